"""Signatures and plain ACL with real RocketMQ: its signer, its clients with halog, the SDK with its broker."""

import base64
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.client import AclCredentials, Message, Producer, PullConsumer, PullStatus, SendStatus
from ha.errors import BrokerError
from ha.protocol.acl import SIGNATURE
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import RemotingClient, open_remoting_client
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import ClientError, open_java_client
from tests.interop.processes import Children, eventually
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.side_by_side import stored_records
from tests.security.brokers import guarded_broker

ALICE = ("alice-key", "the-secret-of-alice")
ADMIN = ("admin-key", "the-secret-of-admin")
ACCOUNTS = """
globalWhiteRemoteAddresses: [10.10.103.*]
accounts:
  - accessKey: alice-key
    secretKey: the-secret-of-alice
    defaultTopicPerm: DENY
    defaultGroupPerm: DENY
    topicPerms: [Open=PUB|SUB, Out=PUB, In=SUB]
    groupPerms: [readers=SUB]
  - {accessKey: admin-key, secretKey: the-secret-of-admin, admin: true}
"""
EXCEPTION = "org.apache.rocketmq.acl.common.AclException: "


async def test_signatures_are_those_of_the_real_hook(children: Children, release: Release) -> None:
    chance = random.Random(4)
    alphabet = "abcXYZ019_%=-äß漢字\N{GRINNING FACE}\N{FULLWIDTH LATIN CAPITAL LETTER A}"
    async with open_java_client(children, release, "127.0.0.1:1") as client:
        for number in range(40):
            names = {"".join(chance.choices(alphabet, k=chance.randint(1, 6))) for _ in range(chance.randint(0, 15))}
            fields = {name: "".join(chance.choices(alphabet, k=chance.randint(0, 20))) for name in names}
            body = chance.randbytes(chance.choice([0, 1, 100, 5000]))
            token = None if number % 3 else "token-" + chance.choice(alphabet)
            secret = "secret-" + "".join(chance.choices(alphabet, k=5))
            lines = "\n".join(f"{name}\t{value}" for name, value in fields.items())
            options: dict[str, Any] = {"accessKey": "ak", "secretKey": secret, "code": 310}
            options["fields"] = base64.b64encode(lines.encode()).decode()
            if body:
                options["body"] = base64.b64encode(body).decode()
            if token is not None:
                options["securityToken"] = token
            [signed, _] = await client.run("sign", **options)
            command = RemotingCommand(310, ext_fields=dict(fields), body=body)
            AclCredentials("ak", secret, token).sign(command)
            assert command.ext_fields[SIGNATURE] == signed["signature"], fields


@asynccontextmanager
async def halog_with_acl(children: Children) -> AsyncIterator[tuple[HalogBroker, Path]]:
    """A halog broker and name server that check permissions, and their policy file."""
    file = children.folder / "conf" / "plain_acl.yml"
    file.parent.mkdir()
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    extra: dict[str, object] = {"aclEnable": "true", "aclFile": file}
    name_server = await start_halog_name_server(children, extra)
    extra |= {"brokerAccessKey": ADMIN[0], "brokerSecretKey": ADMIN[1]}
    extra |= {"transactionTimeOut": 1000, "transactionCheckInterval": 1000}
    broker = HalogBroker(children, "master", name_server, "ASYNC_MASTER", extra=extra)
    await broker.start()
    yield broker, file


@pytest.mark.usual_release("5.5.0")
async def test_real_clients_have_the_configured_permissions(children: Children, release: Release) -> None:
    async with (
        halog_with_acl(children) as (broker, file),
        open_java_client(children, release, broker.name_server) as java,
    ):
        alice: dict[str, Any] = {"accessKey": ALICE[0], "secretKey": ALICE[1]}
        admin: dict[str, Any] = {"accessKey": ADMIN[0], "secretKey": ADMIN[1]}
        assert [event["status"] for event in await java.send("Open", 3, **alice)] == ["SEND_OK"] * 3
        assert (await java.send("Out", **alice))[0]["status"] == "SEND_OK"
        assert (await java.send("In", **admin))[0]["status"] == "SEND_OK"
        for topic, who, reason in (
            ("In", alice, "No default permission for topic:In"),
            ("Closed", alice, "No default permission for topic:Closed"),
        ):
            [event] = await java.send(topic, **who)
            assert event["status"] == "ERROR"
            assert EXCEPTION + reason in event["error"]
        for who in ({**alice, "secretKey": "the-secret-of-bob"}, {**alice, "accessKey": "nobody-key"}, {}):
            [event] = await java.send("Open", **who)  # the name server sends it nothing
            assert "No route info of this topic: Open" in event["error"]

        # Accept both its own error and the broker's: 4.9 names no topic with 37, 5.x does.
        plan: dict[str, Any] = {"plan": "commit,rollback,unknown-commit", "asked": 1, "lingerMs": 500}
        events = await java.run("transact", topic="Open", group="payers", **plan, **alice)
        assert events[-1]["missing"] == 0
        assert len([record for record in stored_records(broker) if record.topic == "Open"]) == 3 + 2

        if not release.is_4:
            return  # the newer client signs other requests like the older one; the rest would take ten seconds
        got = await java.run("push", topic="Open", group="readers", count=3, **alice)
        assert sorted(event["sequence"] for event in got if event["event"] == "got") == [0, 1, 2]
        out = children.folder / "consumed"
        assert len(await java.consume("In", out, group="readers", **alice)) == 1
        with pytest.raises(ClientError, match="No default permission for topic:Out"):
            await java.consume("Out", out, group="readers", **alice)
        with pytest.raises(ClientError, match="No default permission for group:strangers"):
            await java.consume("In", out, group="strangers", **alice)
        denied = await java.run("push", topic="Open", group="strangers", count=1, limitS=2, **alice)
        assert [event["event"] for event in denied] == ["started", "done"]

        # While everything runs: alice gets read permission where she may write, from the next request on.
        file.write_text(ACCOUNTS.replace("Out=PUB", "Out=PUB|SUB"))
        assert broker.child is not None
        errors = broker.child.log.with_suffix(".err")
        await eventually("acl.reloaded", lambda: "acl.reloaded" in errors.read_text(), 10)
        assert len(await java.consume("Out", out, group="readers", **alice)) == 1
        assert not [secret for secret in (ALICE[1], ADMIN[1]) if secret in errors.read_text()]


@pytest.mark.parametrize("release", ["4.9.7"], indirect=True)  # 5.x has no plain ACL
async def test_the_sdk_at_a_real_broker_that_checks(children: Children, release: Release) -> None:
    """4.9.7 with aclEnable=true; its answers to rejected requests are, word for word, also halog's."""
    name_server = await start_name_server(children, release)
    broker = RocketMqBroker(
        children,
        release,
        "real",
        name_server,
        "ASYNC_MASTER",
        extra={"aclEnable": "true", "brokerName": "broker-r"},
    )
    conf = children.folder / "real-home" / "conf"
    conf.mkdir(parents=True)
    (conf / "plain_acl.yml").write_text(ACCOUNTS)
    await broker.start()
    # A slave of it: its signed requests for the tables are answered; no RocketMQ master can prove its haSharedSecret.
    settings: dict[str, object] = {"brokerAccessKey": ADMIN[0], "brokerSecretKey": ADMIN[1], "brokerName": "broker-r"}
    settings |= {"haSharedSecret": "a-secret-of-this-cluster"}
    slave = HalogBroker(children, "slave", name_server, "SLAVE", 1, extra=settings)
    await slave.start()
    alice = AclCredentials(*ALICE)
    async with Producer(name_server, credentials=AclCredentials(*ADMIN)) as producer:
        for topic in ("Open", "Out", "In"):
            await _until_stored(producer, topic)
    async with Producer(name_server, credentials=alice) as producer:
        assert (await producer.send(Message("Open", b"x" * 5000))).status is SendStatus.SEND_OK
        result = await producer.send_batch([Message("Out", b"a"), Message("Out", b"b")])
        assert result.status is SendStatus.SEND_OK
        with pytest.raises(BrokerError, match="No default permission for topic:In"):
            await producer.send(Message("In", b"x"))
    async with PullConsumer(name_server, group="readers", credentials=alice) as consumer:
        [queue, *_] = await consumer.queues("In")
        assert (await consumer.pull(queue, 0)).status in (PullStatus.FOUND, PullStatus.NO_NEW_MSG)
        await consumer.commit(queue, 0)
        with pytest.raises(BrokerError, match="No default permission for topic:Out"):
            await consumer.pull((await consumer.queues("Out"))[0], 0)
    for credentials in (None, AclCredentials(ALICE[0], "the-secret-of-bob")):
        async with Producer(name_server, credentials=credentials) as producer:
            with pytest.raises(BrokerError, match=r"No accessKey is configured|Check signature failed"):
                await producer.send(Message("Open", b"x"))

    assert slave.child is not None
    errors = slave.child.log.with_suffix(".err")
    await eventually("tables copied", lambda: "slave_sync.completed" in errors.read_text(), 20)
    refused = "ha.client_not_authenticated .*RocketMQ's masters can't"
    await eventually("refused", lambda: re.search(refused, errors.read_text()), 20)
    assert ADMIN[1] not in errors.read_text()

    async with guarded_broker(children.folder / "own", ACCOUNTS) as own_broker, open_remoting_client() as client:
        for code, who, ext in (
            (310, None, {"b": "Open", "a": "g"}),
            (310, ("nobody-key", "x"), {"b": "Open", "a": "g"}),
            (310, (ALICE[0], "x"), {"b": "Open", "a": "g"}),
            (310, ALICE, {"b": "Closed", "a": "g"}),
            (310, ALICE, {"b": "In", "a": "g"}),
            (10, ALICE, {"topic": "In"}),
            (11, ALICE, {"topic": "Out", "consumerGroup": "readers"}),
            (11, ALICE, {"topic": "In", "consumerGroup": "strangers"}),
            (15, ALICE, {"topic": "In", "consumerGroup": "strangers", "queueId": "0", "commitOffset": "0"}),
            (38, ALICE, {"consumerGroup": "strangers"}),
            (35, ALICE, {"clientID": "c", "consumerGroup": "strangers"}),
            (17, ALICE, {"topic": "Mine"}),
            (25, ALICE, {}),
            (200, ALICE, {}),
            (215, ALICE, {"topic": "Open"}),
        ):
            real = await _ask(client, broker.address, code, who, ext)
            own = await _ask(own_broker.client, own_broker.address, code, who, ext)
            assert own.code == real.code == 1
            assert own.remark is not None
            assert own.remark.startswith(EXCEPTION)
            # After it RocketMQ appends the location of the exception in its source.
            assert (real.remark or "").startswith(own.remark + ", org.apache.rocketmq.acl."), (code, ext)


async def _ask(
    client: RemotingClient, address: str, code: int, who: tuple[str, str] | None, ext: dict[str, str]
) -> RemotingCommand:
    command = RemotingCommand(code, ext_fields=dict(ext))
    if who is not None:
        AclCredentials(*who).sign(command)
    return await client.invoke(address, command, 10)


async def _until_stored(producer: Producer, topic: str) -> None:
    result = await producer.send(Message(topic, b"first"), timeout_s=20)
    assert result.status is SendStatus.SEND_OK


@pytest.mark.usual_release("4.9.7")
async def test_a_real_slave_stays_out_where_a_secret_is_set(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    master = HalogBroker(
        children, "own", name_server, "ASYNC_MASTER", extra={"haSharedSecret": "a-secret-of-this-cluster"}
    )
    await master.start()
    async with Producer(name_server) as producer:
        assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
    slave = RocketMqBroker(children, release, "real-slave", name_server, "SLAVE", broker_id=1)
    await slave.start()
    assert master.child is not None
    errors = master.child.log.with_suffix(".err")
    reason = "ha.slave_disconnected .*reason=not_authenticated.*it is RocketMQ's"
    await eventually("refused", lambda: re.search(reason, errors.read_text()), 30)
    assert not any(path.read_bytes().strip(b"\0") for path in slave.commitlog.glob("*"))


async def test_real_brokers_register_at_a_guarded_name_server(children: Children, release: Release) -> None:
    """5.x signs with a configured account; 4.9 does not sign, and is accepted by its address or not at all."""
    file = children.folder / "plain_acl.yml"
    file.write_text(ACCOUNTS)
    file.chmod(0o600)
    extra = {"aclEnable": "true", "aclFile": file}
    name_server = await start_halog_name_server(children, extra)
    account: dict[str, object] = {}
    if not release.is_4:
        provider = "org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider"
        account["innerClientAuthenticationCredentials"] = json.dumps({"accessKey": ADMIN[0], "secretKey": ADMIN[1]})
        account |= {"authenticationMetadataProvider": provider, "authConfigPath": children.folder / "auth"}
    broker = RocketMqBroker(children, release, "real", name_server, "ASYNC_MASTER", extra=account)
    broker.credentials = AclCredentials(*ALICE)
    await broker.start()
    async with open_remoting_client() as client:

        async def brokers(who: tuple[str, str] | None = ALICE) -> bytes:
            answer = await _ask(client, name_server, RequestCode.GET_BROKER_CLUSTER_INFO, who, {})
            return bytes(answer.body)

        if release.is_4:
            assert b"broker-a" not in await brokers()
            file.write_text(ACCOUNTS.replace("[10.10.103.*]", "[127.0.0.1]"))
            await broker.stop()
            await broker.start()
        with trio.fail_after(40):
            while True:
                if broker.address.encode() in await brokers():
                    break
                await trio.sleep(0.1)
        if not release.is_4:
            for code in (RequestCode.WIPE_WRITE_PERM_OF_BROKER, RequestCode.UNREGISTER_BROKER):
                fields = {"brokerName": "broker-a", "brokerAddr": broker.address, "clusterName": "InteropCluster"}
                for who in (None, ALICE):
                    refused = await _ask(client, name_server, code, who, {**fields, "brokerId": "0"})
                    assert (refused.remark or "").startswith(EXCEPTION)
            assert broker.address.encode() in await brokers()
