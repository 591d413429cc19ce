"""One file of the key index, which maps the hashes of keys to the physical offsets of records.

    header | slots: number of the newest entry, or 0 | entries, each with the number of the previous one of its slot

The slot of a key is its hash modulo the number of slots. Entry numbers begin at 1. New entries and slots of the newest
file are kept in memory, and a worker writes them at intervals (`take_unwritten`): writing single slots in random places
would cost one system call each, and a write waits, for tens of milliseconds, while the file system allocates blocks for
it. After a kill, the file therefore has the state of the worker's last write. Keys that arrive while the worker writes
have to wait (key_index.py). Source: IndexFile.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from typing import NamedTuple

from ha.protocol.index_entries import PAGE_SLOTS, Slots, chain_keys, count_used, follow_chains, link_slots
from ha.protocol.record_digest import KEY, KEY_SIZE
from ha.protocol.store_files import (
    INDEX_ENTRY,
    INDEX_ENTRY_SIZE,
    INDEX_HEADER_SIZE,
    INDEX_SLOT,
    INDEX_SLOT_SIZE,
    IndexHeader,
    index_entry_position,
    index_slot_position,
)
from ha.store.files import File, is_unreadable, zeros
from ha.store.mapped_file import RunBlocking, fetch

_RUN_PAGES_MAX = 64
"""Maximum number of pages of the slot table that are copied, byte-swapped and written at once: the whole table is 20 MB
by default."""
_CHECK_ENTRIES = 4096
_PIECE_SLOTS = 65536
"""Maximum number of slots that are byte-swapped, or compared, at once, with the GIL held."""


def blank_slots(count: int) -> Slots:
    """Returns `count` empty slots."""
    return zeros(count * INDEX_SLOT_SIZE).cast("i")


class _NewEntries:
    """Entries from number `first` on that are not in the file yet. Entries are only added; once they are written, the
    file uses a new object."""

    __slots__ = ("first", "raw")

    def __init__(self, first: int) -> None:
        self.first = first
        self.raw = bytearray()


class IndexFile:
    """One file of the key index. Only the newest file gets entries. `slots` is the slot table in memory; None if the
    file is only read."""

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
        self.slots: Slots | None = None
        self._dirty_pages = bytearray(-(-slot_count // PAGE_SLOTS))
        self._new = _NewEntries(self.next_entry)
        self.is_dirty = False

    @property
    def room(self) -> int:
        """Number of keys that the file still has room for."""
        return max(0, self.entry_count_max - self.next_entry)

    @property
    def is_full(self) -> bool:
        """Whether the next key goes to a new file."""
        return self.next_entry >= self.entry_count_max

    def load_slots(self) -> bool:
        """Reads the slot table; returns False if it is too short, the disk can't read it, or a slot has an entry
        number that is not valid according to the header. Raises OSError."""
        slots = blank_slots(self.slot_count)
        for begin in range(0, self.slot_count, _PIECE_SLOTS):
            try:
                piece = self._slots_on_disk(begin)
            except OSError as error:
                if not is_unreadable(error):
                    raise
                return False
            if len(piece) < min(_PIECE_SLOTS, self.slot_count - begin):
                return False
            slots[begin : begin + len(piece)] = memoryview(piece)
        self.slots = slots
        self.used_slots = count_used(slots, self.next_entry)  # not the header's count: damage to it would go unnoticed
        # A crash between writing slots and header leaves slots that point beyond the entries known to be good. The
        # entries of those chains may be lost, so the file is useless.
        return self.used_slots >= 0

    def _slots_on_disk(self, begin: int) -> array[int]:
        """Returns up to _PIECE_SLOTS slots from the file, from slot `begin` on; fewer if the file is too short."""
        count = min(_PIECE_SLOTS, self.slot_count - begin)
        raw = self.file.pread(count * INDEX_SLOT_SIZE, index_slot_position(begin))
        slots = array("i", raw[: len(raw) - len(raw) % INDEX_SLOT_SIZE])
        if sys.byteorder == "little":
            slots.byteswap()
        return slots

    def _entry(self, number: int) -> tuple[int, int, int, int]:
        raw = self._raw(number, 1)
        if len(raw) < INDEX_ENTRY_SIZE:
            return (0, 0, 0, -1)
        key_hash, physical_offset, seconds, previous = INDEX_ENTRY.unpack(raw)
        return key_hash, physical_offset, seconds, previous

    def _raw(self, number: int, count: int) -> bytes:
        """Returns entries from a number on, in the file's format; fewer if the file is too short."""
        new = self._new  # once: a worker may write them meanwhile
        stop = number + count
        kept = b""
        if stop > new.first:
            begin = max(number, new.first)
            kept = bytes(new.raw[(begin - new.first) * INDEX_ENTRY_SIZE : (stop - new.first) * INDEX_ENTRY_SIZE])
            stop = begin
        if number >= stop:
            return kept
        written = self.file.pread((stop - number) * INDEX_ENTRY_SIZE, index_entry_position(self.slot_count, number))
        return written + kept

    def put(self, keys: bytes, new_bytes_max: int) -> int:
        """Adds keys (`record_digest.KEY`), ascending by physical offset, until the file is full; returns how many it
        added.

        Before that, writes the entries that are only in memory if they take `new_bytes_max` bytes or more. Raises
        OSError if that fails; no key is added then.
        """
        assert self.slots is not None
        first = self.next_entry
        count = min(len(keys) // KEY_SIZE, self.entry_count_max - first)
        if not count:
            return 0
        keys = keys[: count * KEY_SIZE]
        if len(self._new.raw) >= new_bytes_max:
            self._write_new()
        entries, free_count = chain_keys(keys, self.slots, first, self.begin_timestamp_ms)
        self._new.raw += entries
        self.next_entry = first + count  # before slots refer to the entries: a worker may be running a query
        link_slots(keys, self.slots, first, self._dirty_pages)
        if first == 1:
            _, self.begin_physical_offset, self.begin_timestamp_ms = KEY.unpack_from(keys)
        _, self.end_physical_offset, self.end_timestamp_ms = KEY.unpack_from(keys, len(keys) - KEY_SIZE)
        self.used_slots += free_count
        self.is_dirty = True
        return count

    def first_from(self, physical_offset: int) -> int:
        """Returns the number of the first entry of a record at or beyond a physical offset; `next_entry` if there is
        none. Blocking. Raises OSError."""
        numbers = range(1, self.next_entry)
        return 1 + bisect_left(numbers, physical_offset, key=lambda number: self._entry(number)[1])

    def truncate(self, number: int, end_timestamp_ms: int) -> None:
        """Removes the entries from `number` (> 1) on. `end_timestamp_ms`: store time of the last remaining entry's
        record. Blocking. Raises OSError if an entry can't be read.

        Only for the newest file, whose slots are in memory; a query may be under way in another worker.
        """
        assert self.slots is not None
        assert 1 < number <= self.next_entry
        stop, self.next_entry = self.next_entry, number
        while stop > number:  # the newest first, so that each slot ends up with its newest remaining entry
            begin = max(number, stop - _CHECK_ENTRIES)
            raw = self._raw(begin, stop - begin)
            for key_hash, _, _, previous in reversed(list(INDEX_ENTRY.iter_unpack(raw))):
                slot = key_hash % self.slot_count
                self.slots[slot] = previous
                self._dirty_pages[slot // PAGE_SLOTS] = 1
                self.used_slots -= previous == 0
            stop = begin
        remaining = _NewEntries(min(number, self._new.first))
        remaining.raw += self._new.raw[: max(0, number - self._new.first) * INDEX_ENTRY_SIZE]
        self._new = remaining
        self.end_physical_offset = self._entry(number - 1)[1]
        self.end_timestamp_ms = end_timestamp_ms
        self.is_dirty = True

    def count_last(self, physical_offset: int) -> int:
        """Returns how many of the newest entries are of the record at `physical_offset`. Raises OSError."""
        number = self.next_entry
        while number > 1 and self._entry(number - 1)[1] == physical_offset:
            number -= 1
        return self.next_entry - number

    def take_unwritten(self) -> Unwritten:
        """Returns the part of the file that has to be written. Not blocking. `put` must not be called before `write` or
        `give_back` has returned."""
        pages: list[int] = []
        if self.is_dirty:
            pages = [page for page, is_dirty in enumerate(self._dirty_pages) if is_dirty]
            self._dirty_pages = bytearray(len(self._dirty_pages))
        taken = Unwritten(self, self.is_dirty, pages, self._header().pack(), self.end_timestamp_ms)
        self.is_dirty = False
        return taken

    def give_back(self, unwritten: Unwritten) -> None:
        """Takes back what `take_unwritten` returned, because it was not written."""
        self.is_dirty = True
        for page in unwritten.pages:
            self._dirty_pages[page] = 1

    def write(self, unwritten: Unwritten) -> None:
        """Writes what `take_unwritten` returned, without syncing it. Blocking. Raises OSError."""
        slots, pages = self.slots, unwritten.pages
        assert slots is not None
        self._write_new()
        at = 0
        while at < len(pages):
            stop = at + 1
            while stop < min(len(pages), at + _RUN_PAGES_MAX) and pages[stop] == pages[stop - 1] + 1:
                stop += 1
            begin = pages[at] * PAGE_SLOTS
            piece = array("i", slots[begin : (pages[stop - 1] + 1) * PAGE_SLOTS].tobytes())
            if sys.byteorder == "little":
                piece.byteswap()
            self.file.pwrite(memoryview(piece).cast("B"), index_slot_position(begin))
            at = stop
        self.file.pwrite(unwritten.header, 0)

    def _write_new(self) -> None:
        """Writes the new entries, which are then read from the file. Raises OSError. Must not run while `put` does."""
        new = self._new
        if new.raw:
            self.file.pwrite(new.raw, index_entry_position(self.slot_count, new.first))
            self._new = _NewEntries(new.first + len(new.raw) // INDEX_ENTRY_SIZE)

    def write_header(self) -> None:
        """Writes the file's header, which defines which entries are valid, without syncing it. Raises OSError."""
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
        """Returns up to `count_max` physical offsets of records that have a key with this hash and were stored within
        [begin_ms, end_ms] (to the second), newest first. Blocking. Raises OSError."""
        slot, slots = key_hash % self.slot_count, self.slots  # once: a worker may drop them meanwhile
        if slots is not None:
            number = slots[slot]
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

    def trouble(self, stop: int, slots: Slots | None) -> str:
        """Checks the chains and order of the entries below number `stop`, the slots, and, if `slots` is None, the
        header. Returns a description of the first inconsistency; "" if there is none.

        Blocking. Raises OSError. `stop` and `slots` are the file's `next_entry` and `slots` at one moment: keys may be
        put meanwhile.
        """
        newest = blank_slots(self.slot_count)  # a dict would take 500 MB for a full file
        used_count = 0
        last_physical = -1
        number = 1
        while number < stop:
            count = min(_CHECK_ENTRIES, stop - number)
            raw = self._raw(number, count)
            if len(raw) < count * INDEX_ENTRY_SIZE:
                return f"it ends within entry {number + len(raw) // INDEX_ENTRY_SIZE}"
            fitting_count, free_count, last_physical = follow_chains(raw, newest, number, last_physical)
            if fitting_count < count:
                return f"entry {number + fitting_count} does not fit those before it"
            used_count += free_count
            number += count
        for begin in range(0, self.slot_count, _PIECE_SLOTS):
            expected = newest[begin : begin + _PIECE_SLOTS]
            found = self._slots_on_disk(begin) if slots is None else slots[begin : begin + _PIECE_SLOTS]
            if len(found) < len(expected):
                return "it ends within its slots"
            if expected != found:
                for slot, (lead, wanted) in enumerate(zip(found, expected, strict=True), begin):
                    if lead != wanted and (slots is None or lead < stop):  # others refer to keys put meanwhile
                        return f"slot {slot} says {lead}, its newest entry is {wanted}"
        if slots is not None:
            return ""  # its header is in memory, and newer than the one in the file
        header = IndexHeader.unpack(self.file.pread(INDEX_HEADER_SIZE, 0))
        if (
            header.index_count != stop
            or header.end_physical_offset != last_physical
            or header.hash_slot_count != used_count
            or header.begin_physical_offset != self.entries(1, 1)[0][1]
            or (header.begin_timestamp_ms, header.end_timestamp_ms) != (self.begin_timestamp_ms, self.end_timestamp_ms)
        ):
            return "its header does not fit its entries"
        return ""

    def entries(self, number: int, count: int) -> list[tuple[int, int, int, int]]:
        """Returns up to `count` entries from a number on: key hash, physical offset, seconds since the file's begin
        timestamp, number of the slot's previous entry. Blocking. Raises OSError."""
        return _unpacked(self._raw(number, min(count, self.next_entry - number)))

    async def fetch_entries(
        self, number: int, count: int, run_blocking: RunBlocking
    ) -> list[tuple[int, int, int, int]]:
        """Like `entries`, but a worker reads what the page cache lacks. Ends before the entries that are not in the
        file yet, unless it begins with one of them. Raises OSError."""
        count = min(count, self.next_entry - number)
        if number >= self._new.first:
            return _unpacked(self._raw(number, count))
        count = min(count, self._new.first - number)
        position = index_entry_position(self.slot_count, number)
        return _unpacked(await fetch(self.file, count * INDEX_ENTRY_SIZE, position, run_blocking))


class Unwritten(NamedTuple):
    """The part of one file that is to be written: its new entries, the slots in `pages` (numbers of pages of PAGE_SLOTS
    slots), then `header`. If not `is_dirty`, nothing has to be written. `end_timestamp_ms`: store time of the newest
    record with keys in the file."""

    file: IndexFile
    is_dirty: bool
    pages: list[int]
    header: bytes
    end_timestamp_ms: int


def _unpacked(raw: bytes | bytearray) -> list[tuple[int, int, int, int]]:
    return list(INDEX_ENTRY.iter_unpack(raw[: len(raw) - len(raw) % INDEX_ENTRY_SIZE]))


assert array("i").itemsize == INDEX_SLOT_SIZE
