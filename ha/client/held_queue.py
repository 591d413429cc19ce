"""A queue that rebalancing gave to this consumer, until it is taken away, and the messages pulled from it.

A queue may begin anew while it is held: the brokers moved its offset, an operator reset it, or its lock was lost. Then
its process queue is dropped and another one made.
"""

from __future__ import annotations

import math

import anyio

from ha.client.messages import MessageQueue
from ha.client.process_queue import ProcessQueue


class HeldQueue:
    """One queue, its present process queue, and what the tasks that work on it tell each other."""

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.process_queue: ProcessQueue | None = None
        """None until it is known where to begin."""
        self.is_revoked = False
        """Another member has it now; nothing of it is handled any more."""
        self.saved_offset: int | None = None
        """What the positions were last told; None: they have to be told whatever it is."""
        self.feeding = anyio.CancelScope()
        """Around everything that fetches messages for it."""
        self.resume_at: int | None = None
        """Where the next process queue begins, whatever the positions say."""
        self.resume_from = -1
        """Where it begins at least."""
        self.locked_until = -math.inf
        """ORDERLY: until when this consumer may believe that the lock is its own (the event loop's clock)."""
        self.lock_changed = anyio.Event()
        self.is_scheduled = False
        """ORDERLY: a worker is at it, or will be."""
        self.handling_count = 0
        """Messages of it that handlers are at."""
        self._idle: anyio.Event | None = None
        self.last_pull_ms = 0
        self.last_consume_ms = 0
        self.last_lock_ms = 0
        self._pulling: anyio.CancelScope | None = None

    @property
    def is_locked(self) -> bool:
        """Whether the lock is held for sure."""
        return anyio.current_time() < self.locked_until

    def set_locked(self, until: float, now_ms: int) -> None:
        """The broker granted the lock, or renewed it."""
        if not self.is_locked and self.process_queue is not None:
            # Somebody else may have had it since, and be further by now; or nobody had, and the brokers know less.
            self.begin_anew(at=None)
        self.locked_until = until
        self.last_lock_ms = now_ms
        self._tell_lock_changed()

    def set_unlocked(self) -> None:
        """The broker gave the lock to somebody else, or forgot it."""
        self.locked_until = -math.inf
        self._tell_lock_changed()

    def _tell_lock_changed(self) -> None:
        self.lock_changed.set()
        self.lock_changed = anyio.Event()

    def begin_handling(self) -> None:
        """A handler begins with a message of it."""
        self.handling_count += 1

    def end_handling(self, now_ms: int) -> None:
        """A handler is through with a message of it."""
        self.last_consume_ms = now_ms
        self.handling_count -= 1
        if self._idle is not None and self.handling_count == 0:
            self._idle.set()
            self._idle = None

    async def wait_idle(self) -> None:
        """Returns when no handler is at a message of it."""
        while self.handling_count:
            if self._idle is None:
                self._idle = anyio.Event()
            await self._idle.wait()

    def begin_anew(self, at: int | None) -> None:
        """Drops what was pulled. Pulling begins again at queue offset `at`; None: where the positions say, or further
        if this consumer got further."""
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
        """Nothing is fetched any more, and nothing that waits may be handled."""
        self.is_revoked = True
        self.feeding.cancel()

    def drop(self) -> None:
        """Forgets what was pulled; what handlers are at does not count any more when they end."""
        if self.process_queue is not None:
            self.process_queue.drop()

    def pulling(self) -> anyio.CancelScope:
        """A scope that `begin_anew` cancels."""
        self._pulling = anyio.CancelScope()
        return self._pulling
