"""A disk in memory behind the store's file seam: power loss, errors and a full disk at a chosen operation.
A write that fails may be taken in part.

Fault model: names are safe at once (the seam promises synced directories). Bytes are safe after `sync`; at a power loss
each page written since then survives at random, so that records are torn in any order. A kill loses
nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import trio

from ha.store.files import DiskUsage
from tests.store.held import HeldFile, HeldFiles

PAGE = 512
"""Smaller than a real page, so that small test records span several."""


class Inode:
    def __init__(self, content: bytearray) -> None:
        self.content = content
        self.durable = bytes(content)
        self.modified_ms = 0
        self.failed_sync_count = 0


class MemoryFile(HeldFile[Inode]):
    def __init__(self, disk: MemoryDisk, path: Path, inode: Inode) -> None:
        super().__init__(path, inode)
        self._disk = disk
        self._reported_count = inode.failed_sync_count

    def _write(self, chunk: memoryview, position: int) -> int:
        disk = self._disk
        if disk.refusal is not None:  # of what was left of the last one
            refusal, disk.refusal = disk.refusal, None
            raise refusal
        taken = len(chunk)
        try:
            disk.step("pwrite", self.path)
        except OSError as error:
            taken = min(disk.taken_bytes, taken - 1)
            if taken <= 0:
                raise
            disk.refusal = error.with_traceback(None)
        self._inode.content[position : position + taken] = chunk[:taken]
        return taken

    def zero(self, position: int, size: int) -> None:
        self._disk.step("zero", self.path)
        self._inode.content[position : position + size] = bytes(size)

    def write_back(self, position: int, size: int) -> None:
        self._disk.step(f"write back {position} to {position + size}", self.path)

    def sync(self) -> None:
        """A failed sync is reported once to each descriptor that was open then, as by the kernel."""
        inode, unreported = self._inode, self._inode.failed_sync_count - self._reported_count
        try:
            self._disk.step("sync", self.path)
        except OSError:
            inode.failed_sync_count += 1
            raise
        finally:
            self._reported_count = inode.failed_sync_count
        if unreported:
            raise OSError(errno.EIO, "an earlier sync failed", str(self.path))
        inode.durable = bytes(inode.content)


class MemoryLock:
    def __init__(self, disk: MemoryDisk, path: Path) -> None:
        self._disk = disk
        self._path = path

    def release(self) -> None:
        self._disk.locked.discard(self._path)


class MemoryDisk(HeldFiles[Inode]):
    """Implements `ha.store.files.Disk`."""

    def __init__(self, inodes: dict[Path, Inode] | None = None) -> None:
        self.inodes = inodes or {}
        self.locked: set[Path] = set()
        self.steps: list[tuple[str, str]] = []
        self.die_at: int | None = None
        """Number of the step that fails with EIO, like every one after it"""
        self.refuse: Callable[[str, Path], int | None] = lambda operation, path: None
        """Returns an errno to fail a step with"""
        self.taken_bytes = 0
        """Size of the part of a failing write that the disk writes before it refuses the rest"""
        self.refusal: OSError | None = None
        self.total_bytes = 1 << 40
        self.free_bytes = 1 << 39
        self.now_ms = 0

    def step(self, operation: str, path: Path) -> None:
        if self.die_at is not None and len(self.steps) >= self.die_at:
            raise OSError(errno.EIO, "the machine is dead", str(path))
        code = self.refuse(operation, path)
        if code is not None:
            raise OSError(code, errno.errorcode[code], str(path))
        self.steps.append((operation, path.name))

    def power_loss(self, random: Random) -> MemoryDisk:
        """Returns the disk as the machine finds it after a power loss."""
        inodes = {}
        for path, inode in self.inodes.items():
            content = bytearray(inode.content)
            durable = inode.durable.ljust(len(content), b"\x00")
            for begin in range(0, len(content), PAGE):
                if content[begin : begin + PAGE] != durable[begin : begin + PAGE] and random.random() < 0.5:
                    content[begin : begin + PAGE] = durable[begin : begin + PAGE]
            inodes[path] = Inode(content)
            inodes[path].modified_ms = inode.modified_ms
        return MemoryDisk(inodes)

    def kill(self) -> MemoryDisk:
        """Returns the disk as the next process finds it after a kill -9."""
        return MemoryDisk({path: Inode(bytearray(inode.content)) for path, inode in self.inodes.items()})

    # the seam

    def create(self, path: Path, size: int, *, allocate: bool) -> MemoryFile:
        self.step("create", path)
        if path in self.inodes:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        inode = self.inodes[path] = Inode(bytearray(size))
        inode.modified_ms = self.now_ms
        return MemoryFile(self, path, inode)

    def open(self, path: Path) -> MemoryFile:
        return MemoryFile(self, path, self.inode(path))

    def write_bytes(self, path: Path, content: bytes) -> None:
        try:
            self.step("write_bytes", path)
        except OSError:
            if self.taken_bytes:
                self.inodes[path] = Inode(bytearray(content[: self.taken_bytes]))
            raise
        self.inodes[path] = Inode(bytearray(content))

    def rename(self, old: Path, new: Path) -> None:
        self.step("rename", old)
        self.move(old, new)

    def unlink(self, path: Path) -> None:
        self.step("unlink", path)
        self.inode(path)  # raises FileNotFoundError
        del self.inodes[path]

    def usage(self, path: Path) -> DiskUsage:
        return DiskUsage(self.total_bytes, self.free_bytes)

    def lock(self, path: Path, content: bytes) -> MemoryLock | None:
        if path in self.locked:
            return None
        self.locked.add(path)
        return MemoryLock(self, path)

    def lock_directory(self, path: Path) -> MemoryLock | None:
        return self.lock(path, b"")


async def run_inline(call: Callable[..., Any], *arguments: Any) -> Any:
    """A blocking runner for tests on a mock clock, which does not wait for real threads."""
    await trio.lowlevel.checkpoint()
    return call(*arguments)


class Worker:
    """Runs blocking calls like `run_inline`, and knows while it runs one."""

    def __init__(self) -> None:
        self.is_working = False

    async def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        self.is_working = True
        try:
            return call(*arguments)
        finally:
            self.is_working = False
