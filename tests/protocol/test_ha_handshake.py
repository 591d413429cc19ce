"""The bytes of the handshake, which nodes of different versions have to agree on.

The proofs were computed by OpenSSL from the formula at the top of ha/protocol/ha_handshake.py:
`openssl dgst -sha256 -mac HMAC -macopt hexkey:…` of the words and the two nonces.
"""

from ha.protocol.ha_handshake import CHALLENGE_BEGIN, HELLO, HandshakeKey, encode_handshake_frame, is_handshake_header
from ha.replication.range_question import RANGE_QUESTION

KEY = HandshakeKey("a secret of one cluster")
MASTERS, SLAVES = bytes(range(32)), bytes(range(100, 132))
SLAVE_PROOF = bytes.fromhex("060d4288b1171d21c9ca38df2bcc99997091b3a0ab9b0a68d1afdb723fa3e75d")
MASTER_PROOF = bytes.fromhex("0b8dc40c9932f8abca0b706c270cdac80360596c3c8c712a49a74f3cb95c4e27")


def test_the_proofs_are_those_of_the_formula() -> None:
    assert KEY.slave_proof(MASTERS, SLAVES) == SLAVE_PROOF
    assert KEY.master_proof(MASTERS, SLAVES) == MASTER_PROOF
    assert KEY.is_slave_proof(SLAVE_PROOF, MASTERS, SLAVES)
    assert KEY.is_master_proof(MASTER_PROOF, MASTERS, SLAVES)


def test_a_proof_is_for_both_nonces_one_direction_and_one_secret() -> None:
    """Also for the prover's own nonce: without it a nonce of the other side's choice would fix the proof."""
    others = bytes(32)
    for masters, slaves in ((others, SLAVES), (MASTERS, others), (SLAVES, MASTERS)):
        assert not KEY.is_slave_proof(SLAVE_PROOF, masters, slaves)
        assert not KEY.is_master_proof(MASTER_PROOF, masters, slaves)
    assert not KEY.is_slave_proof(MASTER_PROOF, MASTERS, SLAVES)
    assert not KEY.is_master_proof(SLAVE_PROOF, MASTERS, SLAVES)
    assert not HandshakeKey("a secret of another one").is_slave_proof(SLAVE_PROOF, MASTERS, SLAVES)


def test_handshake_framing() -> None:
    assert HELLO == RANGE_QUESTION == b"\xff" * 8
    frame = encode_handshake_frame(MASTERS)
    assert frame == bytes.fromhex("fffffffffffffffe00000020") + MASTERS
    assert frame.startswith(CHALLENGE_BEGIN)
    assert is_handshake_header(frame[:12])
