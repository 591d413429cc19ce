"""A worker makes new files of queues and index, and deletes those that are not needed."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ha.protocol.store_files import ENTRY, ENTRY_FILL, ENTRY_SIZE, segment_name
from ha.store.consume_queue import ConsumeQueue
from ha.store.message_store import open_message_store
from ha.store.open_files import OpenFiles
from tests.store.disks import MemoryDisk, Worker, run_inline
from tests.store.stores import ROOT, WallClock, check_derived, dispatched, message, open_small, small_options

QUEUES = ROOT / "consumequeue"
INDEX = ROOT / "index"


def derived_files(disk: MemoryDisk) -> list[str]:
    return sorted(str(path) for path in disk.inodes if path.is_relative_to(QUEUES) or path.parent == INDEX)


async def test_a_worker_makes_new_queue_files() -> None:
    """The first, the next ones, and the one of a queue that begins in the middle, which has to be filled."""
    disk = MemoryDisk()
    worker = Worker()
    made: list[tuple[Path, bool]] = []

    def note(operation: str, path: Path) -> None:
        if operation == "create" and (path.is_relative_to(QUEUES) or path.parent == INDEX):
            made.append((path, worker.is_working))

    async with open_small(MemoryDisk()) as master:
        await master.log.put([message(number, size=60, queue_id=number % 2) for number in range(60)])
        end = master.log.max_offset.value
        rest = [(each.start, min(each.end, end)) for each in master.log.segments[1:]]
        raw = [(begin, await master.log.read_all(begin, stop - begin)) for begin, stop in rest]
    disk.refuse = note
    options = small_options(is_slave=True, index_entry_count=1000)
    async with open_message_store(options, disk=disk, run_blocking=worker.run, wall_clock_ms=WallClock()) as store:
        for begin, chunk in raw:
            await store.log.append_raw(begin, chunk)
        await dispatched(store)
        assert any(queue.min_offset % 8 for queue in store.queues)
        await check_derived(store)
    assert len(made) >= 5
    assert INDEX in {path.parent for path, _ in made}
    assert [path for path, by_worker in made if not by_worker] == []


async def test_new_files_of_truncated_records_are_deleted(autojump_clock: MockClock) -> None:
    disk = MemoryDisk()
    is_slow, is_making, go_on = False, trio.Event(), trio.Event()

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if is_slow and getattr(call, "__name__", "") == "_make_next_files":
            is_making.set()
            await go_on.wait()
        return await run_inline(call, *arguments)

    async with open_message_store(
        small_options(index_entry_count=11), disk=disk, run_blocking=slowly, wall_clock_ms=WallClock()
    ) as store:
        # Three keys each: one more message needs another file of the index, too.
        await store.log.put([message(number) for number in range(3)])
        await dispatched(store)
        before = derived_files(disk)
        is_slow = True
        [cut] = await store.log.put([message(3, queue_id=1)])
        await is_making.wait()
        await store.truncate(cut.physical_offset)
        go_on.set()
        await wait_all_tasks_blocked()
        assert derived_files(disk) == before
        await store.log.put([message(4, queue_id=number) for number in (0, 1, 2)])
        await check_derived(store)
        assert len(derived_files(disk)) == len(before) + 3


async def test_new_files_of_truncated_records_that_are_not_deleted_are_replaced(autojump_clock: MockClock) -> None:
    """The next message for the queue found that the name exists, which ended the node."""
    disk = MemoryDisk()
    is_slow, is_making, go_on = False, trio.Event(), trio.Event()

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if is_slow and getattr(call, "__name__", "") == "_make_next_files":
            is_making.set()
            await go_on.wait()
        return await run_inline(call, *arguments)

    async with open_message_store(small_options(), disk=disk, run_blocking=slowly, wall_clock_ms=WallClock()) as store:
        await store.log.put([message(number) for number in range(3)])
        await dispatched(store)
        before = derived_files(disk)
        is_slow = True
        [cut] = await store.log.put([message(3, queue_id=1)])
        await is_making.wait()
        await store.truncate(cut.physical_offset)
        disk.refuse = lambda operation, path: errno.EMFILE if operation == "unlink" else None
        go_on.set()
        await wait_all_tasks_blocked()
        assert len(derived_files(disk)) == len(before) + 1
        disk.refuse = lambda operation, path: None
        await store.log.put([message(4, queue_id=1)])
        await check_derived(store)


async def test_a_new_index_file_of_truncated_records_that_is_not_deleted_is_used_later(
    autojump_clock: MockClock,
) -> None:
    """It stayed as an empty file before the ones that were made later, which the next start deleted."""
    disk, clock = MemoryDisk(), WallClock()
    is_slow, is_making, go_on = False, trio.Event(), trio.Event()

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if is_slow and getattr(call, "__name__", "") == "_make_next_files":
            is_making.set()
            await go_on.wait()
        return await run_inline(call, *arguments)

    options = small_options(index_entry_count=11)
    async with open_message_store(options, disk=disk, run_blocking=slowly, wall_clock_ms=clock) as store:
        await store.log.put([message(number) for number in range(3)])
        await dispatched(store)
        is_slow = True
        [cut] = await store.log.put([message(3)])
        await is_making.wait()
        await store.truncate(cut.physical_offset)
        disk.refuse = lambda operation, path: errno.EMFILE if operation == "unlink" else None
        go_on.set()
        await wait_all_tasks_blocked()
        assert len(disk.list_dir(INDEX)) == 2
        disk.refuse = lambda operation, path: None
        await store.log.put([message(number) for number in range(4, 10)])
        await check_derived(store)
        assert store.index is not None
        assert [file.path.name for file in store.index.files] == disk.list_dir(INDEX)


async def test_the_next_start_makes_files_that_a_stop_had_no_time_for(autojump_clock: MockClock) -> None:
    """Each chunk's files take 2 s to make, as if there were thousands."""
    disk = MemoryDisk()
    is_slow = True

    async def slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if is_slow and getattr(call, "__name__", "") == "_make_next_files":
            with trio.CancelScope(shield=True):  # no thread is let go of
                await trio.sleep(2)
        return await run_inline(call, *arguments)

    options = small_options(segment_size=1 << 20)
    async with open_message_store(options, disk=disk, run_blocking=slowly, wall_clock_ms=WallClock()) as store:
        for first in range(0, 6_000, 1_000):
            await store.log.put([message(number, size=3, queue_id=number) for number in range(first, first + 1_000)])
        end = store.log.max_offset.value
        began = trio.current_time()
    assert trio.current_time() - began < options.stop_timeout_s
    assert not disk.exists(ROOT / "abort")
    is_slow = False
    async with open_message_store(options, disk=disk, run_blocking=slowly, wall_clock_ms=WallClock()) as store:
        assert store.statistics().recovered_clean
        assert store.is_writable == (True, "")
        assert store.log.dispatched_offset.value == store.log.max_offset.value == end
        assert len(list(store.queues)) == 6_000
        assert store.statistics().index_file_count > 1


def test_blank_entries_of_a_new_file_are_on_the_disk() -> None:
    """They may keep the end of a queue without messages: a later write, and its sync, may never come."""
    disk = MemoryDisk()
    queue = ConsumeQueue(disk, OpenFiles(disk), QUEUES / "T" / "0", "T", 0, 8)
    [new] = queue.new_files(13, 14)
    queue.adopt(new, new.make())
    [inode] = disk.inodes.values()
    assert inode.durable == inode.content == ENTRY_FILL * 5 + bytes(3 * ENTRY_SIZE)


def test_a_queue_that_gets_its_first_file_while_retention_trims_keeps_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Retention's worker had searched the queue without files, and then set the start that it had found."""
    disk = MemoryDisk()
    queue = ConsumeQueue(disk, OpenFiles(disk), QUEUES / "T" / "0", "T", 0, 8)
    [new] = queue.new_files(1000, 1001)
    search = queue.end_before

    def search_and_adopt(physical_offset: int) -> int:
        found = search(physical_offset)
        queue.adopt(new, new.make())
        return found

    monkeypatch.setattr(queue, "end_before", search_and_adopt)
    queue.correct_min(4096)
    assert queue.min_offset == queue.max_offset


@pytest.mark.parametrize("removal", ["correct_min", "clear"])
def test_a_queue_that_begins_again_while_a_worker_removes_its_first_files(removal: str) -> None:
    """Dispatch deletes all files after a gap that is longer than a file."""
    disk = MemoryDisk()
    queue = ConsumeQueue(disk, OpenFiles(disk), QUEUES / "T" / "0", "T", 0, 8)
    queue.append(0, [ENTRY.pack(number * 100, 100, 0) for number in range(30)])
    later = [ENTRY.pack(10_000, 100, 0)]
    failures: list[BaseException] = []

    def begin_again() -> None:
        try:
            queue.append(1000, later)
        except BaseException as error:
            failures.append(error)

    other = threading.Thread(target=begin_again)
    unlink = disk.unlink

    def unlink_beside_it(path: Path) -> None:
        if other.ident is None:
            other.start()
            other.join(0.2)
        unlink(path)

    disk.unlink = unlink_beside_it  # type: ignore[method-assign]
    getattr(queue, removal)(2000)
    other.join()
    assert not failures
    assert (queue.min_offset, queue.max_offset, queue.files.starts) == (1000, 1001, [1000])
    assert [path.name for path in disk.inodes if path.parent == queue.files._directory] == [segment_name(20_000)]
