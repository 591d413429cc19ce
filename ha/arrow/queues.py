"""Reads consume queues as arrays of entries.

Files are zero-padded to their full size, so the queue ends at the first entry of size 0. RocketMQ does not clear what
it truncates after a crash: entries after the end may be stale, which only the commitlog shows (see `LogReader`).

Ordinary queues have entries of 20 bytes, one a message. Batch queues have entries of 46 bytes, one a batch:
int64 physical offset, int32 size, int64 tags code, int64 store time, int64 base offset, int16 batch size, 8 reserved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ha.protocol.store_files import segment_start

ENTRY_DTYPE = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
"""Consume-queue entries (`ha.protocol.store_files.ENTRY`)"""
BATCH_ENTRY_DTYPE = np.dtype(
    [
        ("physical_offset", ">i8"),
        ("size", ">i4"),
        ("tags_code", ">i8"),
        ("store_ms", ">i8"),
        ("base_offset", ">i8"),
        ("batch_size", ">i2"),
        ("reserved", "V8"),
    ]
)
Entries = npt.NDArray[np.void]
_PROBE_ENTRIES = 1024


class QueueId(NamedTuple):
    """A queue of this store."""

    topic: str
    queue_id: int


class _File(NamedTuple):
    start: int  # entries
    room: int  # entries
    path: Path


class QueueFiles:
    """The files of one queue. Positions and counts are entries: for ordinary queues these are queue offsets."""

    def __init__(self, directory: Path, dtype: np.dtype[np.void] = ENTRY_DTYPE) -> None:
        self.directory = directory
        self.dtype = dtype
        self._files: list[_File] = []
        self._end = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the directory again; a missing directory is an empty queue."""
        files: list[_File] = []
        try:
            with os.scandir(self.directory) as found:
                for item in found:
                    start = segment_start(item.name)
                    if start is not None:
                        size = item.stat().st_size
                        files.append(_File(start // self.dtype.itemsize, size // self.dtype.itemsize, Path(item.path)))
        except FileNotFoundError:
            files = []
        files.sort()
        self._files = files

    @property
    def has_files(self) -> bool:
        """Whether the directory held files at the last `refresh`."""
        return bool(self._files)

    @property
    def first(self) -> int:
        """Position of the oldest file's first entry."""
        return self._files[0].start if self._files else 0

    def find_end(self) -> int:
        """Return the position after the last entry of a size other than 0."""
        end = self._end_from(self._end) if self._is_written(self._end - 1) else self._search_end()
        self._end = end
        return end

    def _is_written(self, position: int) -> bool:
        if position < self.first:
            return False
        _, found = self.read(position, position + 1)
        return len(found) == 1 and bool(found["size"][0])

    def _end_from(self, position: int) -> int:
        while True:
            _, entries = self.read(position, position + _PROBE_ENTRIES)
            written = entries["size"] != 0
            if not written.all():
                return position + int(np.argmin(written))
            position += len(entries)
            if not len(entries):
                return position

    def _search_end(self) -> int:
        for file in reversed(self._files):
            if not self._is_written(file.start):
                continue
            low, high = file.start, file.start + file.room  # written at low, unwritten at high
            while high - low > _PROBE_ENTRIES:
                middle = (low + high) // 2
                low, high = (middle, high) if self._is_written(middle) else (low, middle)
            return self._end_from(low)
        return self.first

    def read(self, begin: int, end: int) -> tuple[int, Entries]:
        """Return the contiguous entries within [begin, end) that files hold, and the position of the first of them."""
        pieces: list[Entries] = []
        start = end
        width = self.dtype.itemsize
        for file in self._files:
            low, high = max(begin, file.start), min(end, file.start + file.room)
            if low >= high:
                continue
            try:
                descriptor = os.open(file.path, os.O_RDONLY)
            except FileNotFoundError:
                pieces = []  # retention deleted it, and everything before it
                continue
            try:
                raw = os.pread(descriptor, (high - low) * width, (low - file.start) * width)
            finally:
                os.close(descriptor)
            if not pieces:
                start = low
            pieces.append(np.frombuffer(raw, self.dtype, count=len(raw) // width))
        if not pieces:
            return end, np.empty(0, self.dtype)
        return start, pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def physical_offset(self, position: int) -> int:
        """Return the physical offset in one entry; −1 if there is no such entry."""
        _, found = self.read(position, position + 1)
        return int(found["physical_offset"][0]) if len(found) else -1

    def search(self, physical_offset: int, end: int) -> int:
        """Return the first position before `end` whose entry points to `physical_offset` or beyond; else `end`.

        Physical offsets ascend in a queue; blank entries hold 0 or the offset where they were written.
        """
        low, high = self.first, end
        if low < high and self.physical_offset(low) >= physical_offset:
            return low  # the usual case of planning: retention has not reached this queue
        while high - low > _PROBE_ENTRIES:
            middle = (low + high) // 2
            if self.physical_offset(middle) < physical_offset:
                low = middle + 1
            else:
                high = middle
        low, entries = self.read(low, high)
        return low + int(np.searchsorted(entries["physical_offset"].astype(np.int64), physical_offset))
