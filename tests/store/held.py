"""What all disks in memory have in common, whatever befalls them: names, and files whose bytes are simply there.

They differ in what a write, a sync or a crash does: `disks.py`, `recording.py`, `tests/sim/disk.py`.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ha.store.files import File, write_all


class HeldInode(Protocol):
    """A file's content; whoever holds it open keeps it when its name is gone."""

    content: bytearray
    modified_ms: int


Inode = TypeVar("Inode", bound=HeldInode)


class HeldFile(Generic[Inode]):
    """What is the same of `ha.store.files.File`: how it is read, and that a write goes on until all is taken."""

    __slots__ = ("_inode", "path")

    def __init__(self, path: Path, inode: Inode) -> None:
        self.path = path
        self._inode = inode

    def map(self, size: int) -> memoryview:
        assert size <= len(self._inode.content)
        return memoryview(self._inode.content)[:size]

    def cool(self, position: int, size: int) -> None:
        pass

    def write_back(self, position: int, size: int) -> None:
        pass

    def pwrite(self, chunk: bytes | bytearray | memoryview, position: int) -> None:
        assert position + len(chunk) <= len(self._inode.content), "no file of the store grows by writing"
        write_all(self._write, chunk, position)

    def _write(self, chunk: memoryview, position: int) -> int:
        """Write the beginning of `chunk`, as pwrite(2) does, and return its size."""
        raise NotImplementedError

    def pread(self, size: int, position: int) -> bytes:
        return bytes(self._inode.content[position : position + size])

    def pread_nowait(self, size: int, position: int) -> bytes | None:
        return None

    def next_range(self, position: int) -> tuple[int, int] | None:
        end = len(self._inode.content)
        return (position, end) if position < end else None


class HeldFiles(Generic[Inode]):
    """The names of `ha.store.files.Disk`, in `inodes`; a directory is there as long as something is in it."""

    inodes: dict[Path, Inode]

    def open(self, path: Path) -> File:
        raise NotImplementedError

    def inode(self, path: Path) -> Inode:
        found = self.inodes.get(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return found

    def make_dirs(self, path: Path) -> None:
        pass

    def remove_dir(self, path: Path) -> None:
        pass

    def list_dir(self, path: Path) -> list[str]:
        depth, parts = len(path.parts), path.parts
        return sorted({p.parts[depth] for p in self.inodes if len(p.parts) > depth and p.parts[:depth] == parts})

    def exists(self, path: Path) -> bool:
        return path in self.inodes or bool(self.list_dir(path))

    def sync_all(self, paths: Sequence[Path]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                self.open(path).sync()

    def size(self, path: Path) -> int:
        return len(self.inode(path).content)

    def modified_ms(self, path: Path) -> int:
        return self.inode(path).modified_ms

    def read_bytes(self, path: Path) -> bytes:
        return bytes(self.inode(path).content)

    def move(self, old: Path, new: Path) -> None:
        """Give a file, or all that is in a directory, its new name."""
        for path in list(self.inodes):
            if path == old or old in path.parents:
                self.inodes[new / path.relative_to(old)] = self.inodes.pop(path)
