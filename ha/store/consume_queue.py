"""A consume queue: the positions in the commitlog of the messages of one topic and queue id.

An entry is 20 bytes (`ha.protocol.store_files.ENTRY`): physical offset int64, record size int32, tags code int64.
Derived: every entry can be rebuilt from the commitlog. queue_files.py reads and writes the files. Source: ConsumeQueue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ha.protocol.queue_entries import count_entries
from ha.protocol.store_files import BLANK_SIZE, ENTRY, ENTRY_SIZE
from ha.store.files import Disk, File, is_passing, is_unreadable, read_readable
from ha.store.mapped_file import RunBlocking, fetch
from ha.store.open_files import OpenFiles
from ha.store.queue_files import QueueFiles

logger = logging.getLogger(__name__)

QUEUE_OFFSET_MAX = (1 << 62) // ENTRY_SIZE
"""Maximum valid queue offset; higher ones are treated as damage"""
_READ_ENTRIES = 4096
_SCANNED_ENTRIES = 1 << 16
_NEAR_ENTRIES = 128
"""Maximum number of remaining candidates at which a binary search reads all of them at once, and number of entries that
a search for the next or previous record reads at once"""


class QueueEntry(NamedTuple):
    """Physical offset of a message's record, its size in bytes, and its tags code. `size` is BLANK_SIZE if the entry is
    blank: there is no message."""

    physical_offset: int
    size: int
    tags_code: int


class NewFile(NamedTuple):
    """A file that a queue needs next: its start (entries), and how many blank entries it begins with."""

    queue: ConsumeQueue
    start: int
    blank_count: int

    def make(self) -> File:
        """Makes the file; see `QueueFiles.make`. Blocking."""
        return self.queue.files.make(self.start, self.blank_count)


class ConsumeQueue:
    """One queue. Offsets are queue offsets (entries) unless named otherwise. Searches read the files: they block, and
    raise OSError."""

    def __init__(self, disk: Disk, files: OpenFiles, directory: Path, topic: str, queue_id: int, count: int) -> None:
        """`count`: number of entries in one file."""
        self.topic = topic
        self.queue_id = queue_id
        self.min_offset = 0
        self.max_offset = 0
        self.max_physical_offset = 0
        """Physical offset at which the last record with an entry ends, 0 if there is none; records before it are
        skipped when they are dispatched again"""
        self.has_lost_entries = False
        """Whether the queue has to be rebuilt: `load` found entries after the first invalid one, and removed them, or
        could not read some"""
        self.files = QueueFiles(disk, files, directory, count, owner=self)
        self._removing = threading.Lock()  # workers and dispatch may remove files at the same time

    # ---- reading

    def read(self, queue_offset: int, count: int) -> list[QueueEntry]:
        """Returns up to `count` entries from `queue_offset` on; none if that is outside [`min_offset`, `max_offset`).
        Blocking. Raises OSError.

        A file that is too short is read as if entries of size 0 followed. Callers must check that an entry is plausible
        before they use it, and have it repaired (`Scrub.repair_entry`) if it is not.
        """
        return list(map(QueueEntry._make, ENTRY.iter_unpack(self.read_raw(queue_offset, count))))

    def read_readable(self, queue_offset: int, count: int) -> list[QueueEntry]:
        """Like `read`, but entries that the disk can't read have size 0. Raises OSError if a file can't be opened.

        For services, which have such entries repaired like wrong ones, and otherwise could not go on.
        """
        try:
            return self.read(queue_offset, count)
        except OSError as error:
            if not is_unreadable(error):
                raise
        pieces = [read_readable(file, size, position) for file, size, position in self._ranges(queue_offset, count)]
        return list(map(QueueEntry._make, ENTRY.iter_unpack(b"".join(pieces))))

    def read_raw(self, queue_offset: int, count: int) -> bytes:
        """Like `read`; returns the entries as they are in the file."""
        pieces = [
            file.pread(size, position).ljust(size, b"\0") for file, size, position in self._ranges(queue_offset, count)
        ]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_cached(self, queue_offset: int, count: int) -> bytes | None:
        """Like `read_raw`, but returns None if the page cache lacks an entry. Raises OSError."""
        pieces: list[bytes] = []
        for file, size, position in self._ranges(queue_offset, count):
            piece = file.pread_nowait(size, position)
            if piece is None or len(piece) != size:
                return None
            pieces.append(bytes(piece))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def fetch_raw(self, queue_offset: int, count: int, run_blocking: RunBlocking) -> bytes:
        """Like `read_raw`, but a worker reads entries that the page cache lacks. Not a Trio checkpoint if the cache has
        all of them. Raises OSError."""
        pieces = [
            bytes(await fetch(file, size, position, run_blocking)).ljust(size, b"\0")
            for file, size, position in self._ranges(queue_offset, count)
        ]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _ranges(self, queue_offset: int, count: int) -> list[tuple[File, int, int]]:
        if queue_offset < self.min_offset:
            return []
        return self.files.ranges(queue_offset, min(queue_offset + count, self.max_offset))

    def _entry(self, position: int) -> QueueEntry:
        return QueueEntry._make(ENTRY.unpack(self.files.read(position, 1)))

    # ---- building

    def append(self, queue_offset: int, entries: Sequence[bytes]) -> None:
        """Writes entries of consecutive queue offsets, none of which exists yet.

        A new queue may begin anywhere. A gap before the entries is logged and filled with blank entries; if the gap is
        longer than a file, the queue's files are deleted instead, and the queue begins with these entries. Raises
        OSError if a file can't be written, created or deleted; entries written before the error remain, and
        `max_offset` is after them.
        """
        if queue_offset != self.max_offset:
            self._begin_at(queue_offset)
        raw = b"".join(entries)
        files, position = self.files, queue_offset
        written = 0
        while written < len(raw):
            if position >= files.end:
                new = NewFile(self, files.start_of(position), 0)
                self.adopt(new, new.make())
            room = (files.start_of(position) + files.file_entries - position) * ENTRY_SIZE
            piece = raw if len(raw) <= room and not written else raw[written : written + room]
            files.write(position, piece)
            written += len(piece)
            position += len(piece) // ENTRY_SIZE
            self.max_offset = position
            physical_offset, size, _ = ENTRY.unpack_from(piece, len(piece) - ENTRY_SIZE)
            if size != BLANK_SIZE:
                self.max_physical_offset = physical_offset + size

    @property
    def next_offset_max(self) -> int:
        """The highest plausible queue offset of this queue's next record, if the log still has all records after the
        queue's last one.

        No CRC covers a record's queue offset, so a higher one counts as damaged: only a new queue can begin with a gap
        of more than a file.
        """
        files = self.files
        return min(self.max_offset + files.file_entries, QUEUE_OFFSET_MAX) if files.starts else QUEUE_OFFSET_MAX

    def lacks_files_to(self, end: int) -> bool:
        """Returns whether entries up to `end` need a file that does not exist."""
        return end > self.files.end

    def new_files(self, queue_offset: int, end: int) -> list[NewFile]:
        """Returns the files that `append` of entries from `queue_offset` up to `end` would create. The caller makes and
        adopts them before it appends.

        Empty if these entries are not the next ones: there is a gap, or they exist already.
        """
        files = self.files
        first = files.start_of(queue_offset)
        if files.starts:
            if queue_offset != self.max_offset:
                return []
            first = files.end
        return [NewFile(self, start, max(0, queue_offset - start)) for start in range(first, end, files.file_entries)]

    def adopt(self, new: NewFile, file: File) -> None:
        """Adds the file that `new.make` has returned as the last one of the queue."""
        if not self.files.starts:
            self.min_offset = self.max_offset = new.start + new.blank_count
        self.files.adopt(new.start, file)

    def repair(self, queue_offset: int, entries: Sequence[bytes]) -> int:
        """Replaces the entries from `queue_offset` on with `entries`; returns how many differed. Raises OSError.

        Entries outside [`min_offset`, `max_offset`) are ignored. A file that is too short is completed. Files that the
        disk can't read have to be replaced before: see `replace_unreadable`.
        """
        begin, stop = max(queue_offset, self.min_offset), min(queue_offset + len(entries), self.max_offset)
        repaired = 0
        while begin < stop:
            here = min(stop, self.files.start_of(begin) + self.files.file_entries)
            repaired += self.files.repair(begin, b"".join(entries[begin - queue_offset : here - queue_offset]))
            begin = here
        return repaired

    def replace_unreadable(self, start: int) -> bool:
        """Replaces the file at `start` by a copy if the disk can't read all of it; returns whether it did. The entries
        that can't be read become zeros, until they are repaired. Blocking. Raises OSError."""
        reason = self.files.replace_unreadable(start)
        if reason:
            logger.error(
                "queue.file_replaced topic=%s queue_id=%d start=%d reason=%r", self.topic, self.queue_id, start, reason
            )
        return bool(reason)

    def _replace_all_unreadable(self, error: OSError) -> None:
        """Replaces the files that the disk can't read, after an error of a read. Raises the error if there are none, or
        it is temporary."""
        if is_passing(error) or not sum(map(self.replace_unreadable, self.files.starts)):
            raise error

    def _begin_at(self, queue_offset: int) -> None:
        """Makes `queue_offset`, which is beyond the end, the next queue offset to be written, as `append` describes."""
        if not self.files.starts:
            [new] = self.new_files(queue_offset, queue_offset + 1)
            self.adopt(new, new.make())
            return
        logger.error(
            "queue.gap_found topic=%s queue_id=%d expected=%d found=%d",
            self.topic,
            self.queue_id,
            self.max_offset,
            queue_offset,
        )
        if queue_offset - self.max_offset > self.files.file_entries:
            # Not filled: the records before the gap are deleted (dispatch.py).
            self.destroy()
            self._begin_at(queue_offset)
            return
        # Blank entries in the middle have the physical offset of their position, so that these stay ascending.
        blank = ENTRY.pack(self.max_physical_offset, BLANK_SIZE, 0)
        self.append(self.max_offset, [blank] * (queue_offset - self.max_offset))

    def keep_end(self, end: int, physical_offset: int) -> None:
        """Fills the queue with blank entries up to `end`, its end before entries were lost. The record of the last lost
        entry ended at or before `physical_offset`. Raises OSError."""
        logger.error(
            "queue.end_kept topic=%s queue_id=%d end=%d found=%d", self.topic, self.queue_id, end, self.max_offset
        )
        # A truncation of the log before the end of that record then removes the blank entries, too.
        blank = ENTRY.pack(max(physical_offset, self.max_physical_offset) - 1, BLANK_SIZE, 0)
        self.append(self.max_offset, [blank] * (end - self.max_offset))

    # ---- loading

    def load(self, is_clean: bool) -> bool:
        """Finds the entries on the disk. Returns False if the queue is damaged and was emptied: files are missing or of
        a wrong size, or an entry points before the end of the previous record. Raises OSError.

        Files that the disk can't read are replaced (`replace_unreadable`), and `has_lost_entries` is set. After an
        unclean stop the bytes after the entries have to be zeros on the disk, too: see `QueueFiles.take_zeroed`.
        """
        try:
            return self._load(is_clean)
        except OSError as error:
            self._replace_all_unreadable(error)
        self.forget()
        is_whole = self._load(is_clean)
        self.has_lost_entries = True
        return is_whole

    def _load(self, is_clean: bool) -> bool:
        files = self.files
        if not files.find():
            return self._discard(f"files at {files.starts}")
        if not files.starts:
            return True
        first = self.min_offset = self.max_offset = files.starts[0]
        # From the third file from the end, as in RocketMQ: a crash can have left holes in what was not synced.
        position = files.starts[max(0, len(files.starts) - 3)]
        data = files.last_data()
        stop = files.starts[-1] + (-(-data[-1][1] // ENTRY_SIZE) if data else 0)
        while position < stop:
            count = min(_SCANNED_ENTRIES, stop - position, files.start_of(position) + files.file_entries - position)
            raw = files.read(position, count)
            valid, self.max_physical_offset, is_end = count_entries(raw, self.max_physical_offset)
            position += valid
            if not is_end:
                at, *_ = ENTRY.unpack_from(raw, valid * ENTRY_SIZE)
                return self._discard(f"entry {position} points to {at}, before the end of the previous record")
            if valid < count:
                break
        self.max_offset = position
        if position > first and self._entry(first)[:2] == (0, BLANK_SIZE):
            self.min_offset = self.end_before(0)
        self.has_lost_entries = files.has_data_from(position, data)
        if self.has_lost_entries:
            logger.error("queue.entries_lost topic=%s queue_id=%d from=%d", self.topic, self.queue_id, position)
        if self.has_lost_entries or not is_clean:
            files.zero_from(position)
        return True

    def _discard(self, reason: str) -> bool:
        logger.error("queue.damage_found topic=%s queue_id=%d reason=%r", self.topic, self.queue_id, reason)
        self.destroy()
        return False

    # ---- removing entries

    def truncate(self, physical_offset: int) -> int:
        """Removes (and zeroes) the entries of records at or beyond a physical offset; returns how many. Raises OSError.

        The caller syncs the zeros: see `QueueFiles.take_zeroed`. Replaces files that the disk can't read, so nothing
        may be dispatched meanwhile.
        """
        try:
            keep = self.end_before(physical_offset)
        except OSError as error:
            self._replace_all_unreadable(error)
            keep = self.end_before(physical_offset)
        removed = self.max_offset - keep
        if removed:
            self.max_offset = keep
            self.min_offset = min(self.min_offset, keep)
            starts = self.files.starts
            last = self._entry(keep - 1) if starts and keep > starts[0] else None
            self.max_physical_offset = last.physical_offset + last.size if last and last.size != BLANK_SIZE else 0
            self.files.zero_from(keep)
        # The size in the last entry may be damaged: the records from here on would be skipped.
        self.max_physical_offset = min(self.max_physical_offset, physical_offset)
        return removed

    def correct_min(self, log_min_offset: int) -> int:
        """Sets `min_offset` to the first entry of a record at or beyond `log_min_offset`, and deletes files with only
        older entries; returns how many. Raises OSError.

        The last file always stays: it holds the next queue offset. If the disk can't read an entry, nothing changes
        before the scrub, or a pull, has replaced the file.
        """
        with self._removing:
            if not self.files.starts:
                return 0  # dispatch may be about to add the first file, and then sets `min_offset`
            try:
                self.min_offset = self.end_before(max(log_min_offset, 0))
            except OSError as error:
                if not is_unreadable(error):
                    raise
                logger.error(
                    "queue.start_unreadable topic=%s queue_id=%d reason=%r", self.topic, self.queue_id, str(error)
                )
                return 0
            deleted = 0
            while len(self.files.starts) > 1 and self.files.starts[1] <= self.min_offset:
                self.files.remove(self.files.starts[0])
                deleted += 1
            return deleted

    def clear(self, before: int) -> None:
        """Removes the entries of records before a physical offset, durably; `max_offset` stays. Blocking. Raises
        OSError.

        Files with no other entries are deleted, except for the last one. In the first file that stays, the removed
        entries become blank, as in a queue that began with the next entry.
        """
        with self._removing:
            begin, first = self.end_before(before), self.min_offset
            if begin <= first:
                return
            files = self.files
            self.min_offset = begin  # at once, so that nothing repairs the blank entries
            try:
                for start in files.starts[:-1]:
                    if start + files.file_entries <= begin:
                        files.remove(start)
                files.blank(files.starts[0], begin)
            except OSError:
                self.min_offset = max(first, files.starts[0])  # so that the next call removes the rest
                raise

    def destroy(self) -> None:
        """Deletes the queue's files and resets it to the state without entries. Raises OSError."""
        with self._removing:
            for start in self.files.starts[::-1]:  # the last one first: at a start, only missing last files are noticed
                self.files.remove(start)
            self.forget()

    def forget(self) -> None:
        """Resets the queue without touching files, which were moved."""
        self.files.forget()
        self.min_offset = self.max_offset = self.max_physical_offset = 0

    # ---- searching

    def sync_from(self, physical_offset: int) -> None:
        """Syncs the files with entries of records at or beyond a physical offset. Blocking. Raises OSError."""
        self.files.sync_from(self.end_before(physical_offset))

    def end_before(self, physical_offset: int) -> int:
        """Returns the queue offset after the last entry of a record before a physical offset.

        Zeroed entries have no physical offset: a power loss can leave them at the end, and damage anywhere. They count
        as entries of later records, unless an entry of a record before the offset follows.
        """
        if 0 < self.max_physical_offset < physical_offset:
            return self.max_offset
        files = self.files
        low = files.starts[0] if files.starts else self.max_offset
        high = self.max_offset
        near, first = b"", low
        while low < high:
            middle = (low + high) // 2
            start = files.start_of(middle)
            if not near and high - low <= _NEAR_ENTRIES and start <= low and high <= start + files.file_entries:
                near, first = files.read(low, high - low), low
            entry = QueueEntry(*ENTRY.unpack_from(near, (middle - first) * ENTRY_SIZE)) if near else self._entry(middle)
            is_pre_blank = entry.size == BLANK_SIZE and entry.physical_offset == 0
            if is_pre_blank or (entry.physical_offset < physical_offset and entry.size > 0):
                low = middle + 1
            else:
                high = middle
        for position in range(low, self.max_offset):
            entry = self._entry(position)
            if entry.size > 0:
                if entry.physical_offset >= physical_offset:
                    break
                low = position + 1
        return low

    def first_record_from(self, physical_offset: int) -> int | None:
        """Returns the physical offset of the first record at or beyond `physical_offset` that has an entry; None if
        none has."""
        begin = self.end_before(physical_offset)
        while begin < self.max_offset:
            end = min(begin + _NEAR_ENTRIES, self.files.start_of(begin) + self.files.file_entries, self.max_offset)
            for at, size, _ in ENTRY.iter_unpack(self.files.read(begin, end - begin)):
                if 0 < size < BLANK_SIZE:
                    return int(at)
            begin = end
        return None

    def records_in(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns (physical offset, size in bytes) of the records that have an entry and begin within [begin, end)."""
        found: list[tuple[int, int]] = []
        position = self.end_before(begin)
        while position < self.max_offset:
            for physical_offset, size, _ in self.read(position, _READ_ENTRIES):
                if physical_offset >= end:
                    return found
                if 0 < size < BLANK_SIZE:
                    found.append((physical_offset, size))
            position += _READ_ENTRIES
        return found

    def last_record_before(self, physical_offset: int) -> int:
        """Returns the physical offset of the last record before `physical_offset` that has an entry; -1 if none has."""
        end = self.end_before(physical_offset)
        while end > self.min_offset:
            begin = max(end - _NEAR_ENTRIES, self.files.start_of(end - 1), self.min_offset)
            for at, size, _ in reversed(list(ENTRY.iter_unpack(self.files.read(begin, end - begin)))):
                if 0 < size < BLANK_SIZE:
                    return int(at)
            end = begin
        return -1

    def has_record_at(self, physical_offset: int) -> bool:
        """Returns whether the queue has an entry of a record that begins at exactly this physical offset."""
        return self.first_record_from(physical_offset) == physical_offset
