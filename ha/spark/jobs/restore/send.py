"""Sends the messages of one task of a restore into queues, each once and in order.

Every message sent has two properties:

    HALOG_REPLAY   the replay's id
    HALOG_ORIGIN   topic "/" broker name "/" queue id "/" queue offset of the original

The messages of one source queue go to one target queue in order; each request is sent only when the previous one is
known to be stored. If a message is in the target queue, all earlier ones of its source queue are therefore there, too.
After a kill, a retry, a missing answer or FLUSH_SLAVE_TIMEOUT, the task reads the target queue backwards from its end,
at most to its end when the replay began, until it finds a message of the replay and source queue, and continues after
that message. docs/spark.md lists the cases in which this fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import anyio
import msgspec
import pyarrow as pa

from ha.arrow.plain import inflate
from ha.client import (
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
    RestoreFailed,
)
from ha.protocol.codes import ResponseCode, SysFlag
from ha.protocol.properties import decode_properties
from ha.protocol.topic_names import RETRY_PREFIX
from ha.spark.sink.control import PASSING
from ha.spark.sink.identity import SINK_PROPERTY

REPLAY_PROPERTY = "HALOG_REPLAY"
ORIGIN_PROPERTY = "HALOG_ORIGIN"
BORN_PROPERTY = "HALOG_BORN_TIMESTAMP"
"""Name of the property with the original born time in ms since 1970; the new message has a new born time."""
SENT_COLUMNS = (
    "topic",
    "brokerName",
    "queueId",
    "queueOffset",
    "physicalOffset",
    "body",
    "propertiesString",
    "bornTimestamp",
    "sysFlag",
    "flag",
    "crcOk",
)
"""Columns that a task reads of each row"""

DROPPED_PROPERTIES = frozenset(
    {
        # The broker sets these itself.
        "CLUSTER",
        "MSG_REGION",
        "TRACE_ON",
        "__CRC32#",
        "INNER_MULTI_QUEUE_OFFSET",
        "INNER_NUM",
        "INNER_BASE",
        # These describe how the original was sent. With them, the broker would delay the message or wait for a commit.
        "WAIT",
        "DELAY",
        "TIMER_DELAY_SEC",
        "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS",
        "TIMER_OUT_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS",
        "TIMER_ROLL_TIMES",
        "TIMER_DEL_UNIQKEY",
        "TRAN_MSG",
        "TRANSACTION_CHECK_TIMES",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "REAL_TOPIC",
        "REAL_QID",
        # With these, a broker may store a retry as a dead letter, in a topic that is not searched.
        "RECONSUME_TIME",
        "MAX_RECONSUME_TIMES",
        # Readers with isolation=read_committed would look for a commit that names this message's new queue offset.
        SINK_PROPERTY,
        # State of a consumption in progress.
        "POP_CK",
        "POP_CK_OFFSET",
        "1ST_POP_TIME",
        "MIN_OFFSET",
        "MAX_OFFSET",
        "CONSUME_START_TIME",
    }
)
"""Properties that are not restored. All others are kept: the application's own, KEYS, TAGS, UNIQ_KEY (it is the same
message) and the history of the message's consumption (RETRY_TOPIC, ORIGIN_MESSAGE_ID, …)."""

_REQUEST_BYTES = 512 << 10
_REQUEST_MESSAGES = 256
_MESSAGE_OVERHEAD = 64
_ATTEMPTS = 6
_PAUSE_S = 0.5
_SETTLE_S = 0.2
_SETTLE_MAX_S = 5.0
_CONFIRM_S = 60.0
"""Maximum time in seconds to wait until messages that were answered FLUSH_SLAVE_TIMEOUT can be read, before the queue
is searched for them. A master of a failover group usually confirms them earlier, without the members that are behind,
or steps down
"""
_NEW_TOPIC_PATIENCE_S = 5.0
_WINDOW = 256
_WINDOW_MAX = 8192


class TargetQueue(msgspec.Struct, frozen=True):
    """A queue that messages are sent to. `floor`: its end (queue offset) when the replay began."""

    queue: MessageQueue
    floor: int


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all tasks of a replay share."""

    servers: str
    replay_id: str
    targets: tuple[TargetQueue, ...]
    """The queues to send to, sorted by broker and queue"""
    source_brokers: tuple[str, ...]
    """The source's brokers in the order of their discovery"""
    messages_per_s: float | None
    """Maximum number of messages per second of one task; None: no limit"""
    skip_unsendable: bool
    is_again: bool
    """Whether an earlier run may have sent some of the messages"""

    def target_of(self, broker_name: str, queue_id: int) -> TargetQueue:
        """Returns the target of queue `queue_id` of the source broker `broker_name`, one of `source_brokers`.

        It is on the target topic's broker of the same name. If there is none, the broker is chosen by the position of
        `broker_name` in `source_brokers`, modulo the number of the topic's brokers. Of the chosen broker's queues, the
        target is the one at index `queue_id`, modulo their number.
        """
        names = sorted({target.queue.broker_name for target in self.targets})
        name = broker_name
        if name not in names:
            name = names[self.source_brokers.index(broker_name) % len(names)]
        own = [target for target in self.targets if target.queue.broker_name == name]
        return own[queue_id % len(own)]


class QueueReplay(msgspec.Struct, kw_only=True):
    """The result of one source queue.

    `rows`: number of messages that passed the filters. `body_bytes`: total body size of the messages that this run sent
    (decompressed), or in a dry run counted (as stored). `first` and `last`: the source's queue offsets of the first and
    last of these messages; None if there are none.
    """

    topic: str
    broker_name: str
    queue_id: int
    target: MessageQueue | None = None
    rows: int = 0
    body_bytes: int = 0
    sent: int = 0
    already: int = 0
    """Number of messages that an earlier run sent"""
    unsendable: int = 0
    """Number of skipped messages: damaged, empty, a batch in one record, or larger than a broker accepts, including the
    properties that a restore adds"""
    weakly_stored: int = 0
    """Number of messages stored less safely than SEND_OK"""
    first: int | None = None
    last: int | None = None


def _rows(batch: pa.RecordBatch) -> list[dict[str, object]]:
    """Returns the rows as dicts, with `bornTimestamp` in µs since 1970: datetime can't represent years after 9999."""
    index = batch.schema.get_field_index("bornTimestamp")
    born = batch.column(index).cast(pa.int64())
    rows: list[dict[str, object]] = batch.set_column(index, "bornTimestamp", born).to_pylist()
    return rows


def replay_batches(plan: ReplayPlan, batches: Iterable[pa.RecordBatch]) -> list[QueueReplay]:
    """Sends the rows of `batches` (SENT_COLUMNS; the rows of each queue in order), and returns the result of each
    queue.

    Raises RestoreFailed, ClientError, and the errors of `batches`.
    """

    async def run() -> list[QueueReplay]:
        options = ClientOptions(compression=Compression.NONE)
        async with (
            Producer(plan.servers, group="halog-restore", options=options) as producer,
            PullConsumer(plan.servers, group="halog-restore", read_from=ReadFrom.MASTER, options=options) as consumer,
        ):
            task = _Task(plan, producer, consumer, options.message_size_max)
            for batch in batches:
                for row in _rows(batch):
                    await task.take(row)
            await task.flush()
            return list(task.done.values())

    return anyio.run(run, backend="trio")


class _Task:
    def __init__(self, plan: ReplayPlan, producer: Producer, consumer: PullConsumer, body_bytes_max: int) -> None:
        self.done: dict[tuple[str, str, int], QueueReplay] = {}
        self._plan = plan
        self._producer = producer
        self._consumer = consumer
        self._body_bytes_max = body_bytes_max
        self._last_stored: dict[tuple[str, str, int], int] = {}
        self._queue: tuple[str, str, int] | None = None
        self._taken = (-1, -1)
        """Queue offset and physical offset of the last message of `_queue` that was taken"""
        self._waiting: list[tuple[int, Message]] = []
        self._waiting_bytes = 0
        self._next_send = 0.0

    async def take(self, row: dict[str, object]) -> None:
        """Adds one row's message to the pending ones, unless it was sent before; sends them if they fill a request."""
        topic, broker_name = str(row["topic"]), str(row["brokerName"])
        queue_id, offset = row["queueId"], row["queueOffset"]
        assert isinstance(queue_id, int)
        assert isinstance(offset, int)
        key = (topic, broker_name, queue_id)
        if key != self._queue:
            await self.flush()
            self._queue, self._taken = key, (-1, -1)
        done = self.done.get(key)
        if done is None:
            target = self._plan.target_of(broker_name, queue_id)
            done = QueueReplay(topic=topic, broker_name=broker_name, queue_id=queue_id, target=target.queue)
            self.done[key] = done
            self._last_stored[key] = await self._find_last(key, may_be_new=self._plan.is_again)
        self._check_order(offset, row["physicalOffset"])
        done.rows += 1
        if offset <= self._last_stored[key]:
            done.already += 1
            return
        try:
            message = self._message(row, done)
        except ValueError as error:
            self._leave_out(done, offset, str(error))
            return
        size = len(message.body) + sum(len(n) + len(v) + 2 for n, v in message.properties.items()) + _MESSAGE_OVERHEAD
        if self._waiting_bytes + size > _REQUEST_BYTES or len(self._waiting) >= self._request_messages(message.topic):
            await self.flush()
        self._waiting.append((offset, message))
        self._waiting_bytes += size

    async def flush(self) -> None:
        """Sends the pending messages."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting:
            return
        await self._send(waiting)

    async def _send(self, waiting: list[tuple[int, Message]]) -> None:
        """Sends messages in one request, or in halves if the broker refuses one of them; retries. Raises RestoreFailed;
        ClientError as in `_find_last`."""
        assert self._queue is not None
        done = self.done[self._queue]
        assert done.target is not None
        for attempt in range(_ATTEMPTS):
            is_last = attempt + 1 == _ATTEMPTS
            await self._keep_pace(len(waiting))
            messages = [message for _, message in waiting]
            try:
                if len(messages) == 1:
                    result = await self._producer.send(messages[0], queue=done.target)
                else:
                    result = await self._producer.send_batch(messages, queue=done.target)
            except (BrokerError, LocalProtocolError, ValueError) as error:
                if not isinstance(error, BrokerError) or error.code == ResponseCode.MESSAGE_ILLEGAL:
                    if len(waiting) == 1:
                        self._leave_out(done, waiting[0][0], str(error))
                        return
                    half = len(waiting) // 2
                    await self._send(waiting[:half])
                    await self._send(waiting[half:])
                    return
                if error.code not in PASSING or is_last:
                    raise RestoreFailed(self._place(waiting[0][0]), str(error)) from None
                await anyio.sleep(_PAUSE_S * (attempt + 1))
                continue
            except (ConnectionFailed, RequestTimedOut) as error:
                if is_last:
                    raise RestoreFailed(self._place(waiting[0][0]), str(error)) from None
                await anyio.sleep(_PAUSE_S * (attempt + 1))
                is_weak = False
            else:
                is_weak = result.status is not SendStatus.SEND_OK
                if result.status is not SendStatus.FLUSH_SLAVE_TIMEOUT:
                    self._count(done, waiting, is_weak=is_weak)
                    return
                # In a failover group, another master may have replaced this one, without these messages.
                await self._wait_readable(done.target, result.queue_offset + len(waiting))
            # The request may have been stored.
            last = await self._find_last(self._queue, may_be_new=True)
            stored = [each for each in waiting if each[0] <= last]
            waiting = waiting[len(stored) :]
            if stored:
                self._count(done, stored, is_weak=is_weak)
            if not waiting:
                return
        reason = "the broker answered FLUSH_SLAVE_TIMEOUT, and its queue does not have the messages"
        raise RestoreFailed(self._place(waiting[0][0]), reason)

    async def _wait_readable(self, queue: MessageQueue, end: int) -> None:
        """Returns when `queue` ends at `end` or later, or after _CONFIRM_S. Readers get a message of a failover group
        only when enough members have it."""
        with anyio.move_on_after(_CONFIRM_S):
            while True:
                with suppress(BrokerError, ConnectionFailed, RequestTimedOut):  # a master may be elected meanwhile
                    if await self._consumer.max_offset(queue) >= end:
                        return
                await anyio.sleep(_SETTLE_S)

    def _leave_out(self, done: QueueReplay, offset: int, reason: str) -> None:
        """Counts a message that no broker accepts. Raises RestoreFailed unless the plan has `skip_unsendable`."""
        if not self._plan.skip_unsendable:
            place = f"{done.topic} queue {done.queue_id} of {done.broker_name}, queue offset {offset}"
            raise RestoreFailed(place, f"{reason}; skip_unsendable leaves it out")
        done.unsendable += 1

    def _count(self, done: QueueReplay, stored: list[tuple[int, Message]], *, is_weak: bool) -> None:
        done.sent += len(stored)
        done.weakly_stored += len(stored) if is_weak else 0
        done.body_bytes += sum(len(message.body) for _, message in stored)
        done.first = stored[0][0] if done.first is None else done.first
        done.last = stored[-1][0]

    def _check_order(self, offset: int, physical_offset: object) -> None:
        """Raises RestoreFailed if the queue has messages of two topics of the same name, one created after the other
        was deleted. The second topic's queue offsets begin at 0 again (in RocketMQ), so they do not tell which messages
        were sent."""
        assert isinstance(physical_offset, int)
        if offset <= self._taken[0] or physical_offset < self._taken[1]:
            reason = "the topic was deleted and created again, so queue offsets don't identify its messages"
            raise RestoreFailed(self._place(offset), f"{reason}; select one of both topics by store time")
        self._taken = offset, physical_offset

    def _place(self, offset: int) -> str:
        assert self._queue is not None
        topic, broker_name, queue_id = self._queue
        return f"{topic} queue {queue_id} of {broker_name}, from queue offset {offset} on"

    def _request_messages(self, topic: str) -> int:
        """Returns the maximum number of messages of a request: at most those of one second."""
        if topic.startswith(RETRY_PREFIX):
            return 1  # brokers refuse batches of retries
        rate = self._plan.messages_per_s
        return _REQUEST_MESSAGES if rate is None else max(1, min(_REQUEST_MESSAGES, int(rate)))

    async def _keep_pace(self, messages: int) -> None:
        if self._plan.messages_per_s is None:
            return
        now = anyio.current_time()
        start = max(now, self._next_send)
        self._next_send = start + messages / self._plan.messages_per_s
        await anyio.sleep(start - now)

    def _message(self, row: dict[str, object], done: QueueReplay) -> Message:
        """Returns the message to send. Raises ValueError if no broker would accept it."""
        assert done.target is not None
        body, sys_flag, flag, born = row["body"], row["sysFlag"], row["flag"], row["bornTimestamp"]
        if row["crcOk"] is False or not isinstance(body, bytes) or not isinstance(sys_flag, int):
            raise ValueError("the record is damaged")
        if sys_flag & SysFlag.INNER_BATCH:
            raise ValueError("it is a batch of messages in one record, which a replay does not take apart")
        if sys_flag & SysFlag.COMPRESSED:
            try:
                body = inflate(body, sys_flag, self._body_bytes_max)
            except RemoteProtocolError as error:
                raise ValueError(str(error)) from None
        if not 0 < len(body) <= self._body_bytes_max:
            raise ValueError(f"a body of {len(body)} bytes; brokers take 1 … {self._body_bytes_max}")
        properties = decode_properties(str(row["propertiesString"] or "").encode())
        for name in DROPPED_PROPERTIES & properties.keys():
            del properties[name]
        properties[REPLAY_PROPERTY] = self._plan.replay_id
        properties[ORIGIN_PROPERTY] = f"{done.topic}/{done.broker_name}/{done.queue_id}/{row['queueOffset']}"
        if isinstance(born, int):
            properties[BORN_PROPERTY] = str(born // 1000)
        return Message(done.target.topic, body, properties=properties, flag=flag if isinstance(flag, int) else 0)

    async def _find_last(self, source: tuple[str, str, int], *, may_be_new: bool) -> int:
        """Returns the last queue offset of `source` whose message is in the target queue; -1 if there is none.

        Tries again if the broker can't be reached or is busy. `may_be_new`: the topic may just have been created, and
        not be known to the name servers yet. Raises RestoreFailed if retention has deleted messages that an earlier run
        may have sent, or if name servers don't know the broker; ClientError.
        """
        attempts = 0
        while True:
            try:
                return await self._search_last(source, may_be_new=may_be_new)
            except (BrokerError, ConnectionFailed, RequestTimedOut) as error:
                attempts += 1
                is_passing = not isinstance(error, BrokerError) or error.code in PASSING
                if not is_passing or attempts == _ATTEMPTS:
                    raise
            await anyio.sleep(_PAUSE_S * attempts)

    async def _search_last(self, source: tuple[str, str, int], *, may_be_new: bool) -> int:
        """As `_find_last`, but tries only once."""
        target = self._plan.target_of(source[1], source[2])
        broker_name = target.queue.broker_name
        origin = "{}/{}/{}/".format(*source).encode()
        give_up = anyio.current_time() + (_NEW_TOPIC_PATIENCE_S if may_be_new else 0)
        was_there = False
        while True:
            try:
                end = await self._settled_end(target.queue)
                begin = await self._consumer.min_offset(target.queue)
                break
            except BrokerError as error:
                if error.code != ResponseCode.TOPIC_NOT_EXIST:
                    raise
                if broker_name not in await self._consumer.broker_names():
                    reason = f"{broker_name} is not registered with the name servers, so it is unknown what was sent"
                    raise RestoreFailed(f"{target.queue.topic} queue {target.queue.queue_id}", reason) from None
                if was_there and anyio.current_time() >= give_up:
                    return -1
                was_there = True  # the broker may have just registered again
            await anyio.sleep(_SETTLE_S)
        window = _WINDOW
        while end > max(begin, target.floor):
            low = max(begin, target.floor, end - window)
            found = await self._last_between(target.queue, low, end, origin)
            if found >= 0:
                return found
            end, window = low, min(2 * window, _WINDOW_MAX)
        begin = await self._consumer.min_offset(target.queue)  # retention may have deleted messages meanwhile
        if begin > target.floor:
            queue = target.queue
            raise RestoreFailed(
                f"{queue.topic} queue {queue.queue_id} of {queue.broker_name}",
                f"its messages before queue offset {begin} were deleted, so the messages of an earlier run can't be "
                "found; give another state file to send all again",
            )
        return -1

    async def _settled_end(self, queue: MessageQueue) -> int:
        """Returns the queue's end once two reads _SETTLE_S apart agree; after _SETTLE_MAX_S in any case, because
        producers may send to the queue all the time.

        Messages that an earlier run sent shortly before may become visible late.
        """
        end, give_up = -1, anyio.current_time() + _SETTLE_MAX_S
        while True:
            now = await self._consumer.max_offset(queue)
            if now == end or anyio.current_time() >= give_up:
                return now
            end = now
            await anyio.sleep(_SETTLE_S)

    async def _last_between(self, queue: MessageQueue, begin: int, end: int, origin: bytes) -> int:
        last = -1
        async with self._consumer.reading({queue: begin}) as reading:
            async for stretch in reading:
                for message in stretch.messages:
                    if message.queue_offset >= end:
                        return last
                    properties = message.properties
                    value = properties.get(ORIGIN_PROPERTY, "").encode()
                    if properties.get(REPLAY_PROPERTY) == self._plan.replay_id and value.startswith(origin):
                        last = max(last, int(value[len(origin) :]))
                if stretch.next_offset >= end:
                    return last
        return last
