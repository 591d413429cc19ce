"""Cutting the end of an open store's log off, as a node does whose master never had it (a failover).

    flush, verify the cut's block ─▶ intent on the disk ─▶ in memory: offsets fall, nobody derives
      ─▶ checksums ─▶ checkpoint ─▶ segments ─▶ queues ─▶ index ─▶ queueends ─▶ terms ─▶ intent gone ─▶ all go on

The intent, the file `logcut` (halog's own: CRC-32 as 8 hex digits, a newline, the physical offset in decimal), says
that the log ends there whatever else is found. What a crash leaves undone a start does first (`finish_files`, then
the rest of recovery), so that no byte behind the cut is ever taken for a message: neither at a start in between, nor
when later a new record ends exactly where an old one began. RocketMQ only moves its positions and deletes the files
behind (MappedFileQueue.truncateDirtyFiles, https://github.com/apache/rocketmq/issues/10666): the rest of the last file
stays as it was, and recovery reads on in it.

A torn or empty intent was never said to be on the disk: nothing had been done after it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from isal.isal_zlib import crc32

from ha.errors import DamagedBytes, DiskFailed, DiskFull
from ha.protocol.record import Filler, scan_record
from ha.store.checksums import Checksums
from ha.store.consume_queue import ConsumeQueues
from ha.store.files import Disk, is_passing
from ha.store.log_scan import LogScan
from ha.store.mapped_file import Segment
from ha.store.options import StoreOptions
from ha.store.segment_files import cut_files, cut_segments

if TYPE_CHECKING:
    from ha.store.message_store import MessageStore

logger = logging.getLogger(__name__)

INTENT_FILE = "logcut"
_WALK_BYTES = 1 << 20
_FILLER_HEAD_SIZE = 8
_DIGITS_MAX = 19


# ---- the intent


def load_intent(disk: Disk, path: Path) -> int | None:
    """Return where the log is to be cut; None if there is no intent. One that was not written whole is removed."""
    if not disk.exists(path):
        return None
    guard, _, content = disk.read_bytes(path).partition(b"\n")
    if guard == _guard(content) and content.isdigit() and len(content) <= _DIGITS_MAX:
        return int(content)
    disk.unlink(path)
    return None


def save_intent(disk: Disk, path: Path, offset: int) -> None:
    """Write the file and sync it. OSError: whether it is there is unknown."""
    content = b"%d" % offset
    disk.write_bytes(path, _guard(content) + b"\n" + content)


def _guard(content: bytes) -> bytes:
    return b"%08x" % crc32(content)


def finish_files(disk: Disk, options: StoreOptions, checksums: Checksums, offset: int) -> None:
    """Do to checksums and segments what the intent says, before a start looks at them. Blocking."""
    logger.warning("log_cut_finished root=%s at=%d", options.root, offset)
    checksums.truncate(offset)
    cut_files(disk, options.commitlog_path, offset)


# ---- where records begin


def boundary_before(segments: Sequence[Segment], options: StoreOptions, queues: ConsumeQueues, offset: int) -> int:
    """Return the last place at or before `offset` that lies between two records, or at a segment's begin. Blocking.

    As far as it can be told: not behind damage.
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


def _stored_before(scan: LogScan, queues: ConsumeQueues, offset: int) -> int:
    """Return when the last record before a place between two was stored, 0 if there is none. Blocking.

    No queue may know it: its topic may be deleted.
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
    """Size of the record or filler at an offset; 0 if there is none."""
    head = scan.head_at(physical_offset)
    if head is not None:
        return head.total_size
    raw = segment.file.pread(_FILLER_HEAD_SIZE, physical_offset - segment.start)
    found = scan_record(raw, 0, len(raw))
    is_filler = isinstance(found, Filler) and found.total_size == segment.end - physical_offset
    return found.total_size if is_filler and isinstance(found, Filler) else 0


# ---- the cut


class Truncation:
    """Cuts one open store; `MessageStore.truncate` says what it promises."""

    def __init__(self, store: MessageStore, disk: Disk) -> None:
        self._store = store
        self._disk = disk
        self._path = store.options.root / INTENT_FILE

    async def run(self, offset: int) -> bool:
        """Cut, while nothing of the store is saved, cleaned or appended; False if the log ends there anyway."""
        store = self._store
        log, run = store.log, store.run_blocking
        if offset == log.max_offset.value:
            return False
        if not max(log.min_offset, 0) <= offset < log.max_offset.value:
            raise ValueError(f"can't cut at {offset} a log that holds [{log.min_offset}, {log.max_offset.value})")
        boundary = await run(boundary_before, log.segments, store.options, store.queues, offset)
        if boundary != offset:
            raise ValueError(f"{offset} lies in the record at {boundary}, or behind damage: a log isn't cut there")
        await store.flusher.flush()
        await self._verify_block(offset)
        try:
            await log.allocator.drop_ready()
        except OSError as error:
            raise DiskFailed(store.options.commitlog_path, "unlink", str(error)) from error
        async with store.verified.held():
            with trio.CancelScope(shield=True):
                await self._save_intent(offset)
                try:
                    await self._cut(offset)
                except (OSError, DiskFull) as error:
                    # Nobody goes on: the next start finishes it.
                    raise DiskFailed(self._path, f"cutting the log at {offset}", str(error)) from error
        return True

    async def _verify_block(self, offset: int) -> None:
        """Have it found out, and listed, if what stays of the block in which the cut is isn't what was written: its
        checksum is made anew."""
        log = self._store.log
        start = log.segment_at(offset).start
        begin = offset - (offset - start) % self._store.options.checksum_block_size
        if begin < offset:
            with suppress(DamagedBytes):
                await log.read(begin, offset - begin)

    async def _save_intent(self, offset: int) -> None:
        run, disk, path = self._store.run_blocking, self._disk, self._path
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
            raise DiskFull(path, 0, str(error)) from error

    async def _cut(self, offset: int) -> None:
        store, disk = self._store, self._disk
        log, run, queues, index = store.log, store.run_blocking, store.queues, store.index
        logger.warning("log_cut root=%s at=%d end=%d", store.options.root, offset, log.max_offset.value)
        segments = log.begin_cut(offset)
        store.flusher.refuse_beyond(offset)
        await run(store.verified.cut, offset)
        store.damage.cut(offset, self._boundary)
        scan = LogScan(list(log.segments), store.options, is_clean=True)
        # Who puts next looks at what is not dispatched yet himself.
        await store.forget_times_after(await run(_stored_before, scan, queues, log.dispatched_offset.value))
        await run(cut_segments, disk, segments, offset, "cut")
        await run(queues.truncate, offset)
        put_again_from = None
        if index is not None:
            put_again_from = await run(index.cut, offset, scan.timestamp_at)
        await store.save_cut_derived()
        await store.epochs.truncate_from(offset)
        await run(disk.unlink, self._path)
        if put_again_from is not None and index is not None and index.is_attached:
            again_from = max(put_again_from, log.min_offset)
            log.dispatched_offset.reset(min(log.dispatched_offset.value, again_from))
        log.end_cut()

    def _boundary(self, offset: int) -> int:
        store = self._store
        return boundary_before(store.log.segments, store.options, store.queues, offset)


__all__ = ["INTENT_FILE", "Truncation", "boundary_before", "finish_files", "load_intent", "save_intent"]
