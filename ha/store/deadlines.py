"""One timer for many deadlines: it is set when something new is due earlier, not each time that something is due.

Requests that wait come and go thousands of times a second, nearly always with the latest deadline of all. A task that
slept until the earliest of them would be woken, and its timer set anew, for every one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio


class DeadlineTimer:
    """Calls `expire` in time. `run` is its task; `note` is called by whoever adds a deadline (trio clock, seconds)."""

    __slots__ = ("_changed", "_due", "_expire")

    def __init__(self, expire: Callable[[float], float]) -> None:
        """`expire(now)` ends what is due at `now` or earlier, and returns the next deadline; infinity if there is none.

        It is called at each deadline that is still there then, and now and then when nothing is due.
        """
        self._expire = expire
        self._due = math.inf
        self._changed = trio.lowlevel.ParkingLot()

    def note(self, deadline: float) -> None:
        """Have `expire` called at `deadline` at the latest."""
        if deadline < self._due:
            self._due = deadline
            self._changed.unpark_all()

    async def run(self) -> None:
        """Keep time until cancelled."""
        while True:
            self._due = self._expire(trio.current_time())
            with trio.move_on_at(self._due):
                await self._changed.park()
