"""Many sockets behind one epoll descriptor, on which one task waits: what is ready is served in one turn of it.

A wait of trio's for one socket takes some twenty microseconds of Python: a registration, a task made runnable, its
step. With one request in flight on each of many connections that is a third of what a request costs. Here a task that
waits leaves behind what is to be done when its socket is readable, a function that doesn't wait. The poller calls it,
and the task is woken only if that isn't enough. The task still owns its connection: cancelled, it waits no more.

    turn     what all sockets that are ready have brought, at most TURN_S of it, then the other tasks
    its end  what was left for it by `at_turn_end`: what many brought is written, what many are told is sent, once
"""

from __future__ import annotations

import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import perf_counter

import trio

TURN_S = 0.002
"""So long sockets are served before the other tasks have their turn."""

EVENTS_MAX = 256
"""Sockets that the system names at once."""


class _Wait:
    """A task that waits, and what is called instead of waking it."""

    __slots__ = ("error", "on_readable", "task")

    def __init__(self, task: trio.lowlevel.Task, on_readable: Callable[[], bool]) -> None:
        self.task = task
        self.on_readable = on_readable
        self.error: Exception | None = None


class Poller:
    """Runs within `open_poller`. Its sockets are those that tasks wait for now."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._waits: dict[int, _Wait] = {}
        self._unserved: list[tuple[int, int]] = []
        self._early: list[Callable[[], None]] = []
        self._late: list[Callable[[], None]] = []
        self._is_in_turn = False
        self._scope = trio.CancelScope(shield=True)

    async def wait(self, descriptor: int, on_readable: Callable[[], bool]) -> None:
        """Have `on_readable` called whenever the descriptor is readable or its peer gone, until it returns False.

        It runs in the poller's task. What it raises is raised here. The descriptor must stay open until this returns.
        """
        if descriptor < 0:
            raise trio.ClosedResourceError("the socket is closed")
        wait = _Wait(trio.lowlevel.current_task(), on_readable)
        assert descriptor not in self._waits, "another task waits for it"
        self._epoll.register(descriptor, select.EPOLLIN)
        self._waits[descriptor] = wait

        def abort(_: object) -> trio.lowlevel.Abort:
            self._forget(descriptor)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if wait.error is not None:
            raise wait.error

    def at_turn_end(self, callback: Callable[[], None], *, is_early: bool = False) -> None:
        """Call it when all that is ready has been read; at once outside a turn. Those that are early come first.

        It must not raise, and may leave more for the same end.
        """
        if not self._is_in_turn:
            callback()
        elif is_early:
            self._early.append(callback)
        else:
            self._late.append(callback)

    @property
    def is_in_turn(self) -> bool:
        """Whether sockets are being served, and `at_turn_end` puts off."""
        return self._is_in_turn

    async def _run(self) -> None:
        """Serve until `_scope` is cancelled, whatever is cancelled around it: connections are served to their end."""
        with self._scope:
            while True:
                if self._unserved:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(self._epoll.fileno())
                self._serve()

    def _serve(self) -> None:
        """One turn."""
        events = self._unserved or self._epoll.poll(0, EVENTS_MAX)
        self._unserved = []
        ends_at = perf_counter() + TURN_S
        self._is_in_turn = True
        try:
            for number, (descriptor, _) in enumerate(events):
                wait = self._waits.get(descriptor)
                if wait is not None:  # else one before it has ended the wait
                    self._serve_one(descriptor, wait)
                if perf_counter() >= ends_at:
                    self._unserved = events[number + 1 :]
                    break
            while self._early or self._late:
                callbacks, self._early = self._early, []
                if not callbacks:
                    callbacks, self._late = self._late, []
                for callback in callbacks:
                    callback()
        finally:
            self._is_in_turn = False

    def _serve_one(self, descriptor: int, wait: _Wait) -> None:
        try:
            goes_on = wait.on_readable()
        except Exception as error:  # its task's, which is where it is raised
            wait.error = error
            goes_on = False
        if not goes_on and self._waits.get(descriptor) is wait:  # else it was cancelled meanwhile
            self._forget(descriptor)
            trio.lowlevel.reschedule(wait.task)

    def _forget(self, descriptor: int) -> None:
        del self._waits[descriptor]
        with suppress(OSError):  # closed already, and with that out of the epoll
            self._epoll.unregister(descriptor)

    def _close(self) -> None:
        self._epoll.close()


@asynccontextmanager
async def open_poller() -> AsyncIterator[Poller]:
    """A poller that serves while the block runs, also while what is in the block ends in shielded scopes."""
    poller = Poller()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poller._run)
            try:
                yield poller
            finally:
                poller._scope.cancel()
    finally:
        poller._close()
