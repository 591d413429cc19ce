"""How halog nodes prove to each other on the HA port that they know the same secret, before anything else is said.

    slave                                                    master
    -1                                     8  ──▶
                                              ◀──  12 + 32   (-2, 32) challenge: the master's nonce
    the slave's nonce, the slave's proof  64  ──▶
                                              ◀──  12 + 32   (-2, 32) the master's proof

    slave's proof  = HMAC-SHA256(secret, "halog ha 1 slave\\0"  + master's nonce + slave's nonce)
    master's proof = HMAC-SHA256(secret, "halog ha 1 master\\0" + slave's nonce + master's nonce)

Then the HA protocol begins as if nothing had been said. (p, n) is the header of a transfer frame; a physical offset of
-2 is none that any master sends. The first message is the range question, which a RocketMQ master ignores, which a
halog master without a secret answers with its range, and which no RocketMQ slave sends: so each side knows from the
first answer, or its absence, with whom it has to do. Both nonces are in both proofs, so neither can be replayed; the
words differ, so neither can be sent back to who made it. Who does not know the secret gets 32 random bytes at most.

What it does not do: it encrypts nothing and protects nothing that is said later. Whoever can change packets between the
two needs TLS to be kept out; both can be used together.
"""

from __future__ import annotations

import hmac
from struct import Struct

from ha.errors import RemoteProtocolError

HELLO = b"\xff" * 8
"""The range question (ha/replication/range_question.py)."""
NONCE_SIZE = 32
PROOF_SIZE = 32
ANSWER_SIZE = NONCE_SIZE + PROOF_SIZE

_MARK = -2
_HEADER = Struct(">qi")
HEADER_SIZE = _HEADER.size
CHALLENGE_BEGIN = _MARK.to_bytes(8, "big", signed=True)
"""With these bytes a master that has a secret answers the range question."""


class HandshakeKey:
    """The secret that a master and its slaves share."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def __repr__(self) -> str:
        return "<HandshakeKey>"

    def slave_proof(self, master_nonce: bytes, slave_nonce: bytes) -> bytes:
        """Return what shows a master that this slave knows the secret."""
        return hmac.digest(self._secret, b"halog ha 1 slave\0" + master_nonce + slave_nonce, "sha256")

    def master_proof(self, master_nonce: bytes, slave_nonce: bytes) -> bytes:
        """Return what shows a slave that this master knows the secret."""
        return hmac.digest(self._secret, b"halog ha 1 master\0" + slave_nonce + master_nonce, "sha256")

    def is_slave_proof(self, proof: bytes, master_nonce: bytes, slave_nonce: bytes) -> bool:
        """Tell whether `proof` is that of a slave that knows the secret; takes the same time whatever it is."""
        return hmac.compare_digest(proof, self.slave_proof(master_nonce, slave_nonce))

    def is_master_proof(self, proof: bytes, master_nonce: bytes, slave_nonce: bytes) -> bool:
        """Tell whether `proof` is that of a master that knows the secret; takes the same time whatever it is."""
        return hmac.compare_digest(proof, self.master_proof(master_nonce, slave_nonce))


def encode_handshake_frame(content: bytes) -> bytes:
    """Return a master's nonce or proof as a frame."""
    assert len(content) == NONCE_SIZE == PROOF_SIZE
    return _HEADER.pack(_MARK, len(content)) + content


def is_handshake_header(header: bytes) -> bool:
    """Tell whether 32 bytes of handshake follow `header`; False for the begin of a range answer.

    RemoteProtocolError for anything else.
    """
    offset, size = _HEADER.unpack(header)
    if offset == _MARK and size == NONCE_SIZE:
        return True
    if offset >= 0 and size == 0:
        return False
    raise RemoteProtocolError(f"a frame of {size} bytes at {offset} where a challenge was expected")
