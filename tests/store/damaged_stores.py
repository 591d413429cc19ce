"""Stores with some segments, and what happens to their files."""

from pathlib import Path

from ha.store.checkpoint import load_begin, load_checkpoint, save_checkpoint
from tests.store.disks import MemoryDisk
from tests.store.stores import ROOT, SEGMENT, check_derived, message, open_small

LOG = ROOT / "commitlog"


async def made(count: int = 30, *, size: int = 400, is_clean: bool = True) -> tuple[MemoryDisk, list[tuple[int, int]]]:
    """A store with some segments, and (offset, size) of its records."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        results = []
        for number in range(count):
            results += await store.log.put([message(number, size=size, queue_id=number % 2)])
        await check_derived(store)
    if not is_clean:
        disk.write_bytes(ROOT / "abort", b"")
        forget_checksums(disk)  # which would prove that all of it was flushed
    return disk, [(result.physical_offset, result.size) for result in results]


def forget_checksums(disk: MemoryDisk) -> None:
    """Removes what RocketMQ, or an older halog, does not write."""
    for path in [path for path in disk.inodes if path.parent.name == "checksums"]:
        del disk.inodes[path]
    forget_flushed_to(disk)


def forget_flushed_to(disk: MemoryDisk) -> None:
    """Leaves only the times of the checkpoint as a proof of what was flushed."""
    checkpoint = load_checkpoint(disk, ROOT / "checkpoint")
    save_checkpoint(disk, ROOT / "checkpoint", checkpoint, 0, load_begin(disk, ROOT / "checkpoint"))


def segment(disk: MemoryDisk, physical_offset: int) -> tuple[Path, int]:
    start = physical_offset - physical_offset % SEGMENT
    return LOG / f"{start:020d}", physical_offset - start


def damage(disk: MemoryDisk, physical_offset: int, size: int = 10) -> None:
    path, position = segment(disk, physical_offset)
    disk.inodes[path].content[position : position + size] = b"\xff" * size


def snapshot(disk: MemoryDisk) -> dict[Path, bytes]:
    return {path: bytes(inode.content) for path, inode in disk.inodes.items() if path.parent == LOG}
