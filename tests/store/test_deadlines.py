"""DeadlineTimer: exact to the deadline, and asleep while deadlines come and go behind the earliest."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ha.store.deadlines import DeadlineTimer


class Waiting:
    """Deadlines that a test adds, and when `expire` was called for which; all in seconds since the start."""

    def __init__(self) -> None:
        self.began = trio.current_time()
        self.deadlines: list[float] = []
        self.calls: list[tuple[float, list[float]]] = []
        self.timer = DeadlineTimer(self._expire)

    def add(self, deadline: float) -> None:
        self.deadlines.append(deadline)
        self.timer.note(self.began + deadline)

    def _expire(self, now: float) -> float:
        at = now - self.began
        late = sorted(deadline for deadline in self.deadlines if deadline <= at)
        self.deadlines = [deadline for deadline in self.deadlines if deadline > at]
        self.calls.append((at, late))
        return self.began + min(self.deadlines, default=math.inf)


@asynccontextmanager
async def running() -> AsyncIterator[Waiting]:
    waiting = Waiting()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiting.timer.run)
        await wait_all_tasks_blocked()
        waiting.calls.clear()
        yield waiting
        nursery.cancel_scope.cancel()


async def test_deadlines_are_kept_in_any_order(autojump_clock: MockClock) -> None:
    async with running() as waiting:
        for deadline in (3, 1, 2, 2):
            waiting.add(deadline)
        await trio.sleep(10)
        assert [call for call in waiting.calls if call[1]] == [(1, [1]), (2, [2, 2]), (3, [3])]


async def test_deadlines_behind_the_earliest_wake_no_task(autojump_clock: MockClock) -> None:
    async with running() as waiting:
        waiting.add(3)
        await wait_all_tasks_blocked()
        waiting.calls.clear()
        for number in range(100):
            waiting.deadlines.clear()  # the one before was satisfied
            waiting.add(3 + number / 100)
            await trio.sleep(0.01)
        assert waiting.calls == []
        await trio.sleep(9)
        assert waiting.calls == [(3, []), (3.99, [3.99])]
