"""The key index: from `topic#key` to the physical offsets of records, in hash files (`index_file.py`).

A file's name is the local time of its creation, its size fixed, its content sparse. Derived: it can be built again from
the commitlog. Only hashes are kept, so a query may return records with another key. Source: IndexService.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import trio

from ha.protocol.record import RecordHead
from ha.protocol.record_digest import KEY, KEY_SIZE, TAG_INFIX, index_key_hashes
from ha.protocol.store_files import index_file_size, index_key, index_key_hash
from ha.store.files import Disk
from ha.store.index_file import IndexFile, Unwritten, blank_slots
from ha.store.mapped_file import RunBlocking

logger = logging.getLogger(__name__)

_NAME_DIGITS = 17
_NEW_BYTES_MAX = 128 << 10
"""So much of new entries is kept for the worker that writes them; beyond it whoever brings them does, and meets a full
disk. It would wait, too, if it did so while what was written before gets its place on the disk."""
_NEW_BYTES_MAX_MEANWHILE = 16 << 20
"""So much while a worker is at it, so that it doesn't"""
QUERY_COUNT_MAX = 64


class IndexCursor:
    """Goes along the entries of an index while somebody goes along the records of the log, and compares."""

    def __init__(self, index: KeyIndex) -> None:
        self._index = index
        self._generation = index.generation
        self._file = 0
        self._number = 1
        self._is_found = False
        self._began_at: int | None = None  # physical offset of the first record that it was shown
        self._has_given_up = False

    def give_up(self) -> None:
        """Compare no further: records are missing in between."""
        self._has_given_up = True

    def leap(self) -> None:
        """Look anew where the next records are: those in between are deleted."""
        self._is_found = False

    async def follows(self, heads: Sequence[RecordHead], run_blocking: RunBlocking) -> bool:
        """Whether the entries of these records, which go on where the last call ended, are what comes next here."""
        index = self._index
        if index.generation != self._generation or self._has_given_up:
            return True  # built anew, or shortened by retention, meanwhile: the next round compares
        expected = index.keys_of(heads)
        if self._began_at is None and heads:
            self._began_at = heads[0].physical_offset
        if expected and not self._is_found:
            await self._seek(expected[0][1], run_blocking)
            self._is_found = True
        while expected:
            entries = await self._next(len(expected), run_blocking)
            if index.generation != self._generation:
                return True  # as above
            if not entries and index.has_waiting:
                self.give_up()  # they are among what waits to be written: the next round compares
                return True
            if not entries:
                return False  # dispatched, so it was to be here
            file = index.files[self._file]
            begin_ms = file.begin_timestamp_ms
            for number, (entry, key) in enumerate(zip(entries, expected, strict=False), self._number):
                key_hash, physical_offset, stored_ms = key
                if number > 1:
                    seconds = min(max((stored_ms - begin_ms) // 1000, 0), 0x7FFFFFFF)
                else:
                    seconds = self._first_seconds(stored_ms, entry[2])
                if entry[:3] != (key_hash, physical_offset, seconds) or (number == 1 and begin_ms != stored_ms):
                    return False
                if number == file.next_entry - 1 and file.is_full and file.end_timestamp_ms != stored_ms:
                    return False
            self._number += len(entries)
            expected = expected[len(entries) :]
        return True

    async def _seek(self, physical_offset: int, run_blocking: RunBlocking) -> None:
        """Go to the first entry of a record at or beyond an offset: retention deletes whole files."""
        files = self._index.files
        while self._file < len(files) and files[self._file].end_physical_offset < physical_offset:
            self._file += 1
        if self._file < len(files):
            self._number = await run_blocking(files[self._file].first_from, physical_offset)

    def _first_seconds(self, stored_ms: int, found: int) -> int:
        """What the first entry of the present file must say: the seconds since the end of the file before.

        Without one it is 0, unless retention may have deleted it; then what was `found` can't be told from it.
        """
        if self._file == 0:
            return found if self._began_at else 0
        previous_ms = self._index.files[self._file - 1].end_timestamp_ms
        return min(max((stored_ms - previous_ms) // 1000, 0), 0x7FFFFFFF)

    async def _next(self, count: int, run_blocking: RunBlocking) -> list[tuple[int, int, int, int]]:
        files = self._index.files
        while self._file < len(files) and self._number >= files[self._file].next_entry:
            self._file, self._number = self._file + 1, 1
        if self._file == len(files):
            return []
        return await files[self._file].fetch_entries(self._number, count, run_blocking)


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
        self.has_tags = index_tags
        """Whether records are indexed by their tags, too"""
        self._wall_clock_ms = wall_clock_ms
        self._size = index_file_size(slot_count, entry_count)
        self._files: list[IndexFile] = []
        self._retired: list[IndexFile] = []  # full, not yet synced
        self._spare: IndexFile | None = None  # the next one, made beforehand
        self._pending: list[bytes] = []  # keys of records taken in, not yet written
        self._is_frozen = False  # a worker is writing entries and slots
        self._is_saving = False  # or waits until they are on the disk
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

    @property
    def has_waiting(self) -> bool:
        """Whether keys were put that are in no file yet."""
        return bool(self._pending)

    # ---- building

    def put_heads(self, heads: Sequence[RecordHead]) -> None:
        """Index the keys of records, ascending by physical offset; see `put`."""
        if heads:
            keys = b"".join([KEY.pack(*key) for key in self.keys_of(heads)])
            self.put(keys, heads[0].physical_offset, heads[-1].physical_offset)

    def put(self, keys: bytes, first_offset: int, last_offset: int) -> None:
        """Index `keys` (`record_digest.KEY`), all that the records from one physical offset to another have.

        Records already indexed are skipped. OSError if it could not be written; the call may be repeated and goes on
        where it stopped.
        """
        done = self._taken_to
        if first_offset <= done:
            known = range(len(keys) // KEY_SIZE)
            keys = keys[KEY_SIZE * bisect_right(known, done, key=lambda number: _physical_offset(keys, number)) :]
        if last_offset > done:
            if self._begun is not None:
                begun, held_count = self._begun
                if keys and _physical_offset(keys, 0) == begun:
                    keys = keys[KEY_SIZE * held_count :]
                self._begun = None
            self._pending.append(keys)
            self._taken_to = last_offset
        self.write_pending()

    def write_pending(self) -> None:
        """Write the keys that waited, unless they still have to. OSError."""
        if self._is_frozen:
            return
        files, pending = self._files, self._pending
        while pending:
            keys = pending[0]
            if keys:
                if not files or files[-1].is_full:
                    self._add_file()
                new_bytes_max = _NEW_BYTES_MAX_MEANWHILE if self._is_saving else _NEW_BYTES_MAX
                taken = files[-1].put(keys, new_bytes_max) * KEY_SIZE
                if taken < len(keys):
                    pending[0] = keys[taken:]
                    continue
            pending.pop(0)

    def keys_of(self, heads: Sequence[RecordHead]) -> list[tuple[int, int, int]]:
        """Return (hash, physical offset, store time in ms) of each key that records are indexed by, as entries go."""
        return [
            (key_hash, head.physical_offset, head.store_timestamp_ms)
            for head in heads
            for key_hash in index_key_hashes(head, with_tags=self.has_tags)
        ]

    def cursor(self) -> IndexCursor:
        """Return a cursor at the first entry."""
        return IndexCursor(self)

    def trouble_in(self, file: IndexFile) -> str:
        """Return what is wrong with a file in itself, or "". Blocking."""
        if file not in self._files:
            return ""
        try:
            size = self._disk.size(file.path)
        except FileNotFoundError:  # retention, or a cut of the log, takes it away just now
            return ""
        return file.trouble() if size == self._size else f"size {size}, expected {self._size}"

    def detach(self) -> list[IndexFile]:
        """Have no files and take in nothing from dispatch: the index is built again from the log's begin.

        Returns the files there were, to be deleted before anything is put.
        """
        files = [*self._files, *([] if self._spare is None else [self._spare])]
        self.forget()
        self.is_attached = False
        return files

    def delete(self, files: list[IndexFile]) -> None:
        """Delete files that it no longer has. Blocking."""
        for file in files:
            with suppress(FileNotFoundError):  # set aside with all others
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

    def lacks_file(self, key_count: int, last_offset: int) -> bool:
        """Whether `put` of so many keys, of records up to a physical offset, would have to make a file."""
        if self._spare is not None or not key_count or last_offset <= self._taken_to:
            return False
        waiting_count = sum(map(len, self._pending)) // KEY_SIZE
        return not self._files or self._files[-1].room < waiting_count + key_count

    def make_spare(self) -> None:
        """Make the file that comes next. Blocking: its name has to reach the disk, and its slots take 20 MB."""
        self._spare = self._make_file()

    def drop_spare(self) -> None:
        """Take it away again. Blocking."""
        spare, self._spare = self._spare, None
        if spare is not None:
            self.delete([spare])

    def _make_file(self) -> IndexFile:
        previous = self._files[-1] if self._files else None
        name = _file_name(self._wall_clock_ms())
        if previous is not None and name <= previous.path.name:
            # Names tell the order. Local time repeats an hour in autumn, and clocks are set back.
            name = f"{int(previous.path.name) + 1:0{_NAME_DIGITS}d}"
        path = self._directory / name
        self._disk.make_dirs(self._directory)
        file = IndexFile(self._disk.create(path, self._size, allocate=False), self._slot_count, self._entry_count)
        file.slots = blank_slots(self._slot_count)
        return file

    def _add_file(self) -> None:
        previous = self._files[-1] if self._files else None
        file = self._make_file() if self._spare is None else self._spare
        self._spare = None
        if previous is not None:
            file.begin_physical_offset = file.end_physical_offset = previous.end_physical_offset
            file.begin_timestamp_ms = file.end_timestamp_ms = previous.end_timestamp_ms
            self._retired.append(previous)
        file.write_header()
        self._files.append(file)

    # ---- keeping

    def take_unwritten(self) -> list[Unwritten]:
        """What has to be written as of this moment, for `write`, and then for `give_back`. Not blocking.

        Keys that are put meanwhile wait until entries and slots are written.
        """
        self._is_frozen = self._is_saving = True
        return [file.take_unwritten() for file in (*self._retired, *self._files[-1:])]

    def give_back(self, taken: list[Unwritten]) -> None:
        """Have the next `take_unwritten` return it again, if there is anything. Not blocking."""
        self._is_frozen = self._is_saving = False
        for unwritten in taken:
            if unwritten.is_dirty:
                unwritten.file.give_back(unwritten)

    def write(self, taken: list[Unwritten]) -> None:
        """Write and sync it, and raise `safe_timestamp_ms`. Blocking; keys may be put meanwhile.

        What is written is taken out of the list; what is left, because the disk refuses (OSError), is to be given back.
        """
        for unwritten in taken:
            if unwritten.is_dirty:
                unwritten.file.write(unwritten)
        self._is_frozen = False
        while taken:
            unwritten = taken[0]
            file = unwritten.file
            if unwritten.is_dirty:
                file.file.sync()
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

    def cut(self, physical_offset: int, store_ms_of: Callable[[int], int]) -> int | None:
        """Forget the keys of records at or beyond a physical offset, in the files too once `write` has been called.

        Blocking, while nothing is put. `store_ms_of` a record at a physical offset is its store time, 0 if it can't be
        read: then its file goes as a whole. Returns from which physical offset on records have to be put again, None
        if all that are left are here.
        """
        self.generation += 1
        self._pending = []
        is_whole = True
        while self._files and self._files[-1].next_entry > 1 and self._files[-1].end_physical_offset >= physical_offset:
            file = self._files[-1]
            if file in self._retired:
                self._retired.remove(file)
            number = file.first_from(physical_offset)
            if number > 1 and (file.slots is not None or file.load_slots()):
                stored_ms = store_ms_of(file.entries(number - 1, 1)[0][1])
                if stored_ms:
                    file.cut(number, stored_ms)
                    break
            is_whole = is_whole and number == 1
            logger.warning("index_file_deleted file=%s reason=beyond the end of the log", file.path)
            self._files.pop()
            self._disk.unlink(file.path)
        if self._files and self._files[-1] in self._retired:
            self._retired.remove(self._files[-1])
        self._find_taken()
        end = self.end_physical_offset
        if self._files:
            self.safe_timestamp_ms = min(self.safe_timestamp_ms, self._files[-1].end_timestamp_ms)
        if is_whole:
            return None
        return 0 if end is None else end

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
        self._spare = None
        self._is_frozen = False
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
        for keys in reversed(list(self._pending)):
            for pending_hash, physical_offset, store_ms in reversed(list(KEY.iter_unpack(keys))):
                if pending_hash == key_hash and begin_ms <= store_ms <= end_ms and len(found) < count_max:
                    found.append(physical_offset)
        for file in reversed(list(self._files)):
            if len(found) >= count_max:
                break
            if file.begin_timestamp_ms <= end_ms and file.end_timestamp_ms >= begin_ms:
                older = file.find(key_hash, count_max - len(found), begin_ms, end_ms)
                found += [each for each in older if each not in found]  # what waited may have been written just now
            if file.begin_timestamp_ms < begin_ms:
                break
        return found


def _physical_offset(keys: bytes, number: int) -> int:
    """The physical offset of one of `keys`."""
    offset: int = KEY.unpack_from(keys, number * KEY_SIZE)[1]
    return offset


def _file_name(now_ms: int) -> str:
    seconds, ms = divmod(now_ms, 1000)
    return time.strftime("%Y%m%d%H%M%S", time.localtime(seconds)) + f"{ms:03d}"
