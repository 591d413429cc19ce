"""Timer messages: when they arrive, and as which bytes; what is refused; recalls, restarts and retention.

Times are virtual and exact. Properties and remarks are those of RocketMQ 5.5.0 (spec: timer.md).
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio

from ha.broker.batch_reader import BATCH_BYTES_MAX
from ha.broker.options import BrokerRole
from ha.broker.put_request import PutRequest
from ha.broker.queue_read import QueueRead, ReadStatus
from ha.broker.slave_sync import SlaveSync
from ha.broker.timer_index import BUCKET_MS, LEAD_MS, RUN_COUNT, TimerIndex, _Run
from ha.broker.timers import TimerService
from ha.causes import Cause
from ha.protocol.bodies import TimerCheckPoint
from ha.protocol.codes import PutStatus, RequestCode
from ha.protocol.properties import PROPERTIES_SIZE_MAX, encode_properties, java_hash
from ha.protocol.record import Message, timer_code
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import TIMER_TOPIC
from ha.store.commitlog import UNLIMITED
from ha.store.dispatch import Arrival
from ha.store.files import DiskUsage, OsDisk
from ha.store.record_maker import AppendResult
from tests.broker.few_descriptors import FewDescriptors
from tests.broker.node import Node, WallClock, open_node
from tests.broker.test_terms import member

HOUR_MS = 3_600_000


def properties(**named: object) -> str:
    return encode_properties({name: str(value) for name, value in named.items()}).decode()


@pytest.mark.parametrize(
    ("asked", "delay_s"),
    [
        ({"TIMER_DELAY_SEC": 90}, 90.0),
        ({"TIMER_DELAY_MS": 1234}, 1.234),
        ({"TIMER_DELAY_SEC": 2, "TIMER_DELAY_MS": 9}, 2.0),
        ({"TIMER_DELAY_SEC": 3700}, 3700.0),
    ],
)
async def test_it_arrives_when_it_is_due(node: Node, asked: dict[str, int], delay_s: float) -> None:
    began = trio.current_time()
    answer = await node.send(b"later", i=properties(TAGS="TagA", **asked), h=7, j=2, e=0)
    assert answer.code == 0, answer.remark
    [(at, record)] = await node.arrivals()
    assert delay_s <= at - began < delay_s + 0.1
    assert (record.topic, record.queue_id, record.body, record.flag) == ("TT", 0, b"later", 7)
    assert record.reconsume_times == 2
    found = record.property_map()
    assert (found["REAL_TOPIC"], found["REAL_QID"], found["TAGS"]) == ("TT", "0", "TagA")
    assert found["UNIQ_KEY"] == answer.ext_fields["transactionId"]
    assert int(found["TIMER_DEQUEUE_MS"]) >= int(found["TIMER_OUT_MS"])
    assert {"TIMER_ENQUEUE_MS", *asked} <= found.keys()
    assert node.broker.timers.statistics().pending_count == 0


async def test_a_time_that_has_come_makes_an_ordinary_message(node: Node) -> None:
    await node.send(b"now", i=properties(TIMER_DELIVER_MS=1_000), e=0)
    await node.dispatched()
    [(_, record)] = await node.arrivals()
    assert record.property_map()["TIMER_DELIVER_MS"] == "1000"
    assert node.store.queues.get(TIMER_TOPIC, 0) is None


@pytest.mark.parametrize(
    ("asked", "code", "remark"),
    [
        ({"TIMER_DELAY_SEC": "soon"}, 13, "timer message illegal, the delay time should not be bigger than the max"),
        ({"TIMER_DELAY_SEC": 41 * 86_400}, 13, "max delay 3456000000ms; or if set del msg, the delay time"),
        ({"TIMER_DELIVER_MS": 1, "TIMER_DEL_UNIQKEY": "k"}, 13, "should be bigger than the current time"),
    ],
)
async def test_what_can_never_be_delivered_is_refused(
    node: Node, asked: dict[str, Any], code: int, remark: str
) -> None:
    answer = await node.send(b"never", i=properties(**asked))
    assert answer.code == code
    assert remark in (answer.remark or "")


async def test_switched_off_they_are_refused(tmp_path: Path) -> None:
    async with open_node(tmp_path, timer_enable=False) as node:
        answer = await node.send(b"never", i=properties(TIMER_DELAY_SEC=1))
        assert answer.code == 1
        assert answer.remark == "accurate timer message is not enabled, timerWheelEnable is false"


async def test_a_delay_by_level_takes_precedence(tmp_path: Path) -> None:
    async with open_node(tmp_path, store_changes={"delay_levels_ms": (5_000,)}) as node:
        began = trio.current_time()
        await node.send(b"level", i=properties(DELAY=1, TIMER_DELAY_SEC=60), e=0)
        [(at, _)] = await node.arrivals()
        assert at - began == pytest.approx(5, abs=0.01)


async def test_messages_arrive_in_the_order_of_time(tmp_path: Path) -> None:
    delays_s = list(range(1, 200))
    random.Random(3).shuffle(delays_s)
    async with open_node(tmp_path) as node:
        for delay_s in delays_s:
            await node.send(b"%d" % delay_s, i=properties(TIMER_DELAY_SEC=delay_s), e=0)
        found = await node.arrivals(len(delays_s))
        assert [int(record.body) for _, record in found] == sorted(delays_s)


async def test_a_restart_goes_on_where_delivery_was(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        for delay_s in (5, 500, 1000):
            await node.send(b"%d" % delay_s, i=properties(TIMER_DELAY_SEC=delay_s), e=0)
        await node.arrivals()
    await trio.sleep(600)
    async with open_node(tmp_path) as node:
        began = trio.current_time()
        found = await node.arrivals(3)
        assert [record.body for _, record in found] == [b"5", b"500", b"1000"]
        assert found[1][0] - began < 0.1, "due while the node was down"
        assert found[2][0] - began == pytest.approx(1000 - 600 - 5, abs=1)
        assert node.broker.timers.statistics().delivered_count == 2


async def test_a_recalled_message_is_not_delivered(node: Node) -> None:
    due_ms = WallClock()() + 60_000
    recalled = await node.send(b"no", i=properties(TIMER_DELIVER_MS=due_ms), e=0)
    await node.send(b"yes", i=properties(TIMER_DELIVER_MS=due_ms), e=0)
    key = recalled.ext_fields["transactionId"]
    await node.send(b"0", i=properties(TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY=key), e=0)
    [(_, record)] = await node.arrivals()
    assert record.body == b"yes"
    statistics = node.broker.timers.statistics()
    assert (statistics.delivered_count, statistics.recalled_count, statistics.pending_count) == (1, 1, 0)


@pytest.mark.parametrize("is_repaired", [True, False])
async def test_a_message_waits_for_an_unreadable_recall_that_is_due_with_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_repaired: bool
) -> None:
    """It was delivered, although its recall had succeeded. A recall that stays unreadable is dropped."""
    due_ms = WallClock()() + 60_000
    recalled = await node.send(b"recalled", i=properties(TIMER_DELIVER_MS=due_ms), e=0)
    await node.send(b"later", i=properties(TIMER_DELIVER_MS=due_ms + 1000), e=0)
    key = recalled.ext_fields["transactionId"]
    await node.send(b"0", i=properties(TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY=key), e=0)
    timers = node.broker.timers
    read = timers._reader.read

    async def read_others(queue: Any, offset: int, count_max: int) -> QueueRead:
        if offset == 2:
            return QueueRead(ReadStatus.OFFSET_FOUND_NULL, 2, 0, 3)
        return await read(queue, offset, 1)

    with monkeypatch.context() as patch:
        patch.setattr(timers._reader, "read", read_others)
        [(_, record)] = await node.arrivals()
        assert record.body == b"later"
        assert timers.statistics().pending_count == 2
        await trio.sleep(10 if is_repaired else 100)
    await trio.sleep(10)
    statistics = timers.statistics()
    assert (statistics.recalled_count, statistics.dropped_count) == ((1, 0) if is_repaired else (0, 1))
    assert (statistics.delivered_count, statistics.pending_count) == (1 if is_repaired else 2, 0)


async def test_messages_are_delivered_as_soon_as_their_recall_is_readable(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recall was read again only after the many messages that waited for it."""
    monkeypatch.setattr("ha.broker.timers.BATCH_COUNT_MAX", 2)
    due_ms = WallClock()() + 60_000
    keys = []
    for _ in range(100):
        sent = await node.send(i=properties(TIMER_DELIVER_MS=due_ms), e=0)
        keys.append(sent.ext_fields["transactionId"])
    await node.send(i=properties(TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY=keys[0]), e=0)
    timers = node.broker.timers
    read = timers._reader.read

    async def read_others(queue: Any, offset: int, count_max: int) -> QueueRead:
        if offset == len(keys):
            return QueueRead(ReadStatus.OFFSET_FOUND_NULL, offset, 0, offset + 1)
        return await read(queue, offset, 1)

    with monkeypatch.context() as patch:
        patch.setattr(timers._reader, "read", read_others)
        await trio.sleep(65)
        statistics = timers.statistics()
        assert (statistics.delivered_count, statistics.pending_count) == (0, len(keys) + 1)
        assert statistics.next_due_ms == due_ms
    await trio.sleep(5)
    statistics = timers.statistics()
    assert (statistics.delivered_count, statistics.recalled_count) == (len(keys) - 1, 1)
    assert statistics.pending_count == 0


async def test_a_recall_concerns_only_its_own_topic(node: Node) -> None:
    """A producer of one topic can't take back messages of another one."""
    due_ms = WallClock()() + 60_000
    sent = await node.send(b"stays", i=properties(TIMER_DELIVER_MS=due_ms), e=0)
    key = sent.ext_fields["transactionId"]
    await node.send(b"0", b="Other", i=properties(TIMER_DELIVER_MS=due_ms, TIMER_DEL_UNIQKEY=key), e=0)
    await trio.sleep(70)
    assert node.broker.timers.statistics().delivered_count == 1


async def test_a_wall_clock_set_forward_delivers_within_a_second(tmp_path: Path) -> None:
    clock = WallClock()
    async with open_node(tmp_path, wall_clock_ms=clock) as node:
        began = trio.current_time()
        await node.send(b"later", i=properties(TIMER_DELAY_SEC=3600), e=0)
        await trio.sleep(10)
        clock.start_ms += HOUR_MS
        [(at, _)] = await node.arrivals()
        assert at - began <= 11.1


async def test_a_message_is_delivered_that_is_due_before_what_was_delivered(tmp_path: Path) -> None:
    """The wall clock was an hour ahead for a while."""
    clock = WallClock()
    async with open_node(tmp_path, wall_clock_ms=clock) as node:
        clock.start_ms += HOUR_MS
        await node.send(b"ahead", i=properties(TIMER_DELAY_SEC=5), e=0)
        await node.arrivals()
        clock.start_ms -= HOUR_MS
        await node.send(b"now", i=properties(TIMER_DELAY_SEC=5), e=0)
        [(_, record)] = await node.arrivals(offset=1)
        assert record.body == b"now"


async def test_a_restart_after_the_clock_was_set_back_repeats_nothing_that_was_due_later(tmp_path: Path) -> None:
    """TIME only grows: "ahead" counts as delivered although messages that are due before it are still pending."""
    clock = WallClock()
    async with open_node(tmp_path, wall_clock_ms=clock) as node:
        await node.send(b"far", i=properties(TIMER_DELAY_SEC=3600), e=0)
        clock.start_ms += 60_000
        await node.send(b"ahead", i=properties(TIMER_DELAY_SEC=5), e=0)
        await node.arrivals()
        clock.start_ms -= 60_000
        for delay_s in (5, 40):
            await node.send(b"%d" % delay_s, i=properties(TIMER_DELAY_SEC=delay_s), e=0)
        await node.arrivals(offset=1)
    async with open_node(tmp_path, wall_clock_ms=clock) as node:
        await trio.sleep(80)
        await node.dispatched()
        found = [record.body for record in node.records(await node.pull())]
        assert (found.count(b"ahead"), found.count(b"40")) == (1, 1)


@pytest.mark.parametrize("is_disk_error", [False, True])
async def test_what_could_not_be_read_when_it_was_due_is_delivered_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_disk_error: bool
) -> None:
    """The next one is delivered meanwhile; neither TIME nor FIRST passes the first."""
    monkeypatch.setattr("ha.broker.timers.READ_COUNT_MAX", 1)  # so that FIRST is determined at once
    async with open_node(tmp_path) as node:
        began = trio.current_time()
        for delay_s in (5, 10):
            await node.send(b"%d" % delay_s, i=properties(TIMER_DELAY_SEC=delay_s), e=0)
        read = node.broker.timers._reader.read

        async def read_others(queue: Any, offset: int, count_max: int) -> QueueRead:
            if offset == 0 and is_disk_error:
                raise OSError(errno.EIO, "Input/output error")
            if offset == 0:
                return QueueRead(ReadStatus.OFFSET_FOUND_NULL, 0, 0, 2)
            return await read(queue, offset, count_max)

        monkeypatch.setattr(node.broker.timers._reader, "read", read_others)
        [(at, record)] = await node.arrivals()
        assert record.body == b"10"
        assert at - began == pytest.approx(10, abs=0.01)
    async with open_node(tmp_path) as node:
        with trio.fail_after(60):
            found = await node.arrivals(offset=1)
        assert found[0][1].body == b"5"


async def test_a_message_is_pending_until_it_is_delivered(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its delivery takes ten seconds, because the disk is slow."""
    read = node.broker.timers._reader.read

    async def read_slowly(queue: Any, offset: int, count_max: int) -> QueueRead:
        await trio.sleep(10)
        return await read(queue, offset, count_max)

    monkeypatch.setattr(node.broker.timers._reader, "read", read_slowly)
    await node.send(b"slow", i=properties(TIMER_DELAY_SEC=5), e=0)
    due_ms = node.broker.timers.statistics().next_due_ms
    await trio.sleep(10)
    statistics = node.broker.timers.statistics()
    assert (statistics.pending_count, statistics.due_counts["1h"], statistics.next_due_ms) == (1, 1, due_ms)
    assert node.broker.timers.figures()["timerCongestNum"] == "1"
    await node.arrivals()
    await trio.sleep(1)
    statistics = node.broker.timers.statistics()
    assert (statistics.pending_count, statistics.next_due_ms) == (0, None)


@pytest.mark.parametrize(("left_count", "is_first_pending"), [(0, False), (1, False), (1, True)])
async def test_a_lost_end_of_the_log_hides_no_new_message(
    tmp_path: Path, left_count: int, is_first_pending: bool
) -> None:
    """The disk has kept the progress, and of the timer messages only `left_count`; and the clock was ahead."""
    clock, progress = WallClock(), Path("config/delayOffset.json")
    async with open_node(tmp_path / "before", wall_clock_ms=clock) as node:
        clock.start_ms += HOUR_MS
        if is_first_pending:
            await node.send(b"left", i=properties(TIMER_DELAY_SEC=7200), e=0)
        for _ in range(3):
            await node.send(b"lost", i=properties(TIMER_DELAY_SEC=1), e=0)
        await node.arrivals(3)
    clock.start_ms -= HOUR_MS
    async with open_node(tmp_path / "after", wall_clock_ms=clock) as node:
        for _ in range(left_count):
            await node.send(b"left", i=properties(TIMER_DELAY_SEC=3600), e=0)
    shutil.copy(tmp_path / "before" / progress, tmp_path / "after" / progress)
    async with open_node(tmp_path / "after", wall_clock_ms=clock) as node:
        await node.send(b"new", i=properties(TIMER_DELAY_SEC=5), e=0)
        with trio.fail_after(60):
            [(_, record)] = await node.arrivals()
        assert record.body == b"new"


async def test_what_could_not_be_put_when_it_was_due_is_delivered_after_a_restart(tmp_path: Path) -> None:
    disk = FillingDisk()
    async with open_node(tmp_path, disk=disk) as node:
        await node.send(b"late", i=properties(TIMER_DELAY_SEC=5), e=0)
        disk.free_share = 0.01
        await node.store.retention.check_disk()
        await trio.sleep(100)
        assert node.broker.timers.statistics().delivered_count == 0
    async with open_node(tmp_path) as node:
        [(_, record)] = await node.arrivals()
        assert record.body == b"late"


@pytest.mark.parametrize("is_indexed", [True, False])
async def test_a_queue_whose_file_cannot_be_opened_is_read_later(tmp_path: Path, is_indexed: bool) -> None:
    """It ended the broker: when the message was due, or as soon as it was stored."""
    disk = FewDescriptors()
    async with open_node(tmp_path, disk=disk) as node:

        def exhaust(arrivals: Iterable[Arrival]) -> None:
            if not is_indexed and any(arrival.topic == TIMER_TOPIC for arrival in arrivals):
                disk.exhaust(node, TIMER_TOPIC)

        node.store.subscribe(exhaust)
        await node.send(b"late", i=properties(TIMER_DELAY_SEC=5), e=0)
        await trio.sleep(1)
        disk.exhaust(node, TIMER_TOPIC)
        await trio.sleep(30)
        assert node.broker.timers.statistics().delivered_count == 0
        disk.is_exhausted = False
        [(_, record)] = await node.arrivals()
        assert record.body == b"late"
        statistics = node.broker.timers.statistics()
        assert (statistics.pending_count, statistics.dropped_count) == (0, 0)


async def test_nothing_is_dropped_while_checksums_cannot_be_read(tmp_path: Path) -> None:
    """After a minute, all messages that were due counted as lost."""
    disk = FewDescriptors()
    async with open_node(tmp_path) as node:
        for number in range(4):
            await node.send(b"%d" % number, i=properties(TIMER_DELAY_SEC=20 + number), e=0)
    async with open_node(tmp_path, disk=disk) as node:
        disk.exhaust(node, None)
        await trio.sleep(300)
        assert node.broker.timers.statistics().delivered_count == 0
        disk.is_exhausted = False
        await trio.sleep(5)
        statistics = node.broker.timers.statistics()
        assert (statistics.delivered_count, statistics.dropped_count) == (4, 0)


async def test_messages_that_stay_unreadable_do_not_delay_repaired_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are retried at once are due before the one that is repaired."""
    monkeypatch.setattr("ha.broker.timers.BATCH_COUNT_MAX", 2)
    async with open_node(tmp_path) as node:
        ends = [0]
        for count, body in ((2, b"damaged"), (1, b"repaired")):
            for _ in range(count):
                await node.send(body, i=properties(TIMER_DELAY_SEC=5), e=0)
            ends.append(node.store.log.max_offset.value)
        await node.dispatched()
        place: Any = {"file": "f", "reason": "r", "found_by": "scrub", "by_checksum": True}
        _, second = [node.store.damage.add(*part, **place) for part in pairwise(ends)]
        await trio.sleep(100)
        assert node.broker.timers.statistics().delivered_count == 0
        node.store.damage.healed(second, "a peer")
        with trio.fail_after(10):
            [(_, record)] = await node.arrivals()
        assert record.body == b"repaired"
        assert node.broker.timers.statistics().pending_count == 2


async def test_a_message_without_room_for_further_properties_is_delivered(node: Node) -> None:
    await node.send(b"first")
    await node.broker.put_service.put([largest_message(b"full", 5)])
    with trio.fail_after(60):
        [(_, record)] = await node.arrivals(offset=1)
    assert (record.body, len(record.properties)) == (b"full", PROPERTIES_SIZE_MAX)


# ---- retention


def largest_message(body: bytes, due_s: float) -> Message:
    """A message for queue 0 of TT with the longest properties, as it is stored until it is due."""
    due_ms = WallClock()() + int(due_s * 1000)
    raw = properties(TIMER_OUT_MS=due_ms, REAL_TOPIC="TT", REAL_QID=0, filler="x").encode()
    filler = "x" * (1 + PROPERTIES_SIZE_MAX - len(raw))
    raw = properties(TIMER_OUT_MS=due_ms, REAL_TOPIC="TT", REAL_QID=0, filler=filler).encode()
    return Message(TIMER_TOPIC, 0, body, raw)


class FillingDisk(OsDisk):
    """A disk whose free space the test sets."""

    free_share = 0.9

    def usage(self, path: Path) -> DiskUsage:
        return DiskUsage(1 << 40, int(self.free_share * (1 << 40)))


EXPIRED: dict[str, Any] = {"segment_size": 16_384, "reserved_h": -1e6}
"""Every segment but the last is old enough to be deleted."""


async def fill_segments(node: Node) -> None:
    for _ in range(40):
        await node.send(bytes(1000), e=1)
    await node.dispatched()


async def test_pending_messages_are_rolled_before_their_segment_is_deleted(tmp_path: Path) -> None:
    async with open_node(tmp_path, store_changes=EXPIRED) as node:
        began = trio.current_time()
        for delay_s in (10, 500, 700):
            await node.send(b"%d" % delay_s, i=properties(TIMER_DELAY_SEC=delay_s), e=0)
        await node.arrivals()
        await fill_segments(node)
        assert await node.store.retention.clean(at_any_hour=True) >= 1
        assert node.store.log.min_offset > 0
        assert node.store.log.flushed_offset.value > node.store.log.segments[-1].start, "rolled messages are flushed"
        await node.dispatched()
        await trio.sleep(1)
        assert node.broker.timers.statistics().pending_count == 2
        [(at, record), (_, last)] = await node.arrivals(2, offset=1)
        assert (record.body, last.body) == (b"500", b"700")
        assert at - began == pytest.approx(500, abs=0.2)
        assert record.property_map()["TIMER_ROLL_TIMES"] == "1"
        await trio.sleep(1000)
        assert node.broker.timers.statistics().delivered_count == 3


async def test_delivered_copies_are_flushed_before_the_segment_of_their_message_is_deleted(tmp_path: Path) -> None:
    """A power loss kept the deletion, and lost the only copy."""
    async with open_node(tmp_path, store_changes=EXPIRED) as node:
        await node.send(b"later", i=properties(TIMER_DELAY_SEC=50), e=0)
        await fill_segments(node)
        await node.arrivals()
        await node.store.flusher.flush()
        log, flushed_to = node.store.log, node.store.log.flushed_offset.value
        await node.send(b"last", e=1)
        assert log.flushed_offset.value == flushed_to < log.max_offset.value
        assert await node.store.retention.clean(at_any_hour=True) >= 1
        assert log.flushed_offset.value == log.max_offset.value


async def test_rolled_messages_are_confirmed_before_their_segment_is_deleted(tmp_path: Path) -> None:
    """A member that lost its role truncated the new records, and had deleted the old ones."""
    async with open_node(tmp_path, store_changes=EXPIRED) as node:
        await node.send(b"later", i=properties(TIMER_DELAY_SEC=500), e=0)
        await fill_segments(node)
        log = node.store.log
        log.limit_dispatch(log.max_offset.value)
        assert await node.store.retention.clean(at_any_hour=True) == 0
        log.limit_dispatch(UNLIMITED)
        assert await node.store.retention.clean(at_any_hour=True) >= 1
        assert [record.body for _, record in await node.arrivals()] == [b"later"]


async def test_what_was_rolled_is_not_rolled_again_when_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_node(tmp_path, store_changes=EXPIRED) as node:
        for number in range(5):
            await node.send(b"%d" % number, i=properties(TIMER_DELAY_SEC=500), e=0)
        await fill_segments(node)
        service, room = node.broker.put_service, 3

        def admit_three(requests: Sequence[PutRequest]) -> Sequence[PutRequest]:
            nonlocal room
            admitted, refused = requests[:room], requests[room:]
            room -= len(admitted)
            service._refuse(refused, Cause.NOT_WRITABLE, "no room")
            return admitted

        with monkeypatch.context() as patch:
            patch.setattr(service, "_admit", admit_three)
            assert await node.store.retention.clean(at_any_hour=True) == 0
            await node.dispatched()
        assert await node.store.retention.clean(at_any_hour=True) >= 1
        assert [record.body for _, record in await node.arrivals(5)] == [b"0", b"1", b"2", b"3", b"4"]
        await trio.sleep(1000)
        assert node.broker.timers.statistics().delivered_count == 5


async def test_a_message_is_rolled_once_if_one_before_it_needs_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was rolled again with each further attempt, and delivered as often."""
    async with open_node(tmp_path, store_changes=EXPIRED) as node:
        for body in (bytes(10_000), b"small"):
            await node.send(body, i=properties(TIMER_DELAY_SEC=500), e=0)
        await fill_segments(node)
        log = node.store.log
        while not 2000 < log.segments[-1].end - log.max_offset.value < 8000:
            await node.send(bytes(1000))

        async def add_segment() -> AppendResult:
            await trio.lowlevel.checkpoint()
            return AppendResult(PutStatus.CREATE_MAPPED_FILE_FAILED, remark="no room")

        with monkeypatch.context() as patch:
            patch.setattr(log, "add_segment", add_segment)
            for _ in range(2):
                assert await node.store.retention.clean(at_any_hour=True) == 0
        assert await node.store.retention.clean(at_any_hour=True) >= 1
        await trio.sleep(1000)
        assert node.broker.timers.statistics().delivered_count == 2


@pytest.mark.parametrize("filler", [b"x", b"\xff"])
async def test_a_message_without_room_for_further_properties_is_rolled_once(tmp_path: Path, filler: bytes) -> None:
    """Bytes that are not UTF-8 stay as they are, in place of three bytes each."""
    async with open_node(tmp_path, store_changes={**EXPIRED, "segment_size": 65_536}) as node:
        for number in range(3):
            await node.send(b"%d" % number, i=properties(TIMER_DELAY_SEC=500), e=0)
        full = largest_message(b"full", 500)
        full.properties = full.properties.replace(b"x", filler)
        await node.broker.put_service.put([full])
        for _ in range(3):
            await fill_segments(node)
            await node.store.retention.clean(at_any_hour=True)
        assert node.store.log.min_offset > 0
        with trio.fail_after(1000):
            assert sorted(record.body for _, record in await node.arrivals(4)) == [b"0", b"1", b"2", b"full"]
        await trio.sleep(1000)
        assert node.broker.timers.statistics().delivered_count == 4


@pytest.mark.parametrize("stated", ["many", "2147483648"])
async def test_a_producer_may_state_any_number_of_rolls(tmp_path: Path, stated: str) -> None:
    async with open_node(tmp_path, store_changes=EXPIRED) as node:
        await node.send(b"later", i=properties(TIMER_DELAY_SEC=500, TIMER_ROLL_TIMES=stated), e=0)
        await fill_segments(node)
        assert await node.store.retention.clean(at_any_hour=True) >= 1
        [(_, record)] = await node.arrivals()
        assert record.property_map()["TIMER_ROLL_TIMES"] == "1"


async def test_messages_are_rolled_on_a_nearly_full_disk_while_a_due_one_waits_for_room(tmp_path: Path) -> None:
    disk = FillingDisk()
    async with open_node(tmp_path, store_changes=EXPIRED, disk=disk) as node:
        for delay_s in (100, 5000):
            await node.send(b"%d" % delay_s, i=properties(TIMER_DELAY_SEC=delay_s), e=0)
        await fill_segments(node)
        disk.free_share = 0.01
        await node.store.retention.check_disk()
        assert (await node.send(b"refused")).code == 14
        await trio.sleep(200)  # the first one is due, and can't be put
        assert node.broker.timers.statistics().delivered_count == 0
        assert node.store.retention.deleted_count >= 1
        disk.free_share = 0.5
        await node.store.retention.check_disk()
        assert [record.body for _, record in await node.arrivals(2)] == [b"100", b"5000"]
        await trio.sleep(1000)
        assert node.broker.timers.statistics().delivered_count == 2


@pytest.mark.parametrize("is_pending", [True, False])
async def test_a_slave_keeps_segments_with_pending_messages(tmp_path: Path, *, is_pending: bool) -> None:
    async with member(tmp_path) as node:
        await node.broker.become_master(1)
        assert (await node.send(b"later", i=properties(TIMER_DELAY_SEC=50), e=0)).code == 0
        await node.dispatched()
        await trio.sleep(10 if is_pending else 100)
        assert node.broker.timers.statistics().delivered_count == (0 if is_pending else 1)
        await node.broker.become_slave(1)
        assert await node.broker.timers.release(node.store.log.max_offset.value) is not is_pending


# ---- the index


def popped_from(index: TimerIndex, now_ms: int, count_max: int) -> list[tuple[int, int]]:
    """Pops until nothing is due, or `count_max` messages are found."""
    due: list[tuple[int, int]] = []
    while True:
        is_advancing = index.advance(now_ms)
        found = index.pop_due(now_ms, count_max - len(due))
        due += found
        if len(due) == count_max or not (found or is_advancing):
            return due


@pytest.mark.parametrize("run_count", [4, 100, 10_000])
def test_the_index_keeps_the_order_of_time_and_recalls_first(monkeypatch: pytest.MonkeyPatch, run_count: int) -> None:
    monkeypatch.setattr("ha.broker.timer_index.RUN_COUNT", run_count)
    chance = random.Random(5)
    index = TimerIndex()
    model: list[tuple[int, int]] = []
    popped: list[tuple[int, int]] = []
    now_ms = 1_700_000_000_000
    for queue_offset in range(3000):
        code = 2 * (now_ms + chance.randrange(4 * BUCKET_MS)) + chance.randrange(2)
        index.add(code, queue_offset)
        model.append((code, queue_offset))
        if chance.random() < 0.1:
            now_ms += chance.randrange(BUCKET_MS // 4)
            due = popped_from(index, now_ms, 50)
            expected = sorted(each for each in model if each[0] >> 1 <= now_ms)[:50]
            assert due == expected
            popped += due
            model = [each for each in model if each not in set(due)]
        assert len(index) == len(model)
        first_ms, lowest = index.next_due_ms, index.lowest_offset
        assert first_ms is None if not model else first_ms is not None and first_ms <= min(model)[0] >> 1
        assert lowest is None if not model else lowest is not None and lowest <= min(offset for _, offset in model)
    assert popped
    index.drop_before(2000)
    model = [each for each in model if each[1] >= 2000]
    assert len(index) == len(model)
    assert popped_from(index, now_ms + 10 * BUCKET_MS, 10_000) == sorted(model)
    assert len(index) == 0
    assert index.lowest_offset is None
    assert index.next_due_ms is None


def test_a_step_of_the_index_is_small_however_many_messages_are_due_in_the_hour() -> None:
    """The work of a step: the messages that it sorts, and those that it returns."""
    index = TimerIndex()
    count = 50_000
    start_ms = 500_000 * BUCKET_MS
    chance = random.Random(7)
    for queue_offset in range(count):
        index.add(2 * (start_ms + chance.randrange(BUCKET_MS)) + 1, queue_offset)
    sorted_counts: list[int] = []

    class CountedRun(_Run):
        def __init__(self, codes: Sequence[int], queue_offsets: Sequence[int]) -> None:
            sorted_counts.append(len(codes))
            super().__init__(codes, queue_offsets)

    with patch("ha.broker.timer_index._Run", CountedRun):
        assert not index.advance(start_ms - 2 * LEAD_MS), "it is not time yet"
        assert sorted_counts == []
        steps = 1
        while index.advance(start_ms - LEAD_MS):
            assert len(sorted_counts) == steps, "each call sorts one run"
            assert index.pop_due(start_ms - 1, 10) == []
            steps += 1
    assert steps == -(-count // RUN_COUNT)
    assert max(sorted_counts) == RUN_COUNT
    assert sum(sorted_counts) == count
    due = popped_from(index, start_ms + BUCKET_MS, count + 1)
    assert len(due) == count
    assert due == sorted(due)


@pytest.mark.parametrize("dropped", [0, 5, 30, 60, 75, 100])
def test_dropped_messages_are_neither_counted_nor_found(monkeypatch: pytest.MonkeyPatch, dropped: int) -> None:
    """They are in sorted runs, among the recent ones, in an hour that is being sorted, and in a later hour."""
    monkeypatch.setattr("ha.broker.timer_index.RUN_COUNT", 10)
    index = TimerIndex()
    start_ms = 500_000 * BUCKET_MS
    keys = [(2 * (start_ms + 997 * number % 3_000_000) + 1, number) for number in range(45)]
    keys += [(2 * (start_ms + BUCKET_MS + 997 * number % 3_000_000) + 1, number) for number in range(45, 75)]
    keys += [(2 * (start_ms + 2 * BUCKET_MS + number) + 1, number) for number in range(75, 90)]
    for number, key in enumerate(keys):
        if number == 40:
            while index.advance(start_ms):
                pass
        index.add(*key)
    assert index.advance(start_ms + BUCKET_MS - 1), "the second hour is sorted in part"
    index.drop_before(dropped)
    kept = sorted(key for key in keys if key[1] >= dropped)
    assert len(index) == len(kept)
    assert popped_from(index, start_ms + 3 * BUCKET_MS, 1000) == kept
    assert len(index) == 0


def test_messages_are_due_while_the_next_hour_is_being_sorted() -> None:
    index = TimerIndex()
    start_ms = 500_000 * BUCKET_MS
    index.add(2 * (start_ms - 1) + 1, 0)
    for queue_offset in range(1, 3 * RUN_COUNT):
        index.add(2 * start_ms + 1, queue_offset)
    assert not index.advance(start_ms - 1)
    assert index.advance(start_ms - 1), "the next hour begins"
    assert index.pop_due(start_ms - 1, 10) == [(2 * (start_ms - 1) + 1, 0)]
    assert index.pop_due(start_ms, 10) == [], "the hour has begun, and is not sorted"


async def test_an_hour_is_sorted_with_other_tasks_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.broker.timer_index.RUN_COUNT", 2)
    async with open_node(tmp_path) as node:
        clock = WallClock()
        hour_ms = (clock() // BUCKET_MS + 1) * BUCKET_MS
        for number in range(20):
            await node.send(b"%d" % number, i=properties(TIMER_DELIVER_MS=hour_ms + number), e=0)
        steps: list[bool] = []
        advance = TimerIndex.advance

        def advance_counted(self: TimerIndex, now_ms: int) -> bool:
            is_advancing = advance(self, now_ms)
            if is_advancing:
                trio.lowlevel.current_trio_token().run_sync_soon(steps.append, True)
                steps.append(False)
            return is_advancing

        monkeypatch.setattr(TimerIndex, "advance", advance_counted)
        found = await node.arrivals(20)
        assert [int(record.body) for _, record in found] == list(range(20))
        assert len(steps) == 2 * 9
        assert steps == [False, True] * 9, "the event loop ran between two steps"


def test_pending_messages_are_counted_by_the_time_until_they_are_due() -> None:
    index = TimerIndex()
    now_ms = 500_000 * BUCKET_MS
    for hours in (0, 1, 1, 5, 23, 24, 100, 1000):
        index.add(2 * (now_ms + hours * BUCKET_MS + 1), 0)
    ends_ms = [now_ms + hours * BUCKET_MS for hours in (1, 24, 168)]
    assert index.due_counts(ends_ms) == [1, 4, 2, 1]
    index.advance(now_ms)
    assert index.due_counts(ends_ms) == [1, 4, 2, 1]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"TIMER_OUT_MS\x011700000000000\x02", 3_400_000_000_001),
        (b"TIMER_DEL_UNIQKEY\x01k\x02TIMER_OUT_MS\x011700000000000\x02", 3_400_000_000_000),
        (b"TIMER_OUT_MS\x01soon\x02", 77),
        (b"TIMER_OUT_MS\x0112\x02", 77),
        pytest.param(b"TIMER_OUT_MS\x01" + b"9" * 5000 + b"\x02", 77, id="5,000 digits"),
        (b"", 77),
    ],
)
def test_the_timer_code_says_when_it_is_due(raw: bytes, code: int) -> None:
    assert timer_code(raw, 77) == code


def write_hashes(folder: Path, *tags: str) -> None:
    """Writes to the entries of the timer queue what RocketMQ writes: the hash of the tags."""
    [path] = (folder / "consumequeue" / TIMER_TOPIC / "0").iterdir()
    entries = bytearray(path.read_bytes())
    for number, each in enumerate(tags):
        at = 20 * number + 12
        assert int.from_bytes(entries[at : at + 8], "big") > 1 << 32
        entries[at : at + 8] = java_hash(each).to_bytes(8, "big", signed=True)
    path.write_bytes(entries)


async def test_what_a_real_broker_stored_is_taken_over(tmp_path: Path) -> None:
    """Its consume queue has the hash of the tags where halog's has the due time, so the messages are read."""
    async with open_node(tmp_path) as node:
        await node.send(b"early", i=properties(TAGS="TagA", TIMER_DELAY_SEC=30), e=0)
        await node.send(b"late", i=properties(TIMER_DELAY_SEC=60), e=0)
        await node.dispatched()
    write_hashes(tmp_path, "TagA", "")
    async with open_node(tmp_path) as node:
        assert [record.body for _, record in await node.arrivals(2)] == [b"early", b"late"]


async def test_a_damaged_message_of_a_real_broker_does_not_hide_the_next_one(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.send(b"damaged", i=properties(TIMER_DELAY_SEC=3000), e=0)
        await node.send(bytes(100_000), e=1)
        await node.send(b"intact", i=properties(TIMER_DELAY_SEC=3000), e=0)
        await node.dispatched()
    write_hashes(tmp_path, "", "")
    log = tmp_path / "commitlog" / f"{0:020d}"
    content = bytearray(log.read_bytes())
    content[4] ^= 1  # of the magic number: the entry seems to be wrong, so reading stops there
    log.write_bytes(content)
    async with open_node(tmp_path) as node:
        await trio.sleep(4000)
        assert node.broker.timers.statistics().delivered_count == 0, "the damage may still be repaired"
        for damage in node.store.damage.open:
            node.store.damage.failed(damage, "no peer has it", is_hopeless=True)
        [(_, record)] = await node.arrivals()
        assert record.body == b"intact"
        assert node.broker.timers.statistics().dropped_count == 1


async def test_counting_does_not_prolong_the_wait_for_an_unreadable_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read messages of a real broker; each began the other's minute again."""
    async with open_node(tmp_path) as node:
        for number in range(3):
            await node.send(b"%d" % number, i=properties(TIMER_DELAY_SEC=3000), e=0)
        await node.dispatched()
    write_hashes(tmp_path, "", "", "")
    read, unreadable = TimerService._read, {1}

    async def read_others(self: TimerService, queue: Any, queue_offsets: Iterable[int]) -> Any:
        found = await read(self, queue, queue_offsets)
        return {at: record for at, record in found.items() if at not in unreadable}

    monkeypatch.setattr(TimerService, "_read", read_others)
    async with open_node(tmp_path, store_changes={"scrub_bytes_per_s": 0}) as node:
        await trio.sleep(1)
        unreadable.add(0)
        for _ in range(7):
            await node.ask(RequestCode.GET_TIMER_METRICS)
            await trio.sleep(10)
        unreadable.clear()
        assert (node.broker.timers.statistics().pending_count, node.broker.timers._indexed_to) == (2, 3)


LARGE_BODY = bytes(500_000)


async def largest_put(node: Node, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Awaitable[object]]) -> int:
    """The most bytes of bodies that are put together during `act`."""
    service, sizes = node.broker.put_service, [0]
    settle = service.settle

    async def counted(requests: Sequence[PutRequest], *more: Any) -> None:
        sizes.append(sum(len(message.body) for request in requests for message in request.messages))
        await settle(requests, *more)

    monkeypatch.setattr(service, "settle", counted)
    await act()
    return max(sizes)


async def test_large_messages_that_are_due_together_are_delivered_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_node(tmp_path, store_changes={"segment_size": 1 << 26}) as node:
        for _ in range(20):
            assert (await node.send(LARGE_BODY, i=properties(TIMER_DELAY_SEC=100), e=0)).code == 0
        await node.dispatched()
        assert await largest_put(node, monkeypatch, partial(trio.sleep, 200)) <= BATCH_BYTES_MAX + len(LARGE_BODY)
        assert node.broker.timers.statistics().delivered_count == 20


async def test_large_messages_are_rolled_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_node(tmp_path, store_changes={"segment_size": 1 << 23, "reserved_h": -1e6}) as node:
        for _ in range(20):
            assert (await node.send(LARGE_BODY, i=properties(TIMER_DELAY_SEC=100_000), e=0)).code == 0
        for _ in range(10):
            await node.send(LARGE_BODY, e=1)
        await node.dispatched()
        clean = partial(node.store.retention.clean, at_any_hour=True)
        assert 0 < await largest_put(node, monkeypatch, clean) <= BATCH_BYTES_MAX + len(LARGE_BODY)
        assert node.store.log.min_offset > 0
        assert node.broker.timers.statistics().pending_count == 20
        assert await node.broker.timers.count_topics(1000) == {"TT": 20}


async def test_large_messages_of_a_real_broker_are_indexed_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 1024 of them were in memory at once."""
    changes = {"segment_size": 1 << 26}
    async with open_node(tmp_path, store_changes=changes) as node:
        for _ in range(20):
            await node.send(LARGE_BODY, i=properties(TIMER_DELAY_SEC=3000), e=0)
        await node.dispatched()
    write_hashes(tmp_path, *[""] * 20)
    read, sizes = TimerService._read, [0]

    async def counted(self: TimerService, *place: Any) -> Any:
        found = await read(self, *place)
        sizes.append(sum(len(record.body) for record in found.values() if record is not None))
        return found

    monkeypatch.setattr(TimerService, "_read", counted)
    async with open_node(tmp_path, store_changes=changes) as node:
        await trio.sleep(1)
        assert node.broker.timers.statistics().pending_count == 20
    assert 0 < max(sizes) <= BATCH_BYTES_MAX + len(LARGE_BODY)


async def test_slave_of_a_rocketmq_master_deletes_what_that_has_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its delay offsets have no progress of timers: every segment with a timer message was kept for ever."""
    async with open_node(tmp_path / "m", store_changes=EXPIRED) as master:
        await master.send(b"x", i=properties(TIMER_DELAY_SEC=5), e=0)
        await fill_segments(master)
        await master.arrivals()
        shutil.copytree(tmp_path / "m", tmp_path / "s")
        (tmp_path / "s" / "config" / "delayOffset.json").unlink(missing_ok=True)
        later = WallClock(WallClock()() + 30 * 86_400_000)
        async with open_node(
            tmp_path / "s", store_changes=EXPIRED, role=BrokerRole.SLAVE, wall_clock_ms=later
        ) as slave:
            broker = slave.broker
            sync = SlaveSync(master.client, lambda: "m", broker.tables, broker.options)
            invoke, check_point = master.client.invoke, TimerCheckPoint(WallClock()(), 0)

            async def as_rocketmq(address: str, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
                if command.code == RequestCode.GET_ALL_DELAY_OFFSET:
                    return command.reply(0, body=b'{"offsetTable":{3:7}}')
                if command.code == RequestCode.GET_TIMER_CHECK_POINT:
                    return command.reply(0, body=check_point.encode())
                return await invoke(address, command, timeout_s)

            monkeypatch.setattr(master.client, "invoke", as_rocketmq)
            for seen, deleted in ((0, False), (1, True)):
                check_point = TimerCheckPoint(WallClock()() + 60_000, seen)
                assert await sync.sync_once()
                assert bool(await slave.store.retention.clean(at_any_hour=True)) == deleted
