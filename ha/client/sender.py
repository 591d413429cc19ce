"""A message on its way to a broker: its properties, its queue, and what is tried again where.

Queues take turns. An attempt that failed is repeated on another queue, and on another broker if there is one. Where
there is none, one that stores nothing for now (14: it is not the master any more, say) is asked again, and the name
servers about it, for as long as it takes to find a new master. RocketMQ's clients give up after three attempts, and
look at a route again each 30 s. Sources: DefaultMQProducerImpl (which codes are retried, topic creation, what is
compressed), MQFaultStrategy (turns).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import count, repeat

import anyio
import anyio.to_thread
import msgspec

from ha.client.client import Client
from ha.client.messages import Message, MessageQueue, SendResult, SendStatus
from ha.client.routes import TopicRoute
from ha.errors import BrokerError, ConnectionFailed, HalogError, RequestTimedOut
from ha.protocol import properties as names
from ha.protocol.batch import encode_batch
from ha.protocol.codes import RequestCode, ResponseCode, SysFlag
from ha.protocol.compression import compressed
from ha.protocol.headers import SendMessageRequestV2, SendMessageResponse, parse_header
from ha.protocol.message_id import unique_id_properties
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
RETRIED_ELSEWHERE = frozenset(
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
"""Codes of refusals that may be the broker's, not the message's."""
_SENT_ALONE = frozenset(
    {
        names.DELAY,
        names.TIMER_DELAY_MS,
        names.TIMER_DELAY_SEC,
        names.TIMER_DELIVER_MS,
        names.TRANSACTION_PREPARED,
        names.INNER_NUM,
        names.INNER_BASE,
        "INNER_MULTI_DISPATCH",
        "_SYS_MSG_PRIORITY_",
    }
)
"""Properties that have brokers do something else with a message than store it where it was sent to; in a batch they
would not look."""
_SEND = RequestCode.SEND_MESSAGE_V2
_RETRY_PAUSE_S = 0.1
_PAUSES_MAX = 3
"""Pauses grow up to so many times that."""
_TAKEOVER_S = 5.0
"""So long a broker set is given to find a master: a lease of 2 s, and as much again for what follows."""
_COMPRESSED_HERE_MAX = 64 * 1024
"""Longer bodies, in bytes, are compressed in a worker thread: zlib makes some 30 MB/s."""


_USUAL_PROPERTIES_SIZE_MAX = PROPERTIES_SIZE_MAX - len(unique_id_properties(["0" * 56])[0])


@lru_cache(maxsize=1024)
def _tags_property(tags: str) -> bytes:
    """Of values that come again and again."""
    return encode_properties({names.TAGS: tags})


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message, or a batch, ready to be sent: all but its queue. `sys_flag` holds bits of `codes.SysFlag`.

    `properties` is the property string; without a `message_id` it lacks that of the unique id, which comes when the
    message leaves. `may_join`: it may be sent in a batch with others whose `waits` (the broker's
    answer waits until it is safe) and `sys_flag` are the same."""

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
    may_join: bool = False


class Sent(msgspec.Struct, frozen=True, gc=False):
    """A result, and what ending a transaction takes beside it."""

    result: SendResult
    address: str
    transaction_id: str | None


class Sender:
    """Sends for one producer group."""

    def __init__(self, client: Client, group: str) -> None:
        self._client = client
        self._group = group
        self._turns: dict[str, count[int]] = {}
        options = client.options
        self._usual_size_max = min(options.message_size_max, options.compress_from_bytes - 1)

    def prepare_usual(self, message: Message) -> Outgoing | None:
        """What `prepare` would make of `message`, without a unique id, in a third of the time; None unless it is one as
        most are."""
        body, topic = message.body, message.topic
        if (
            message.properties
            or message.delay_level
            or message.delay_s is not None
            or message.deliver_at_ms is not None
            or not message.wait_stored
            or type(body) is not bytes
            or not 0 < len(body) <= self._usual_size_max
            or not -0x80000000 <= message.flag <= 0x7FFFFFFF
            or len(topic) > TOPIC_SIZE_V1_MAX
            or topic.startswith(RETRY_PREFIX)
        ):
            return None
        tags, keys = message.tags, message.keys
        properties = b"" if tags is None else _tags_property(tags)
        if keys:
            text = keys if type(keys) is str else names.KEY_SEPARATOR.join(keys)
            if not text or "\x02" in text:
                return None  # `prepare` says what is wrong with them
            try:
                properties += f"{names.KEYS}\x01{text}\x02".encode()
            except UnicodeEncodeError:
                return None
        if len(properties) > _USUAL_PROPERTIES_SIZE_MAX:
            return None
        return Outgoing(_SEND, topic, body, properties, None, message.flag, may_join=True)

    async def prepare(self, message: Message, *, extra: dict[str, str] | None = None, sys_flag: int = 0) -> Outgoing:
        """`message` with its properties and those of `extra`, compressed if that pays. ValueError for what no broker
        would take."""
        known = {**self._properties(message), **(extra or {})}
        reconsume_times, max_reconsume_times = 0, None
        if message.topic.startswith(RETRY_PREFIX):
            # What a consumer gives back travels in fields of the request instead.
            reconsume_times = int(known.pop(names.RECONSUME_TIME, "0"))
            text = known.pop(names.MAX_RECONSUME_TIMES, None)
            max_reconsume_times = None if text is None else int(text)
        options = self._client.options
        self._check_size(message.body)
        body = message.body
        if len(body) >= options.compress_from_bytes and not sys_flag & SysFlag.COMPRESSED:
            if len(body) > _COMPRESSED_HERE_MAX:
                body, added = await anyio.to_thread.run_sync(compressed, body, options.compression)
            else:
                body, added = compressed(body, options.compression)
            sys_flag |= added
        properties = encode_properties(known)
        waits = names.WAIT not in known
        may_join = (
            _SENT_ALONE.isdisjoint(known)
            and type(body) is bytes
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
            may_join,
        )

    def prepare_batch(self, messages: Sequence[Message]) -> Outgoing:
        """`messages` as one. ValueError unless all have the same topic and `wait_stored` and none is delayed."""
        first = messages[0] if messages else None
        if first is None:
            raise ValueError("a batch needs at least one message")
        parts, message_ids = [], []
        for message in messages:
            is_delayed = message.delay_level or message.delay_s is not None or message.deliver_at_ms is not None
            if message.topic != first.topic or message.wait_stored != first.wait_stored or is_delayed:
                raise ValueError("the messages of a batch share topic and wait_stored and are not delayed")
            known = self._properties(message)
            parts.append((message.flag, message.body, encode_properties(known)))
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
        """How many brokers take messages of `topic`, as far as is known without asking; at least 1."""
        route = self._client.routes.known(topic)
        return 1 if route is None else max(1, len({queue.broker_name for queue in route.write_queues}))

    async def send(self, outgoing: Outgoing, queue: MessageQueue | None, timeout_s: float | None) -> Sent:
        """Sends and waits for the answer, to `queue` without retries, else wherever it succeeds; see Producer.send."""
        message_id = outgoing.message_id
        if message_id is None:
            message_id = self._client.unique_ids.next()
            outgoing = with_id(outgoing, message_id)
        options = self._client.options
        routes = self._client.routes
        timeout_s = options.send_timeout_s if timeout_s is None else timeout_s
        now = anyio.current_time()
        deadline, gives_up_at = now + timeout_s, now + _TAKEOVER_S
        attempts_left = 1 if queue is not None else 1 + options.send_retries
        avoid: str | None = None
        failure: BrokerError | ConnectionFailed | None = None
        for attempt in count():
            if not attempts_left:
                break
            attempts_left -= 1
            route = routes.known(outgoing.topic) or await routes.find_for_sending(outgoing.topic)
            pause_s = _RETRY_PAUSE_S * min(attempt, _PAUSES_MAX) * random.uniform(0.5, 1.5)
            try:
                target = queue or self._next_queue(route, avoid)
            except ConnectionFailed as error:
                if not route.lacks_master or anyio.current_time() >= min(gives_up_at, deadline):
                    raise
                failure = error
                attempts_left += 1
                await anyio.sleep(max(pause_s, _RETRY_PAUSE_S))
                continue
            if target.broker_name == avoid:
                # No other broker to turn to; give this one a moment.
                await anyio.sleep(pause_s)
            left_s = deadline - anyio.current_time()
            if left_s <= 0:
                break
            command = self._command(outgoing, target)
            avoid = target.broker_name
            try:
                address = route.master_of(avoid)
                answer = await self._client.connections.invoke(address, command, left_s)
            except ConnectionFailed as error:
                failure = error
                routes.distrust(outgoing.topic)
                continue
            status = _STATUS_OF_CODE.get(answer.code)
            if status is not None:
                return _sent(status, answer, target, message_id, address)
            failure = BrokerError(address, answer.code, answer.remark or "")
            if answer.code == ResponseCode.TOPIC_NOT_EXIST:
                routes.forget(outgoing.topic)
            routes.distrust(outgoing.topic)
            if answer.code not in RETRIED_ELSEWHERE:
                break
            if (
                answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
                and queue is None  # what was sent to it after this message might overtake it
                and not any(each.broker_name != avoid for each in route.write_queues)
                and anyio.current_time() < gives_up_at
            ):
                attempts_left += 1
        if failure is None:
            raise RequestTimedOut(";".join(self._client.name_servers), timeout_s)
        raise failure

    def batch_of(self, messages: Sequence[Outgoing]) -> tuple[Outgoing, list[str]]:
        """Messages that may join each other as one batch, and their unique ids."""
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
        """Sends and asks for no answer; see Producer.send_oneway."""
        routes = self._client.routes
        route = routes.known(outgoing.topic) or await routes.find_for_sending(outgoing.topic)
        target = queue or self._next_queue(route, avoid=None)
        command = self._command(outgoing, target)
        command.flag = FLAG_ONEWAY
        timeout_s = self._client.options.send_timeout_s if timeout_s is None else timeout_s
        await self._client.connections.to(route.master_of(target.broker_name)).send_oneway(command, timeout_s)

    def _next_queue(self, route: TopicRoute, avoid: str | None) -> MessageQueue:
        queues = route.write_queues
        if not queues:
            self._client.routes.distrust(route.topic)
            raise ConnectionFailed(route.topic, "no master that may be written to is registered for this topic")
        turn = self._turns.get(route.topic)
        if turn is None:
            # Producers that start together should not all begin with queue 0.
            turn = self._turns[route.topic] = count(random.randrange(len(queues)))
        first = queues[next(turn) % len(queues)]
        if first.broker_name != avoid:
            return first
        others = [queue for queue in queues if queue.broker_name != avoid]
        return others[next(turn) % len(others)] if others else first

    def _properties(self, message: Message) -> dict[str, str]:
        """The properties of `message`, with its unique id among them."""
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
            known[names.TIMER_DELAY_MS] = str(int(message.delay_s * 1000))
        if message.deliver_at_ms is not None:
            known[names.TIMER_DELIVER_MS] = str(message.deliver_at_ms)
        if names.UNIQ_KEY not in known:
            known[names.UNIQ_KEY] = self._client.unique_ids.next()
        return known

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
    result = SendResult(status, message_id, header.msg_id, queue, header.queue_offset, answer.remark or "")
    return Sent(result, address, header.transaction_id)


def with_id(outgoing: Outgoing, message_id: str) -> Outgoing:
    """The message as it leaves: with this id, unless it has one."""
    if outgoing.message_id is not None:
        return outgoing
    properties = outgoing.properties + unique_id_properties([message_id])[0]
    return msgspec.structs.replace(outgoing, properties=properties, message_id=message_id)


def results_of(result: SendResult, message_ids: Sequence[str]) -> list[SendResult | HalogError]:
    """What the result of their batch says of each message: stored one after the other, from its queue offset on."""
    places = result.offset_message_id.split(",")
    if len(places) != len(message_ids):
        # One record holds them all.
        places = places[:1] * len(message_ids)
    status, queue, remark = repeat(result.status), repeat(result.queue), repeat(result.remark)
    return list(map(SendResult, status, message_ids, places, queue, count(result.queue_offset), remark))


def _batch_properties(waits: bool) -> bytes:
    return encode_properties({} if waits else {names.WAIT: "false"})
