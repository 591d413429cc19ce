"""The key index: from `topic#key` to the physical offsets of records, in hash files.

    header | slots: number of the newest entry with that hash, or 0 | entries, each with the number of the one before it

Entry numbers begin at 1. A file's name is the local time of its creation, its size fixed, its content sparse. Derived:
it can be built again from the commitlog. Only hashes are kept, so a query may return records with another key.

Entries are written as they come. Slots and header of the newest file are kept in memory and written by `flush`, as
single slots in random places would cost one system call each. It takes them all at one moment, since it writes in a
worker while keys go on coming. After a kill the file therefore describes the state of
its last flush, with entries beyond that are ignored. Sources: IndexFile, IndexService.
"""

from __future__ import annotations

import logging
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import trio

from ha.protocol.codes import SysFlag
from ha.protocol.record import RecordHead
from ha.protocol.store_files import (
    INDEX_ENTRY,
    INDEX_ENTRY_SIZE,
    INDEX_HEADER_SIZE,
    INDEX_SLOT,
    INDEX_SLOT_SIZE,
    IndexHeader,
    index_entry_position,
    index_file_size,
    index_key,
    index_key_hash,
    index_slot_position,
)
from ha.store.files import Disk, File

logger = logging.getLogger(__name__)

_PAGE_SLOTS = 1024
_NAME_DIGITS = 17
_CHECK_ENTRIES = 1024
TAG_INFIX = "T#"
QUERY_COUNT_MAX = 64


class IndexFile:
    """One file. Only the newest of an index is written; `slots` is then its slot table."""

    def __init__(self, file: File, slot_count: int, entry_count_max: int) -> None:
        self.file = file
        self.path = file.path
        self.slot_count = slot_count
        self.entry_count_max = entry_count_max
        header = IndexHeader.unpack(file.pread(INDEX_HEADER_SIZE, 0))
        self.begin_timestamp_ms = header.begin_timestamp_ms
        self.end_timestamp_ms = header.end_timestamp_ms
        self.begin_physical_offset = header.begin_physical_offset
        self.end_physical_offset = header.end_physical_offset
        self.used_slots = header.hash_slot_count
        self.next_entry = max(header.index_count, 1)
        self.slots: array[int] | None = None
        self._dirty_pages: set[int] = set()
        self.is_dirty = False

    @property
    def is_full(self) -> bool:
        """Whether the next key goes to a new file."""
        return self.next_entry >= self.entry_count_max

    def load_slots(self) -> bool:
        """Read the slot table; False if it does not agree with the header."""
        slots = array("i", self.file.pread(self.slot_count * INDEX_SLOT_SIZE, INDEX_HEADER_SIZE))
        if slots.itemsize != INDEX_SLOT_SIZE or len(slots) != self.slot_count:
            return False
        if sys.byteorder == "little":
            slots.byteswap()
        self.slots = slots
        # A crash between writing slots and header leaves slots that point beyond the entries known to be good. What
        # these chains led to may be lost, so the file is of no use.
        return min(slots) >= 0 and max(slots) < self.next_entry

    def _entry(self, number: int) -> tuple[int, int, int, int]:
        raw = self.file.pread(INDEX_ENTRY_SIZE, index_entry_position(self.slot_count, number))
        if len(raw) < INDEX_ENTRY_SIZE:
            return (0, 0, 0, -1)
        key_hash, physical_offset, seconds, previous = INDEX_ENTRY.unpack(raw)
        return key_hash, physical_offset, seconds, previous

    def put(self, keys: Sequence[tuple[int, int, int]]) -> int:
        """Add (key hash, physical offset, store time ms) triples until full; return how many were taken.

        OSError if the entries could not be written; nothing changed then.
        """
        slots = self.slots
        assert slots is not None
        slot_count = self.slot_count
        first = number = self.next_entry
        taken = keys[: self.entry_count_max - number] if number + len(keys) > self.entry_count_max else keys
        if not taken:
            return 0
        begin_ms = self.begin_timestamp_ms
        begin_physical = self.begin_physical_offset
        staged: dict[int, int] = {}
        fresh = 0
        pieces = []
        pack = INDEX_ENTRY.pack
        for key_hash, physical_offset, store_ms in taken:
            slot = key_hash % slot_count
            previous = staged.get(slot)
            if previous is None:
                previous = slots[slot]
                if previous == 0:
                    fresh += 1
            if begin_ms <= 0:
                seconds = 0
            else:
                seconds = (store_ms - begin_ms) // 1000
                if not 0 <= seconds <= 0x7FFFFFFF:
                    seconds = 0 if seconds < 0 else 0x7FFFFFFF
            if number <= 1:
                begin_ms = store_ms
                begin_physical = physical_offset
            pieces.append(pack(key_hash, physical_offset, seconds, previous))
            staged[slot] = number
            number += 1
        self.file.pwrite(b"".join(pieces), index_entry_position(self.slot_count, first))
        for slot, newest in staged.items():
            slots[slot] = newest
        self._dirty_pages.update({slot // _PAGE_SLOTS for slot in staged})
        self.begin_timestamp_ms = begin_ms
        self.begin_physical_offset = begin_physical
        _, self.end_physical_offset, self.end_timestamp_ms = taken[-1]
        self.used_slots += fresh
        self.next_entry = number
        self.is_dirty = True
        return len(taken)

    def count_last(self, physical_offset: int) -> int:
        """Return how many of the newest entries are of one record."""
        number = self.next_entry
        while number > 1 and self._entry(number - 1)[1] == physical_offset:
            number -= 1
        return self.next_entry - number

    def take_unwritten(self) -> Unwritten:
        """Take out what has to be written: slots and header of one moment, however long the writing takes.

        Not blocking, and not beside `put`. The caller writes it and syncs the file, or gives it back.
        """
        slots = self.slots
        runs = []
        pages, self._dirty_pages = self._dirty_pages, set()
        if self.is_dirty:
            assert slots is not None
            in_order = sorted(pages)
            at = 0
            while at < len(in_order):
                stop = at + 1
                while stop < len(in_order) and in_order[stop] == in_order[stop - 1] + 1:
                    stop += 1
                begin = in_order[at] * _PAGE_SLOTS
                runs.append((index_slot_position(begin), slots[begin : (in_order[stop - 1] + 1) * _PAGE_SLOTS]))
                at = stop
        taken = Unwritten(self, self.is_dirty, pages, runs, self._header().pack(), self.end_timestamp_ms)
        self.is_dirty = False
        return taken

    def give_back(self, unwritten: Unwritten) -> None:
        """Have it written again: it is not on the disk after all."""
        self.is_dirty = True
        self._dirty_pages |= unwritten.pages

    def write_header(self) -> None:
        """Write the 40 bytes that say what is valid."""
        self.file.pwrite(self._header().pack(), 0)

    def _header(self) -> IndexHeader:
        return IndexHeader(
            begin_timestamp_ms=self.begin_timestamp_ms,
            end_timestamp_ms=self.end_timestamp_ms,
            begin_physical_offset=self.begin_physical_offset,
            end_physical_offset=self.end_physical_offset,
            hash_slot_count=self.used_slots,
            index_count=self.next_entry,
        )

    def find(self, key_hash: int, count_max: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return up to `count_max` physical offsets under a hash, stored within [begin_ms, end_ms], newest first."""
        slot = key_hash % self.slot_count
        if self.slots is not None:
            number = self.slots[slot]
        else:
            number = INDEX_SLOT.unpack(self.file.pread(INDEX_SLOT_SIZE, index_slot_position(slot)))[0]
        found: list[int] = []
        while 0 < number < self.next_entry and len(found) < count_max:
            entry_hash, physical_offset, seconds, previous = self._entry(number)
            if seconds < 0:
                break
            stored_ms = self.begin_timestamp_ms + seconds * 1000
            if entry_hash == key_hash and begin_ms <= stored_ms <= end_ms:
                found.append(physical_offset)
            if not 0 < previous < number or stored_ms < begin_ms:
                break
            number = previous
        return found

    def trouble(self) -> str:
        """Read all entries and return what is inconsistent: chains, order or slots; "" if nothing. Blocking."""
        newest: dict[int, int] = {}
        last_physical = -1
        stop, slots = self.next_entry, self.slots
        snapshot = array("i", slots) if slots is not None else None
        number = 1
        while number < stop:
            count = min(_CHECK_ENTRIES, stop - number)
            raw = self.file.pread(count * INDEX_ENTRY_SIZE, index_entry_position(self.slot_count, number))
            if len(raw) < count * INDEX_ENTRY_SIZE:
                return f"it ends within entry {number + len(raw) // INDEX_ENTRY_SIZE}"
            for key_hash, physical_offset, seconds, previous in INDEX_ENTRY.iter_unpack(raw):
                slot = key_hash % self.slot_count
                if key_hash < 0 or seconds < 0 or previous != newest.get(slot, 0) or physical_offset < last_physical:
                    return f"entry {number} does not fit those before it"
                newest[slot] = number
                last_physical = physical_offset
                number += 1
        if snapshot is None:
            table = array("i", self.file.pread(self.slot_count * INDEX_SLOT_SIZE, INDEX_HEADER_SIZE))
            if sys.byteorder == "little":
                table.byteswap()
        else:
            table = snapshot
        if len(table) != self.slot_count:
            return "it ends within its slots"
        for slot, head in newest.items():
            if snapshot is None and table[slot] != head:
                return f"slot {slot} says {table[slot]}, its newest entry is {head}"
        if snapshot is None and sum(1 for head in table if head) != len(newest):
            return "slots lead to no entry"
        header = IndexHeader.unpack(self.file.pread(INDEX_HEADER_SIZE, 0))
        if snapshot is None and (
            header.index_count != stop
            or header.end_physical_offset != last_physical
            or header.hash_slot_count != len(newest)
            or header.begin_physical_offset != self.entries(1, 1)[0][1]
            or (header.begin_timestamp_ms, header.end_timestamp_ms) != (self.begin_timestamp_ms, self.end_timestamp_ms)
        ):
            return "its header does not fit its entries"
        return ""

    def entries(self, number: int, count: int) -> list[tuple[int, int, int, int]]:
        """Return up to `count` entries from a number on: key hash, physical offset, seconds, number before in slot."""
        count = min(count, self.next_entry - number)
        raw = self.file.pread(count * INDEX_ENTRY_SIZE, index_entry_position(self.slot_count, number))
        return list(INDEX_ENTRY.iter_unpack(raw[: len(raw) - len(raw) % INDEX_ENTRY_SIZE]))


class IndexCursor:
    """Goes along the entries of an index while somebody goes along the records of the log, and compares."""

    def __init__(self, index: KeyIndex) -> None:
        self._index = index
        self._generation = index.generation
        self._file = 0
        self._number = 1
        self._is_found = False
        self._has_given_up = False

    def give_up(self) -> None:
        """Compare no further: records are missing in between."""
        self._has_given_up = True

    def follows(self, heads: Sequence[RecordHead]) -> bool:
        """Whether the entries of these records, which go on where the last call ended, are what comes next here."""
        index = self._index
        if index.generation != self._generation or self._has_given_up:
            return True  # built anew, or shortened by retention, meanwhile: the next round compares
        expected = index.places_of(heads)
        if not self._is_found:
            first = self._next(1)
            if not first:
                return True
            expected = [place for place in expected if place[0] >= first[0][1]]
            self._is_found = bool(expected)
        while expected:
            entries = self._next(len(expected))
            if not entries:
                return expected[0][0] > index.taken_to
            file = index.files[self._file]
            begin_ms = file.begin_timestamp_ms
            for number, (entry, place) in enumerate(zip(entries, expected, strict=False), self._number):
                physical_offset, stored_ms = place
                seconds = 0 if number == 1 else min(max((stored_ms - begin_ms) // 1000, 0), 0x7FFFFFFF)
                if entry[1:3] != (physical_offset, seconds) or (number == 1 and begin_ms != stored_ms):
                    return False
                if number == file.next_entry - 1 and file.is_full and file.end_timestamp_ms != stored_ms:
                    return False
            self._number += len(entries)
            expected = expected[len(entries) :]
        return True

    def _next(self, count: int) -> list[tuple[int, int, int, int]]:
        files = self._index.files
        while self._file < len(files) and self._number >= files[self._file].next_entry:
            self._file, self._number = self._file + 1, 1
        return files[self._file].entries(self._number, count) if self._file < len(files) else []


class Unwritten(NamedTuple):
    """What of one file is to be written: `runs` of slots with their positions, then the header."""

    file: IndexFile
    is_dirty: bool
    pages: set[int]
    runs: list[tuple[int, array[int]]]
    header: bytes
    end_timestamp_ms: int


class KeyIndex:
    """All index files of a store, oldest first."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        *,
        slot_count: int,
        entry_count: int,
        index_tags: bool,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._slot_count = slot_count
        self._entry_count = entry_count
        self._index_tags = index_tags
        self._wall_clock_ms = wall_clock_ms
        self._size = index_file_size(slot_count, entry_count)
        self._files: list[IndexFile] = []
        self._retired: list[IndexFile] = []  # full, not yet synced
        self._pending: list[tuple[int, int, int]] = []  # of records taken in, not yet written
        self._taken_to = -1  # physical offset of the last record taken in
        self._begun: tuple[int, int] | None = None  # a record partly in the last file: its offset, how many of its keys
        self.is_attached = True
        """Whether it takes in what dispatch brings; not while it is built again"""
        self.generation = 0
        """How often files were taken away"""
        self._attached = trio.lowlevel.ParkingLot()
        self.safe_timestamp_ms = 0
        """Store time up to which the index was synced [checkpoint: indexMsgTimestamp]"""

    @property
    def files(self) -> Sequence[IndexFile]:
        """The files, oldest first."""
        return self._files

    # ---- building

    def put_heads(self, heads: Sequence[RecordHead]) -> None:
        """Index the keys of records, ascending by physical offset; those already indexed are skipped.

        OSError if it could not be written; the call may be repeated and goes on where it stopped.
        """
        files = self._files
        done = self._taken_to
        hash_of = index_key_hash
        keys = self._pending
        for head in heads:
            physical = head.physical_offset
            if physical <= done or head.sys_flag & SysFlag.TRANSACTION_MASK == SysFlag.TRANSACTION_ROLLBACK:
                continue
            prefix = head.topic + "#"
            stored_ms = head.store_timestamp_ms
            key_count_before = len(keys)
            if head.unique_key:
                keys.append((hash_of(prefix + head.unique_key), physical, stored_ms))
            for key in head.keys:
                keys.append((hash_of(prefix + key), physical, stored_ms))
            if head.tags and self._index_tags:
                keys.append((hash_of(prefix + TAG_INFIX + head.tags), physical, stored_ms))
            if self._begun is not None:
                begun, held_count = self._begun
                if begun == physical:
                    del keys[key_count_before : key_count_before + held_count]
                self._begun = None
            done = physical
        self._taken_to = done
        while self._pending:
            if not files or files[-1].is_full:
                self._add_file()
            self._pending = self._pending[files[-1].put(self._pending) :]

    def places_of(self, heads: Sequence[RecordHead]) -> list[tuple[int, int]]:
        """Return (physical offset, store time in ms) for each key that records are indexed by, in the entries' order.

        Without the keys' hashes, which cost as much as all else: an entry with another hash is in another chain.
        """
        places = []
        for head in heads:
            if head.sys_flag & SysFlag.TRANSACTION_MASK != SysFlag.TRANSACTION_ROLLBACK:
                count = bool(head.unique_key) + len(head.keys) + bool(head.tags and self._index_tags)
                places += [(head.physical_offset, head.store_timestamp_ms)] * count
        return places

    @property
    def taken_to(self) -> int:
        """Physical offset of the last record taken in; -1 if none was."""
        return self._taken_to

    def cursor(self) -> IndexCursor:
        """Return a cursor at the first entry."""
        return IndexCursor(self)

    def trouble_in(self, file: IndexFile) -> str:
        """Return what is wrong with a file in itself, or "". Blocking."""
        if file not in self._files:
            return ""
        if self._disk.size(file.path) != self._size:
            return f"size {self._disk.size(file.path)}, expected {self._size}"
        return file.trouble()

    def detach(self) -> None:
        """Delete all files and take in nothing from dispatch: the index is built again from the log's begin."""
        files = list(self._files)
        self.forget()
        self.is_attached = False
        for file in files:
            self._disk.unlink(file.path)

    def attach(self) -> None:
        """Take in again what dispatch brings, which goes on where the last `put_heads` ended."""
        self.is_attached = True
        self._attached.unpark_all()

    async def wait_attached(self) -> None:
        """Wait until the index is whole."""
        await trio.lowlevel.checkpoint()
        while not self.is_attached:
            await self._attached.park()

    def _add_file(self) -> None:
        previous = self._files[-1] if self._files else None
        name = _file_name(self._wall_clock_ms())
        if previous is not None and name <= previous.path.name:
            # Names tell the order. Local time repeats an hour in autumn, and clocks are set back.
            name = f"{int(previous.path.name) + 1:0{_NAME_DIGITS}d}"
        path = self._directory / name
        self._disk.make_dirs(self._directory)
        file = IndexFile(self._disk.create(path, self._size, allocate=False), self._slot_count, self._entry_count)
        file.slots = array("i", bytes(self._slot_count * INDEX_SLOT_SIZE))
        if previous is not None:
            file.begin_physical_offset = file.end_physical_offset = previous.end_physical_offset
            file.begin_timestamp_ms = file.end_timestamp_ms = previous.end_timestamp_ms
            self._retired.append(previous)
        file.write_header()
        self._files.append(file)

    # ---- keeping

    def flush(self) -> None:
        """Write and sync what changed, and raise `safe_timestamp_ms`. Blocking; OSError if the disk refuses."""
        self.write(self.take_unwritten())

    def take_unwritten(self) -> list[Unwritten]:
        """What `write` has to write, as of this moment. Not blocking; whoever takes it must call `write` with it."""
        return [file.take_unwritten() for file in (*self._retired, *self._files[-1:])]

    def give_back(self, taken: list[Unwritten]) -> None:
        """Have the next `take_unwritten` return it again. Not blocking."""
        for unwritten in taken:
            if unwritten.is_dirty:
                unwritten.file.give_back(unwritten)

    def write(self, taken: list[Unwritten]) -> None:
        """Write and sync it, and raise `safe_timestamp_ms`. Blocking; keys may be put meanwhile, which stay unwritten.

        OSError if the disk refuses: the next `take_unwritten` has it again.
        """
        while taken:
            unwritten = taken[0]
            file = unwritten.file
            try:
                if unwritten.is_dirty:
                    for position, run in unwritten.runs:
                        piece = run[:]
                        if sys.byteorder == "little":
                            piece.byteswap()
                        file.file.pwrite(piece.tobytes(), position)
                    file.file.pwrite(unwritten.header, 0)
                    file.file.sync()
            except OSError:
                self.give_back(taken)
                raise
            taken.pop(0)
            if file in self._files:  # not forgotten meanwhile
                self.safe_timestamp_ms = max(self.safe_timestamp_ms, unwritten.end_timestamp_ms)
            if file in self._retired and not file.is_dirty:
                file.slots = None
                self._retired.remove(file)

    def load(self, safe_timestamp_ms: int | None) -> None:
        """Find the files on the disk. Those that are damaged are deleted, with all that follow them.

        After a crash `safe_timestamp_ms` is the checkpoint's indexMsgTimestamp: newer files weren't synced, and go.
        """
        has_gap = False
        for name in self._disk.list_dir(self._directory):
            if len(name) != _NAME_DIGITS or not name.isdigit():
                continue
            path = self._directory / name
            reason = ""
            size = self._disk.size(path)
            slot_count, entry_count = self._slot_count, self._entry_count
            if size != self._size:
                reason = f"size {size}, expected {self._size}"
            else:
                file = IndexFile(self._disk.open(path), slot_count, entry_count)
                if safe_timestamp_ms is not None and file.end_timestamp_ms > safe_timestamp_ms:
                    reason = "not synced before the crash"
                elif file.next_entry == 1:
                    reason = "empty"
                elif file.next_entry > entry_count:
                    reason = f"{file.next_entry} entries of at most {entry_count}"
                elif self._files and file.begin_physical_offset < self._files[-1].end_physical_offset:
                    reason = "it overlaps the file before"
            if not reason and has_gap:
                reason = "it follows one that was deleted"  # indexing goes on at the end of the last one, so no gaps
            if reason:
                has_gap = True
                logger.warning("index_file_deleted file=%s reason=%s", path, reason)
                self._disk.unlink(path)
                continue
            self._files.append(file)
        if self._files and not self._files[-1].load_slots():
            file = self._files.pop()
            logger.warning("index_file_deleted file=%s reason=slots and entries disagree", file.path)
            self._disk.unlink(file.path)
            if self._files:
                self._files[-1].load_slots()
        self._find_taken()
        self.safe_timestamp_ms = self._files[-1].end_timestamp_ms if self._files else 0

    @property
    def end_physical_offset(self) -> int | None:
        """Physical offset of the last record indexed; None if nothing is."""
        if not self._files or (len(self._files) == 1 and self._files[0].next_entry == 1):
            return None
        return self._files[-1].end_physical_offset

    def truncate(self, physical_offset: int) -> None:
        """Delete files that know records at or beyond a physical offset; dispatch then builds them again."""
        while self._files and self._files[-1].next_entry > 1 and self._files[-1].end_physical_offset >= physical_offset:
            file = self._files.pop()
            logger.warning("index_file_deleted file=%s reason=beyond the end of the log", file.path)
            self._disk.unlink(file.path)
            if self._files:
                self._files[-1].load_slots()
        self._find_taken()

    def _find_taken(self) -> None:
        """Where to go on. The last record of a full file may have had more keys, in a file that is no longer there."""
        end = self.end_physical_offset
        self._taken_to = -1 if end is None else end
        self._begun = None
        if end is not None and self._files[-1].is_full:
            self._taken_to = end - 1
            self._begun = end, self._files[-1].count_last(end)

    def delete_before(self, log_min_offset: int) -> int:
        """Delete files whose records are all gone from the commitlog, never the newest; return how many."""
        deleted = 0
        while len(self._files) > 1 and self._files[0].end_physical_offset < log_min_offset:
            file = self._files.pop(0)
            self.generation += 1
            if file in self._retired:
                self._retired.remove(file)
            self._disk.unlink(file.path)
            deleted += 1
        return deleted

    def forget(self) -> None:
        """Be empty without touching files (somebody moved them)."""
        self.generation += 1
        self._files.clear()
        self._retired.clear()
        self._pending = []
        self._taken_to = -1
        self._begun = None
        self.safe_timestamp_ms = 0

    # ---- asking

    def query(self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return physical offsets of records that may have `key` (in KEYS or as UNIQ_KEY), newest first.

        At most min(count_max, 64), stored within [begin_ms, end_ms] to the second. By hash: the caller must look at the
        records. Blocking: it reads files.
        """
        return self._query(index_key(topic, key), count_max, begin_ms, end_ms)

    def query_tag(self, topic: str, tag: str, count_max: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return physical offsets of records that may have the tag, as `query` does; none if tags aren't indexed."""
        return self._query(index_key(topic, TAG_INFIX + tag), count_max, begin_ms, end_ms)

    def _query(self, text: str, count_max: int, begin_ms: int, end_ms: int) -> list[int]:
        count_max = min(count_max, QUERY_COUNT_MAX)
        key_hash = index_key_hash(text)
        found: list[int] = []
        for file in reversed(list(self._files)):
            if len(found) >= count_max:
                break
            if file.begin_timestamp_ms <= end_ms and file.end_timestamp_ms >= begin_ms:
                found.extend(file.find(key_hash, count_max - len(found), begin_ms, end_ms))
            if file.begin_timestamp_ms < begin_ms:
                break
        return found


def _file_name(now_ms: int) -> str:
    seconds, ms = divmod(now_ms, 1000)
    return time.strftime("%Y%m%d%H%M%S", time.localtime(seconds)) + f"{ms:03d}"
