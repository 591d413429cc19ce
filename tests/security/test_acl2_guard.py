"""Users of ACL 2.0 at a broker: what every request needs, attempts to get more, and what is shown of secrets."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from ha.acl import BROKER_RULES, AclGuard, AclGuardOptions, Right
from ha.acl.evaluation import DENIED, Policies, parse_entry
from ha.acl.requirements import Needs
from ha.protocol.access_bodies import PolicyEntryInfo, PolicyInfo, UserConfig
from ha.protocol.acl import AclCredentials
from ha.protocol.message_id import encode_message_id
from ha.protocol.record import Message, encode_host
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import TABLES_TOPIC
from scripts.permissions_table import BODIES, FIELDS, for_users
from tests.broker.node import PULL, SEND_V1, SEND_V2, Node
from tests.interop.acl2_cases import ALICE, PASSWORD, SUPER, SUPER_PASSWORD, acl, entry, policies, user
from tests.security.brokers import ACCOUNTS, Client, policy
from tests.security.users import ROOT, open_users


def root(node: Node) -> Client:
    """The super user."""
    return Client(node, AclCredentials(SUPER, SUPER_PASSWORD))


def alice(node: Node) -> Client:
    """A normal user."""
    return Client(node, AclCredentials(ALICE, PASSWORD))


async def done(answer: RemotingCommand) -> None:
    assert answer.code == 0, answer


async def create(node: Node, *parts: dict[str, Any], name: str = ALICE, password: str = PASSWORD) -> None:
    """Creates a normal user with policies."""
    assert (await root(node).ask(3001, user(name, password=password), username=name)).code == 0
    if parts:
        answer = await root(node).ask(3006, acl(f"User:{name}", policies(*parts)), subject=f"User:{name}")
        assert answer.code == 0, answer


async def refusal(client: Client, code: int, body: bytes = b"", **ext: Any) -> str:
    """The remark of a refusal; "" if the request is admitted."""
    answer = await client.ask(code, body, **ext)
    return (answer.remark or "") if answer.code == 16 else ""


async def test_every_code_needs_what_the_table_says(autojump_clock: MockClock, tmp_path: Path) -> None:
    """For a user without policies, and for one who has exactly what the table names."""
    words = {"Pub", "Sub", "Create", "Update", "Delete", "Get", "List"}
    async with open_users(tmp_path) as node:
        await create(node)
        for code, rule in BROKER_RULES.items():
            body = json.dumps(BODIES[code]).encode() if code in BODIES else b""
            denied = await refusal(alice(node), code, body, **FIELDS)
            assert bool(denied) is (rule.kind is not Needs.SIGNATURE), code
            if not denied:
                continue
            assert denied.startswith("User:alice has no permission to access "), code
            text = for_users(code, rule)
            assert text != "a signature"
            parts = []
            for need in text.split("; "):
                actions, _, where = need.partition(" on ")
                action = actions.split(" or ")[-1]
                assert action in words
                for kind, resource in (("topic", "Topic:*"), ("group", "Group:*"), ("cluster", "Cluster:*")):
                    if kind in where:
                        parts.append(entry(resource, action))
            name = f"user-{code}"
            await create(node, *parts, name=name)
            needed = Client(node, AclCredentials(name, PASSWORD))
            assert "has no permission" not in await refusal(needed, code, body, **FIELDS), (code, text)
            for left_out in range(len(parts)):
                weaker = f"{name}-{left_out}"
                await create(node, *(part for at, part in enumerate(parts) if at != left_out), name=weaker)
                assert "has no permission" in await refusal(
                    Client(node, AclCredentials(weaker, PASSWORD)), code, body, **FIELDS
                ), (code, parts[left_out])


BYPASSES: list[tuple[int, bytes, dict[str, Any]]] = [
    (310, b"x", {**SEND_V2, "b": "%RETRY%h"}),
    (310, b"x", {**SEND_V2, "b": "%DLQ%g"}),
    (310, b"x", {**SEND_V2, "b": ""}),
    (310, b"x", {**SEND_V2, "b": "mine "}),
    # The parser goes by the field names, not by the code: so must the check.
    (10, b"x", {**SEND_V1, **SEND_V2, "topic": "mine", "b": "other"}),
    (310, b"x", {**SEND_V1, "topic": "other", "b": "mine"}),
    (320, b"x", {**SEND_V2, "b": "other", "m": True}),
    (11, b"", {**PULL, "topic": "%RETRY%h", "consumerGroup": "g"}),
    (11, b"", {**PULL, "topic": "mine", "consumerGroup": "h"}),
    (11, b"", {**PULL, "topic": None, "consumerGroup": "g"}),
    (361, b"", {**PULL, "topic": "other", "consumerGroup": "g"}),
    (33, b"", {"offset": 0, "topic": "other"}),
    (33, b"", {"offset": 0}),
    (36, b"", {"offset": 0, "group": "h", "delayLevel": 0, "originTopic": "mine"}),
    (200, b'{"groupName":"h"}', {"groupName": "g"}),
    (225, b'{"groupConfigList":[{"groupName":"g"},{"groupName":"h"}]}', {}),
    (215, b"", {"topic": "other"}),
    (25, b"brokerPermission=0", {"topic": "mine"}),
    (309, b"", {"consumerGroup": "g", "clientId": "c", "msgId": "x"}),
    (3001, user("eve", password="p", userType="Super"), {"username": "eve"}),
    (3006, acl("User:alice", policies(entry("*", "All"))), {"subject": "User:alice"}),
    (3004, b"", {"username": ALICE}),
]
"""Requests of a user with all actions on the topic `mine` and the group `g`, and on everything beginning with mine."""


async def test_rights_do_not_extend_to_other_resources(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_users(tmp_path) as node:
        await create(node, entry("Topic:mine", "All"), entry("Group:g", "All"))
        assert await refusal(alice(node), 310, b"x", **{**SEND_V2, "b": "mine"}) == ""
        for code, body, ext in BYPASSES:
            assert "no matched policies." in await refusal(alice(node), code, body, **ext), (code, ext)


async def test_system_topics_need_a_super_user(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_users(tmp_path) as node:
        await create(node, entry("*", "All"))
        for topic in ("RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX", "rmq_sys_halog_tables"):
            pull = {**PULL, "topic": topic, "suspendTimeoutMillis": 0}
            assert "no matched policies." in await refusal(alice(node), 11, **pull)
            assert "no matched policies." in await refusal(alice(node), 30, topic=topic, queueId=0)
            assert await refusal(root(node), 11, **pull) == ""


async def test_only_super_users_see_passwords(autojump_clock: MockClock, tmp_path: Path) -> None:
    """RocketMQ shows them to everyone with Get on the cluster, who may then sign as a super user."""
    async with open_users(tmp_path) as node:
        await create(node, entry("Cluster:*", "Get"))
        requests: list[tuple[int, dict[str, Any]]] = [(3004, {"username": SUPER}), (3005, {})]
        for code, ext in requests:
            answer = bytes((await alice(node).ask(code, **ext)).body)
            assert SUPER.encode() in answer
            assert b"password" not in answer
            assert b"secret" not in answer
            assert SUPER_PASSWORD.encode() in bytes((await root(node).ask(code, **ext)).body)


async def test_only_who_may_read_a_message_has_it_consumed_again(autojump_clock: MockClock, tmp_path: Path) -> None:
    """In a failover group, the log contains the passwords of super users."""
    async with open_users(tmp_path) as node:
        await create(node, entry("Cluster:*", "Update"), entry("Group:g", "Sub"), entry("Topic:A", "Sub"))
        for topic, is_allowed in ((TABLES_TOPIC, False), ("B", False), ("A", True)):
            [put] = await node.broker.put_service.put([Message(topic, 0, b"hello")])
            message_id = encode_message_id(encode_host("127.0.0.1", 1), put.physical_offset)
            ext: dict[str, Any] = {"msgId": message_id, "consumerGroup": "g", "clientId": "c"}
            assert (await refusal(alice(node), 309, **ext) == "") is is_allowed, topic
            assert await refusal(root(node), 309, **ext) == "", topic


async def test_secrets_are_not_logged(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_users(tmp_path) as node:
        await create(node, entry("*", "All"))
        await done(await root(node).ask(3002, user(ALICE, password="the-secret-of-later"), username=ALICE))
        assert await refusal(alice(node), 11, **PULL) == "check signature failed."
        assert await refusal(Client(node, AclCredentials(ALICE, "the-secret-of-later")), 30, topic="T", queueId=0) == ""
        await done(await root(node).ask(3003, username=ALICE))
        assert await refusal(Client(node, AclCredentials(ALICE, "the-secret-of-later")), 21) == (
            "User:alice is not found."
        )
        shown = caplog.text + repr(node.broker.options) + repr(node.broker.tables.view()) + repr(node.broker.acl_guard)
    assert "user.changed" in shown
    assert "the-secret" not in shown


async def test_changes_count_from_the_next_request_on(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_users(tmp_path) as node:
        await create(node, entry("Topic:A", "Get"))
        assert await refusal(alice(node), 30, topic="A", queueId=0) == ""
        await done(await root(node).ask(3007, acl("User:alice", policies(entry("Topic:A", "Get", "Deny"))), subject=""))
        assert "the decision is deny." in await refusal(alice(node), 30, topic="A", queueId=0)
        await done(await root(node).ask(3008, subject="User:alice"))
        assert "no matched policies." in await refusal(alice(node), 30, topic="A", queueId=0)
        await done(await root(node).ask(3002, user(ALICE, userType="Super"), username=ALICE))
        assert await refusal(alice(node), 26) == ""


async def test_users_and_policies_outlive_a_restart(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_users(tmp_path) as node:
        await create(node, entry("Topic:A", "Get"))
        await done(await root(node).ask(3002, user(SUPER, password="the-new-secret"), username=SUPER))
    async with open_users(tmp_path) as node:
        assert await refusal(alice(node), 30, topic="A", queueId=0) == ""
        assert await refusal(root(node), 26) == "check signature failed."  # the configured user exists already
        assert await refusal(Client(node, AclCredentials(SUPER, "the-new-secret")), 26) == ""


async def test_accounts_of_the_file_come_first(autojump_clock: MockClock, tmp_path: Path) -> None:
    """Who may create users can't take over an account of plain_acl.yml. Each kind is refused in its own words."""
    async with open_users(tmp_path, policy=policy(ACCOUNTS)) as node:
        await create(node, name="admin-key", password="another-secret")
        taken_over = await Client(node, AclCredentials("admin-key", "another-secret")).ask(26)
        assert (taken_over.code, taken_over.remark) == (
            1,
            "org.apache.rocketmq.acl.common.AclException: Check signature failed for accessKey=admin-key",
        )
        plain = Client(node, AclCredentials("alice-key", "the-secret-of-alice"))
        assert (await plain.ask(310, b"x", **{**SEND_V2, "b": "writable"})).code == 0
        denied = await plain.ask(310, b"x", **{**SEND_V2, "b": "other"})
        assert denied.remark == "org.apache.rocketmq.acl.common.AclException: No default permission for topic:other"
        admin = Client(node, AclCredentials("admin-key", "the-secret-of-admin"))
        assert (await admin.ask(3001, user("eve", password="p", userType="Super"), username="eve")).code == 0
        assert b"the-secret" in bytes((await admin.ask(3005)).body)
        assert await refusal(Client(node, AclCredentials("nobody", "x")), 21) == "User:nobody is not found."


async def test_whitelists(autojump_clock: MockClock, tmp_path: Path) -> None:
    """A request that needs a permission has to be in both lists; naming a user without signing gives no rights."""
    async with open_users(tmp_path) as node:
        await create(node, entry("Topic:A", "Get"))
        guard = node.broker.acl_guard
        assert guard is not None
        nobody = Client(node, None)
        assert await refusal(nobody, 21) == "username cannot be null."
        guard._options = AclGuardOptions(unauthenticated_codes=frozenset({"21", "30"}))
        assert await refusal(nobody, 21) == ""
        assert await refusal(nobody, 30, topic="A", queueId=0) == "username cannot be null."
        assert await refusal(nobody, 30, topic="A", queueId=0, AccessKey=ALICE) == "check signature failed."
        guard._options = AclGuardOptions(
            unauthenticated_codes=frozenset({"30"}), unauthorized_codes=frozenset({"30", "31"})
        )
        assert await refusal(nobody, 30, topic="B", queueId=0) == ""
        assert await refusal(nobody, 31, topic="B", queueId=0) == "username cannot be null."
        assert await refusal(alice(node), 31, topic="B", queueId=0) == ""
        guard._options = AclGuardOptions(
            unauthenticated_codes=frozenset({"21", "30"}), unauthorized_codes=frozenset({"30"}), requires_tls=True
        )
        assert "aclRequireTls" in await refusal(nobody, 21)
        assert "aclRequireTls" in await refusal(nobody, 30, topic="B", queueId=0)


async def test_an_unsigned_request_is_of_no_account(autojump_clock: MockClock, tmp_path: Path) -> None:
    """Whoever named a super user got all passwords, and could make themselves one."""
    async with open_users(tmp_path) as node:
        guard = node.broker.acl_guard
        assert guard is not None
        codes = frozenset({"3001", "3005"})
        guard._options = AclGuardOptions(unauthenticated_codes=codes, unauthorized_codes=codes)
        nobody = Client(node, None)
        claims: list[dict[str, Any]] = [{}, {"AccessKey": SUPER}, {"AccessKey": SUPER, "Signature": "AAAA"}]
        for forged in claims:
            answer = await nobody.ask(3005, **forged)
            assert (answer.code, b"password" in bytes(answer.body)) == (0, False)
            answer = await nobody.ask(3001, user("eve", password="p", userType="Super"), username="eve", **forged)
            assert (answer.code, answer.remark) == (1, "The super user can only be create by super user")
        assert SUPER_PASSWORD.encode() in bytes((await root(node).ask(3005)).body), "as it is signed"


async def test_authentication_without_authorization(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with open_users(tmp_path, authorization_enabled=False) as node:
        await create(node)
        assert await refusal(alice(node), 26) == ""
        assert await refusal(Client(node, AclCredentials(ALICE, "wrong")), 26) == "check signature failed."
        answer = await alice(node).ask(3001, user("eve", password="p", userType="Super"), username="eve")
        assert (answer.code, answer.remark) == (1, "The super user can only be create by super user")
        assert b"password" not in bytes((await alice(node).ask(3005)).body)


async def test_without_authentication_there_are_no_users(autojump_clock: MockClock, tmp_path: Path) -> None:
    """Otherwise whoever reaches the port could create a super user before it is turned on."""
    off: dict[str, Any] = {"authentication_enabled": False, "authorization_enabled": False, "initial_users": ()}
    async with open_users(tmp_path, **off) as node:
        assert node.broker.acl_guard is not None
        node.broker.acl_guard.policy = policy(ACCOUNTS)
        admin = Client(node, AclCredentials("admin-key", "the-secret-of-admin"))
        for code in range(3001, 3011):
            answer = await admin.ask(code, user("eve", password="p"), username="eve", subject="User:eve")
            assert (answer.code, answer.remark) == (1, "authenticationEnabled=false: this broker has no users")
        assert len(node.broker.tables.users) == 0


@pytest.mark.parametrize(
    ("code", "body", "ext", "reason"),
    [
        (3001, user("x" * 256, password="p"), {"username": "x" * 256}, "256 characters"),
        (3001, user("x", password="p" * 256), {"username": "x"}, "256 characters"),
        (3001, user("x", password="p"), {"username": "x\nforged line"}, "control characters"),
        (3001, user("x", password="p"), {"username": "$ref"}, "reference"),
        (3001, b"[" * 300_000, {"username": "x"}, "300000 bytes"),
        (3006, acl("", policies(*[entry(f"Topic:{n}", "Pub") for n in range(1000)])), {}, "1001 entries"),
        (3006, acl("", policies(entry("Topic:A", "Pub", ips=["10.0.0.1"] * 101))), {}, "101 source addresses"),
        (3006, acl("", policies(entry("Topic:a*b*", "Pub"))), {}, "has a * before its end"),
        (3006, acl("", policies(entry("Topic:a*b", "Pub"))), {}, "has a * before its end"),
        (3006, acl("", policies(entry("Topic:A", "Pub", ips=["localhost/8"]))), {}, "The source ip is invalid."),
        (3008, b"", {"resource": "Thing:A"}, "The resource is null."),
        (3001, b"{", {"username": "x"}, ""),
    ],
    ids=range(12),
)
async def test_excessive_and_malformed_requests_change_nothing(
    autojump_clock: MockClock, tmp_path: Path, code: int, body: bytes, ext: dict[str, Any], reason: str
) -> None:
    async with open_users(tmp_path) as node:
        await create(node, entry("Topic:A", "Get"))
        before = dict(node.broker.tables.users.table)
        answer = await root(node).ask(code, body, **{"subject": "User:alice", **ext})
        assert answer.code != 0
        assert reason in (answer.remark or "")
        assert node.broker.tables.users.table == before


def test_representations_show_no_password() -> None:
    assert SUPER_PASSWORD not in repr(ROOT)
    assert ROOT.is_super
    made = UserConfig(username="u", password="the-secret")
    assert repr([made]) == "[UserConfig('u', Normal, enable, entries=0)]"
    assert AclGuard().users is None


def test_deny_wins_among_equal_entries() -> None:
    """A broker keeps one entry per type and resource; a copy from another broker may have several."""
    for decisions in (("Allow", "Deny"), ("Deny", "Allow")):
        entries = [PolicyEntryInfo(resource="Topic:A", actions=["Pub"], decision=each) for each in decisions]
        assert Policies([PolicyInfo(entries=entries)]).denial("Topic", "A", Right.PUB, "10.0.0.1") == DENIED


@pytest.mark.parametrize(
    ("host", "counts"), [("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("::ffff:11.1.2.3", False)]
)
def test_ipv4_client_of_an_ipv6_socket_has_its_ipv4_address(host: str, counts: bool) -> None:
    entry = PolicyEntryInfo(resource="*", actions=["All"], source_ips=["10.0.0.0/8"], decision="Allow")
    assert parse_entry(entry).is_from(host) is counts
