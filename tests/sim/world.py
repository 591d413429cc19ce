"""What everything in one simulated run shares: chance, timers, the trace. Knows no disk, network or node.

Each part draws from a stream of random numbers of its own, so that leaving one fault out of a plan changes no draw of
the others: a shrunk scenario stays close to the one that failed.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import trio

EPOCH_MS = 1_800_000_000_000
"""Wall clock of every machine at the begin of a run, less its own steps."""

TICK_S = 0.0001
"""Timers are rounded up to this, so that things happen at the same moment often, and in any order."""


class Timers:
    """Calls functions at moments of trio's clock, all from one task; equal moments in the order of asking."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._sooner = trio.lowlevel.ParkingLot()
        self._next = math.inf

    def call_at(self, moment: float, call: Callable[..., None], *arguments: Any) -> float:
        """Have `call(*arguments)`, which must not raise, called at `moment` (s), rounded up to a tick; return that."""
        moment = math.ceil(moment / TICK_S) * TICK_S
        heapq.heappush(self._heap, (moment, next(self._numbers), call, arguments))
        if moment < self._next:
            self._sooner.unpark_all()
        return moment

    def call_in(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> float:
        """`call_at`, `delay_s` from now."""
        return self.call_at(trio.current_time() + delay_s, call, *arguments)

    async def run(self) -> None:
        """Make the calls, until cancelled."""
        heap = self._heap
        while True:
            self._next = heap[0][0] if heap else math.inf
            with trio.CancelScope(deadline=self._next):
                await self._sooner.park()
            self._next = -math.inf  # whatever is asked for while we call needs no wake-up
            now = trio.current_time()
            while heap and heap[0][0] <= now:
                _, _, call, arguments = heapq.heappop(heap)
                call(*arguments)


class World:
    """One run. `seed` and everything drawn from it decide all that happens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.timers = Timers()
        self.trace: list[str] = []
        self._chances: dict[str, random.Random] = {}

    def chance(self, name: str) -> random.Random:
        """Return the stream of random numbers of one part of the world."""
        found = self._chances.get(name)
        if found is None:
            found = self._chances[name] = random.Random(f"{self.seed}/{name}")
        return found

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        self.trace.append(f"{trio.current_time():.4f} {text}")

    @property
    def fingerprint(self) -> str:
        """Hash of the whole trace: equal runs have equal ones."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=16).hexdigest()
