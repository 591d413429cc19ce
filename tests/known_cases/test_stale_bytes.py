"""Bytes of truncated records must not come back."""

from random import Random

import pytest
import trio
from trio.testing import memory_stream_pair

from ha.errors import HalogError
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.statistics import Condition
from tests.store.disks import MemoryDisk
from tests.store.stores import (
    ROOT,
    SEGMENT,
    WallClock,
    all_bytes,
    check_derived,
    dispatched,
    message,
    open_small,
    records,
)

LOG = ROOT / "commitlog"
IN_THE_MIDDLE, AT_A_BEGIN = 8, 12
"""Number of intact records: the torn one is in the middle of a segment, or at its start."""


async def torn(keep: int, count: int = 20) -> tuple[MemoryDisk, list[int], bytes]:
    """A crashed store of `count` records over several segments, of which only the first `keep` are intact; returns the
    offset of each record, and the log's bytes. The records behind the torn one are valid."""
    async with open_small(running := MemoryDisk()) as store:
        results = []
        for number in range(count):
            results += await store.log.put([message(number, size=300, queue_id=number % 2)])
        written = await all_bytes(store)
        await dispatched(store)
        disk = running.kill()
    bad = results[keep].physical_offset
    path = LOG / f"{bad - bad % SEGMENT:020d}"
    disk.inodes[path].content[bad % SEGMENT + 100 : bad % SEGMENT + 120] = b"\xff" * 20
    disk.inodes[path].durable = bytes(disk.inodes[path].content)
    return disk, [result.physical_offset for result in results], written


def stored_behind(disk: MemoryDisk, end: int) -> bytes:
    """All bytes in the segments behind `end`."""
    found = b""
    for name in disk.list_dir(LOG):
        start = int(name)
        found += bytes(disk.inodes[LOG / name].content)[max(0, end - start) :]
    return found


@pytest.mark.parametrize("keep", [IN_THE_MIDDLE, AT_A_BEGIN])
async def test_10666_bytes_cut_off_by_recovery_do_not_come_back(keep: int) -> None:
    """apache/rocketmq#10666: truncateDirtyFiles moves positions in memory and leaves the bytes. They are complete
    records with valid magic, size, offset and CRC, so the next recovery takes them for messages: after a crash a slave
    had its truncated tail back, behind or among new messages.

    In halog the bytes behind the end are zero on the disk before anything is served. A crash at any operation of that
    recovery, by kill or power loss, leads to the same end, and new messages are followed by nothing.
    """
    for is_power_loss in (False, True):
        for die_at in range(40):
            disk, places, written = await torn(keep)
            end = places[keep]
            clock = WallClock(1_700_000_100_000)
            disk.die_at = len(disk.steps) + die_at
            try:
                async with open_small(disk, clock) as store:
                    assert store.log.max_offset.value == end
                    assert not any(stored_behind(disk, end))
                    [result] = await store.log.put([message(777, size=30)])
                    assert result.physical_offset == end
            except* (HalogError, OSError):
                pass
            after = disk.power_loss(Random(die_at)) if is_power_loss else disk.kill()
            async with open_small(after, clock) as store:
                found = await records(store)
                assert [record.body for record in found[:keep]] == [message(n, size=300).body for n in range(keep)]
                assert store.log.max_offset.value >= end
                bodies = [record.body for record in found[keep:]]
                assert bodies in ([], [message(777, size=30).body])
                assert (await all_bytes(store))[:end] == written[:end]
                assert not any(stored_behind(after, store.log.max_offset.value))
                await check_derived(store)


async def test_10666_log_ends_after_a_record_written_over_longer_ones() -> None:
    """The hardest case: after the truncation a record of just the right size is stored, so that an old one would start
    exactly at its end."""
    disk, places, _ = await torn(IN_THE_MIDDLE)
    clock = WallClock(1_700_000_100_000)
    async with open_small(disk, clock) as store:
        [result] = await store.log.put([message(8, size=300, queue_id=0)])
        assert result.next_offset == places[IN_THE_MIDDLE + 1]
    disk.write_bytes(ROOT / "abort", b"")
    async with open_small(disk.kill(), clock) as store:
        assert store.log.max_offset.value == result.next_offset
        assert len(await records(store)) == IN_THE_MIDDLE + 1


@pytest.mark.parametrize("is_growing", [True, False])
async def test_10666_stale_tail_is_not_taken_for_the_masters_log(is_growing: bool) -> None:
    """A tail that RocketMQ left on a slave can't be told from messages in that store alone: its records are valid.
    Comparing it with the master shows the difference: the slave reports where the logs differ and appends nothing."""
    clock = WallClock(1_700_000_000_000)
    master_disk, slave_disk = MemoryDisk(), MemoryDisk()
    async with open_small(master_disk, clock) as master, open_small(slave_disk, is_slave=True) as slave:
        for number in range(6):
            await master.log.put([message(number, size=300)])
        common = await all_bytes(master)
        await slave.log.append_raw(0, common)
        stale = MemoryDisk()
        async with open_small(stale, WallClock(1_600_000_000_000)) as other:
            for number in range(8):
                await other.log.put([message(number, size=300)])
            tail = (await all_bytes(other))[len(common) :]
        await slave.log.append_raw(len(common), tail)
        held = await all_bytes(slave)
        if is_growing:
            for number in range(100, 103):
                await master.log.put([message(number, size=300)])
        service = HAService(master.log, HAOptions())
        async with trio.open_nursery() as nursery:

            async def connect(address: str) -> trio.abc.Stream:
                ours, theirs = memory_stream_pair()
                nursery.start_soon(service.handle, theirs, "10.0.0.2:1")
                return ours

            client = HAClient(slave.log, HAOptions(), connect)
            client.set_master("10.0.0.1:10912")
            nursery.start_soon(client.run)
            await trio.sleep(60)
            statistics = client.statistics()
            assert statistics.condition is (Condition.DIVERGED if is_growing else Condition.MASTER_BEHIND)
            assert "stop this slave and empty its store" in statistics.detail
            assert service.push2_slave_max_offset <= len(common) + len(tail)
            assert not service.is_slave_ok(master.log.max_offset.value)
            nursery.cancel_scope.cancel()
        assert await all_bytes(slave) == held
