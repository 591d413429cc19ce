"""Sends messages: builds their properties, chooses a queue round robin, and retries.

A failed attempt is retried at once on another broker if the topic has one, otherwise after a pause that grows, with a
fresh route. Sends to a chosen queue are never retried.

| failure | retried |
|---|---|
| no name server or master is reached, or NoMaster with `is_temporary`: nothing was stored | until timeout |
| code 14, the broker is not the master: nothing was stored | until timeout |
| the broker rejected the message because of its state (RETRYABLE_CODES) | `send_retries` times |
| the connection was lost after the request was sent: it may be stored | `send_retries` times |
| anything else, also any other NoMaster | never |

RocketMQ's clients give up after three attempts and refresh a route only every 30 s. Sources: DefaultMQProducerImpl
(retried codes, topic creation, compression), MQFaultStrategy (round robin).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence, Set
from copy import copy
from functools import lru_cache
from itertools import count, repeat

import anyio
import anyio.to_thread
import msgspec

from ha.client.backoff import Backoff
from ha.client.client import Client
from ha.client.messages import Message, MessageQueue, SendResult, SendStatus
from ha.client.routes import TopicRoute
from ha.errors import BrokerError, ConnectionFailed, HalogError, NameServersUnreachable, NoMaster, RequestTimedOut
from ha.protocol import properties as names
from ha.protocol.batch import encode_batch
from ha.protocol.codes import RequestCode, ResponseCode, SysFlag
from ha.protocol.compression import compressed
from ha.protocol.headers import SendMessageRequestV2, SendMessageResponse, parse_header
from ha.protocol.message_id import unique_id_properties
from ha.protocol.pop import PRIORITY
from ha.protocol.properties import PROPERTIES_SIZE_MAX, encode_properties
from ha.protocol.record import TOPIC_SIZE_V1_MAX
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand
from ha.protocol.topic_names import AUTO_CREATE_TOPIC, RETRY_PREFIX

_STATUS_OF_CODE = {
    int(ResponseCode.SUCCESS): SendStatus.SEND_OK,
    int(ResponseCode.FLUSH_DISK_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
    int(ResponseCode.FLUSH_SLAVE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
    int(ResponseCode.SLAVE_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
}
RETRYABLE_CODES = frozenset(
    {
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    }
)
"""Response codes of rejections that may be due to the broker's state rather than to the message."""
_UNBATCHABLE = frozenset(
    {
        names.DELAY,
        names.TIMER_DELAY_MS,
        names.TIMER_DELAY_SEC,
        names.TIMER_DELIVER_MS,
        names.TRANSACTION_PREPARED,
        names.INNER_NUM,
        names.INNER_BASE,
        "INNER_MULTI_DISPATCH",
        PRIORITY,
    }
)
"""Properties that change where or when a broker stores or delivers a message. Brokers ignore them in batches, so such
messages are sent alone."""
_PRIORITY_MAX = 0x7FFFFFFF
_SEND = RequestCode.SEND_MESSAGE_V2
_UNTIL_TIMEOUT = frozenset({ResponseCode.SERVICE_NOT_AVAILABLE})
"""Response codes that are retried until the timeout: the broker is not the master, or not yet. A master is elected
within seconds."""
_COMPRESSED_HERE_MAX = 64 * 1024
"""Maximum bytes of a body that is compressed on the event loop; a longer one is compressed in a worker thread, as zlib
compresses about 30 MB/s."""


_SIMPLE_PROPERTIES_SIZE_MAX = PROPERTIES_SIZE_MAX - len(unique_id_properties(["0" * 56])[0])


@lru_cache(maxsize=1024)
def _tags_property(tags: str) -> bytes:
    """Returns the encoded property TAGS. Cached because producers use few distinct tags."""
    return encode_properties({names.TAGS: tags})


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message or batch, complete except for its queue. `sys_flag` holds bits of `codes.SysFlag`.

    `properties` is the encoded property string. While `message_id` is None it lacks the unique id, which is added when
    the message is sent. `waits`: the broker answers only once the message is flushed and replicated. `is_batchable`:
    the message may share a batch with others of the same topic, `sys_flag` and `waits`."""

    code: RequestCode
    topic: str
    body: bytes
    properties: bytes
    message_id: str | None
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    waits: bool = True
    is_batchable: bool = False


class Sent(msgspec.Struct, frozen=True, gc=False):
    """Result of a send, with the broker's address and the transaction id, which are needed to end a transaction."""

    result: SendResult
    address: str
    transaction_id: str | None


class Sender:
    """Sends the messages of one producer group."""

    def __init__(self, client: Client, group: str) -> None:
        self._client = client
        self._group = group
        self._queue_counters: dict[str, count[int]] = {}
        self.retry_count = 0
        """Number of times that a send has paused before a retry."""
        options = client.options
        self._simple_size_max = min(options.message_size_max, options.compress_from_bytes - 1)

    @property
    def is_open(self) -> bool:
        """Whether the client is open."""
        return self._client.is_open

    def prepare_simple(self, message: Message) -> Outgoing | None:
        """Prepares a simple message in a third of the time that `prepare` takes, without a unique id. Returns None for
        a message that needs `prepare`, also for most invalid ones. Raises LocalProtocolError for tags that can't be
        encoded."""
        body, topic = message.body, message.topic
        if (
            message.properties
            or message.delay_level
            or message.delay_s is not None
            or message.deliver_at_ms is not None
            or message.priority is not None
            or not message.wait_stored
            or type(body) is not bytes
            or not 0 < len(body) <= self._simple_size_max
            or not -0x80000000 <= message.flag <= 0x7FFFFFFF
            or len(topic) > TOPIC_SIZE_V1_MAX
            or topic.startswith(RETRY_PREFIX)
        ):
            return None
        tags, keys = message.tags, message.keys
        if tags is not None and type(tags) is not str:
            return None  # `prepare` raises the error
        properties = b"" if tags is None else _tags_property(tags)
        if keys:
            text = keys if type(keys) is str else names.KEY_SEPARATOR.join(keys)
            if not text or "\x02" in text:
                return None  # `prepare` raises the error
            try:
                properties += f"{names.KEYS}\x01{text}\x02".encode()
            except UnicodeEncodeError:
                return None
        if len(properties) > _SIMPLE_PROPERTIES_SIZE_MAX:
            return None
        return Outgoing(_SEND, topic, body, properties, None, message.flag, is_batchable=True)

    async def prepare(self, message: Message, *, extra: dict[str, str] | None = None, sys_flag: int = 0) -> Outgoing:
        """Prepares `message` with its own properties and `extra`; compresses a body of `compress_from_bytes` or more if
        that makes it shorter. `sys_flag`: bits to set; with COMPRESSED, the body is compressed already. Raises
        ValueError, TypeError or LocalProtocolError for a message that no broker would accept."""
        known = {**self._properties(message), **(extra or {})}
        reconsume_times, max_reconsume_times = 0, None
        if message.topic.startswith(RETRY_PREFIX):
            # For retries, these values are sent in request fields, not in properties.
            reconsume_times = int(known.pop(names.RECONSUME_TIME, "0"))
            text = known.pop(names.MAX_RECONSUME_TIMES, None)
            max_reconsume_times = None if text is None else int(text)
        options = self._client.options
        body = self._body_of(message)
        if len(body) >= options.compress_from_bytes and not sys_flag & SysFlag.COMPRESSED:
            if len(body) > _COMPRESSED_HERE_MAX:
                body, added = await anyio.to_thread.run_sync(compressed, body, options.compression)
            else:
                body, added = compressed(body, options.compression)
            sys_flag |= added
        properties = encode_properties(known)
        waits = names.WAIT not in known
        is_batchable = (
            _UNBATCHABLE.isdisjoint(known)
            and -0x80000000 <= message.flag <= 0x7FFFFFFF
            and (waits or known[names.WAIT] == "false")
            and len(properties) <= PROPERTIES_SIZE_MAX
            and len(message.topic) <= TOPIC_SIZE_V1_MAX
            and not message.topic.startswith(RETRY_PREFIX)
        )
        return Outgoing(
            _SEND,
            message.topic,
            body,
            properties,
            known[names.UNIQ_KEY],
            message.flag,
            sys_flag,
            reconsume_times,
            max_reconsume_times,
            waits,
            is_batchable,
        )

    def prepare_batch(self, messages: Sequence[Message]) -> Outgoing:
        """Prepares one batch; see Producer.send_batch."""
        first = messages[0] if messages else None
        if first is None:
            raise ValueError("a batch needs at least one message")
        parts, message_ids = [], []
        for message in messages:
            known = self._properties(message)
            is_special = not _UNBATCHABLE.isdisjoint(known)
            if message.topic != first.topic or message.wait_stored != first.wait_stored or is_special:
                raise ValueError("the messages of a batch share topic and wait_stored and have no delay or priority")
            parts.append((message.flag, self._body_of(message), encode_properties(known)))
            message_ids.append(known[names.UNIQ_KEY])
        body = encode_batch(parts)
        self._check_size(body)
        return Outgoing(
            RequestCode.SEND_BATCH_MESSAGE,
            first.topic,
            body,
            _batch_properties(first.wait_stored),
            ",".join(message_ids),
        )

    def broker_count(self, topic: str) -> int:
        """Number of brokers with writable queues of `topic` in the cached route; at least 1."""
        route = self._client.routes.known(topic)
        return 1 if route is None else max(1, len({queue.broker_name for queue in route.write_queues}))

    async def send(self, outgoing: Outgoing, queue: MessageQueue | None, timeout_s: float | None) -> Sent:
        """Sends to `queue` without retries, or to any queue with retries, and returns the result; see Producer.send."""
        message_id = outgoing.message_id
        if message_id is None:
            message_id = self._client.unique_ids.next()
            outgoing = with_id(outgoing, message_id)
        options, routes = self._client.options, self._client.routes
        timeout_s = options.send_timeout_s if timeout_s is None else timeout_s
        deadline = anyio.current_time() + timeout_s
        retries_left = options.send_retries
        backoff = Backoff()
        tried: set[str] = set()
        failure: BrokerError | ConnectionFailed = ConnectionFailed(outgoing.topic, "this client was closed")
        was_sent = False  # by any attempt
        try:
            while True:
                try:
                    route = routes.known(outgoing.topic) or await routes.find_for_sending(outgoing.topic, deadline)
                    if not self._client.is_open:  # closed during the lookup, or during the pause before it
                        raise failure
                    target = queue or self._next_queue(route, tried)
                except NoMaster as error:
                    if not error.is_temporary:
                        raise
                    failure, target = error, None
                except NameServersUnreachable as error:
                    failure, target = error, None
                if target is None or target.broker_name in tried:
                    pause_s = backoff.next_s()
                    if queue is not None or anyio.current_time() + pause_s >= deadline or self._gives_up_on(failure):
                        raise failure
                    self.retry_count += 1
                    await anyio.sleep(pause_s)
                    tried.clear()  # all brokers may be tried again; the route is looked up again
                    continue
                tried.add(target.broker_name)
                try:
                    return await self._send_to(outgoing, route, target, message_id, deadline, timeout_s)
                except ConnectionFailed as error:
                    failure = error
                    was_sent |= error.was_sent
                    retries_left -= error.was_sent
                except BrokerError as error:
                    failure = error
                    if error.code not in RETRYABLE_CODES:
                        raise
                    retries_left -= error.code not in _UNTIL_TIMEOUT
                # Later messages to a chosen queue might overtake this one.
                if queue is not None or retries_left < 0 or not self._client.is_open:
                    raise failure
        except (BrokerError, ConnectionFailed) as error:
            if error.was_sent or not was_sent:
                raise
            failure = copy(error)  # other sends may raise the same one: route lookups are shared
            failure.was_sent = True
            raise failure from error.__cause__

    def _gives_up_on(self, failure: BrokerError | ConnectionFailed) -> bool:
        if not self._client.is_open:
            return True
        return isinstance(failure, ConnectionFailed) and not self._client.options.retry_unreachable

    async def _send_to(
        self,
        outgoing: Outgoing,
        route: TopicRoute,
        target: MessageQueue,
        message_id: str,
        deadline: float,
        timeout_s: float,
    ) -> Sent:
        """Makes one attempt. Raises RequestTimedOut, and ConnectionFailed or BrokerError, after which the next attempt
        looks the route up again."""
        left_s = deadline - anyio.current_time()
        if left_s <= 0:
            raise RequestTimedOut(";".join(self._client.name_servers), timeout_s)
        routes = self._client.routes
        try:
            address = route.master_of(target.broker_name)
            answer = await self._client.connections.invoke(address, self._command(outgoing, target), left_s)
        except ConnectionFailed:
            routes.mark_stale(outgoing.topic)
            raise
        status = _STATUS_OF_CODE.get(answer.code)
        if status is not None:
            return _sent(status, answer, target, message_id, address)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            routes.forget(outgoing.topic)
        routes.mark_stale(outgoing.topic)
        raise BrokerError(address, answer.code, answer.remark or "")

    def batch_of(self, messages: Sequence[Outgoing]) -> tuple[Outgoing, list[str]]:
        """Returns batchable messages as one batch, and their unique ids."""
        ids = self._client.unique_ids.next_many(len(messages))
        body = encode_batch(
            [
                (each.flag, each.body, each.properties + own if each.message_id is None else each.properties)
                for each, own in zip(messages, unique_id_properties(ids), strict=True)
            ]
        )
        ids = [own if each.message_id is None else each.message_id for each, own in zip(messages, ids, strict=True)]
        first = messages[0]
        code, properties = RequestCode.SEND_BATCH_MESSAGE, _batch_properties(first.waits)
        return Outgoing(code, first.topic, body, properties, "", 0, first.sys_flag), ids

    async def send_oneway(self, outgoing: Outgoing, queue: MessageQueue | None, timeout_s: float | None) -> None:
        """Sends without waiting for a response; see Producer.send_oneway."""
        timeout_s = self._client.options.send_timeout_s if timeout_s is None else timeout_s
        deadline = anyio.current_time() + timeout_s
        routes = self._client.routes
        route = routes.known(outgoing.topic) or await routes.find_for_sending(outgoing.topic, deadline)
        target = queue or self._next_queue(route, frozenset())
        command = self._command(outgoing, target)
        command.flag = FLAG_ONEWAY
        try:
            connection = self._client.connections.to(route.master_of(target.broker_name))
            await connection.send_oneway(command, deadline - anyio.current_time())
        except ConnectionFailed:
            routes.mark_stale(outgoing.topic)
            raise

    def _next_queue(self, route: TopicRoute, tried: Set[str]) -> MessageQueue:
        """Returns the next queue, if possible of a broker that is not in `tried`. Raises NoMaster if the route has no
        writable queues."""
        queues = route.write_queues
        if not queues:
            self._client.routes.mark_stale(route.topic)
            raise NoMaster(route.topic, is_temporary=route.lacks_master)
        turn = self._queue_counters.get(route.topic)
        if turn is None:
            # Spreads producers that start together over the queues.
            turn = self._queue_counters[route.topic] = count(random.randrange(len(queues)))
        first = queues[next(turn) % len(queues)]
        if first.broker_name not in tried:
            return first
        others = [queue for queue in queues if queue.broker_name not in tried]
        return others[next(turn) % len(others)] if others else first

    def _properties(self, message: Message) -> dict[str, str]:
        """Returns the properties of `message`, including its unique id. Raises ValueError for invalid delays or
        priorities, and TypeError for a name or value that isn't text."""
        known = dict(message.properties)
        if message.tags is not None:
            known[names.TAGS] = message.tags
        if message.keys:
            known[names.KEYS] = (
                message.keys if isinstance(message.keys, str) else names.KEY_SEPARATOR.join(message.keys)
            )
        if not message.wait_stored:
            known[names.WAIT] = "false"
        if bool(message.delay_level) + (message.delay_s is not None) + (message.deliver_at_ms is not None) > 1:
            raise ValueError("give one of delay_level, delay_s and deliver_at_ms")
        if message.delay_level:
            known[names.DELAY] = str(message.delay_level)
        if message.delay_s is not None:
            delay_ms = message.delay_s * 1000
            if not math.isfinite(delay_ms):
                raise ValueError(f"delay_s={message.delay_s}; accepted: a finite number of ms")
            known[names.TIMER_DELAY_MS] = str(int(delay_ms))
        if message.deliver_at_ms is not None:
            known[names.TIMER_DELIVER_MS] = str(message.deliver_at_ms)
        if message.priority is not None:
            if not 0 <= message.priority <= _PRIORITY_MAX:
                raise ValueError(f"priority={message.priority}; accepted: 0 … {_PRIORITY_MAX}")
            known[PRIORITY] = str(message.priority)
        for name, value in known.items():
            if not isinstance(name, str) or not (value is None or isinstance(value, str)):
                raise TypeError(f"property {name!r} has the value {value!r}; tags, property names and values are str")
        if names.UNIQ_KEY not in known:
            known[names.UNIQ_KEY] = self._client.unique_ids.next()
        return known

    def _body_of(self, message: Message) -> bytes:
        """Returns the body as it is now: the program may change a bytearray or memoryview later. Raises TypeError if it
        isn't bytes, and ValueError if its size is not accepted."""
        body: object = message.body
        if isinstance(body, str):
            raise TypeError("a body is bytes, not str: use text.encode()")
        if not isinstance(body, bytes | bytearray | memoryview):
            raise TypeError(f"a body is bytes, not {type(body).__name__}: encode it first, for example as JSON")
        content = bytes(body)
        self._check_size(content)
        return content

    def _check_size(self, body: bytes) -> None:
        size_max = self._client.options.message_size_max
        if not 0 < len(body) <= size_max:
            raise ValueError(f"a body of {len(body)} bytes; accepted: 1 … {size_max}")

    def _command(self, outgoing: Outgoing, queue: MessageQueue) -> RemotingCommand:
        header = SendMessageRequestV2(
            producer_group=self._group,
            topic=queue.topic,
            default_topic=AUTO_CREATE_TOPIC,
            default_topic_queue_nums=self._client.options.default_topic_queue_nums,
            queue_id=queue.queue_id,
            sys_flag=outgoing.sys_flag,
            born_timestamp=self._client.wall_clock_ms(),
            flag=outgoing.flag,
            properties=outgoing.properties.decode(),
            reconsume_times=outgoing.reconsume_times,
            max_reconsume_times=outgoing.max_reconsume_times,
            batch=outgoing.code == RequestCode.SEND_BATCH_MESSAGE,
            broker_name=queue.broker_name,
        )
        return RemotingCommand(outgoing.code, ext_fields=header.to_ext_fields(), body=outgoing.body)


def _sent(status: SendStatus, answer: RemotingCommand, target: MessageQueue, message_id: str, address: str) -> Sent:
    header = parse_header(SendMessageResponse, answer.ext_fields)
    queue = target
    if header.queue_id != target.queue_id:
        queue = MessageQueue(target.topic, target.broker_name, header.queue_id)
    remark, handle = answer.remark or "", header.recall_handle
    result = SendResult(status, message_id, header.msg_id, queue, header.queue_offset, remark, handle)
    return Sent(result, address, header.transaction_id)


def with_id(outgoing: Outgoing, message_id: str) -> Outgoing:
    """Returns `outgoing` with this unique id, or unchanged if it has an id already."""
    if outgoing.message_id is not None:
        return outgoing
    properties = outgoing.properties + unique_id_properties([message_id])[0]
    return msgspec.structs.replace(outgoing, properties=properties, message_id=message_id)


def results_of(result: SendResult, message_ids: Sequence[str]) -> list[SendResult | HalogError]:
    """Splits a batch's result into one for each message. The messages are stored consecutively, from the batch's queue
    offset on."""
    places = result.offset_message_id.split(",")
    if len(places) != len(message_ids):
        # The broker stored the whole batch as one record.
        places = places[:1] * len(message_ids)
    status, queue, remark = repeat(result.status), repeat(result.queue), repeat(result.remark)
    return list(map(SendResult, status, message_ids, places, queue, count(result.queue_offset), remark))


def _batch_properties(waits: bool) -> bytes:
    return encode_properties({} if waits else {names.WAIT: "false"})
