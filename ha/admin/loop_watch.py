"""Measures what blocks the event loop, for /loop, while a watch is active.

A *delay* is how late a task runs that is due every BEAT_S. A *hold* is the duration of one step of a task (from await
to await), during which no other task runs. Those of at least LONG_S are recorded with their processor time and the time
spent in the run queue; for the rest, the thread slept in the kernel or waited for the GIL. On a busy machine, other
processes cause most of a long hold. A hold also has the task's name, the stack where it awaited next, and the duration
of garbage collections in any thread; a collection stops all other threads.

The stack is not sampled by a thread during a hold: the thread would compete for the GIL, and that alone caused holds of
20 to 60 ms on a busy machine.
"""

from __future__ import annotations

import gc
import os
import time
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import trio

BEAT_S = 0.005
LONG_S = 0.02
HOLD_COUNT_MAX = 1000
"""Maximum number of holds, and of delays, that are recorded; the shortest ones are dropped."""
FRAME_COUNT_MAX = 8
SECONDS_MAX = 3600.0

_TRIO = os.path.dirname(trio.__file__) + os.sep
_SCHEDSTAT = "/proc/thread-self/schedstat"


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A long step. `at_s` is the wall clock at its end, in seconds since 1970.

    Parts of `seconds` are `cpu_s`, `queued_s` (time in the run queue; None if unknown) and `collection_s` (garbage
    collection in any thread; overlaps the others). `stack` is where the task awaited next, innermost function last;
    empty if it ended.
    """

    at_s: float
    seconds: float
    cpu_s: float
    queued_s: float | None
    collection_s: float
    task: str
    stack: tuple[str, ...]


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """A long delay; fields as in Hold."""

    at_s: float
    seconds: float
    cpu_s: float
    queued_s: float | None


class LoopReport(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements since the start of the watch; `delays` and `holds` are the longest ones, longest first."""

    is_watching: bool
    seconds: float = 0.0
    beat_count: int = 0
    long_delay_count: int = 0
    delay_p99_s: float = 0.0
    delay_max_s: float = 0.0
    step_count: int = 0
    long_hold_count: int = 0
    hold_max_s: float = 0.0
    delays: tuple[Delay, ...] = ()
    holds: tuple[Hold, ...] = ()


class LoopWatch(trio.abc.Instrument):
    """Watches the event loop in which `serve` runs, for as long as `begin` requests."""

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._requested = trio.Event()
        self._duration_s = 0.0
        self._scope = trio.CancelScope()
        self._is_watching = False
        self._reset()

    def _reset(self) -> None:
        self._started = self._ended = self._clock()
        self._delay_counts: dict[int, int] = {}  # count by tenths of a millisecond
        self._delays: list[Delay] = []
        self._beat_count = 0
        self._delay_max_s = 0.0
        self._long_delay_count = 0
        self._step_count = 0
        self._long_hold_count = 0
        self._hold_max_s = 0.0
        self._holds: list[Hold] = []
        self._queued_s: float | None = None
        self._step_began = self._step_cpu = 0.0
        self._collection_s = self._collection_began = self._step_collection_s = 0.0
        self._in_step = False

    def begin(self, seconds: float) -> None:
        """Starts a new watch of `seconds`, which replaces a running one."""
        self._duration_s = seconds
        self._requested.set()
        self._scope.cancel()

    def report(self) -> LoopReport:
        """Returns the measurements of the running watch, otherwise of the last one."""
        return LoopReport(
            is_watching=self._is_watching,
            seconds=round((self._clock() if self._is_watching else self._ended) - self._started, 3),
            beat_count=self._beat_count,
            long_delay_count=self._long_delay_count,
            delay_p99_s=_quantile(self._delay_counts, 0.99) / 1e4,
            delay_max_s=self._delay_max_s,
            step_count=self._step_count,
            long_hold_count=self._long_hold_count,
            hold_max_s=self._hold_max_s,
            delays=tuple(reversed(self._delays)),
            holds=tuple(reversed(self._holds)),
        )

    async def serve(self) -> None:
        """Waits for requests and watches, until cancelled."""
        while True:
            await self._requested.wait()
            self._requested = trio.Event()
            self._reset()
            with trio.CancelScope() as self._scope, trio.move_on_after(self._duration_s), self._watching() as queued_s:
                await self._beat(queued_s)

    async def _beat(self, queued_s: Callable[[], float | None]) -> None:
        while True:
            due = self._clock() + BEAT_S
            self._queued_s = queued_before = queued_s()
            cpu_before = time.thread_time()
            await trio.sleep(BEAT_S)
            delay_s = max(0.0, self._clock() - due)
            self._beat_count += 1
            self._delay_max_s = max(self._delay_max_s, delay_s)
            tenths = int(delay_s * 1e4)
            self._delay_counts[tenths] = self._delay_counts.get(tenths, 0) + 1
            if delay_s >= LONG_S:
                self._long_delay_count += 1
                self._record_delay(delay_s, time.thread_time() - cpu_before, queued_before, queued_s())

    def _record_delay(
        self, seconds: float, cpu_s: float, queued_before: float | None, queued_now: float | None
    ) -> None:
        # The measured times cover the whole beat, including up to BEAT_S before the task was due.
        cpu_s, queued_s = min(cpu_s, seconds), None
        if queued_before is not None and queued_now is not None:
            queued_s = min(queued_now - queued_before, seconds - cpu_s)
        delay = Delay(at_s=self._wall_clock(), seconds=seconds, cpu_s=cpu_s, queued_s=queued_s)
        insort(self._delays, delay, key=lambda each: each.seconds)
        del self._delays[:-HOLD_COUNT_MAX]

    @contextmanager
    def _watching(self) -> Iterator[Callable[[], float | None]]:
        """Times steps during the block; yields a function that returns this thread's time in the run queue."""
        with _schedstat_clock() as self._queue_clock:
            self._is_watching = True
            trio.lowlevel.add_instrument(self)
            gc.callbacks.append(self._collected)
            try:
                yield self._queue_clock
            finally:
                trio.lowlevel.remove_instrument(self)
                gc.callbacks.remove(self._collected)
                self._is_watching = False
                self._ended = self._clock()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Starts the measurement of a step; called by Trio."""
        self._step_began = self._clock()
        self._step_cpu = time.thread_time()
        self._step_collection_s = self._collection_s
        self._in_step = True

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Ends the measurement of a step; called by Trio."""
        if not self._in_step:  # the watch began in this step
            return
        self._in_step = False
        seconds = self._clock() - self._step_began
        self._hold_max_s = max(self._hold_max_s, seconds)
        if seconds >= LONG_S:
            self._long_hold_count += 1
            self._record_hold(task, seconds, time.thread_time() - self._step_cpu)
        self._step_count += 1

    def _record_hold(self, task: trio.lowlevel.Task, seconds: float, cpu_s: float) -> None:
        queued_now, queued_s = self._queue_clock(), None
        if queued_now is not None and self._queued_s is not None:
            # Measured since the last beat, which can be slightly longer than the step.
            queued_s = min(queued_now - self._queued_s, max(0.0, seconds - cpu_s))
            self._queued_s = queued_now
        hold = Hold(
            at_s=self._wall_clock(),
            seconds=seconds,
            cpu_s=cpu_s,
            queued_s=queued_s,
            collection_s=self._collection_s - self._step_collection_s,
            task=task.name,
            stack=_stack(task),
        )
        insort(self._holds, hold, key=lambda each: each.seconds)
        del self._holds[:-HOLD_COUNT_MAX]

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = self._clock()
        else:
            self._collection_s += self._clock() - self._collection_began


def _stack(task: trio.lowlevel.Task) -> tuple[str, ...]:
    return tuple(
        f"{frame.f_code.co_filename.rpartition('/')[2]}:{line} {frame.f_code.co_name}"
        for frame, line in task.iter_await_frames()
        if not frame.f_code.co_filename.startswith(_TRIO)
    )[-FRAME_COUNT_MAX:]


@contextmanager
def _schedstat_clock() -> Iterator[Callable[[], float | None]]:
    """Yields a function that returns the calling thread's time in the run queue in seconds; None if unknown."""
    try:
        descriptor = os.open(_SCHEDSTAT, os.O_RDONLY)
    except OSError:
        yield lambda: None
        return

    def queued_s() -> float | None:
        with suppress(OSError, ValueError, IndexError):
            return int(os.pread(descriptor, 100, 0).split()[1]) / 1e9
        return None

    try:
        yield queued_s
    finally:
        os.close(descriptor)


def _quantile(counts: dict[int, int], share: float) -> int:
    """Returns a quantile: the smallest key such that at least `share` of all counts are at this key or a lower one; 0
    without counts.
    """
    left = share * sum(counts.values())
    for key in sorted(counts):
        left -= counts[key]
        if left <= 0:
            return key
    return 0
