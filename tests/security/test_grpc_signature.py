"""Signatures of gRPC calls: what real clients send, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from trio.testing import MockClock

from ha.acl import Account, AclGuard, AclGuardOptions, AclPolicy, AclRefusal, Right
from ha.acl.grpc_signature import GrpcSignature, read_signature
from ha.acl.requirements import CLUSTER
from ha.errors import RemoteProtocolError
from ha.protocol.acl import SigningKey
from tests.interop.acl2_cases import ALICE, PASSWORD, entry
from tests.security.test_acl2_guard import create
from tests.security.users import open_users

# What rocketmq-python-client 5.1.2 sent as user alice with the password of acl2_cases.
PYTHON = {
    "x-mq-language": "PYTHON",
    "x-mq-date-time": "20261127T025722Z",
    "authorization": (
        "MQv2-HMAC-SHA1 Credential=alice, SignedHeaders=x-mq-date-time, "
        "Signature=239fd2c30087a8a7b1a38c73bceeb7a734c97ec0"
    ),
}
# The same client without credentials.
ANONYMOUS = {
    "x-mq-date-time": "20261127T025722Z",
    "authorization": (
        "MQv2-HMAC-SHA1 Credential=, SignedHeaders=x-mq-date-time, Signature=8d986e4dd72b26b49493f5899a86f717c9d64730"
    ),
}
PEER = ("127.0.0.1", 50_000)
SEND = "apache.rocketmq.v2.SendMessageRequest"


def test_signature_of_a_real_client() -> None:
    signature = read_signature(PYTHON)
    assert signature.access_key == ALICE
    assert signature.is_by(SigningKey(PASSWORD))
    assert not signature.is_by(SigningKey("another-secret"))
    later = read_signature({**PYTHON, "x-mq-date-time": "20261127T025723Z"})
    assert not later.is_by(SigningKey(PASSWORD))


def test_other_clients_write_it_differently() -> None:
    """Java's digits are upper case; Go adds region and service, even without credentials."""
    text = PYTHON["authorization"]
    java = text.rpartition("=")[0] + "=" + text.rpartition("=")[2].upper()
    go = text.replace("alice", "alice//Rocketmq")
    for authorization in (java, go):
        assert read_signature({**PYTHON, "authorization": authorization}) == read_signature(PYTHON)
    assert read_signature({**PYTHON, "authorization": text.replace("alice", "//Rocketmq")}).access_key == ""
    assert read_signature(ANONYMOUS).access_key == ""
    assert read_signature({}) == GrpcSignature()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x-mq-date-time": ""}, "datetime is null."),
        ({"authorization": "MQv2-HMAC-SHA1"}, "authentication header is incorrect."),
        ({"authorization": "MQv2-HMAC-SHA1 Credential"}, "name=value"),
        ({"authorization": "MQv2-HMAC-SHA1 Credential=alice, Signature=xyz"}, "hexadecimal"),
        ({"authorization": "MQv2-HMAC-SHA1 Credential=alice, Signature=" + "0" * 41}, "hexadecimal"),
        ({"authorization": "MQv2-HMAC-SHA1 Credential=" + "a" * 5000}, "4096 characters"),
        ({"x-mq-date-time": "\ud800"}, "not text"),
    ],
)
def test_malformed_metadata(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        read_signature({**PYTHON, **changes})


async def test_guard_authenticates_and_authorizes_calls(autojump_clock: MockClock, tmp_path: Path) -> None:
    def refused(guard: AclGuard, metadata: dict[str, str], call: str = SEND) -> str:
        with pytest.raises(AclRefusal) as caught:
            guard.authenticate(metadata, PEER, call)
        assert caught.value.code == 16
        assert caught.value.is_authentication
        return caught.value.remark

    async with open_users(tmp_path) as node:
        guard = node.broker.acl_guard
        assert guard is not None
        assert refused(guard, PYTHON) == "User:alice is not found."
        await create(node, entry("Topic:A", "Pub"), entry("Group:g", "Sub"))
        assert guard.authenticate(PYTHON, PEER, SEND) == ALICE
        assert refused(guard, ANONYMOUS) == "username cannot be null."
        assert refused(guard, {}) == "username cannot be null."
        assert refused(guard, {**PYTHON, "x-mq-date-time": "2026"}) == "check signature failed."
        assert refused(guard, {**PYTHON, "authorization": "x"}) == "authentication header is incorrect."

        guard.authorize(ALICE, PEER, SEND, [("A", Right.PUB), ("%RETRY%g", Right.SUB)])
        for needs in ([("A", Right.SUB)], [("A", Right.PUB), ("B", Right.PUB)], [(CLUSTER, Right.GET)]):
            with pytest.raises(AclRefusal, match="User:alice has no permission to access") as caught:
                guard.authorize(ALICE, PEER, SEND, needs)
            assert not caught.value.is_authentication
        with pytest.raises(AclRefusal, match="username cannot be null"):
            guard.authorize("", PEER, SEND, [("A", Right.PUB)])

        guard._options = AclGuardOptions(unauthenticated_codes=frozenset({SEND}))
        for unsigned in ({}, {**PYTHON, "x-mq-date-time": "2026"}, {**PYTHON, "authorization": "x"}):
            assert guard.authenticate(unsigned, PEER, SEND) == ""
        with pytest.raises(AclRefusal, match="username cannot be null"):  # it names no user whose rights count
            guard.authorize("", PEER, SEND, [("A", Right.PUB)])
        assert guard.authenticate(PYTHON, PEER, SEND) == ALICE, "who has signed keeps the rights of the user"
        guard._options = AclGuardOptions(unauthorized_codes=frozenset({SEND}))
        guard.authorize(ALICE, PEER, SEND, [("B", Right.PUB)])
        guard.authorize("", PEER, SEND, [("B", Right.PUB)])  # as if it were in both lists
        guard._options = AclGuardOptions(requires_tls=True)
        assert "aclRequireTls" in refused(guard, PYTHON)
        assert guard.authenticate(PYTHON, PEER, SEND, is_encrypted=True) == ALICE


async def test_accounts_of_the_file_sign_calls_too(autojump_clock: MockClock) -> None:
    guard = AclGuard(AclPolicy([Account(ALICE, PASSWORD, topics={"writable": Right.PUB, "readable": Right.SUB})]))
    assert guard.authenticate(PYTHON, PEER, SEND) == ALICE
    guard.authorize(ALICE, PEER, SEND, [("writable", Right.PUB)])
    with pytest.raises(AclRefusal) as caught:
        guard.authorize(ALICE, PEER, SEND, [("readable", Right.PUB)])
    assert caught.value.code == 1
    assert caught.value.text == "No default permission for topic:readable"
    guard._options = AclGuardOptions(unauthorized_codes=frozenset({SEND}))
    with pytest.raises(AclRefusal, match="No default permission"):  # authorizationWhitelist is about users
        guard.authorize(ALICE, PEER, SEND, [("readable", Right.PUB)])
    guard._options = AclGuardOptions(unauthenticated_codes=frozenset({SEND}), unauthorized_codes=frozenset({SEND}))
    assert guard.authenticate(PYTHON, PEER, SEND) == ALICE
    guard.authorize(ALICE, PEER, SEND, [("readable", Right.PUB)])  # as everybody may do it without a signature
    with pytest.raises(AclRefusal, match="No acl config for alice"):
        AclGuard(AclPolicy()).authenticate(PYTHON, PEER, SEND)
