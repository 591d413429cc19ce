"""Recovery: the end of the log, torn tails, and damage."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import trio
from trio.testing import MockClock

from ha.errors import CorruptLog, DamagedBytes, HalogError, StoreLocked
from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_record
from ha.protocol.store_files import Checkpoint
from ha.store.checkpoint import load_checkpoint, load_flushed_to
from tests.store.damaged_stores import LOG, damage, forget_checksums, made, segment, snapshot
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


@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_clean_store_is_unchanged_by_a_restart(is_clean: bool) -> None:
    disk, offsets = await made(is_clean=is_clean)
    before = snapshot(disk)
    async with open_small(disk) as store:
        assert store.statistics().recovered_clean is is_clean
        assert store.statistics().truncated_bytes == 0
        assert store.log.max_offset.value == sum(offsets[-1])
        await check_derived(store)
        assert snapshot(disk) == before
        [result] = await store.log.put([message(99, queue_id=1)])
        assert result.queue_offset == 15


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("is_slave", [False, True])
async def test_a_log_in_another_format_is_left_as_it_is(is_clean: bool, is_slave: bool) -> None:
    """It was taken for a torn tail, and zeroed."""
    disk = MemoryDisk()
    content = b"\0\0\1\0\xaa\xbb\xcc\xdd" + b"a record of long ago" * 12
    disk.write_bytes(LOG / f"{0:020d}", content.ljust(SEGMENT, b"\0"))
    if not is_clean:
        disk.write_bytes(ROOT / "abort", b"")
    before = snapshot(disk)
    with pytest.raises(
        CorruptLog, match=r"magic aabbccdd.*; nothing in this log is a record of RocketMQ 4 or 5"
    ) as caught:
        async with open_small(disk, is_slave=is_slave):
            pass
    assert (caught.value.file.name, caught.value.position) == (f"{0:020d}", 0)
    assert snapshot(disk) == before


@pytest.mark.parametrize("is_clean", [True, False])
async def test_the_begin_of_a_first_record_is_no_other_format(is_clean: bool) -> None:
    """A slave may be stopped, or killed, before it has got more."""
    async with open_small() as master:
        await master.log.put([message(0)])
        log = await all_bytes(master)
    for size in range(1, 13):
        disk = MemoryDisk()
        async with open_small(disk, is_slave=True) as store:
            await store.log.append_raw(0, log[:size])
            killed = disk.kill()
        async with open_small(disk if is_clean else killed, is_slave=True) as store:
            await store.log.append_raw(store.log.max_offset.value, log[store.log.max_offset.value :])
            assert [record.body for record in await records(store)] == [message(0).body]


async def test_a_torn_tail_is_zeroed_with_its_queue_entries() -> None:
    disk, offsets = await made(is_clean=False)
    bad = offsets[-3][0]
    damage(disk, bad + 100)
    # Nothing of the last three was flushed, says the checkpoint.
    disk.write_bytes(ROOT / "checkpoint", Checkpoint().pack())
    async with open_small(disk) as store:
        assert store.log.max_offset.value == bad
        assert store.statistics().truncated_bytes > 0
        assert len(await records(store)) == 27
        await check_derived(store)
        path, position = segment(disk, bad)
        assert not any(disk.inodes[path].content[position:])
        [result] = await store.log.put([message(99, queue_id=1)])
        assert (result.physical_offset, result.queue_offset) == (bad, 13)
        await check_derived(store)


async def test_a_torn_tail_over_a_segment_end_takes_the_later_segments_with_it() -> None:
    disk, offsets = await made(is_clean=False)
    last_start = offsets[-1][0] - offsets[-1][0] % SEGMENT
    bad = max(offset for offset, _ in offsets if offset < last_start)
    damage(disk, bad + 100)
    disk.write_bytes(ROOT / "checkpoint", Checkpoint().pack())
    async with open_small(disk) as store:
        assert store.log.max_offset.value == bad
        assert f"{last_start:020d}" not in disk.list_dir(LOG)
        await check_derived(store)


@pytest.mark.parametrize(
    "harm",
    [
        lambda disk, offset: damage(disk, offset + 100),
        lambda disk, offset: damage(disk, offset),
        lambda disk, offset: disk.inodes[segment(disk, offset)[0]].content.__setitem__(
            slice(segment(disk, offset)[1], segment(disk, offset)[1] + 400), bytes(400)
        ),
    ],
    ids=["body", "head", "zeroed"],
)
@pytest.mark.parametrize("which", [-1, -2, -5])
@pytest.mark.parametrize("has_checksums", [True, False])
async def test_damage_after_a_clean_stop_is_listed_and_the_rest_is_served(
    harm: Callable[[MemoryDisk, int], None], which: int, has_checksums: bool
) -> None:
    disk, offsets = await made()
    if not has_checksums:
        forget_checksums(disk)
    bad = offsets[which][0]
    harm(disk, bad)
    before = snapshot(disk)
    if which == -1 and not has_checksums:  # nobody can know how many messages followed
        with pytest.raises(CorruptLog, match="queue has the record") as caught:
            async with open_small(disk):
                pass
        assert (caught.value.file, caught.value.position) == segment(disk, bad)
        assert not disk.exists(ROOT / "abort")
    else:
        async with open_small(disk) as store:
            assert store.log.max_offset.value == sum(offsets[-1])
            assert store.is_writable == (True, "")
            [damage] = store.damage.open
            assert damage.begin <= bad < damage.end
            assert (damage.found_by, damage.file) == ("recovery", segment(disk, bad)[0].name)
            with pytest.raises(DamagedBytes):
                await store.log.read(bad, 100)
            assert bytes(await store.log.read(0, 100))
            await dispatched(store)
            assert store.queues.next_queue_offset("T", 0) == store.queues.next_queue_offset("T", 1) == 15
    assert snapshot(disk) == before
    assert disk.locked == set()


async def test_damage_before_flushed_records_is_listed_after_a_crash_too() -> None:
    disk, offsets = await made(is_clean=False)
    damage(disk, offsets[-4][0] + 100)
    before = snapshot(disk)
    async with open_small(disk) as store:
        assert store.log.max_offset.value == sum(offsets[-1])
        [found] = store.damage.open
        assert (found.begin, found.end) == (offsets[-4][0], sum(offsets[-4]))
    assert snapshot(disk) == before


async def test_leftovers_behind_the_end_are_not_damage() -> None:
    """RocketMQ does not zero what it truncates: an older good record behind the end proves nothing."""
    disk, offsets = await made(is_clean=True)
    end = sum(offsets[-1])
    path, position = segment(disk, end)
    old = encode_record(
        message(7), queue_offset=1, physical_offset=end + 64, store_timestamp_ms=1000, store_host=b"\x7f\0\0\1\0\0\0\1"
    )
    assert position + 64 + len(old) < SEGMENT
    disk.inodes[path].content[position + 64 : position + 64 + len(old)] = old
    async with open_small(disk) as store:
        assert store.log.max_offset.value == end
        assert store.statistics().truncated_bytes > 0
        assert not any(disk.inodes[path].content[position:])


async def test_a_stale_index_continues_where_it_ended() -> None:
    disk, _ = await made(10)
    stale = disk.kill()
    async with open_small(disk, WallClock(1_800_000_000_000)) as store:
        await store.log.put([message(n, size=400) for n in range(100, 110)])
    for path in [path for path in disk.inodes if "index" in path.parts]:
        del disk.inodes[path]
    disk.inodes.update({path: inode for path, inode in stale.inodes.items() if "index" in path.parts})
    async with open_small(disk) as store:
        await check_derived(store)


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("has_file", [True, False])
async def test_missing_and_short_segments_are_completed_and_listed(has_file: bool, has_checksums: bool) -> None:
    disk, offsets = await made()
    disk = disk.kill()
    if not has_checksums:
        forget_checksums(disk)
    path = LOG / f"{SEGMENT:020d}"
    if has_file:
        del disk.inodes[path].content[100:]
    else:
        del disk.inodes[path]
    async with open_small(disk) as store:
        assert len(disk.inodes[path].content) == SEGMENT
        [found] = store.damage.open
        assert SEGMENT <= found.begin <= SEGMENT + 100
        assert SEGMENT < found.end <= 2 * SEGMENT
        assert found.by_checksum is has_checksums
        for offset, size in offsets:
            if found.begin < offset + size and offset < found.end:
                with pytest.raises(DamagedBytes):
                    await store.log.read(max(offset, found.begin), size)
            else:
                assert bytes(await store.log.read(offset, size))


@pytest.mark.parametrize("is_slave", [False, True])
@pytest.mark.parametrize("count", [1, 2])
async def test_segments_behind_missing_ones_are_kept_after_a_crash_that_nothing_is_known_of(
    count: int, is_slave: bool
) -> None:
    """No crash leaves that, as files are made and synced in order: they were moved."""
    disk, offsets = await made(60, is_clean=False)
    others = ("checkpoint", "queueends", "consumequeue", "index")
    for path in [path for path in disk.inodes if path.relative_to(ROOT).parts[0] in others]:
        del disk.inodes[path]
    kept = [(offset, size) for offset, size in offsets if offset >= (1 + count) * SEGMENT]
    assert len({offset // SEGMENT for offset, _ in kept}) > 1
    for number in range(1, 1 + count):
        del disk.inodes[LOG / f"{number * SEGMENT:020d}"]
    for _ in range(2):
        async with open_small(disk, is_slave=is_slave) as store:
            assert store.log.max_offset.value == sum(offsets[-1])
            assert SEGMENT - 100 < store.damage.open[0].begin <= SEGMENT
            assert store.damage.open[-1].end == (1 + count) * SEGMENT
            for offset, size in kept:
                assert bytes(await store.log.read(offset, size))
            killed = disk.kill()
        disk = killed


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("count", [1, 2])
async def test_missing_first_segments_are_listed(count: int, has_checksums: bool, is_clean: bool) -> None:
    disk, offsets = await made(is_clean=is_clean)
    if not has_checksums:
        forget_checksums(disk)
    for number in range(count):
        del disk.inodes[LOG / f"{number * SEGMENT:020d}"]
    async with open_small(disk) as store:
        assert store.log.min_offset == 0
        assert store.damage.open[0].begin == 0
        assert count * SEGMENT - 100 < store.damage.open[-1].end <= count * SEGMENT
        for offset, size in offsets:
            if offset < store.damage.open[-1].end:
                with pytest.raises(DamagedBytes):
                    await store.log.read(offset, size)
            else:
                assert bytes(await store.log.read(offset, size))


async def test_too_many_first_segments_that_are_gone_are_refused_with_what_to_do() -> None:
    disk, _ = await made(160)
    names = disk.list_dir(LOG)
    assert len(names) > 18
    for name in names[:17]:
        del disk.inodes[LOG / name]
    before = set(disk.inodes)
    with pytest.raises(CorruptLog, match=r"17 segments are missing.*delete the file checkpoint"):
        async with open_small(disk):
            pass
    assert before == set(disk.inodes)
    disk.locked.clear()
    del disk.inodes[ROOT / "checkpoint"]
    async with open_small(disk) as store:
        assert store.log.min_offset == 17 * SEGMENT
        assert not store.damage.open


async def test_a_slave_whose_log_was_deleted_misses_nothing_of_it() -> None:
    """Its master's log has another first offset by now."""
    disk, _ = await made()
    for name in disk.list_dir(LOG):
        del disk.inodes[LOG / name]
    async with open_small(disk, is_slave=True) as store:
        await store.log.append_raw(5 * SEGMENT, b"x")
        disk = disk.kill()
    async with open_small(disk, is_slave=True) as store:
        assert store.log.min_offset == 5 * SEGMENT
        assert not store.damage.open


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_log_that_was_deleted_has_no_term(is_killed: bool, autojump_clock: MockClock) -> None:
    """Its first term begins at 0, so the log of a member would look like one that has lost nothing."""
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True, dispatch_confirmed=True) as store:
        await store.epochs.append(1, 0)
        await store.log.append_raw(0, b"x")
        await trio.sleep(store.options.checkpoint_interval_s * 2)
        killed = disk.kill()
    if is_killed:
        disk = killed
    for name in disk.list_dir(LOG):
        del disk.inodes[LOG / name]
    disk.locked.clear()
    async with open_small(disk, is_slave=True, dispatch_confirmed=True) as store:
        assert store.epochs.last is None


async def test_a_term_without_a_first_byte_stays() -> None:
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True, dispatch_confirmed=True) as store:
        await store.epochs.append(1, 0)
    async with open_small(disk, is_slave=True, dispatch_confirmed=True) as store:
        assert store.epochs.last is not None


async def test_a_store_that_rocketmq_used_meanwhile_may_begin_later() -> None:
    """RocketMQ deletes old segments without recording it."""
    disk, _ = await made()
    checkpoint = load_checkpoint(disk, ROOT / "checkpoint")
    theirs = msgspec.structs.replace(checkpoint, physic_msg_timestamp_ms=checkpoint.physic_msg_timestamp_ms + 1)
    disk.open(ROOT / "checkpoint").pwrite(theirs.pack()[:48], 0)
    del disk.inodes[LOG / f"{0:020d}"]
    async with open_small(disk) as store:
        assert store.log.min_offset == SEGMENT
        assert not store.damage.open


async def test_checksums_of_a_log_that_was_deleted_say_nothing_of_the_next_one() -> None:
    disk, _ = await made()
    disk = disk.kill()
    for path in [path for path in disk.inodes if {"commitlog", "consumequeue", "index"} & set(path.parts)]:
        del disk.inodes[path]
    async with open_small(disk) as store:
        [result] = await store.log.put([message(99)])
        await dispatched(store)
        disk = disk.kill()
    async with open_small(disk) as store:
        assert not store.statistics().recovered_clean
        assert store.log.max_offset.value == result.next_offset
        assert not store.damage.open


async def test_files_that_are_all_of_another_size_are_refused() -> None:
    disk, _ = await made(5)
    disk = disk.kill()
    forget_checksums(disk)
    del disk.inodes[LOG / f"{0:020d}"].content[100:]
    with pytest.raises(CorruptLog, match="mappedFileSizeCommitLog") as caught:
        async with open_small(disk):
            pass
    assert caught.value.position == 100


@pytest.mark.parametrize("has_checksums", [True, False])
async def test_a_missing_last_segment_is_noticed_after_a_clean_stop(has_checksums: bool) -> None:
    disk, offsets = await made()
    last = disk.list_dir(LOG)[-1]
    del disk.inodes[LOG / last]
    if has_checksums:
        async with open_small(disk) as store:
            assert store.log.max_offset.value == sum(offsets[-1])
            assert [each.file for each in store.damage.open] == [last]
        return
    forget_checksums(disk)
    with pytest.raises(CorruptLog, match="queue has the record"):
        async with open_small(disk):
            pass


async def test_an_empty_last_file_and_an_unused_segment_are_removed() -> None:
    disk, offsets = await made()
    following = (sum(offsets[-1]) // SEGMENT + 1) * SEGMENT
    disk.create(LOG / f"{following:020d}", SEGMENT, allocate=True)
    disk.create(LOG / f"{following + SEGMENT:020d}", 0, allocate=True)
    async with open_small(disk) as store:
        assert store.log.max_offset.value == sum(offsets[-1])
        assert disk.list_dir(LOG)[-1] == f"{following - SEGMENT:020d}"


async def test_two_stores_can_not_have_one_directory() -> None:
    disk = MemoryDisk()
    async with open_small(disk):
        with pytest.raises(StoreLocked) as caught:
            async with open_small(disk):
                pass
        assert caught.value.lock_file == ROOT / "lock"
    async with open_small(disk):
        assert disk.exists(ROOT / "abort")
    assert not disk.exists(ROOT / "abort")


@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_record_with_keys_in_two_index_files_keeps_them_when_the_second_is_lost(is_clean: bool) -> None:
    """40 entries a file, 3 a message: the fourteenth has its first key in one file and two in the next."""
    disk = MemoryDisk()
    async with open_small(disk, index_entry_count=41) as store:
        await store.log.put([message(number) for number in range(20)])
        await check_derived(store)
    _, newest = sorted(path for path in disk.inodes if path.parent == ROOT / "index")
    disk.unlink(newest)
    if not is_clean:
        disk.write_bytes(ROOT / "abort", b"")
    async with open_small(disk, index_entry_count=41) as store:
        await check_derived(store)
        assert store.index is not None
        assert sum(file.next_entry - 1 for file in store.index.files) == 3 * 20


@pytest.mark.parametrize("folder", ["consumequeue", "index"])
@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_disk_too_full_for_queues_keeps_no_store_from_opening(
    autojump_clock: MockClock, folder: str, is_clean: bool
) -> None:
    """The start waited for room, which retention makes only after it."""
    disk, offsets = await made(is_clean=is_clean)
    for path in [path for path in disk.inodes if folder in path.parts]:
        del disk.inodes[path]

    def is_full(operation: str, path: Path) -> int | None:
        needs_room = operation == "create" or (operation == "pwrite" and folder in path.parts)
        return errno.ENOSPC if needs_room or (operation == "write_bytes" and path.name == "queueends") else None

    disk.refuse = is_full
    async with open_small(disk) as store:
        assert store.log.max_offset.value == sum(offsets[-1])
        is_writable, reason = store.is_writable
        assert not is_writable
        assert "disk full" in reason
        disk.refuse = lambda operation, path: None
        await dispatched(store)
        assert store.is_writable[0]
        await check_derived(store)


async def test_a_disk_too_full_for_checksums_keeps_no_store_from_opening() -> None:
    """Checksums are recomputed when there is room."""
    disk, offsets = await made()
    disk = disk.kill()
    forget_checksums(disk)

    def is_full(operation: str, path: Path) -> int | None:
        return errno.ENOSPC if path.parent.name == "checksums" else None

    disk.refuse = is_full
    async with open_small(disk) as store:
        assert store.log.max_offset.value == sum(offsets[-1])
        await store.log.put([message(99)])
        await check_derived(store)
        disk.refuse = lambda operation, path: None
    assert disk.list_dir(ROOT / "checksums")
    async with open_small(disk) as store:
        assert not store.damage.open
        assert len(await records(store)) == len(offsets) + 1


async def two_generations(
    *, mutilate: Callable[[bytearray, list[int]], None], count: int = 6, has_checkpoint: bool = True
) -> tuple[MemoryDisk, int, int]:
    """A store without queues and checksums, its second record damaged and `mutilate` applied; then a put, flushed.

    The put can't be dispatched over the damage, so the stop leaves the abort file. Returns the put's offset and end.
    """
    disk, offsets = await made(count)
    disk = disk.kill()
    forget_checksums(disk)
    for path in [path for path in disk.inodes if {"consumequeue", "index"} & set(path.parts)]:
        del disk.inodes[path]
    disk.inodes.pop(ROOT / "abort", None)
    if not has_checkpoint:
        disk.inodes.pop(ROOT / "checkpoint", None)
    damage(disk, offsets[1][0], size=offsets[1][1])
    mutilate(disk.inodes[LOG / f"{0:020d}"].content, [offset for offset, _ in offsets])
    async with open_small(disk, WallClock(1_700_000_100_000)) as store:
        [result] = await store.log.put([message(99)])
        assert result.status.is_stored
    assert disk.exists(ROOT / "abort")
    return disk, result.physical_offset, result.next_offset


def set_store_times(content: bytearray, offsets: list[int]) -> None:
    """Moves store times far into the future: no CRC covers them."""
    for offset in offsets:
        content[offset + 56 : offset + 64] = (1 << 60).to_bytes(8, "big")


@pytest.mark.parametrize(
    "mutilate",
    [
        lambda content, offsets: None,
        lambda content, offsets: set_store_times(content, offsets[2:3]),
        lambda content, offsets: set_store_times(content, offsets[2:5]),
        lambda content, offsets: set_store_times(content, offsets[-1:]),
        lambda content, offsets: set_store_times(content, offsets[2:]),
    ],
    ids=["damage", "next_in_the_future", "some_in_the_future", "last_in_the_future", "all_in_the_future"],
)
@pytest.mark.parametrize("has_checkpoint", [True, False])
async def test_flushed_records_behind_damage_survive_a_crash(
    mutilate: Callable[[bytearray, list[int]], None], has_checkpoint: bool
) -> None:
    disk, put_at, put_end = await two_generations(mutilate=mutilate, has_checkpoint=has_checkpoint)
    for _ in range(2):
        async with open_small(disk) as store:
            assert not store.statistics().recovered_clean
            assert store.log.max_offset.value == put_end
            assert bytes(await store.log.read(put_at, 100))
            assert [each.reason[:12] for each in store.damage.open] == ["not a record"]


async def test_a_store_time_hit_before_damage_does_not_make_leftovers_of_what_follows() -> None:
    disk, offsets = await made(6, is_clean=False)
    content = disk.inodes[LOG / f"{0:020d}"].content
    set_store_times(content, [offsets[1][0]])
    damage(disk, offsets[2][0], size=offsets[2][1])
    async with open_small(disk) as store:
        assert store.log.max_offset.value == sum(offsets[-1])
        assert [(each.begin, each.end) for each in store.damage.open] == [(offsets[2][0], sum(offsets[2]))]


@pytest.mark.parametrize("is_slave", [True, False])
async def test_a_damaged_record_with_a_flushed_store_time_is_no_torn_tail(is_slave: bool) -> None:
    """No sound record follows, so the end of the log is unknown; a slave gets it again."""
    disk, offsets = await made(6, is_clean=False)
    for offset, size in offsets[4:]:
        damage(disk, offset + 100, size - 100)
    before = snapshot(disk)
    if is_slave:
        async with open_small(disk, is_slave=True) as store:
            assert store.log.max_offset.value == offsets[4][0]
        return
    with pytest.raises(CorruptLog, match="checkpoint says that the record was flushed"):
        async with open_small(disk):
            pass
    assert snapshot(disk) == before


async def test_blocks_with_checksums_behind_a_damaged_one_without_prove_that_it_was_flushed() -> None:
    disk, offsets = await made(6, is_clean=False)
    disk.write_bytes(ROOT / "checkpoint", Checkpoint().pack())
    forget_checksums(disk)
    damage(disk, offsets[1][0], size=offsets[1][1])
    disk.unlink(ROOT / "abort")
    async with open_small(disk, checksum_block_size=1024) as store:
        results = []
        for number in range(10):
            results += await store.log.put([message(number, size=400)])
    disk.write_bytes(ROOT / "abort", b"")
    disk.write_bytes(ROOT / "checkpoint", Checkpoint().pack())
    async with open_small(disk, checksum_block_size=1024) as store:
        assert store.log.max_offset.value == results[-1].next_offset
        assert store.damage.open


async def test_more_bad_heads_than_a_few_do_not_hide_the_good_records_behind() -> None:
    disk = MemoryDisk()
    async with open_small(disk, segment_size=1 << 16) as store:
        results = await store.log.put([message(number, size=20) for number in range(150)])
    forget_checksums(disk)
    for path in [path for path in disk.inodes if {"consumequeue", "index"} & set(path.parts)]:
        del disk.inodes[path]
    content = disk.inodes[LOG / f"{0:020d}"].content
    for result in results[1:100]:
        content[result.physical_offset + 89] ^= 1
    async with open_small(disk, segment_size=1 << 16) as store:
        assert store.log.max_offset.value == results[-1].next_offset
        bad = (results[1].physical_offset, results[100].physical_offset)
        assert [(each.begin, each.end) for each in store.damage.open] == [bad]


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_record_with_zeros_in_its_properties_that_was_flushed_for_sure_is_kept(is_known: bool) -> None:
    """Without a checksum it looks as if one of its pages was never written."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        [result] = await store.log.put([Message("T", 0, b"x", b"A\x01" + bytes(1000) + b"\x02")])
    disk.write_bytes(ROOT / "abort", b"")
    if not is_known:
        forget_checksums(disk)
    async with open_small(disk) as store:
        assert store.log.max_offset.value == (result.next_offset if is_known else 0)


@pytest.mark.parametrize("is_dropped", [True, False])
async def test_recovery_knows_that_flushed_bytes_are_gone(*, is_dropped: bool) -> None:
    """The kernel has dropped pages that a failed sync left unwritten."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        await store.log.put([message(number) for number in range(3)])
        raw = await all_bytes(store)
        await store.flusher.flush()
        await store.checkpointer.write()
        killed = disk.kill()
    if is_dropped:
        killed.inodes[LOG / f"{0:020d}"].content[len(raw) - 200 : len(raw)] = bytes(200)
    async with open_small(killed, is_slave=True) as store:
        assert (store.log.max_offset.value < len(raw)) is is_dropped
        assert store.recovery.is_shorter is is_dropped


@pytest.mark.parametrize("is_shared", [True, False])
async def test_zeros_in_a_sector_in_which_the_next_record_begins_were_written(is_shared: bool) -> None:
    """A RocketMQ broker that was killed within a record takes it for complete and appends to it; a page that never
    reached the disk has nothing of the next record."""
    disk = MemoryDisk()
    places = []
    async with open_small(disk) as store:
        for _ in range(40):
            places += await store.log.put([Message("T", 0, b"x", b"A\x01" + b"a" * 100 + b"\x02")])
    disk.write_bytes(ROOT / "abort", b"")
    forget_checksums(disk)
    torn = next(
        place
        for place in places[10:]
        if place.next_offset // 512 * 512 > place.next_offset - 100 and place.next_offset % 512 <= 400
    )
    path, end = segment(disk, torn.next_offset)
    sector = end // 512 * 512
    zeros_end = end if is_shared else sector + 512
    disk.inodes[path].content[sector:zeros_end] = bytes(zeros_end - sector)
    async with open_small(disk) as store:
        assert store.log.max_offset.value == places[-1].next_offset
        assert [each.begin for each in store.damage.open] == ([] if is_shared else [torn.physical_offset])


def after_power_loss(disk: MemoryDisk) -> MemoryDisk:
    """All is there but the checksums, which are not synced."""
    after = disk.kill()
    after.write_bytes(ROOT / "abort", b"")
    forget_checksums(after)
    return after


async def rolled_by_rocketmq() -> tuple[MemoryDisk, int]:
    """A segment is full and flushed. RocketMQ gives it the store time of the message that did not fit."""
    disk, offsets = await made(30)
    last_start = offsets[-1][0] - offsets[-1][0] % SEGMENT
    async with open_small(disk.kill()) as store:
        [first] = [each for each in await records(store) if each.physical_offset == last_start]
    disk = after_power_loss(disk)
    disk.inodes[LOG / f"{last_start:020d}"].content[:] = bytes(SEGMENT)
    disk.write_bytes(ROOT / "checkpoint", Checkpoint(physic_msg_timestamp_ms=first.store_timestamp_ms).pack())
    return disk, last_start


async def slave_that_cut_its_end() -> tuple[MemoryDisk, int]:
    """It expected its master to send that again, and is made a master itself."""
    disk, offsets = await made(6, is_clean=False)
    damage(disk, *offsets[-1])
    async with open_small(disk, is_slave=True) as store:
        assert store.log.max_offset.value == offsets[-1][0]
        return after_power_loss(disk), offsets[-1][0]


async def slave_whose_log_was_set_aside() -> tuple[MemoryDisk, int]:
    """haOutOfRange=resync: an older halog left the checkpoint, for a second."""
    disk, _ = await made(6)
    raw = disk.read_bytes(ROOT / "checkpoint")
    async with open_small(disk, is_slave=True) as store:
        await store.log.reset(3 * SEGMENT)
        after = after_power_loss(disk)
    after.write_bytes(ROOT / "checkpoint", raw[:76].ljust(len(raw), b"\0"))
    return after, 3 * SEGMENT


async def slave_of_a_broker_whose_clock_was_set_back() -> tuple[MemoryDisk, int]:
    """RocketMQ stores the time of its clock, even if it was set back."""
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True) as store:
        for number, store_ms in enumerate([1_700_000_000_000, 1_600_000_000_000]):
            end = store.log.max_offset.value
            raw = encode_record(
                message(number),
                queue_offset=number,
                physical_offset=end,
                store_timestamp_ms=store_ms,
                store_host=b"\x7f\0\0\1\0\0\0\1",
            )
            await store.log.append_raw(end, raw)
            await dispatched(store)
    return after_power_loss(disk), end + len(raw)


@pytest.mark.parametrize(
    "found",
    [
        rolled_by_rocketmq,
        slave_that_cut_its_end,
        slave_whose_log_was_set_aside,
        slave_of_a_broker_whose_clock_was_set_back,
    ],
)
async def test_a_checkpoint_that_is_newer_than_the_last_record_is_no_proof_of_a_loss(
    found: Callable[[], Awaitable[tuple[MemoryDisk, int]]],
) -> None:
    """These logs lack only bytes that a slave may lack; a master continues with them."""
    disk, end = await found()
    checkpoint = Checkpoint.unpack(disk.read_bytes(ROOT / "checkpoint"))
    async with open_small(disk) as store:
        assert store.log.max_offset.value == end
        assert not store.damage.open
        assert store.log.last_store_timestamp_ms < checkpoint.physic_msg_timestamp_ms


@pytest.mark.parametrize("which", [17, 18, 19])
async def test_bytes_without_checksum_behind_damage_are_readable(which: int, autojump_clock: MockClock) -> None:
    """The checksum of the last block covers its damaged first part; a process killed since appended to it."""
    disk = MemoryDisk()
    results = []
    async with open_small(disk, flush_mode="SYNC_FLUSH", checkpoint_interval_s=1.0) as store:
        for number in range(30):
            if number == 20:
                await trio.sleep(1.5)  # a checkpoint, and the checksums of what is there
            results += await store.log.put([message(number, size=400, queue_id=number % 2)])
            await store.flusher.flush()
            await dispatched(store)
        killed = disk.kill()
    damage(killed, results[which].physical_offset + 200)
    async with open_small(killed) as store:
        with trio.fail_after(60):
            for result in results[20:]:
                if result.next_offset <= store.log.max_offset.value:
                    assert await store.log.read_all(result.physical_offset, result.size)
        assert any(each.begin <= results[which].physical_offset + 200 < each.end for each in store.damage.open)


async def sync_flushed(**changes: Any) -> tuple[MemoryDisk, list[tuple[int, int]]]:
    """A master that is killed before the checksums of its last records are made; offset and size of all of them."""
    disk = MemoryDisk()
    results = []
    async with open_small(disk, flush_mode="SYNC_FLUSH", checkpoint_interval_s=1.0, **changes) as store:
        for number in range(30):
            if number == 20:
                await trio.sleep(1.5)
            results += await store.log.put([message(number, size=400, queue_id=number % 2)])
            await store.flusher.flush()
            await dispatched(store)
        killed = disk.kill()
    return killed, [(result.physical_offset, result.size) for result in results]


def cut(disk: MemoryDisk, physical_offset: int) -> None:
    path, position = segment(disk, physical_offset)
    del disk.inodes[path].content[position:]


def zero(disk: MemoryDisk, physical_offset: int) -> None:
    path, position = segment(disk, physical_offset)
    content = disk.inodes[path].content
    content[position:] = bytes(len(content) - position)


@pytest.mark.parametrize("harm", [cut, zero, damage])
@pytest.mark.parametrize("which", [-1, -2, 21, 18])
async def test_queue_entries_of_a_sync_flush_master_prove_damage(
    harm: Callable[[MemoryDisk, int], None], which: int, autojump_clock: MockClock
) -> None:
    """The log extends beyond its checksums; the slaves have the rest."""
    disk, offsets = await sync_flushed(index_enabled=False)
    whole = snapshot(disk)
    end = next_offset = sum(offsets[-1])
    for path in segment_paths(disk, from_offset=offsets[which][0]):
        harm(disk, max(offsets[which][0], int(path.name)))
    for count in range(2):  # the second start finds what the first found
        async with open_small(disk, flush_mode="SYNC_FLUSH", index_enabled=False) as store:
            assert store.log.max_offset.value == next_offset
            assert store.damage.open
            assert all(each.end <= end for each in store.damage.open)
            is_writable, reason = store.is_writable
            if is_writable:
                [result] = await store.log.put([message(40 + count, size=400)])
                assert result.queue_offset == 15 + count
                next_offset = result.next_offset
                await store.flusher.flush()
                await dispatched(store)
            else:  # damage over several segments is not skipped, even if queues have its records
                assert which in (18, 21)
                assert "to be healed" in reason
            disk = disk.kill()
    async with open_small(disk, flush_mode="SYNC_FLUSH", index_enabled=False) as store:
        for each in list(store.damage.open):
            start = each.begin - each.begin % SEGMENT
            raw = whole[LOG / f"{start:020d}"][each.begin - start : each.end - start]
            assert await store.repair.proves(each, each.begin, raw) == len(raw)
            await store.repair.rewrite(each.begin, raw)
            assert await store.repair.is_sound(each)
            store.repair.after_heal(each)
            store.damage.healed(each, "a peer")
        assert len(await records(store)) == (32 if is_writable else 30)
        await check_derived(store)


def segment_paths(disk: MemoryDisk, *, from_offset: int) -> list[Path]:
    return [path for path in sorted(disk.inodes) if path.parent == LOG and int(path.name) + SEGMENT > from_offset]


@pytest.mark.parametrize("is_slave", [False, True])
@pytest.mark.parametrize("flush_mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_queues_of_slaves_and_async_masters_prove_no_flush(
    is_slave: bool, flush_mode: Literal["SYNC_FLUSH", "ASYNC_FLUSH"], autojump_clock: MockClock
) -> None:
    """A slave gets its bytes again, and an async master may lose a record and keep its entry."""
    disk, offsets = await made(6, is_clean=False)
    async with open_small(disk, is_slave=is_slave, flush_mode=flush_mode) as store:
        await dispatched(store)
        killed = disk.kill()
    forget_checksums(killed)
    killed.write_bytes(ROOT / "checkpoint", Checkpoint(physic_msg_timestamp_ms=1).pack())
    zero(killed, offsets[-2][0])
    async with open_small(killed, flush_mode=flush_mode) as store:
        proves = not is_slave and flush_mode == "SYNC_FLUSH"
        assert store.log.max_offset.value == (sum(offsets[-1]) if proves else offsets[-2][0])
        assert bool(store.damage.open) is proves


@pytest.mark.parametrize("segment_size", [SEGMENT, 1 << 16])
@pytest.mark.parametrize("newest", [3, 4, 20, 41, 59])
async def test_after_a_crash_the_scan_skips_flushed_records(
    newest: int, segment_size: int, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    """The checkpoint has the store time of the newest synced message in log and queues; 3 s are subtracted."""
    disk, clock = MemoryDisk(), WallClock()
    names: dict[str, Any] = {"segment_size": segment_size, "recovery_scan_bytes": 500, "index_enabled": False}
    async with open_small(disk, clock, **names) as store:
        begins, times = [], []
        for number in range(60):
            clock.now_ms += 1000
            [result] = await store.log.put([message(number, size=400, queue_id=number % 2)])
            begins.append(result.physical_offset)
            times.append(clock.now_ms)
        await dispatched(store)
        killed = disk.kill()
    killed.write_bytes(ROOT / "checkpoint", Checkpoint(times[newest], times[newest]).pack())
    forget_checksums(killed)
    with caplog.at_level("INFO"):
        async with open_small(killed, clock, **names) as store:
            assert len(await records(store)) == 60
            await check_derived(store)
    [line] = [each.getMessage() for each in caplog.records if "clean=False" in each.getMessage()]
    dispatched_from = int(line.partition("dispatched_from=")[2].split()[0])
    assert begins[max(newest - 3 - 3, 0)] <= dispatched_from <= begins[newest - 3]


async def test_a_damaged_queue_entry_fakes_no_record(autojump_clock: MockClock) -> None:
    disk, offsets = await sync_flushed()
    end = sum(offsets[-1])
    for path in [path for path in disk.inodes if "consumequeue" in path.parts]:
        content = disk.inodes[path].content
        for at in range(0, len(content), 20):
            if content[at : at + 8] == offsets[-1][0].to_bytes(8, "big"):
                content[at : at + 8] = end.to_bytes(8, "big")
    async with open_small(disk, flush_mode="SYNC_FLUSH") as store:
        assert store.log.max_offset.value == end
        assert not store.damage.open
        await check_derived(store)


async def test_a_missing_file_with_queued_records_is_refused(autojump_clock: MockClock) -> None:
    disk, offsets = await sync_flushed()
    forget_checksums(disk)
    for path in segment_paths(disk, from_offset=offsets[-1][0]):
        del disk.inodes[path]
    with pytest.raises(CorruptLog, match="the consume queues have records up to"):
        async with open_small(disk, flush_mode="SYNC_FLUSH"):
            pass


@pytest.mark.parametrize("is_clean", [True, False])
async def test_damage_proven_by_queues_alone_stays_damage(is_clean: bool, autojump_clock: MockClock) -> None:
    """By the checkpoint: the queues of the next process, which does not flush at once, prove nothing."""
    disk, offsets = await sync_flushed()
    end = sum(offsets[-1])
    zero(disk, offsets[-1][0])
    for _ in range(3):
        async with open_small(disk) as store:
            assert store.log.max_offset.value == end
            assert [each.end for each in store.damage.open] == [end]
            killed = disk.kill()
        disk = disk if is_clean else killed
    assert load_flushed_to(disk, ROOT / "checkpoint") == end


async def test_a_start_that_fails_at_any_step_leaves_no_damage() -> None:
    """A slave was killed with a part of a record, which has checksums. A start zeroes it, and the next one took these
    zeros for damage if the first had ended before it removed the checksums."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        results = await store.log.put([message(number, size=400) for number in range(8)])
        log = await all_bytes(store)
    part = results[-1].physical_offset + 200
    disk = MemoryDisk()
    async with open_small(disk, is_slave=True, checksum_block_size=1024) as store:
        await store.log.append_raw(0, log[:part])
        await store.flusher.flush()
        await store.checkpointer.save(with_derived=True)
        killed = disk.kill()
    step = 0
    while True:
        first = killed.kill()
        first.die_at = step
        with suppress(OSError, HalogError):
            async with open_small(first, is_slave=True, checksum_block_size=1024):
                pass
        if len(first.steps) < step:
            break
        async with open_small(first.kill(), is_slave=True, checksum_block_size=1024) as store:
            assert not store.damage.open, (step, first.steps[-3:])
            assert store.log.max_offset.value == results[-1].physical_offset
        step += 1
    assert ("zero", f"{0:020d}") in first.steps


@pytest.mark.parametrize("is_slave", [False, True])
@pytest.mark.parametrize("harm", [cut, zero, damage])
@pytest.mark.parametrize("which", [-1, 12])
async def test_the_checkpoint_records_the_end_of_a_masters_log(
    harm: Callable[[MemoryDisk, int], None], which: int, is_slave: bool, autojump_clock: MockClock
) -> None:
    """A power loss took the checksums and the queues, which were not synced. A slave gets the bytes again."""
    disk = MemoryDisk()
    async with open_small(disk, checkpoint_interval_s=1.0) as store:
        results = [*await store.log.put([message(number, size=400) for number in range(20)])]
        await trio.sleep(2)
        disk = disk.kill()
    for path in [path for path in disk.inodes if {"checksums", "consumequeue"} & {*path.parts}]:
        del disk.inodes[path]
    begin, end = results[which].physical_offset, results[-1].next_offset
    for path in segment_paths(disk, from_offset=begin):
        harm(disk, max(begin, int(path.name)))
    async with open_small(disk, is_slave=is_slave) as store:
        if is_slave:
            assert store.log.max_offset.value in (begin, begin - begin % SEGMENT, end)
        else:
            assert store.log.max_offset.value == end
            assert store.damage.open[0].begin == begin
        killed = disk.kill()
        assert load_flushed_to(killed, ROOT / "checkpoint") == (0 if is_slave else end)


async def test_the_checkpoint_of_a_deleted_log_is_rewritten_at_once() -> None:
    disk, _ = await made()
    for path in [path for path in disk.inodes if path.parent == LOG]:
        del disk.inodes[path]
    async with open_small(disk) as store:
        [result] = await store.log.put([message(1)])
        disk = disk.kill()
    async with open_small(disk) as store:
        assert store.log.max_offset.value == result.next_offset
        assert not store.damage.open


async def test_dispatch_skips_each_damaged_range_that_the_queues_have(autojump_clock: MockClock) -> None:
    """The ranges are blocks, which begin within a record: it waited at the second one until that was repaired."""
    disk = MemoryDisk()
    async with open_small(disk, checksum_block_size=1024) as store:
        results = await store.log.put([message(number, size=400) for number in range(40)])
        await dispatched(store)
    for path in [path for path in disk.inodes if path.parent.name == "index"]:
        del disk.inodes[path]  # so that all records are dispatched again
    for result in (results[3], results[12]):
        damage(disk, result.physical_offset + 200)
    async with open_small(disk, checksum_block_size=1024) as store:
        with trio.fail_after(60):
            await dispatched(store)
        assert len(store.damage.open) == 2
