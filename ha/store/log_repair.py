"""Verifies the bytes that a peer sends for a damaged range, and writes them to the log.

The healer (`ha/replication/healer.py`) fetches the bytes. They count as proven if they have the checksums that were
computed when the blocks were written here. If no checksums are known, valid records that end exactly where the damage
does count as proven; this excludes damaged copies, but not forged records.
"""

from __future__ import annotations

import logging

from isal.isal_zlib import crc32

from ha.errors import OffsetGone
from ha.protocol.record import Filler, RecordHead, scan_record
from ha.store.damage import DamagedRange
from ha.store.log_scan import LogScan
from ha.store.mapped_file import Segment
from ha.store.store_parts import StoreParts

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Maximum size in bytes of the part of a damaged range that is held in memory. It equals the size of the largest frame
that a client can send. No record is larger, and neither is a filler in the place of a record that had no room."""


class LogRepair:
    """Verifies and writes the bytes for damaged ranges of one log."""

    def __init__(self, parts: StoreParts) -> None:
        self._disk = parts.disk
        self._log = parts.log
        self._verified = parts.verified
        self._checksums = parts.checksums
        self._block_size = parts.checksums.block_size
        self._queues = parts.queues
        self._options = parts.options
        self._run_blocking = parts.run_blocking
        self.damage = parts.damage

    async def is_sound(self, damage: DamagedRange) -> bool:
        """Reads a damaged range again; returns whether its bytes are sound now, as after a temporary read error. Raises
        OSError if its checksums can't be read, OffsetGone if it is no longer in the log."""
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

    async def proves(self, damage: DamagedRange, begin: int, raw: bytes) -> int:
        """Returns how many bytes of `raw`, meant for physical offset `begin` in a damaged range, are proven to be what
        was written.

        Whole blocks are compared with their checksums, if these are known. Otherwise, the valid records at the start of
        `raw` count, and a filler after them if it ends where the damage does. The caller checks that the last record or
        filler of the range ends there. If `raw` ends within a record, that record is not proven. Raises OSError;
        OffsetGone if `begin` is no longer in the log.
        """
        segment = self._log.segment_at(begin)
        if damage.by_checksum:
            return await self._proven_blocks(damage, begin, raw)
        scan = LogScan([segment], self._options, is_clean=True)
        proven: int = await self._run_blocking(scan.sound_prefix, raw, begin, damage.end, segment)
        return proven

    async def _proven_blocks(self, damage: DamagedRange, begin: int, raw: bytes) -> int:
        segment = self._log.segment_at(begin)
        sums = await self._verified.load_sums(segment)
        view = memoryview(raw)
        proven = 0
        while proven < len(raw):
            at = begin + proven - segment.start
            block, within = divmod(at, self._block_size)
            length, expected = sums.lengths[block], sums.crcs[block]
            piece = view[proven : proven + length]
            crc = crc32(piece)
            if len(piece) < length and begin + len(raw) == damage.end:
                # The last block of the log, found damaged, has grown since: its checksum covers the new bytes, too.
                crc = crc32(await self._run_blocking(segment.file.pread, length - len(piece), at + len(piece)), crc)
            if within or not length or crc != expected:
                break
            proven += len(piece)
        return proven

    async def proves_alone(self, damage: DamagedRange, begin: int, raw: bytes) -> int:
        """Like `proves`, but for the start of a damaged range whose end is not available.

        Whole blocks are compared with their checksums, if these are known. Otherwise the bytes must be valid records
        that have consume queue entries. Raises OSError; OffsetGone if `begin` is no longer in the log.
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
            if not isinstance(found, RecordHead) or not self._queues.has_entry_of(found):
                break
            at += found.total_size
        return at

    async def rewrite(self, begin: int, raw: bytes) -> None:
        """Writes proven bytes over damaged ones, syncs them, and reads them back. Raises OSError if they can't be
        written, or if other bytes are read back.

        Raises OffsetGone if no listed range contains the bytes: meanwhile the log was truncated before their end, and
        may have other bytes there now, or its start was deleted.
        """
        log = self._log
        async with self._verified.checksums_held():
            if not self.damage.contains(begin, begin + len(raw)):
                raise OffsetGone(begin + len(raw), log.min_offset, log.max_offset.value)
            segment = log.segment_at(begin)
            await self._run_blocking(self._rewrite, segment, begin - segment.start, raw)

    def _rewrite(self, segment: Segment, position: int, raw: bytes) -> None:
        path = segment.file.path
        file = self._disk.open(path)  # if this descriptor's sync fails, the flusher's must fail as well
        file.pwrite(raw, position)
        file.sync()
        if file.pread(len(raw), position) != raw:
            raise OSError(f"{path} does not keep what is written at {position}")

    async def agrees(self, damage: DamagedRange, raw: bytes) -> bool:
        """Returns whether `raw`, sent by another node, equals the bytes on the disk here; if so, corrects their
        checksum.

        If they are equal, only the checksum was wrong, because another program wrote the log. Always False unless the
        damage is one block with a checksum and `raw` has all of its damaged bytes: a peer may have only the first
        records of it. Raises OSError if the checksums can't be read or written.
        """
        if not damage.by_checksum or len(raw) > self._block_size or damage.begin + len(raw) < damage.end:
            return False
        segment = self._log.segment_at(damage.begin)
        position = damage.begin - segment.start
        async with self._verified.checksums_held():
            try:
                if await self._run_blocking(segment.file.pread, len(raw), position) != raw:
                    return False
            except OSError:
                return False
            if damage.begin + len(raw) > self._log.max_offset.value:
                return False  # truncated meanwhile
            sums = await self._run_blocking(self._checksums.load, segment.start)
            sums.set(position // self._block_size, crc32(raw), len(raw))
            await self._run_blocking(self._checksums.write_back)
        logger.warning("checksums.corrected begin=%d end=%d", damage.begin, damage.end)
        return True

    def after_heal(self, damage: DamagedRange) -> None:
        """Makes the next reads check the records of a healed range again, and compute the checksums of its blocks. Does
        nothing if the blocks have checksums."""
        if not damage.by_checksum:
            sums = self._checksums.peek(damage.begin - damage.begin % self._checksums.segment_size)
            if sums is not None:
                sums.walked = sums.start
