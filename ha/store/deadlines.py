"""One timer for the deadlines of many requests. It is reset only if a new deadline is earlier than all others, not each
time that a request is added or finishes.

Requests arrive and finish thousands of times a second, and a new one nearly always has the latest deadline. A task that
always slept until the earliest remaining deadline would have to be woken, and its timer reset, each time that the
request with that deadline finishes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio


class DeadlineTimer:
    """Calls `expire` at each deadline. `run` is its task; `note` adds a deadline (trio clock, seconds)."""

    __slots__ = ("_changed", "_due", "_expire")

    def __init__(self, expire: Callable[[float], float]) -> None:
        """`expire(now)` must end the requests whose deadline is `now` or earlier, and return the next deadline,
        infinity if there is none.

        It is called at each deadline that still exists at that time, and sometimes when no deadline has passed.
        """
        self._expire = expire
        self._due = math.inf
        self._changed = trio.lowlevel.ParkingLot()

    def note(self, deadline: float) -> None:
        """Makes `run` call `expire` at `deadline` at the latest."""
        if deadline < self._due:
            self._due = deadline
            self._changed.unpark_all()

    async def run(self) -> None:
        """Waits for deadlines until cancelled."""
        while True:
            self._due = self._expire(trio.current_time())
            with trio.move_on_at(self._due):
                await self._changed.park()
