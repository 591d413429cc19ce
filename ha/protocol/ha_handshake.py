"""The handshake in which halog nodes prove on the HA port that they know the same secret, before any other message.

    slave                                                    master
    -1                                     8  ──▶
                                              ◀──  12 + 32   (-2, 32) challenge: the master's nonce
    the slave's nonce, the slave's proof  64  ──▶
                                              ◀──  12 + 32   (-2, 32) the master's proof

    slave's proof  = HMAC-SHA256(secret, "halog ha 1 slave\\0"  + master's nonce + slave's nonce)
    master's proof = HMAC-SHA256(secret, "halog ha 1 master\\0" + slave's nonce + master's nonce)

The HA protocol then starts as usual. 8, 64 and 12 + 32 are sizes in bytes. (p, n) is the header of a transfer frame
with physical offset p and body size n; no master sends a physical offset of -2.
The first message is the range question: a RocketMQ master ignores it, a halog master without a secret answers with its
range, and no RocketMQ slave sends it. By the first message, the master therefore recognizes a RocketMQ slave; by the
answer, or its absence, the slave recognizes a master that is RocketMQ's or has no secret. Each proof covers both
nonces, so it can't be replayed, and the label of its side, so it can't be reflected. A slave that does not know the
secret receives only 32 random bytes. A master that does not know it receives a nonce and a proof, with which it can
test guesses offline, so the secret must not be guessable.

The handshake encrypts nothing and does not protect later messages. Against an attacker who can modify packets, use TLS;
the two can be combined.
"""

from __future__ import annotations

import hmac
from struct import Struct

from ha.errors import RemoteProtocolError

HELLO = b"\xff" * 8
"""The first message of a handshake, which equals the range question (ha/replication/range_question.py)."""
NONCE_SIZE = 32
PROOF_SIZE = 32
ANSWER_SIZE = NONCE_SIZE + PROOF_SIZE

_MARK = -2
_HEADER = Struct(">qi")
HEADER_SIZE = _HEADER.size
CHALLENGE_BEGIN = _MARK.to_bytes(8, "big", signed=True)
"""First bytes of the answer to the range question from a master that has a secret"""


class HandshakeKey:
    """The secret shared by a master and its slaves."""

    __slots__ = ("_secret",)

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def __repr__(self) -> str:
        return "<HandshakeKey>"

    def slave_proof(self, master_nonce: bytes, slave_nonce: bytes) -> bytes:
        """Returns the proof to a master that this slave knows the secret."""
        return hmac.digest(self._secret, b"halog ha 1 slave\0" + master_nonce + slave_nonce, "sha256")

    def master_proof(self, master_nonce: bytes, slave_nonce: bytes) -> bytes:
        """Returns the proof to a slave that this master knows the secret."""
        return hmac.digest(self._secret, b"halog ha 1 master\0" + slave_nonce + master_nonce, "sha256")

    def is_slave_proof(self, proof: bytes, master_nonce: bytes, slave_nonce: bytes) -> bool:
        """Returns whether `proof` is from a slave that knows the secret; compares in constant time."""
        return hmac.compare_digest(proof, self.slave_proof(master_nonce, slave_nonce))

    def is_master_proof(self, proof: bytes, master_nonce: bytes, slave_nonce: bytes) -> bool:
        """Returns whether `proof` is from a master that knows the secret; compares in constant time."""
        return hmac.compare_digest(proof, self.master_proof(master_nonce, slave_nonce))


def encode_handshake_frame(content: bytes) -> bytes:
    """Returns a master's nonce or proof as a frame."""
    assert len(content) == NONCE_SIZE == PROOF_SIZE
    return _HEADER.pack(_MARK, len(content)) + content


def is_handshake_header(header: bytes) -> bool:
    """Returns whether 32 bytes of handshake follow `header` (HEADER_SIZE bytes); False if `header` starts an answer
    with a range.

    Raises RemoteProtocolError for anything else.
    """
    offset, size = _HEADER.unpack(header)
    if offset == _MARK and size == NONCE_SIZE:
        return True
    if offset >= 0 and size == 0:
        return False
    raise RemoteProtocolError(f"frame of {size} bytes at {offset} instead of a challenge")
