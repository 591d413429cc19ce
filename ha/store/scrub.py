"""The scrub: all of the log read again at a bounded rate, compared with its checksums, and what is derived with it.

One round goes from the log's begin to what is dispatched. Reading is what verifies the log (verified_reads.py). The
records that were read say what the consume queues and the key index must hold:

- a queue entry that differs is written anew, at once; so is one that a reader stumbles over (`mend`);
- an index file that differs is deleted with those after it, and built again from the log while dispatch goes on.

A damaged range of the log is passed over; what is derived of it is compared in the next round, which begins as soon as
the range has been healed. The scrub runs on the event loop in steps of a millisecond, and sleeps in between what the
rate says, and at least `_REST` times as long as a step took.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import trio

from ha.errors import DamagedBytes, OffsetGone
from ha.protocol.codes import SysFlag
from ha.protocol.record import Filler, RecordHead, scan_record
from ha.protocol.store_files import ENTRY
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import ConsumeQueue
from ha.store.consume_queues import ConsumeQueues
from ha.store.index_cursor import IndexCursor
from ha.store.key_index import KeyIndex
from ha.store.log_scan import LogScan
from ha.store.mapped_file import RunBlocking
from ha.store.options import StoreOptions

logger = logging.getLogger(__name__)

_STEP_BYTES = 128 << 10
_REST = 9
_MEND_BYTES_MAX = 256 << 20
"""A missing entry's record is looked for in so much of the log; beyond it is left to the scrub."""
_MEND_AHEAD_BYTES = 1 << 20
_BACK_ENTRIES_MAX = 64
_VISIBLE = (SysFlag.TRANSACTION_NOT, SysFlag.TRANSACTION_COMMIT)


class ScrubStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How far the scrub is, and what it and readers mended."""

    round_count: int
    """Rounds completed since the start"""
    position: int
    """Physical offset up to which this round has come; -1 between two rounds"""
    scrubbed_bytes: int
    queue_entries_mended_count: int
    index_rebuilt_count: int


class Scrub:
    """One store's. `run` is its task; `mend` is for readers."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        index: KeyIndex | None,
        options: StoreOptions,
        *,
        run_blocking: RunBlocking,
    ) -> None:
        self._log = log
        self._queues = queues
        self._index = index
        self._options = options
        self._run_blocking = run_blocking
        self._round_count = 0
        self._position = -1
        self._scrubbed_bytes = 0
        self._mended_count = 0
        self._index_rebuilt_count = 0
        self._mending = trio.Lock()
        self._round_ended = trio.lowlevel.ParkingLot()
        self._is_wanted = trio.Event()

    def statistics(self) -> ScrubStatistics:
        """Return this moment's figures."""
        return ScrubStatistics(
            round_count=self._round_count,
            position=self._position,
            scrubbed_bytes=self._scrubbed_bytes,
            queue_entries_mended_count=self._mended_count,
            index_rebuilt_count=self._index_rebuilt_count,
        )

    async def run(self) -> None:
        """Go round after round until cancelled; with a rate of 0 only when `want` says so."""
        options = self._options
        wait_s = options.scrub_first_s
        while True:
            with trio.move_on_after(wait_s if options.scrub_bytes_per_s else float("inf")):
                await self._is_wanted.wait()
            self._is_wanted = trio.Event()
            await self.round()
            wait_s = options.scrub_pause_s

    @property
    def _end(self) -> int:
        """Up to where records are dispatched. A filler is as a whole when its head is there; the rest may be coming."""
        log = self._log
        return min(log.dispatched_offset.value, log.max_offset.value)

    def want(self) -> None:
        """Begin the next round now."""
        self._is_wanted.set()

    async def round(self) -> None:
        """Go through all of the store once."""
        log = self._log
        generation = log.generation
        is_index_sound = await self._check_index_files()
        cursor = IndexCursor(self._index) if self._index is not None and is_index_sound else None
        for start in [segment.start for segment in log.segments]:
            try:
                if not await self._scrub_segment(start, cursor):
                    is_index_sound, cursor = False, None
                if generation != log.generation:
                    break
                if log.segments and start >= log.segments[0].start:
                    await self._log.verified.check_checksums(start)
            except OffsetGone:  # deleted meanwhile
                if cursor is not None:
                    cursor.skip()
            except OSError as error:  # unreadable where no checksum tells what should be there; or the disk is full
                logger.error("scrub.failed segment=%d at=%d reason=%s", start, self._position, error)
                cursor = None
        if self._index is not None and not (is_index_sound and self._index.is_attached):
            try:
                await self._rebuild_index()
            except OSError as error:
                logger.error("index.rebuild_failed reason=%s", error)
        self._round_count += 1
        self._position = -1
        self._round_ended.unpark_all()

    async def _scrub_segment(self, start: int, cursor: IndexCursor | None) -> bool:
        """Go through one segment; False if the index, along which `cursor` goes, differs from its records."""
        log = self._log
        generation = log.generation
        position = start
        while True:
            await log.wait_truncated()
            end = min(start + log.segment_size, self._end)
            if position >= end or generation != log.generation:
                if cursor is not None and position < start + log.segment_size:
                    cursor.close()  # more may be dispatched here before the next segment's turn
                return True
            self._position = position
            began = trio.current_time()
            try:
                heads, behind = await self._heads(position, end)
            except DamagedBytes as damaged:
                if cursor is not None:
                    cursor.close()
                position = await self._behind(position, damaged.end)
                continue
            if generation != log.generation:
                return True
            await self._mend(heads)
            if cursor is not None and not await cursor.follows(heads, self._run_blocking):
                logger.error("index.mismatch_found begin=%d end=%d", position, behind)
                return False
            if behind == position:
                return True  # what is no record, to dispatch neither
            self._scrubbed_bytes += behind - position
            rate = self._options.scrub_bytes_per_s
            took_s = trio.current_time() - began
            await trio.sleep(max((behind - position) / rate if rate else 0.0, took_s * _REST))
            position = behind

    async def wait_round(self) -> None:
        """Begin a round and wait for its end; for tools and tests."""
        self.want()
        await self._round_ended.park()

    # ---- records

    async def _heads(self, position: int, end: int) -> tuple[list[RecordHead], int]:
        """Return the records at a physical offset and after, some of them, and where they end."""
        log = self._log
        size = _STEP_BYTES
        while True:
            raw = b""
            while len(raw) < min(size, end - position):
                try:
                    raw += await self._read(position + len(raw), min(size, end - position) - len(raw))
                except DamagedBytes:
                    if not raw:
                        raise
                    size = len(raw)
                    break
            heads = list(self._parse(raw, position))
            segment_end = position - position % log.segment_size + log.segment_size
            at = heads[-1].physical_offset + heads[-1].total_size if heads else position
            if isinstance(scan_record(raw, at - position, len(raw)), Filler):
                await self._read_through(at, min(segment_end, end))
                return heads, segment_end
            if heads or position + len(raw) >= end:
                return heads, at
            if len(raw) <= size // 2 or size == len(raw) < _STEP_BYTES:
                # A damaged place begins before the record ends.
                await self._read(position + len(raw), 1)
            size *= 4

    async def _read_through(self, position: int, end: int) -> None:
        """Have the end of a segment verified, in which there are no records."""
        while position < end:
            position += len(await self._read(position, min(_STEP_BYTES, end - position)))

    async def _read(self, position: int, size: int) -> memoryview:
        """Read at least one byte. OffsetGone, too, if the log was cut there meanwhile."""
        log = self._log
        raw = await log.read(position, size, "scrub")
        if not raw:
            raise OffsetGone(position, log.min_offset, log.max_offset.value)
        return raw

    def _parse(self, raw: bytes, base: int) -> Iterator[RecordHead]:
        at = 0
        while at < len(raw):
            found = scan_record(raw, at, len(raw), delay_levels_ms=self._options.delay_levels_ms)
            if not isinstance(found, RecordHead) or found.physical_offset != base + at:
                return
            yield found
            at += found.total_size

    async def _behind(self, position: int, end: int) -> int:
        """Return where records go on behind damage: at the next one that is sound, at most the segment's end.

        What else is damaged up to there, or to the segment's end, is found on the way.
        """
        segment = self._log.segment_at(position)
        at, stop = end, min(segment.end, self._end)
        while at < stop:
            try:
                await self._read_through(at, stop)
                break
            except DamagedBytes as damaged:
                at = damaged.end
        if end >= segment.end:
            return segment.end
        scan = LogScan([segment], self._options, is_clean=True)
        found: RecordHead | None = await self._run_blocking(scan.next_good_record, end - 1, 0)
        return found.physical_offset if found is not None else segment.end

    # ---- queues

    async def _mend(self, heads: list[RecordHead]) -> None:
        """Compare the entries of these records, and write those that differ."""
        generation = self._log.generation
        for (topic, queue_id), group in _by_queue(heads).items():
            queue = self._queues.get(topic, queue_id)
            if queue is None:
                continue
            at = 0
            while at < len(group):
                first = group[at].queue_offset
                run = at + 1
                while run < len(group) and group[run].queue_offset == first + run - at:
                    run += 1
                entries = [ENTRY.pack(head.physical_offset, head.total_size, head.tags_code) for head in group[at:run]]
                found = await queue.fetch_raw(first, len(entries), self._run_blocking)
                if generation != self._log.generation:
                    return  # the end of the log was cut off meanwhile
                mended = queue.repair(first, entries) if found != b"".join(entries) else 0
                if mended:
                    self._mended_count += mended
                    logger.error(
                        "queue.entries_repaired topic=%s queue_id=%d first=%d count=%d", topic, queue_id, first, mended
                    )
                at = run

    async def mend(self, queue: ConsumeQueue, queue_offset: int) -> bool:
        """Write an entry of a queue anew that a reader found wrong; False if its record isn't found in the log.

        DamagedBytes if that may lie where the log is damaged. The entries after it are compared as well.
        """
        async with self._mending:
            before = self._mended_count
            await self._log.wait_truncated()
            generation = self._log.generation
            position = await self._record_before(queue, queue_offset)
            stop = min(self._end, position + _MEND_BYTES_MAX)
            while position < stop:
                try:
                    heads, behind = await self._heads(position, stop)
                except OffsetGone:
                    break
                if generation != self._log.generation:
                    break  # the end of the log was cut off meanwhile
                mine = [h for h in heads if h.topic == queue.topic and h.queue_id == queue.queue_id]
                await self._mend(mine)
                if any(head.queue_offset >= queue_offset for head in mine):
                    stop = min(stop, behind + _MEND_AHEAD_BYTES)
                if behind == position:
                    break
                position = behind
            if self._mended_count == before:
                self.want()
            return self._mended_count > before

    async def _record_before(self, queue: ConsumeQueue, queue_offset: int) -> int:
        """Physical offset of a record of the queue before an offset, proven by the log; the log's begin without."""
        log = self._log
        for offset in range(queue_offset - 1, max(queue.min_offset, queue_offset - _BACK_ENTRIES_MAX) - 1, -1):
            for entry in queue.read(offset, 1):
                if not log.min_offset <= entry.physical_offset < self._end:
                    continue
                try:
                    heads, _ = await self._heads(entry.physical_offset, self._end)
                except (DamagedBytes, OffsetGone):
                    continue
                if heads and (heads[0].topic, heads[0].queue_id, heads[0].queue_offset) == (
                    queue.topic,
                    queue.queue_id,
                    offset,
                ):
                    return heads[0].physical_offset
        return max(log.min_offset, 0)

    # ---- the key index

    async def _check_index_files(self) -> bool:
        """Whether each index file is consistent in itself."""
        if self._index is None:
            return True
        for file in list(self._index.files):
            trouble = await self._run_blocking(self._index.trouble_in, file)
            if trouble:
                logger.error("index.damage_found file=%s reason=%s", file.path, trouble)
                return False
        return True

    async def _rebuild_index(self) -> None:
        """Delete the index and build it again from the log, while dispatch goes on without it."""
        index, log = self._index, self._log
        assert index is not None
        self._index_rebuilt_count += 1
        logger.error("index.rebuild_started files=%d", len(index.files))
        await self._run_blocking(index.delete, index.detach())
        position = max(log.min_offset, 0)
        generation = log.generation
        while position < self._end:
            await log.wait_truncated()
            if generation != log.generation:  # set aside, or cut, meanwhile: what is indexed may be gone
                generation, position = log.generation, max(log.min_offset, 0)
                await self._run_blocking(index.delete, index.detach())
                continue
            began = trio.current_time()
            end = min(position - position % log.segment_size + log.segment_size, self._end)
            try:
                heads, behind = await self._heads(position, end)
            except DamagedBytes as damaged:
                behind = await self._behind(position, damaged.end)
                heads = []
            except OffsetGone:
                behind, heads = max(log.min_offset, 0), []
            if heads and index.lacks_file(len(index.keys_of(heads)), heads[-1].physical_offset):
                await self._run_blocking(index.make_spare)
            if generation != log.generation:
                continue
            index.put_heads(heads)
            if behind == position:
                break
            position = behind
            await trio.sleep(trio.current_time() - began)
        index.attach()


def _by_queue(heads: list[RecordHead]) -> dict[tuple[str, int], list[RecordHead]]:
    groups: dict[tuple[str, int], list[RecordHead]] = {}
    for head in heads:
        if head.sys_flag & SysFlag.TRANSACTION_MASK in _VISIBLE:
            groups.setdefault((head.topic, head.queue_id), []).append(head)
    return groups
