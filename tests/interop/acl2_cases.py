"""Policies and requests of ACL 2.0. `python -m tests.interop.acl2_cases FILE` records a real broker's answers.

It starts one RocketMQ 5.5.0 broker with authenticationEnabled and authorizationEnabled, which needs Java and Maven. Its
answers are in tests/fixtures/acl2/answers-5.5.0.json; tests/security/test_acl2_answers.py compares halog's with them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import trio

from ha.protocol.acl import AclCredentials
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from tests.broker.node import PULL, SEND_V2, text
from tests.interop.processes import open_children
from tests.interop.releases import resolve
from tests.interop.rocketmq import RocketMqBroker

Ask: TypeAlias = Callable[[str, RemotingCommand], Awaitable[RemotingCommand]]
"""Sends a request signed by a user; "" for none"""

SUPER, SUPER_PASSWORD = "root-user", "the-secret-of-root"
ALICE, PASSWORD = "alice", "the-secret-of-alice"
CLUSTER = "InteropCluster"


def entry(
    resource: str, actions: str, decision: str = "Allow", ips: list[str] | None = None, kind: str | None = "Custom"
) -> dict[str, Any]:
    """A policy with one entry. `actions`: joined by |."""
    made = {"resource": resource, "actions": actions.split("|"), "decision": decision}
    if ips is not None:
        made["sourceIps"] = ips
    return {"policyType": kind, "entries": [made]}


def policies(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Merges policies of one type, in order."""
    by_kind: dict[Any, dict[str, Any]] = {}
    for part in parts:
        merged = by_kind.setdefault(part["policyType"], {"policyType": part["policyType"], "entries": []})
        merged["entries"] += part["entries"]
    return list(by_kind.values())


def send(topic: str) -> tuple[int, dict[str, Any], bytes]:
    """Needs Pub on the topic."""
    return 310, {**SEND_V2, "b": topic}, b"x"


def end(topic: str) -> tuple[int, dict[str, Any], bytes]:
    """Needs Get on the topic."""
    return 30, {"topic": topic, "queueId": 0}, b""


def pull(topic: str, group: str) -> tuple[int, dict[str, Any], bytes]:
    """Needs Sub on both."""
    return 11, {**PULL, "topic": topic, "consumerGroup": group, "suspendTimeoutMillis": 0, "sysFlag": 4}, b""


def commit(topic: str, group: str) -> tuple[int, dict[str, Any], bytes]:
    """Needs Sub or Update on both."""
    return 15, {"topic": topic, "consumerGroup": group, "queueId": 0, "commitOffset": 0}, b""


def find(topic: str) -> tuple[int, dict[str, Any], bytes]:
    """Needs Sub or Get on the topic."""
    return 12, {"topic": topic, "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1}, b""


def create(topic: str) -> tuple[int, dict[str, Any], bytes]:
    """Needs Create on the topic."""
    fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    return 17, {**fields, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False}, b""


def delete(topic: str) -> tuple[int, dict[str, Any], bytes]:
    """Needs Delete on the topic."""
    return 215, {"topic": topic}, b""


def users() -> tuple[int, dict[str, Any], bytes]:
    """Needs Get on the cluster."""
    return 3005, {"filter": "no such user"}, b""


A, AB, B = "Topic:A", "Topic:AB", "Topic:B"

CASES: dict[str, tuple[list[dict[str, Any]], list[tuple[int, dict[str, Any], bytes]]]] = {
    "no policies": ([], [send("A"), end("A"), users()]),
    "literal": (policies(entry(A, "Pub")), [send("A"), send("AB"), send("a"), end("A"), pull("A", "g")]),
    "topic does not cover group": (policies(entry(A, "Sub")), [pull("A", "g"), find("A"), end("A")]),
    "topic and group": (policies(entry(A, "Sub"), entry("Group:g", "Sub")), [pull("A", "g"), pull("A", "h")]),
    "retry topic is its group": (
        policies(entry("Group:g", "Sub")),
        [pull("%RETRY%g", "g"), send("%RETRY%g"), send("%RETRY%h"), end("%RETRY%g")],
    ),
    "retry topic by its name": (policies(entry("Topic:%RETRY%g", "All")), [send("%RETRY%g")]),
    "any of two actions": (policies(entry(A, "Get")), [find("A"), end("A"), send("A")]),
    "update is enough to commit": (
        policies(entry(A, "Update"), entry("Group:g", "Update")),
        [commit("A", "g"), pull("A", "g")],
    ),
    "all": (policies(entry(A, "All")), [send("A"), end("A"), find("A"), create("A"), delete("A"), users()]),
    "prefix": (policies(entry("Topic:A*", "Pub")), [send("A"), send("AB"), send("BA")]),
    "every topic": (policies(entry("Topic:*", "Pub")), [send("A"), pull("A", "g")]),
    "everything": (policies(entry("*", "All")), [send("A"), pull("A", "g"), users(), create("B"), delete("B")]),
    "named any": (policies(entry("Any:whatever", "Pub")), [send("A")]),
    "literal denied, prefix allowed": (
        policies(entry("Topic:A*", "Pub"), entry(AB, "Pub", "Deny")),
        [send("A"), send("AB"), send("ABC")],
    ),
    "literal allowed, prefix denied": (
        policies(entry("Topic:A*", "Pub", "Deny"), entry(AB, "Pub")),
        [send("A"), send("AB"), send("ABC")],
    ),
    "longer prefix wins": (
        policies(entry("Topic:A*", "Pub", "Deny"), entry("Topic:AB*", "Pub"), entry("Topic:*", "Pub", "Deny")),
        [send("A"), send("AB"), send("ABC"), send("B")],
    ),
    "longer prefix denied": (
        policies(entry("Topic:AB*", "Pub", "Deny"), entry("Topic:A*", "Pub")),
        [send("A"), send("AB"), send("ABC")],
    ),
    "a type wins over everything": (
        policies(entry("*", "All", "Deny"), entry("Topic:*", "Pub")),
        [send("A"), end("A")],
    ),
    "a literal of everything": (policies(entry("*", "All"), entry(A, "Pub", "Deny")), [send("A"), end("A"), send("B")]),
    "other actions do not match": (
        policies(entry(A, "Sub", "Deny"), entry("Topic:*", "Pub")),
        [send("A"), find("A")],
    ),
    "custom before default": (
        policies(entry("Topic:*", "Pub"), entry(A, "Pub", "Deny", kind="Default")),
        [send("A"), send("B")],
    ),
    "default if custom does not match": (
        policies(entry(B, "Pub", "Deny"), entry("Topic:*", "Pub", kind="Default")),
        [send("A"), send("B")],
    ),
    "custom of another action": (
        policies(entry(A, "Sub", "Deny"), entry("Topic:*", "Pub|Sub", kind="Default")),
        [send("A"), find("A")],
    ),
    "no type is custom": (policies(entry(A, "Pub", kind=None)), [send("A")]),
    "one of several actions denied": (
        policies(entry(A, "Sub", "Deny"), entry("Topic:A*", "Get")),
        [find("A"), end("A")],
    ),
    "address": (policies(entry(A, "Pub", ips=["127.0.0.1"])), [send("A")]),
    "another address": (policies(entry(A, "Pub", ips=["127.0.0.2"])), [send("A")]),
    "network": (policies(entry(A, "Pub", ips=["10.0.0.0/8", "127.0.0.0/8"])), [send("A")]),
    "another network": (policies(entry(A, "Pub", ips=["10.0.0.0/8"])), [send("A")]),
    "every address": (policies(entry(A, "Pub", ips=["0.0.0.0/0"])), [send("A")]),
    "denied address, allowed elsewhere": (
        policies(entry(A, "Pub", "Deny", ips=["127.0.0.0/8"]), entry("Topic:*", "Pub")),
        [send("A"), send("B")],
    ),
    "address of another": (
        policies(entry(A, "Pub", "Deny", ips=["10.1.2.3"]), entry("Topic:*", "Pub")),
        [send("A"), send("B")],
    ),
    "cluster": (policies(entry(f"Cluster:{CLUSTER}", "Get")), [users(), send("A")]),
    "every cluster": (policies(entry("Cluster:*", "All")), [users(), create("B")]),
    "another cluster": (policies(entry("Cluster:Other", "All")), [users()]),
    "create and delete": (
        policies(entry("Topic:B*", "Create"), entry(B, "Delete")),
        [create("B"), create("A"), delete("B"), delete("A")],
    ),
    "names without regard to case": (policies(entry("topic:A", "pub", "allow", kind="custom")), [send("A"), send("a")]),
}

BAD = {
    "no entries": [{"policyType": "Custom", "entries": []}],
    "unknown resource": policies(entry("Thing:A", "Pub")),
    "no resource": policies(entry("", "Pub")),
    "unknown action": policies(entry(A, "Shout")),
    "any action": policies(entry(A, "Any")),
    "unknown decision": policies(entry(A, "Pub", "Perhaps")),
    "bad address": policies(entry(A, "Pub", ips=["1.2.3"])),
    "blank address": policies(entry(A, "Pub", ips=[" "])),
    "bad network": policies(entry(A, "Pub", ips=["1.2.3.4/33"])),
}


def user(name: str, **fields: str) -> bytes:
    """The body of 3001 and 3002."""
    return json.dumps({"username": name, **fields}).encode()


def acl(subject: str, parts: list[dict[str, Any]]) -> bytes:
    """The body of 3006 and 3007."""
    return json.dumps({"subject": subject, "policies": parts}).encode()


ME, BOB = f"User:{ALICE}", {"subject": "User:bob"}
MORE = policies(entry(A, "Pub"), entry("*", "Get", kind="Default"))
REPLACED = policies(entry(A, "Sub|Get", "Deny", ["10.0.0.0/8"]))
ADMINISTRATION: list[tuple[str, str, int, dict[str, Any], bytes]] = [
    ("a user exists", SUPER, 3001, {"username": ALICE}, user(ALICE, password="x")),
    ("no name", SUPER, 3001, {"username": ""}, user("", password="x")),
    ("no password", SUPER, 3001, {"username": "bob"}, user("bob")),
    ("the header counts", SUPER, 3001, {"username": "bob"}, user("eve", password="the-secret-of-bob")),
    ("shown", SUPER, 3004, {"username": "bob"}, b""),
    ("nobody", SUPER, 3004, {"username": "nobody"}, b""),
    ("blank", SUPER, 3004, {"username": " "}, b""),
    ("listed", SUPER, 3005, {"filter": "bo"}, b""),
    ("all listed", SUPER, 3005, {}, b""),
    ("disabled", SUPER, 3002, {"username": "bob"}, user("bob", userStatus="disable")),
    ("disabled is shown", SUPER, 3004, {"username": "bob"}, b""),
    ("disabled is refused", "bob", 3004, {"username": "bob"}, b""),
    ("enabled again", SUPER, 3002, {"username": "bob"}, user("bob", userStatus="enable")),
    ("unknown type", SUPER, 3002, {"username": "bob"}, user("bob", userType="Emperor")),
    ("without rights", "bob", 3004, {"username": "bob"}, b""),
    ("nobody is changed", SUPER, 3002, {"username": "nobody"}, user("nobody", password="x")),
    ("rights on the cluster", SUPER, 3006, BOB, acl("User:bob", policies(entry("Cluster:*", "All")))),
    ("no super user", "bob", 3001, {"username": "eve"}, user("eve", password="x", userType="Super")),
    ("a normal user", "bob", 3001, {"username": "eve"}, user("eve", password="x")),
    ("not to super user", "bob", 3002, {"username": "eve"}, user("eve", userType="Super")),
    ("not a super user", "bob", 3002, {"username": SUPER}, user(SUPER, password="x")),
    ("not without a super user", "bob", 3003, {"username": SUPER}, b""),
    ("deleted", SUPER, 3003, {"username": "eve"}, b""),
    ("deleted twice", SUPER, 3003, {"username": "eve"}, b""),
    ("policies", SUPER, 3009, {"subject": "User:bob"}, b""),
    ("policies of nobody", SUPER, 3009, {"subject": "User:nobody"}, b""),
    ("no subject", SUPER, 3009, {"subject": "bob"}, b""),
    ("policies for nobody", SUPER, 3006, {"subject": "User:nobody"}, acl("User:nobody", policies(entry(A, "Pub")))),
    ("more", SUPER, 3007, BOB, acl("User:bob", MORE)),
    ("replaced", SUPER, 3006, BOB, acl("User:bob", REPLACED)),
    ("all policies", SUPER, 3009, {"subject": "User:bob"}, b""),
    ("policies listed", SUPER, 3010, {"subjectFilter": "bob", "resourceFilter": "Topic"}, b""),
    ("none listed", SUPER, 3010, {"subjectFilter": "nobody"}, b""),
    ("one deleted", SUPER, 3008, {"subject": "User:bob", "resource": A}, b""),
    ("one of the other type", SUPER, 3008, {"subject": "User:bob", "resource": "*"}, b""),
    ("the default one", SUPER, 3008, {"subject": "User:bob", "policyType": "Default", "resource": "*"}, b""),
    ("what is left", SUPER, 3009, {"subject": "User:bob"}, b""),
    ("all deleted", SUPER, 3008, {"subject": "User:bob"}, b""),
    ("nothing is left", SUPER, 3009, {"subject": "User:bob"}, b""),
    ("none to delete", SUPER, 3008, {"subject": "User:bob"}, b""),
    *[("bad: " + name, SUPER, 3006, {"subject": ME}, acl(ME, parts)) for name, parts in BAD.items()],
    ("no body", SUPER, 3006, {"subject": ME}, b""),
    ("unsigned", "", *send("A")),
    ("unknown user", "stranger", *send("A")),
    ("wrong password", "wrong", *send("A")),
]


def request(code: int, ext: dict[str, Any], body: bytes) -> RemotingCommand:
    """The command of one request."""
    fields = {name: text(value) for name, value in ext.items() if value is not None}
    return RemotingCommand(code, version=479, ext_fields=fields, body=body)


def shown(answer: RemotingCommand) -> list[Any]:
    """Code, remark and body of an answer."""
    body = bytes(answer.body).decode()
    return [answer.code, answer.remark, json.loads(body) if body[:1] in ("[", "{") else ""]


CREDENTIALS = {
    SUPER: AclCredentials(SUPER, SUPER_PASSWORD),
    ALICE: AclCredentials(ALICE, PASSWORD),
    "bob": AclCredentials("bob", "the-secret-of-bob"),
    "stranger": AclCredentials("stranger", "the-secret-of-bob"),
    "wrong": AclCredentials(ALICE, "the-secret-of-bob"),
}


async def ask_all(ask: Ask) -> dict[str, list[Any]]:
    """The answers to all cases. A request that was admitted only counts as that, unless it is about users."""
    answers: dict[str, list[Any]] = {}
    created = await ask(SUPER, request(3001, {"username": ALICE}, user(ALICE, password=PASSWORD)))
    assert created.code == 0, created
    for name, (parts, requests) in CASES.items():
        if parts:
            done = await ask(SUPER, request(3006, {"subject": ME}, acl(ME, parts)))
            assert done.code == 0, (name, done)
        for number, (code, ext, body) in enumerate(requests):
            answer = await ask(ALICE, request(code, ext, body))
            key = f"{name} {number} {code} {ext.get('topic', ext.get('b', ''))} {ext.get('consumerGroup', '')}"
            answers[key.strip()] = [answer.code, answer.remark] if answer.code == 16 else ["admitted"]
        if parts:
            done = await ask(SUPER, request(3008, {"subject": ME}, b""))
            assert done.code == 0, (name, done)
    for name, who, code, ext, body in ADMINISTRATION:
        answers[f"{code} {name}"] = shown(await ask(who, request(code, ext, body)))
    return answers


def asker(address: str, client: Any) -> Ask:
    """Sends to one broker."""

    async def ask(who: str, command: RemotingCommand) -> RemotingCommand:
        if who:
            CREDENTIALS[who].sign(command)
        answer: RemotingCommand = await client.invoke(address, command, 20)
        return answer

    return ask


AUTH_SETTINGS: dict[str, object] = {
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "initAuthenticationUser": json.dumps({"username": SUPER, "password": SUPER_PASSWORD}),
    "innerClientAuthenticationCredentials": json.dumps({"accessKey": SUPER, "secretKey": SUPER_PASSWORD}),
    "authenticationProvider": "org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": (
        "org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider"
    ),
    "authorizationProvider": "org.apache.rocketmq.auth.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": (
        "org.apache.rocketmq.auth.authorization.provider.LocalAuthorizationMetadataProvider"
    ),
}


class _Broker(RocketMqBroker):
    async def _register_now(self) -> None:
        await trio.lowlevel.checkpoint()


async def record() -> dict[str, list[Any]]:
    """The answers of a real broker."""
    with TemporaryDirectory() as folder:
        async with open_children(Path(folder)) as children:
            release = resolve("5.5.0")
            broker = _Broker(children, release, "real", "127.0.0.1:1", "ASYNC_MASTER", extra=AUTH_SETTINGS)
            await broker.start()
            async with open_remoting_client() as client:
                return await ask_all(asker(broker.address, client))


if __name__ == "__main__":
    answers = trio.run(record)
    Path(sys.argv[1]).write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
