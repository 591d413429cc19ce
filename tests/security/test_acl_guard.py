"""Permissions of every request at a broker with aclEnable, and bypasses that 4.9.7 leaves open."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ha.acl import BROKER_RULES, Right
from ha.acl.requirements import Needs
from ha.broker.options import BrokerOptions
from ha.broker.send import SEND_CODES
from ha.errors import RemoteProtocolError
from ha.protocol.acl import AclCredentials
from ha.protocol.batch import encode_batch
from ha.protocol.bodies import LIST_SIZE_MAX
from ha.protocol.remoting import RemotingCommand
from tests.broker.node import PULL, SEND_V1, SEND_V2, open_node
from tests.security.brokers import ACCOUNTS, SECRET, Client, admin, alice, guarded_broker, policy

EXCEPTION = "org.apache.rocketmq.acl.common.AclException: "
OFFSET = {"consumerGroup": "g", "topic": "TT", "queueId": 0, "commitOffset": 0}


def heartbeat(group: str, topic: str) -> bytes:
    """The body of 34."""
    return json.dumps(
        {"clientID": "c", "consumerDataSet": [{"groupName": group, "subscriptionDataSet": [{"topic": topic}]}]}
    ).encode()


async def refusal(client: Client, code: int, body: bytes = b"", **ext: Any) -> str:
    """The distinctive part of a refusal; "" if the request is allowed."""
    answer = await client.ask(code, body, **ext)
    if not (answer.remark or "").startswith(EXCEPTION):
        return ""
    assert answer.code == 1
    assert answer.remark is not None
    return answer.remark.removeprefix(EXCEPTION)


@pytest.mark.parametrize(
    ("code", "size_max"),
    [
        (34, BrokerOptions().heartbeat_size_max),
        (41, LIST_SIZE_MAX),
        (42, LIST_SIZE_MAX),
        (200, LIST_SIZE_MAX),
        (225, LIST_SIZE_MAX),
    ],
)
def test_bodies_that_their_handlers_refuse_are_not_decoded(code: int, size_max: int) -> None:
    """Any account can send them, and 16 MiB take seconds to decode."""
    for size, reason in ((size_max, "JSON"), (size_max + 1, f"{size_max + 1} bytes; at most {size_max}")):
        with pytest.raises(RemoteProtocolError, match=reason):
            list(BROKER_RULES[code].needs(RemotingCommand(code, body=b" " * size)))


async def test_authentication(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:
        assert await refusal(Client(node, None), 310, b"x", **SEND_V2) == "No accessKey is configured"
        assert await refusal(Client(node, None), 310, b"x", AccessKey="", **SEND_V2) == "No accessKey is configured"
        nobody = Client(node, AclCredentials("nobody-key", SECRET))
        assert await refusal(nobody, 310, b"x", **SEND_V2) == "No acl config for nobody-key"
        wrong = Client(node, AclCredentials("alice-key", "the-secret-of-bob"))
        assert await refusal(wrong, 310, b"x", **SEND_V2) == "Check signature failed for accessKey=alice-key"
        assert (await alice(node).ask(310, b"x", **SEND_V2)).code == 0
        queue = node.store.queues.get("TT", 0)
        assert queue is not None
        assert queue.max_offset == 1
        changed = await alice(node).ask(310, b"x", changed={"b": "writable"}, **SEND_V2)
        assert changed.remark == EXCEPTION + "Check signature failed for accessKey=alice-key"
        unsigned = await alice(node).ask(310, b"x", changed={"Signature": ""}, **SEND_V2)
        assert unsigned.remark == EXCEPTION + "Check signature failed for accessKey=alice-key"
        # A refused request has no effect: not even the topic is created.
        assert node.broker.topics.get("writable") is None


ENDS = (29, 30, 31, 32)
"""Requests for the bounds of queues."""
POPS = (200050, 200051, 200052, 200053, 200054, 200055)
"""Requests of POP consumers."""


def acks(topic: str, group: str) -> bytes:
    """The body of 200151."""
    return json.dumps({"acks": [{"t": topic, "c": group, "so": 0, "q": 0, "rq": 0, "pt": 0}]}).encode()


def asks_for_queues(topic: str, group: str) -> bytes:
    """The body of 400."""
    return json.dumps({"topic": topic, "consumerGroup": group, "clientId": "c"}).encode()


REQUESTS: list[tuple[int, bytes, dict[str, Any], str]] = [
    (310, b"x", {**SEND_V2, "b": "writable"}, ""),
    (310, b"x", {**SEND_V2, "b": "readable"}, "No default permission for topic:readable"),
    (310, b"x", {**SEND_V2, "b": "other"}, "No default permission for topic:other"),
    (310, b"x", {**SEND_V2, "b": "RMQ_SYS_TRACE_TOPIC"}, ""),
    (310, b"x", {**SEND_V2, "b": "%RETRY%g"}, ""),
    (310, b"x", {**SEND_V2, "b": "%RETRY%h"}, "No default permission for group:h"),
    (310, b"x", {**SEND_V2, "a": "g", "b": "%RETRY%h"}, "No default permission for group:h"),
    (310, b"x", {**SEND_V2, "b": "%DLQ%g"}, "No default permission for topic:%DLQ%g"),
    (10, b"x", {**SEND_V1, "topic": "writable"}, ""),
    (10, b"x", {**SEND_V1, "topic": "other"}, "No default permission for topic:other"),
    (10, b"x", {**SEND_V1, "topic": "%RETRY%h"}, "No default permission for group:h"),
    # The parser goes by the field names, not by the code: so must the check.
    (10, b"x", {**SEND_V1, **SEND_V2, "topic": "writable", "b": "other"}, "No default permission for topic:other"),
    (310, b"x", {**SEND_V1, "topic": "other", "b": "writable"}, "No default permission for topic:other"),
    (320, b"x", {**SEND_V2, "b": "other", "m": True}, "No default permission for topic:other"),
    (320, encode_batch([(0, b"x", b"")]), {**SEND_V2, "b": "writable", "m": True}, ""),
    (11, b"", {**PULL, "topic": "readable"}, ""),
    (11, b"", {**PULL, "topic": "writable"}, "No default permission for topic:writable"),
    (11, b"", {**PULL, "consumerGroup": "h"}, "No default permission for group:h"),
    (11, b"", {**PULL, "topic": "%RETRY%g"}, ""),
    (11, b"", {**PULL, "topic": "%RETRY%h"}, "No default permission for group:h"),
    (11, b"", {**PULL, "topic": "%DLQ%g"}, ""),
    (11, b"", {**PULL, "topic": None}, "No default permission for topic:"),
    (361, b"", {**PULL, "topic": "writable"}, "No default permission for topic:writable"),
    (15, b"", OFFSET, ""),
    (15, b"", {**OFFSET, "consumerGroup": "h"}, "No default permission for group:h"),
    (15, b"", {**OFFSET, "topic": "other"}, "No default permission for topic:other"),
    (14, b"", OFFSET, ""),
    (14, b"", {**OFFSET, "consumerGroup": "h"}, "No default permission for group:h"),
    (14, b"", {**OFFSET, "topic": "other"}, "No default permission for topic:other"),
    *[
        (code, b"", {"topic": topic, "queueId": 0, "timestamp": 0}, "")
        for code in ENDS
        for topic in ("readable", "writable", "%RETRY%g")
    ],
    *[(code, b"", {"topic": "other", "queueId": 0}, "No default permission for topic:other") for code in ENDS],
    (30, b"", {"topic": "%RETRY%h", "queueId": 0}, "No default permission for group:h"),
    (38, b"", {"consumerGroup": "g"}, ""),
    (38, b"", {"consumerGroup": "h"}, "No default permission for group:h"),
    (35, b"", {"clientID": "c", "producerGroup": "p", "consumerGroup": ""}, ""),
    (35, b"", {"clientID": "c", "consumerGroup": "h"}, "No default permission for group:h"),
    (34, heartbeat("g", "TT"), {}, ""),
    (34, heartbeat("g", "writable"), {}, "No default permission for topic:writable"),
    (34, heartbeat("h", "TT"), {}, "No default permission for group:h"),
    (21, b"", {}, ""),
    (43, b"", {}, "Need admin permission for request code=43, but accessKey=alice-key is not"),
    (204, b"", {"producerGroup": "p"}, "Need admin permission for request code=204, but accessKey=alice-key is not"),
    (17, b"", {"topic": "t"}, "Need admin permission for request code=17, but accessKey=alice-key is not"),
    (25, b"x=y", {}, "Need admin permission for request code=25, but accessKey=alice-key is not"),
    (222, b"", {}, "Need admin permission for request code=222, but accessKey=alice-key is not"),
    (12, b"", {"topic": "readable", "key": "k"}, ""),
    (12, b"", {"topic": "other", "key": "k"}, "No default permission for topic:other"),
    (33, b"", {"offset": 0, "topic": "readable"}, ""),
    (33, b"", {"offset": 0, "topic": "other"}, "No default permission for topic:other"),
    (33, b"", {"offset": 0}, "No default permission for topic:"),
    (36, b"", {"offset": 0, "group": "g", "delayLevel": 0, "originTopic": "TT"}, ""),
    (36, b"", {"offset": 0, "group": "g", "delayLevel": -1, "originTopic": "%RETRY%g_TT"}, ""),  # of a proxy
    (36, b"", {"offset": 0, "group": "g", "originTopic": "%RETRY%g_other"}, "No default permission for topic:other"),
    (36, b"", {"offset": 0, "group": "g", "originTopic": "%RETRY%h_TT"}, "No default permission for group:h_TT"),
    (36, b"", {"offset": 0, "group": "h", "delayLevel": 0}, "No default permission for group:h"),
    (36, b"", {"offset": 0, "group": "g", "originTopic": "other"}, "No default permission for topic:other"),
    (37, b"", {"topic": "writable"}, ""),
    (37, b"", {"topic": "readable"}, "No default permission for topic:readable"),
    *[(code, b'{"consumerGroup":"g"}', {}, "") for code in (41, 42)],
    *[(code, b'{"consumerGroup":"h"}', {}, "No default permission for group:h") for code in (41, 42)],
    (46, b'{"clientId":"c","group":"g","subscriptionData":{"topic":"TT"}}', {}, ""),
    (46, b'{"clientId":"c","group":"h","subscriptionData":{"topic":"TT"}}', {}, "No default permission for group:h"),
    *[(code, b"", {"topic": "writable"}, "") for code in (202, 300, 351)],
    *[(code, b"", {"topic": "other"}, "No default permission for topic:other") for code in (202, 300, 351)],
    *[(code, b"", {"consumerGroup": "g"}, "") for code in (203, 208)],
    *[(code, b"", {"consumerGroup": "h"}, "No default permission for group:h") for code in (203, 208)],
    (208, b"", {"consumerGroup": "g", "topic": "other"}, "No default permission for topic:other"),
    (208, b"", {"consumerGroup": "g", "topicList": "TT;other"}, "No default permission for topic:other"),
    *[(code, b"", {"group": "g", "topic": "TT"}, "") for code in (223, 303, 345)],
    *[(code, b"", {"group": "h", "topic": "TT"}, "No default permission for group:h") for code in (223, 303, 345)],
    *[(code, b"", {"group": "g", "topic": "x"}, "No default permission for topic:x") for code in (223, 303, 345)],
    (308, b"", {"topic": "TT", "compareGroup": "g", "filterGroups": ""}, ""),
    (308, b"", {"topic": "TT", "compareGroup": "h"}, "No default permission for group:h"),
    (315, b"", {"statsName": "GROUP_GET_NUMS", "statsKey": "TT@g"}, ""),
    (315, b"", {"statsName": "GROUP_GET_NUMS", "statsKey": "TT@h"}, "No default permission for group:h"),
    (315, b"", {"statsName": "TOPIC_PUT_NUMS", "statsKey": "other"}, "No default permission for topic:other"),
    (321, b"", {"topic": "readable", "queueId": 0, "index": 0, "count": 1}, ""),
    (321, b"", {"topic": "writable", "queueId": 0, "index": 0, "count": 1}, "No default permission for topic:writable"),
    *[(code, b"", {"group": "g"}, "") for code in (343, 352)],
    *[(code, b"", {"group": "h"}, "No default permission for group:h") for code in (343, 352)],
    (361, b"", PULL, ""),
    (370, b"", {"topic": "writable", "recallHandle": "x"}, ""),
    (370, b"", {"topic": "readable", "recallHandle": "x"}, "No default permission for topic:readable"),
    *[(code, b"x", {**SEND_V2, "b": "C_REPLY_TOPIC"}, "") for code in (324, 325)],
    *[(code, b"x", {**SEND_V2, "b": "RMQ_SYS_TRACE_TOPIC"}, "No default permission for topic:") for code in (324, 325)],
    *[(code, b"", {**PULL, "topic": "readable"}, "") for code in POPS],
    *[(code, b"", {**PULL, "topic": "writable"}, "No default permission for topic:writable") for code in POPS],
    *[(code, b"", {**PULL, "consumerGroup": "h"}, "No default permission for group:h") for code in POPS],
    (400, asks_for_queues("readable", "g"), {}, ""),
    (400, asks_for_queues("writable", "g"), {}, "No default permission for topic:writable"),
    (400, asks_for_queues("TT", "h"), {}, "No default permission for group:h"),
    (200151, acks("TT", "g"), {}, ""),
    (200151, acks("writable", "g"), {}, "No default permission for topic:writable"),
    (200151, acks("TT", "h"), {}, "No default permission for group:h"),
    (324, b"x", {**SEND_V2, "b": "other_REPLY_TOPIC"}, "No default permission for topic:other_REPLY_TOPIC"),
    (307, b"", {"consumerGroup": "g"}, "Need admin permission for request code=307, but accessKey=alice-key is not"),
    (309, b"", {"consumerGroup": "g"}, "Need admin permission for request code=309, but accessKey=alice-key is not"),
]
"""Code, body, ext fields, and why alice is refused; "" if allowed."""


async def test_permissions(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:
        for code, body, ext, expected in REQUESTS:
            assert (code, ext, await refusal(alice(node), code, body, **ext)) == (code, ext, expected)
            assert (code, ext, await refusal(admin(node), code, body, **ext)) == (code, ext, "")


async def test_fast_port_enforces_the_same_rules(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:
        node.address = "fast"
        for code, body, ext, expected in REQUESTS:
            assert (code, ext, await refusal(alice(node), code, body, **ext)) == (code, ext, expected)


async def test_unknown_codes_are_answered_to_authenticated_clients(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:
        assert (await alice(node).ask(9999)).code == 3
        assert (await Client(node, None).ask(9999)).code == 1
        assert (await admin(node).ask(50)).code == 3
        assert (await alice(node).ask(50)).code == 3


async def test_malformed_body_is_refused_as_without_acl(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:
        answer = await alice(node).ask(34, b"{")
        assert answer.code == 1
        assert EXCEPTION not in (answer.remark or "")


async def test_only_allowed_requests_of_a_chunk_are_served(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node, trio.open_nursery() as nursery:
        answers: dict[str, int] = {}

        async def send(topic: str) -> None:
            answers[topic] = (await alice(node).ask(310, b"x", **{**SEND_V2, "b": topic})).code

        for topic in ("writable", "other", "TT", "readable"):
            nursery.start_soon(send, topic)
    assert answers == {"writable": 0, "other": 1, "TT": 0, "readable": 1}


WHITE = """
globalWhiteRemoteAddresses: [{}]
accounts: [{{accessKey: alice-key, secretKey: the-secret-of-alice, whiteRemoteAddress: "{}"}}]
"""


async def test_addresses_that_need_no_signature(autojump_clock: MockClock, tmp_path: Path) -> None:
    """The peer of a memory stream has no address: only * matches it."""
    unsigned = {"AccessKey": "alice-key", **SEND_V2}
    async with guarded_broker(tmp_path / "1", WHITE.format("'*'", "")) as node:
        assert await refusal(Client(node, None), 310, b"x", **SEND_V2) == ""
        assert await refusal(Client(node, None), 17) == ""
    async with guarded_broker(tmp_path / "2", WHITE.format("10.0.0.1", "*")) as node:
        assert await refusal(Client(node, None), 310, b"x", **SEND_V2) == "No accessKey is configured"
        assert await refusal(Client(node, None), 310, b"x", **unsigned) == ""
    async with guarded_broker(tmp_path / "3", WHITE.format("10.0.0.1", "10.0.0.1")) as node:
        assert await refusal(Client(node, None), 310, b"x", **unsigned) != ""


async def test_new_policy_applies_to_the_next_request(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:
        assert await refusal(alice(node), 310, b"x", **SEND_V2) == ""
        assert node.broker.acl_guard is not None
        node.broker.acl_guard.policy = policy("accounts: [{accessKey: other-key, secretKey: the-secret-of-bob}]")
        assert await refusal(alice(node), 310, b"x", **SEND_V2) == "No acl config for alice-key"


async def test_connection_closes_after_repeated_auth_failures(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded_broker(tmp_path) as node:
        wrong = Client(node, AclCredentials("alice-key", "the-secret-of-bob"))
        for _ in range(10):
            assert (await wrong.ask(310, b"x", **SEND_V2)).code == 1
        with pytest.raises(trio.BrokenResourceError):
            await wrong.ask(310, b"x", **SEND_V2)
        assert (await wrong.ask(310, b"x", **SEND_V2)).code == 1  # on a new connection
        assert node.broker.acl_guard is not None
        found = node.broker.acl_guard.statistics()
        assert (found.account_count, found.failed_count, found.denied_count, found.closed_count) == (2, 12, 0, 1)
    lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1  # one for all twelve
    assert "Check signature failed for accessKey=alice-key" in lines[0].getMessage()
    assert "secret" not in caplog.text


async def test_connection_outlives_a_few_auth_failures_from_time_to_time(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """All clients of a gRPC front share one: each change of a user's password may make a request of it fail."""
    async with guarded_broker(tmp_path) as node:
        wrong = Client(node, AclCredentials("alice-key", "the-secret-of-bob"))
        for _ in range(3):
            for _ in range(10):
                assert (await wrong.ask(310, b"x", **SEND_V2)).code == 1
            await trio.sleep(60)
        assert node.broker.acl_guard is not None
        assert node.broker.acl_guard.statistics().closed_count == 0


async def test_denied_permissions_do_not_close_the_connection(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:
        for _ in range(30):
            assert await refusal(alice(node), 310, b"x", **{**SEND_V2, "b": "other"}) != ""
        assert await refusal(alice(node), 310, b"x", **SEND_V2) == ""
        assert node.broker.acl_guard is not None
        assert node.broker.acl_guard.statistics().denied_count == 30


async def test_unauthenticated_oneway_request_is_not_served(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:
        fields = {name: str(value) for name, value in SEND_V2.items()}
        connection = await node.client.connection(node.address)
        connection.send_oneway(RemotingCommand(310, ext_fields=fields, body=b"x"))
        assert (await alice(node).ask(310, b"x", **SEND_V2)).ext_fields["queueOffset"] == "0"


async def test_long_access_keys_are_shortened(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded_broker(tmp_path) as node:
        name = "x\nWARNING forged line" + "y" * 100_000
        reason = await refusal(Client(node, AclCredentials(name, SECRET)), 310, b"x", **SEND_V2)
        assert len(reason) < 100
    assert "\nWARNING forged" not in caplog.text
    assert len(caplog.text) < 2000


def test_requests_cover_every_code_that_needs_rights() -> None:
    rights = {code for code, rule in BROKER_RULES.items() if rule.kind is Needs.RIGHTS}
    assert {code for code, _, _, expected in REQUESTS if expected} >= rights
    assert {code for code, _, _, expected in REQUESTS if not expected} >= rights


async def test_rules_and_handlers_have_the_same_codes(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with guarded_broker(tmp_path) as node:
        assert set(node.broker.processor._handlers) | SEND_CODES == BROKER_RULES.keys()


async def test_every_broker_code_enforces_its_rule(autojump_clock: MockClock, tmp_path: Path) -> None:
    """For an account without rights that names topics and groups of others."""
    accounts = ACCOUNTS + "  - {accessKey: nobody-key, secretKey: the-secret-of-nobody}\n"
    names = {"topic": "TT", "consumerGroup": "g", "group": "g", "statsName": "TOPIC_PUT_NUMS", "statsKey": "TT"}
    ext = {**names, "queueId": 0, "index": 0, "count": 1, "b": "TT", "a": "g"}
    bodies = {34: heartbeat("g", "TT"), 41: b'{"consumerGroup":"g"}', 42: b'{"consumerGroup":"g"}'}
    bodies[200151] = acks("TT", "g")
    bodies[400] = asks_for_queues("TT", "g")
    bodies[46] = b'{"clientId":"c","group":"g","namespace":"","subscriptionData":{"topic":"TT"}}'
    async with guarded_broker(tmp_path, accounts) as node:
        nobody = Client(node, AclCredentials("nobody-key", "the-secret-of-nobody"))
        for code, rule in BROKER_RULES.items():
            said = await refusal(nobody, code, bodies.get(code, b""), **ext)
            match rule.kind:
                case Needs.SIGNATURE:
                    assert said == "", code
                case Needs.RIGHTS:
                    assert said.startswith("No default permission for "), code
                case Needs.ADMIN | Needs.ADMIN_CHANGE:
                    assert said == f"Need admin permission for request code={code}, but accessKey=nobody-key is not"


def test_malformed_heartbeats_are_refused() -> None:
    needed = BROKER_RULES[34].needed
    assert needed is not None
    with pytest.raises(RemoteProtocolError):
        list(needed(RemotingCommand(34, body=b"[1")))
    assert list(needed(RemotingCommand(34, body=heartbeat("g", "T")))) == [("%RETRY%g", Right.SUB), ("T", Right.SUB)]


async def test_without_a_policy_everything_is_allowed(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        assert node.broker.acl_guard is None
        assert (await node.send()).code == 0
