"""POP state in the log: what survives a crash, what a record costs, snapshots, and records that can't be stored."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.broker.journal import Logged
from ha.broker.options import BrokerRole
from ha.broker.pop import pop_log
from ha.broker.put import PutService
from ha.broker.put_request import PutRequest
from ha.broker.queue_read import QueueRead, QueueReader
from ha.causes import Cause
from ha.errors import DiskFailed
from ha.poller import open_poller
from ha.protocol.codes import PutStatus
from ha.protocol.pop_records import SNAPSHOT_END_CODE, PopRecord, decode_pop_record, encode_pop_record
from ha.protocol.record import Message, decode_record
from ha.protocol.remoting import RemotingCommand, RemotingParser
from ha.protocol.topic_names import POP_TOPIC
from ha.remoting import RemotingConnection
from ha.store.commitlog import CommitLog
from ha.store.record_maker import AppendResult
from tests.broker.node import Node, StalledSync, open_node, text
from tests.broker.pop_client import POP, Popped, ack, ack_fields, change, pop, pop_messages, popped_of


def bodies(messages: list[Popped]) -> list[bytes]:
    return sorted(message.body for message in messages)


async def put_many(node: Node, count: int, queue_count: int = 4) -> None:
    assert (await node.send(b"first")).code == 0
    messages = [Message("TT", number % queue_count, b"%d" % number) for number in range(count)]
    for start in range(0, count, 200):
        await node.broker.put_service.put(messages[start : start + 200])
    await node.dispatched()


@contextmanager
def refused_puts(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """During the block nothing can be stored."""
    service = node.broker.put_service

    def refuse(requests: Sequence[PutRequest]) -> Sequence[PutRequest]:
        service._refuse(requests, Cause.NOT_WRITABLE, "no room")
        return ()

    with monkeypatch.context() as patch:
        patch.setattr(service, "_admit", refuse)
        yield


@contextmanager
def segment_wanted(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    wait: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    *,
    is_made: bool = False,
) -> Iterator[None]:
    """In the block the next record needs another segment; after `wait` that can't be made, unless `is_made`."""
    with monkeypatch.context() as patch:

        async def add_segment() -> AppendResult | None:
            await wait()
            patch.undo()
            return None if is_made else AppendResult(PutStatus.CREATE_MAPPED_FILE_FAILED, remark="no room")

        patch.setattr(node.store.log, "append", lambda *_: [])
        patch.setattr(node.store.log, "add_segment", add_segment)
        yield


def keep_log_from(root: Path, begin: int) -> None:
    """Deletes all files of a store but the segments from physical offset `begin` on."""
    for path in root.iterdir():
        if path.name != "commitlog":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (root / "commitlog").iterdir():
        if int(path.name) < begin:
            path.unlink()


def record_count(node: Node) -> int:
    queue = node.store.queues.get(POP_TOPIC, 0)
    return 0 if queue is None else queue.max_offset


async def test_state_survives_a_crash_between_pop_and_ack(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await put_many(node, 40)
        messages = await pop_messages(node, invisibleTime=5000)
        acknowledged, left = messages[:10], messages[10:]
        for message in acknowledged[1:]:
            assert (await ack(node, message)).code == 0
        _, late = await change(node, left[0], 60_000)
        offset = node.broker.offsets.get("g", "TT", 0)
    async with open_node(tmp_path) as node:
        assert node.broker.offsets.get("g", "TT", 0) == offset
        assert (await ack(node, acknowledged[0])).code == 0  # with a handle from before the restart
        rest = await pop_messages(node)
        assert bodies(rest + messages) == sorted([b"first", *(b"%d" % number for number in range(40))])
        for message in rest:
            assert (await ack(node, message)).code == 0
        await trio.sleep(6)
        again = await pop_messages(node)
        assert bodies(again) == bodies(left[1:])
        assert (await ack(node, late)).code == 0
        for message in again:
            assert (await ack(node, message)).code == 0
        await trio.sleep(100)
        assert await pop_messages(node) == []


async def test_requests_at_the_same_time_share_a_record(node: Node) -> None:
    await put_many(node, 320)
    before = record_count(node)
    messages: list[Popped] = []

    async def take() -> None:
        messages.extend(await pop_messages(node))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(take)
    await node.dispatched()
    assert len(messages) > 300
    async with trio.open_nursery() as nursery:
        for message in messages:
            nursery.start_soon(partial(ack, node, message))
    await node.dispatched()
    assert record_count(node) - before < 40, "RocketMQ would write more than 640"
    assert node.broker.pop.statistics().in_flight_count == 0


async def test_no_invisible_time_makes_a_record_unreadable(tmp_path: Path) -> None:
    """Such a record lost the changes of all other requests that are in it."""
    async with open_node(tmp_path) as node:
        await put_many(node, 8)
        [message] = await pop_messages(node, maxMsgNums=1)
        refused, longest = 2**63 - 1, 2**62
        assert (await pop(node, invisibleTime=refused)).code == 29
        assert (await change(node, message, refused))[0].code == 29
        assert (await change(node, message, longest))[0].code == 0
        assert len(await pop_messages(node, maxMsgNums=1, invisibleTime=longest)) == 1
        assert len(await pop_messages(node, consumerGroup="h", order=True, invisibleTime=longest)) == 9
    async with open_node(tmp_path) as node:
        assert node.broker.pop.statistics().in_flight_count == 2
        assert await pop_messages(node, consumerGroup="h", order=True) == []


async def test_no_committed_offset_makes_a_record_unreadable(tmp_path: Path) -> None:
    """A negative one did, in a queue without messages."""
    async with open_node(tmp_path) as node:
        await node.send(b"first")
        for group, before in (("g", {"maxMsgNums": 0}), ("h", {"queueId": 1})):  # "h" has popped from the queue
            assert await pop_messages(node, consumerGroup=group, **before) == []
            fields: Any = {"consumerGroup": group, "topic": "TT", "queueId": 1, "commitOffset": -5}
            assert (await node.ask(15, **fields)).code == 0
            assert len(await pop_messages(node, consumerGroup=group)) == 1
    async with open_node(tmp_path) as node:
        assert node.broker.pop.statistics().in_flight_count == 2


async def test_record_of_a_pop_is_small(node: Node) -> None:
    await put_many(node, 40, 1)
    await pop_messages(node)
    await node.dispatched()
    queue = node.store.queues.get(POP_TOPIC, 0)
    assert queue is not None
    [entry] = queue.read(queue.max_offset - 1, 1)
    assert entry.size < 350
    record = decode_pop_record(decode_record(await node.store.log.read_all(*entry[:2])).body)
    assert [change.taken[0].runs for change in record.queues if change.taken] == [[0, 32]]


async def test_answers_wait_for_the_disk(tmp_path: Path) -> None:
    """With SYNC_FLUSH, a pop and an ack are answered when their record is flushed, like a send."""
    sync = StalledSync()
    async with open_node(tmp_path, flush_sync=True, run_blocking=sync) as node:
        await node.send(b"a")
        await node.dispatched()
        sync.stall_s = 2.0
        for _ in range(2):
            began = trio.current_time()
            messages = await pop_messages(node, consumerGroup="h")
            if messages:
                assert 2.0 <= trio.current_time() - began < 5
                began = trio.current_time()
                assert (await ack(node, messages[0], consumerGroup="h")).code == 0
                assert 2.0 <= trio.current_time() - began < 5
        sync.stall_s = 10.0
        await node.send(b"b", i="WAIT\x01false\x02")
        with trio.move_on_after(30):
            await trio.sleep(11)
        messages = await pop_messages(node)
        answer = await ack(node, messages[0])
        assert (answer.code, str(answer.remark).split(" ")[0]) == (10, "FLUSH_DISK_TIMEOUT")


async def test_pop_that_can_not_be_stored_is_undone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_many(node, 10)
    standing = node.broker.standing
    messages = await pop_messages(node, maxMsgNums=3)

    async def refused() -> None:
        answer = await pop(node)
        assert answer.code == 14
        answer = await ack(node, messages[0])
        assert answer.code == 14

    with refused_puts(node, monkeypatch):
        await refused()
    assert standing.refusal == ""
    assert node.broker.pop.statistics().in_flight_count == 3
    rest = await pop_messages(node)
    assert bodies(rest + messages) == sorted([b"first", *(b"%d" % number for number in range(10))])
    assert (await ack(node, messages[0])).code == 0
    assert node.broker.pop.statistics().in_flight_count == 10


async def test_changes_after_a_record_that_can_not_be_stored_are_undone_and_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_many(node, 10)
    [message] = await pop_messages(node, maxMsgNums=1, invisibleTime=1000)
    codes: dict[str, int] = {}
    has_failed = trio.Event()

    async def ask(name: str, request: Awaitable[RemotingCommand]) -> None:
        codes[name] = (await request).code

    with segment_wanted(node, monkeypatch, has_failed.wait):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "pop", pop(node))
            await trio.sleep(0.1)
            nursery.start_soon(ask, "ack", ack(node, message))
            await trio.sleep(0.1)
            assert not codes
            has_failed.set()
    assert codes["pop"] == codes["ack"] != 0
    await trio.sleep(2)
    assert len(await pop_messages(node)) == 11, "the rest, and the one whose acknowledgement was refused"


async def test_messages_whose_pop_is_undone_go_to_one_that_waits(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_many(node, 4)
    has_failed = trio.Event()
    found: list[list[bytes]] = []
    began = trio.current_time()

    async def wait(**changes: Any) -> None:
        answer = await node.ask_alone(200050, **{**POP, **changes})
        found.append([message.body for message in popped_of(answer)] if not answer.code else [b""])

    async with trio.open_nursery() as nursery:
        with segment_wanted(node, monkeypatch, has_failed.wait):
            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            nursery.start_soon(partial(wait, pollTime=9000))
            await wait_all_tasks_blocked()
            has_failed.set()
            await wait_all_tasks_blocked()
    assert [sorted(each) for each in found] == [[b""], sorted([b"first", b"0", b"1", b"2", b"3"])]
    assert trio.current_time() == began + pop_log.PAUSE_S


@pytest.mark.parametrize("is_answered", [True, False])
async def test_the_record_before_one_that_failed_acknowledges_nothing_of_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """For example, too many puts waited for the slaves to let the later one in: it was answered first."""
    await put_many(node, 2)
    messages = await pop_messages(node)
    log, codes = node.broker.pop._pop_log, [-1, -1, -1]
    answer, done = log._on_done, list[Any]()
    monkeypatch.setattr(log, "_on_done", done.extend)

    async def ask(number: int, message: Popped) -> None:
        codes[number] = (await node.ask_alone(200051, **ack_fields(message))).code

    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(ask, number, messages[number])
            await wait_all_tasks_blocked()
        done[1].status, done[1].remark = PutStatus.FLUSH_SLAVE_TIMEOUT, "late"
        answer([done[1]])
        if is_answered:
            answer([done[0]])
        nursery.start_soon(ask, 2, messages[1])
        await wait_all_tasks_blocked()
        assert codes == [0 if is_answered else -1, 12, -1]
        answer([done[0]])
        await wait_all_tasks_blocked()
        assert codes == [0, 12, -1]
        answer([done[2]])
    assert codes == [0, 12, 0]


async def test_a_pop_of_which_a_part_was_undone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of its first queue can't be stored while it reads the second one, whose record can."""
    reads = 0
    read = QueueReader.read

    async def read_slowly(self: QueueReader, *args: Any, **more: Any) -> QueueRead:
        nonlocal reads
        reads += 1
        if reads == 2:
            await trio.sleep(1)
        return await read(self, *args, **more)

    async with open_node(tmp_path) as node:
        await put_many(node, 10)
        monkeypatch.setattr(QueueReader, "read", read_slowly)
        with segment_wanted(node, monkeypatch):
            answer = await pop(node, invisibleTime=1000)
        assert reads > 2
        assert (answer.code, "no room" in (answer.remark or "")) == (1, True)
        await trio.sleep(2)
        assert len(await pop_messages(node)) == 11


async def test_a_disk_that_fails_while_a_record_waits_for_a_segment_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that waited for the record looked again and again, without a checkpoint, and the process never ended."""
    look_count = 0
    wait_appended = PutService.wait_appended

    async def look(service: PutService) -> None:
        nonlocal look_count
        look_count += 1
        assert look_count < 100
        await wait_appended(service)

    async def fail() -> None:
        async with open_node(tmp_path) as node:
            await node.send(b"0")
            [message] = await pop_messages(node)
            log = node.store.log
            monkeypatch.setattr(PutService, "wait_appended", look)
            monkeypatch.setattr(log, "append", lambda *_: [])
            monkeypatch.setattr(log, "add_segment", add_segment_of(log))
            await ack(node, message)

    def add_segment_of(log: CommitLog) -> Callable[[], Awaitable[None]]:
        def append(*_: object) -> list[AppendResult]:
            raise DiskFailed(tmp_path, "write", "no")

        async def add_segment() -> None:
            monkeypatch.setattr(log, "append", append)

        return add_segment

    with pytest.RaisesGroup(DiskFailed, flatten_subgroups=True):
        await fail()
    assert look_count


async def test_message_whose_acknowledgement_is_undone_is_delivered_in_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its redelivery slept without a deadline meanwhile, as nothing was in flight."""
    await node.send(b"0")
    [message] = await pop_messages(node, invisibleTime=3000)
    with segment_wanted(node, monkeypatch, partial(trio.sleep, 2)):
        assert (await ack(node, message)).code != 0
    await trio.sleep(2)
    assert node.broker.pop.statistics().revived_count == 1


async def test_pops_and_acks_of_a_turn_are_one_record_at_its_end(tmp_path: Path) -> None:
    async with open_poller() as poller, open_node(tmp_path, poller=poller) as node:
        old, stream, connection = await popped_and_connected(node)
        log = node.store.log
        before = log.next_queue_offset(POP_TOPIC, 0)

        def serve() -> None:
            pops = [command(200050, number, POP) for number in range(2)]
            acks = [command(200051, 2 + number, ack_fields(message)) for number, message in enumerate(old)]
            assert node.broker.processor.take(connection, [*pops, *acks]) == []
            assert log.next_queue_offset(POP_TOPIC, 0) == before

        poller.as_turn(serve)
        assert log.next_queue_offset(POP_TOPIC, 0) == before + 1
        assert node.broker.pop.statistics().in_flight_count == 64
        answers: list[RemotingCommand] = []
        parser = RemotingParser()
        while len(answers) < 34:
            answers += parser.feed(await stream.receive_some())
        assert sorted((answer.opaque, answer.code) for answer in answers) == [(number, 0) for number in range(34)]


async def test_record_that_has_to_wait_is_appended_after_its_turn(tmp_path: Path) -> None:
    async with open_poller() as poller, open_node(tmp_path, poller=poller) as node:
        old, stream, connection = await popped_and_connected(node)
        before = node.store.log.next_queue_offset(POP_TOPIC, 0)
        async with node.store.log.appends_held():
            poller.as_turn(partial(take, node, connection, command(200050, 0, POP)))
            poller.as_turn(partial(take, node, connection, command(200051, 1, ack_fields(old[0]))))
            await wait_all_tasks_blocked()
            assert node.store.log.next_queue_offset(POP_TOPIC, 0) == before
        answers = RemotingParser().feed(await stream.receive_some())
        answers += [] if len(answers) == 2 else RemotingParser().feed(await stream.receive_some())
        assert [(answer.opaque, answer.code) for answer in answers] == [(0, 0), (1, 0)]
        assert node.store.log.next_queue_offset(POP_TOPIC, 0) == before + 2
        poller.as_turn(partial(take, node, connection, command(200051, 2, ack_fields(old[1]))))
        assert node.store.log.next_queue_offset(POP_TOPIC, 0) == before + 3, "in the turn again"


async def popped_and_connected(node: Node) -> tuple[list[Any], trio.abc.Stream, RemotingConnection]:
    """Pops 32 of 100 messages and opens a connection; returns the messages, and both ends of the connection."""
    await put_many(node, 100)
    old = await pop_messages(node)
    stream = node.listener.connect()
    await wait_all_tasks_blocked()
    *_, connection = node.broker.servers[0].connections
    return old, stream, connection


def take(node: Node, connection: RemotingConnection, request: RemotingCommand) -> None:
    assert node.broker.processor.take(connection, [request]) == []


def command(code: int, opaque: int, fields: dict[str, Any]) -> RemotingCommand:
    return RemotingCommand(code, opaque=opaque, ext_fields={name: text(value) for name, value in fields.items()})


async def test_snapshot_bounds_what_a_start_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pop_log, "SNAPSHOT_AFTER_BYTES_MIN", 2000)
    caplog.set_level("INFO")
    async with open_node(tmp_path) as node:
        await put_many(node, 400)
        kept = (await pop_messages(node, invisibleTime=1_000_000))[:5]
        for _ in range(12):
            for message in await pop_messages(node, invisibleTime=1_000_000):
                assert (await ack(node, message)).code == 0
        in_flight = node.broker.pop.statistics().in_flight_count
        assert record_count(node) > 300
    caplog.clear()
    async with open_node(tmp_path) as node:
        await trio.sleep(0.1)
        [line] = [record.getMessage() for record in caplog.records if record.msg.startswith("pop.loaded")]
        assert int(line.split("records=")[1].split(" ")[0]) < 60
        assert node.broker.pop.statistics().in_flight_count == in_flight == 32
        for message in kept:
            assert (await ack(node, message)).code == 0
        assert node.broker.pop.statistics().in_flight_count == 27


@pytest.mark.parametrize("has_snapshot", [True, False])
async def test_a_log_that_can_not_be_read_for_the_moment_is_loaded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_snapshot: bool
) -> None:
    """The snapshot, or the copy of a message, was ignored."""
    async with open_node(tmp_path) as node:
        await node.send(b"a")
        await pop_messages(node, invisibleTime=1000)
        if has_snapshot:
            node.broker.pop._pop_log._want_snapshot()
            await trio.sleep(0.5)
        else:
            monkeypatch.setattr(node.broker.pop._pop_log, "_write_changes", _never)
            await trio.sleep(2)

    async def read_all(log: CommitLog, *place: object) -> bytes:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(CommitLog, "read_all", read_all)
        async with open_node(tmp_path) as node:
            await trio.sleep(5)
            assert node.broker.pop._pop_log.state is None
            patch.undo()
            await trio.sleep(1)
            assert node.broker.pop._pop_log.state is not None
            assert bodies(await pop_messages(node)) == [b"a"]


async def test_blank_entries_are_skipped(tmp_path: Path) -> None:
    """They replace entries that a queue lost in a crash. POP requests were refused for a minute per entry."""
    async with open_node(tmp_path) as node:
        assert (await node.send(b"first")).code == 0
        assert len(await pop_messages(node)) == 1
        await node.dispatched()
        queue = node.store.queues.get(POP_TOPIC, 0)
        assert queue is not None
        queue.keep_end(queue.max_offset + 8, node.store.log.max_offset.value)
    async with open_node(tmp_path) as node:
        assert (await node.send(b"second")).code == 0
        assert bodies(await pop_messages(node)) == [b"second"]


async def test_retention_waits_for_a_snapshot(tmp_path: Path) -> None:
    store: dict[str, Any] = {"segment_size": 1 << 16}
    async with open_node(tmp_path, store_changes=store) as node:
        await put_many(node, 8)
        messages = await pop_messages(node, invisibleTime=1_000_000)
        await put_many(node, 2000)
        first_segment = node.store.log.segments[0].start
        node.store.retention.disk_used_ratio = 0.99
        assert await node.store.retention.clean() > 0
        assert node.store.log.segments[0].start > first_segment
        records = node.store.queues.get(POP_TOPIC, 0)
        assert records is not None
        [end] = records.read(records.max_offset - 1, 1)
        assert end.tags_code == SNAPSHOT_END_CODE
        assert node.store.log.flushed_offset.value >= end.physical_offset + end.size, "before the file is deleted"
        assert node.broker.pop.statistics().in_flight_count == len(messages)
    async with open_node(tmp_path, store_changes=store) as node:
        await trio.sleep(0.1)
        assert node.broker.pop.statistics().in_flight_count == len(messages)
        assert node.broker.pop._pop_log.state is not None
        queue = node.broker.pop._pop_log.state.get(("g", "TT", 0))
        assert queue is not None
        assert queue.next_offset == 3


async def test_retention_flushes_a_snapshot_that_was_written_before(tmp_path: Path) -> None:
    """A power loss could take it after the records before it were deleted."""
    async with open_node(tmp_path, store_changes={"segment_size": 1 << 16, "flush_interval_s": 1e6}) as node:
        await put_many(node, 8)
        await pop_messages(node, invisibleTime=1_000_000)
        await put_many(node, 2000)
        node.broker.pop._pop_log._want_snapshot()
        await trio.sleep(1)
        records = node.store.queues.get(POP_TOPIC, 0)
        assert records is not None
        [end] = records.read(records.max_offset - 1, 1)
        assert end.tags_code == SNAPSHOT_END_CODE
        snapshot_end, flushed = end.physical_offset + end.size, node.store.log.flushed_offset
        assert flushed.value < snapshot_end
        node.store.retention.disk_used_ratio = 0.99
        assert await node.store.retention.clean() > 0
        assert flushed.value >= snapshot_end


async def test_messages_of_a_queue_that_begins_again_in_another_log_are_popped(tmp_path: Path) -> None:
    """An operator replaced the log by one that has the records of POP, but no message of the queue.

    The first pop began where the queue ended by then, after messages that were stored since the start.
    """
    store: dict[str, Any] = {"segment_size": 1 << 16}
    async with open_node(tmp_path, store_changes=store) as node:
        await put_many(node, 8, queue_count=1)
        await node.broker.put_service.put([Message("TT", 1, bytes(1000)) for _ in range(60)])
        await node.broker.put_service.put([Message("TT", 1, bytes(1000)) for _ in range(60)])
        assert len(await pop_messages(node, queueId=0)) == 9
        await node.dispatched()
        begin = node.store.log.segments[-1].start
        assert begin > 0
    keep_log_from(tmp_path, begin)
    async with open_node(tmp_path, store_changes=store) as node:
        await trio.sleep(0.1)
        assert (await node.send(b"new")).ext_fields["queueOffset"] == "0"
        assert bodies(await pop_messages(node, queueId=0)) == [b"new"]


@pytest.mark.parametrize("offset", [1, 5])
async def test_reset_of_the_offset_survives_a_restart_before_the_next_pop(tmp_path: Path, offset: int) -> None:
    async with open_node(tmp_path) as node:
        for number in range(7):
            await node.send(b"%d" % number)
        for message in await pop_messages(node, maxMsgNums=3):
            await ack(node, message)
        assert node.broker.offsets.reset("g", "TT", 0, offset)
        await node.dispatched()
        await trio.sleep(0.1)
    async with open_node(tmp_path) as node:
        assert bodies(await pop_messages(node)) == [b"%d" % number for number in range(offset, 7)]


async def test_reset_of_the_offset_is_repeated_if_it_can_not_be_stored(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.send(b"0")
    await node.send(b"1")
    for message in await pop_messages(node):
        await ack(node, message)
    with refused_puts(node, monkeypatch):
        assert node.broker.offsets.reset("g", "TT", 0, 1)
        assert (await pop(node)).code == 14
    await trio.sleep(1)
    assert node.broker.offsets.get("g", "TT", 0) == 1
    assert bodies(await pop_messages(node)) == [b"1"]


async def with_many_runs(node: Node) -> Popped:
    """Leaves every other message of four queues in flight, and returns one of them."""
    await put_many(node, 400)
    popped: list[Popped] = []
    while messages := await pop_messages(node, invisibleTime=1_000_000):
        popped += messages
    for message in popped:
        if message.record.queue_offset % 2:
            assert (await ack(node, message)).code == 0
    return popped[0]


async def test_changes_that_one_record_can_not_hold_become_several(tmp_path: Path) -> None:
    """A reset of long queues was refused for ever, as larger than a message may be, and with it all later changes."""
    async with open_node(tmp_path, message_size_max=2048) as node:
        handle = await with_many_runs(node)
        before = record_count(node)
        for queue_id in range(4):
            assert node.broker.offsets.reset("g", "TT", queue_id, 0)
        assert (await ack(node, handle)).code == 0
        await node.dispatched()
        assert record_count(node) - before > 2
        assert node.broker.pop.statistics().in_flight_count == 0
    async with open_node(tmp_path, message_size_max=2048) as node:
        assert node.broker.pop.statistics().in_flight_count == 0
        assert len(await pop_messages(node)) == 32


async def test_consumer_offset_is_never_ahead_of_the_log(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was already behind the messages of changes that the next record has."""
    await put_many(node, 2, queue_count=1)
    offsets, committed = node.broker.offsets, []
    commit = offsets.commit

    def note(group: str, topic: str, queue_id: int, offset: int) -> bool:
        committed.append(offset)
        return commit(group, topic, queue_id, offset)

    monkeypatch.setattr(offsets, "commit", note)
    async with trio.open_nursery() as nursery, node.store.log.appends_held():
        for _ in range(2):
            nursery.start_soon(partial(pop_messages, node, queueId=0, maxMsgNums=1))
            await wait_all_tasks_blocked()
    assert committed == [1, 2]


async def test_changes_of_one_queue_that_one_record_can_not_hold_become_several(tmp_path: Path) -> None:
    async with open_node(tmp_path, message_size_max=2048, store_changes={"message_size_max": 2048}) as node:
        await put_many(node, 1000, queue_count=1)
        popped: list[Popped] = []
        while messages := await pop_messages(node, invisibleTime=1_000_000):
            popped += messages
        for message in popped:
            if message.record.queue_offset % 2:
                assert (await ack(node, message)).code == 0
        assert node.broker.offsets.reset("g", "TT", 0, 2)
        assert (await ack(node, popped[0])).code == 0
        assert node.broker.pop.statistics().in_flight_count == 0
    async with open_node(tmp_path, message_size_max=2048, store_changes={"message_size_max": 2048}) as node:
        assert node.broker.pop.statistics().in_flight_count == 0
        assert (await pop_messages(node))[0].record.queue_offset == 2


async def test_answer_waits_for_the_last_record_of_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_node(tmp_path, message_size_max=2048) as node:
        await with_many_runs(node)
        outcomes: list[Logged] = []
        admit, admitted = PutService._admit, []

        def admit_one(service: PutService, requests: Sequence[PutRequest]) -> Sequence[PutRequest]:
            admitted.append(requests)
            if len(admitted) == 1:
                return admit(service, requests)
            service._refuse(requests, Cause.NOT_WRITABLE, "no room")
            return ()

        with monkeypatch.context() as patch:
            patch.setattr(PutService, "_admit", admit_one)
            for queue_id in range(4):
                assert node.broker.offsets.reset("g", "TT", queue_id, 0)
            node.broker.pop._pop_log.call(outcomes.append)
            await wait_all_tasks_blocked()
        assert [outcome.fault for outcome in outcomes] == ["SERVICE_NOT_AVAILABLE no room"]
        assert len(admitted) > 1


async def test_deleted_topic_and_group_leave_no_state(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await put_many(node, 8)
        await pop_messages(node, maxMsgNums=4, invisibleTime=1000)
        await pop_messages(node, maxMsgNums=4, consumerGroup="h", invisibleTime=1000)
        assert (await node.ask(207, groupName="g", cleanOffset=True)).code == 0
        assert node.broker.pop.statistics().in_flight_count == 4
        assert (await node.ask(215, topic="TT")).code == 0
        assert node.broker.pop.statistics().in_flight_count == 0
    async with open_node(tmp_path) as node:
        await trio.sleep(5)
        assert node.broker.pop.statistics().in_flight_count == 0
        assert not [topic for topic in node.broker.topics.table if topic.startswith("%RETRY%")]


async def test_group_deleted_while_a_record_waits_keeps_no_offset(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_many(node, 8)
    await pop_messages(node, maxMsgNums=1)
    is_deleted = trio.Event()
    with segment_wanted(node, monkeypatch, is_deleted.wait, is_made=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pop, node)
            await trio.sleep(0.1)
            assert (await node.ask(207, groupName="g", cleanOffset=True)).code == 0
            is_deleted.set()
    await trio.sleep(1)
    assert node.broker.offsets.topics_of("g") == []


async def test_offset_committed_while_a_record_waits_is_kept(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_many(node, 8)
    messages = await pop_messages(node, queueId=0)
    is_committed = trio.Event()
    with segment_wanted(node, monkeypatch, is_committed.wait, is_made=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ack, node, messages[0])
            await trio.sleep(0.1)
            assert (await node.ask(15, consumerGroup="g", topic="TT", queueId=0, commitOffset=1)).code == 0
            is_committed.set()
    assert node.broker.offsets.get("g", "TT", 0) == 1
    assert bodies(await pop_messages(node, queueId=0)) == bodies(messages[1:])
    assert node.broker.offsets.get("g", "TT", 0) == len(messages)


async def test_long_queues_of_unacknowledged_messages_keep_memory_bounded(tmp_path: Path) -> None:
    async with open_node(tmp_path, pop_in_flight_per_queue_max=100, pop_in_flight_max=250) as node:
        await put_many(node, 1000)
        total = 0
        while messages := await pop_messages(node, invisibleTime=60_000):
            total += len(messages)
        assert total == 250
        state = node.broker.pop._pop_log.state
        assert state is not None
        assert max(len(queue.batches) for queue in state.queues.values()) <= 100
        await trio.sleep(61)
        assert node.broker.pop.statistics().in_flight_count == 0
        assert len(state._schedule) == 0


async def test_acknowledged_messages_leave_nothing_in_the_schedule(node: Node) -> None:
    """Handles with long invisible times that are acknowledged at once do not fill the memory."""
    await put_many(node, 1200, 1)
    state = node.broker.pop._pop_log.state
    assert state is not None
    for _ in range(1150):
        [message] = await pop_messages(node, maxMsgNums=1, invisibleTime=40_000_000)
        await ack(node, message)
    assert len(state._schedule) <= 1030


async def test_topic_of_the_records_is_hidden_and_read_only(node: Node) -> None:
    assert (await node.send(b"x", b=POP_TOPIC)).code == 16
    assert (await node.ask(215, topic=POP_TOPIC)).code != 0


async def test_slave_refuses(tmp_path: Path) -> None:
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        await node.broker.topics.ensure("TT", 4)
        answer = await pop(node)
        assert answer.code == 2
        assert "SLAVE" in str(answer.remark)


@pytest.mark.parametrize("waited", [False, True], ids=["no record follows", "a record made before the copies follows"])
async def test_redelivery_in_a_crash_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited: bool) -> None:
    """The copies are stored and the record of their removal is not: the next start finds them.

    A record that had to wait for a new segment may have been made before the copies, and be appended after them.
    """
    async with open_node(tmp_path) as node:
        await node.send(b"a")
        await node.send(b"b")
        messages = await pop_messages(node, invisibleTime=1000)
        assert (await change(node, messages[1], 50_000))[0].code == 0
        monkeypatch.setattr(node.broker.pop._pop_log, "_write_changes", _never)
        await trio.sleep(2)
        if waited:
            await node.broker.put_service.put([Message(POP_TOPIC, 0, encode_pop_record(PopRecord()))])
    async with open_node(tmp_path) as node:
        await trio.sleep(2)
        [found] = await pop_messages(node)
        assert (found.body, found.topic) == (b"a", "%RETRY%g_TT")
        assert (await ack(node, found)).code == 0
        await trio.sleep(20)
        assert await pop_messages(node) == []
        await trio.sleep(40)
        assert bodies(await pop_messages(node)) == [b"b"]


async def _never(*_: object) -> bool:
    await trio.sleep_forever()
    raise AssertionError


@pytest.mark.parametrize(("bytes_max", "count_max", "popped_count"), [(1000, 100, 1), (1 << 20, 2, 2)])
async def test_pops_that_wait_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int, count_max: int, popped_count: int
) -> None:
    monkeypatch.setattr(pop_log, "WAITING_COUNT_MAX", count_max)
    sync = StalledSync()
    async with open_node(tmp_path, flush_sync=True, run_blocking=sync, pop_waiting_bytes_max=bytes_max) as node:
        for _ in range(4):
            await node.send(bytes(2000))
        sync.stall_s = 3.0
        answers = []

        async def take() -> None:
            answers.append((await pop(node, maxMsgNums=1)).code)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(take)
                await trio.sleep(0.1)
        assert sorted(answers) == [0] * popped_count + [2] * (4 - popped_count)
        assert await pop_messages(node, maxMsgNums=1)
