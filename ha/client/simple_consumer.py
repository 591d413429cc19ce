"""The SDK's simple consumer: receives messages by POP, and acknowledges each of them or gives it back.

Source: SimpleConsumerImpl of RocketMQ's 5.x clients, which waits at one broker at a time; this one waits at all of them
at once.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

import anyio
import msgspec
from anyio.abc import TaskGroup

from ha.client.arrivals import POLL_S, Arrivals
from ha.client.backoff import Backoff
from ha.client.client import NOT_OPEN, Client, ClientUser, NameServers
from ha.client.messages import MessageQueue
from ha.client.options import ClientOptions
from ha.client.pop_requests import ALL_QUEUES, PopRequests
from ha.client.popped_message import INVISIBLE_S_MAX, Lease, PoppedMessage, popped_message
from ha.client.push_options import ConsumeMode, StartFrom
from ha.client.queue_requests import UNAVAILABLE_CODES
from ha.client.received import received
from ha.client.send_back import SendBack
from ha.client.subscription import TAG, Sql92, checked_subscriptions, wanted_tags
from ha.errors import BrokerError, ClientError, ConnectionFailed, RemoteProtocolError, RequestTimedOut
from ha.protocol.acl import AclCredentials
from ha.protocol.codes import MASTER_ID
from ha.protocol.popped import Popped
from ha.protocol.properties import UNIQ_KEY

_log = logging.getLogger(__name__)

RECEIVE_COUNT_MAX = 32
"""Maximum number of messages that brokers return for one pop."""
RECONSUME_TIMES_MAX = 16
_DEAD_LETTER = -1
"""Delay level that makes a message a dead letter."""
_QUICK_ANSWER_S = 0.1
"""Time in seconds within which a round of requests without messages counts as quick. `receive` pauses after the second
quick round in a row, not after the first: a notification may have ended the first, and then its messages are popped
without a pause."""
_CLOSE_TIMEOUT_S = 2.0
"""Time limit for giving back messages that an iteration has not returned, in seconds."""


class SimpleConsumer(ClientUser):
    """Receives messages on request, and acknowledges each of them. An async context manager; works under asyncio and
    trio, with halog and RocketMQ 5 or later, whose brokers have POP.

        async with SimpleConsumer("127.0.0.1:9876", group="billing", subscriptions={"invoices": "*"}) as consumer:
            async for message in consumer.messages():
                await message.ack()

    A received message is invisible to the group for `invisible_s`. Unless it is acknowledged by then, it is delivered
    again, like one that was given back by `nack`. Members share messages, not queues, so there may be more members than
    queues, and messages of a queue are handled out of order.

    With `mode` ORDERLY, brokers give out a queue's next messages only after those that they gave out before are
    acknowledged; one that was given back, or not acknowledged in time, is delivered again before later ones. All
    members of the group have to use the same mode.

    `subscriptions` and `start_from` are those of PushConsumer, but `start_from` can't be a datetime. A message that was
    redelivered more than `reconsume_times_max` times becomes a dead letter (topic %DLQ%group) instead of being
    received. The other arguments are those of Producer. Leaving the block gives back the messages that an iteration has
    not returned.
    """

    def __init__(
        self,
        name_servers: Client | NameServers = None,
        *,
        group: str,
        subscriptions: Mapping[str, str | Sql92],
        mode: ConsumeMode = ConsumeMode.CONCURRENTLY,
        start_from: StartFrom = StartFrom.LAST,
        reconsume_times_max: int = RECONSUME_TIMES_MAX,
        options: ClientOptions | None = None,
        credentials: AclCredentials | None = None,
    ) -> None:
        if not isinstance(start_from, StartFrom):
            raise TypeError(f"start_from={start_from!r}; accepted: StartFrom.FIRST, StartFrom.LAST")
        if reconsume_times_max < 0:
            raise ValueError(f"reconsume_times_max={reconsume_times_max}; accepted: 0 or more")
        super().__init__(name_servers, options, credentials)
        self._subscriptions = checked_subscriptions(group, subscriptions, self._client.wall_clock_ms())
        self._group = group
        self._reconsume_times_max = reconsume_times_max
        self._is_ordered = mode is ConsumeMode.ORDERLY
        self._requests = PopRequests(self._client, group, start_from, is_ordered=self._is_ordered)
        self._send_back = SendBack(self._client, group, reconsume_times_max)
        self._next_source = 0
        self._buffer: deque[PoppedMessage] = deque()
        self._return_at = math.inf
        """Time at which `_return_unread` looks at the buffer again, on the event loop's clock."""
        self._receiving = anyio.Lock()
        self._arrivals: Arrivals | None = None
        self._tasks: TaskGroup | None = None

    async def _begin(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._waiting())

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            self._arrivals = arrivals = Arrivals(self._requests, self._subscriptions, tasks)
            self._tasks = tasks
            self._sooner = anyio.Event()
            tasks.start_soon(self._return_unread)
            try:
                yield
            finally:
                self._arrivals = self._tasks = None
                arrivals.close()
                tasks.cancel_scope.cancel()
                leases = [message.lease for message in self._buffer]
                self._buffer.clear()
                with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                    await self._give_back(leases)

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._group

    async def receive(
        self, max_messages: int = RECEIVE_COUNT_MAX, *, invisible_s: float = 60.0, wait_s: float = 15.0
    ) -> list[PoppedMessage]:
        """Receives 1 to `max_messages` (at most 32) messages, or none if none arrive within `wait_s`.

        For `invisible_s` (0.001 … 1e9) no other member of the group gets them. With mode ORDERLY, handle those of a
        queue in the order of the list, and if you give one back, give back the later ones of its queue, too.

        While all brokers fail with ConnectionFailed, or BrokerError with code 2, 14 or 1500, they are asked again for
        request_timeout_s, even after `wait_s`. If this is cancelled, messages that a broker has already taken for it
        stay invisible for `invisible_s`; with mode ORDERLY, the next call gets them. Raises BrokerError (for example
        code 26: the group does not exist), RouteNotFound, RequestTimedOut, ConnectionFailed, RemoteProtocolError,
        ValueError for arguments out of range, and RuntimeError outside the block."""
        return await self._receive(self.open_arrivals(), max_messages, invisible_s, wait_s)

    def open_arrivals(self) -> Arrivals:
        """Returns the `Arrivals` of the current block; called by iterations. Raises RuntimeError outside the block."""
        if self._arrivals is None:
            raise RuntimeError(NOT_OPEN)
        return self._arrivals

    async def _receive(
        self, arrivals: Arrivals, max_messages: int, invisible_s: float, wait_s: float
    ) -> list[PoppedMessage]:
        """As `receive`. `arrivals` are those of the consumer's block: raises ConnectionFailed once it has ended."""
        if not 1 <= max_messages <= RECEIVE_COUNT_MAX:
            raise ValueError(f"max_messages={max_messages}; accepted: 1 … {RECEIVE_COUNT_MAX}")
        if not 0.001 <= invisible_s <= INVISIBLE_S_MAX:
            raise ValueError(f"invisible_s={invisible_s}; accepted: 0.001 … {INVISIBLE_S_MAX:g}")
        backoff, options, quick_count = Backoff(), self._client.options, 0
        end, give_up_at = anyio.current_time() + wait_s, math.inf
        while True:
            started = anyio.current_time()
            try:
                messages = await self._receive_once(arrivals, max_messages, invisible_s, end)
            except ClientError as error:
                if arrivals.is_closed or not _is_unavailable(error):
                    raise
                now, pause_s = anyio.current_time(), backoff.next_s()
                give_up_at = min(give_up_at, now + options.request_timeout_s)
                if not options.retry_unreachable or now + pause_s >= give_up_at:
                    raise
                await anyio.sleep(pause_s)
                if arrivals.is_closed or not self._client.is_open:
                    raise
                continue
            now = anyio.current_time()
            if messages or now >= end:
                return messages
            give_up_at = math.inf
            quick_count = quick_count + 1 if now - started < _QUICK_ANSWER_S else 0
            if quick_count > 1:
                await anyio.sleep(min(backoff.next_s(), end - now))
            else:
                backoff.reset()

    def messages(self, *, max_messages: int = 16, invisible_s: float = 60.0) -> Messages:
        """Returns an endless async iterator of messages. Several tasks may iterate, each over its own iterator or over
        a shared one.

        `max_messages` (at most 32) and `invisible_s` are those of the underlying `receive`: up to `max_messages`
        messages are buffered, invisible to other members. Those that are still buffered when half of `invisible_s`
        has passed are given back, which doesn't count as a redelivery. With mode ORDERLY, messages are received one
        at a time, so that tasks that share the iteration get messages of different queues. Brokers that can't be
        reached, or time out, are retried indefinitely; the iteration raises the other errors of `receive`, and
        ConnectionFailed or the last error once the consumer is closed."""
        return Messages(self, 1 if self._is_ordered else max_messages, invisible_s)

    async def ack(self, message: PoppedMessage) -> None:
        """As `message.ack()`."""
        await message.lease.ack()

    async def change_invisible_time(self, message: PoppedMessage, invisible_s: float) -> None:
        """Makes `message` invisible for `invisible_s` from now, instead of the rest of its time: call this when
        handling takes longer than expected.

        `ack` and `nack` wait until this has ended. If this is cancelled, its request continues, so that they can use
        the message's new handle. Raises ReceiptExpired if the invisible time is over or the message was acknowledged or
        given back, BrokerError, RequestTimedOut, ConnectionFailed, RemoteProtocolError, ValueError for an `invisible_s`
        outside 0 … 1e9, and RuntimeError outside the consumer's block. After RequestTimedOut, or ConnectionFailed with
        `was_sent`, the message may be delivered again in spite of `ack`, because the new handle is unknown."""
        if self._tasks is None:
            raise RuntimeError(NOT_OPEN)
        ended = anyio.Event()
        failure: Exception | None = ConnectionFailed(
            message.queue.broker_name, "the consumer was closed", was_sent=True
        )

        async def extend() -> None:
            nonlocal failure
            try:
                await message.lease.extend(invisible_s)
                failure = None
            except Exception as error:  # raised below
                failure = error
            finally:
                ended.set()

        self._tasks.start_soon(extend)
        await ended.wait()
        if failure is not None:
            raise failure

    async def take_buffered(self, arrivals: Arrivals, max_messages: int, invisible_s: float) -> PoppedMessage:
        """Returns the next message for an iteration; receives more when none is buffered. Raises the errors of
        `_receive`."""
        while True:
            while self._buffer:
                message = self._buffer.popleft()
                if not message.lease.is_expired:
                    return message
            async with self._receiving:
                if not self._buffer:
                    messages = await self._receive(arrivals, max_messages, invisible_s, POLL_S)
                    if arrivals.is_closed:  # the end of the block gave back only messages that were buffered by then
                        await self._give_back([message.lease for message in messages])
                        raise self._closed()
                    self._buffer.extend(messages)
                    if messages and messages[0].lease.half_over_at < self._return_at:
                        self._sooner.set()

    async def _return_unread(self) -> None:
        """Gives back messages that are still buffered when half of their invisible time has passed, until cancelled.

        The program needs the rest of the time for a message that it gets. Messages that expire in the buffer would
        count as redelivered each time, and in the end become dead letters that the program has never received."""
        while True:
            now = anyio.current_time()
            unread = [message.lease for message in self._buffer if message.lease.half_over_at <= now]
            if unread:
                self._buffer = deque(message for message in self._buffer if message.lease.half_over_at > now)
                await self._give_back(unread)
                continue
            self._return_at = min((message.lease.half_over_at for message in self._buffer), default=math.inf)
            self._sooner = anyio.Event()
            with anyio.move_on_after(self._return_at - now):
                await self._sooner.wait()

    async def _give_back(self, leases: Iterable[Lease]) -> None:
        """Gives back the messages of `leases` that have not expired, concurrently, because each request may wait for a
        broker that does not answer. Failures are logged."""

        async def give_back_one(lease: Lease) -> None:
            try:
                await lease.give_back(0, counts=False)
            except (ClientError, RemoteProtocolError) as error:
                _log.warning("client.message_not_returned group=%s reason=%r", self._group, str(error))

        async with anyio.create_task_group() as tasks:
            for lease in leases:
                if not lease.is_expired:
                    tasks.start_soon(give_back_one, lease)

    def _closed(self) -> ConnectionFailed:
        return ConnectionFailed(", ".join(self._subscriptions), "the consumer was closed")

    # ---- sources: all queues of one topic on one broker

    async def _receive_once(
        self, arrivals: Arrivals, max_messages: int, invisible_s: float, end: float
    ) -> list[PoppedMessage]:
        """Pops from each source that is not postponed, until one has messages, and returns those. If none has, waits
        until `end` or until a broker reports that there may be messages, and returns []. Raises the last source's error
        if the last pop of every source failed because its broker was unavailable or did not answer in time, and at
        once any other error of a pop.

        A single source in order mode is popped with a long poll instead of waiting for a notification: if the long poll
        is cancelled, the next pop gets the messages that the broker took for it. In the other mode, these messages
        would stay invisible."""
        if arrivals.is_closed:
            raise self._closed()
        sources = await self._sources()
        is_polled = self._is_ordered and len(sources) == 1
        for source in sources:
            left_s = end - anyio.current_time()
            if source in arrivals.postponed and left_s > 0:
                continue
            arrivals.postponed.pop(source, None)
            wait_s = min(max(0.0, left_s), POLL_S) if is_polled else 0.0
            try:
                with self._requests.attempt(source) as attempt_id:
                    popped, has_more = await self._requests.pop(
                        source,
                        self._subscriptions[source.topic],
                        message_count_max=max_messages,
                        invisible_ms=int(invisible_s * 1000),
                        wait_s=wait_s,
                        attempt_id=attempt_id,
                    )
                    messages = await self._kept(source, popped)
            except ClientError as error:
                if not (_is_unavailable(error) or isinstance(error, RequestTimedOut)):
                    raise
                arrivals.postpone(source, error)
                continue
            # In order mode a source that returns no more messages may have some that unacknowledged ones block.
            if left_s > 0 and not (has_more or self._is_ordered):
                arrivals.postpone(source, None)
            if messages:
                return messages
        failures = [arrivals.postponed.get(source) for source in sources]
        if failures[-1] is not None and None not in failures:
            arrivals.postponed.clear()
            raise failures[-1]
        if not is_polled:
            await arrivals.wait(sources, end - anyio.current_time())
        return []

    async def _sources(self) -> list[MessageQueue]:
        """Returns the sources, each time starting with the next one (round robin). Omits broker sets without a master,
        unless none has one. Raises the errors of `Routes.find`, and ConnectionFailed if no broker has readable
        queues."""
        routes = self._client.routes
        found, without_master = list[MessageQueue](), list[MessageQueue]()
        for topic in self._subscriptions:
            route = await routes.find(topic)
            for name in sorted({queue.broker_name for queue in route.read_queues}):
                has_master = MASTER_ID in route.addresses.get(name, {})
                (found if has_master else without_master).append(MessageQueue(topic, name, ALL_QUEUES))
        sources = found or without_master
        if not sources:
            raise ConnectionFailed(", ".join(self._subscriptions), "no broker with readable queues is registered")
        self._next_source = (self._next_source + 1) % len(sources)
        return sources[self._next_source :] + sources[: self._next_source]

    # ---- received messages

    async def _kept(self, source: MessageQueue, popped: list[Popped]) -> list[PoppedMessage]:
        """Returns the popped messages that the program gets. Acknowledges those with other tags, makes those that were
        delivered too often dead letters (if that fails, they are delivered again later), and gives back those beyond
        frame_size_max bytes of bodies."""
        subscription = self._subscriptions[source.topic]
        tags = wanted_tags(subscription.sub_string) if subscription.expression_type == TAG else None
        messages = []
        size = 0
        for number, each in enumerate(popped):
            if size >= self._client.options.frame_size_max:
                await self._give_back([self._lease(source, other) for other in popped[number:]])
                break
            message = self._message(source, each)
            size += len(message.stored_body)
            if tags is not None and message.tags not in tags:  # brokers compare only hashes of tags
                await self._discard(message)
            elif message.reconsume_times > self._reconsume_times_max:
                if await self._send_back.redeliver(message, _DEAD_LETTER):
                    await self._discard(message)
            else:
                messages.append(message)
        return messages

    def _message(self, source: MessageQueue, popped: Popped) -> PoppedMessage:
        record = popped.record
        if record.reconsume_times != popped.attempts_before:  # in order mode the record lacks the number
            record = msgspec.structs.replace(record, reconsume_times=popped.attempts_before)
        queue = MessageQueue(source.topic, source.broker_name, record.queue_id)
        message = received(record, queue, self._client.options.message_size_max)
        return popped_message(message, self._lease(source, popped))

    def _lease(self, source: MessageQueue, popped: Popped) -> Lease:
        message_id = popped.properties.get(UNIQ_KEY, popped.receipt.encode())
        return Lease(self._requests, source, popped.receipt, message_id)

    async def _discard(self, message: PoppedMessage) -> None:
        """Acknowledges a message that the program doesn't get. If that fails, which is logged, it is delivered
        again."""
        try:
            await message.lease.ack()
        except (ClientError, RemoteProtocolError) as error:
            _log.warning("client.ack_failed message=%s reason=%r", message.message_id, str(error))


class Messages:
    """An endless async iterator of messages; see `SimpleConsumer.messages`."""

    def __init__(self, consumer: SimpleConsumer, max_messages: int, invisible_s: float) -> None:
        self._consumer = consumer
        self._max_messages = max_messages
        self._invisible_s = invisible_s
        self._arrivals: Arrivals | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PoppedMessage:
        """Returns the next message. If cancelled, buffered messages are kept; `SimpleConsumer.receive` says what
        happens to messages that a broker has already taken."""
        backoff = Backoff()
        if self._arrivals is None:
            self._arrivals = self._consumer.open_arrivals()
        while True:
            try:
                return await self._consumer.take_buffered(self._arrivals, self._max_messages, self._invisible_s)
            except ClientError as error:
                if self._arrivals.is_closed or not (_is_unavailable(error) or isinstance(error, RequestTimedOut)):
                    raise
                _log.warning("client.receive_failed group=%s reason=%r", self._consumer.group, str(error))
            await anyio.sleep(backoff.next_s())


def _is_unavailable(error: ClientError) -> bool:
    """Returns whether a request that failed with this error may succeed later, at this broker or at the next master."""
    return isinstance(error, ConnectionFailed) or (isinstance(error, BrokerError) and error.code in UNAVAILABLE_CODES)
