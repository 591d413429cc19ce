"""Truncates the log of an open store: after a failover, a node removes the records that its new master does not have.

    flush, verify the block at the new end ─▶ intent on the disk ─▶ in memory: lower the offsets, stop dispatch
      ─▶ checksums ─▶ checkpoint ─▶ segments ─▶ queues ─▶ index ─▶ queueends ─▶ terms ─▶ intent removed ─▶ all continue

The intent is the file `logcut` (halog's own: CRC-32 as 8 hex digits, a newline, the physical offset in decimal). While
it exists, the log ends at that offset, even if the files contain later records. A start first completes a truncation
that a crash interrupted (`finish_files`, then the rest of recovery), so that no byte after the new end is ever read as
a message: neither by that start, nor later, when a new record ends exactly where an old one began. RocketMQ only moves
its positions and deletes the files after them (MappedFileQueue.truncateDirtyFiles,
https://github.com/apache/rocketmq/issues/10666): the rest of the last file keeps its old content, and recovery
continues in it.

If a crash left an incomplete intent, nothing had been truncated yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import trio
from isal.isal_zlib import crc32

from ha.errors import DamagedBytes, DiskFailed, DiskFull
from ha.protocol.record import Filler, scan_record
from ha.store.checkpointer import Checkpointer
from ha.store.checksums import Checksums
from ha.store.consume_queues import ConsumeQueues
from ha.store.files import Disk, is_passing
from ha.store.log_scan import LogScan
from ha.store.mapped_file import Segment
from ha.store.options import StoreOptions
from ha.store.segment_files import truncate_files, truncate_segments
from ha.store.store_parts import StoreParts

logger = logging.getLogger(__name__)

INTENT_FILE = "logcut"
_WALK_BYTES = 1 << 20
_FILLER_HEAD_SIZE = 8
_DIGITS_MAX = 19


# ---- the intent


def load_intent(disk: Disk, path: Path) -> int | None:
    """Returns the physical offset at which an interrupted truncation ends the log; None if there is none. Deletes an
    incomplete intent. Raises OSError."""
    if not disk.exists(path):
        return None
    guard, _, content = disk.read_bytes(path).partition(b"\n")
    if guard == _guard(content) and content.isdigit() and len(content) <= _DIGITS_MAX:
        return int(content)
    disk.unlink(path)
    return None


def save_intent(disk: Disk, path: Path, offset: int) -> None:
    """Writes and syncs the intent to truncate the log at `offset`. If it raises OSError, it is unknown whether the file
    exists."""
    content = b"%d" % offset
    disk.write_bytes(path, _guard(content) + b"\n" + content)


def _guard(content: bytes) -> bytes:
    return b"%08x" % crc32(content)


def finish_files(disk: Disk, options: StoreOptions, checksums: Checksums, offset: int) -> None:
    """Truncates checksums and segments at the offset in the intent, before recovery reads them. Blocking. Raises
    OSError."""
    logger.warning("store.truncation_resumed root=%s at=%d", options.root, offset)
    checksums.truncate(offset)
    truncate_files(disk, options.commitlog_path, offset)


# ---- record boundaries


def boundary_before(segments: Sequence[Segment], options: StoreOptions, queues: ConsumeQueues, offset: int) -> int:
    """Returns the last boundary between two records, or start of a segment, at or before `offset`; `offset` itself if
    no segment contains it. Blocking. Raises OSError.

    If bytes before `offset` are damaged, the result may be the boundary before the damage.
    """
    scan = LogScan(list(segments), options, is_clean=True)
    segment = scan.segment_at(offset)
    if segment is None:
        return offset
    if scan.head_at(offset) is not None:
        return offset
    at = segment.start
    distance = _WALK_BYTES
    while offset - distance > segment.start:
        start = queues.first_record_from(offset - distance)
        if start is not None and segment.start <= start <= offset and scan.head_at(start) is not None:
            at = start
            break
        distance *= 4
    while at < offset:
        size = _size_at(scan, segment, at)
        if not size or at + size > offset:
            break
        at += size
    return at


def record_end(segments: Sequence[Segment], options: StoreOptions, offset: int) -> int | None:
    """Returns the physical offset at which the record or filler at a physical offset ends; None if no intact one starts
    there. Blocking. Raises OSError."""
    scan = LogScan(list(segments), options, is_clean=True)
    segment = scan.segment_at(offset)
    size = 0 if segment is None else _size_at(scan, segment, offset)
    return offset + size if size else None


def _stored_before(scan: LogScan, queues: ConsumeQueues, offset: int) -> int:
    """Returns the store time of the last record before a record boundary, 0 if there is none. Blocking.

    Reads the log, as the queues may not have the record: its topic may be deleted.
    """
    segment = scan.segment_at(offset - 1)
    if segment is None:
        return 0
    at, stored_ms = max(queues.last_record_before(offset), segment.start), 0
    while at < offset and (head := scan.head_at(at)) is not None:
        stored_ms = head.store_timestamp_ms
        at += head.total_size
    return stored_ms


def _size_at(scan: LogScan, segment: Segment, physical_offset: int) -> int:
    """Returns the size in bytes of the record or filler at a physical offset; 0 if there is none."""
    head = scan.head_at(physical_offset)
    if head is not None:
        return head.total_size
    raw = segment.file.pread(_FILLER_HEAD_SIZE, physical_offset - segment.start)
    found = scan_record(raw, 0, len(raw))
    is_filler = isinstance(found, Filler) and found.total_size == segment.end - physical_offset
    return found.total_size if is_filler and isinstance(found, Filler) else 0


# ---- truncating


class Truncation:
    """Truncates one open store; `MessageStore.truncate` documents the guarantees."""

    def __init__(self, parts: StoreParts, checkpointer: Checkpointer) -> None:
        self._parts = parts
        self._checkpointer = checkpointer
        self._path = parts.options.root / INTENT_FILE

    async def check(self, offset: int) -> bool:
        """Prepares a truncation: flushes the log, and verifies the block that `offset` divides. False if the log ends
        there anyway.

        Raises ValueError if the log can't be truncated there; OSError if the log can't be read; DiskFull or DiskFailed
        if the disk is full or fails.
        """
        parts = self._parts
        log = parts.log
        if offset == log.max_offset.value:
            return False
        if not max(log.min_offset, 0) <= offset < log.max_offset.value:
            raise ValueError(f"can't truncate at {offset} a log that holds [{log.min_offset}, {log.max_offset.value})")
        boundary = await parts.run_blocking(self._boundary, offset)
        if boundary != offset:
            raise ValueError(f"{offset} lies within the record at {boundary}, or behind damage: can't truncate there")
        await parts.flusher.flush()
        await self._verify_block(offset)
        try:
            await log.allocator.drop_ready()
        except OSError as error:
            if is_passing(error):
                raise DiskFull(parts.options.commitlog_path, 0, error) from error
            raise DiskFailed(parts.options.commitlog_path, "unlink", str(error)) from error
        return True

    async def run(self, offset: int) -> None:
        """Truncates after `check`, while nothing of the store is saved, deleted or appended.

        Raises DiskFull if the intent can't be written because the disk is full or no file can be opened; nothing has
        changed then. Raises DiskFailed if the store must stop: the next start completes the truncation if the intent is
        on the disk.
        """
        async with self._parts.verified.checksums_held():
            with trio.CancelScope(shield=True):
                await self._save_intent(offset)
                try:
                    await self._truncate(offset)
                except (OSError, DiskFull) as error:
                    # The store must stop: the next start completes the truncation.
                    raise DiskFailed(self._path, f"truncating the log at {offset}", str(error)) from error

    async def _verify_block(self, offset: int) -> None:
        """Verifies the block that `offset` divides, and lists it if it is damaged, before a checksum of the remaining
        part is made."""
        log = self._parts.log
        start = log.segment_at(offset).start
        begin = offset - (offset - start) % self._parts.options.checksum_block_size
        if begin < offset:
            with suppress(DamagedBytes):
                await log.read(begin, offset - begin)

    async def _save_intent(self, offset: int) -> None:
        run, disk, path = self._parts.run_blocking, self._parts.disk, self._path
        try:
            await run(save_intent, disk, path, offset)
        except OSError as error:
            if not is_passing(error):
                raise DiskFailed(path, "write", str(error)) from error
            try:
                if disk.exists(path):
                    await run(disk.unlink, path)
            except OSError as second:
                raise DiskFailed(path, "unlink", str(second)) from second
            raise DiskFull(path, 0, error) from error

    async def _truncate(self, offset: int) -> None:
        parts, disk = self._parts, self._parts.disk
        log, run, queues, index = parts.log, parts.run_blocking, parts.queues, parts.index
        logger.warning("store.truncated root=%s at=%d end=%d", parts.options.root, offset, log.max_offset.value)
        segments = log.begin_truncation(offset)
        parts.flusher.fail_beyond(offset)
        await run(parts.verified.truncate, offset)
        divided = [damage.begin for damage in parts.damage.open if damage.begin < offset < damage.end]
        record_begins = {begin: await run(self._boundary, begin) for begin in divided}
        parts.damage.truncate(offset, lambda begin: record_begins.get(begin, begin))
        scan = LogScan(list(log.segments), parts.options, is_clean=True)
        # The store time of the last dispatched record suffices: later ones are read before the next put anyway
        # (undispatched.py).
        await self._checkpointer.cap_timestamps(await run(_stored_before, scan, queues, log.dispatched_offset.value))
        await run(truncate_segments, disk, segments, offset, "truncated")
        await run(queues.truncate, offset)
        if offset == log.min_offset:
            await run(queues.destroy)
        put_again_from = None
        if index is not None:
            put_again_from = await run(index.truncate, offset, scan.timestamp_at)
        await self._checkpointer.save_truncated()
        await parts.epochs.truncate_from(offset)
        await run(disk.unlink, self._path)
        if put_again_from is not None and index is not None and index.is_attached:
            parts.dispatcher.dispatch_again(max(put_again_from, log.min_offset))
        log.end_truncation()

    def _boundary(self, offset: int) -> int:
        parts = self._parts
        return boundary_before(parts.log.segments, parts.options, parts.queues, offset)
