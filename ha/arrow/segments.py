"""Maps the commitlog's files for reading, while a broker may be writing them.

Segments are files of one size named after the physical offset of their first byte. A broker never shortens one: it
deletes whole files (retention) or renames the directory (a resync), and mapped files stay readable.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections import OrderedDict
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import numpy as np

from ha.arrow.heads import Int64s
from ha.errors import StoreUnreadable
from ha.protocol.record import FILLER_MAGIC, MAGIC_V1, MAGIC_V2, RECORD_SIZE_MIN
from ha.protocol.store_files import segment_start

_SIZE_AND_MAGIC = Struct(">ii")
MAPPED_MAX = 8
"""Maximum number of mapped segments; the least recently used is unmapped first."""


def is_set_aside(directory: Path) -> bool:
    """Returns whether a missing commitlog `directory` was renamed by a resync, which then creates a new one.

    A reader treats such a log as empty, as it will be a moment later, instead of failing the query.
    """
    return any(directory.parent.glob(f"{directory.name}.aside-*"))


class Segment(NamedTuple):
    """One commitlog file: `start` is the physical offset of its first byte, `size` its length in bytes."""

    start: int
    size: int
    path: Path

    @property
    def end(self) -> int:
        """Physical offset after its last byte."""
        return self.start + self.size


class Segments:
    """The files of one commitlog directory, as of the last `refresh`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._segments: list[Segment] = []
        self._starts: list[int] = []
        self._mapped: OrderedDict[int, memoryview] = OrderedDict()
        self._files: dict[int, tuple[int, int]] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Reads the directory again; returns whether it has changed. Raises StoreUnreadable if it can't be listed."""
        try:
            names = os.listdir(self.directory)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or not is_set_aside(self.directory):
                raise StoreUnreadable(self.directory, error.strerror or str(error)) from error
            names = []
        found: list[Segment] = []
        files: dict[int, tuple[int, int]] = {}  # inode and size
        for name in names:
            start = segment_start(name)
            if start is None:
                continue
            path = self.directory / name
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # removed since it was listed
            if status.st_size:
                found.append(Segment(start, status.st_size, path))
                files[start] = status.st_ino, status.st_size
        found.sort()
        for start in list(self._mapped):
            if files.get(start) != self._files.get(start):
                del self._mapped[start]
        has_changed = files != self._files
        self._segments = found
        self._starts = [segment.start for segment in found]
        self._files = files
        return has_changed

    def __len__(self) -> int:
        return len(self._segments)

    def all(self) -> list[Segment]:
        """Returns every segment, ascending."""
        return list(self._segments)

    @property
    def min_offset(self) -> int:
        """First physical offset of the oldest segment, 0 if there is none."""
        return self._segments[0].start if self._segments else 0

    def find(self, physical_offset: int) -> Segment | None:
        """Returns the segment that contains this physical offset; None if there is none."""
        index = bisect.bisect_right(self._starts, physical_offset) - 1
        if index < 0:
            return None
        segment = self._segments[index]
        return segment if physical_offset < segment.end else None

    def buffer(self, segment: Segment) -> memoryview | None:
        """Returns the segment's mapped bytes; None if the file is gone or was replaced. Raises OSError if it can't be
        opened or mapped."""
        kept = self._mapped.get(segment.start)
        if kept is not None:
            self._mapped.move_to_end(segment.start)
            return kept
        try:
            descriptor = os.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(descriptor).st_ino != self._files[segment.start][0]:
                return None
            mapped = mmap.mmap(descriptor, segment.size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        buffer = memoryview(mapped)
        self._mapped[segment.start] = buffer
        while len(self._mapped) > MAPPED_MAX:
            self._mapped.popitem(last=False)
        return buffer

    def is_replaced(self, segment: Segment) -> bool:
        """Returns whether another file now has the segment's name, because a resync has set the log aside."""
        try:
            return os.stat(segment.path).st_ino != self._files[segment.start][0]
        except FileNotFoundError:
            return False

    def mapped_at(self, physical_offset: int) -> tuple[Segment, memoryview] | None:
        """Returns the segment that contains this physical offset, with its mapped bytes. None if no segment does, or if
        its file has been removed or replaced since `refresh`. Raises OSError if the file can't be opened or mapped."""
        segment = self.find(physical_offset)
        buffer = None if segment is None else self.buffer(segment)
        return None if segment is None or buffer is None else (segment, buffer)

    def current_at(self, physical_offset: int) -> tuple[Segment, memoryview] | None:
        """Like `mapped_at`, but calls `refresh` and tries again before it returns None. Raises StoreUnreadable if a
        resync has replaced the log, or if the directory can't be listed."""
        mapped = self.mapped_at(physical_offset)
        if mapped is None:
            former = self.find(physical_offset)
            if former is not None and self.is_replaced(former):
                raise StoreUnreadable(self.directory.parent, "its log was replaced while it was read")
            self.refresh()
            mapped = self.mapped_at(physical_offset)
        return mapped

    def has_record(self, physical_offset: int) -> bool:
        """Returns whether a record begins at a physical offset, or after the filler there, judging by its magic code
        only."""
        while (mapped := self.mapped_at(physical_offset)) is not None:
            segment, buffer = mapped
            at = physical_offset - segment.start
            head = buffer[at : at + _SIZE_AND_MAGIC.size]
            magic = _SIZE_AND_MAGIC.unpack(head)[1] if len(head) == _SIZE_AND_MAGIC.size else FILLER_MAGIC
            if magic != FILLER_MAGIC:
                return magic in (MAGIC_V1, MAGIC_V2)
            physical_offset = segment.end
        return False

    def read(self, physical_offset: int, size: int) -> bytes | None:
        """Returns up to `size` bytes from `physical_offset` on, within one segment. None, or an error, as in
        `mapped_at`."""
        mapped = self.mapped_at(physical_offset)
        if mapped is None:
            return None
        segment, buffer = mapped
        at = physical_offset - segment.start
        return bytes(buffer[at : at + size])

    def close(self) -> None:
        """Unmaps the files; a file that batches still use stays mapped until they are released."""
        self._mapped.clear()


class Walk(NamedTuple):
    """The result of a walk of record sizes: positions in the buffer, and where and why it stopped."""

    positions: Int64s
    stopped_at: int
    reason: str
    """"" at the requested end, "filler" after the segment's last record, else why the bytes there are not a record"""


def walk_sizes(buffer: memoryview, begin: int, end: int) -> Walk:
    """Follows the record sizes from `begin` (bytes) until a record starts at or after `end`."""
    limit = len(buffer)
    last = limit - _SIZE_AND_MAGIC.size
    positions: list[int] = []
    append = positions.append
    unpack = _SIZE_AND_MAGIC.unpack_from
    at = begin
    reason = ""
    while at < end:
        if at > last:
            reason = "the file ends"
            break
        size, magic = unpack(buffer, at)
        if magic != MAGIC_V2 and magic != MAGIC_V1:
            reason = "filler" if magic == FILLER_MAGIC else f"magic {magic & 0xFFFFFFFF:08x}"
            break
        if size < RECORD_SIZE_MIN or at + size > limit:
            reason = f"a record of {size} bytes where {limit - at} are"
            break
        append(at)
        at += size
    return Walk(np.array(positions, np.int64), at, reason)
