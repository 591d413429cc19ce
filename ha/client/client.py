"""Shared state of a program's producers and consumers: connections, routes, heartbeats, and requests from brokers.

A producer or consumer that is given name servers creates its own client; given a `Client`, it shares that one.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ha.client.connection import Connection, refuse
from ha.client.connections import Connections, open_connections
from ha.client.credentials import signing
from ha.client.heartbeat import Heartbeats
from ha.client.options import ClientOptions, month_ms, name_server_addresses, own_address
from ha.client.replaced import disconnect_replaced_masters
from ha.client.routes import Routes, open_routes
from ha.client.starting import Startable
from ha.errors import ClientError, ProtocolError
from ha.protocol import java_json
from ha.protocol import properties as names
from ha.protocol.acl import AclCredentials
from ha.protocol.bodies import ConsumerData
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.message_id import UniqueIdGenerator
from ha.protocol.record import decode_record
from ha.protocol.remoting import RemotingCommand

_log = logging.getLogger(__name__)

NameServers = str | list[str] | tuple[str, ...] | None
_REQUESTS_WAITING_MAX = 256
"""Maximum number of queued requests from brokers; further ones are rejected with SYSTEM_BUSY (oneway: dropped)."""
_REQUEST_TASKS = 4
_CLOSE_TIMEOUT_S = 2.0
NOT_OPEN = "not open: use it inside `async with …:`, or between `await start()` and `await stop()`"
_client_numbers = itertools.count(1)


class ConsumerMember(Protocol):
    """The part of a consumer that its client uses."""

    @property
    def group(self) -> str:
        """The consumer group."""

    def describe(self) -> ConsumerData:
        """Returns the heartbeat data of this consumer."""

    def on_members_changed(self) -> None:
        """Called when a member joined or left the group: NOTIFY_CONSUMER_IDS_CHANGED (40). Must not block."""

    async def answer(self, connection: Connection, command: RemotingCommand) -> RemotingCommand | None:
        """Returns the response to a broker's request, or None for no response. The request is
        RESET_CONSUMER_CLIENT_OFFSET (220), GET_CONSUMER_STATUS_FROM_CLIENT (221), GET_CONSUMER_RUNNING_INFO (307) or
        CONSUME_MESSAGE_DIRECTLY (309). Cancelled when the consumer leaves. Raises RemoteProtocolError if the request is
        malformed."""


class ProducerMember(Protocol):
    """The part of a producer that its client uses."""

    @property
    def group(self) -> str:
        """The producer group."""

    async def answer(self, connection: Connection, command: RemotingCommand) -> RemotingCommand | None:
        """Returns the response to the broker's request CHECK_TRANSACTION_STATE (39), or None for no response. Cancelled
        when the producer leaves. Raises RemoteProtocolError if the request is malformed, ConnectionFailed or
        RequestTimedOut if the outcome can't be sent."""


class Client(Startable):
    """Connections, routes and an identity that producers and consumers can share. An async context manager.

        async with Client("127.0.0.1:9876") as client, Producer(client) as producer, PullConsumer(client) as consumer:
            …

    Those that share a client have the same `client_id`, so only one Producer and one PushConsumer of each group can
    use it: opening a second one raises ValueError. A client has one connection per broker. `name_servers`, `options`
    and `credentials` are those of Producer.
    """

    def __init__(
        self,
        name_servers: NameServers = None,
        *,
        options: ClientOptions | None = None,
        credentials: AclCredentials | None = None,
        wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.name_servers = name_server_addresses(name_servers)
        self.options = signing(options or ClientOptions(), credentials)
        self.wall_clock_ms = wall_clock_ms
        self._take_identity()
        self._producers: dict[str, ProducerMember] = {}
        self._consumers: dict[str, ConsumerMember] = {}
        self._answering: dict[anyio.CancelScope, ConsumerMember | ProducerMember] = {}
        """Cancel scopes of the calls of members' `answer` in progress."""
        self._connections: Connections | None = None
        self._routes: Routes | None = None
        self.is_open = False

    def _take_identity(self) -> None:
        """Sets `client_id`, and the start of the messages' unique ids, to those of this process."""
        self._process_id = os.getpid()
        self.client_id = (
            f"{socket.inet_ntoa(own_address())}@{self._process_id}#{time.time_ns() + next(_client_numbers)}"
        )
        """Id by which brokers identify this client: address, process id and a number that is unique within the process,
        as in RocketMQ's clients."""
        self.unique_ids = UniqueIdGenerator(
            address=own_address(),
            process_id=self._process_id,
            process_hash=random.getrandbits(31),
            wall_clock_ms=self.wall_clock_ms,
            month_ms=month_ms,
        )

    async def _open(self, stack: AsyncExitStack) -> None:
        if os.getpid() != self._process_id:  # forked since: the parent, or its other children, may open it as well
            self._take_identity()
        send, receive = anyio.create_memory_object_stream[tuple[Connection, RemotingCommand]](_REQUESTS_WAITING_MAX)
        self._requests: MemoryObjectSendStream[tuple[Connection, RemotingCommand]] = send
        stack.enter_context(send)
        stack.enter_context(receive)
        connections = await stack.enter_async_context(open_connections(self.options, self._on_request))
        routes = await stack.enter_async_context(open_routes(self.name_servers, connections, self.options))
        self.heartbeats = Heartbeats(self.client_id, connections, routes, self.options)
        self._connections, self._routes = connections, routes
        stack.callback(self._forget_parts)
        await stack.enter_async_context(self._serving(receive))
        self.is_open = True
        stack.callback(self._refuse_users)

    def _refuse_users(self) -> None:
        self.is_open = False

    def _forget_parts(self) -> None:
        self._connections = self._routes = None

    @property
    def connections(self) -> Connections:
        """The connections to name servers and brokers. Raises RuntimeError if the client is not open."""
        if self._connections is None:
            raise RuntimeError(NOT_OPEN)
        return self._connections

    @property
    def routes(self) -> Routes:
        """The known routes. Raises RuntimeError if the client is not open."""
        if self._routes is None:
            raise RuntimeError(NOT_OPEN)
        return self._routes

    @asynccontextmanager
    async def joined_producer(self, member: ProducerMember) -> AsyncIterator[None]:
        """Registers `member` with the brokers for the duration of the block. Raises ValueError if this client has a
        producer of the same group, or the group's name can't be encoded as UTF-8."""
        if member.group in self._producers:
            raise ValueError(f"this client has a producer of group {member.group} already")
        member.group.encode()  # the client's heartbeats would fail, for all its members
        self._producers[member.group] = member
        self.heartbeats.add_producer(member.group)
        try:
            yield
        finally:
            del self._producers[member.group]
            self._cancel_answers(member)
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await self.heartbeats.remove_producer(member.group)

    @asynccontextmanager
    async def joined_consumer(self, member: ConsumerMember) -> AsyncIterator[None]:
        """As `joined_producer`, for a consumer. Before the block starts, sends a heartbeat to each broker of the known
        routes, and waits until it is answered or has failed; failures are logged."""
        if member.group in self._consumers:
            raise ValueError(f"this client has a consumer of group {member.group} already")
        java_json.dumps(member.describe())  # raises ValueError, as for a producer
        self._consumers[member.group] = member
        self.heartbeats.add_consumer(member.group, member.describe)
        try:
            await self.heartbeats.beat()
            yield
        finally:
            del self._consumers[member.group]
            self._cancel_answers(member)
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await self.heartbeats.remove_consumer(member.group)

    @asynccontextmanager
    async def _serving(
        self, requests: MemoryObjectReceiveStream[tuple[Connection, RemotingCommand]]
    ) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.heartbeats.serve)
            tasks.start_soon(disconnect_replaced_masters, self.connections, self.routes)
            for _ in range(_REQUEST_TASKS):
                tasks.start_soon(self._answer_requests, requests)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    def _on_request(self, connection: Connection, command: RemotingCommand) -> None:
        if command.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            consumer = self._consumers.get(command.ext_fields.get("consumerGroup", ""))
            if consumer is not None:
                consumer.on_members_changed()
            return
        try:
            self._requests.send_nowait((connection, command))
        except (anyio.WouldBlock, anyio.ClosedResourceError, anyio.BrokenResourceError):
            _log.warning("client.request_dropped address=%s code=%s", connection.address, command.code)
            if not command.is_oneway:
                connection.respond(command.reply(ResponseCode.SYSTEM_BUSY, "too many requests to this client"))

    async def _answer_requests(self, requests: MemoryObjectReceiveStream[tuple[Connection, RemotingCommand]]) -> None:
        while True:
            connection, command = await requests.receive()
            try:
                member = self._member_for(command)
                if member is None or not await self._answer(member, connection, command):
                    refuse(connection, command)
            except (ProtocolError, ClientError) as error:  # a LocalProtocolError: the response is too large
                _log.warning(
                    "client.request_failed address=%s code=%s reason=%r", connection.address, command.code, str(error)
                )
                if not command.is_oneway:
                    connection.respond(command.reply(ResponseCode.SYSTEM_ERROR, str(error)))

    async def _answer(
        self, member: ConsumerMember | ProducerMember, connection: Connection, command: RemotingCommand
    ) -> bool:
        """Sends the member's response to a request. Returns False if the member leaves before it has one."""
        with anyio.CancelScope() as scope:
            self._answering[scope] = member
            try:
                answer = await member.answer(connection, command)
            finally:
                del self._answering[scope]
            if answer is not None and not command.is_oneway:
                connection.respond(answer)
        return not scope.cancelled_caught

    def _cancel_answers(self, member: ConsumerMember | ProducerMember) -> None:
        """Cancels the calls of `member.answer`, because they use the resources of the member's block."""
        for scope, each in self._answering.items():
            if each is member:
                scope.cancel()

    def _member_for(self, command: RemotingCommand) -> ConsumerMember | ProducerMember | None:
        fields = command.ext_fields
        match command.code:
            case RequestCode.CHECK_TRANSACTION_STATE:
                known = decode_record(command.body, verify_crc=False).property_map()
                return self._producers.get(known.get(names.PRODUCER_GROUP, ""))
            case RequestCode.RESET_CONSUMER_CLIENT_OFFSET | RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT:
                return self._consumers.get(fields.get("group", ""))
            case RequestCode.GET_CONSUMER_RUNNING_INFO | RequestCode.CONSUME_MESSAGE_DIRECTLY:
                return self._consumers.get(fields.get("consumerGroup", ""))
            case _:
                return None


class ClientUser(Startable):
    """Base class of producers, consumers and Admin: an async context manager with a shared client or one of its own."""

    def __init__(
        self,
        client: Client | NameServers,
        options: ClientOptions | None,
        credentials: AclCredentials | None,
        wall_clock_ms: Callable[[], int] | None = None,
    ) -> None:
        """Raises ValueError for an invalid name server address, incomplete or unreadable credentials in the
        environment, or options or credentials together with a shared client."""
        self._is_own_client = not isinstance(client, Client)
        if not isinstance(client, Client):
            clock = {} if wall_clock_ms is None else {"wall_clock_ms": wall_clock_ms}
            self._client = Client(client, options=options, credentials=credentials, **clock)
        elif options is not None or credentials is not None:
            raise ValueError("set options and credentials on the shared client")
        else:
            self._client = client

    @property
    def client_id(self) -> str:
        """The id by which brokers identify the client."""
        return self._client.client_id

    async def _open(self, stack: AsyncExitStack) -> None:
        """Opens the client, unless it is shared, and starts the services of the subclass. Raises RuntimeError if a
        shared client is not open."""
        if self._is_own_client:
            await stack.enter_async_context(self._client)
        elif not self._client.is_open:
            raise RuntimeError(f"the shared client is {NOT_OPEN}")
        await self._begin(stack)

    async def _begin(self, stack: AsyncExitStack) -> None:
        """Starts the services of a subclass once the client is open; `stack` ends them when the block ends."""
