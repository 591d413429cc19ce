"""The scrub reads the whole log at a bounded rate, and compares it with its checksums and with what is derived from it.

One round goes from the log's first record to the last dispatched one. Reading verifies the log (verified_reads.py), and
its records determine the content of the consume queues and the key index:

- a queue entry that differs is rewritten at once; so is one that a reader finds wrong (`repair_entry`). A queue file
  that the disk can't read is replaced by a copy first;
- if an index file differs, the whole index is deleted, and rebuilt from the log while dispatch continues.

A damaged range of the log is skipped. Its entries are compared in the next round, which begins when the range is healed
and, if dispatch waited for that, dispatched. The scrub runs on the event loop in steps of a millisecond, and sleeps in
between as the rate requires, at least `_REST` times as long as a step took.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import trio

from ha.errors import DamagedBytes, OffsetGone
from ha.protocol.codes import SysFlag
from ha.protocol.record import Filler, RecordHead, scan_record
from ha.protocol.store_files import ENTRY, ENTRY_SIZE
from ha.protocol.topic_names import SCHEDULE_TOPIC
from ha.store.consume_queue import ConsumeQueue, QueueEntry
from ha.store.files import is_passing
from ha.store.index_cursor import IndexCursor
from ha.store.index_file import IndexFile
from ha.store.key_index import KeyIndex
from ha.store.log_scan import LogScan
from ha.store.store_parts import StoreParts

logger = logging.getLogger(__name__)

_DELAY_MS_MAX = 366 * 86_400_000
"""Maximum delay of a scheduled message; a later time in a queue entry is treated as damage."""
_STEP_BYTES = 128 << 10
_REST = 9
_PAUSE_S = 1.0
_REPAIR_BYTES_MAX = 256 << 20
"""Maximum number of bytes of the log that `repair_entry` searches for the record of a wrong entry. If the record is not
among them, the next round of the scrub repairs the entry."""
_REPAIR_AHEAD_BYTES = 1 << 20
_BACK_ENTRIES_MAX = 256
"""Maximum number of entries before a wrong one among which `repair_entry` searches for a right one. The 205 entries of
a block of the disk may all be unreadable."""
_VISIBLE = (SysFlag.TRANSACTION_NOT, SysFlag.TRANSACTION_COMMIT)


class ScrubStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the scrub, and what it and readers repaired."""

    round_count: int
    """Number of rounds completed since the start"""
    position: int
    """Physical offset that this round has reached; -1 between two rounds"""
    scrubbed_bytes: int
    queue_entries_mended_count: int
    index_rebuilt_count: int


class Scrub:
    """The scrub of one store. `run` is its task; `repair_entry` is for readers."""

    def __init__(self, parts: StoreParts) -> None:
        self._log = parts.log
        self._queues = parts.queues
        self._index = parts.index
        self._options = parts.options
        self._run_blocking = parts.run_blocking
        self._round_count = 0
        self._position = -1
        self._scrubbed_bytes = 0
        self._repaired_count = 0
        self._index_rebuilt_count = 0
        self._dropped: list[IndexFile] = []  # of a damaged index, not yet deleted
        self._repair_lock = trio.Lock()
        self._round_ended = trio.lowlevel.ParkingLot()
        self._wanted = trio.Event()

    def statistics(self) -> ScrubStatistics:
        """Returns the progress of the scrub, and how much was repaired."""
        return ScrubStatistics(
            round_count=self._round_count,
            position=self._position,
            scrubbed_bytes=self._scrubbed_bytes,
            queue_entries_mended_count=self._repaired_count,
            index_rebuilt_count=self._index_rebuilt_count,
        )

    async def run(self) -> None:
        """Runs rounds until cancelled; with a rate of 0 only those that `want` requests."""
        options = self._options
        wait_s = options.scrub_first_s
        while True:
            with trio.move_on_after(wait_s if options.scrub_bytes_per_s else float("inf")):
                await self._wanted.wait()
            self._wanted = trio.Event()
            await self.round()
            while self._lacks_index:
                await trio.sleep(options.scrub_first_s)
                await self._try_to_rebuild_index()
            wait_s = options.scrub_pause_s

    @property
    def _end(self) -> int:
        """Physical offset after the dispatched records, but not beyond the log's end: dispatch skips a filler when it
        has read its head, although a slave may not have the rest yet."""
        log = self._log
        return min(log.dispatched_offset.value, log.max_offset.value)

    def want(self) -> None:
        """Makes the next round begin at once, after the present one if one is in progress."""
        self._wanted.set()

    async def round(self) -> None:
        """Checks the whole store once, and rebuilds the index if it is wrong."""
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
            except OSError as error:  # bytes without a checksum can't be read, or the disk is full
                logger.error("scrub.failed segment=%d at=%d reason=%r", start, self._position, str(error))
                cursor = None
        if self._lacks_index or not is_index_sound:
            await self._try_to_rebuild_index()
        self._round_count += 1
        self._position = -1
        self._round_ended.unpark_all()

    async def _scrub_segment(self, start: int, cursor: IndexCursor | None) -> bool:
        """Checks one segment; returns False if the entries of the index at `cursor` differ from its records."""
        log = self._log
        generation = log.generation
        position = start
        while True:
            await log.wait_truncated()
            end = min(start + log.segment_size, self._end)
            if position >= end or generation != log.generation:
                if cursor is not None and position < start + log.segment_size:
                    cursor.close()  # more may be dispatched here before the next segment is checked
                return True
            self._position = position
            began = trio.current_time()
            try:
                heads, behind = await self._heads(position, end)
            except DamagedBytes as damaged:
                if cursor is not None:
                    cursor.close()
                position = await self._resume_after(position, damaged.end)
                continue
            if generation != log.generation:
                return True
            if behind == position:  # no record is there: dispatch has skipped these bytes
                position = await self._resume_after(position, position + 1)
                continue
            await self._repair(heads)
            if cursor is not None and not await cursor.follows(heads, self._run_blocking):
                logger.error("index.mismatch_found begin=%d end=%d", position, behind)
                return False
            self._scrubbed_bytes += behind - position
            rate = self._options.scrub_bytes_per_s
            took_s = trio.current_time() - began
            await trio.sleep(max((behind - position) / rate if rate else 0.0, took_s * _REST))
            position = behind

    async def wait_round(self) -> None:
        """Requests a round and waits for the end of a round: the present one if one is in progress. For tools and
        tests."""
        self.want()
        await self._round_ended.park()

    # ---- records

    async def _heads(self, position: int, end: int) -> tuple[list[RecordHead], int]:
        """Returns the heads of some records from a physical offset on, and the physical offset after these records and
        a filler that follows them; `position` if there are none. Raises DamagedBytes, OffsetGone, OSError."""
        log = self._log
        size = _STEP_BYTES
        while True:
            raw, stop = b"", min(size, end - position)
            while len(raw) < stop:
                try:
                    raw += await self._read(position + len(raw), stop - len(raw))
                except DamagedBytes:
                    if not any(self._parse(raw, position)):
                        raise
                    break
            heads = list(self._parse(raw, position))
            segment_end = position - position % log.segment_size + log.segment_size
            at = heads[-1].physical_offset + heads[-1].total_size if heads else position
            found = scan_record(raw, at - position, len(raw))
            if isinstance(found, Filler):
                await self._read_through(at, min(segment_end, end))
                return heads, segment_end
            if heads or found is not None or position + len(raw) >= end:
                return heads, at
            size *= 4

    async def _heads_or_next(self, position: int, end: int) -> tuple[list[RecordHead], int]:
        """Like `_heads`, but where the log is damaged or has no record, returns no records, and the physical offset at
        which sound records continue."""
        bad_to = position + 1
        try:
            heads, behind = await self._heads(position, end)
            if behind > position:
                return heads, behind
        except DamagedBytes as damaged:
            bad_to = damaged.end
        return [], await self._resume_after(position, bad_to)

    async def _read_through(self, position: int, end: int) -> None:
        """Verifies the bytes of [`position`, `end`) without parsing records. Raises DamagedBytes, OffsetGone,
        OSError."""
        while position < end:
            position += len(await self._read(position, min(_STEP_BYTES, end - position)))

    async def _read(self, position: int, size: int) -> memoryview:
        """Returns at least one and at most `size` verified bytes. Raises DamagedBytes, OSError; OffsetGone also if the
        log was truncated there meanwhile."""
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

    async def _resume_after(self, position: int, end: int) -> int:
        """Returns the physical offset of the next sound record after damage that ends at `end`, or the segment's end.

        Reads and verifies everything up to the end of the segment, so that other damage in it is found, too.
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

    async def _repair(self, heads: list[RecordHead]) -> None:
        """Compares the queue entries of these records with the records, and rewrites entries that differ."""
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
                found = await self._entries(queue, first, len(entries))
                if generation != self._log.generation:
                    return  # the log was truncated meanwhile
                if topic == SCHEDULE_TOPIC:
                    entries = _with_known_times(entries, found, group[at:run])
                repaired = 0
                if found != b"".join(entries):
                    async with self._log.maintenance_lock:  # meanwhile no file of the queue is deleted
                        if generation != self._log.generation:
                            return
                        repaired = await self._rewrite(queue, first, entries)
                if repaired:
                    self._repaired_count += repaired
                    logger.error(
                        "queue.entries_repaired topic=%s queue_id=%d first=%d count=%d",
                        topic,
                        queue_id,
                        first,
                        repaired,
                    )
                at = run

    async def _entries(self, queue: ConsumeQueue, first: int, count: int) -> bytes:
        """Returns up to `count` entries of a queue from `first` on. Before that, replaces the files of these entries
        that the disk can't read; the entries that it can't read are zeros then. Raises OSError."""
        try:
            return await queue.fetch_raw(first, count, self._run_blocking)
        except OSError as error:
            if is_passing(error):
                raise
        async with self._log.maintenance_lock:  # meanwhile no file of the queue is deleted
            files = queue.files
            for start in list(files.starts):
                if not start < first + count or not first < start + files.file_entries:
                    continue
                if start == files.starts[-1]:  # on the event loop, as in `_rewrite`
                    queue.replace_unreadable(start)
                else:
                    await self._run_blocking(queue.replace_unreadable, start)
        return await queue.fetch_raw(first, count, self._run_blocking)

    async def _rewrite(self, queue: ConsumeQueue, first: int, entries: list[bytes]) -> int:
        """Replaces entries of a queue from `first` on by `entries`; returns how many differed. Raises OSError.

        A worker replaces those before the last file, because a file that is too short is copied and synced. Those in
        the last file are replaced on the event loop: dispatch could add others to the file while a worker copies it,
        and the copy would lack them.
        """
        starts = queue.files.starts
        count = max(0, starts[-1] - first) if starts else 0
        older, newer = entries[:count], entries[count:]
        repaired: int = await self._run_blocking(queue.repair, first, older) if older else 0
        return repaired + queue.repair(first + len(older), newer)

    async def repair_entry(self, queue: ConsumeQueue, queue_offset: int) -> bool:
        """Rewrites an entry of a queue that a reader found wrong, and wrong entries near it; returns whether it rewrote
        any.

        If it rewrites none, for example because the record isn't found in the log, it requests a round. Raises
        DamagedBytes if the record may lie where the log is damaged, OSError if log or queue can't be read or written.
        """
        async with self._repair_lock:
            before = self._repaired_count
            await self._log.wait_truncated()
            generation = self._log.generation
            position = await self._record_before(queue, queue_offset)
            stop = min(self._end, position + _REPAIR_BYTES_MAX)
            while position < stop:
                try:
                    heads, behind = await self._heads(position, stop)
                except OffsetGone:
                    break
                if generation != self._log.generation:
                    break  # the log was truncated meanwhile
                mine = [h for h in heads if h.topic == queue.topic and h.queue_id == queue.queue_id]
                await self._repair(mine)
                if any(head.queue_offset >= queue_offset for head in mine):
                    stop = min(stop, behind + _REPAIR_AHEAD_BYTES)
                if behind == position:
                    break
                position = behind
            if self._repaired_count == before:
                self.want()
            return self._repaired_count > before

    async def _record_before(self, queue: ConsumeQueue, queue_offset: int) -> int:
        """Returns the physical offset of a record of the queue before `queue_offset`, whose entry the log confirms; if
        none of the last _BACK_ENTRIES_MAX entries is right, the log's first offset."""
        log = self._log
        first = max(queue.min_offset, queue_offset - _BACK_ENTRIES_MAX)
        raw = await self._entries(queue, first, queue_offset + 1 - first)
        for offset in range(queue_offset - 1, first - 1, -1):
            entry = QueueEntry._make(ENTRY.unpack_from(raw, (offset - first) * ENTRY_SIZE))
            if entry.size <= 0 or not log.min_offset <= entry.physical_offset < self._end:
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
        """Returns whether each index file is internally consistent; True if entries were removed during the check."""
        if self._index is None:
            return True
        for file in list(self._index.files):
            generation = self._index.generation
            try:
                trouble = await self._run_blocking(self._index.trouble_in, file, file.next_entry, file.slots)
            except OSError as error:
                trouble = str(error)
            if generation != self._index.generation:
                return True  # entries were removed meanwhile: the next round checks
            if trouble:
                logger.error("index.damage_found file=%s reason=%r", file.path, trouble)
                return False
        return True

    @property
    def _lacks_index(self) -> bool:
        """Whether the index is incomplete, because its last rebuild failed."""
        return self._index is not None and not self._index.is_attached

    async def _try_to_rebuild_index(self) -> None:
        try:
            await self._rebuild_index()
        except OSError as error:
            logger.error("index.rebuild_failed reason=%r", str(error))

    async def _rebuild_index(self) -> None:
        """Deletes the index and rebuilds it from the log, while dispatch continues without it. Waits while the disk is
        full or no file can be opened. After another OSError the index stays incomplete and detached."""
        index, log = self._index, self._log
        assert index is not None
        self._index_rebuilt_count += 1
        logger.error("index.rebuild_started files=%d", len(index.files))
        position, generation, is_paused = 0, -1, False
        while generation != log.generation or position < self._end:
            await log.wait_truncated()
            began = trio.current_time()
            end = min(position - position % log.segment_size + log.segment_size, self._end)
            try:
                if generation != log.generation:  # first, or set aside or truncated meanwhile: records may be gone
                    await self._drop_index(index)
                    generation, position = log.generation, max(log.min_offset, 0)
                    continue
                heads, behind = await self._heads_or_next(position, end)
                if heads and index.lacks_file(len(index.keys_of(heads)), heads[-1].physical_offset):
                    await self._run_blocking(index.make_spare)
                if generation != log.generation:
                    continue
                index.put_heads(heads)
            except OffsetGone:
                behind = max(log.min_offset, 0)
            except OSError as error:
                if not is_passing(error):
                    raise
                if not is_paused:
                    logger.error("index.rebuild_paused at=%d reason=%r", position, str(error))
                is_paused = True
                await trio.sleep(_PAUSE_S)
                continue
            position, is_paused = behind, False
            await trio.sleep(trio.current_time() - began)
        index.attach()

    async def _drop_index(self, index: KeyIndex) -> None:
        """Detaches the index and deletes its files, while nothing else saves, trims, truncates or moves it. Raises
        OSError; the next call deletes the files that are left."""
        async with self._log.maintenance_lock:
            self._dropped += index.detach()
            await self._run_blocking(index.delete, self._dropped)


def _with_known_times(entries: list[bytes], found: bytes, heads: list[RecordHead]) -> list[bytes]:
    """Returns `entries` with the delivery times that the queue has: they were computed with the delay levels
    (messageDelayLevel) at the time of dispatch. A time that is not plausible is replaced."""
    kept = []
    for number, (entry, head) in enumerate(zip(entries, heads, strict=True)):
        known = found[number * ENTRY.size : (number + 1) * ENTRY.size]
        is_same = len(known) == ENTRY.size and ENTRY.unpack(known)[:2] == ENTRY.unpack(entry)[:2]
        delay_ms = ENTRY.unpack(known)[2] - head.store_timestamp_ms if is_same else -1
        kept.append(known if 0 <= delay_ms <= _DELAY_MS_MAX else entry)
    return kept


def _by_queue(heads: list[RecordHead]) -> dict[tuple[str, int], list[RecordHead]]:
    groups: dict[tuple[str, int], list[RecordHead]] = {}
    for head in heads:
        if head.sys_flag & SysFlag.TRANSACTION_MASK in _VISIBLE:
            groups.setdefault((head.topic, head.queue_id), []).append(head)
    return groups
