"""Reads consume queues as arrays of entries.

Files are zero-padded to their full size, so the queue ends at the first entry of size 0. RocketMQ does not clear the
entries that it truncates after a crash: the last ones may be stale, which only the commitlog shows (see `Confirmed`).

Ordinary queues have an entry of 20 bytes for each message. Batch queues have an entry of 46 bytes for each batch:
int64 physical offset, int32 size, int64 tags code, int64 store time, int64 base offset, int16 batch size, 8 reserved.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ha.errors import StoreUnreadable
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
QUEUE_FOLDERS = {"consumequeue": ENTRY_DTYPE, "batchconsumequeue": BATCH_ENTRY_DTYPE}
"""Directories of a store's queues, with the type of their entries"""
Entries = npt.NDArray[np.void]
_PROBE_ENTRIES = 1024
_PROBE_ENTRIES_AGAIN = 32
"""Number of entries read first if the end of the queue has been found before: most queues have few new entries."""
_SIZE_AT = 8
_NO_SIZE = bytes(4)
UNWRITTEN = np.iinfo(np.int64).max
"""Stands for the physical offset of an entry that is not written, or that a recovering node will write again; greater
than all others"""


class QueueId(NamedTuple):
    """Topic and queue id, which identify a queue within one store."""

    topic: str
    queue_id: int


class _File(NamedTuple):
    start: int  # entries
    room: int  # entries
    path: str


class QueueFiles:
    """The files of one queue, listed when they are first needed. Positions and counts are in entries; positions in an
    ordinary queue are queue offsets. Methods raise StoreUnreadable if the directory can't be listed."""

    def __init__(self, directory: str, dtype: np.dtype[np.void] = ENTRY_DTYPE) -> None:
        self.directory = directory
        self.dtype = dtype
        self._listed: list[_File] | None = None
        self._end = 0

    def refresh(self) -> None:
        """Reads the directory again at the next use."""
        self._listed = None

    @property
    def _files(self) -> list[_File]:
        """The files, ascending; a missing directory is an empty queue."""
        if self._listed is None:
            files: list[_File] = []
            width = self.dtype.itemsize
            for name in _names_in(self.directory):
                start = segment_start(name)
                if start is not None:
                    path = f"{self.directory}/{name}"
                    with suppress(FileNotFoundError):  # deleted since it was listed
                        files.append(_File(start // width, os.stat(path).st_size // width, path))
            files.sort()
            # Surplus entries of a file that is too long are damage; the next file has those positions.
            cut = (file._replace(room=min(file.room, after.start - file.start)) for file, after in pairwise(files))
            self._listed = [*cut, *files[-1:]]
        return self._listed

    @property
    def has_files(self) -> bool:
        """Whether the directory held files when it was last read."""
        return bool(self._files)

    @property
    def first(self) -> int:
        """Position of the oldest file's first entry; 0 if there is no file."""
        return self._files[0].start if self._files else 0

    def find_end(self) -> int:
        """Returns the position after the last written entry (size other than 0); `first` if there is none."""
        last = self._end - 1
        end = self._end_from(last, _PROBE_ENTRIES_AGAIN) if last >= self.first else last
        self._end = end if end > last else self._search_end()
        return self._end

    def _end_from(self, position: int, count: int = _PROBE_ENTRIES) -> int:
        """Returns the position of the first unwritten entry from `position` on."""
        while True:
            start, entries = self.read(position, position + count)
            if not len(entries):
                return position
            written = entries["size"] != 0
            if not written.all():
                return start + int(np.argmin(written))
            position = start + len(entries)
            count = _PROBE_ENTRIES

    def _search_end(self) -> int:
        for file in reversed(self._files):
            try:
                descriptor = os.open(file.path, os.O_RDONLY)
            except FileNotFoundError:
                break  # retention deleted it, and everything before it
            try:
                low = self._last_written(descriptor, file.room)
            finally:
                os.close(descriptor)
            if low is not None:
                return self._end_from(file.start + low)
        return self.first

    def _last_written(self, descriptor: int, room: int) -> int | None:
        """Returns the index in its file of a written entry, at most _PROBE_ENTRIES before the last written one; None if
        the first entry is not written.
        """

        def is_written(entry: int) -> bool:
            raw = os.pread(descriptor, len(_NO_SIZE), entry * self.dtype.itemsize + _SIZE_AT)
            return len(raw) == len(_NO_SIZE) and raw != _NO_SIZE

        if not is_written(0):
            return None
        low, high = 0, room  # written at low, unwritten at high
        while high - low > _PROBE_ENTRIES:
            middle = (low + high) // 2
            low, high = (middle, high) if is_written(middle) else (low, middle)
        return low

    def read(self, begin: int, end: int) -> tuple[int, Entries]:
        """Returns the position of the first entry in [begin, end) that a file holds, and the contiguous entries from
        there on; `end` and no entries if no file holds any."""
        pieces: list[Entries] = []
        start = end
        width = self.dtype.itemsize
        for file in self._files:
            low, high = max(begin, file.start), min(end, file.start + file.room)
            if low >= high:
                continue
            if pieces and low > start + sum(map(len, pieces)):
                break  # a file between them is missing
            try:
                descriptor = os.open(file.path, os.O_RDONLY)
            except FileNotFoundError:
                if pieces:
                    break
                continue  # retention deleted it, and everything before it
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
        """Returns the physical offset in the entry at `position`; -1 if retention deleted the entry, UNWRITTEN if it is
        not written."""
        _, found = self.read(position, position + 1)
        if len(found):
            return int(found["physical_offset"][0]) if found["size"][0] else UNWRITTEN
        return UNWRITTEN if self.lacks_end(position) else -1

    def batch_offset(self, position: int) -> int:
        """Returns the first queue offset of the entry at `position` of a batch queue; at the end, that after the last
        entry's messages."""
        _, found = self.read(position, position + 1)
        if len(found) and found["size"][0]:
            return int(found["base_offset"][0])
        _, found = self.read(position - 1, position)
        return int(found["base_offset"][0]) + int(found["batch_size"][0]) if len(found) else 0

    def lacks_end(self, position: int) -> bool:
        """Returns whether the entry missing at `position` was never written or was removed by a recovering node;
        otherwise retention deleted it. Reads the directory again."""
        self.refresh()
        return self.has_files and position >= self.first

    def search(self, physical_offset: int, end: int) -> int:
        """Returns the first position before `end` whose entry points to `physical_offset` or beyond, or is not written;
        else `end`.

        Physical offsets ascend in a queue; blank entries hold 0 or the offset where they were written.
        """
        low, high = self.first, end
        if low < high and self.physical_offset(low) >= physical_offset:
            return low  # the usual case: retention has not reached this queue
        while high - low > _PROBE_ENTRIES:
            middle = (low + high) // 2
            if self.physical_offset(middle) < physical_offset:
                low = middle + 1
            else:
                high = middle
        start, entries = self.read(low, high)
        if not len(entries):
            return low if self.lacks_end(low) else high
        places = np.where(entries["size"] == 0, UNWRITTEN, entries["physical_offset"])
        return start + int(np.searchsorted(places, physical_offset))


class Queues(Mapping[QueueId, QueueFiles]):
    """The queues of a store by their id, listed topic by topic when they are first needed. Methods raise
    StoreUnreadable if a directory can't be listed."""

    def __init__(self, root: Path) -> None:
        self._folders = [(f"{root}/{name}", dtype) for name, dtype in QUEUE_FOLDERS.items()]
        self._names: frozenset[str] | None = None
        self._topics: dict[str, dict[int, QueueFiles]] = {}
        self._listed: set[str] = set()

    def refresh(self) -> None:
        """Reads the directories again at the next use."""
        self._names = None
        self._listed.clear()
        for queues in self._topics.values():
            for queue in queues.values():
                queue.refresh()

    def topic_names(self) -> frozenset[str]:
        """Returns the topics that have a directory, even an empty one."""
        if self._names is None:
            self._names = frozenset(name for folder, _ in self._folders for name in _names_in(folder))
        return self._names

    def of_topic(self, topic: str) -> Mapping[int, QueueFiles]:
        """Returns the queues of a topic by queue id."""
        if topic not in self._listed:
            self._topics[topic] = self._list(topic) if topic in self.topic_names() else {}
            self._listed.add(topic)
        return self._topics[topic]

    def _list(self, topic: str) -> dict[int, QueueFiles]:
        known = self._topics.get(topic, {})
        found: dict[int, QueueFiles] = {}
        for folder, dtype in self._folders:
            for name in _names_in(f"{folder}/{topic}"):
                if name.isdecimal():
                    queue = known.get(int(name))
                    if queue is None or queue.dtype is not dtype:
                        queue = QueueFiles(f"{folder}/{topic}/{name}", dtype)
                    found[int(name)] = queue
        return found

    def __getitem__(self, key: QueueId) -> QueueFiles:
        return self.of_topic(key.topic)[key.queue_id]

    def __iter__(self) -> Iterator[QueueId]:
        for topic in self.topic_names():
            for queue_id in self.of_topic(topic):
                yield QueueId(topic, queue_id)

    def __len__(self) -> int:
        return sum(len(self.of_topic(topic)) for topic in self.topic_names())


def _names_in(directory: str) -> list[str]:
    """Returns the names in a directory; an empty list if it does not exist. Raises StoreUnreadable if it can't be
    listed."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreUnreadable(Path(directory), error.strerror or str(error)) from error
