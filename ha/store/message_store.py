"""A store, opened: the log, what is derived from it, and the tasks that keep them.

    async with open_message_store(StoreOptions(root=path)) as store:
        [result] = await store.log.put([message])

Opening takes the lock, recovers, and writes the abort file; closing flushes, writes the checkpoint and removes it. An
abort file found at the start therefore means that the last owner crashed. Source: DefaultMessageStore.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio

from ha.errors import DiskFailed, DiskFull, OffsetGone, StoreLocked
from ha.protocol.store_files import Checkpoint
from ha.store.checkpoint import load_begin, load_checkpoint, load_flushed_to, save_checkpoint
from ha.store.checksums import Checksums
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import ConsumeQueues
from ha.store.damage import DamageRegistry, DamageStatistics
from ha.store.dispatch import Arrival, Dispatcher
from ha.store.epochs import EPOCH_FILE, EpochHistory
from ha.store.files import Disk, OsDisk, is_passing
from ha.store.flusher import Flusher
from ha.store.key_index import KeyIndex
from ha.store.mapped_file import RunBlocking, run_in_thread
from ha.store.options import StoreOptions
from ha.store.queue_ends import QUEUE_ENDS_FILE, QueueEnds, load_queue_ends, save_queue_ends
from ha.store.recovery import Recovered, recover_log
from ha.store.retention import Retention
from ha.store.rewrite import write_again
from ha.store.scrub import Scrub, ScrubStatistics
from ha.store.segment_files import load_segments
from ha.store.truncation import INTENT_FILE, Truncation, boundary_before, finish_files, load_intent
from ha.store.undispatched import Undispatched, look_at_undispatched

logger = logging.getLogger(__name__)


class StoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a store. Offsets in bytes, ratios 0..1."""

    min_offset: int
    max_offset: int
    flushed_offset: int
    dispatched_offset: int
    segment_count: int
    queue_count: int
    index_file_count: int
    sync_count: int
    flush_waiting_count: int
    dispatch_paused_reason: str
    dispatch_skipped_count: int
    disk_used_ratio: float
    is_writable: bool
    not_writable_reason: str
    recovered_clean: bool
    recovery_s: float
    truncated_bytes: int


_SYNCED_AT_ONCE = 512
"""Files of queues; a stop waits for no more."""
_FLUSHED_FIRST = b"SYNC_FLUSH"
"""In the abort file of a master with SYNC_FLUSH: what its queues know was flushed before (recovery.py). RocketMQ looks
only whether there is one; a store that it used meanwhile and crashed with has no sound checkpoint (checkpoint.py)."""
_OPEN_QUEUES_MAX = 1 << 14
"""So many files of queues are kept open, if the process may; each takes a KiB or two"""
_CATCH_UP_SHARE = 0.3
"""Of the time to stop; a worker may be making files for one chunk more, and they all want to be synced"""
QUERY_WAIT_S = 2.0
"""So long a query waits for an index that is being built again; after that it finds what is there."""


class StoreDamage(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found damaged since the start, and how far the scrub is."""

    log: DamageStatistics
    checksum_rebuilt_count: int
    verified_bytes: int
    """Bytes that were read from the disk and had their checksum"""
    scrub: ScrubStatistics


def wall_clock_ms() -> int:
    """Return the time of day, ms since the epoch."""
    return time.time_ns() // 1_000_000


class MessageStore:
    """What `open_message_store` yields. `log`, `queues`, `index` (None if disabled), `flusher`, `checkpoint`."""

    def __init__(
        self, options: StoreOptions, disk: Disk, run_blocking: RunBlocking, wall_clock_ms: Callable[[], int]
    ) -> None:
        self.options = options
        self._disk = disk
        self._run_blocking = self.run_blocking = run_blocking
        self.epochs = EpochHistory(disk, options.root / EPOCH_FILE, run_blocking=run_blocking)
        """The terms of the log's masters; empty in a store that was never part of a failover group"""
        self.queues = ConsumeQueues(disk, options.root / "consumequeue", options.queue_entry_count)
        self.index: KeyIndex | None = None
        if options.index_enabled:
            self.index = KeyIndex(
                disk,
                options.root / "index",
                slot_count=options.index_slot_count,
                entry_count=options.index_entry_count,
                index_tags=options.index_tags,
                wall_clock_ms=wall_clock_ms,
            )
        self.damage = DamageRegistry(wall_clock_ms)
        self._checksums = Checksums(disk, options.root / "checksums", options.segment_size, options.checksum_block_size)
        self.log = CommitLog(
            disk,
            options,
            run_blocking=run_blocking,
            wall_clock_ms=wall_clock_ms,
            initial_queue_offset=self.queues.next_queue_offset,
            checksums=self._checksums,
            damage=self.damage,
        )
        self.verified = self.log.verified
        self.verified.is_queued = self.queues.has_entry_of
        self.log.on_reset = self._forget_derived
        self.log.before_delete = self._note_begin
        self._keeping = self.log.keeping
        self.flusher = Flusher(self.log, options)
        self.dispatcher = Dispatcher(self.log, self.queues, self.index, options, disk, run_blocking)
        self.retention = Retention(
            self.log,
            self.queues,
            self.index,
            options,
            disk=disk,
            run_blocking=run_blocking,
            wall_clock_ms=wall_clock_ms,
            epochs=self.epochs,
            keeping=self._keeping,
        )
        self.scrub = Scrub(self.log, self.verified, self.queues, self.index, options, run_blocking=run_blocking)
        self.damage.on_healed = self.scrub.want
        self.checkpoint = Checkpoint()
        self._saved_checkpoint: tuple[bytes, int, int] | None = None
        self._recovered_end = self._counted_to = 0
        self._recovered_clean = True
        self._recovery_s = 0.0
        self._saved_ends: QueueEnds = {}
        self._truncated_bytes = 0

    # ---- for the rooms above

    @property
    def is_writable(self) -> tuple[bool, str]:
        """Whether puts are welcome, and if not, why (a failed disk, or one nearly full)."""
        if self.flusher.failure is not None:
            return False, str(self.flusher.failure)
        dispatched = self.log.dispatched_offset.value
        if max(dispatched, self._counted_to) < self._recovered_end and not self.log.is_slave:
            # The next queue offsets are known only when the queues are whole.
            return (
                False,
                f"queues are built up to {dispatched} of {self._recovered_end}: {self.dispatcher.paused_reason}",
            )
        return self.retention.is_writable

    def subscribe(self, callback: Callable[[list[Arrival]], None]) -> None:
        """Have `callback` called after each dispatched batch that brought messages."""
        self.dispatcher.subscribe(callback)

    def set_retain_from(self, lowest_needed: Callable[[], int | None]) -> None:
        """Ask `lowest_needed` for the physical offset that a slave still needs before segments are deleted."""
        self.retention.lowest_needed = lowest_needed

    def damage_statistics(self) -> StoreDamage:
        """Return what was found damaged, in the log and in what is derived from it, and what became of it."""
        return StoreDamage(
            log=self.damage.statistics(),
            checksum_rebuilt_count=self._checksums.rebuilt_count,
            verified_bytes=self.verified.verified_bytes,
            scrub=self.scrub.statistics(),
        )

    def statistics(self) -> StoreStatistics:
        """Return this moment's figures."""
        log = self.log
        is_writable, reason = self.is_writable
        return StoreStatistics(
            min_offset=log.min_offset,
            max_offset=log.max_offset.value,
            flushed_offset=log.flushed_offset.value,
            dispatched_offset=log.dispatched_offset.value,
            segment_count=len(log.segments),
            queue_count=sum(1 for _ in self.queues),
            index_file_count=len(self.index.files) if self.index is not None else 0,
            sync_count=self.flusher.sync_count,
            flush_waiting_count=self.flusher.waiting_count,
            dispatch_paused_reason=self.dispatcher.paused_reason,
            dispatch_skipped_count=self.dispatcher.skipped_count,
            disk_used_ratio=self.retention.disk_used_ratio,
            is_writable=is_writable,
            not_writable_reason=reason,
            recovered_clean=self._recovered_clean,
            recovery_s=self._recovery_s,
            truncated_bytes=self._truncated_bytes,
        )

    async def query(self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return physical offsets of records that may have `key`, newest first; see `KeyIndex.query`."""
        if self.index is None:
            return []
        with trio.move_on_after(QUERY_WAIT_S):
            await self.index.wait_attached()
        found: list[int] = await self._run_blocking(self.index.query, topic, key, count_max, begin_ms, end_ms)
        return found

    async def clear_topic(self, topic: str) -> None:
        """Take the messages of a topic from its queues, which go on at the offsets where they are.

        Raises DiskFull, DiskFailed. The log keeps the records until retention takes them. Queues that have to be built
        again from the log, because their files were damaged, have them again.
        """
        try:
            async with self._keeping:
                await self._run_blocking(self.queues.clear, topic)
        except OSError as error:
            directory = self.options.root / "consumequeue" / topic
            if is_passing(error):
                raise DiskFull(directory, 0, str(error)) from error
            raise DiskFailed(directory, "write", str(error)) from error

    # ---- failover

    async def truncate(self, offset: int) -> None:
        """Cut the log, and all that is derived from it, at a physical offset that lies between two records.

        Every service goes on; the offsets of the log fall, and whoever waits for one is woken. Requests that wait for a
        flush beyond it are told FLUSH_DISK_TIMEOUT. What a master puts next goes on in each queue where it ends then.
        Nothing happens if the log ends there anyway.

        ValueError if the log doesn't hold `offset`, or it lies inside a record; DiskFull if nothing could be begun;
        DiskFailed if the disk fails in the middle: the node must stop then, and the next start finishes it. Cancelled,
        it has either not begun or is complete.
        """
        async with self._keeping, self.log.appends_held():
            if not await Truncation(self, self._disk).run(offset):
                return
            self._recovered_end = min(self._recovered_end, offset)
            self._counted_to = min(self._counted_to, offset)
            if not self.log.is_slave:
                await self._count_ahead()

    async def become_master(self) -> None:
        """Have the log go on with messages that are put here, when nobody appends a master's bytes any more.

        A last record of which only a part has come is cut off. Next queue offsets and the last store time are looked up
        in what is not dispatched yet, so that putting need not wait for that. CorruptLog or DamagedBytes if that can't
        be read; what `truncate` raises.
        """
        async with self.log.appends_held():
            end = (await self._undispatched()).end
        await self.truncate(end)
        async with self.log.appends_held():
            await self._count_ahead()
            self.log.is_slave = False

    def become_slave(self) -> None:
        """Have the log go on with a master's bytes, when nobody puts any more."""
        self.log.is_slave = True

    async def _undispatched(self) -> Undispatched:
        log = self.log
        begin, end = log.dispatched_offset.value, log.max_offset.value
        if begin > end:  # behind a filler of which only a part has come
            begin = await self._run_blocking(boundary_before, log.segments, self.options, self.queues, end)
        return await look_at_undispatched(log, begin)

    async def _count_ahead(self) -> None:
        ahead = await self._undispatched()
        self.log.count_on(ahead.next_offsets)
        self.log.last_store_timestamp_ms = max(self.log.last_store_timestamp_ms, ahead.store_timestamp_ms)
        self._recovered_end = self._counted_to = ahead.end

    async def forget_times_after(self, stored_ms: int) -> None:
        """For the cut: say on the disk, before bytes change, that nothing stored later was saved. OSError."""
        log, checkpoint = self.log, self.checkpoint
        log.last_store_timestamp_ms = min(log.last_store_timestamp_ms, stored_ms)
        self.flusher.flushed_timestamp_ms = min(self.flusher.flushed_timestamp_ms, stored_ms)
        self.dispatcher.forget_times_after(stored_ms)
        checkpoint.physic_msg_timestamp_ms = min(checkpoint.physic_msg_timestamp_ms, stored_ms)
        checkpoint.logics_msg_timestamp_ms = min(checkpoint.logics_msg_timestamp_ms, stored_ms)
        checkpoint.index_msg_timestamp_ms = min(checkpoint.index_msg_timestamp_ms, stored_ms)
        await self._write_checkpoint()

    async def save_cut_derived(self) -> None:
        """For the cut: have what the queues' files and the index hold, and where queues end, on the disk. OSError."""
        if self.index is not None:
            await self._save_index(self.index)
        self._saved_ends = self.queues.ends()
        path = self.options.root / QUEUE_ENDS_FILE
        await self._run_blocking(save_queue_ends, self._disk, path, self._saved_ends)

    # ---- life

    async def recover(self) -> None:
        """Bring log, queues and index to one end. CorruptLog if acknowledged data is damaged (nothing is deleted)."""
        began = trio.current_time()
        options, log, queues = self.options, self.log, self.queues
        queues.keep_open(min(options.open_files_max * 3 // 4, _OPEN_QUEUES_MAX))
        await self.epochs.load()
        cut_at = await self._run_blocking(load_intent, self._disk, options.root / INTENT_FILE)
        if cut_at is not None:
            await self._run_blocking(finish_files, self._disk, options, self._checksums, cut_at)
        is_clean = self._recovered_clean = not self._disk.exists(options.root / "abort") and cut_at is None
        recovered, are_queues_whole = await self._recover_log(is_clean, cut_at)
        min_offset = max(log.min_offset, 0)
        if is_clean:
            await self._run_blocking(queues.truncate, recovered.max_offset)
            dispatch_from = queues.max_physical_offset
        else:
            await self._begin_anew(recovered)
            dispatch_from = recovered.scanned_from
        if self.index is not None:
            dispatch_from = await self._recover_index(self.index, recovered.max_offset, dispatch_from)
        if cut_at is not None:
            await self._finish_cut(cut_at, recovered)
        await self.epochs.drop_beyond(recovered.max_offset)
        if queues.cut_at is not None:
            dispatch_from = min(dispatch_from, queues.cut_at)
        if not are_queues_whole:
            dispatch_from = min_offset
        log.dispatched_offset.reset(min(max(dispatch_from, min_offset), recovered.max_offset))
        await self.dispatcher.catch_up()
        self._recovered_end = recovered.max_offset
        if log.segments:
            await self._run_blocking(queues.correct_min, min_offset)
        await self._run_blocking(queues.keep_open, min(options.open_files_max // 4, _OPEN_QUEUES_MAX))
        self._recovery_s = trio.current_time() - began
        logger.info(
            "store_recovered root=%s clean=%s min_offset=%d max_offset=%d truncated_bytes=%d dispatched_from=%d s=%.3f",
            options.root,
            is_clean,
            log.min_offset,
            log.max_offset.value,
            recovered.truncated_bytes,
            dispatch_from,
            self._recovery_s,
        )

    async def _finish_cut(self, cut_at: int, recovered: Recovered) -> None:
        """Do the rest of what a crash left undone of a cut, and take the intent away."""
        await self.forget_times_after(recovered.last_store_timestamp_ms)
        await self.save_cut_derived()
        await self.epochs.truncate_from(cut_at)
        await self._run_blocking(self._disk.unlink, self.options.root / INTENT_FILE)

    async def _recover_log(self, is_clean: bool, cut_at: int | None) -> tuple[Recovered, bool]:
        """Load checkpoint and queues and bring the log to its end; return whether the queues are whole, too."""
        run, disk, options, checksums = self._run_blocking, self._disk, self.options, self._checksums
        self.checkpoint = await run(load_checkpoint, disk, options.root / "checkpoint")
        flushed_to = await run(load_flushed_to, disk, options.root / "checkpoint")
        if cut_at is not None:
            flushed_to = min(flushed_to, cut_at)
        # A slave that was a master gets its bytes from another now.
        known_end = max(0 if options.is_slave else flushed_to, await run(checksums.known_end))
        known_begin = await run(load_begin, disk, options.root / "checkpoint")
        segments, remade = await run(
            load_segments, disk, options.commitlog_path, options.segment_size, checksums, known_begin, known_end
        )
        are_queues_whole: bool = await run(self.queues.load, is_clean)
        queued_to = self.queues.max_physical_offset
        if cut_at is None:
            self.queues.miss_ends(await run(load_queue_ends, disk, options.root / QUEUE_ENDS_FILE))
        else:
            await run(self.queues.truncate, cut_at)
            queued_to = min(queued_to, cut_at)
        recovered = await recover_log(
            segments,
            remade,
            disk=disk,
            options=options,
            run_blocking=run,
            is_clean=is_clean,
            checkpoint=self.checkpoint,
            queues=self.queues,
            are_queues_whole=are_queues_whole,
            queues_prove=not is_clean and await run(self._flushed_first),
            checksums=checksums,
            known_end=known_end,
            damage=self.damage,
        )
        if not is_clean:
            unsure_from = max(recovered.scanned_from, known_end)
            await run(write_again, recovered.segments, unsure_from, recovered.max_offset)
        self.log.adopt(recovered.segments, recovered.max_offset)
        confirmed = self.checkpoint.confirm_physical_offset if options.dispatch_confirmed else 0
        if options.dispatch_confirmed:
            # What the queues knew was confirmed. A consumer that had got it would find the queue's end before it.
            self.log.limit_dispatch(min(max(confirmed, queued_to), recovered.max_offset))
        is_shorter = recovered.max_offset < max(flushed_to, confirmed) or self.log.min_offset < known_begin
        if recovered.queues_kept_to or is_shorter or (flushed_to and options.is_slave):
            await self._write_checkpoint()  # the next start must not conclude another end
        await run(self.verified.begin, recovered.scanned_from, recovered.max_offset)
        self.log.last_store_timestamp_ms = self.flusher.flushed_timestamp_ms = recovered.last_store_timestamp_ms
        self._truncated_bytes = recovered.truncated_bytes
        return recovered, are_queues_whole

    async def _recover_index(self, index: KeyIndex, end: int, dispatch_from: int) -> int:
        """Load the index up to the log's end; return from where the records have to be dispatched for it as well."""
        run = self._run_blocking
        await run(index.load, None if self._recovered_clean else self.checkpoint.index_msg_timestamp_ms)
        if self.checkpoint.index_msg_timestamp_ms > index.safe_timestamp_ms:
            # What was deleted is built again under the same store times.
            self.checkpoint.index_msg_timestamp_ms = index.safe_timestamp_ms
            await self._write_checkpoint()
        await run(index.truncate, end)
        indexed_to = index.end_physical_offset
        if indexed_to is None:
            return max(self.log.min_offset, 0)
        return min(dispatch_from, indexed_to)

    async def _begin_anew(self, recovered: Recovered) -> None:
        """After a crash: drop the entries that a power cut may have torn.

        Records from `scanned_from` on are dispatched again. Until those entries are safe too, the checkpoint must not
        say that they are: the next crash may come before.
        """
        run, checkpoint = self._run_blocking, self.checkpoint
        since_ms = recovered.scanned_from_timestamp_ms
        if recovered.scanned_from < recovered.max_offset and since_ms < checkpoint.logics_msg_timestamp_ms:
            checkpoint.logics_msg_timestamp_ms = since_ms
            await self._write_checkpoint()
        await run(self.queues.truncate, max(recovered.scanned_from, recovered.queues_kept_to))
        if recovered.queues_kept_to:
            await run(self.queues.sync_from, recovered.scanned_from)

    def _flushed_first(self) -> bool:
        """Whether the process that crashed put no record into a queue that was not flushed. Blocking."""
        is_own = self.checkpoint.physic_msg_timestamp_ms > 0
        return is_own and self._disk.read_bytes(self.options.root / "abort") == _FLUSHED_FIRST

    async def run(self) -> None:
        """Run every service of the store until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.log.allocator.run)
            nursery.start_soon(self.log.keep_cool)
            nursery.start_soon(self.flusher.run)
            nursery.start_soon(self.dispatcher.run)
            nursery.start_soon(self._save_now_and_then)
            nursery.start_soon(self.retention.run)
            nursery.start_soon(self.scrub.run)

    async def close(self) -> None:
        """Flush and say in the checkpoint that all is well. DiskFailed if it isn't: the abort file then stays."""
        await self.log.allocator.drop_ready()
        await self.flusher.flush()
        # Thousands of queues may still need their files. What is not dispatched is so after the next start.
        with trio.move_on_after(self.options.stop_timeout_s * _CATCH_UP_SHARE) as catching_up:
            await self.dispatcher.catch_up_for_stop()
        await self._save_derived()
        await self._cover_flushed()
        await self._save_checkpoint()
        is_only_late = catching_up.cancelled_caught and not self.dispatcher.paused_reason
        if self._is_behind and not self.log.is_slave and not is_only_late:
            logger.warning("stopped_behind dispatched=%d", self.log.dispatched_offset.value)
            return  # the next start finds the abort file and dispatches again
        await self._run_blocking(self._disk.unlink, self.options.root / "abort")

    @property
    def _is_behind(self) -> bool:
        """Whether records that may be dispatched are not: the limit may lie inside the next one."""
        log = self.log
        is_limited = log.dispatch_limit.value < log.max_offset.value
        return log.dispatched_offset.value < log.dispatchable_end and (
            not is_limited or bool(self.dispatcher.paused_reason)
        )

    async def _save_now_and_then(self) -> None:
        options = self.options
        derived_at = trio.current_time() + options.derived_flush_interval_s
        while True:
            await trio.sleep(options.checkpoint_interval_s)
            async with self._keeping:
                if trio.current_time() >= derived_at:
                    derived_at = trio.current_time() + options.derived_flush_interval_s
                    await self._save_derived()
                await self._cover_flushed()
                await self._save_checkpoint()

    async def _cover_flushed(self) -> None:
        """Make and write the checksums of what was flushed meanwhile."""
        try:
            await self.verified.cover_flushed()
        except OffsetGone:  # set aside, or deleted, meanwhile
            return
        except OSError as error:
            if not is_passing(error):
                raise DiskFailed(self.options.root / "checksums", "write", str(error)) from error

    async def _save_derived(self) -> None:
        """Sync queues and index, and note until when they are whole."""
        log = self.log
        generation = log.generation
        dispatched = log.dispatched_offset.value
        stored_ms = self.dispatcher.dispatched_timestamp_ms
        unsynced = self.queues.take_dirty()[::-1]
        ends = self.queues.ends() if unsynced else self._saved_ends
        try:
            while unsynced:
                await self._run_blocking(self._disk.sync_all, unsynced[: -_SYNCED_AT_ONCE - 1 : -1])
                del unsynced[-_SYNCED_AT_ONCE:]
            if ends != self._saved_ends:
                path = self.options.root / QUEUE_ENDS_FILE
                await self._run_blocking(save_queue_ends, self._disk, path, ends)
                self._saved_ends = ends
            if self.index is not None:
                await self._save_index(self.index)
        except OSError as error:
            if is_passing(error):  # dispatch says so in the log and the next round tries again
                return
            raise DiskFailed(self.options.root, "sync of queues and index", str(error)) from error
        finally:
            self.queues.note_dirty(unsynced)  # cancelled by the stop, or the disk is full: the next round syncs them
        if generation == log.generation and dispatched <= log.dispatched_offset.value:
            self.checkpoint.logics_msg_timestamp_ms = max(self.checkpoint.logics_msg_timestamp_ms, stored_ms)
            if self.index is not None:
                self.checkpoint.index_msg_timestamp_ms = self.index.safe_timestamp_ms

    async def _save_index(self, index: KeyIndex) -> None:
        index.write_pending()
        taken = index.take_unwritten()
        dirty_ms = [unwritten.end_timestamp_ms for unwritten in taken if unwritten.is_dirty]
        try:
            if dirty_ms and min(dirty_ms) <= self.checkpoint.index_msg_timestamp_ms:
                # More keys of the very millisecond that the checkpoint vouches for: a file that is half written when
                # the power goes must not pass for the one that was synced.
                self.checkpoint.index_msg_timestamp_ms = min(dirty_ms) - 1
                await self._write_checkpoint()
            await self._run_blocking(index.write, taken)
            index.write_pending()  # what came meanwhile
        finally:
            index.give_back(taken)  # what is not written: the stop came first, or the disk refuses

    async def _save_checkpoint(self) -> None:
        checkpoint = self.checkpoint
        checkpoint.physic_msg_timestamp_ms = max(checkpoint.physic_msg_timestamp_ms, self.flusher.flushed_timestamp_ms)
        try:
            await self._write_checkpoint()
        except OSError as error:
            if not is_passing(error):
                raise DiskFailed(self.options.root / "checkpoint", "write", str(error)) from error

    async def _note_begin(self, begin: int) -> None:
        """For retention: say on the disk, before a segment is deleted, where the log begins without it. OSError."""
        await self._write_checkpoint(begin)

    async def _write_checkpoint(self, begin: int | None = None) -> None:
        """Write the checkpoint, unless nothing in it is new. OSError. `begin`: of the log, if it is about to change."""
        flushed_to = 0 if self.log.is_slave else self.log.flushed_offset.value
        if self.options.dispatch_confirmed:
            self.checkpoint.confirm_physical_offset = min(self.log.max_offset.value, self.log.dispatch_limit.value)
        content = self.checkpoint.pack(), flushed_to, self.log.min_offset if begin is None else begin
        if content == self._saved_checkpoint:
            return
        path = self.options.root / "checkpoint"
        await self._run_blocking(save_checkpoint, self._disk, path, Checkpoint.unpack(content[0]), *content[1:])
        self._saved_checkpoint = content

    def _forget_derived(self) -> None:
        self.queues.forget()
        self.epochs.forget()
        if self.index is not None:
            self.index.forget()
        self.checkpoint = Checkpoint()
        self._saved_checkpoint = None  # the file goes, too
        self.flusher.flushed_timestamp_ms = 0
        self.dispatcher.dispatched_timestamp_ms = 0


@asynccontextmanager
async def open_message_store(
    options: StoreOptions,
    *,
    disk: Disk | None = None,
    run_blocking: RunBlocking = run_in_thread,
    wall_clock_ms: Callable[[], int] = wall_clock_ms,
) -> AsyncIterator[MessageStore]:
    """Open the store at `options.root`, made if missing; usable while the block runs.

    `disk`, `run_blocking` and `wall_clock_ms` are what it needs of the world; tests replace them.

    Raises StoreLocked if another process (or store of this one) has it, CorruptLog if acknowledged data is damaged,
    DiskFailed if the disk fails at any time: then the block is cancelled and the store is left to abnormal recovery, as
    after a crash. Cancelling the block closes the store as leaving it does, in at most `stop_timeout_s`.
    """
    disk = disk if disk is not None else OsDisk()
    root = options.root
    await run_blocking(_make_directories, disk, options)
    lock = await run_blocking(disk.lock, root / "lock", b"lock")
    if lock is None:
        raise StoreLocked(root / "lock")
    try:
        store = MessageStore(options, disk, run_blocking, wall_clock_ms)
        try:
            await store.recover()
            await store.retention.look_at_disk()
            flushes_first = options.is_sync_flush and not options.is_slave
            await run_blocking(disk.write_bytes, root / "abort", _FLUSHED_FIRST if flushes_first else b"")
        except OSError as error:
            raise DiskFailed(root, "recovery", str(error)) from error
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.run)
                yield store
                nursery.cancel_scope.cancel()
        finally:
            if store.flusher.failure is None and not store.log.is_torn and store.log.cut_under_way is None:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + options.stop_timeout_s) as scope:
                    try:
                        await store.close()
                    except OSError as error:
                        raise DiskFailed(root, "closing", str(error)) from error
                if scope.cancelled_caught:
                    logger.error("store_not_closed root=%s timeout_s=%s", root, options.stop_timeout_s)
    finally:
        lock.release()


def _make_directories(disk: Disk, options: StoreOptions) -> None:
    disk.make_dirs(options.root)
    disk.make_dirs(options.commitlog_path)
    disk.make_dirs(options.root / "consumequeue")
    disk.make_dirs(options.root / "index")
