"""An encrypted stream over another one: Python's ssl on memory, moved by Trio.

Used instead of trio.SSLStream, with which it shares the way (ssl.SSLObject between two ssl.MemoryBIO), for these:

- `receive_some` returns all the records that have come, not one. RocketMQ's clients put each request into a record of
  its own, and everything behind a port here works on chunks. With a wake-up for each record, a message of 1 KiB cost a
  broker 150 us of processor time where a plain connection takes 20; so it is 28 (docs/tls.md).
- It can send without waiting and move its bytes with what is cheaper than a stream's own methods (`move_with`).
- When a handshake fails the alert is sent, so that the other side learns why.
- A reader that has to answer (a key update) never waits for a writer that is sending.

One task may receive while another sends. A cut connection is an end of the stream like a proper one: what is carried
here has lengths of its own, so a message that was cut is noticed.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from operator import index
from typing import Any, Protocol

import trio

RECEIVE_SIZE = 65_536
RECEIVE_SIZE_MAX = 262_144
RECORD_SIZE = 16_384
SEND_SIZE = 262_144
"""So much is encrypted at once: a bound of the copy, and of the time in which no other task runs."""


class Mover(Protocol):
    """Moves bytes over a stream more cheaply than its own methods do."""

    async def receive(self) -> bytes:
        """The next bytes; b"" at the end."""
        ...

    def send_nowait(self, data: bytes | memoryview) -> int:
        """How many bytes the system took without waiting."""
        ...

    async def send_all(self, data: bytes | memoryview) -> None:
        """Send everything."""
        ...


class TlsStream(trio.abc.Stream):
    """TLS over `transport_stream`. `do_handshake` comes first. Errors are those of any trio stream."""

    def __init__(
        self,
        transport_stream: trio.abc.Stream,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        host: str | None = None,
        received: bytes = b"",
    ) -> None:
        """`host`: the server that a client wants. `received`: what was read from `transport_stream` already."""
        self.transport_stream = transport_stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        if received:
            self._incoming.write(received)
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=host)
        self._mover: Mover | None = None
        self._unsent: bytes | memoryview = b""
        self._taken_early = 0
        self._sending = trio.Lock()
        self._error: ssl.SSLError | None = None
        self._is_shaken = False
        self._is_over = False
        self._is_closed = False

    def move_with(self, mover: Mover) -> None:
        """Move bytes with `mover`, made for `transport_stream`, from now on."""
        self._mover = mover

    async def do_handshake(self) -> None:
        """Do it, unless it is done. trio.BrokenResourceError, with the ssl.SSLError that says why as its cause."""
        while not self._is_shaken:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError as error:
                self._error = error
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._flush()  # the alert
                raise trio.BrokenResourceError(str(error)) from error
            else:
                self._is_shaken = True
        await self._flush()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what has come, at most `max_bytes`; b"" at the end."""
        self._check_open()
        size_max = RECEIVE_SIZE if max_bytes is None else index(max_bytes)
        if size_max < 1:
            raise ValueError("max_bytes must be 1 or more")
        has_waited = False
        while True:
            chunk = self._decrypt(size_max)
            if self._outgoing.pending and not self._sending.locked():
                with suppress(trio.BrokenResourceError):  # what came before the other side went away is still ours
                    await self._flush()
            if chunk or self._is_over:
                if not has_waited:
                    await trio.lowlevel.checkpoint()
                return chunk
            if self._error is not None:
                raise trio.BrokenResourceError(str(self._error)) from self._error
            await self._fill(max(RECEIVE_SIZE, min(size_max, RECEIVE_SIZE_MAX)))
            has_waited = True

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything. Cancelled, it leaves an unknown part sent: close then."""
        self._check_open()
        if not data:
            await trio.lowlevel.checkpoint()
            return
        with memoryview(data) as view:
            early, self._taken_early = self._taken_early, 0
            if early:
                await self._flush()
            for start in range(early, len(view), SEND_SIZE):
                with view[start : start + SEND_SIZE] as part:
                    self._encrypt(part)
                await self._flush()

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Send without waiting, if a mover can do that, and return how much: all, or 0.

        0 means nothing for the caller but that `send_all` has to be called with the same data next; it may be encrypted
        already, and partly on its way.
        """
        if self._mover is None or len(data) > SEND_SIZE or self._sending.locked() or self._taken_early:
            return 0
        with memoryview(data) as view:
            self._encrypt(view)
        ciphertext = self._outgoing.read()
        sent = self._mover.send_nowait(ciphertext)
        if sent == len(ciphertext):
            return len(data)
        self._unsent = memoryview(ciphertext)[sent:]
        self._taken_early = len(data)
        return 0

    async def wait_send_all_might_not_block(self) -> None:
        """As of the stream below."""
        self._check_open()
        await self.transport_stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Say goodbye if that needs no waiting for the other side's, and close the stream below in any case."""
        try:
            if self._is_shaken and self._error is None and not self._sending.locked():
                with suppress(ssl.SSLError):
                    self._object.unwrap()
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._flush()
        finally:
            self._is_closed = True
            await self.transport_stream.aclose()

    # About the other side

    @property
    def peer_address(self) -> tuple[str, int]:
        """Host and port of the other side; ("gone", 0) if it is lost already."""
        if isinstance(self.transport_stream, trio.SocketStream):
            try:
                host, port = self.transport_stream.socket.getpeername()[:2]
            except (OSError, ValueError):
                return ("gone", 0)
            return (host, port)
        host, port = getattr(self.transport_stream, "peer_address", ("memory", 0))
        return (host, port)

    def getpeercert(self) -> dict[str, Any]:
        """Return the other side's certificate as ssl.SSLSocket does; {} if it has shown none."""
        return self._object.getpeercert() or {}

    def selected_alpn_protocol(self) -> str | None:
        """Return what was agreed on to be spoken over this; None: nothing was."""
        return self._object.selected_alpn_protocol()

    def version(self) -> str | None:
        """Return "TLSv1.3", for example."""
        return self._object.version()

    # Between the two memories

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError

    def _decrypt(self, size_max: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            while size < size_max and not self._is_over and self._error is None:
                chunk = self._object.read(min(size_max - size, RECORD_SIZE))
                if chunk:
                    chunks.append(chunk)
                    size += len(chunk)
                else:
                    self._is_over = True
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._is_over = True
        except ssl.SSLError as error:
            self._error = error  # raised once what came before it is taken
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _encrypt(self, part: memoryview) -> None:
        try:
            sent = self._object.write(part)
        except ssl.SSLError as error:
            raise trio.BrokenResourceError(str(error)) from error
        assert sent == len(part), "memory takes everything"

    async def _fill(self, size: int = RECEIVE_SIZE) -> None:
        if self._mover is not None:
            received: bytes | bytearray = await self._mover.receive()
        else:
            received = await self.transport_stream.receive_some(size)
        if received:
            self._incoming.write(received)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        """Send what is encrypted, also what the other half adds meanwhile."""
        if not self._outgoing.pending and not self._unsent:
            return
        try:
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            send_all = self.transport_stream.send_all if self._mover is None else self._mover.send_all
            while self._outgoing.pending or self._unsent:
                ciphertext, self._unsent = self._unsent or self._outgoing.read(), b""
                await send_all(ciphertext)
        finally:
            self._sending.release()
