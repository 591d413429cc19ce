"""The SDK's producer.

Any number of tasks can send concurrently through one producer; they share one connection per broker. With
`ClientOptions.batching`, messages that arrive while a request is in flight are sent together in the next request
(`batching.py`). Source: DefaultMQProducer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack

from ha.client.batching import Batching, open_batching
from ha.client.callbacks import check_async
from ha.client.client import Client, ClientUser, NameServers
from ha.client.connection import Connection
from ha.client.messages import Message, MessageQueue, SendResult
from ha.client.options import ClientOptions
from ha.client.recalling import recall
from ha.client.sender import Sender
from ha.client.shared_requests import SharedRequests
from ha.client.transactions import Check, Local, TransactionResult, Transactions
from ha.errors import HalogError
from ha.protocol.acl import AclCredentials
from ha.protocol.remoting import RemotingCommand


class Producer(ClientUser):
    """Sends messages. An async context manager; works under asyncio and trio, with halog and RocketMQ brokers.

        async with Producer("127.0.0.1:9876", group="billing") as producer:
            result = await producer.send(Message("invoices", b"…", tags="paid"))

    `name_servers`: host:port, several as a list or joined with ';', or a `Client`, to share its connections; None uses
    NAMESRV_ADDR from the environment.
    `credentials`: for brokers with access control; None uses those of `options` or, if it has none, of the environment
    (HALOG_ACCESS_KEY with HALOG_SECRET_KEY or HALOG_SECRET_KEY_FILE).
    `check`: called to find out the outcome of a transaction that this producer, or another of its group, left open;
    required for transactions.

    Raises ValueError for invalid arguments, and TypeError if `check` is not async. Entering the block raises ValueError
    for TLS files that can't be used, for an invalid group name, or if a shared client has a producer of the same group,
    and RuntimeError if a shared client is not open.

    Leaving the block closes the connections, and sends in flight fail with ConnectionFailed. With a shared client, the
    connections stay open, and only sends with `ClientOptions.batching` fail.
    """

    def __init__(
        self,
        name_servers: Client | NameServers = None,
        *,
        group: str = "halog-producer",
        check: Check | None = None,
        options: ClientOptions | None = None,
        credentials: AclCredentials | None = None,
        wall_clock_ms: Callable[[], int] | None = None,
    ) -> None:
        check_async(check, "check")
        super().__init__(name_servers, options, credentials, wall_clock_ms)
        self._group = group
        self._sender = Sender(self._client, group)
        self._shared = SharedRequests(self._sender)
        self._batching: Batching | None = None
        self._transactions = None if check is None else Transactions(self._client, group, self._sender, check)

    async def _begin(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._client.joined_producer(self))
        if self._client.options.batching:
            self._batching = await stack.enter_async_context(open_batching(self._sender, self._shared))

    @property
    def group(self) -> str:
        """The producer group."""
        return self._group

    @property
    def retry_count(self) -> int:
        """Number of times that a send has paused before a retry, since this producer was created."""
        return self._sender.retry_count

    async def answer(self, connection: Connection, command: RemotingCommand) -> RemotingCommand | None:
        """Handles a broker's request, and returns the response; None for no response. Called by the client."""
        if self._transactions is None:
            return None
        return await self._transactions.answer(connection, command)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The writable queues of `topic`, sorted. For a topic that does not exist yet, the queues that it will have
        once a send has created it. Raises RouteNotFound, NameServersUnreachable, BrokerError, RemoteProtocolError."""
        return list((await self._client.routes.find_for_sending(topic)).write_queues)

    async def send(
        self, message: Message, *, queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> SendResult:
        """Sends one message and returns where and how safely it was stored; check the result's `status`.

        `queue` chooses the queue and disables retries. All attempts together take at most `timeout_s` (default
        options.send_timeout_s); without `queue`, they continue until then while no name server or master can be
        reached.

        Raises BrokerError if the broker rejected the message, RouteNotFound, ConnectionFailed, RequestTimedOut,
        RemoteProtocolError for a malformed response, ValueError for a message that no broker would accept,
        LocalProtocolError for one that can't be encoded, TypeError for a body that isn't bytes or a property that isn't
        text. The error is that of the last attempt; `was_sent` of BrokerError and ConnectionFailed says whether any
        attempt may have stored the message. After RequestTimedOut or RemoteProtocolError, it may be stored. A retried
        send may be stored more than once. A cancelled one may be stored, unless batching had not sent it yet."""
        _check_topic(queue, message)
        outgoing = self._sender.prepare_simple(message) or await self._sender.prepare(message)
        if self._batching is None:
            return (await self._sender.send(outgoing, queue, timeout_s)).result
        timeout_s = self._client.options.send_timeout_s if timeout_s is None else timeout_s
        return await self._batching.send(outgoing, queue, timeout_s)

    async def send_many(
        self, messages: Iterable[Message], *, queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> list[SendResult | HalogError]:
        """Sends messages and returns for each, in order, the result that `send` would return or the error it would
        raise.

        Messages share requests, regardless of ClientOptions.batching; those to a chosen `queue` are sent in order, one
        request after the other. All together take at most `timeout_s` (default options.send_timeout_s). Raises
        ValueError, TypeError or LocalProtocolError, and sends nothing, if no broker would accept one of the messages.
        If this is cancelled, any of them may be stored."""
        sender, messages = self._sender, list(messages)
        _check_topic(queue, *messages)
        outgoing = [sender.prepare_simple(message) or await sender.prepare(message) for message in messages]
        timeout_s = self._client.options.send_timeout_s if timeout_s is None else timeout_s
        return await self._shared.send_many(outgoing, queue, timeout_s)

    async def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> SendResult:
        """Sends messages of one topic in one request; all or none are stored, consecutively in one queue.

        Result and errors as for `send`. Raises ValueError unless all have the same topic and `wait_stored` and none has
        a delay or priority, and for an empty batch."""
        _check_topic(queue, *messages)
        return (await self._sender.send(self._sender.prepare_batch(messages), queue, timeout_s)).result

    async def send_oneway(
        self, message: Message, *, queue: MessageQueue | None = None, timeout_s: float | None = None
    ) -> None:
        """Sends one message without waiting for a response, so whether it was stored is unknown. No retries.

        Waits for the route and the connection, and while the connection's outbox is full, for at most `timeout_s`
        (default options.send_timeout_s). Raises RouteNotFound, ConnectionFailed, RequestTimedOut, and ValueError,
        TypeError or LocalProtocolError as `send` does."""
        _check_topic(queue, message)
        await self._sender.send_oneway(await self._sender.prepare(message), queue, timeout_s)

    async def recall(self, recall_handle: str, *, timeout_s: float | None = None) -> str:
        """Takes back a message that is not due yet, by the `recall_handle` of its SendResult; returns its message id.

        Once this has returned, a halog broker does not deliver the message; RocketMQ's brokers may, in the second
        before it is due. Retries for at most `timeout_s` (default options.send_timeout_s) while the broker can't be
        reached, for example because the master changes. Raises BrokerError if the broker rejected it (code 604: the
        message is due), RouteNotFound, RequestTimedOut or ConnectionFailed (the message may have been recalled),
        RemoteProtocolError if `recall_handle` is not a handle."""
        timeout_s = self._client.options.send_timeout_s if timeout_s is None else timeout_s
        return await recall(self._client, self._group, recall_handle, timeout_s)

    async def send_in_transaction(
        self,
        message: Message,
        local: Local,
        *,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
    ) -> TransactionResult:
        """Stores `message` as a half message, which consumers don't receive, calls `local`, and commits the message or
        rolls it back, according to the result of `local`.

        If the half message was not stored safely (any status but SEND_OK), it is rolled back without calling `local`.
        If `local` raises or returns UNKNOWN, or the outcome can't be delivered, the broker asks a producer of the
        group, which calls `check`.

        Raises the errors of `send` before `local` is called, and those of `local`; ValueError without `check`, or for a
        delayed message; TypeError if `local` is not async, or returns anything but a TransactionState (the broker asks
        then, too)."""
        if self._transactions is None:
            raise ValueError("transactions need a producer with check=…, which resolves those left open")
        check_async(local, "local")
        _check_topic(queue, message)
        return await self._transactions.send(message, local, queue, timeout_s)


def _check_topic(queue: MessageQueue | None, *messages: Message) -> None:
    """Raises ValueError if `queue` belongs to another topic, where brokers would store the messages."""
    if queue is not None:
        for message in messages:
            if message.topic != queue.topic:
                raise ValueError(f"a message of topic {message.topic} can't be sent to a queue of topic {queue.topic}")
