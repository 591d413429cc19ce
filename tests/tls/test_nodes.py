"""Whole nodes: their ports encrypted, their links to each other too."""

import http.client
import logging
import shutil
import ssl
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from ha.errors import ConfigError
from ha.node import Node, open_node
from ha.node.platform import Platform
from ha.node.tls import NodeTls
from ha.protocol.codes import PutStatus, ResponseCode
from ha.protocol.record import Message
from ha.protocol.remoting import RemotingCommand
from ha.remoting import connect_tcp
from ha.replication.options import HAOptions
from ha.replication.progress import CloseReason, SlaveState
from ha.replication.statistics import Condition
from ha.tls.files import TlsFiles, client_context
from ha.tls.handshake import HANDSHAKE_TIMEOUT_S
from tests.remoting.wire import Peer
from tests.tls.nodes import client, open_pair, server, settings, until
from tests.tls.pki import Pki
from tests.tls.ports import is_served


async def until_replicated(master: Node) -> None:
    """Until the slave has confirmed a message."""
    with trio.fail_after(10):
        while (await master.put(Message(topic="greetings", queue_id=0, body=b"hello"))).status is not PutStatus.PUT_OK:
            await master.ha_service.wait_state(SlaveState.TRANSFER)


async def open_stream(address: str, context: ssl.SSLContext | None) -> trio.abc.Stream:
    stream = await connect_tcp(address)
    if context is None:
        return stream
    return trio.SSLStream(stream, context, server_hostname=address.rpartition(":")[0], https_compatible=True)


async def is_answered(address: str, context: ssl.SSLContext | None) -> bool:
    """Whether a server answers a request, or ends the connection."""
    async with await open_stream(address, context) as stream:
        return await is_served(Peer(stream), b"")


def fetch(address: str, path: str, context: ssl.SSLContext | None) -> tuple[int, Any]:
    """An HTTP answer, by the standard library's client."""
    connection = (
        http.client.HTTPConnection(address, timeout=5)
        if context is None
        else http.client.HTTPSConnection(address, timeout=5, context=context)
    )
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# Everything at once


async def test_a_cluster_in_which_nothing_is_plain(pki: Pki, tmp_path: Path) -> None:
    modes = ("tls.server.mode=enforcing", "tls.server.need.client.auth=require", "haTls=enforcing")
    everything = (*modes, "adminTls=enforcing", "tls.enable=true", *server(pki))
    master_keys = (*everything, *client(pki, "broker-a-0"))
    slave_keys = (*everything, *client(pki, "broker-a-1"))
    async with open_pair(tmp_path, master_keys, slave_keys) as (master, slave):
        await until_replicated(master)
        with trio.fail_after(10):
            await slave.registration.master.wait_value(lambda told: told is not None)
        (connection,) = master.ha_service.statistics().slaves
        assert connection.identity == "broker-a-1"
        assert slave.store.log.max_offset.value == master.store.log.max_offset.value

        friend, stranger = pki.client("friend"), client_context(TlsFiles(trust=pki.trust))
        assert master.name_server_address is not None
        for address in (master.remoting_address, slave.remoting_address, master.name_server_address):
            assert await is_answered(address, friend)
            assert not await is_answered(address, None)
            assert not await is_answered(address, stranger)
        status, body = await trio.to_thread.run_sync(fetch, master.admin_address, "/status", stranger)
        shown = msgspec.json.decode(body)["tls"]
        assert (status, shown["remoting_mode"], shown["ha_mode"], shown["admin_mode"]) == (200, *["enforcing"] * 3)
        assert set(shown["credentials"]) == {"server", "ha", "admin", "client"}
        assert shown["handshakes"]["completed"] >= 5


async def test_a_slave_copies_the_masters_tables_over_tls(pki: Pki, tmp_path: Path) -> None:
    """By the master's remoting port, which lets nobody in without TLS."""
    master_keys = (*server(pki), "tls.server.mode=enforcing")
    async with open_pair(tmp_path, master_keys, ("tls.enable=true", *client(pki, None))) as (master, slave):
        await master.broker.topics.ensure("of-the-master", 3)
        assert slave.broker.slave_sync is not None
        slave.broker.slave_sync.sync_soon()
        await until(lambda: slave.broker.topics.get("of-the-master") is not None)


async def test_by_default_a_node_is_plain(tmp_path: Path, session_pki: Pki) -> None:
    async with open_node(settings(tmp_path, "ASYNC_MASTER")) as master:
        assert await is_answered(master.remoting_address, None)
        assert not await is_answered(master.remoting_address, session_pki.client())
        status, body = await trio.to_thread.run_sync(fetch, master.admin_address, "/status", None)
        assert status == 200
        assert msgspec.json.decode(body)["tls"]["credentials"] == {}


async def test_permissive_ports_serve_both(pki: Pki, tmp_path: Path) -> None:
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *server(pki))) as master:
        assert master.name_server_address is not None
        for address in (master.remoting_address, master.name_server_address):
            assert await is_answered(address, None)
            assert await is_answered(address, pki.client())


# The HA port


@pytest.mark.parametrize(
    ("master_mode", "slave_mode", "follows", "why"),
    [
        ("permissive", "disabled", True, ""),
        ("permissive", "enforcing", True, ""),
        ("enforcing", "enforcing", True, ""),
        ("enforcing", "disabled", False, "no TLS, which haTls=enforcing requires"),
        ("disabled", "enforcing", False, "TLS handshake failed"),
    ],
)
async def test_modes_of_the_ha_port(
    master_mode: str,
    slave_mode: str,
    follows: bool,
    why: str,
    pki: Pki,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = server(pki)
    async with open_pair(
        tmp_path,
        (*keys, f"haTls={master_mode}", "haSendHeartbeatInterval=200"),
        (*keys, f"haTls={slave_mode}", "haSendHeartbeatInterval=200", *client(pki, "broker-a-1")),
    ) as (master, slave):
        assert slave.ha_client is not None
        if follows:
            await until_replicated(master)
            (connection,) = master.ha_service.statistics().slaves
            assert (connection.identity == "broker-a-1") == (slave_mode == "enforcing")
        else:
            await until(lambda: why in caplog.text)
            assert master.ha_service.statistics().slave_count == 0


async def test_a_plain_slave_may_be_silent_longer_than_a_handshake_may_take(
    pki: Pki, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """RocketMQ's slaves send nothing before haSendHeartbeatInterval."""
    tls = NodeTls(settings(tmp_path, "ASYNC_MASTER", *server(pki), "haTls=permissive"), Platform())
    assert tls.secure_slave is not None
    slave, accepted = trio.testing.memory_stream_pair()

    async def report_late() -> None:
        await trio.sleep(HANDSHAKE_TIMEOUT_S + 5)
        await slave.send_all(b"report")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(report_late)
        stream, name = await tls.secure_slave(accepted)
    assert (await stream.receive_some(), name) == (b"report", None)


@pytest.mark.parametrize("what", ["another CA", "another name", "no certificate", "expired"])
async def test_whom_an_enforcing_ha_port_keeps_out(
    what: str, pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = (*server(pki), "haTls=enforcing", "haTlsSubjects=broker-a-1;broker-a-2")
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *keys)) as master:
        (tmp_path / "others").mkdir()
        maker = Pki(tmp_path / "others") if what == "another CA" else pki
        certificate, key = maker.issue(
            "slave",
            common_name="broker-b-1" if what == "another name" else "broker-a-1",
            valid_for=timedelta(days=-1 if what == "expired" else 1),
        )
        files = TlsFiles(trust=pki.trust)
        if what != "no certificate":
            files = msgspec.structs.replace(files, certificate=certificate, key=key)
        async with await open_stream(master.ha_address, client_context(files)) as stream:
            with trio.fail_after(5), suppress(trio.BrokenResourceError):
                await stream.send_all(bytes(8))
                assert not await stream.receive_some()
        reason = {
            "another CA": "the certificate is not valid",
            "another name": "haTlsSubjects does not contain 'broker-b-1', the name in the slave's certificate",
            "no certificate": "peer did not return a certificate",
            "expired": "certificate has expired",
        }[what]
        (line,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("ha.connection_refused"))
        assert reason in line
        assert master.ha_service.statistics().closed_counts == {CloseReason.HANDSHAKE_FAILED: 1}


async def test_strangers_at_the_ha_port_keep_no_slave_out(pki: Pki, tmp_path: Path) -> None:
    """More of them than there may be connections, each silent."""
    keys = (*server(pki), "haTls=enforcing")
    async with (
        open_pair(tmp_path, keys, (*keys, *client(pki, "broker-a-1"))) as (master, slave),
        AsyncExitStack() as stack,
    ):
        await until_replicated(master)
        for _ in range(HAOptions().connection_count_max + 5):
            await stack.enter_async_context(await connect_tcp(master.ha_address))
        assert slave.ha_client is not None
        await until(lambda: master.ha_service.statistics().closed_counts.get(CloseReason.TOO_MANY_CONNECTIONS) == 5)
        async with await open_stream(master.ha_address, pki.client("broker-a-2")) as another:
            await another.send_all(b"\xff" * 8)
            assert await another.receive_some(), "the range question is answered"
        await until_replicated(master)


async def test_a_slave_does_not_follow_a_master_that_it_can_not_check(pki: Pki, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    others = Pki(tmp_path / "others")
    keys = (*server(pki), "haTls=enforcing")
    slave_keys = (*keys, *client(pki, "broker-a-1")[:2], f"tls.client.trustCertPath={others.trust}")
    async with open_pair(tmp_path, keys, slave_keys) as (_, slave):
        assert slave.ha_client is not None
        link = slave.ha_client.statistics
        await until(lambda: link().condition is Condition.CONNECT_FAILED)
        assert "the certificate is not valid" in slave.ha_client.statistics().detail


async def test_a_large_log_comes_over_tls_byte_for_byte(pki: Pki, tmp_path: Path) -> None:
    keys = (*server(pki), "haTls=enforcing", *client(pki, "broker-a-1"))
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *keys)) as master:
        for _ in range(20):
            await master.put_many([Message(topic="greetings", queue_id=0, body=bytes(99_000))] * 10)
        end = master.store.log.max_offset.value
        assert end > 4 * 4_194_304
        more = (
            f"haMasterAddress={master.ha_address}",
            f"namesrvAddr={master.name_server_address}",
            "haStartFrom=first",
        )
        async with open_node(settings(tmp_path, "SLAVE", *keys, *more)) as slave:
            with trio.fail_after(20):
                await slave.store.log.max_offset.wait_beyond(end - 1)
    logs = [sorted((tmp_path / role / "commitlog").glob("0*")) for role in ("ASYNC_MASTER", "SLAVE")]
    assert [path.name for path in logs[0]] == [path.name for path in logs[1]]
    assert b"".join(p.read_bytes() for p in logs[0])[:end] == b"".join(p.read_bytes() for p in logs[1])[:end]


# The admin port


async def test_the_admin_port_by_https(pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *server(pki), "adminTls=enforcing")) as master:
        for path in ("/live", "/ready", "/status"):
            status, _ = await trio.to_thread.run_sync(fetch, master.admin_address, path, pki.client())
            assert status == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            await trio.to_thread.run_sync(fetch, master.admin_address, "/live", None)
        await until(lambda: "admin.tls_handshake_failed" in caplog.text)
        with pytest.raises(ssl.SSLCertVerificationError):
            await trio.to_thread.run_sync(fetch, master.admin_address, "/live", ssl.create_default_context())
        # One who says nothing keeps nobody else out.
        async with await connect_tcp(master.admin_address):
            status, _ = await trio.to_thread.run_sync(fetch, master.admin_address, "/live", pki.client())
            assert status == 200


# Reloading in a running node


async def test_a_running_node_takes_new_certificates(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = (*server(pki), "tls.server.mode=enforcing")
    platform = Platform(file_check_interval_s=0.1)
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *keys), platform) as master:
        old = Peer(await open_stream(master.remoting_address, pki.client()))
        assert await is_served(old, b"")
        (tmp_path / "next").mkdir()
        following = Pki(tmp_path / "next")
        for path in following.issue("server"):
            await trio.to_thread.run_sync(shutil.copy, path, str(pki.folder))
        with caplog.at_level(logging.INFO):
            await until(lambda: "tls.reloaded role=server" in caplog.text)
        assert await is_answered(master.remoting_address, following.client())
        assert not await is_answered(master.remoting_address, pki.client())
        assert await is_served(old, b""), "who is there stays"
        await old.stream.aclose()

        for name in ("server.pem", "server.key"):
            await trio.Path(pki.folder / name).write_text("not yet")
        await until(lambda: "tls.reload_failed" in caplog.text)
        assert await is_answered(master.remoting_address, following.client())
        _, body = await trio.to_thread.run_sync(fetch, master.admin_address, "/status", None)
        assert "no PEM certificate" in msgspec.json.decode(body)["tls"]["credentials"]["server"]["error"]


async def test_an_expiring_certificate_is_in_log_and_status(
    pki: Pki, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = server(pki)
    pki.issue("server", valid_for=timedelta(days=10))
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *keys)) as master:
        await until(lambda: "tls.certificate_expiring role=server" in caplog.text)
        _, body = await trio.to_thread.run_sync(fetch, master.admin_address, "/status", None)
        assert msgspec.json.decode(body)["tls"]["credentials"]["server"]["is_expiring"] is True


# What can't be used is told at the start, by the key that names it


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("tls.server.certPath", {"tls.server.certPath": "/nowhere.pem"}),
        ("tls.server.keyPath", {"tls.server.keyPath": "/nowhere.key"}),
        ("tls.server.keyPath", {"tls.server.keyPassword": "wrong"}),
        (
            "tls.server.trustCertPath",
            {"tls.server.trustCertPath": "/nowhere", "tls.server.need.client.auth": "optional"},
        ),
        ("haTlsTrustCertPath", {"haTlsTrustCertPath": "/nowhere", "haTls": "enforcing"}),
        ("tls.client.trustCertPath", {"tls.client.trustCertPath": "/nowhere", "tls.enable": "true"}),
        ("tls.client.certPath", {"tls.client.certPath": "/nowhere", "tls.enable": "true"}),
    ],
)
async def test_files_that_can_not_be_used_end_the_start(
    key: str, change: dict[str, str], pki: Pki, tmp_path: Path
) -> None:
    certificate, secret = pki.issue("server", password="right")
    keys = {
        "tls.server.certPath": certificate,
        "tls.server.keyPath": secret,
        "tls.server.keyPassword": "right",
        "tls.server.trustCertPath": pki.trust,
    } | change
    with pytest.raises(ConfigError) as caught:
        async with open_node(settings(tmp_path, "ASYNC_MASTER", *(f"{key}={text}" for key, text in keys.items()))):
            raise AssertionError
    assert caught.value.key == key
    assert "right" not in str(caught.value)


async def test_requests_of_every_size(pki: Pki, tmp_path: Path) -> None:
    async with open_node(settings(tmp_path, "ASYNC_MASTER", *server(pki), "tls.server.mode=enforcing")) as master:
        stream = await open_stream(master.remoting_address, pki.client())
        peer = Peer(stream)
        for size in (0, 1, 16_384, 16_385, 3_000_000):
            answer = await peer.ask(RemotingCommand(9999, size, body=bytes(size)))
            assert (answer.code, answer.opaque) == (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, size)
        await stream.aclose()
