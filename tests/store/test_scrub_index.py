"""The scrub compares the key index with the log from the first record that the log still holds."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ha.protocol.record import Message, RecordHead, scan_record
from ha.protocol.store_files import (
    ENTRY,
    INDEX_ENTRY,
    INDEX_HEADER_SIZE,
    INDEX_SLOT,
    IndexHeader,
    index_entry_position,
    index_slot_position,
)
from ha.protocol.topic_names import SCHEDULE_TOPIC
from ha.store.files import OsFile
from ha.store.index_cursor import IndexCursor
from ha.store.message_store import open_message_store
from tests.store.disks import MemoryDisk, MemoryFile, run_inline
from tests.store.stores import (
    ROOT,
    SEGMENT,
    WallClock,
    check_derived,
    dispatched,
    message,
    open_small,
    small_options,
)

INDEX = ROOT / "index"
SLOT_COUNT = small_options().index_slot_count


async def made(disk: MemoryDisk, clock: WallClock, count: int = 60) -> None:
    """A store with some segments and several index files (40 entries each, three a message)."""
    async with open_small(disk, clock) as store:
        for number in range(count):
            clock.now_ms += 1000
            await store.log.put([message(number, size=400)])
        await check_derived(store)
    assert len(disk.list_dir(INDEX)) > 3


def newest_of(disk: MemoryDisk) -> Path:
    """The index file that keys are put into."""
    return INDEX / disk.list_dir(INDEX)[-1]


def heads_of(raw: bytes) -> list[RecordHead]:
    """Returns the first records of a log."""
    heads: list[RecordHead] = []
    while isinstance(found := scan_record(raw, sum(head.total_size for head in heads), len(raw)), RecordHead):
        heads.append(found)
    return heads


@pytest.mark.parametrize("known_from", [5, 60])
async def test_missing_keys_of_the_oldest_records_are_noticed(known_from: int, autojump_clock: object) -> None:
    """As after a crash that lost the index while those records were damaged."""
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    async with open_small(disk, clock) as store:
        assert store.index is not None
        heads = heads_of(await store.log.read_all(0, 4096))
        store.index.delete(store.index.detach())
        store.index.put_heads(heads[known_from:])
        store.index.attach()
        assert not store.index.query("T", "k0", 64, 0, 1 << 62)
        with trio.fail_after(60):
            await store.scrub.wait_round()
        assert store.scrub.statistics().index_rebuilt_count == 1
        await check_derived(store)
        with trio.fail_after(60):
            await store.scrub.wait_round()
        assert store.scrub.statistics().index_rebuilt_count == 1


async def test_a_wrong_slot_of_the_file_being_written_is_noticed(autojump_clock: object) -> None:
    """It leads to an older entry: the newer ones of its chain can't be found."""
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    content = disk.inodes[newest_of(disk)].content
    slots = content[INDEX_HEADER_SIZE : index_entry_position(SLOT_COUNT, 0)]
    numbers = [number for (number,) in INDEX_SLOT.iter_unpack(slots)]
    slot = numbers.index(max(numbers))
    *_, previous = INDEX_ENTRY.unpack_from(content, index_entry_position(SLOT_COUNT, numbers[slot]))
    INDEX_SLOT.pack_into(content, index_slot_position(slot), previous)
    async with open_small(disk, clock) as store:
        await dispatched(store)
        with trio.fail_after(60):
            await store.scrub.wait_round()
        assert store.scrub.statistics().index_rebuilt_count == 1
        await check_derived(store)


async def test_keys_put_while_a_worker_checks_a_file_are_no_damage(autojump_clock: object) -> None:
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    async with open_small(disk, clock) as store:
        assert store.index is not None
        file = store.index.files[-1]
        stop, slots = file.next_entry, file.slots
        await store.log.put([message(60)])
        await dispatched(store)
        assert file.next_entry > stop
        assert file.trouble(stop, slots) == ""


async def test_a_wrong_number_of_used_slots_does_not_survive_a_restart(autojump_clock: object) -> None:
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    newest = newest_of(disk)
    counted = IndexHeader.unpack(disk.inodes[newest].content).hash_slot_count
    disk.inodes[newest].content[32] ^= 1  # hashSlotCount
    assert IndexHeader.unpack(disk.inodes[newest].content).hash_slot_count != counted
    async with open_small(disk, clock) as store:
        assert store.index is not None
        assert store.index.files[-1].used_slots == counted


async def test_each_file_that_becomes_the_newest_at_a_start_has_its_slots_checked(autojump_clock: object) -> None:
    """Only the newest file's were: the file before it was used although keys could not be found in it."""
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    for name in disk.list_dir(INDEX)[-2:]:
        content = disk.inodes[INDEX / name].content
        slots = content[INDEX_HEADER_SIZE : index_entry_position(SLOT_COUNT, 0)]
        used = next(slot for slot, (number,) in enumerate(INDEX_SLOT.iter_unpack(slots)) if number)
        INDEX_SLOT.pack_into(content, index_slot_position(used), 1000)
    async with open_small(disk, clock) as store:
        await check_derived(store)


@pytest.mark.parametrize("segments", [1, 2, 5])
async def test_keys_of_deleted_records_are_skipped(segments: int, autojump_clock: object) -> None:
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    for name in disk.list_dir(ROOT / "commitlog")[:segments]:
        del disk.inodes[ROOT / "commitlog" / name]
    disk.unlink(ROOT / "checkpoint")  # as if it were what retention wrote: it knows of no earlier begin
    async with open_small(disk, clock) as store:
        assert store.index is not None
        await dispatched(store)
        store.index.delete_before(store.log.min_offset)
        assert store.index.files[0].entries(1, 1)[0][1] < store.log.min_offset
        with trio.fail_after(60):
            await store.scrub.wait_round()
        assert store.scrub.statistics().index_rebuilt_count == 0


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_keys_of_records_deleted_during_the_round_are_skipped(is_damaged: bool, autojump_clock: object) -> None:
    """The same round compares the records behind them."""
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    async with open_small(disk, clock, scrub_bytes_per_s=500) as store:
        assert store.index is not None
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.scrub.wait_round)
                await trio.sleep(1)
                assert store.scrub.statistics().scrubbed_bytes == SEGMENT  # the first one
                await store.log.delete_first()
                await store.log.delete_first()
                if is_damaged:
                    file = store.index.files[-1]
                    [key_hash, physical_offset, seconds, previous] = file.entries(1, 1)[0]
                    raw = INDEX_ENTRY.pack(key_hash ^ 1, physical_offset, seconds, previous)
                    file.file.pwrite(raw, index_entry_position(file.slot_count, 1))
        assert store.scrub.statistics().index_rebuilt_count == is_damaged


async def test_a_healed_range_is_compared_at_once(autojump_clock: object) -> None:
    """Without waiting for the next round: its entries could not be compared while it was damaged."""
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    async with open_small(disk, clock) as store:
        await trio.sleep(100)
        assert store.scrub.statistics().round_count == 1
        damage = store.damage.add(0, 100, file="", reason="", found_by="read", by_checksum=False)
        store.damage.healed(damage, "a peer")
        await trio.sleep(60)
        assert store.scrub.statistics().round_count == 2


async def test_a_healed_range_is_compared_after_dispatch_that_waited_for_it(autojump_clock: object) -> None:
    """The round that began with the repair found nothing dispatched, and the next one comes after scrubPauseSeconds."""
    disk = MemoryDisk()
    await made(disk, WallClock())
    for path in [path for path in disk.inodes if {"checksums", "consumequeue", "index"} & {*path.parts}]:
        del disk.inodes[path]
    [first, *_] = [inode.content for path, inode in sorted(disk.inodes.items()) if path.parent.name == "commitlog"]
    right = bytes(first[:100])
    first[:100] = bytes(100)

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == "_make_next_files":
            await trio.sleep(1)
        return await run_inline(call, *arguments)

    async with open_message_store(small_options(), disk=disk, run_blocking=slowly, wall_clock_ms=WallClock()) as store:
        await trio.sleep(100)
        [damage] = store.damage.open
        assert store.log.dispatched_offset.value == store.scrub.statistics().scrubbed_bytes == 0
        await store.repair.rewrite(0, right)
        store.damage.healed(damage, "a peer")
        await trio.sleep(60)
        assert store.scrub.statistics().scrubbed_bytes == store.log.max_offset.value


async def test_a_round_ends_at_an_incomplete_filler() -> None:
    """A slave's log may end anywhere; a filler's head is enough for dispatch to end the segment."""
    async with open_small() as master:
        await master.log.put([message(number, size=400) for number in range(20)])
        raw = await master.log.read_all(0, SEGMENT)
    async with open_small(is_slave=True) as slave:
        await slave.log.append_raw(0, raw[:-3])
        while slave.log.dispatched_offset.value < slave.log.max_offset.value:
            await slave.log.dispatched_offset.wait_beyond(0)
        assert slave.log.dispatched_offset.value == SEGMENT
        with trio.fail_after(10):
            await slave.scrub.wait_round()
        await slave.log.append_raw(SEGMENT - 3, raw[-3:])
        await check_derived(slave)


async def test_index_file_that_can_not_be_read_is_rebuilt(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the store, a minute after each start."""
    async with open_message_store(small_options(root=tmp_path), run_blocking=run_inline) as store:
        for number in range(60):
            await store.log.put([message(number)])
        await dispatched(store)
        await store.checkpointer.save(with_derived=True)
        assert store.index is not None
        pread, damaged = OsFile.pread, store.index.files[0].path

        def fail(file: OsFile, size: int, position: int) -> bytes:
            if file.path == damaged and position > 200:
                raise OSError(errno.EIO, "Input/output error", str(file.path))
            return pread(file, size, position)

        monkeypatch.setattr(OsFile, "pread", fail)
        await store.scrub.round()
        assert store.scrub.statistics().index_rebuilt_count == 1


async def test_index_is_rebuilt_while_retention_deletes_a_damaged_segment(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_small() as store:
        for number in range(40):
            await store.log.put([message(number, size=1000)])
        await dispatched(store)
        store.damage.add(0, 1000, file="0", reason="x", found_by="read", by_checksum=False)
        read_through = store.scrub._read_through

        async def and_delete(position: int, end: int) -> None:
            if not store.log.min_offset:
                async with store.log.maintenance_lock:
                    await store.log.delete_first()
            await read_through(position, end)

        monkeypatch.setattr(store.scrub, "_read_through", and_delete)
        await store.scrub._rebuild_index()
        assert store.log.min_offset > 0


async def test_times_of_delivery_from_other_delay_levels_stay() -> None:
    """A message that was promised in an hour became due in a second after messageDelayLevel was changed."""
    disk = MemoryDisk()
    delayed = Message(SCHEDULE_TOPIC, 0, b"x", b"DELAY\x011\x02")
    async with open_small(disk, delay_levels_ms=(3_600_000,)) as store:
        await store.log.put([delayed])
        await dispatched(store)
        [entry] = known = store.queues.get(SCHEDULE_TOPIC, 0).read(0, 1)  # type: ignore[union-attr]
    async with open_small(disk, delay_levels_ms=(1000,)) as store:
        queue = store.queues.get(SCHEDULE_TOPIC, 0)
        assert queue is not None
        await store.scrub.round()
        assert queue.read(0, 1) == known
        queue.repair(0, [ENTRY.pack(entry.physical_offset, entry.size, 5)])
        await store.scrub.round()
        assert queue.read(0, 1)[0].tags_code > 1_700_000_000_000, "a damaged time is repaired"


@pytest.mark.parametrize("damaged_at", [50_000, 300_000])
async def test_a_round_ends_at_damage_within_a_large_record(damaged_at: int) -> None:
    """The scrub reads 128 KiB at first, and more while it does not have the whole record."""
    disk = MemoryDisk()
    sizes: dict[str, Any] = {"segment_size": 1 << 20, "message_size_max": 1 << 20, "hot_window_bytes": SEGMENT}
    async with open_small(disk, **sizes) as store:
        await store.log.put([message(0, size=300), message(1, size=600_000), message(2)])
        await dispatched(store)
    [content] = [inode.content for path, inode in disk.inodes.items() if path.parent.name == "commitlog"]
    content[damaged_at] ^= 1
    async with open_small(disk, **sizes) as store:
        with trio.fail_after(10):
            await store.scrub.round()
        assert [damage.begin <= damaged_at < damage.end for damage in store.damage.open] == [True]


async def test_bytes_that_dispatch_has_skipped_hide_no_keys(autojump_clock: object) -> None:
    """Each round deleted the index and rebuilt it up to these bytes only."""
    async with open_small() as store:
        await store.log.put([message(number, size=300) for number in range(5)])
        await dispatched(store)
        await store.log.append_raw(store.log.max_offset.value, b"\xff" * 100)
        await dispatched(store)
        assert store.dispatcher.skipped_count == 1
        await store.log.put([message(number, size=300) for number in range(5, 30)])
        await dispatched(store)
        await store.scrub.round()
        assert store.scrub.statistics().index_rebuilt_count == 0
        await store.scrub._rebuild_index()
        for number in range(30):
            assert len(await store.query("T", f"k{number}", 64, 0, 1 << 62)) == 1


async def test_records_that_are_dispatched_while_a_rebuild_ends_keep_their_keys(autojump_clock: object) -> None:
    """Dispatch had read them before, and waited for the file of a new queue."""
    is_making, go_on = trio.Event(), trio.Event()

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == "_make_next_files" and store.log.dispatched_offset.value:
            is_making.set()
            await go_on.wait()
        return await run_inline(call, *arguments)

    async with open_message_store(small_options(), disk=MemoryDisk(), run_blocking=slowly) as store:
        await store.log.put([message(number) for number in range(5)])
        await dispatched(store)
        index = store.index
        assert index is not None
        files = index.detach()
        await store.log.put([message(5, queue_id=1)])
        await is_making.wait()
        index.delete(files)
        await store.scrub._rebuild_index()
        go_on.set()
        await check_derived(store)


async def test_a_rebuild_begins_after_a_save_of_the_index() -> None:
    """The worker that saved found the dropped files gone, in the middle of a step, and the error ended the store."""
    is_saving, go_on = trio.Event(), trio.Event()

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == "write":
            is_saving.set()
            await go_on.wait()
        return await run_inline(call, *arguments)

    async with open_message_store(small_options(), disk=MemoryDisk(), run_blocking=slowly) as store:
        index = store.index
        assert index is not None
        await store.log.put([message(number) for number in range(20)])
        await dispatched(store)

        async def save() -> None:
            async with store.log.maintenance_lock:
                await store.checkpointer.save(with_derived=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(save)
            await is_saving.wait()
            nursery.start_soon(store.scrub._rebuild_index)
            await wait_all_tasks_blocked()
            assert index.is_attached
            assert index.files
            go_on.set()
        assert store.scrub.statistics().index_rebuilt_count == 1
        await check_derived(store)


@pytest.mark.parametrize(
    ("operation", "code"), [("create", errno.ENOSPC), ("create", errno.EMFILE), ("pwrite", errno.ENOSPC)]
)
async def test_a_rebuild_continues_when_the_disk_has_room(operation: str, code: int, autojump_clock: object) -> None:
    """It ended, and until the next round, an hour later, queries found only part of the messages."""
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    async with open_small(disk, clock) as store:
        index = store.index
        assert index is not None
        index.delete(index.detach())
        index.attach()
        disk.refuse = lambda refused, path: code if refused == operation and path.parent == INDEX else None
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.scrub.round)
                await trio.sleep(60)
                assert not index.is_attached
                disk.refuse = lambda refused, path: None
        assert index.is_attached
        assert store.scrub.statistics().index_rebuilt_count == 1
        await check_derived(store)


async def test_a_rebuild_that_the_disk_failed_is_repeated_before_the_next_round(autojump_clock: object) -> None:
    """Until that round, an hour later, queries found only part of the messages."""
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    async with open_small(disk, clock) as store:
        assert store.index is not None
        store.index.delete(store.index.detach())
        store.index.attach()
        disk.refuse = lambda operation, path: errno.EIO if operation == "create" and path.parent == INDEX else None
        store.scrub.want()
        await store.scrub.wait_round()
        assert not store.index.is_attached
        disk.refuse = lambda operation, path: None
        began = trio.current_time()
        await store.index.wait_attached()
        assert trio.current_time() - began <= store.options.scrub_first_s + 1
        await check_derived(store)


async def test_a_rebuild_during_a_reset_leaves_no_file_of_the_old_index() -> None:
    """The file that a worker is making is moved aside with the others; new keys must not be put into it."""
    is_made, go_on = trio.Event(), threading.Event()

    class Slow(MemoryDisk):
        def create(self, path: Path, size: int, *, allocate: bool) -> MemoryFile:
            file = super().create(path, size, allocate=allocate)
            if path.parent == INDEX and slave.index is not None and not slave.index.is_attached:
                trio.from_thread.run_sync(is_made.set)
                assert go_on.wait(60)
            return file

    async with open_small() as master:
        await master.log.put([message(number) for number in range(10)])
        raw = await master.log.read_all(0, master.log.max_offset.value)
    disk = Slow()
    async with open_message_store(small_options(is_slave=True), disk=disk) as slave:
        await slave.log.append_raw(0, raw)
        await dispatched(slave)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slave.scrub._rebuild_index)
            await is_made.wait()
            await slave.log.reset(0)
            go_on.set()
        await slave.log.append_raw(0, raw)
        await check_derived(slave)
        assert slave.index is not None
        assert [file.path.name for file in slave.index.files] == disk.list_dir(INDEX)


async def test_a_file_that_dispatch_makes_while_a_rebuild_makes_one_does_not_stay() -> None:
    """The next start would delete it as empty, and with it all newer files of the index."""
    is_making, is_made, go_on = trio.Event(), trio.Event(), trio.Event()
    disk = MemoryDisk()

    async def together(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == "_make_next_files" and store.log.dispatched_offset.value:
            is_making.set()
            await go_on.wait()
            result = await run_inline(call, *arguments)
            is_made.set()
            return result
        result = await run_inline(call, *arguments)
        if call.__name__ == "make_spare" and not go_on.is_set():
            go_on.set()
            await is_made.wait()
            await wait_all_tasks_blocked()
        return result

    async with open_message_store(
        small_options(), disk=disk, run_blocking=together, wall_clock_ms=WallClock()
    ) as store:
        await store.log.put([message(number) for number in range(12)])
        await dispatched(store)
        await store.log.put([message(number) for number in range(12, 16)])  # for which the file has no room
        await is_making.wait()
        await store.scrub._rebuild_index()
        await check_derived(store)
        assert store.index is not None
        assert [file.path.name for file in store.index.files] == disk.list_dir(INDEX)


@pytest.mark.parametrize(("code", "round_count"), [(errno.EMFILE, 1), (errno.EIO, 2)])
async def test_files_of_a_damaged_index_that_are_not_deleted_at_once_are_deleted_later(
    code: int, round_count: int, autojump_clock: object
) -> None:
    """The next start would load them, and delete the new ones."""
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    async with open_small(disk, clock, scrub_bytes_per_s=0) as store:
        index = store.index
        assert index is not None
        index.files[0].file.pwrite(b"\1", index_entry_position(SLOT_COUNT, 2))
        disk.refuse = lambda operation, path: code if operation == "unlink" and path.parent == INDEX else None
        with trio.fail_after(600):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.scrub.round)
                await trio.sleep(60)
                assert not index.is_attached
                disk.refuse = lambda operation, path: None
            if round_count > 1:
                await store.scrub.round()
        assert store.scrub.statistics().index_rebuilt_count == round_count
        assert [file.path.name for file in index.files] == disk.list_dir(INDEX)
        await check_derived(store)


async def test_a_comparison_survives_files_that_are_removed_while_it_looks_for_its_place() -> None:
    """As by retention, a truncation or a reset. An IndexError ended the store."""
    disk, clock = MemoryDisk(), WallClock()
    await made(disk, clock)
    async with open_small(disk, clock, scrub_bytes_per_s=0) as store:
        index = store.index
        assert index is not None
        heads = heads_of(await store.log.read_all(store.log.segments[-2].start, 2048))

        async def meanwhile(call: Callable[..., Any], *arguments: Any) -> Any:
            number = call(*arguments)
            index.delete_before(store.log.max_offset.value)
            return number

        cursor = IndexCursor(index)
        assert await cursor.follows(heads, meanwhile)
