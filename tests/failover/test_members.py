"""Groups of real processes: a master dies, is stopped, or hands over, while a producer sends.

Nothing here asserts how long something takes; what it took is in the report of a failure.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import trio

from ha.client import Admin, PullConsumer
from tests.failover.etcd_servers import require_etcd
from tests.failover.members import LEASE_S, TOPIC, open_members, until

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _etcd() -> None:
    require_etcd()


async def test_a_master_is_killed_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    async with open_members(tmp_path, 1, 2, 3) as (members, load):
        killed = members.master_id
        assert killed is not None
        async with PullConsumer(members.name_server, group="kept") as consumer:
            queue = (await consumer.queues(TOPIC))[0]
            await consumer.pull(queue, 0)  # creates the group
            await consumer.commit(queue, 7)
            assert await consumer.committed_offset(queue) == 7
        await members.master.kill()
        await members.wait_another(killed)
        await load.go_on()
        async with PullConsumer(members.name_server, group="kept") as consumer:
            assert await consumer.committed_offset(queue) == 7
        assert killed not in members.sync_state_set
        members.start_soon(killed)
        await members.wait_ready(killed)
        await members.wait_set(1, 2, 3)
        await load.go_on()
        await load.stop()
        assert not await load.lost()
        await members.wait_equal(1, 2, 3)


async def test_a_master_that_loses_power_is_not_elected_over_one_that_has_its_messages(tmp_path: Path) -> None:
    """It is back before its lease ends, so no other member becomes master."""
    never_ms = 3_600_000
    keys = {
        "leaseTtl": 6000,
        "flushCommitLogThoroughInterval": never_ms,
        "flushIntervalCommitLog": never_ms,
    }
    async with open_members(tmp_path, 1, 2, 3, keys=keys) as (members, load):
        first = members.master_id
        assert first is not None
        assert await members.lose_power(first, seed=1)
        members.start_soon(first)
        await until("another term", lambda: members.epoch > 1 and members.master_id is not None)
        new = members.master_id
        assert new is not None
        await load.go_on()
        assert new != first
        await members.wait_set(1, 2, 3)
        await load.stop()
        assert not await load.lost()
        # All at once: the longest log is not known before all are back.
        await until("all complete", lambda: all(members.status(id_)["member"]["is_complete"] for id_ in (1, 2, 3)))
        await members.lose_power(1, 2, 3, seed=2)
        left = [id_ for id_ in (1, 2, 3) if id_ != new]
        members.start_soon(*left)
        await until("a reason", lambda: all(f"waiting for [{new}]" in members.why_not_master(id_) for id_ in left))
        members.start_soon(new)
        await members.wait_ready(1, 2, 3)
        await members.wait_set(1, 2, 3)
        await members.wait_equal(1, 2, 3)


async def test_nobody_is_elected_by_a_backup_of_etcd_in_which_the_set_was_larger(tmp_path: Path) -> None:
    async with open_members(tmp_path, 1, 2, 3) as (members, load):
        master = members.master_id
        assert master is not None
        await members.etcd.back_up(tmp_path / "backup")
        await members.wait_set(1, 2, 3)
        stale = [id_ for id_ in (1, 2, 3) if id_ != master]
        for id_ in stale:
            await members.processes[id_].kill()
        await members.wait_set(master)
        await load.go_on()
        await load.stop()
        await members.etcd.restore(tmp_path / "backup")
        members.start_soon(*stale)
        for id_ in (1, 2, 3):
            what = f"member {id_}'s reason"
            await until(what, lambda id_=id_: "restored from an older state" in members.why_not_master(id_))  # type: ignore[misc]
        await members.put_record_back(master)
        await until("the master again", lambda: members.master_id == master and members.epoch > 1)
        await members.wait_set(1, 2, 3)
        assert not await load.lost()
        await members.wait_equal(1, 2, 3)


async def test_a_frozen_master_notices_that_it_was_replaced(tmp_path: Path) -> None:
    async with open_members(tmp_path, 1, 2, 3) as (members, load):
        stopped = members.master_id
        assert stopped is not None
        process = members.master
        process.send_signal(signal.SIGSTOP)
        await members.wait_another(stopped)
        await load.go_on()
        process.send_signal(signal.SIGCONT)
        await members.wait_set(1, 2, 3)
        await load.go_on()
        await load.stop()
        assert "state=fenced" in process.tail(400)
        assert not await load.lost()
        await members.wait_equal(1, 2, 3)


async def test_neither_a_planned_switch_nor_a_stop_fails_a_send(tmp_path: Path) -> None:
    async with open_members(tmp_path, 1, 2, 3, in_flight=32) as (members, load):
        first = members.master_id
        target = next(id_ for id_ in (1, 2, 3) if id_ != first)
        await members.ask_to_switch(target)
        assert await members.wait_another(first) == target
        await load.go_on()
        # A master that stops hands over.
        assert await members.master.stop() == 0
        assert await members.wait_another(target) != target
        assert target not in members.sync_state_set
        await load.go_on()
        # Nor do sends wait for a slave that was stopped.
        slave = next(id_ for id_ in (1, 2, 3) if id_ not in (target, members.master_id))
        assert await members.processes[slave].stop() == 0
        await until("the set without it", lambda: members.sync_state_set == {members.master_id})
        await load.go_on()
        await load.stop()
        assert not load.failed
        assert not await load.lost()


async def test_a_frozen_slave_is_not_waited_for_longer_than_its_lease(tmp_path: Path) -> None:
    never_ms = 3_600_000
    keys = {"haMaxTimeSlaveNotCatchup": never_ms, "haHousekeepingInterval": never_ms}
    async with open_members(tmp_path, 1, 2, 3, keys=keys) as (members, load):
        slave = next(id_ for id_ in (1, 2, 3) if id_ != members.master_id)
        members.processes[slave].send_signal(signal.SIGSTOP)
        await until("the set without it", lambda: members.sync_state_set == {1, 2, 3} - {slave})
        await load.go_on()
        members.processes[slave].send_signal(signal.SIGCONT)
        await members.wait_set(1, 2, 3)
        await load.stop()
        assert not await load.lost()
        await members.wait_equal(1, 2, 3)


@pytest.mark.parametrize("with_copy", [False, True])
async def test_duplicate_broker_id_is_rejected(with_copy: bool, tmp_path: Path) -> None:
    """Of a slave and of the master: the first process continues, name servers know only it, and nothing is lost."""
    async with open_members(tmp_path, 1, 2, 3) as (members, load):
        master = members.master_id
        assert master is not None
        term = members.view.master_revision
        closed_counts = {id_: members.status(id_)["ha"]["closed_counts"] for id_ in (1, 2, 3)}
        for id_ in (master, next(id_ for id_ in (1, 2, 3) if id_ != master)):
            duplicate = members.start_duplicate_soon(id_, with_copy=with_copy)
            await members.check_refused(duplicate, id_)
            assert members.processes[id_].exit_code is None
            assert str(members.ports[id_]) in members.view.members[id_].broker_address
        assert members.view.master_revision == term
        assert members.sync_state_set == {1, 2, 3}
        for id_ in (1, 2, 3):
            assert members.status(id_)["member"]["id_taken_by"] is None
            assert members.status(id_)["ha"]["closed_counts"] == closed_counts[id_]
        async with Admin(members.name_server) as admin:
            [group] = await admin.brokers()
        ports = sorted(int(address.rpartition(":")[2]) for address in group.addresses.values())
        assert ports == sorted(members.ports.values())
        await load.go_on()
        await load.stop()
        assert not load.failed
        assert not await load.lost()
        await members.wait_equal(1, 2, 3)


async def test_without_etcd_nothing_is_acknowledged_after_the_lease(tmp_path: Path) -> None:
    async with open_members(tmp_path, 1, 2, 3) as (members, load):
        etcd = members.etcd
        etcd.pause()
        await trio.sleep(2 * LEASE_S)
        count = len(load.acknowledged)
        await trio.sleep(2 * LEASE_S)
        assert len(load.acknowledged) == count
        etcd.resume()
        await load.go_on()
        await members.wait_set(1, 2, 3)
        await load.stop()
        assert not await load.lost()
        await members.wait_equal(1, 2, 3)
