"""Dispatch (RocketMQ: reput): from the commitlog to consume queues and index, in batches, and word of what arrived.

One task reads records between `dispatched_offset` and the end (with SYNC_FLUSH: the flushed end). It runs on masters
and slaves alike and is idempotent: records that a queue or the index already knows are skipped, so it may begin early.
Sources: DefaultMessageStore.ReputMessageService, CommitLogDispatcherBuildConsumeQueue, -BuildIndex.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import trio

from ha.errors import DamagedBytes, DiskFailed, OffsetGone
from ha.protocol.codes import SysFlag
from ha.protocol.record import Filler, RecordHead, Unparsable, scan_record
from ha.protocol.store_files import ENTRY, ENTRY_SIZE
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import ConsumeQueues
from ha.store.files import is_full, is_passing
from ha.store.key_index import KeyIndex
from ha.store.options import StoreOptions

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 128 * 1024
_CHUNK_RECORDS_MAX = 256
"""Work between two checkpoints: about 3 ms."""
_PAUSE_S = 1.0
_QUEUE_OFFSET_MAX = (1 << 62) // ENTRY_SIZE
_VISIBLE = (SysFlag.TRANSACTION_NOT, SysFlag.TRANSACTION_COMMIT)


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
        limit = log.flushed_offset if self._options.is_sync_flush else log.max_offset
        while True:
            position = log.dispatched_offset.value
            if position >= limit.value:
                await limit.wait_beyond(position)
                continue
            end = limit.value
            if await self._advance(end):
                continue
            if self._damaged is None:
                await limit.wait_beyond(end)
            else:
                await log.wait_healed(self._damaged.begin, self._damaged.begin + 1)

    async def catch_up(self) -> None:
        """Dispatch everything up to the log's end, as far as it can be; for recovery."""
        while self._log.dispatched_offset.value < self._log.max_offset.value:
            if not await self._advance(self._log.max_offset.value):
                return

    async def catch_up_for_stop(self) -> None:
        """Dispatch the rest before closing, unless the disk is full: the next start then does it."""
        if not self.paused_reason or self._damaged is not None:
            await self.catch_up()

    async def _advance(self, end: int) -> bool:
        """Dispatch one chunk. False if nothing can be done until there are more bytes."""
        log = self._log
        position = log.dispatched_offset.value
        generation = log.generation
        size = _CHUNK_BYTES
        self._damaged = None
        while True:
            try:
                chunk = await log.read(position, min(size, end - position), "dispatch")
            except DamagedBytes as damaged:
                return self._meet_damage(position, damaged)
            except OffsetGone:
                if generation != log.generation:
                    return True
                logger.warning("dispatch_skipped from=%d to=%d reason=deleted", position, log.min_offset)
                log.dispatched_offset.reset(max(log.min_offset, 0))
                return True
            if generation != log.generation:
                return True  # the log was set aside meanwhile
            segment_end = log.segment_at(position).end
            heads, consumed, trouble = self._parse(chunk, position, segment_end)
            if consumed or trouble is not None:
                break
            if position + len(chunk) >= min(end, segment_end):
                return False  # an incomplete record at the end
            if len(chunk) < size:  # read up to a damaged place, or to the end of a block
                rest = await self._read_rest(position, chunk, min(4 * size, min(end, segment_end) - position))
                if rest is None:
                    return False
                heads, consumed, trouble = self._parse(rest, position, segment_end)
                if consumed or trouble is not None:
                    break
            size *= 4
        if trouble is not None and not consumed:
            return self._pass_over(position, trouble, min(end, segment_end))
        while True:
            try:
                arrivals = self._build(heads)
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
        if heads:
            self.dispatched_timestamp_ms = heads[-1].store_timestamp_ms
            log.last_store_timestamp_ms = max(log.last_store_timestamp_ms, self.dispatched_timestamp_ms)
        log.dispatched_offset.raise_to(position + consumed)
        if arrivals:
            for callback in self._subscribers:
                callback(arrivals)
        return True

    async def _read_rest(self, position: int, chunk: memoryview | bytes, size: int) -> bytes | None:
        """Read on behind a chunk that ended early, up to `size` bytes in all; None if damage is in the way."""
        pieces = bytes(chunk)
        while len(pieces) < size:
            try:
                piece = await self._log.read(position + len(pieces), size - len(pieces), "dispatch")
            except DamagedBytes as damaged:
                self._meet_damage(position, damaged)
                return None
            if not piece:
                break
            pieces += piece
        return pieces

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
    ) -> tuple[list[RecordHead], int, Unparsable | None]:
        """Return the records at the begin of `chunk`, the bytes they take, and what stopped before its end."""
        buffer = chunk if isinstance(chunk, bytes) else bytes(chunk)
        end = len(buffer)
        heads: list[RecordHead] = []
        position = 0
        levels = self._options.delay_levels_ms
        while position < end and len(heads) < _CHUNK_RECORDS_MAX:
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
        if self._options.is_slave:
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
        groups: dict[tuple[str, int], list[RecordHead]] = {}
        for head in heads:
            if head.sys_flag & SysFlag.TRANSACTION_MASK in _VISIBLE:
                key = (head.topic, head.queue_id)
                group = groups.get(key)
                if group is None:
                    if not _is_usable(head):
                        self._skip(head, "unusable topic or queue")
                        continue
                    groups[key] = [head]
                else:
                    group.append(head)
        arrivals = []
        for (topic, queue_id), group in groups.items():
            arrival = self._build_queue(topic, queue_id, group)
            if arrival is not None:
                arrivals.append(arrival)
        if self._index is not None and self._index.is_attached:
            self._index.put_heads(heads)
        return arrivals

    def _build_queue(self, topic: str, queue_id: int, group: list[RecordHead]) -> Arrival | None:
        queue = self._queues.get_or_create(topic, queue_id)
        done = queue.max_physical_offset
        expected = first = queue.max_offset
        cleared_to = expected if queue.min_offset == expected else 0
        entries: list[bytes] = []
        codes: list[int] = []
        pack = ENTRY.pack
        for head in group:
            physical = head.physical_offset
            end = physical + head.total_size
            if end <= done:
                continue
            queue_offset = head.queue_offset
            if queue_offset != expected:
                if queue_offset < cleared_to:
                    continue  # dispatched again after a restart
                if queue_offset < expected or queue_offset > _QUEUE_OFFSET_MAX:
                    self._skip(head, f"queue offset {queue_offset} where {expected} comes next")
                    continue
                if entries:
                    queue.append(first, entries)
                    entries = []
                first = expected = queue_offset
            entries.append(pack(physical, head.total_size, head.tags_code))
            codes.append(head.tags_code)
            expected += 1
        if entries:
            queue.append(first, entries)
        return Arrival(topic, queue_id, queue.max_offset, codes) if codes else None

    def _skip(self, head: RecordHead, reason: str) -> None:
        self.skipped_count += 1
        name = f"{head.topic!r}-{head.queue_id}"
        if name not in self._skipped and len(self._skipped) < 1000:
            self._skipped.add(name)
            logger.error("record_not_queued at=%d queue=%s reason=%s", head.physical_offset, name, reason)


def _is_usable(head: RecordHead) -> bool:
    """Whether a record's queue can be a directory: a replica's bytes must not lead to files elsewhere."""
    topic = head.topic
    return (
        head.queue_id >= 0
        and 0 < len(topic) <= 255
        and topic not in (".", "..")
        and "/" not in topic
        and "\x00" not in topic
        and topic.isprintable()
    )
