"""Reads bytes of the log from the disk, and verifies them before other components get them.

Bytes that this process appended are trusted until their checksums are made, about a second after the flush. All others
are compared with the checksum of their block each time that they are read. Where a block has none (RocketMQ wrote the
store, or a checksum file is damaged) its records are checked individually once, and the checksum is made then.

    read ── block has a checksum? ── yes ── same? ── yes ── serve
                     │ no                     │ no
             walk the records           DamagedBytes, listed in the registry, never served
                     │ sound: make the checksum, check again
                     │ not a record: list it, as above

A worker reads the bytes, unless the page cache has them. Their CRC is computed on the event loop: that takes a few
microseconds for 32 KiB, and a worker would have to reacquire the interpreter lock for every block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, NoReturn

import trio
from isal.isal_zlib import crc32

from ha.errors import DamagedBytes, OffsetGone
from ha.store.checksums import Checksums, SegmentSums
from ha.store.damage import FoundBy
from ha.store.log_scan import LogScan
from ha.store.mapped_file import RunBlocking, Segment, fetch
from ha.store.options import StoreOptions
from ha.store.recent_reads import RecentReads
from ha.store.segmented_log import SegmentedLog

_WHOLE_BLOCKS_FROM = 4
"""Number of blocks above which a read ends at a block's end, so that the next read does not read a block again."""
_COVER_BLOCKS = 32
"""Number of blocks whose checksums are computed between two Trio checkpoints: a MiB, about 0.1 ms."""


class _Blocks(NamedTuple):
    """Consecutive blocks of a segment, to be read for the bytes from `position` to `stop`, and the checksums to compare
    them with. Positions are in the segment."""

    position: int
    stop: int
    begin: int
    end: int
    block_size: int
    crcs: Sequence[int]
    lengths: Sequence[int]
    trusted_from: int
    walked: int

    @property
    def first(self) -> _Blocks:
        """The first block alone."""
        end = min(self.begin + self.block_size, self.end)
        return self._replace(stop=min(self.stop, end), end=end, crcs=self.crcs[:1], lengths=self.lengths[:1])

    def check(self, raw: bytes | bytearray) -> tuple[int, tuple[int, int] | None, bool]:
        """Returns the position up to which the bytes are good, the bad block (begin, end) that begins there (or
        None), and whether a bad block was skipped.

        A bad block is skipped if its checksum covers only bytes before the requested ones, which then have no checksum
        yet.
        """
        view = memoryview(raw)
        good_to, has_skipped = self.begin, False
        for number, length in enumerate(self.lengths):
            at = self.begin + number * self.block_size
            end = min(at + self.block_size, self.end)
            if length:
                piece = view[at - self.begin : at - self.begin + length]
                if len(piece) != length or crc32(piece) != self.crcs[number]:
                    if at + length > self.position:
                        return good_to, (at, at + length), has_skipped
                    has_skipped = True
                good_to = at + length
            if at + length < end:
                # The rest of the block, or all of it, has no checksum (yet).
                if at + length < self.trusted_from and self.walked < min(end, self.trusted_from):
                    break
                good_to = end
        return good_to, None, has_skipped


class VerifiedReads:
    """Reads of one log's files, and the checksums that they are compared with."""

    def __init__(
        self, log: SegmentedLog, checksums: Checksums, options: StoreOptions, run_blocking: RunBlocking
    ) -> None:
        self._log = log
        self.checksums = checksums
        self._damage = log.damage
        self._options = options
        self._run_blocking = run_blocking
        self._block_size = checksums.block_size
        self._checksum_lock = trio.Lock()
        self.trusted_from = 0
        """Physical offset from which on all bytes were appended by this process: until they have a checksum, they are
        not checked"""
        self._covered_to = 0
        self.verified_bytes = 0
        self._recent = RecentReads(checksums.block_size)
        """Cache of bytes that pulls have read and verified: the next messages of a queue, and of other queues, are
        often near them"""

    # ---- reading

    def read_recent(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Returns at least one and at most `size_max` bytes that a recent pull has read; None if there are none: then
        call `read`."""
        log, recent = self._log, self._recent.find(physical_offset)
        if recent is None or log.truncated is not None or physical_offset < log.min_offset:
            return None
        recent = recent[:size_max]
        if self._damage and self._damage.first_in(physical_offset, physical_offset + len(recent)) is not None:
            return None
        return recent

    def read_cached(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Like `read` for a pull, but never waits. Returns None if the page cache lacks the bytes, if they can't be
        verified at once, or if `read` would raise; then call `read`.

        Reads ahead if recent pulls have read the bytes just before these.
        """
        log = self._log
        if log.truncated is not None or not log.min_offset <= physical_offset < log.max_offset.value:
            return None
        segment = log.segment_at(physical_offset)
        sums = self.checksums.peek(segment.start)
        if sums is None:
            return None
        try:
            ahead = self._recent.ahead(physical_offset)
            blocks = self._blocks(segment, sums, physical_offset, max(size_max, ahead))
            raw = segment.file.pread_nowait(blocks.end - blocks.begin, blocks.begin)
            if raw is None or len(raw) < blocks.end - blocks.begin:
                return None
            found = self._verified(segment, blocks, raw, "pull")
        except (DamagedBytes, OSError):  # `read` raises it again
            return None
        return None if found is None else found[:size_max]

    async def read(self, physical_offset: int, size_max: int, found_by: FoundBy) -> memoryview:
        """Returns bytes from a physical offset on, of one segment, that are verified or were appended by this process:
        at least one and at most `size_max`; empty at the log's end.

        Raises DamagedBytes if the first byte is not what was written; OffsetGone outside the log; OSError if the disk
        can't read bytes that have no checksum, or checksums can't be read or written.
        """
        log = self._log
        while True:
            if log.truncated is not None:
                await log.wait_truncated()
            end = log.max_offset.value
            if physical_offset > end:
                raise OffsetGone(physical_offset, log.min_offset, end)
            if physical_offset == end or size_max <= 0:
                return memoryview(b"")
            segment = log.segment_at(physical_offset)
            sums = self.checksums.peek(segment.start)  # once: a worker may drop them meanwhile
            if sums is None:
                await self.load_sums(segment)
                continue  # damage found meanwhile by a walk of the records has to be considered
            generation = log.generation
            found = await self._read_once(segment, self._blocks(segment, sums, physical_offset, size_max), found_by)
            if found is not None:
                return found
            if generation == log.generation:
                await self._walk_to(segment, physical_offset - segment.start)

    async def load_sums(self, segment: Segment) -> SegmentSums:
        """Returns the checksums of a segment, read from its file if they are not in memory. Raises OSError."""
        sums = self.checksums.peek(segment.start)
        if sums is None:
            async with self._checksum_lock:
                sums = await self._run_blocking(self.checksums.load, segment.start)
        return sums

    def _blocks(self, segment: Segment, sums: SegmentSums, physical_offset: int, size_max: int) -> _Blocks:
        """Returns the blocks to read for bytes of a segment with these checksums, up to the first listed damage.

        Raises DamagedBytes if the bytes begin in a damaged range.
        """
        position = physical_offset - segment.start
        log_end = self._log.max_offset.value - segment.start
        size = min(size_max, segment.size - position, log_end - position)
        if self._damage:
            hit = self._damage.first_in(physical_offset, physical_offset + size)
            if hit is not None and hit.begin <= physical_offset:
                raise DamagedBytes(hit.begin, hit.end, hit.reason, is_hopeless=hit.is_hopeless)
            if hit is not None:
                size = hit.begin - physical_offset
        block_size = self._block_size
        first, stop = position // block_size, position + size
        behind = -(-stop // block_size)
        if behind - first > _WHOLE_BLOCKS_FROM and stop % block_size and stop < log_end:
            behind -= 1
            stop = behind * block_size
        # Copied before the bytes are read: a checksum may grow with the log meanwhile.
        return _Blocks(
            position,
            stop,
            first * block_size,
            min(behind * block_size, segment.size, log_end),
            block_size,
            sums.crcs[first:behind],
            sums.lengths[first:behind],
            self.trusted_from - segment.start,
            sums.walked - segment.start,
        )

    async def _read_once(self, segment: Segment, blocks: _Blocks, found_by: FoundBy) -> memoryview | None:
        """Reads and checks blocks; only the first one if the disk can't read all of them. None if there is no checksum
        to compare with, or the log was truncated or set aside meanwhile. Raises DamagedBytes, OSError."""
        generation = self._log.generation
        try:
            raw = await self._pread(segment, blocks.begin, blocks.end - blocks.begin)
        except OSError as error:
            if generation != self._log.generation:
                return None
            if len(blocks.lengths) > 1:
                return await self._read_once(segment, blocks.first, found_by)
            if not blocks.lengths[0]:
                raise
            bad = blocks.begin, blocks.begin + blocks.lengths[0]
            self._raise_damaged(segment, *bad, f"the disk can't read it: {error}", found_by)
        if generation != self._log.generation:
            return None
        return self._verified(segment, blocks, raw, found_by)

    def _verified(
        self, segment: Segment, blocks: _Blocks, raw: bytes | bytearray, found_by: FoundBy
    ) -> memoryview | None:
        """Returns the requested bytes up to the first one that is not good. If not even the first byte is good, returns
        None if it has no checksum to compare with, and raises DamagedBytes if it is damaged."""
        good_to, bad, has_skipped = blocks.check(raw)
        if bad is not None and good_to <= blocks.position:
            self._raise_damaged(segment, *bad, "the bytes don't match their checksum", found_by)
        self.verified_bytes += max(0, good_to - blocks.begin)
        if good_to <= blocks.position:
            return None
        view = memoryview(raw)
        if found_by == "pull" and not has_skipped:
            begin, end = segment.start + blocks.begin, segment.start + good_to
            if not (self._damage and self._damage.first_in(begin, end)):  # may be more than the requested bytes
                self._recent.keep(begin, view[: good_to - blocks.begin])
        return view[blocks.position - blocks.begin : min(blocks.stop, good_to) - blocks.begin]

    async def _pread(self, segment: Segment, position: int, size: int) -> bytes | bytearray:
        await trio.lowlevel.checkpoint()
        return await fetch(segment.file, size, position, self._run_blocking)

    def _raise_damaged(self, segment: Segment, begin: int, end: int, reason: str, found_by: FoundBy) -> NoReturn:
        """Lists [begin, end) of a segment as damaged and raises DamagedBytes."""
        damage = self._damage.add(
            segment.start + begin,
            segment.start + end,
            file=segment.file.path.name,
            reason=reason,
            found_by=found_by,
            by_checksum=True,
        )
        raise DamagedBytes(damage.begin, damage.end, damage.reason, is_hopeless=damage.is_hopeless)

    # ---- blocks without a checksum

    async def _walk_to(self, segment: Segment, position: int) -> None:
        """Checks records individually, from the place where the last check of the segment stopped to the end of the
        block at `position`. Makes the checksums of whole sound blocks, and lists the bytes between sound records as
        damaged. Raises DamagedBytes if they can't be listed, because the registry is full; OSError."""
        block_size = self._block_size
        target = segment.start + min((position // block_size + 1) * block_size, segment.size)
        async with self._checksum_lock:
            sums: SegmentSums = await self._run_blocking(self.checksums.load, segment.start)
            generation = self._log.generation
            while sums.walked < min(target, self.trusted_from):
                began = sums.walked
                reached, reason, sound_again = await self._run_blocking(self._walk, segment, began)
                if generation != self._log.generation:
                    return
                if reason:
                    damage = self._damage.add(
                        reached,
                        sound_again,
                        file=segment.file.path.name,
                        reason=reason,
                        found_by="read",
                        by_checksum=False,
                    )
                    if damage in self._damage.open:
                        reached = sound_again
                if reached == began:  # not listed, as too many are: what follows can't be checked, either
                    raise DamagedBytes(reached, segment.end, reason)
                sums.walked = reached
                await self._run_blocking(self._cover_walked, segment, sums, began, reached)
            await self._run_blocking(self.checksums.write_back)

    def _walk(self, segment: Segment, physical_offset: int) -> tuple[int, str, int]:
        """Checks one chunk of records. Returns the physical offset up to which they are sound; the reason why the bytes
        there are no sound record, empty if only the chunk ends; and the physical offset at which sound records
        continue. Blocking. Raises OSError."""
        scan = LogScan([segment], self._options, is_clean=True)
        stop = min(segment.end, self.trusted_from)
        known = self._damage.first_in(physical_offset, physical_offset + 1)
        if known is not None and known.begin <= physical_offset and not known.by_checksum:
            return physical_offset, known.reason, known.end
        position, _, reason = scan.check_chunk(segment, physical_offset - segment.start)
        reached = segment.start + position
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
            if self._damage.first_in(segment.start + at, segment.start + end) is not None:
                continue
            raw = segment.file.pread(end - at, at)
            sums.set(block, crc32(raw), len(raw))

    # ---- making checksums

    def begin(self, walked_from: int, end: int) -> None:
        """Starts with the log that recovery found: it ends at `end`, and its records from `walked_from` on were
        checked. Blocking. Raises OSError.

        Drops the checksums beyond the end, and makes those that are missing for the checked blocks.
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
                if at + length >= stop or self._damage.first_in(segment.start + at, segment.start + stop) is not None:
                    continue
                raw = segment.file.pread(stop - at - length, at + length)
                sums.set(block, crc32(raw, sums.crcs[block] if length else 0), stop - at)
        if self._log.segments:
            tail = self._log.segments[-1]
            sums = checksums.load(tail.start)
            at = (end - tail.start) // block_size
            if at < len(sums.lengths) and not sums.lengths[at]:
                # Not checked, or damaged: the next block is the first to get a checksum.
                is_block_begin = (end - tail.start) % block_size == 0
                self._covered_to = end if is_block_begin else min(tail.start + (at + 1) * block_size, tail.end)
        self.checksums.write_back()

    async def cover_flushed(self) -> None:
        """Makes and writes the checksums of what was flushed since the last call.

        Raises OSError if bytes can't be read or checksums written. The next call does what a cancelled or failed call
        did not.
        """
        log = self._log
        if self._covered_to >= log.flushed_offset.value and not self.checksums.is_dirty:
            return
        async with self._checksum_lock:
            generation = log.generation
            self._covered_to = max(self._covered_to, log.min_offset)  # bytes before it may be deleted
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
        """Compares the checksum file of a segment with the checksums in memory, and rewrites it if it differs.
        Raises OSError."""
        async with self._checksum_lock:
            await self._run_blocking(self.checksums.verify_file, start)

    @asynccontextmanager
    async def checksums_held(self) -> AsyncIterator[None]:
        """Keeps other tasks from changing checksums and from rewriting damaged bytes until the block ends."""
        async with self._checksum_lock:
            yield

    def truncate(self, end: int) -> None:
        """Deletes the checksums of all bytes from `end` on and syncs the change. Called with `checksums_held`, before
        the log's files are truncated at `end`. Blocking. Raises OSError.

        If the checksum of the block that contains `end` matches, it is replaced by one of the part before `end`.
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
        """Starts with an empty log that begins at `end`: drops all cached bytes, loaded checksums and listed damage."""
        self._recent.clear()
        self.checksums.forget()
        self._damage.forget(0, 1 << 63)
        self.trusted_from = self._covered_to = end
