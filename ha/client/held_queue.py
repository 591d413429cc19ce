"""A queue assigned to this consumer, until it is revoked, and the messages pulled from it.

A held queue restarts, with a new process queue, when the broker moves the consumer's offset, when an operator resets
the offset, and when a lock that was lost is granted again.
"""

from __future__ import annotations

import math

import anyio

from ha.client.messages import MessageQueue
from ha.client.process_queue import ProcessQueue


class HeldQueue:
    """One queue, its current process queue, and the state shared by the tasks that work on it."""

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.process_queue: ProcessQueue | None = None
        """Messages fetched since the last restart; None until the start offset is known."""
        self.is_revoked = False
        """Whether no further message may be handled, because the queue is no longer assigned to this consumer or the
        consumer is closing."""
        self.saved_offset: int | None = None
        """Position (queue offset) that was last saved or loaded; None: `position` must be saved in any case."""
        self.saved_loss_count = 0
        """`Positions.loss_count` when `saved_offset` was saved or loaded."""
        self.restart_count = 0
        """Number of restarts so far. A save that began before the last restart does not set `saved_offset`."""
        self.feeding = anyio.CancelScope()
        """Cancel scope of the task that fetches the queue's messages."""
        self.resume_at: int | None = None
        """Queue offset at which the next process queue starts; None: at the saved position or, without one, where
        the consumer's `start_from` says."""
        self.resume_from = -1
        """If `resume_at` is None: minimum queue offset at which the next process queue starts; -1: no minimum."""
        self.locked_until = -math.inf
        """With ORDERLY: time at which the lock expires, on the event loop's clock."""
        self.lock_changed = anyio.Event()
        """Event that is set when the lock is granted, renewed or lost, and then replaced by a new one."""
        self.is_scheduled = False
        """With ORDERLY: whether a worker has the queue, or the queue waits for a worker or for the next attempt at a
        failed message."""
        self.handling_count = 0
        """Number of messages that handlers are working on."""
        self._idle: anyio.Event | None = None
        # For tools: wall-clock times, in ms since 1970
        self.last_pull_ms = 0
        self.last_consume_ms = 0
        self.last_lock_ms = 0
        self._pulling: anyio.CancelScope | None = None

    @property
    def position(self) -> int | None:
        """The first queue offset not handled yet; None while it is not known."""
        return self.resume_at if self.process_queue is None else self.process_queue.commit_offset

    @property
    def has_unsaved_position(self) -> bool:
        """Whether `position` has to be saved."""
        return self.position is not None and self.position != self.saved_offset

    @property
    def is_locked(self) -> bool:
        """Whether this consumer has the queue's lock, and the lock can't have expired at the broker."""
        return anyio.current_time() < self.locked_until

    def set_locked(self, until: float, now_ms: int) -> None:
        """Records that the broker granted or renewed the lock, which is valid until `until` (event loop's clock). If
        the lock had been lost or had expired, restarts the queue. `now_ms`: wall clock, for tools."""
        if not self.is_locked and self.process_queue is not None:
            # Another member may have held the lock meanwhile, and saved a higher position.
            self.restart(at=None)
        self.locked_until = until
        self.last_lock_ms = now_ms
        self._tell_lock_changed()

    def set_unlocked(self) -> None:
        """Records that the lock was lost."""
        self.locked_until = -math.inf
        self._tell_lock_changed()

    def _tell_lock_changed(self) -> None:
        self.lock_changed.set()
        self.lock_changed = anyio.Event()

    def mark_saved(self, offset: int, loss_count: int) -> None:
        """Records that the position `offset` was saved or loaded, at this `Positions.loss_count`."""
        self.saved_offset, self.saved_loss_count = offset, loss_count

    def begin_handling(self) -> None:
        """Records that a handler starts to work on a message of this queue."""
        self.handling_count += 1

    def end_handling(self, now_ms: int) -> None:
        """Records that a handler has ended, at `now_ms` (wall clock)."""
        self.last_consume_ms = now_ms
        self.handling_count -= 1
        if self._idle is not None and self.handling_count == 0:
            self._idle.set()
            self._idle = None

    async def wait_idle(self) -> None:
        """Returns when no handler is working on a message of this queue."""
        while self.handling_count:
            if self._idle is None:
                self._idle = anyio.Event()
            await self._idle.wait()

    def restart(self, at: int | None) -> None:
        """Drops the pulled messages and pulls again from queue offset `at`; None: from the saved position or the
        current `position`, whichever is higher."""
        self.restart_count += 1
        if self.process_queue is not None:
            if at is None:
                self.resume_from = max(self.resume_from, self.process_queue.commit_offset)
            self.process_queue.drop()
            self.process_queue = None
        if at is not None:
            self.resume_at, self.resume_from = at, -1
            self.saved_offset = None
        if self._pulling is not None:
            self._pulling.cancel()

    def revoke(self) -> None:
        """Stops fetching. With ORDERLY, waiting messages are no longer handled either; with CONCURRENTLY, call `drop`
        for that."""
        self.is_revoked = True
        self.feeding.cancel()

    def drop(self) -> None:
        """Drops the pulled messages. Messages that are being handled no longer advance `position` when they finish."""
        if self.process_queue is not None:
            self.process_queue.drop()

    def pulling(self) -> anyio.CancelScope:
        """Returns a new cancel scope for fetching, which `restart` cancels."""
        self._pulling = anyio.CancelScope()
        return self._pulling
