"""TLS between halog and RocketMQ's own clients, brokers and name servers, both ways."""

import pytest

from ha.client import ClientOptions, ClientTls, Message, Producer, PullConsumer, SendStatus
from ha.errors import ConnectionFailed, RouteNotFound
from tests.interop.clusters import wait_equal
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.test_sdk import read_all, retry_on
from tests.tls.pki import Pki

TRUSTS_ANYBODY = ("-Dtls.enable=true",)


def checks(pki: Pki, name: str) -> tuple[str, ...]:
    """JVM options with which a Java client checks the server and presents a certificate."""
    certificate, key = pki.issue(name)
    return (
        "-Dtls.enable=true",
        "-Dtls.test.mode.enable=false",
        "-Dtls.client.authServer=true",
        f"-Dtls.client.trustCertPath={pki.trust}",
        f"-Dtls.client.certPath={certificate}",
        f"-Dtls.client.keyPath={key}",
    )


@pytest.mark.usual_release("5.5.0")
@pytest.mark.processes
async def test_java_clients_of_halog(children: Children, release: Release) -> None:
    pki = Pki(children.folder)
    certificate, key = pki.issue("server")
    server = {
        "tls.server.mode": "enforcing",
        "tls.server.certPath": certificate,
        "tls.server.keyPath": key,
        "tls.server.trustCertPath": pki.trust,
        "tls.server.need.client.auth": "optional",
    }
    name_server = await start_halog_name_server(children, server)
    outgoing = {"tls.enable": "true", "tls.client.trustCertPath": pki.trust}
    master = HalogBroker(children, "ha-master", name_server, "ASYNC_MASTER", extra={**server, **outgoing})
    await master.start()
    for number, jvm in enumerate((TRUSTS_ANYBODY, checks(pki, "java"))):
        topic = f"secret-{number}"
        async with open_java_client(children, release, name_server, *jvm) as client:
            sent = [*await client.send(topic, 50, size=3000), *await client.send(topic, 50, first=50, mode="async")]
            assert {event["status"] for event in sent} == {"SEND_OK"}
            await client.wait_route(topic)
            consumed = await client.consume(topic, children.folder / f"{topic}.txt")
            assert sorted(message.sequence for message in consumed) == list(range(100))
            assert {(m.sequence, m.crc) for m in consumed} == {(event["sequence"], event["crc"]) for event in sent}
    async with open_java_client(children, release, name_server) as client:
        (event,) = await client.send("secret-0", timeoutMs=2000)
        assert event["status"] == "ERROR", "it has no TLS"


@pytest.mark.usual_release("5.5.0")
async def test_the_sdk_and_a_real_broker(children: Children, release: Release) -> None:
    pki = Pki(children.folder)
    certificate, key = pki.issue("server")
    jvm = ("-Dtls.test.mode.enable=false", f"-Dtls.server.certPath={certificate}", f"-Dtls.server.keyPath={key}")
    name_server = await start_name_server(children, release, *jvm)
    master = RocketMqBroker(children, release, "master", name_server, "ASYNC_MASTER", jvm=jvm)
    await master.start()

    options = ClientOptions(tls=ClientTls(trust=pki.trust))
    async with Producer(master.name_server, options=options) as producer:
        send = lambda: producer.send(Message("secret", b"alone"))  # noqa: E731
        result = await retry_on((RouteNotFound, ConnectionFailed), send)
        assert result.status is SendStatus.SEND_OK
        for number in range(100):
            assert (await producer.send(Message("secret", b"%d" % number * 500))).status is SendStatus.SEND_OK
    async with PullConsumer(master.name_server, options=options) as consumer:
        assert len(await read_all(consumer, "secret")) == 101


@pytest.mark.usual_release("4.9.7")
@pytest.mark.processes
async def test_a_rocketmq_slave_beside_an_encrypted_one(children: Children, release: Release) -> None:
    """haTls=permissive: RocketMQ's slaves have no TLS, halog's do, and both copy one master."""
    pki = Pki(children.folder)
    certificate, key = pki.issue("node")
    tls = {
        "tls.server.certPath": certificate,
        "tls.server.keyPath": key,
        "tls.server.trustCertPath": pki.trust,
        "tls.client.certPath": certificate,
        "tls.client.keyPath": key,
        "tls.client.trustCertPath": pki.trust,
    }
    name_server = await start_halog_name_server(children)
    master = HalogBroker(children, "ha-master", name_server, "SYNC_MASTER", extra={**tls, "haTls": "permissive"})
    plain = RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1)
    secret = HalogBroker(children, "ha-slave", name_server, "SLAVE", broker_id=2, extra={**tls, "haTls": "enforcing"})
    for broker in (master, plain, secret):
        await broker.start()
    async with Producer(name_server) as producer:
        for number in range(100):
            await producer.send(Message("both", b"%d" % number * 500))
    for slave in (plain, secret):
        assert (await wait_equal(master, slave)).end > 100_000
