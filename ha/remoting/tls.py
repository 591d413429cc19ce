"""What a remoting port does with TLS: a client's first byte tells, as for RocketMQ (HandshakeHandler).

    first byte         disabled   permissive   enforcing
    0x16, ClientHello  closed     TLS          TLS
    any other          plain      plain        closed

The byte is looked at in the first chunk that was read anyway, so a plain connection pays nothing for the question; the
chunk of a TLS client goes to the handshake. Knows no files and no certificates: `secure` does the handshake.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import trio

Secure = Callable[[trio.abc.Stream, bytes], Awaitable[trio.abc.Stream]]
"""Takes a stream and what was already read of it, and returns the encrypted one; HandshakeFailed, the stream closed."""

TLS_HANDSHAKE = 0x16


class PortTls(msgspec.Struct, frozen=True, kw_only=True):
    """The TLS of one port."""

    secure: Secure
    is_required: bool = False
    """Plain clients are closed (enforcing); otherwise both are served (permissive)."""
