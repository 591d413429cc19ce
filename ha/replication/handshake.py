"""The handshake of ha/protocol/ha_handshake.py over a stream: the master's side, the slave's side, their deadlines."""

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
    """What both sides need. `random_bytes` makes nonces; they must never come again."""

    key: HandshakeKey
    random_bytes: Callable[[int], bytes]
    timeout_s: float = 10.0
    """For the whole handshake. More than 5 s: a RocketMQ 4.9 slave is silent for so long, then its report tells."""


async def admit_slave(stream: trio.abc.Stream, options: HandshakeOptions) -> tuple[CloseReason, str] | None:
    """As a master, let the slave prove itself; None if it did, else why the connection must end, and in words.

    Nothing is sent to a peer that does not begin the handshake. Raises what the stream raises.
    """
    with trio.move_on_after(options.timeout_s):
        hello = await _receive(stream, len(HELLO))
        if not hello:
            return CloseReason.SLAVE_CLOSED, ""
        if hello != HELLO:
            detail = "haSharedSecret is set here, and the slave begins without it: it is RocketMQ's, or has none set"
            return CloseReason.NOT_AUTHENTICATED, detail
        nonce = options.random_bytes(NONCE_SIZE)
        await stream.send_all(encode_handshake_frame(nonce))
        answer = await _receive(stream, ANSWER_SIZE)
        if not answer:
            detail = "the slave hung up at the challenge: it has no haSharedSecret, and here it is set"
            return CloseReason.NOT_AUTHENTICATED, detail
        slave_nonce, proof = answer[:NONCE_SIZE], answer[NONCE_SIZE:]
        if not options.key.is_slave_proof(proof, nonce, slave_nonce):
            return CloseReason.NOT_AUTHENTICATED, "the slave's haSharedSecret is another one"
        await stream.send_all(encode_handshake_frame(options.key.master_proof(nonce, slave_nonce)))
        return None
    return CloseReason.NOT_AUTHENTICATED, f"haSharedSecret is not proved after {options.timeout_s:g} s"


async def recognise_master(stream: trio.abc.Stream, options: HandshakeOptions) -> str:
    """As a slave, prove oneself and let the master do it; "" if both did, else why not, in words.

    Raises what the stream raises, and RemoteProtocolError.
    """
    with trio.move_on_after(options.timeout_s):
        await stream.send_all(HELLO)
        header = await _receive(stream, HEADER_SIZE)
        if not header:
            return "the master hung up at the handshake; if it is halog, its log says why (ha.slave_disconnected)"
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
            return "what answers as the master does not know haSharedSecret"
        return ""
    return (
        f"haSharedSecret is set here, and the master has not proved it after {options.timeout_s:g} s: "
        "RocketMQ's masters can't"
    )


async def _receive(stream: trio.abc.Stream, size: int) -> bytes:
    """Exactly `size` bytes, and none beyond them; b"" if the stream ends first."""
    received = b""
    while len(received) < size:
        chunk = await stream.receive_some(size - len(received))
        if not chunk:
            return b""
        received += chunk
    return received
