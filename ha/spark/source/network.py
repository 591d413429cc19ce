"""Implements `LogSource` over brokers (option `servers`), for logs without an accessible store directory.

The driver asks name servers for topics and queues, and brokers for the range of each queue. A task pulls its slices
with many concurrent requests, and decodes the answers into the same Arrow columns as from a store directory.

    readFrom         master, slave, or suggested (the master, until it suggests a slave; the default)
    pullTimeout      time for which a failing pull is repeated before the query fails (30s)
    pullBatchSize    maximum messages per pull (32, the most that a RocketMQ broker sends)

The range of a queue is that of the master. With readFrom=slave it is that of a slave, so messages that only the master
has are not read. Sizes are unknown before reading, and only queued messages are read.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from time import monotonic, sleep
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ha.arrow import decode_pull_body
from ha.arrow.places import LIGHT_QUEUE_PREFIX
from ha.arrow.read_options import ReadCounts, ReadOptions, RowFilter
from ha.client import ClientOptions, MessageQueue, PullConsumer, PullStatus, RawPull, ReadFrom
from ha.errors import (
    BrokerError,
    ClientError,
    ConnectionFailed,
    NameServersUnreachable,
    OptionError,
    RemoteProtocolError,
    RouteNotFound,
)
from ha.protocol.codes import ResponseCode
from ha.protocol.properties import find_property
from ha.protocol.record import MessageRecord, decode_record
from ha.protocol.topic_names import AUTO_CREATE_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from ha.spark.option_values import GivenOptions, Table, choice, count, seconds
from ha.spark.source.log_source import Brokers, LogPartition, LogSource, QueueKey, QueueRange, QueueSlice
from ha.spark.source.network_pull import PullSettings, Slot, pull_slots, with_retries
from ha.spark.source.options import SourceOptions
from ha.spark.source.planning import report_loss

logger = logging.getLogger("ha.spark")

T = TypeVar("T")

GROUP = "halog-spark"
"""Consumer group of the pulls, which brokers require and create. No offsets are committed for it."""
_READ_FROM = {"master": ReadFrom.MASTER, "slave": ReadFrom.SLAVE, "suggested": ReadFrom.SUGGESTED}
_PULL_COUNT_MAX = 4096
_AWAY_PAUSE_S = 0.2
"""Interval in seconds at which name servers are asked for a broker that they don't know"""
_LIGHT_QUEUE_COLUMNS = ("topic", "queueOffset", "queueId", "propertiesString")
_OFFSET_DIGITS_MAX = 18  # fits into 64 bits
_MULTI_DISPATCH = (b"INNER_MULTI_DISPATCH", b"INNER_MULTI_QUEUE_OFFSET")
_NOBODYS_TOPICS = frozenset({AUTO_CREATE_TOPIC, "OFFSET_MOVED_EVENT", "BenchmarkTest", "SELF_TEST_TOPIC"})
"""Topics that RocketMQ registers on every broker for its own use"""


class NetworkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Name servers, and options of pulling. Part of every partition."""

    servers: tuple[str, ...]
    read_from: ReadFrom = ReadFrom.SUGGESTED
    pull_timeout_s: float = 30.0
    pull_count: int = 32


_VALUES: Table = {
    "readFrom": ("read_from", lambda name, text: _READ_FROM[choice(*_READ_FROM)(name, text)]),
    "pullTimeout": ("pull_timeout_s", seconds(0.1, 86_400, "100ms to 24 h, such as 10s")),
    "pullBatchSize": ("pull_count", count(most=_PULL_COUNT_MAX)),
}


def network_settings(servers: Sequence[str], given: Mapping[str, str]) -> NetworkSettings:
    """Returns the settings for the name servers `servers` and the options `given`. Raises OptionError for an invalid
    value."""
    return NetworkSettings(servers=tuple(servers), **GivenOptions(given).fields(_VALUES))


def open_network_source(options: SourceOptions) -> NetworkSource:
    """Opens a source for the name servers of the option `servers`. Raises OptionError if none answers or an option is
    invalid; ConnectionFailed if they know no broker; or another ClientError."""
    return NetworkSource(network_settings(options.servers, options.network))


class _Client:
    """A consumer on an event loop in its own thread, for synchronous callers."""

    def __init__(self, settings: NetworkSettings) -> None:
        self._settings = settings
        self._stack = ExitStack()
        self.portal: BlockingPortal = self._stack.enter_context(start_blocking_portal("asyncio"))
        consumer = PullConsumer(
            list(settings.servers),
            group=GROUP,
            read_from=settings.read_from,
            options=ClientOptions(request_timeout_s=min(5.0, settings.pull_timeout_s)),
        )
        try:
            self.consumer = self._stack.enter_context(self.portal.wrap_async_context_manager(consumer))
        except BaseException:
            self._stack.close()
            raise

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Runs `function` on the loop and returns its result. Raises OptionError instead of NameServersUnreachable."""
        try:
            return self.portal.call(function)
        except NameServersUnreachable as error:
            raise OptionError("servers", str(error), "name servers that are up, as host:port") from None

    def call_with_retries(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Calls `attempt` like `call`, and repeats it for up to pullTimeout on transient errors."""
        return self.call(lambda: with_retries(attempt, self._settings.pull_timeout_s))

    def close(self) -> None:
        self._stack.close()


class NetworkSource(LogSource):
    """Implements `LogSource` over name servers and brokers. Keeps its connections between calls."""

    def __init__(self, settings: NetworkSettings) -> None:
        self._settings = settings
        self._client = _Client(settings)
        self._queues: dict[str, list[QueueKey]] = {}
        self._topics: list[str] | None = None
        self._ranges: dict[QueueKey, QueueRange] = {}
        try:
            # Not retried if no name server answers: most likely the option is wrong. Nor if they know no broker: the
            # first one to register would be read without the others, which may follow up to 30 s later.
            self._brokers = Brokers(self._client.call(self._client.consumer.broker_names), are_registered=True)
            if not self._brokers:
                reason = "no broker is registered with the name servers (brokers register every 30 s)"
                raise ConnectionFailed(";".join(settings.servers), reason)
        except BaseException:
            self.close()
            raise

    def refresh(self) -> bool:
        """Drops cached answers, and asks for the brokers' names again at once. Returns True: the log may have changed.

        Known brokers stay known: name servers forget a broker while it restarts, and all brokers when they restart
        themselves.
        """
        self._queues.clear()
        self._ranges.clear()
        self._topics = None
        names = self._client.call_with_retries(self._client.consumer.broker_names)
        self._brokers = Brokers(sorted({*self._brokers, *names}), are_registered=True)
        return True

    def brokers(self) -> Brokers:
        """Returns the names of all brokers that the name servers have known since the source was opened, sorted."""
        return self._brokers

    def min_offset(self, broker: str) -> None:
        """Returns None: brokers report only the ranges of queues."""

    def topics(self) -> list[str]:
        """Returns the topics known to the name servers, sorted, except those that RocketMQ registers on every broker:
        _NOBODYS_TOPICS, and topics named after a broker."""
        if self._topics is None:
            known = self._client.call_with_retries(self._client.consumer.topics)
            self._topics = [topic for topic in known if topic not in _NOBODYS_TOPICS and topic not in self._brokers]
        return self._topics

    def queues(self, topics: frozenset[str] | None) -> list[QueueKey]:
        """Returns the readable queues of `topics`, or of all topics if None, sorted. An unknown topic has no queues."""
        found: list[QueueKey] = []
        for topic in self.topics() if topics is None else sorted(topics):
            if topic not in self._queues:
                self._queues[topic] = self._routed(topic)
            found += self._queues[topic]
        return sorted(found)

    def _routed(self, topic: str) -> list[QueueKey]:
        consumer = self._client.consumer
        try:
            queues = self._client.call_with_retries(lambda: consumer.queues(topic))
        except RouteNotFound:
            return []
        return [QueueKey(queue.topic, queue.broker_name, queue.queue_id) for queue in queues]

    def queue_range(self, queue: QueueKey) -> QueueRange:
        """Returns the range of `queue`, as reported by the broker that would be read from; (0, 0) if its topic was
        deleted.

        Raises ConnectionFailed if its broker is not registered, or another ClientError, after up to pullTimeout;
        OptionError if no name server answers, or if readFrom=slave and no slave can be read.
        """
        if queue not in self._ranges:
            # Callers ask for one queue after the other, so the ranges of all known queues are fetched at once.
            missing = [key for keys in self._queues.values() for key in keys if key not in self._ranges]
            self._ask_ranges(missing if queue in missing else [*missing, queue])
        return self._ranges[queue]

    def _ask_ranges(self, queues: Sequence[QueueKey]) -> None:
        consumer, portal = self._client.consumer, self._client.portal
        retry_s = self._settings.pull_timeout_s

        async def ask(key: QueueKey) -> QueueRange:
            queue = _message_queue(key)
            for _ in range(2):  # the broker may register between the two questions
                try:
                    # The end first: if the queue grows or is truncated in between, this is still a range.
                    end = await consumer.max_offset(queue)
                    begin = await consumer.min_offset(queue)
                except RouteNotFound:
                    if key.broker not in await consumer.broker_names():
                        raise ConnectionFailed(key.broker, "it is not registered with the name servers") from None
                else:
                    return QueueRange(min(begin, end), end)
            return QueueRange(0, 0)  # its topic was deleted

        futures = {key: portal.start_task_soon(with_retries, partial(ask, key), retry_s) for key in queues}
        try:
            for key, future in futures.items():
                self._ranges[key] = _result_of(future, f"{key}", self._settings)
        finally:
            for future in futures.values():
                future.cancel()

    def offset_for_time(self, queue: QueueKey, timestamp_ms: int) -> int | None:
        """Returns the queue offset of the first message stored at or after `timestamp_ms`; None if there is none.

        Brokers differ in their answer for a time between two messages or after the last one (RocketMQ 4.9: the
        nearest), so the search only starts at their answer.
        """
        begin, end = self.queue_range(queue)
        if begin >= end:
            return None
        consumer, target = self._client.consumer, _message_queue(queue)
        guess = self._client.call_with_retries(lambda: consumer.offset_for_time(target, timestamp_ms))
        low, high = begin, end  # messages before low are earlier than the time; those from high on are not
        probe = min(max(guess, begin), end - 1)
        probes = [probe, probe - 1]
        while low < high:
            middle = next((offset for offset in probes if low <= offset < high), (low + high) // 2)
            probes = [offset for offset in probes if offset != middle]
            # The next message that can be read decides.
            at, stored_ms = self._next(target, middle, high, attrgetter("store_timestamp_ms"))
            if stored_ms is None or stored_ms >= timestamp_ms:
                high = middle
            else:
                low = at + 1
        return low if low < end else None

    def _next(
        self, queue: MessageQueue, at: int, end: int, value_of: Callable[[MessageRecord], int]
    ) -> tuple[int, int | None]:
        """Pulls from `at` on until the broker returns a message that can be decoded. Returns the queue offset of the
        last pull, and `value_of` its first message; as the value, -1 (lower than any other) if the message at this
        offset was deleted, and None if no pull before `end` returned such a message.

        The message may be at a later offset than the pull. Its record does not always have that offset: records of
        light queues have offsets of other queues, and those of inner batches the offset of the first message.
        """
        max_messages = 1
        while at < end:
            raw = self._pull(queue, at, max_messages)
            if at < raw.min_offset:
                return at, -1
            record = _first_record(raw)
            if record is not None:
                return at, value_of(record)
            is_damaged = raw.status is PullStatus.FOUND
            if not is_damaged or max_messages == 1:
                at = max(at + 1, raw.next_offset)
            # halog's brokers examine no more messages than requested.
            max_messages = 1 if is_damaged else self._settings.pull_count
        return at, None

    def physical_offset(self, queue: QueueKey, queue_offset: int) -> int:
        """Pulls a message and returns its physical offset; -1 if it no longer exists or can't be read, or if its record
        has another queue offset (light queues, inner batches)."""
        record = _first_record(self._pull(_message_queue(queue), queue_offset, max_messages=1))
        return record.physical_offset if record is not None and record.queue_offset == queue_offset else -1

    def first_physical_offset(self, queue: QueueKey, begin: int, end: int) -> int:
        """Pulls from `begin` on until the broker returns a message that can be decoded, and returns its physical
        offset; -1 if no pull before `end` does, or if messages were deleted meanwhile."""
        _, found = self._next(_message_queue(queue), begin, end, attrgetter("physical_offset"))
        return -1 if found is None else found

    def _pull(self, queue: MessageQueue, queue_offset: int, max_messages: int) -> RawPull:
        consumer = self._client.consumer
        return self._client.call_with_retries(lambda: consumer.pull_raw(queue, queue_offset, max_messages=max_messages))

    def queue_bytes(self, queue: QueueKey, begin: int, end: int) -> int | None:
        """Returns None: the size is unknown before the records are read."""
        return None

    def queue_partition(self, slices: Sequence[QueueSlice]) -> LogPartition:
        """Returns a task's partition for `slices`."""
        return NetworkPartition(tuple(slices), self._settings)

    def range_partitions(
        self, bytes_each: int, count_min: int, topics: frozenset[str] | None
    ) -> list[LogPartition] | None:
        """Returns None: brokers are read by queue."""
        return None

    def close(self) -> None:
        """Closes the connections and ends the thread."""
        self._client.close()


class NetworkPartition(LogPartition):
    """Pulls slices of queues, one slice after the other."""

    def __init__(self, slices: tuple[QueueSlice, ...], settings: NetworkSettings) -> None:
        super().__init__()
        self.slices = slices
        self.settings = settings

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Yields the rows in the slices' order. The next pulls run while a batch is decoded. Raises the errors of
        `pull_slots`, RecordsGone for a deleted topic, and OptionError as `NetworkSource.queue_range` does."""
        client = _Client(self.settings)
        try:
            for piece in self.slices:
                yield from _read_slice(client, piece, self.settings, options)
        finally:
            client.close()


def _read_slice(
    client: _Client, piece: QueueSlice, settings: NetworkSettings, options: ReadOptions
) -> Iterator[pa.RecordBatch]:
    queue = _message_queue(piece.queue)
    begin, end = piece.begin, piece.end
    tags = _broker_tags(piece.queue.topic, options.where.tags)
    pulls = PullSettings(
        slot_entries=settings.pull_count,
        retry_s=settings.pull_timeout_s,
        tags=tags,
        fail_on_data_loss=options.fail_on_data_loss,
    )

    def start(at: int) -> Future[list[Slot]]:
        return client.portal.start_task_soon(pull_slots, client.consumer, queue, at, end, pulls)

    at = begin
    waiting = start(at) if at < end else None
    give_up_s: float | None = None  # set while the broker is away
    was_there = False
    bodies: list[bytes] = []
    size = entry_count = 0
    counts = ReadCounts()
    try:
        while waiting is not None:
            try:
                slots = _result_of(waiting, f"{piece.queue}", settings)
            except BrokerError as error:
                if error.code != ResponseCode.TOPIC_NOT_EXIST:
                    raise
                is_there = piece.queue.broker in client.call_with_retries(client.consumer.broker_names)
                if give_up_s is None:
                    give_up_s = monotonic() + settings.pull_timeout_s
                elif not is_there and monotonic() > give_up_s:
                    raise
                if not (is_there and was_there):  # the broker may be restarting, or have just registered
                    was_there = is_there
                    sleep(0 if is_there else _AWAY_PAUSE_S)
                    waiting = start(at)
                    continue
                report_loss(options.fail_on_data_loss, str(piece.queue), at, end, "its topic was deleted")
                slots = [Slot(end, end)]
            at = slots[-1].end
            give_up_s, was_there = None, False
            waiting = start(at) if at < end else None
            counts.gone += sum(slot.gone for slot in slots)
            for slot in slots:
                if tags or slot.has_batches:
                    # Messages before or after a slot are in the adjacent one as well.
                    if bodies:
                        yield from _decoded(bodies, piece.queue, options, counts)
                        bodies, size, entry_count = [], 0, 0
                    yield from _decoded(slot.bodies, piece.queue, _within(options, slot.begin, slot.end), counts)
                    continue
                bodies += slot.bodies
                size += sum(map(len, slot.bodies))
                entry_count += slot.end - slot.begin
            if bodies and (waiting is None or entry_count >= options.batch_rows or size >= options.batch_bytes):
                yield from _decoded(bodies, piece.queue, options, counts)
                bodies, size, entry_count = [], 0, 0
    finally:
        if waiting is not None:
            waiting.cancel()  # closing the client would wait for it
    if counts.damaged or counts.gone:
        logger.warning(
            "source.records_missing queue=%r damaged=%d skipped=%d gone=%d",
            str(piece.queue),
            counts.damaged,
            counts.skipped,
            counts.gone,
        )


def _decoded(
    bodies: list[bytes], queue: QueueKey, options: ReadOptions, counts: ReadCounts
) -> Iterator[pa.RecordBatch]:
    if not bodies:
        return
    columns, is_light = options.columns, queue.topic.startswith(LIGHT_QUEUE_PREFIX)
    if is_light:
        more = [name for name in _LIGHT_QUEUE_COLUMNS if name not in columns]
        options = msgspec.structs.replace(options, columns=(*columns, *more))
    for batch in decode_pull_body(b"".join(bodies), broker_name=queue.broker, options=options, counts=counts):
        if is_light:
            batch = _in_light_queue(batch, queue).select(list(columns))
        for first in range(0, batch.num_rows, options.batch_rows):
            yield batch.slice(first, options.batch_rows)


def _in_light_queue(batch: pa.RecordBatch, queue: QueueKey) -> pa.RecordBatch:
    """Returns `batch` with the queue ids and queue offsets that its messages have in the light queue `queue`.

    Two properties of a message list the names of its light queues and its offsets in them, separated by commas
    (RocketMQ: MQClientAPIImpl.processPopResponse). The queue offset is null if `queue` is not listed. If a message was
    sent to the light queue itself, its record has the offset.
    """
    offsets: list[int | None] = []
    columns = (batch.column(name).to_pylist() for name in _LIGHT_QUEUE_COLUMNS)
    for topic, queue_offset, _, properties in zip(*columns, strict=True):
        if topic != queue.topic:
            names, places = (find_property((properties or "").encode(), name) or "" for name in _MULTI_DISPATCH)
            places_by_name = dict(zip(names.split(","), places.split(","), strict=False))
            place = places_by_name.get(queue.topic, "")
            queue_offset = int(place) if place.isdecimal() and len(place) <= _OFFSET_DIGITS_MAX else None
        offsets.append(queue_offset)
    values = {"queueOffset": offsets, "queueId": [queue.queue_id] * batch.num_rows}
    for name, column in values.items():
        index = batch.schema.get_field_index(name)
        batch = batch.set_column(index, batch.schema.field(index), pa.array(column, batch.schema.field(index).type))
    return batch


def _within(options: ReadOptions, begin: int, end: int) -> ReadOptions:
    where = options.where.restrict(RowFilter(queue_offset_begin=begin, queue_offset_end=end))
    return msgspec.structs.replace(options, where=where)


def _broker_tags(topic: str, tags: frozenset[str] | None) -> tuple[str, ...]:
    """Returns the tags by which the broker filters; none (no filter) if a tag can't be part of a tag expression.

    Also none for a light queue, as its records have the offsets of other queues, which don't show which rows are after
    the end of a slot; and none for delayed messages, as their queue entries have a time instead of the tags' hash.
    """
    if topic.startswith(LIGHT_QUEUE_PREFIX) or topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
        return ()
    if not tags or any(not tag or "|" in tag or tag != tag.strip() or tag == "*" for tag in tags):
        return ()
    return tuple(sorted(tags))


def _result_of(future: Future[Any], what: str, settings: NetworkSettings) -> Any:
    try:
        return future.result()
    except NameServersUnreachable as error:
        raise OptionError("servers", str(error), "name servers that are up, as host:port") from None
    except BrokerError as error:
        if settings.read_from is ReadFrom.SLAVE and "slaveReadEnable" in error.remark:
            raise OptionError("readFrom", f"{what}: {error}", "master, or slaves with slaveReadEnable=true") from None
        raise
    except ClientError as error:
        if settings.read_from is ReadFrom.SLAVE and "no slave" in str(error):
            raise OptionError("readFrom", f"{what}: {error}", "master or suggested") from None
        raise


def _first_record(raw: RawPull) -> MessageRecord | None:
    """Returns the first record of an answer; None if there is none, or if it is damaged."""
    if raw.status is not PullStatus.FOUND:
        return None
    try:
        return decode_record(raw.body, verify_crc=False)
    except RemoteProtocolError:
        return None


def _message_queue(key: QueueKey) -> MessageQueue:
    return MessageQueue(key.topic, key.broker, key.queue_id)
