"""Dispatch (RocketMQ: reput): from the commitlog to consume queues and index, in batches, and word of what arrived.

One task reads records between `dispatched_offset` and the end (with SYNC_FLUSH: the flushed end), or the log's
`dispatch_limit` where that comes first. It runs on masters and slaves alike and is idempotent: records that a queue or
the index already knows are skipped, so it may begin early.
Sources: DefaultMessageStore.ReputMessageService, CommitLogDispatcherBuildConsumeQueue, -BuildIndex.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
import trio

from ha.errors import DamagedBytes, DiskFailed, OffsetGone
from ha.protocol.record import Unparsable
from ha.protocol.record_digest import KEY_SIZE, QueueRun, RecordDigest, digest_records
from ha.protocol.store_files import ENTRY, ENTRY_SIZE
from ha.protocol.topic_names import NAME_SIZE_MAX, is_queue_directory
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import ConsumeQueue, ConsumeQueues, NewFile
from ha.store.files import Disk, File, is_full, is_passing
from ha.store.key_index import KeyIndex
from ha.store.mapped_file import RunBlocking
from ha.store.options import StoreOptions

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
"""Records that begin within so many bytes are dispatched before the next checkpoint, and then their queues are filled
one after the other: readers of the files count on it (ha/arrow/settled.py)."""
_RECORDS_MAX = 1024
"""At most so many at once: half a ms of work, 10 ms of records of which none is usual, or where nothing is compiled."""
_PAUSE_S = 1.0
_FILES_WAIT_S = 3.0
"""A slave may have a whole log to dispatch; clients give most questions 5 s or 6 s."""
_QUEUE_OFFSET_MAX = (1 << 62) // ENTRY_SIZE
_Place = tuple[tuple[int, int, int], int]
"""A record's entry (physical offset, size, tags code) and queue offset"""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """Messages that came to one queue: the queue's end (entries) and the tags codes of the new ones, in order."""

    topic: str
    queue_id: int
    max_queue_offset: int
    tags_codes: list[int]


class Dispatcher:
    """Keeps queues and index up with the log."""

    def __init__(
        self,
        log: CommitLog,
        queues: ConsumeQueues,
        index: KeyIndex | None,
        options: StoreOptions,
        disk: Disk,
        run_blocking: RunBlocking,
    ) -> None:
        self._log = log
        self._disk = disk
        self._run_blocking = run_blocking
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
        self._is_making = False
        self._askers = trio.lowlevel.ParkingLot()

    def subscribe(self, callback: Callable[[list[Arrival]], None]) -> None:
        """Have `callback` called, synchronously, after each batch that brought messages."""
        self._subscribers.append(callback)

    async def run(self) -> None:
        """Dispatch what is there and what comes, until cancelled. DiskFailed if the disk fails, not if it is full."""
        try:
            await self._run()
        finally:
            self._let_askers_go()

    async def _run(self) -> None:
        log = self._log
        written = log.flushed_offset if self._options.is_sync_flush else log.max_offset
        allowed = log.dispatch_limit
        while True:
            if log.cut_under_way is not None:
                await log.wait_cut()
            position = log.dispatched_offset.value
            limit = written if written.value < allowed.value else allowed
            if position >= limit.value:
                self._let_askers_go()
                await limit.wait_beyond(position)
                continue
            end = limit.value
            if await self._advance(end):
                if self._askers:
                    self._askers.unpark_all()
                if log.dispatched_offset.value < limit.value:
                    await trio.lowlevel.checkpoint()
                continue
            self._let_askers_go()
            if self._damaged is None:
                await limit.wait_beyond(end)
            else:
                await log.wait_healed(self._damaged.begin, self._damaged.begin + 1)

    async def wait_files_made(self) -> None:
        """If a worker makes files for queues, wait until what the log has now is dispatched, or can't be: 3 s at most.

        No checkpoint if none does. Whoever finds nothing in a queue, or in the index, may look again afterwards: the
        first message of a queue is to be found by who was told that it is stored.
        """
        end = self._log.max_offset.value
        if self._is_making:
            with trio.move_on_after(_FILES_WAIT_S):
                while self._is_making and self._log.dispatched_offset.value < end:
                    await self._askers.park()

    def _let_askers_go(self) -> None:
        self._is_making = False
        if self._askers:
            self._askers.unpark_all()

    async def catch_up(self) -> None:
        """Dispatch everything up to the log's end or limit, as far as it can be. Not while `run` does it."""
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
            digest = self._digest(chunk, position, segment_end)
            if digest.size or digest.trouble is not None:
                break
            if position + len(chunk) >= min(end, segment_end):
                return False  # an incomplete record at the end
            if len(chunk) < size:  # read up to a damaged place, or to the end of a block
                rest = await self._read_rest(position, chunk, min(4 * size, min(end, segment_end) - position))
                if generation != log.generation:
                    return True
                if rest is None:
                    return False
                digest = self._digest(rest, position, segment_end)
                if digest.size or digest.trouble is not None:
                    break
            size *= 4
        if digest.trouble is not None and not digest.size:
            return self._pass_over(position, digest.trouble, min(end, segment_end))
        while True:
            try:
                await self._make_files(digest)
                if generation != log.generation:
                    return True
                arrivals = self._build(digest)
                break
            except OSError as error:
                if not is_passing(error):
                    raise DiskFailed(self._options.root, "dispatch", str(error)) from error
                if not self.paused_reason:
                    logger.error("dispatch_paused at=%d reason=%s", position, error)
                self.paused_reason = f"{'disk full' if is_full(error) else 'no file can be opened'}: {error}"
            self._let_askers_go()
            await trio.sleep(_PAUSE_S)
            if generation != log.generation:
                return True
        if self.paused_reason:
            logger.warning("dispatch_resumed at=%d", position)
            self.paused_reason = ""
        if digest.count:
            self.dispatched_timestamp_ms = digest.store_timestamp_ms
            log.last_store_timestamp_ms = max(log.last_store_timestamp_ms, self.dispatched_timestamp_ms)
        log.dispatched_offset.raise_to(position + digest.size)
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

    def _digest(self, chunk: memoryview | bytes, base: int, segment_end: int) -> RecordDigest:
        index = self._index
        return digest_records(
            chunk,
            base,
            segment_end,
            count_max=_RECORDS_MAX,
            bytes_max=_CHUNK_BYTES,
            delay_levels_ms=self._options.delay_levels_ms,
            with_keys=index is not None and index.is_attached,
            with_tags=index is not None and index.has_tags,
        )

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

    async def _make_files(self, digest: RecordDigest) -> None:
        """Make the files that queues and index lack for these records, in a worker: that waits for the disk, and may
        have to fill them. OSError. If the log is cut or set aside meanwhile nobody needs them, and they go again."""
        wanted: list[NewFile] = []
        for run in digest.queues:
            queue = self._queues.get(run.topic, run.queue_id)
            end = run.queue_offset + len(run.entries) // ENTRY_SIZE
            if queue is not None and not queue.lacks_files_to(end):
                continue
            if run.queue_offsets is None and end <= _QUEUE_OFFSET_MAX and is_queue_directory(run.topic, run.queue_id):
                queue = self._queues.get_or_create(run.topic, run.queue_id)
                wanted += queue.new_files(run.queue_offset, end)
        index = self._index
        key_count = len(digest.keys) // KEY_SIZE
        if index is not None and not (index.is_attached and index.lacks_file(key_count, digest.last_offset)):
            index = None
        if not wanted and index is None:
            return
        log = self._log
        generation = log.generation
        made: list[tuple[NewFile, File]] = []
        self._is_making = True
        try:
            await self._run_blocking(_make_next_files, wanted, made, index)
        except OSError:
            if generation == log.generation:
                raise
        finally:
            if generation == log.generation:
                for new, file in made:
                    new.queue.adopt(new, file)
                made = []
            if made or (index is not None and (generation != log.generation or not index.is_attached)):
                with trio.CancelScope(shield=True):
                    await self._run_blocking(self._remove, made, index)

    def _remove(self, made: list[tuple[NewFile, File]], index: KeyIndex | None) -> None:
        if index is not None:
            index.drop_spare()
        for _, file in made:
            with suppress(FileNotFoundError):  # set aside with all others
                self._disk.unlink(file.path)

    def _build(self, digest: RecordDigest) -> list[Arrival]:
        arrivals = []
        for run in digest.queues:
            arrival = self._build_queue(run)
            if arrival is not None:
                arrivals.append(arrival)
        index = self._index
        if index is not None and index.is_attached and digest.count:
            index.put(digest.keys, digest.first_offset, digest.last_offset)
        return arrivals

    def _build_queue(self, run: QueueRun) -> Arrival | None:
        topic, queue_id = run.topic, run.queue_id
        if not is_queue_directory(topic, queue_id):
            for physical_offset, *_ in ENTRY.iter_unpack(run.entries):
                self._skip(topic, queue_id, physical_offset, "unusable topic or queue")
            return None
        queue = self._queues.get_or_create(topic, queue_id)
        if run.queue_offset == queue.max_offset and run.queue_offsets is None:
            physical_offset, size, _ = ENTRY.unpack_from(run.entries)
            if physical_offset + size > queue.max_physical_offset:  # as usual: it simply goes on
                queue.append(run.queue_offset, [run.entries])
                return Arrival(topic, queue_id, queue.max_offset, run.tags_codes)
        offsets: Iterable[int] = itertools.count(run.queue_offset) if run.queue_offsets is None else run.queue_offsets
        return self._build_singly(queue, zip(ENTRY.iter_unpack(run.entries), offsets, strict=False))

    def _build_singly(self, queue: ConsumeQueue, places: Iterable[_Place]) -> Arrival | None:
        topic, queue_id = queue.topic, queue.queue_id
        done = queue.max_physical_offset
        expected = first = queue.max_offset
        cleared_to = expected if queue.min_offset == expected else 0
        entries: list[bytes] = []
        codes: list[int] = []
        pack = ENTRY.pack
        for (physical, size, code), queue_offset in places:
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
        name = f"{topic[:NAME_SIZE_MAX]!r}-{queue_id}"
        if name not in self._skipped and len(self._skipped) < 1000:
            self._skipped.add(name)
            logger.error("record_not_queued at=%d queue=%s reason=%s", physical_offset, name, reason)


def _make_next_files(wanted: Sequence[NewFile], made: list[tuple[NewFile, File]], index: KeyIndex | None) -> None:
    """Make files one after the other, each in `made` as soon as it is, and an index's next one. Blocking. OSError."""
    for new in wanted:
        made.append((new, new.queue.make_file(new)))
    if index is not None:
        index.make_spare()
