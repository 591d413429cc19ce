"""Sockets read and written with system calls: failed reads, time slices, closed sockets, and the eager writer."""

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
    open_tcp,
    transport_for,
)
from tests.remoting.wire import socket_pair


class Failures:
    """Counts the reads that found nothing."""

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


class Passes:
    """Counts how often another task runs."""

    def __init__(self) -> None:
        self.count = 0

    async def take(self) -> None:
        while True:
            self.count += 1
            await trio.lowlevel.checkpoint()


async def exchange(transport: Transport, theirs: trio.SocketStream, message: bytes) -> None:
    """Receives a message that is sent while this waits for it."""
    got = b""
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            await trio.testing.wait_all_tasks_blocked()
            await theirs.send_all(message)

        nursery.start_soon(send)
        while len(got) < len(message):
            got += await transport.receive()
    assert got == message


async def test_single_messages_are_waited_for_without_failed_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = Failures(monkeypatch)
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs):
            transport = transport_for(ours, 65_536)
            for _ in range(2 * (WAIT_FIRST_COUNT + 1)):
                await exchange(transport, theirs, b"a message")
    assert failures.count == 2


async def test_after_a_long_chunk_the_next_read_does_not_wait_first(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = Failures(monkeypatch)
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs):
            transport = transport_for(ours, 65_536)
            await exchange(transport, theirs, b"a message")
            await exchange(transport, theirs, b"a message")
            assert failures.count == 1
            await theirs.send_all(bytes(READ_BYTES_COUNTED_MIN + 1))
            got = 0
            while got <= READ_BYTES_COUNTED_MIN:
                got += len(await transport.receive())
            await exchange(transport, theirs, b"a message")
    assert failures.count == 2


@pytest.mark.parametrize(("time_slice_s", "is_at_once"), [(60.0, True), (0.0, False)])
async def test_long_sends_and_reads_let_other_tasks_run_after_a_time_slice(
    monkeypatch: pytest.MonkeyPatch, time_slice_s: float, is_at_once: bool
) -> None:
    piece = READ_BYTES_COUNTED_MIN + 1
    monkeypatch.setattr(ha.transport, "TIME_SLICE_S", time_slice_s)
    monkeypatch.setattr(ha.transport, "SEND_PIECE_BYTES", piece)
    message, got, passes = os.urandom(5 * piece), b"", Passes()
    buffer = memoryview(bytearray(piece))
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs), trio.open_nursery() as nursery:
            sending, receiving = transport_for(ours, piece), transport_for(theirs, piece)
            nursery.start_soon(passes.take)
            await sending.send_all(message)
            sent_in, passes.count = passes.count, 0
            while len(got) < len(message):
                got += buffer[: await receiving.receive_into(buffer)]
            nursery.cancel_scope.cancel()
    assert got == message
    assert max(sent_in, passes.count) <= 1 if is_at_once else min(sent_in, passes.count) >= 3


@pytest.mark.parametrize(("time_slice_s", "passes_min", "passes_max"), [(60.0, 0, 1), (0.0, 15, 22)])
async def test_short_requests_that_take_long_let_other_tasks_run(
    monkeypatch: pytest.MonkeyPatch, time_slice_s: float, passes_min: int, passes_max: int
) -> None:
    """Such as pulls: a hundred bytes ask for one MiB, and a fast reader has sent the next request by then."""
    monkeypatch.setattr(ha.transport, "TIME_SLICE_S", time_slice_s)
    passes = Passes()
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs), trio.open_nursery() as nursery:
            transport = transport_for(ours, 8)
            await theirs.send_all(b"question" * 20)
            nursery.start_soon(passes.take)
            for _ in range(20):
                assert await transport.receive() == b"question"
            nursery.cancel_scope.cancel()
    assert passes_min <= passes.count <= passes_max


async def test_the_system_accepts_one_mib_before_the_peer_reads() -> None:
    async with socket_pair() as (ours, _):
        transport = transport_for(ours, 65_536)
        piece = bytes(SEND_PIECE_BYTES)
        assert [transport.send_nowait(piece) for _ in range(4)] == [SEND_PIECE_BYTES] * 4


async def test_a_closed_socket_is_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with trio.fail_after(20):
        async with socket_pair() as (ours, theirs):
            transport = transport_for(ours, 65_536)
            await exchange(transport, theirs, b"a message")
            await ours.aclose()
            with pytest.raises(trio.BrokenResourceError):
                await transport.receive()


class Half:
    """A transport that accepts half of what it gets without waiting."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send_nowait(self, data: bytes | memoryview) -> int:
        self.sent.append(bytes(data[: len(data) // 2]))
        return len(data) // 2


async def write(writer: EagerWriter, transport: Half) -> None:
    while True:
        rest = bytes(await writer.wait_for_work())
        assert not writer.is_parked, "it may send"
        transport.sent.append(b"rest: " + rest)


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
        assert not writer.is_parked


async def test_eager_writer_sends_in_place_of_a_woken_task() -> None:
    transport = Half()
    writer = EagerWriter(transport)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, writer, transport)
        await trio.testing.wait_all_tasks_blocked()
        writer.wake()
        assert (writer.is_idle, writer.is_parked) == (False, True)
        assert writer.try_send(b"abcd") == 2
        assert not writer.is_parked, "the rest comes first"
        await trio.testing.wait_all_tasks_blocked()
        assert transport.sent == [b"ab", b"rest: cd"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("host", ["10.0.0..1", "x" * 64 + ".example", "ä" * 64, "\udc80"])
async def test_a_host_that_can_be_no_name_is_an_os_error(host: str) -> None:
    with pytest.raises(OSError, match="is no host name"):
        await open_tcp(host, 1)
