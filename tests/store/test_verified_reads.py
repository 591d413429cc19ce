"""Proofs of the bytes for a damaged range, reads beside other tasks, and blocks that can't be read."""

import errno
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ha.errors import DamagedBytes, DiskFailed, OffsetGone
from ha.protocol.record import Message
from ha.protocol.store_files import segment_name
from ha.store.checksums import SegmentSums
from ha.store.message_store import open_message_store
from tests.store.disks import MemoryDisk, MemoryFile, run_inline
from tests.store.stores import (
    ROOT,
    SEGMENT,
    WallClock,
    all_bytes,
    check_derived,
    dispatched,
    message,
    open_small,
    small_options,
)


@pytest.mark.parametrize("size_max", [4 << 20, 12 << 20])
async def test_a_damaged_record_of_any_size_is_proven_as_a_whole(size_max: int) -> None:
    """Without checksums only the whole record proves it; records can be as large as a frame."""
    async with open_small(MemoryDisk(), segment_size=16 << 20, message_size_max=size_max) as store:
        largest = Message(topic="T", queue_id=0, body=b"x" * size_max)
        results = await store.log.put([message(0), largest, message(2)])
        begin, end = results[1].physical_offset, results[1].next_offset
        raw = await store.log.read_all(begin, end - begin)
        damage = store.damage.add(begin, end, file="f", reason="r", found_by="scrub", by_checksum=False)
        assert await store.repair.proves(damage, begin, raw) == len(raw)
        assert await store.repair.proves(damage, begin, raw[:-1]) == 0
        assert await store.repair.is_sound(damage)


async def test_the_first_part_of_a_range_is_proven_by_queued_records() -> None:
    """Sound records of another history in the same places differ in queue, queue offset or tags."""
    async with open_small(MemoryDisk()) as other:
        results = await other.log.put([message(number, size=400, queue_id=(number == 3)) for number in range(6)])
        foreign = await other.log.read_all(0, results[-1].next_offset)
    async with open_small(MemoryDisk()) as store:
        results = await store.log.put([message(number, size=400) for number in range(6)])
        await dispatched(store)
        begin, end = results[1].physical_offset, results[-1].next_offset
        raw = await store.log.read_all(begin, end - begin)
        damage = store.damage.add(begin, end, file="f", reason="r", found_by="scrub", by_checksum=False)
        repair = store.repair
        assert await repair.proves_alone(damage, begin, raw) == end - begin
        assert await repair.proves_alone(damage, begin, raw[:-1]) == results[-1].physical_offset - begin
        assert len(foreign) == end
        assert await repair.proves(damage, begin, foreign[begin:]) == end - begin
        assert await repair.proves_alone(damage, begin, foreign[begin:]) == results[3].physical_offset - begin
        tampered = raw.replace(b"tag2", b"tag3")
        assert await repair.proves(damage, begin, tampered) == end - begin
        assert await repair.proves_alone(damage, begin, tampered) == results[2].physical_offset - begin


async def test_the_healed_part_of_a_range_is_read_and_dispatched() -> None:
    disk = MemoryDisk()
    async with open_small(disk) as store:
        results = await store.log.put([message(number, size=400) for number in range(6)])
        await dispatched(store)
    for path in [path for path in disk.inodes if {"checksums", "consumequeue"} & {*path.parts}]:
        del disk.inodes[path]
    begin, end = results[1].physical_offset, results[4].next_offset
    [content] = [inode.content for path, inode in disk.inodes.items() if path.parent.name == "commitlog"]
    right = bytes(content[begin:end])
    content[begin:end] = bytes(end - begin)
    async with open_small(disk) as store:
        await wait_all_tasks_blocked()
        [damage] = store.damage.open
        assert (damage.begin, damage.end) == (begin, end)
        assert store.log.dispatched_offset.value == begin
        middle = results[3].physical_offset
        await store.repair.rewrite(begin, right[: middle - begin])
        store.damage.shrink(damage, middle, "a peer")
        store.repair.after_heal(damage)
        with trio.fail_after(60):
            await store.log.dispatched_offset.wait_beyond(middle - 1)
        assert await store.log.read_all(begin, middle - begin) == right[: middle - begin]
        with pytest.raises(DamagedBytes):
            await store.log.read(middle, 1)
        await store.repair.rewrite(middle, right[middle - begin :])
        assert await store.repair.is_sound(damage)
        store.damage.healed(damage, "another")
        store.repair.after_heal(damage)
        await check_derived(store)


async def test_the_flusher_fails_after_a_failed_sync_of_healed_bytes(autojump_clock: MockClock) -> None:
    """Bytes appended before were lost with it: the kernel writes them no more, and the next sync of the same descriptor
    succeeded."""
    disk = MemoryDisk()
    with pytest.RaisesGroup(DiskFailed, flatten_subgroups=True):
        async with open_small(disk, flush_mode="SYNC_FLUSH") as store:
            results = await store.log.put([message(number) for number in range(3)])
            begin, end = results[1].physical_offset, results[1].next_offset
            raw = await store.log.read_all(begin, end - begin)
            store.damage.add(begin, end, file="f", reason="r", found_by="scrub", by_checksum=False)
            disk.refuse = lambda operation, path: errno.EIO if operation == "sync" else None
            with pytest.raises(OSError, match="EIO"):
                await store.repair.rewrite(begin, raw)
            disk.refuse = lambda operation, path: None
            await store.log.put([message(3)])
            await trio.sleep(60)


async def test_bytes_fetched_before_a_truncation_are_not_written_over_newer_ones() -> None:
    """A peer sends the records of an earlier term; meanwhile the log is truncated before them, and grows again."""
    async with open_small() as store:
        results = await store.log.put([message(number) for number in range(6)])
        await dispatched(store)
        begin, end = results[3].physical_offset, results[-1].next_offset
        raw = await store.log.read_all(begin, end - begin)
        damage = store.damage.add(begin, end, file="f", reason="r", found_by="scrub", by_checksum=False)
        await store.truncate(results[2].physical_offset)
        await store.log.put([message(number) for number in range(10, 14)])
        assert store.log.max_offset.value >= end
        newer = await all_bytes(store)
        assert await store.repair.proves(damage, begin, raw) == len(raw)
        with pytest.raises(OffsetGone):
            await store.repair.rewrite(begin, raw)
        assert await all_bytes(store) == newer


async def test_a_read_that_waits_for_checksums_of_new_bytes_finds_no_damage(
    autojump_clock: MockClock,
) -> None:
    """It compared a block up to an old end of the log with a checksum that covers more."""
    gate = trio.Event()

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "load" and arguments == (0,):
            await gate.wait()
        return await run_inline(call, *arguments)

    options = small_options(hot_window_bytes=0, checkpoint_interval_s=1e6, flush_interval_s=1e6, scrub_bytes_per_s=0)
    async with open_message_store(options, disk=MemoryDisk(), run_blocking=slowly, wall_clock_ms=WallClock()) as store:
        [first] = await store.log.put([message(0)])
        await store.flusher.flush()
        found: list[bytes] = []

        async def read() -> None:
            found.append(bytes(await store.log.read(first.physical_offset, first.size)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.verified.cover_flushed)
            await wait_all_tasks_blocked()
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            await store.log.put([message(1)])
            await store.flusher.flush()
            gate.set()
        assert len(found[0]) == first.size
        assert store.damage.found_count == 0


async def test_a_read_that_waits_for_a_walk_returns_no_damaged_bytes(autojump_clock: MockClock) -> None:
    """It had checked for damage before the walk, and took the walked bytes for sound."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        results = await store.log.put([message(number, size=400) for number in range(6)])
        await dispatched(store)
    gate = trio.Event()
    gate.set()

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "load" and arguments == (0,):
            await gate.wait()
        return await run_inline(call, *arguments)

    options = small_options(hot_window_bytes=0, scrub_bytes_per_s=0)
    async with open_message_store(options, disk=disk, run_blocking=slowly, wall_clock_ms=WallClock()) as store:
        assert store.verified.trusted_from > results[1].physical_offset
        # As RocketMQ writes it: without checksums.
        for path in [path for path in disk.inodes if path.parent.name == "checksums"]:
            del disk.inodes[path]
        store.verified.checksums._loaded.clear()
        disk.inodes[ROOT / "commitlog" / segment_name(0)].content[results[1].physical_offset + 200] ^= 1
        gate = trio.Event()
        refused: list[DamagedBytes] = []

        async def read() -> None:
            with pytest.raises(DamagedBytes) as caught:
                await store.log.read(results[1].physical_offset, results[1].size)
            refused.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.verified._walk_to, store.log.segments[0], 0)
            await wait_all_tasks_blocked()
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            gate.set()
        assert [each.begin for each in refused] == [results[1].physical_offset]


async def test_a_damaged_block_that_a_read_skips_is_not_cached(autojump_clock: MockClock) -> None:
    """The rest of the block has no checksum yet; its covered part is damaged and was not requested."""
    disk = MemoryDisk()
    options = small_options(hot_window_bytes=0, checkpoint_interval_s=1e6, flush_interval_s=1e6, scrub_bytes_per_s=0)
    async with open_message_store(options, disk=disk, run_blocking=run_inline, wall_clock_ms=WallClock()) as store:
        [damaged] = await store.log.put([message(0)])
        await store.flusher.flush()
        await store.verified.cover_flushed()
        [behind] = await store.log.put([message(1)])
        disk.inodes[ROOT / "commitlog" / segment_name(0)].content[damaged.physical_offset + 50] ^= 1
        assert len(await store.log.read(behind.physical_offset, behind.size, "pull")) == behind.size
        with pytest.raises(DamagedBytes):
            await store.log.read(damaged.physical_offset, damaged.size, "pull")


async def test_a_peer_with_part_of_a_block_does_not_make_damage_sound() -> None:
    """What it had equalled the bytes here; all of the block was taken for sound, and sent to slaves."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        results = await store.log.put([message(number, size=400) for number in range(6)])
        end = results[-1].next_offset
        await store.flusher.flush()
        await dispatched(store)
        damage = store.damage.add(0, end, file="f", reason="r", found_by="scrub", by_checksum=True)
        raw = bytes(disk.inodes[ROOT / "commitlog" / segment_name(0)].content[:end])
        assert not await store.repair.agrees(damage, raw[: results[1].physical_offset])
        assert await store.repair.agrees(damage, raw)


async def test_damage_in_a_block_that_grows_is_proven() -> None:
    """Once the checksum of the log's last block covered newer records, too, the block could never be healed."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        [first] = await store.log.put([message(0)])
        await dispatched(store)
        right = await all_bytes(store)
    content = disk.inodes[ROOT / "commitlog" / segment_name(0)].content
    content[first.next_offset - 3] ^= 1
    async with open_small(disk) as store:
        with pytest.raises(DamagedBytes):
            await store.log.read(0, 1)
        [damage] = store.damage.open
        assert (damage.begin, damage.end) == (0, first.next_offset)
        await store.log.put([message(1)])
        await store.flusher.flush()
        await store.verified.cover_flushed()
        assert not await store.repair.is_sound(damage)
        assert await store.repair.proves(damage, 0, bytes(content[: damage.end])) == 0
        assert await store.repair.proves(damage, 0, right[:-1]) == 0
        assert await store.repair.proves(damage, 0, right) == len(right)
        await store.repair.rewrite(0, right)
        assert await store.repair.is_sound(damage)


async def test_checksums_are_made_after_a_segment_without_them_was_deleted() -> None:
    """Retention can delete a segment just after its end was flushed; then no more checksums were made."""
    async with open_small(checkpoint_interval_s=1e6, flush_interval_s=1e6) as store:
        await store.log.put([message(number, size=400) for number in range(30)])
        await dispatched(store)
        await store.log.delete_first()
        await store.flusher.flush()
        await store.verified.cover_flushed()
        assert store.verified.checksums.known_end() == store.log.flushed_offset.value


async def test_a_new_slave_whose_log_begins_later_makes_checksums(autojump_clock: MockClock) -> None:
    """As one that follows a master whose first segments are deleted; until its next start it made none."""
    disk = MemoryDisk()
    async with open_small() as master:
        await master.log.put([message(number, size=400) for number in range(30)])
        raw = await all_bytes(master)
    begin, end = SEGMENT, 3 * SEGMENT
    async with open_small(disk, is_slave=True, hot_window_bytes=SEGMENT, checksum_block_size=1024) as slave:
        for at in range(begin, end, 512):
            await slave.log.append_raw(at, raw[at : at + 512])
        await dispatched(slave)
        await trio.sleep(30)
        assert slave.verified.checksums.known_end() == slave.log.flushed_offset.value == end
        disk.inodes[ROOT / "commitlog" / segment_name(begin)].content[700] ^= 1
        with pytest.raises(DamagedBytes):
            await slave.log.read(begin + 700, 1)


@pytest.mark.parametrize("size_max", [3 * 1024, SEGMENT])
async def test_a_block_that_the_disk_can_not_read_is_the_damaged_one(
    size_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block of the read was listed, found sound by the healer, read again, and so on."""
    disk = MemoryDisk()
    async with open_small(disk, checksum_block_size=1024, hot_window_bytes=0) as store:
        await store.log.put([message(number, size=400) for number in range(12)])
        await dispatched(store)
        right = await all_bytes(store)
        await store.flusher.flush()
        await store.verified.cover_flushed()
        pread = MemoryFile.pread

        def fail(file: MemoryFile, size: int, position: int) -> bytes:
            if file.path == ROOT / "commitlog" / segment_name(0) and position < 3000 < position + size:
                raise OSError(errno.EIO, "Input/output error", str(file.path))
            return pread(file, size, position)

        monkeypatch.setattr(MemoryFile, "pread", fail)
        for begin in (0, 1024):
            assert await store.log.read(begin, size_max, "replication") == right[begin : begin + 1024]
        with pytest.raises(DamagedBytes, match="the disk can't read it"):
            await store.log.read(2048, size_max, "replication")
        assert [(damage.begin, damage.end) for damage in store.damage.open] == [(2048, 3072)]
        assert await store.log.read(3072, 1024, "replication") == right[3072:SEGMENT]


async def test_damage_that_is_not_listed_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks have no checksum, it counted as sound, and got one."""
    monkeypatch.setattr("ha.store.damage.OPEN_COUNT_MAX", 0)
    disk = MemoryDisk()
    async with open_small(disk, checksum_block_size=1024, hot_window_bytes=0) as store:
        await store.log.put([message(number, size=400) for number in range(12)])
        await dispatched(store)
    async with open_small(disk, checksum_block_size=1024, hot_window_bytes=0, scrub_bytes_per_s=0) as store:
        # As RocketMQ writes it: without checksums.
        for path in [path for path in disk.inodes if path.parent.name == "checksums"]:
            del disk.inodes[path]
        store.verified.checksums.forget()
        right = bytes(disk.inodes[ROOT / "commitlog" / segment_name(0)].content)
        disk.inodes[ROOT / "commitlog" / segment_name(0)].content[2500] ^= 1
        for _ in range(2):
            assert await store.log.read(0, 1024) == right[:1024]
            for position in (2500, 3500):
                with pytest.raises(DamagedBytes):
                    await store.log.read(position, 1)
        await store.scrub.round()
        disk.inodes[ROOT / "commitlog" / segment_name(0)].content[2500] ^= 1
        assert await store.log.read(2500, 1) == right[2500:2501]


async def test_a_checksum_file_that_can_not_be_made_again_at_once_is_made_later(autojump_clock: MockClock) -> None:
    """It was missing until the next start, which had to take the bytes on the disk for the right ones."""
    disk = MemoryDisk()
    async with open_small(disk, scrub_bytes_per_s=0) as store:
        await store.log.put([message(number) for number in range(10)])
        await store.flusher.flush()
        await store.verified.cover_flushed()
        path = ROOT / "checksums" / segment_name(0)
        right = bytes(disk.inodes[path].content)
        del disk.inodes[path].content[600:]
        disk.refuse = lambda operation, refused: errno.EMFILE if (operation, refused) == ("create", path) else None
        await store.scrub.round()
        assert not disk.exists(path)
        disk.refuse = lambda operation, refused: None
        await trio.sleep(5)
        assert disk.read_bytes(path) == right


@pytest.mark.parametrize("is_cached", [True, False])
async def test_checksums_that_a_worker_drops_during_a_read_are_used(
    is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the memory for the checksums of many segments is limited. An assertion ended the node."""
    async with open_small(hot_window_bytes=0, scrub_bytes_per_s=0) as store:
        await store.log.put([message(number, size=400) for number in range(4)])
        await store.flusher.flush()
        await store.verified.cover_flushed()
        right = await store.log.read_all(0, 100)
        checksums = store.verified.checksums
        peek = checksums.peek

        def dropped(start: int) -> SegmentSums | None:
            found = peek(start)
            checksums.forget()
            return found

        monkeypatch.setattr(checksums, "peek", dropped)
        if is_cached:
            monkeypatch.setattr(MemoryFile, "pread_nowait", MemoryFile.pread)
            cached = store.log.read_cached(0, 100)
            assert cached is not None
            assert cached.tobytes() == right
        else:
            assert await store.log.read_all(0, 100) == right


async def test_a_read_at_the_end_of_the_log_is_empty_also_at_the_end_of_the_last_segment() -> None:
    async with open_small() as source:
        await source.log.put([message(number, size=400) for number in range(12)])
        raw = await all_bytes(source)
    async with open_small(is_slave=True) as store:
        await store.log.append_raw(0, raw[:1000])
        assert bytes(await store.verified.read(1000, 100, "replication")) == b""
        await store.log.append_raw(1000, raw[1000:SEGMENT])
        assert bytes(await store.verified.read(SEGMENT, 100, "replication")) == b""
        with pytest.raises(OffsetGone):
            await store.verified.read(SEGMENT + 1, 100, "replication")
