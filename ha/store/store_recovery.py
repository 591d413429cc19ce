"""Makes log, queues and index end at the same record at start, after a clean stop or a crash.

recovery.py finds the end of the log; queues and index are truncated to it, and dispatch adds what they lack. A
truncation that a crash interrupted is completed first. Source: DefaultMessageStore.recover.
"""

from __future__ import annotations

import logging

import msgspec
import trio

from ha.store.checkpoint import load_begin, load_checkpoint, load_flushed_to
from ha.store.checkpointer import Checkpointer
from ha.store.consume_queue import ConsumeQueue
from ha.store.files import is_passing
from ha.store.key_index import KeyIndex
from ha.store.log_reset import finish_reset
from ha.store.queue_ends import QUEUE_ENDS_FILE, QueueEnds, load_queue_ends
from ha.store.recovery import LogRecovery, Recovered
from ha.store.rewrite import write_again
from ha.store.segment_files import load_segments
from ha.store.store_parts import StoreParts
from ha.store.truncation import INTENT_FILE, finish_files, load_intent

logger = logging.getLogger(__name__)

FLUSHED_FIRST = b"SYNC_FLUSH"
"""Content of the abort file if each record is flushed before its queue entry is written (recovery.py). Written by a
master with SYNC_FLUSH, and by a start that dispatches the records left by a clean stop. RocketMQ checks only whether
the file exists. If RocketMQ used the store in between and crashed, the content may be wrong, but then there is no sound
checkpoint either (checkpoint.py)."""
_OPEN_QUEUES_MAX = 1 << 14
"""Maximum number of queue files that are kept open; each takes a KiB or two of memory."""


class RecoverySummary(msgspec.Struct, frozen=True):
    """Result of a recovery, for statistics. Offset and size in bytes."""

    is_clean: bool = True
    max_offset: int = 0
    truncated_bytes: int = 0
    duration_s: float = 0.0
    is_shorter: bool = False
    """Whether the log ends before what the checkpoint says was flushed or confirmed"""


class StoreRecovery:
    """Recovers one store. Used once."""

    def __init__(self, parts: StoreParts, checkpointer: Checkpointer) -> None:
        self._parts = parts
        self._checkpointer = checkpointer
        self._is_clean = True
        self._truncate_at: int | None = None
        self._queue_ends: QueueEnds = {}
        self._lost_from: int | None = None
        self._is_shorter = False
        self._found_ends: list[tuple[ConsumeQueue, int, int]] = []
        """After a crash: queues, their ends before entries were removed, and where their last records end (bytes)"""
        self._are_ends_flushed = False
        """Whether the log was flushed up to the recorded ends of the queues"""

    async def run(self) -> RecoverySummary:
        """Recovers the store, and dispatches the records that queues and index lack.

        Raises CorruptLog if the end of the log can't be determined, its files can't be those of this log (recovery.py),
        or both epoch files are damaged; nothing was deleted from the log then. Raises OSError or DiskFailed if the disk
        fails; DiskFull if the epoch file has to be changed and the disk is full or no file can be opened.
        """
        began = trio.current_time()
        parts, run, root = self._parts, self._parts.run_blocking, self._parts.options.root
        log, queues = parts.log, parts.queues
        open_files_max = parts.options.open_files_max
        queues.limit_open_files(min(open_files_max * 3 // 4, _OPEN_QUEUES_MAX))
        await parts.epochs.load()
        self._truncate_at = await run(self._load_intent)
        if self._truncate_at is not None:
            await run(finish_files, parts.disk, parts.options, parts.checksums, self._truncate_at)
        self._is_clean = not parts.disk.exists(root / "abort") and self._truncate_at is None
        recovered, are_queues_whole = await self._recover_log()
        had_ends_ms = self._checkpointer.checkpoint.logics_msg_timestamp_ms
        dispatch_from = await self._recover_derived(recovered, are_queues_whole=are_queues_whole)
        await self._dispatch(dispatch_from)
        if recovered.last_store_timestamp_ms >= had_ends_ms:
            # The log still has all records up to the recorded ends. If a queue ends earlier nevertheless, a damaged
            # entry of an older record was removed together with those that were dispatched again.
            lost_from = queues.lost_from(self._queue_ends)
            if lost_from is not None:
                await self._dispatch(lost_from)
            # Without the checkpoint's time it is not known whether the log still has the records.
            if had_ends_ms and self._are_ends_flushed and log.dispatched_offset.value == log.max_offset.value:
                await self._restore_ends()
        await self._keep_ends()
        if not self._is_clean and self._short_queues():
            # The recorded ends include records that the crash lost. A later start must not restore these ends, because
            # other records may get the queue offsets.
            try:
                await self._checkpointer.save_truncated()
            except OSError as error:
                if not is_passing(error):  # otherwise the checkpointer saves them later
                    raise
        if log.segments:
            await run(queues.correct_min, max(log.min_offset, 0))
        await run(queues.limit_open_files, min(open_files_max // 4, _OPEN_QUEUES_MAX))
        summary = RecoverySummary(
            is_clean=self._is_clean,
            max_offset=recovered.max_offset,
            truncated_bytes=recovered.truncated_bytes,
            duration_s=trio.current_time() - began,
            is_shorter=self._is_shorter,
        )
        logger.info(
            "store.recovered root=%s clean=%s min_offset=%d max_offset=%d truncated_bytes=%d dispatched_from=%d"
            " duration_s=%.3f",
            root,
            summary.is_clean,
            log.min_offset,
            log.max_offset.value,
            summary.truncated_bytes,
            dispatch_from,
            summary.duration_s,
        )
        return summary

    def _load_intent(self) -> int | None:
        """Completes an interrupted reset; returns the physical offset at which an interrupted truncation ends the log,
        None if there is none. Blocking."""
        disk, options = self._parts.disk, self._parts.options
        finish_reset(disk, options)
        return load_intent(disk, options.root / INTENT_FILE)

    async def _recover_log(self) -> tuple[Recovered, bool]:
        """Loads checkpoint and queues and finds the end of the log. Also returns whether the files of all queues were
        usable."""
        parts, checkpointer, run = self._parts, self._checkpointer, self._parts.run_blocking
        disk, options, checksums, queues = parts.disk, parts.options, parts.checksums, parts.queues
        checkpointer.checkpoint = checkpoint = await run(load_checkpoint, disk, options.root / "checkpoint")
        known_begin, known_end, flushed_to = await self._known_range()
        segments, zero_filled = await run(
            load_segments, disk, options.commitlog_path, options.segment_size, checksums, known_begin, known_end
        )
        are_queues_whole: bool = await run(queues.load, self._is_clean)
        queued_to = queues.max_physical_offset
        if self._truncate_at is None:
            self._queue_ends = await run(load_queue_ends, disk, options.root / QUEUE_ENDS_FILE)
            self._lost_from = queues.lost_from(self._queue_ends)
        else:
            await run(queues.truncate, self._truncate_at)
            queued_to = min(queued_to, self._truncate_at)
        if not self._is_clean:
            self._found_ends = [(queue, queue.max_offset, queue.max_physical_offset) for queue in queues]
        queues_prove = not self._is_clean and await run(self._was_flushed_first)
        self._are_ends_flushed = self._is_clean or queues_prove
        recovered = await LogRecovery(
            parts,
            segments,
            zero_filled,
            checkpoint,
            is_clean=self._is_clean,
            are_queues_whole=are_queues_whole,
            queues_prove=queues_prove,
            known_end=known_end,
        ).run()
        if not self._is_clean:
            unsure_from = max(recovered.scanned_from, known_end)
            await run(write_again, recovered.segments, unsure_from, recovered.max_offset)
        parts.log.adopt(recovered.segments, recovered.max_offset)
        confirmed = checkpoint.confirm_physical_offset if options.dispatch_confirmed else 0
        if options.dispatch_confirmed:
            # Records in queues were confirmed. If the limit were before one, a consumer that has received it would find
            # that the queue ends before it.
            parts.log.limit_dispatch(min(max(confirmed, queued_to), recovered.max_offset))
        if not recovered.segments and (known_begin >= 0 or known_end):
            # The log was deleted, or its disk was replaced or is not mounted: its terms are gone, too. Done before the
            # checkpoint, the evidence that there was a log, is replaced.
            hint = "if it was not deleted on purpose, stop this node and check that its disk is mounted"
            logger.error("commitlog.lost directory=%s hint=%r", options.commitlog_path, hint)
            await parts.epochs.truncate_from(0)
        self._is_shorter = recovered.max_offset < max(flushed_to, confirmed)
        is_changed = self._is_shorter or parts.log.min_offset < known_begin
        if recovered.queues_kept_to or is_changed or (flushed_to and options.is_slave):
            await checkpointer.write()  # so that the next start finds the same end
        await run(parts.verified.begin, recovered.scanned_from, recovered.max_offset)
        parts.log.last_store_timestamp_ms = recovered.last_store_timestamp_ms
        parts.flusher.flushed_timestamp_ms = recovered.last_store_timestamp_ms
        return recovered, are_queues_whole

    async def _known_range(self) -> tuple[int, int, int]:
        """Returns three physical offsets: where the log begins according to the checkpoint (-1 if unknown), the lowest
        possible end of the log, and its flushed end according to the checkpoint (0 if unknown)."""
        parts, run, path = self._parts, self._parts.run_blocking, self._parts.options.root / "checkpoint"
        flushed_to = await run(load_flushed_to, parts.disk, path)
        if self._truncate_at is not None:
            flushed_to = min(flushed_to, self._truncate_at)
        # The checkpoint of a slave that was a master does not describe the bytes that it now gets from another master.
        known_end = max(0 if parts.options.is_slave else flushed_to, await run(parts.checksums.known_end))
        return await run(load_begin, parts.disk, path), known_end, flushed_to

    def _was_flushed_first(self) -> bool:
        """Returns whether the process that crashed added only flushed records to its queues. Blocking."""
        is_own = self._checkpointer.checkpoint.physic_msg_timestamp_ms > 0
        return is_own and self._parts.disk.read_bytes(self._parts.options.root / "abort") == FLUSHED_FIRST

    async def _recover_derived(self, recovered: Recovered, *, are_queues_whole: bool) -> int:
        """Truncates queues, index and epochs to the log's end; returns the physical offset from which records have to
        be dispatched again."""
        parts = self._parts
        queues, min_offset = parts.queues, max(parts.log.min_offset, 0)
        if self._is_clean:
            await parts.run_blocking(queues.truncate, recovered.max_offset)
            dispatch_from = queues.max_physical_offset
        else:
            await self._drop_unsynced_entries(recovered)
            dispatch_from = recovered.scanned_from
        if parts.options.is_slave and recovered.segments and recovered.max_offset <= min_offset:
            await parts.run_blocking(queues.destroy)
            self._found_ends, self._queue_ends = [], {}
        if parts.index is not None:
            indexed_to = await self._recover_index(parts.index, recovered.max_offset)
            dispatch_from = min_offset if indexed_to is None else min(dispatch_from, indexed_to)
        if self._truncate_at is not None:
            await self._finish_truncation(self._truncate_at, recovered)
        await parts.epochs.drop_beyond(recovered.max_offset)
        for lost_from in (queues.rebuild_from, self._lost_from):
            if lost_from is not None:
                dispatch_from = min(dispatch_from, lost_from)
        return dispatch_from if are_queues_whole else min_offset

    async def _dispatch(self, begin: int) -> None:
        parts, log = self._parts, self._parts.log
        log.dispatched_offset.reset(min(max(begin, log.min_offset, 0), log.max_offset.value))
        if self._is_clean and log.dispatched_offset.value < log.dispatchable_end:
            # If this start is killed, some queues may have entries of later records than others.
            await parts.run_blocking(parts.disk.write_bytes, parts.options.root / "abort", FLUSHED_FIRST)
        await parts.dispatcher.catch_up()

    def _short_queues(self) -> list[tuple[str, int, int]]:
        """Returns topic, queue id and recorded end of each queue that ends before its recorded end."""
        next_queue_offset = self._parts.queues.next_queue_offset
        ends = ((topic, queue_id, end) for topic, known in self._queue_ends.items() for queue_id, end in known.items())
        return [(topic, queue_id, end) for topic, queue_id, end in ends if next_queue_offset(topic, queue_id) < end]

    async def _restore_ends(self) -> None:
        """Restores, with blank entries, the recorded ends of queues that are still too short after dispatch: retention
        has deleted the records of their lost entries, or these records can no longer be dispatched to the queue.

        Otherwise the next messages would get queue offsets that consumers have committed as consumed.
        """
        log, run = self._parts.log, self._parts.run_blocking
        min_offset = max(log.min_offset, 1)
        for topic, queue_id, end in self._short_queues():
            queue = self._parts.queues.get_or_create(topic, queue_id)
            if queue.files.starts:
                is_expired = queue.max_physical_offset <= min_offset
                await run(queue.keep_end, end, min_offset if is_expired else log.max_offset.value)
                continue
            logger.error("queue.end_kept topic=%s queue_id=%d end=%d found=0", topic, queue_id, end)
            [new] = queue.new_files(end, end + 1)
            queue.adopt(new, await run(new.make))

    async def _keep_ends(self) -> None:
        """Fills up, with blank entries, queues that are shorter than before recovery although the log still has their
        last records, so that no queue offset is used again.

        Dispatch does not restore the entry of a record if a bit of the record's topic, queue id or queue offset has
        flipped; no CRC of the record covers these fields.
        """
        dispatched_to = self._parts.log.dispatched_offset.value
        for queue, end, physical_end in self._found_ends:
            if queue.max_offset < end and 0 < physical_end <= dispatched_to:
                await self._parts.run_blocking(queue.keep_end, end, physical_end)

    async def _drop_unsynced_entries(self, recovered: Recovered) -> None:
        """Removes, after a crash, the queue entries that a power loss may have torn: those of records from
        `scanned_from` on, or from `queues_kept_to` on if that is greater. Dispatch adds them again.

        First lowers the checkpoint's time of the queues, because another crash may come before the new entries are
        durable.
        """
        run, queues = self._parts.run_blocking, self._parts.queues
        checkpoint, since_ms = self._checkpointer.checkpoint, recovered.scanned_from_timestamp_ms
        if recovered.scanned_from < recovered.max_offset and since_ms < checkpoint.logics_msg_timestamp_ms:
            checkpoint.logics_msg_timestamp_ms = since_ms
            await self._checkpointer.write()
        await run(queues.truncate, max(recovered.scanned_from, recovered.queues_kept_to))
        if recovered.queues_kept_to:
            await run(queues.sync_from, recovered.scanned_from)

    async def _recover_index(self, index: KeyIndex, end: int) -> int | None:
        """Loads the index and deletes its files with records at or beyond the log's end. Returns the physical offset of
        the last record that has keys in the index, None if it is empty."""
        run, checkpoint = self._parts.run_blocking, self._checkpointer.checkpoint
        await run(index.load, None if self._is_clean else checkpoint.index_msg_timestamp_ms)
        if checkpoint.index_msg_timestamp_ms > index.safe_timestamp_ms:
            # Deleted files are rebuilt with the same store times, and must not count as synced.
            checkpoint.index_msg_timestamp_ms = index.safe_timestamp_ms
            await self._checkpointer.write()
        await run(index.drop_files_beyond, end)
        return index.end_physical_offset

    async def _finish_truncation(self, truncate_at: int, recovered: Recovered) -> None:
        """Completes an interrupted truncation, and removes the intent."""
        parts = self._parts
        await self._checkpointer.cap_timestamps(recovered.last_store_timestamp_ms)
        await self._checkpointer.save_truncated()
        await parts.epochs.truncate_from(truncate_at)
        await parts.run_blocking(parts.disk.unlink, parts.options.root / INTENT_FILE)
