"""Scans the records of contiguous segments: which are good, where they end, and where they continue.

For recovery, and for searches after damage while the store runs. A good record has consistent sizes, magic number,
physical offset and body CRC. The CRC covers the body only, so a record would pass although a page with its topic or
properties never reached the disk and reads as zeros. After a crash, such a record counts as torn, unless it is known to
have been flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from struct import Struct

import msgspec

from ha.errors import RemoteProtocolError
from ha.protocol.record import Filler, RecordHead, scan_record, sound_records, verify_record
from ha.store.files import data_ranges, is_unreadable, read_readable
from ha.store.mapped_file import RunBlocking, Segment
from ha.store.options import StoreOptions

_CHUNK_BYTES = 8 << 20
_PHYSICAL_OFFSET_AT = 28
_INT64 = Struct(">q")
_INT32 = Struct(">i")
_SECTOR_SIZE = 512
_BODY_AT_MIN = 88
_MAGIC_PREFIX = b"\xda\xa3\x20"  # of both record magics
_FILLER_MAGIC = b"\xcb\xd4\x31\x94"
_MAGIC_AT = 4
_MAGIC_LAST_BYTES = (0xA7, 0xAB)
DAMAGE_COUNT_MAX = 1000
"""Maximum number of bad places that a scan skips."""


class LogEnd(msgspec.Struct, frozen=True):
    """Where the good records end, as a physical offset; the reason; and the physical offset of the last good record, -1
    if there is none."""

    position: int
    reason: str
    last_record: int


class LogScan:
    """Scans contiguous segments. Methods that read files block, except for `find_end`, and raise OSError if a file
    can't be read, except for bytes before `known_end`, which count as damaged then."""

    def __init__(self, segments: list[Segment], options: StoreOptions, *, is_clean: bool, known_end: int = 0) -> None:
        """`is_clean`: the log was closed cleanly; otherwise records after `known_end` are also checked for lost pages.

        `known_end`: physical offset up to which the log was certainly flushed.
        """
        self.segments = list(segments)
        self._known_end = known_end
        self._is_clean = is_clean
        self._is_slave = options.is_slave

    def _pread(self, segment: Segment, size: int, position: int) -> bytes:
        """Reads from a segment's file. Bytes before `known_end` that the disk can't read are damage, and read as zeros.
        Raises OSError if it can't read later ones: the log may end there, or not."""
        try:
            return segment.file.pread(size, position)
        except OSError as error:
            known = min(size, self._known_end - segment.start - position)
            if not is_unreadable(error) or known <= 0:
                raise
        rest = segment.file.pread(size - known, position + known) if known < size else b""
        return read_readable(segment.file, known, position) + rest

    def head_at(self, physical_offset: int) -> RecordHead | None:
        """Returns the head of the record at a physical offset; None if there is no good one."""
        segment = self.segment_at(physical_offset)
        if segment is None:
            return None
        position = physical_offset - segment.start
        size = self._pread(segment, _INT32.size, position)
        size_max = max(_BODY_AT_MIN, *_INT32.unpack(size)) if len(size) == _INT32.size else 0
        raw = self._pread(segment, min(size_max, segment.size - position), position)
        head = scan_record(raw, 0, len(raw))
        if not isinstance(head, RecordHead) or head.physical_offset != physical_offset:
            return None
        try:
            verify_record(raw, 0, len(raw))
        except RemoteProtocolError:
            return None
        return head

    def segment_at(self, physical_offset: int) -> Segment | None:
        """Returns the segment that contains a physical offset; None if none of `segments` does."""
        segments = self.segments
        number = (physical_offset - segments[0].start) // segments[0].size if segments else 0
        return segments[number] if 0 <= number < len(segments) else None

    def timestamp_at(self, physical_offset: int) -> int:
        """Returns the store time of the good record at a physical offset, in ms since 1970; 0 if there is none."""
        head = self.head_at(physical_offset)
        return head.store_timestamp_ms if head is not None else 0

    async def find_end(self, first: int, run_blocking: RunBlocking) -> LogEnd:
        """Checks records from physical offset `first` on; returns where the good ones end, and why."""
        last_record = -1
        for segment in self.segments:
            if segment.end <= first:
                continue
            position = max(first - segment.start, 0)
            while position < segment.size:
                position, last, reason = await run_blocking(self.check_chunk, segment, position)
                if last >= 0:
                    last_record = segment.start + last
                if reason:
                    return LogEnd(segment.start + position, reason, last_record)
        return LogEnd(self.segments[-1].end, "end of the last segment", last_record)

    def check_chunk(self, segment: Segment, position: int) -> tuple[int, int, str]:
        """Checks one chunk of records. Returns two positions in the segment, and a reason.

        The reason says why the next record is bad; "" if the scan continues. The first position is where the next chunk
        begins or, with a reason, where the bad record begins; the second one is that of the chunk's last good record,
        -1 if it has none.
        """
        raw, is_last_chunk = self._chunk_at(segment, position)
        if not raw:
            return position, -1, "the file ends here"
        end = len(raw)
        verify = verify_record
        offset_at, size_at = _INT64.unpack_from, _INT32.unpack_from
        start = segment.start + position
        # Records that may not have been flushed are checked more strictly.
        at, last = sound_records(raw, start, min(end, max(self._known_end - start, 0)))
        if last >= 0:
            last += position
        try:
            while at < end:
                if at and not is_last_chunk and (end - at < _BODY_AT_MIN or end - at < size_at(raw, at)[0]):
                    return position + at, last, ""  # the next chunk has the whole of it
                found = verify(raw, at, end)
                if isinstance(found, Filler):
                    if found.total_size != end - at or not is_last_chunk:
                        return position + at, last, f"filler of {found.total_size} bytes"
                    return segment.size, last, ""
                (claimed,) = offset_at(raw, at + _PHYSICAL_OFFSET_AT)
                if claimed != start + at:
                    return position + at, last, f"the record says that it is at {claimed}"
                if start + at + found > self._known_end:
                    if not self._is_clean and _has_lost_page(raw, at, found, start - segment.start):
                        return position + at, last, "a page of its properties was never written"
                    if raw[at + found - 1] == 0 and self._is_unfinished(raw, at, found, segment, position):
                        return position + at, last, "the end of its topic or properties was never written"
                last = position + at
                at += found
        except RemoteProtocolError as error:
            return position + at, last, str(error)
        return position + at, last, ""

    def _chunk_at(self, segment: Segment, position: int) -> tuple[bytes, bool]:
        """Reads a chunk with the whole of its first record or filler, and returns whether it is the segment's last one.

        A record may be of any size that fits into a segment: maxMessageSize may have been larger, here or on a master.
        """
        size = min(_CHUNK_BYTES, segment.size - position)
        raw = self._pread(segment, size, position)
        if len(raw) == size > _BODY_AT_MIN and (claimed := _claimed_size(raw, segment.start + position)) > size:
            size = min(claimed, segment.size - position)
            raw = self._pread(segment, size, position)
        return raw, len(raw) < size or position + len(raw) >= segment.size  # an open file may have been truncated

    def _is_unfinished(self, raw: bytes, at: int, size: int, segment: Segment, position: int) -> bool:
        """Returns whether the good record at `at`, whose last byte is zero, is only partly written.

        A slave writes bytes as it receives them and may stop, or be killed, inside a record; a master may be killed
        while it writes one. The CRC does not cover topic and properties. A record that is followed by data is complete.
        """
        if self._is_clean and not self._is_slave:
            return False
        following = self._pread(segment, 2 * _MAGIC_AT, position + at + size)
        if any(following[_MAGIC_AT:]):
            return False
        _, topic_end = _topic_of(raw, at)
        is_without_properties = topic_end + 2 == at + size
        return not is_without_properties or raw[topic_end - 1] == 0

    def sound_prefix(self, raw: bytes, begin: int, end: int, segment: Segment) -> int:
        """Returns how many bytes of `raw`, meant for physical offset `begin`, are whole sound records. A filler after
        them counts only if it ends at `end`, and `raw` and the segment end there, too."""
        at = 0
        try:
            while at < len(raw):
                found = verify_record(raw, at, len(raw))
                if isinstance(found, Filler):
                    fits = begin + at + found.total_size == segment.end == end == begin + len(raw)
                    return len(raw) if fits else at
                if _INT64.unpack_from(raw, at + _PHYSICAL_OFFSET_AT)[0] != begin + at:
                    return at
                at += found
        except RemoteProtocolError:
            pass
        return at

    def next_good_record(self, physical_offset: int, last_ms: int) -> RecordHead | None:
        """Returns the first good record after a physical offset with a store time of at least `last_ms`; None if there
        is none. Older ones are ignored: a truncation may have left them."""
        for segment in self.segments:
            if segment.end <= physical_offset:
                continue
            old_end = 0
            for begin, stop in data_ranges(segment.file, max(physical_offset - segment.start + 1, 0), segment.size):
                for candidate in self._candidates(segment, begin, stop):
                    if candidate <= physical_offset or candidate < old_end:
                        continue
                    head = self.head_at(candidate)
                    if head is not None and head.store_timestamp_ms >= last_ms:
                        return head
                    if head is not None:
                        old_end = candidate + head.total_size
        return None

    def _candidates(self, segment: Segment, begin: int, stop: int) -> Iterator[int]:
        """Yields the physical offsets where, judging by a magic number, a record may begin."""
        while begin < stop:
            size = min(_CHUNK_BYTES, stop + len(_MAGIC_PREFIX) - begin, segment.size - begin)
            raw = self._pread(segment, size, begin)
            if not raw:
                break
            at = raw.find(_MAGIC_PREFIX)
            while at >= 0:
                start = begin + at - _MAGIC_AT
                last_byte = raw[at + 3] if at + 3 < len(raw) else -1
                if last_byte in _MAGIC_LAST_BYTES and start >= 0:
                    claimed = self._pread(segment, _INT64.size, start + _PHYSICAL_OFFSET_AT)
                    if len(claimed) == _INT64.size and _INT64.unpack(claimed)[0] == segment.start + start:
                        yield segment.start + start
                at = raw.find(_MAGIC_PREFIX, at + 1)
            if begin + len(raw) >= stop:
                break
            begin += max(1, len(raw) - len(_MAGIC_PREFIX))

    def store_times(self, physical_offset: int, oldest_ms: int) -> Iterator[tuple[int, int]]:
        """Yields physical offset and store time (ms since 1970) of the good records from an offset on.

        After a bad place it continues at the next good record with a store time of at least `oldest_ms`; it ends after
        DAMAGE_COUNT_MAX bad places.
        """
        bad_count = 0
        while (segment := self.segment_at(physical_offset)) is not None and bad_count <= DAMAGE_COUNT_MAX:
            position = physical_offset - segment.start
            raw, _ = self._chunk_at(segment, position)
            at = 0
            with suppress(RemoteProtocolError):
                while at < len(raw):
                    found = verify_record(raw, at, len(raw))
                    if isinstance(found, Filler):
                        if found.total_size == segment.size - position - at:
                            at += found.total_size
                        break
                    if _INT64.unpack_from(raw, at + _PHYSICAL_OFFSET_AT)[0] != physical_offset + at:
                        break
                    yield physical_offset + at, _store_ms(raw, at)
                    at += found
            physical_offset += at
            if at == 0:
                following = self.next_good_record(physical_offset, oldest_ms)
                if following is None:
                    return
                physical_offset = following.physical_offset
                bad_count += 1

    def claimed_ms(self, physical_offset: int) -> int:
        """Returns the store time (ms since 1970) in the head of the bad record at a physical offset; -1 if there is no
        record head."""
        segment = self.segment_at(physical_offset)
        if segment is None:
            return -1
        raw = self._pread(segment, _BODY_AT_MIN, physical_offset - segment.start)
        return _store_ms(raw, 0) if len(raw) == _BODY_AT_MIN and _is_head(raw, physical_offset) else -1


def _is_head(raw: bytes, physical_offset: int) -> bool:
    """Returns whether `raw` begins with the head of a record for this physical offset."""
    return (
        raw.startswith(_MAGIC_PREFIX, _MAGIC_AT)
        and raw[_MAGIC_AT + 3] in _MAGIC_LAST_BYTES
        and _INT64.unpack_from(raw, _PHYSICAL_OFFSET_AT)[0] == physical_offset
    )


def _claimed_size(raw: bytes, physical_offset: int) -> int:
    """Returns the size in the head of the record or filler that `raw` begins with; 0 if it begins with none."""
    is_filler = raw.startswith(_FILLER_MAGIC, _MAGIC_AT)
    return int(_INT32.unpack_from(raw)[0]) if is_filler or _is_head(raw, physical_offset) else 0


def _has_lost_page(raw: bytes, at: int, size: int, base: int) -> bool:
    """Returns whether topic or properties of the good record at `at` contain a zero at the border of a sector.

    The start of the record's last sector is ignored if the next record begins in that sector, which was then written as
    a whole. A zero can be there if a RocketMQ broker was killed while it wrote the record, and took it for complete at
    its next start.
    """
    end = at + size
    first = end - (base + end) % _SECTOR_SIZE  # start of the record's last sector; then backwards
    if first <= at + _BODY_AT_MIN:
        return False
    topic_at, topic_end = _topic_of(raw, at)
    for boundary in range(first, topic_at - 1, -_SECTOR_SIZE):
        # A lost sector begins with a zero; one written before the record was complete ends with a zero.
        for position in (boundary, boundary - 1):
            is_length = topic_end <= position < topic_end + 2
            if topic_at <= position < end and not is_length and raw[position] == 0:
                if position == first and any(raw[end : first + _SECTOR_SIZE]):
                    continue
                return True
    return False


def _topic_of(raw: bytes, at: int) -> tuple[int, int]:
    """Returns the positions at which the topic of the good record at `at` begins and ends. The length of the properties
    follows, and then the properties."""
    (magic_last,) = raw[at + 7 : at + 8]
    (sys_flag,) = _INT32.unpack_from(raw, at + 36)
    body_at = at + _BODY_AT_MIN + 12 * ((sys_flag >> 4 & 1) + (sys_flag >> 5 & 1))
    (body_size,) = _INT32.unpack_from(raw, body_at - 4)
    length_size = 1 if magic_last == _MAGIC_LAST_BYTES[0] else 2
    topic_at = body_at + body_size + length_size
    return topic_at, topic_at + int.from_bytes(raw[topic_at - length_size : topic_at], "big")


def _store_ms(raw: bytes, at: int) -> int:
    """Returns the store time in the head of the record at `at`."""
    (sys_flag,) = _INT32.unpack_from(raw, at + 36)
    (store_ms,) = _INT64.unpack_from(raw, at + 56 + 12 * (sys_flag >> 4 & 1))
    return int(store_ms)
