"""Delivers timer messages: moves them from rmq_sys_wheel_timer to their own topics, in the order of their due times.

A service of the master. It builds an index by due time (timer_index.py) from the consume queue of rmq_sys_wheel_timer,
sleeps until the first message is due, and puts due messages in batches. RocketMQ keeps a timer wheel and a timer log on
disk; here everything is derived from the commitlog. The only state is the progress: three numbers in the table of the
delay levels' offsets, which is saved and replicated (delay_offsets.py).

    FIRST      queue offset; every message before it was delivered or rolled
    SEEN       queue offset up to which the queue was indexed when TIME was set
    TIME       ms since the epoch; every message before SEEN that is due by then was delivered

A message at or after FIRST is pending if it is at or after SEEN, or due after TIME. After a crash or a change of
master, the last deliveries may be repeated; none is lost.

A start or a change of master reads 20 bytes per message from FIRST on, and yields to other tasks between batches.
Entries written by RocketMQ lack the due time, so their messages are read, too.

Rolling: before retention deletes a segment, `release` stores its pending messages in rmq_sys_wheel_timer again and
flushes them; RocketMQ rolls all messages every two days. A segment whose messages can't be rolled is kept. A slave
keeps a segment until its master has rolled or delivered the messages in it.

A recall (a message with TIMER_DEL_UNIQKEY) has the topic and the due time of the message that it recalls; the index
returns it before that message. Due times refer to the wall clock, which is checked at least once a second. Sources:
TimerMessageStore, RecallMessageProcessor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import trio

from ha.broker.batch_reader import BATCH_BYTES_MAX, BATCH_COUNT_MAX, UNREADABLE_S_MAX, BatchReader, LossDetector, split
from ha.broker.core import BrokerCore
from ha.broker.detour import message_of, parse_int, real_message, with_notes
from ha.broker.limited_log import LimitedLog
from ha.broker.put_request import PutRequest
from ha.broker.queue_read import ReadStatus
from ha.broker.queue_times import bounds
from ha.broker.stored_properties import without
from ha.broker.timer_index import TimerIndex
from ha.broker.timer_postponed import PostponedTimers
from ha.errors import RemoteProtocolError
from ha.protocol.properties import (
    CRC32,
    REAL_TOPIC,
    TIMER_DELETE_UNIQUE_KEY,
    TIMER_DEQUEUE_MS,
    TIMER_ENQUEUE_MS,
    TIMER_ROLL_TIMES,
    UNIQ_KEY,
)
from ha.protocol.record import TIMER_CODE_MIN, MessageRecord, decode_record, timer_code
from ha.protocol.topic_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from ha.store.files import is_passing

if TYPE_CHECKING:
    from ha.store.consume_queue import ConsumeQueue, QueueEntry
    from ha.store.dispatch import Arrival

logger = logging.getLogger(__name__)

FIRST, SEEN, TIME = -3, -2, -1
"""Keys of the progress in the table of delay levels, whose own keys are positive."""

CHECK_INTERVAL_S = 1.0
"""Interval for checking the wall clock, which may be set, and for retrying messages that can't be read."""
PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 2.0
"""Minimum and maximum back-off between attempts to put messages."""
HORIZONS_MS = {"1h": 3_600_000, "24h": 86_400_000, "7d": 7 * 86_400_000}
"""Times until due, in ms, up to which pending messages are counted."""
RECALL_WAIT_S = 3.0
"""Maximum wait until a stored recall is in the index."""
READ_COUNT_MAX = 1024
"""Maximum number of queue entries read between two checkpoints."""


class TimerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start. Pending messages, which include recalls, are known on the master only.

    next_due_ms: due time of the first pending message, or a lower bound of it, in ms since the epoch; None if no
    message is pending.
    dropped_count: messages that are gone, damaged or invalid.
    """

    pending_count: int
    next_due_ms: int | None
    due_counts: dict[str, int]
    """Time until due (a value of `HORIZONS_MS`, or "later") -> number of pending messages, exact to the hour"""
    delivered_count: int
    recalled_count: int
    dropped_count: int


class _Delivery(PutRequest, kw_only=True, gc=False):
    """The put of one message. `queue_offset`: the timer message's offset in the timer queue; `code`: its timer code."""

    queue_offset: int
    code: int


class _AwaitedRecall(msgspec.Struct, gc=False):
    """A stored recall, due at `due_ms`, whose answer waits until it is in the index.

    is_in_time: whether it was indexed before its message was taken for delivery; None until it is indexed.
    """

    due_ms: int
    indexed: trio.Event
    is_in_time: bool | None = None


class TimerService:
    """Delivers timer messages. Run `serve` while the broker is a master; the store calls `on_arrivals`."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._puts = core.puts
        self._progress = core.tables.delay_offsets
        self._standing = core.standing
        self._wall_clock_ms = core.world.wall_clock_ms
        self._reader = BatchReader(core.store)
        self._index_losses, self._release_losses = LossDetector(self._reader), LossDetector(self._reader)
        self._log = LimitedLog(logger)
        self._working = trio.Lock()
        """Serializes indexing, delivery and rolling"""
        self._awaited: dict[int, _AwaitedRecall] = {}
        """Queue offset -> the recall stored there"""
        self._delivered_count = self._recalled_count = self._dropped_count = 0
        self._reset()

    def _reset(self) -> None:
        self._arrived = trio.Event()
        self._index = TimerIndex()
        self._indexed_to = self._progress.get(FIRST)
        """Queue offset of the first message that is not indexed yet"""
        self._is_blocked = False
        """Whether the message at `_indexed_to` can't be read now"""
        self._postponed = PostponedTimers()
        self._delivering: dict[int, int] = {}
        """Queue offset of each message that is being delivered -> timer code"""
        self._taken_ms = 0
        """The latest due time of the messages taken from the index for delivery"""
        self._searched_at = 0
        """Value of `_indexed_to` when FIRST was last determined"""
        self._recalls: dict[tuple[str, str], int] = {}
        """Topic and unique key of a recalled message -> its due time (ms)"""
        self._rolled_recalls: dict[tuple[str, str], int] = {}
        """The same for recalls that were rolled, until their copies, which are before `_rolled_to`, are indexed"""
        self._rolled_to = 0
        """Queue offset after the copy of the last recall that was rolled"""

    def statistics(self) -> TimerStatistics:
        """Returns a snapshot."""
        now_ms = self._wall_clock_ms()
        counts = self._index.due_counts([now_ms + horizon_ms for horizon_ms in HORIZONS_MS.values()])
        due_count = self._due_count()
        counts[0] += due_count
        return TimerStatistics(
            pending_count=len(self._index) + due_count,
            next_due_ms=self._next_due_ms(),
            due_counts=dict(zip((*HORIZONS_MS, "later"), counts, strict=True)),
            delivered_count=self._delivered_count,
            recalled_count=self._recalled_count,
            dropped_count=self._dropped_count,
        )

    def _due_count(self) -> int:
        """Returns the number of messages that are due but not delivered yet."""
        return len(self._postponed) + sum(at not in self._postponed for at in self._delivering)

    def _next_due_ms(self) -> int | None:
        """Returns the due time of the first pending message, or a lower bound of it, in ms since the epoch; None if no
        message is pending."""
        due_ms = [*self._postponed.due_ms, *(code >> 1 for code in self._delivering.values())]
        if self._index.next_due_ms is not None:
            due_ms.append(self._index.next_due_ms)
        return min(due_ms, default=None)

    def on_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Wakes the service if a timer message arrived. Called by the store once per dispatched batch; never blocks."""
        if any(arrival.topic == TIMER_TOPIC for arrival in arrivals):
            self._arrived.set()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Delivers due messages until cancelled."""
        task_status.started()
        self._reset()
        pause_s = PAUSE_S_MIN
        try:
            while True:
                self._arrived = trio.Event()
                try:
                    async with self._working:
                        await self._index_new()
                        now_ms = self._wall_clock_ms()
                        is_advancing = self._index.advance(now_ms)
                        for code, queue_offset in self._postponed.take_waited():
                            self._index.add(code, queue_offset)
                        retried = self._postponed.due_for_retry(BATCH_COUNT_MAX, CHECK_INTERVAL_S)
                        due = [*retried, *self._index.pop_due(now_ms, BATCH_COUNT_MAX)]
                        is_delivered = not due or await self._deliver(due, now_ms)
                except OSError as error:
                    if not is_passing(error):
                        raise
                    self._log.write("timer.read_failed reason=%r", str(error))
                    is_delivered = False
                if not is_delivered:
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, PAUSE_S_MAX)
                    continue
                pause_s = PAUSE_S_MIN
                if is_advancing:
                    await trio.lowlevel.checkpoint()
                elif not due:
                    with trio.move_on_after(self._wait_s(now_ms)):
                        await self._arrived.wait()
        finally:
            self._reset()

    def _wait_s(self, now_ms: int) -> float:
        """Returns the maximum time in seconds to wait for new messages before the next step; inf without a limit."""
        next_due_ms = self._index.next_due_ms
        if next_due_ms is not None:
            return max(0.0, min(CHECK_INTERVAL_S, (next_due_ms - now_ms) / 1000))
        return CHECK_INTERVAL_S if self._postponed or self._is_blocked else math.inf

    # ---- the index

    async def _index_new(self) -> None:
        """Adds new messages of the queue to the index."""
        self._is_blocked = False
        queue = self._store.queues.get(TIMER_TOPIC, 0)
        # A new master may know progress for messages that it has not dispatched yet.
        end = max(bounds(queue)[1], self._store.log.next_queue_offset(TIMER_TOPIC, 0))
        for key in (FIRST, SEEN):
            if self._progress.get(key) > end:  # the end of the log was lost
                logger.error("timer.offset_corrected from=%d to=%d", self._progress.get(key), end)
                self._progress.set(key, end)
        self._indexed_to = min(self._indexed_to, end)
        if queue is None:
            return
        self._indexed_to = max(self._indexed_to, self._progress.get(FIRST), queue.min_offset)
        while self._indexed_to < queue.max_offset:
            entries = queue.read_readable(self._indexed_to, READ_COUNT_MAX)
            codes = await self._codes(queue, self._indexed_to, entries, self._index_losses)
            for queue_offset, code in enumerate(codes, self._indexed_to):
                if code is None:
                    self._drop(queue_offset, "it is gone, damaged, or has no due time")
                elif self._is_pending(queue_offset, code):
                    self._index.add(code, queue_offset)
            self._indexed_to += len(codes)
            if self._indexed_to >= self._rolled_to:
                self._rolled_recalls.clear()
            self._answer_recalls()
            if len(codes) < len(entries) or not entries:
                self._is_blocked = True
                return
            await trio.lowlevel.checkpoint()

    async def await_recall(self, queue_offset: int, due_ms: int) -> bool | None:
        """Waits at most `RECALL_WAIT_S` until the recall stored at `queue_offset` of the timer queue is in the index.

        Returns True if it was indexed before its message, due at `due_ms`, was taken for delivery, False if later, and
        None if it is not indexed in time.
        """
        recall = self._awaited[queue_offset] = _AwaitedRecall(due_ms, trio.Event())
        if queue_offset < self._indexed_to:
            self._answer_recalls()
        with trio.move_on_after(RECALL_WAIT_S):
            await recall.indexed.wait()
        self._awaited.pop(queue_offset, None)
        return recall.is_in_time

    def _answer_recalls(self) -> None:
        for queue_offset in [each for each in self._awaited if each < self._indexed_to]:
            recall = self._awaited.pop(queue_offset)
            recall.is_in_time = recall.due_ms > max(self._taken_ms, self._progress.get(TIME))
            recall.indexed.set()

    def _is_pending(self, queue_offset: int, code: int) -> bool:
        """Returns whether a message at or after FIRST still has to be delivered according to the progress."""
        seen, time_ms = self._progress.get(SEEN), self._progress.get(TIME)
        if self._standing.is_slave and self._progress.rocketmq_timers is not None:
            seen, time_ms = self._progress.rocketmq_timers
        return queue_offset >= seen or code >> 1 > time_ms

    async def _codes(
        self, queue: ConsumeQueue, first: int, entries: Sequence[QueueEntry], losses: LossDetector | None
    ) -> list[int | None]:
        """Returns the timer codes of `entries`, which begin at queue offset `first`; None for one that can't be
        determined because its message is lost, damaged or has no due time.

        Ends before the first message that has to be read and can't be read now. `losses`: of this caller, as others may
        read elsewhere in the queue; None for a caller that gives up no message.
        """
        codes: list[int | None] = [entry.tags_code for entry in entries]
        unknown = [
            queue_offset for queue_offset, code in enumerate(codes, first) if code is None or code < TIMER_CODE_MIN
        ]
        found: dict[int, int | None] = {}
        left = unknown
        while left:
            count = _batch_count(queue, left)
            for queue_offset, record in (await self._read(queue, left[:count])).items():
                found[queue_offset] = None if record is None else timer_code(record.properties, 0) or None
            left = left[count:]
        for queue_offset in unknown:
            if queue_offset not in found and not (losses is not None and losses.is_lost(queue_offset)):
                return codes[: queue_offset - first]
            codes[queue_offset - first] = found.get(queue_offset)
        return codes

    # ---- delivery

    async def _deliver(self, due: Sequence[tuple[int, int]], now_ms: int) -> bool:
        """Delivers due messages in their order and sets the progress. Returns False if some can't be put now; these
        stay due. Raises OSError if the queue can't be read; then all of them stay due."""
        queue = self._store.queues.get(TIMER_TOPIC, 0)
        assert queue is not None
        count = 0
        try:
            count = _batch_count(queue, [queue_offset for _, queue_offset in due])
        finally:
            for code, queue_offset in due[count:]:
                if queue_offset not in self._postponed:
                    self._index.add(code, queue_offset)
        due = due[:count]
        self._taken_ms = max(self._taken_ms, due[-1][0] >> 1)
        self._delivering = {queue_offset: code for code, queue_offset in due}
        records = await self._read(queue, [queue_offset for _, queue_offset in due])
        for code, queue_offset in due:
            since = self._postponed.take(queue_offset, trio.current_time())
            if queue_offset not in records:
                self._postpone(code, queue_offset, since)
        unread_recalls = self._postponed.recalls
        deliveries: list[_Delivery] = []
        for code, queue_offset in due:
            if queue_offset not in records:
                continue
            record = records[queue_offset]
            if code % 2 and code - 1 in unread_recalls:  # one of them may recall this message
                self._postponed.await_recall(code, queue_offset)
            elif record is None:
                self._drop(queue_offset, "it is no longer in the log")
            else:
                deliveries += self._delivery(record, code, now_ms)
        await self._puts.settle(deliveries)
        failed = []
        for delivery in deliveries:
            if delivery.status.is_stored:
                self._delivered_count += 1
            elif delivery.is_hopeless:
                self._drop(delivery.queue_offset, delivery.remark)
            else:
                failed.append(delivery)
                self._index.add(delivery.code, delivery.queue_offset)
        if failed:
            self._log.write("timer.put_failed offset=%d reason=%r", failed[0].queue_offset, failed[0].remark)
        self._delivering = {}
        self._set_progress()
        return not failed

    def _delivery(self, record: MessageRecord, code: int, now_ms: int) -> Iterator[_Delivery]:
        """Yields the put of a message, or nothing if the message has been recalled, is a recall, or is invalid."""
        properties = record.property_map()
        topic, due_ms = properties.get(REAL_TOPIC, ""), code >> 1
        recalled = properties.get(TIMER_DELETE_UNIQUE_KEY)
        if recalled is not None:
            self._recalls[topic, recalled] = due_ms
            return
        key = topic, properties.get(UNIQ_KEY, "")
        if due_ms in (self._recalls.get(key), self._rolled_recalls.get(key)):
            self._recalled_count += 1
            return
        try:
            message = real_message(record)
            if message.topic in (SCHEDULE_TOPIC, HALF_TOPIC, TIMER_TOPIC) or message.queue_id < 0:
                raise ValueError(f"it belongs in {message.topic}, queue {message.queue_id}")
        except ValueError as error:
            self._drop(record.queue_offset, str(error))
            return
        times = {TIMER_ENQUEUE_MS: str(record.store_timestamp_ms), TIMER_DEQUEUE_MS: str(now_ms)}
        message.properties = with_notes(message.properties, times)
        yield _Delivery(messages=(message,), waits=False, queue_offset=record.queue_offset, code=code)

    def _set_progress(self) -> None:
        """Sets SEEN, and TIME to the latest due time of the messages taken from the index, but below the due time of
        the first pending message.

        Does nothing if that would move TIME back. Also advances FIRST, but not at each call.
        """
        next_due_ms = self._next_due_ms()
        time_ms = self._taken_ms if next_due_ms is None else min(self._taken_ms, next_due_ms - 1)
        if time_ms < self._progress.get(TIME):
            return
        self._progress.set(SEEN, self._indexed_to)
        self._progress.set(TIME, time_ms)
        if self._recalls:
            self._recalls = {key: due_ms for key, due_ms in self._recalls.items() if due_ms > time_ms}
        if next_due_ms is None or self._indexed_to > self._searched_at + len(self._index) + READ_COUNT_MAX:
            self._searched_at = self._indexed_to  # a linear search: repeated after as many arrivals as pending messages
            lowest = self._index.lowest_offset
            offsets = [*self._postponed.offsets, self._indexed_to if lowest is None else lowest]
            self._progress.set(FIRST, max(self._progress.get(FIRST), min(offsets)))

    # ---- rolling

    async def release(self, end: int) -> bool:
        """Rolls pending messages before physical offset `end` (bytes), so that retention can delete their records.

        Returns False if one may still be pending: it can't be read or rolled now, or this is a slave.
        """
        async with self._working:
            queue = self._store.queues.get(TIMER_TOPIC, 0)
            if queue is None:
                return True
            first = max(self._progress.get(FIRST), queue.min_offset)
            while entries := [
                entry for entry in queue.read_readable(first, READ_COUNT_MAX) if entry.physical_offset < end
            ]:
                codes = await self._codes(queue, first, entries, self._release_losses)
                pending = [
                    at for at, code in enumerate(codes, first) if code is not None and self._is_pending(at, code)
                ]
                released = codes_end = first + len(codes)
                left = pending
                while left and not self._standing.is_slave:
                    count = _batch_count(queue, left)
                    batch, left = left[:count], left[count:]
                    batch_end = left[0] if left else codes_end
                    released = await self._roll(queue, batch, batch_end)
                    if released < batch_end:
                        break
                if pending and self._standing.is_slave:  # the role may have changed in the loop
                    released = pending[0]
                if not self._standing.is_slave:
                    self._progress.set(FIRST, released)
                    self._index.drop_before(released)
                    self._postponed.drop_before(released)
                if released < first + len(entries):
                    self._log.write("timer.segment_kept offset=%d reason=%r", released, "it has pending messages")
                    return False
                first = released
                await trio.lowlevel.checkpoint()
            return True

    async def _roll(self, queue: ConsumeQueue, queue_offsets: Sequence[int], end: int) -> int:
        """Stores pending messages, which lie before queue offset `end`, in the timer topic again.

        Returns the queue offset of the first one that could not be stored, or `end`. Those after it are not stored
        either, as they will be rolled with it later.
        """
        records = await self._read(queue, queue_offsets)
        for at in queue_offsets:
            if at not in records:
                end = at
                break
            record = records[at]
            if record is None:
                continue
            put = self._rolled(record)
            await self._puts.settle([put])
            if put.is_hopeless:
                self._drop(at, put.remark)
            elif not put.status.is_stored:
                end = at
                break
            else:
                self._note_rolled(record)
        return end

    def _note_rolled(self, record: MessageRecord) -> None:
        """Keeps a recall in force until its copy is indexed: its message may become due before."""
        properties = record.property_map()
        recalled = properties.get(TIMER_DELETE_UNIQUE_KEY)
        if recalled is not None:
            self._rolled_to = self._store.log.next_queue_offset(TIMER_TOPIC, 0)
            self._rolled_recalls[properties.get(REAL_TOPIC, ""), recalled] = timer_code(record.properties, 0) >> 1

    def _rolled(self, record: MessageRecord) -> PutRequest:
        try:
            times = parse_int(record.property_map().get(TIMER_ROLL_TIMES, "0"))
        except ValueError:  # a producer may set it to anything
            times = 0
        raw = without(record.properties, TIMER_ROLL_TIMES, CRC32)  # the store computes a new CRC
        raw = with_notes(raw, {TIMER_ROLL_TIMES: str(times + 1)})
        message = message_of(record, TIMER_TOPIC, 0, raw)
        return PutRequest(messages=(message,), waits=False, frees_space=True)

    # ---- counting

    async def count_topics(self, read_count_max: int) -> dict[str, int]:
        """Returns the number of pending messages by topic, recalls included.

        Reads at most about `read_count_max` messages, in groups that are spread evenly over the queue. If more are
        pending, the counts are estimates. Raises OSError.
        """
        queue = self._store.queues.get(TIMER_TOPIC, 0)
        if queue is None:
            return {}
        first, end = max(self._progress.get(FIRST), queue.min_offset), self._indexed_to
        step = BATCH_COUNT_MAX * max(1, math.ceil((end - first) / read_count_max))
        counts: dict[str, int] = {}
        for at in range(first, end, step):
            group = range(at, min(at + BATCH_COUNT_MAX, end))
            codes = await self._codes(queue, at, queue.read_readable(at, len(group)), None)
            pending = [each for each, code in zip(group, codes, strict=False) if code and self._is_pending(each, code)]
            weight = min(step, end - at) / len(group)
            while pending:
                count = _batch_count(queue, pending)
                for record in (await self._read(queue, pending[:count])).values():
                    topic = None if record is None else record.property_map().get(REAL_TOPIC)
                    if topic is not None:
                        counts[topic] = counts.get(topic, 0) + round(weight)
                pending = pending[count:]
            await trio.lowlevel.checkpoint()
        return counts

    def figures(self) -> dict[str, str]:
        """Returns the number of pending messages, the number of those not indexed yet, and by how many seconds the
        first pending one is overdue, for GET_BROKER_RUNTIME_INFO (28)."""
        queue, next_due_ms = self._store.queues.get(TIMER_TOPIC, 0), self._next_due_ms()
        overdue_ms = 0 if next_due_ms is None else max(0, self._wall_clock_ms() - next_due_ms)
        return {
            "timerCongestNum": str(len(self._index) + self._due_count()),
            "timerOffsetBehind": str(0 if queue is None else max(0, queue.max_offset - self._indexed_to)),
            "timerReadBehind": str(overdue_ms // 1000),
        }

    # ---- reading

    async def _read(self, queue: ConsumeQueue, queue_offsets: Iterable[int]) -> dict[int, MessageRecord | None]:
        """Reads messages and returns them by queue offset, None for one that is gone. Omits those that can't be read
        now."""
        found: dict[int, MessageRecord | None] = {}
        for start, end in _runs(queue_offsets):
            at = start
            while at < end:
                try:
                    read = await self._reader.read(queue, at, end - at)
                except OSError as error:
                    self._log.write("timer.unreadable offset=%d reason=%r", at, str(error))
                    at += 1
                    continue
                if read.status is ReadStatus.FOUND:
                    for raw in split(read.body):
                        try:
                            record = decode_record(raw)
                        except RemoteProtocolError as error:
                            self._log.write("timer.unreadable offset=%d reason=%r", at, str(error))
                        else:
                            found[record.queue_offset] = record
                elif read.status is ReadStatus.MESSAGE_WAS_REMOVING:
                    found.update(dict.fromkeys(range(at, min(read.next_offset, end))))
                else:
                    self._log.write("timer.unreadable offset=%d reason=%r", at, read.status.value)
                at = max(read.next_offset, at + 1)
        return found

    def _postpone(self, code: int, queue_offset: int, since: float) -> None:
        """Keeps a due message that can't be read now for another attempt, or drops it if attempts have failed for
        `UNREADABLE_S_MAX`.

        `since`: time (Trio's clock) from which failed attempts count; `BatchReader.lost_since` says when they don't,
        for example while the log has damage that may still be repaired.
        """
        since = self._reader.lost_since(since)
        if trio.current_time() - since < UNREADABLE_S_MAX:
            self._postponed.add(code, queue_offset, since)
        else:
            self._drop(queue_offset, "its record can't be read")

    def _drop(self, queue_offset: int, reason: str) -> None:
        self._dropped_count += 1
        self._log.write("timer.dropped offset=%d reason=%r", queue_offset, reason)


def _batch_count(queue: ConsumeQueue, queue_offsets: Sequence[int]) -> int:
    """Returns how many of these messages, from the first on, fit into BATCH_BYTES_MAX; at least one if there are
    any."""
    sizes: dict[int, int] = {}
    for start, end in _runs(queue_offsets):
        sizes.update((at, entry.size) for at, entry in enumerate(queue.read_readable(start, end - start), start))
    size = 0
    for count, queue_offset in enumerate(queue_offsets):
        size += sizes.get(queue_offset, 0)
        if count and size > BATCH_BYTES_MAX:
            return count
    return len(queue_offsets)


def _runs(queue_offsets: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields the runs of consecutive offsets, ascending, each as (first, last + 1)."""
    start = end = -1
    for queue_offset in sorted(queue_offsets):
        if queue_offset != end:
            if start >= 0:
                yield start, end
            start = queue_offset
        end = queue_offset + 1
    if start >= 0:
        yield start, end
