"""The cache of verified bytes serves pulls of other queues."""

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import DamagedBytes, OffsetGone
from ha.protocol.store_files import segment_name
from ha.store.recent_reads import AHEAD_BYTES_MAX, RecentReads
from tests.store.disks import MemoryDisk, MemoryFile
from tests.store.stores import dispatched, message, open_small

BLOCK = 16


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 100)), max_size=30))
def test_cached_bytes_equal_the_log(reads: list[tuple[int, int]]) -> None:
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


async def test_interleaved_queues_are_verified_once() -> None:
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


async def test_truncated_bytes_are_not_served() -> None:
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


async def test_damaged_or_truncating_bytes_are_not_served_from_memory() -> None:
    disk = MemoryDisk()
    async with open_small(disk, segment_size=1 << 20) as store:
        await store.log.put([message(number, size=400) for number in range(8)])
    async with open_small(disk, segment_size=1 << 20) as store:
        log = store.log
        places = [(entry.physical_offset, entry.size) for entry in next(iter(store.queues)).read(0, 8)]
        begin, size = places[4]
        assert log.read_nowait(begin, size) is None
        expected = await log.read_all(begin, size, "pull")
        assert bytes(log.read_nowait(begin, size) or b"") == expected
        store.damage.add(begin + 10, begin + 20, file="", reason="", found_by="scrub", by_checksum=True)
        assert log.read_nowait(begin, size) is None
        assert bytes(log.read_nowait(begin, 10) or b"") == expected[:10]
        store.damage.forget(0, 1 << 63)
        log.truncated = trio.Event()
        assert log.read_nowait(begin, size) is None
        log.truncated = None


async def test_deleted_segments_are_not_served_from_memory() -> None:
    disk = MemoryDisk()
    async with open_small(disk, hot_window_bytes=0) as store:
        results = await store.log.put([message(number, size=400) for number in range(40)])
        place = results[0]
    async with open_small(disk, hot_window_bytes=0) as store:
        await dispatched(store)
        await store.log.read_all(0, place.size, "pull")
        assert store.log.read_nowait(0, place.size) is not None
        await store.log.delete_first()
        assert store.log.min_offset > 0
        assert store.log.read_nowait(0, place.size) is None
        with pytest.raises(OffsetGone):
            await store.log.read(0, place.size, "pull")


def test_read_ahead_doubles() -> None:
    recent = RecentReads(BLOCK)
    assert recent.ahead(0) == 0
    recent.keep(10 * BLOCK, memoryview(bytes(3 * BLOCK)))
    assert [recent.ahead(block * BLOCK) for block in (9, 13, 16, 17)] == [0, 6 * BLOCK, 6 * BLOCK, 0]
    recent.keep(20 * BLOCK, memoryview(bytes(AHEAD_BYTES_MAX)))
    assert recent.ahead(20 * BLOCK + AHEAD_BYTES_MAX) == AHEAD_BYTES_MAX


@pytest.mark.parametrize("is_cached", [True, False])
async def test_read_ahead_uses_the_page_cache_only(is_cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage there is found when it is requested, not before."""
    disk = MemoryDisk()
    async with open_small(disk, segment_size=1 << 20, checksum_block_size=1024) as store:
        results = await store.log.put([message(number, size=400) for number in range(200)])
        expected = await store.log.read_all(0, results[-1].next_offset)
    damaged_at = results[150].physical_offset
    disk.inodes[store.options.commitlog_path / segment_name(0)].content[damaged_at] ^= 1
    pread = MemoryFile.pread
    sizes: list[int] = []

    def pread_nowait(file: MemoryFile, size: int, position: int) -> bytes | None:
        sizes.append(size)
        return pread(file, size, position) if is_cached else None

    def pread_slowly(file: MemoryFile, size: int, position: int) -> bytes:
        assert not is_cached
        assert size <= 2048  # a record and what of its blocks is beside it
        return pread(file, size, position)

    async with open_small(disk, segment_size=1 << 20, checksum_block_size=1024, hot_window_bytes=0) as store:
        await dispatched(store)
        monkeypatch.setattr(MemoryFile, "pread_nowait", pread_nowait)
        monkeypatch.setattr(MemoryFile, "pread", pread_slowly)
        before = store.verified.verified_bytes
        for place in results[:145]:
            begin, end = place.physical_offset, place.next_offset
            assert await store.log.read_all(begin, end - begin, "pull") == expected[begin:end]
        assert not store.damage
        if is_cached:
            assert len(sizes) < 20
            assert store.verified.verified_bytes - before <= damaged_at
        with pytest.raises(DamagedBytes):
            await store.log.read_all(damaged_at, 400, "pull")


async def test_what_the_system_has_cached_is_read_and_verified_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    async with open_small(disk, segment_size=1 << 20, checksum_block_size=1024) as store:
        places = await store.log.put([message(number, size=400) for number in range(20)])
        expected = await store.log.read_all(0, places[-1].next_offset)
    begin, end = places[3].physical_offset, places[3].next_offset
    damaged_at = places[15].physical_offset
    disk.inodes[store.options.commitlog_path / segment_name(0)].content[damaged_at] ^= 1
    async with open_small(disk, segment_size=1 << 20, checksum_block_size=1024, hot_window_bytes=0) as store:
        log = store.log
        await dispatched(store)
        assert log.read_cached(begin, end - begin) is None, "the checksums are not loaded"
        await store.verified.load_sums(log.segment_at(0))
        monkeypatch.setattr(MemoryFile, "pread_nowait", MemoryFile.pread)
        assert bytes(log.read_cached(begin, end - begin) or b"") == expected[begin:end]
        assert bytes(log.read_nowait(begin, end - begin) or b"") == expected[begin:end]
        assert log.read_cached(damaged_at, 400) is None
        assert store.damage
        with pytest.raises(DamagedBytes):
            await log.read(damaged_at, 400, "pull")
        assert log.read_cached(log.max_offset.value, 1) is None
        log.truncated = trio.Event()
        assert log.read_cached(begin, end - begin) is None
        log.truncated = None
        monkeypatch.setattr(MemoryFile, "pread_nowait", lambda file, size, position: bytes(size - 1))
        assert log.read_cached(begin, end - begin) is None, "a part of it would take the disk"
        monkeypatch.setattr(MemoryFile, "pread_nowait", lambda file, size, position: None)
        assert log.read_cached(begin, end - begin) is None
