"""Finding the end of the commitlog at start, and what to do about what lies behind it.

The last good record decides. Behind it there may be nothing (zeros); a torn tail, written but not synced when the
machine died; or damage. A torn tail is cut off and zeroed. Damage is told from it by what was flushed there for sure:

- a block has a checksum only if it was flushed, so one that doesn't match it is damaged, and the end of the last such
  block is where the log ended at least (`known_end`).
- after a clean stop everything was flushed. A good record behind the bad place shows that flushed data was lost.
- after a crash, pages not yet synced may have reached the disk in any order, so good records may follow a torn one. But
  a record that the checkpoint says was flushed (store time < physicMsgTimestamp) proves that all before it was: any
  good one behind the bad place, not only the next, whose store time may have been hit as well; or the bad one itself,
  by the store time in its head. So does a checkpoint that is newer than the last good record before the bad place.

A damaged range is listed, the scan goes on behind it, and the node serves the rest while the range is healed from a
peer. The same with a file that is too short or missing between others: it is made whole with zeros, which are damage.

A record's CRC covers its body only. A record whose topic or properties lie on a page that never reached the disk would
pass, with zeros in them; after a crash recovery takes such a record for torn, unless a checksum says it was flushed.

RocketMQ truncates silently in every case (CommitLog.recoverNormally, recoverAbnormally): on a master that drops
acknowledged messages, and a slave never learns of them. halog raises CorruptLog, and deletes nothing, only where it
can't know where the log ended (after a clean stop a queue knows a record behind the last good one, after a crash the
bad record says that it was flushed, and nothing tells how many followed) or what the files are (all of another size):
going on could give a second history to offsets that slaves hold. After a crash a slave cuts what nothing sound follows:
its master's clock may have been set back, and it gets the bytes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct
from zlib import crc32

import msgspec

from ha.errors import CorruptLog, RemoteProtocolError
from ha.protocol.record import Filler, RecordHead, scan_record, verify_record
from ha.protocol.store_files import segment_name
from ha.store.checksums import Checksums
from ha.store.damage import DamageRegistry
from ha.store.files import Disk, File
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
_COPY_BYTES = 1 << 20
_REMADE_COUNT_MAX = 16
"""More segments missing than this is no damage of a disk: somebody moved files."""
_DAMAGE_COUNT_MAX = 1000
_WHOLE_SUFFIX = ".whole"
"""Of the copy that replaces a file that is too short, until it is complete"""


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


class Remade(msgspec.Struct, frozen=True):
    """Bytes [`begin`, `end`) of the log are zeros, put where a file was too short or missing."""

    begin: int
    end: int
    reason: str


def load_segments(
    disk: Disk, directory: Path, segment_size: int, checksums: Checksums | None = None
) -> tuple[list[Segment], list[Remade]]:
    """Open the files of the commitlog; those too short, or missing before others or before `known_end`, are remade.

    CorruptLog if they are of another size altogether, or too many are missing. An empty last file, which a crash of
    RocketMQ can leave, is removed, unless its checksums say that it wasn't empty.
    """
    names = disk.list_dir(directory)
    for name in names:
        if name.endswith(_WHOLE_SUFFIX):
            disk.unlink(directory / name)
    sizes = {start: disk.size(directory / segment_name(start)) for start in segment_starts(names)}
    known_end = checksums.known_end() if checksums is not None and sizes else 0
    if sizes and sizes[max(sizes)] == 0 and known_end <= max(sizes):
        disk.unlink(directory / segment_name(max(sizes)))
        del sizes[max(sizes)]
    if not sizes:
        return [], []
    for start, size in sizes.items():
        path = directory / segment_name(start)
        if start % segment_size:
            raise CorruptLog(path, 0, f"its name is no multiple of mappedFileSizeCommitLog {segment_size}")
        is_ours = segment_size in sizes.values() or (checksums is not None and checksums.is_of(start))
        if size > segment_size or (size < segment_size and not is_ours):
            raise CorruptLog(path, size, f"the file has {size} bytes, mappedFileSizeCommitLog is {segment_size}")
    stop = max(max(sizes) + 1, known_end)
    expected = range(min(sizes), stop, segment_size)
    missing = [start for start in expected if start not in sizes]
    if len(missing) > _REMADE_COUNT_MAX:
        path = directory / segment_name(missing[0])
        raise CorruptLog(path, 0, f"{len(missing)} segments are missing, from {path.name} on")
    segments: list[Segment] = []
    remade: list[Remade] = []
    for start in expected:
        path = directory / segment_name(start)
        size = sizes.get(start, -1)
        if size == segment_size:
            file = disk.open(path)
        elif size < 0:
            file = disk.create(path, segment_size, allocate=True)
            remade.append(Remade(start, start + segment_size, "the file was missing"))
        else:
            file = _made_whole(disk, path, size, segment_size)
            remade.append(Remade(start + size, start + segment_size, f"the file ended after {size} bytes"))
        segments.append(Segment(start, segment_size, file))
    for each in remade:
        logger.error("segment_remade begin=%d end=%d reason=%s", each.begin, each.end, each.reason)
    return segments, remade


def _made_whole(disk: Disk, path: Path, size: int, segment_size: int) -> File:
    """Replace a file that is too short by one with zeros at its end, its space reserved."""
    old = disk.open(path)
    fresh_path = path.with_name(path.name + _WHOLE_SUFFIX)
    fresh = disk.create(fresh_path, segment_size, allocate=True)
    for at in range(0, size, _COPY_BYTES):
        fresh.pwrite(old.pread(min(_COPY_BYTES, size - at), at), at)
    fresh.sync()
    disk.rename(fresh_path, path)
    return disk.open(path)


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
    checksums: Checksums | None = None,
    damage: DamageRegistry | None = None,
    remade: list[Remade] | None = None,
) -> Recovered:
    """Find the end of the log, list what is damaged before it, cut off a torn tail, delete the segments behind it.

    `flushed_timestamp_ms` and `start_timestamp_ms` are the checkpoint's physicMsgTimestamp and minTimestamp,
    `queues_end` the end of the last record that a queue knows, `is_in_queue` whether one knows a record at an
    offset, `queued_from` the first record at or beyond an offset that one knows.
    CorruptLog if flushed data is damaged and it can't be told where the log ended; then nothing was changed.
    """
    if not segments:
        return Recovered(segments=[], max_offset=0, scanned_from=0, last_store_timestamp_ms=0, truncated_bytes=0)
    known_end = await run_blocking(checksums.known_end) if checksums is not None else 0
    scan = LogScan(segments, options, is_clean=is_clean, known_end=known_end)
    first = await run_blocking(scan.find_start, start_timestamp_ms, queues_end, queued_from)
    position, last_record, bad = first, -1, []
    while True:
        end = await scan.find_end(position, run_blocking)
        last_record = max(last_record, end.last_record)
        last_ms = await run_blocking(scan.timestamp_at, last_record) if last_record >= 0 else 0
        oldest_ms = last_ms
        if last_ms > flushed_timestamp_ms > 0:
            oldest_ms = await run_blocking(scan.newest_ms, first, end, flushed_timestamp_ms)
        goes_on = await run_blocking(
            scan.damage_end, end, last_ms, oldest_ms, flushed_timestamp_ms, is_in_queue, known_end, checksums
        )
        if goes_on is None:
            break
        bad.append((end.position, goes_on, end.reason))
        if damage is None or len(bad) > _DAMAGE_COUNT_MAX:
            raise scan.corrupt(end, f"{end.reason}; what lies behind it was flushed")
        position = goes_on
    if damage is not None:
        for each in remade or ():
            if each.end <= first:
                await run_blocking(scan.list_remade, damage, each, checksums)
        for begin, stop, reason in bad:
            await run_blocking(scan.list_damage, damage, begin, stop, reason, checksums)
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
    """Whether topic or properties of the good record at `at` hold a zero where a sector of the file begins or ends."""
    end = at + size
    first = end - (base + end) % _SECTOR_SIZE  # last sector begin in the record, then backwards
    if first <= at + _BODY_AT_MIN:
        return False
    topic_at, topic_end = _topic_of(raw, at)
    for boundary in range(first, topic_at - 1, -_SECTOR_SIZE):
        # Lost altogether it begins with a zero; as it was when less of the record had been written it ends with one.
        for position in (boundary, boundary - 1):
            is_length = topic_end <= position < topic_end + 2
            if topic_at <= position < end and not is_length and raw[position] == 0:
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


def _store_ms(raw: bytes, at: int) -> int:
    """Store time in the head of the record at `at`."""
    (sys_flag,) = _INT32.unpack_from(raw, at + 36)
    (store_ms,) = _INT64.unpack_from(raw, at + 56 + 12 * (sys_flag >> 4 & 1))
    return int(store_ms)


class LogScan:
    """Looks at the records of some neighbouring segments. Blocking."""

    def __init__(self, segments: list[Segment], options: StoreOptions, *, is_clean: bool, known_end: int = 0) -> None:
        self.segments = list(segments)
        self._known_end = known_end
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
        size = segment.file.pread(_INT32.size, position)
        size_max = max(_BODY_AT_MIN, *_INT32.unpack(size)) if len(size) == _INT32.size else 0
        raw = segment.file.pread(min(size_max, self._record_size_max, segment.size - position), position)
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
                position, last, reason = await run_blocking(self.check_chunk, segment, position)
                if last >= 0:
                    last_record = segment.start + last
                if reason:
                    return _End(segment.start + position, reason, last_record)
        return _End(self.segments[-1].end, "end of the last segment", last_record)

    def check_chunk(self, segment: Segment, position: int) -> tuple[int, int, str]:
        """Check one chunk's records; return where to go on, the position of the last good one, and what is wrong."""
        size = min(max(_CHUNK_BYTES, self._record_size_max), segment.size - position)
        raw = segment.file.pread(size, position)
        at = 0
        last = -1
        end = len(raw)
        is_last_chunk = end < size or position + end >= segment.size  # a file may have been cut while it was open
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

    def damage_end(
        self,
        end: _End,
        last_ms: int,
        oldest_ms: int,
        flushed_timestamp_ms: int,
        is_in_queue: Callable[[int], bool],
        known_end: int,
        checksums: Checksums | None,
    ) -> int | None:
        """If what lies behind an end shows that flushed data is lost there: where the log goes on. CorruptLog if that
        can't be told. None: it ends there. What is older than `oldest_ms` behind it are leftovers."""
        is_clean = self._is_clean
        found = self.next_good_record(end.position, oldest_ms)
        if checksums is not None and end.position < known_end:
            is_near = found is not None and (is_clean or found.physical_offset < known_end)
            if found is not None and is_near:
                return found.physical_offset
            if not self._is_as_written(checksums, end.position, known_end):
                return known_end
            # What is as it was written is the begin of a record that a slave had not got whole.
        if is_clean:
            if found is not None:
                return found.physical_offset
            if is_in_queue(end.position):
                raise self.corrupt(end, f"{end.reason}; a consume queue knows the record")
            return None
        was_flushed = oldest_ms <= self._claimed_ms(end.position) < flushed_timestamp_ms
        if found is None:
            if was_flushed and not self._is_slave:
                raise self.corrupt(end, f"{end.reason}; the checkpoint says that the record was flushed")
            return None
        if was_flushed or last_ms < flushed_timestamp_ms:
            return found.physical_offset
        for _, store_ms in self._store_times(found.physical_offset, oldest_ms):
            if oldest_ms <= store_ms < flushed_timestamp_ms:
                return found.physical_offset
        return None

    def newest_ms(self, first: int, end: _End, flushed_timestamp_ms: int) -> int:
        """The newest store time, of the good records in [`first`, `end`), that the checkpoint says was flushed.

        For an end behind a record that is newer than the checkpoint: one not flushed, or one whose store time was hit,
        beside which all that follows would look like leftovers.
        """
        if self._claimed_ms(end.position) < 0 and self.next_good_record(end.position, 0) is None:
            return flushed_timestamp_ms
        newest = 0
        for position, store_ms in self._store_times(first, 0):
            if position >= end.position:
                break
            if newest < store_ms <= flushed_timestamp_ms:
                newest = store_ms
        return newest

    def _store_times(self, physical_offset: int, oldest_ms: int) -> Iterator[tuple[int, int]]:
        """Offset and store time of good records from one on, also behind what is bad between them."""
        bad_count = 0
        while (segment := self._segment(physical_offset)) is not None and bad_count <= _DAMAGE_COUNT_MAX:
            position = physical_offset - segment.start
            raw = segment.file.pread(min(max(_CHUNK_BYTES, self._record_size_max), segment.size - position), position)
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

    def _claimed_ms(self, physical_offset: int) -> int:
        """Store time in the head of the bad record at an offset; -1 if no head of a record is there."""
        segment = self._segment(physical_offset)
        if segment is None:
            return -1
        raw = segment.file.pread(_BODY_AT_MIN, physical_offset - segment.start)
        is_head = (
            len(raw) == _BODY_AT_MIN
            and raw[_MAGIC_AT:].startswith(_MAGIC_PREFIX)
            and raw[_MAGIC_AT + 3] in _MAGIC_LAST_BYTES
            and _INT64.unpack_from(raw, _PHYSICAL_OFFSET_AT)[0] == physical_offset
        )
        return _store_ms(raw, 0) if is_head else -1

    def _is_as_written(self, checksums: Checksums, begin: int, end: int) -> bool:
        """Whether all of [begin, end) has checksums, and has them rightly."""
        return not self.bad_blocks(checksums, begin, end) and all(
            self._is_covered(checksums, max(begin, each.start), min(end, each.end))
            for each in self.segments
            if each.start < end and begin < each.end
        )

    def bad_blocks(self, checksums: Checksums, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the blocks (physical offsets) overlapping [begin, end) whose bytes don't have their checksum."""
        bad = []
        for segment in self.segments:
            if segment.end <= begin or segment.start >= end:
                continue
            sums = checksums.load(segment.start)
            size = checksums.block_size
            for block in range(
                max(begin - segment.start, 0) // size, -(-min(end - segment.start, segment.size) // size)
            ):
                length = sums.lengths[block]
                if length and crc32(segment.file.pread(length, block * size)) != sums.crcs[block]:
                    bad.append((segment.start + block * size, segment.start + block * size + length))
        return bad

    def list_remade(self, damage: DamageRegistry, remade: Remade, checksums: Checksums | None) -> None:
        """List what lies in a remade range, which the scan for the log's end does not come by."""
        if checksums is not None and self._is_covered(checksums, remade.begin, remade.end):
            if self.bad_blocks(checksums, remade.begin, remade.end):
                self.list_damage(damage, remade.begin, remade.end, remade.reason, checksums)
            return
        segment = self._segment(remade.begin)
        assert segment is not None
        position, reason = 0, ""
        while position < segment.size and not reason:
            position, _, reason = self.check_chunk(segment, position)
        if reason:
            self.list_damage(damage, segment.start + position, segment.end, remade.reason, None)

    @staticmethod
    def _is_covered(checksums: Checksums, begin: int, end: int) -> bool:
        """Whether all of a segment's [begin, end) has checksums."""
        start = begin - begin % checksums.segment_size
        sums, size = checksums.load(start), checksums.block_size
        return all(
            start + block * size + sums.lengths[block] >= min(start + (block + 1) * size, end)
            for block in range((begin - start) // size, -(-(end - start) // size))
        )

    def list_damage(
        self, damage: DamageRegistry, begin: int, end: int, reason: str, checksums: Checksums | None
    ) -> None:
        """List [begin, end), by segments: the bad blocks in it if all of it has checksums, else from record to
        record."""
        for segment in self.segments:
            first, stop = max(begin, segment.start), min(end, segment.end)
            if first >= stop:
                continue
            name = segment.file.path.name
            bad = []
            if checksums is not None and self._is_covered(checksums, first, stop):
                bad = self.bad_blocks(checksums, first, stop)
            for at, until in bad:
                damage.add(at, until, file=name, reason=reason, found_by="recovery", by_checksum=True)
            if not bad:
                damage.add(first, stop, file=name, reason=reason, found_by="recovery", by_checksum=False)

    def sound_prefix(self, raw: bytes, begin: int, end: int, segment: Segment) -> int:
        """Return how many bytes of `raw`, at physical offset `begin`, are whole sound records within [begin, end)."""
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

    def corrupt(self, end: _End, reason: str) -> CorruptLog:
        """Return the error that names the place."""
        segment = self._segment(end.position) or self.segments[-1]
        return CorruptLog(segment.file.path, end.position - segment.start, reason)

    def next_good_record(self, physical_offset: int, last_ms: int) -> RecordHead | None:
        """The first good record behind an offset that is not older than the ones before it (those are leftovers)."""
        for segment in self.segments:
            if segment.end <= physical_offset:
                continue
            position = max(physical_offset - segment.start + 1, 0)
            old_end = 0
            while (found := segment.file.next_range(position)) is not None and found[0] < segment.size:
                begin, stop = max(position, found[0]), min(found[1], segment.size)
                for candidate in self._candidates(segment, begin, stop):
                    if candidate <= physical_offset or candidate < old_end:
                        continue
                    head = self._head(candidate)
                    if head is not None and head.store_timestamp_ms >= last_ms:
                        return head
                    if head is not None:
                        old_end = candidate + head.total_size
                position = stop
        return None

    @staticmethod
    def _candidates(segment: Segment, begin: int, stop: int) -> Iterator[int]:
        """Physical offsets at which a record's magic number says that one might begin."""
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
                        yield segment.start + start
                at = raw.find(_MAGIC_PREFIX, at + 1)
            if begin + len(raw) >= stop:
                break
            begin += max(1, len(raw) - len(_MAGIC_PREFIX))

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


__all__ = ["LogScan", "Recovered", "Remade", "load_segments", "recover_log"]
