"""Serves many sockets from one task, which waits for one epoll descriptor.

Waiting for one socket in Trio costs about 20 µs of Python code, which registers the wait, makes the task runnable and
runs it. With one request in flight on each of many connections, that is a third of the cost of a request. With the
poller, a waiting task passes a function that serves its socket without waiting. The poller calls this function when the
socket is readable, and wakes the task only if the function returns False. The task still owns its connection: when the
task is cancelled, the poller forgets the function.

    turn         serves the sockets that are ready; turns follow one another for at most TIME_SLICE_S, then the other
                 tasks run
    end of turn  calls the callbacks of `at_turn_end`, which write and send the output of the whole turn at once, and
                 then those of `after_turn`, for work that no response depends on
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import perf_counter

import trio

TIME_SLICE_S = 0.002
"""Maximum time in seconds for which sockets are served, one connection reads or sends, or its requests are handled,
before other tasks run. A limit in bytes is not enough: while a virtual machine's host provides new memory pages, a
system call that touches many of them takes ten times as long."""

EVENTS_MAX = 256
"""Maximum number of ready sockets that one system call returns."""


class _Wait:
    """A waiting task, and the function that is called instead of waking it."""

    __slots__ = ("error", "on_readable", "task")

    def __init__(self, task: trio.lowlevel.Task, on_readable: Callable[[], bool]) -> None:
        self.task = task
        self.on_readable = on_readable
        self.error: Exception | None = None


class Poller:
    """Serves the sockets that tasks are waiting for (see `wait`). Created and run by `open_poller`."""

    def __init__(self, time_slice_s: float = TIME_SLICE_S) -> None:
        self._time_slice_s = time_slice_s
        self._epoll = select.epoll()
        self._waits: dict[int, _Wait] = {}
        self._unserved: list[tuple[int, int]] = []
        self._early: deque[Callable[[], None]] = deque()
        self._late: deque[Callable[[], None]] = deque()
        self._last: deque[Callable[[], None]] = deque()
        self.is_in_turn = False
        """Whether a turn is in progress, so that `at_turn_end` defers callbacks. For reading only."""
        self._scope = trio.CancelScope(shield=True)

    async def wait(self, descriptor: int, on_readable: Callable[[], bool]) -> None:
        """Calls `on_readable` when the descriptor is readable or its peer is gone, until `on_readable` returns False.

        `on_readable` is called in the poller's task; if it raises an exception, the wait ends and raises that. The
        descriptor must stay open until the wait ends. Raises trio.ClosedResourceError if `descriptor` is -1, as a
        closed socket's is. Only one task may wait for a descriptor at a time.
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
        """Calls `callback` when the turn has served its sockets, or at once outside a turn.

        Callbacks with `is_early` are called before the others. A callback must not raise, and may add others for the
        same turn.
        """
        if not self.is_in_turn:
            callback()
        elif is_early:
            self._early.append(callback)
        else:
            self._late.append(callback)

    def after_turn(self, callback: Callable[[], None]) -> bool:
        """Calls `callback` at the very end of the turn, after its output is sent, and returns True. Outside a turn,
        returns False without calling it.

        The callback must not raise, and may add others for the same turn.
        """
        if self.is_in_turn:
            self._last.append(callback)
        return self.is_in_turn

    def as_turn(self, function: Callable[[], None]) -> None:
        """Calls `function` in the current turn, or in a turn of its own if there is none, so that its output is sent
        together at the end of the turn."""
        if self.is_in_turn:
            function()
            return
        self.is_in_turn = True
        try:
            function()
            self._end_turn()
        finally:
            self.is_in_turn = False

    async def _run(self) -> None:
        """Serves until `_scope` is cancelled; shielded, so that connections are served until they have ended."""
        with self._scope:
            while True:
                if self._unserved:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(self._epoll.fileno())
                self._serve()

    def _serve(self) -> None:
        """Runs turns until no socket is ready, or the time slice is over.

        Polls for ready sockets again after each turn: a slave's report, for example, may have arrived while the
        turn's last callbacks ran, and an iteration of Trio's event loop would delay it.
        """
        ends_at = perf_counter() + self._time_slice_s
        events = self._unserved or self._epoll.poll(0, EVENTS_MAX)
        while events:
            self._unserved = self._run_turn(events, ends_at)
            if perf_counter() >= ends_at:
                break
            events = self._epoll.poll(0, EVENTS_MAX)

    def _run_turn(self, events: list[tuple[int, int]], ends_at: float) -> list[tuple[int, int]]:
        """Serves the sockets of `events`, and ends the turn. Returns the events for which no time was left."""
        unserved: list[tuple[int, int]] = []
        self.is_in_turn = True
        try:
            for number, (descriptor, _) in enumerate(events):
                wait = self._waits.get(descriptor)
                if wait is not None:  # else another socket's function has ended the wait
                    self._serve_one(descriptor, wait)
                if perf_counter() >= ends_at:
                    unserved = events[number + 1 :]
                    break
            self._end_turn()
        finally:
            self.is_in_turn = False
        return unserved

    def _end_turn(self) -> None:
        while callbacks := self._early or self._late or self._last:
            callbacks.popleft()()

    def _serve_one(self, descriptor: int, wait: _Wait) -> None:
        try:
            is_served = wait.on_readable()
        except Exception as error:  # raised in the waiting task
            wait.error = error
            is_served = False
        if not is_served and self._waits.get(descriptor) is wait:  # else the wait was cancelled
            self._forget(descriptor)
            trio.lowlevel.reschedule(wait.task)

    def _forget(self, descriptor: int) -> None:
        del self._waits[descriptor]
        with suppress(OSError):  # closed already, which has removed it
            self._epoll.unregister(descriptor)


@asynccontextmanager
async def open_poller(time_slice_s: float = TIME_SLICE_S) -> AsyncIterator[Poller]:
    """Runs a poller for the duration of the block, including a shielded clean-up after the block is cancelled."""
    poller = Poller(time_slice_s)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poller._run)
            try:
                yield poller
            finally:
                poller._scope.cancel()
    finally:
        poller._epoll.close()
