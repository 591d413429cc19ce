"""Finds the end of the commitlog at start, and decides how to treat the bytes after it.

The scan stops at the first place without a good record. There may be nothing (zeros); a torn tail, written but not
synced when the machine stopped; or damage. A torn tail is overwritten with zeros. A bad place is damage if something
that was certainly flushed is there or follows:

- A block has a checksum only if it was flushed, so one that doesn't match its checksum is damaged, and the log ended at
  the end of the last block with a checksum, or later. A master's checkpoint contains a flushed offset, too; `known_end`
  is the higher of the two.
- After a clean stop everything was flushed. A good record after the bad place shows that flushed data was lost.
- After a crash, unsynced pages may have reached the disk in any order, so good records may follow a torn one. But a
  record that was flushed according to the checkpoint (store time < physicMsgTimestamp) proves that everything before it
  was flushed. It may be any good record after the bad place (the store time of the next one may be damaged), or the bad
  record itself, by the store time in its head. If a good record follows, it is also enough that the last good record
  before the bad place is older than the checkpoint; if none follows, that proves nothing (docs/corruption.md).
- Files are created in order, each durably before the next one, and a truncation deletes the last one first. So a crash
  never leaves a missing file before others, and a good record after a missing file is kept.
- A master with SYNC_FLUSH dispatches flushed records only: an entry of its queues is not written before the sync of its
  record succeeded. So an entry on the disk proves that its record was flushed, in whatever order the pages got there
  (`queues_prove`). It counts only if the records of all entries from the start of the scan on are contiguous, and one
  of these records ends where the good records end: a flipped bit or a torn page must not fake a record.

A damaged range is listed, the scan continues after it, and the node serves the rest while the range is healed from a
peer. A file that is too short, or missing between others, is filled with zeros, which count as damage, too.

RocketMQ truncates silently in every case (CommitLog.recoverNormally, recoverAbnormally). On a master this drops
acknowledged messages, and slaves never learn of it. halog raises CorruptLog, and deletes nothing, in these cases:

- The end of the log is unknown, so that continuing could store other messages at physical offsets that slaves already
  have: after a clean stop, a queue has a record at the bad place, or after a crash of a master the bad record was
  flushed, and in both cases no good record follows; or the queues of a master with SYNC_FLUSH have records beyond the
  last file.
- More than DAMAGE_COUNT_MAX places are bad.
- The files can't be those of this log, for example because all have a size other than the configured one
  (segment_files.py).
- The log has no good record and begins with bytes that no crash leaves: another program wrote it.

After a crash a slave truncates bytes that no good record follows, even if the checkpoint says that they were flushed:
its master's clock may have been set back, and the slave gets the bytes again.
"""

from __future__ import annotations

import logging

import msgspec
from isal.isal_zlib import crc32

from ha.errors import CorruptLog
from ha.protocol.record import FILLER_MAGIC, MAGIC_V1, MAGIC_V2, RecordHead
from ha.protocol.store_files import Checkpoint
from ha.store.checkpoint import min_timestamp_ms
from ha.store.files import read_readable
from ha.store.log_scan import DAMAGE_COUNT_MAX, LogEnd, LogScan
from ha.store.mapped_file import Segment
from ha.store.segment_files import ZeroFilled, truncate_segments
from ha.store.store_parts import StoreParts

logger = logging.getLogger(__name__)

_ANY_END = 1 << 63
_SAFE_WITHIN_BYTES = 4 << 20
"""Maximum distance in bytes between the last safe record and the start of the scan after a crash."""


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """The log as recovery left it."""

    segments: list[Segment]
    max_offset: int
    """Physical offset at which the last record, filler or damaged range of the log ends; 0 if there are no
    segments"""
    scanned_from: int
    """Start of the scan: records from here on may be missing in queues and index after a crash"""
    last_store_timestamp_ms: int
    """Store time of the last good record; 0 if there is none"""
    scanned_from_timestamp_ms: int = 0
    """Store time of the record at `scanned_from`; 0 if there is none"""
    truncated_bytes: int
    """Size of the torn tail that was removed, as `truncate_segments` returns it"""
    queues_kept_to: int = 0
    """After a crash: end of the last damaged range, if the queues have entries for all records from `scanned_from` to
    there. These entries are kept, since damaged records can't be dispatched again. 0 otherwise"""


class LogRecovery:
    """Finds the end of one log and its damage. Used once; the methods that `run` calls may block."""

    def __init__(
        self,
        parts: StoreParts,
        segments: list[Segment],
        zero_filled: list[ZeroFilled],
        checkpoint: Checkpoint,
        *,
        is_clean: bool,
        are_queues_whole: bool,
        queues_prove: bool,
        known_end: int,
    ) -> None:
        """`segments`, `zero_filled`: see `load_segments`. `queues_prove`: records were flushed before they were added
        to their queues. `known_end`: the log was flushed at least up to this physical offset."""
        self.scan = LogScan(segments, parts.options, is_clean=is_clean, known_end=known_end)
        self._parts = parts
        self._zero_filled = zero_filled
        self._scan_bytes = parts.options.recovery_scan_bytes
        self._is_slave = parts.options.is_slave
        self._flushed_ms = checkpoint.physic_msg_timestamp_ms
        self._start_ms = min_timestamp_ms(checkpoint)
        self._queues = parts.queues
        self._checksums = parts.checksums
        self._is_clean = is_clean
        self._known_end = known_end
        self._are_queues_whole = are_queues_whole
        self._queues_prove = queues_prove and are_queues_whole and not self._is_slave

    async def run(self) -> Recovered:
        """Finds the end of the log, lists the damage before it, and truncates what is after it. Raises OSError.

        Raises CorruptLog if the end of the log can't be determined, too many places are bad, or another program wrote
        the log; nothing has changed then.
        """
        run, scan = self._parts.run_blocking, self.scan
        if not scan.segments:
            return Recovered(segments=[], max_offset=0, scanned_from=0, last_store_timestamp_ms=0, truncated_bytes=0)
        first = await run(self.find_start, self._queues.max_physical_offset if self._are_queues_whole else 0)
        position, last_record, last_ms, bad = first, -1, 0, []
        while True:
            end = await scan.find_end(position, run)
            last_record = max(last_record, end.last_record)
            last_ms = await run(scan.timestamp_at, last_record) if last_record >= 0 else 0
            resumes_at = await run(self.damage_end, first, end, last_ms)
            if resumes_at is None:
                break
            bad.append((end.position, resumes_at, end.reason))
            if len(bad) > DAMAGE_COUNT_MAX:
                raise self.corrupt(end, f"{end.reason}; what lies behind it was flushed")
            position = resumes_at
        if last_record < 0 and not bad and await run(self.is_foreign):
            raise self.corrupt(
                end,
                f"{end.reason}; nothing in this log is a record of RocketMQ 4 or 5: another version wrote it. Start "
                "that version, or set storePathRootDir to another directory",
            )
        await run(self.list_found, first, bad)
        await run(self._checksums.truncate, end.position)  # first: with checksums, the zeros would be damage
        truncated = await run(truncate_segments, self._parts.disk, scan.segments, end.position, end.reason)
        return Recovered(
            segments=scan.segments,
            max_offset=end.position,
            scanned_from=first,
            scanned_from_timestamp_ms=await run(scan.timestamp_at, first) if first < end.position else 0,
            last_store_timestamp_ms=last_ms,
            truncated_bytes=truncated,
            queues_kept_to=await run(self.queues_kept_to, first, bad[-1][1]) if bad else 0,
        )

    def find_start(self, queues_end: int) -> int:
        """Returns the physical offset to scan from: that of a record near the end that has a queue entry, or else the
        start of a segment. After a crash, log and queues were certainly flushed up to there, unless it is the start of
        the first segment.

        `queues_end`: physical offset of the end of the last record that has a queue entry; 0 if queues are missing.
        """
        distance, unsure_from = self._scan_bytes, queues_end
        while queues_end - distance > self.scan.segments[0].start:
            start = self._queues.first_record_from(queues_end - distance)
            head = self.scan.head_at(start) if start is not None else None
            if head is None:
                break
            if self._is_clean:
                return head.physical_offset
            if self._is_safe(head):
                return self._last_safe(head, unsure_from)
            distance, unsure_from = distance * 4, head.physical_offset
        for number in range(len(self.scan.segments) - 1, -1, -1):
            segment = self.scan.segments[number]
            head = self.scan.head_at(segment.start)
            if head is None:
                continue
            if self._is_clean:
                if segment.start < queues_end:
                    return segment.start
            elif self._is_safe(head):
                return self._last_safe(head, unsure_from)
        return self.scan.segments[0].start

    def _is_safe(self, head: RecordHead) -> bool:
        """Returns whether a record was flushed, in the log and in the queues, when the checkpoint was written."""
        return 0 < head.store_timestamp_ms <= self._start_ms

    def _last_safe(self, head: RecordHead, unsure_from: int) -> int:
        """Returns the physical offset of a safe record at or after `head`, near the last safe one of the same queue.

        Records from `unsure_from` on are not considered. Searches only one queue, as there may be thousands.
        """
        begin, end = head.physical_offset, unsure_from
        queue = self._queues.get(head.topic, head.queue_id)
        while queue is not None and end - begin > min(self._scan_bytes, _SAFE_WITHIN_BYTES):
            middle = (begin + end) // 2
            start = queue.first_record_from(middle)
            found = self.scan.head_at(start) if start is not None and start < end else None
            if found is not None and self._is_safe(found):
                begin = found.physical_offset
            else:
                end = middle
        return begin

    def is_foreign(self) -> bool:
        """Returns whether the log was not written by RocketMQ or halog: the first record has no known magic code. A
        code with one flipped bit counts as known, and so do the first bytes of a code: a slave may have been stopped,
        or killed, within its first record."""
        raw = self.scan.segments[0].file.pread(4, 4)
        magic, begun = int.from_bytes(raw, "big"), raw.rstrip(b"\0")
        known = [each & 0xFFFFFFFF for each in (MAGIC_V1, MAGIC_V2, FILLER_MAGIC)]
        return all((magic ^ each).bit_count() > 1 and not each.to_bytes(4, "big").startswith(begun) for each in known)

    def damage_end(self, first: int, end: LogEnd, last_ms: int) -> int | None:
        """Returns the physical offset at which the log continues if flushed data was lost at `end`; None if the log
        ends there. Raises CorruptLog if that can't be determined.

        `first` is the start of the scan, `last_ms` the store time of the last good record before the end. Records after
        the end with an earlier store time are ignored: a truncation may have left them.
        """
        is_clean, flushed_ms, known_end = self._is_clean, self._flushed_ms, self._known_end
        oldest_ms = self._newest_ms(first, end) if last_ms > flushed_ms > 0 else last_ms
        found = self.scan.next_good_record(end.position, oldest_ms)
        if end.position < known_end:
            is_near = found is not None and (is_clean or found.physical_offset < known_end)
            if found is not None and is_near:
                return found.physical_offset
            if not self._is_as_written(end.position, known_end):
                return known_end
            # Intact bytes that are no whole record are the first part of one that a slave was receiving.
        if is_clean:
            if found is not None:
                return found.physical_offset
            if self._queues.has_record_at(end.position):
                raise self.corrupt(end, f"{end.reason}; a consume queue has the record")
            return None
        queued_to = self._queued_to(first, end)
        if queued_to is not None:
            return queued_to if found is None else min(found.physical_offset, queued_to)
        was_flushed = oldest_ms <= self.scan.claimed_ms(end.position) < flushed_ms
        if found is None:
            if was_flushed and not self._is_slave:
                raise self.corrupt(end, f"{end.reason}; the checkpoint says that the record was flushed")
            return None
        if was_flushed or last_ms < flushed_ms or self._has_missing(end.position, found.physical_offset):
            return found.physical_offset
        for _, store_ms in self.scan.store_times(found.physical_offset, oldest_ms):
            if oldest_ms <= store_ms < flushed_ms:
                return found.physical_offset
        return None

    def _has_missing(self, begin: int, end: int) -> bool:
        """Returns whether [begin, end) overlaps a file that was missing and was filled with zeros."""
        return any(each.was_missing and begin < each.end and each.begin < end for each in self._zero_filled)

    def _queued_to(self, first: int, end: LogEnd) -> int | None:
        """Returns the physical offset up to which the queues prove that the log was flushed, None if that is not beyond
        `end`; `first`: start of the scan.

        Raises CorruptLog if that offset is beyond the last file.
        """
        if not self._queues_prove or self._queues.first_record_from(end.position) is None:
            return None
        segment = self.scan.segment_at(end.position)
        if not self._queues_have(max(first, segment.start) if segment is not None else first, end.position):
            return None
        reached = self._queues.contiguous_end(end.position, _ANY_END, segment_size=self.scan.segments[0].size)
        if reached == end.position:
            return None
        if reached > self.scan.segments[-1].end:
            raise self.corrupt(end, f"{end.reason}; the consume queues have records up to {reached}")
        return reached

    def queues_kept_to(self, first: int, damaged_to: int) -> int:
        """Returns `damaged_to`, the end of the last damaged range, if the entries of records before it are kept:
        after a crash, if the queues have entries for all records from `first` to there. Otherwise 0."""
        is_kept = self._are_queues_whole and not self._is_clean and self._queues_have(first, damaged_to)
        return damaged_to if is_kept else 0

    def _queues_have(self, first: int, end: int) -> bool:
        """Returns whether the queues have entries for all records from `first` to `end`; a filler before `end` has
        none."""
        size = self.scan.segments[0].size
        queued_to = self._queues.contiguous_end(first, end, segment_size=size)
        return end in (queued_to, -(-queued_to // size) * size)

    def _newest_ms(self, first: int, end: LogEnd) -> int:
        """Returns the newest store time that the checkpoint covers, of the good records in [`first`, `end`).

        Needed if the last record before `end` is newer than the checkpoint, because it was not flushed or its store
        time is damaged: compared with a damaged time, all later records could look like leftovers of a truncation.
        """
        if self.scan.claimed_ms(end.position) < 0 and self.scan.next_good_record(end.position, 0) is None:
            return self._flushed_ms
        newest = 0
        for position, store_ms in self.scan.store_times(first, 0):
            if position >= end.position:
                break
            if newest < store_ms <= self._flushed_ms:
                newest = store_ms
        return newest

    def _is_as_written(self, begin: int, end: int) -> bool:
        """Returns whether all of [begin, end) has checksums and matches them."""
        return not self._bad_blocks(begin, end) and all(
            self._is_covered(max(begin, each.start), min(end, each.end))
            for each in self.scan.segments
            if each.start < end and begin < each.end
        )

    def _bad_blocks(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns the blocks (physical offsets) overlapping [begin, end) whose bytes don't match their checksum."""
        bad = []
        size = self._checksums.block_size
        for segment in self.scan.segments:
            if segment.end <= begin or segment.start >= end:
                continue
            sums = self._checksums.load(segment.start)
            first, stop = max(begin - segment.start, 0), min(end - segment.start, segment.size)
            for block in range(first // size, -(-stop // size)):
                length = sums.lengths[block]
                if length and crc32(read_readable(segment.file, length, block * size)) != sums.crcs[block]:
                    bad.append((segment.start + block * size, segment.start + block * size + length))
        return bad

    def list_found(self, first: int, bad: list[tuple[int, int, str]]) -> None:
        """Lists all damage: ranges filled with zeros before `first`, where the scan began, and the bad places (begin,
        end, reason). Raises OSError."""
        for each in self._zero_filled:
            if each.end <= first:
                self._list_zero_filled(each)
        for begin, end, reason in bad:
            self._list_damage(begin, end, reason)

    def _list_zero_filled(self, zero_filled: ZeroFilled) -> None:
        if self._is_covered(zero_filled.begin, zero_filled.end):
            if self._bad_blocks(zero_filled.begin, zero_filled.end):
                self._list_damage(zero_filled.begin, zero_filled.end, zero_filled.reason)
            return
        segment = self.scan.segment_at(zero_filled.begin)
        assert segment is not None
        position, reason = 0, ""
        while position < segment.size and not reason:
            position, _, reason = self.scan.check_chunk(segment, position)
        if reason:
            self._add(segment, segment.start + position, segment.end, zero_filled.reason, by_checksum=False)

    def _is_covered(self, begin: int, end: int) -> bool:
        """Returns whether all of [begin, end), within one segment, has checksums."""
        checksums = self._checksums
        start = begin - begin % checksums.segment_size
        sums, size = checksums.load(start), checksums.block_size
        return all(
            start + block * size + sums.lengths[block] >= min(start + (block + 1) * size, end)
            for block in range((begin - start) // size, -(-(end - start) // size))
        )

    def _list_damage(self, begin: int, end: int, reason: str) -> None:
        """Lists [begin, end) segment by segment: the bad blocks if all bytes there have checksums and some block is
        bad, otherwise all bytes."""
        for segment in self.scan.segments:
            first, stop = max(begin, segment.start), min(end, segment.end)
            if first >= stop:
                continue
            bad = self._bad_blocks(first, stop) if self._is_covered(first, stop) else []
            for at, until in bad:
                self._add(segment, at, until, reason, by_checksum=True)
            if not bad:
                self._add(segment, first, stop, reason, by_checksum=False)

    def _add(self, segment: Segment, begin: int, end: int, reason: str, *, by_checksum: bool) -> None:
        name = segment.file.path.name
        self._parts.damage.add(begin, end, file=name, reason=reason, found_by="recovery", by_checksum=by_checksum)

    def corrupt(self, end: LogEnd, reason: str) -> CorruptLog:
        """Returns the CorruptLog for a log that ends at `end`, with the file and the position in the file."""
        segment = self.scan.segment_at(end.position) or self.scan.segments[-1]
        return CorruptLog(segment.file.path, end.position - segment.start, reason)
