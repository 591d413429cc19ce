"""Finding the end of the commitlog at start, and what to do about what lies behind it.

The last good record decides. Behind it there may be nothing (zeros); a torn tail, written but not synced when the
machine died; or damage. A torn tail is cut off and zeroed. Damage is told from it by what lies further on:

- after a clean stop everything was flushed. A good record behind the bad place, or a queue entry for the record there,
  shows that acknowledged data was lost.
- after a crash, pages not yet synced may have reached the disk in any order, so good records may follow a torn one. But
  a good record that the checkpoint says was flushed (store time < physicMsgTimestamp) proves that all before it was.

A record's CRC covers its body only. A record whose topic or properties lie on a page that never reached the disk would
pass, with zeros in them; after a crash recovery takes such a record for torn.

RocketMQ truncates silently in every case (CommitLog.recoverNormally, recoverAbnormally). halog raises CorruptLog then
and deletes nothing: on a master it would drop acknowledged messages, and a slave would never learn of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from struct import Struct

import msgspec

from ha.errors import CorruptLog, RemoteProtocolError
from ha.protocol.record import Filler, RecordHead, scan_record, verify_record
from ha.protocol.store_files import segment_name
from ha.store.files import Disk
from ha.store.mapped_file import RunBlocking, Segment, segment_starts
from ha.store.options import StoreOptions

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20
_PHYSICAL_OFFSET_AT = 28
_INT64 = Struct(">q")
_INT32 = Struct(">i")
_SECTOR_SIZE = 512
_BODY_AT_MIN = 88
_MAGIC_PREFIX = b"\xda\xa3\x20"  # of both record magics
_MAGIC_AT = 4
_MAGIC_LAST_BYTES = (0xA7, 0xAB)


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """The log as recovery left it."""

    segments: list[Segment]
    max_offset: int
    """End of the last good record, 0 without segments"""
    scanned_from: int
    """Where the scan began: records from here on may be missing in queues and index after a crash"""
    last_store_timestamp_ms: int
    """Of the last good record; 0 if there is none"""
    scanned_from_timestamp_ms: int = 0
    """Of the record at `scanned_from`; 0 if there is none"""
    truncated_bytes: int
    """How much of a torn tail was cut off"""


class _End(msgspec.Struct, frozen=True):
    position: int
    reason: str
    last_record: int


def load_segments(disk: Disk, directory: Path, segment_size: int) -> list[Segment]:
    """Open the files of the commitlog. CorruptLog if one has another size or one is missing in between.

    An empty last file, which a crash of RocketMQ can leave, is removed.
    """
    starts = segment_starts(disk.list_dir(directory))
    segments: list[Segment] = []
    for start in starts:
        path = directory / segment_name(start)
        size = disk.size(path)
        if size == 0 and start == starts[-1]:
            disk.unlink(path)
            continue
        if size != segment_size:
            raise CorruptLog(path, size, f"the file has {size} bytes, mappedFileSizeCommitLog is {segment_size}")
        if segments and start != segments[-1].end:
            raise CorruptLog(path, 0, f"a segment is missing between {segments[-1].file.path.name} and this one")
        if start % segment_size:
            raise CorruptLog(path, 0, f"its name is no multiple of mappedFileSizeCommitLog {segment_size}")
        segments.append(Segment(start, segment_size, disk.open(path)))
    return segments


async def recover_log(
    segments: list[Segment],
    *,
    disk: Disk,
    options: StoreOptions,
    run_blocking: RunBlocking,
    is_clean: bool,
    flushed_timestamp_ms: int,
    start_timestamp_ms: int,
    queues_end: int,
    is_in_queue: Callable[[int], bool],
    queued_from: Callable[[int], int | None],
) -> Recovered:
    """Find the end of the log, cut off a torn tail, delete the segments behind it.

    `flushed_timestamp_ms` and `start_timestamp_ms` are the checkpoint's physicMsgTimestamp and minTimestamp,
    `queues_end` the end of the last record that a queue knows, `is_in_queue` whether one knows a record at an
    offset, `queued_from` the first record at or beyond an offset that one knows.
    CorruptLog if acknowledged data is damaged; then nothing was changed.
    """
    if not segments:
        return Recovered(segments=[], max_offset=0, scanned_from=0, last_store_timestamp_ms=0, truncated_bytes=0)
    scan = _Scan(segments, options, is_clean=is_clean)
    first = await run_blocking(scan.find_start, start_timestamp_ms, queues_end, queued_from)
    end = await scan.find_end(first, run_blocking)
    last_ms = await run_blocking(scan.timestamp_at, end.last_record) if end.last_record >= 0 else 0
    await run_blocking(scan.refuse_damage, end, last_ms, is_clean, flushed_timestamp_ms, is_in_queue)
    truncated = await run_blocking(scan.cut, disk, end)
    return Recovered(
        segments=scan.segments,
        max_offset=end.position,
        scanned_from=first,
        scanned_from_timestamp_ms=await run_blocking(scan.timestamp_at, first) if first < end.position else 0,
        last_store_timestamp_ms=last_ms,
        truncated_bytes=truncated,
    )


def _has_lost_page(raw: bytes, at: int, size: int, base: int) -> bool:
    """Whether topic or properties of the good record at `at` hold a zero where a sector of the file begins."""
    end = at + size
    first = end - (base + end) % _SECTOR_SIZE  # last sector begin in the record, then backwards
    if first <= at + _BODY_AT_MIN:
        return False
    topic_at, topic_end = _topic_of(raw, at)
    for position in range(first, topic_at - 1, -_SECTOR_SIZE):
        is_length = topic_end <= position < topic_end + 2
        if position < end and not is_length and raw[position] == 0:
            return True
    return False


def _topic_of(raw: bytes, at: int) -> tuple[int, int]:
    """Where the topic of the good record at `at` begins and ends; the length of its properties follows, then they."""
    (magic_last,) = raw[at + 7 : at + 8]
    (sys_flag,) = _INT32.unpack_from(raw, at + 36)
    body_at = at + _BODY_AT_MIN + 12 * ((sys_flag >> 4 & 1) + (sys_flag >> 5 & 1))
    (body_size,) = _INT32.unpack_from(raw, body_at - 4)
    length_size = 1 if magic_last == _MAGIC_LAST_BYTES[0] else 2
    topic_at = body_at + body_size + length_size
    return topic_at, topic_at + int.from_bytes(raw[topic_at - length_size : topic_at], "big")


class _Scan:
    def __init__(self, segments: list[Segment], options: StoreOptions, *, is_clean: bool) -> None:
        self.segments = list(segments)
        self._is_clean = is_clean
        self._is_slave = options.is_slave
        self._scan_bytes = options.recovery_scan_bytes
        self._record_size_max = min(options.segment_size, max(options.message_size_max, 4 << 20) + (1 << 20))

    def find_start(self, start_timestamp_ms: int, queues_end: int, queued_from: Callable[[int], int | None]) -> int:
        """Physical offset of the record to scan from: a queue's entry not far from the end, or a segment's begin.

        After a crash it must be known to be flushed (`start_timestamp_ms`), in the log and in the queues.
        """
        distance = self._scan_bytes
        while queues_end - distance > self.segments[0].start:
            start = queued_from(queues_end - distance)
            head = self._head(start) if start is not None else None
            if start is None or head is None:
                break
            if self._is_clean or 0 < head.store_timestamp_ms <= start_timestamp_ms:
                return start
            distance *= 4
        for number in range(len(self.segments) - 1, 0, -1):
            segment = self.segments[number]
            head = self._head(segment.start)
            if head is None:
                continue
            if self._is_clean:
                if segment.start < queues_end:
                    return segment.start
            elif 0 < head.store_timestamp_ms <= start_timestamp_ms:
                return segment.start
        return self.segments[0].start

    def _head(self, physical_offset: int) -> RecordHead | None:
        segment = self._segment(physical_offset)
        if segment is None:
            return None
        position = physical_offset - segment.start
        raw = segment.file.pread(min(self._record_size_max, segment.size - position), position)
        head = scan_record(raw, 0, len(raw))
        if not isinstance(head, RecordHead) or head.physical_offset != physical_offset:
            return None
        try:
            verify_record(raw, 0, len(raw))
        except RemoteProtocolError:
            return None
        return head

    def _segment(self, physical_offset: int) -> Segment | None:
        number = (physical_offset - self.segments[0].start) // self.segments[0].size
        return self.segments[number] if 0 <= number < len(self.segments) else None

    def timestamp_at(self, physical_offset: int) -> int:
        """Store time of the good record at an offset."""
        head = self._head(physical_offset)
        return head.store_timestamp_ms if head is not None else 0

    async def find_end(self, first: int, run_blocking: RunBlocking) -> _End:
        """Check records from physical offset `first` on until one is not good."""
        last_record = -1
        for segment in self.segments:
            if segment.end <= first:
                continue
            position = max(first - segment.start, 0)
            while position < segment.size:
                position, last, reason = await run_blocking(self._check_chunk, segment, position)
                if last >= 0:
                    last_record = segment.start + last
                if reason:
                    return _End(segment.start + position, reason, last_record)
        return _End(self.segments[-1].end, "end of the last segment", last_record)

    def _check_chunk(self, segment: Segment, position: int) -> tuple[int, int, str]:
        """Check one chunk's records; return where to go on, the position of the last good one, and what is wrong."""
        size = min(max(_CHUNK_BYTES, self._record_size_max), segment.size - position)
        raw = segment.file.pread(size, position)
        at = 0
        last = -1
        end = len(raw)
        is_last_chunk = position + end >= segment.size
        verify = verify_record
        offset_at = _INT64.unpack_from
        start = segment.start + position
        try:
            while at < end:
                if not is_last_chunk and end - at < self._record_size_max:
                    return position + at, last, ""
                found = verify(raw, at, end)
                if isinstance(found, Filler):
                    if found.total_size != end - at or not is_last_chunk:
                        return position + at, last, f"filler of {found.total_size} bytes"
                    return segment.size, last, ""
                (claimed,) = offset_at(raw, at + _PHYSICAL_OFFSET_AT)
                if claimed != start + at:
                    return position + at, last, f"the record says that it is at {claimed}"
                if not self._is_clean and _has_lost_page(raw, at, found, start - segment.start):
                    return position + at, last, "a page of its properties was never written"
                if raw[at + found - 1] == 0 and self._is_unfinished(raw, at, found, segment, position):
                    return position + at, last, "the end of its topic or properties was never written"
                last = position + at
                at += found
        except RemoteProtocolError as error:
            return position + at, last, str(error)
        return position + at, last, ""

    def _is_unfinished(self, raw: bytes, at: int, size: int, segment: Segment, position: int) -> bool:
        """Whether the good record at `at`, whose last byte is zero, is one of which only a part was written.

        A slave takes bytes as they come and may stop, or be killed, inside a record; a master may be killed while it
        writes one. The CRC says nothing of topic and properties. What is followed by anything was whole.
        """
        if self._is_clean and not self._is_slave:
            return False
        following = segment.file.pread(2 * _MAGIC_AT, position + at + size)
        if any(following[_MAGIC_AT:]):
            return False
        _, topic_end = _topic_of(raw, at)
        is_without_properties = topic_end + 2 == at + size
        return not is_without_properties or raw[topic_end - 1] == 0

    def refuse_damage(
        self,
        end: _End,
        last_ms: int,
        is_clean: bool,
        flushed_timestamp_ms: int,
        is_in_queue: Callable[[int], bool],
    ) -> None:
        """CorruptLog if what lies behind the end shows that flushed data is lost."""
        if is_clean and is_in_queue(end.position):
            raise self._corrupt(end, f"{end.reason}; a consume queue knows the record")
        if is_clean and self._segment(end.position) is None:
            return
        found = self._next_good_record(end.position, last_ms)
        if found is None:
            return
        if is_clean:
            raise self._corrupt(end, f"{end.reason}; good records follow at {found.physical_offset}")
        # Of the checkpoint's very millisecond there may be records on either side of what was flushed.
        if found.store_timestamp_ms < flushed_timestamp_ms:
            raise self._corrupt(end, f"{end.reason}; the flushed record at {found.physical_offset} follows")

    def _corrupt(self, end: _End, reason: str) -> CorruptLog:
        segment = self._segment(end.position) or self.segments[-1]
        return CorruptLog(segment.file.path, end.position - segment.start, reason)

    def _next_good_record(self, physical_offset: int, last_ms: int) -> RecordHead | None:
        """The first good record behind an offset that is not older than the ones before it (those are leftovers)."""
        for segment in self.segments:
            if segment.end <= physical_offset:
                continue
            position = max(physical_offset - segment.start + 1, 0)
            while (found := segment.file.next_range(position)) is not None and found[0] < segment.size:
                begin, stop = max(position, found[0]), min(found[1], segment.size)
                for candidate in self._candidates(segment, begin, stop):
                    if candidate <= physical_offset:
                        continue
                    head = self._head(candidate)
                    if head is not None and head.store_timestamp_ms >= last_ms:
                        return head
                position = stop
        return None

    @staticmethod
    def _candidates(segment: Segment, begin: int, stop: int) -> list[int]:
        """Physical offsets at which a record's magic number says that one might begin."""
        found = []
        while begin < stop:
            raw = segment.file.pread(min(_CHUNK_BYTES, segment.size - begin), begin)
            if not raw:
                break
            at = raw.find(_MAGIC_PREFIX)
            while at >= 0:
                start = begin + at - _MAGIC_AT
                last_byte = raw[at + 3] if at + 3 < len(raw) else -1
                if last_byte in _MAGIC_LAST_BYTES and start >= 0:
                    claimed = segment.file.pread(_INT64.size, start + _PHYSICAL_OFFSET_AT)
                    if len(claimed) == _INT64.size and _INT64.unpack(claimed)[0] == segment.start + start:
                        found.append(segment.start + start)
                        if len(found) >= 64:
                            return found
                at = raw.find(_MAGIC_PREFIX, at + 1)
            if begin + len(raw) >= stop:
                break
            begin += max(1, len(raw) - len(_MAGIC_PREFIX))
        return found

    def cut(self, disk: Disk, end: _End) -> int:
        """Zero what lies behind the end, delete the segments behind that; return how many bytes were not zero.

        The last one first: a crash in between must not leave a gap between segments.
        """
        cut_bytes = 0
        kept: list[Segment] = []
        for segment in reversed(self.segments):
            if segment.start > end.position or (segment.start == end.position and segment is not self.segments[0]):
                self._note(segment, 0, end)
                disk.unlink(segment.file.path)
                continue
            kept.insert(0, segment)
            if segment.end > end.position:
                position = end.position - segment.start
                cut_bytes += self._note(segment, position, end)
                segment.file.zero(position, segment.size - position)
                segment.file.sync()
        self.segments = kept
        return cut_bytes

    @staticmethod
    def _note(segment: Segment, position: int, end: _End) -> int:
        raw = segment.file.pread(min(_CHUNK_BYTES, segment.size - position), position)
        used = len(raw.rstrip(b"\x00"))
        if used:
            logger.warning(
                "log_truncated file=%s at=%d bytes=%d reason=%s", segment.file.path, position, used, end.reason
            )
        return used


__all__ = ["Recovered", "load_segments", "recover_log"]
