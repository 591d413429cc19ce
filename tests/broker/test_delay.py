"""Delayed messages: when they arrive, in which order and as which bytes; over restarts, clock steps and faults.

Times are virtual and exact.
"""

import errno
import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker.config_file import ConfigFile
from ha.broker.delay import CLOCK_STEP_COUNT_MAX, StoreClock
from ha.broker.delay_offsets import MARK_COUNT_MAX, DelayOffsetTable
from ha.broker.options import BrokerRole
from ha.broker.queue_read import QueueRead, ReadStatus
from ha.broker.slave_sync import SlaveSync
from ha.protocol import java_json
from ha.protocol.batch import encode_batch
from ha.protocol.bodies import DelayOffsets
from ha.protocol.codes import PutStatus, RequestCode
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message
from ha.protocol.topic_names import SCHEDULE_TOPIC
from ha.store.consume_queue import ConsumeQueue
from ha.store.record_maker import AppendResult
from tests.broker.few_descriptors import FewDescriptors
from tests.broker.node import Node, WallClock, open_node
from tests.broker.test_put import slave_of
from tests.store.disks import run_inline

DELAY_3 = "TAGS\x01TagA\x02DELAY\x013\x02"
LEVELS: dict[str, Any] = {"store_changes": {"delay_levels_ms": (1_000, 5_000, 10_000)}}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path, **LEVELS) as node:
        yield node


def delay(level: int | str, **more: str) -> str:
    return encode_properties({"DELAY": str(level), **more}).decode()


def waiting(node: Node, level: int) -> list[Any]:
    queue = node.store.queues.get(SCHEDULE_TOPIC, level - 1)
    return [] if queue is None else queue.read(queue.min_offset, 100)


async def test_message_is_delivered_when_due(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        began = trio.current_time()
        answer = await node.send(b"later", i=DELAY_3, h=7, j=2, e=1, f=1)
        assert (answer.code, answer.ext_fields["queueId"], answer.ext_fields["queueOffset"]) == (0, "1", "0")
        await node.dispatched()
        [entry] = waiting(node, 3)
        scheduled = await node.store.log.read_all(entry.physical_offset, entry.size)
        [(at, record)] = await node.arrivals(queueId=1)
        assert at - began == pytest.approx(10, abs=0.01)
        assert record.store_timestamp_ms - entry.tags_code in range(10)
        assert (record.topic, record.queue_id, record.body, record.flag, record.sys_flag) == ("TT", 1, b"later", 7, 1)
        assert record.reconsume_times == 2
        assert record.born_timestamp_ms == 1_700_000_000_000
        assert record.properties in scheduled
        found = record.property_map()
        assert (found["DELAY"], found["REAL_TOPIC"], found["REAL_QID"], found["TAGS"]) == ("3", "TT", "1", "TagA")
        assert found["UNIQ_KEY"] == answer.ext_fields["transactionId"]
        assert (await node.pull(0, queueId=1, subscription="TagB")).code == 20
        assert (await node.pull(0, queueId=1, subscription="TagA")).code == 0


async def test_levels_are_independent_and_in_order(tmp_path: Path) -> None:
    async with open_node(tmp_path, **LEVELS) as node:
        began = trio.current_time()
        for number in range(9):
            assert (await node.send(b"%d" % number, i=delay((3, 1, 2)[number % 3]))).code == 0
            await trio.sleep(0.1)
        found = await node.arrivals(9)
    assert [record.body for _, record in found] == [b"1", b"4", b"7", b"2", b"5", b"8", b"0", b"3", b"6"]
    for at, record in found:
        number = int(record.body)
        due = (10, 1, 5)[number % 3] + number / 10
        assert at - began == pytest.approx(due, abs=0.02)


async def test_levels_beyond_the_last_become_the_last(node: Node) -> None:
    began = trio.current_time()
    assert (await node.send(i=delay(99))).code == 0
    [(at, record)] = await node.arrivals()
    assert at - began == pytest.approx(10, abs=0.01)
    assert record.property_map()["DELAY"] == "3"


@pytest.mark.parametrize(
    ("properties", "code"),
    [
        (delay("x"), 1),
        (delay("99999999999"), 1),
        (delay(0), 0),
        (delay(-1), 0),
        (delay(0, TIMER_DELAY_SEC="3"), 0),
        (delay(1, TIMER_DELAY_SEC="3"), 0),
        (delay(1, TRAN_MSG="true"), 13),
    ],
)
async def test_invalid_levels(tmp_path: Path, properties: str, code: int) -> None:
    async with open_node(tmp_path) as node:
        answer = await node.send(i=properties)
        assert answer.code == code
        assert answer.remark or not code
        await node.dispatched()
        assert bool(waiting(node, 1)) is (code == 0 and "DELAY\x011" in properties)


async def test_batches_are_not_delayed(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        body = encode_batch([(0, b"a", encode_properties({"DELAY": "2"})), (0, b"b", b"")])
        answer = await node.send(body, code=320, m=True, i=delay(2))
        assert answer.code == 13
        assert node.store.log.max_offset.value == 0
        assert (await node.send(body, code=320, m=True, i="")).code == 0  # RocketMQ doesn't look at the parts
        assert len(await node.arrivals(2)) == 2


async def test_system_topics_take_no_sends(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        assert (await node.send(b=SCHEDULE_TOPIC, i=delay(1))).code == 16


async def test_thousand_messages_due_at_once(node: Node) -> None:
    messages = []
    for number in range(1000):
        properties = encode_properties({"DELAY": "2", "REAL_TOPIC": "TT", "REAL_QID": "0"})
        messages.append(Message(SCHEDULE_TOPIC, 1, b"%d" % number + bytes(500), properties))
    await node.broker.topics.ensure("TT", 1)
    await node.broker.put_service.put(messages)
    found = await node.arrivals(1000)
    assert [int(record.body.rstrip(b"\x00")) for _, record in found] == list(range(1000))
    assert node.broker.delay.statistics().delivered_count == 1000
    assert node.broker.delay.statistics().waiting_counts == {}
    await node.send(i=delay(1))
    await node.dispatched()
    assert node.broker.delay.statistics().waiting_counts == {1: 1}
    table = json.loads(bytes((await node.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).body))["table"]
    shown = {name: value for name, value in table.items() if name.startswith("schedule")}
    assert shown == {"scheduleMessageOffset_1": "0,1", "scheduleMessageOffset_2": "1000,1000"}


async def test_large_messages(tmp_path: Path) -> None:
    """A batch has at most 1 MiB, or one larger message."""
    sizes = [700_000, 700_000, 2_000_000, 100, 300_000, 300_000]
    async with open_node(tmp_path, store_changes={"segment_size": 1 << 23}) as node:
        submit, batches = node.broker.put_service.submit, []

        def note(requests: Sequence[Any]) -> None:
            batches.append([len(request.messages[0].body) for request in requests])
            submit(requests)

        for size in sizes:
            assert (await node.send(bytes(size), i=delay(1))).code == 0
        node.broker.put_service.submit = note  # type: ignore[method-assign]
        assert len(await node.arrivals(len(sizes), maxMsgNums=1)) == len(sizes)
    assert batches == [[700_000], [700_000], [2_000_000], [100, 300_000, 300_000]]


class SteppedClock(WallClock):
    """A wall clock that tests set."""

    def __init__(self) -> None:
        super().__init__()
        self.step_ms = 0

    def __call__(self) -> int:
        return super().__call__() + self.step_ms


async def note_arrivals(node: Node, into: dict[bytes, list[float]]) -> None:
    """Records the arrival times of messages in queue 0 of TT, until cancelled."""
    offset = 0
    while True:
        for at, record in await node.arrivals(offset=offset):
            into.setdefault(record.body, []).append(at)
            offset += 1


@pytest.mark.parametrize("step_ms", [-3_600_000, -7_000, -2_000, 2_000, 7_000, 3_600_000])
async def test_steps_of_the_wall_clock_have_no_effect(tmp_path: Path, step_ms: int) -> None:
    clock = SteppedClock()
    async with open_node(tmp_path, wall_clock_ms=clock, **LEVELS) as node, trio.open_nursery() as nursery:
        came: dict[bytes, list[float]] = {}
        due: dict[bytes, float] = {}
        await node.broker.topics.ensure("TT", 1)
        nursery.start_soon(note_arrivals, node, came)
        for number in range(36):
            level = 1 + number % 3
            due[b"%d" % number] = trio.current_time() + (1, 5, 10)[level - 1]
            assert (await node.send(b"%d" % number, i=delay(level))).code == 0
            await trio.sleep(0.25)
            if number == 17:
                clock.step_ms = step_ms
        await trio.sleep(20)
        assert {body: [pytest.approx(at, abs=0.1)] for body, at in due.items()} == came
        nursery.cancel_scope.cancel()


async def test_restart_neither_loses_nor_repeats_messages(tmp_path: Path) -> None:
    due = {}
    async with open_node(tmp_path, **LEVELS) as node:
        for number in range(30):
            level = 1 + number % 3
            due[number] = trio.current_time() + (1, 5, 10)[level - 1]
            await node.send(b"%d" % number, i=delay(level))
            await trio.sleep(0.1)
        assert len(await node.arrivals(8)) == 8
    stopped = trio.current_time()
    await trio.sleep(4)
    async with open_node(tmp_path, **LEVELS) as node:
        found = await node.arrivals(30)
        await trio.sleep(30)
        assert node.store.queues.get("TT", 0).max_offset == 30  # type: ignore[union-attr]
        assert {int(record.body) for _, record in found} == set(range(30))
        for at, record in found[8:]:
            assert at == pytest.approx(max(due[int(record.body)], stopped + 4), abs=0.1)
        assert node.broker.delay.statistics().delivered_count < 30


async def test_kill_repeats_only_the_last_seconds(tmp_path: Path) -> None:
    """A copy of the files at some moment is the state after a kill."""
    async with open_node(tmp_path / "a", **LEVELS) as node:
        for number in range(275):
            await node.send(b"%d" % number, i=delay(1))
            await trio.sleep(0.1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    async with open_node(tmp_path / "b", **LEVELS) as node:
        await trio.sleep(5)
        queue = node.store.queues.get("TT", 0)
        assert queue is not None
        found = [int(record.body) for _, record in await node.arrivals(queue.max_offset)]
        assert set(found) == set(range(275))
        again = [number for number in found if found.count(number) > 1]
        assert len(again) == 2 * (len(found) - 275) > 0
        assert min(again) >= 185  # delivered after 20 s, when the file was written


async def test_file_is_in_rocketmqs_format(tmp_path: Path) -> None:
    path = tmp_path / "config" / "delayOffset.json"
    async with open_node(tmp_path, **LEVELS) as node:
        await trio.sleep(2)
        await node.send(i=delay(3))
        await node.send(i=delay(1))
        await trio.sleep(7)
        assert not path.exists()
        await trio.sleep(2)
        text = path.read_text()
        assert text.startswith('{\n\t"dataVersion":{\n\t\t"counter":1,\n\t\t"stateVersion":0,\n\t\t"timestamp":17')
        assert text.endswith('\n\t},\n\t"offsetTable":{1:1\n\t}\n}')
        await trio.sleep(2)
        answer = await node.ask(RequestCode.GET_ALL_DELAY_OFFSET)
        assert answer.code == 0
        assert java_json.read_as(DelayOffsets, bytes(answer.body)).offset_table == {1: 1}  # what is flushed
        await node.store.flusher.flush()
        answer = await node.ask(RequestCode.GET_ALL_DELAY_OFFSET)
        assert java_json.read_as(DelayOffsets, bytes(answer.body)).offset_table == {1: 1, 3: 1}
    assert java_json.read_as(DelayOffsets, path.read_bytes()).offset_table == {1: 1, 3: 1}


async def test_deleted_messages_are_skipped(tmp_path: Path) -> None:
    async with open_node(tmp_path, **LEVELS) as node:
        for number in range(5):
            await node.send(b"%d" % number, i=delay(2))
        await node.dispatched()
        queue = node.store.queues.get(SCHEDULE_TOPIC, 1)
        assert queue is not None
        queue.min_offset = 3
        found = await node.arrivals(2)
        assert [record.body for _, record in found] == [b"3", b"4"]
        assert found[0][0] == pytest.approx(trio.current_time(), abs=0.1)
    (tmp_path / "config" / "delayOffset.json").write_text('{"offsetTable":{2:77}}')
    async with open_node(tmp_path, **LEVELS) as node:
        await node.send(b"next", i=delay(2))
        [(_, record)] = await node.arrivals(offset=2)
        assert record.body == b"next"


async def test_a_lost_log_hides_no_new_message(tmp_path: Path) -> None:
    """The disk has kept the progress of a level, and none of its messages."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "delayOffset.json").write_text('{"offsetTable":{2:77}}')
    async with open_node(tmp_path, **LEVELS) as node:
        await node.send(b"new", i=delay(2))
        with trio.fail_after(60):
            [(_, record)] = await node.arrivals()
        assert record.body == b"new"


async def test_refused_put_is_retried(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        await node.send(b"%d" % number, i=delay(1))
    append, began = node.store.log.append, trio.current_time()

    def refuse_some(messages: Sequence[Message], _: float | None = None) -> list[AppendResult]:
        results = []
        for message in messages:
            if message.body == b"3":
                results.append(AppendResult(PutStatus.MESSAGE_ILLEGAL, remark="never"))
            elif int(message.body) % 2 and trio.current_time() < began + 5:
                results.append(AppendResult(PutStatus.CREATE_MAPPED_FILE_FAILED, remark="not now"))
            else:
                results += append([message])
        return results

    monkeypatch.setattr(node.store.log, "append", refuse_some)
    found = await node.arrivals(5)
    assert [record.body for _, record in found] == [b"0", b"2", b"4", b"1", b"5"]
    assert found[2][0] - began == pytest.approx(1, abs=0.01)
    assert 5 <= found[3][0] - began < 7.1
    await trio.sleep(1)
    assert node.broker.delay_offsets.get(1) == 6
    statistics = node.broker.delay.statistics()
    assert (statistics.delivered_count, statistics.dropped_count) == (5, 1)


async def test_delivery_waits_while_the_store_is_not_writable(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.send(i=delay(1))
    with monkeypatch.context() as patch:
        patch.setattr(type(node.store), "is_writable", (False, "the disk is full"))
        await trio.sleep(30)
        assert node.store.queues.get("TT", 0) is None
    began = trio.current_time()
    [(at, _)] = await node.arrivals()
    assert at - began <= 2.01


class BadReads:
    """Wraps a node's reader of delayed messages; `answer` replaces its results."""

    def __init__(self, node: Node, answer: Callable[[int], QueueRead | None]) -> None:
        self._read = node.broker.delay._reader.read
        self._answer = answer
        self.count = 0
        node.broker.delay._reader.read = self  # type: ignore[method-assign]

    async def __call__(self, queue: ConsumeQueue, queue_offset: int, count_max: int = 1) -> QueueRead:
        self.count += 1
        await trio.lowlevel.checkpoint()
        return self._answer(queue_offset) or await self._read(queue, queue_offset, count_max)


def unreadable(queue_offset: int) -> QueueRead:
    return QueueRead(ReadStatus.OFFSET_FOUND_NULL, queue_offset, 0, 9)


async def test_delivery_waits_for_repairable_damage(node: Node) -> None:
    for number in range(3):
        await node.send(b"%d" % number, i=delay(1))
    damage = node.store.damage.add(1, 2, file="f", reason="r", found_by="scrub", by_checksum=True)
    reads = BadReads(node, lambda offset: unreadable(offset) if node.store.damage else None)
    await trio.sleep(300)
    assert 140 < reads.count < 160  # every 2 s
    began = trio.current_time()
    node.store.damage.healed(damage, "a peer")
    found = await node.arrivals(3)
    assert [record.body for _, record in found] == [b"0", b"1", b"2"]
    assert found[-1][0] - began < 0.1
    assert node.broker.delay.statistics().dropped_count == 0


async def test_unreadable_message_is_dropped_after_a_minute(node: Node) -> None:
    for number in range(3):
        await node.send(b"%d" % number, i=delay(1))
    BadReads(node, lambda offset: unreadable(offset) if offset == 0 else None)
    began = trio.current_time()
    await trio.sleep(30)
    found = await node.arrivals(2)
    assert [record.body for _, record in found] == [b"1", b"2"]
    assert 61 <= found[0][0] - began < 64
    assert node.broker.delay.statistics().dropped_count == 1


async def test_failed_reads_of_the_disk_are_retried(node: Node) -> None:
    await node.send(i=delay(1))
    began = trio.current_time()

    def fail(queue_offset: int) -> None:
        if trio.current_time() < began + 30:
            raise OSError(errno.EIO, "a bad sector")

    reads = BadReads(node, fail)
    [(at, _)] = await node.arrivals()
    assert 30 <= at - began <= 32
    assert reads.count < 25


@pytest.mark.parametrize("topic", [SCHEDULE_TOPIC, None], ids=["queue", "checksums"])
async def test_nothing_is_dropped_while_too_many_files_are_open(tmp_path: Path, topic: str | None) -> None:
    """After a minute, one message of each level was dropped, and a further one with each further minute."""
    disk = FewDescriptors()
    async with open_node(tmp_path, **LEVELS) as node:
        await node.send(b"late", i=delay(3))
    async with open_node(tmp_path, disk=disk, **LEVELS) as node:
        disk.exhaust(node, topic)
        await trio.sleep(300)
        assert node.broker.delay.statistics().delivered_count == 0
        disk.is_exhausted = False
        await trio.sleep(5)
        statistics = node.broker.delay.statistics()
        assert (statistics.delivered_count, statistics.dropped_count) == (1, 0)


async def test_messages_deleted_by_retention_are_counted(node: Node) -> None:
    for number in range(4):
        await node.send(b"%d" % number, i=delay(1))
    gone = QueueRead(ReadStatus.MESSAGE_WAS_REMOVING, 3, 0, 4)
    BadReads(node, lambda offset: gone if offset == 0 else None)
    [(_, record)] = await node.arrivals()
    assert record.body == b"3"
    assert node.broker.delay.statistics().dropped_count == 3


async def test_damaged_messages_between_others_are_counted(node: Node) -> None:
    for number in range(3):
        await node.send(b"%d" % number, i=delay(1))
    await node.dispatched()
    _, (begin, size, _), _ = waiting(node, 1)
    damage = node.store.damage.add(begin, begin + size, file="f", reason="r", found_by="scrub", by_checksum=True)
    node.store.damage.failed(damage, "no peer has it", is_hopeless=True)
    found = await node.arrivals(2)
    assert [record.body for _, record in found] == [b"0", b"2"]
    assert node.broker.delay.statistics().dropped_count == 1


async def test_undeliverable_messages_are_dropped(node: Node) -> None:
    targets = [("TT", "x"), ("", "0"), (SCHEDULE_TOPIC, "0"), ("RMQ_SYS_TRANS_HALF_TOPIC", "0"), ("TT", "-1")]
    messages = [
        Message(SCHEDULE_TOPIC, 0, b"x", encode_properties({"DELAY": "1", "REAL_TOPIC": topic, "REAL_QID": queue}))
        for topic, queue in [*targets, ("T" * 200, "0"), ("TT", "0")]
    ]
    await node.broker.put_service.put(messages)
    await node.broker.topics.ensure("TT", 1)
    assert len(await node.arrivals()) == 1
    assert node.broker.delay.statistics().dropped_count == 6
    assert node.broker.delay_offsets.get(1) == 7


async def test_levels_no_longer_configured_are_delivered(tmp_path: Path) -> None:
    async with open_node(tmp_path, **LEVELS) as node:
        await node.send(b"3", i=delay(3))
        await node.send(b"2", i=delay(2))
    async with open_node(tmp_path, store_changes={"delay_levels_ms": (1_000, 2_000)}) as node:
        began = trio.current_time()
        found = await node.arrivals(2)
        assert [record.body for _, record in found] == [b"2", b"3"]
        assert found[0][0] - began < 0.1  # more to go than its level's delay: at once, as in RocketMQ
        assert found[1][0] == pytest.approx(10, abs=0.1)


async def test_slaves_copy_only_offsets_of_replicated_messages(tmp_path: Path) -> None:
    async with open_node(tmp_path / "m", **LEVELS) as node:
        await node.send(b"before")
        async with slave_of(node) as slave:
            await slave.acknowledge()
            await node.send(b"a", i=delay(1))
            await node.dispatched()
            before_delivery = node.store.log.max_offset.value
            assert len(await node.arrivals(offset=1)) == 1

            async def told() -> dict[int, int] | None:
                answer = await node.ask(45)
                return None if answer.code else java_json.read_as(DelayOffsets, bytes(answer.body)).offset_table

            await slave.report(before_delivery)
            assert await told() == {}
            await node.store.flusher.flush()
            assert await told() == {}
            await slave.acknowledge()
            assert await told() == {1: 1}
        async with open_node(tmp_path / "s", role=BrokerRole.SLAVE, **LEVELS) as other:
            broker = other.broker
            sync = SlaveSync(node.client, lambda: "m", broker.tables, broker.options)
            assert await sync.sync_once()
            assert broker.delay_offsets.get(1) == 1
            written = (tmp_path / "s" / "config" / "delayOffset.json").read_bytes()
            assert java_json.read_as(DelayOffsets, written).offset_table == {1: 1}
            answer = await other.ask(45)
            assert b'"offsetTable":{1:1}' in bytes(answer.body)
            assert broker.delay.statistics().delivered_count == 0


async def test_offset_marks(tmp_path: Path) -> None:
    table = DelayOffsetTable(
        ConfigFile(tmp_path / "delayOffset.json", run_blocking=run_inline), wall_clock_ms=lambda: 7
    )
    await table.load(100)
    assert table.settled(0) is not None
    for end in range(1, 1000):
        table.set(1, end)
        assert table.mark(end, 0)
    assert len(table._marks) == MARK_COUNT_MAX
    assert settled(table, 0) == {}
    assert settled(table, 999) == {1: 999}
    table.mark(1000, 998)
    assert settled(table, 0) is None
    assert settled(table, 998) == {1: 998}
    await table.save(500)
    assert not (tmp_path / "delayOffset.json").exists()
    await table.save(998)
    again = DelayOffsetTable(
        ConfigFile(tmp_path / "delayOffset.json", run_blocking=run_inline), wall_clock_ms=lambda: 7
    )
    await again.load(2000)
    assert again.get(1) == 998
    assert settled(again, 1999) is None
    assert settled(again, 2000) == {1: 998}


async def test_progress_is_written_after_a_cancelled_attempt(tmp_path: Path) -> None:
    """The save at shutdown, or the next copy from the master, took the progress for written."""
    table = DelayOffsetTable(
        ConfigFile(tmp_path / "delayOffset.json", run_blocking=run_inline), wall_clock_ms=lambda: 7
    )
    await table.load(0)
    copied = DelayOffsets(offset_table={2: 5})
    table.set(1, 3)
    table.mark(100, 0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await table.save(100)
    await table.save(100)
    assert written(tmp_path) == {1: 3}
    with trio.CancelScope() as scope:
        scope.cancel()
        await table.replace(copied)
    assert await table.replace(copied)
    assert written(tmp_path) == {2: 5}


def written(folder: Path) -> dict[int, int]:
    return java_json.read_as(DelayOffsets, (folder / "delayOffset.json").read_bytes()).offset_table


def settled(table: DelayOffsetTable, log_offset: int) -> dict[int, int] | None:
    found = table.settled(log_offset)
    return None if found is None else found.offset_table


def test_recorded_clock_steps_are_bounded() -> None:
    clock = StoreClock(0.0)
    for number in range(100_000):
        clock.note(number, -number / 10)
    assert len(clock._ahead_s) <= CLOCK_STEP_COUNT_MAX + 1
    assert clock.ahead_s(99_999) == pytest.approx(-9_999.9, abs=5)
    assert clock.ahead_s(50_000) >= -5_000
    assert clock.ahead_s(50_000) == pytest.approx(-5_000, abs=20)
    clock.forget_before(90_000)
    assert clock.ahead_s(95_000) == pytest.approx(-9_500, abs=20)
    assert len(clock._ahead_s) < 2000


@pytest.mark.parametrize("behind_count", [MARK_COUNT_MAX - 1, MARK_COUNT_MAX + 1, 4 * MARK_COUNT_MAX])
def test_progress_settles_beside_a_slave_far_behind(tmp_path: Path, behind_count: int) -> None:
    """With more marks than are kept, none was ever settled, and slaves in sync kept old progress, too."""
    table = DelayOffsetTable(ConfigFile(tmp_path / "delayOffset.json"), wall_clock_ms=lambda: 0)
    for step in range(1, 5000):
        table.set(1, step)
        acknowledged = max(0, step - behind_count) * 1000
        table.mark(step * 1000, acknowledged)
    settled = table.settled(acknowledged)
    assert settled is not None
    assert settled.offset_table[1] > 5000 - 2 * behind_count - MARK_COUNT_MAX
