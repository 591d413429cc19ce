"""TLS over a Trio stream, with an ssl.SSLObject between two ssl.MemoryBIO.

It differs from trio.SSLStream in these points:

- `receive_some` returns the data of all records that have arrived, not of one. RocketMQ's clients put each request into
  a record of its own, and this project's ports work on chunks. A message of 1 KiB took 28 µs of a broker's processor
  time, and would have taken 150 µs if the reader had woken up for each record (without TLS: 20 µs; docs/tls.md).
- It can send without waiting, and can use cheaper calls than a stream's methods (`move_with`).
- It sends the alert of a failed handshake, so that the other side learns the reason.
- A reader that must send (a key update) never waits for a writer.

One task may receive while another sends. A truncated connection looks like a regular end of the stream; the protocols
above TLS detect truncated messages by their lengths.
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
"""Maximum number of bytes encrypted at once. Limits the size of the copy, and the time for which other tasks wait."""


class Mover(Protocol):
    """Transfers bytes over a stream with cheaper calls than the stream's methods."""

    async def receive(self) -> bytes:
        """Returns the next bytes; b"" at the end of the stream."""
        ...

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Sends `data` without waiting, and returns how many bytes the system accepted."""
        ...

    async def send_all(self, data: bytes | memoryview) -> None:
        """Sends all of `data`."""
        ...


class TlsStream(trio.abc.Stream):
    """TLS over `transport_stream`. Call `do_handshake` first. Errors are those of Trio's streams."""

    def __init__(
        self,
        transport_stream: trio.abc.Stream,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        host: str | None = None,
        received: bytes = b"",
    ) -> None:
        """`host`: server name, for clients. `received`: bytes that were already read from `transport_stream`."""
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
        self._is_established = False
        self._is_at_end = False
        self._is_closed = False

    def move_with(self, mover: Mover) -> None:
        """Sends and receives the encrypted bytes with `mover` from now on. It must belong to `transport_stream`."""
        self._mover = mover

    async def do_handshake(self) -> None:
        """Performs the handshake, unless it is done already. Raises trio.BrokenResourceError if it fails; the cause is
        the ssl.SSLError, unless the connection was lost."""
        while not self._is_established:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError as error:
                self._error = error
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._flush()  # sends the TLS alert
                raise trio.BrokenResourceError(str(error)) from error
            else:
                self._is_established = True
        await self._flush()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Returns up to `max_bytes` (None: RECEIVE_SIZE) of received data; b"" at the end of the stream."""
        self._check_open()
        size_max = RECEIVE_SIZE if max_bytes is None else index(max_bytes)
        if size_max < 1:
            raise ValueError("max_bytes must be 1 or more")
        has_waited = False
        while True:
            chunk = self._decrypt(size_max)
            if self._outgoing.pending and not self._sending.locked():
                with suppress(
                    trio.BrokenResourceError
                ):  # bytes received before the connection was lost are still returned
                    await self._flush()
            if chunk or self._is_at_end:
                if not has_waited:
                    await trio.lowlevel.checkpoint()
                return chunk
            if self._error is not None:
                raise trio.BrokenResourceError(str(self._error)) from self._error
            await self._fill(max(RECEIVE_SIZE, min(size_max, RECEIVE_SIZE_MAX)))
            has_waited = True

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of `data`. If cancelled, an unknown part was sent: close the stream."""
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
        """Sends `data` without waiting, and returns the number of bytes sent: all or 0.

        After 0, call `send_all` with the same data next: it may already be encrypted and partly sent. Raises
        trio.BrokenResourceError if the connection is lost.
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
        """Waits as `transport_stream.wait_send_all_might_not_block` does."""
        self._check_open()
        await self.transport_stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Sends the closing alert, unless a writer is busy or the connection has failed. Closes the transport stream in
        any case."""
        try:
            if self._is_established and self._error is None and not self._sending.locked():
                with suppress(ssl.SSLError):
                    self._object.unwrap()
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._flush()
        finally:
            self._is_closed = True
            await self.transport_stream.aclose()

    # The peer

    @property
    def peer_address(self) -> tuple[str, int]:
        """Host and port of the peer; ("gone", 0) if the connection is lost."""
        if isinstance(self.transport_stream, trio.SocketStream):
            try:
                host, port = self.transport_stream.socket.getpeername()[:2]
            except (OSError, ValueError):
                return ("gone", 0)
            return (host, port)
        host, port = getattr(self.transport_stream, "peer_address", ("memory", 0))
        return (host, port)

    def getpeercert(self) -> dict[str, Any]:
        """Returns the peer's certificate as ssl.SSLSocket.getpeercert does; {} if the peer presented none, or the
        context doesn't verify it."""
        return self._object.getpeercert() or {}

    def selected_alpn_protocol(self) -> str | None:
        """Returns the protocol that was negotiated by ALPN; None if there is none."""
        return self._object.selected_alpn_protocol()

    def version(self) -> str | None:
        """Returns the TLS version, such as "TLSv1.3"; None before the handshake."""
        return self._object.version()

    # Encryption and transport

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError

    def _decrypt(self, size_max: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            while size < size_max and not self._is_at_end and self._error is None:
                chunk = self._object.read(min(size_max - size, RECORD_SIZE))
                if chunk:
                    chunks.append(chunk)
                    size += len(chunk)
                else:
                    self._is_at_end = True
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._is_at_end = True
        except ssl.SSLError as error:
            self._error = error  # raised after the bytes before it were returned
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _encrypt(self, part: memoryview) -> None:
        try:
            sent = self._object.write(part)
        except ssl.SSLError as error:
            raise trio.BrokenResourceError(str(error)) from error
        assert sent == len(part), "a MemoryBIO accepts everything"

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
        """Sends encrypted bytes, including those that another task adds in the meantime."""
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
