"""Commands that a part of the cluster can't carry out: they can be repeated."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio.from_thread
import pytest

from ha.cli import run
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.java_json import dumps
from ha.protocol.remoting import RemotingCommand
from tests.client.fake_broker import route_body, serving

MISSING = 17


class FakeCluster:
    """Two brokers and two name servers that know topic T; those in `failing` refuse changes.

    The brokers know the policies of users, and refuse what is done already in RocketMQ's words.
    """

    def __init__(self) -> None:
        self.users: dict[str, dict[str, set[str]]] = {"a": {}, "b": {}}
        self.holders = {"a", "b", "n1", "n2"}
        self.failing: set[str] = set()
        self.without_master: set[str] = set()
        self.last_stored_ms = 1
        self.topics: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
        self.groups: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
        self.addresses: dict[str, str] = {}

    def answer(self, name: str, command: RemotingCommand) -> RemotingCommand:
        match command.code:
            case RequestCode.GET_ROUTEINFO_BY_TOPIC if name in self.holders:
                return command.reply(0, body=route_body({broker: {0: self.addresses[broker]} for broker in "ab"}, 1))
            case RequestCode.GET_BROKER_CLUSTER_INFO:
                table = {
                    broker: {
                        "brokerAddrs": {int(broker in self.without_master): self.addresses[broker]},
                        "brokerName": broker,
                        "cluster": "C",
                    }
                    for broker in "ab"
                }
                return command.reply(0, body=dumps({"brokerAddrTable": table, "clusterAddrTable": {"C": ["a", "b"]}}))
            case RequestCode.GET_TOPIC_STATS_INFO if name in self.holders:
                key = f'{{"brokerName":"{name}","queueId":0,"topic":"T"}}'
                queue = f'{{"lastUpdateTimestamp":{self.last_stored_ms},"maxOffset":5,"minOffset":0}}'
                return command.reply(0, body=f'{{"offsetTable":{{{key}:{queue}}}}}'.encode())
            case RequestCode.QUERY_TOPIC_CONSUME_BY_WHO:
                return command.reply(0, body=dumps({"groupList": []}))
            case RequestCode.DELETE_TOPIC_IN_BROKER | RequestCode.DELETE_TOPIC_IN_NAMESRV:
                if name in self.failing:
                    return command.reply(1, "not now")
                self.holders.discard(name)
                return command.reply(0)
            case RequestCode.AUTH_CREATE_USER | RequestCode.AUTH_UPDATE_ACL | RequestCode.AUTH_DELETE_ACL:
                return self.change_user(name, command)
            case RequestCode.GET_ALL_TOPIC_CONFIG:
                return command.reply(0, body=dumps({"topicConfigTable": self.topics[name]}))
            case RequestCode.UPDATE_AND_CREATE_TOPIC:
                self.topics[name][command.ext_fields["topic"]] = {"topicName": command.ext_fields["topic"]}
                return command.reply(0)
            case RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
                return command.reply(0, body=dumps({"subscriptionGroupTable": self.groups[name]}))
            case RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
                group = json.loads(bytes(command.body))
                self.groups[name][group["groupName"]] = group
                return command.reply(0)
            case RequestCode.GET_CONSUMER_CONNECTION_LIST:
                return command.reply(ResponseCode.CONSUMER_NOT_ONLINE, "no member")
            case RequestCode.GET_CONSUME_STATS:
                key = f'{{"brokerName":"{name}","queueId":0,"topic":"T"}}'
                return command.reply(
                    0, body=f'{{"offsetTable":{{{key}:{{"brokerOffset":9,"consumerOffset":4}}}}}}'.encode()
                )
            case RequestCode.AUTH_LIST_ACL:
                return command.reply(0, body=b"[]")
        return command.reply(MISSING, "topic[T] not exist")

    def change_user(self, name: str, command: RemotingCommand) -> RemotingCommand:
        users, refused = self.users[name], ""
        user = command.ext_fields.get("username") or command.ext_fields["subject"].removeprefix("User:")
        if name in self.failing:
            return command.reply(1, "not now")
        if command.code == RequestCode.AUTH_CREATE_USER:
            refused = "The user is existed" if user in users else ""
            users.setdefault(user, set())
        elif user not in users:
            refused = f"The subject of User:{user} is not exist."
        elif command.code == RequestCode.AUTH_UPDATE_ACL:
            users[user].add("Topic:orders")
        else:
            refused = "" if users[user] else "The acl is not exist."
            users[user].discard(command.ext_fields["resource"])
        return command.reply(16 if refused else 0, refused)

    def ha(self, *words: str) -> int:
        return run([*words, "--servers", f"{self.addresses['n1']};{self.addresses['n2']}"])

    def delete(self) -> int:
        return self.ha("topic", "delete", "T", "--yes")


@pytest.fixture
def nodes() -> Iterator[FakeCluster]:
    found = FakeCluster()
    with ExitStack() as stack:
        portal = stack.enter_context(anyio.from_thread.start_blocking_portal("trio"))
        for name in ("a", "b", "n1", "n2"):

            def answer(command: RemotingCommand, name: str = name) -> RemotingCommand:
                return found.answer(name, command)

            server = stack.enter_context(portal.wrap_async_context_manager(serving(answer)))
            found.addresses[name] = server.address
        yield found


@pytest.mark.parametrize("failing", ["a", "b", "n1", "n2"])
def test_a_topic_that_was_deleted_in_part_is_deleted_then(
    failing: str, nodes: FakeCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes.failing = {failing}
    assert nodes.delete() == 1
    assert failing in nodes.holders
    nodes.failing = set()
    capfd.readouterr()
    assert nodes.delete() == 0, capfd.readouterr()
    assert not nodes.holders
    assert nodes.delete() == 2, "it is gone"


@pytest.mark.parametrize("failing", ["a", "b"])
def test_changes_of_users(failing: str, nodes: FakeCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "password").write_text("secret\n")
    for words, left in (
        (("create", "billing", "--password-file", str(tmp_path / "password")), {"billing": set()}),
        (("grant", "billing", "Topic:orders", "Pub"), {"billing": {"Topic:orders"}}),
        (("revoke", "billing", "Topic:orders"), {"billing": set()}),
    ):
        nodes.failing = {failing}
        assert nodes.ha("acl", *words) == 1
        nodes.failing = set()
        capfd.readouterr()
        assert nodes.ha("acl", *words) == 0, capfd.readouterr()
        assert nodes.users == {"a": left, "b": left}
        if words[0] != "grant":
            assert nodes.ha("acl", *words) == 1, "nothing is left to do"
            assert "exist" in capfd.readouterr().err
    assert nodes.ha("acl", "revoke", "nobody", "Topic:orders") == 1


def test_a_change_that_a_group_without_a_master_did_not_get_is_an_error(
    nodes: FakeCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "password").write_text("secret\n")
    create = ("acl", "create", "billing", "--password-file", str(tmp_path / "password"))
    nodes.without_master = {"b"}
    assert nodes.ha(*create) == 69
    assert "b: no master is registered, so nothing changed there; repeat it" in capfd.readouterr().err
    assert nodes.users == {"a": {"billing": set()}, "b": {}}
    nodes.without_master = set()
    assert nodes.ha(*create) == 0
    assert nodes.users["b"] == {"billing": set()}


@pytest.mark.parametrize("kind", ["topic", "group"])
def test_so_is_a_topic_or_group_that_one_did_not_get(
    kind: str, nodes: FakeCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    held = {"topic": nodes.topics, "group": nodes.groups}[kind]
    nodes.without_master = {"b"}
    assert nodes.ha(kind, "create", "new") == 69
    assert "b: no master is registered, so nothing changed there; repeat it" in capfd.readouterr().err
    assert [list(held[name]) for name in "ab"] == [["new"], []]
    assert nodes.ha(kind, "create", "new", "--broker", "a") == 0
    assert nodes.ha(kind, "create", "new", "--broker", "b") == 69
    nodes.without_master = {"a", "b"}
    assert nodes.ha(kind, "create", "new") == 69
    nodes.without_master = set()
    assert nodes.ha(kind, "create", "new") == 0
    assert list(held["b"]) == ["new"]


@pytest.mark.parametrize(
    "words",
    [("group", "list"), ("group", "describe", "G"), ("offsets", "show", "G"), ("group", "delete", "G")],
    ids=" ".join,
)
def test_what_a_broker_without_a_master_holds_is_missing(
    words: tuple[str, ...], nodes: FakeCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes.groups["a"]["G"] = {"groupName": "G"}
    assert nodes.ha(*words) == 0
    assert "registered" not in capfd.readouterr().err
    nodes.without_master = {"b"}
    assert nodes.ha(*words) == 69
    captured = capfd.readouterr()
    assert "G" in captured.out or "lag 5 messages" in captured.out
    assert "ha: b: no master is registered, so the result lacks what is stored there\n" in captured.err
    nodes.groups["a"].clear()
    if words[1] in ("describe", "delete"):
        assert nodes.ha(*words) == 69
        assert "b: no master is registered, and no other broker has group G" in capfd.readouterr().err


def test_a_group_keeps_the_settings_of_each_broker(nodes: FakeCluster, capfd: pytest.CaptureFixture[str]) -> None:
    for name, is_enabled in (("a", False), ("b", True)):
        nodes.groups[name]["billing"] = {"groupName": "billing", "consumeEnable": is_enabled, "retryMaxTimes": 16}
    assert nodes.ha("group", "create", "billing", "--retries", "3") == 0
    assert capfd.readouterr().out == "billing: 3 retries on a, disabled\nbilling: 3 retries on b\n"
    settings = [(nodes.groups[name]["billing"]["consumeEnable"], name) for name in "ab"]
    assert settings == [(False, "a"), (True, "b")]


def test_the_last_time_that_a_broker_can_state_is_shown(nodes: FakeCluster, capfd: pytest.CaptureFixture[str]) -> None:
    nodes.last_stored_ms = 2**63 - 1
    assert nodes.ha("topic", "describe", "T") == 0, capfd.readouterr()
    assert "292278994-08-1" in capfd.readouterr().out
