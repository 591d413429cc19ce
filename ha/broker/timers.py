"""Delivery of timer messages: from rmq_sys_wheel_timer to their own topics, when they are due, in the order of time.

A master's service. It reads the consume queue of rmq_sys_wheel_timer into an index by due time (timer_index.py), sleeps
until the first message is due, and puts all that are due in batches. RocketMQ keeps a wheel and a log of its own on the
disk; here the log is the only source, and what is kept besides is how far delivery is, three numbers that are saved
and replicated with those of the delay levels (delay_offsets.py):

    FIRST      queue offset; every message before it is delivered
    SEEN       queue offset up to which the queue had been read when TIME was set
    TIME       ms since the epoch; every message before SEEN that is due until then is delivered

So a message is pending if it is not before FIRST, and is at or behind SEEN or due after TIME. Copies are put once more
only after a crash, those of the last moments; none is lost by one.

A start, and a change of master, reads 20 bytes for each message from FIRST on, in batches between which other tasks
run. Entries that RocketMQ wrote lack the due time: their messages are read as well.

Before retention deletes a segment, the pending messages in it are put into rmq_sys_wheel_timer again (`release`), as
RocketMQ does every two days (rolling); what can't be put keeps its segment, on a full disk, too. A slave keeps segments
with pending messages until its master has put them again.

A recall (a message with TIMER_DEL_UNIQKEY) is due at the same time as what it recalls, and comes before it in the
index. Due times are those of the wall clock, which is looked at every second.
Sources: TimerMessageStore, RecallMessageProcessor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import trio

from ha.broker.batch_reader import BATCH_COUNT_MAX, UNREADABLE_S_MAX, BatchReader, split
from ha.broker.core import BrokerCore
from ha.broker.deliveries import PAUSE_S_MIN, Delivery, put_all
from ha.broker.detour import message_of, parse_int, real_message
from ha.broker.limited_log import LimitedLog
from ha.broker.queue_read import ReadStatus
from ha.broker.timer_index import TimerIndex
from ha.errors import RemoteProtocolError
from ha.protocol.properties import (
    CRC32,
    TIMER_DELETE_UNIQUE_KEY,
    TIMER_DEQUEUE_MS,
    TIMER_ENQUEUE_MS,
    TIMER_ROLL_TIMES,
    UNIQ_KEY,
    encode_properties,
)
from ha.protocol.record import TIMER_CODE_MIN, MessageRecord, decode_record, timer_code
from ha.protocol.topic_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

if TYPE_CHECKING:
    from ha.store.consume_queue import ConsumeQueue
    from ha.store.dispatch import Arrival

logger = logging.getLogger(__name__)

FIRST, SEEN, TIME = -3, -2, -1
"""Keys of the progress in the table of delay levels, which are positive."""

LOOK_EVERY_S = 1.0
"""The wall clock may be set while a message is waited for."""
READ_COUNT_MAX = 1024
"""Queue entries that are read between two checkpoints."""


class TimerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start; what is pending, which only a master knows."""

    pending_count: int
    next_due_ms: int | None
    delivered_count: int
    recalled_count: int
    dropped_count: int


class TimerService:
    """Delivers. `serve` while the broker is a master; `on_arrivals` is for the store's subscription."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._puts = core.puts
        self._progress = core.tables.delay_offsets
        self._standing = core.standing
        self._wall_clock_ms = core.world.wall_clock_ms
        self._reader = BatchReader(core.store)
        self._log = LimitedLog(logger)
        self._arrived = trio.Event()
        self._index = TimerIndex()
        self._indexed_to = 0
        """Queue offset"""
        self._unreadable: dict[int, tuple[int, float]] = {}
        """Queue offset -> timer code, and the trio time since which the message can't be read"""
        self._retry_at = -math.inf
        """When those are tried again, by trio's clock"""
        self._popped_ms = 0
        """The latest due time of what was taken from the index"""
        self._recalls: dict[str, int] = {}
        """Unique key of a recalled message -> when it is due (ms)"""
        self._changing = trio.Lock()
        """Held while messages are delivered or rolled"""
        self._rolled_count = 0
        """Messages that were rolled and are still in the index"""
        self._delivered_count = self._recalled_count = self._dropped_count = 0

    def __len__(self) -> int:
        return len(self._index) - self._rolled_count + len(self._unreadable)

    def statistics(self) -> TimerStatistics:
        """Returns a snapshot."""
        return TimerStatistics(
            pending_count=len(self),
            next_due_ms=self._index.next_due_ms,
            delivered_count=self._delivered_count,
            recalled_count=self._recalled_count,
            dropped_count=self._dropped_count,
        )

    def on_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Wakes the service if a timer message came. Called by the store once per dispatched batch; never blocks."""
        if any(arrival.topic == TIMER_TOPIC for arrival in arrivals):
            self._arrived.set()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Delivers until cancelled."""
        task_status.started()
        self._index, self._indexed_to = TimerIndex(), self._progress.get(FIRST)
        self._unreadable, self._recalls, self._popped_ms, self._rolled_count = {}, {}, 0, 0
        try:
            while True:
                self._arrived = trio.Event()
                await self._index_new()
                async with self._changing:
                    now_ms = self._wall_clock_ms()
                    due = [*self._retried(), *self._index.pop_due(now_ms, BATCH_COUNT_MAX)]
                    if due:
                        await self._deliver(due, now_ms)
                        continue
                next_due_ms = self._index.next_due_ms
                wait_s = LOOK_EVERY_S if next_due_ms is None else min(LOOK_EVERY_S, (next_due_ms - now_ms) / 1000)
                with trio.move_on_after(wait_s if len(self) else math.inf):
                    await self._arrived.wait()
        finally:
            self._index = TimerIndex()

    # ---- the index

    async def _index_new(self) -> None:
        """Adds to the index what the queue has and the index has not."""
        queue = self._store.queues.get(TIMER_TOPIC, 0)
        if queue is None:
            return
        if self._indexed_to > queue.max_offset:
            # The end of the log was lost, or a new master's queue is not all dispatched yet.
            end = max(queue.max_offset, self._store.log.next_queue_offset(TIMER_TOPIC, 0))
            if self._indexed_to > end:
                logger.error("timer.offset_corrected from=%d to=%d", self._indexed_to, end)
                self._indexed_to = end
                for key in (FIRST, SEEN):
                    self._progress.set(key, min(self._progress.get(key), end))
            return
        self._indexed_to = max(self._indexed_to, queue.min_offset)
        seen, time_ms = self._progress.get(SEEN), self._progress.get(TIME)
        while self._indexed_to < queue.max_offset:
            entries = queue.read(self._indexed_to, READ_COUNT_MAX)
            if not entries:
                return
            codes: Sequence[int] = [entry.tags_code for entry in entries]
            if any(code < TIMER_CODE_MIN for code in codes):
                codes = await self._codes_of_records(queue, len(entries))
            for queue_offset, code in enumerate(codes, self._indexed_to):
                if code and (queue_offset >= seen or code >> 1 > time_ms):
                    self._index.add(code, queue_offset)
            self._indexed_to += len(codes)
            await trio.lowlevel.checkpoint()

    async def _codes_of_records(self, queue: ConsumeQueue, count: int) -> list[int]:
        """Returns the timer codes of the next `count` messages, 0 for one that has none or is gone."""
        found: dict[int, int] = {}
        wanted = range(self._indexed_to, self._indexed_to + count)
        for queue_offset, record in (await self._read(queue, wanted)).items():
            if record is not None:
                found[queue_offset] = timer_code(record.properties, 0)
                if not found[queue_offset]:
                    self._drop(queue_offset, "it has no due time")
        return [found.get(queue_offset, 0) for queue_offset in wanted]

    # ---- delivery

    async def _deliver(self, due: Sequence[tuple[int, int]], now_ms: int) -> None:
        """Delivers what is due, in its order, and sets the progress."""
        queue = self._store.queues.get(TIMER_TOPIC, 0)
        assert queue is not None
        first = self._progress.get(FIRST)
        records = await self._read(queue, [queue_offset for _, queue_offset in due if queue_offset >= first])
        deliveries: list[Delivery] = []
        for code, queue_offset in due:
            if queue_offset < first:
                self._rolled_count -= 1
                continue
            if queue_offset not in records:
                self._put_off(code, queue_offset)
                continue
            self._unreadable.pop(queue_offset, None)
            record = records[queue_offset]
            if record is not None:
                deliveries += self._delivery(record, code >> 1, now_ms)
            else:
                self._drop(queue_offset, "it is no longer in the log")
        self._delivered_count += await put_all(
            self._puts,
            deliveries,
            on_retry=lambda each: self._log.write("timer.not_put offset=%d reason=%r", each.queue_offset, each.remark),
            on_dropped=lambda each: self._drop(each.queue_offset, each.remark),
        )
        self._popped_ms = max(self._popped_ms, due[-1][0] >> 1)
        self._set_progress()

    def _delivery(self, record: MessageRecord, due_ms: int, now_ms: int) -> Iterator[Delivery]:
        properties = record.property_map()
        recalled = properties.get(TIMER_DELETE_UNIQUE_KEY)
        if recalled is not None:
            self._recalls[recalled] = due_ms
            return
        unique_key = properties.get(UNIQ_KEY)
        if unique_key is not None and self._recalls.get(unique_key) == due_ms:
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
        message.properties = bytes(message.properties) + encode_properties(times)
        yield Delivery(messages=(message,), waits=False, queue_offset=record.queue_offset)

    def _set_progress(self) -> None:
        """Sets TIME to before the first message that is still pending, or else to the last one taken from the index."""
        pending = [code >> 1 for code, _ in self._unreadable.values()]
        next_due_ms = self._index.next_due_ms
        if next_due_ms is not None:
            pending.append(next_due_ms)
        time_ms = min([self._popped_ms, *(due_ms - 1 for due_ms in pending)])
        if time_ms < self._progress.get(TIME):
            return
        self._progress.set(SEEN, self._indexed_to)
        self._progress.set(TIME, time_ms)
        self._recalls = {key: due_ms for key, due_ms in self._recalls.items() if due_ms > time_ms}
        # Finding the first pending message takes a look at all, so it is done once for many that came meanwhile.
        if not pending:
            self._progress.set(FIRST, self._indexed_to)
        elif self._indexed_to - self._progress.get(FIRST) > 2 * len(self) + READ_COUNT_MAX:
            self._progress.set(FIRST, min([self._index.lowest_offset(self._indexed_to), *self._unreadable]))

    # ---- rolling

    async def release(self, end: int) -> bool:
        """For retention: whether no message before physical offset `end` is pending; a master rolls those that are."""
        async with self._changing:
            queue = self._store.queues.get(TIMER_TOPIC, 0)
            while queue is not None:
                first = max(self._progress.get(FIRST), queue.min_offset)
                entries = [entry for entry in queue.read(first, READ_COUNT_MAX) if entry.physical_offset < end]
                if not entries:
                    break
                seen, time_ms = self._progress.get(SEEN), self._progress.get(TIME)
                pending = [
                    queue_offset
                    for queue_offset, entry in enumerate(entries, first)
                    if queue_offset >= seen or entry.tags_code >> 1 > time_ms or entry.tags_code < TIMER_CODE_MIN
                ]
                if pending and (self._standing.is_slave or not await self._roll(queue, pending)):
                    self._log.write("timer.segment_kept offset=%d reason=%r", pending[0], "a message in it is pending")
                    return False
                if not self._standing.is_slave:
                    self._progress.set(FIRST, first + len(entries))
                await trio.lowlevel.checkpoint()
            if self._rolled_count > len(self):
                self._index.drop_before(self._progress.get(FIRST))
                self._rolled_count = 0
            return True

    async def _roll(self, queue: ConsumeQueue, queue_offsets: Sequence[int]) -> bool:
        """Puts pending messages into the timer topic again; False if not all could be."""
        records = await self._read(queue, queue_offsets)
        deliveries = []
        for queue_offset in queue_offsets:
            record = records.get(queue_offset)
            if record is not None:
                properties = record.property_map()
                properties[TIMER_ROLL_TIMES] = str(parse_int(properties.get(TIMER_ROLL_TIMES, "0")) + 1)
                properties.pop(CRC32, None)
                message = message_of(record, TIMER_TOPIC, 0, encode_properties(properties))
                deliveries.append(Delivery(messages=(message,), waits=False, queue_offset=queue_offset))
        await self._puts.settle(deliveries)
        if len(records) < len(queue_offsets) or not all(each.status.is_stored for each in deliveries):
            return False
        self._rolled_count += sum(queue_offset < self._indexed_to for queue_offset in queue_offsets)
        return True

    # ---- reading

    async def _read(self, queue: ConsumeQueue, queue_offsets: Iterable[int]) -> dict[int, MessageRecord | None]:
        """Reads messages; None for one that is gone. One that can't be read now is left out."""
        found: dict[int, MessageRecord | None] = {}
        for start, end in _runs(queue_offsets):
            at = start
            while at < end:
                try:
                    read = await self._reader.read(queue, at, end - at)
                except OSError as error:
                    self._log.write("timer.unreadable offset=%d reason=%r", at, str(error))
                    break
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
                    break
                at = max(read.next_offset, at + 1)
        return found

    def _put_off(self, code: int, queue_offset: int) -> None:
        """Tries a message that can't be read now again later, and drops it after `UNREADABLE_S_MAX`."""
        now = trio.current_time()
        _, since = self._unreadable.get(queue_offset, (code, now))
        self._retry_at = max(self._retry_at, now + PAUSE_S_MIN)
        if not all(damage.is_hopeless for damage in self._store.damage.open):
            since = now
        if now - since < UNREADABLE_S_MAX:
            self._unreadable[queue_offset] = code, since
        else:
            self._unreadable.pop(queue_offset, None)
            self._drop(queue_offset, "its entry is wrong and its record is not found")

    def _retried(self) -> list[tuple[int, int]]:
        """What could not be read before, if it is to be tried again now."""
        now = trio.current_time()
        if not self._unreadable or now < self._retry_at:
            return []
        self._retry_at = now + LOOK_EVERY_S
        return sorted((code, queue_offset) for queue_offset, (code, _) in self._unreadable.items())[:BATCH_COUNT_MAX]

    def _drop(self, queue_offset: int, reason: str) -> None:
        self._dropped_count += 1
        self._log.write("timer.dropped offset=%d reason=%r", queue_offset, reason)


def _runs(queue_offsets: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Splits offsets into runs of consecutive ones: (first, behind the last)."""
    start = end = -1
    for queue_offset in sorted(queue_offsets):
        if queue_offset != end:
            if start >= 0:
                yield start, end
            start = queue_offset
        end = queue_offset + 1
    if start >= 0:
        yield start, end
