"""Consume queues: per topic and queue id, where in the commitlog its messages are.

An entry is 20 bytes (`ha.protocol.store_files.ENTRY`): physical offset int64, record size int32, tags code int64.
Files `consumequeue/TOPIC/QUEUE/NNN` of equal size concatenate; the name is the byte offset of the file's first entry,
so entry n of the queue is at byte 20·n of the whole. Derived: every entry can be built again from the commitlog.

Written with pwrite into sparse files of the full size, as RocketMQ expects them: a full disk is then an error of the
write and not a signal. Sources: ConsumeQueue, ConsumeQueueStore.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ha.protocol.queue_entries import count_entries
from ha.protocol.record import RecordHead
from ha.protocol.store_files import BLANK_SIZE, ENTRY, ENTRY_FILL, ENTRY_SIZE, segment_name
from ha.store.files import Disk, File, OpenFiles, data_ranges
from ha.store.mapped_file import RunBlocking, fetch, segment_starts
from ha.store.queue_ends import QueueEnds

logger = logging.getLogger(__name__)

_READ_ENTRIES = 4096
_SCANNED_ENTRIES = 1 << 16
_OPEN_COUNT_MAX = 512
_NEAR_ENTRIES = 128
"""So few are read at once by a search, rather than one here and one there"""
_CHAIN_BYTES = 64 << 20
"""The entries of so much of the log are compared at once"""


class QueueEntry(NamedTuple):
    """Where a message's record is (bytes), how long it is, and its tags code. `size` is BLANK_SIZE if there is none."""

    physical_offset: int
    size: int
    tags_code: int


class NewFile(NamedTuple):
    """A file that a queue needs next: its start (entries), and how many blank entries it begins with."""

    queue: ConsumeQueue
    start: int
    blank_count: int


class ConsumeQueue:
    """One queue. Offsets without further name are entries."""

    def __init__(self, disk: Disk, files: OpenFiles, directory: Path, topic: str, queue_id: int, count: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.min_offset = 0
        self.max_offset = 0
        self.max_physical_offset = 0
        """End (bytes) of the last record that has an entry; records before it are skipped when dispatched again"""
        self.was_cut = False
        """Whether entries were lost that it had: `load` found some behind the first one that is none, and cut them off,
        or `miss_ends` knows of more. To be built again"""
        self._disk = disk
        self._files = files
        self._directory = directory
        self._file_entries = count
        self._file_size = count * ENTRY_SIZE
        self._starts: list[int] = []  # of the files, in entries, contiguous
        self._last_path: tuple[int, Path] = (-1, directory)  # start and path of the file asked for last
        self._cleared: Path | None = None  # of which `_clear_from` made the end zeros
        self._dirty: dict[Path, None] = {}  # in the order of writing, so that equal runs sync in equal order

    # ---- reading

    def read(self, queue_offset: int, count: int) -> list[QueueEntry]:
        """Return up to `count` entries from `queue_offset` on; none outside [`min_offset`, `max_offset`).

        What a file lacks at its end is read as entries of size 0. Whoever uses an entry looks whether it can be true,
        and has it mended (scrub.py) if not.
        """
        return list(map(QueueEntry._make, ENTRY.iter_unpack(self.read_raw(queue_offset, count))))

    def read_raw(self, queue_offset: int, count: int) -> bytes:
        """As `read`, the entries one after the other as they are in the file."""
        pieces = [
            file.pread(size, position).ljust(size, b"\0")
            for file, size, position in self._stretches(queue_offset, count)
        ]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def fetch_raw(self, queue_offset: int, count: int, run_blocking: RunBlocking) -> bytes:
        """As `read_raw`, by a worker where that would wait for the disk. No checkpoint where it would not."""
        pieces = [
            bytes(await fetch(file, size, position, run_blocking)).ljust(size, b"\0")
            for file, size, position in self._stretches(queue_offset, count)
        ]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _stretches(self, queue_offset: int, count: int) -> list[tuple[File, int, int]]:
        """File by file, how many bytes to read and from where for `read_raw`."""
        stop = min(queue_offset + count, self.max_offset)
        stretches: list[tuple[File, int, int]] = []
        while self.min_offset <= queue_offset < stop:
            start = queue_offset - queue_offset % self._file_entries
            here = min(stop, start + self._file_entries) - queue_offset
            try:
                file = self._file(start)
            except FileNotFoundError:  # a worker is taking it away: the log was cut, or its begin deleted
                break
            stretches.append((file, here * ENTRY_SIZE, (queue_offset - start) * ENTRY_SIZE))
            queue_offset += here
        return stretches

    # ---- building

    def append(self, queue_offset: int, entries: Sequence[bytes]) -> None:
        """Write entries of consecutive queue offsets, of which none is there yet.

        A queue that is brand new may begin anywhere; a gap in one that isn't is logged and filled with blank entries.
        OSError if a file can't be written or made; the entries up to there count, as `max_offset` says.
        """
        if queue_offset != self.max_offset:
            self._leap(queue_offset)
        raw = b"".join(entries)
        position = queue_offset
        written = 0
        while written < len(raw):
            start = position - position % self._file_entries
            file = self._file(start, create=True)
            room = (start + self._file_entries - position) * ENTRY_SIZE
            piece = raw if len(raw) <= room and not written else raw[written : written + room]
            file.pwrite(piece, (position - start) * ENTRY_SIZE)
            self._dirty[file.path] = None
            written += len(piece)
            position += len(piece) // ENTRY_SIZE
            self.max_offset = position
            physical_offset, size, _ = ENTRY.unpack_from(piece, len(piece) - ENTRY_SIZE)
            if size != BLANK_SIZE:
                self.max_physical_offset = physical_offset + size

    def lacks_files_to(self, end: int) -> bool:
        """Whether entries up to `end` need a file that is not there."""
        return not self._starts or end > self._starts[-1] + self._file_entries

    def new_files(self, queue_offset: int, end: int) -> list[NewFile]:
        """What `append` of entries from `queue_offset` up to `end` would make of files, to be made and adopted before.

        None if these are not the next ones: then it is a gap, or they are there already.
        """
        count = self._file_entries
        first = queue_offset - queue_offset % count
        if self._starts:
            if queue_offset != self.max_offset:
                return []
            first = self._starts[-1] + count
        return [NewFile(self, start, max(0, queue_offset - start)) for start in range(first, end, count)]

    def make_file(self, new: NewFile) -> File:
        """Make a file that is none of the queue's yet. Blocking: its name has to reach the disk."""
        self._disk.make_dirs(self._directory)
        path = self._directory / segment_name(new.start * ENTRY_SIZE)
        file = self._disk.create(path, self._file_size, allocate=False)
        if new.blank_count:
            try:
                file.pwrite(ENTRY_FILL * new.blank_count, 0)
            except OSError:
                self._disk.unlink(path)  # so that the queue is brand new at the next attempt, too
                raise
        return file

    def adopt(self, new: NewFile, file: File) -> None:
        """Have a file that was made as the last of the queue's."""
        if not self._starts:
            self.min_offset = self.max_offset = new.start + new.blank_count
        self._starts.append(new.start)
        self._files.add(file)

    def mend(self, queue_offset: int, entries: Sequence[bytes]) -> int:
        """Write those of `entries` (at consecutive queue offsets) that the files hold otherwise; return how many.

        Only within [`min_offset`, `max_offset`). A file that is too short is made whole.
        """
        skipped = max(0, self.min_offset - queue_offset)
        entries = entries[skipped : max(0, self.max_offset - queue_offset)]
        position = queue_offset + skipped
        mended = 0
        while entries:
            start = position - position % self._file_entries
            here = entries[: start + self._file_entries - position]
            right = b"".join(here)
            at = (position - start) * ENTRY_SIZE
            file = self._file(start)
            raw = file.pread(len(right), at)
            if raw != right:
                if len(raw) < len(right):
                    file = self._make_whole(start)
                mended += sum(raw[n * ENTRY_SIZE : (n + 1) * ENTRY_SIZE] != entry for n, entry in enumerate(here))
                file.pwrite(right, at)
                self._dirty[file.path] = None
            position += len(here)
            entries = entries[len(here) :]
        return mended

    def _make_whole(self, start: int) -> File:
        """Replace a file that is too short by one of the right size with what it held."""
        path = self._path(start)
        held = self._disk.read_bytes(path)[: self._file_size]
        self._files.forget(path)
        self._disk.unlink(path)
        file = self._disk.create(path, self._file_size, allocate=False)
        file.pwrite(held, 0)
        self._files.add(file)
        return file

    def _leap(self, queue_offset: int) -> None:
        """Make `queue_offset` (beyond the end) the next to be written."""
        if not self._starts:
            [new] = self.new_files(queue_offset, queue_offset + 1)
            self.adopt(new, self.make_file(new))
            return
        logger.error(
            "queue_gap topic=%s queue_id=%d expected=%d found=%d",
            self.topic,
            self.queue_id,
            self.max_offset,
            queue_offset,
        )
        if queue_offset - self.max_offset > self._file_entries:
            # Not filled in: what lies before stays in the files only until retention would reach it anyway.
            self.destroy()
            self._leap(queue_offset)
            return
        # Blank entries in the middle carry the place where they stand, so that physical offsets stay ascending.
        blank = ENTRY.pack(self.max_physical_offset, BLANK_SIZE, 0)
        self.append(self.max_offset, [blank] * (queue_offset - self.max_offset))

    def _path(self, start: int) -> Path:
        # Kept, as making one, hash and all, takes longer than writing to the file.
        named, path = self._last_path
        if named != start:
            path = self._directory / segment_name(start * ENTRY_SIZE)
            self._last_path = start, path
        return path

    def _file(self, start: int, *, create: bool = False) -> File:
        if create and (not self._starts or start > self._starts[-1]):
            new = NewFile(self, start, 0)
            self.adopt(new, self.make_file(new))
        return self._files.get(self._path(start))

    # ---- keeping

    def take_dirty(self) -> list[Path]:
        """Take the files written since the last call; the caller syncs them, or gives them back to `note_dirty`."""
        paths = list(self._dirty)
        self._dirty.clear()
        return paths

    def note_dirty(self, paths: Set[Path]) -> None:
        """Take back those of `paths` that are this queue's: they were not synced after all."""
        for start in self._starts:
            path = self._path(start)
            if path in paths:
                self._dirty[path] = None

    def sync_from(self, physical_offset: int) -> None:
        """Sync the files with entries of records at or beyond a physical offset."""
        position = self._search(physical_offset)
        for start in self._starts:
            if start + self._file_entries > position:
                self._file(start).sync()

    def load(self, is_clean: bool) -> bool:
        """Find the entries on the disk. False if files are missing or of a wrong size: the queue was then emptied.

        After a stop that was not clean, what is behind the entries has to be zeros on the disk, too: `take_cleared`.
        """
        starts = [start // ENTRY_SIZE for start in segment_starts(self._disk.list_dir(self._directory))]
        self._starts = starts
        sizes = {start: self._disk.size(self._path(start)) for start in starts}
        if starts and sizes[starts[-1]] == 0:
            self._disk.unlink(self._path(starts[-1]))
            starts.pop()
        expected = (
            list(range(starts[0], starts[0] + len(starts) * self._file_entries, self._file_entries)) if starts else []
        )
        if starts != expected or any(sizes[start] != self._file_size for start in starts):
            logger.error("queue_damaged topic=%s queue_id=%d files=%s", self.topic, self.queue_id, starts)
            self.destroy()
            return False
        if not starts:
            return True
        self.min_offset = self.max_offset = starts[0]
        # RocketMQ scans from the third file from the end; a crash can have left holes in what was not synced.
        position = starts[max(0, len(starts) - 3)]
        data = data_ranges(self._file(starts[-1]), 0, self._file_size)
        stop = starts[-1] + (-(-data[-1][1] // ENTRY_SIZE) if data else 0)
        while position < stop:
            try:
                valid, size = self._scan(position, min(_SCANNED_ENTRIES, stop - position))
            except _DamagedEntryError as error:
                logger.error("queue_damaged topic=%s queue_id=%d reason=%s", self.topic, self.queue_id, error)
                self.destroy()
                return False
            position += valid
            if valid < size:
                break
        self.max_offset = position
        if position > starts[0] and self._entry(starts[0])[:2] == (0, BLANK_SIZE):
            self.min_offset = self._search(0)
        self.was_cut = self._has_more_than_zeros(position, data)
        if self.was_cut:
            logger.error("queue_cut topic=%s queue_id=%d at=%d", self.topic, self.queue_id, position)
        if self.was_cut or not is_clean:
            self._clear_from(position)
        return True

    def _has_more_than_zeros(self, position: int, data: Sequence[tuple[int, int]]) -> bool:
        """Whether anything stands at or behind an entry: after a clean stop only where files are damaged.

        `data` are the ranges (bytes) of the last file that may be anything but zeros.
        """
        if position >= self._starts[-1] + self._file_entries:
            return False
        if position < self._starts[-1]:
            return True
        file = self._file(self._starts[-1])
        at = (position - self._starts[-1]) * ENTRY_SIZE
        for begin, end in data:
            raw = file.pread(max(0, end - max(begin, at)), max(begin, at))
            if raw.count(0) != len(raw):
                return True
        return False

    def _scan(self, position: int, count: int) -> tuple[int, int]:
        """Return how many entries of one file follow from `position` on, of at most how many that were looked at."""
        start = position - position % self._file_entries
        count = min(count, start + self._file_entries - position)
        raw = self._file(start).pread(count * ENTRY_SIZE, (position - start) * ENTRY_SIZE)
        valid, self.max_physical_offset, is_end = count_entries(raw, self.max_physical_offset)
        if not is_end:
            at, *_ = ENTRY.unpack_from(raw, valid * ENTRY_SIZE)
            raise _DamagedEntryError(f"entry {position + valid} points to {at}, before what is before it ends")
        return valid, count

    def truncate(self, physical_offset: int) -> int:
        """Remove (and zero) the entries of records at or beyond a physical offset; return how many. `take_cleared`."""
        keep = self._search(physical_offset)
        removed = self.max_offset - keep
        if removed:
            self.max_offset = keep
            self.min_offset = min(self.min_offset, keep)
            last = self._entry(keep - 1) if self._starts and keep > self._starts[0] else None
            self.max_physical_offset = last.physical_offset + last.size if last and last.size != BLANK_SIZE else 0
            self._clear_from(keep)
        return removed

    def _clear_from(self, position: int) -> None:
        for start in reversed(self._starts[1:]):
            if start < position:
                break
            self._remove_file(start)
        if self._starts and position < self._starts[-1] + self._file_entries:
            start = self._starts[-1]
            at = (position - start) * ENTRY_SIZE
            file = self._file(start)
            file.zero(at, self._file_size - at)
            self._cleared = file.path

    def take_cleared(self) -> Path | None:
        """Take the file in which entries were made zeros since the last call; the caller syncs it, at once.

        Another record may soon be where one of these entries says that its record is. If that one's entry then gets
        lost with the zeroes, in a power loss, the old one would come back and be taken for it.
        """
        path, self._cleared = self._cleared, None
        return path

    def correct_min(self, log_min_offset: int) -> int:
        """Let `min_offset` follow the commitlog's, and delete files that hold only older entries; return how many.

        The last file always stays: it says which offset comes next.
        """
        self.min_offset = self._search(max(log_min_offset, 0))
        deleted = 0
        while len(self._starts) > 1 and self._starts[1] <= self.min_offset:
            self._remove_file(self._starts[0])
            deleted += 1
        return deleted

    def _search(self, physical_offset: int) -> int:
        """First entry at or beyond a physical offset; `max_offset` if there is none."""
        if 0 < self.max_physical_offset < physical_offset:
            return self.max_offset
        low = self._starts[0] if self._starts else self.max_offset
        high = self.max_offset
        near, first = b"", low
        while low < high:
            middle = (low + high) // 2
            start = middle - middle % self._file_entries
            if not near and high - low <= _NEAR_ENTRIES and start <= low and high <= start + self._file_entries:
                near, first = self._file(start).pread((high - low) * ENTRY_SIZE, (low - start) * ENTRY_SIZE), low
                near = near.ljust((high - low) * ENTRY_SIZE, b"\0")
            entry = QueueEntry(*ENTRY.unpack_from(near, (middle - first) * ENTRY_SIZE)) if near else self._entry(middle)
            is_pre_blank = entry.size == BLANK_SIZE and entry.physical_offset == 0
            is_hole = entry.size <= 0  # never written back before a power loss; what was synced has none
            if is_pre_blank or (entry.physical_offset < physical_offset and not is_hole):
                low = middle + 1
            else:
                high = middle
        return low

    def first_record_from(self, physical_offset: int) -> int | None:
        """Return the physical offset of the first record at or beyond one that has an entry; None if none has."""
        position = self._search(physical_offset)
        if position >= self.max_offset:
            return None
        entry = self._entry(position)
        return entry.physical_offset if entry.size != BLANK_SIZE else None

    def records_in(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return (physical offset, size) of the records that have an entry and begin within [begin, end)."""
        found: list[tuple[int, int]] = []
        position = self._search(begin)
        while position < self.max_offset:
            for physical_offset, size, _ in self.read(position, _READ_ENTRIES):
                if physical_offset >= end:
                    return found
                if size != BLANK_SIZE:
                    found.append((physical_offset, size))
            position += _READ_ENTRIES
        return found

    def last_record_before(self, physical_offset: int) -> int:
        """Return the physical offset of the last record before one that has an entry; −1 if none has."""
        position = self._search(physical_offset) - 1
        if position < self.min_offset:
            return -1
        entry = self._entry(position)
        return entry.physical_offset if entry.size != BLANK_SIZE else -1

    def has_record_at(self, physical_offset: int) -> bool:
        """Tell whether an entry points to exactly this offset."""
        position = self._search(physical_offset)
        return position < self.max_offset and self._entry(position).physical_offset == physical_offset

    def _entry(self, position: int) -> QueueEntry:
        start = position - position % self._file_entries
        raw = self._file(start).pread(ENTRY_SIZE, (position - start) * ENTRY_SIZE).ljust(ENTRY_SIZE, b"\0")
        return QueueEntry(*ENTRY.unpack(raw))

    def clear(self) -> None:
        """Begin anew at the present end: what is before it is no longer in the queue, nor after a restart.

        Blocking. Files but the last go, and that one is filled with blank entries, as that of a queue that began there.
        """
        self.min_offset = end = self.max_offset
        for start in self._starts[:-1]:
            self._remove_file(start)
        if self._starts:
            start = self._starts[-1]
            file = self._file(start)
            file.pwrite(ENTRY_FILL * (end - start), 0)
            file.sync()
        self.min_offset = end  # whatever looked meanwhile

    def _remove_file(self, start: int) -> None:
        path = self._path(start)
        self._starts.remove(start)
        self._files.forget(path)
        self._dirty.pop(path, None)
        self._disk.unlink(path)

    def destroy(self) -> None:
        """Delete the queue's files; it is then as new."""
        for start in list(self._starts):
            self._remove_file(start)
        self.forget()

    def forget(self) -> None:
        """Be as new without touching files (somebody moved them)."""
        self._starts = []
        self._dirty.clear()
        self.min_offset = self.max_offset = self.max_physical_offset = 0


class _DamagedEntryError(Exception):
    """An entry can't be true; the message says which and why."""


class ConsumeQueues:
    """All queues of a store."""

    def __init__(self, disk: Disk, directory: Path, file_entry_count: int) -> None:
        self._disk = disk
        self._open_count_max = _OPEN_COUNT_MAX
        self._files = OpenFiles(disk, _OPEN_COUNT_MAX)
        self._directory = directory
        self._file_entry_count = file_entry_count
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._is_one_missing = False

    def get(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue that has, or once had, a message; else None."""
        return self._queues.get((topic, queue_id))

    def get_or_create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return a queue, made in memory if it is new; its first entry makes its files."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            directory = self._directory / topic / str(queue_id)
            queue = ConsumeQueue(self._disk, self._files, directory, topic, queue_id, self._file_entry_count)
            self._queues[topic, queue_id] = queue
        return queue

    def topics(self) -> dict[str, list[int]]:
        """Return topic -> its queue ids, both sorted."""
        found: dict[str, list[int]] = {}
        for topic, queue_id in sorted(self._queues):
            found.setdefault(topic, []).append(queue_id)
        return found

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        """Return the queue offset behind the last dispatched message of a queue."""
        queue = self._queues.get((topic, queue_id))
        return queue.max_offset if queue is not None else 0

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter(list(self._queues.values()))

    @property
    def max_physical_offset(self) -> int:
        """End of the last record that has an entry in any queue."""
        return max((queue.max_physical_offset for queue in self._queues.values()), default=0)

    @property
    def cut_at(self) -> int | None:
        """Physical offset from which dispatch has to begin to fill the queues that are cut or missing; None if none
        is."""
        if self._is_one_missing:
            return 0
        return min((queue.max_physical_offset for queue in self._queues.values() if queue.was_cut), default=None)

    def load(self, is_clean: bool) -> bool:
        """Find the queues on the disk. False if one was damaged (it is empty now) and must be built again.

        What is behind their entries is made sure of only by `truncate`, which is to come before a record is written.
        """
        whole = True
        for topic in self._disk.list_dir(self._directory):
            for name in self._disk.list_dir(self._directory / topic):
                if name.isascii() and name.isdigit():
                    whole &= self.get_or_create(topic, int(name)).load(is_clean)
        return whole

    def ends(self) -> QueueEnds:
        """Return the `max_offset` of each queue."""
        found: QueueEnds = {}
        for (topic, queue_id), queue in self._queues.items():
            found.setdefault(topic, {})[queue_id] = queue.max_offset
        return found

    def miss_ends(self, ends: QueueEnds) -> None:
        """Notice, after `load`, which queues end before where they did once; they count as cut."""
        for topic, known in ends.items():
            for queue_id, end in known.items():
                queue = self._queues.get((topic, queue_id))
                found = queue.max_offset if queue is not None else 0
                if found < end:
                    logger.error("queue_end_lost topic=%s queue_id=%d end=%d found=%d", topic, queue_id, end, found)
                    if queue is not None:
                        queue.was_cut = True
                    else:
                        self._is_one_missing = True

    def first_record_from(self, physical_offset: int) -> int | None:
        """Return the physical offset of the first record at or beyond one that some queue knows; None if none does."""
        return min((p for queue in self if (p := queue.first_record_from(physical_offset)) is not None), default=None)

    def last_record_before(self, physical_offset: int) -> int:
        """Return the physical offset of the last record before one that has an entry in any queue; −1 if none has."""
        return max((queue.last_record_before(physical_offset) for queue in self), default=-1)

    def has_record_at(self, physical_offset: int) -> bool:
        """Tell whether some queue knows a record at exactly this offset."""
        return any(queue.has_record_at(physical_offset) for queue in self)

    def has_entry_of(self, head: RecordHead) -> bool:
        """Tell whether the entry at a record's queue offset is the one that dispatch makes of it."""
        queue = self._queues.get((head.topic, head.queue_id))
        expected = QueueEntry(head.physical_offset, head.total_size, head.tags_code)
        return queue is not None and queue.read(head.queue_offset, 1) == [expected]

    def known_to(self, begin: int, end: int) -> int:
        """Return up to where the records from physical offset `begin` on have entries one after the other, at least up
        to `end`; `begin` if there is a gap before it (a record that belongs in no queue, or the end of a segment)."""
        at = self.chained_to(begin, end, segment_size=0)
        return at if at >= end else begin

    def chained_to(self, begin: int, end: int, *, segment_size: int) -> int:
        """Return up to where the records within [`begin`, `end`) have entries one after the other, from `begin` on.

        The next one may begin with the next segment, unless `segment_size` is 0.
        """
        at = begin
        while (first := self.first_record_from(at)) is not None and first < end:
            began = at
            stop = min(first + _CHAIN_BYTES, end)
            for physical_offset, size in sorted(chain.from_iterable(queue.records_in(first, stop) for queue in self)):
                next_start = -(-at // segment_size) * segment_size if segment_size else at
                if physical_offset not in (at, next_start) or size <= 0:
                    return at
                at = physical_offset + size
            if at == began:
                break
        return at

    def truncate(self, physical_offset: int) -> int:
        """Remove the entries of records at or beyond a physical offset from all queues; return how many.

        They, and what `load` found behind the entries, are then zeros on the disk, too. Blocking.
        """
        removed = sum(queue.truncate(physical_offset) for queue in self)
        self._disk.sync_all([path for queue in self if (path := queue.take_cleared()) is not None])
        return removed

    def sync_from(self, physical_offset: int) -> None:
        """Sync the entries of records at or beyond a physical offset."""
        for queue in self:
            queue.sync_from(physical_offset)

    def correct_min(self, log_min_offset: int) -> int:
        """Let every queue's `min_offset` follow the commitlog's; return how many files that deleted."""
        return sum(queue.correct_min(log_min_offset) for queue in self)

    def clear(self, topic: str) -> None:
        """Let every queue of a topic begin anew at its present end. Blocking."""
        for queue in self:
            if queue.topic == topic:
                queue.clear()

    def take_dirty(self) -> list[Path]:
        """Take the files written since the last call; the caller syncs them, or gives them back to `note_dirty`."""
        return [path for queue in self for path in queue.take_dirty()]

    def note_dirty(self, paths: Sequence[Path]) -> None:
        """Take back files that were not synced after all; those that are gone meanwhile are passed over."""
        if paths:
            taken = set(paths)
            for queue in self:
                queue.note_dirty(taken)

    def keep_open(self, count_max: int) -> None:
        """Keep at most so many files open from now on."""
        self._open_count_max = count_max
        self._files.limit(count_max)

    def forget(self) -> None:
        """Be empty without touching files (somebody moved them)."""
        self._queues.clear()
        self._files = OpenFiles(self._disk, self._open_count_max)
