"""The checkpoint and a clean stop describe queues and index as they are on the disk."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.errors import DiskFailed
from ha.protocol.store_files import index_entry_position
from ha.store.checksums import Checksums
from ha.store.index_file import IndexFile
from ha.store.key_index import KeyIndex
from ha.store.mapped_file import RunBlocking
from ha.store.message_store import open_message_store
from ha.store.queue_ends import QUEUE_ENDS_FILE, load_queue_ends
from tests.store.disks import MemoryDisk, run_inline
from tests.store.stores import ROOT, WallClock, check_derived, dispatched, message, open_small, small_options


def unsynced(disk: MemoryDisk, folder: str) -> list[str]:
    """Returns the files whose bytes on the disk differ from the page cache."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, inode in disk.inodes.items()
        if ROOT / folder in path.parents and inode.durable.ljust(len(inode.content), b"\0") != bytes(inode.content)
    ]


def sleeping_before(name: str, owner: type) -> tuple[RunBlocking, trio.Event]:
    """Run blocking calls at once, but the first of this method only after 5 s; the event says that it waits.

    Cancelled meanwhile, it never begins: as with a call that no thread has taken yet.
    """
    waits = trio.Event()

    async def run(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == name and isinstance(getattr(call, "__self__", None), owner) and not waits.is_set():
            waits.set()
            await trio.sleep(5)
        return await run_inline(call, *arguments)

    return run, waits


async def test_a_stop_before_the_periodic_index_write_saves_every_key(autojump_clock: object) -> None:
    disk = MemoryDisk()
    run_blocking, waits = sleeping_before("write", KeyIndex)
    options = small_options(derived_flush_interval_s=1.0)
    async with open_message_store(options, disk=disk, run_blocking=run_blocking, wall_clock_ms=WallClock()) as store:
        await store.log.put([message(number) for number in range(10)])
        await dispatched(store)
        await waits.wait()
    [path] = (path for path in disk.inodes if path.parent == ROOT / "index")
    file = IndexFile(disk.open(path), options.index_slot_count, options.index_entry_count)
    assert file.next_entry == 1 + 3 * 10, "UNIQ_KEY, key and tag of each"


async def test_a_stop_before_the_checksums_are_written_saves_all_of_them(autojump_clock: object) -> None:
    disk = MemoryDisk()
    run_blocking, waits = sleeping_before("write_back", Checksums)
    async with open_message_store(
        small_options(), disk=disk, run_blocking=run_blocking, wall_clock_ms=WallClock()
    ) as store:
        await store.log.put([message(number) for number in range(10)])
        await waits.wait()
        end = store.log.max_offset.value
    sums = Checksums(disk, ROOT / "checksums", store.options.segment_size, store.options.checksum_block_size)
    assert sums.covered_end(end - end % store.options.segment_size) == end


async def test_a_stop_in_the_middle_of_the_periodic_sync_leaves_nothing_unsynced(autojump_clock: object) -> None:
    disk = MemoryDisk()
    is_syncing = trio.Event()

    async def slow_first_sync(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == "sync_all" and not is_syncing.is_set():
            is_syncing.set()
            await trio.sleep(5)
        return await run_inline(call, *arguments)

    options = small_options(derived_flush_interval_s=1.0)
    async with open_message_store(options, disk=disk, run_blocking=slow_first_sync, wall_clock_ms=WallClock()) as store:
        await store.log.put([message(number, queue_id=number % 4) for number in range(40)])
        await dispatched(store)
        await is_syncing.wait()
    assert not disk.exists(ROOT / "abort")
    assert unsynced(disk, "consumequeue") == []
    assert unsynced(disk, "index") == []


async def test_the_sync_skips_a_queue_file_that_was_deleted(autojump_clock: object) -> None:
    disk = MemoryDisk()
    gone: list[Path] = []

    async def with_one_gone(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == "sync_all" and not gone:
            gone.append(arguments[0][0])
            disk.unlink(gone[0])
        return await run_inline(call, *arguments)

    async with open_message_store(
        small_options(derived_flush_interval_s=1.0), disk=disk, run_blocking=with_one_gone, wall_clock_ms=WallClock()
    ) as store:
        await store.log.put([message(number, queue_id=number % 4) for number in range(10)])
        await dispatched(store)
        await trio.sleep(1.5)
        assert gone
        assert unsynced(disk, "consumequeue") == []


async def test_the_next_round_syncs_files_that_a_full_disk_refused(autojump_clock: object) -> None:
    for folder in ("consumequeue", "index"):
        disk = MemoryDisk()
        async with open_small(disk, derived_flush_interval_s=1.0) as store:
            await store.log.put([message(number, queue_id=number % 4) for number in range(10)])
            await dispatched(store)
            disk.refuse = lambda operation, path, folder=folder: (  # type: ignore[misc]
                errno.ENOSPC if operation == "sync" and folder in path.parts else None
            )
            await trio.sleep(1.5)
            assert unsynced(disk, folder)
            disk.refuse = lambda operation, path: None
            await trio.sleep(1.5)
            assert unsynced(disk, folder) == []


async def test_an_index_file_begun_long_after_the_previous_one_is_kept(autojump_clock: object) -> None:
    """Its first entry has the seconds since the last entry of the previous file, as in RocketMQ."""
    clock = WallClock()
    async with open_small(MemoryDisk(), clock, derived_flush_interval_s=1.0) as store:
        for number in range(30):  # three keys each, 39 a file
            clock.now_ms += 5000
            await store.log.put([message(number)])
        await dispatched(store)
        assert store.index is not None
        assert len(store.index.files) > 1
        await store.scrub.wait_round()
        assert store.scrub.statistics().index_rebuilt_count == 0
        for number, seconds in enumerate([0, 5]):
            await trio.sleep(2.5)  # until it is written
            file = store.index.files[number]
            at = index_entry_position(small_options().index_slot_count, 1) + 12
            assert int.from_bytes(file.file.pread(4, at), "big") == seconds
            file.file.pwrite((seconds + 1).to_bytes(4, "big"), at)
            await store.scrub.wait_round()
            assert store.scrub.statistics().index_rebuilt_count == number + 1


@pytest.mark.parametrize(("folder", "code"), [("consumequeue", errno.EMFILE), ("index", errno.ENOSPC)])
async def test_a_stop_that_can_not_sync_queues_or_index_is_no_clean_one(
    folder: str, code: int, autojump_clock: object
) -> None:
    """A power loss after it may take entries, which only a start after a crash looks for."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        await store.log.put([message(number, queue_id=number % 4) for number in range(10)])
        await dispatched(store)
        disk.refuse = lambda operation, path: code if operation == "sync" and folder in path.parts else None
    assert unsynced(disk, folder)
    assert disk.exists(ROOT / "abort")


@pytest.mark.parametrize("folder", ["consumequeue", "index"])
async def test_a_failed_sync_is_not_retried_by_the_stop(folder: str, autojump_clock: object) -> None:
    """The second sync would report success, as Linux does, although entries are not on the disk."""
    disk = MemoryDisk()
    failures: list[Path] = []

    def refuse_once(operation: str, path: Path) -> int | None:
        if operation == "sync" and folder in path.parts and not failures:
            failures.append(path)
            return errno.EIO
        return None

    with pytest.RaisesGroup(DiskFailed, flatten_subgroups=True):
        async with open_small(disk, derived_flush_interval_s=1.0) as store:
            await store.log.put([message(number, queue_id=number % 4) for number in range(10)])
            await dispatched(store)
            disk.refuse = refuse_once
            await trio.sleep_forever()
    assert disk.exists(ROOT / "abort")
    async with open_small(disk) as store:
        assert not store.recovery.is_clean
        await check_derived(store)


async def test_the_next_round_writes_the_ends_of_queues_that_a_full_disk_refused(autojump_clock: object) -> None:
    """Without new messages the file remained as the error had left it."""
    disk = MemoryDisk()
    path = ROOT / QUEUE_ENDS_FILE
    async with open_small(disk, derived_flush_interval_s=1.0) as store:
        await store.log.put([message(number, queue_id=number % 4) for number in range(10)])
        await dispatched(store)
        disk.taken_bytes = 1
        disk.refuse = lambda operation, refused: errno.ENOSPC if refused == path else None
        await trio.sleep(1.5)
        assert disk.size(path) == 1
        disk.refuse = lambda operation, refused: None
        await trio.sleep(1.5)
        assert load_queue_ends(disk, path) == {"T": {0: 3, 1: 3, 2: 2, 3: 2}}
