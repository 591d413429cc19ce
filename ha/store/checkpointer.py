"""Syncs queues and index, and records up to where the store is durable, at intervals and when the store closes.

Writes the checkpoint (checkpoint.py), the checksums of flushed bytes, and the file with the ends of the queues.
Recovery relies on these after a crash, so they are written only after the data is on the disk. Source: StoreCheckpoint.
"""

from __future__ import annotations

import trio

from ha.errors import DiskFailed
from ha.protocol.store_files import Checkpoint
from ha.store.checkpoint import save_checkpoint
from ha.store.files import is_passing
from ha.store.key_index import KeyIndex
from ha.store.queue_ends import QUEUE_ENDS_FILE, QueueEnds, save_queue_ends
from ha.store.store_parts import StoreParts

_SYNCED_AT_ONCE = 512
"""Maximum number of queue files that are synced with one call; a cancellation waits until the call returns."""


class Checkpointer:
    """The checkpointer of one store. The log's `maintenance_lock` serializes its work with retention and truncation."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._options = parts.options
        self._run_blocking = parts.run_blocking
        self.checkpoint = Checkpoint()
        self._saved_checkpoint: tuple[bytes, int, int] | None = None
        self._saved_ends: QueueEnds | None = None
        """Ends of the queues in the file `queueends`; None if its content is not known"""

    async def run(self) -> None:
        """Saves the checkpoint every `checkpoint_interval_s`, and queues and index every `derived_flush_interval_s`.

        Runs until cancelled. Raises DiskFailed if the disk fails.
        """
        options = self._options
        derived_at = trio.current_time() + options.derived_flush_interval_s
        while True:
            await trio.sleep(options.checkpoint_interval_s)
            async with self._parts.log.maintenance_lock:
                is_derived_due = trio.current_time() >= derived_at
                if is_derived_due:
                    derived_at = trio.current_time() + options.derived_flush_interval_s
                await self.save(with_derived=is_derived_due)

    async def save(self, *, with_derived: bool) -> None:
        """Saves the checksums and the checkpoint; with `with_derived`, queues and index before them.

        Call it while holding the log's `maintenance_lock`, or while no other task uses the store. Raises DiskFailed if
        the disk fails; if the disk is full, the next call saves what this one did not.
        """
        if with_derived:
            await self._save_derived()
        try:
            await self._parts.verified.cover_flushed()
        except OSError as error:
            if not is_passing(error):
                raise DiskFailed(self._options.root / "checksums", "write", str(error)) from error
        checkpoint, flushed_ms = self.checkpoint, self._parts.flusher.flushed_timestamp_ms
        checkpoint.physic_msg_timestamp_ms = max(checkpoint.physic_msg_timestamp_ms, flushed_ms)
        try:
            await self.write()
        except OSError as error:
            if not is_passing(error):
                raise DiskFailed(self._options.root / "checkpoint", "write", str(error)) from error

    async def write(self, begin: int | None = None) -> None:
        """Writes and syncs the checkpoint, unless it is unchanged. Raises OSError if it can't be written.

        `begin`: physical offset at which the log will begin after a deletion; by default the one at which it begins
        now.
        """
        parts = self._parts
        log = parts.log
        flushed_to = 0 if log.is_slave else log.flushed_offset.value
        if self._options.dispatch_confirmed:
            self.checkpoint.confirm_physical_offset = min(log.max_offset.value, log.dispatch_limit.value)
        content = self.checkpoint.pack(), flushed_to, log.min_offset if begin is None else begin
        if content == self._saved_checkpoint:
            return
        self._saved_checkpoint = None  # unknown after an error
        path = self._options.root / "checkpoint"
        await self._run_blocking(save_checkpoint, parts.disk, path, Checkpoint.unpack(content[0]), *content[1:])
        self._saved_checkpoint = content

    def forget(self) -> None:
        """Resets the checkpoint and the ends of queues after a reset has moved their files."""
        self.checkpoint = Checkpoint()
        self._saved_checkpoint = None
        self._saved_ends = None

    # ---- queues and index

    async def _save_derived(self) -> None:
        """Syncs queues and index, and sets their times in the checkpoint, which the caller writes. Raises
        DiskFailed."""
        parts = self._parts
        log, queues = parts.log, parts.queues
        generation = log.generation
        dispatched = log.dispatched_offset.value
        stored_ms = parts.dispatcher.dispatched_timestamp_ms
        try:
            if queues.unsynced_count or self._saved_ends is None:
                await self._save_queues()
            if parts.index is not None:
                await self._save_index(parts.index)
        except OSError as error:
            if is_passing(error):  # dispatch logs it, and the next round tries again
                return
            raise DiskFailed(self._options.root, "sync of queues and index", str(error)) from error
        if generation == log.generation and dispatched <= log.dispatched_offset.value:
            self.checkpoint.logics_msg_timestamp_ms = max(self.checkpoint.logics_msg_timestamp_ms, stored_ms)
            if parts.index is not None:
                self.checkpoint.index_msg_timestamp_ms = parts.index.safe_timestamp_ms

    async def _save_queues(self) -> None:
        """Syncs the files of queues written up to now, and records the ends of these queues. Raises OSError.

        Syncs _SYNCED_AT_ONCE files at a time: handling those of a hundred thousand queues in one step would block the
        event loop.
        """
        queues, ends = self._parts.queues, self._saved_ends
        if ends is None:
            ends = await self._run_blocking(queues.ends)  # those of queues that are written meanwhile are updated below
        left = queues.unsynced_count
        while left > 0:
            taken = queues.take_unsynced(_SYNCED_AT_ONCE)
            left -= _SYNCED_AT_ONCE
            new_ends = [(queue.topic, queue.queue_id, queue.max_offset) for queue in taken.values()]
            try:
                await self._run_blocking(self._parts.disk.sync_all, list(taken))
            except BaseException:  # cancelled by the stop, or the disk is full: the next round syncs them
                queues.give_back(taken)
                raise
            for topic, queue_id, end in new_ends:
                known = ends.setdefault(topic, {})
                if known.get(queue_id) != end:
                    known[queue_id] = end
                    self._saved_ends = None
        if self._saved_ends is None:
            await self._save_ends(ends)

    async def _save_ends(self, ends: QueueEnds) -> None:
        await self._run_blocking(save_queue_ends, self._parts.disk, self._options.root / QUEUE_ENDS_FILE, ends)
        self._saved_ends = ends

    async def _save_index(self, index: KeyIndex) -> None:
        index.write_pending()
        taken = index.take_unwritten()
        dirty_ms = [unwritten.end_timestamp_ms for unwritten in taken if unwritten.is_dirty]
        try:
            if dirty_ms and min(dirty_ms) <= self.checkpoint.index_msg_timestamp_ms:
                # Some new keys are of a millisecond up to which the index is synced according to the checkpoint. If the
                # power fails during this write, the file must not be taken for the one that was synced before.
                self.checkpoint.index_msg_timestamp_ms = min(dirty_ms) - 1
                await self.write()
            await self._run_blocking(index.write, taken)
            index.write_pending()  # keys put meanwhile
        finally:
            index.give_back(taken)  # nothing is left to write, unless the write was cancelled or failed

    # ---- for truncation

    async def cap_timestamps(self, stored_ms: int) -> None:
        """Lowers every recorded store time to at most `stored_ms`, and writes the checkpoint. Call it before bytes of
        later records change. Raises OSError."""
        parts, checkpoint = self._parts, self.checkpoint
        parts.log.last_store_timestamp_ms = min(parts.log.last_store_timestamp_ms, stored_ms)
        parts.flusher.flushed_timestamp_ms = min(parts.flusher.flushed_timestamp_ms, stored_ms)
        parts.dispatcher.cap_timestamp(stored_ms)
        checkpoint.physic_msg_timestamp_ms = min(checkpoint.physic_msg_timestamp_ms, stored_ms)
        checkpoint.logics_msg_timestamp_ms = min(checkpoint.logics_msg_timestamp_ms, stored_ms)
        checkpoint.index_msg_timestamp_ms = min(checkpoint.index_msg_timestamp_ms, stored_ms)
        await self.write()

    async def save_truncated(self) -> None:
        """Saves the index and the ends of the queues after both were truncated. Raises OSError."""
        if self._parts.index is not None:
            await self._save_index(self._parts.index)
        await self._save_ends(await self._run_blocking(self._parts.queues.ends))
