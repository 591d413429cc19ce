"""Delivers delayed messages from SCHEDULE_TOPIC_XXXX to their own topics when they are due, each level in order.

Runs on a master. Each level has a task that sleeps until the first message of its queue is due, or until one arrives.
It reads and puts all due messages in batches, and counts them as delivered once their puts are answered. Failed puts
are retried with back-off; invalid messages are dropped. After a crash a message may be delivered twice, but none is
lost (delay_offsets.py). RocketMQ polls each level every 100 ms, and skips a message whose put failed
(ScheduleMessageService.DeliverDelayedMessageTimerTask).

Time: a message is due at the wall-clock time in its queue entry, which is its store time plus its level's delay. For
messages that arrive while `serve` runs, this is converted to Trio's clock, so that steps of the wall clock have no
effect. For older messages the wall clock at the start of `serve` counts; one that would then have to wait longer than
its level's delay is due at once, as in RocketMQ (correctDeliverTimestamp).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec
import trio

from ha.broker.batch_reader import BATCH_COUNT_MAX, BatchReader, LossDetector, split
from ha.broker.core import BrokerCore
from ha.broker.detour import real_message
from ha.broker.limited_log import LimitedLog
from ha.broker.put_request import PutRequest
from ha.broker.queue_read import ReadStatus
from ha.broker.queue_times import bounds
from ha.errors import DiskFailed, RemoteProtocolError
from ha.protocol import java_json
from ha.protocol.bodies import DelayOffsets
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.record import MessageRecord, decode_record
from ha.protocol.remoting import RemotingCommand
from ha.protocol.store_files import BLANK_SIZE
from ha.protocol.topic_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from ha.remoting import RemotingConnection, RequestHandler
from ha.store.consume_queue import ConsumeQueue, QueueEntry
from ha.store.dispatch import Arrival
from ha.store.files import is_passing

logger = logging.getLogger(__name__)

PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 2.0
"""Minimum and maximum back-off between attempts to read or put a message, in seconds."""
CLOCK_STEP_S_MIN = 0.05
"""Initial resolution of a `StoreClock` in seconds: smaller changes of the difference between the clocks are not
recorded."""
CLOCK_STEP_COUNT_MAX = 4096
"""Maximum number of recorded differences between store times and Trio's clock in one `StoreClock`."""


class DelayStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Message counts: delivered and dropped since the broker's start, and waiting in each level that has any."""

    delivered_count: int
    dropped_count: int
    waiting_counts: dict[int, int]


class _Delivery(PutRequest, kw_only=True, gc=False):
    """The put of one delayed message. `queue_offset`: the message's position in the queue of its level."""

    queue_offset: int


class StoreClock:
    """The difference in seconds between store times and Trio's clock, at the arrival of each message of one queue.

    It is constant between steps of the wall clock. After a step back, store times do not advance until the wall clock
    has caught up, and the difference changes with every arrival.
    """

    def __init__(self, ahead_s: float) -> None:
        self._first_offsets = [0]
        self._ahead_s = [ahead_s]
        self._step_s = CLOCK_STEP_S_MIN

    def note(self, first_offset: int, ahead_s: float) -> None:
        """Records the difference for messages from queue offset `first_offset` on, unless it changed by less than the
        resolution.

        To keep at most CLOCK_STEP_COUNT_MAX differences, drops every other one and doubles the resolution.
        """
        if abs(ahead_s - self._ahead_s[-1]) < self._step_s or first_offset < self._first_offsets[-1]:
            return
        if len(self._ahead_s) >= CLOCK_STEP_COUNT_MAX:
            del self._first_offsets[1::2], self._ahead_s[1::2]
            self._step_s *= 2
        self._first_offsets.append(first_offset)
        self._ahead_s.append(ahead_s)

    def forget_before(self, offset: int) -> None:
        """Drops differences that only messages before queue offset `offset` need."""
        passed = bisect_right(self._first_offsets, offset) - 1
        if passed > 0:
            del self._first_offsets[:passed], self._ahead_s[:passed]
            if len(self._ahead_s) == 1:
                self._step_s = CLOCK_STEP_S_MIN

    def ahead_s(self, offset: int) -> float:
        """Returns by how many seconds store times were ahead of Trio's clock when the message at queue offset `offset`
        arrived."""
        return self._ahead_s[max(0, bisect_right(self._first_offsets, offset) - 1)]


class _Level:
    """State of one delay level while `serve` runs.

    delay_ms: the level's delay; None if messageDelayLevel no longer has the level.
    known_from: queue offset of the first message that arrives after the start of `serve`.
    started_ahead_s: seconds by which store times were ahead of Trio's clock at the start of `serve`.
    """

    def __init__(self, level: int, delay_ms: int | None, known_from: int, ahead_s: float) -> None:
        self.level = level
        self.delay_ms = delay_ms
        self.known_from = known_from
        self.started_ahead_s = ahead_s
        self.started_at = trio.current_time()
        self.clock = StoreClock(ahead_s)
        self.arrived = trio.Event()

    def due_at(self, queue_offset: int, due_ms: int) -> float:
        """Returns the due time (Trio's clock) of the message at `queue_offset`, whose entry has the wall-clock time
        `due_ms`."""
        due_at = due_ms / 1000 - self.clock.ahead_s(queue_offset)
        if queue_offset < self.known_from and self.delay_ms is not None:
            remaining_s = due_ms / 1000 - self.started_ahead_s - self.started_at
            if remaining_s > self.delay_ms / 1000:
                return self.started_at
        return due_at


class DelayService:
    """Delivers delayed messages. Run `serve` while the broker is a master; the store calls `on_arrivals`."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._put = core.puts
        self._offsets = core.tables.delay_offsets
        self._options = core.options
        self._standing = core.standing
        self._wall_clock_ms = core.world.wall_clock_ms
        self._delays_ms = core.store.options.delay_levels_ms
        self._levels: dict[int, _Level] = {}
        self._reader = BatchReader(core.store)
        self._log = LimitedLog(logger)
        self._delivered_count = 0
        self._dropped_count = 0

    def statistics(self) -> DelayStatistics:
        """Returns a snapshot of the statistics."""
        waiting = {}
        for queue_id in self._store.queues.topics().get(SCHEDULE_TOPIC, ()):
            queue = self._store.queues.get(SCHEDULE_TOPIC, queue_id)
            if queue is not None:
                count = queue.max_offset - max(self._offsets.get(queue_id + 1), queue.min_offset)
                if count > 0:
                    waiting[queue_id + 1] = count
        return DelayStatistics(
            delivered_count=self._delivered_count, dropped_count=self._dropped_count, waiting_counts=waiting
        )

    def figures(self) -> dict[str, str]:
        """Returns the delivery progress and queue end of each level ever used, for GET_BROKER_RUNTIME_INFO (28)."""
        queues = self._store.queues
        ids = queues.topics().get(SCHEDULE_TOPIC, ())
        found = [(queue_id + 1, queue) for queue_id in ids if (queue := queues.get(SCHEDULE_TOPIC, queue_id))]
        return {
            f"scheduleMessageOffset_{level}": f"{self._offsets.get(level)},{queue.max_offset}" for level, queue in found
        }

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {RequestCode.GET_ALL_DELAY_OFFSET: self.all_offsets}

    # ---- the table

    def replicated_offsets(self) -> DelayOffsets | None:
        """Returns the newest state of the table whose delivered messages are replicated; None if there is none.

        A message is replicated if it ends at or before `Acknowledgements.replicated_offset`: it is flushed here, and
        acknowledged by every slave that is counted.
        """
        self._mark()
        return self._offsets.settled(self._put.acknowledgements.replicated_offset)

    async def all_offsets(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """GET_ALL_DELAY_OFFSET (45), sent by slaves: answers with `replicated_offsets`; SYSTEM_ERROR if there are
        none."""
        settled = self.replicated_offsets()
        if settled is None:
            return command.reply(
                ResponseCode.SYSTEM_ERROR, "No delay offset in this broker that is replicated up to there"
            )
        return command.reply(ResponseCode.SUCCESS, body=java_json.dumps(settled))

    async def save(self) -> None:
        """Flushes the log if needed, then writes the newest state of the table whose delivered messages are flushed, if
        this state changed.

        Does nothing on a slave. In a failover group `GroupLog` writes the file. Raises DiskFailed if the file can't be
        written.
        """
        if self._standing.is_slave:
            return
        log = self._store.log
        if self._mark() and self._store.flusher.failure is None:
            try:
                await self._store.flusher.flush()
            except DiskFailed:
                return  # the store ends the process because of this error
        await self._offsets.save(log.flushed_offset.value)

    def _mark(self) -> bool:
        """Marks the current state of the table; returns whether a flush of the log is needed before it can be saved."""
        log = self._store.log
        is_new = self._offsets.mark(log.max_offset.value, self._put.acknowledgements.replicated_offset)
        return is_new and log.flushed_offset.value < log.max_offset.value

    # ---- delivery

    def on_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Wakes the levels that got messages. Called by the store once per dispatched batch; never blocks."""
        levels = self._levels
        if not levels:
            return
        for arrival in arrivals:
            if arrival.topic != SCHEDULE_TOPIC:
                continue
            level = levels.get(arrival.queue_id + 1)
            if level is not None:
                level.clock.note(arrival.max_queue_offset - len(arrival.tags_codes), self._ahead_s())
                level.arrived.set()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Delivers messages, and saves the table every `flush_delay_offset_interval_s`, until cancelled."""
        queues = self._store.queues
        numbers = set(range(1, len(self._delays_ms) + 1))
        # Messages may still wait in levels that messageDelayLevel no longer has.
        numbers.update(queue_id + 1 for queue_id in queues.topics().get(SCHEDULE_TOPIC, ()))
        ahead_s = self._ahead_s()
        for number in sorted(numbers):
            queue = queues.get(SCHEDULE_TOPIC, number - 1)
            delay_ms = self._delays_ms[number - 1] if number <= len(self._delays_ms) else None
            self._levels[number] = _Level(number, delay_ms, queue.max_offset if queue is not None else 0, ahead_s)
        try:
            async with trio.open_nursery() as nursery:
                for level in self._levels.values():
                    nursery.start_soon(self._serve_level, level)
                nursery.start_soon(self._keep_saved)
                task_status.started()
        finally:
            self._levels = {}

    async def _keep_saved(self) -> None:
        while True:
            await trio.sleep(self._options.flush_delay_offset_interval_s)
            await self.save()

    def _ahead_s(self) -> float:
        wall_ms = max(self._wall_clock_ms(), self._store.log.last_store_timestamp_ms)
        return wall_ms / 1000 - trio.current_time()

    async def _serve_level(self, level: _Level) -> None:
        pause_s, losses = PAUSE_S_MIN, LossDetector(self._reader)
        while True:
            level.arrived = trio.Event()
            may_be_lost = True
            queue = self._store.queues.get(SCHEDULE_TOPIC, level.level - 1)
            offset = self._offsets.get(level.level)
            try:
                offset, entries = self._head(level, queue)
                if queue is None or not entries:
                    await level.arrived.wait()
                    continue
                due_count, next_due_at = _due(level, offset, entries)
                if not due_count:
                    await trio.sleep_until(next_due_at)
                    continue
                is_read = await self._deliver(level, queue, offset, due_count)
                await trio.lowlevel.checkpoint()
            except OSError as error:
                self._log_failure("delay.read_failed", level, offset, error)
                is_read, may_be_lost = False, not is_passing(error)
            if is_read:
                pause_s = PAUSE_S_MIN
                continue
            if may_be_lost and losses.is_lost(offset):
                self._drop(level, offset, "its entry is wrong and its record is not found")
                self._offsets.set(level.level, offset + 1)
                continue
            with trio.move_on_after(pause_s):
                await self._store.damage.wait_changed()
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _head(self, level: _Level, queue: ConsumeQueue | None) -> tuple[int, Sequence[QueueEntry]]:
        """Returns the queue offset of the level's next message, and the entries from there on; none if nothing waits.

        Corrects the progress if it is outside the queue.
        """
        offset = self._offsets.get(level.level)
        first, end = bounds(queue)
        # A new master knows its progress before all of the queue is dispatched.
        end = max(end, self._store.log.next_queue_offset(SCHEDULE_TOPIC, level.level - 1))
        right = min(max(offset, first), end)
        if right != offset:
            # Retention deleted messages that still waited, or the end of the log was lost.
            logger.error(
                "delay.offset_corrected level=%d from=%d to=%d min=%d max=%d",
                level.level,
                offset,
                right,
                first,
                end,
            )
            self._offsets.set(level.level, right)
        level.clock.forget_before(right)
        return right, () if queue is None else queue.read_readable(right, BATCH_COUNT_MAX)

    async def _deliver(self, level: _Level, queue: ConsumeQueue, offset: int, due_count: int) -> bool:
        """Delivers or drops up to `due_count` messages from `offset` on; returns False if they can't be read yet."""
        read = await self._reader.read(queue, offset, due_count)
        if read.status is ReadStatus.OFFSET_FOUND_NULL:
            self._log_failure("delay.read_failed", level, offset, read.status.value)
            return False
        if read.status is ReadStatus.FOUND:
            await self._put_all(level, self._deliveries(level, read.body))
        missing_count = read.next_offset - offset - read.message_count
        if missing_count > 0:
            self._drop(level, offset, "it is damaged, or no longer in the log", missing_count)
        self._offsets.set(level.level, read.next_offset)
        return True

    def _deliveries(self, level: _Level, body: bytes) -> list[_Delivery]:
        deliveries = []
        for raw in split(body):
            record: MessageRecord | None = None
            try:
                record = decode_record(raw)
                message = real_message(record)
                if message.topic in (SCHEDULE_TOPIC, HALF_TOPIC, TIMER_TOPIC) or message.queue_id < 0:
                    raise ValueError(f"it belongs in {message.topic}, queue {message.queue_id}")
                deliveries.append(_Delivery(messages=(message,), waits=False, queue_offset=record.queue_offset))
            except (RemoteProtocolError, ValueError) as error:
                self._drop(level, -1 if record is None else record.queue_offset, str(error))
        return deliveries

    async def _put_all(self, level: _Level, deliveries: list[_Delivery]) -> None:
        """Puts `deliveries`, and repeats failed puts with back-off, until each message is stored or dropped as invalid.

        The puts don't wait for a flush or for slaves, so they are answered when they are stored.
        """
        pause_s = PAUSE_S_MIN
        while deliveries:
            await self._put.settle(deliveries)
            failed = []
            for delivery in deliveries:
                if delivery.status.is_stored:
                    self._delivered_count += 1
                elif delivery.is_hopeless:
                    self._drop(level, delivery.queue_offset, delivery.remark)
                else:
                    failed.append(delivery)
            if failed:
                self._offsets.set(level.level, failed[0].queue_offset)
                self._log_failure("delay.put_failed", level, failed[0].queue_offset, failed[0].remark)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            deliveries = failed

    def _drop(self, level: _Level, offset: int, reason: str, count: int = 1) -> None:
        self._dropped_count += count
        self._log_failure("delay.message_dropped", level, offset, reason)

    def _log_failure(self, event: str, level: _Level, offset: int, reason: object) -> None:
        self._log.write(event + " level=%d offset=%d reason=%r", level.level, offset, str(reason), key=level.level)


def _due(level: _Level, offset: int, entries: Sequence[QueueEntry]) -> tuple[int, float]:
    """Returns how many of `entries`, which start at `offset`, are due, and when the next one is due (Trio's clock)."""
    now = trio.current_time()
    for number, (_, size, due_ms) in enumerate(entries):
        if size <= 0 or size == BLANK_SIZE:
            continue  # no message, or a wrong entry, which `_deliver` handles
        due_at = level.due_at(offset + number, due_ms)
        if due_at > now:
            return number, due_at
    return len(entries), now
