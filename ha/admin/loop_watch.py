"""How long the event loop is held, for /loop: measured only while somebody has asked for it.

Two figures. A *delay*: how much later than due a task runs that wants to run every BEAT_S. A *hold*: for how long one
step of one task, from await to await, kept everybody else waiting. Those of LONG_S and more are kept, with what of them
was work and what was standing in the queue for a processor; the rest is sleep (in the kernel for a disk, or for the
GIL): on a busy machine most of it is somebody else's doing. Of a hold there is the task's name, too, where it waited
then, and Python's garbage collections, in whichever thread they were: all others wait for them.

No thread looks where the loop is meanwhile: it would ask for the GIL just then, and on a busy machine whoever is given
the GIL may have to wait for a processor with it. That alone made holds of 20 to 60 ms.
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
"""Holds that are kept, the longest ones; as many delays."""
FRAME_COUNT_MAX = 8
SECONDS_MAX = 3600.0

_TRIO = os.path.dirname(trio.__file__) + os.sep
_SCHEDSTAT = "/proc/thread-self/schedstat"


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """One long step. `at_s`: wall clock at its end, seconds since the epoch; `cpu_s` and `queued_s` are parts of
    `seconds`, the second None where Linux does not tell. So is `collection_s`, whichever thread collected. `stack`:
    where the task waited then, innermost function last; empty if the step was its last."""

    at_s: float
    seconds: float
    cpu_s: float
    queued_s: float | None
    collection_s: float
    task: str
    stack: tuple[str, ...]


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """One long delay: when it ended, its seconds, and parts of them as in Hold."""

    at_s: float
    seconds: float
    cpu_s: float
    queued_s: float | None


class LoopReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen since the watch began; `delays` and `holds` are the longest ones, longest first."""

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
    """Watches the loop in which `serve` runs, when and for as long as `begin` says."""

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._asked = trio.Event()
        self._for_s = 0.0
        self._scope = trio.CancelScope()
        self._is_watching = False
        self._forget()

    def _forget(self) -> None:
        self._started = self._ended = self._clock()
        self._delay_counts: dict[int, int] = {}  # how many, by tenths of a millisecond
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
        """Watch anew, for so long."""
        self._for_s = seconds
        self._asked.set()
        self._scope.cancel()

    def report(self) -> LoopReport:
        """Return what the last watch has seen so far."""
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
        """Wait to be asked and watch, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            self._forget()
            with trio.CancelScope() as self._scope, trio.move_on_after(self._for_s), self._watching() as queued_s:
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
                self._keep_delay(delay_s, time.thread_time() - cpu_before, queued_before, queued_s())

    def _keep_delay(self, seconds: float, cpu_s: float, queued_before: float | None, queued_now: float | None) -> None:
        # Of the whole beat, BEAT_S of which may have been before the task was due.
        cpu_s, queued_s = min(cpu_s, seconds), None
        if queued_before is not None and queued_now is not None:
            queued_s = min(queued_now - queued_before, seconds - cpu_s)
        delay = Delay(at_s=self._wall_clock(), seconds=seconds, cpu_s=cpu_s, queued_s=queued_s)
        insort(self._delays, delay, key=lambda each: each.seconds)
        del self._delays[:-HOLD_COUNT_MAX]

    @contextmanager
    def _watching(self) -> Iterator[Callable[[], float | None]]:
        """Steps are timed in the block; it gets a function that tells how long this thread has stood in the queue."""
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
        """Called by trio."""
        self._step_began = self._clock()
        self._step_cpu = time.thread_time()
        self._step_collection_s = self._collection_s
        self._in_step = True

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Called by trio."""
        if not self._in_step:  # the step in which the watch began
            return
        self._in_step = False
        seconds = self._clock() - self._step_began
        self._hold_max_s = max(self._hold_max_s, seconds)
        if seconds >= LONG_S:
            self._long_hold_count += 1
            self._keep(task, seconds, time.thread_time() - self._step_cpu)
        self._step_count += 1

    def _keep(self, task: trio.lowlevel.Task, seconds: float, cpu_s: float) -> None:
        queued_now, queued_s = self._queue_clock(), None
        if queued_now is not None and self._queued_s is not None:
            # Since the last beat, which may be a little longer than the step.
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
    """How many seconds the calling thread has stood in the queue for a processor; None where Linux does not tell."""
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
    """The least key that at least `share` of all are not above; 0 of nothing."""
    left = share * sum(counts.values())
    for key in sorted(counts):
        left -= counts[key]
        if left <= 0:
            return key
    return 0
