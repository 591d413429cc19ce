"""Topics and consumer groups that a slave copies from its master."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.node import Node
from ha.protocol import java_json
from ha.protocol.bodies import GroupConfig, TopicConfig
from tests.load.memory_cluster import Client, Host, MemoryNetwork, open_client

MASTER, SLAVE = "10.0.0.1", "10.0.0.2"
TABLES = ("topics.json", "subscriptionGroup.json")
SYNCS_S = 600
"""Sixty copies of the tables"""


class EachStep(trio.abc.Instrument):
    """Calls `look` after every step of any task, so that no intermediate state is missed."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.after_task_step = lambda task: look()  # type: ignore[method-assign]


def count_writes(host: Host, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the writes of each table on `host` from now on."""
    written: Counter[str] = Counter()
    write_bytes = host.disk.write_bytes

    def counted(path: Path, content: bytes) -> None:
        written[path.name.removesuffix(".tmp")] += 1
        write_bytes(path, content)

    monkeypatch.setattr(host.disk, "write_bytes", counted)
    return written


async def heartbeat(client: Client, group: str) -> None:
    body = {"clientID": "c", "consumerDataSet": [{"groupName": group, "subscriptionDataSet": []}]}
    assert (await client.ask(34, java_json.dumps(body))).code == 0


async def wait_equal(master: Node, slave: Node) -> None:
    """Waits until the slave has the master's tables and log."""
    with trio.fail_after(60):
        while (  # noqa: ASYNC110
            slave.broker.topics.snapshot() != master.broker.topics.snapshot()
            or slave.broker.groups.snapshot() != master.broker.groups.snapshot()
            or slave.store.log.dispatched_offset.value < master.store.log.max_offset.value
        ):
            await trio.sleep(0.5)


async def test_9984_a_slave_never_lacks_what_its_master_has() -> None:
    """apache/rocketmq#9984, #9879, #10030: at each copy of the tables a slave of 5.3.3 deleted every topic and group
    and created them again. Consumers that read from it meanwhile, or after the master was down, found no topics.

    In halog a table is replaced in one step: the slave never lacks anything that the master has, however often the
    master's table changes, and has everything when the master is down.
    """
    network = MemoryNetwork()
    machine, other = Host(network, MASTER), Host(network, SLAVE)
    async with other.node("SLAVE") as slave:
        async with machine.node("ASYNC_MASTER") as master, open_client(network, f"{MASTER}:10911") as client:
            for number in range(3):
                assert (await client.send(b"%d" % number)).code == 0
            await heartbeat(client, "CG")
            await wait_equal(master, slave)
            missing: list[float] = []
            looks = 0

            def look() -> None:
                nonlocal looks
                looks += 1
                if slave.broker.topics.get("TT") is None or slave.broker.groups.get("CG") is None:
                    missing.append(trio.current_time())

            instrument = EachStep(look)
            trio.lowlevel.add_instrument(instrument)
            for number in range(10):  # a new version of both tables at each copy
                assert (await client.send(b"x", topic=f"T{number}")).code == 0
                await heartbeat(client, f"G{number}")
                if number:
                    assert await master.broker.topics.delete(f"T{number - 1}") == ""
                    assert await master.broker.groups.delete(f"G{number - 1}") == ""
                await trio.sleep(10)
            await wait_equal(master, slave)
            trio.lowlevel.remove_instrument(instrument)
            assert looks > 1000
            assert missing == []
            # Whatever the master has deleted is deleted, and nothing else.
            assert slave.broker.topics.get("T8") is None
            assert slave.broker.groups.get("G8") is None
            assert slave.broker.topics.get("T9") is not None
            assert slave.broker.groups.get("G9") is not None
        await trio.sleep(60)
        async with open_client(network, f"{SLAVE}:10911") as client:
            pull: dict[str, Any] = {"consumerGroup": "CG", "topic": "TT", "queueId": 0, "queueOffset": 0}
            pull |= {"maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subVersion": 0}
            assert (await client.ask(11, **pull, subscription="*")).code == 0


async def test_9777_slave_with_identical_tables_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """apache/rocketmq#9777: a slave raised the version of the tables that it had just copied, so the two were never
    equal, and it copied and wrote all of them each time: more writes than its master, and full garbage collections.

    In halog the copy has the master's version. Sixty copies write nothing.
    """
    network = MemoryNetwork()
    machine, other = Host(network, MASTER), Host(network, SLAVE)
    async with (
        machine.node("ASYNC_MASTER") as master,
        other.node("SLAVE") as slave,
        open_client(network, f"{MASTER}:10911") as client,
    ):
        assert (await client.send(b"1")).code == 0
        await heartbeat(client, "CG")
        await wait_equal(master, slave)
        assert slave.broker.topics.data_version == master.broker.topics.data_version
        assert slave.broker.groups.data_version == master.broker.groups.data_version
        written = count_writes(other, monkeypatch)
        await trio.sleep(SYNCS_S)
        assert [written[name] for name in TABLES] == [0, 0]
        assert (await client.send(b"2", topic="T2")).code == 0
        await wait_equal(master, slave)
        assert [written[name] for name in TABLES] == [1, 0]


async def test_9777_consumer_at_the_slave_does_not_change_the_table_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reverse case: a group that only the slave knows, because the master does not create groups automatically, is
    created there for its readers. It stays, and does not make the versions differ."""
    network = MemoryNetwork()
    machine, other = Host(network, MASTER), Host(network, SLAVE)
    async with (
        machine.node("ASYNC_MASTER", auto_create_group=False) as master,
        other.node("SLAVE") as slave,
        open_client(network, f"{SLAVE}:10911") as client,
    ):
        await wait_equal(master, slave)
        written = count_writes(other, monkeypatch)
        for _ in range(SYNCS_S // 30):
            await heartbeat(client, "CG")
            await trio.sleep(30)
            assert slave.broker.groups.get("CG") is not None
        assert slave.broker.groups.data_version == master.broker.groups.data_version
        assert [written[name] for name in TABLES] == [0, 0]


async def test_9403_attributes_of_topics_and_groups_are_copied() -> None:
    """apache/rocketmq#9403 (#9404, #9499, #9547, #9925): a slave took the attributes in its master's table for changes,
    which start with + or -, and copied no table at all once one topic had attributes.

    In halog attributes are copied unchanged. With a real master: tests/interop/test_slave_attributes.py.
    """
    network = MemoryNetwork()
    machine, other = Host(network, MASTER), Host(network, SLAVE)
    attributes = {"message.type": "DELAY", "cleanup.policy": "DELETE", "": "", "+x": "-y"}
    async with machine.node("ASYNC_MASTER") as master, other.node("SLAVE") as slave:
        assert await master.broker.topics.update(TopicConfig(topic_name="typed", attributes=attributes)) == ""
        assert await master.broker.groups.update([GroupConfig(group_name="CG", attributes=attributes)]) == ""
        await wait_equal(master, slave)
        copy = slave.broker.topics.get("typed")
        assert copy is not None
        assert copy.attributes == attributes
    async with other.node("SLAVE") as slave:  # from its own file
        copy = slave.broker.topics.get("typed")
        assert copy is not None
        assert copy.attributes == attributes
        group = slave.broker.groups.get("CG")
        assert group is not None
        assert group.attributes == attributes
