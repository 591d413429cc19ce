"""How a port serves TLS: as in RocketMQ (HandshakeHandler), the client's first byte decides.

    first byte         disabled   permissive   enforcing
    0x16, ClientHello  closed     TLS          TLS
    any other          plain      plain        closed

The byte is part of the first chunk, so the check costs a plain connection nothing. The first chunk of a TLS client is
passed to the handshake, which the function `PortTls.secure` does; only this function knows the certificates.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import trio

from ha.errors import RemoteProtocolError

Secure = Callable[[trio.abc.Stream, bytes], Awaitable[trio.abc.Stream]]
"""Does the TLS handshake on a stream, given the bytes that were already read from it, and returns the encrypted stream.
If the handshake fails, it closes the stream and raises HandshakeFailed."""

TLS_HANDSHAKE = 0x16


class PortTls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS of one port."""

    secure: Secure
    is_required: bool = False
    """Whether connections of plain clients are closed (enforcing) instead of served (permissive)."""


async def secured(
    stream: trio.abc.Stream, first: bytes, tls: PortTls | None, *, without_tls: str
) -> trio.abc.Stream | None:
    """Returns the encrypted stream, after the handshake, if `first` begins one; None for a plain client, and if `first`
    is empty.

    Raises HandshakeFailed if the handshake fails. Raises RemoteProtocolError if the port doesn't serve such a client;
    its text for a port without TLS is "TLS handshake on a port", followed by `without_tls`.
    """
    if first and first[0] == TLS_HANDSHAKE:
        if tls is None:
            raise RemoteProtocolError(f"TLS handshake on a port {without_tls}")
        return await tls.secure(stream, first)
    if first and tls is not None and tls.is_required:
        raise RemoteProtocolError("no TLS, which this port requires")
    return None
