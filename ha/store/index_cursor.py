"""Compares the entries of the key index with the records of the log, for the scrub."""

from __future__ import annotations

from collections.abc import Sequence

from ha.protocol.record import RecordHead
from ha.store.key_index import KeyIndex
from ha.store.mapped_file import RunBlocking


class IndexCursor:
    """A position in an index that starts at its first entry and follows the records of the log."""

    def __init__(self, index: KeyIndex) -> None:
        self._index = index
        self._generation = index.generation
        self._file = 0
        self._number = 1
        self._is_positioned = False
        self._began_at: int | None = None  # physical offset of the first record compared
        self._is_closed = False

    def close(self) -> None:
        """Ends the comparison, because the next records do not follow the last ones directly."""
        self._is_closed = True

    def skip(self) -> None:
        """Makes the next comparison search for the entries of its records, because the records in between were
        deleted."""
        self._is_positioned = False

    async def follows(self, heads: Sequence[RecordHead], run_blocking: RunBlocking) -> bool:
        """Returns whether the next entries are those of `heads`, the records that follow those of the last call.

        Also True if this can't be checked in this round: the comparison has ended, entries were removed, or the keys
        are not in a file yet. Raises OSError if an index file can't be read.
        """
        index = self._index
        if index.generation != self._generation or self._is_closed:
            return True  # rebuilt, or files deleted by retention, meanwhile: the next round compares
        expected = index.keys_of(heads)
        if self._began_at is None and heads:
            self._began_at = heads[0].physical_offset
        if expected and not self._is_positioned:
            await self._seek(expected[0][1], run_blocking)
            self._is_positioned = True
        while expected:
            entries = await self._next(len(expected), run_blocking)
            if index.generation != self._generation:
                return True  # as above
            if not entries and index.has_pending:
                self.close()  # they are among the pending keys: the next round compares
                return True
            if not entries:
                return False  # the records are dispatched, so their entries must be here
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
        """Moves to the first entry of a record at or beyond a physical offset. Earlier entries can remain, because
        retention deletes whole files only."""
        files = self._index.files
        while self._file < len(files) and files[self._file].end_physical_offset < physical_offset:
            self._file += 1
        if self._file < len(files):
            self._number = await run_blocking(files[self._file].first_from, physical_offset)

    def _first_seconds(self, stored_ms: int, found: int) -> int:
        """Returns the time difference in seconds that the first entry of the current file must contain: from the
        previous file's end timestamp to `stored_ms`; 0 without a previous file.

        If retention may have deleted the previous file, the value can't be checked: returns `found`, the entry's own.
        """
        if self._file == 0:
            return found if self._began_at else 0
        previous_ms = self._index.files[self._file - 1].end_timestamp_ms
        return min(max((stored_ms - previous_ms) // 1000, 0), 0x7FFFFFFF)

    async def _next(self, count: int, run_blocking: RunBlocking) -> list[tuple[int, int, int, int]]:
        files = self._index.files
        while self._file < len(files) and self._number >= files[self._file].next_entry:
            self._file, self._number = self._file + 1, 1
        if self._file >= len(files):  # beyond it if files were removed meanwhile
            return []
        return await files[self._file].fetch_entries(self._number, count, run_blocking)
