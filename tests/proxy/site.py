"""A broker with its gRPC port on TCP, and Apache's generated stubs as the client."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import trio
from google.protobuf.message import Message
from rocketmq.grpc_protocol import definition_pb2 as definition
from rocketmq.grpc_protocol import service_pb2 as service
from rocketmq.grpc_protocol import service_pb2_grpc as stubs

from ha.grpc import GrpcServer
from ha.node.grpc import OwnBroker
from ha.poller import open_poller
from ha.protocol.bodies import GroupConfig, TopicConfig
from ha.proxy.access import GuardedCalls
from ha.proxy.front import Front
from ha.proxy.options import FrontOptions
from tests.broker.node import Node, open_node

TIMEOUT_S = 20.0


class Client:
    """Calls as one client. Blocking, so used in threads; `call` is for tests."""

    def __init__(self, address: str, client_id: str = "vm@1@0@a") -> None:
        self.channel = grpc.insecure_channel(address)
        self.stub = stubs.MessagingServiceStub(self.channel)
        host, _, port = address.rpartition(":")
        self.endpoints = definition.Endpoints(scheme=1, addresses=[definition.Address(host=host, port=int(port))])
        self.metadata = [
            ("x-mq-client-id", client_id),
            ("x-mq-language", "HTTP"),
            ("x-mq-protocol", "v2"),
            ("x-mq-client-version", "1.0.8"),
            ("x-mq-date-time", "20261126T150645Z"),
            ("x-mq-request-id", str(uuid.uuid4())),
        ]

    async def call(self, method: str, request: Message, timeout_s: float = TIMEOUT_S) -> Any:
        """Makes a unary call; returns the response."""

        def blocking() -> Any:
            return getattr(self.stub, method)(request, metadata=self.metadata, timeout=timeout_s)

        return await trio.to_thread.run_sync(blocking)

    async def send(self, *messages: definition.Message) -> Any:
        """Sends messages in one call."""
        return await self.call("SendMessage", service.SendMessageRequest(messages=messages))

    async def receive(self, method: str, request: Message, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Makes a call whose answer is a stream; returns its messages."""

        def blocking() -> list[Any]:
            return list(getattr(self.stub, method)(request, metadata=self.metadata, timeout=timeout_s))

        return await trio.to_thread.run_sync(blocking)


class Chat:
    """A Telemetry stream."""

    def __init__(self, client: Client) -> None:
        self._send, self._receive = trio.open_memory_channel[Any](100)
        self._queue: list[Any] = []
        self._client = client
        self._token = trio.lowlevel.current_trio_token()
        self._waiting: Callable[[], None] | None = None
        self.answers_in, self.answers = trio.open_memory_channel[Any](100)
        self.error: grpc.RpcError | None = None

    def _requests(self) -> Any:
        while (command := trio.from_thread.run(self._receive.receive, trio_token=self._token)) is not None:
            yield command

    async def run(self) -> None:
        """Runs the stream until `end`."""

        def blocking() -> None:
            try:
                for answer in self._client.stub.Telemetry(self._requests(), metadata=self._client.metadata):
                    trio.from_thread.run(self.answers_in.send, answer, trio_token=self._token)
            except grpc.RpcError as error:
                self.error = error
            trio.from_thread.run(self.answers_in.aclose, trio_token=self._token)

        await trio.to_thread.run_sync(blocking)

    async def tell(self, settings: definition.Settings) -> Any:
        """Sends settings; returns the answer."""
        await self._send.send(service.TelemetryCommand(settings=settings))
        return await self.answers.receive()

    async def end(self) -> None:
        """Ends the stream."""
        await self._send.send(None)


def message(topic: str, body: bytes = b"hello", message_id: str = "", **system: Any) -> definition.Message:
    """A message; `system` are its system properties."""
    message_id = message_id or f"01{uuid.uuid4().hex.upper()}"
    properties = definition.SystemProperties(message_id=message_id, born_host="vm", message_type=1, **system)
    properties.born_timestamp.FromMilliseconds(int(time.time() * 1000))
    return definition.Message(
        topic=definition.Resource(name=topic), body=body, system_properties=properties, user_properties={"own": "ü"}
    )


class Site:
    """A broker, and the address of its gRPC port."""

    def __init__(self, node: Node, front: Front, server: GrpcServer, address: str) -> None:
        self.node = node
        self.front = front
        self.server = server
        self.address = address

    async def topic(self, name: str, message_type: str = "NORMAL", *, read: int = 4, write: int = 4) -> None:
        """Creates a topic."""
        attributes = {"message.type": message_type} if message_type else {}
        config = TopicConfig(topic_name=name, read_queue_nums=read, write_queue_nums=write, attributes=attributes)
        assert await self.node.broker.topics.update(config) == ""

    async def group(self, name: str, **changes: Any) -> None:
        """Creates a consumer group."""
        assert await self.node.broker.groups.update([GroupConfig(group_name=name, **changes)]) == ""


@asynccontextmanager
async def open_front(node: Node, clock: Callable[[], int], options: FrontOptions | None = None) -> AsyncIterator[Front]:
    """A front over the node's broker during the block."""
    backend = OwnBroker(node.broker, node.broker.processor)
    guard = node.broker.acl_guard
    access = None if guard is None else GuardedCalls(guard)
    front = backend.front = Front(
        backend, options or FrontOptions(), client_id="front", wall_clock_ms=clock, access=access
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve_clients)
        yield front
        nursery.cancel_scope.cancel()
    backend.end()


@asynccontextmanager
async def open_site(
    folder: Path, options: FrontOptions | None = None, *, front_ahead_ms: int = 0, **changes: Any
) -> AsyncIterator[Site]:
    """A broker with a gRPC port during the block; `changes` are BrokerOptions. The front's clock is `front_ahead_ms`
    ahead of the broker's."""
    clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000  # noqa: E731
    front_clock: Callable[[], int] = lambda: clock() + front_ahead_ms  # noqa: E731
    node_opened = open_node(folder, wall_clock_ms=clock, **changes)
    async with node_opened as node, open_poller() as poller, open_front(node, front_clock, options) as front:
        server = GrpcServer(front, poller=poller)
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, [listener])
            with trio.fail_after(90):
                yield Site(node, front, server, f"127.0.0.1:{listener.socket.getsockname()[1]}")
            nursery.cancel_scope.cancel()
