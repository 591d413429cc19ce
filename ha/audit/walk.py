"""Reads raw bytes of a commitlog by physical offset, and finds the records in them, also after damaged bytes.

The walk follows the record sizes, as a broker's recovery does. At bytes that are not a record it searches for the next
one: a magic number after a size that fits, with a physical offset field equal to its position. A record inside a
message's body is found only if it was crafted for this position. The caller detects that, because each range must begin
where the preceding one ended.
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct

import msgspec
import numpy as np

from ha.arrow.heads import Heads, Int64s
from ha.errors import RemoteProtocolError, StoreUnreadable
from ha.protocol.record import FILLER_MAGIC, FILLER_SIZE_MIN, MAGIC_V1, MAGIC_V2, RECORD_SIZE_MIN, verify_record
from ha.protocol.store_files import segment_start

RECORD_SIZE_MAX = 64 * 1024 * 1024
"""Maximum bytes of a record; longer ones count as damage. RocketMQ's maxMessageSize is 4 MiB and rarely raised."""
_OVERHANG_BYTES = 64 * 1024
_CHUNK_RECORDS_MIN, _CHUNK_RECORDS_MAX = 16, 65_536

_SIZE_AND_MAGIC = Struct(">ii")
_INT64 = Struct(">q")
_MAGIC = re.compile(
    b"|".join(re.escape(magic.to_bytes(4, "big", signed=True)) for magic in (MAGIC_V1, MAGIC_V2, FILLER_MAGIC)),
    re.DOTALL,
)
_PHYSICAL_OFFSET_AT = 28


class RawLog:
    """The segment files that a store directory has at construction, read by physical offset, neither locked nor mapped.

    Raises StoreUnreadable if there is no commitlog, or if a file can't be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = self.path / "commitlog"
        found = []
        try:
            for name in os.listdir(folder):
                if (start := segment_start(name)) is not None:
                    file = folder / name
                    with suppress(FileNotFoundError):  # retention has deleted it since it was listed
                        found.append((start, file, file.stat().st_size))
        except OSError as error:
            raise StoreUnreadable(self.path, f"{folder}: {error.strerror}") from None
        found.sort()
        self._starts = [start for start, _, _ in found]
        self._files = [file for _, file, _ in found]
        self._sizes = [size for _, _, size in found]

    @property
    def min_offset(self) -> int:
        """Physical offset of the oldest segment's first byte; sys.maxsize if there is no segment."""
        return self._starts[0] if self._starts else sys.maxsize

    def segment_end(self, physical_offset: int) -> int:
        """Returns the end of the segment that holds `physical_offset`: where the next one begins, or the end of the
        last file. Before the first segment, returns the start of that segment; without segments, `physical_offset`."""
        at = bisect_right(self._starts, physical_offset) - 1
        if at + 1 < len(self._starts):
            return self._starts[at + 1]
        return self._starts[at] + self._sizes[at] if at >= 0 else physical_offset

    def holes(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns the parts of [begin, end) that no file holds."""
        found, position = [], begin
        first = max(bisect_right(self._starts, begin) - 1, 0)
        for start, size in zip(self._starts[first:], self._sizes[first:], strict=True):
            if start >= end:
                break
            if start > position:
                found.append((position, start))
            position = max(position, start + size)
        if position < end:
            found.append((position, end))
        return [(low, high) for low, high in found if low < high]

    def read(self, begin: int, end: int) -> bytes:
        """Returns the bytes [begin, end), with zeros where no file holds them or the file has been deleted
        meanwhile."""
        pieces, position = [], begin
        at = max(bisect_right(self._starts, begin) - 1, 0)
        while position < end and at < len(self._starts):
            start = self._starts[at]
            if start > position:
                gap = min(start, end) - position
                pieces.append(bytes(gap))
                position += gap
                continue
            stop = min(end, self._starts[at + 1] if at + 1 < len(self._starts) else end)
            piece = self._read_file(at, position - start, stop - position)
            pieces.append(piece)
            position += len(piece)
            if len(piece) < stop - (position - len(piece)):
                pieces.append(bytes(stop - position))
                position = stop
            at += 1
        if position < end:
            pieces.append(bytes(end - position))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_file(self, at: int, position: int, size: int) -> bytes:
        try:
            with open(self._files[at], "rb", buffering=0) as file:
                file.seek(position)
                parts = []
                while size > 0 and (part := file.read(size)):
                    parts.append(part)
                    size -= len(part)
                return parts[0] if len(parts) == 1 else b"".join(parts)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise StoreUnreadable(self.path, f"{self._files[at]}: {error.strerror}") from None


class Damaged(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [begin, end) (physical offsets) that are not a record, and the reason found at the first of them."""

    begin: int
    end: int
    reason: str


def damage_at(damaged: Sequence[Damaged], physical_offsets: Int64s) -> Int64s:
    """Returns, for each physical offset, the index in `damaged` of the span that contains it; -1 if none does.
    `damaged` is in the order of the log."""
    begins = np.array([span.begin for span in damaged], np.int64)
    ends = np.array([-1, *(span.end for span in damaged)], np.int64)
    at = np.searchsorted(begins, physical_offsets, side="right")
    return np.where(physical_offsets < ends[at], at - 1, -1)


class Walked(msgspec.Struct):
    """The records of a range. `positions` are their physical offsets, ascending; `data` holds the log's bytes from the
    physical offset `begin` on."""

    begin: int
    data: bytes
    positions: Int64s
    misplaced: Int64s
    """Positions of records whose physical offset field names another offset."""
    fillers: list[tuple[int, int]]
    """(physical offset, size in bytes) of each filler record."""
    damaged: list[Damaged]
    first_start: int | None
    """The given start, or the physical offset of the first record or filler found; None if none begins in the range."""
    next_start: int | None
    """End of the last record or filler, or the given start if it is beyond the range; None if the range ends inside
    damaged bytes, or if no record or filler is found."""


def walk_range(log: RawLog, begin: int, end: int, limit: int, start: int | None = None) -> Walked:
    """Finds the records that begin in [begin, end) (physical offsets) and end at or before `limit`.

    `start`: the known physical offset of the first record. With None it is searched for, and bytes before it count as
    the end of a record that began before the range. Bytes that no file holds are damage. Raises StoreUnreadable if a
    file can't be read.
    """
    walk = _Walk(log, begin, end, limit)
    walk.run(start)
    positions = np.concatenate(walk.positions) if walk.positions else np.empty(0, np.int64)
    misplaced = np.concatenate(walk.misplaced) if walk.misplaced else np.empty(0, np.int64)
    return Walked(begin, walk.data, positions, misplaced, walk.fillers, walk.damaged, walk.first_start, walk.next_start)


class _Walk:
    def __init__(self, log: RawLog, begin: int, end: int, limit: int) -> None:
        self.log, self.begin, self.end, self.limit = log, begin, end, limit
        # Reads beyond `end` to include the rest of most records that cross it: extending `data` later copies all of it.
        self.data = log.read(begin, min(end + _OVERHANG_BYTES, max(end, limit)))
        self.positions: list[Int64s] = []
        self.misplaced: list[Int64s] = []
        self.fillers: list[tuple[int, int]] = []
        self.damaged: list[Damaged] = []
        self.first_start: int | None = None
        self.next_start: int | None = None

    def run(self, start: int | None) -> None:
        position = self._find(self.begin) if start is None else start
        if start is not None and start >= self.end:
            # A record that begins before the range covers all of it.
            self.first_start = self.next_start = start
            return
        self.first_start = position
        chunk = _CHUNK_RECORDS_MAX
        while position is not None and position < self.end:
            found, stop, is_sound = self._follow_sizes(position, chunk)
            good, reason = self._count_sound(found)
            if good < len(found):
                stop, is_sound = int(found[good]), False
                self.fillers = [filler for filler in self.fillers if filler[0] < stop]
            self._keep(found[:good])
            if is_sound:
                position = stop
                chunk = min(chunk * 2, _CHUNK_RECORDS_MAX)
                continue
            resumed = self._find(stop + 1)
            self.damaged.append(Damaged(stop, self.end if resumed is None else resumed, reason or self._reason(stop)))
            position = resumed
            chunk = _CHUNK_RECORDS_MIN
        self.next_start = position

    def _follow_sizes(self, position: int, count_max: int) -> tuple[Int64s, int, bool]:
        """Steps over up to `count_max` records from `position` on, in the range.

        Returns their positions, where it stopped, and False if it stopped at bytes that are not a record.
        """
        found: list[int] = []
        at = position - self.begin
        range_size = self.end - self.begin
        segment_end = self.log.segment_end(position) - self.begin
        bound = min(segment_end, self.limit - self.begin)
        unpack = _SIZE_AND_MAGIC.unpack_from
        is_sound = True
        while at < range_size and len(found) < count_max:
            if at >= segment_end:
                segment_end = self.log.segment_end(at + self.begin) - self.begin
                bound = min(segment_end, self.limit - self.begin)
            if at + FILLER_SIZE_MIN > len(self.data):
                self._extend(min(at + RECORD_SIZE_MIN, bound))
                if at + FILLER_SIZE_MIN > len(self.data):
                    is_sound = False
                    break
            size, magic = unpack(self.data, at)
            if magic in (MAGIC_V1, MAGIC_V2):
                if not RECORD_SIZE_MIN <= size <= min(bound - at, RECORD_SIZE_MAX):
                    is_sound = False
                    break
                if at + size > len(self.data):
                    self._extend(at + size)
                found.append(at)
            elif magic == FILLER_MAGIC and size >= FILLER_SIZE_MIN and at + size == segment_end:
                self.fillers.append((at + self.begin, size))
                if size <= RECORD_SIZE_MAX:
                    self._extend(min(at + size, bound))
            else:
                is_sound = False
                break
            at += size
        return np.array(found, np.int64) + self.begin, at + self.begin, is_sound

    def _extend(self, size: int) -> None:
        """Extends `data` to at least `size` bytes, with zeros where the log has none."""
        have = len(self.data)
        if size > have:
            self.data += self.log.read(self.begin + have, self.begin + size)

    def _count_sound(self, found: Int64s) -> tuple[int, str]:
        """Returns how many of the records at `found` precede the first invalid one, and why that one is invalid ("" if
        all are valid)."""
        if not len(found):
            return 0, ""
        heads = Heads(np.frombuffer(self.data, np.uint8), found - self.begin, None)
        sound = heads.sound
        ends = found + heads.total_size
        for low, high in self.log.holes(int(found[0]), int(ends[-1])):
            sound &= (ends <= low) | (found >= high)
        bad = np.flatnonzero(~sound)
        if not len(bad):
            return len(found), ""
        return int(bad[0]), self._reason(int(found[bad[0]]))

    def _keep(self, found: Int64s) -> None:
        if not len(found):
            return
        data = np.frombuffer(self.data, np.uint8)
        self.positions.append(found)
        own = Heads(data, found - self.begin, None, check_parts=False).field("physical_offset").astype(np.int64)
        if (own != found).any():
            self.misplaced.append(found[own != found])

    def _find(self, position: int) -> int | None:
        """Returns the physical offset of the first sound record or filler from `position` on, within the range, or
        None."""
        at = position - self.begin
        stop = self.end - self.begin
        if at >= stop:
            return None
        self._extend(min(stop + 8, self.limit - self.begin))
        while match := _MAGIC.search(self.data, at + 4, min(stop + 7, len(self.data))):
            at = match.start() - 4
            if self._is_start(at):
                return at + self.begin
            at += 1
        return None

    def _is_start(self, at: int) -> bool:
        size, magic = _SIZE_AND_MAGIC.unpack_from(self.data, at)
        segment_end = self.log.segment_end(at + self.begin) - self.begin
        if magic == FILLER_MAGIC:
            return bool(size >= FILLER_SIZE_MIN and at + size == segment_end)
        if not RECORD_SIZE_MIN <= size <= min(segment_end - at, self.limit - self.begin - at, RECORD_SIZE_MAX):
            return False
        self._extend(at + size)
        (own,) = _INT64.unpack_from(self.data, at + _PHYSICAL_OFFSET_AT)
        if own != at + self.begin:
            return False
        return bool(Heads(np.frombuffer(self.data, np.uint8), np.array([at]), None).sound[0])

    def _reason(self, position: int) -> str:
        at = position - self.begin
        size = 1
        if at + 4 <= len(self.data):
            size = max(1, min(int.from_bytes(self.data[at : at + 4], "big", signed=True), RECORD_SIZE_MAX))
        if self.log.holes(position, min(position + size, self.limit)):
            return "a segment file is missing or too short"
        end = min(self.log.segment_end(position), self.limit) - self.begin
        self._extend(min(at + RECORD_SIZE_MIN, end))
        try:
            verify_record(self.data, at, min(end, len(self.data)), verify_crc=False)
        except RemoteProtocolError as error:
            return str(error)
        return "a filler that does not end with its segment"
