"""Simultaneous kills, and kills during recovery."""

from collections import Counter

import pytest
import trio

from ha.errors import HalogError
from ha.store.commitlog import UNLIMITED
from tests.sim.__main__ import show
from tests.sim.runner import run_plan
from tests.sim.scenario import Fault, GroupOptions, GroupPlan
from tests.store.disks import MemoryDisk
from tests.store.stores import WallClock, check_derived, message, open_small, records

CONFIRMED, WRITTEN = 7, 20


async def killed() -> MemoryDisk:
    """A killed master of a group whose other members have only the first `CONFIRMED` of `WRITTEN` messages: its
    consumers received these, and its queues have no others."""
    async with open_small(disk := MemoryDisk(), dispatch_confirmed=True) as store:
        results = []
        for number in range(WRITTEN):
            results += await store.log.put([message(number, queue_id=number % 2, size=200)])
        store.log.limit_dispatch(results[CONFIRMED - 1].next_offset)
        await trio.sleep(20)
        assert sum(queue.max_offset for queue in store.queues) == CONFIRMED
        return disk.kill()


@pytest.mark.parametrize("die_at", [None, *range(0, 30, 3)])
async def test_7689_queue_offsets_are_unique_after_two_kills(die_at: int | None) -> None:
    """apache/rocketmq#7689: the controller and the master of a broker set were killed and restarted together. The
    master took the ends of its queues from the confirmed log; new messages got the queue offsets of the messages behind
    it, and one of two was lost to consumers.

    In halog a new master dispatches its log to the end before it stores anything, also if it is killed again meanwhile.
    """
    disk = await killed()
    if die_at is not None:
        disk.die_at = len(disk.steps) + die_at
        try:
            async with open_small(disk, WallClock(1_700_000_050_000), dispatch_confirmed=True, is_slave=True) as store:
                await store.become_master()
        except* (HalogError, OSError):
            pass
        disk = disk.kill()
    async with open_small(disk, WallClock(1_700_000_100_000), dispatch_confirmed=True, is_slave=True) as store:
        await store.become_master()
        results = [(await store.log.put([message(100 + n, queue_id=n % 2)]))[0] for n in range(4)]
        assert [result.queue_offset for result in results] == [10, 10, 11, 11]
        assert sum(queue.max_offset for queue in store.queues) == CONFIRMED  # confirms nothing more
        found = await records(store)
        assert len(found) == WRITTEN + 4
        given = Counter((record.queue_id, record.queue_offset) for record in found)
        assert set(given.values()) == {1}
        assert given.keys() == {(queue_id, offset) for queue_id in (0, 1) for offset in range(12)}
        store.log.limit_dispatch(UNLIMITED)
        await check_derived(store)


@pytest.mark.parametrize("member_count", [2, 3])
def test_7689_master_and_etcd_are_lost_together(member_count: int) -> None:
    """The same with whole members under load: queue offsets are unique, and nothing acknowledged is lost."""
    options = GroupOptions(member_count=member_count, policy="all", producer_count=1, burst_max=8, pause_s=0.1, run_s=9)
    faults = []
    for moment_s in (2.0, 5.0):
        faults.append(Fault(at_s=moment_s, kind="service_down", node="master", other="p1", duration_s=0.5))
        faults.append(Fault(at_s=moment_s, kind="kill_in_write", node="master", other="p1", duration_s=0.5, number=1))
        faults.append(Fault(at_s=moment_s + 0.1, kind="kill", node="slave", other="p1", duration_s=0.4, number=1))
    outcome = run_plan(GroupPlan(seed=7689, options=options, faults=tuple(faults)))
    assert not outcome.violations, show(outcome)
    assert outcome.faults["service_down"] == 2
    assert outcome.acknowledged_count
