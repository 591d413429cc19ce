"""A socket read with the bare system calls: how often it is asked in vain, and what becomes of it when it is closed."""

from __future__ import annotations

import os

import pytest
import trio
import trio.testing

import ha.transport
from ha.transport import (
    READ_BYTES_COUNTED_MIN,
    SEND_PIECE_BYTES,
    WAIT_FIRST_COUNT,
    EagerWriter,
    Transport,
    transport_for,
)
from tests.remoting.wire import socket_pair


class Failures:
    """Counts the reads of a socket that found nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        read = os.read

        def counting(descriptor: int, size: int) -> bytes:
            try:
                return read(descriptor, size)
            except BlockingIOError:
                self.count += 1
                raise

        monkeypatch.setattr(os, "read", counting)


class Turns:
    """Those of the loop that another task gets."""

    def __init__(self) -> None:
        self.count = 0

    async def take(self) -> None:
        while True:
            self.count += 1
            await trio.lowlevel.checkpoint()


async def exchange(moved: Transport, theirs: trio.SocketStream, message: bytes) -> None:
    """Receive what is sent while this waits for it."""
    got = b""
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            await trio.testing.wait_all_tasks_blocked()
            await theirs.send_all(message)

        nursery.start_soon(send)
        while len(got) < len(message):
            got += await moved.receive()
    assert got == message


async def test_who_sends_single_messages_is_waited_for_without_a_read_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = Failures(monkeypatch)
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs):
            moved = transport_for(ours, 65_536)
            for _ in range(2 * (WAIT_FIRST_COUNT + 1)):
                await exchange(moved, theirs, b"a message")
    assert failures.count == 2


async def test_after_much_at_once_the_next_bytes_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = Failures(monkeypatch)
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs):
            moved = transport_for(ours, 65_536)
            await exchange(moved, theirs, b"a message")
            await exchange(moved, theirs, b"a message")
            assert failures.count == 1
            await theirs.send_all(bytes(READ_BYTES_COUNTED_MIN + 1))
            got = 0
            while got <= READ_BYTES_COUNTED_MIN:
                got += len(await moved.receive())
            await exchange(moved, theirs, b"a message")
    assert failures.count == 2


@pytest.mark.parametrize(("time_slice_s", "is_at_once"), [(60.0, True), (0.0, False)])
async def test_who_sends_and_reads_much_lets_others_run_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, time_slice_s: float, is_at_once: bool
) -> None:
    piece = READ_BYTES_COUNTED_MIN + 1
    monkeypatch.setattr(ha.transport, "TIME_SLICE_S", time_slice_s)
    monkeypatch.setattr(ha.transport, "SEND_PIECE_BYTES", piece)
    message, got, turns = os.urandom(5 * piece), b"", Turns()
    buffer = memoryview(bytearray(piece))
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs), trio.open_nursery() as nursery:
            sending, receiving = transport_for(ours, piece), transport_for(theirs, piece)
            nursery.start_soon(turns.take)
            await sending.send_all(message)
            sent_in, turns.count = turns.count, 0
            while len(got) < len(message):
                got += buffer[: await receiving.receive_into(buffer)]
            nursery.cancel_scope.cancel()
    assert got == message
    assert max(sent_in, turns.count) <= 1 if is_at_once else min(sent_in, turns.count) >= 3


@pytest.mark.parametrize(("time_slice_s", "turns_min", "turns_max"), [(60.0, 0, 1), (0.0, 15, 22)])
async def test_who_asks_in_few_bytes_for_what_takes_long_lets_others_run(
    monkeypatch: pytest.MonkeyPatch, time_slice_s: float, turns_min: int, turns_max: int
) -> None:
    """Pulls are such: a hundred bytes that ask for a MiB, and who reads quickly has sent the next one by then."""
    monkeypatch.setattr(ha.transport, "TIME_SLICE_S", time_slice_s)
    turns = Turns()
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs), trio.open_nursery() as nursery:
            moved = transport_for(ours, 8)
            await theirs.send_all(b"question" * 20)
            nursery.start_soon(turns.take)
            for _ in range(20):
                assert await moved.receive() == b"question"
            nursery.cancel_scope.cancel()
    assert turns_min <= turns.count <= turns_max


async def test_an_answer_of_a_mib_is_the_systems_before_its_reader_begins() -> None:
    async with socket_pair() as (ours, _):
        moved = transport_for(ours, 65_536)
        piece = bytes(SEND_PIECE_BYTES)
        assert [moved.send_nowait(piece) for _ in range(4)] == [SEND_PIECE_BYTES] * 4


async def test_a_closed_socket_is_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs):
            moved = transport_for(ours, 65_536)
            await exchange(moved, theirs, b"a message")
            await ours.aclose()
            with pytest.raises(trio.BrokenResourceError):
                await moved.receive()


class Half:
    """A transport that accepts half of what it gets without waiting."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_nowait(self, data: bytes | memoryview) -> int:
        self.sent.append(bytes(data[: len(data) // 2]))
        return len(data) // 2


async def write(writer: EagerWriter, transport: Half) -> None:
    while True:
        transport.sent.append(b"rest: " + bytes(await writer.wait_for_work()))


async def test_eager_writer_leaves_the_rest_to_the_writing_task() -> None:
    transport = Half()
    writer = EagerWriter(transport)  # type: ignore[arg-type]
    writer.wake()  # nobody waits
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, writer, transport)
        assert not writer.is_idle
        await trio.testing.wait_all_tasks_blocked()
        assert writer.is_idle
        assert writer.try_send(b"abcd") == 2
        assert not writer.is_idle, "the rest comes first"
        await trio.testing.wait_all_tasks_blocked()
        assert writer.is_idle
        writer.wake()
        writer.wake()
        await trio.testing.wait_all_tasks_blocked()
        assert transport.sent == [b"ab", b"rest: cd", b"rest: "]
        nursery.cancel_scope.cancel()
        assert not writer.is_idle, "a session that was closed must not acknowledge anything"
