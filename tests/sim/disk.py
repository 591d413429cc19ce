"""A simulated disk behind the store's file seam (`ha.store.files`), including the page cache.

Fault model:
- Created, renamed and removed names, and `write_bytes`, are safe on return, as the seam promises. Everything else is in
  the page cache until `sync`, including writes through a map.
- A kill loses nothing. At a power loss each page (4 KiB) that differs from the disk survives, is lost, or is torn
  between its sectors (512 bytes), independently. Pages may also have been written back at any earlier time.
- A failed sync leaves each dirty page written or not, and *clean* in either case, as Linux does: a later sync reports
  success and writes it only if it was modified again ("fsyncgate"). The page cache still shows the new bytes, unless
  the page is evicted between this process and the next one.
- A full disk rejects new files, and bytes beyond those of a sparse file.
- A failed write may be accepted up to some page; the next call then rejects the rest, as the system does.
- EIO of any operation. A crash in the middle of an operation, after a number of operations.
- Flipped bits and truncated files affect the disk of a stopped node.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ha.store.files import DiskUsage
from tests.store.held import HeldFile, HeldFiles

if TYPE_CHECKING:
    from random import Random

    from tests.sim.world import World

PAGE = 4096
SECTOR = 512
TOTAL_BYTES = 1 << 30
SYNC_S = 0.002
OPERATION_S = 0.00005


class Inode:
    """A file's bytes: `content` in the page cache, `durable` on the disk; of equal length."""

    __slots__ = ("content", "durable", "failed_sync_count", "is_allocated", "lost", "modified_ms")

    def __init__(self, content: bytearray, durable: bytearray | None = None, *, is_allocated: bool = True) -> None:
        self.content = content
        self.durable = bytearray(content) if durable is None else durable
        self.is_allocated = is_allocated
        self.modified_ms = 0
        self.lost: dict[int, bytes] = {}
        """Pages that a failed sync left clean but unwritten, with their content at that time"""
        self.failed_sync_count = 0

    def copy(self) -> Inode:
        """Returns the file as seen by the next process."""
        made = Inode(bytearray(self.content), bytearray(self.durable), is_allocated=self.is_allocated)
        made.lost = dict(self.lost)
        made.modified_ms = self.modified_ms
        return made

    def dirty_pages(self) -> list[int]:
        """Positions of the pages that differ from the disk."""
        content, durable = self.content, self.durable
        if content == durable:
            return []
        return [at for at in range(0, len(content), PAGE) if content[at : at + PAGE] != durable[at : at + PAGE]]

    def unsynced_from(self) -> int | None:
        """Position of the first byte that is not on the disk; None if all are."""
        for page in self.dirty_pages():
            content, durable = self.content[page : page + PAGE], self.durable[page : page + PAGE]
            return page + next(i for i in range(len(content)) if content[i] != durable[i])
        return None

    def sync(self) -> None:
        """Writes the dirty pages, except those that a failed sync left clean and that are unchanged since."""
        kept = {}
        for page, seen in list(self.lost.items()):
            if self.content[page : page + PAGE] == seen:
                kept[page] = self.durable[page : page + PAGE]
            else:
                del self.lost[page]
        self.durable[:] = self.content
        for page, old in kept.items():
            self.durable[page : page + PAGE] = old

    def fail_sync(self, chance: Random) -> None:
        """Writes some of the dirty pages; then none is dirty."""
        self.failed_sync_count += 1
        for page in self.dirty_pages():
            if chance.random() < 0.5:
                self.durable[page : page + PAGE] = self.content[page : page + PAGE]
                self.lost.pop(page, None)
            else:
                self.lost[page] = bytes(self.content[page : page + PAGE])

    def write_back(self, chance: Random) -> None:
        """Writes some dirty pages, as the kernel does in the background."""
        for page in self.dirty_pages():
            if page not in self.lost and chance.random() < 0.3:
                self.durable[page : page + PAGE] = self.content[page : page + PAGE]

    def after_power_loss(self, chance: Random, kept_share: float) -> Inode:
        """Returns the file as seen after a power loss."""
        found = bytearray(self.durable)
        for page in self.dirty_pages():
            if page in self.lost or chance.random() >= kept_share:
                continue
            torn = chance.random() < 0.3
            for at in range(page, min(page + PAGE, len(found)), SECTOR):
                if not torn or chance.random() < 0.5:
                    found[at : at + SECTOR] = self.content[at : at + SECTOR]
        made = Inode(found, is_allocated=self.is_allocated)
        made.modified_ms = self.modified_ms
        return made


class DiskFaults:
    """Injected faults of a disk; they outlive the process."""

    def __init__(self) -> None:
        self.is_full = False
        self.slowness_s = 0.0
        """Additional duration of each sync"""
        self.slowed: dict[trio.CancelScope, None] = {}
        """Waits of calls whose syncs were slow"""
        self.fail_next: dict[str, int] = {}
        """Kind of operation ("sync", "write", "read", "create") -> number of next operations that fail with EIO; with a
        folder of the store ("sync commitlog") only those on files in it"""

    def speed_up(self) -> None:
        """Ends the slowness, including that of calls in progress: one that syncs many files has most of them left."""
        self.slowness_s = 0.0
        for scope in self.slowed:
            scope.cancel()


class SimFile(HeldFile[Inode]):
    """Implements `ha.store.files.File`."""

    __slots__ = ("_disk", "_refusal", "_reported_count")

    def __init__(self, disk: SimDisk, path: Path, inode: Inode) -> None:
        super().__init__(path, inode)
        self._disk = disk
        self._refusal: OSError | None = None
        """Error for the rest of a partially accepted write"""
        self._reported_count = inode.failed_sync_count

    def pread(self, size: int, position: int) -> bytes:
        self._disk.step("read", self.path)
        return super().pread(size, position)

    def pread_nowait(self, size: int, position: int) -> bytes | None:
        return None if self._disk.chance.random() < 0.5 else super().pread(size, position) or None

    def _write(self, chunk: memoryview, position: int) -> int:
        """As pwrite(2): a write rejected in its middle is accepted in part, and the next call fails."""
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal
        disk, inode = self._disk, self._inode
        size, taken = len(chunk), 0

        def partly(share: float) -> None:
            # The kernel copies page by page, and can stop only between pages.
            nonlocal taken
            end = position + int(size * share)
            taken = max(0, end - end % PAGE - position)
            inode.content[position : position + taken] = chunk[:taken]

        is_new = not inode.is_allocated and not any(inode.content[position : position + size])
        try:
            disk.step("write", self.path, partly, needs_room=is_new)
        except OSError as error:
            if not taken:
                raise
            self._refusal = error.with_traceback(None)
        else:
            taken = size
            inode.content[position : position + size] = chunk
        for page in [page for page in inode.lost if position - PAGE < page < position + taken]:
            del inode.lost[page]  # dirty again, even if unchanged
        inode.modified_ms = disk.wall_clock_ms()
        return taken

    def zero(self, position: int, size: int) -> None:
        self._disk.step("write", self.path)
        self._inode.content[position : position + size] = bytes(size)

    def write_back(self, position: int, size: int) -> None:
        self._begin_sync()

    def sync(self) -> None:
        self._begin_sync()
        self._inode.sync()

    def _begin_sync(self) -> None:
        """The kernel reports a failed sync once to each descriptor that was open then."""
        disk, inode = self._disk, self._inode
        unreported = inode.failed_sync_count - self._reported_count
        try:
            disk.step("sync", self.path, lambda share: inode.fail_sync(disk.chance))
        finally:
            self._reported_count = inode.failed_sync_count
        if unreported:
            raise OSError(errno.EIO, "Input/output error", str(self.path))


class SimLock:
    """A lock held by a process; it ends with the process."""

    def __init__(self, disk: SimDisk, path: Path) -> None:
        self._disk = disk
        self._path = path

    def release(self) -> None:
        self._disk.locked.discard(self._path)


class SimDisk(HeldFiles[Inode]):
    """Implements `ha.store.files.Disk` for one process of a node; its successor gets a copy of the files."""

    def __init__(
        self,
        world: World,
        name: str,
        faults: DiskFaults,
        wall_clock_ms: Callable[[], int],
        inodes: dict[Path, Inode] | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.faults = faults
        self.wall_clock_ms = wall_clock_ms
        self.chance = world.chance(f"disk {name}")
        self.inodes: dict[Path, Inode] = {} if inodes is None else inodes
        self.locked: set[Path] = set()
        self.is_dead = False
        """Whether the process is dead: its operations have no effect"""
        self.crash_after: tuple[int, Callable[[], None]] | None = None
        """Number of operations that still succeed, and the function that crashes the node"""
        self.on_unlink: Callable[[Path], None] = lambda path: None
        """Called when a file has been removed"""
        self.owed_s = 0.0
        """Duration of the operations since it was last queried"""
        self.owed_slowness_s = 0.0
        """Additional duration, unless the disk becomes fast"""
        self.failed: set[str] = set()
        """Kinds of operations that have failed with EIO; after a sync or a write to the log, the process ends"""

    # what happens to it

    def step(
        self,
        operation: str,
        path: Path,
        partly: Callable[[float], None] | None = None,
        *,
        needs_room: bool = False,
    ) -> None:
        """Counts one operation, and fails it if due. `partly(share)` applies part of it if it fails midway."""
        if self.is_dead:
            raise OSError(errno.EIO, "the process is dead", str(path))
        faults = self.faults
        if operation == "sync":
            self.owed_s += SYNC_S * (0.2 + 2 * self.chance.random() ** 2)
            self.owed_slowness_s += faults.slowness_s
            self.world.note(f"{self.name} sync {path.name}")
        else:
            self.owed_s += OPERATION_S
        if self.crash_after is not None and operation != "read":
            count, crash = self.crash_after
            self.crash_after = (count - 1, crash)
            if count <= 0:
                if partly is not None:
                    partly(self.chance.random())
                self.crash_after = None
                crash()
                raise OSError(errno.EIO, "the process is dead", str(path))
        if needs_room and faults.is_full:
            if partly is not None and self.chance.random() < 0.5:
                partly(self.chance.random())
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        folder = path.parts[2] if len(path.parts) > 2 else ""
        key = next((k for k in (operation, f"{operation} {folder}") if faults.fail_next.get(k, 0) > 0), None)
        if key is not None:
            faults.fail_next[key] -= 1
            if partly is not None:
                partly(self.chance.random())
            self.failed.add(operation)
            self.world.note(f"{self.name} EIO {operation} {path.name}")
            raise OSError(errno.EIO, "Input/output error", str(path))

    def take_owed_s(self) -> tuple[float, float]:
        """Returns the duration of the operations since the last call, and the additional one if the disk stays slow."""
        owed = self.owed_s, self.owed_slowness_s
        self.owed_s = self.owed_slowness_s = 0.0
        return owed

    def write_back(self) -> None:
        """Writes back some pages, as the kernel does."""
        for inode in self.inodes.values():
            inode.write_back(self.chance)

    def after_kill(self) -> SimDisk:
        """Ends this one; returns the disk for the next process after a kill -9 or an exit."""
        self.is_dead = True
        copies = {path: inode.copy() for path, inode in self.inodes.items()}
        return SimDisk(self.world, self.name, self.faults, self.wall_clock_ms, copies)

    def with_files_of(self, other: SimDisk | None) -> SimDisk:
        """Returns this machine's disk with a copy of the files of `other`, whose process may continue; None: empty."""
        files = {} if other is None else other.inodes
        copies = {path: inode.copy() for path, inode in files.items() if path.name != "lock"}
        return SimDisk(self.world, self.name, self.faults, self.wall_clock_ms, copies)

    @property
    def has_lost_pages(self) -> bool:
        """Whether a failed sync left pages clean but unwritten."""
        return any(inode.lost for inode in self.inodes.values())

    def after_eviction(self) -> SimDisk:
        """Ends this one; returns the disk for the next process if the kernel evicts the pages that a failed sync left
        unwritten."""
        disk = self.after_kill()
        for inode in disk.inodes.values():
            for page in inode.lost:
                inode.content[page : page + PAGE] = inode.durable[page : page + PAGE]
            inode.lost.clear()
        return disk

    def after_power_loss(self) -> SimDisk:
        """Ends this one; returns the disk after a power loss."""
        self.is_dead = True
        kept_share = self.chance.choice((0.0, 0.3, 0.7, 0.95))
        copies = {path: inode.after_power_loss(self.chance, kept_share) for path, inode in self.inodes.items()}
        return SimDisk(self.world, self.name, self.faults, self.wall_clock_ms, copies)

    def damage(self, kind: str, folder: str = "") -> tuple[Path, int, int] | None:
        """Damages a file as a bad disk does; returns the path and the range of bytes. None: nothing to damage.

        `folder`: name of the folder of the file, if not any.
        "flip_bit": one written bit. "zero_range": up to 2000 written bytes. "truncate_file".
        """
        chance = self.chance
        used = {
            path: len(bytes(inode.content).rstrip(b"\0")) for path, inode in self.inodes.items() if path.name != "abort"
        }
        paths = sorted(
            path for path, size in used.items() if size and path.name != "lock" and folder in ("", path.parent.name)
        )
        if not paths:
            return None
        path = chance.choice(paths)
        position = chance.randrange(used[path])
        inode = self.inodes[path]
        end = len(inode.content)
        if kind == "flip_bit":
            end = position + 1
        elif kind == "zero_range":
            end = min(position + 1 + (position * 7919) % 2000, end)
        for held in (inode.content, inode.durable):
            if kind == "flip_bit":
                held[position] ^= 1 << position % 8
            elif kind == "zero_range":
                held[position:end] = bytes(end - position)
            else:
                del held[position:]
        self.world.note(f"{self.name} {kind} {path} at {position}")
        return path, position, end

    # what checkers see

    def image(self, root: Path) -> dict[str, bytes]:
        """All files below `root`, as in the page cache; relative names with slashes."""
        prefix = f"{root}/"
        return {
            name.removeprefix(prefix): bytes(inode.content)
            for name, inode in sorted((str(path), inode) for path, inode in self.inodes.items())
            if name.startswith(prefix)
        }

    def synced_log_end(self, commitlog: Path) -> float:
        """Physical offset of the first commitlog byte that a power loss could take now; infinity: none."""
        prefix = f"{commitlog}/"
        ends = [
            int(path.name) + position
            for path, inode in self.inodes.items()
            if str(path).startswith(prefix) and path.name.isdigit() and (position := inode.unsynced_from()) is not None
        ]
        return min(ends, default=math.inf)

    # the seam

    def create(self, path: Path, size: int, *, allocate: bool) -> SimFile:
        if path in self.inodes:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        self.step("create", path, needs_room=True)
        inode = self.inodes[path] = Inode(bytearray(size), is_allocated=allocate)
        inode.modified_ms = self.wall_clock_ms()
        self.world.note(f"{self.name} create {path.name}")
        return SimFile(self, path, inode)

    def open(self, path: Path) -> SimFile:
        return SimFile(self, path, self.inode(path))

    def read_bytes(self, path: Path) -> bytes:
        self.step("read", path)
        return super().read_bytes(path)

    def write_bytes(self, path: Path, content: bytes) -> None:
        def partly(share: float) -> None:
            if share > 0.3:  # otherwise it fails before it has any effect
                self.inodes[path] = Inode(bytearray(content[: int(len(content) * (share - 0.3))]))

        self.step("write", path, partly, needs_room=True)
        self.inodes[path] = Inode(bytearray(content))
        self.inodes[path].modified_ms = self.wall_clock_ms()

    def rename(self, old: Path, new: Path) -> None:
        self.step("rename", old)
        self.move(old, new)

    def unlink(self, path: Path) -> None:
        self.inode(path)
        self.step("unlink", path)
        del self.inodes[path]
        self.on_unlink(path)

    def usage(self, path: Path) -> DiskUsage:
        return DiskUsage(TOTAL_BYTES, 0 if self.faults.is_full else TOTAL_BYTES // 2)

    def lock(self, path: Path, content: bytes) -> SimLock | None:
        if path in self.locked:
            return None
        self.locked.add(path)
        self.inodes[path] = Inode(bytearray(content))
        return SimLock(self, path)

    def lock_directory(self, path: Path) -> SimLock | None:
        if path in self.locked:
            return None
        self.locked.add(path)
        return SimLock(self, path)
