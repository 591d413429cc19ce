"""A front before a broker with TLS and access control, as `python -m ha.proxy` runs it, and the example in grpc.md."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from rocketmq.grpc_protocol import definition_pb2 as definition
from rocketmq.grpc_protocol import service_pb2 as service

from ha.config import ProxyConfig, load_config
from ha.errors import ConfigError
from ha.node import Node, open_node
from ha.protocol.access_bodies import ALLOW, CUSTOM, DISABLE, PolicyEntryInfo, PolicyInfo, UserConfig
from ha.protocol.bodies import TopicConfig
from ha.proxy.__main__ import serve_proxy
from tests.docs.pages import ROOT
from tests.proxy.site import Client, message
from tests.proxy.test_access import signed
from tests.proxy.test_receiving import ack, receive, receiving
from tests.proxy.test_telemetry import chatting, producer
from tests.tls.nodes import client, server, settings
from tests.tls.pki import Pki

Code = definition.Code
[EXAMPLE] = re.findall(r"(?ms)^```properties\n(.*?)^```", (ROOT / "docs" / "grpc.md").read_text())
"""Enables TLS and access control; the tests replace its addresses, paths and accounts"""
FRONT = "- {accessKey: the-front, secretKey: secret-of-front, admin: true}"
SENDER = "- {accessKey: the-sender, secretKey: secret-of-sender, topicPerms: [t=PUB]}"
READER = "- {accessKey: the-reader, secretKey: secret-of-reader, topicPerms: [t=SUB], groupPerms: [g=SUB]}"
GENEROUS = "- {accessKey: the-sender, secretKey: secret-of-sender, defaultTopicPerm: PUB|SUB}"


def acl_file(path: Path, *accounts: str) -> str:
    path.write_text("\n".join(("accounts:", *accounts)))
    path.chmod(0o600)
    return f"aclFile={path}"


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@asynccontextmanager
async def opened(
    folder: Path, pki: Pki, *front_keys: str, broker_keys: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Node, str]]:
    """A master that requires certificates and signatures, and the address of a front before it."""
    required = ("tls.server.mode=enforcing", "tls.server.need.client.auth=require")
    if not broker_keys:
        broker_keys = "aclEnable=true", acl_file(folder / "broker.yml", FRONT, SENDER, READER)
    async with open_node(settings(folder, "ASYNC_MASTER", *server(pki), *required, *broker_keys)) as node:
        for topic in ("t", "other"):
            assert await node.broker.topics.update(TopicConfig(topic_name=topic)) == ""
        secret = folder / "secret"
        secret.write_text("secret-of-front\n")
        secret.chmod(0o600)
        keys = (
            *(f"namesrvAddr={node.name_server_address}", "grpcListenPort=0", *client(pki, "front")),
            *(*front_keys, "brokerAccessKey=the-front", f"brokerSecretKeyFile={secret}"),
        )
        (folder / "front.conf").write_text(EXAMPLE)
        config = load_config(ProxyConfig, file=folder / "front.conf", settings=keys).config
        async with serve_proxy(config) as line:
            yield node, line.rpartition("=")[2]


async def test_clients_of_a_front_have_their_own_rights(tmp_path: Path, pki: Pki) -> None:
    file = acl_file(tmp_path / "front.yml", FRONT, SENDER, READER)
    async with opened(tmp_path, pki, file) as (_, address):
        sender, reader = (signed(address, f"the-{name}", f"secret-of-{name}") for name in ("sender", "reader"))
        request = receiving("t")
        request.message_queue.broker.name = "broker-a"
        assert (await sender.send(message("t", b"x"))).status.code == Code.OK
        code, [received] = await receive(reader, request)
        assert (code, received.body) == (Code.OK, b"x")
        assert (await ack(reader, received)).status.code == Code.OK
        assert (await reader.send(message("t"))).status.code == Code.FORBIDDEN
        assert (await Client(address).send(message("t"))).status.code == Code.UNAUTHORIZED
        assert (await signed(address, "the-sender", "wrong").send(message("t"))).status.code == Code.UNAUTHORIZED


async def test_brokers_check_the_rights_of_a_fronts_clients(tmp_path: Path, pki: Pki) -> None:
    """The front allows more than the broker, and its own account may do everything."""
    file = acl_file(tmp_path / "front.yml", FRONT, GENEROUS)
    async with opened(tmp_path, pki, file) as (node, address):
        sender = signed(address, "the-sender", "secret-of-sender")
        refused = (await sender.send(message("other"))).status
        assert refused.code == Code.INTERNAL_SERVER_ERROR
        assert refused.message.endswith("No default permission for topic:other")
        assert node.store.queues.get("other", 0) is None


async def test_brokers_check_the_policies_of_users_behind_a_front(tmp_path: Path, pki: Pki) -> None:
    """The front knows names and passwords of ACL 2.0 users from its file."""
    file = acl_file(tmp_path / "front.yml", FRONT, GENEROUS)
    root = {"username": "the-front", "password": "secret-of-front"}
    users = (f"{key}=true" for key in ("authenticationEnabled", "authorizationEnabled"))
    broker_keys = (*users, f"initAuthenticationUser={json.dumps(root)}")
    async with opened(tmp_path, pki, file, broker_keys=broker_keys) as (node, address):
        entry = PolicyEntryInfo(resource="Topic:t", actions=["Pub"], decision=ALLOW)
        policy = PolicyInfo(policy_type=CUSTOM, entries=[entry])
        user = UserConfig(username="the-sender", password="secret-of-sender", policies=[policy])
        assert await node.broker.tables.users.put(user) == ""
        sender = signed(address, "the-sender", "secret-of-sender")
        assert (await sender.send(message("t"))).status.code == Code.OK
        refused = (await sender.send(message("other"))).status
        assert (refused.code, "User:the-sender has no permission" in refused.message) == (Code.FORBIDDEN, True)


@asynccontextmanager
async def opened_for_users(folder: Path, pki: Pki, *more: str) -> AsyncIterator[tuple[Node, str, UserConfig]]:
    """A master with a user who may send to `t`, and the address of a front without accounts of its own."""
    root = {"username": "the-front", "password": "secret-of-front"}
    users = ("authenticationEnabled=true", "authorizationEnabled=true")
    initial = f"initAuthenticationUser={json.dumps(root)}"
    async with opened(folder, pki, "aclEnable=false", *users, broker_keys=(*users, initial, *more)) as (node, address):
        entry = PolicyEntryInfo(resource="Topic:t", actions=["Pub"], decision=ALLOW)
        policy = PolicyInfo(policy_type=CUSTOM, entries=[entry])
        user = UserConfig(username="the-sender", password="secret-of-sender", policies=[policy])
        assert await node.broker.tables.users.put(user) == ""
        yield node, address, user


async def test_a_front_reads_users_from_brokers(tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.proxy.users.REFRESH_S", 0.2)
    async with opened_for_users(tmp_path, pki) as (node, address, user):
        sender = signed(address, "the-sender", "secret-of-sender")
        assert (await sender.send(message("t"))).status.code == Code.OK
        assert (await sender.send(message("other"))).status.code == Code.FORBIDDEN
        route = service.QueryRouteRequest(topic=definition.Resource(name="other"))
        refused = await sender.call("QueryRoute", route)
        assert refused.status.code == Code.FORBIDDEN, "the front asks for routes with its own account"
        for stranger in (
            signed(address, "the-sender", "wrong"),
            signed(address, "nobody", "secret-of-sender"),
            Client(address),
        ):
            assert (await stranger.send(message("t"))).status.code == Code.UNAUTHORIZED
        assert await node.broker.tables.users.put(msgspec.structs.replace(user, user_status=DISABLE)) == ""
        with trio.fail_after(30):
            while (await sender.send(message("t"))).status.code != Code.UNAUTHORIZED:
                pass  # the broker refuses it, until the front does


async def test_a_front_reads_a_user_again_whose_signature_a_broker_refused(tmp_path: Path, pki: Pki) -> None:
    """Its password was changed: the front has accepted the old one, and signed with it."""
    async with opened_for_users(tmp_path, pki) as (node, address, user):
        sender = signed(address, "the-sender", "secret-of-sender")
        assert (await sender.send(message("t"))).status.code == Code.OK
        assert await node.broker.tables.users.put(msgspec.structs.replace(user, password="another-secret")) == ""
        assert (await sender.send(message("t"))).status.code != Code.OK
        assert (await signed(address, "the-sender", "another-secret").send(message("t"))).status.code == Code.OK
        assert (await sender.send(message("t"))).status.code == Code.UNAUTHORIZED


@pytest.mark.parametrize("fate", ["deleted", "disabled"])
async def test_a_front_reads_a_user_again_whom_a_broker_refused(tmp_path: Path, pki: Pki, fate: str) -> None:
    """Passing on more of its calls would make the broker close the connection that all clients share."""
    async with opened_for_users(tmp_path, pki) as (node, address, user):
        sender = signed(address, "the-sender", "secret-of-sender")
        assert (await sender.send(message("t"))).status.code == Code.OK
        users = node.broker.tables.users
        if fate == "deleted":
            assert await users.delete(user.username) == ""
        else:
            assert await users.put(msgspec.structs.replace(user, user_status=DISABLE)) == ""
        assert (await sender.send(message("t"))).status.code != Code.OK
        for _ in range(12):
            assert (await sender.send(message("t"))).status.code == Code.UNAUTHORIZED
        assert node.acl_guard is not None
        assert node.acl_guard.statistics().failed_count == 1


CHANGES: dict[str, dict[str, Any]] = {
    "another password": {"password": "another-secret"},
    "no rights": {"policies": []},
    "disabled": {"user_status": DISABLE},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
async def test_producers_of_changed_users_are_not_asked(
    tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Their streams stay open, but the front shows them no more half messages."""
    monkeypatch.setattr("ha.proxy.users.REFRESH_S", 0.2)
    async with opened_for_users(tmp_path, pki, "transactionTimeOut=500", "transactionCheckInterval=500") as site:
        node, address, user = site
        topic = TopicConfig(topic_name="t", attributes={"message.type": "TRANSACTION"})
        assert await node.broker.topics.update(topic) == ""
        other = msgspec.structs.replace(user, username="the-other")
        assert await node.broker.tables.users.put(other) == ""
        clients = [signed(address, name, "secret-of-sender") for name in ("the-sender", "the-other")]
        async with chatting(clients[0]) as changed, chatting(clients[1]) as unchanged:
            for chat in (changed, unchanged):
                await chat.tell(producer("t"))
            assert await node.broker.tables.users.put(msgspec.structs.replace(user, **change)) == ""
            with trio.fail_after(10):
                while (await clients[0].send(message("t"))).status.code == Code.OK:
                    pass
                await trio.sleep(0.5)  # the front has read it
            half = message("t", b"half")
            half.system_properties.message_type = definition.TRANSACTION
            assert (await clients[1].send(half)).status.code == Code.OK
            with trio.fail_after(20):
                for _ in range(2):
                    await unchanged.answers.receive()
            with pytest.raises(trio.WouldBlock):
                changed.answers.receive_nowait()


async def test_a_front_acts_with_its_own_account(tmp_path: Path, pki: Pki) -> None:
    """It asks for the type of a topic, registers for its transactions, and is asked about them."""
    file = acl_file(tmp_path / "front.yml", FRONT, SENDER)
    broker_file = acl_file(tmp_path / "broker.yml", FRONT, SENDER)
    fast = ("transactionTimeOut=500", "transactionCheckInterval=500")
    async with opened(tmp_path, pki, file, broker_keys=("aclEnable=true", broker_file, *fast)) as (node, address):
        topic = TopicConfig(topic_name="t", attributes={"message.type": "TRANSACTION"})
        assert await node.broker.topics.update(topic) == ""
        sender = signed(address, "the-sender", "secret-of-sender")
        half = message("t", b"half")
        half.system_properties.message_type = definition.TRANSACTION
        async with chatting(sender) as chat:
            await chat.tell(producer())
            assert (await sender.send(half)).status.code == Code.OK
            with trio.fail_after(10):
                asked = (await chat.answers.receive()).recover_orphaned_transaction_command
            assert asked.message.body == b"half"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["brokerAccessKey=the-front", "brokerSecretKey=secret-of-front"], "brokerAccessKey"),
        (["aclEnable=true", "brokerAccessKey=the-front"], "brokerSecretKey"),
        (["tls.client.keyPath=k.pem"], "tls.client.certPath"),
        (["authenticationEnabled=true"], "brokerAccessKey"),
        (["aclEnable=true", "authorizationEnabled=true"], "authorizationEnabled"),
        (["namesrvAddr=h:99999"], "namesrvAddr"),
    ],
)
def test_contradictions_are_refused(settings: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ProxyConfig, settings=settings)
    assert key in str(caught.value)
