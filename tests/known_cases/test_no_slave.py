"""SLAVE_NOT_AVAILABLE although the slave runs: every component that can know the reason reports it, with a hint."""

from pathlib import Path
from typing import Any

import pytest
import trio

from ha.config import Config
from ha.protocol.codes import ResponseCode
from ha.protocol.remoting import RemotingCommand
from tests.load.memory_cluster import Host, MemoryNetwork, open_client
from tests.scenarios.brokers import Broker, eventually

MASTER, SLAVE = "10.0.0.1", "10.0.0.2"


async def test_246_blocked_ha_port() -> None:
    """alibaba/rocketmq#246: ports 9876 and 10911 were open, 10912 was not. Everything looked healthy, every send was
    SLAVE_NOT_AVAILABLE, "and the log does not show this error".

    In halog the slave logs the address, its origin, and "firewall"; the master, which sees that a host copies its
    topics without an HA connection, reports it in each remark and in its status.
    """
    network = MemoryNetwork()
    network.blocked.add(f"{MASTER}:10912")
    async with (
        Host(network, MASTER).node("SYNC_MASTER") as master,
        Host(network, SLAVE).node("SLAVE") as slave,
        open_client(network, f"{MASTER}:10911") as client,
    ):
        await trio.sleep(30)
        answer = await client.send(b"hello")
        assert answer.code == ResponseCode.SLAVE_NOT_AVAILABLE
        assert answer.remark == (
            "no slave is connected; a slave at 10.0.0.2 copies the topics but has no HA connection: can it reach "
            "10.0.0.1:10912, the HA address advertised here (brokerIP2, haListenPort)?"
        )
        assert master.ha_service.explain(0) == answer.remark
        assert slave.ha_client is not None
        why = slave.not_ready()
        assert why.startswith("not connected to its master (connect_failed: 10.0.0.1:10912 (from the name server")
        assert "no answer within 5 s, as behind a firewall" in why
        warnings = [event.text for event in slave.events.newest_first() if event.level == "WARNING"]
        assert sum("ha.client_connect_failed" in text for text in warnings) == 1

        network.blocked.clear()
        await trio.sleep(15)
        assert (await client.send(b"hello")).code == ResponseCode.SUCCESS
        assert slave.not_ready() == ""


async def test_1278_wrong_advertised_address() -> None:
    """apache/rocketmq#1278 (and #2456, #2291): of two masters one was always SLAVE_NOT_AVAILABLE. "In my case it was
    brokerIP2, which was not set": the master had registered an address of another network.

    In halog the slave reports the address, its origin, and the keys of the master that set it.
    """
    network = MemoryNetwork()
    async with (
        Host(network, MASTER).node("SYNC_MASTER", broker_ip2="172.17.0.1") as master,
        Host(network, SLAVE).node("SLAVE") as slave,
        open_client(network, f"{MASTER}:10911") as client,
    ):
        await trio.sleep(30)
        answer = await client.send(b"hello")
        assert answer.code == ResponseCode.SLAVE_NOT_AVAILABLE
        assert "can it reach 172.17.0.1:10912, the HA address advertised here (brokerIP2, haListenPort)?" in str(
            answer.remark
        )
        assert slave.not_ready() == (
            "not connected to its master (connect_failed: 172.17.0.1:10912 (from the name server, where the master "
            "registers its brokerIP2 and haListenPort): nobody listens on 172.17.0.1:10912)"
        )
        assert master.not_ready() == ""


async def test_2456_slave_connects_to_the_wrong_port() -> None:
    """apache/rocketmq#2456: a cluster "2m-2s-sync" with every port and file as in the manual, and always
    SLAVE_NOT_AVAILABLE. Here: haMasterAddress with the client port, which closes connections it can't parse."""
    network = MemoryNetwork()
    async with (
        Host(network, MASTER).node("SYNC_MASTER"),
        Host(network, SLAVE).node("SLAVE", ha_master_address=f"{MASTER}:10911") as slave,
        open_client(network, f"{MASTER}:10911") as client,
    ):
        await trio.sleep(90)
        assert "a slave at 10.0.0.2 copies the topics but has no HA connection" in str((await client.send(b"x")).remark)
        why = slave.not_ready()
        assert why.startswith("not connected to its master (")
        assert "haListenPort" in why, why


@pytest.mark.processes
def test_2456_slave_configured_as_its_own_master(tmp_path: Path) -> None:
    """A master that registers a loopback address, or one that two machines share (docker0), sends its slave to itself.
    The slave would follow its own log, in sync forever, while the master has no slave; halog detects it."""
    with Broker(tmp_path / "s", "SLAVE", namesrvAddr="127.0.0.1:1", haMasterAddress="127.0.0.1:1") as slave:
        slave.start()
        own = slave.addresses["ha"]
        slave.stop()
        slave.start(haMasterAddress=own)
        link: dict[str, Any] = eventually("it has tried", lambda: told(slave))
        assert link["detail"] == f"{own} (haMasterAddress): that is this slave itself"
        assert slave.status()["is_ready"] is False
        slave.stop()


def told(slave: Broker) -> dict[str, Any]:
    link: dict[str, Any] = slave.status()["ha_client"]
    return link if link["condition"] == "connect_failed" else {}


WAITS_FOR_NOBODY: list[dict[str, Any]] = [
    {"in_sync_replicas": 1},
    {"min_in_sync_replicas": 1},
    {"in_sync_replicas": 1, "min_in_sync_replicas": 1},
    {"all_ack_in_sync_state_set": True},
    {"all_ack_in_sync_state_set": True, "in_sync_replicas": 2},
]
WAITS: list[dict[str, Any]] = [
    {},
    {"in_sync_replicas": 2},
    {"in_sync_replicas": 3, "min_in_sync_replicas": 2},
    {"all_ack_in_sync_state_set": True, "in_sync_replicas": 2, "min_in_sync_replicas": 2},
]


async def answer_of_master(role: str, keys: dict[str, Any]) -> RemotingCommand:
    """The answer of a master without a slave to a send."""
    async with (
        Host(network := MemoryNetwork(), MASTER).node(role, **keys),
        open_client(network, f"{MASTER}:10911") as client,
    ):
        return await client.send(b"hello")


@pytest.mark.parametrize("keys", WAITS_FOR_NOBODY)
async def test_2528_sync_master_without_required_replicas_warns_at_start(
    keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """apache/rocketmq#2528: "brokerRole=SYNC_MASTER is invalid", sends succeed although no slave has anything. With 5.x
    that is the default: inSyncReplicas is 1, which the master itself satisfies, and SEND_OK needs no slave.

    The same keys have the same effect in halog, since clients and operators rely on them. But the node warns when it
    starts.
    """
    assert (await answer_of_master("SYNC_MASTER", keys)).code == ResponseCode.SUCCESS
    warnings = [
        record.getMessage() for record in caplog.records if "node.sync_master_without_slaves" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert "SEND_OK can mean this node alone; set inSyncReplicas=2" in warnings[0]


@pytest.mark.parametrize("keys", [*WAITS[1:], {"all_ack_in_sync_state_set": True}])
async def test_2528_async_master_with_replica_keys_warns_at_start(
    keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As in RocketMQ, an ASYNC_MASTER waits for nobody, whatever these keys say."""
    assert (await answer_of_master("ASYNC_MASTER", keys)).code == ResponseCode.SUCCESS
    assert caplog.text.count("node.replica_keys_unused role=ASYNC_MASTER") == 1


@pytest.mark.parametrize("keys", WAITS)
async def test_2528_sync_master_waits_by_default_keys(keys: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Without any of the keys halog uses 4.9's rule, not 5.x's default; with the others no warning is due."""
    answer = await answer_of_master("SYNC_MASTER", keys)
    assert answer.code != ResponseCode.SUCCESS
    assert "no slave is connected" in str(answer.remark)
    assert not any("node.sync_master_without_slaves" in record.getMessage() for record in caplog.records)


async def test_2528_waiting_is_the_default() -> None:
    """A configuration with only SYNC_MASTER has no 5.x key in effect."""
    config = Config(broker_role="SYNC_MASTER")
    assert (config.in_sync_replicas, config.min_in_sync_replicas, config.all_ack_in_sync_state_set) == (
        None,
        None,
        False,
    )
