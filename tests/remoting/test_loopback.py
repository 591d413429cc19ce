"""The remoting server over real sockets: partial sends, readers that stop, many connections, taken ports."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import pytest
import trio

from ha.errors import AddressInUse
from ha.protocol.remoting import RemotingCommand, encode_command
from ha.remoting import RemotingConnection, RemotingServer, RemotingServerOptions, open_listeners, serve_remoting
from tests.remoting.wire import Peer, Recorder, request


async def until(condition: Callable[[], bool]) -> None:
    """For what the kernel does between two sockets, which no event of ours announces."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.005)


async def start(nursery: trio.Nursery, options: RemotingServerOptions | None = None) -> tuple[RemotingServer, int]:
    listeners = await open_listeners("127.0.0.1", 0, key="listenPort")
    server: RemotingServer = await nursery.start(serve_remoting, Recorder(), listeners, options)
    return server, listeners[0].socket.getsockname()[1]


async def connect(port: int) -> Peer:
    return Peer(await trio.open_tcp_stream("127.0.0.1", port))


async def start_with_one(nursery: trio.Nursery) -> tuple[RemotingServer, RemotingConnection, Peer]:
    """A server with one connection, whose reader and writer wait."""
    server, port = await start(nursery)
    peer = await connect(port)
    await peer.ask(request(1))
    await trio.testing.wait_all_tasks_blocked(0.01)
    [connection] = server.connections
    return server, connection, peer


async def test_what_is_sent_now_has_left_before_any_other_task_runs() -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server, connection, peer = await start_with_one(nursery)
            before = server.statistics().sends
            connection.send_now(encode_command(RemotingCommand(0, 2)))
            assert (server.statistics().sends, connection.outbox_bytes) == (before + 1, 0)
            connection.send_now(encode_command(RemotingCommand(0, 3)))
            for opaque in (2, 3):
                answer = await peer.receive()
                assert answer is not None
                assert answer.opaque == opaque
            await peer.stream.aclose()
            nursery.cancel_scope.cancel()


async def test_what_is_sent_now_leaves_behind_what_waits_already() -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server, connection, peer = await start_with_one(nursery)
            before = server.statistics().sends
            connection.send_soon(encode_command(RemotingCommand(0, 2)))
            connection.send_now(encode_command(RemotingCommand(0, 3)))
            answers = [await peer.receive() for _ in range(2)]
            assert [answer.opaque for answer in answers if answer] == [2, 3]
            assert server.statistics().sends == before + 1
            await peer.stream.aclose()
            nursery.cancel_scope.cancel()


async def test_what_the_system_does_not_take_now_is_sent_later() -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server, connection, peer = await start_with_one(nursery)
            bodies = [bytes([n]) * 3_000_000 for n in range(2)]
            for n, body in enumerate(bodies):
                connection.send_now(encode_command(RemotingCommand(0, n, body=body)))
            assert 0 < connection.outbox_bytes < 6_000_000
            for n, body in enumerate(bodies):
                answer = await peer.receive()
                assert answer is not None
                assert (answer.opaque, answer.body) == (n, body)
            await until(lambda: not connection.outbox_bytes)
            assert server.statistics().outbox_bytes == 0
            await peer.stream.aclose()
            nursery.cancel_scope.cancel()


async def test_sending_now_to_a_peer_that_is_gone_ends_the_connection_and_nobody_else() -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server, connection, peer = await start_with_one(nursery)
            # Lost while the connection's tasks have no turn to see it.
            reset = struct.pack("ii", 1, 0)
            peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)  # type: ignore[attr-defined]
            peer.stream.socket.close()  # type: ignore[attr-defined]
            while not connection.is_closed:
                connection.send_now(encode_command(RemotingCommand(0, 2)))
            connection.send_now(encode_command(RemotingCommand(0, 3)))
            await until(lambda: not server.connections)
            assert server.statistics().closed == {"connection lost": 1}
            assert server.statistics().outbox_bytes == 0
            nursery.cancel_scope.cancel()


async def test_long_bodies_survive_partial_reads_and_sends() -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server, port = await start(nursery)
            peer = await connect(port)
            bodies = [bytes([n]) * (n * 1_000_003) for n in range(1, 6)]

            async def send() -> None:
                for n, body in enumerate(bodies):
                    await peer.send(request(n, body))

            nursery.start_soon(send)
            for n, body in enumerate(bodies):
                answer = await peer.receive()
                assert answer is not None
                assert answer.opaque == n
                assert answer.body == body
            assert server.statistics().connections == 1
            await peer.stream.aclose()
            nursery.cancel_scope.cancel()


async def test_a_reader_that_stops_is_cut_and_bounded() -> None:
    options = RemotingServerOptions(send_timeout_s=0.3, outbox_high_bytes=100_000)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server, port = await start(nursery, options)
            peer = await connect(port)
            peer.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # type: ignore[attr-defined]
            with pytest.raises(trio.BrokenResourceError):  # noqa: PT012
                while True:
                    await peer.send(*(request(n, bytes(10_000)) for n in range(10)))
                    assert server.statistics().outbox_bytes < 100_000 + 262_144 + 100_000
            assert server.statistics().closed == {"peer does not read": 1}
            await peer.stream.aclose()
            nursery.cancel_scope.cancel()


async def test_a_hundred_connections_at_once() -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server, port = await start(nursery)

            async def one(number: int) -> None:
                peer = await connect(port)
                async with peer.stream:
                    for n in range(20):
                        answer = await peer.ask(request(n, b"%d/%d" % (number, n)))
                        assert answer.body == b"%d/%d" % (number, n)

            async with trio.open_nursery() as clients:
                for number in range(100):
                    clients.start_soon(one, number)
            assert server.statistics().requests == 2000
            await until(lambda: not server.connections)  # their ends are still to be read
            assert set(server.statistics().closed) == {"end of stream"}
            nursery.cancel_scope.cancel()


async def test_a_reset_connection_ends_alone() -> None:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            server, port = await start(nursery)
            raw = socket.create_connection(("127.0.0.1", port))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            await until(lambda: bool(server.connections))
            raw.close()
            await until(lambda: not server.connections)
            assert server.statistics().closed == {"connection lost": 1}
            peer = await connect(port)
            assert (await peer.ask(request(1))).opaque == 1
            await peer.stream.aclose()
            nursery.cancel_scope.cancel()


async def test_a_taken_port_names_the_key_and_the_address() -> None:
    taken = await open_listeners("127.0.0.1", 0, key="listenPort")
    async with taken[0]:
        port = taken[0].socket.getsockname()[1]
        with pytest.raises(AddressInUse) as caught:
            await open_listeners("127.0.0.1", port, key="listenPort")
        assert (caught.value.key, caught.value.host, caught.value.port) == ("listenPort", "127.0.0.1", port)
        assert "in use" in caught.value.reason


async def test_an_address_of_another_machine_can_not_be_listened_on() -> None:
    with pytest.raises(AddressInUse):
        await open_listeners("192.0.2.1", 0, key="listenPort")
