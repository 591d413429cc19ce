"""The start with many queues, whose files are sparse and stay so."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.store_files import ENTRY, ENTRY_SIZE
from ha.store.consume_queues import ConsumeQueues
from ha.store.files import OsDisk, OsFile
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions
from ha.store.queue_ends import QUEUE_ENDS_FILE, load_queue_ends
from tests.store.disks import MemoryDisk, run_inline
from tests.store.stores import ROOT, WallClock, dispatched, message, small_options

QUEUE_COUNT = 20


async def test_a_start_reads_and_writes_no_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = StoreOptions(root=tmp_path, segment_size=1 << 20, index_enabled=False, queue_entry_count=300_000)
    read_bytes: list[int] = []
    synced: list[Path] = []
    pread, sync = OsFile.pread, OsFile.sync

    def noting_pread(self: OsFile, size: int, position: int) -> bytes:
        raw = pread(self, size, position)
        if "consumequeue" in self.path.parts:
            read_bytes.append(len(raw))
        return raw

    def noting_sync(self: OsFile) -> None:
        if "consumequeue" in self.path.parts:
            synced.append(self.path)
        sync(self)

    def held_bytes() -> int:
        return sum(path.stat().st_blocks * 512 for path in tmp_path.glob("consumequeue/*/*/*"))

    async with open_message_store(options, disk=OsDisk(), run_blocking=run_inline, wall_clock_ms=WallClock()) as store:
        await store.log.put([message(number, queue_id=number % QUEUE_COUNT) for number in range(100)])
        await dispatched(store)
    held = held_bytes()
    assert held <= QUEUE_COUNT * 8192
    monkeypatch.setattr(OsFile, "pread", noting_pread)
    monkeypatch.setattr(OsFile, "sync", noting_sync)
    async with open_message_store(options, disk=OsDisk(), run_blocking=run_inline, wall_clock_ms=WallClock()) as store:
        assert sum(queue.max_offset for queue in store.queues) == 100
        assert synced == []
        assert 0 < sum(read_bytes) <= QUEUE_COUNT * 16384
    (tmp_path / "abort").touch()  # as after a kill: the bytes behind the entries are synced
    async with open_message_store(options, disk=OsDisk(), run_blocking=run_inline, wall_clock_ms=WallClock()) as store:
        assert sum(queue.max_offset for queue in store.queues) == 100
        assert len(set(synced)) == len(synced) == QUEUE_COUNT
    assert held_bytes() == held


@pytest.mark.parametrize("stray", [None, 30, 200_000])
def test_data_behind_the_entries_is_found_anywhere(tmp_path: Path, stray: int | None) -> None:
    queues = ConsumeQueues(OsDisk(), tmp_path, 300_000)
    entries = [ENTRY.pack(100 * number, 100, 0) for number in range(5)]
    queues.get_or_create("T", 0).append(0, entries)
    [path] = tmp_path.glob("T/0/*")
    if stray is not None:
        with path.open("r+b") as file:
            file.seek(stray * ENTRY_SIZE)
            file.write(entries[0])
    again = ConsumeQueues(OsDisk(), tmp_path, 300_000)
    assert again.load(is_clean=True)
    [queue] = again
    assert (queue.max_offset, queue.max_physical_offset, queue.has_lost_entries) == (5, 500, stray is not None)
    assert path.read_bytes() == b"".join(entries).ljust(300_000 * ENTRY_SIZE, b"\0")


def test_after_a_kill_the_zeros_behind_the_entries_are_synced() -> None:
    """A process was killed before it synced a zeroed entry, which must not return after a power loss."""
    for is_clean in (True, False):
        disk = MemoryDisk()
        queues = ConsumeQueues(disk, ROOT, 8)
        queues.get_or_create("T", 0).append(0, [ENTRY.pack(100 * number, 100, 0) for number in range(5)])
        [path] = queues.take_unsynced(2)
        disk.open(path).sync()
        disk.open(path).zero(4 * ENTRY_SIZE, ENTRY_SIZE)
        again = ConsumeQueues(disk, ROOT, 8)
        assert again.load(is_clean)
        assert [each.max_offset for each in again] == [4]
        again.truncate(1000)  # beyond all, as a start does whatever it finds
        inode = disk.inodes[path]
        assert (inode.durable == inode.content) is not is_clean  # a clean stop has synced what it left


async def test_a_save_costs_the_queues_written_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over a hundred thousand queues would block the event loop, and so would all of them in one piece."""
    disk, synced = MemoryDisk(), []

    async def run(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == "sync_all":
            synced.append(len(arguments[0]))
        return await run_inline(call, *arguments)

    options = small_options(index_enabled=False, segment_size=1 << 20)
    async with open_message_store(options, disk=disk, run_blocking=run, wall_clock_ms=WallClock()) as store:
        await store.log.put([message(number, queue_id=number) for number in range(1_100)])
        await dispatched(store)
        await store.checkpointer.save(with_derived=True)
        assert [count for count in synced if count] == [512, 512, 76]
        ends = load_queue_ends(disk, ROOT / QUEUE_ENDS_FILE)
        assert dict.fromkeys(range(1100), 1) in ends.values()
        synced.clear()
        with monkeypatch.context() as patches:
            patches.setattr(ConsumeQueues, "__iter__", lambda queues: pytest.fail("a pass over all queues"))
            await store.log.put([message(1, queue_id=7)])
            await dispatched(store)
            await store.checkpointer.save(with_derived=True)
        assert [count for count in synced if count] == [1]
        [saved] = load_queue_ends(disk, ROOT / QUEUE_ENDS_FILE).values()
        assert (len(saved), saved[7], saved[8]) == (1_100, 2, 1)


async def test_ends_that_could_not_be_saved_are_saved_later(autojump_clock: object) -> None:
    disk, options = MemoryDisk(), small_options(index_enabled=False)

    async def run(call: Callable[..., Any], *arguments: Any) -> Any:
        if call.__name__ == "save_queue_ends" and is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return await run_inline(call, *arguments)

    is_full = False
    async with open_message_store(options, disk=disk, run_blocking=run, wall_clock_ms=WallClock()) as store:
        for number in range(3):
            is_full = number == 1
            await store.log.put([message(number, queue_id=0)])
            await dispatched(store)
            await store.checkpointer.save(with_derived=True)
            [saved] = load_queue_ends(disk, ROOT / QUEUE_ENDS_FILE).values()
            assert saved == {0: (1, 1, 3)[number]}
