"""The dispatch limit: records behind it are in the log, and visible to slaves only."""

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ha.protocol.store_files import Checkpoint
from ha.store.commitlog import UNLIMITED
from ha.store.dispatch import Arrival
from ha.store.message_store import MessageStore
from tests.store.disks import MemoryDisk
from tests.store.stores import ROOT, all_bytes, check_derived, message, open_small, records


async def settled(store: MessageStore) -> None:
    """Waits until dispatch is idle."""
    await trio.testing.wait_all_tasks_blocked(0.001)


def ends(store: MessageStore) -> dict[int, int]:
    return {queue.queue_id: queue.max_offset for queue in store.queues}


@pytest.mark.parametrize("flush_mode", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_nothing_behind_the_limit_is_in_queues_index_or_arrivals(
    flush_mode: str, autojump_clock: MockClock
) -> None:
    arrived: list[Arrival] = []
    async with open_small(flush_mode=flush_mode) as store:
        store.subscribe(arrived.extend)
        store.log.limit_dispatch(0)
        results = await store.log.put([message(n, queue_id=n % 2) for n in range(6)])
        await trio.sleep(5)
        assert (store.log.dispatched_offset.value, ends(store), arrived) == (0, {}, [])
        assert await store.query("T", "k0", 9, 0, 1 << 62) == []
        for number, result in enumerate(results):
            # A limit inside the record hides all of it.
            store.log.limit_dispatch(result.next_offset - 1)
            await trio.sleep(5)
            assert store.log.dispatched_offset.value == store.log.dispatchable_end - result.size + 1
            assert await store.query("T", f"k{number}", 9, 0, 1 << 62) == []
            store.log.limit_dispatch(result.next_offset)
            await trio.sleep(5)
            assert store.log.dispatched_offset.value == result.next_offset
            assert await store.query("T", f"k{number}", 9, 0, 1 << 62) == [result.physical_offset]
            assert sum(ends(store).values()) == number + 1 == sum(len(each.tags_codes) for each in arrived)
        [last] = await store.log.put([message(9)])
        await trio.sleep(5)
        assert store.log.dispatched_offset.value == results[-1].next_offset
        store.log.limit_dispatch(UNLIMITED)
        await trio.sleep(5)
        assert store.log.dispatched_offset.value == last.next_offset
        await check_derived(store)


async def test_a_lower_limit_keeps_dispatched_messages_and_stops_new_ones(autojump_clock: MockClock) -> None:
    async with open_small() as store:
        assert store.log.dispatch_limit.value == UNLIMITED
        first, second = await store.log.put([message(0), message(1)])
        await trio.sleep(1)
        store.log.limit_dispatch(first.next_offset)
        await store.log.put([message(2)])
        await trio.sleep(1)
        assert store.log.dispatched_offset.value == second.next_offset
        assert ends(store) == {0: 2}
        store.log.limit_dispatch(UNLIMITED - 1)
        await trio.sleep(1)
        assert ends(store) == {0: 3}


@pytest.mark.parametrize("is_slave", [True, False])
@pytest.mark.parametrize("is_killed", [True, False])
async def test_the_limit_survives_a_restart(is_slave: bool, is_killed: bool, autojump_clock: MockClock) -> None:
    disk = MemoryDisk()
    async with open_small(disk, dispatch_confirmed=True, derived_flush_interval_s=1.0) as store:
        results = await store.log.put([message(n, size=900) for n in range(12)])
        await trio.sleep(1)
        assert store.log.dispatched_offset.value == 0  # nothing was ever confirmed
        confirmed = results[6].next_offset
        store.log.limit_dispatch(confirmed + 10)
        await trio.sleep(20)
        written = await all_bytes(store)
        killed = disk.kill()
    if is_killed:
        disk = killed
    disk.locked.clear()
    assert Checkpoint.unpack(disk.read_bytes(ROOT / "checkpoint")).confirm_physical_offset == confirmed + 10
    async with open_small(disk, dispatch_confirmed=True, is_slave=is_slave) as store:
        assert store.statistics().recovered_clean is not is_killed
        assert await all_bytes(store) == written
        await trio.sleep(20)
        assert (store.log.dispatched_offset.value, ends(store)) == (confirmed, {0: 7})
        store.log.limit_dispatch(UNLIMITED)
        await check_derived(store)
        assert len(await records(store)) == 12
    async with open_small(disk, is_slave=is_slave) as store:
        assert store.statistics().recovered_clean


async def test_visible_messages_stay_visible_after_a_crash_with_an_older_checkpoint() -> None:
    disk = MemoryDisk()
    async with open_small(disk, dispatch_confirmed=True, checkpoint_interval_s=1e6) as store:
        results = await store.log.put([message(n) for n in range(5)])
        store.log.limit_dispatch(results[2].next_offset)
        await settled(store)
        assert ends(store) == {0: 3}
        disk = disk.kill()
    async with open_small(disk, dispatch_confirmed=True) as store:
        await settled(store)
        assert ends(store) == {0: 3}


async def test_the_limit_of_lost_bytes_does_not_apply_to_new_ones(
    autojump_clock: MockClock,
) -> None:
    disk = MemoryDisk()
    async with open_small(disk, dispatch_confirmed=True, is_slave=True) as store, open_small() as master:
        await master.log.put([message(n) for n in range(5)])
        raw = await all_bytes(master)
        await store.log.append_raw(0, raw)
        store.log.limit_dispatch(len(raw))
        await trio.sleep(20)
        disk = disk.kill()
    disk.inodes[ROOT / "commitlog" / f"{0:020d}"].content[100:] = bytes(4096 - 100)
    for path in [path for path in disk.inodes if path.parent.name == "checksums"]:
        disk.unlink(path)
    for _ in range(2):
        async with open_small(disk, dispatch_confirmed=True, is_slave=True) as store:
            assert store.log.max_offset.value == store.log.dispatch_limit.value == 0
            disk = disk.kill()
    async with open_small(disk, dispatch_confirmed=True, is_slave=True) as store:
        await store.log.append_raw(0, raw)
        await trio.sleep(20)
        assert ends(store) == {}


async def test_without_the_option_a_start_dispatches_everything(autojump_clock: MockClock) -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        store.log.limit_dispatch(0)
        await store.log.put([message(n) for n in range(5)])
    async with open_small(disk) as store:
        assert store.statistics().recovered_clean
        assert ends(store) == {0: 5}
        await check_derived(store)
