"""Stores whose queues are behind or ahead of their log after a crash."""

from pathlib import Path

import pytest

from tests.store.disks import MemoryDisk
from tests.store.stores import (
    ROOT,
    SEGMENT,
    WallClock,
    check_derived,
    dispatched,
    message,
    open_small,
    records,
)

QUEUE = ROOT / "consumequeue" / "T" / "0"
PER_FILE = 8
"""Entries of a queue's file in these stores"""
ENTRY_SIZE = 20


async def crashed(count: int) -> tuple[MemoryDisk, list[int]]:
    """A killed store of `count` messages of one queue, and the end of each of them."""
    async with open_small(running := MemoryDisk()) as store:
        ends = [(await store.log.put([message(number, size=300)]))[0].next_offset for number in range(count)]
        await dispatched(store)
        return running.kill(), ends


def lose_log_behind(disk: MemoryDisk, end: int) -> None:
    """Simulates a power loss with ASYNC_FLUSH: the log behind `end` is lost, and its metadata."""
    for path in [path for path in disk.inodes if path.parent.name == "commitlog"]:
        start = int(path.name)
        content = disk.inodes[path].content
        if start >= end:
            disk.unlink(path)
        elif start + len(content) > end:
            content[end - start :] = bytes(len(content) - (end - start))
    for name in ("checksums", "index"):
        for path in [path for path in disk.inodes if path.parent.name == name]:
            disk.unlink(path)
    for path in [path for path in disk.inodes if path.name in ("checkpoint", "queueends")]:
        disk.unlink(path)


def queue_files(disk: MemoryDisk) -> list[Path]:
    return sorted(path for path in disk.inodes if path.parent == QUEUE)


@pytest.mark.parametrize("kept_entries", [0, PER_FILE], ids=["only file", "last file"])
@pytest.mark.parametrize("bytes_there", [0, 1, 13, ENTRY_SIZE - 1, ENTRY_SIZE, 3 * ENTRY_SIZE + 7])
@pytest.mark.parametrize("is_slave", [False, True])
async def test_9728_last_queue_file_without_a_complete_entry(
    kept_entries: int, bytes_there: int, is_slave: bool
) -> None:
    """apache/rocketmq#9728, #10108: the last file of a consume queue was empty, or had a partial entry, because it was
    not flushed, and its messages were lost. Recovery kept the file and looked for the first entry in it; the broker did
    not start: IllegalArgumentException in correctMinOffset.

    In halog such a file, with any number of bytes, is no obstacle: queues end where the log's messages do, and the next
    message has the next queue offset.
    """
    disk, ends = await crashed(PER_FILE + 4)
    lose_log_behind(disk, ends[kept_entries - 1] if kept_entries else 0)
    files = queue_files(disk)
    assert len(files) == 2
    if not kept_entries:
        disk.unlink(files.pop())
    content = disk.inodes[files[-1]].content
    content[bytes_there:] = bytes(len(content) - bytes_there)
    for _ in range(2):  # the state left by the first start, after another kill
        disk = disk.kill()
        async with open_small(disk, WallClock(1_700_000_100_000), is_slave=is_slave) as store:
            assert len(await records(store)) == kept_entries
            await check_derived(store)
    async with open_small(disk.kill(), WallClock(1_700_000_200_000)) as store:
        [result] = await store.log.put([message(99)])
        assert result.queue_offset == kept_entries
        await check_derived(store)


async def test_10108_queue_whose_messages_were_all_deleted() -> None:
    """The other cause: all messages of a queue were deleted from the log."""
    disk, ends = await crashed(3 * PER_FILE)
    first = ends[-1] - ends[-1] % SEGMENT
    for path in [path for path in disk.inodes if path.parent.name in ("commitlog", "checksums")]:
        if int(path.name) < first:
            disk.unlink(path)
    last = queue_files(disk)[-1]
    disk.inodes[last].content[:] = bytes(len(disk.inodes[last].content))
    async with open_small(disk.kill(), WallClock(1_700_000_100_000)) as store:
        left = await records(store)
        assert 0 < len(left) < 3 * PER_FILE
        await dispatched(store)
        [result] = await store.log.put([message(99)])
        assert result.queue_offset == 3 * PER_FILE
        await dispatched(store)
        [queue] = list(store.queues)
        assert [entry.physical_offset for entry in queue.read(queue.max_offset - 1, 1)] == [result.physical_offset]
