"""Builds consume queues and the key index from the commitlog in batches (RocketMQ: reput), and notifies readers of new
messages.

One task reads records from `dispatched_offset` up to the end (with SYNC_FLUSH: the flushed end), or up to the log's
`dispatch_limit` if that comes first. While the task is idle, records that are appended in a turn of the node's poller
(ha/poller.py) are dispatched at the end of that turn, without waking the task, unless dispatching them has to wait.
Dispatch runs on masters and slaves alike and is idempotent: records that a queue or the index already has are skipped,
so it may begin at an earlier record than necessary.
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
from ha.store.consume_queue import QUEUE_OFFSET_MAX, ConsumeQueue, NewFile
from ha.store.consume_queues import ConsumeQueues
from ha.store.files import Disk, File, is_full, is_passing
from ha.store.key_index import KeyIndex
from ha.store.mapped_file import RunBlocking
from ha.store.options import StoreOptions

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
"""Size of a chunk of the log in bytes. The records that begin in a chunk are dispatched queue by queue, without a Trio
checkpoint in between; readers of the files rely on the size (ha/arrow/settled.py)."""
_RECORDS_MAX = 1024
"""Maximum number of records dispatched at once: 0.5 ms of work; 10 ms if the compiled parser can handle none of them,
or without compiled modules"""
_PAUSE_S = 1.0
_FILES_WAIT_S = 3.0
"""Maximum time that `wait_files_made` waits. A slave may have a whole log to dispatch, and clients wait 5 s or 6 s for
most responses."""
_Place = tuple[tuple[int, int, int], int]
"""A record's entry (physical offset, size, tags code) and queue offset"""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """New messages of one queue: the queue's end (entries) and the tags codes of the new ones, in order."""

    topic: str
    queue_id: int
    max_queue_offset: int
    tags_codes: list[int]


class Dispatcher:
    """Dispatches one log to its queues and index."""

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
        self._skipped_queues: set[str] = set()  # already logged
        self._arrivals: list[Arrival] = []  # in queues, not yet passed to the subscribers
        self.paused_reason = ""
        """Why dispatch does not continue although there are records to dispatch; empty if it does"""
        self.dispatched_timestamp_ms = 0
        """Store time of the last record dispatched [checkpoint: logicsMsgTimestamp]"""
        self.skipped_count = 0
        """Number of records that could not be added to their queue, and of ranges skipped because they contain no
        record"""
        self.on_caught_up: Callable[[], None] = lambda: None
        """Called when dispatch reaches the end after it waited for a repair. The store sets it"""
        self.after_turn: Callable[[Callable[[], None]], bool] = lambda callback: False
        """Schedules a call of `callback` at the end of the current turn of the poller (ha/poller.py), and returns True;
        returns False outside a turn. The node sets it"""
        self._is_idle = False
        """Whether `run` has dispatched everything and waits. Records that are then appended in a turn of the poller are
        dispatched at its end"""
        self._is_due = False
        self._arrived = trio.lowlevel.ParkingLot()
        self._damaged: DamagedBytes | None = None
        self._has_waited_for_repair = False
        self.is_making_files = False
        """Whether dispatch has begun to create files for queues or the index since it last reached the end or had to
        wait"""
        self._file_waiters = trio.lowlevel.ParkingLot()

    def subscribe(self, callback: Callable[[list[Arrival]], None]) -> None:
        """Calls `callback` synchronously after each batch with new messages. It must not raise."""
        self._subscribers.append(callback)

    async def run(self) -> None:
        """Dispatches until cancelled. Retries while the disk is full or no file can be opened.

        Raises DiskFailed if a queue or the index can't be written for another reason; OSError if the log or a queue
        can't be read.
        """
        log = self._log
        offsets = log.flushed_offset if self._options.is_sync_flush else log.max_offset, log.dispatch_limit
        for offset in offsets:
            offset.subscribe(self._on_log_grew)
        try:
            await self._run()
        finally:
            for offset in offsets:
                offset.unsubscribe(self._on_log_grew)
            self._is_idle = False
            self._stop_making()

    async def _run(self) -> None:
        log = self._log
        written = log.flushed_offset if self._options.is_sync_flush else log.max_offset
        allowed = log.dispatch_limit
        while True:
            if log.truncated is not None:
                await log.wait_truncated()
            position = log.dispatched_offset.value
            limit = written if written.value < allowed.value else allowed
            if position >= limit.value:
                self._stop_making()
                if self._has_waited_for_repair:
                    self._has_waited_for_repair = False
                    self.on_caught_up()
                self._is_idle = True
                try:
                    await self._arrived.park()
                finally:
                    self._is_idle = False
                continue
            end = limit.value
            if await self._advance(end):
                if self._file_waiters:
                    self._file_waiters.unpark_all()
                if log.dispatched_offset.value < limit.value:
                    await trio.lowlevel.checkpoint()
                continue
            self._stop_making()
            if self._damaged is None:
                await limit.wait_beyond(end)
            else:
                self._has_waited_for_repair = True
                await log.wait_healed(self._damaged.begin, self._damaged.begin + 1)

    def _on_log_grew(self) -> None:
        """Schedules dispatch of the new bytes: at the end of the poller's turn or, outside a turn, in the task."""
        if not self._is_idle or self._is_due:
            return  # the task checks the log again before it becomes idle
        if self._log.dispatched_offset.value >= self._log.dispatchable_end:
            return
        self._is_due = self.after_turn(self._advance_in_turn)
        if not self._is_due:
            self._arrived.unpark_all()

    def _advance_in_turn(self) -> None:
        self._is_due = False
        if self._is_idle and not self._advance_now():
            self._arrived.unpark_all()

    def _advance_now(self) -> bool:
        """Dispatches one chunk of the log if its bytes are in memory and no file has to be created. Returns whether
        everything up to `dispatchable_end` is then dispatched; if not, the caller wakes the task."""
        log = self._log
        position, end = log.dispatched_offset.value, log.dispatchable_end
        if position >= end:
            return True
        chunk = None if log.truncated else log.read_hot(position, min(_CHUNK_BYTES, end - position))
        if not chunk:
            return False
        digest = self._digest(chunk, position, log.segment_at(position).end)
        if not digest.size or self._lacks_files(digest):
            return False
        try:
            self._build(digest)
        except OSError:
            return False  # the task tries again, and reports it
        self._finish(digest, position)
        return position + digest.size == end

    async def wait_files_made(self) -> None:
        """If files for queues or the index are being created, waits until the records now in the log are dispatched, or
        dispatch has to wait; at most 3 s.

        Not a checkpoint if no files are being created. A reader that finds nothing in a queue or in the index calls
        this and looks again: otherwise a client might not find the first message of a new queue right after its send.
        """
        end = self._log.max_offset.value
        if self.is_making_files:
            with trio.move_on_after(_FILES_WAIT_S):
                while self.is_making_files and self._log.dispatched_offset.value < end:
                    await self._file_waiters.park()

    def _stop_making(self) -> None:
        self.is_making_files = False
        if self._file_waiters:
            self._file_waiters.unpark_all()

    def dispatch_again(self, physical_offset: int) -> None:
        """Lowers `dispatched_offset` to at most `physical_offset`, because the index has lost the keys of the records
        from there on. Called during a truncation, while nothing is dispatched."""
        self._log.dispatched_offset.reset(min(self._log.dispatched_offset.value, physical_offset))
        self._arrived.unpark_all()

    async def catch_up(self) -> None:
        """Dispatches everything up to the log's end or limit. Returns earlier at damaged bytes, at an incomplete
        record, if the disk is full or no file can be opened and, on a slave, at bytes that are no record. Must not be
        called while `run` is active. Raises errors as `run` does."""
        while self._log.dispatched_offset.value < self._log.dispatchable_end:
            if not await self._advance(self._log.dispatchable_end) or self.paused_reason:
                return
            await trio.lowlevel.checkpoint()

    async def catch_up_for_stop(self) -> None:
        """Dispatches the rest before closing, unless dispatch is paused for a reason other than damage, such as a full
        disk: then the next start does it. Raises DiskFailed and OSError as `run` does."""
        if not self.paused_reason or self._damaged is not None:
            await self.catch_up()

    async def _advance(self, end: int) -> bool:
        """Dispatches one chunk. False if nothing can be done until there are more bytes or, if `_damaged` is set, until
        that range is healed.

        Not a checkpoint if the bytes are in memory: the task that waited for them has just had one.
        """
        log = self._log
        position = log.dispatched_offset.value
        generation = log.generation
        self._damaged = None
        try:
            digest = await self._next_digest(position, end)
        except DamagedBytes as damaged:
            return generation != log.generation or await self._on_damage(position, damaged)
        except OffsetGone:
            if generation == log.generation:
                logger.warning("dispatch.skipped from=%d to=%d reason=deleted", position, log.min_offset)
                log.dispatched_offset.reset(max(log.min_offset, 0))
            return True
        except OSError as error:
            if not is_passing(error):
                raise
            await self._pause_for(error, position)
            return True
        if generation != log.generation:
            return True  # the log was set aside or truncated meanwhile
        if digest is None:
            return False
        if digest.damage is not None and not digest.size:
            return self._skip_bytes(position, digest.damage, min(end, log.segment_at(position).end))
        if await self._build_if_possible(digest, position):
            self._finish(digest, position)
        return True

    def _finish(self, digest: RecordDigest, position: int) -> None:
        """Raises `dispatched_offset` to the end of the records of `digest`, which begin at `position` and have their
        entries now, and calls the subscribers."""
        log = self._log
        if self.paused_reason:
            logger.warning("dispatch.resumed at=%d", position)
            self.paused_reason = ""
        if digest.count:
            self.dispatched_timestamp_ms = digest.store_timestamp_ms
            log.last_store_timestamp_ms = max(log.last_store_timestamp_ms, self.dispatched_timestamp_ms)
        log.dispatched_offset.raise_to(position + digest.size)
        arrivals, self._arrivals = self._arrivals, []
        if arrivals:
            for callback in self._subscribers:
                callback(arrivals)

    async def _next_digest(self, position: int, end: int) -> RecordDigest | None:
        """Returns the digest of the records from `position` on; one of size 0, with `damage`, if the bytes are no
        record; None if the next record is incomplete, or the log was truncated or set aside meanwhile.

        Raises DamagedBytes, OffsetGone, OSError.
        """
        log, size = self._log, _CHUNK_BYTES
        generation = log.generation
        hot = log.read_hot(position, min(size, end - position))
        chunk: memoryview | bytes = hot if hot else await log.read(position, min(size, end - position), "dispatch")
        while generation == log.generation:
            segment_end = log.segment_at(position).end
            digest = self._digest(chunk, position, segment_end)
            if digest.size or digest.damage is not None:
                return digest
            stop = min(end, segment_end)
            if position + len(chunk) >= stop:
                return None
            size *= 4
            chunk = await self._read_more(position, chunk, min(size, stop - position))
        return None

    async def _read_more(self, position: int, chunk: memoryview | bytes, size: int) -> bytes:
        """Extends a chunk that ended within a record to `size` bytes, fewer at the end of the log. Raises DamagedBytes,
        OffsetGone, OSError."""
        pieces = bytes(chunk)
        while len(pieces) < size:
            piece = await self._log.read(position + len(pieces), size - len(pieces), "dispatch")
            if not piece:
                break
            pieces += piece
        return pieces

    async def _build_if_possible(self, digest: RecordDigest, position: int) -> bool:
        """Builds the entries of records. Returns False if the log was truncated or set aside meanwhile, or after a
        pause because the disk is full or no file can be opened. Raises DiskFailed."""
        generation = self._log.generation
        try:
            await self._make_files(digest)
            if generation == self._log.generation:
                self._build(digest)
                return True
        except OSError as error:
            if not is_passing(error):
                raise DiskFailed(self._options.root, "dispatch", str(error)) from error
            await self._pause_for(error, position)
        return False

    async def _pause_for(self, error: OSError, position: int) -> None:
        """Waits for _PAUSE_S after a temporary error."""
        trouble = "disk full" if is_full(error) else "no file can be opened"
        if not self.paused_reason.startswith(trouble):
            self._pause(position, f"{trouble}: {error}")
        self._stop_making()
        await trio.sleep(_PAUSE_S)

    def _pause(self, position: int, reason: str) -> None:
        if reason != self.paused_reason:
            logger.error("dispatch.paused at=%d reason=%r", position, reason)
        self.paused_reason = reason

    def cap_timestamp(self, stored_ms: int) -> None:
        """Lowers `dispatched_timestamp_ms` to at most `stored_ms`, because the log is truncated or set aside. Clears
        `paused_reason`, and the arrivals that are not passed to the subscribers yet."""
        self.dispatched_timestamp_ms = min(self.dispatched_timestamp_ms, stored_ms)
        self.paused_reason = ""
        self._arrivals = []

    async def _on_damage(self, position: int, damaged: DamagedBytes) -> bool:
        """Skips damaged bytes if the queues have entries of all records in these bytes. Otherwise returns False:
        dispatch then waits until the bytes are healed. Raises OSError if a queue can't be read."""
        log = self._log
        generation = log.generation
        try:
            async with log.maintenance_lock:  # meanwhile no file of a queue is deleted
                queued_to: int = await self._run_blocking(self._queues.contiguous_end, position, damaged.end, 0)
        except OSError as error:
            if not is_passing(error):
                raise
            await self._pause_for(error, position)
            return True
        if generation != log.generation:
            return True
        self._damaged = damaged
        if queued_to < damaged.end:
            self._pause(position, f"waits for bytes [{damaged.begin}, {damaged.end}) to be healed")
            return False
        logger.warning("dispatch.damage_skipped from=%d to=%d", position, queued_to)
        log.dispatched_offset.raise_to(queued_to)
        return True

    def _digest(self, chunk: memoryview | bytes, base: int, segment_end: int) -> RecordDigest:
        index = self._index
        return digest_records(
            chunk,
            base,
            segment_end,
            count_max=_RECORDS_MAX,
            bytes_max=_CHUNK_BYTES,
            delay_levels_ms=self._options.delay_levels_ms,
            with_keys=index is not None,
            with_tags=index is not None and index.has_tags,
        )

    def _skip_bytes(self, position: int, trouble: Unparsable, end: int) -> bool:
        """Handles bytes that are no record: a slave waits for other bytes (False), a master skips them (True), as
        RocketMQ does."""
        if self._log.is_slave:
            self._pause(position, f"no record at {position}: {trouble.reason}")
            return False
        step = trouble.total_size if 0 < trouble.total_size <= end - position else end - position
        logger.error("dispatch.skipped from=%d to=%d reason=%r", position, position + step, trouble.reason)
        self.skipped_count += 1
        self._log.dispatched_offset.raise_to(position + step)
        return True

    def _lacks_files(self, digest: RecordDigest) -> bool:
        """Returns whether files of queues or of the index may have to be created for these records."""
        for run in digest.queues:
            queue = self._queues.get(run.topic, run.queue_id)
            if queue is None or queue.lacks_files_to(run.queue_offset + len(run.entries) // ENTRY_SIZE):
                return True
        index = self._index
        if index is None or not index.is_attached:
            return False
        return index.lacks_file(len(digest.keys) // KEY_SIZE, digest.last_offset)

    async def _make_files(self, digest: RecordDigest) -> None:
        """Creates the queue and index files that are missing for these records, in a worker thread, because creating
        files waits for the disk. Raises OSError.

        If the log is truncated or set aside meanwhile, deletes the files again.
        """
        if not self._lacks_files(digest):
            return
        wanted: list[NewFile] = []
        for run in digest.queues:
            queue = self._queues.get(run.topic, run.queue_id)
            end = run.queue_offset + len(run.entries) // ENTRY_SIZE
            if queue is not None and not queue.lacks_files_to(end):
                continue
            if run.queue_offsets is None and end <= QUEUE_OFFSET_MAX and is_queue_directory(run.topic, run.queue_id):
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
        self.is_making_files = True
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
            if made or (index is not None and generation != log.generation):
                with trio.CancelScope(shield=True):
                    await self._run_blocking(self._remove, made, index)

    def _remove(self, made: list[tuple[NewFile, File]], index: KeyIndex | None) -> None:
        if index is not None:
            index.drop_spare()
        for _, file in made:
            with suppress(FileNotFoundError):  # set aside with the others
                self._disk.unlink(file.path)

    def _build(self, digest: RecordDigest) -> None:
        """Adds the records to their queues and to the index. Raises OSError; if the call is repeated, it continues
        where it failed."""
        for run in digest.queues:
            try:
                arrival = self._build_queue(run)
            except OSError:
                end = self._queues.next_queue_offset(run.topic, run.queue_id)
                if end > run.queue_offset:  # the repeated call skips these messages
                    self._arrivals.append(Arrival(run.topic, run.queue_id, end, run.tags_codes))
                raise
            if arrival is not None:
                self._arrivals.append(arrival)
        index = self._index
        if index is not None and index.is_attached and digest.count:
            index.put(digest.keys, digest.first_offset, digest.last_offset)

    def _build_queue(self, run: QueueRun) -> Arrival | None:
        topic, queue_id = run.topic, run.queue_id
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            if not is_queue_directory(topic, queue_id):
                for physical_offset, *_ in ENTRY.iter_unpack(run.entries):
                    self._skip(topic, queue_id, physical_offset, "unusable topic or queue")
                return None
            queue = self._queues.get_or_create(topic, queue_id)
        if run.queue_offset == queue.max_offset and run.queue_offsets is None:
            physical_offset, size, _ = ENTRY.unpack_from(run.entries)
            if physical_offset + size > queue.max_physical_offset:  # the usual case: the next entries
                queue.append(run.queue_offset, [run.entries])
                return Arrival(topic, queue_id, queue.max_offset, run.tags_codes)
        offsets: Iterable[int] = itertools.count(run.queue_offset) if run.queue_offsets is None else run.queue_offsets
        return self._build_each(queue, zip(ENTRY.iter_unpack(run.entries), offsets, strict=False))

    def _build_each(self, queue: ConsumeQueue, places: Iterable[_Place]) -> Arrival | None:
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
                if entries:
                    queue.append(first, entries)
                    first, entries = expected, []
                has_last = queue.max_physical_offset >= self._log.min_offset  # else later ones may be deleted, too
                if not expected < queue_offset <= (queue.next_offset_max if has_last else QUEUE_OFFSET_MAX):
                    self._skip(topic, queue_id, physical, f"queue offset {queue_offset} where {expected} comes next")
                    continue
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
        if name not in self._skipped_queues and len(self._skipped_queues) < 1000:
            self._skipped_queues.add(name)
            logger.error("dispatch.record_skipped at=%d queue=%s reason=%r", physical_offset, name, reason)


def _make_next_files(wanted: Sequence[NewFile], made: list[tuple[NewFile, File]], index: KeyIndex | None) -> None:
    """Creates the files in `wanted`, adding each to `made` as soon as it exists, and then the next file of `index`.
    Blocking. Raises OSError."""
    for new in wanted:
        made.append((new, new.make()))
    if index is not None:
        index.make_spare()
