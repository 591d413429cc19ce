"""Sectors of the operating system's files that can't be read: reads fail with EIO, as do writes of a part of a sector.
A write of the whole sector makes it readable.

A sector belongs to the file, not to its name: a copy of the file can be read. The store's file seam is affected
(`ha.store.files`), the test's own reads are not.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ha.store.files import OsDisk, OsFile

SECTOR_BYTES = 512


class BadSectors:
    """The sectors that can't be read. Until `close`, no other file gets the inode of one of these files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sectors: dict[int, set[int]] = {}
        self._kept: list[int] = []
        self.failed_count = 0
        """Number of reads that failed"""
        pread, pread_nowait, pwrite, read_bytes = OsFile.pread, OsFile.pread_nowait, OsFile.pwrite, OsDisk.read_bytes

        def bad_pread(file: OsFile, size: int, position: int) -> bytes:
            self._check(file.descriptor, position, position + size)
            return pread(file, size, position)

        def bad_pread_nowait(file: OsFile, size: int, position: int) -> bytearray | None:
            self._check(file.descriptor, position, position + size)
            return pread_nowait(file, size, position)

        def bad_pwrite(file: OsFile, chunk: bytes | bytearray | memoryview, position: int) -> None:
            end = position + len(chunk)
            for at in (position, end):
                if at % SECTOR_BYTES:
                    self._check(file.descriptor, at, at + 1)
            pwrite(file, chunk, position)
            whole = range(-(-position // SECTOR_BYTES), end // SECTOR_BYTES)
            self._sectors.get(os.fstat(file.descriptor).st_ino, set()).difference_update(whole)

        def bad_read_bytes(disk: OsDisk, path: Path) -> bytes:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                self._check(descriptor, 0, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
            return read_bytes(disk, path)

        monkeypatch.setattr(OsFile, "pread", bad_pread)
        monkeypatch.setattr(OsFile, "pread_nowait", bad_pread_nowait)
        monkeypatch.setattr(OsFile, "pwrite", bad_pwrite)
        monkeypatch.setattr(OsDisk, "read_bytes", bad_read_bytes)
        monkeypatch.setattr("ha.store.files.BLOCK_BYTES", SECTOR_BYTES)

    def add(self, path: Path, position: int, size: int = 1) -> None:
        """Makes the sectors of a file's bytes from `position` on unreadable."""
        descriptor = os.open(path, os.O_RDONLY)
        self._kept.append(descriptor)
        sectors = range(position // SECTOR_BYTES, -(-(position + size) // SECTOR_BYTES))
        self._sectors.setdefault(os.fstat(descriptor).st_ino, set()).update(sectors)

    def close(self) -> None:
        """Makes all files readable."""
        self._sectors.clear()
        while self._kept:
            os.close(self._kept.pop())

    def _check(self, descriptor: int, begin: int, end: int) -> None:
        if not self._sectors:
            return
        bad = self._sectors.get(os.fstat(descriptor).st_ino)
        if bad and not bad.isdisjoint(range(begin // SECTOR_BYTES, -(-end // SECTOR_BYTES))):
            self.failed_count += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def bad_sectors() -> Iterator[BadSectors]:
    """No sector is bad yet; all files can be read again after the block."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        bad = BadSectors(monkeypatch)
        try:
            yield bad
        finally:
            bad.close()
