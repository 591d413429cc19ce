"""The files of one consume queue, as one array of entries.

The files `consumequeue/TOPIC/QUEUE/NNN` have the same size, and each one's name is the byte offset of its first entry,
so entry n of the queue is at byte 20·n of the array. They have their full size from the start, as RocketMQ expects, and
are sparse. They are written with pwrite, so that a full disk is an error and not a signal. The meaning of entries is
unknown here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from pathlib import Path

from ha.protocol.store_files import ENTRY_FILL, ENTRY_SIZE, segment_name
from ha.store.files import BLOCK_BYTES, Disk, File, data_ranges, read_readable
from ha.store.mapped_file import segment_starts
from ha.store.open_files import OpenFiles

_WHOLE_SUFFIX = ".whole"
"""Suffix of an incomplete copy that is to replace a file that is too short or unreadable. An error may leave the
copy."""


class QueueFiles:
    """The files of one queue. Offsets are queue offsets, counted in entries."""

    def __init__(
        self, disk: Disk, open_files: OpenFiles, directory: Path, file_entries: int, owner: object = None
    ) -> None:
        """`owner`: stored with the path of each unsynced file in `OpenFiles.unsynced`."""
        self._disk = disk
        self._owner = owner
        self._open_files = open_files
        self._directory = directory
        self.file_entries = file_entries
        self._file_size = file_entries * ENTRY_SIZE
        self.starts: list[int] = []  # contiguous
        self._last_path: tuple[int, Path] = (-1, directory)  # start and path of the file asked for last
        self._zeroed: Path | None = None  # the file whose end was zeroed and is not synced yet

    @property
    def end(self) -> int:
        """The offset after the last entry that the files have room for; 0 if there are no files."""
        return self.starts[-1] + self.file_entries if self.starts else 0

    def start_of(self, offset: int) -> int:
        """Returns the start of the file that an offset belongs to."""
        return offset - offset % self.file_entries

    # ---- reading

    def ranges(self, begin: int, stop: int) -> list[tuple[File, int, int]]:
        """Returns the places of the entries in [begin, stop): (file, size, position) for each file, with size and
        position in bytes.

        Ends before a file that a worker has removed because the log was truncated, or its first segments deleted.
        Raises OSError if another file can't be opened.
        """
        found: list[tuple[File, int, int]] = []
        while begin < stop:
            start = self.start_of(begin)
            here = min(stop, start + self.file_entries)
            try:
                found.append((self.file(start), (here - begin) * ENTRY_SIZE, (begin - start) * ENTRY_SIZE))
            except FileNotFoundError:
                break
            begin = here
        return found

    def read(self, begin: int, count: int) -> bytes:
        """Returns `count` entries from `begin` on, all of one file. A file that is too short is read as if zeros
        followed it. Raises OSError."""
        start, size = self.start_of(begin), count * ENTRY_SIZE
        return self.file(start).pread(size, (begin - start) * ENTRY_SIZE).ljust(size, b"\0")

    def last_data(self) -> list[tuple[int, int]]:
        """Returns the byte ranges of the last file that may contain anything but zeros. Call it before reading the
        file, as reading adds ranges.
        """
        return data_ranges(self.file(self.starts[-1]), 0, self._file_size)

    def has_data_from(self, offset: int, data: Sequence[tuple[int, int]]) -> bool:
        """Returns whether the last file has anything but zeros at or after an offset; True if the offset is before that
        file. `data`: the result of `last_data`. Raises OSError."""
        if offset >= self.end:
            return False
        if offset < self.starts[-1]:
            return True
        file = self.file(self.starts[-1])
        at = (offset - self.starts[-1]) * ENTRY_SIZE
        for begin, end in data:
            raw = file.pread(max(0, end - max(begin, at)), max(begin, at))
            if raw.count(0) != len(raw):
                return True
        return False

    def file(self, start: int) -> File:
        """Returns the open file that begins at `start`. Raises OSError if it can't be opened, FileNotFoundError if it
        was removed."""
        return self._open_files.get(self._path(start))

    def _path(self, start: int) -> Path:
        # Cached, because creating a Path and its hash takes longer than writing to the file.
        named, path = self._last_path
        if named != start:
            path = self._directory / segment_name(start * ENTRY_SIZE)
            self._last_path = start, path
        return path

    # ---- writing

    def write(self, offset: int, raw: bytes) -> None:
        """Writes whole entries from `offset` on, all of one file. Raises OSError."""
        start = self.start_of(offset)
        file = self.file(start)
        file.pwrite(raw, (offset - start) * ENTRY_SIZE)
        self._open_files.unsynced[file.path] = self._owner

    def repair(self, offset: int, raw: bytes) -> int:
        """Replaces the entries from `offset` on, all of one file, by those of `raw` if any differ; returns how many
        differed. Completes a file that is too short. Raises OSError."""
        start = self.start_of(offset)
        found = self.file(start).pread(len(raw), (offset - start) * ENTRY_SIZE)
        if found == raw:
            return 0
        if len(found) < len(raw):
            self._complete(start)
        self.write(offset, raw)
        return sum(found[at : at + ENTRY_SIZE] != raw[at : at + ENTRY_SIZE] for at in range(0, len(raw), ENTRY_SIZE))

    def replace_unreadable(self, start: int) -> str:
        """Replaces the file at `start` by a copy if the disk can't read all of it: blocks that it can't read become
        zeros. Returns the disk's error, or "" if the file can be read. Blocking. Raises OSError; the file then stays.

        The block can't be repaired in place: to write a part of a block, the system first reads it.
        """
        file = self.file(start)
        try:
            file.pread(self._file_size, 0)
        except OSError as error:
            self._complete(start)
            return str(error)
        return ""

    def _complete(self, start: int) -> None:
        """Replaces a file that is too short, or that the disk can't read, by a copy that is completed with zeros.
        Raises OSError; the file then stays."""
        path = self._path(start)
        whole = path.with_name(path.name + _WHOLE_SUFFIX)
        if self._disk.exists(whole):
            self._disk.unlink(whole)
        old, new = self.file(start), self._disk.create(whole, self._file_size, allocate=False)
        for at in range(0, self._file_size, BLOCK_BYTES):
            block = read_readable(old, min(BLOCK_BYTES, self._file_size - at), at)
            if block.count(0) != len(block):
                new.pwrite(block, at)
        new.sync()
        self._disk.rename(whole, path)
        self._open_files.forget(path)

    def blank(self, start: int, end: int) -> None:
        """Overwrites the entries before `end` in the file at `start` with blank ones, and syncs the file. Blocking.
        Raises OSError."""
        file = self.file(start)
        file.pwrite(ENTRY_FILL * (end - start), 0)
        file.sync()

    def zero_from(self, offset: int) -> None:
        """Zeroes all entries from an offset on, and removes the files that begin there or later, except for the first
        file. The zeros are not synced (see `take_zeroed`). Raises OSError."""
        for start in reversed(self.starts[1:]):
            if start < offset:
                break
            self.remove(start)
        if self.starts and offset < self.end:
            file = self.file(self.starts[-1])
            at = (offset - self.starts[-1]) * ENTRY_SIZE
            file.zero(at, self._file_size - at)
            self._zeroed = file.path

    def take_zeroed(self) -> Path | None:
        """Returns the path of the file in which entries were zeroed since the last call, None if there is none. The
        caller must sync the file at once.

        Otherwise a new record could be appended at the physical offset in a removed entry. If a power failure then lost
        both the zeros and the entry of the new record, the removed entry would be taken for that of the new record.
        """
        path, self._zeroed = self._zeroed, None
        return path

    # ---- making and removing files

    def find(self) -> bool:
        """Finds the files on the disk; False if files are missing or of a wrong size. Deletes an empty last file, and
        incomplete copies. Raises OSError."""
        names = self._disk.list_dir(self._directory)
        for name in names:
            if name.endswith(_WHOLE_SUFFIX):  # RocketMQ does not start with such a name
                self._disk.unlink(self._directory / name)
        self.starts = [start // ENTRY_SIZE for start in segment_starts(names)]
        starts = self.starts
        sizes = {start: self._disk.size(self._path(start)) for start in starts}
        if starts and sizes[starts[-1]] == 0:
            self._disk.unlink(self._path(starts[-1]))
            starts.pop()
        first = starts[0] if starts else 0
        expected = [first + number * self.file_entries for number in range(len(starts))]
        return starts == expected and all(sizes[start] == self._file_size for start in starts)

    def make(self, start: int, blank_count: int) -> File:
        """Creates a file that begins with `blank_count` blank entries. It belongs to the queue only after `adopt`.

        Its name and these entries are durable on return. Blocking. Raises OSError; a file that is left after the error
        is replaced by the next call.
        """
        self._disk.make_dirs(self._directory)
        path = self._directory / segment_name(start * ENTRY_SIZE)
        if self._disk.exists(path):  # left by an error
            self._disk.unlink(path)
        file = self._disk.create(path, self._file_size, allocate=False)
        if blank_count:
            try:
                file.pwrite(ENTRY_FILL * blank_count, 0)
                file.sync()
            except OSError:
                self._disk.unlink(path)  # so that the next attempt finds no file of the queue either
                raise
        return file

    def adopt(self, start: int, file: File) -> None:
        """Adds a file from `make` to the queue, as its last one."""
        self.starts.append(start)
        self._open_files.add(file)

    def remove(self, start: int) -> None:
        """Deletes the file that begins at `start`. Raises OSError; if the file still exists, it stays in the queue."""
        path = self._path(start)
        self.starts.remove(start)
        self._open_files.forget(path)
        try:
            self._disk.unlink(path)
        except OSError:
            if self._disk.exists(path):
                insort(self.starts, start)
            raise

    def forget(self) -> None:
        """Resets to the state without files; those on the disk are not touched."""
        self.starts = []

    # ---- syncing

    def sync_from(self, offset: int) -> None:
        """Syncs the files that have entries at or beyond an offset. Blocking. Raises OSError."""
        for start in self.starts:
            if start + self.file_entries > offset:
                self.file(start).sync()
