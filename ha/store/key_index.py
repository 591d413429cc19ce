"""The key index, which maps `topic#key` to the physical offsets of records, in hash files (`index_file.py`).

A file is named after the local time of its creation, has a fixed size and is sparse. The index is derived: it can be
rebuilt from the commitlog. It stores only hashes, so a query may return records with another key. Source: IndexService.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

import trio

from ha.protocol.index_entries import Slots
from ha.protocol.record import RecordHead
from ha.protocol.record_digest import KEY, KEY_SIZE, index_key_hashes
from ha.protocol.store_files import index_file_size, index_key, index_key_hash
from ha.store.files import Disk, is_unreadable
from ha.store.index_file import IndexFile, Unwritten, blank_slots

logger = logging.getLogger(__name__)

_NAME_DIGITS = 17
_NEW_BYTES_MAX = 128 << 10
"""Maximum size in bytes of new entries that are kept in memory until a worker writes them. Above it, `put` writes them
itself, and so finds out that the disk is full.
"""
_NEW_BYTES_MAX_SAVING = 16 << 20
"""Replaces _NEW_BYTES_MAX while a worker saves, because `put` would have to wait until the file system has allocated
the worker's blocks.
"""
QUERY_COUNT_MAX = 64
_BEYOND = "beyond the end of the log"


class _Saving(Enum):
    """State of the worker that saves the newest entries.

    IDLE ─ take_unwritten ─▶ WRITING ─▶ SYNCING ─ give_back ─▶ IDLE
    """

    IDLE = "idle"
    WRITING = "writing"
    """Entries and slots are being written; new keys are kept in memory meanwhile"""
    SYNCING = "syncing"


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
        """Whether records are also indexed by their tags"""
        self._wall_clock_ms = wall_clock_ms
        self._size = index_file_size(slot_count, entry_count)
        self._files: list[IndexFile] = []
        self._retired: list[IndexFile] = []  # full, not yet synced
        self._spare: IndexFile | None = None  # the next one, made in advance
        self._spare_lock = threading.Lock()  # dispatch and a rebuild may make, add or delete it at the same time
        self._pending: list[bytes] = []  # keys of indexed records that are not in a file yet
        self._saving = _Saving.IDLE
        self._indexed_to = -1  # physical offset of the last record
        self._partial: tuple[int, int] | None = None  # record partly in the last file: offset, key count
        self.is_attached = True
        """Whether dispatch adds keys to the index; False while the index is being rebuilt"""
        self.generation = 0
        """Number of times that files or entries were removed; positions noted before are then no longer valid"""
        self._attached = trio.lowlevel.ParkingLot()
        self.safe_timestamp_ms = 0
        """Store time up to which the index was synced [checkpoint: indexMsgTimestamp]"""

    @property
    def files(self) -> Sequence[IndexFile]:
        """The files, oldest first."""
        return self._files

    @property
    def has_pending(self) -> bool:
        """Whether some of the keys passed to `put` are not in a file yet."""
        return bool(self._pending)

    @property
    def is_unsynced(self) -> bool:
        """Whether a file has keys that are not synced yet."""
        return any(file.is_dirty for file in (*self._retired, *self._files[-1:]))

    # ---- building

    def put_heads(self, heads: Sequence[RecordHead]) -> None:
        """Indexes the keys of records, ascending by physical offset; see `put`."""
        if heads:
            keys = b"".join([KEY.pack(*key) for key in self.keys_of(heads)])
            self.put(keys, heads[0].physical_offset, heads[-1].physical_offset)

    def put(self, keys: bytes, first_offset: int, last_offset: int) -> None:
        """Indexes `keys` (`record_digest.KEY`): all keys of consecutive records, the first and last of which begin at
        the physical offsets `first_offset` and `last_offset`.

        Skips records already indexed. Raises OSError if the keys could not be written; a repeated call continues where
        this one stopped.
        """
        done = self._indexed_to
        if first_offset <= done:
            known = range(len(keys) // KEY_SIZE)
            keys = keys[KEY_SIZE * bisect_right(known, done, key=lambda number: _physical_offset(keys, number)) :]
        if last_offset > done:
            if self._partial is not None:
                begun, held_count = self._partial
                if keys and _physical_offset(keys, 0) == begun:
                    keys = keys[KEY_SIZE * held_count :]
                self._partial = None
            self._pending.append(keys)
            self._indexed_to = last_offset
        self.write_pending()

    def write_pending(self) -> None:
        """Adds the pending keys to files, unless a worker is writing entries and slots. Raises OSError."""
        if self._saving is _Saving.WRITING:
            return
        files, pending = self._files, self._pending
        while pending:
            keys = pending[0]
            if keys:
                if not files or files[-1].is_full:
                    self._add_file()
                new_bytes_max = _NEW_BYTES_MAX if self._saving is _Saving.IDLE else _NEW_BYTES_MAX_SAVING
                taken = files[-1].put(keys, new_bytes_max) * KEY_SIZE
                if taken < len(keys):
                    pending[0] = keys[taken:]
                    continue
            pending.pop(0)

    def keys_of(self, heads: Sequence[RecordHead]) -> list[tuple[int, int, int]]:
        """Returns (hash, physical offset, store time in ms) of each key of records, in the order of entries."""
        return [
            (key_hash, head.physical_offset, head.store_timestamp_ms)
            for head in heads
            for key_hash in index_key_hashes(head, with_tags=self.has_tags)
        ]

    def trouble_in(self, file: IndexFile, stop: int, slots: Slots | None) -> str:
        """Returns a description of the first inconsistency within a file; an empty string if there is none, or the file
        was removed. Blocking. Raises OSError.

        `stop` and `slots`: see `IndexFile.trouble`.
        """
        if file not in self._files:
            return ""
        try:
            size = self._disk.size(file.path)
        except FileNotFoundError:  # retention or a truncation of the log is removing it
            return ""
        return file.trouble(stop, slots) if size == self._size else f"size {size}, expected {self._size}"

    def detach(self) -> list[IndexFile]:
        """Drops all files and stops dispatch from adding to the index, to rebuild it from the log's first record.

        Returns the files, to be deleted before anything is put.
        """
        files = [*self._files, *([] if self._spare is None else [self._spare])]
        self.forget()
        self.is_attached = False
        return files

    def delete(self, files: list[IndexFile]) -> None:
        """Deletes `files` from the disk, the last one first, and removes them from that list. Blocking. Raises OSError;
        those that are not deleted then stay in the list."""
        while files:  # the last one first, so that a crash in between leaves no gap
            with suppress(FileNotFoundError):  # set aside with the others, or deleted by hand
                self._disk.unlink(files[-1].path)
            files.pop()

    def attach(self) -> None:
        """Makes dispatch add to the index again, from where the last `put_heads` ended."""
        self.is_attached = True
        self._attached.unpark_all()

    async def wait_attached(self) -> None:
        """Waits until the index is attached, and so complete. Always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while not self.is_attached:
            await self._attached.park()

    def lacks_file(self, key_count: int, last_offset: int) -> bool:
        """Returns whether `put` of `key_count` keys, of records up to physical offset `last_offset`, would have to
        create a file."""
        if self._spare is not None or not key_count or last_offset <= self._indexed_to:
            return False
        pending_count = sum(map(len, self._pending)) // KEY_SIZE
        return not self._files or self._files[-1].room < pending_count + key_count

    def make_spare(self) -> None:
        """Creates the next file in advance, unless there is one. Blocking, because its name is synced and 20 MB of
        slots are allocated (by default). Raises OSError."""
        with self._spare_lock:
            if self._spare is None:
                self._spare = self._make_file()

    def drop_spare(self) -> None:
        """Deletes the file made in advance. Blocking. Raises OSError; if the file still exists then, it is used as the
        next one."""
        with self._spare_lock:
            spare = self._spare
            if spare is not None:
                try:
                    self.delete([spare])
                finally:
                    if not self._disk.exists(spare.path):
                        self._spare = None

    def _make_file(self) -> IndexFile:
        previous = self._files[-1] if self._files else None
        name = _file_name(self._wall_clock_ms())
        if previous is not None and name <= previous.path.name:
            # Names define the order, but local time repeats an hour in autumn, and a clock may be set back.
            name = f"{int(previous.path.name) + 1:0{_NAME_DIGITS}d}"
        path = self._directory / name
        self._disk.make_dirs(self._directory)
        file = IndexFile(self._disk.create(path, self._size, allocate=False), self._slot_count, self._entry_count)
        file.slots = blank_slots(self._slot_count)
        return file

    def _add_file(self) -> None:
        previous = self._files[-1] if self._files else None
        with self._spare_lock:
            file = self._spare = self._spare or self._make_file()
            if previous is not None:
                file.begin_physical_offset = file.end_physical_offset = previous.end_physical_offset
                file.begin_timestamp_ms = file.end_timestamp_ms = previous.end_timestamp_ms
            file.write_header()
            self._spare = None  # not before: if the disk is full, the next call uses it
        if previous is not None:
            self._retired.append(previous)
        self._files.append(file)

    # ---- saving

    def take_unwritten(self) -> list[Unwritten]:
        """Returns what has to be written now, for `write` and then `give_back`. Not blocking.

        Keys that are put meanwhile wait until entries and slots are written.
        """
        self._saving = _Saving.WRITING
        return [file.take_unwritten() for file in (*self._retired, *self._files[-1:])]

    def give_back(self, taken: list[Unwritten]) -> None:
        """Ends a save; the next `take_unwritten` returns what was not written. Not blocking."""
        self._saving = _Saving.IDLE
        for unwritten in taken:
            if unwritten.is_dirty:
                unwritten.file.give_back(unwritten)

    def write(self, taken: list[Unwritten]) -> None:
        """Writes and syncs what `take_unwritten` returned, and raises `safe_timestamp_ms`. Blocking; keys may be put
        meanwhile.

        Removes each part that is synced from `taken`; if the disk refuses (OSError), pass the rest to `give_back`.
        """
        for unwritten in taken:
            if unwritten.is_dirty:
                unwritten.file.write(unwritten)
        self._saving = _Saving.SYNCING
        while taken:
            unwritten = taken[0]
            file = unwritten.file
            if unwritten.is_dirty:
                file.file.sync()
            taken.pop(0)
            if file in self._files:  # not dropped meanwhile
                self.safe_timestamp_ms = max(self.safe_timestamp_ms, unwritten.end_timestamp_ms)
            if file in self._retired and not file.is_dirty:
                file.slots = None
                self._retired.remove(file)

    # ---- loading

    def load(self, safe_timestamp_ms: int | None) -> None:
        """Finds the files on the disk. Deletes damaged ones and all that follow them. Blocking. Raises OSError.

        `safe_timestamp_ms`: the checkpoint's indexMsgTimestamp after a crash, None after a clean stop. Files with store
        times after it may not have been synced, and are deleted.
        """
        bad: list[tuple[Path, str]] = []
        for name in self._disk.list_dir(self._directory):
            if len(name) != _NAME_DIGITS or not name.isdigit():
                continue
            path = self._directory / name
            reason = ""
            size = self._disk.size(path)
            if size != self._size:
                reason = f"size {size}, expected {self._size}"
            else:
                try:
                    file = IndexFile(self._disk.open(path), self._slot_count, self._entry_count)
                except OSError as error:
                    if not is_unreadable(error):
                        raise
                    bad.append((path, str(error)))
                    continue
                if safe_timestamp_ms is not None and file.end_timestamp_ms > safe_timestamp_ms:
                    reason = "not synced before the crash"
                elif file.next_entry == 1:
                    reason = "empty"
                elif file.next_entry > self._entry_count:
                    reason = f"{file.next_entry} entries of at most {self._entry_count}"
                elif self._files and file.begin_physical_offset < self._files[-1].end_physical_offset:
                    reason = "overlaps the previous file"
            if not reason and bad:
                reason = "follows a deleted file"  # indexing continues at the end of the last one, so no gaps
            if reason:
                bad.append((path, reason))
                continue
            self._files.append(file)
        for path, reason in reversed(bad):  # so that a crash in between leaves no gap
            self._unlink(path, reason)
        self._load_newest()
        self._set_indexed_to()
        self.safe_timestamp_ms = self._files[-1].end_timestamp_ms if self._files else 0

    def _unlink(self, path: Path, reason: str) -> None:
        logger.warning("index.file_deleted file=%s reason=%r", path, reason)
        self._disk.unlink(path)

    def _load_newest(self) -> None:
        """Reads the slots of the newest file. If they don't fit its entries, deletes the file and continues with the
        one before it. Raises OSError."""
        while self._files and not self._files[-1].load_slots():
            self._unlink(self._files.pop().path, "its slots are damaged")

    @property
    def end_physical_offset(self) -> int | None:
        """Physical offset of the last record that has keys in the files; None if there is none."""
        if not self._files or (len(self._files) == 1 and self._files[0].next_entry == 1):
            return None
        return self._files[-1].end_physical_offset

    def drop_files_beyond(self, physical_offset: int) -> None:
        """Deletes files with keys of records at or beyond a physical offset; dispatch then rebuilds them. Blocking.
        Raises OSError."""
        while self._reaches(physical_offset):
            self._unlink(self._files.pop().path, _BEYOND)
            self._load_newest()
        self._set_indexed_to()

    def _reaches(self, physical_offset: int) -> bool:
        end = self.end_physical_offset
        return end is not None and self._files[-1].next_entry > 1 and end >= physical_offset

    # ---- removing entries

    def truncate(self, physical_offset: int, store_ms_of: Callable[[int], int]) -> int | None:
        """Removes the keys of records at or beyond a physical offset. A file that keeps other keys changes on the disk
        only with the next `write`.

        Blocking; nothing may be put meanwhile. Raises OSError. `store_ms_of` returns the store time of the record at a
        physical offset, 0 if it can't be read: then its whole file is deleted. Returns the physical offset from which
        records have to be put again, None if none have to.
        """
        self.generation += 1
        is_whole = not self._pending  # some may be of earlier records
        self._pending = []
        while self._reaches(physical_offset):
            file = self._files[-1]
            if file in self._retired:
                self._retired.remove(file)
            number = file.first_from(physical_offset)
            if number > 1 and (file.slots is not None or file.load_slots()):
                stored_ms = store_ms_of(file.entries(number - 1, 1)[0][1])
                if stored_ms:
                    file.truncate(number, stored_ms)
                    break
            is_whole = is_whole and number == 1
            self._unlink(self._files.pop().path, _BEYOND)
        if self._files and self._files[-1] in self._retired:
            self._retired.remove(self._files[-1])
        self._set_indexed_to()
        end = self.end_physical_offset
        if self._files:
            self.safe_timestamp_ms = min(self.safe_timestamp_ms, self._files[-1].end_timestamp_ms)
        if is_whole:
            return None
        return 0 if end is None else end

    def _set_indexed_to(self) -> None:
        """Sets the position from which records are indexed. Raises OSError.

        If the last file is full, the last record in it is indexed again, because the rest of that record's keys may
        have been in a file that was deleted.
        """
        end = self.end_physical_offset
        self._indexed_to = -1 if end is None else end
        self._partial = None
        if end is not None and self._files[-1].is_full:
            self._indexed_to = end - 1
            self._partial = end, self._files[-1].count_last(end)

    def delete_before(self, log_min_offset: int) -> int:
        """Deletes files whose records are all deleted from the commitlog, never the newest; returns how many. Blocking.
        Raises OSError."""
        deleted = 0
        while len(self._files) > 1 and self._files[0].end_physical_offset < log_min_offset:
            file = self._files[0]
            self.delete([file])  # first: if the disk refuses, the next call deletes it
            self.generation += 1
            self._files.pop(0)
            if file in self._retired:
                self._retired.remove(file)
            deleted += 1
        return deleted

    def forget(self) -> None:
        """Resets the index without touching files, which were moved."""
        self.generation += 1
        self._spare = None
        if self._saving is _Saving.WRITING:
            self._saving = _Saving.SYNCING  # keys need not wait for files that are gone
        self._files.clear()
        self._retired.clear()
        self._pending = []
        self._indexed_to = -1
        self._partial = None
        self.safe_timestamp_ms = 0

    # ---- queries

    def query(self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int) -> list[int]:
        """Returns physical offsets of records that may have `key`, newest first. A key is one of a message's KEYS, its
        UNIQ_KEY, or TAG_INFIX followed by its tag.

        At most min(count_max, QUERY_COUNT_MAX), stored within [begin_ms, end_ms] to the second. Only hashes are
        compared, so the caller must check the records. Blocking. Raises OSError.
        """
        count_max = min(count_max, QUERY_COUNT_MAX)
        key_hash = index_key_hash(index_key(topic, key))
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
                found += [each for each in older if each not in found]  # pending keys may just have been written
            if file.begin_timestamp_ms < begin_ms:
                break
        return found


def _physical_offset(keys: bytes, number: int) -> int:
    """Returns the physical offset in one of `keys`."""
    offset: int = KEY.unpack_from(keys, number * KEY_SIZE)[1]
    return offset


def _file_name(now_ms: int) -> str:
    seconds, ms = divmod(now_ms, 1000)
    return time.strftime("%Y%m%d%H%M%S", time.localtime(seconds)) + f"{ms:03d}"
