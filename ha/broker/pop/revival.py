"""Redelivers messages whose invisible time is over: copies them to the group's retry topic (RocketMQ: revive).

A service of the master. It sleeps until the first message in flight is due, and puts copies of due messages in batches;
RocketMQ checks every second and is 2 to 4 s late. A message leaves the POP state once its copy is stored, and its
removal is in the log after the copy, so that a crash in between never loses it. The next start finds such copies
(copies.py).

    not acknowledged    a copy in the retry topic; one that was read from a retry topic goes back there
    unreadable          tried again every RETRY_S; dropped if attempts have failed for `UNREADABLE_S_MAX`
                        (`BatchReader.lost_since` says which of them count)
    gone                its record was deleted, by retention or with its topic: it leaves the state. It stays if its
                        topic is only missing from the table: the table of a new master may not have the topic yet

Source: PopReviveService.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import trio

from ha.broker.batch_reader import BATCH_COUNT_MAX, UNREADABLE_S_MAX, BatchReader, split
from ha.broker.core import BrokerCore
from ha.broker.detour import message_of, with_notes
from ha.broker.limited_log import LimitedLog
from ha.broker.pop.copies import copy_mark
from ha.broker.pop.pop_log import PopLog
from ha.broker.pop.state import Batch, PopState
from ha.broker.put_request import PutRequest
from ha.broker.queue_read import ReadStatus
from ha.broker.stored_properties import without
from ha.errors import RemoteProtocolError
from ha.protocol.pop import FIRST_POP_TIME, NORMAL, ORIGIN_GROUP, popped_topic, retry_topic
from ha.protocol.properties import CRC32
from ha.protocol.record import (
    RECONSUME_TIMES_MAX,
    RECORD_PLACE,
    Message,
    MessageRecord,
    decode_record,
    encode_host,
)
from ha.store.consume_queue import ConsumeQueue

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Maximum time in seconds between checks of the wall clock, which may be set while the service sleeps."""
RETRY_S = 1.0
"""Time in seconds before another attempt to deliver a message."""


class _Copy(PutRequest, kw_only=True, gc=False):
    """The put of one copy, and the message that it copies."""

    batch: Batch
    offset: int


class _Due(msgspec.Struct, frozen=True):
    """One due message."""

    batch: Batch
    offset: int


class Revival:
    """Redelivers messages that were not acknowledged in time. Run `serve` while the broker is a master."""

    def __init__(self, core: BrokerCore, log: PopLog) -> None:
        self._core = core
        self._store = core.store
        self._topics = core.tables.topics
        self._offsets = core.tables.offsets
        self._puts = core.puts
        self._pop_log = log
        log.on_scheduled = self._wake
        self._reader = BatchReader(core.store)
        self._log = LimitedLog(logger)
        self._is_v2 = core.options.enable_retry_topic_v2
        self._wall_clock_ms = core.world.wall_clock_ms
        self._own_host = encode_host(core.options.host, core.options.port)
        self._earlier = trio.Event()
        self._sleeps_until_ms = math.inf
        self._unreadable: dict[_Due, float] = {}
        """Each due message that can't be read -> time (Trio's clock) from which failed reads count"""
        self.revived_counts: Counter[str] = Counter()
        """Group -> number of its messages delivered again since the start"""
        self.lost_count = 0
        """Number of due messages dropped since the start, because they were gone, unreadable or could not be copied"""

    def _wake(self, due_ms: int) -> None:
        if due_ms < self._sleeps_until_ms:
            self._earlier.set()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Redelivers due messages until cancelled."""
        task_status.started()
        self._unreadable = {}
        while True:
            state = self._pop_log.state
            if state is None:
                await self._pop_log.wait_loaded()
                continue
            self._earlier = trio.Event()
            now_ms = self._wall_clock_ms()
            batches = state.take_due(now_ms, BATCH_COUNT_MAX)
            if batches:
                await self._deliver(state, batches)
                await trio.lowlevel.checkpoint()
                continue
            next_due_ms = state.next_due_ms
            self._sleeps_until_ms = math.inf if next_due_ms is None else next_due_ms
            wait_s = math.inf
            if next_due_ms is not None:
                wait_s = max(0.0, min(CHECK_INTERVAL_S, (next_due_ms - now_ms) / 1000))
            with trio.move_on_after(wait_s):
                await self._earlier.wait()
            self._sleeps_until_ms = -math.inf

    async def _deliver(self, state: PopState, batches: Sequence[Batch]) -> None:
        """Puts copies of due messages; those that can't be put now are tried again later."""
        copies: list[_Copy] = []
        for batch in batches:
            due = [_Due(batch, offset) for offset in state.left_of(batch)]
            records = await self._read(due)
            due = [each for each in due if state.is_in_flight(batch, each.offset)]  # neither done nor deleted meanwhile
            topic = await self._retry_topic(batch) if due else None
            for each in due:
                if each.offset not in records:
                    self._postpone(state, each)
                    continue
                self._unreadable.pop(each, None)
                record = records[each.offset]
                if record is None:
                    self._drop(state, [each], "its record was deleted")
                elif topic is not None:
                    message = self._copy_of(record, batch, topic)
                    copies.append(_Copy(messages=(message,), waits=False, batch=batch, offset=each.offset))
        copies = [copy for copy in copies if state.is_in_flight(copy.batch, copy.offset)]  # not acknowledged meanwhile
        await self._put(state, copies)
        if self._pop_log.state is not state:
            return
        for each in [each for each in self._unreadable if not state.is_in_flight(each.batch, each.offset)]:
            del self._unreadable[each]  # acknowledged meanwhile
        now_ms = self._wall_clock_ms()
        for batch in batches:
            state.reschedule(batch, now_ms + int(1000 * RETRY_S))

    async def _put(self, state: PopState, copies: Sequence[_Copy]) -> None:
        """Puts copies. Each message leaves the state in the step in which its copy is appended, so that the next record
        of the log has its removal (copies.py)."""

        def on_done(done: Sequence[_Copy]) -> None:
            if self._pop_log.state is state:
                for copy in done:
                    self._on_put(state, copy)

        await self._puts.settle(copies, on_done)

    def _on_put(self, state: PopState, copy: _Copy) -> None:
        if copy.status.is_stored:
            self.revived_counts[copy.batch.queue.key[0]] += 1
            if state.is_in_flight(copy.batch, copy.offset):
                state.finish(copy.batch.queue, copy.offset, is_copied=True)
        elif copy.is_hopeless:
            self._drop(state, [_Due(copy.batch, copy.offset)], copy.remark)
        else:
            self._log.write("pop.revival_failed reason=%r", copy.remark)

    async def _retry_topic(self, batch: Batch) -> str | None:
        """Returns the retry topic of a batch, created if it does not exist; None if that is not possible now."""
        group, topic, _ = batch.queue.key
        if popped_topic(group, topic)[1] != NORMAL:
            return topic
        name = retry_topic(group, topic, is_v2=self._is_v2)
        if self._topics.get(name) is None:
            config = await self._topics.ensure(name, 1)
            if isinstance(config, str):
                self._log.write("pop.revival_failed reason=%r", config)
                return None
            self._offsets.commit(group, name, 0, 0)
        return name

    def _copy_of(self, record: MessageRecord, batch: Batch, topic: str) -> Message:
        raw = without(record.properties, ORIGIN_GROUP, CRC32)  # the store computes a new CRC
        raw = with_notes(raw, {ORIGIN_GROUP: batch.queue.key[0]})
        if FIRST_POP_TIME not in record.property_map():
            raw = with_notes(raw, {FIRST_POP_TIME: str(batch.pop_time_ms)})
        message = message_of(record, topic, 0, raw)
        message.born_host = self._own_host
        message.prepared_transaction_offset = copy_mark(record.physical_offset)
        message.reconsume_times = min(record.reconsume_times + (not batch.is_suspended), RECONSUME_TIMES_MAX)
        return message

    async def _read(self, due: Sequence[_Due]) -> dict[int, MessageRecord | None]:
        """Reads messages of one queue and returns them by queue offset, with None for each that is gone. Omits those
        that can't be read now."""
        if not due:
            return {}
        _, topic, queue_id = due[0].batch.queue.key
        queue = self._store.queues.get(topic, queue_id)
        end = self._store.log.next_queue_offset(topic, queue_id)
        found: dict[int, MessageRecord | None] = {}
        offsets = sorted(each.offset for each in due)
        while offsets:
            first = offsets[0]
            if first >= end or (queue is not None and first < queue.min_offset):
                found[first] = None
                offsets.pop(0)
                continue
            if queue is None or first >= queue.max_offset:
                break  # not dispatched yet
            offsets = await self._read_some(queue, offsets, found)
        return found

    async def _read_some(
        self, queue: ConsumeQueue, offsets: list[int], found: dict[int, MessageRecord | None]
    ) -> list[int]:
        """Reads messages from the first of `offsets` on, as many as fit one batch, into `found`. Returns the offsets
        that are left to read."""
        wanted = set(offsets[:BATCH_COUNT_MAX])
        try:
            read = await self._reader.read(queue, offsets[0], min(BATCH_COUNT_MAX, offsets[-1] - offsets[0] + 1))
        except OSError as error:
            self._log.write("pop.unreadable reason=%r", str(error))
            return offsets[1:]
        next_offset = max(read.next_offset, offsets[0] + 1)
        if read.status is ReadStatus.FOUND:
            found.update((offset, None) for offset in wanted if offset < read.next_offset)
            for raw in split(read.body):
                offset = RECORD_PLACE.unpack_from(raw)[2]
                if offset not in wanted:
                    continue
                try:
                    found[offset] = decode_record(raw)
                except RemoteProtocolError as error:
                    self._log.write("pop.unreadable reason=%r", str(error))
                    del found[offset]
        elif read.status is ReadStatus.MESSAGE_WAS_REMOVING:
            found.update((offset, None) for offset in wanted if offset < read.next_offset)
        else:
            next_offset = offsets[0] + 1
        return [offset for offset in offsets if offset >= next_offset]

    def _postpone(self, state: PopState, due: _Due) -> None:
        """Keeps an unreadable message for another attempt, or drops it if attempts have failed for `UNREADABLE_S_MAX`.

        Attempts before its dispatch don't count, nor do those that `BatchReader.lost_since` excludes, for example while
        the log has damage that may still be repaired.
        """
        now = trio.current_time()
        since = self._unreadable[due] = self._reader.lost_since(self._unreadable.get(due, now))
        _, topic, queue_id = due.batch.queue.key
        queue = self._store.queues.get(topic, queue_id)
        if queue is None or due.offset >= queue.max_offset:
            self._unreadable[due] = now
        elif now - since >= UNREADABLE_S_MAX:
            del self._unreadable[due]
            self._drop(state, [due], "its record can't be read")

    def _drop(self, state: PopState, due: Sequence[_Due], reason: str) -> None:
        for each in due:
            if state.is_in_flight(each.batch, each.offset):
                self.lost_count += 1
                group, topic, queue_id = each.batch.queue.key
                self._log.write(
                    "pop.dropped group=%r topic=%r queue=%d offset=%d reason=%r",
                    group,
                    topic,
                    queue_id,
                    each.offset,
                    reason,
                    key=reason,
                )
                state.finish(each.batch.queue, each.offset)
