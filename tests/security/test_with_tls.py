"""Credentials inside TLS: each configured one is required, and none replaces another."""

from pathlib import Path

import msgspec
import pytest

from ha.client import AclCredentials, Admin, ClientOptions, ClientTls, Message, Producer, SendStatus
from ha.errors import BrokerError, ConnectionFailed
from ha.node import open_node
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from ha.replication.statistics import Condition
from tests.tls.nodes import client, open_pair, server, settings, until
from tests.tls.pki import Pki

SECRET, KEY = "haSharedSecret=a-secret-of-this-cluster", "the-secret-of-alice"


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    """The test's own CA."""
    return Pki(tmp_path)


def everything(pki: Pki, folder: Path) -> tuple[str, ...]:
    """Configuration of a node that requires TLS and all credentials."""
    file = folder / "plain_acl.yml"
    file.write_text(f"accounts: [{{accessKey: alice-key, secretKey: {KEY}, admin: true}}]")
    file.chmod(0o600)
    tls = ("tls.server.mode=enforcing", "tls.enable=true", "haTls=enforcing", "adminTls=enforcing")
    own = ("aclEnable=true", f"aclFile={file}", "brokerAccessKey=alice-key", f"brokerSecretKey={KEY}")
    return (*server(pki), *tls, *own, SECRET, "adminToken=a-token-of-the-operator", "haSendHeartbeatInterval=200")


async def test_acl_tls_and_secrets_together(pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = everything(pki, tmp_path)
    async with open_pair(tmp_path, (*keys, *client(pki, "broker-a-0")), (*keys, *client(pki, "broker-a-1"))) as (
        master,
        slave,
    ):
        link = slave.ha_client
        assert link is not None
        await until(lambda: link.statistics().condition is Condition.CONNECTED)
        [connection] = master.ha_service.statistics().slaves
        assert connection.identity == "broker-a-1"  # its certificate's name
        await until(lambda: master.broker.acl_guard is not None and slave.broker.topics.get("TBW102") is not None)

        tls = ClientTls(trust=pki.trust)
        servers = master.name_server_address
        alice = AclCredentials("alice-key", KEY)
        async with Producer(servers, options=ClientOptions(tls=tls), credentials=alice) as producer:
            assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
        await until(lambda: slave.store.log.max_offset.value == master.store.log.max_offset.value > 0)
        async with Producer(servers, options=ClientOptions(tls=tls)) as producer:
            with pytest.raises(BrokerError, match="No accessKey is configured"):
                await producer.send(Message("T", b"x"))
        async with Producer(servers, credentials=alice) as producer:
            with pytest.raises(ConnectionFailed):
                await producer.send(Message("T", b"x"))


@pytest.mark.parametrize("missing", ["secret", "certificate"])
async def test_certificate_and_signature_are_both_required(pki: Pki, tmp_path: Path, missing: str) -> None:
    keys = (*server(pki), "haTls=enforcing", "haSendHeartbeatInterval=200")
    secret = "haSharedSecret=a-secret-of-another-one" if missing == "secret" else SECRET
    proofs = client(pki, "broker-a-1") if missing == "secret" else client(pki, None)
    if missing == "certificate":
        # A slave that enforces would not start without one; this one's is not from the master's CA.
        others = Pki(tmp_path, "others")
        certificate, key = others.issue("stranger", common_name="broker-a-1")
        proofs = (*proofs, f"tls.client.certPath={certificate}", f"tls.client.keyPath={key}")
    async with open_pair(
        tmp_path, (*keys, SECRET, *client(pki, None)), (*keys, secret, *proofs), role="ASYNC_MASTER"
    ) as (master, slave):
        reason = "not_authenticated" if missing == "secret" else "handshake_failed"
        await until(lambda: reason in {each.value for each in master.ha_service.statistics().closed_counts})
        assert master.ha_service.statistics().slave_count == 0
        assert slave.ha_client is not None
        assert slave.ha_client.statistics().condition is not Condition.CONNECTED


async def test_require_tls_refuses_plain_connections(pki: Pki, tmp_path: Path) -> None:
    """If a port accepts plain connections, an overheard signature can be used for another request."""
    keys = [key for key in everything(pki, tmp_path) if not key.startswith(("tls.server.mode", "haTls", SECRET[:8]))]
    own = (*keys, *client(pki, None), "aclRequireTls=true")
    alice, tls = AclCredentials("alice-key", KEY), ClientTls(trust=pki.trust)
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *own)) as master:
        servers = master.name_server_address
        assert servers is not None
        async with Producer(servers, options=ClientOptions(tls=tls), credentials=alice) as producer:
            assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
        async with open_remoting_client() as plain:
            for address in (servers, master.remoting_address):
                command = RemotingCommand(28 if address != servers else 106)
                alice.sign(command)
                answer = await plain.invoke(address, command, 5)
                assert answer.code == 1
                assert "aclRequireTls: this connection is not encrypted" in (answer.remark or "")


async def test_admin_from_tls_stops_a_replayed_deletion(pki: Pki, tmp_path: Path) -> None:
    """RocketMQ's signature covers no request code: an overheard 202 of an admin is a good 215, too."""
    keys = [key for key in everything(pki, tmp_path) if not key.startswith(("tls.server.mode", "haTls", SECRET[:8]))]
    alice, tls = AclCredentials("alice-key", KEY), ClientTls(trust=pki.trust)
    overheard = RemotingCommand(202, ext_fields={"topic": "T"})
    alice.sign(overheard)
    replayed = msgspec.structs.replace(overheard, code=215)
    for origins, is_deleted in ((), True), (("aclAdminFrom=tls",), False):
        folder = tmp_path / f"{is_deleted}"
        folder.mkdir()
        async with open_node(settings(folder, "ASYNC_MASTER", *keys, *client(pki, None), *origins)) as master:
            secure = ClientOptions(tls=tls)
            async with Producer(master.name_server_address, options=secure, credentials=alice) as producer:
                assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
            async with open_remoting_client() as attacker:
                assert (await attacker.invoke(master.remoting_address, overheard, 5)).code == 0
                answer = await attacker.invoke(master.remoting_address, replayed, 5)
                assert (answer.code == 0) == is_deleted, answer.remark
                assert (master.broker.topics.get("T") is None) == is_deleted
            async with Admin(master.name_server_address, options=secure, credentials=alice) as admin:
                await admin.delete_topic("T")
