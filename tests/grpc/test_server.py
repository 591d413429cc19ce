"""The gRPC server with grpcio as its client, over TCP."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
import trio
import trio.testing
import trustme
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, PingReceived, StreamEnded, TrailersReceived
from h2.settings import SettingCodes

from ha.grpc import Call, GrpcOptions, GrpcServer, Status
from ha.grpc.connection import MESSAGES_WAITING_MAX, SERVED_PIECE_BYTES, TASKS_PER_SLICE_MAX
from ha.grpc.frames import PREFACE
from ha.poller import open_poller
from ha.remoting import PortTls
from ha.tls.handshake import Handshakes
from tests.grpc.http2_client import HEADERS, framed
from tests.limits.sockets import until
from tests.remoting.wire import MemoryListener

TIMEOUT_S = 20.0


class Echo:
    """Unary and streaming methods, and one that waits until its call is cancelled."""

    def __init__(self) -> None:
        self.cancelled = trio.Event()
        self.metadata: list[str] = []

    def is_streaming(self, path: bytes) -> bool:
        return path == b"/s/Chat"

    def take(self, call: Call) -> bool:
        if call.method != "Echo":
            return False
        self.metadata.append(call.metadata(b"x-mq-client-id"))
        call.respond(call.message)
        return True

    async def serve(self, call: Call) -> None:
        if call.method == "Chat":
            assert call.messages_out is not None
            async for message in call.messages_out:
                await call.send(b"got " + message)
            call.finish()
        elif call.method == "Repeat":
            await call.respond_all(b"x" * 100_000 for _ in range(int(call.message)))
        elif call.method == "Wait":
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled.set()
        else:
            call.finish(Status.UNIMPLEMENTED, f"no method {call.method}")


@asynccontextmanager
async def serving(
    service: Echo, options: GrpcOptions | None = None, tls: PortTls | None = None, **more: Any
) -> AsyncIterator[tuple[GrpcServer, str]]:
    async with open_poller() as poller, trio.open_nursery() as nursery:
        server = GrpcServer(service, options, tls=tls, poller=poller, **more)
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(server.serve, [listener])
        with trio.fail_after(60):
            yield server, f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return await trio.to_thread.run_sync(function, *arguments)


def echo(channel: grpc.Channel, message: bytes) -> bytes:
    answer: bytes = channel.unary_unary("/s/Echo")(message, metadata=[("x-mq-client-id", "me")], timeout=TIMEOUT_S)
    return answer


async def test_calls_of_all_kinds() -> None:
    service = Echo()

    def client(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            for size in (0, 10, 100_000, 3_000_000):
                assert echo(channel, b"m" * size) == b"m" * size
            chat = channel.stream_stream("/s/Chat")(iter([b"a", b"b"]), timeout=TIMEOUT_S)
            assert list(chat) == [b"got a", b"got b"]
            repeat = channel.unary_stream("/s/Repeat")(b"20", timeout=TIMEOUT_S)
            assert [len(message) for message in repeat] == [100_000] * 20
            with pytest.raises(grpc.RpcError, match="no method Nope") as refused:
                channel.unary_unary("/s/Nope")(b"", timeout=TIMEOUT_S)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async with serving(service) as (server, address):
        await in_thread(client, address)
        assert server.statistics().calls == 7
        assert service.metadata == ["me"] * 4


async def test_calls_in_flight_at_the_same_time() -> None:
    def client(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            method = channel.unary_unary("/s/Echo")
            futures = [method.future(b"%d" % number, timeout=TIMEOUT_S) for number in range(500)]
            assert [future.result() for future in futures] == [b"%d" % number for number in range(500)]

    async with serving(Echo()) as (_, address):
        await in_thread(client, address)


async def test_deadline_and_cancellation_end_the_task() -> None:
    service = Echo()

    def client(address: str) -> Generator[None, None, None]:
        with grpc.insecure_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as late:
                channel.unary_unary("/s/Wait")(b"", timeout=0.3)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            yield  # the connection stays open

    async with serving(service) as (server, address):
        steps = client(address)
        await in_thread(next, steps)
        await service.cancelled.wait()
        assert server.statistics().calls_in_flight == 0
        assert server.statistics().connections == 1
        steps.close()


async def test_end_of_the_connection_ends_its_calls() -> None:
    service = Echo()

    def client(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            waiting = channel.unary_unary("/s/Wait").future(b"", timeout=TIMEOUT_S)
            assert echo(channel, b"") == b""
            assert waiting.running()

    async with serving(service) as (_, address):
        await in_thread(client, address)
        await service.cancelled.wait()


async def test_tls_and_plain_calls_on_one_port() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    handshakes = Handshakes()

    async def secure(stream: trio.abc.Stream, first: bytes) -> trio.abc.Stream:
        return await handshakes.accept(stream, context, first)

    def client(address: str) -> None:
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(address.replace("127.0.0.1", "localhost"), credentials) as channel:
            assert echo(channel, b"m" * 2_000_000) == b"m" * 2_000_000
        with grpc.insecure_channel(address) as channel:
            assert echo(channel, b"plain") == b"plain"

    async with serving(Echo(), tls=PortTls(secure=secure)) as (_, address):
        await in_thread(client, address)
    assert handshakes.statistics().completed == 1

    def refused(address: str) -> None:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            echo(channel, b"plain")

    async with serving(Echo(), tls=PortTls(secure=secure, is_required=True)) as (server, address):
        host, _, port = address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:  # grpcio may open connections that it leaves
            await stream.send_all(PREFACE)
            async for _ in stream:
                pass
        await until(lambda: not server.connections)
        assert server.statistics().ended == {"protocol error": 1}
        await in_thread(refused, address)


async def test_silent_peer_of_a_broken_preface(autojump_clock: trio.testing.MockClock) -> None:
    """It does not keep the connection by not reading the reason."""
    server = GrpcServer(Echo())
    ours, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.handle, theirs)
        await ours.send_all(b"GET / HTTP/1.1\r\n\r\n")
        await trio.sleep(3)
        assert not server.connections
        assert server.statistics().ended == {"protocol error": 1}


async def test_peer_of_a_broken_preface_gets_the_reason(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(GrpcServer(Echo()).handle, theirs)
        await ours.send_all(b"GET / HTTP/1.1\r\n\r\n")
        assert b"no HTTP/2 preface" in b"".join([bytes(chunk) async for chunk in ours])


async def test_server_that_may_not_serve() -> None:
    """A slave accepts no connections, and drops those that it has when it becomes one."""
    may_serve = True

    def client(address: str) -> Generator[None, None, None]:
        with grpc.insecure_channel(address) as channel:
            assert echo(channel, b"one") == b"one"
            yield
            with pytest.raises(grpc.RpcError) as refused:
                echo(channel, b"two")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            yield

    async with serving(Echo(), is_serving=lambda: may_serve) as (server, address):
        steps = client(address)
        await in_thread(next, steps)
        may_serve = False
        [connection] = server.connections
        closed = trio.Event()
        connection.on_close(lambda _: closed.set())
        await closed.wait()
        await in_thread(next, steps)
        steps.close()


async def test_connections_are_limited(autojump_clock: trio.testing.MockClock) -> None:
    """A connection without a call makes room for another one after a while."""
    options = GrpcOptions(connections_max=2, connections_per_host_max=2, open_timeout_s=5, idle_timeout_s=60)
    server = GrpcServer(Echo(), options)
    async with trio.open_nursery() as nursery:
        ends = [trio.testing.memory_stream_pair() for _ in range(4)]
        for _, theirs in ends[:3]:
            nursery.start_soon(server.handle, theirs)
            await trio.testing.wait_all_tasks_blocked()
        assert len(server.connections) == 2
        assert server.statistics().refused == 1
        await trio.sleep(6)
        nursery.start_soon(server.handle, ends[3][1])
        await trio.testing.wait_all_tasks_blocked()
        assert server.statistics().ended == {"evicted": 1}
        nursery.cancel_scope.cancel()


async def test_idle_connections_are_closed(autojump_clock: trio.testing.MockClock) -> None:
    server = GrpcServer(Echo(), GrpcOptions(idle_timeout_s=60))
    async with trio.open_nursery() as nursery:
        listener = MemoryListener()
        await nursery.start(server.serve, [listener])
        stream = listener.connect()
        started = trio.current_time()
        assert await stream.receive_some(1) == b""
        assert 60 <= trio.current_time() - started <= 62
        await trio.testing.wait_all_tasks_blocked()
        assert server.statistics().ended == {"idle": 1}
        nursery.cancel_scope.cancel()


async def test_connection_with_short_calls_is_not_idle(autojump_clock: trio.testing.MockClock) -> None:
    server = GrpcServer(Echo(), GrpcOptions(idle_timeout_s=60))
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(server._watch)
        nursery.start_soon(server.handle, theirs)
        client = H2Connection(H2Configuration(client_side=True))
        client.initiate_connection()
        for stream_id in (1, 3, 5):
            client.send_headers(stream_id, [(name, "/s/Echo" if name == ":path" else value) for name, value in HEADERS])
            client.send_data(stream_id, framed(b""), end_stream=True)
            await ours.send_all(client.data_to_send())
            await trio.sleep(59.5)
            assert server.statistics().calls_in_flight == 0
        assert server.statistics().connections == 1
        nursery.cancel_scope.cancel()


class Poll(Echo):
    """A method that answers when there is a message, and one that makes a message."""

    def __init__(self) -> None:
        super().__init__()
        self.has_message = trio.Event()
        self.message = b"message"
        self.outcome = ""

    async def serve(self, call: Call) -> None:
        if call.method == "Send":
            self.has_message.set()
            call.finish()
            return
        try:
            await self.has_message.wait()
            await trio.lowlevel.checkpoint_if_cancelled()
            await call.respond_all([self.message])
            self.outcome = "answered"
        except trio.Cancelled:
            self.outcome = "cancelled"
            raise


async def test_call_that_is_cancelled_behind_more_calls_than_a_slice_starts() -> None:
    """Its task is cancelled before it can take its answer for sent."""
    service = Poll()
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()

    def call(stream_id: int, path: str) -> None:
        client.send_headers(stream_id, [(name, path if name == ":path" else value) for name, value in HEADERS])
        client.send_data(stream_id, framed(b""), end_stream=True)

    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(GrpcServer(service).handle, theirs)
        call(1, "/s/Poll")
        await ours.send_all(client.data_to_send())
        await trio.testing.wait_all_tasks_blocked()
        for number in range(1, 4 * TASKS_PER_SLICE_MAX):
            call(2 * number + 1, "/s/Send")
        client.reset_stream(1, 8)
        chunk = client.data_to_send()
        assert len(chunk) <= SERVED_PIECE_BYTES
        await ours.send_all(chunk)
        await trio.testing.wait_all_tasks_blocked()
        assert service.outcome == "cancelled"
        nursery.cancel_scope.cancel()


async def test_call_that_is_cancelled_when_its_task_is_about_to_send_the_rest() -> None:
    """Two chunks are served in one turn: the first one wakes the task, which waits for the peer's window, and with the
    second one the peer cancels the call."""
    service = Poll()
    service.has_message.set()
    service.message = bytes(200_000)
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, [(name, "/s/Poll" if name == ":path" else value) for name, value in HEADERS])
    client.send_data(1, framed(b""), end_stream=True)
    server = GrpcServer(service)
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(server.handle, theirs)
        await ours.send_all(client.data_to_send())
        await trio.testing.wait_all_tasks_blocked()
        [connection] = server.connections
        client.ping(bytes(8))
        connection._serve_now(client.data_to_send())
        client.reset_stream(1, 8)
        connection._serve_now(client.data_to_send())
        await trio.testing.wait_all_tasks_blocked()
        assert service.outcome == "cancelled"
        nursery.cancel_scope.cancel()


async def test_incomplete_messages_of_all_connections_are_limited() -> None:
    """The connection that has most of them is closed, and what it had is free again."""
    server = GrpcServer(Echo(), GrpcOptions(request_total_bytes_max=50_000, message_size_max=25_000))
    async with trio.open_nursery() as nursery:
        peers = []
        for size in (20_000, 15_000, 16_000, 16_000):
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(server.handle, theirs)
            client = H2Connection(H2Configuration(client_side=True))
            client.initiate_connection()
            client.send_headers(1, [(name, "/s/Echo" if name == ":path" else value) for name, value in HEADERS])
            for begin in range(0, size, 10_000):
                client.send_data(1, framed(b"x" * 25_000)[begin : min(begin + 10_000, size)])
            await ours.send_all(client.data_to_send())
            await trio.testing.wait_all_tasks_blocked()
            peers.append(ours)
        assert sorted(each.protocol.partial_bytes for each in server.connections) == [15_000, 16_000, 16_000]
        assert server.statistics().ended == {"bytes of requests": 1}
        nursery.cancel_scope.cancel()


class Slow(Echo):
    """Answers unary calls when the test allows it, in a task (method Task) or without one."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Call] = []
        self.goes_on = trio.Event()

    def take(self, call: Call) -> bool:
        self.waiting.append(call)
        return call.method != "Task"

    async def serve(self, call: Call) -> None:
        await self.goes_on.wait()
        call.respond(b"")

    def answer(self) -> None:
        self.goes_on.set()
        for call in self.waiting:
            if call.method != "Task":
                call.respond(b"")
        self.waiting.clear()


@pytest.mark.parametrize("method", ["Take", "Task"])
async def test_unanswered_calls_of_a_connection_are_limited(method: str) -> None:
    """While the service does not answer, for example because the disk is stuck, it keeps the messages of a few calls
    only; all are answered in the end."""
    service = Slow()
    answers = []

    def client(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            calls = [channel.unary_unary(f"/s/{method}").future(b"x" * 100_000, timeout=TIMEOUT_S) for _ in range(100)]
            answers.extend([call.result() for call in calls])

    async with serving(service, GrpcOptions(unanswered_bytes_max=1_000_000)) as (server, address):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, client, address)
            await until(lambda: len(service.waiting) > 10)
            await trio.sleep(0.5)
            assert len(service.waiting) < 20
            [connection] = server.connections
            assert connection.request_bytes < 3_000_000
            while len(answers) < 100:
                service.answer()
                await trio.sleep(0.01)
        assert connection.request_bytes == 0


async def test_unanswered_calls_of_all_connections_are_limited() -> None:
    server = GrpcServer(Slow(), GrpcOptions(request_total_bytes_max=50_000, message_size_max=25_000))
    async with trio.open_nursery() as nursery:
        for size in (20_000, 15_000, 16_000, 16_000):
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(server.handle, theirs)
            client = H2Connection(H2Configuration(client_side=True))
            client.initiate_connection()
            client.send_headers(1, [(name, "/s/Take" if name == ":path" else value) for name, value in HEADERS])
            for begin in range(0, size, 10_000):
                end = min(begin + 10_000, size)
                client.send_data(1, framed(b"x" * (size - 5))[begin:end], end_stream=end == size)
            await ours.send_all(client.data_to_send())
            await trio.testing.wait_all_tasks_blocked()
        left = sorted(each.request_bytes for each in server.connections)
        assert left == [15_000 - 5, 16_000 - 5, 16_000 - 5]
        assert server.statistics().ended == {"bytes of requests": 1}
        nursery.cancel_scope.cancel()


class Silent(Echo):
    """Does not take the messages of its streams."""

    async def serve(self, call: Call) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()


async def test_messages_that_wait_are_limited() -> None:
    """With more, the call fails, and its task ends."""
    silent = Silent()

    def client(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            chat = channel.stream_stream("/s/Chat")(iter([b"m"] * (MESSAGES_WAITING_MAX + 1)), timeout=TIMEOUT_S)
            with pytest.raises(grpc.RpcError) as refused:
                next(chat)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trio.from_thread.run(silent.cancelled.wait)

    async with serving(silent) as (_, address):
        await in_thread(client, address)


class LargeChat(Echo):
    """A streaming method that answers each message with a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    async def serve(self, call: Call) -> None:
        assert call.messages_out is not None
        self.calls.append(call)
        async for _ in call.messages_out:
            await call.send(b"a" * 100_000)


@pytest.mark.parametrize("status", [Status.OK, Status.RESOURCE_EXHAUSTED])
async def test_messages_of_several_tasks_to_one_call(status: Status) -> None:
    """While one task waits in a large message for the peer's window, others send messages or end the call."""
    service, (ours, theirs) = LargeChat(), trio.testing.memory_stream_pair()
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, [(name, "/s/Chat" if name == ":path" else value) for name, value in HEADERS])
    client.send_data(1, framed(b""))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(GrpcServer(service).handle, theirs)
        await ours.send_all(client.data_to_send())
        await trio.testing.wait_all_tasks_blocked()
        [call] = service.calls
        call.send_nowait(b"c" * 10)
        call.finish(status)
        received, is_ended = b"", False
        with trio.fail_after(TIMEOUT_S):
            while not is_ended:
                for event in client.receive_data(await ours.receive_some()):
                    if isinstance(event, DataReceived):
                        received += event.data
                        client.acknowledge_received_data(event.flow_controlled_length, 1)
                    elif isinstance(event, TrailersReceived):
                        assert dict(event.headers)[b"grpc-status"] == b"%d" % status
                    is_ended |= isinstance(event, StreamEnded)
                await ours.send_all(client.data_to_send())
        assert received == framed(b"a" * 100_000) + framed(b"c" * 10)
        nursery.cancel_scope.cancel()


class Hasty(Echo):
    """Answers without looking at the peer's window."""

    async def serve(self, call: Call) -> None:
        for _ in range(100):
            call.send_nowait(b"x" * 10_000)
        await trio.sleep_forever()


async def raw_peer(server: GrpcServer, nursery: trio.Nursery, piece_size: int | None) -> trio.abc.Stream:
    """A peer that has made a call and reads nothing more."""
    ours, theirs = trio.testing.memory_stream_pair() if piece_size is None else trio.testing.lockstep_stream_pair()
    nursery.start_soon(server.handle, theirs)
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, [(name, "/s/Hasty" if name == ":path" else value) for name, value in HEADERS])
    client.send_data(1, framed(b""), end_stream=True)
    await ours.send_all(client.data_to_send())
    await trio.testing.wait_all_tasks_blocked()
    return ours


@pytest.mark.parametrize("path", ["/s/Echo", "/s/Wait"], ids=["taken", "tasks"])
async def test_other_tasks_run_while_a_chunk_of_calls_is_served(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the time slice is over, or 64 tasks were started."""
    monkeypatch.setattr("ha.grpc.connection.TIME_SLICE_S", 0.0 if path == "/s/Echo" else 60.0)
    count, step_max = 200, 1 if path == "/s/Echo" else TASKS_PER_SLICE_MAX
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = count
    client.remote_settings.acknowledge()
    for stream_id in range(1, 2 * count, 2):
        client.send_headers(stream_id, [(name, path if name == ":path" else value) for name, value in HEADERS])
        client.send_data(stream_id, framed(b""), end_stream=True)
    async with open_poller() as poller, trio.open_nursery() as nursery:
        server = GrpcServer(Echo(), poller=poller)
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(server.handle, theirs)
        await trio.testing.wait_all_tasks_blocked()
        await ours.send_all(client.data_to_send())
        seen = [0]
        while seen[-1] < count:
            await trio.lowlevel.checkpoint()
            seen.append(server.statistics().calls)
        steps = [after - before for before, after in itertools.pairwise(seen)]
        assert max(steps) <= 2 * step_max, "the order of two tasks varies"
        nursery.cancel_scope.cancel()


class Costly(Echo):
    """Answers with three messages that take long to make."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks: list[int] = []
        self.tick_count = 0

    async def serve(self, call: Call) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick)
            await call.respond_all(self._messages())
            nursery.cancel_scope.cancel()

    async def _tick(self) -> None:
        while True:
            self.tick_count += 1
            await trio.lowlevel.checkpoint()

    def _messages(self) -> Generator[bytes, None, None]:
        for _ in range(3):
            self.ticks.append(self.tick_count)
            yield b"x"


async def test_other_tasks_run_between_the_messages_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.grpc.connection.TIME_SLICE_S", 0.0)
    costly, (ours, theirs) = Costly(), trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(GrpcServer(costly).handle, theirs)
        await call_with_a_large_window(ours)
        while len(costly.ticks) < 3:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert costly.ticks[0] < costly.ticks[2]


class Large(Echo):
    """Sends 100 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.message_count = 0

    async def serve(self, call: Call) -> None:
        await call.respond_all(self._messages())

    def _messages(self) -> Generator[bytes, None, None]:
        for self.message_count in range(1, 101):
            yield b"x" * 1_000_000


async def call_with_a_large_window(stream: trio.abc.Stream) -> None:
    """Calls `Large` as a client whose window is as large as possible."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
    client.increment_flow_control_window(2**31 - 1 - 65_535)
    client.send_headers(1, [(name, "/s/Large" if name == ":path" else value) for name, value in HEADERS])
    client.send_data(1, framed(b""), end_stream=True)
    await stream.send_all(client.data_to_send())


async def test_answers_to_a_peer_that_does_not_read_are_limited() -> None:
    """However large a window it has opened."""
    service, (ours, theirs) = Large(), trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(GrpcServer(service).handle, theirs)
        await call_with_a_large_window(ours)
        await trio.testing.wait_all_tasks_blocked()
        assert 0 < service.message_count < 5
        nursery.cancel_scope.cancel()


async def test_peer_that_opens_no_window_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    server = GrpcServer(Hasty(), GrpcOptions(pending_bytes_max=500_000, message_size_max=100_000))
    async with trio.open_nursery() as nursery:
        await raw_peer(server, nursery, None)
        assert server.statistics().ended == {"outbox full": 1}


@pytest.mark.parametrize("allows", ["more", "other calls", "nothing"])
async def test_peer_whose_window_stays_closed(autojump_clock: trio.testing.MockClock, allows: str) -> None:
    """It is closed after a while, although it answers PINGs. However long its messages are, few bytes wait for it."""
    service, (ours, theirs) = Large(), trio.testing.memory_stream_pair()
    server = GrpcServer(service, GrpcOptions(send_timeout_s=60, pending_bytes_max=70_000, message_size_max=1000))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [MemoryListener()])
        nursery.start_soon(server.handle, theirs)
        client = H2Connection(H2Configuration(client_side=True))
        client.initiate_connection()
        client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1000})

        def send_call(stream_id: int, path: str) -> None:
            headers = [(name, path if name == ":path" else value) for name, value in HEADERS]
            client.send_headers(stream_id, headers)
            client.send_data(stream_id, framed(b""), end_stream=True)

        send_call(1, "/s/Large")
        with suppress(trio.BrokenResourceError):
            for number in range(1, 6):
                await ours.send_all(client.data_to_send())
                await trio.sleep(29)
                client.ping(bytes(8))
                if allows == "more":
                    client.increment_flow_control_window(1, 1)
                elif allows == "other calls":
                    send_call(1 + 2 * number, "/s/Echo")
        assert server.statistics().ended == ({"peer does not read": 1} if allows == "nothing" else {})
        nursery.cancel_scope.cancel()


async def test_peer_that_does_not_read_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    server = GrpcServer(Hasty(), GrpcOptions(send_timeout_s=60))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [MemoryListener()])
        stream = await raw_peer(server, nursery, 1)
        await trio.sleep(58)
        assert server.connections
        await trio.sleep(5)
        assert server.statistics().ended == {"peer does not read": 1}
        await stream.aclose()
        nursery.cancel_scope.cancel()


async def test_peer_that_reads_slowly_is_not_closed(autojump_clock: trio.testing.MockClock) -> None:
    """It takes several times `send_timeout_s` to read one message."""
    server, (ours, theirs) = GrpcServer(Large(), GrpcOptions(send_timeout_s=60)), trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [MemoryListener()])
        nursery.start_soon(server.handle, theirs)
        await call_with_a_large_window(ours)
        for _ in range(150):
            assert await ours.receive_some(8000)
            await trio.sleep(1)
        assert server.connections
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def silent_call() -> AsyncIterator[tuple[GrpcServer, H2Connection, trio.abc.Stream]]:
    """A server that asks for a sign of life after 60 s and waits 20 s for it, and a client with a call."""
    server = GrpcServer(Silent(), GrpcOptions(ping_after_s=60, ping_timeout_s=20))
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.memory_stream_pair()
        await nursery.start(server.serve, [MemoryListener()])
        nursery.start_soon(server.handle, theirs)
        client = H2Connection(H2Configuration(client_side=True))
        client.initiate_connection()
        client.send_headers(1, [(name, "/s/Chat" if name == ":path" else value) for name, value in HEADERS])
        client.send_data(1, framed(b"m"))
        await ours.send_all(client.data_to_send())
        yield server, client, ours
        nursery.cancel_scope.cancel()


async def test_peer_has_its_time_to_answer_a_ping_that_is_late(autojump_clock: trio.testing.MockClock) -> None:
    """As after the process was stopped for a while."""
    async with silent_call() as (server, client, ours):
        await trio.testing.wait_all_tasks_blocked()
        autojump_clock.jump(100)
        while not any(isinstance(each, PingReceived) for each in client.receive_data(await ours.receive_some())):
            pass
        await trio.sleep(15)
        assert len(server.connections) == 1
        await ours.send_all(client.data_to_send())
        await trio.sleep(15)
        assert len(server.connections) == 1


@pytest.mark.parametrize("answers", [True, False], ids=["alive", "gone"])
async def test_silent_peer_of_a_call_is_asked_for_a_sign_of_life(
    autojump_clock: trio.testing.MockClock, answers: bool
) -> None:
    async with silent_call() as (server, client, ours):
        pinged_at: list[float] = []
        began = trio.current_time()
        with trio.move_on_after(300):
            while chunk := await ours.receive_some():
                pinged_at += [
                    trio.current_time() - began for each in client.receive_data(chunk) if isinstance(each, PingReceived)
                ]
                if answers:
                    await ours.send_all(client.data_to_send())
        if answers:
            assert len(server.connections) == 1
            assert len(pinged_at) == 4
        else:
            await trio.testing.wait_all_tasks_blocked()
            assert server.statistics().ended == {"PING not answered": 1}
            assert len(pinged_at) == 1
            assert 60 <= pinged_at[0] <= 62
            assert 80 <= trio.current_time() - began <= 83
