"""Dispatch (RocketMQ: reput): from the commitlog to consume queues and index, in batches, and word of what arrived.

One task reads records between `dispatched_offset` and the end (with SYNC_FLUSH: the flushed end), or the log's
`dispatch_limit` where that comes first. It runs on masters and slaves alike and is idempotent: records that a queue or
the index already knows are skipped, so it may begin early.
Sources: DefaultMessageStore.ReputMessageService, CommitLogDispatcherBuildConsumeQueue, -BuildIndex.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
import trio

from ha.errors import DamagedBytes, DiskFailed, OffsetGone
from ha.protocol.codes import SysFlag
from ha.protocol.entry_dtypes import ENTRY_DTYPE
from ha.protocol.record import RECORD_SIZE_MIN, Filler, Readable, RecordHead, Unparsable, scan_record
from ha.protocol.record_table import RecordTable, scan_table
from ha.protocol.store_files import ENTRY, ENTRY_SIZE
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import ConsumeQueues
from ha.store.files import is_full, is_passing
from ha.store.key_index import KeyIndex
from ha.store.options import StoreOptions

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
"""Records that begin within so many bytes are dispatched before the next checkpoint, and then their queues are filled
one after the other: readers of the files count on it (ha/arrow/settled.py)."""
_SINGLE_RECORDS_MAX = 256
_TABLE_RECORDS_MAX = 1024
"""At most so many at once: two ms of work, and 10 ms of records of which none is usual."""
_TABLE_RECORDS_MIN = 96
"""So many cost less as a table than one by one."""
_PAUSE_S = 1.0
_QUEUE_OFFSET_MAX = (1 << 62) // ENTRY_SIZE
_VISIBLE = (SysFlag.TRANSACTION_NOT, SysFlag.TRANSACTION_COMMIT)
_Place = tuple[int, int, int, int]
"""A record's physical offset, size, queue offset and tags code"""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """Messages that came to one queue: the queue's end (entries) and the tags codes of the new ones, in order."""

    topic: str
    queue_id: int
    max_queue_offset: int
    tags_codes: list[int]


class Dispatcher:
    """Keeps queues and index up with the log."""

    def __init__(self, log: CommitLog, queues: ConsumeQueues, index: KeyIndex | None, options: StoreOptions) -> None:
        self._log = log
        self._queues = queues
        self._index = index
        self._options = options
        self._subscribers: list[Callable[[list[Arrival]], None]] = []
        self._stalled_at = -1
        self._skipped: set[str] = set()
        self.paused_reason = ""
        """Why dispatch does not go on although there are bytes; empty if it does"""
        self.dispatched_timestamp_ms = 0
        """Store time of the last record dispatched [checkpoint: logicsMsgTimestamp]"""
        self.skipped_count = 0
        """Records that could not be given to their queue"""
        self._damaged: DamagedBytes | None = None

    def subscribe(self, callback: Callable[[list[Arrival]], None]) -> None:
        """Have `callback` called, synchronously, after each batch that brought messages."""
        self._subscribers.append(callback)

    async def run(self) -> None:
        """Dispatch what is there and what comes, until cancelled. DiskFailed if the disk fails, not if it is full."""
        log = self._log
        written = log.flushed_offset if self._options.is_sync_flush else log.max_offset
        allowed = log.dispatch_limit
        while True:
            if log.cut_under_way is not None:
                await log.wait_cut()
            position = log.dispatched_offset.value
            limit = written if written.value < allowed.value else allowed
            if position >= limit.value:
                await limit.wait_beyond(position)
                continue
            end = limit.value
            if await self._advance(end):
                if log.dispatched_offset.value < limit.value:
                    await trio.lowlevel.checkpoint()
                continue
            if self._damaged is None:
                await limit.wait_beyond(end)
            else:
                await log.wait_healed(self._damaged.begin, self._damaged.begin + 1)

    async def catch_up(self) -> None:
        """Dispatch everything up to the log's end or limit, as far as it can be; for recovery."""
        while self._log.dispatched_offset.value < self._log.dispatchable_end:
            if not await self._advance(self._log.dispatchable_end):
                return
            await trio.lowlevel.checkpoint()

    async def catch_up_for_stop(self) -> None:
        """Dispatch the rest before closing, unless the disk is full: the next start then does it."""
        if not self.paused_reason or self._damaged is not None:
            await self.catch_up()

    async def _advance(self, end: int) -> bool:
        """Dispatch one chunk. False if nothing can be done until there are more bytes.

        No checkpoint if the bytes are in memory: whoever waited for them has just had one.
        """
        log = self._log
        position = log.dispatched_offset.value
        generation = log.generation
        size = _CHUNK_BYTES
        self._damaged = None
        while True:
            try:
                hot = log.read_hot(position, min(size, end - position))
                chunk = hot if hot else await log.read(position, min(size, end - position), "dispatch")
            except DamagedBytes as damaged:
                return generation != log.generation or self._meet_damage(position, damaged)
            except OffsetGone:
                if generation != log.generation:
                    return True
                logger.warning("dispatch_skipped from=%d to=%d reason=deleted", position, log.min_offset)
                log.dispatched_offset.reset(max(log.min_offset, 0))
                return True
            if generation != log.generation:
                return True  # the log was set aside, or cut, meanwhile
            segment_end = log.segment_at(position).end
            found, consumed, trouble = self._parse(chunk, position, segment_end)
            if consumed or trouble is not None:
                break
            if position + len(chunk) >= min(end, segment_end):
                return False  # an incomplete record at the end
            if len(chunk) < size:  # read up to a damaged place, or to the end of a block
                rest = await self._read_rest(position, chunk, min(4 * size, min(end, segment_end) - position))
                if generation != log.generation:
                    return True
                if rest is None:
                    return False
                found, consumed, trouble = self._parse(rest, position, segment_end)
                if consumed or trouble is not None:
                    break
            size *= 4
        if trouble is not None and not consumed:
            return self._pass_over(position, trouble, min(end, segment_end))
        while True:
            try:
                arrivals = self._build_table(found) if isinstance(found, RecordTable) else self._build(found)
                break
            except OSError as error:
                if not is_passing(error):
                    raise DiskFailed(self._options.root, "dispatch", str(error)) from error
                if not self.paused_reason:
                    logger.error("dispatch_paused at=%d reason=%s", position, error)
                self.paused_reason = f"{'disk full' if is_full(error) else 'no file can be opened'}: {error}"
            await trio.sleep(_PAUSE_S)
            if generation != log.generation:
                return True
        if self.paused_reason:
            logger.warning("dispatch_resumed at=%d", position)
            self.paused_reason = ""
        if found:
            self.dispatched_timestamp_ms = (
                int(found.store_ms[-1]) if isinstance(found, RecordTable) else found[-1].store_timestamp_ms
            )
            log.last_store_timestamp_ms = max(log.last_store_timestamp_ms, self.dispatched_timestamp_ms)
        log.dispatched_offset.raise_to(position + consumed)
        if arrivals:
            for callback in self._subscribers:
                callback(arrivals)
        return True

    async def _read_rest(self, position: int, chunk: memoryview | bytes, size: int) -> bytes | None:
        """Read on behind a chunk that ended early, up to `size` bytes in all; None if damage is in the way, or the log
        was cut."""
        pieces, generation = bytes(chunk), self._log.generation
        while len(pieces) < size:
            try:
                piece = await self._log.read(position + len(pieces), size - len(pieces), "dispatch")
            except DamagedBytes as damaged:
                if generation == self._log.generation:
                    self._meet_damage(position, damaged)
                return None
            except OffsetGone:
                if generation == self._log.generation:
                    raise
                return None
            if not piece:
                break
            pieces += piece
        return pieces

    def forget_times_after(self, stored_ms: int) -> None:
        """The log was cut: its last record was stored at that time."""
        self.dispatched_timestamp_ms = min(self.dispatched_timestamp_ms, stored_ms)
        self._stalled_at, self.paused_reason = -1, ""

    def _meet_damage(self, position: int, damaged: DamagedBytes) -> bool:
        """Go on behind damaged bytes if the queues know every record there, else wait for them to be healed."""
        self._damaged = damaged
        known_to = self._queues.known_to(position, damaged.end)
        if known_to >= damaged.end:
            logger.warning("dispatch_passed_damage from=%d to=%d: the queues know what is there", position, known_to)
            self._log.dispatched_offset.raise_to(known_to)
            return True
        reason = f"waits for bytes [{damaged.begin}, {damaged.end}) to be healed"
        if reason != self.paused_reason:
            logger.error("dispatch_paused at=%d reason=%s", position, reason)
        self.paused_reason = reason
        return False

    def _parse(
        self, chunk: memoryview | bytes, base: int, segment_end: int
    ) -> tuple[list[RecordHead] | RecordTable, int, Unparsable | None]:
        """Return the records at the begin of `chunk`, the bytes they take, and what stopped before its end."""
        first_size = max(int.from_bytes(chunk[:4], "big"), RECORD_SIZE_MIN)
        if len(chunk) >= _TABLE_RECORDS_MIN * first_size:
            table = scan_table(
                chunk,
                base,
                count_max=_TABLE_RECORDS_MAX,
                bytes_max=_CHUNK_BYTES,
                delay_levels_ms=self._options.delay_levels_ms,
            )
            if len(table) >= _TABLE_RECORDS_MIN:
                found, consumed, trouble = self._parse_singly(chunk, table.size, base, segment_end, count_max=1)
                return table, table.size if found else consumed, trouble
        # Slices of bytes are cheaper, a copy of long records isn't.
        buffer = bytes(chunk) if len(chunk) <= _SINGLE_RECORDS_MAX * first_size else chunk
        return self._parse_singly(buffer, 0, base, segment_end, count_max=_SINGLE_RECORDS_MAX)

    def _parse_singly(
        self, buffer: Readable, position: int, base: int, segment_end: int, *, count_max: int
    ) -> tuple[list[RecordHead], int, Unparsable | None]:
        end = len(buffer)
        heads: list[RecordHead] = []
        levels = self._options.delay_levels_ms
        while position < end and len(heads) < count_max and (position < _CHUNK_BYTES or not heads):
            found = scan_record(buffer, position, end, delay_levels_ms=levels)
            if type(found) is RecordHead:
                if found.physical_offset != base + position:
                    reason = f"it says that it is at {found.physical_offset}"
                    return heads, position, Unparsable(found.total_size, reason)
                heads.append(found)
                position += found.total_size
            elif type(found) is Filler:
                return heads, segment_end - base, None
            elif found is None:
                claimed = int.from_bytes(buffer[position : position + 4], "big", signed=True)
                if end - position >= 4 and claimed > segment_end - base - position:
                    return heads, position, Unparsable(0, f"{claimed} bytes do not fit the segment")
                break
            else:
                assert isinstance(found, Unparsable)
                return heads, position, found
        return heads, position, None

    def _pass_over(self, position: int, trouble: Unparsable, end: int) -> bool:
        """Deal with bytes that are no record: a slave waits for better ones, a master skips them (as RocketMQ does)."""
        if self._log.is_slave:
            if self._stalled_at != position:
                self._stalled_at = position
                logger.error("dispatch_stalled at=%d reason=%s", position, trouble.reason)
            self.paused_reason = f"no record at {position}: {trouble.reason}"
            return False
        step = trouble.total_size if 0 < trouble.total_size <= end - position else end - position
        logger.error("dispatch_skipped from=%d to=%d reason=%s", position, position + step, trouble.reason)
        self.skipped_count += 1
        self._log.dispatched_offset.raise_to(position + step)
        return True

    def _build(self, heads: list[RecordHead]) -> list[Arrival]:
        groups: dict[tuple[str, int], list[_Place]] = {}
        for head in heads:
            if head.sys_flag & SysFlag.TRANSACTION_MASK in _VISIBLE:
                key = (head.topic, head.queue_id)
                group = groups.get(key)
                if group is None:
                    if not _is_usable(*key):
                        self._skip(*key, head.physical_offset, "unusable topic or queue")
                        continue
                    group = groups[key] = []
                group.append((head.physical_offset, head.total_size, head.queue_offset, head.tags_code))
        arrivals = []
        for (topic, queue_id), group in groups.items():
            arrival = self._build_queue(topic, queue_id, group)
            if arrival is not None:
                arrivals.append(arrival)
        if self._index is not None and self._index.is_attached:
            self._index.put_heads(heads)
        return arrivals

    def _build_table(self, table: RecordTable) -> list[Arrival]:
        """Do what `_build` does, of many records at once."""
        groups = _Groups(table)
        arrivals = []
        for number, (topic, queue_id) in enumerate(groups.names):
            if not _is_usable(topic, queue_id):
                for physical_offset, *_ in groups.places(number):
                    self._skip(topic, queue_id, physical_offset, "unusable topic or queue")
                continue
            queue = self._queues.get_or_create(topic, queue_id)
            run = groups.run(number, queue.max_offset, queue.max_physical_offset)
            if run is None:
                arrival = self._build_queue(topic, queue_id, groups.places(number))
            else:
                entries, codes = run
                queue.append(queue.max_offset, [entries])
                arrival = Arrival(topic, queue_id, queue.max_offset, codes)
            if arrival is not None:
                arrivals.append(arrival)
        if self._index is not None and self._index.is_attached:
            self._index.put_table(table)
        return arrivals

    def _build_queue(self, topic: str, queue_id: int, places: Iterable[_Place]) -> Arrival | None:
        queue = self._queues.get_or_create(topic, queue_id)
        done = queue.max_physical_offset
        expected = first = queue.max_offset
        cleared_to = expected if queue.min_offset == expected else 0
        entries: list[bytes] = []
        codes: list[int] = []
        pack = ENTRY.pack
        for physical, size, queue_offset, code in places:
            if physical + size <= done:
                continue
            if queue_offset != expected:
                if queue_offset < cleared_to:
                    continue  # dispatched again after a restart
                if queue_offset < expected or queue_offset > _QUEUE_OFFSET_MAX:
                    self._skip(topic, queue_id, physical, f"queue offset {queue_offset} where {expected} comes next")
                    continue
                if entries:
                    queue.append(first, entries)
                    entries = []
                first = expected = queue_offset
            entries.append(pack(physical, size, code))
            codes.append(code)
            expected += 1
        if entries:
            queue.append(first, entries)
        return Arrival(topic, queue_id, queue.max_offset, codes) if codes else None

    def _skip(self, topic: str, queue_id: int, physical_offset: int, reason: str) -> None:
        self.skipped_count += 1
        name = f"{topic!r}-{queue_id}"
        if name not in self._skipped and len(self._skipped) < 1000:
            self._skipped.add(name)
            logger.error("record_not_queued at=%d queue=%s reason=%s", physical_offset, name, reason)


class _Groups:
    """The records of a table that consumers may see, by queue, in the order of their first ones."""

    def __init__(self, table: RecordTable) -> None:
        transaction = table.sys_flag & SysFlag.TRANSACTION_MASK
        rows = np.flatnonzero((transaction == _VISIBLE[0]) | (transaction == _VISIBLE[1]))
        queues = (table.topic_of << 32 | table.queue_id & 0xFFFFFFFF)[rows]
        order = np.argsort(queues, kind="stable")
        queues, rows = queues[order], rows[order]
        is_begin = np.append(True, queues[1:] != queues[:-1])[: len(rows)]
        begins = np.flatnonzero(is_begin)
        physical, size, code = table.physical_offset[rows], table.total_size[rows], table.tags_code[rows]
        queue_offset = table.queue_offset[rows]
        entries = np.empty(len(rows), ENTRY_DTYPE)
        entries["physical_offset"], entries["size"], entries["tags_code"] = physical, size, code
        self._entries = entries.tobytes()
        self._codes: list[int] = code.tolist()
        self._columns = physical, size, queue_offset
        firsts = rows[begins]
        # Where a queue offset does not follow the one before it in the group.
        breaks = np.append(0, np.cumsum(~is_begin[1:] & (queue_offset[1:] != queue_offset[:-1] + 1)))
        ends = np.append(begins[1:], len(rows))
        in_order = np.argsort(firsts)
        begins, ends, firsts = begins[in_order], ends[in_order], firsts[in_order]
        self._begins: list[int] = begins.tolist()
        self._ends: list[int] = ends.tolist()
        self._are_dense: list[bool] = (breaks[begins] == breaks[ends - 1]).tolist() if len(rows) else []
        self._first_offsets: list[int] = table.queue_offset[firsts].tolist()
        self._first_ends: list[int] = (table.physical_offset + table.total_size)[firsts].tolist()
        topics = table.topics
        self.names = [
            (topics[topic], queue_id)
            for topic, queue_id in zip(table.topic_of[firsts].tolist(), table.queue_id[firsts].tolist(), strict=True)
        ]

    def run(self, number: int, queue_offset: int, physical_offset: int) -> tuple[bytes, list[int]] | None:
        """All entries of a group, and their tags codes, if they simply go on where its queue ends; else None."""
        if (
            not self._are_dense[number]
            or self._first_offsets[number] != queue_offset
            or self._first_ends[number] <= physical_offset
        ):
            return None
        begin, end = self._begins[number], self._ends[number]
        return self._entries[begin * ENTRY_SIZE : end * ENTRY_SIZE], self._codes[begin:end]

    def places(self, number: int) -> Iterator[_Place]:
        """The records of a group, one by one."""
        begin, end = self._begins[number], self._ends[number]
        return zip(*(column[begin:end].tolist() for column in self._columns), self._codes[begin:end], strict=True)


def _is_usable(topic: str, queue_id: int) -> bool:
    """Whether a record's queue can be a directory: a replica's bytes must not lead to files elsewhere."""
    return (
        queue_id >= 0
        and 0 < len(topic) <= 255
        and topic not in (".", "..")
        and "/" not in topic
        and "\x00" not in topic
        and topic.isprintable()
    )
