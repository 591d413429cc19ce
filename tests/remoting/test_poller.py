"""The poller: which task serves a chunk, when a reader is woken, and what is done at the end of a turn."""

import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import trio
import trio.testing

from ha.poller import Poller, open_poller
from ha.protocol.remoting import RemotingCommand, encode_command
from ha.remoting import RemotingConnection, RemotingServer
from ha.transport import read_into, transport_for
from tests.limits.sockets import until
from tests.remoting.wire import Peer, Recorder, request, socket_pair

WAIT_S = 20
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: a close that is a reset"""


@asynccontextmanager
async def open_polled() -> AsyncIterator[tuple[Poller, trio.SocketStream, trio.SocketStream]]:
    with trio.fail_after(WAIT_S):
        async with open_poller() as poller, socket_pair() as (ours, theirs):
            yield poller, ours, theirs


async def test_chunks_are_served_without_waking_the_reader_until_one_is_not() -> None:
    taken: list[bytes] = []
    tasks = set()

    def take(chunk: bytes) -> bool:
        tasks.add(trio.lowlevel.current_task())
        taken.append(chunk)
        return chunk != b"wake up"

    async with open_polled() as (poller, ours, theirs), trio.open_nursery() as nursery:
        transport = transport_for(ours, 65_536, poller)

        async def send() -> None:
            for number, message in enumerate((b"one", b"two", b"wake up")):
                await theirs.send_all(message)
                await until(lambda: len(taken) > number)  # noqa: B023

        nursery.start_soon(send)
        assert await transport.receive(take) == b"wake up"
        assert taken == [b"one", b"two", b"wake up"]
        assert trio.lowlevel.current_task() not in tasks
        await theirs.send_all(b"nobody waits")
        assert await transport.receive() == b"nobody waits"
        await theirs.send_eof()
        assert await transport.receive(take) == b""


async def test_an_error_in_a_turn_is_raised_in_the_waiting_task() -> None:
    def refuse(chunk: bytes) -> bool:
        raise ValueError(chunk)

    async with open_polled() as (poller, ours, theirs):
        transport = transport_for(ours, 65_536, poller)
        await theirs.send_all(b"nonsense")
        with pytest.raises(ValueError, match="nonsense"):
            await transport.receive(refuse)
        theirs.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        await theirs.aclose()
        with pytest.raises(trio.BrokenResourceError, match="reset"):
            await transport.receive(refuse)


async def test_a_cancelled_wait_can_be_repeated() -> None:
    taken: list[bytes] = []

    def take(chunk: bytes) -> bool:
        taken.append(chunk)
        return False

    async with open_polled() as (poller, ours, theirs):
        transport = transport_for(ours, 65_536, poller)
        with trio.CancelScope() as scope:
            scope.cancel()
            await transport.receive(take)
        await theirs.send_all(b"later")
        await trio.testing.wait_all_tasks_blocked()
        assert taken == []
        assert await transport.receive(take) == b"later"
        await ours.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await transport_for(ours, 65_536, poller).receive(take)


async def test_the_reader_waits_itself_after_a_chunk_that_was_not_served_in_a_turn() -> None:
    takers: list[str] = []

    def take(chunk: bytes) -> bool:
        takers.append(trio.lowlevel.current_task().name.rpartition(".")[2])
        return chunk == b"quick"

    async with open_polled() as (poller, ours, theirs), trio.open_nursery() as nursery:
        transport = transport_for(ours, 65_536, poller)

        async def send() -> None:
            for number, message in enumerate((b"slow", b"slow", b"quick", b"quick", b"slow")):
                await theirs.send_all(message)
                await until(lambda: len(takers) > number)  # noqa: B023

        async def read() -> None:
            for _ in range(3):
                assert await transport.receive(take) == b"slow"

        nursery.start_soon(send)
        nursery.start_soon(read)
    assert takers == ["_run", "read", "read", "_run", "_run"]


async def test_reads_that_leave_nothing_do_not_wake_the_reader() -> None:
    readers: list[str] = []
    buffer = memoryview(bytearray(16))

    def read(descriptor: int, into: memoryview) -> int | None:
        size = read_into(descriptor, into)
        readers.append(trio.lowlevel.current_task().name.rpartition(".")[2])
        return None if bytes(into[:size]) == b"take" else size

    async with open_polled() as (poller, ours, theirs), trio.open_nursery() as nursery:
        transport = transport_for(ours, 65_536, poller)

        async def send() -> None:
            for number, message in enumerate((b"take", b"take", b"leave", b"leave", b"take", b"take")):
                await theirs.send_all(message)
                await until(lambda: len(readers) > number)  # noqa: B023
            await theirs.send_eof()

        async def receive() -> None:
            for expected in (5, 5, 0):
                assert await transport.receive_into(buffer, read) == expected

        nursery.start_soon(send)
        nursery.start_soon(receive)
    assert readers == ["_run", "_run", "_run", "receive", "receive", "_run", "_run"]


async def test_a_task_whose_wait_is_cancelled_in_a_turn_is_woken_once() -> None:
    calls: list[str] = []
    scopes = {"one": trio.CancelScope(), "two": trio.CancelScope()}

    async def wait(poller: Poller, stream: trio.SocketStream, name: str) -> None:
        def on_readable() -> bool:
            calls.append(name)
            for scope in scopes.values():
                scope.cancel()
            return False

        with scopes[name]:
            await poller.wait(stream.socket.fileno(), on_readable)

    with trio.fail_after(WAIT_S):
        async with open_poller() as poller, socket_pair() as (one, its), socket_pair() as (two, others):
            await its.send_all(b"x")
            await others.send_all(b"x")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, poller, one, "one")
                nursery.start_soon(wait, poller, two, "two")
    assert len(calls) == 1


async def test_callbacks_are_called_after_all_reads_of_a_turn_early_ones_first() -> None:
    order: list[str] = []
    with trio.fail_after(WAIT_S):
        async with open_poller() as poller, socket_pair() as (one, its), socket_pair() as (two, others):

            def serve(name: str) -> Callable[[], bool]:
                def on_readable() -> bool:
                    order.append(f"read {name}")
                    assert poller.after_turn(lambda: order.append(f"last {name}"))
                    poller.at_turn_end(lambda: order.append(f"late {name}"))
                    poller.at_turn_end(lambda: leave(name), is_early=True)
                    return False

                return on_readable

            def leave(name: str) -> None:
                order.append(f"early {name}")
                poller.at_turn_end(lambda: order.append(f"left by {name}"))

            poller.at_turn_end(lambda: order.append("at once"))
            assert not poller.after_turn(lambda: order.append("never"))
            await its.send_all(b"x")
            await others.send_all(b"x")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(poller.wait, one.socket.fileno(), serve("one"))
                nursery.start_soon(poller.wait, two.socket.fileno(), serve("two"))
    first, second = ("one", "two") if order[1] == "read one" else ("two", "one")
    assert order == ["at once"] + [
        f"{what} {name}" for what in ("read", "early", "late", "left by", "last") for name in (first, second)
    ]


async def test_a_socket_that_becomes_ready_in_a_turn_is_served_before_other_tasks_run() -> None:
    order: list[str] = []
    is_told = trio.Event()

    async def note_task() -> None:
        await is_told.wait()
        order.append("task")

    with trio.fail_after(WAIT_S):
        async with open_poller(time_slice_s=60) as poller, socket_pair() as (ours, theirs):

            def send() -> None:
                os.write(theirs.socket.fileno(), b"x")

            def serve() -> bool:
                is_told.set()
                order.append(os.read(ours.socket.fileno(), 1).decode())
                return len(order) < 10 and poller.after_turn(send)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(note_task)
                nursery.start_soon(poller.wait, ours.socket.fileno(), serve)
                send()
    assert order == ["x"] * 10 + ["task"]


async def test_a_function_gets_a_turn_of_its_own_or_shares_the_present_one() -> None:
    order: list[str] = []

    def inner() -> None:
        poller.at_turn_end(lambda: order.append("end of inner"))
        order.append("inner")

    def outer() -> None:
        poller.as_turn(inner)
        order.append("outer")

    def fail() -> None:
        raise ValueError

    async with open_poller() as poller:
        poller.as_turn(outer)
        assert order == ["inner", "outer", "end of inner"]
        with pytest.raises(ValueError):  # noqa: PT011
            poller.as_turn(fail)
        assert not poller.is_in_turn


async def test_other_tasks_run_between_turns_however_much_there_is_to_read() -> None:
    read: list[int] = []
    seen: list[int] = []
    with trio.fail_after(WAIT_S):
        async with open_poller(time_slice_s=0.0) as poller, trio.open_nursery() as nursery:
            for number in range(3):
                ours, theirs = socket.socketpair()
                nursery.start_soon(hold, ours, theirs)
                theirs.send(b"never read")

                def on_readable(number: int = number) -> bool:
                    read.append(number)
                    return True

                nursery.start_soon(poller.wait, ours.fileno(), on_readable)
            while len(read) < 9:
                await trio.lowlevel.checkpoint()
                seen.append(len(read))
            nursery.cancel_scope.cancel()
    # One in each turn, all equally often; this task runs once in each pass of the event loop, before or after the turn.
    assert sorted(read[:3]) == sorted(read[3:6]) == sorted(read[6:9]) == [0, 1, 2]
    assert all(after - before <= 2 for before, after in pairwise(seen))


async def hold(*sockets: socket.socket) -> None:
    """Keeps sockets open until cancelled."""
    try:
        await trio.sleep_forever()
    finally:
        for each in sockets:
            each.close()


async def test_it_serves_while_its_cancelled_block_ends() -> None:
    with trio.fail_after(WAIT_S):
        async with socket_pair() as (ours, theirs):
            with trio.CancelScope() as outer:
                async with open_poller() as poller:
                    outer.cancel()
                    with trio.CancelScope(shield=True):
                        await theirs.send_all(b"still there")
                        assert await transport_for(ours, 65_536, poller).receive(lambda _: False) == b"still there"
                    await trio.lowlevel.checkpoint()
            assert outer.cancelled_caught


class Taker:
    """Takes all requests but those with the body "slow", and echoes them at the end of the turn."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self.chunks: list[list[bytes]] = []
        self._unanswered: list[tuple[RemotingConnection, RemotingCommand]] = []

    def take(self, connection: RemotingConnection, commands: list[RemotingCommand]) -> list[RemotingCommand]:
        assert not self._poller.is_in_turn or trio.lowlevel.current_task().name.endswith("Poller._run")
        if any(command.body == b"slow" for command in commands):
            return commands
        self.chunks.append([bytes(command.body) for command in commands])
        self._unanswered += [(connection, command) for command in commands]
        self._poller.at_turn_end(self._answer, is_early=True)
        return []

    def _answer(self) -> None:
        unanswered, self._unanswered = self._unanswered, []
        for connection, command in unanswered:
            connection.send_soon(encode_command(command.reply(0, body=command.body)))


async def test_a_server_takes_requests_in_a_turn_unless_they_have_to_wait() -> None:
    recorder = Recorder()
    async with open_polled() as (poller, ours, theirs), trio.open_nursery() as nursery:
        taker = Taker(poller)
        server = RemotingServer(recorder, take=taker.take, poller=poller)
        nursery.start_soon(server.handle, ours)
        peer = Peer(theirs)
        first = await peer.ask(request(1, b"first"))
        frame = encode_command(request(2, b"cut"))
        await theirs.send_all(frame[:20])
        await until(lambda: server.statistics().partial_bytes == 20)
        await theirs.send_all(frame[20:] + encode_command(request(3, b"whole")))
        answers = [first, await peer.receive(), await peer.receive()]
        assert server.statistics().partial_bytes == 0
        sends = server.statistics().sends
        await peer.send(request(4, b"quick"), request(5, b"slow"))
        answers += [await peer.receive(), await peer.receive(), await peer.ask(request(6, b"again"))]
        assert [answer.opaque for answer in answers if answer] == [1, 2, 3, 4, 5, 6]
        assert taker.chunks == [[b"first"], [b"cut", b"whole"], [b"again"]]
        assert [[bytes(command.body) for command in chunk] for chunk in recorder.chunks] == [[b"quick", b"slow"]]
        assert sends == 2  # the two answers of a turn leave together
        assert server.statistics().requests == 6
        nursery.cancel_scope.cancel()


async def test_malformed_bytes_in_a_turn_close_only_their_connection() -> None:
    with trio.fail_after(WAIT_S):
        async with (
            open_poller() as poller,
            socket_pair() as (one, its),
            socket_pair() as (two, others),
            trio.open_nursery() as nursery,
        ):
            server = RemotingServer(Recorder(), take=Taker(poller).take, poller=poller)
            for stream in (one, two):
                nursery.start_soon(server.handle, stream)
            bad, good = Peer(its), Peer(others)
            for peer in (bad, good):
                assert (await peer.ask(request(1, b"x"))).opaque == 1
            await its.send_all(b"\x00\x00\x00\x08\x00\x00\xff\xff\x00\x00\x00\x00")
            assert await bad.receive() is None
            assert (await good.ask(request(2, b"y"))).body == b"y"
            assert server.statistics().closed == {"protocol error": 1}
            nursery.cancel_scope.cancel()
