"""The checksum files of a store (`ha.protocol.checksum_file`): one per segment, read as a whole, written in groups.

An entry is written only for bytes that are flushed, so it also proves that they were: `known_end` is a lower bound of
the log's end after any crash. Entries are not synced; lost ones are recomputed. Before bytes that have an entry
may change, the entry is removed and the removal synced (`truncate`).
"""

from __future__ import annotations

import logging
from array import array
from contextlib import suppress
from pathlib import Path

from ha.protocol.checksum_file import (
    GROUP_ENTRIES,
    GROUP_SIZE,
    ChecksumHead,
    pack_group,
    unpack_group,
    unpack_head,
)
from ha.protocol.store_files import segment_name
from ha.store.files import Disk, File, data_ranges, is_full, read_if_readable
from ha.store.mapped_file import segment_starts

logger = logging.getLogger(__name__)

LOADED_COUNT_MAX = 64
"""Maximum number of segments whose entries are kept in memory: 256 KiB each at RocketMQ's segment size."""


class SegmentSums:
    """The checksum entries of one segment: for each block, a CRC-32 and the number of bytes from the block's start that
    it covers; 0 if the block has no entry."""

    __slots__ = ("crcs", "dirty", "lengths", "start", "walked")

    def __init__(self, head: ChecksumHead) -> None:
        self.start = head.segment_start
        self.crcs = array("I", bytes(4 * head.block_count))
        self.lengths = array("I", bytes(4 * head.block_count))
        self.dirty: set[int] = set()
        self.walked = head.segment_start
        """Physical offset up to which records were checked individually, because blocks have no entry"""

    def set(self, block: int, crc: int, length: int) -> None:
        """Sets a block's entry in memory; `Checksums.write_back` writes it to the file."""
        self.crcs[block] = crc
        self.lengths[block] = length
        self.dirty.add(block // GROUP_ENTRIES)


class Checksums:
    """All checksums of a store. `peek` and `is_dirty` may be used at any time. The other methods block, and only one
    thread at a time may call them."""

    def __init__(self, disk: Disk, directory: Path, segment_size: int, block_size: int) -> None:
        self._disk = disk
        self._directory = directory
        self.segment_size = segment_size
        self.block_size = block_size
        self._loaded: dict[int, SegmentSums] = {}
        self.rebuilt_count = 0
        """Number of damaged checksum files, and groups of entries, that were found; they are recomputed"""

    def peek(self, start: int) -> SegmentSums | None:
        """Returns the checksum entries of the segment that starts at physical offset `start`; None if they are not in
        memory."""
        return self._loaded.get(start)

    def load(self, start: int) -> SegmentSums:
        """Returns the entries of the segment at `start`, read from its file if they are not in memory; damaged entries
        count as missing. Deletes a file that the disk can't read, of the wrong size, or whose head is for another
        segment or block size. Raises OSError."""
        sums = self._loaded.get(start)
        if sums is None:
            sums = self._read(start)
            if len(self._loaded) >= LOADED_COUNT_MAX:
                for old in [each for each in self._loaded.values() if not each.dirty][: LOADED_COUNT_MAX // 2]:
                    del self._loaded[old.start]
            self._loaded[start] = sums
        return sums

    def _head(self, start: int) -> ChecksumHead:
        return ChecksumHead(self.block_size, self.segment_size, start)

    def path_of(self, start: int) -> Path:
        """Returns the path of the checksum file of the segment at `start`."""
        return self._directory / segment_name(start)

    def _read(self, start: int) -> SegmentSums:
        head = self._head(start)
        sums = SegmentSums(head)
        path = self.path_of(start)
        if not self._disk.exists(path):
            return sums
        raw = read_if_readable(self._disk, path)
        found = unpack_head(raw)
        if len(raw) != head.file_size or (found is not None and found != head):
            self._note_damage(path, f"{len(raw)} bytes, {head.file_size} expected" if found is None else f"{found}")
            self._disk.unlink(path)
            return sums
        if found is None:
            if any(raw[:GROUP_SIZE]):  # zeros: the process ended before it wrote the head
                self._note_damage(path, "its head")
            with suppress(OSError):  # a full disk: the next read of the file tries again
                self._disk.open(path).pwrite(head.pack(), 0)
        for number in range(head.group_count):
            at = GROUP_SIZE * (1 + number)
            entries = unpack_group(number, raw[at : at + GROUP_SIZE])
            begin = number * GROUP_ENTRIES
            if entries is None:
                self._note_damage(path, f"group {number}")
                sums.dirty.add(number)
                continue
            count = min(GROUP_ENTRIES, head.block_count - begin)
            sums.crcs[begin : begin + count] = entries[0][:count]
            sums.lengths[begin : begin + count] = entries[1][:count]
        return sums

    def _note_damage(self, path: Path, what: str) -> None:
        self.rebuilt_count += 1
        logger.error('checksums.damage_found file=%s what=%r hint="recomputed from the records"', path, what)

    @property
    def is_dirty(self) -> bool:
        """Whether any entry is not written yet."""
        return any(sums.dirty for sums in list(self._loaded.values()))  # workers add and remove entries meanwhile

    def write_back(self) -> None:
        """Writes the changed entries. Raises OSError if the disk fails; if it is full, the next call writes the
        rest."""
        try:
            self._write_dirty()
        except OSError as error:
            if not is_full(error):
                raise

    def _write_dirty(self) -> None:
        for sums in list(self._loaded.values()):
            while sums.dirty:
                file = self._open(sums.start)
                number = next(iter(sums.dirty))
                file.pwrite(pack_group(number, sums.crcs, sums.lengths), GROUP_SIZE * (1 + number))
                sums.dirty.discard(number)

    def _open(self, start: int) -> File:
        path = self.path_of(start)
        if self._disk.exists(path):
            return self._disk.open(path)
        self._disk.make_dirs(self._directory)
        head = self._head(start)
        file = self._disk.create(path, head.file_size, allocate=False)
        file.pwrite(head.pack(), 0)
        return file

    def verify_file(self, start: int) -> bool:
        """Compares the checksum file of the segment at `start` with the entries in memory, and rewrites what differs.
        Returns False if anything differed; True, without a check, if the entries are not in memory or not all written,
        or there is no file. Raises OSError."""
        sums = self._loaded.get(start)
        path = self.path_of(start)
        if sums is None or sums.dirty or not self._disk.exists(path):
            return True
        head = self._head(start)
        try:
            raw = read_if_readable(self._disk, path)
        except FileNotFoundError:  # deleted by retention
            return True
        groups = [pack_group(number, sums.crcs, sums.lengths) for number in range(head.group_count)]
        empty = bytes(GROUP_SIZE)
        differs = [
            number
            for number, group in enumerate(groups)
            if raw[(at := GROUP_SIZE * (1 + number)) : at + GROUP_SIZE] != group
            and (
                any(sums.lengths[number * GROUP_ENTRIES : (number + 1) * GROUP_ENTRIES])
                or raw[at : at + GROUP_SIZE] != empty
            )
        ]
        if len(raw) == head.file_size and raw[:GROUP_SIZE] == head.pack() and not differs:
            return True
        self._note_damage(path, f"{len(differs)} groups of {len(groups)}")
        sums.dirty.update(differs if len(raw) == head.file_size else range(len(groups)))
        if len(raw) != head.file_size:
            self._disk.unlink(path)
        self._open(start).pwrite(head.pack(), 0)
        self.write_back()
        return False

    def covered_end(self, start: int) -> int:
        """Returns the physical offset after the last byte that an entry of the segment at `start` covers; `start` if it
        has no entry. Raises OSError."""
        sums = self.load(start)
        for block in range(len(sums.lengths) - 1, -1, -1):
            if sums.lengths[block]:
                return start + block * self.block_size + sums.lengths[block]
        return start

    def known_end(self) -> int:
        """Returns the physical offset up to which the log was certainly flushed; 0 if there are no entries. Raises
        OSError."""
        for start in reversed(self.starts()):
            end = self.covered_end(start)
            if end > start:
                return end
        return 0

    def starts(self) -> list[int]:
        """Returns the starts of the segments that have a file, ascending."""
        return segment_starts(self._disk.list_dir(self._directory))

    def is_of(self, start: int) -> bool:
        """Returns whether the segment at `start` has a checksum file with a sound head, for the configured segment and
        block size. Raises OSError."""
        path = self.path_of(start)
        return self._disk.exists(path) and unpack_head(read_if_readable(self._disk, path)) == self._head(start)

    def truncate(self, physical_offset: int) -> None:
        """Removes every checksum that covers a byte at or beyond a physical offset, and syncs the change. Raises
        OSError."""
        for start in sorted({*self.starts(), *self._loaded}, reverse=True):  # the newest may have no file yet
            if start >= physical_offset:
                self.delete(start)
                continue
            sums = self.load(start)
            for block in range(len(sums.lengths) - 1, -1, -1):
                length = sums.lengths[block]
                if length:
                    if start + block * self.block_size + length <= physical_offset:
                        break
                    sums.set(block, 0, 0)
            sums.dirty.update(self._written_groups(start, physical_offset))
            if sums.dirty:
                self._write_dirty()
                self._open(start).sync()
            break

    def _written_groups(self, start: int, physical_offset: int) -> set[int]:
        """Returns the groups of the segment at `start` that have entries for `physical_offset` or beyond and are
        written in its file. They are written again even if they are empty: after a failed sync, the disk may still have
        entries that the page cache no longer shows."""
        path, size = self.path_of(start), self._head(start).file_size
        if not self._disk.exists(path):
            return set()
        first = (physical_offset - start) // self.block_size // GROUP_ENTRIES
        found: set[int] = set()
        for begin, end in data_ranges(self._disk.open(path), GROUP_SIZE * (1 + first), size):
            found.update(range(begin // GROUP_SIZE - 1, -(-end // GROUP_SIZE) - 1))
        return found

    def delete(self, start: int) -> None:
        """Drops the entries of the segment at `start`, and deletes its checksum file if there is one. Raises
        OSError."""
        self._loaded.pop(start, None)
        path = self.path_of(start)
        if self._disk.exists(path):
            self._disk.unlink(path)

    def forget(self) -> None:
        """Drops all entries from memory. The files stay: they belong to a log that was set aside."""
        self._loaded.clear()
