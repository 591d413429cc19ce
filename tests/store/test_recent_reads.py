"""What pulls have read and verified serves those of other queues, and nobody who asks for other bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ha.store.recent_reads import RecentReads
from tests.store.disks import MemoryDisk
from tests.store.stores import dispatched, message, open_small

BLOCK = 16


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 100)), max_size=30))
def test_what_is_found_is_what_is_there(reads: list[tuple[int, int]]) -> None:
    log = bytes(number % 251 for number in range(1000))
    recent = RecentReads(BLOCK, bytes_max=200)
    kept: list[tuple[int, int]] = []
    for block, size in reads:
        begin = block * BLOCK
        recent.keep(begin, memoryview(log)[begin : begin + size])
        kept.append((begin, begin + size))
        while sum(end - first for first, end in kept) > 200:
            kept.pop(0)
        for offset in range(0, 1000, 7):
            found = recent.find(offset)
            assert found is None or bytes(found) == log[offset : offset + len(found)]
            assert found is None or len(found)
            assert found is None or any(first <= offset < end for first, end in kept)
        first, end = kept[-1]
        assert len(recent.find(first) or b"") == end - first
    recent.clear()
    assert all(recent.find(offset) is None for offset in range(1000))


async def test_queues_in_turns_have_what_lies_between_verified_once() -> None:
    disk = MemoryDisk()
    async with open_small(disk, segment_size=1 << 20) as store:
        results = await store.log.put([message(number, size=400, queue_id=number % 4) for number in range(256)])
        expected = await store.log.read_all(0, results[-1].next_offset)
    async with open_small(disk, segment_size=1 << 20) as store:
        await dispatched(store)
        before = store.verified.verified_bytes
        for queue_id in range(4):
            for place in results[queue_id::4]:
                begin, end = place.physical_offset, place.next_offset
                assert await store.log.read_all(begin, end - begin, "pull") == expected[begin:end]
        assert store.verified.verified_bytes - before == len(expected)


async def test_what_was_cut_off_is_not_served_again() -> None:
    disk = MemoryDisk()
    async with open_small(disk, segment_size=1 << 20, hot_window_bytes=0) as store:
        await store.log.put([message(number, size=400) for number in range(8)])
    async with open_small(disk, segment_size=1 << 20, hot_window_bytes=0) as store:
        places = [(entry.physical_offset, entry.size) for entry in next(iter(store.queues)).read(0, 8)]
        begin, size = places[4]
        await store.log.read_all(begin, size, "pull")
        await store.truncate(begin)
        [after] = await store.log.put([message(9, size=399)])
        assert after.physical_offset == begin
        assert b"9." in await store.log.read_all(begin, after.size, "pull")
