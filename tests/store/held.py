"""Common base of all disks in memory: names, and files that hold their bytes in memory.

Subclasses define the effect of a write, a sync and a crash: `disks.py`, `recording.py`, `tests/sim/disk.py`.
"""

import errno
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ha.store.files import File, write_all


class HeldInode(Protocol):
    """The content of a file, which open files keep when its name is removed."""

    content: bytearray
    modified_ms: int


Inode = TypeVar("Inode", bound=HeldInode)


class HeldFile(Generic[Inode]):
    """Common part of `ha.store.files.File`: reads, and writes that continue until everything is written."""

    __slots__ = ("_inode", "path")

    def __init__(self, path: Path, inode: Inode) -> None:
        self.path = path
        self._inode = inode

    @property
    def descriptor(self) -> int | None:
        return None

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
        """Writes the first part of `chunk`, as pwrite(2) does, and returns its size."""
        raise NotImplementedError

    def pread(self, size: int, position: int) -> bytes:
        return bytes(self._inode.content[position : position + size])

    def pread_nowait(self, size: int, position: int) -> bytes | None:
        return None

    def next_range(self, position: int) -> tuple[int, int] | None:
        end = len(self._inode.content)
        return (position, end) if position < end else None


class HeldFiles(Generic[Inode]):
    """Names and inodes of `ha.store.files.Disk`; a directory exists while it contains something."""

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
        """Renames a file, or everything in a directory."""
        prefix = f"{old}/"
        for path in list(self.inodes):
            if path == old or str(path).startswith(prefix):
                self.inodes[new / path.relative_to(old)] = self.inodes.pop(path)
