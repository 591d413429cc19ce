"""Bytes of the log that come back from the disk, checked before anybody gets them.

What this process appended is trusted while it is new: up to where its checksums are made, a second or so after it was
flushed. All else is compared with the checksum of its block each time it is read, and where a block has none (a store
of RocketMQ's, or of an older halog) its records are checked one by one once, and the checksum is made then.

    read ── block has a checksum? ── yes ── same? ── yes ── serve
                     │ no                     │ no
             walk the records           DamagedBytes, listed in the registry, never served
                     │ sound: make the checksum, look again
                     │ not a record: list it, as above

A CRC of 32 KiB takes about a microsecond and is computed on the event loop, reading is done in a worker unless the
bytes are cached: a worker that computes would have to fetch the interpreter lock back for every block.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from isal.isal_zlib import crc32

from ha.errors import DamagedBytes, OffsetGone
from ha.protocol.record import Filler, RecordHead, scan_record
from ha.store.checksums import Checksums, SegmentSums
from ha.store.damage import Damage, DamageRegistry, FoundBy
from ha.store.log_scan import LogScan
from ha.store.mapped_file import RunBlocking, Segment, fetch
from ha.store.options import StoreOptions
from ha.store.recent_reads import RecentReads

if TYPE_CHECKING:
    from ha.store.commitlog import CommitLog

logger = logging.getLogger(__name__)

_Pread = Callable[[Segment, int, int], Awaitable[bytes | bytearray | None]]

_WHOLE_BLOCKS_FROM = 4
"""A read over more blocks than this ends with a whole one, so that the next one reads none twice."""
PIECE_BYTES = 16 << 20
"""At most so much of a damaged range is held at once: no record, nor the filler where one had no room, is larger than
the largest frame that a client can send."""
_COVER_BLOCKS = 32
"""Blocks whose checksums are computed between two checkpoints: about 30 µs, and the reading of a MiB."""


class VerifiedReads:
    """Reads of one log's files, and what they are checked against."""

    def __init__(
        self,
        log: CommitLog,
        checksums: Checksums,
        damage: DamageRegistry,
        options: StoreOptions,
        run_blocking: RunBlocking,
    ) -> None:
        self._log = log
        self.checksums = checksums
        self.damage = damage
        self._options = options
        self._run_blocking = run_blocking
        self._block_size = checksums.block_size
        self._turn = trio.Lock()
        self.trusted_from = 0
        """Bytes from this physical offset on were appended by this process, or fetched and compared by it"""
        self._covered_to = 0
        self.verified_bytes = 0
        self.is_queued: Callable[[RecordHead], bool] = lambda head: False
        """Tells whether a consume queue has exactly the entry of a record; blocking. The store sets it"""
        self._recent = RecentReads(checksums.block_size)
        """What pulls read and verified: the next message of a queue is near, and so are those of others"""

    # ---- reading

    def read_recent(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Return at least one byte that a pull has read of late, as `read` would for the next one; None if it has to be
        asked."""
        log, recent = self._log, self._recent.find(physical_offset)
        if recent is None or log.cut_under_way is not None or physical_offset < log.min_offset:
            return None
        recent = recent[:size_max]
        if self.damage and self.damage.first_in(physical_offset, physical_offset + len(recent)) is not None:
            return None
        return recent

    async def read(self, physical_offset: int, size_max: int, found_by: FoundBy) -> memoryview:
        """Return at least one byte from an offset on that is verified (or new), at most `size_max`, of one segment.

        DamagedBytes if the first byte is not what was written; OffsetGone outside the log; OSError if the disk can't
        read what has no checksum.
        """
        log = self._log
        may_read_ahead = found_by == "pull"
        while True:
            if log.cut_under_way is not None:
                await log.wait_cut()
            end = log.max_offset.value
            if physical_offset > end:
                raise OffsetGone(physical_offset, log.min_offset, end)
            segment = log.segment_at(physical_offset)
            sums = self.checksums.peek(segment.start)
            if sums is None:
                await self._sums(segment)
                continue  # what was walked meanwhile counts as sound only for who looks at the damage found there
            position = physical_offset - segment.start
            sound_size = min(segment.size - position, end - physical_offset)
            if self.damage:
                hit = self.damage.first_in(physical_offset, physical_offset + sound_size)
                if hit is not None and hit.begin <= physical_offset:
                    raise DamagedBytes(hit.begin, hit.end, hit.reason, is_hopeless=hit.is_hopeless)
                if hit is not None:
                    sound_size = hit.begin - physical_offset
            size = min(size_max, sound_size)
            if size <= 0:
                return memoryview(b"")
            generation = log.generation
            log_end = end - segment.start
            ahead = min(self._recent.ahead(physical_offset), sound_size) if may_read_ahead else 0
            if ahead > size:
                may_read_ahead = False
                found = await self._read_once(
                    segment, sums, position, ahead, log_end, found_by, generation, self._pread_cached
                )
                if found is None:
                    continue  # not without a look at what was found to be damaged meanwhile
            else:
                found = await self._read_once(segment, sums, position, size, log_end, found_by, generation, self._pread)
            if found is not None:
                return found[:size]
            if generation == log.generation:
                await self._walk_to(segment, position)

    async def _sums(self, segment: Segment) -> SegmentSums:
        sums = self.checksums.peek(segment.start)
        if sums is None:
            async with self._turn:
                sums = await self._run_blocking(self.checksums.load, segment.start)
        return sums

    async def _read_once(
        self,
        segment: Segment,
        sums: SegmentSums,
        position: int,
        size: int,
        log_end: int,
        found_by: FoundBy,
        generation: int,
        pread: _Pread,
    ) -> memoryview | None:
        """None if there is no checksum to compare with, `pread` gives nothing, or the log is another one meanwhile than
        in `generation`; positions are in the segment."""
        block_size = self._block_size
        first = position // block_size
        stop = position + size
        behind = -(-stop // block_size)
        if behind - first > _WHOLE_BLOCKS_FROM and stop % block_size and stop < log_end:
            behind -= 1
            stop = behind * block_size
        # Taken before the bytes are read: a checksum may grow with the log meanwhile.
        crcs, lengths = sums.crcs[first:behind], sums.lengths[first:behind]
        raw_begin = first * block_size
        raw_end = min(behind * block_size, segment.size, log_end)
        trusted_from = self.trusted_from - segment.start
        walked = sums.walked - segment.start
        is_behind_damage = False
        trouble = ""
        raw: bytes | bytearray | None
        try:
            raw = await pread(segment, raw_begin, raw_end - raw_begin)
        except OSError as error:
            if not lengths[0]:
                raise
            raw, trouble = b"", f"the disk can't read it: {error}"
        if raw is None or generation != self._log.generation:
            return None  # its end was cut off: what was read there is neither good nor damaged
        view = memoryview(raw)
        good_to = raw_begin
        for number, length in enumerate(lengths):
            at = raw_begin + number * block_size
            block_end = min(at + block_size, raw_end)
            if length:
                piece = view[at - raw_begin : at - raw_begin + length]
                is_bad = len(piece) != length or crc32(piece) != crcs[number]
                if is_bad and not trouble and at + length <= position:
                    is_behind_damage = True  # of what was asked for nothing: that is what has no checksum yet
                elif is_bad:
                    if good_to <= position:
                        reason = trouble or "the bytes don't have the checksum that they had when they were written"
                        self._found(segment, at, at + length, reason, found_by)
                    break
                good_to = at + length
            if at + length < block_end:
                # The rest of the block, or all of it, has no checksum (yet).
                if at + length >= trusted_from or walked >= min(block_end, trusted_from):
                    good_to = block_end
                else:
                    break
        self.verified_bytes += max(0, good_to - raw_begin)
        if good_to <= position:
            return None
        if found_by == "pull" and not is_behind_damage:
            begin, end = segment.start + raw_begin, segment.start + good_to
            if not (self.damage and self.damage.first_in(begin, end)):  # records beside what was asked for may be in it
                self._recent.keep(begin, view[: good_to - raw_begin])
        return view[position - raw_begin : min(stop, good_to) - raw_begin]

    async def _pread(self, segment: Segment, position: int, size: int) -> bytes | bytearray:
        await trio.lowlevel.checkpoint()
        return await fetch(segment.file, size, position, self._run_blocking)

    async def _pread_cached(self, segment: Segment, position: int, size: int) -> bytes | bytearray | None:
        """All of it, or None if that takes the disk: nobody has asked for all of it yet."""
        await trio.lowlevel.checkpoint()
        cached = segment.file.pread_nowait(size, position)
        return cached if cached is not None and len(cached) == size else None

    def _found(self, segment: Segment, begin: int, end: int, reason: str, found_by: FoundBy) -> None:
        """List [begin, end) of a segment, and raise."""
        start = segment.start
        damage = self.damage.add(
            start + begin,
            start + end,
            file=segment.file.path.name,
            reason=reason,
            found_by=found_by,
            by_checksum=True,
        )
        raise DamagedBytes(damage.begin, damage.end, damage.reason, is_hopeless=damage.is_hopeless)

    # ---- blocks without a checksum

    async def _walk_to(self, segment: Segment, position: int) -> None:
        """Check records from the segment's begin to behind the block at `position`; make checksums of what is sound.

        What isn't is listed as damage.
        """
        block_size = self._block_size
        target = segment.start + min((position // block_size + 1) * block_size, segment.size)
        async with self._turn:
            sums: SegmentSums = await self._run_blocking(self.checksums.load, segment.start)
            generation = self._log.generation
            while sums.walked < min(target, self.trusted_from):
                began = sums.walked
                reached, reason, sound_again = await self._run_blocking(self._walk, segment, began)
                if generation != self._log.generation:
                    return
                if reason:
                    self.damage.add(
                        reached,
                        sound_again,
                        file=segment.file.path.name,
                        reason=reason,
                        found_by="read",
                        by_checksum=False,
                    )
                    reached = sound_again
                sums.walked = reached
                await self._run_blocking(self._cover_walked, segment, sums, began, reached)
            await self._run_blocking(self.checksums.write_back)

    def _walk(self, segment: Segment, physical_offset: int) -> tuple[int, str, int]:
        """Return up to where records are sound, why not further ("": only a step's end), and where they are again."""
        scan = LogScan([segment], self._options, is_clean=True)
        stop = min(segment.end, self.trusted_from)
        known = self.damage.first_in(physical_offset, physical_offset + 1)
        if known is not None and known.begin <= physical_offset and not known.by_checksum:
            return physical_offset, known.reason, known.end
        position, _, reason = scan.check_chunk(segment, physical_offset - segment.start)
        reached = segment.start + position
        if not reason and reached == physical_offset:
            reason = "the file ends here"
        if not reason or reached >= stop:
            return min(reached, stop), "", 0
        following = scan.next_good_record(reached, 0)
        sound_again = following.physical_offset if following is not None else segment.end
        return reached, reason, min(sound_again, stop)

    def _cover_walked(self, segment: Segment, sums: SegmentSums, began: int, reached: int) -> None:
        block_size = self._block_size
        first = (began - segment.start) // block_size
        for block in range(first, -(-(reached - segment.start) // block_size)):
            at = block * block_size
            end = min(at + block_size, segment.size)
            if sums.lengths[block] or segment.start + end > reached:
                continue
            if self.damage.first_in(segment.start + at, segment.start + end) is not None:
                continue
            raw = segment.file.pread(end - at, at)
            sums.set(block, crc32(raw), len(raw))

    # ---- making checksums

    def begin(self, walked_from: int, end: int) -> None:
        """After recovery: the log ends at `end`, and its records from `walked_from` on were checked. Blocking.

        Entries beyond the end are taken back. What was checked gets the entries that it lacks.
        """
        self.trusted_from = end
        self._covered_to = end
        checksums, block_size = self.checksums, self._block_size
        checksums.truncate(end)
        for segment in self._log.segments:
            if segment.end <= walked_from or segment.start >= end:
                continue
            sums = checksums.load(segment.start)
            first = max(walked_from - segment.start, 0)
            for block in range(-(-first // block_size), -(-min(end - segment.start, segment.size) // block_size)):
                at = block * block_size
                stop = min(at + block_size, segment.size, end - segment.start)
                length = sums.lengths[block]
                if at + length >= stop or self.damage.first_in(segment.start + at, segment.start + stop) is not None:
                    continue
                raw = segment.file.pread(stop - at - length, at + length)
                sums.set(block, crc32(raw, sums.crcs[block] if length else 0), stop - at)
        if self._log.segments:
            tail = self._log.segments[-1]
            sums = checksums.load(tail.start)
            at = (end - tail.start) // block_size
            if at < len(sums.lengths) and not sums.lengths[at]:
                # Not checked, or damaged: the block's checksum begins anew with the next one.
                is_begin = (end - tail.start) % block_size == 0
                self._covered_to = end if is_begin else min(tail.start + (at + 1) * block_size, tail.end)
        self.checksums.write_back()

    async def cover_flushed(self) -> None:
        """Make the checksums of what was flushed since the last call, and write them. OSError if they can't be.

        What a cancelled or failed call left unwritten is written by the next one.
        """
        log = self._log
        if self._covered_to >= log.flushed_offset.value and not self.checksums.is_dirty:
            return
        async with self._turn:
            generation = log.generation
            while self._covered_to < log.flushed_offset.value:
                segment = log.segment_at(self._covered_to)
                sums: SegmentSums = self.checksums.peek(segment.start) or await self._run_blocking(
                    self.checksums.load, segment.start
                )
                target = min(log.flushed_offset.value, segment.end, self._covered_to + _COVER_BLOCKS * self._block_size)
                position, size = self._covered_to - segment.start, target - self._covered_to
                raw = log.read_hot(self._covered_to, size)
                if raw is None:
                    raw = memoryview(await self._pread(segment, position, size))
                if generation != log.generation:
                    return
                with raw:
                    self._cover(sums, position, raw)
                self._covered_to = target
                await trio.lowlevel.checkpoint()
            await self._run_blocking(self.checksums.write_back)

    def _cover(self, sums: SegmentSums, position: int, raw: memoryview) -> None:
        block_size = self._block_size
        done = 0
        while done < len(raw):
            block, within = divmod(position + done, block_size)
            piece = raw[done : done + block_size - within]
            if within == 0 or sums.lengths[block] == within:
                sums.set(block, crc32(piece, sums.crcs[block] if within else 0), within + len(piece))
            done += len(piece)

    async def check_checksums(self, start: int) -> None:
        """Compare the checksum file of a segment with what is in memory, and write it anew if it differs."""
        async with self._turn:
            await self._run_blocking(self.checksums.verify_file, start)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Let nobody make or write checksums, nor write over damaged bytes, until the block ends."""
        async with self._turn:
            yield

    def cut(self, end: int) -> None:
        """Take back, synced, what covers bytes from `end` on: the log is about to be cut there. Blocking, while `held`.

        The block in which the cut is keeps a checksum, of what stays of it, if it has a right one now.
        """
        checksums, block_size = self.checksums, self._block_size
        self._recent.clear()
        kept: tuple[SegmentSums, int, bytes] | None = None
        is_covered = True
        for segment in self._log.segments:
            if not segment.start < end < segment.end:
                continue
            block, within = divmod(end - segment.start, block_size)
            sums = checksums.load(segment.start)
            length = sums.lengths[block]
            if within < length:
                raw = segment.file.pread(length, block * block_size)
                if within and crc32(raw) == sums.crcs[block]:
                    kept = sums, block, raw[:within]
            is_covered = within in (0, length) or kept is not None
            sums.walked = min(sums.walked, end)
            if not is_covered:
                self._covered_to = min(self._covered_to, segment.start + (block + 1) * block_size, segment.end)
        checksums.truncate(end)
        if kept is not None:
            sums, block, raw = kept
            sums.set(block, crc32(raw), len(raw))
        self.trusted_from = min(self.trusted_from, end)
        if is_covered:
            self._covered_to = min(self._covered_to, end)
        checksums.write_back()

    def reset(self, end: int) -> None:
        """The log was set aside and is empty, beginning at `end`."""
        self._recent.clear()
        self.checksums.forget()
        self.damage.forget(0, 1 << 63)
        self.trusted_from = self._covered_to = end

    # ---- healing

    async def is_sound(self, damage: Damage) -> bool:
        """Read a damaged range again and tell whether it is right now (a disk may fail to read for a moment)."""
        segment = self._log.segment_at(damage.begin)
        position = damage.begin
        while position < damage.end:
            size = min(damage.end - position, PIECE_BYTES - PIECE_BYTES % self._block_size)
            try:
                raw = await self._run_blocking(segment.file.pread, size, position - segment.start)
            except OSError:
                return False
            proven = await self.proves(damage, position, raw)
            if not proven:
                return False
            position += proven
        return True

    async def proves(self, damage: Damage, begin: int, raw: bytes) -> int:
        """Return how many bytes of `raw`, meant for `begin` in a damage, are proven to be what was written there.

        By the checksums of whole blocks if they are known; else by records that are sound, the last of which ends
        where the damage does (or the piece ends within a record, which then doesn't count).
        """
        segment = self._log.segment_at(begin)
        if damage.by_checksum:
            sums = await self._sums(segment)
            return self._proven_blocks(sums, begin - segment.start, raw)
        scan = LogScan([segment], self._options, is_clean=True)
        proven: int = await self._run_blocking(scan.sound_prefix, raw, begin, damage.end, segment)
        return proven

    def _proven_blocks(self, sums: SegmentSums, position: int, raw: bytes) -> int:
        block_size = self._block_size
        view = memoryview(raw)
        proven = 0
        while proven < len(raw):
            block, within = divmod(position + proven, block_size)
            length = sums.lengths[block]
            piece = view[proven : proven + length]
            if within or not length or len(piece) < length or crc32(piece) != sums.crcs[block]:
                break
            proven += length
        return proven

    async def proves_alone(self, damage: Damage, begin: int, raw: bytes) -> int:
        """Return how many bytes of `raw`, meant for `begin` in a damage, are proven without regard to what follows.

        By the checksums of whole blocks; or, where none are known, by sound records that the consume queues know.
        """
        if damage.by_checksum:
            return await self.proves(damage, begin, raw)
        scan = LogScan([self._log.segment_at(begin)], self._options, is_clean=True)
        proven: int = await self._run_blocking(self._queued_prefix, scan, raw, begin, damage.end)
        return proven

    def _queued_prefix(self, scan: LogScan, raw: bytes, begin: int, end: int) -> int:
        size = scan.sound_prefix(raw, begin, end, scan.segments[0])
        at = 0
        while at < size:
            found = scan_record(raw, at, size, delay_levels_ms=self._options.delay_levels_ms)
            if isinstance(found, Filler):
                return size
            if not isinstance(found, RecordHead) or not self.is_queued(found):
                break
            at += found.total_size
        return at

    async def rewrite(self, begin: int, raw: bytes) -> None:
        """Write proven bytes over damaged ones, synced, and look whether they stay. OSError if they don't.

        OffsetGone if the log was cut before their end meanwhile.
        """
        log = self._log
        async with self._turn:
            if begin + len(raw) > log.max_offset.value:
                raise OffsetGone(begin + len(raw), log.min_offset, log.max_offset.value)
            segment = log.segment_at(begin)
            await self._run_blocking(_rewrite, segment, begin - segment.start, raw)

    async def agrees(self, damage: Damage, raw: bytes) -> bool:
        """If `raw`, another node's, is what the disk here holds as well, make its checksum anew and say so.

        Only the checksum was wrong then: another program wrote the log. For one block whose checksum is known.
        """
        if not damage.by_checksum or len(raw) > self._block_size:
            return False
        segment = self._log.segment_at(damage.begin)
        position = damage.begin - segment.start
        async with self._turn:
            try:
                if await self._run_blocking(segment.file.pread, len(raw), position) != raw:
                    return False
            except OSError:
                return False
            if damage.begin + len(raw) > self._log.max_offset.value:
                return False  # cut off meanwhile
            sums = await self._run_blocking(self.checksums.load, segment.start)
            sums.set(position // self._block_size, crc32(raw), len(raw))
            await self._run_blocking(self.checksums.write_back)
        logger.warning("checksum_corrected begin=%d end=%d: a peer holds the same bytes", damage.begin, damage.end)
        return True

    def after_heal(self, damage: Damage) -> None:
        """Have the records of a healed range checked once more where blocks have no checksum."""
        if not damage.by_checksum:
            start = damage.begin - damage.begin % self.checksums.segment_size
            sums = self.checksums.peek(start)
            if sums is not None:
                sums.walked = start


def _rewrite(segment: Segment, position: int, raw: bytes) -> None:
    segment.file.pwrite(raw, position)
    segment.file.sync()
    if segment.file.pread(len(raw), position) != raw:
        raise OSError(f"{segment.file.path} does not keep what is written at {position}")
