"""An open store whose node changes between the roles master and slave."""

import pytest
import trio
from trio.testing import MockClock

from ha.errors import CorruptLog
from ha.protocol.codes import SysFlag
from ha.protocol.record import Filler, scan_record
from ha.store.checkpoint import load_flushed_to
from ha.store.commitlog import UNLIMITED
from ha.store.message_store import MessageStore
from tests.store.disks import MemoryDisk
from tests.store.stores import ROOT, SEGMENT, WallClock, all_bytes, check_derived, message, open_small, records


async def made_log(count: int = 20) -> bytes:
    async with open_small() as master:
        for number in range(count):
            await master.log.put([message(number, size=300, queue_id=number % 3)])
        return await all_bytes(master)


async def append(store: MessageStore, log: bytes, end: int) -> None:
    at = store.log.max_offset.value
    while at < end:
        stop = min(end, at - at % SEGMENT + SEGMENT)
        await store.log.append_raw(at, log[at:stop])
        at = stop


async def check_puts(store: MessageStore) -> None:
    """Checks that puts continue each queue behind its last record, dispatched or not."""
    expected: dict[int, int] = {}
    for record in await records(store):
        expected[record.queue_id] = record.queue_offset + 1
    results = await store.log.put([message(500 + n, queue_id=n) for n in range(4)])
    assert [each.queue_offset for each in results] == [expected.get(n, 0) for n in range(4)]


async def test_a_new_master_appends_behind_undispatched_records(autojump_clock: MockClock) -> None:
    log = await made_log()
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True, dispatch_confirmed=True) as store:
        await append(store, log, len(log))
        store.log.limit_dispatch(len(log) // 2)
        await trio.sleep(5)
        before = store.log.dispatched_offset.value
        assert before < len(log) // 2
    async with open_small(disk, is_slave=True, dispatch_confirmed=True) as store:
        await store.become_master()
        assert not store.log.is_slave
        assert store.is_writable == (True, "")
        assert (store.log.max_offset.value, store.log.dispatched_offset.value) == (len(log), before)
        await check_puts(store)
        await trio.sleep(5)
        assert store.log.dispatched_offset.value == before
        store.log.limit_dispatch(UNLIMITED)
        await check_derived(store)
        await trio.sleep(20)
        assert load_flushed_to(disk, ROOT / "checkpoint") == store.log.flushed_offset.value
        # And back, to a master that never had what was put here, and once more.
        store.become_slave()
        await store.truncate(len(log))
        await store.become_master()
        await check_puts(store)
        await check_derived(store)
    async with open_small(disk, is_slave=True, dispatch_confirmed=True) as store:
        assert store.statistics().recovered_clean
        await check_derived(store)


async def test_a_new_master_with_an_earlier_clock_keeps_store_times_ascending() -> None:
    """Recovery relies on the order of store times: they never fall, even with another node's clock."""
    ahead = WallClock()
    ahead.now_ms += 3_600_000
    async with open_small(clock=ahead) as master:
        for number in range(3):
            await master.log.put([message(number)])
        log = await all_bytes(master)
    async with open_small(is_slave=True, dispatch_confirmed=True) as store:
        store.log.limit_dispatch(0)
        await append(store, log, len(log))
        await store.become_master()
        await store.log.put([message(3)])
        *before, last = [record.store_timestamp_ms for record in await records(store)]
        assert last == before[-1] > 1_700_003_600_000


async def test_a_new_master_truncates_an_incomplete_record(autojump_clock: MockClock) -> None:
    log = await made_log()
    begins = [0]
    while begins[-1] < len(log):
        found = scan_record(log, begins[-1], len(log))
        assert found is not None
        begins.append(begins[-1] + found.total_size)
    fillers = [at for at in begins[:-1] if isinstance(scan_record(log, at, len(log)), Filler)]
    assert len(fillers) >= 1
    for end in [
        *(at + part for at in begins[3:8] for part in (1, 60, 200)),
        fillers[0] + 4,
        fillers[0] + 8,
        fillers[0] + 30,
    ]:
        for limit in (0, len(log)):
            async with open_small(is_slave=True) as store:
                store.log.limit_dispatch(limit)
                await append(store, log, end)
                await trio.sleep(1)
                await store.become_master()
                assert store.log.max_offset.value == max(at for at in begins if at <= end), end
                await check_puts(store)
                store.log.limit_dispatch(UNLIMITED)
                await check_derived(store)


async def test_a_slave_with_invalid_bytes_can_not_become_master(autojump_clock: MockClock) -> None:
    log = bytearray(await made_log())
    first = int.from_bytes(log[:4], "big")
    log[first + 4 : first + 8] = b"what"
    async with open_small(is_slave=True) as store:
        await append(store, bytes(log), 3000)
        await trio.sleep(1)
        with pytest.raises(CorruptLog):
            await store.become_master()
        assert store.log.is_slave
        assert store.log.max_offset.value == 3000


async def test_records_without_queue_entries_do_not_change_queue_offsets(autojump_clock: MockClock) -> None:
    async with open_small() as master:
        await master.log.put([message(0), message(1, sys_flag=int(SysFlag.TRANSACTION_PREPARED))])
        log = await all_bytes(master)
    async with open_small(is_slave=True, dispatch_confirmed=True) as store:
        await append(store, log, len(log))
        await store.become_master()
        [result] = await store.log.put([message(2)])
        assert result.queue_offset == 1


async def test_an_empty_store_can_become_a_master() -> None:
    async with open_small(is_slave=True, dispatch_confirmed=True) as store:
        await store.become_master()
        store.log.limit_dispatch(UNLIMITED)
        [result] = await store.log.put([message(0)])
        assert (result.physical_offset, result.queue_offset) == (0, 0)
        await check_derived(store)
