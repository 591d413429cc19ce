"""Consumer offsets when masters go down and come back."""

import trio

from ha.replication.statistics import Condition
from tests.load.memory_cluster import Host, MemoryNetwork, open_client

MASTER, SLAVE = "10.0.0.1", "10.0.0.2"


async def wait_until_known(network: MemoryNetwork, address: str, offset: int) -> None:
    """Waits until a broker has `offset` committed for the group of this module."""
    async with open_client(network, f"{address}:10911") as client:
        with trio.fail_after(60):
            while await client.committed() != offset:  # noqa: ASYNC110
                await trio.sleep(0.5)


async def stopped_pair() -> tuple[MemoryNetwork, Host, Host]:
    """The hosts of a stopped master and slave with ten messages and the committed offset 5."""
    network = MemoryNetwork()
    machine, other = Host(network, MASTER), Host(network, SLAVE)
    async with machine.node("ASYNC_MASTER") as master, open_client(network, f"{MASTER}:10911") as client:
        for number in range(10):
            assert (await client.send(b"%d" % number)).code == 0
        await master.broker.groups.find_or_create("CG")
        assert (await client.commit(5)).code == 0
        async with other.node("SLAVE"):
            await wait_until_known(network, SLAVE, 5)
    return network, machine, other


async def test_1094_returning_master_does_not_move_offsets_back() -> None:
    """apache/rocketmq#1094 (and #1440, alibaba/rocketmq#28): while a master was down for five minutes, consumers
    continued at its slave and committed there. When it came back, the slave overwrote the new offsets with the master's
    old ones, and groups received five minutes of messages again.

    In halog the slave keeps higher offsets and commits them to the master before its first heartbeat.
    """
    network = MemoryNetwork()
    machine, other = Host(network, MASTER), Host(network, SLAVE)
    async with machine.node("ASYNC_MASTER") as master, open_client(network, f"{MASTER}:10911") as client:
        for number in range(20):
            assert (await client.send(b"%d" % number, queue_id=number % 2)).code == 0
        async with other.node("SLAVE") as slave:
            with trio.fail_after(60):
                await slave.store.log.max_offset.wait_beyond(master.store.log.max_offset.value - 1)
        await master.broker.groups.find_or_create("CG")
        assert (await client.commit(5)).code == 0

    async with other.node("SLAVE", name_server_addresses="10.0.0.9:9876", ha_master_address="10.0.0.1:10912") as slave:
        names = Host(network, "10.0.0.9")
        async with names.node("ASYNC_MASTER", broker_name="names-only"):  # its name server, which stays up
            with_names = {"name_server_addresses": "10.0.0.9:9876"}
            async with machine.node("ASYNC_MASTER", **with_names):
                await wait_until_known(network, SLAVE, 5)
            # The master is down for five minutes.
            async with open_client(network, f"{SLAVE}:10911") as client:
                assert (await client.commit(9)).code == 0
                assert (await client.commit(3, queue_id=1)).code == 0
                await trio.sleep(300)
                assert await client.committed() == 9
            async with machine.node("ASYNC_MASTER", **with_names) as master:
                assert master.broker.offsets.get("CG", "TT", 0) == 5  # as in its own file
                await slave.ha_client.state.wait_value(lambda state: state.value == "transfer")  # type: ignore[union-attr]
                await trio.sleep(1)
                assert slave.broker.offsets.get("CG", "TT", 0) == 9
                assert master.broker.offsets.get("CG", "TT", 0) == 9
                assert master.broker.offsets.get("CG", "TT", 1) == 3

                # From then on the master's offsets are authoritative again, also when an operator resets a group.
                async with open_client(network, f"{MASTER}:10911") as client:
                    assert (await client.commit(2)).code == 0
                await wait_until_known(network, SLAVE, 2)
                assert master.broker.offsets.get("CG", "TT", 0) == 2
            # The offsets handed over are in the master's file.
            async with machine.node("ASYNC_MASTER", **with_names) as master:
                assert master.broker.offsets.get("CG", "TT", 1) == 3


async def test_1094_rejection_by_the_master_is_logged_once(caplog: object) -> None:
    """A commit for a topic or group that the master does not have is dropped, not retried forever."""
    network = MemoryNetwork()
    machine, other = Host(network, MASTER), Host(network, SLAVE)
    async with machine.node("ASYNC_MASTER") as master, other.node("SLAVE") as slave:
        slave.broker.offsets.commit("CG", "NO_SUCH_TOPIC", 0, 7)
        await trio.sleep(60)
        assert slave.broker.offsets.local_commits() == []
        assert master.broker.offsets.get("CG", "NO_SUCH_TOPIC", 0) is None
        lines = [event.text for event in slave.events.newest_first() if "commit_refused" in event.text]
        assert len(lines) == 1
        assert "topic=NO_SUCH_TOPIC" in lines[0]


async def test_1094_slave_can_restart_while_its_master_is_down() -> None:
    """Offsets committed at the slave survive its restart, and are still handed over to the master."""
    network, machine, other = await stopped_pair()
    for restart in range(2):
        async with other.node("SLAVE") as slave, open_client(network, f"{SLAVE}:10911") as client:
            assert await client.committed() == 5 + 2 * restart
            assert (await client.commit(7 + 2 * restart)).code == 0
            await trio.sleep(30)
            assert len(slave.broker.offsets.local_commits()) == 1
    async with other.node("SLAVE") as slave:
        await trio.sleep(30)
        async with machine.node("ASYNC_MASTER") as master:
            assert master.broker.offsets.get("CG", "TT", 0) == 5
            await trio.sleep(30)
            assert master.broker.offsets.get("CG", "TT", 0) == 9
            assert slave.broker.offsets.get("CG", "TT", 0) == 9
            assert slave.broker.offsets.local_commits() == []


async def test_1094_offsets_of_a_master_restarted_before_its_slave_are_kept() -> None:
    """The group may have been reset meanwhile: receiving messages again is better than missing some."""
    network, machine, other = await stopped_pair()
    async with other.node("SLAVE"), open_client(network, f"{SLAVE}:10911") as client:
        assert (await client.commit(9)).code == 0
    async with machine.node("ASYNC_MASTER") as master, open_client(network, f"{MASTER}:10911") as client:
        assert (await client.commit(2)).code == 0
        async with other.node("SLAVE") as slave:
            await trio.sleep(30)
            assert slave.broker.offsets.get("CG", "TT", 0) == 2
            assert master.broker.offsets.get("CG", "TT", 0) == 2
            assert slave.broker.offsets.local_commits() == []


async def test_a_slave_keeps_its_offsets_while_its_log_differs_from_the_masters() -> None:
    """A master returns without its log, and its consumers begin anew there. The slave, whose log may be the one that is
    kept, copied the new offsets, so that consumers of the slave's log would have skipped messages or got others again.
    """
    network, _, other = await stopped_pair()
    async with Host(network, MASTER).node("ASYNC_MASTER") as master, open_client(network, f"{MASTER}:10911") as client:
        assert (await client.send(b"of another history")).code == 0
        await master.broker.groups.find_or_create("CG")
        assert (await client.commit(1)).code == 0
        async with other.node("SLAVE") as slave:
            await trio.sleep(30)
            assert slave.ha_client is not None
            assert slave.ha_client.statistics().condition is Condition.MASTER_BEHIND
            assert slave.broker.offsets.get("CG", "TT", 0) == 5
            for _ in range(20):  # now the master's log is longer
                assert (await client.send(bytes(500))).code == 0
            await trio.sleep(30)
            assert slave.ha_client.statistics().condition is Condition.DIVERGED
            assert slave.broker.offsets.get("CG", "TT", 0) == 5
            assert master.broker.offsets.get("CG", "TT", 0) == 1
