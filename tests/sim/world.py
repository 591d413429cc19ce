"""State shared by everything in one simulated run: chance, timers, the trace. Knows no disk, network or node.

Each part draws from its own stream of random numbers, so that leaving a fault out of a plan changes no draw of the
others: a shrunk scenario stays close to the failed one.
"""

import hashlib
import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import trio

EPOCH_MS = 1_800_000_000_000
"""Wall clock of every machine at the start of a run, before its own steps."""

TICK_S = 0.0001
"""Timers are rounded up to this, so that events often coincide, in any order."""


class Timers:
    """Calls functions at times of trio's clock, all from one task; at equal times in the order of scheduling."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._sooner = trio.lowlevel.ParkingLot()
        self._next = math.inf

    def call_at(self, moment: float, call: Callable[..., None], *arguments: Any) -> float:
        """Schedules `call(*arguments)`, which must not raise, at `moment` (s), rounded up to a tick; returns that."""
        moment = math.ceil(moment / TICK_S) * TICK_S
        heapq.heappush(self._heap, (moment, next(self._numbers), call, arguments))
        if moment < self._next:
            self._sooner.unpark_all()
        return moment

    def call_in(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> float:
        """`call_at`, `delay_s` from now."""
        return self.call_at(trio.current_time() + delay_s, call, *arguments)

    async def run(self) -> None:
        """Makes the calls, until cancelled."""
        heap = self._heap
        while True:
            self._next = heap[0][0] if heap else math.inf
            with trio.CancelScope(deadline=self._next):
                await self._sooner.park()
            self._next = -math.inf  # calls scheduled by a call need no wake-up
            now = trio.current_time()
            while heap and heap[0][0] <= now:
                _, _, call, arguments = heapq.heappop(heap)
                call(*arguments)


class World:
    """One run. `seed` and the draws from it decide everything."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.timers = Timers()
        self.trace: list[str] = []
        self._chances: dict[str, random.Random] = {}

    def chance(self, name: str) -> random.Random:
        """Returns the random stream of one part of the world."""
        found = self._chances.get(name)
        if found is None:
            found = self._chances[name] = random.Random(f"{self.seed}/{name}")
        return found

    def note(self, text: str) -> None:
        """Adds a line to the trace."""
        self.trace.append(f"{trio.current_time():.4f} {text}")

    @property
    def fingerprint(self) -> str:
        """Hash of the whole trace: equal runs have equal fingerprints."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=16).hexdigest()
