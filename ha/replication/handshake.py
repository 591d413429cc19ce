"""Authenticates master and slave to each other over a stream, within a timeout, with the messages and proofs of
ha/protocol/ha_handshake.py.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import trio

from ha.protocol.ha_handshake import (
    ANSWER_SIZE,
    HEADER_SIZE,
    HELLO,
    NONCE_SIZE,
    PROOF_SIZE,
    HandshakeKey,
    encode_handshake_frame,
    is_handshake_header,
)
from ha.replication.progress import CloseReason


class HandshakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Secret and settings, for both sides. `random_bytes` makes nonces, which must never repeat."""

    key: HandshakeKey
    random_bytes: Callable[[int], bytes]
    timeout_s: float = 10.0
    """Maximum time for the whole handshake, in seconds. Longer than the 5 s after which a RocketMQ 4.9 slave sends its
    first report: the master can then log that the slave has no secret, and not just a timeout."""


async def authenticate_slave(stream: trio.abc.Stream, options: HandshakeOptions) -> tuple[CloseReason, str] | None:
    """Authenticates a slave, on the master. Returns None if that succeeded, else the reason to close and its details.

    Nothing is sent to a peer that does not start the handshake. A timeout gives NOT_AUTHENTICATED. If the connection
    fails, raises the stream's error (OSError or trio.BrokenResourceError).
    """
    with trio.move_on_after(options.timeout_s):
        hello = await _receive(stream, len(HELLO))
        if not hello:
            return CloseReason.SLAVE_CLOSED, ""
        if hello != HELLO:
            detail = "haSharedSecret is set here, and the slave starts without it: it is RocketMQ's, or has none set"
            return CloseReason.NOT_AUTHENTICATED, detail
        nonce = options.random_bytes(NONCE_SIZE)
        await stream.send_all(encode_handshake_frame(nonce))
        answer = await _receive(stream, ANSWER_SIZE)
        if not answer:
            detail = "the slave closed the connection at the challenge: it has no haSharedSecret, and here it is set"
            return CloseReason.NOT_AUTHENTICATED, detail
        slave_nonce, proof = answer[:NONCE_SIZE], answer[NONCE_SIZE:]
        if not options.key.is_slave_proof(proof, nonce, slave_nonce):
            return CloseReason.NOT_AUTHENTICATED, "the slave's haSharedSecret is another one"
        await stream.send_all(encode_handshake_frame(options.key.master_proof(nonce, slave_nonce)))
        return None
    return CloseReason.NOT_AUTHENTICATED, f"haSharedSecret was not proved within {options.timeout_s:g} s"


async def authenticate_to_master(stream: trio.abc.Stream, options: HandshakeOptions) -> str:
    """Authenticates both sides, on the slave. Returns an empty string if that succeeded, else the reason as a text for
    people, also after a timeout.

    If the connection fails, raises the stream's error (OSError or trio.BrokenResourceError). Raises RemoteProtocolError
    if the master's messages are not those of the handshake.
    """
    with trio.move_on_after(options.timeout_s):
        await stream.send_all(HELLO)
        header = await _receive(stream, HEADER_SIZE)
        if not header:
            return "the master closed the connection at the handshake; a halog master logs why (ha.slave_disconnected)"
        if not is_handshake_header(header):
            return "haSharedSecret is set here, and the master has none"
        nonce = await _receive(stream, NONCE_SIZE)
        own_nonce = options.random_bytes(NONCE_SIZE)
        if nonce:
            await stream.send_all(own_nonce + options.key.slave_proof(nonce, own_nonce))
            header = await _receive(stream, HEADER_SIZE)
        if not nonce or not header:
            return "the master does not accept this slave's haSharedSecret: its own is another one"
        proof = await _receive(stream, PROOF_SIZE) if is_handshake_header(header) else b""
        if not options.key.is_master_proof(proof, nonce, own_nonce):
            return "the server that answers as master does not know haSharedSecret"
        return ""
    return (
        f"haSharedSecret is set here, and the master did not prove it within {options.timeout_s:g} s: "
        "RocketMQ's masters can't"
    )


async def _receive(stream: trio.abc.Stream, size: int) -> bytes:
    """Returns exactly `size` bytes, and reads no more; b"" if the stream ends first."""
    received = b""
    while len(received) < size:
        chunk = await stream.receive_some(size - len(received))
        if not chunk:
            return b""
        received += chunk
    return received
