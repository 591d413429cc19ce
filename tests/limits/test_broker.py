"""Limits of a broker, each exceeded over a real socket while a witness is still served."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from ha.broker.broker import Broker, BrokerPorts, Replication, open_broker
from ha.broker.options import BrokerOptions
from ha.broker.world import World
from ha.protocol.batch import ENTRY_SIZE_MIN, encode_batch
from ha.protocol.bodies import TopicConfig, TopicConfigTable
from ha.protocol.record import encode_host
from ha.protocol.remoting import RemotingCommand, encode_command
from ha.remoting import CloseCause, RemotingConnection, RemotingServerOptions
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions
from tests.broker.node import PULL, SEND_V2, text
from tests.limits.sockets import TIMEOUT_S, Site, anonymous_bytes, ended, push, settled, until
from tests.testing.time_slices import CALL_COUNT, BusyWork

GROWTH_MAX = 32 << 20


class BrokerSite(Site):
    """A broker on a real port."""

    def __init__(self, port: int, broker: Broker) -> None:
        super().__init__(port)
        self.broker = broker


@asynccontextmanager
async def open_site(
    folder: Path, *, remoting: RemotingServerOptions | None = None, flush_sync: bool = False, **changes: Any
) -> AsyncIterator[BrokerSite]:
    """A broker with a real store, on a real port."""
    options = msgspec.structs.replace(
        BrokerOptions(broker_name="b0", host="127.0.0.1", config_dir=folder / "config", flush_sync=flush_sync),
        **changes,
    )
    store_options = StoreOptions(
        root=folder,
        segment_size=32 << 20,
        queue_entry_count=1000,
        index_slot_count=1000,
        index_entry_count=4000,
        store_host=encode_host("127.0.0.1", 10911),
        flush_mode="SYNC_FLUSH" if flush_sync else "ASYNC_FLUSH",
    )
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with (
        open_message_store(store_options) as store,
        open_broker(
            options,
            store,
            Replication(),
            BrokerPorts(listeners=listeners, options=remoting),
            World(unique_id=lambda: "U"),
        ) as broker,
        BrokerSite(port, broker).hanging_up() as site,
    ):
        yield site


def request(code: int, fields: dict[str, Any], body: bytes = b"", opaque: int = 1) -> RemotingCommand:
    return RemotingCommand(code, opaque, ext_fields={name: text(value) for name, value in fields.items()}, body=body)


def send(body: bytes = b"x", **changes: Any) -> RemotingCommand:
    return request(310, {**SEND_V2, **changes}, body)


def heartbeat(**fields: Any) -> RemotingCommand:
    return request(34, {}, json.dumps({"clientID": "c", **fields}).encode())


def group(name: str, subscriptions: int = 1) -> dict[str, Any]:
    topics = [{"topic": f"t{n}", "subString": "*"} for n in range(subscriptions)]
    return {"groupName": name, "subscriptionDataSet": topics}


async def test_topics_created_by_sends_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path, topic_count_max=30) as site:
        witness = await site.witness()
        peer = await site.connect()
        answers = [await peer.ask(send(b=f"topic{n}")) for n in range(60)]
        assert answers[0].code == 0
        assert answers[-1].code == 17
        assert "maximum of 30 topics" in str(answers[-1].remark)
        assert len(site.broker.topics) == 30
        assert (await peer.ask(send(b="topic0"))).code == 0
        assert await witness.is_served()


async def test_queues_of_a_created_topic_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        peer = await site.connect()
        assert (await peer.ask(send(b="wide", d=2_000_000_000))).code == 0
        created = site.broker.topics.get("wide")
        assert created is not None
        assert created.write_queue_nums == site.broker.options.default_topic_queue_nums
        assert (await peer.ask(send(b="wide", e=1_000_000))).code != 0


async def test_groups_created_by_pulls_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path, group_count_max=10) as site:
        witness = await site.witness()
        peer = await site.connect()
        assert (await peer.ask(send())).code == 0
        answers = [await peer.ask(request(11, {**PULL, "consumerGroup": f"g{n}", "sysFlag": 4})) for n in range(20)]
        assert answers[-1].code == 26
        assert "too many" in str(answers[-1].remark)
        assert len(site.broker.groups) == 10
        assert await witness.is_served()


@pytest.mark.parametrize(
    ("beat", "words"),
    [
        (heartbeat(consumerDataSet=[group(f"g{n}") for n in range(257)]), "257 consumer groups"),
        (heartbeat(producerDataSet=[{"groupName": f"g{n}"} for n in range(257)]), "257 producer groups"),
        (heartbeat(consumerDataSet=[group("g", 1025)]), "1025 subscriptions"),
        (heartbeat(producerDataSet=[{"groupName": "g" * 256}]), "256 characters of a producer group"),
        (heartbeat(clientID="c" * 256), "256 characters of a client id"),
        (heartbeat(more="x" * (1 << 18)), "heartbeat of"),
    ],
)
async def test_content_of_a_heartbeat_is_limited(tmp_path: Path, beat: RemotingCommand, words: str) -> None:
    async with open_site(tmp_path) as site:
        peer = await site.connect()
        answer = await peer.ask(beat)
        assert answer.code == 1
        assert words in str(answer.remark)
        assert len(site.broker.groups) == 0
        assert site.broker.clients._membership_count == 0
        await peer.send(heartbeat(consumerDataSet=[group("g")]))
        received = [await peer.expect() for _ in range(2)]  # with the notification that the group has a member
        assert sorted(command.code for command in received) == [0, 40]


async def test_memberships_of_all_clients_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path, client_count_max=20) as site:
        witness = await site.witness()
        for number in range(5):
            peer = await site.connect()
            groups = [{"groupName": f"{number}.{n}"} for n in range(10)]
            assert (await peer.ask(heartbeat(producerDataSet=groups))).code == 0
        assert site.broker.clients._membership_count == 20
        assert await witness.is_served()


async def test_committed_offsets_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path, offset_key_count_max=5) as site:
        peer = await site.connect()
        await peer.ask(send())
        for n in range(10):
            await peer.ask(request(11, {**PULL, "consumerGroup": f"g{n}", "sysFlag": 4 | 1, "commitOffset": 1}))
        assert len(site.broker.offsets.snapshot().offset_table) == 5
        fields = {"consumerGroup": "g9", "topic": "TT", "queueId": 0, "commitOffset": 1}
        answer = await peer.ask(request(15, fields))
        assert answer.code == 1
        assert answer.remark == "this broker holds its maximum of offsets"
        assert (await peer.ask(request(15, {**fields, "consumerGroup": "g0"}))).code == 0


async def test_committed_offsets_of_many_queues_are_limited(tmp_path: Path) -> None:
    """Each broker has the topic BenchmarkTest with 1,024 queues, so few groups can have many offsets."""
    async with open_site(tmp_path, offset_count_max=10) as site:
        peer = await site.connect()
        for group in ("g0", "g1"):
            await site.broker.groups.find_or_create(group)
        commits = [(f"g{number % 2}", number // 2) for number in range(24)]
        codes = []
        for group, queue_id in commits:
            fields = {"consumerGroup": group, "topic": "BenchmarkTest", "queueId": queue_id, "commitOffset": 1}
            codes.append((await peer.ask(request(15, fields))).code)
        assert codes == [0] * 10 + [1] * 14
        assert sum(map(len, site.broker.offsets.table.values())) == 10
        fields = {"consumerGroup": "g1", "topic": "BenchmarkTest", "queueId": 4, "commitOffset": 2}
        assert (await peer.ask(request(15, fields))).code == 0, "an offset that exists"


async def test_held_pulls_are_limited(tmp_path: Path) -> None:
    """Further pulls of a connection are answered at once. Of a held pull neither body nor unknown fields are kept."""
    async with open_site(tmp_path, hold_count_per_connection_max=50, hold_count_max=80) as site:
        witness = await site.witness()
        peer = await site.connect()
        await peer.ask(send())
        before = anonymous_bytes()
        pull = {**PULL, "queueOffset": 1, "sysFlag": 2 | 4, "suspendTimeoutMillis": 60_000, "padding": "x" * 200_000}
        for opaque in range(60):
            await peer.send(request(11, pull, bytes(1 << 19), opaque=opaque))
        assert [(await peer.expect()).code for _ in range(10)] == [19] * 10
        assert len(site.broker.puller.holds) == 50
        assert anonymous_bytes() - before < GROWTH_MAX, "60 bodies and fields of 700 KB each are 42 MB"
        other = await site.connect()
        for opaque in range(50):
            await other.send(request(11, {**pull, "padding": ""}, opaque=opaque))
        for _ in range(20):
            await other.expect()
        assert len(site.broker.puller.holds) == 80
        assert await witness.is_served()


async def test_messages_of_a_batch_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        witness = await site.witness()
        peer = await site.connect()
        body = encode_batch([(0, b"", b"")]) * ((4 << 20) // ENTRY_SIZE_MIN)
        before = anonymous_bytes()
        answer = await peer.ask(request(320, SEND_V2, body))
        assert answer.code == 1
        assert "batch of more than" in str(answer.remark)
        assert anonymous_bytes() - before < GROWTH_MAX
        assert site.broker.store.log.max_offset.value == 0
        assert await witness.is_served()


async def test_sends_in_flight_are_limited(tmp_path: Path) -> None:
    """While the disk doesn't sync: first those of a connection, then those of all; they are answered once it does."""
    changes: dict[str, Any] = {"sends_in_flight_per_connection_max": 400, "sends_in_flight_max": 700}
    async with open_site(tmp_path, flush_sync=True, **changes) as site:
        witness = await site.witness()
        released = trio.Event()
        log = site.broker.store.log
        sync = log.sync

        async def stalled(flushed: int, target: int) -> None:
            await released.wait()
            await sync(flushed, target)

        log.sync = stalled  # type: ignore[method-assign]
        sender = site.broker.processor._send
        frame = encode_command(send(bytes(2000)))  # about a hundred in a chunk
        first, second = await site.connect(), await site.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(push, first, frame * 4000)
            await until(lambda: sender.in_flight_count >= 400)
            await settled()
            assert sender.in_flight_count <= 550, "the others wait in the peer's socket"
            await push(second, frame * 400)
            with trio.fail_after(TIMEOUT_S):
                refused = await second.expect()
            assert refused.code == 2
            assert "sends wait for a flush" in str(refused.remark)
            assert await witness.is_served()
            released.set()
            with trio.fail_after(TIMEOUT_S):
                codes = {(await first.expect()).code for _ in range(4000)}
        assert codes <= {0, 2}
        assert sender.in_flight_count == 0


async def test_a_connection_is_not_read_while_the_log_accepts_no_appends(tmp_path: Path) -> None:
    """Queued sends are put afterwards; those of a connection that was closed while they waited are not."""
    async with open_site(tmp_path) as site:
        log, sender = site.broker.store.log, site.broker.processor._send
        peer, other = await site.connect(), await site.connect()
        async with log.appends_held():
            await peer.send(send())
            await until(lambda: sender.in_flight_count == 1)
            assert site.broker.put_service.is_blocked
            await other.send(send(), send(), send())
            server = site.broker.servers[0]
            await until(lambda: server.statistics().requests == 4)
            [connection] = [each for each in server.connections if not each.in_flight]
            connection.close(CloseCause.CONNECTION_LOST)
            assert await ended(other)
            assert sender.in_flight_count == 1
        answer = await peer.expect()
        assert answer.code == 0
        assert sender.in_flight_count == 0
        assert site.broker.put_service.stored_count == 1


async def test_expensive_requests_of_one_chunk_let_other_tasks_run(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        work = BusyWork()

        async def busy(connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
            work.call()
            return command.reply(0)

        site.broker.processor._handlers[30] = busy
        peer = await site.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work.run_beside)
            await peer.send(*(request(30, {}, opaque=opaque) for opaque in range(CALL_COUNT)))
            for _ in range(CALL_COUNT):
                await peer.expect()
        work.check()


async def test_long_responses_to_a_peer_that_does_not_read_are_limited(tmp_path: Path) -> None:
    """21 is a request of a hundred bytes whose response lists all topics."""
    async with open_site(tmp_path, remoting=RemotingServerOptions(send_timeout_s=1.0)) as site:
        witness = await site.witness()
        site.broker.topics._table.update({f"t{n}": TopicConfig(topic_name=f"t{n}") for n in range(2000)})
        listed = 0
        snapshot = site.broker.topics.snapshot

        def counted() -> TopicConfigTable:
            nonlocal listed
            listed += 1
            return snapshot()

        site.broker.topics.snapshot = counted  # type: ignore[method-assign]
        peer = await site.connect()
        before = anonymous_bytes()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(push, peer, encode_command(request(21, {})) * 20_000)
            for _ in range(10):
                began = trio.current_time()
                assert await witness.is_served()
                assert trio.current_time() - began < 2
                await settled()
            assert anonymous_bytes() - before < GROWTH_MAX, "8 GB were requested"
            await until(lambda: "peer does not read" in site.broker.servers[0].statistics().closed)
            assert await ended(peer)
        assert listed < 100, "20,000 were requested"
        assert await witness.is_served()
