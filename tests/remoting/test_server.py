"""Requests and responses of the remoting server over memory streams, and its timeouts in virtual time."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.protocol.remoting import RemotingCommand, RemotingParser, encode_command
from ha.remoting import RemotingConnection, RemotingServer, RemotingServerOptions, each_request
from tests.remoting.wire import MemoryListener, Peer, Recorder, Wire, open_wire, request
from tests.testing.time_slices import CALL_COUNT, BusyWork


async def test_the_requests_of_a_chunk_are_one_call_and_their_responses_one_send() -> None:
    recorder = Recorder()
    async with open_wire(recorder) as wire:
        peer = wire.connect()
        await peer.send(*(request(n, b"x%d" % n) for n in range(16)))
        answers = [await peer.expect() for _ in range(16)]
        assert [(a.opaque, a.flag, a.body) for a in answers] == [(n, 1, b"x%d" % n) for n in range(16)]
        assert [len(chunk) for chunk in recorder.chunks] == [16]
        assert wire.server.statistics().sends == 1
        assert wire.server.statistics().requests == 16


@pytest.mark.parametrize("serialize_type", [0, 1])
async def test_the_response_has_the_encoding_of_the_request(serialize_type: int) -> None:
    async with open_wire(Recorder()) as wire:
        answer = await wire.connect().ask(request(5, serialize_type=serialize_type))
        assert answer.serialize_type == serialize_type


async def test_a_oneway_request_is_never_answered() -> None:
    async with open_wire(Recorder()) as wire:
        peer = wire.connect()
        await peer.send(request(1, flag=2))
        assert (await peer.ask(request(2))).opaque == 2


async def test_a_malformed_request_is_refused_and_the_connection_stays_open() -> None:
    @each_request
    async def handler(connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        if command.opaque == 2:
            raise RemoteProtocolError("no topic")
        return command.reply(0)

    async with open_wire(handler) as wire:
        peer = wire.connect()
        await peer.send(request(1), request(2), request(3))
        answers = [await peer.expect() for _ in range(3)]
        assert [(a.opaque, a.code, a.remark) for a in answers] == [(1, 0, None), (2, 1, "no topic"), (3, 0, None)]


async def test_a_response_does_not_wait_for_a_later_request_of_its_chunk() -> None:
    go_on = trio.Event()

    @each_request
    async def handler(connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        if command.opaque == 2:
            await go_on.wait()
        return command.reply(0)

    async with open_wire(handler) as wire:
        peer = wire.connect()
        await peer.send(request(1), request(2))
        with trio.fail_after(5):
            assert (await peer.expect()).opaque == 1
        go_on.set()
        assert (await peer.expect()).opaque == 2


class Direct(trio.abc.Stream):
    """Sends without waiting. `sent`: the data of each send, and whether it had to wait."""

    def __init__(self, received: trio.abc.ReceiveStream) -> None:
        self._received = received
        self.sent: list[tuple[bytes, bool]] = []

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._received.receive_some(max_bytes))

    def send_nowait(self, data: bytes | memoryview) -> int:
        self.sent.append((bytes(data), False))
        return len(data)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append((bytes(data), True))
        await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await self._received.aclose()


async def test_responses_to_a_chunk_are_sent_by_its_reader() -> None:
    """Although the writer was woken between the requests, in case that the second one waits."""

    @each_request
    async def handler(connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        return command.reply(0)

    ours, theirs = trio.testing.memory_stream_one_way_pair()
    stream = Direct(theirs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(RemotingServer(handler).handle, stream)
        await ours.send_all(b"".join(encode_command(request(opaque)) for opaque in (1, 2)))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    [(data, has_waited)] = stream.sent
    assert [answer.opaque for answer in RemotingParser().feed(data)] == [1, 2]
    assert not has_waited


async def test_expensive_requests_of_one_chunk_let_other_tasks_run() -> None:
    work = BusyWork()

    @each_request
    async def busy(connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        work.call()
        return command.reply(0)

    async with open_wire(busy) as wire, trio.open_nursery() as nursery:
        nursery.start_soon(work.run_beside)
        peer = wire.connect()
        await peer.send(*(request(n) for n in range(CALL_COUNT)))
        assert [(await peer.expect()).opaque for _ in range(CALL_COUNT)] == list(range(CALL_COUNT))
    work.check()


async def test_requests_of_a_peer_that_does_not_read_are_not_served_until_it_does() -> None:
    served = 0

    @each_request
    async def handler(connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        nonlocal served
        served += 1
        return command.reply(0, body=bytes(400))

    async with open_wire(handler, RemotingServerOptions(outbox_high_bytes=1000)) as wire:
        peer = wire.connect(lockstep=True)
        await peer.send(*(request(n) for n in range(20)))
        await trio.testing.wait_all_tasks_blocked()
        assert served == 2  # responses of 550 bytes: the second exceeds 1000
        assert [(await peer.expect()).opaque for _ in range(20)] == list(range(20))
        await peer.send(*(request(n) for n in range(20)))
        await trio.testing.wait_all_tasks_blocked()
        await peer.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert served == 22, "none for a peer that is gone"


async def test_a_response_too_long_for_a_frame_becomes_an_error_of_that_request() -> None:
    @each_request
    async def handler(connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand | None:
        return command.reply(0, body=bytes(17_000_000 if command.opaque == 1 else 3))

    async with open_wire(handler) as wire:
        peer = wire.connect()
        answer = await peer.ask(request(1))
        assert answer.code == 1
        assert answer.remark is not None
        assert "can't be sent" in answer.remark
        assert (await peer.ask(request(2))).body == bytes(3)


@pytest.mark.parametrize(
    ("first_bytes", "told"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "remoting frame of"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS handshake"),
        (b"\x00\x00\x00\x04\x00\x00\x00\x09", "header of 9 bytes"),
        (b"\xff\xff\xff\xff", "remoting frame of -1"),
    ],
)
async def test_garbage_closes_the_connection_with_one_log_line(
    first_bytes: bytes, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_wire(Recorder()) as wire:
        peer, other = wire.connect(), wire.connect()
        await other.ask(request(1))
        await peer.stream.send_all(first_bytes)
        assert await peer.receive() is None
        assert wire.server.statistics().closed == {"protocol error": 1}
        assert (await other.ask(request(2))).opaque == 2
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert told in lines[0]
    assert "memory:0" in lines[0]


async def test_an_idle_connection_is_closed_after_120_seconds(autojump_clock: trio.testing.MockClock) -> None:
    async with open_wire(Recorder()) as wire:
        await trio.sleep(7)
        peer = wire.connect()
        await peer.ask(request(1))
        await trio.sleep(50)
        await peer.ask(request(2))
        assert await peer.receive() is None
        assert trio.current_time() == pytest.approx(7 + 50 + 120)
        assert wire.server.statistics().closed == {"idle": 1}


async def test_a_peer_that_does_not_read_is_closed_after_30_seconds(autojump_clock: trio.testing.MockClock) -> None:
    async with open_wire(Recorder()) as wire:
        peer = wire.connect(lockstep=True)
        await trio.sleep(5)
        await peer.send(request(1))
        await trio.sleep(29.9)
        assert wire.server.statistics().connections == 1
        await trio.sleep(0.2)
        assert wire.server.statistics().connections == 0
        assert wire.server.statistics().closed == {"peer does not read": 1}


async def test_time_in_which_reading_is_paused_does_not_count_as_idle(autojump_clock: trio.testing.MockClock) -> None:
    async def handler(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        await trio.sleep(100 if requests[0].body else 0)
        connection.reply(requests[0], requests[0].reply(0))

    async with open_wire(handler, RemotingServerOptions(handled_bytes_max=1000)) as wire:
        slow, paused = wire.connect(), wire.connect()
        await slow.send(request(1, bytes(1000)))
        await trio.testing.wait_all_tasks_blocked()
        await paused.ask(request(2))
        assert await paused.receive() is None
        assert trio.current_time() == pytest.approx(100 + 120)


async def test_time_in_which_reading_is_paused_does_not_count_for_a_frame(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def handler(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        await trio.sleep(100 if requests[0].body else 0)
        connection.reply(requests[0], requests[0].reply(0))

    async with open_wire(handler, RemotingServerOptions(handled_bytes_max=1000)) as wire:
        slow, paused = wire.connect(), wire.connect()
        await slow.send(request(1, bytes(1000)))
        await trio.testing.wait_all_tasks_blocked()
        frame = encode_command(request(2))
        await paused.stream.send_all(frame[:9])
        await trio.sleep(90)
        await paused.stream.send_all(frame[9:])
        assert (await paused.expect()).opaque == 2
        assert trio.current_time() == pytest.approx(100)
        await paused.stream.send_all(frame[:9])
        assert await paused.receive() is None
        assert trio.current_time() == pytest.approx(100 + 30)


async def test_requests_are_not_read_while_too_much_waits_to_be_sent() -> None:
    recorder = Recorder()
    async with open_wire(recorder, RemotingServerOptions(outbox_high_bytes=1000)) as wire:
        peer = wire.connect(lockstep=True)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                for n in range(10):
                    await peer.send(request(n, bytes(400)))

            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            assert len(recorder.chunks) == 2  # responses of 550 bytes: the second exceeds 1000
            assert wire.server.statistics().outbox_bytes < 1200
            for n in range(10):
                answer = await peer.expect()
                assert answer.opaque == n
        await trio.testing.wait_all_tasks_blocked()
        assert wire.server.statistics().outbox_bytes == 0


async def test_requests_that_need_no_wait_are_not_served_while_too_much_waits_to_be_sent() -> None:
    taken = []

    def take(connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        for command in commands:
            taken.append(command.opaque)
            connection.reply(command, command.reply(0, body=command.body))
        return []

    listener = MemoryListener()
    options = RemotingServerOptions(outbox_high_bytes=1000, outbox_bytes_max=3000)
    async with trio.open_nursery() as nursery:
        server: RemotingServer = await nursery.start(RemotingServer(Recorder(), options, take=take).serve, [listener])
        peer = Peer(listener.connect(lockstep=True))

        async def send() -> None:
            for n in range(10):
                await peer.send(request(n, bytes(400)))

        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        assert len(taken) == 2  # responses of 550 bytes: the second exceeds 1000
        assert [(await peer.expect()).opaque for _ in range(10)] == list(range(10))
        assert server.statistics().closed == {}
        nursery.cancel_scope.cancel()


async def test_the_fullest_outbox_is_closed_not_the_one_that_exceeds_the_limit() -> None:
    async with open_wire(Recorder(), RemotingServerOptions(outbox_total_bytes_max=1000)) as wire:
        full, other = wire.connect(lockstep=True), wire.connect(lockstep=True)
        await full.send(request(1, bytes(700)))
        await trio.testing.wait_all_tasks_blocked()
        assert (await other.ask(request(2, bytes(300)))).opaque == 2
        assert wire.server.statistics().closed == {"outbox full": 1}


async def test_the_longest_incomplete_frame_is_closed_not_the_one_that_exceeds_the_limit() -> None:
    async with open_wire(Recorder(), RemotingServerOptions(partial_bytes_max=1000)) as wire:
        hog, other = wire.connect(), wire.connect()
        await hog.stream.send_all(encode_command(request(1, bytes(2000)))[:800])
        await trio.testing.wait_all_tasks_blocked()
        whole = encode_command(request(2, bytes(400)))
        await other.stream.send_all(whole[:300])
        await trio.testing.wait_all_tasks_blocked()
        assert await hog.receive() is None
        assert wire.server.statistics().partial_bytes == 300
        await other.stream.send_all(whole[300:])
        assert (await other.expect()).opaque == 2
        assert wire.server.statistics().closed == {"protocol error": 1}
        assert wire.server.statistics().partial_bytes == 0


async def test_connections_beyond_the_limit_are_closed_until_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_wire(Recorder(), RemotingServerOptions(connections_max=2)) as wire:
        peers = [wire.connect() for _ in range(4)]
        await trio.testing.wait_all_tasks_blocked()
        assert [await peers[2].receive(), await peers[3].receive()] == [None, None]
        assert (await peers[1].ask(request(1))).opaque == 1
        assert wire.server.statistics().refused == 2
        await peers[0].stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert (await wire.connect().ask(request(2))).opaque == 2
    warnings = [record.getMessage().split()[0] for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["remoting.connection_refused"]


async def test_late_responses_of_one_tick_are_one_send() -> None:
    waiting: list[tuple[RemotingConnection, RemotingCommand]] = []

    async def handler(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        waiting.extend((connection, r) for r in requests)

    async with open_wire(handler) as wire:
        peer = wire.connect()
        await peer.send(*(request(n) for n in range(5)))
        await trio.testing.wait_all_tasks_blocked()
        for connection, waited in reversed(waiting):
            connection.reply(waited, waited.reply(0))
        answers = [await peer.expect() for _ in range(5)]
        assert [a.opaque for a in answers] == [4, 3, 2, 1, 0]
        assert wire.server.statistics().sends == 1


async def test_what_the_handler_queues_is_sent_when_it_returns() -> None:
    async def handler(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        for each in requests:
            connection.reply(each, each.reply(0))
            await trio.lowlevel.checkpoint()

    async with open_wire(handler) as wire:
        peer = wire.connect()
        await peer.send(*(request(n) for n in range(5)))
        assert [(await peer.expect()).opaque for _ in range(5)] == [0, 1, 2, 3, 4]
        assert wire.server.statistics().sends == 1


async def test_flush_sends_what_is_queued_before_the_handler_returns() -> None:
    go_on = trio.Event()

    async def handler(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        connection.reply(requests[0], requests[0].reply(0))
        connection.flush()
        await go_on.wait()
        connection.reply(requests[1], requests[1].reply(0))

    async with open_wire(handler) as wire:
        peer = wire.connect()
        await peer.send(request(1), request(2))
        assert (await peer.expect()).opaque == 1
        go_on.set()
        assert (await peer.expect()).opaque == 2


@asynccontextmanager
async def open_connection() -> AsyncIterator[tuple[Wire, Peer, RemotingConnection]]:
    """A server that has answered one request, and its connection."""
    recorder = Recorder()
    async with open_wire(recorder) as wire:
        peer = wire.connect()
        await peer.ask(request(77))
        [connection] = recorder.connections
        yield wire, peer, connection


class TestInvoke:
    async def test_no_response_in_time(self, autojump_clock: trio.testing.MockClock) -> None:
        async with open_connection() as (_, _, connection):
            start = trio.current_time()
            with pytest.raises(trio.TooSlowError):
                await connection.invoke(request(0, code=220), 3)
            assert trio.current_time() - start == pytest.approx(3)
            assert connection.protocol.cause == "no answer"  # nothing at all came: the peer is considered dead

    async def test_the_end_of_a_connection_fails_pending_invocations(self) -> None:
        closed: list[str] = []
        async with open_connection() as (_, peer, connection):
            connection.on_close(lambda: closed.append("called"))
            async with trio.open_nursery() as nursery:

                async def invoke() -> None:
                    with pytest.raises(trio.BrokenResourceError, match="end of stream"):
                        await connection.invoke(request(0, code=220), 3)

                nursery.start_soon(invoke)
                await peer.receive()
                await peer.stream.aclose()
            assert closed == ["called"]
            with pytest.raises(trio.BrokenResourceError):
                await connection.invoke(request(0, code=220), 3)
            connection.send_soon(b"dropped")
            connection.on_close(lambda: closed.append("at once"))
            assert closed == ["called", "at once"]

    async def test_a_oneway_request_is_flagged(self) -> None:
        async with open_connection() as (_, peer, connection):
            connection.send_oneway(request(0, code=40))
            told = await peer.expect()
            assert (told.code, told.flag) == (40, 2)


async def test_a_bug_in_a_handler_ends_the_server() -> None:
    async def handler(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        raise KeyError("bug")

    with pytest.RaisesGroup(KeyError, flatten_subgroups=True):
        async with open_wire(handler) as wire:
            await wire.connect().send(request(1))
            await trio.sleep_forever()


async def test_drain_sends_what_is_queued_and_accepts_no_connections(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_wire(Recorder()) as wire:
        slow = wire.connect(lockstep=True)
        await slow.send(request(1, bytes(1000)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.server.drain, 10)
            await trio.sleep(2)
            assert (await slow.expect()).opaque == 1
        assert trio.current_time() == pytest.approx(2)
        with pytest.raises(ConnectionRefusedError):
            wire.connect()


async def test_the_own_connection_of_the_process_is_served_although_clients_use_all_others() -> None:
    async with open_wire(Recorder(), RemotingServerOptions(connections_max=1)) as wire, trio.open_nursery() as nursery:
        await wire.connect().ask(request(1))
        assert await wire.connect().receive() is None
        own, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(partial(wire.server.handle, theirs, is_own=True))
        assert (await Peer(own).ask(request(2))).opaque == 2
        nursery.cancel_scope.cancel()


async def test_a_server_that_stops_reading_answers_only_requests_read_before() -> None:
    handled: list[int] = []
    go_on = trio.Event()

    async def wait(connection: RemotingConnection, requests: list[RemotingCommand]) -> None:
        handled.extend(each.opaque for each in requests)
        await go_on.wait()
        for each in requests:
            connection.reply(each, each.reply(0))

    async with open_wire(wait) as wire:
        busy, idle = wire.connect(), wire.connect()
        await busy.send(request(1))
        await trio.testing.wait_all_tasks_blocked()
        wire.server.stop_reading()
        await idle.send(request(2))
        await busy.send(request(3))
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
        assert (await busy.expect()).opaque == 1
        await trio.testing.wait_all_tasks_blocked()
        assert handled == [1]
        assert wire.server.statistics().connections == 2, "they end with the server, not before"


async def test_requests_that_need_a_wait_are_answered_if_reading_stops_right_after_they_were_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def take(connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        if commands[0].opaque == 2:
            server.stop_reading()
        return commands

    listener = MemoryListener()
    async with trio.open_nursery() as nursery:
        server: RemotingServer = await nursery.start(RemotingServer(Recorder(), take=take).serve, [listener])
        peer = Peer(listener.connect())
        for opaque in (1, 2):
            await peer.send(request(opaque))
            await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(5):
            assert [(await peer.expect()).opaque for _ in range(2)] == [1, 2]
        nursery.cancel_scope.cancel()


@settings(max_examples=150)
@given(chunks=st.lists(st.binary(min_size=1, max_size=60), max_size=5), frames_before=st.integers(0, 2))
def test_any_bytes_close_at_most_their_own_connection(chunks: list[bytes], frames_before: int) -> None:
    async def main() -> None:
        async with open_wire(Recorder()) as wire:
            peer, other = wire.connect(), wire.connect()
            for n in range(frames_before):
                await peer.ask(request(n))
            try:
                for chunk in chunks:
                    await peer.stream.send_all(chunk)
            except trio.BrokenResourceError:
                pass
            await trio.testing.wait_all_tasks_blocked()
            assert (await other.ask(request(9))).opaque == 9
            statistics = wire.server.statistics()
            assert statistics.connections + sum(statistics.closed.values()) == 2
            assert set(statistics.closed) <= {"protocol error"}
            assert statistics.requests == frames_before + 1

    trio.run(main)
