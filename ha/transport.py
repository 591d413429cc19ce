"""Bytes in and out of one stream, as cheaply as the stream allows.

A TCP stream is read and written below trio.SocketStream: the system call first, and a wait only when it would block, or
lately did each time. With SocketStream each receive costs a checkpoint and each send another, which is half of the
processor time of an echo (bench/README.md). An encrypted stream over TCP is given that way of moving its bytes. Any
other trio.abc.Stream (memory streams) goes through its own methods, behind the same calls. os.read and os.write are
given the socket's file descriptor, because trio's socket has no call that tries without a checkpoint; the descriptor is
asked for anew each time, so that a closed socket is -1 and never somebody else's file.

With a poller (poller.py) what a TCP connection brings can be served in the poller's turn, without waking its reader.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable

import trio

from ha.poller import Poller

READ_FIRST = 65_536
"""Bytes asked for until a read fills that: most connections never need chunk_size_max."""

HOT_BYTES_MAX = 1_048_576
"""Bytes read from one connection without a wait before the other tasks get a turn."""

HOT_S = 0.002
"""Seconds after which they do in any case. A page that the host has to give first, or take back from somebody, makes a
system call that moves many of them take ten times as long."""

PIECE_BYTES = 262_144
"""Bytes sent with one system call."""

HOT_READ_BYTES = 16_384
"""A read counts as at least so many of them: who sends in drips must not keep the others waiting for longer."""

PROBE_COUNT = 16
"""Where a read found nothing more, so many of the next ones wait before they try, unless much comes: a system call that
fails is what a message that is alone would pay twice."""

_SYSTEM_DEFAULT = 0
"""Of TCP_NOTSENT_LOWAT. With trio's 16 KiB the system takes no more than that beyond the peer's window: an answer of a
MiB costs a turn of the loop, and a wake-up of its reader, for each 200 KB."""

Take = Callable[[bytes], bool]
"""Serves a chunk if that can be done without waiting; tells whether it is served."""


class Transport(Protocol):
    """What a connection needs of its stream. The peer's doings raise trio.BrokenResourceError, nothing else."""

    async def receive(self, take: Take | None = None) -> bytes:
        """The next bytes, b"" at the end of the stream. Not always a checkpoint; one each HOT_BYTES_MAX or HOT_S.

        With `take` the next that it does not serve: it is asked first, maybe in another task, and what it raises is
        raised here."""
        ...

    async def receive_into(self, buffer: memoryview) -> int:
        """The same into the begin of `buffer`; how many bytes it is, 0 at the end of the stream."""
        ...

    @property
    def can_send_nowait(self) -> bool:
        """Whether `send_nowait` is worth a try."""
        ...

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Give bytes to the system without waiting; how many it took, 0 if none or if the stream can't do that.

        The rest has to be what `send_all` is called with next."""
        ...

    async def send_all(self, data: bytes | memoryview) -> None:
        """Send everything. Not always a checkpoint. Cancelled, it leaves an unknown prefix sent: close then."""
        ...


def transport_for(stream: trio.abc.Stream, chunk_size_max: int, poller: Poller | None = None) -> Transport:
    """The cheapest transport that the stream allows. With a poller its task serves what `receive` is to take."""
    if isinstance(stream, trio.SocketStream) and os.name == "posix":
        return SocketTransport(stream, chunk_size_max, poller)
    below = getattr(stream, "transport_stream", None)
    if isinstance(below, trio.SocketStream) and isinstance(stream, EncryptedStream) and os.name == "posix":
        stream.move_with(SocketTransport(below, chunk_size_max))
        return EncryptedTransport(stream, chunk_size_max)
    return StreamTransport(stream, chunk_size_max)


def peer_of(stream: trio.abc.Stream) -> tuple[str, int]:
    """The peer's host and port; ("gone", 0) if it is lost already.

    Any other stream says in `peer_address`, if it has that, who its peer is; otherwise ("memory", 0).
    """
    if isinstance(stream, trio.SocketStream):
        try:
            name = stream.socket.getpeername()
        except OSError:
            return ("gone", 0)
        if stream.socket.family in (socket.AF_INET, socket.AF_INET6):
            return (name[0], name[1])
    host, port = getattr(stream, "peer_address", ("memory", 0))
    return (host, port)


class SocketTransport:
    """A TCP connection, read and written with the bare system calls."""

    __slots__ = (
        "_hot_bytes",
        "_hot_since",
        "_is_taken",
        "_poller",
        "_read_size",
        "_read_size_max",
        "_socket",
        "_waits",
    )
    can_send_nowait = True

    def __init__(self, stream: trio.SocketStream, chunk_size_max: int, poller: Poller | None = None) -> None:
        self._socket = stream.socket
        self._poller = poller
        self._is_taken = True
        """Whether the last chunk was, and the next one may be: else a turn would only be in the way of the reader"""
        self._read_size_max = chunk_size_max
        self._read_size = min(READ_FIRST, chunk_size_max)
        self._hot_bytes = 0
        self._hot_since = 0.0
        self._waits = 0
        with suppress(OSError):  # a socket that is no TCP connection, or none any more
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _SYSTEM_DEFAULT)

    async def receive(self, take: Take | None = None) -> bytes:
        while True:
            if take is not None and self._poller is not None and self._is_taken:
                chunk = await self._receive_in_turns(take, self._poller)
                self._is_taken = False
                return chunk
            chunk = await self._receive()
            self._is_taken = bool(chunk) and take is not None and take(chunk)
            if not self._is_taken:
                return chunk

    async def _receive(self) -> bytes:
        if self._waits or self._hot_bytes >= HOT_BYTES_MAX:
            await self._wait()
        while True:
            try:
                chunk = self._read()
            except BlockingIOError:
                self._hot_bytes = 0
                self._waits = PROBE_COUNT
                await trio.lowlevel.wait_readable(self._socket)
            else:
                self._count(len(chunk))
                return chunk

    async def _receive_in_turns(self, take: Take, poller: Poller) -> bytes:
        """The next chunk that `take` does not serve in a turn of the poller."""
        found = b""

        def read_and_take() -> bool:
            nonlocal found
            try:
                found = self._read()
            except BlockingIOError:  # somebody else's event
                return True
            return bool(found) and take(found)

        await poller.wait(self._socket.fileno(), read_and_take)
        return found

    def _read(self) -> bytes:
        """What is there. BlockingIOError."""
        try:
            chunk = os.read(self._socket.fileno(), self._read_size)
        except BlockingIOError:
            raise
        except OSError as error:
            raise trio.BrokenResourceError(f"receive: {error.strerror}") from error
        if len(chunk) == self._read_size:
            self._read_size = self._read_size_max
        return chunk

    async def receive_into(self, buffer: memoryview) -> int:
        if self._waits or self._hot_bytes >= HOT_BYTES_MAX:
            await self._wait()
        while True:
            try:
                size = os.readv(self._socket.fileno(), (buffer,))
            except BlockingIOError:
                self._hot_bytes = 0
                self._waits = PROBE_COUNT
                await trio.lowlevel.wait_readable(self._socket)
            except OSError as error:
                raise trio.BrokenResourceError(f"receive: {error.strerror}") from error
            else:
                self._count(size)
                return size

    async def _wait(self) -> None:
        """Let the other tasks have a turn: until there are bytes if it is likely that there are none."""
        self._hot_bytes = 0
        if self._waits and self._socket.fileno() >= 0:
            self._waits -= 1
            await trio.lowlevel.wait_readable(self._socket)
        else:
            await trio.lowlevel.checkpoint()

    def _count(self, size: int) -> None:
        """Note a read of `size` bytes."""
        now = time.perf_counter()
        if not self._hot_bytes:
            self._hot_since = now
        # What was done with the last ones counts, too: a few bytes may ask for much.
        self._hot_bytes += max(size, HOT_READ_BYTES) if now - self._hot_since < HOT_S else HOT_BYTES_MAX
        if size > HOT_READ_BYTES:
            self._waits = 0

    def send_nowait(self, data: bytes | memoryview) -> int:
        try:
            return os.write(self._socket.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError(f"send: {error.strerror}") from error

    async def send_all(self, data: bytes | memoryview) -> None:
        with memoryview(data) as view:
            sent = self._send_pieces(view)
            while sent < len(view):
                await trio.lowlevel.wait_writable(self._socket)
                with view[sent:] as rest:
                    sent += self._send_pieces(rest)

    def _send_pieces(self, data: memoryview) -> int:
        """As `send_nowait`, with several calls, for HOT_S at most."""
        size = len(data)
        if size <= PIECE_BYTES:
            return self.send_nowait(data)
        sent, end_at = 0, time.perf_counter() + HOT_S
        while sent < size:
            with data[sent : sent + PIECE_BYTES] as piece:
                taken = self.send_nowait(piece)
                sent += taken
                if taken < len(piece) or time.perf_counter() >= end_at:
                    break
        return sent


class EagerWriter:
    """Sends without a task switch what the system accepts at once, and leaves the rest to the task that writes.

    The writing task calls `wait_for_work` whenever it has nothing to send, and sends what that returns before anything
    else. Meanwhile it is idle, and any other task may `try_send` in its place, or `wake` it.
    """

    __slots__ = ("_rest", "_task", "is_idle", "transport")

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.is_idle = False
        """Whether the writing task waits for work. False from the moment that it is cancelled."""
        self._task: trio.lowlevel.Task | None = None
        self._rest = memoryview(b"")

    def try_send(self, data: bytes) -> int:
        """Sends without waiting; returns how many bytes the system has accepted. Only while `is_idle`."""
        size = self.transport.send_nowait(data)
        if size < len(data):
            self._rest = memoryview(data)[size:]
            self.wake()
        return size

    def wake(self) -> None:
        """Ends `wait_for_work`."""
        if self.is_idle:
            assert self._task is not None
            self.is_idle = False
            trio.lowlevel.reschedule(self._task)

    async def wait_for_work(self) -> memoryview:
        """Waits until woken; returns what `try_send` has left, which may be nothing."""
        self.is_idle = True
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)
        rest, self._rest = self._rest, memoryview(b"")
        return rest

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self.is_idle = False
        return trio.lowlevel.Abort.SUCCEEDED


@runtime_checkable
class NowaitStream(Protocol):
    """A stream of any kind that can be given bytes without waiting."""

    def send_nowait(self, data: bytes | memoryview) -> int:
        """As `Transport.send_nowait`."""


@runtime_checkable
class EncryptedStream(Protocol):
    """A stream that encrypts what it moves over another one (ha/tls/stream.py)."""

    def move_with(self, mover: Transport) -> None:
        """Move the bytes of the stream below with `mover` from now on."""

    def send_nowait(self, data: bytes | memoryview) -> int:
        """As `Transport.send_nowait`, all or nothing."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As of any stream."""

    async def send_all(self, data: bytes | memoryview) -> None:
        """As of any stream; after a `send_nowait` that took nothing, of the same data."""


class EncryptedTransport:
    """TLS over a TCP connection that is read and written with the bare system calls."""

    __slots__ = ("_chunk_size_max", "_stream", "send_all", "send_nowait")
    can_send_nowait = True

    def __init__(self, stream: EncryptedStream, chunk_size_max: int) -> None:
        self._stream = stream
        self._chunk_size_max = chunk_size_max
        self.send_nowait = stream.send_nowait
        self.send_all = stream.send_all

    async def receive(self, take: Take | None = None) -> bytes:
        while chunk := await self._stream.receive_some(self._chunk_size_max):
            if take is None or not take(chunk):
                break
        return chunk

    async def receive_into(self, buffer: memoryview) -> int:
        chunk = await self._stream.receive_some(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)


class StreamTransport:
    """Any other stream, through its own methods."""

    __slots__ = ("_chunk_size_max", "_nowait_stream", "_stream")

    def __init__(self, stream: trio.abc.Stream, chunk_size_max: int) -> None:
        self._stream = stream
        self._chunk_size_max = chunk_size_max
        self._nowait_stream: NowaitStream | None = None
        # An encrypted stream can't without a mover, which it has over TCP alone.
        if isinstance(stream, NowaitStream) and not isinstance(stream, EncryptedStream):
            self._nowait_stream = stream

    @property
    def can_send_nowait(self) -> bool:
        return self._nowait_stream is not None

    async def receive(self, take: Take | None = None) -> bytes:
        while chunk := bytes(await self._stream.receive_some(self._chunk_size_max)):
            if take is None or not take(chunk):
                break
        return chunk

    async def receive_into(self, buffer: memoryview) -> int:
        chunk = await self._stream.receive_some(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def send_nowait(self, data: bytes | memoryview) -> int:
        return 0 if self._nowait_stream is None else self._nowait_stream.send_nowait(data)

    async def send_all(self, data: bytes | memoryview) -> None:
        await self._stream.send_all(data)
