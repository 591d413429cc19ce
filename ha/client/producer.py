"""The SDK's producer: a message in, a SendResult out.

Any number of tasks may send at once through one producer; their requests share one connection per broker and travel in
whatever bursts they come in. Queues take turns. An attempt that failed is repeated on another queue, and on another
broker if there is one. Sources: DefaultMQProducerImpl (which codes are retried, topic creation), MQFaultStrategy
(turns).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import anyio

from ha.client.client import Client, NameServers, SharedClient
from ha.client.connection import Connection
from ha.client.messages import Message, MessageQueue, SendResult, SendStatus
from ha.client.options import ClientOptions
from ha.client.routes import DEFAULT_TOPIC, TopicRoute
from ha.errors import BrokerError, ConnectionFailed, RequestTimedOut
from ha.protocol import properties as names
from ha.protocol.acl import AclCredentials
from ha.protocol.batch import encode_batch
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import SendMessageRequestV2, SendMessageResponse, parse_header
from ha.protocol.properties import encode_properties
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand

_STATUS_OF_CODE = {
    int(ResponseCode.SUCCESS): SendStatus.SEND_OK,
    int(ResponseCode.FLUSH_DISK_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
    int(ResponseCode.FLUSH_SLAVE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
    int(ResponseCode.SLAVE_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
}
_RETRIED_ELSEWHERE = frozenset(
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
_RETRY_PAUSE_S = 0.1


class Producer:
    """Sends messages. An async context manager; works under asyncio and trio, against halog and RocketMQ brokers.

        async with Producer("127.0.0.1:9876", group="billing") as producer:
            result = await producer.send(Message("invoices", b"…", tags="paid"))

    `name_servers`: host:port, several as a list or joined with ';'; None takes NAMESRV_ADDR from the environment; or a
    `Client`, to share its connections with others.
    `credentials`: for brokers with access control; None takes HALOG_ACCESS_KEY and HALOG_SECRET_KEY, if they are set.
    Leaving the block closes the connections; sends still in flight then fail with ConnectionFailed.
    """

    def __init__(
        self,
        name_servers: Client | NameServers = None,
        *,
        group: str = "halog-producer",
        options: ClientOptions | None = None,
        credentials: AclCredentials | None = None,
        wall_clock_ms: Callable[[], int] | None = None,
    ) -> None:
        self._client = SharedClient(name_servers, options, credentials, wall_clock_ms)
        self._group = group
        self._options = self._client.client.options
        self._wall_clock_ms = self._client.client.wall_clock_ms
        self._turns: dict[str, itertools.count[int]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(self._client.open())
            await stack.enter_async_context(client.joined_producer(self))
            self._connections = client.connections
            self._routes = client.routes
            self._unique_ids = client.unique_ids
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The error is the block's own: passing it through the task groups would wrap it into an exception group.
        await self._stack.aclose()

    @property
    def group(self) -> str:
        """The producer group."""
        return self._group

    async def answer(self, connection: Connection, command: RemotingCommand) -> RemotingCommand | None:
        """What a broker asks this producer; its client calls it."""
        return None

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues that sends of `topic` take turns on, sorted. For a topic yet to be created: those it will get."""
        return list((await self._routes.find_for_sending(topic)).write_queues)

    async def send(
        self, message: Message, *, queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> SendResult:
        """Sends one message and returns where and how safely it was stored; look at the result's `status`.

        `queue` pins it to one queue, without retries elsewhere. All attempts together take at most `timeout_s` (default
        options.send_timeout_s). Raises BrokerError when the broker refused it (not stored), RouteNotFound,
        RequestTimedOut or ConnectionFailed (may be stored), ValueError for a message that no broker would take. A send
        that was retried or cancelled may have been stored more than once or at all."""
        text, message_id = self._properties(message)
        return await self._send(
            RequestCode.SEND_MESSAGE_V2, message.topic, message.body, message.flag, text, message_id, queue, timeout_s
        )

    async def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> SendResult:
        """Sends messages of one topic in one request; all or none are stored, one after the other in one queue.

        Result and errors as of `send`. ValueError unless all have the same topic and `wait_stored` and none a delay."""
        first = messages[0] if messages else None
        if first is None:
            raise ValueError("a batch needs at least one message")
        parts, message_ids = [], []
        for message in messages:
            if message.topic != first.topic or message.wait_stored != first.wait_stored or message.delay_level:
                raise ValueError("the messages of a batch share topic and wait_stored and have no delay_level")
            text, message_id = self._properties(message)
            parts.append((message.flag, message.body, text.encode()))
            message_ids.append(message_id)
        body = encode_batch(parts)
        wait = encode_properties({} if first.wait_stored else {names.WAIT: "false"}).decode()
        return await self._send(
            RequestCode.SEND_BATCH_MESSAGE, first.topic, body, 0, wait, ",".join(message_ids), queue, timeout_s
        )

    async def send_oneway(
        self, message: Message, *, queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> None:
        """Sends one message and asks for no answer: whether it was stored is never known. No retries.

        Waits for the route and while the connection's outbox is full. Raises RouteNotFound, ConnectionFailed,
        RequestTimedOut."""
        text, _ = self._properties(message)
        route = self._routes.known(message.topic) or await self._routes.find_for_sending(message.topic)
        target = queue or self._next_queue(route, avoid=None)
        header = self._header(RequestCode.SEND_MESSAGE_V2, target, message.flag, text)
        command = RemotingCommand(
            RequestCode.SEND_MESSAGE_V2, flag=FLAG_ONEWAY, ext_fields=header.to_ext_fields(), body=message.body
        )
        timeout_s = self._options.send_timeout_s if timeout_s is None else timeout_s
        await self._connections.to(route.master_of(target.broker_name)).send_oneway(command, timeout_s)

    async def _send(
        self,
        code: RequestCode,
        topic: str,
        body: bytes,
        flag: int,
        properties: str,
        message_id: str,
        queue: MessageQueue | None,
        timeout_s: float | None,
    ) -> SendResult:
        if not 0 < len(body) <= self._options.message_size_max:
            raise ValueError(f"a body of {len(body)} bytes; accepted: 1 … {self._options.message_size_max}")
        timeout_s = self._options.send_timeout_s if timeout_s is None else timeout_s
        deadline = anyio.current_time() + timeout_s
        attempts = 1 if queue is not None else 1 + self._options.send_retries
        avoid: str | None = None
        failure: BrokerError | ConnectionFailed | None = None
        for attempt in range(attempts):
            route = self._routes.known(topic) or await self._routes.find_for_sending(topic)
            target = queue or self._next_queue(route, avoid)
            if target.broker_name == avoid:
                # No other broker to turn to; give this one a moment.
                await anyio.sleep(_RETRY_PAUSE_S * attempt * random.uniform(0.5, 1.5))
            left_s = deadline - anyio.current_time()
            if left_s <= 0:
                break
            header = self._header(code, target, flag, properties)
            command = RemotingCommand(code, ext_fields=header.to_ext_fields(), body=body)
            avoid = target.broker_name
            try:
                address = route.master_of(avoid)
                answer = await self._connections.invoke(address, command, left_s)
            except ConnectionFailed as error:
                failure = error
                self._routes.distrust(topic)
                continue
            status = _STATUS_OF_CODE.get(answer.code)
            if status is not None:
                return _result(status, answer, target, message_id)
            failure = BrokerError(address, answer.code, answer.remark or "")
            self._routes.distrust(topic)
            if answer.code not in _RETRIED_ELSEWHERE:
                break
        if failure is None:
            raise RequestTimedOut(";".join(self._client.client.name_servers), timeout_s)
        raise failure

    def _next_queue(self, route: TopicRoute, avoid: str | None) -> MessageQueue:
        queues = route.write_queues
        if not queues:
            self._routes.distrust(route.topic)
            raise ConnectionFailed(route.topic, "no master that may be written to is registered for this topic")
        turn = self._turns.get(route.topic)
        if turn is None:
            # Producers that start together should not all begin with queue 0.
            turn = self._turns[route.topic] = itertools.count(random.randrange(len(queues)))
        first = queues[next(turn) % len(queues)]
        if first.broker_name != avoid:
            return first
        others = [queue for queue in queues if queue.broker_name != avoid]
        return others[next(turn) % len(others)] if others else first

    def _properties(self, message: Message) -> tuple[str, str]:
        """The property string of `message` and the unique id in it."""
        known = dict(message.properties)
        if message.tags is not None:
            known[names.TAGS] = message.tags
        if message.keys:
            known[names.KEYS] = (
                message.keys if isinstance(message.keys, str) else names.KEY_SEPARATOR.join(message.keys)
            )
        if not message.wait_stored:
            known[names.WAIT] = "false"
        if message.delay_level:
            known[names.DELAY] = str(message.delay_level)
        message_id = known.get(names.UNIQ_KEY)
        if message_id is None:
            message_id = known[names.UNIQ_KEY] = self._unique_ids.next()
        return encode_properties(known).decode(), message_id

    def _header(self, code: RequestCode, queue: MessageQueue, flag: int, properties: str) -> SendMessageRequestV2:
        return SendMessageRequestV2(
            producer_group=self._group,
            topic=queue.topic,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=self._options.default_topic_queue_nums,
            queue_id=queue.queue_id,
            sys_flag=0,
            born_timestamp=self._wall_clock_ms(),
            flag=flag,
            properties=properties,
            batch=code == RequestCode.SEND_BATCH_MESSAGE,
            broker_name=queue.broker_name,
        )


def _result(status: SendStatus, answer: RemotingCommand, target: MessageQueue, message_id: str) -> SendResult:
    header = parse_header(SendMessageResponse, answer.ext_fields)
    queue = target
    if header.queue_id != target.queue_id:
        queue = MessageQueue(target.topic, target.broker_name, header.queue_id)
    return SendResult(status, message_id, header.msg_id, queue, header.queue_offset, answer.remark or "")
