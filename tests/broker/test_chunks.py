"""Chunks of requests: one append, answers in bursts, each for its own request."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from ha.broker.core import BrokerCore
from ha.broker.options import BrokerRole
from ha.broker.send import SendProcessor
from ha.broker.topics import ANNOUNCE_TIMEOUT_S
from ha.broker.world import World
from ha.poller import open_poller
from ha.protocol.batch import encode_batch
from ha.protocol.ha_frame import encode_report
from ha.protocol.message_id import decode_message_id
from ha.protocol.record import Message, decode_record
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand, RemotingParser, encode_command
from ha.protocol.remoting_protocol import CloseCause
from ha.store.commitlog import CommitLog
from ha.store.record_maker import AppendResult
from tests.broker.node import HOST, PORT, PULL, SEND_V2, Node, open_node, text
from tests.broker.test_put import Slave, slave_of

Puts = list[int]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path) as node:
        await node.send()
        yield node


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> Puts:
    """Number of messages of each append."""
    counts: Puts = []
    append = CommitLog.append

    def counted(self: CommitLog, messages: Sequence[Message], began: float | None = None) -> list[AppendResult]:
        results = append(self, messages, began)
        if results:
            counts.append(len(results))
        return results

    monkeypatch.setattr(CommitLog, "append", counted)
    return counts


def frame(opaque: int, code: int = 310, body: bytes = b"x", flag: int = 0, **changes: Any) -> bytes:
    fields = {**(PULL if code == 11 else SEND_V2), **changes}
    return encode_command(
        RemotingCommand(
            code, opaque=opaque, flag=flag, body=body, ext_fields={name: text(value) for name, value in fields.items()}
        )
    )


async def answers(node: Node, frames: list[bytes]) -> list[RemotingCommand]:
    """Sends all frames as one chunk and returns the answers in order of arrival."""
    stream = node.listener.connect()
    await stream.send_all(b"".join(frames))
    await wait_all_tasks_blocked()
    chunk = await stream.receive_some()
    await stream.aclose()
    return RemotingParser().feed(chunk)


async def test_pipelined_sends(node: Node, puts: Puts) -> None:
    got = await answers(node, [frame(opaque, body=b"%d" % opaque) for opaque in range(50)])
    assert puts[1:] == [50]
    assert [answer.opaque for answer in got] == list(range(50))
    assert [answer.ext_fields["queueOffset"] for answer in got] == [str(1 + n) for n in range(50)]
    await node.dispatched()
    bodies = [record.body for record in node.records(await node.pull(1))]
    assert bodies == [b"%d" % opaque for opaque in range(32)]


@pytest.mark.parametrize(
    "unique_key", ["C0A8000100002A9F", 'a "quoted" \\ 100 % one', "umlaut \u00e4 \U0001f600 \t\u2028", ""]
)
async def test_template_answers_equal_encoded_commands(node: Node, unique_key: str) -> None:
    properties = f"TAGS\x01a\x02UNIQ_KEY\x01{unique_key}\x02" if unique_key else ""
    stream = node.listener.connect()
    await stream.send_all(frame(1, i=properties) + frame(2**31 - 1, i=properties, e=1))
    await wait_all_tasks_blocked()
    sent = await stream.receive_some()
    await stream.aclose()
    got = RemotingParser().feed(sent)
    assert sent == b"".join(map(encode_command, got))
    assert [list(answer.ext_fields) for answer in got] == [
        ["msgId", "queueId", "queueOffset", "transactionId", "MSG_REGION", "TRACE_ON"]
    ] * 2
    if unique_key:
        assert {answer.ext_fields["transactionId"] for answer in got} == {unique_key}
    end = node.store.log.max_offset.value
    host, port, last_at = decode_message_id(got[1].ext_fields["msgId"])
    assert (host, port) == (HOST, PORT)
    record = decode_record(await node.store.log.read_all(last_at, end - last_at))
    assert (record.queue_id, record.queue_offset) == (1, 0)
    assert (got[1].ext_fields["queueId"], got[1].ext_fields["queueOffset"]) == ("1", "0")
    assert [answer.opaque for answer in got] == [1, 2**31 - 1]


async def test_an_answer_does_not_wait_for_the_topic_of_a_later_send(node: Node) -> None:
    """Sends that had to wait were stored together once all their topics were created, and answered after that."""
    may_tell = trio.Event()

    async def wait_told() -> None:
        if node.broker.topics.get("Slow") is not None:
            await may_tell.wait()

    node.broker.topics.wait_told = wait_told
    stream, other = node.listener.connect(), node.listener.connect()
    async with node.store.log.appends_held():
        await other.send_all(frame(1))  # blocks the queue of puts
        await wait_all_tasks_blocked()
        await stream.send_all(frame(2) + frame(3, b="New") + frame(4, b="Slow"))
        await wait_all_tasks_blocked()
    parser = RemotingParser()
    opaques: list[int] = []
    with trio.fail_after(ANNOUNCE_TIMEOUT_S / 2):
        while len(opaques) < 2:
            opaques += [answer.opaque for answer in parser.feed(await stream.receive_some())]
    assert opaques == [2, 3]
    may_tell.set()
    assert [answer.opaque for answer in parser.feed(await stream.receive_some())] == [4]


async def test_an_answer_does_not_wait_for_the_dead_letters_of_a_later_send(node: Node) -> None:
    """The topic of the later send exists, but not the one that its message is redirected to."""
    may_tell = trio.Event()

    async def wait_told() -> None:
        if node.broker.topics.get("%DLQ%g") is not None:
            await may_tell.wait()

    node.broker.topics.wait_told = wait_told
    await node.broker.topics.ensure("%RETRY%g", 1)
    stream = node.listener.connect()
    await stream.send_all(frame(1, b="%RETRY%g", j=1) + frame(2, b="%RETRY%g", j=17))
    parser = RemotingParser()
    with trio.fail_after(ANNOUNCE_TIMEOUT_S / 2):
        assert [answer.opaque for answer in parser.feed(await stream.receive_some())] == [1]
    may_tell.set()
    assert [answer.opaque for answer in parser.feed(await stream.receive_some())] == [2]
    assert node.store.queues.not_empty(("%DLQ%g",))


async def test_invalid_send_does_not_affect_others(node: Node, puts: Puts) -> None:
    batch = encode_batch([(0, b"a", b""), (0, b"b", b"")])
    got = await answers(
        node,
        [
            frame(1),
            frame(2, e=99),
            frame(3, flag=FLAG_ONEWAY),
            frame(4, code=320, body=batch, m=True),
            frame(5, g="x"),
            frame(6, b="Fresh"),
            frame(7, code=9999),
            frame(8, code=11, queueOffset=0),
        ],
    )
    assert {answer.opaque: answer.code for answer in got} == {1: 0, 2: 29, 4: 0, 5: 1, 6: 0, 7: 3, 8: 0}
    assert puts[1:] == [2, 1], (
        "a batch is one append, as it goes into one segment; sends before and after it share appends"
    )
    by_opaque = {answer.opaque: answer.ext_fields.get("queueOffset") for answer in got}
    assert (by_opaque[1], by_opaque[4], by_opaque[6]) == ("1", "3", "0")


async def test_chunk_shares_one_wait(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SYNC_MASTER) as node:
        await node.store.log.put([Message("TT", 0, b"first")])
        await node.send()
        async with slave_of(node) as slave:
            stream = node.listener.connect()
            await stream.send_all(b"".join(frame(opaque) for opaque in range(20)))
            await wait_all_tasks_blocked()
            assert node.ha.statistics().waiting_request_count == 1
            await slave.acknowledge()
            with trio.fail_after(1):
                got = RemotingParser().feed(await stream.receive_some())
            assert [(answer.opaque, answer.code) for answer in got] == [(opaque, 0) for opaque in range(20)]


async def test_chunks_acknowledged_together_are_answered_with_one_send(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SYNC_MASTER) as node:
        await node.store.log.put([Message("TT", 0, b"first")])
        async with slave_of(node) as slave:
            stream = node.listener.connect()
            for opaque in range(3):
                await stream.send_all(frame(opaque))
                await wait_all_tasks_blocked()
            [server, _] = node.broker.servers
            sends_before = server.statistics().sends
            await slave.acknowledge()
            with trio.fail_after(1):
                got = RemotingParser().feed(await stream.receive_some())
            assert [(answer.opaque, answer.code) for answer in got] == [(opaque, 0) for opaque in range(3)]
            await wait_all_tasks_blocked()
            assert server.statistics().sends == sends_before + 1


async def send_at_once(streams: Sequence[trio.abc.Stream], frames: Sequence[bytes]) -> None:
    async with trio.open_nursery() as nursery:
        for stream, each in zip(streams, frames, strict=True):
            nursery.start_soon(stream.send_all, each)


@pytest.mark.real_time
async def test_sends_of_one_poller_turn_share_one_append(tmp_path: Path, puts: Puts) -> None:
    async with open_poller() as poller, open_node(tmp_path) as node:
        await node.send()
        for _ in range(2):
            node.listener.connect()
        await wait_all_tasks_blocked()
        connections = node.broker.servers[0].connections
        core = BrokerCore(
            options=node.broker.options,
            store=node.store,
            tables=node.broker.tables,
            puts=node.broker.put_service,
            world=World(unique_id=lambda: "id", poller=poller),
        )
        sender = SendProcessor(core, node.broker.queue_locks)
        fields = {name: text(value) for name, value in SEND_V2.items()}
        counts = []

        def take() -> bool:
            for connection in connections:
                sender.take(connection, [RemotingCommand(310, opaque=1, ext_fields=fields, body=b"x")])
            counts.append(len(puts))
            return False

        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"a turn")
            with trio.fail_after(10):
                await poller.wait(ours.fileno(), take)
        assert puts[-1] == len(connections) == 3
        assert counts == [len(puts) - 1]


@asynccontextmanager
async def busy_node(folder: Path) -> AsyncIterator[tuple[Node, Slave]]:
    """A master with four sends in flight on one connection, which a slave has not acknowledged."""
    async with open_node(folder, role=BrokerRole.SYNC_MASTER) as node:
        await node.store.log.put([Message("TT", 0, b"first")])
        async with slave_of(node) as slave:
            stream = node.listener.connect()
            await stream.send_all(b"".join(frame(opaque) for opaque in range(4)))
            await wait_all_tasks_blocked()
            yield node, slave


async def test_sends_of_many_connections_share_appends(tmp_path: Path, puts: Puts) -> None:
    async with busy_node(tmp_path) as (node, slave):
        streams = [node.listener.connect() for _ in range(5)]
        await wait_all_tasks_blocked()  # until they are accepted
        await send_at_once(streams, [frame(10 * n) + frame(10 * n + 1, e=99) + frame(10 * n + 2) for n in range(5)])
        await wait_all_tasks_blocked()
        assert puts[-2:] == [4, 10]
        await slave.acknowledge()
        places = []
        for n, stream in enumerate(streams):
            with trio.fail_after(1):
                got = RemotingParser().feed(await stream.receive_some())
                if len(got) < 3:
                    got += RemotingParser().feed(await stream.receive_some())
            assert [(answer.opaque, answer.code) for answer in got] == [(10 * n + 1, 29), (10 * n, 0), (10 * n + 2, 0)]
            places += [int(answer.ext_fields["queueOffset"]) for answer in got[1:]]
        assert sorted(places) == list(range(5, 15))
        await wait_all_tasks_blocked()
        assert node.broker.sender.in_flight_count == 0


async def test_sends_are_put_although_another_connection_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with busy_node(tmp_path) as (node, slave):
        streams = [node.listener.connect() for _ in range(3)]
        await wait_all_tasks_blocked()
        connections = [each for each in node.broker.servers[0].connections if not each.in_flight]
        service = node.broker.put_service
        drain_soon = service.drain_soon

        def drain_soon_and_close() -> None:
            gone = [each for each in connections if each.in_flight]
            if len(gone) == 1:
                gone[0].close(CloseCause.CONNECTION_LOST)
            drain_soon()

        monkeypatch.setattr(service, "drain_soon", drain_soon_and_close)
        await send_at_once(streams, [frame(n) for n in range(3)])
        await wait_all_tasks_blocked()
        await slave.acknowledge()
        answered = []
        for n, stream in enumerate(streams):
            with trio.fail_after(1):
                chunk = await stream.receive_some()
            answered += [(n, answer.opaque, answer.code) for answer in RemotingParser().feed(chunk)]
        assert len(answered) == 2
        assert all(n == opaque and code == 0 for n, opaque, code in answered)
        await wait_all_tasks_blocked()
        assert node.broker.sender.in_flight_count == 0


async def test_stopping_broker_answers_sends_in_flight(tmp_path: Path) -> None:
    slave, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        async with open_node(tmp_path, role=BrokerRole.SYNC_MASTER, slave_timeout_s=0.5) as node:
            await node.store.log.put([Message("TT", 0, b"first")])
            nursery.start_soon(node.ha.handle, theirs, "10.0.0.2:5555")
            await slave.send_all(encode_report(node.store.log.max_offset.value))
            await wait_all_tasks_blocked()
            stream = node.listener.connect()
            await stream.send_all(frame(1))
            await wait_all_tasks_blocked()
            assert node.ha.statistics().waiting_request_count == 1
        (answer,) = RemotingParser().feed(await stream.receive_some())
        assert answer.code == 12
        nursery.cancel_scope.cancel()


async def test_order_is_kept_while_sends_wait_for_a_segment(tmp_path: Path, puts: Puts) -> None:
    async with open_node(tmp_path) as node:
        await node.send()
        body = bytes(60_000)  # the node's segments have 1 MiB: seventeen of these
        stream = node.listener.connect()
        async with trio.open_nursery() as nursery:
            for begin in range(0, 60, 20):
                chunk = b"".join(frame(opaque, body=body, e=0) for opaque in range(begin, begin + 20))
                nursery.start_soon(stream.send_all, chunk)
                await wait_all_tasks_blocked()
        got: list[RemotingCommand] = []
        parser = RemotingParser()
        with trio.fail_after(5):
            while len(got) < 60:
                got += parser.feed(await stream.receive_some())
        assert {answer.code for answer in got} == {0}
        places = {answer.opaque: int(answer.ext_fields["queueOffset"]) for answer in got}
        first = min(places.values())
        assert [places[opaque] for opaque in range(60)] == list(range(first, first + 60))
        assert sum(puts[1:]) == 60
        assert node.broker.sender.in_flight_count == 0
