"""Groups of real processes: a master dies, is stopped, or hands over, while a producer sends.

Nothing here asserts how long something takes; what it took is in the report of a failure.
"""

from pathlib import Path

import pytest
import trio

from ha.client import PullConsumer
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
