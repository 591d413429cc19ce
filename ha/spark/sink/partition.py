"""Writes one task's part: finds the rows that earlier attempts stored, sends the rest, and reports all queue offsets.

    first row          read the commit topic: if the batch is committed already, send nothing.
    first row of a     look for messages of this part, from where an earlier attempt can have begun (floors) to each
    topic              queue's end. If no record has the floors of a broker, write one first (begin).
    each row           found: match it, send nothing. Otherwise add it to a request, to the next queue or to its own.
    a request          stored; or certainly not stored, and repeated; or unknown (no answer, or FLUSH_SLAVE_TIMEOUT):
                       then a fence is stored after it, its queue is read, and the missing messages are sent again.

Usually the commit topic is read once, each queue is asked for its end, and nothing is found; only messages that others
sent to the topic since the sink's last commit are scanned.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Iterable, Sequence, Set
from contextlib import asynccontextmanager
from zlib import crc32

import anyio
import msgspec
import pyarrow as pa

from ha.client import (
    Admin,
    ClientOptions,
    Compression,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    ReadFrom,
    SendStatus,
)
from ha.errors import (
    BrokerError,
    ConnectionFailed,
    LocalProtocolError,
    RemoteProtocolError,
    RequestTimedOut,
    RouteNotFound,
    SinkFailed,
)
from ha.protocol.properties import find_property
from ha.protocol.record import CRC_MASK, decode_records
from ha.spark.calls import bounded_calls, unwrapped_tasks
from ha.spark.sink.control import (
    PASSING,
    PAUSE_S,
    CommitTopic,
    ControlRecord,
    Floors,
    History,
    Ranges,
    existing_queues,
)
from ha.spark.sink.identity import HASH_DIGITS, SINK_PROPERTY_BYTES, SinkPart, UniqueKeys, hash_number
from ha.spark.sink.options import SinkOptions
from ha.spark.sink.rows import Row, read_rows, with_identity
from ha.spark.source.network_pull import PullSettings, pull_slots, with_retries

_log = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 10.0
_NEW_TOPIC_PATIENCE_S = 5.0
"""Maximum time in seconds to wait until the name servers know a topic that an earlier attempt may have created"""
SETTLE_S = 2.5
"""Time in seconds for which a cancelled attempt may continue to send: slightly more than spark.python.task.killTimeout
(2 s)"""
_UNSENT_REQUESTS_MAX = 8
"""Maximum number of rows that wait for more rows of their topic and queue, in multiples of batchSize; beyond it, all
are sent."""


class Doubtful(msgspec.Struct):
    """Rows in one queue that may not be stored safely: their queue offsets, as [begin, end), and the sum of their
    hashes, by which they are recognized when they are read again."""

    spans: list[tuple[int, int]] = []
    hash_sum: int = 0


class PartResult(msgspec.Struct):
    """A task's result for the driver.

    `row_count`: rows of this part, of which `found_count` were stored by earlier attempts. `strays`: number of messages
    of earlier attempts that match no row. `ranges`: where the rows are. `floors`: the highest known end of each queue
    of the topics. `doubtful`: rows whose broker must store a fence before the commit, and must then still have them.
    `already_committed`: whether the batch was committed before, so that nothing was sent.
    """

    part: SinkPart
    already_committed: bool = False
    committed_row_count: int = 0
    """Number of rows of the whole batch, from its commit"""
    row_count: int = 0
    found_count: int = 0
    strays: int = 0
    ranges: Ranges = {}
    floors: Floors = {}
    doubtful: dict[MessageQueue, Doubtful] = {}

    def add(self, queue: MessageQueue, begin: int, keys: Sequence[str], *, is_doubtful: bool) -> None:
        """Records that rows with these UNIQ_KEYs, or hashes, are at the queue offsets of `queue` from `begin` on."""
        end = begin + len(keys)
        of_queue = self.ranges.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})
        _extend(of_queue.setdefault(queue.queue_id, []), begin, end)
        if is_doubtful:
            doubtful = self.doubtful.setdefault(queue, Doubtful())
            _extend(doubtful.spans, begin, end)
            doubtful.hash_sum += sum(map(hash_number, keys))
        self.row_count += len(keys)
        self.see_end(queue, end)

    def see_end(self, queue: MessageQueue, end: int) -> None:
        """Records that `queue` has messages up to queue offset `end`."""
        ends = self.floors.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})
        ends[queue.queue_id] = max(end, ends.get(queue.queue_id, 0))


class _Found(msgspec.Struct, frozen=True):
    queue: MessageQueue
    queue_offset: int


class _Request(msgspec.Struct):
    """Messages sent together, to one queue."""

    queue: MessageQueue
    messages: list[Message]
    keys: list[str]


class _Waiting(msgspec.Struct):
    """Rows of one topic and, if pinned, queue that are not yet in a request."""

    messages: list[Message] = []
    keys: list[str] = []
    size: int = 0


class _Topic(msgspec.Struct):
    """A topic being written to. `turn`: index of the queue for the next request, modulo the number of queues.

    `begins`: queue offsets before which this attempt has stored no message.
    """

    queues: list[MessageQueue]
    turn: int
    begins: dict[MessageQueue, int]


@asynccontextmanager
async def open_clients(options: SinkOptions) -> AsyncIterator[tuple[Producer, PullConsumer, CommitTopic]]:
    """Opens the producer, the consumer that looks for earlier messages (at masters) and the commit topic."""
    client = ClientOptions(send_timeout_s=min(_REQUEST_TIMEOUT_S, options.send_timeout_s), compression=Compression.NONE)
    group = options.producer_group
    async with (
        Producer(list(options.servers), group=group, options=client) as producer,
        PullConsumer(list(options.servers), group=group, read_from=ReadFrom.MASTER, options=client) as consumer,
    ):
        yield producer, consumer, CommitTopic(producer, consumer, options.commit_topic, options.send_timeout_s)


class PartWriter:
    """Writes the rows of one attempt at `part`.

    `is_repeated`: whether an earlier attempt failed or was cancelled; it may continue to send for `settle_s` (seconds).
    `since_ms`: no attempt at this part is older than this time (ms since 1970); None if unknown.
    """

    def __init__(
        self,
        options: SinkOptions,
        part: SinkPart,
        clients: tuple[Producer, PullConsumer, CommitTopic],
        *,
        is_repeated: bool = False,
        since_ms: int | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._options = options
        self._part = part
        self._producer, self._consumer, self._commits = clients
        self._is_repeated = is_repeated
        self._since_ms = since_ms
        self._settle_s = settle_s
        self._keys = UniqueKeys(part)
        self._result = PartResult(part)
        self._history: History | None = None
        self._own_begin_count = 0
        self._topics: dict[str, _Topic] = {}
        self._found: dict[str, list[_Found]] = {}
        self._waiting: dict[tuple[str, MessageQueue | None], _Waiting] = {}

    async def write(self, batches: Iterable[pa.RecordBatch]) -> PartResult:
        """Stores every row once; only counts the rows if the batch is committed already.

        Raises SinkFailed, ClientError or RecordsGone if that fails; the next attempt finds what was stored by then.
        """
        for batch in batches:
            if batch.num_rows == 0:
                continue
            if self._history is None:
                await self._open()
            if self._result.already_committed:
                self._result.row_count += batch.num_rows
                continue
            await self._write_batch(batch)
        left = [found for of_hash in self._found.values() for found in of_hash]
        if left:
            self._result.strays = len(left)
            _log.warning("sink.strays_found part=%s count=%d first=%r", self._part.text, len(left), left[0])
        return self._result

    async def _open(self) -> None:
        self._history = history = await self._commits.history(self._part.sink, self._since_ms)
        if history.committed_batch > self._part.batch:
            raise SinkFailed(
                f"batch {self._part.batch} of {self._part.sink} is to be written, and batch {history.committed_batch} "
                "is committed already: the checkpoint was set back, so that its batches need not be those in the log. "
                "Begin with a new checkpoint, and with startingOffsets after the committed rows"
            )
        if history.commit is not None and history.committed_batch == self._part.batch:
            self._result.already_committed = True
            self._result.committed_row_count = history.commit.row_count
            _log.info("sink.batch_already_committed part=%s", self._part.text)

    async def _write_batch(self, batch: pa.RecordBatch) -> None:
        """Stores the rows of one Arrow batch. All requests are answered on return, as Spark may then block the event
        loop for its next batch, during which no answer could be handled in time."""
        async with bounded_calls(self._send, self._options.in_flight) as start_sending:
            for row in read_rows(batch, self._options.topic):
                topic = self._topics.get(row.message.topic)
                if topic is None:
                    topic = await self._open_topic(row.message.topic)
                row_hash = self._keys.hash(row.head, row.message.body)
                found = self._found.get(row_hash)
                if found:
                    self._claim(row_hash, found)
                    continue
                for request in self._join(row, topic, row_hash):
                    await start_sending(request)
            for request in self._drain():
                await start_sending(request)

    def _claim(self, row_hash: str, found: list[_Found]) -> None:
        claimed = found.pop(0)
        if not found:
            del self._found[row_hash]
        self._result.add(claimed.queue, claimed.queue_offset, [row_hash], is_doubtful=True)
        self._result.found_count += 1

    def _join(self, row: Row, topic: _Topic, row_hash: str) -> list[_Request]:
        """Adds a row to the pending rows of its topic and queue; returns the requests that are now full."""
        pinned = self._pinned(row, topic)
        place = (row.message.topic, pinned)
        waiting = self._waiting.get(place)
        if waiting is None:
            waiting = self._waiting[place] = _Waiting([], [])
        size = len(row.message.body) + len(row.head) + 200
        full = []
        if waiting.messages and waiting.size + size > self._options.batch_bytes:
            full.append(self._request(place))
            waiting = self._waiting[place] = _Waiting([], [])
        key = self._keys.key(row_hash)
        waiting.messages.append(with_identity(row.message, self._part.text, key))
        waiting.keys.append(key)
        waiting.size += size
        if len(waiting.messages) >= self._options.batch_row_count:
            full.append(self._request(place))
        elif len(self._waiting) > _UNSENT_REQUESTS_MAX:
            rows = sum(len(other.messages) for other in self._waiting.values())
            if rows > _UNSENT_REQUESTS_MAX * self._options.batch_row_count:
                full += self._drain()
        return full

    def _drain(self) -> list[_Request]:
        return [self._request(place) for place in list(self._waiting)]

    def _request(self, place: tuple[str, MessageQueue | None]) -> _Request:
        waiting = self._waiting.pop(place)
        name, queue = place
        if queue is None:
            topic = self._topics[name]
            queue = topic.queues[topic.turn % len(topic.queues)]
            topic.turn += 1
        return _Request(queue, waiting.messages, waiting.keys)

    def _pinned(self, row: Row, topic: _Topic) -> MessageQueue | None:
        if row.queue_id is None:
            return None
        fitting = [
            queue
            for queue in topic.queues
            if queue.queue_id == row.queue_id and row.broker_name in (None, queue.broker_name)
        ]
        if not fitting:
            of_broker = f" of broker {row.broker_name}" if row.broker_name else ""
            has = ", ".join(f"{queue.broker_name}:{queue.queue_id}" for queue in topic.queues)
            raise SinkFailed(f"queueId: {row.message.topic} has no queue {row.queue_id}{of_broker}; it has {has}")
        return fitting[self._part.partition % len(fitting)]

    async def _open_topic(self, name: str) -> _Topic:
        """Prepares for sending to a topic: finds its queues, records that the part begins, and finds the messages of
        earlier attempts. If there was an earlier attempt, waits until it has ended."""
        history = self._history
        assert history is not None
        part = self._part
        queues = await self._queues(name)
        floors = history.floors(name, part.batch, part.partition)
        has_begun = history.begin_count(part.batch, part.partition) > self._own_begin_count
        if new := [queue for queue in queues if queue.broker_name not in floors]:
            ends = await self._ends(new, may_be_new=False)
            begin = ControlRecord("begin", part.sink, part.batch, part.partition, {name: _by_broker(ends)})
            await self._commits.wait_pullable(await self._commits.append(begin))
            # Another attempt's begin may have been stored, but not pullable yet, when the history was read.
            self._history = history = await self._commits.history(part.sink, self._since_ms)
            floors = _by_broker(ends) | history.floors(name, part.batch, part.partition)
            self._own_begin_count += 1
            has_begun = has_begun or history.begin_count(part.batch, part.partition) > self._own_begin_count
        has_begun = has_begun or self._is_repeated
        if has_begun:
            await self._fence(queues)
        ends = await self._ends(queues, may_be_new=has_begun)
        absent = floors.keys() - {queue.broker_name for queue in queues}
        await self._check_without_rows(name, absent)
        starts = {queue: floors.get(queue.broker_name, {}).get(queue.queue_id, 0) for queue in queues}
        await self._find_all(starts, ends)
        if has_begun or self._found:
            # Spark lets a cancelled task's Python process run for a while, so wait until it has ended.
            await anyio.sleep(self._settle_s)
            await self._check_without_rows(name, absent)
            await self._fence(queues)
            starts, ends = ends, await self._ends(queues, may_be_new=False)
            await self._find_all(starts, ends)
        for queue, end in ends.items():
            self._result.see_end(queue, end)
        topic = self._topics[name] = _Topic(queues, part.partition + part.batch, ends)
        return topic

    async def _queues(self, name: str) -> list[MessageQueue]:
        try:
            queues = await with_retries(lambda: self._producer.queues(name), self._options.send_timeout_s)
        except RouteNotFound:
            raise SinkFailed(
                f"topic: no name server of servers={','.join(self._options.servers)} knows {name}, and brokers there "
                "do not create topics automatically; create it"
            ) from None
        except ConnectionFailed as error:
            raise SinkFailed(f"servers: {error}") from None
        if not queues:
            raise SinkFailed(f"topic: no broker has a queue of {name} that can be written to")
        return queues

    async def _check_without_rows(self, topic: str, broker_names: Set[str]) -> None:
        """Checks that none of these brokers, to which no row can be sent now, can hold rows: none has the topic. Raises
        SinkFailed if one has it, or if its master does not answer.

        A producer assumes queues on every broker for a topic that does not exist yet, and a broker creates the topic
        with the first message, so records have floors of brokers that never got the topic. The brokers themselves are
        asked, as the name servers may learn of a new topic later.
        """
        if not broker_names:
            return
        reasons: dict[str, str] = {}
        async with Admin(list(self._options.servers)) as admin:
            for broker_name in sorted(broker_names):
                try:
                    if topic in await admin.topic_configs(broker_name):
                        reasons[broker_name] = (
                            f"{broker_name} has the topic, and its queues are not known or not writable"
                        )
                except (BrokerError, ConnectionFailed, RequestTimedOut) as error:
                    reasons[broker_name] = str(error)
        if reasons:
            # Messages of an earlier attempt there would be sent again to the other queues.
            raise SinkFailed(
                f"{topic}: no master of {', '.join(reasons)} can be written to, and it may hold rows of batch "
                f"{self._part.batch} already; start the query again when it can ({'; '.join(reasons.values())})"
            )

    async def _ends(self, queues: list[MessageQueue], *, may_be_new: bool) -> dict[MessageQueue, int]:
        """Returns the max offset of each queue; 0 for those that do not exist yet.

        `may_be_new`: they may just have been created and have rows, so wait up to _NEW_TOPIC_PATIENCE_S for the name
        servers to know them. Raises SinkFailed as in `_check_without_rows` for the brokers of those that are not known
        by then, since a restarting broker's queues are unknown, too.
        """
        give_up = anyio.current_time() + _NEW_TOPIC_PATIENCE_S
        topic = queues[0].topic
        # The route is looked up here as well, as the producer assumes queues for a topic that does not exist.
        while unknown := set(queues).difference(await existing_queues(self._consumer, topic)):
            if not may_be_new or anyio.current_time() > give_up:
                break
            await anyio.sleep(PAUSE_S)
        if may_be_new:
            await self._check_without_rows(topic, {queue.broker_name for queue in unknown})
        ends = dict.fromkeys(queues, 0)

        async def ask(queue: MessageQueue) -> None:
            ends[queue] = await with_retries(lambda: self._consumer.max_offset(queue), self._options.send_timeout_s)

        async with unwrapped_tasks() as tasks:
            for queue in queues:
                if queue not in unknown:
                    tasks.start_soon(ask, queue)
        return ends

    async def _fence(self, queues: list[MessageQueue]) -> None:
        for broker_name in sorted({queue.broker_name for queue in queues}):
            await self._commits.fence(broker_name)

    async def _find_all(self, starts: dict[MessageQueue, int], ends: dict[MessageQueue, int]) -> None:
        for queue, end in ends.items():
            start = starts[queue]
            # A queue that ends before its floor was deleted and created again.
            await self._find(queue, start if start <= end else 0, end)

    async def _find(self, queue: MessageQueue, begin: int, end: int) -> None:
        """Adds the messages of this part in queue offsets [begin, end) to `_found`, by the hash of their row."""
        async for queue_offset, key in self._own_rows(queue, begin, end):
            self._found.setdefault(key[:HASH_DIGITS], []).append(_Found(queue, queue_offset))

    def _own_rows(self, queue: MessageQueue, begin: int, end: int) -> AsyncIterator[tuple[int, str]]:
        return rows_of_part(self._consumer, self._part, queue, begin, end, self._options.send_timeout_s)

    async def _send(self, request: _Request) -> None:
        """Stores `request` once. Raises SinkFailed if it can't be stored within sendTimeout, or if the broker refuses
        it."""
        queue = request.queue
        give_up = anyio.current_time() + self._options.send_timeout_s
        pause_s = PAUSE_S
        while True:
            is_unknown = False
            try:
                result = await self._producer.send_batch(request.messages, queue=queue)
            except (RequestTimedOut, ConnectionFailed) as error:
                reason = str(error)
                is_unknown = True
            except BrokerError as error:
                if error.code not in PASSING:
                    raise SinkFailed(f"{queue.topic}: the broker refuses rows for good: {error}") from None
                reason = str(error)
            except (ValueError, LocalProtocolError) as error:
                raise SinkFailed(f"{queue.topic}: a row can't be a message: {error}") from None
            else:
                count = len(request.messages)
                if result.status is not SendStatus.FLUSH_SLAVE_TIMEOUT:
                    is_doubtful = result.status not in self._options.accepted
                    self._result.add(result.queue, result.queue_offset, request.keys, is_doubtful=is_doubtful)
                    return
                # In a failover group, another master may have replaced this one, without these messages.
                if await self._was_stored(request, result.queue_offset):
                    return
                reason = f"{len(request.messages)} of {count} rows that were answered {result.status.value} are missing"
            if anyio.current_time() > give_up:
                raise SinkFailed(
                    f"{queue.topic} queue {queue.queue_id} of {queue.broker_name} took no rows for "
                    f"{self._options.send_timeout_s:g} s (sendTimeout): {reason}"
                )
            await anyio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, 2.0)
            if is_unknown and await self._was_stored(request, self._topics[queue.topic].begins.get(queue, 0)):
                return

    async def _was_stored(self, request: _Request, begin: int) -> bool:
        """Looks for the messages of `request` in its queue from queue offset `begin` on, removes the stored ones from
        it, and returns whether none is left."""
        queue = request.queue
        _log.info("sink.lookup_started part=%s queue=%r rows=%d", self._part.text, queue, len(request.keys))
        await self._commits.fence(queue.broker_name)
        end = (await self._ends([queue], may_be_new=True))[queue]
        wanted, stored = set(request.keys), set()
        async for queue_offset, key in self._own_rows(queue, begin, end):
            if key in wanted and key not in stored:
                stored.add(key)
                self._result.add(queue, queue_offset, [key], is_doubtful=True)
        left = [pair for pair in zip(request.messages, request.keys, strict=True) if pair[1] not in stored]
        request.messages, request.keys = [message for message, _ in left], [key for _, key in left]
        return not left


async def rows_of_part(
    consumer: PullConsumer, part: SinkPart, queue: MessageQueue, begin: int, end: int, retry_s: float
) -> AsyncIterator[tuple[int, str]]:
    """Yields the queue offset and UNIQ_KEY of each message of `part` in queue offsets [begin, end) of `queue`, except
    those with a damaged body, which are sent again.

    `retry_s`: see PullSettings. Raises SinkFailed if a message can't be decoded; the errors of `pull_slots`.
    """
    settings = PullSettings(retry_s=retry_s, fail_on_data_loss=False)
    mark = b"%b\x01%b" % (SINK_PROPERTY_BYTES, part.text.encode())
    at = begin
    while at < end:
        for slot in await pull_slots(consumer, queue, at, end, settings):
            at = slot.end
            for body in slot.bodies:
                if mark not in body:
                    continue  # no message of this part
                try:
                    records = decode_records(body, verify_crc=False)
                except RemoteProtocolError as error:
                    raise SinkFailed(f"{queue.topic} queue {queue.queue_id} can't be read: {error}") from None
                for record in records:
                    is_own = find_property(record.properties, SINK_PROPERTY_BYTES) == part.text
                    if is_own and crc32(record.body) & CRC_MASK == record.body_crc:
                        yield record.queue_offset, find_property(record.properties, b"UNIQ_KEY") or ""


def _extend(spans: list[tuple[int, int]], begin: int, end: int) -> None:
    """Adds [begin, end) to `spans`."""
    if spans and spans[-1][1] == begin:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((begin, end))


def _by_broker(ends: dict[MessageQueue, int]) -> dict[str, dict[int, int]]:
    floors: dict[str, dict[int, int]] = {}
    for queue, end in ends.items():
        floors.setdefault(queue.broker_name, {})[queue.queue_id] = end
    return floors
