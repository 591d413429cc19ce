"""A front before a broker with TLS and access control, as `python -m ha.proxy` runs it, and the example in grpc.md."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rocketmq.grpc_protocol import definition_pb2 as definition

from ha.config import ProxyConfig, load_config
from ha.errors import ConfigError
from ha.node import Node, open_node
from ha.protocol.bodies import TopicConfig
from ha.proxy.__main__ import serve_proxy
from tests.docs.pages import ROOT
from tests.proxy.site import Client, message
from tests.proxy.test_access import signed
from tests.proxy.test_receiving import ack, receive, receiving
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
async def opened(folder: Path, pki: Pki, front_file: str) -> AsyncIterator[tuple[Node, str]]:
    """A master that requires certificates and signatures, and the address of a front before it."""
    broker_file = acl_file(folder / "broker.yml", FRONT, SENDER, READER)
    required = ("tls.server.mode=enforcing", "tls.server.need.client.auth=require", "aclEnable=true", broker_file)
    async with open_node(settings(folder, "ASYNC_MASTER", *server(pki), *required)) as node:
        for topic in ("t", "other"):
            assert await node.broker.topics.update(TopicConfig(topic_name=topic)) == ""
        secret = folder / "secret"
        secret.write_text("secret-of-front\n")
        secret.chmod(0o600)
        keys = (
            *(f"namesrvAddr={node.name_server_address}", "grpcListenPort=0", *client(pki, "front")),
            *(front_file, "brokerAccessKey=the-front", f"brokerSecretKeyFile={secret}"),
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
        assert "the-sender" in refused.message or "No default permission" in refused.message
        assert node.store.queues.get("other", 0) is None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["brokerAccessKey=the-front", "brokerSecretKey=secret-of-front"], "brokerAccessKey"),
        (["aclEnable=true", "brokerAccessKey=the-front"], "brokerSecretKey"),
        (["tls.client.keyPath=k.pem"], "tls.client.certPath"),
    ],
)
def test_contradictions_are_refused(settings: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ProxyConfig, settings=settings)
    assert key in str(caught.value)
