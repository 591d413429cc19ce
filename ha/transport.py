"""Opens TCP streams, and reads and writes the bytes of one stream, as cheaply as the stream allows.

TCP streams are read and written below trio.SocketStream: the system call comes first, and a wait only if the call would
block, or did so recently. With SocketStream, each receive and each send costs a checkpoint, which is half of the
processor time of an echo (bench/README.md). An encrypted stream over TCP moves its bytes in the same way. Any other
trio.abc.Stream, such as a memory stream, is used through its own methods, behind the same interface.

os.read and os.write get the socket's file descriptor, because Trio's sockets have no call without a checkpoint. The
descriptor is looked up for each call, so after the socket is closed it is -1, and never that of another file.

With a poller (poller.py), the chunks of a TCP connection can be served in the poller's task without waking the reader.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar, runtime_checkable

import trio

from ha.poller import TIME_SLICE_S, Poller

READ_SIZE_FIRST = 65_536
"""Number of bytes requested by a read, until a read returns that many: most connections never need `chunk_size_max`."""

TIME_SLICE_BYTES = 1_048_576
"""Number of bytes read from one connection after which other tasks run in any case."""

READ_BYTES_COUNTED_MIN = 16_384
"""Number of bytes that a shorter read counts as towards TIME_SLICE_BYTES: a peer that sends in small pieces must not
delay others for longer."""

SEND_PIECE_BYTES = 262_144
"""Maximum number of bytes sent with one system call."""

WAIT_FIRST_COUNT = 16
"""Number of reads, after one that found nothing, that wait until the socket is readable before they try; fewer if one
returns more than READ_BYTES_COUNTED_MIN. Without this, a failed system call would be added to each single message."""

_NOTSENT_LOWAT_DEFAULT = 0
"""Value of TCP_NOTSENT_LOWAT that restores the kernel's default. With Trio's 16 KiB the kernel accepts no more than
that beyond the peer's window: sending 1 MiB would take a pass of the event loop, and wake up the peer, for each 200
KB."""

ServeChunk = Callable[[bytes], bool]
"""Processes a received chunk, if that is possible without waiting; returns whether it was processed."""


ReadInto = Callable[[int, memoryview], int | None]
"""Reads from a descriptor into the start of a buffer, as readv(2) does. Returns the number of bytes that it leaves to
the caller in the buffer; None if it has processed all bytes itself."""

_Left = TypeVar("_Left", bytes, int)
"""Data that a read leaves to the caller: a chunk, or the number of bytes in the buffer."""


def read_into(descriptor: int, buffer: memoryview) -> int:
    """Reads from `descriptor` into the start of `buffer` with readv(2), and returns the number of bytes."""
    return os.readv(descriptor, (buffer,))


class Transport(Protocol):
    """Reads and writes the stream of a connection. Errors of the peer or the network raise only
    trio.BrokenResourceError."""

    async def receive(self, serve: ServeChunk | None = None) -> bytes:
        """Returns the next bytes, b"" at the end of the stream. A checkpoint at least once per time slice.

        With `serve`, each chunk is first passed to `serve`, possibly in another task; returns the first chunk that
        `serve` does not process. An exception that `serve` raises is raised here.
        """
        ...

    async def receive_into(self, buffer: memoryview, read: ReadInto = read_into) -> int:
        """Receives into the start of `buffer`; returns the number of bytes, 0 at the end of the stream.

        With plain TCP, `read` is called to read the bytes, possibly in another task. It may also process them: as long
        as it returns None, this method waits for more bytes. `read` must raise OSError as readv(2) does,
        BlockingIOError if nothing has arrived.
        """
        ...

    @property
    def can_send_nowait(self) -> bool:
        """Whether `send_nowait` is supported; if not, it always returns 0."""
        ...

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Passes bytes to the kernel without waiting; returns how many it accepted.

        If that is not all, pass the rest to `send_all` before any other data.
        """
        ...

    async def send_all(self, data: bytes | memoryview) -> None:
        """Sends all of `data`. Not always a checkpoint. If cancelled, an unknown part was sent: close the stream."""
        ...


def transport_for(stream: trio.abc.Stream, chunk_size_max: int, poller: Poller | None = None) -> Transport:
    """Returns the cheapest transport that the stream allows. With `poller`, the functions that are passed to `receive`
    and `receive_into` are called in the poller's task if the stream is plain TCP."""
    if isinstance(stream, trio.SocketStream) and os.name == "posix":
        return SocketTransport(stream, chunk_size_max, poller)
    below = getattr(stream, "transport_stream", None)
    if isinstance(below, trio.SocketStream) and isinstance(stream, EncryptedStream) and os.name == "posix":
        stream.move_with(SocketTransport(below, chunk_size_max))
        return EncryptedTransport(stream, chunk_size_max)
    return StreamTransport(stream, chunk_size_max)


async def open_tcp(host: str, port: int) -> trio.abc.Stream:
    """Connects with TCP_NODELAY, which Trio sets. Raises OSError if the connection fails, or if `host`, which a broker
    may have registered, is not a valid host name."""
    try:
        return await trio.open_tcp_stream(host, port)
    except ValueError as error:  # UnicodeError: it has no IDNA encoding
        raise OSError(f"{host!r} is no host name: {error}") from None


def peer_of(stream: trio.abc.Stream) -> tuple[str, int]:
    """Returns the peer's host and port; ("gone", 0) if the connection is lost already.

    For a stream that is not TCP, returns its attribute `peer_address`, by default ("memory", 0).
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
    """A TCP connection, read and written with system calls."""

    __slots__ = (
        "_poller",
        "_read_size",
        "_read_size_max",
        "_slice_began",
        "_slice_bytes",
        "_socket",
        "_waits_left",
        "_was_served",
    )
    can_send_nowait = True

    def __init__(self, stream: trio.SocketStream, chunk_size_max: int, poller: Poller | None = None) -> None:
        self._socket = stream.socket
        self._poller = poller
        self._was_served = True
        """Whether the data of the last read was processed at once, so that the reader's task had nothing to do."""
        self._read_size_max = chunk_size_max
        self._read_size = min(READ_SIZE_FIRST, chunk_size_max)
        self._slice_bytes = 0
        self._slice_began = 0.0
        self._waits_left = 0
        with suppress(OSError):  # not a TCP connection, or closed already
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT_DEFAULT)

    async def receive(self, serve: ServeChunk | None = None) -> bytes:
        def take() -> tuple[int, bytes | None]:
            chunk = self._read()
            return len(chunk), None if chunk and serve is not None and serve(chunk) else chunk

        return await self._receive(take)

    async def receive_into(self, buffer: memoryview, read: ReadInto = read_into) -> int:
        def take() -> tuple[int, int | None]:
            try:
                size = read(self._socket.fileno(), buffer)
            except BlockingIOError:
                raise
            except OSError as error:
                raise trio.BrokenResourceError(f"receive: {error.strerror}") from error
            return size or 0, size

        return await self._receive(take)

    async def _receive(self, take: Callable[[], tuple[int, _Left | None]]) -> _Left:
        """Calls `take`, which reads data and may process it, until it leaves data to the caller. `take` returns the
        number of bytes read (0 if unknown), and the data that it leaves, or None; it raises BlockingIOError if nothing
        has arrived.

        The poller's task calls `take`, unless the last read left data: then this task calls it, because the next read
        is expected to leave data, too.
        """
        while True:
            if self._poller is not None and self._was_served:
                left = await self._receive_in_turns(take, self._poller)
                self._was_served = False
                return left
            found = await self._take_when_readable(take)
            self._was_served = found is None
            if found is not None:
                return found

    async def _take_when_readable(self, take: Callable[[], tuple[int, _Left | None]]) -> _Left | None:
        if self._waits_left or self._slice_bytes >= TIME_SLICE_BYTES:
            await self._wait()
        while True:
            if not self._slice_bytes:
                self._slice_began = time.perf_counter()
            try:
                size, left = take()
            except BlockingIOError:
                self._slice_bytes = 0
                self._waits_left = WAIT_FIRST_COUNT
                await trio.lowlevel.wait_readable(self._socket)
            else:
                self._count(size)
                return left

    async def _receive_in_turns(self, take: Callable[[], tuple[int, _Left | None]], poller: Poller) -> _Left:
        """Calls `take` in the poller's task, until it leaves data to the caller. The poller limits the time for which
        it serves this socket."""
        left: _Left | None = None

        def take_all() -> bool:
            nonlocal left
            with suppress(BlockingIOError):  # a spurious event
                _, left = take()
            return left is None

        await poller.wait(self._socket.fileno(), take_all)
        assert left is not None
        return left

    def _read(self) -> bytes:
        """Returns the bytes that have arrived, up to `_read_size`; b"" at the end of the stream. Raises BlockingIOError
        if none have arrived."""
        try:
            chunk = os.read(self._socket.fileno(), self._read_size)
        except BlockingIOError:
            raise
        except OSError as error:
            raise trio.BrokenResourceError(f"receive: {error.strerror}") from error
        if len(chunk) == self._read_size:
            self._read_size = self._read_size_max
        return chunk

    async def _wait(self) -> None:
        """Lets other tasks run: until the socket is readable if `_waits_left` is above 0, else for one checkpoint."""
        self._slice_bytes = 0
        if self._waits_left and self._socket.fileno() >= 0:
            self._waits_left -= 1
            await trio.lowlevel.wait_readable(self._socket)
        else:
            await trio.lowlevel.checkpoint()

    def _count(self, size: int) -> None:
        """Counts a read of `size` bytes towards the time slice, and ends the slice after TIME_SLICE_S: a request of few
        bytes may take long."""
        is_over = time.perf_counter() - self._slice_began >= TIME_SLICE_S
        self._slice_bytes += TIME_SLICE_BYTES if is_over else max(size, READ_BYTES_COUNTED_MIN)
        if size > READ_BYTES_COUNTED_MIN:
            self._waits_left = 0

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
        """Like `send_nowait`, with several system calls, for one time slice at most."""
        size = len(data)
        if size <= SEND_PIECE_BYTES:
            return self.send_nowait(data)
        sent, end_at = 0, time.perf_counter() + TIME_SLICE_S
        while sent < size:
            with data[sent : sent + SEND_PIECE_BYTES] as piece:
                taken = self.send_nowait(piece)
                sent += taken
                if taken < len(piece) or time.perf_counter() >= end_at:
                    break
        return sent


class EagerWriter:
    """Sends the bytes that the kernel accepts at once without a task switch, and leaves the rest to the writing task.

    The writing task calls `wait_for_work` whenever it has nothing to send, and sends the bytes that it returns before
    any others. While it waits it is idle, and any other task may call `try_send` in its place, or `wake` it.
    """

    __slots__ = ("_rest", "_task", "is_idle", "is_parked", "transport")

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.is_idle = False
        """Whether the writing task waits for work. False from the moment that it is woken or cancelled."""
        self.is_parked = False
        """Whether `try_send` may be called: the writing task waits for work, or was woken but does not run yet, and has
        no bytes of an earlier `try_send` to send first. False from the moment that it is cancelled."""
        self._task: trio.lowlevel.Task | None = None
        self._rest = memoryview(b"")

    def try_send(self, data: bytes) -> int:
        """Sends the bytes that the kernel accepts without waiting, and leaves the rest of `data` to the writing task.
        Returns how many bytes were sent. Call it only while `is_parked`."""
        size = self.transport.send_nowait(data)
        self.leave_rest(data, size)
        return size

    def leave_rest(self, data: bytes, sent: int) -> None:
        """Leaves `data` without its first `sent` bytes to the writing task. Call it only while `is_parked`."""
        if sent < len(data):
            self.is_parked = False
            self._rest = memoryview(data)[sent:]
            self.wake()

    def wake(self) -> None:
        """Ends the writing task's `wait_for_work`; does nothing if it does not wait."""
        if self.is_idle:
            assert self._task is not None
            self.is_idle = False
            trio.lowlevel.reschedule(self._task)

    async def wait_for_work(self) -> memoryview:
        """Waits until woken; returns the bytes that `try_send` or `leave_rest` has left to send; empty if none."""
        self.is_idle = self.is_parked = True
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)
        self.is_parked = False
        rest, self._rest = self._rest, memoryview(b"")
        return rest

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self.is_idle = self.is_parked = False
        return trio.lowlevel.Abort.SUCCEEDED


@runtime_checkable
class NowaitStream(Protocol):
    """A stream other than TCP that can send without waiting, such as a simulated socket in tests."""

    def send_nowait(self, data: bytes | memoryview) -> int:
        """As `Transport.send_nowait`."""


@runtime_checkable
class EncryptedStream(Protocol):
    """A stream that encrypts the bytes of another one (ha/tls/stream.py)."""

    def move_with(self, mover: Transport) -> None:
        """Sends and receives the encrypted bytes with `mover` from now on."""

    def send_nowait(self, data: bytes | memoryview) -> int:
        """As `Transport.send_nowait`, all or nothing."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As trio.abc.Stream.receive_some."""

    async def send_all(self, data: bytes | memoryview) -> None:
        """As trio.abc.Stream.send_all. After a `send_nowait` that returned 0, call it with the same data."""


class EncryptedTransport:
    """TLS over a TCP connection that is read and written with system calls."""

    __slots__ = ("_chunk_size_max", "_stream", "send_all", "send_nowait")
    can_send_nowait = True

    def __init__(self, stream: EncryptedStream, chunk_size_max: int) -> None:
        self._stream = stream
        self._chunk_size_max = chunk_size_max
        self.send_nowait = stream.send_nowait
        self.send_all = stream.send_all

    async def receive(self, serve: ServeChunk | None = None) -> bytes:
        while chunk := await self._stream.receive_some(self._chunk_size_max):
            if serve is None or not serve(chunk):
                break
        return chunk

    async def receive_into(self, buffer: memoryview, read: ReadInto = read_into) -> int:
        chunk = await self._stream.receive_some(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)


class StreamTransport:
    """A stream that is neither TCP nor TLS over TCP, such as a memory stream; calls the stream's own methods."""

    __slots__ = ("_chunk_size_max", "_nowait_stream", "_stream")

    def __init__(self, stream: trio.abc.Stream, chunk_size_max: int) -> None:
        self._stream = stream
        self._chunk_size_max = chunk_size_max
        self._nowait_stream: NowaitStream | None = None
        # An encrypted stream sends without waiting only if it has a mover, so only over TCP.
        if isinstance(stream, NowaitStream) and not isinstance(stream, EncryptedStream):
            self._nowait_stream = stream

    @property
    def can_send_nowait(self) -> bool:
        return self._nowait_stream is not None

    async def receive(self, serve: ServeChunk | None = None) -> bytes:
        while chunk := bytes(await self._stream.receive_some(self._chunk_size_max)):
            if serve is None or not serve(chunk):
                break
        return chunk

    async def receive_into(self, buffer: memoryview, read: ReadInto = read_into) -> int:
        chunk = await self._stream.receive_some(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def send_nowait(self, data: bytes | memoryview) -> int:
        return 0 if self._nowait_stream is None else self._nowait_stream.send_nowait(data)

    async def send_all(self, data: bytes | memoryview) -> None:
        await self._stream.send_all(data)
