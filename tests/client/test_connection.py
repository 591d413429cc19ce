"""One connection: requests and answers paired, bursts coalesced, every way to fail, under asyncio and trio."""

import select
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
import trio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.stapled import StapledByteStream

from ha.client.connection import Connection
from ha.client.connections import open_connections
from ha.client.options import ClientOptions
from ha.errors import ConnectionFailed, LocalProtocolError, RequestTimedOut
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import FRAME_SIZE_MAX, RemotingCommand, encode_command
from ha.protocol.remoting_protocol import ConnectionLimits
from tests.client.backends import on_both_backends
from tests.client.fake_broker import FakeServer, Handler, serving


@asynccontextmanager
async def open_connection(
    handler: Handler, options: ClientOptions | None = None
) -> AsyncIterator[tuple[Connection, FakeServer]]:
    """A connection to a server that answers with `handler`."""
    async with serving(handler) as server, anyio.create_task_group() as tasks:
        connection = Connection(server.address, options or ClientOptions())
        tasks.start_soon(connection.run)
        yield connection, server
        tasks.cancel_scope.cancel()


def echo(command: RemotingCommand) -> RemotingCommand:
    return command.reply(ResponseCode.SUCCESS, ext_fields=command.ext_fields, body=command.body)


def is_trio() -> bool:
    return trio.lowlevel.in_trio_task()


def request(number: int) -> RemotingCommand:
    return RemotingCommand(RequestCode.GET_MAX_OFFSET, ext_fields={"n": str(number)}, body=b"x" * number)


@on_both_backends(open_connection, lambda command: echo(command) if command.ext_fields["n"] == "2" else None)
async def test_oversized_request_does_not_affect_others(connection: Connection, server: FakeServer) -> None:
    with pytest.raises(LocalProtocolError):
        await connection.invoke(RemotingCommand(1, body=bytes(FRAME_SIZE_MAX)), 0.1)
    with pytest.raises(RequestTimedOut):  # by when the time of the first one is over, too
        await connection.invoke(request(1), 0.1)
    assert (await connection.invoke(request(2), 5)).ext_fields["n"] == "2"


@on_both_backends(open_connection, echo)
async def test_burst_is_sent_in_one_write(connection: Connection, server: FakeServer) -> None:
    await connection.invoke(request(0), 5)
    async with anyio.create_task_group() as tasks:
        for number in range(64):
            tasks.start_soon(connection.invoke, request(number), 5)
    assert sum(map(len, server.chunks[1:])) == 64
    assert len(server.chunks) <= 3


class Watched:
    """Opens streams whose sends are counted: what goes past them is not."""

    def __init__(self, *, is_wrapped: bool = False) -> None:
        self.sent = b""
        self._is_wrapped = is_wrapped

    async def __call__(self, host: str, port: int) -> ByteStream:
        stream: ByteStream = await anyio.connect_tcp(host, port)
        if self._is_wrapped:
            stream = StapledByteStream(stream, stream)  # as TLS: it knows the socket, and is none
            assert stream.extra(SocketAttribute.raw_socket)
        send = stream.send

        async def watched(item: bytes) -> None:
            self.sent += item
            await send(item)

        stream.send = watched  # type: ignore[method-assign]
        return stream


@on_both_backends()
@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_lone_request_bypasses_the_writer_on_plain_sockets(is_wrapped: bool) -> None:
    watched = Watched(is_wrapped=is_wrapped)
    sizes = (1, 5_000_000, 2)  # the second is more than a socket accepts at once: the writer sends the rest
    async with open_connection(lambda command: command.reply(0), ClientOptions(connect=watched)) as (
        connection,
        server,
    ):
        await connection.invoke(RemotingCommand(30, body=b"sent by the writer, before there is a socket"), 5)
        before = len(watched.sent)
        for size in sizes:
            await connection.invoke(RemotingCommand(30, body=b"x" * size), 5)
        assert [len(command.body) for command in server.commands[1:]] == list(sizes)
        length = sum(len(encode_command(command)) for command in server.commands[1:])
        if is_trio() and not is_wrapped:
            assert 0 < len(watched.sent) - before < 5_000_000
        else:
            assert len(watched.sent) - before == length


@on_both_backends()
async def test_long_poll_does_not_prevent_the_direct_write() -> None:
    def answer(command: RemotingCommand) -> RemotingCommand | None:
        return None if command.ext_fields["n"] == "0" else echo(command)

    watched = Watched()
    async with (
        open_connection(answer, ClientOptions(connect=watched)) as (connection, server),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(connection.invoke, request(0), 5, is_prompt=False))
        await server.received(1)
        before = watched.sent
        await connection.invoke(request(1), 5)
        assert (watched.sent == before) is is_trio()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("timeout_s", "text"), [(-0.5, "0.001"), (0, "0.001"), (2e-5, "0.001"), (0.0123456, "0.01235"), (3.0, "3")]
)
def test_the_error_of_a_timeout_shows_it_without_an_exponent(timeout_s: float, text: str) -> None:
    """It is the rest of a caller's time, if other waits have used up some or all of it."""
    assert str(RequestTimedOut("b:1", timeout_s)) == f"no answer from b:1 within {text} s"


@on_both_backends()
async def test_requests_time_out_individually() -> None:

    def silent_on_odd(command: RemotingCommand) -> RemotingCommand | None:
        return None if int(command.ext_fields["n"]) % 2 else echo(command)

    async with open_connection(silent_on_odd) as (connection, server):
        await connection.invoke(request(2), 5)
        ended: dict[int, float] = {}
        started = anyio.current_time()

        async def ask(number: int, timeout_s: float) -> None:
            with pytest.raises(RequestTimedOut) as caught:
                await connection.invoke(request(number), timeout_s)
            assert caught.value.timeout_s == timeout_s
            assert caught.value.address == connection.address
            ended[number] = anyio.current_time() - started

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, 1, 0.6)
            await anyio.sleep(0.05)
            tasks.start_soon(ask, 3, 0.1)  # ends before the one that began before it
            tasks.start_soon(connection.invoke, request(2), 0.4)
        assert 0.15 <= ended[3] < 0.6 <= ended[1]
        assert (await connection.invoke(request(4), 5)).ext_fields["n"] == "4"
        assert server.connection_count == 1


@on_both_backends(open_connection, lambda command: None if command.ext_fields["n"] == "0" else echo(command))
async def test_deadlines_of_answered_requests_do_not_pile_up(connection: Connection, server: FakeServer) -> None:
    """Behind that of a pending request, which is kept."""

    async def poll() -> None:
        with pytest.raises(RequestTimedOut):
            await connection.invoke(request(0), 1.0, is_prompt=False)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poll)
        for _ in range(500):
            await connection.invoke(request(1), 60)
        assert len(connection._deadlines) < 100


@on_both_backends()
async def test_request_times_out_before_the_connection_is_established() -> None:
    async def connect(host: str, port: int) -> ByteStream:
        await anyio.sleep_forever()
        raise AssertionError

    connection = Connection("127.0.0.1:1", ClientOptions(connect=connect, connect_timeout_s=20.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.run)
        with anyio.fail_after(10), pytest.raises(RequestTimedOut):
            await connection.invoke(request(1), 0.1)
        assert not connection.is_closed
        tasks.cancel_scope.cancel()


@on_both_backends(open_connection, echo, ClientOptions(request_timeout_s=0.25))
async def test_connection_to_a_silent_server_is_closed(connection: Connection, server: FakeServer) -> None:
    """Packets may vanish without a word. The kernel then takes minutes to notice, or to try again once they do not."""
    server.handler = lambda command: None
    with pytest.raises(RequestTimedOut):
        await connection.invoke(request(1), 0.1)
    assert not connection.is_closed  # too short a time to judge by

    async def outlast() -> None:
        with pytest.raises(ConnectionFailed, match=r"silent for 0\.3 s"):
            await connection.invoke(request(3), 15)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outlast)
        await server.received(2)
        with pytest.raises(RequestTimedOut):
            await connection.invoke(request(2), 0.3)
    assert connection.is_closed


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_response_received_while_the_loop_was_blocked_is_accepted(backend: str) -> None:
    """A handler that computes for long, or a machine that slept, must not cost the answers that came meanwhile."""
    sockets: list[socket.socket] = []

    async def connect(host: str, port: int) -> ByteStream:
        stream = await anyio.connect_tcp(host, port)
        sockets.append(stream.extra(anyio.abc.SocketAttribute.raw_socket))
        return stream

    def block() -> None:
        """Until the answer is there, and until it would have been due."""
        select.select(sockets, [], [], 5)
        time.sleep(0.25)

    async def main(address: str) -> None:
        connection = Connection(address, ClientOptions(connect=connect, request_timeout_s=0.2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.run)
            await connection.invoke(request(0), 5)
            tasks.start_soon(connection.invoke, request(1), 0.2)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()  # it has been written
            block()
            assert (await connection.invoke(request(2), 5)).ext_fields["n"] == "2"
            tasks.cancel_scope.cancel()

    with (
        anyio.from_thread.start_blocking_portal("trio") as portal,
        portal.wrap_async_context_manager(serving(echo)) as server,
    ):
        anyio.run(main, server.address, backend=backend)


@on_both_backends(open_connection, echo)
@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "closed by the server"),
        (b"\x00\x00\x00\x05\x07\x00\x00\x00x", "broke the protocol"),
        (b"\x7f\xff\xff\xff", "broke the protocol"),
    ],
)
async def test_pending_requests_fail_when_the_connection_ends(
    connection: Connection, server: FakeServer, *, sent: bytes, reason: str
) -> None:
    server.handler = lambda command: None
    failures: list[str] = []

    async def ask() -> None:
        with pytest.raises(ConnectionFailed) as caught:
            await connection.invoke(request(1), 10)
        failures.append(caught.value.reason)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await server.received(3)
        if sent:
            await server.streams[0].send(sent)
        else:
            await server.disconnect()
    assert [reason in failure for failure in failures] == [True] * 3, failures
    assert connection.is_closed
    with pytest.raises(ConnectionFailed):
        await connection.invoke(request(1), 10)


@on_both_backends()
async def test_closed_port_fails_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        connection = Connection(f"127.0.0.1:{taken.getsockname()[1]}", ClientOptions())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.run)
            with anyio.fail_after(2), pytest.raises(ConnectionFailed, match="refused"):
                await connection.invoke(request(1), 10)


@on_both_backends()
async def test_an_address_that_is_none_fails_only_its_requests() -> None:
    """As a name server may announce it: a broker chooses its address."""
    for address in ("broker-a", "broker-a:0", f"{'ü' * 80}:10911"):
        async with anyio.create_task_group() as tasks:
            connection = Connection(address, ClientOptions())
            tasks.start_soon(connection.run)
            with pytest.raises(ConnectionFailed, match="can't connect: "):
                await connection.invoke(request(1), 5)


@on_both_backends()
async def test_full_outbox_blocks_senders() -> None:
    size = 600_000
    async with open_connection(lambda command: command.reply(0), ClientOptions(outbox_size_max=size)) as (
        connection,
        server,
    ):
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(connection.invoke, RemotingCommand(30, ext_fields={"n": "0"}, body=b"x" * size), 10)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            assert connection._protocol.outbox_bytes <= 2 * size  # the bound, and the one that went over it
        assert len(server.commands) == 20


@asynccontextmanager
async def to_a_server_that_does_not_read() -> AsyncIterator[Connection]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        connection = Connection(address, ClientOptions(outbox_size_max=1000))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.run)
            yield connection
            tasks.cancel_scope.cancel()


@on_both_backends(to_a_server_that_does_not_read)
async def test_server_that_does_not_read_causes_a_timeout(connection: Connection) -> None:
    big = RemotingCommand(30, body=b"x" * 15_000_000)
    with pytest.raises(RequestTimedOut):
        await connection.invoke(big, 0.2)
    with pytest.raises(RequestTimedOut):
        await connection.invoke(request(1), 0.2)  # no room in the outbox
    with pytest.raises(RequestTimedOut):
        await connection.send_oneway(request(1), 0.2)


@on_both_backends()
@pytest.mark.parametrize("is_full", [False, True])
async def test_oneway_waits_for_the_connection_until_its_timeout(*, is_full: bool) -> None:
    """Then it is not sent, and does not wait again for room in the outbox."""

    async def never(host: str, port: int) -> ByteStream:
        await anyio.sleep_forever()
        raise AssertionError

    connection = Connection("127.0.0.1:10911", ClientOptions(outbox_size_max=1000), never)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.run)
        if is_full:
            tasks.start_soon(connection.invoke, request(2000), 10)
            await anyio.wait_all_tasks_blocked()
        queued_bytes, began = connection._protocol.outbox_bytes, anyio.current_time()
        with pytest.raises(RequestTimedOut):
            await connection.send_oneway(request(1), 0.5)
        assert 0.5 <= anyio.current_time() - began < 0.95
        assert connection._protocol.outbox_bytes == queued_bytes
        tasks.cancel_scope.cancel()


@on_both_backends()
async def test_connection_to_a_server_that_does_not_read_is_closed() -> None:
    """No request is left whose timeout would close it, because those that wait for room in the outbox were not sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ha.client.connection.ConnectionLimits", partial(ConnectionLimits, send_timeout_s=0.3))
        async with to_a_server_that_does_not_read() as connection:
            with pytest.raises(RequestTimedOut):
                await connection.invoke(RemotingCommand(30, body=b"x" * 15_000_000), 0.1)
            with pytest.raises(ConnectionFailed, match="does not read"):
                await connection.invoke(request(1), 5)


@on_both_backends(open_connection, echo)
async def test_cancelled_request_does_not_affect_others(connection: Connection, server: FakeServer) -> None:
    server.handler = lambda command: None if command.ext_fields["n"] == "1" else echo(command)
    with anyio.move_on_after(0.05) as scope:
        await connection.invoke(request(1), 10)
    assert scope.cancelled_caught
    assert connection._protocol._pending == {}
    assert (await connection.invoke(request(2), 5)).ext_fields["n"] == "2"


@on_both_backends(open_connection, echo)
async def test_server_requests_are_rejected_and_oneways_ignored(connection: Connection, server: FakeServer) -> None:
    from_server = RemotingCommand(RequestCode.CHECK_TRANSACTION_STATE, opaque=77)
    oneway = RemotingCommand(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, opaque=78, flag=2)
    server.handler = lambda c: encode_command(from_server) + encode_command(oneway) + encode_command(echo(c))
    await connection.invoke(request(1), 5)
    server.handler = echo
    await connection.invoke(request(2), 5)
    assert [(c.code, c.opaque, c.is_response) for c in server.commands[1:-1]] == [(3, 77, True)]


@on_both_backends()
async def test_lost_connections_are_forgotten() -> None:
    """Brokers come back under other addresses, such as in Kubernetes."""
    async with open_connections(ClientOptions()) as connections:
        for _ in range(2):
            async with serving(echo) as server:
                assert (await connections.invoke(server.address, request(1), 5)).body == b"x"
                assert [each.address for each in connections.silent(0.0)] == [server.address]
            while connections.silent(0.0):
                await anyio.lowlevel.checkpoint()
