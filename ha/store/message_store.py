"""An open store: the log, what is derived from it, and the tasks that maintain both.

    async with open_message_store(StoreOptions(root=path)) as store:
        [result] = await store.log.put([message])

Opening takes the lock, recovers, and writes the abort file; closing flushes, writes the checkpoint, and removes the
abort file. An abort file found at the start therefore means that the last owner crashed, or could not close the store
completely. Source: DefaultMessageStore.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from enum import Enum
from functools import partial

import msgspec
import trio

from ha.errors import DiskFailed, DiskFull, StoreLocked
from ha.store.checkpointer import Checkpointer
from ha.store.damage import DamagedRange, DamageStatistics
from ha.store.dispatch import Arrival
from ha.store.files import Disk, OsDisk, is_passing, real_path
from ha.store.log_repair import LogRepair
from ha.store.log_reset import waiting_segment
from ha.store.mapped_file import RunBlocking, run_in_thread
from ha.store.options import StoreOptions
from ha.store.retention import Retention
from ha.store.scrub import Scrub, ScrubStatistics
from ha.store.segmented_log import UNLIMITED
from ha.store.store_parts import StoreParts
from ha.store.store_recovery import FLUSHED_FIRST, RecoverySummary, StoreRecovery
from ha.store.truncation import Truncation, boundary_before, record_end
from ha.store.undispatched import Undispatched, read_undispatched

logger = logging.getLogger(__name__)

_CATCH_UP_SHARE = 0.3
"""Share (0 to 1) of `stop_timeout_s` for dispatching the rest of the log. At the end of that time a worker may still be
creating files for one more chunk, all of which have to be synced."""
QUERY_WAIT_S = 2.0
"""Maximum time in seconds that a query waits for an index that is being rebuilt; after that it searches the part that
has been rebuilt so far."""


class StoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a store. Offsets in bytes (`min_offset` is -1 while the log has no segment), ratios from 0 to 1.
    `recovered_clean`, `recovery_s` and `truncated_bytes` describe the recovery at the start."""

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


class StoreDamage(msgspec.Struct, frozen=True, kw_only=True):
    """All damage found since the start, and the progress of the scrub."""

    log: DamageStatistics
    checksum_rebuilt_count: int
    verified_bytes: int
    """Number of bytes that were read from the disk and found good"""
    scrub: ScrubStatistics


class StoreState(Enum):
    """State of a store.

    RECOVERING ─▶ SERVING ◀─▶ TRUNCATING        only a SERVING store, without a failed write or sync, can be closed
                     │             │            cleanly; any other is left to recovery, as after a crash
                     ├─────────────┴─▶ FAILED
                     └─▶ CLOSED
    """

    RECOVERING = "recovering"
    SERVING = "serving"
    TRUNCATING = "truncating"
    FAILED = "failed"
    CLOSED = "closed"


def wall_clock_ms() -> int:
    """Returns the current time in ms since the epoch."""
    return time.time_ns() // 1_000_000


class MessageStore:
    """An open store: the commitlog, its consume queues and its index (None if it is disabled). Made by
    `open_message_store`."""

    def __init__(
        self, options: StoreOptions, disk: Disk, run_blocking: RunBlocking, wall_clock_ms: Callable[[], int]
    ) -> None:
        parts = self._parts = StoreParts(options, disk, run_blocking, wall_clock_ms)
        self.state = StoreState.RECOVERING
        self.options = options
        self.run_blocking = run_blocking
        self.log, self.queues, self.index, self.epochs = parts.log, parts.queues, parts.index, parts.epochs
        self.flusher, self.dispatcher = parts.flusher, parts.dispatcher
        self.damage, self.verified = parts.damage, parts.verified
        self.repair = LogRepair(parts)
        self.checkpointer = Checkpointer(parts)
        self.retention = Retention(parts, wall_clock_ms)
        self.scrub = Scrub(parts)
        self.log.on_reset = self._forget_derived
        self.log.before_delete = self.checkpointer.write
        self.damage.on_healed = self._on_healed
        self.dispatcher.on_caught_up = self.scrub.want
        self.recovery = RecoverySummary()
        """Result of the recovery at the start"""
        self._writable_from = 0
        """Physical offset that dispatch must reach before a master accepts puts: until then the next queue offsets are
        unknown"""

    # ---- for other packages

    @property
    def is_writable(self) -> tuple[bool, str]:
        """Whether puts are accepted, and if not, why: a failed disk, one that is nearly full, or queues that are not
        built yet."""
        can_append, reason = self.can_append
        return self.retention.is_writable if can_append else (False, reason)

    @property
    def can_append(self) -> tuple[bool, str]:
        """Like `is_writable`, but True on a disk that is nearly full: records that free space may still be appended."""
        if self.flusher.failure is not None:
            return False, str(self.flusher.failure)
        dispatched = self.log.dispatched_offset.value
        if dispatched < self._writable_from and not self.log.is_slave:
            progress = f"queues are built up to {dispatched} of {self._writable_from}"
            return False, f"{progress}: {self.dispatcher.paused_reason}"
        return True, ""

    def subscribe(self, callback: Callable[[list[Arrival]], None]) -> None:
        """Calls `callback` synchronously after each dispatched batch that brought messages. It must not raise."""
        self.dispatcher.subscribe(callback)

    def set_retain_from(self, lowest_needed: Callable[[], int | None]) -> None:
        """Sets the callback that returns the lowest physical offset that a slave still needs, None if none needs
        any."""
        self.retention.lowest_needed = lowest_needed

    def set_release(self, release: Callable[[int], Awaitable[bool]]) -> None:
        """Sets the callback that retention awaits before it deletes a segment, with the physical offset at which the
        segment ends. If the callback returns False, the segment stays."""
        self.retention.release = release

    def damage_statistics(self) -> StoreDamage:
        """Returns the damage found in the log and in what is derived from it, and whether it was repaired."""
        return StoreDamage(
            log=self.damage.statistics(),
            checksum_rebuilt_count=self._parts.checksums.rebuilt_count,
            verified_bytes=self.verified.verified_bytes,
            scrub=self.scrub.statistics(),
        )

    def statistics(self) -> StoreStatistics:
        """Returns a snapshot of the store's offsets, counts and state."""
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
            recovered_clean=self.recovery.is_clean,
            recovery_s=self.recovery.duration_s,
            truncated_bytes=self.recovery.truncated_bytes,
        )

    async def query(self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int) -> list[int]:
        """Returns physical offsets of records that may have `key`, newest first; see `KeyIndex.query`. An empty list if
        there is no index. While the index is being rebuilt, waits up to QUERY_WAIT_S. Raises OSError."""
        if self.index is None:
            return []
        with trio.move_on_after(QUERY_WAIT_S):
            await self.index.wait_attached()
        found: list[int] = await self.run_blocking(self.index.query, topic, key, count_max, begin_ms, end_ms)
        return found

    async def clear_topics(self, before: Mapping[str, int]) -> None:
        """Removes messages from the queues of topics. `before` maps each topic to the physical offset before which its
        messages are removed. The queues keep their ends.

        The log keeps the records until retention deletes them. Records that are not dispatched yet, and queues that are
        rebuilt from the log because their files were damaged, need another call. Raises DiskFull if the disk is full or
        no file can be opened, DiskFailed if the disk fails; in both cases some queues may still have their messages.
        """
        if not self.queues.not_empty(before):
            return
        try:
            async with self.log.maintenance_lock:
                await self.run_blocking(self.queues.clear, dict(before))  # a copy: `before` may change meanwhile
        except OSError as error:
            directory = self.options.root / "consumequeue"
            if is_passing(error):
                raise DiskFull(directory, 0, error) from error
            raise DiskFailed(directory, "write", str(error)) from error

    # ---- failover

    async def truncate(self, offset: int) -> None:
        """Truncates the log, and all that is derived from it, at a physical offset that lies between two records.

        Every service continues; the offsets of the log fall, and all tasks that wait for one are woken. Requests that
        wait for a flush beyond `offset` get FLUSH_DISK_TIMEOUT. The next message that a master puts into a queue
        follows the queue's last remaining message. Does nothing if the log ends at `offset` anyway.

        Raises ValueError if the log doesn't hold `offset`, or if `offset` lies inside a record, or may do so because
        bytes before it are damaged. Raises DiskFull if the disk is full or no file can be opened, and OSError if the
        log can't be read; in both cases nothing has changed. Raises DiskFailed if the node must stop: the next start
        completes a truncation that has begun. On a master, also raises CorruptLog, DamagedBytes or OSError if the
        records that are not dispatched yet can't be read afterwards. If cancelled, the truncation has either not begun
        or is complete.
        """
        async with self.log.maintenance_lock, self.log.appends_held():
            truncation = Truncation(self._parts, self.checkpointer)
            if not await truncation.check(offset):
                return
            self.state = StoreState.TRUNCATING
            try:
                await truncation.run(offset)
            finally:
                if self.log.truncated is None:  # complete, or not begun
                    self.state = StoreState.SERVING
            self._writable_from = min(self._writable_from, offset)
            if not self.log.is_slave:
                await self._set_next_offsets()

    async def truncate_record(self, offset: int) -> None:
        """Truncates the log at the start of the record that contains a physical offset. If that record is confirmed,
        first lowers `dispatch_limit` to its start. Raises the errors of `truncate`."""
        begin = await self.run_blocking(boundary_before, self.log.segments, self.options, self.queues, offset)
        if self.log.dispatch_limit.value != UNLIMITED:
            self.log.limit_dispatch(min(self.log.dispatch_limit.value, begin))
        await self.truncate(begin)

    async def record_end(self, offset: int) -> int | None:
        """Returns the physical offset at which the record or filler at a physical offset ends; None if no intact one
        starts there. Raises OSError."""
        end: int | None = await self.run_blocking(record_end, self.log.segments, self.options, offset)
        return end

    async def become_master(self) -> None:
        """Makes the log accept puts, after the last append of a master's bytes.

        Removes an incomplete last record, and what a failed write may have left after it. Reads the next queue offsets
        and the last store time from the records that are not dispatched yet, so that puts need not wait for dispatch.
        Raises CorruptLog or DamagedBytes if these records can't be read, and the errors of `truncate`.
        """
        async with self.log.appends_held():
            end = (await self._read_undispatched()).end
            await self.log.clear_torn()
        await self.truncate(end)
        async with self.log.appends_held():
            await self._set_next_offsets()
            self.log.is_slave = False

    def become_slave(self) -> None:
        """Makes the log accept a master's bytes, after the last put."""
        self.log.is_slave = True

    async def _read_undispatched(self) -> Undispatched:
        log = self.log
        begin, end = log.dispatched_offset.value, log.max_offset.value
        if begin > end:  # dispatch has skipped an incomplete filler
            begin = await self.run_blocking(boundary_before, log.segments, self.options, self.queues, end)
        return await read_undispatched(log, begin)

    async def _set_next_offsets(self) -> None:
        undispatched = await self._read_undispatched()
        self.log.set_next_queue_offsets(undispatched.next_offsets)
        self.log.last_store_timestamp_ms = max(self.log.last_store_timestamp_ms, undispatched.store_timestamp_ms)
        self._writable_from = 0

    # ---- lifecycle

    async def recover(self) -> None:
        """Recovers the log, then makes queues and index end at its last record: truncates them, or adds entries. Raises
        the errors of `StoreRecovery.run`."""
        self.recovery = await StoreRecovery(self._parts, self.checkpointer).run()
        self._writable_from = self.recovery.max_offset
        self.state = StoreState.SERVING

    async def run(self) -> None:
        """Runs every service of the store until cancelled. Raises an exception group if one of them fails, for example
        with DiskFailed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.log.allocator.run)
            nursery.start_soon(self.log.release_cold_pages)
            nursery.start_soon(self.flusher.run)
            nursery.start_soon(self.dispatcher.run)
            nursery.start_soon(self.checkpointer.run)
            nursery.start_soon(self.retention.run)
            nursery.start_soon(self.scrub.run)

    @property
    def can_close(self) -> bool:
        """Whether `close` may be called: no write or sync failed, and no truncation is incomplete."""
        return self.state is StoreState.SERVING and self.flusher.failure is None and not self.log.is_torn

    async def close(self) -> None:
        """Flushes the log, dispatches the rest, saves queues, index and checkpoint, and then deletes the abort file to
        mark the store as cleanly closed.

        The abort file stays if DiskFailed or OSError is raised, if the disk was too full to sync queues or index, or
        if dispatch on a master could not finish for a reason other than lack of time.
        """
        await self.log.allocator.drop_ready()
        await self.flusher.flush()
        # Thousands of queues may still need their files. The next start dispatches what is left.
        with trio.move_on_after(self.options.stop_timeout_s * _CATCH_UP_SHARE) as catching_up:
            await self.dispatcher.catch_up_for_stop()
        await self.checkpointer.save(with_derived=True)
        self.state = StoreState.CLOSED
        is_only_late = catching_up.cancelled_caught and not self.dispatcher.paused_reason
        is_stuck = self._is_behind and not self.log.is_slave and not is_only_late
        unsynced_count = self.queues.unsynced_count
        is_index_unsynced = self.index is not None and self.index.is_unsynced
        if is_stuck or unsynced_count or is_index_unsynced:
            logger.warning(
                "store.closed_behind dispatched=%d unsynced_queue_files=%d index_unsynced=%s",
                self.log.dispatched_offset.value,
                unsynced_count,
                is_index_unsynced,
            )
            return  # the next start finds the abort file and dispatches again
        await self.run_blocking(self._parts.disk.unlink, self.options.root / "abort")

    @property
    def _is_behind(self) -> bool:
        """Whether there are records that dispatch has not handled. If dispatch is limited to a part of the log, the
        last bytes before the limit may be the start of a record that ends after it; the result is then False, unless
        dispatch is paused."""
        log = self.log
        is_limited = log.dispatch_limit.value < log.max_offset.value
        return log.dispatched_offset.value < log.dispatchable_end and (
            not is_limited or bool(self.dispatcher.paused_reason)
        )

    def _on_healed(self, damage: DamagedRange) -> None:
        """Schedules a scrub of the data derived from a healed range, unless dispatch has not reached it yet."""
        if damage.begin < self.log.dispatched_offset.value:
            self.scrub.want()

    def _forget_derived(self) -> None:
        self.queues.forget()
        self.epochs.forget()
        if self.index is not None:
            self.index.forget()
        self.checkpointer.forget()
        self.flusher.flushed_timestamp_ms = 0
        self.dispatcher.cap_timestamp(0)


@asynccontextmanager
async def open_message_store(
    options: StoreOptions,
    *,
    disk: Disk | None = None,
    run_blocking: RunBlocking = run_in_thread,
    wall_clock_ms: Callable[[], int] = wall_clock_ms,
) -> AsyncIterator[MessageStore]:
    """Opens the store at `options.root`, or creates it if it doesn't exist, for use in the block.

    The store uses `disk` for its files, `run_blocking` for worker threads, and `wall_clock_ms` for the time; tests
    replace them.

    Raises StoreLocked if another process, or this one, has the store open already, and CorruptLog and DiskFull as
    `StoreRecovery.run` does. Raises OSError if the directories can't be created or locked. Raises DiskFailed if the
    disk fails. If a service fails while the block runs, the block is cancelled, and the error is raised in an exception
    group; after DiskFailed the store is not closed but left to recovery, as after a crash. Cancelling the block closes
    the store as leaving it does, in at most `stop_timeout_s`.
    """
    disk = disk if disk is not None else OsDisk()
    root = options.root
    await run_blocking(_make_directories, disk, options)
    with await run_blocking(_lock, disk, options):
        store = MessageStore(options, disk, run_blocking, wall_clock_ms)
        try:
            await store.recover()
            await store.retention.check_disk()
            flushes_first = options.is_sync_flush and not options.is_slave
            await run_blocking(disk.write_bytes, root / "abort", FLUSHED_FIRST if flushes_first else b"")
        except OSError as error:
            raise DiskFailed(root, "recovery", str(error)) from error
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.run)
                yield store
                nursery.cancel_scope.cancel()
        except* DiskFailed:
            store.state = StoreState.FAILED  # a second sync of the same file would report success
            raise
        finally:
            if store.can_close:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + options.stop_timeout_s) as scope:
                    try:
                        await store.close()
                    except OSError as error:
                        raise DiskFailed(root, "closing", str(error)) from error
                if scope.cancelled_caught:
                    logger.error("store.close_timed_out root=%s timeout_s=%s", root, options.stop_timeout_s)
            elif store.flusher.failure is not None and not _is_in(sys.exception(), store.flusher.failure):
                raise store.flusher.failure  # of a flush that was requested after the services had ended


def _is_in(raised: BaseException | None, failure: DiskFailed) -> bool:
    """Returns whether `raised` is `failure`, or an exception group that contains it."""
    if isinstance(raised, BaseExceptionGroup):
        return raised.subgroup(lambda each: each is failure) is not None
    return raised is failure


def _lock(disk: Disk, options: StoreOptions) -> ExitStack:
    """Locks the store and the directory of its log, which may be elsewhere; returns what releases the locks. Blocking.
    Raises StoreLocked."""
    file, directory = options.root / "lock", options.commitlog_path
    with ExitStack() as locks:
        for path, lock in (
            (file, partial(disk.lock, file, b"lock")),
            (directory, partial(disk.lock_directory, directory)),
        ):
            held = lock()
            if held is None:
                raise StoreLocked(path)
            locks.callback(held.release)
        return locks.pop_all()


def _make_directories(disk: Disk, options: StoreOptions) -> None:
    disk.make_dirs(options.root)
    # If the path is a symbolic link to a directory that doesn't exist, either a reset was interrupted, which recovery
    # completes, or a disk is not mounted, which is an error.
    is_resetting = waiting_segment(disk, options) is not None
    disk.make_dirs(real_path(options.commitlog_path) if is_resetting else options.commitlog_path)
    disk.make_dirs(options.root / "consumequeue")
    disk.make_dirs(options.root / "index")
