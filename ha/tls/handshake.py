"""TLS handshakes with a timeout and a limit on concurrent ones.

If a peer stays silent, sends something other than TLS, or presents an unknown certificate, the handshake ends with
HandshakeFailed and a closed stream. Other connections are not affected.
"""

from __future__ import annotations

import logging
import ssl

import msgspec
import trio

from ha.errors import HandshakeFailed
from ha.log_rate_limiter import LogRateLimiter

from .files import reason_of
from .stream import TlsStream

logger = logging.getLogger(__name__)

HANDSHAKE_RECORD = 0x16
"""First byte of a ClientHello. Remoting frames start with a length below 2^24, and slaves' reports with an offset below
2^56 or with 0xFF, so neither starts with this byte."""


HANDSHAKE_TIMEOUT_S = 10.0
HANDSHAKE_COUNT_MAX = 256


class HandshakeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of handshakes: `under_way` now, `completed` and `failed` since the start. `failed` includes `refused`, the
    handshakes that were cancelled for a newer one."""

    under_way: int
    completed: int
    failed: int
    refused: int


class Handshakes:
    """All handshakes of a process: `accept` as a server, `connect` as a client.

    At most `count_max` accepted handshakes run concurrently; one more cancels the oldest. Proper clients need only
    milliseconds, so this mostly cancels handshakes that peers keep open.
    """

    def __init__(self, *, timeout_s: float = HANDSHAKE_TIMEOUT_S, count_max: int = HANDSHAKE_COUNT_MAX) -> None:
        self._timeout_s = timeout_s
        self._count_max = count_max
        self._accepting: list[trio.CancelScope] = []
        self._under_way = 0
        self._completed = 0
        self._failed = 0
        self._refused = 0
        self._log_limiter = LogRateLimiter()

    def statistics(self) -> HandshakeStatistics:
        """Returns a snapshot of the counters."""
        return HandshakeStatistics(
            under_way=self._under_way, completed=self._completed, failed=self._failed, refused=self._refused
        )

    async def accept(self, stream: trio.abc.Stream, context: ssl.SSLContext, received: bytes = b"") -> TlsStream:
        """Performs the server's handshake, and returns the encrypted stream. Raises HandshakeFailed if it fails, times
        out, or is cancelled for a newer handshake. In these cases, and if the caller is cancelled, `stream` is closed.

        `received`: bytes that were already read from the stream.
        """
        if len(self._accepting) >= self._count_max:
            self._refused += 1
            if times := self._log_limiter.admit("full", trio.current_time()):
                logger.warning(
                    'tls.handshakes_full handshakes=%d times=%d hint="each new one cancels the oldest"',
                    self._count_max,
                    times,
                )
            self._accepting.pop(0).cancel()
        with trio.CancelScope() as scope:
            self._accepting.append(scope)
            try:
                return await self._shake(TlsStream(stream, context, server_side=True, received=received))
            finally:
                if scope in self._accepting:
                    self._accepting.remove(scope)
        raise await self._failure(stream, "cancelled for a newer handshake")

    async def connect(self, stream: trio.abc.Stream, context: ssl.SSLContext, host: str) -> TlsStream:
        """Performs the client's handshake with `host`, and returns the encrypted stream. Raises HandshakeFailed if it
        fails or times out. In these cases, and if the caller is cancelled, `stream` is closed."""
        return await self._shake(TlsStream(stream, context, host=host))

    async def _shake(self, secured: TlsStream) -> TlsStream:
        self._under_way += 1
        try:
            with trio.fail_after(self._timeout_s):
                await secured.do_handshake()
        except trio.TooSlowError:
            raise await self._failure(secured.transport_stream, f"not completed within {self._timeout_s:g} s") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            cause = error.__cause__
            if cause is None or isinstance(cause, ssl.SSLEOFError | ssl.SSLSyscallError):
                reason = "the peer closed the connection"
            else:
                reason = reason_of(cause)
            raise await self._failure(secured.transport_stream, reason) from None
        except BaseException:
            await trio.aclose_forcefully(secured.transport_stream)
            raise
        finally:
            self._under_way -= 1
        self._completed += 1
        return secured

    async def _failure(self, stream: trio.abc.Stream, reason: str) -> HandshakeFailed:
        self._failed += 1
        await trio.aclose_forcefully(stream)
        return HandshakeFailed(reason)


def common_name(stream: trio.abc.Stream) -> str | None:
    """Returns the common name in the peer's verified certificate; None if there is no certificate or no
    encryption."""
    if not isinstance(stream, TlsStream):
        return None
    names = [value for part in stream.getpeercert().get("subject", ()) for key, value in part if key == "commonName"]
    return names[-1] if names else None


class PrefixedStream(trio.abc.Stream):
    """`stream`, preceded by bytes that were already read from it."""

    def __init__(self, first: bytes, stream: trio.abc.Stream) -> None:
        self._first = first
        self.stream = stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if not self._first:
            return await self.stream.receive_some(max_bytes)
        await trio.lowlevel.checkpoint()
        size = len(self._first) if max_bytes is None else max_bytes
        first, self._first = self._first[:size], self._first[size:]
        return first

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.stream.aclose()
