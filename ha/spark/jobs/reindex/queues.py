"""Writes consume-queue files from several tasks: the task of each range of the log writes entries at their places.

Entry n of a queue is at byte 20·n of its concatenated files, and its record contains n, the queue offset. Ranges are
therefore independent as long as the queue offsets of a queue have no gaps or repetitions. Each range reports where its
part of a queue begins and ends, and the parts must join. If they do not (damage, or a log that lost records), the queue
is built again by one task that reads its records in order, with the store's own `ConsumeQueue`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path

import msgspec

from ha.protocol.record_digest import QueueRun
from ha.protocol.store_files import ENTRY_FILL, ENTRY_SIZE, segment_name
from ha.spark.jobs.synced import sync_path
from ha.store.consume_queue import QUEUE_OFFSET_MAX, ConsumeQueue
from ha.store.files import OsDisk
from ha.store.open_files import OpenFiles

_BUFFERED_BYTES_MAX = 20 << 20


class QueuePart(msgspec.Struct, array_like=True):
    """One range's part of a queue, or a whole queue: queue offsets [begin, end), and the number of records.

    `is_dense`: whether the records have all these queue offsets, in order. Otherwise the bounds mean nothing, and the
    queue has to be built from its records in order.
    """

    topic: str
    queue_id: int
    begin: int
    end: int
    count: int
    is_dense: bool = True


def queue_directory(root: Path, topic: str, queue_id: int) -> Path:
    """Returns the directory of a queue's files in a store."""
    return root / "consumequeue" / topic / str(queue_id)


class QueueSlices:
    """Buffers the queue entries of one range of the log, up to a limit, and writes them to their queues' files."""

    def __init__(self, root: Path, file_entries: int) -> None:
        self._root = root
        self._file_entries = file_entries
        self._parts: dict[tuple[str, int], QueuePart] = {}
        self._buffers: dict[tuple[str, int], bytearray] = {}
        self._buffered_bytes = 0

    def add(self, run: QueueRun) -> None:
        """Adds records of one queue; called in the order of the log. A part that is not dense gets no more entries.
        Raises OSError."""
        key = (run.topic, run.queue_id)
        first = run.queue_offset
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = QueuePart(run.topic, run.queue_id, first, first, 0)
        count = len(run.entries) // ENTRY_SIZE
        part.count += count
        if not part.is_dense:
            return
        if run.queue_offsets is not None or first != part.end or not 0 <= first <= QUEUE_OFFSET_MAX - count:
            part.is_dense = False
            self._buffered_bytes -= len(self._buffers.pop(key, b""))
            return
        part.end += count
        self._buffers.setdefault(key, bytearray()).extend(run.entries)
        self._buffered_bytes += len(run.entries)
        if self._buffered_bytes >= _BUFFERED_BYTES_MAX:
            self._write()

    def finish(self) -> list[QueuePart]:
        """Writes the buffered entries, and returns the parts. Raises OSError."""
        self._write()
        return list(self._parts.values())

    def _write(self) -> None:
        for key, raw in self._buffers.items():
            first = self._parts[key].end - len(raw) // ENTRY_SIZE
            write_entries(queue_directory(self._root, *key), self._file_entries, first, raw)
        self._buffers.clear()
        self._buffered_bytes = 0


def write_entries(directory: Path, file_entries: int, first: int, raw: bytes | bytearray) -> None:
    """Writes entries to queue offsets from `first` on, and creates missing files. Raises OSError.

    On a POSIX file system, other tasks, even on other hosts, may write to other places in the same files meanwhile.
    """
    directory.mkdir(parents=True, exist_ok=True)
    view = memoryview(raw)
    position = first
    while view:
        start = position - position % file_entries
        room = (start + file_entries - position) * ENTRY_SIZE
        descriptor = os.open(
            directory / segment_name(start * ENTRY_SIZE), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644
        )
        try:
            if os.fstat(descriptor).st_size == 0:
                os.ftruncate(descriptor, file_entries * ENTRY_SIZE)  # harmless if two tasks do it: the size is the same
            piece, view = view[:room], view[room:]
            at = (position - start) * ENTRY_SIZE
            while piece:
                written = os.pwrite(descriptor, piece, at)
                at += written
                piece = piece[written:]
        finally:
            os.close(descriptor)
        position = start + file_entries


def join_parts(ranges: Iterable[Sequence[QueuePart]]) -> list[QueuePart]:
    """Joins the parts of all ranges, given in the order of the log, into whole queues, sorted by topic and queue
    id."""
    joined: dict[tuple[str, int], QueuePart] = {}
    for parts in ranges:
        for part in parts:
            key = (part.topic, part.queue_id)
            whole = joined.get(key)
            if whole is None:
                joined[key] = copy(part)
                continue
            whole.is_dense &= part.is_dense and part.begin == whole.end
            whole.end = part.end
            whole.count += part.count
    return [part for _, part in sorted(joined.items())]


def complete_queue(root: Path, file_entries: int, queue: QueuePart) -> None:
    """Writes blank entries before a queue's first entry in its file, as a broker does, and syncs the queue's files.

    Does not create the file: an earlier attempt may have deleted it (`clear_queue`).
    """
    directory = queue_directory(root, queue.topic, queue.queue_id)
    start = queue.begin - queue.begin % file_entries
    if queue.begin != start and (directory / segment_name(start * ENTRY_SIZE)).exists():
        write_entries(directory, file_entries, start, ENTRY_FILL * (queue.begin - start))
    sync_files(directory)


def clear_queue(root: Path, file_entries: int, part: QueuePart, before: int) -> int:
    """Removes a built queue's entries of records before the physical offset `before` (bytes). The queue keeps its end,
    as when a broker deletes a topic. Returns the number of removed entries. Can be repeated."""
    disk = OsDisk()
    directory = queue_directory(root, part.topic, part.queue_id)
    queue = ConsumeQueue(disk, OpenFiles(disk), directory, part.topic, part.queue_id, file_entries)
    is_whole = queue.load(is_clean=True) and (not part.is_dense or queue.max_offset == part.end)
    assert is_whole, f"{directory} ends at {queue.max_offset} instead of {part.end}"
    begin = part.begin if part.is_dense else queue.min_offset
    queue.clear(before)
    if queue.min_offset > begin:
        sync_files(directory)
    return queue.min_offset - begin


def sync_files(directory: Path) -> None:
    """Syncs the files in a directory, the entries of its subdirectories, and the directory itself."""
    for path in (*directory.iterdir(), directory):
        sync_path(path)


class OrderedQueue:
    """Builds one queue from its records in order, whatever their queue offsets are, as the store does at dispatch.

    A record is dropped if its queue offset is taken, beyond `ConsumeQueue.next_offset_max`, or above QUEUE_OFFSET_MAX.
    `ConsumeQueue` fills other gaps with blank entries. `dropped`: number of dropped records.
    """

    def __init__(self, root: Path, file_entries: int, topic: str, queue_id: int) -> None:
        disk = OsDisk()
        directory = queue_directory(root, topic, queue_id)
        self._queue = ConsumeQueue(disk, OpenFiles(disk), directory, topic, queue_id, file_entries)
        self.dropped = 0

    @property
    def entry_count(self) -> int:
        """Number of entries, including blank ones in gaps."""
        return self._queue.max_offset - self._queue.min_offset

    def add(self, run: QueueRun) -> None:
        """Adds the queue's next records. Raises OSError."""
        offsets = run.queue_offsets
        if offsets is None:
            self._add_run(run.queue_offset, run.entries)
            return
        begin = 0
        for number in range(1, len(offsets) + 1):
            if number == len(offsets) or offsets[number] != offsets[number - 1] + 1:
                self._add_run(offsets[begin], run.entries[begin * ENTRY_SIZE : number * ENTRY_SIZE])
                begin = number

    def _add_run(self, first: int, raw: bytes) -> None:
        """Adds entries of consecutive queue offsets."""
        count, queue = len(raw) // ENTRY_SIZE, self._queue
        if first > queue.next_offset_max:
            self.dropped += count
            return
        taken = min(max(queue.max_offset - first, 0), count)
        beyond = min(max(first + count - 1 - QUEUE_OFFSET_MAX, 0), count - taken)
        self.dropped += taken + beyond
        if taken + beyond < count:
            queue.append(first + taken, [raw[taken * ENTRY_SIZE : (count - beyond) * ENTRY_SIZE]])


def remove_queue(directory: Path) -> None:
    """Deletes a queue's files, if there are any."""
    if directory.exists():
        for path in directory.iterdir():
            path.unlink()
