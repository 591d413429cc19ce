"""Takes messages for a pop: chooses the queues, reads the messages, and describes them for the answer.

A request for all queues begins with a random queue; in a topic with priorities, with the highest queue id. The group's
retry topics come last or, with a probability of RETRY_FIRST_CHANCE, first, so that neither they nor the topic itself
starve; in order mode they are not read. A queue that another pop is reading is skipped, and so is one at its limit of
messages in flight. Source: PopMessageProcessor.

`take_nowait` serves pops whose messages are in memory, `take` all others. Both run the same generator (`_steps`), which
yields the reads that it needs.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import lru_cache

import msgspec
import trio

from ha.broker.batch_reader import split
from ha.broker.core import BrokerCore
from ha.broker.detour import message_of
from ha.broker.filters import Selection, read_wanted
from ha.broker.limited_log import LimitedLog
from ha.broker.pop.ordered import OrderedBatch, ordered_batch
from ha.broker.pop.pop_log import PopLog
from ha.broker.pop.state import PopQueue, PopState, QueueKey
from ha.broker.queue_read import UNREADABLE_RETRY_S, QueueRead, QueueReader, ReadStatus
from ha.broker.queue_times import bounds
from ha.broker.refused import RefusedError, refused_if_unreadable
from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.bodies import TopicConfig
from ha.protocol.pop import (
    MESSAGE_TYPE,
    NORMAL,
    ORDER_QUEUE,
    POP_CK,
    PRIORITY_TYPE,
    RETRY_V1,
    RETRY_V2,
    Handle,
    NotificationRequest,
    PeekMessageRequest,
    PopInfo,
    PopMessageRequest,
    retry_topic,
)
from ha.protocol.properties import CRC32, encode_properties
from ha.protocol.record import RECORD_PLACE, decode_record, encode_host
from ha.protocol.record_encoding import encode_record
from ha.store.consume_queue import ConsumeQueue

logger = logging.getLogger(__name__)

RETRY_FIRST_CHANCE = 0.2
"""Probability, 0 to 1, that a pop reads the retry topics first (RocketMQ: popFromRetryProbability, in percent)."""
SCAN_COUNT_MAX = 8192
"""Maximum number of messages of one queue that a pop scans for selected ones."""
INIT_MAX = 1
"""Init mode in which a group that has no offset yet starts with the last message."""

_EVERYTHING = Selection()
_SKIPPED_MESSAGES = (ReadStatus.NO_MATCHED_MESSAGE, ReadStatus.MESSAGE_WAS_REMOVING, ReadStatus.OFFSET_TOO_SMALL)
"""Statuses of a read that returned no message, although there may be some from its `next_offset` on"""

TopicRequest = PopMessageRequest | NotificationRequest | PeekMessageRequest
"""Requests about messages of a topic"""


class Source(msgspec.Struct, frozen=True):
    """A queue to read from; `flag` as in ha.protocol.pop."""

    topic: str
    queue_id: int
    flag: int


class _Wanted(msgspec.Struct, kw_only=True, gc=False):
    """The next read: messages of one queue from queue offset `begin` on.

    read: the result, to be set before the next step; None if `take_nowait` would have to wait, or the disk can't read.
    """

    queue: ConsumeQueue | None
    begin: int
    selection: Selection
    count_max: int
    bytes_max: int
    read: QueueRead | None = None


class Taken(msgspec.Struct, kw_only=True):
    """The messages that a pop took, and the information about them for its answer.

    since: the POP log's `failure_count` before the pop.
    size: bytes of `bodies`.
    rest_count: number of messages that are left in the queues.
    busy: queues that were skipped because other pops were reading them.
    full: queues that have messages, but were skipped because they have no room for further ones in flight.
    ends: the end of each queue when it was looked at; None if no message can arrive during the pop.
    again_ms: time in ms since the epoch at which another attempt may find messages although none arrives; None if no
    such time is known. For a queue blocked by ordered messages, it is the time when the queue becomes free. If a read
    failed because too many files were open, it is UNREADABLE_RETRY_S later. It is the pop time if another attempt may
    find messages at once, for example because a scan ended at SCAN_COUNT_MAX, or an offset was reset during the pop.
    """

    pop_time_ms: int
    since: int
    info: PopInfo = msgspec.field(default_factory=PopInfo)
    bodies: list[bytes] = []
    count: int = 0
    size: int = 0
    rest_count: int = 0
    busy: list[PopQueue] = []
    full: list[PopQueue] = []
    ends: list[tuple[Source, int]] | None = None
    again_ms: int | None = None

    def try_again(self, at_ms: int) -> None:
        """Sets `again_ms` to `at_ms`, unless an earlier time is set."""
        self.again_ms = at_ms if self.again_ms is None else min(self.again_ms, at_ms)


class Taker:
    """Pops messages: reads them and records in the `PopState` that they are in flight. Does not wait until this change
    is in the log."""

    def __init__(self, core: BrokerCore, log: PopLog) -> None:
        options = core.options
        self._store = core.store
        self._topics = core.tables.topics
        self._offsets = core.tables.offsets
        self._reads = core.tables.reads
        self._options = options
        self._wall_clock_ms = core.world.wall_clock_ms
        self._pop_log = log
        self._reader = QueueReader(
            core.store.log, options, run_blocking=core.store.run_blocking, repair_entry=core.store.scrub.repair_entry
        )
        self._log = LimitedLog(logger)

    # ---- which queues

    def sources(self, request: TopicRequest, config: TopicConfig, *, is_order: bool) -> tuple[Source, ...]:
        """Returns the queues to read from, in order."""
        normal = _queues_of(config.topic_name, config.read_queue_nums, NORMAL)
        if request.queue_id >= 0:
            normal = normal[request.queue_id : request.queue_id + 1]
        elif (config.attributes or {}).get(MESSAGE_TYPE) == PRIORITY_TYPE:
            normal = normal[::-1]
        else:
            first = random.randrange(max(1, len(normal)))
            normal = normal[first:] + normal[:first]
        if is_order:
            return normal
        retries = self._retry_sources(request.consumer_group, config.topic_name)
        return retries + normal if random.random() < RETRY_FIRST_CHANCE else normal + retries

    def _retry_sources(self, group: str, topic: str) -> tuple[Source, ...]:
        found: tuple[Source, ...] = ()
        for flag in (RETRY_V2, RETRY_V1):
            config = self._topics.get(retry_topic(group, topic, is_v2=flag == RETRY_V2))
            if config is not None:
                found += _queues_of(config.topic_name, config.read_queue_nums, flag)
        return found

    def position(self, state: PopState, group: str, source: Source) -> tuple[int, int]:
        """Returns the queue offsets at which a pop would begin, and at which the queue ends."""
        first, end = bounds(self._store.queues.get(source.topic, source.queue_id))
        queue = state.get((group, source.topic, source.queue_id))
        begin = self._offsets.get(group, source.topic, source.queue_id) if queue is None else queue.next_offset
        return first if begin is None else max(first, begin), end

    # ---- taking

    def take_nowait(
        self, state: PopState, request: PopMessageRequest, config: TopicConfig, selection: Selection
    ) -> Taken | None:
        """Takes up to the requested number of messages without waiting. Raises RefusedError if a queue can't be read,
        unless it has taken some.

        Returns None if `take` has to be called: the first messages are not in memory, or selected by a condition on
        properties, or there are none and files of queues are being created.
        """
        taken = Taken(pop_time_ms=self._wall_clock_ms(), since=self._pop_log.failure_count)
        with closing(self._steps(state, request, config, selection, taken)) as steps:
            for wanted in steps:
                wanted.read = self._read_nowait(wanted)
                if wanted.read is None and not taken.count:
                    return None
        return taken if taken.count or not self._store.dispatcher.is_making_files else None

    async def take(
        self, state: PopState, request: PopMessageRequest, config: TopicConfig, selection: Selection
    ) -> Taken:
        """Takes up to the requested number of messages. Raises RefusedError if a queue can't be read, unless it has
        taken some."""
        taken = await self._take(state, request, config, selection)
        if not taken.count and self._store.dispatcher.is_making_files:
            await self._store.dispatcher.wait_files_made()
            taken = await self._take(state, request, config, selection)
        if not taken.count and (
            any(state.room(queue) > 0 for queue in taken.full)
            or not all(queue.is_busy for queue in taken.busy)
            or any(self._end(source) != end for source, end in taken.ends or ())
        ):
            taken.try_again(taken.pop_time_ms)  # there may be a message in a queue that was read before, or skipped
        return taken

    def _end(self, source: Source) -> int:
        return bounds(self._store.queues.get(source.topic, source.queue_id))[1]

    async def _take(
        self, state: PopState, request: PopMessageRequest, config: TopicConfig, selection: Selection
    ) -> Taken:
        taken = Taken(pop_time_ms=self._wall_clock_ms(), since=self._pop_log.failure_count, ends=[])
        refused: RefusedError | None = None
        with closing(self._steps(state, request, config, selection, taken)) as steps:
            for wanted in steps:
                try:
                    wanted.read = await self._read(wanted)
                except RefusedError as error:  # other queues may have messages
                    refused, wanted.read = error, None
        if refused is not None and not taken.count:
            raise refused
        return taken

    def _steps(
        self, state: PopState, request: PopMessageRequest, config: TopicConfig, selection: Selection, taken: Taken
    ) -> Generator[_Wanted, None, None]:
        """Fills `taken`. Yields each read that is needed for that; the caller sets its result before the next step."""
        for source in self.sources(request, config, is_order=request.order):
            if taken.count >= request.max_msg_nums or taken.size >= self._options.transfer_hot_bytes_max:
                begin, end = self.position(state, request.consumer_group, source)
                taken.rest_count += max(0, end - begin)
            else:
                if taken.ends is not None:
                    taken.ends.append((source, self._end(source)))
                yield from self._take_from(state, source, request, selection, taken)

    def _take_from(
        self, state: PopState, source: Source, request: PopMessageRequest, selection: Selection, taken: Taken
    ) -> Generator[_Wanted, None, None]:
        try:
            queue = self._open(state, source, request)
        except RefusedError:
            if taken.count:
                return  # the messages of other queues, which are in flight now, have to be sent
            raise
        if queue is None:
            return
        if queue.is_busy:
            taken.busy.append(queue)
            return
        self._follow_offset(state, queue)
        order = queue.order
        if request.order and order is not None and not order.is_same_attempt(request.attempt_id):
            blocked_until_ms = order.due_ms(taken.pop_time_ms)
            if blocked_until_ms is not None:
                taken.try_again(blocked_until_ms)
                return
        count_max = request.max_msg_nums - taken.count
        if not request.order:
            count_max = min(count_max, state.room(queue))
            if count_max <= 0:
                if queue.next_offset < self._end(source):
                    taken.full.append(queue)
                    state.mark_full(queue)
                return
        queue.is_busy = True
        try:
            read = yield from self._find(state, queue, source, selection, count_max, taken)
        finally:
            queue.is_busy = False
        if read is not None:
            self._add(state, queue, source, request, read, taken)

    def _add(
        self,
        state: PopState,
        queue: PopQueue,
        source: Source,
        request: PopMessageRequest,
        read: QueueRead,
        taken: Taken,
    ) -> None:
        """Takes the messages that were read from the queue's next offset on."""
        begin, order = queue.next_offset, queue.order
        end = self._end(source)  # it may have grown during the read
        taken.rest_count += max(0, end - read.next_offset)
        bodies = [read.body]
        offsets: Sequence[int] = range(begin, read.next_offset)
        if len(offsets) != read.message_count or order is not None or source.flag != NORMAL:
            bodies = [
                raw
                for raw in split(read.body)
                if order is None or not order.is_acknowledged(RECORD_PLACE.unpack_from(raw)[2])
            ]
            offsets = tuple(RECORD_PLACE.unpack_from(raw)[2] for raw in bodies)
        self._set_taken(state, queue, source, request, offsets, read.next_offset, taken)
        if not offsets:  # all were acknowledged, and those before them are not selected, or are lost
            state.move(queue, read.next_offset)
            taken.try_again(taken.pop_time_ms)
            return
        if source.flag != NORMAL:
            bodies = [self._as_original(raw, request, source, begin, taken) for raw in bodies]
        taken.info.add(source.flag, source.queue_id, begin, offsets)
        taken.bodies += bodies
        taken.count += len(offsets)
        taken.size += sum(map(len, bodies))
        self._reads.note(request.consumer_group, source.topic, source.queue_id, read.next_offset, len(offsets))

    def _set_taken(
        self,
        state: PopState,
        queue: PopQueue,
        source: Source,
        request: PopMessageRequest,
        offsets: Sequence[int],
        next_offset: int,
        taken: Taken,
    ) -> None:
        if not request.order:
            state.set_order(queue, None)
            state.take(queue, offsets, next_offset, taken.pop_time_ms, taken.pop_time_ms + request.invisible_time)
        elif offsets:
            batch = ordered_batch(
                queue.order,
                offsets,
                pop_time_ms=taken.pop_time_ms,
                invisible_ms=request.invisible_time,
                attempt_id=request.attempt_id,
            )
            state.set_order(queue, batch)
            _add_counts(taken.info, source, batch, offsets)

    def _is_current(self, state: PopState, queue: PopQueue) -> bool:
        """Returns whether the broker is still the master in the term of `state`, and the queue was not removed."""
        return self._pop_log.state is state and state.get(queue.key) is queue

    def _open(self, state: PopState, source: Source, request: PopMessageRequest) -> PopQueue | None:
        """Returns the state of the queue, created at the group's first pop from it; None if there are too many queues.
        Raises RefusedError if the queue can't be read."""
        group = request.consumer_group
        key = group, source.topic, source.queue_id
        queue = state.get(key)
        if queue is not None:
            return queue
        queue = state.open(key, self._first_offset(key, source, request.init_mode))
        if queue is None:
            self._log.write('pop.queues_full count=%d hint="further groups can\'t pop"', len(state.queues))
        else:
            queue.committed = self._offsets.get(*key)
        return queue

    def _first_offset(self, key: QueueKey, source: Source, init_mode: int) -> int:
        """Returns the queue offset at which the first pop of a group begins. Raises RefusedError if the queue can't be
        read."""
        committed = self._offsets.get(*key)
        if committed is not None:
            return max(0, committed)  # consumers may commit negative offsets, which no record can hold
        store_queue = self._store.queues.get(source.topic, source.queue_id)
        begin, end = bounds(store_queue)
        if source.flag != NORMAL or init_mode != INIT_MAX or store_queue is None or begin == end:
            return begin
        in_memory_from = self._store.log.max_offset.value - self._options.access_in_memory_bytes_max
        with refused_if_unreadable():
            if begin == 0 and store_queue.read(0, 1)[0].physical_offset >= in_memory_from:
                return 0  # a small topic is read from its start
        return end - 1

    def _follow_offset(self, state: PopState, queue: PopQueue) -> None:
        """Makes the queue continue at the consumer offset if it was reset, or committed by a consumer that pulls."""
        reset = self._offsets.take_reset(*queue.key)
        current = self._offsets.get(*queue.key)
        if reset is None and current != queue.committed:
            reset = current
        if reset is not None:
            state.reset(queue, max(0, reset))
        queue.committed = current

    def _find(
        self,
        state: PopState,
        queue: PopQueue,
        source: Source,
        selection: Selection,
        count_max: int,
        taken: Taken,
    ) -> Generator[_Wanted, None, QueueRead | None]:
        """Reads selected messages from the queue's next offset on, and moves the offset past those not selected.

        Returns None if there are none now. Messages of retry topics are not filtered.
        """
        wanted = _Wanted(
            queue=self._store.queues.get(source.topic, source.queue_id),
            begin=queue.next_offset,
            selection=selection if source.flag == NORMAL else _EVERYTHING,
            count_max=count_max,
            bytes_max=max(1, self._options.transfer_hot_bytes_max - taken.size),
        )
        scan_end = queue.next_offset + SCAN_COUNT_MAX
        while True:
            begin = wanted.begin = queue.next_offset
            yield wanted
            read = wanted.read
            if read is None:
                taken.rest_count += max(0, bounds(wanted.queue)[1] - begin)
                return None
            if not self._is_current(state, queue) or queue.next_offset != begin:
                taken.try_again(taken.pop_time_ms)  # the group's offset was reset, or the queue removed
                return None
            if read.status is ReadStatus.FOUND:
                return read
            if read.status in _SKIPPED_MESSAGES:
                state.move(queue, read.next_offset)
                end = bounds(wanted.queue)[1]  # it may have grown during the read
                if scan_end > read.next_offset < end:
                    continue
                if read.next_offset < end:
                    taken.rest_count += end - read.next_offset
                    taken.try_again(taken.pop_time_ms)
            elif read.is_interrupted:
                taken.try_again(self._wall_clock_ms() + int(1000 * UNREADABLE_RETRY_S))
            elif read.status is not ReadStatus.OFFSET_FOUND_NULL:
                end = self._store.log.next_queue_offset(source.topic, source.queue_id)
                if begin > end:  # the topic was deleted and created again, or an offset beyond the end was committed
                    logger.warning("pop.offset_corrected key=%r from=%d to=%d", queue.key, begin, end)
                    state.reset(queue, end)
            return None

    def _read_nowait(self, wanted: _Wanted) -> QueueRead | None:
        if wanted.selection.is_wanted is not None:
            return None
        return self._reader.read_nowait(
            wanted.queue,
            wanted.begin,
            message_count_max=wanted.count_max,
            message_bytes_max=wanted.bytes_max,
            tags_codes=wanted.selection.tags_codes,
        )

    async def _read(self, wanted: _Wanted) -> QueueRead:
        """Reads `wanted`. Raises RefusedError if the disk can't read."""
        selection = wanted.selection
        limits = {"message_count_max": wanted.count_max, "message_bytes_max": wanted.bytes_max}
        with refused_if_unreadable():
            if selection.is_wanted is not None:
                return await read_wanted(self._reader, wanted.queue, wanted.begin, selection.is_wanted, **limits)
            read = await self._reader.read(wanted.queue, wanted.begin, tags_codes=selection.tags_codes, **limits)
        if read.status in _SKIPPED_MESSAGES:
            await trio.lowlevel.checkpoint()
        return read

    def _as_original(self, raw: bytes, request: PopMessageRequest, source: Source, begin: int, taken: Taken) -> bytes:
        """Converts the record of a message in a retry topic to one of the topic popped from, with its POP handle as a
        property. Returns `raw` if the record is invalid or has no room for the property."""
        try:
            record = decode_record(raw, verify_crc=False)
            properties = record.property_map()
            properties.pop(CRC32, None)
            properties[POP_CK] = Handle(
                start_offset=begin,
                pop_time_ms=taken.pop_time_ms,
                invisible_ms=request.invisible_time,
                revive_queue=ORDER_QUEUE if request.order else 0,
                flag=source.flag,
                broker_name=self._options.broker_name,
                queue_id=source.queue_id,
                offset=record.queue_offset,
            ).encode()
            return encode_record(
                message_of(record, request.topic, record.queue_id, encode_properties(properties)),
                queue_offset=record.queue_offset,
                physical_offset=record.physical_offset,
                store_timestamp_ms=record.store_timestamp_ms,
                store_host=encode_host(*record.store_host),
            )
        except (LocalProtocolError, RemoteProtocolError):  # no room for the property: the client makes the handle
            return raw


@lru_cache(64)
def _queues_of(topic: str, queue_count: int, flag: int) -> tuple[Source, ...]:
    return tuple(Source(topic, queue_id, flag) for queue_id in range(queue_count))


def _add_counts(info: PopInfo, source: Source, batch: OrderedBatch, offsets: Sequence[int]) -> None:
    """Adds to `info` how often each message was popped before, and the lowest of these counts."""
    counts = [(offset, batch.messages[offset].count) for offset in offsets]
    tried = [each for each in counts if each[1]]
    info.add_counts(source.flag, source.queue_id, tried, min(times for _, times in counts))
