"""A disk in memory that records all operations, and computes every state that a power loss can leave.

Like Linux's dm-log-writes, but over the store's file seam: one `Recorder` keeps the operations of all its disks in one
order, with marks of the test in between (what was answered when). Any moment of it can then be made the last one.

Fault model. At a power loss each sector (512 bytes) of a file holds what it held at the file's last completed sync or
anything that was written there since, whether a program wrote it in one piece or not, each sector for itself; disks
write a sector whole or not at all. Writes during a sync may or may not be part of it. Names are
safe when `create`, `rename` and `unlink` return, as the seam promises; `create`'s content is zeros until written.
`write_bytes` truncates, writes and syncs: the file may be found as before, empty, or as after.

Writes through a map can't be seen as they happen. They are found by comparing at each recorded operation and whenever
the test says `observe`; a sector written twice in between shows its last content only.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import trio

from ha.store.files import DiskUsage
from tests.store.held import HeldFile, HeldFiles

SECTOR = 512


class Mark(NamedTuple):
    """An event of the test between the operations."""

    what: Any


class Created(NamedTuple):
    disk: RecordingDisk
    path: Path
    number: int
    size: int


class Wrote(NamedTuple):
    """Sectors that changed: number -> content."""

    disk: RecordingDisk
    number: int
    sectors: dict[int, bytes]


class Replaced(NamedTuple):
    """The whole content was replaced."""

    disk: RecordingDisk
    number: int
    content: bytes


class SyncBegan(NamedTuple):
    disk: RecordingDisk
    number: int
    token: int


class SyncEnded(NamedTuple):
    """Everything that was written before the sync began is durable."""

    disk: RecordingDisk
    number: int
    token: int


class Renamed(NamedTuple):
    disk: RecordingDisk
    old: Path
    new: Path


class Unlinked(NamedTuple):
    disk: RecordingDisk
    path: Path


Operation = Mark | Created | Wrote | Replaced | SyncBegan | SyncEnded | Renamed | Unlinked


class Recorder:
    """The operations of any number of disks, in order."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.disks: list[RecordingDisk] = []
        self._last_token = 0

    def mark(self, what: Any) -> None:
        """Records an event of the test."""
        self.observe()
        self.operations.append(Mark(what))

    def observe(self) -> None:
        """Records what was written through maps."""
        for disk in self.disks:
            disk.observe()

    def add(self, operation: Operation) -> None:
        """Records an operation, after all writes through maps. OSError if its disk is dead."""
        if not isinstance(operation, Mark):
            operation.disk.check_alive()
        self.observe()
        self.operations.append(operation)

    def next_token(self) -> int:
        self._last_token += 1
        return self._last_token


@dataclass
class Inode:
    number: int
    content: bytearray
    shadow: bytes
    """The content at the last comparison, for mapped files"""
    is_mapped: bool = False
    modified_ms: int = 0


class RecordingFile(HeldFile[Inode]):
    """Implements `ha.store.files.File`."""

    def __init__(self, disk: RecordingDisk, path: Path, inode: Inode) -> None:
        super().__init__(path, inode)
        self._disk = disk

    def map(self, size: int) -> memoryview:
        self._inode.is_mapped = True
        return super().map(size)

    def _write(self, chunk: memoryview, position: int) -> int:
        self._disk.check_alive()
        self._inode.content[position : position + len(chunk)] = chunk
        self._disk.look_at(self._inode)
        return len(chunk)

    def zero(self, position: int, size: int) -> None:
        # Piece by piece, so that a crash finds any part of it done.
        for begin in range(position, position + size, SECTOR):
            self.pwrite(bytes(min(SECTOR, position + size - begin)), begin)

    def sync(self) -> None:
        self.end_sync(self.begin_sync())

    def begin_sync(self) -> int:
        """The first half of a sync, which need not include later writes."""
        recorder = self._disk.recorder
        token = recorder.next_token()
        recorder.add(SyncBegan(self._disk, self._inode.number, token))
        return token

    def end_sync(self, token: int) -> None:
        """The second half of a sync."""
        self._disk.recorder.add(SyncEnded(self._disk, self._inode.number, token))


class RecordingLock:
    def release(self) -> None:
        pass


class RecordingDisk(HeldFiles[Inode]):
    """Implements `ha.store.files.Disk`; its files are initially `contents`, all durable."""

    def __init__(self, recorder: Recorder, contents: dict[Path, bytes] | None = None) -> None:
        self.recorder = recorder
        recorder.disks.append(self)
        self.now_ms = 0
        self.is_dead = False
        """Every operation fails: the process is being killed"""
        self._last_number = 0
        self.inodes = {}
        self._by_number: dict[int, Inode] = {}
        for path, content in (contents or {}).items():
            self._add(path, bytearray(content))
        self.initial = {path: (inode.number, bytes(inode.content)) for path, inode in self.inodes.items()}

    def _add(self, path: Path, content: bytearray) -> Inode:
        self._last_number += 1
        inode = Inode(self._last_number, content, bytes(content), modified_ms=self.now_ms)
        self.inodes[path] = self._by_number[inode.number] = inode
        return inode

    def observe(self) -> None:
        """Records what was written through maps."""
        for inode in self._by_number.values():
            if inode.is_mapped:
                self.look_at(inode)

    def look_at(self, inode: Inode) -> None:
        """Records which sectors of a file have changed since the last comparison."""
        content, shadow = inode.content, inode.shadow
        if content == shadow:
            return
        changed = {
            begin // SECTOR: bytes(content[begin : begin + SECTOR])
            for begin in range(0, len(content), SECTOR)
            if content[begin : begin + SECTOR] != shadow[begin : begin + SECTOR]
        }
        inode.shadow = bytes(content)
        inode.modified_ms = self.now_ms
        self.recorder.operations.append(Wrote(self, inode.number, changed))

    def files(self) -> dict[Path, bytes]:
        """Returns the content of every file."""
        return {path: bytes(inode.content) for path, inode in self.inodes.items()}

    # the seam

    def check_alive(self) -> None:
        """OSError if the process is being killed."""
        if self.is_dead:
            raise OSError(errno.EIO, "the process is being killed")

    def create(self, path: Path, size: int, *, allocate: bool) -> RecordingFile:
        self.check_alive()
        if path in self.inodes:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        inode = self._add(path, bytearray(size))
        self.recorder.add(Created(self, path, inode.number, size))
        return RecordingFile(self, path, inode)

    def open(self, path: Path) -> RecordingFile:
        return RecordingFile(self, path, self.inode(path))

    def write_bytes(self, path: Path, content: bytes) -> None:
        self.check_alive()
        if path not in self.inodes:
            inode = self._add(path, bytearray())
            self.recorder.add(Created(self, path, inode.number, 0))
        inode = self.inodes[path]
        inode.content, inode.shadow, inode.is_mapped = bytearray(content), bytes(content), False
        self.recorder.add(Replaced(self, inode.number, content))
        RecordingFile(self, path, inode).sync()

    def rename(self, old: Path, new: Path) -> None:
        self.check_alive()
        self.move(old, new)
        self.recorder.add(Renamed(self, old, new))

    def unlink(self, path: Path) -> None:
        self.check_alive()
        del self.inodes[path]
        self.recorder.add(Unlinked(self, path))

    def usage(self, path: Path) -> DiskUsage:
        return DiskUsage(1 << 40, 1 << 39)

    def lock(self, path: Path, content: bytes) -> RecordingLock | None:
        return RecordingLock()

    def lock_directory(self, path: Path) -> RecordingLock | None:
        return RecordingLock()


# ---- the states that a power loss leaves


class _Version(NamedTuple):
    time: int
    """Number of the operation that wrote it"""
    content: bytes


@dataclass
class _Doubtful:
    """A file at some moment: its durable content, and the possible contents of each sector."""

    durable: bytes
    wholes: list[_Version] = field(default_factory=list)
    """Possible contents of the whole file after a replacement that is not synced"""
    sectors: dict[int, list[_Version]] = field(default_factory=dict)
    """Contents written to a sector since the last sync, oldest first"""
    begun: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """Syncs under way: when each began, and the file as it was then"""

    def latest(self) -> bytes:
        content = bytearray(self.wholes[-1].content if self.wholes else self.durable)
        for number, versions in self.sectors.items():
            newest = versions[-1].content
            content[number * SECTOR : number * SECTOR + len(newest)] = newest
        return bytes(content)

    def end_sync(self, token: int) -> None:
        """Makes the writes before the sync began durable; later ones stay uncertain."""
        began, self.durable = self.begun.pop(token)
        self.wholes = [version for version in self.wholes if version.time > began]
        self.sectors = {
            number: left
            for number, versions in self.sectors.items()
            if (left := [version for version in versions if version.time > began])
        }


class PowerLoss:
    """One disk of a recording: `advance` it to a moment, then draw states of it."""

    def __init__(self, recorder: Recorder, disk: RecordingDisk) -> None:
        self._operations = recorder.operations
        self._disk = disk
        self._names = {path: number for path, (number, _) in disk.initial.items()}
        self._files = {number: _Doubtful(content) for number, content in disk.initial.values()}
        self.position = 0

    def advance(self, position: int) -> None:
        """Advances to the moment before operation number `position`."""
        while self.position < position:
            operation = self._operations[self.position]
            self.position += 1
            if not isinstance(operation, Mark) and operation.disk is self._disk:
                self._apply(operation)

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Created(_, path, number, size):
                self._names[path] = number
                self._files[number] = _Doubtful(bytes(size))
            case Wrote(_, number, sectors):
                file = self._files[number]
                for sector, content in sectors.items():
                    file.sectors.setdefault(sector, []).append(_Version(self.position, content))
            case Replaced(_, number, content):
                file = self._files[number]
                file.wholes += [_Version(self.position, b""), _Version(self.position, content)]
                file.sectors.clear()
            case SyncBegan(_, number, token):
                file = self._files[number]
                file.begun[token] = self.position, file.latest()
            case SyncEnded(_, number, token):
                self._files[number].end_sync(token)
            case Renamed(_, old, new):
                for path in list(self._names):
                    if path == old or old in path.parents:
                        self._names[new / path.relative_to(old)] = self._names.pop(path)
            case Unlinked(_, path):
                del self._names[path]

    @property
    def doubtful_count(self) -> int:
        """Number of sectors and whole files with more than one possible content."""
        files = [self._files[number] for number in self._names.values()]
        return sum(len(file.sectors) + bool(file.wholes) for file in files)

    def draw(self, chance: Random, keep: float) -> dict[Path, bytes]:
        """Draws a state: each unsynced sector is as written with probability `keep`; 0: all are lost, 1: none is."""
        return {path: self._draw_file(self._files[number], chance, keep) for path, number in self._names.items()}

    @staticmethod
    def _draw_file(file: _Doubtful, chance: Random, keep: float) -> bytes:
        content = bytearray(file.durable)
        if file.wholes and chance.random() < keep:
            content = bytearray((file.wholes[-1] if keep == 1 else chance.choice(file.wholes)).content)
        for sector, versions in file.sectors.items():
            if chance.random() >= keep:
                continue
            # Mostly the newest: an older one reached the disk only if it was written back in between.
            version = versions[-1] if keep == 1 or chance.random() < 0.8 else chance.choice(versions)
            if sector * SECTOR < len(content):
                content[sector * SECTOR : sector * SECTOR + len(version.content)] = version.content
        return bytes(content)


def runner_with_slow_syncs(chance: Random, longest_s: float) -> Callable[..., Any]:
    """A blocking runner for the mock clock in which a sync takes time, while other tasks write."""

    async def run(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        owner = getattr(call, "__self__", None)
        if isinstance(owner, RecordingFile) and call.__name__ == "sync":
            token = owner.begin_sync()
            with trio.CancelScope(shield=True):  # as a thread's, its end is waited for in any case
                await trio.sleep(chance.uniform(0, longest_s))
            owner.end_sync(token)
            return None
        return call(*arguments)

    return run
