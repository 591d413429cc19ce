"""The remoting server over real sockets: partial sends, peers that stop reading, many connections, ports in use."""

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from ha.protocol.remoting import RemotingCommand, encode_command
from ha.remoting import RemotingConnection, RemotingServer, RemotingServerOptions
from tests.limits.sockets import TIMEOUT_S, ServerSite, open_site, settled
from tests.remoting.wire import Peer, Recorder, request

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection."""


@asynccontextmanager
async def open_server(options: RemotingServerOptions | None = None) -> AsyncIterator[ServerSite]:
    with trio.fail_after(TIMEOUT_S):
        async with open_site(Recorder(), options) as site:
            yield site


@asynccontextmanager
async def open_idle_connection() -> AsyncIterator[tuple[RemotingServer, RemotingConnection, Peer]]:
    """A server with one connection whose reader and writer wait."""
    async with open_server() as site:
        peer = await site.connect()
        await peer.ask(request(1))
        await settled()
        [connection] = site.server.connections
        yield site.server, connection, peer


def response(opaque: int, body: bytes = b"") -> bytes:
    return encode_command(RemotingCommand(0, opaque, body=body))


async def assert_received(peer: Peer, *responses: tuple[int, bytes]) -> None:
    for opaque, body in responses:
        received = await peer.expect()
        assert (received.opaque, received.body) == (opaque, body)


async def test_send_now_sends_before_any_other_task_runs() -> None:
    async with open_idle_connection() as (server, connection, peer):
        before = server.statistics().sends
        connection.send_now(response(2))
        assert (server.statistics().sends, connection.outbox_bytes) == (before + 1, 0)
        connection.send_now(response(3))
        await assert_received(peer, (2, b""), (3, b""))


async def test_send_now_leaves_its_frame_to_the_writer_if_that_is_about_to_send() -> None:
    async with open_idle_connection() as (server, connection, peer):
        before = server.statistics().sends
        connection.send_soon(response(2))
        connection.send_now(response(3))
        await assert_received(peer, (2, b""), (3, b""))
        assert server.statistics().sends == before + 1


async def test_the_writer_sends_what_the_system_has_not_accepted() -> None:
    async with open_idle_connection() as (server, connection, peer):
        bodies = [bytes([n]) * 3_000_000 for n in range(2)]
        for n, body in enumerate(bodies):
            connection.send_now(response(n, body))
        assert 0 < connection.outbox_bytes < 6_000_000
        await assert_received(peer, *enumerate(bodies))
        await connection.flushed()
        assert server.statistics().outbox_bytes == 0


async def test_responses_of_a_chunk_beyond_one_batch_are_sent() -> None:
    async with open_server(RemotingServerOptions(batch_size_max=1000)) as site:
        peer = await site.connect()
        await peer.send(*(request(n, bytes(300)) for n in range(10)))
        await assert_received(peer, *((n, bytes(300)) for n in range(10)))


async def test_send_now_to_a_lost_peer_closes_only_its_connection() -> None:
    async with open_idle_connection() as (server, connection, peer):
        # Lost while the connection's tasks have no chance to notice it.
        peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)  # type: ignore[attr-defined]
        peer.stream.socket.close()  # type: ignore[attr-defined]
        while not connection.is_closed:
            connection.send_now(response(2))
        connection.send_now(response(3))
        await settled()
        assert server.statistics().closed == {"connection lost": 1}
        assert server.statistics().outbox_bytes == 0


async def test_long_bodies_survive_partial_reads_and_sends() -> None:
    async with open_server() as site:
        peer = await site.connect()
        bodies = [bytes([n]) * (n * 1_000_003) for n in range(1, 6)]

        async def send() -> None:
            for n, body in enumerate(bodies):
                await peer.send(request(n, body))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await assert_received(peer, *enumerate(bodies))
        assert site.server.statistics().connections == 1


async def test_a_peer_that_stops_reading_is_closed_and_its_outbox_is_limited(
    socket_clock: trio.testing.MockClock,
) -> None:
    options = RemotingServerOptions(send_timeout_s=5, outbox_high_bytes=100_000)
    async with open_server(options) as site:
        peer = await site.connect()
        peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # type: ignore[attr-defined]
        with pytest.raises(trio.BrokenResourceError):  # noqa: PT012
            while True:
                await peer.send(*(request(n, bytes(10_000)) for n in range(10)))
                assert site.server.statistics().outbox_bytes < 100_000 + 262_144 + 100_000
        assert site.server.statistics().closed == {"peer does not read": 1}


async def test_a_hundred_connections_at_once() -> None:
    async with open_server() as site:

        async def run_one(number: int) -> None:
            peer = await site.connect()
            async with peer.stream:
                for n in range(20):
                    body = b"%d/%d" % (number, n)
                    assert (await peer.ask(request(n, body))).body == body

        async with trio.open_nursery() as clients:
            for number in range(100):
                clients.start_soon(run_one, number)
        await settled()
        assert site.server.statistics().requests == 2000
        assert site.server.statistics().closed == {"end of stream": 100}


async def test_a_reset_ends_only_its_connection() -> None:
    async with open_server() as site:
        with socket.create_connection(("127.0.0.1", site.port)) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            await settled()
            assert site.server.statistics().connections == 1
        await settled()
        assert site.server.statistics().closed == {"connection lost": 1}
        assert (await (await site.connect()).ask(request(1))).opaque == 1
