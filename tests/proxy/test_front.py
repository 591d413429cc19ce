"""What depends on time in the front: deadlines of calls, and clients that are gone. On a virtual clock, over streams in
memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from google.protobuf.message import Message
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ResponseReceived, StreamEnded, TrailersReceived
from rocketmq.grpc_protocol import definition_pb2 as definition
from rocketmq.grpc_protocol import service_pb2 as service

from ha.grpc import GrpcServer
from ha.proxy.front import SILENT_S, Front
from ha.proxy.options import FrontOptions
from tests.broker.node import Node, WallClock, open_node
from tests.broker.pop_client import pop_messages
from tests.grpc.http2_client import HEADERS, framed
from tests.proxy.site import open_front
from tests.proxy.test_receiving import receiving
from tests.proxy.test_telemetry import consumer


class Connection:
    """A client's connection to a front, which makes one call at a time."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.initiate_connection()

    async def start(self, method: str, request: Message | None = None, **headers: str) -> int:
        """Sends a call's headers and its message; without one, the call stays open. `method` may be a whole path."""
        stream_id = self._h2.get_next_available_stream_id()
        path = method if method.startswith("/") else f"/apache.rocketmq.v2.MessagingService/{method}"
        sent = [(name, path if name == ":path" else value) for name, value in HEADERS]
        sent += [("x-mq-client-id", "vm@1"), *((name.replace("_", "-"), value) for name, value in headers.items())]
        self._h2.send_headers(stream_id, sent)
        if request is not None:
            await self.send(stream_id, request, is_last=True)
        return stream_id

    async def send(self, stream_id: int, request: Message, *, is_last: bool = False) -> None:
        """Sends a message of a call."""
        self._h2.send_data(stream_id, framed(request.SerializeToString()), end_stream=is_last)
        await self.stream.send_all(self._h2.data_to_send())

    async def cancel(self, stream_id: int) -> None:
        """Cancels a call a second later."""
        await trio.sleep(1)
        self._h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        await self.stream.send_all(self._h2.data_to_send())
        await trio.sleep(1)

    async def call(self, method: str, request: Message, **headers: str) -> str:
        """Makes a call; returns its gRPC status."""
        stream_id, status = await self.start(method, request, **headers), ""
        while True:
            for event in self._h2.receive_data(await self.stream.receive_some()):
                if isinstance(event, ResponseReceived | TrailersReceived) and event.stream_id == stream_id:
                    status = {str(name): str(value) for name, value in event.headers}.get("grpc-status", "")
                elif isinstance(event, StreamEnded) and event.stream_id == stream_id:
                    return status
            await self.stream.send_all(self._h2.data_to_send())


class World:
    """A node with a front."""

    def __init__(self, node: Node, front: Front, nursery: trio.Nursery) -> None:
        self.node = node
        self._server = GrpcServer(front)
        self._nursery = nursery

    @property
    def client_ids(self) -> set[str]:
        """The clients on all connections."""
        return {client_id for connection in self._server.connections for client_id in connection.sessions}

    def connect(self) -> Connection:
        """Opens a connection to the front."""
        ours, theirs = trio.testing.memory_stream_pair()
        self._nursery.start_soon(self._server.handle, theirs)
        return Connection(ours)


@asynccontextmanager
async def opened(folder: Path, sessions_per_connection_max: int = 1_024) -> AsyncIterator[World]:
    clock = WallClock()
    async with (
        open_node(folder, wall_clock_ms=clock) as node,
        open_front(
            node, clock, FrontOptions(polling_ms_min=200, sessions_per_connection_max=sessions_per_connection_max)
        ) as front,
        trio.open_nursery() as nursery,
    ):
        yield World(node, front, nursery)
        nursery.cancel_scope.cancel()


ROUTE = service.QueryRouteRequest(topic=definition.Resource(name="TT"))


@pytest.mark.parametrize(("deadline", "ends_after_s"), [({"grpc_timeout": "2S"}, 2.0), ({}, 60.0)])
async def test_calls_end_at_their_deadline(
    tmp_path: Path,
    autojump_clock: object,
    monkeypatch: pytest.MonkeyPatch,
    deadline: dict[str, str],
    ends_after_s: float,
) -> None:
    """Of the client, or after a minute. The client may be gone without a word, so the front keeps the time itself."""

    async def never(_: object, topic: str) -> Any:
        await trio.sleep_forever()

    monkeypatch.setattr("ha.node.grpc.OwnBroker.route", never)
    async with opened(tmp_path) as world:
        began = trio.current_time()
        status = await world.connect().call("QueryRoute", ROUTE, **deadline)
        assert status == "4", "DEADLINE_EXCEEDED"
        assert trio.current_time() - began == pytest.approx(ends_after_s, abs=0.001)


async def received(world: World) -> Connection:
    """A push consumer's connection that has received a message."""
    connection = world.connect()
    chat = await connection.start("Telemetry")
    await connection.send(chat, service.TelemetryCommand(settings=consumer("g", "TT")))
    assert await connection.call("ReceiveMessage", receiving("TT", auto_renew=True)) == "0"
    assert world.node.broker.pop.statistics().in_flight_count == 1
    return connection


async def redelivery_s(world: World) -> float:
    """How long it takes until the message can be popped."""
    began = trio.current_time()
    [_] = await pop_messages(world.node, pollTime=30_000)
    return trio.current_time() - began


async def test_messages_of_a_lost_connection_come_back_after_11_s(tmp_path: Path, autojump_clock: object) -> None:
    """The client has 10 s to connect again; then they become visible after 1 s."""
    async with opened(tmp_path) as world:
        await world.node.send()
        connection = await received(world)
        await connection.stream.aclose()
        assert 11.0 <= await redelivery_s(world) <= 12.1
        assert world.node.broker.clients.consumer_ids("g") == []


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["own broker", "other broker"])
async def test_messages_that_are_popped_for_a_cancelled_call_come_back(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    """A broker goes on with the long poll of a call that its client has cancelled."""
    if is_elsewhere:
        monkeypatch.setattr("ha.node.grpc.OwnBroker.invoke_nowait", lambda *arguments: False)
    async with opened(tmp_path) as world:
        await world.node.send()
        connection = await received(world)
        request = receiving("TT", auto_renew=True)
        request.long_polling_timeout.FromSeconds(15)
        await connection.cancel(await connection.start("ReceiveMessage", request))
        await world.node.send()
        await trio.sleep(0.1)
        assert world.node.broker.pop.statistics().in_flight_count == 2
        assert 1.0 <= await redelivery_s(world) <= 3.1


async def test_messages_of_a_client_that_ends_come_back_after_1_s(tmp_path: Path, autojump_clock: object) -> None:
    async with opened(tmp_path) as world:
        await world.node.send()
        connection = await received(world)
        await connection.call("NotifyClientTermination", service.NotifyClientTerminationRequest())
        assert 1.0 <= await redelivery_s(world) <= 2.1


async def keep_alive(connection: Connection) -> None:
    """Makes a call of another client from time to time, like those that share a connection through a proxy."""
    while True:
        await trio.sleep(10)
        await connection.call("QueryRoute", ROUTE, x_mq_client_id="vm@2")


async def test_messages_of_a_client_that_is_gone_from_a_shared_connection_come_back(
    tmp_path: Path, autojump_clock: object
) -> None:
    """Behind an HTTP/2 proxy, only its Telemetry stream ends."""
    async with opened(tmp_path) as world, trio.open_nursery() as nursery:
        await world.node.send()
        connection = await received(world)
        await connection.cancel(1)
        nursery.start_soon(keep_alive, connection)
        began = trio.current_time()
        while not await pop_messages(world.node, pollTime=10_000):
            assert trio.current_time() - began < SILENT_S + 60
        assert trio.current_time() - began >= SILENT_S
        assert world.node.broker.clients.consumer_ids("g") == []
        nursery.cancel_scope.cancel()


async def test_silent_clients_make_room_for_others(tmp_path: Path, autojump_clock: object) -> None:
    """A Node.js program may start one client after the other, all on one connection, because none of them gets a
    route."""
    async with opened(tmp_path, sessions_per_connection_max=2) as world:
        connection = world.connect()
        chat = await connection.start("Telemetry")
        await connection.send(chat, service.TelemetryCommand(settings=consumer("g", "TT")))
        for number in range(4):
            assert await connection.call("Heartbeat", service.HeartbeatRequest(), x_mq_client_id=f"vm@1{number}") == "0"
            assert world.client_ids == {"vm@1", f"vm@1{number}"}
            await trio.sleep(SILENT_S + 60)
        assert world.client_ids == {"vm@1"}, "its Telemetry stream is open"


async def test_messages_of_a_client_that_connects_again_stay_invisible(tmp_path: Path, autojump_clock: object) -> None:
    async with opened(tmp_path) as world:
        await world.node.send()
        connection = await received(world)
        await connection.stream.aclose()
        await trio.sleep(8)
        assert await world.connect().call("QueryRoute", ROUTE) == "0"
        assert await pop_messages(world.node, pollTime=30_000) == []


async def test_telemetry_of_another_service(tmp_path: Path, autojump_clock: object) -> None:
    """Such a call must not end the process."""
    async with opened(tmp_path) as world:
        assert await world.connect().call("/other.Service/Telemetry", service.TelemetryCommand()) == "0"
        assert await world.connect().call("QueryRoute", ROUTE) == "0"
