"""Until when a master may act as one: the arithmetic of its lease, and the right that hangs on it.

    deadline = (time before the grant or renewal was sent) + granted seconds x (1 - drift)

The service counts from when it carried the request out, which is no earlier, so its lease ends later than this deadline
as long as the two clocks disagree by no more than `drift` of what they count. A renewal whose answer was lost counts
for nothing, one that is answered late only for what is left of it.

The clock is the event loop's, which nobody can step. It is asked at each question, and no answer is kept: a process
that was stopped finds the deadline past at the very first question after it. Not so where that clock stands still as
well: in a virtual machine that its host stops, on a machine that sleeps. Then what protects is that the members of the
sync-state set acknowledge nothing to a master of a lower epoch (docs/failover.md).

Knows no service, no tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

DRIFT = 0.1
"""By so much of what they count the clocks of a member and of the service may disagree."""

Clock = Callable[[], float]
"""Seconds from some moment on, never stepped."""


class LeaseDeadline:
    """When one lease ends, as its owner has to see it; not yet held before the first `renewed`."""

    def __init__(self, clock: Clock = trio.current_time, drift: float = DRIFT) -> None:
        self._clock = clock
        self._drift = drift
        self._deadline = -math.inf
        self._has_ended = False
        self._subscribers: list[Callable[[], None]] = []

    def renewed(self, sent_at: float, granted_s: float) -> None:
        """The service granted `granted_s` seconds in answer to what was sent at `sent_at` of the clock.

        Answers may come in another order than the requests: an older one never shortens what a newer one gave.
        """
        self._tell()  # a deadline that has passed unseen is past all the same
        self._deadline = max(self._deadline, sent_at + granted_s * (1 - self._drift))
        self._tell()

    def end(self) -> None:
        """The service says that the lease has ended; whatever else is still answered counts no more."""
        self._has_ended = True
        self._tell()

    @property
    def at(self) -> float:
        """The deadline, by the clock."""
        return -math.inf if self._has_ended else self._deadline

    @property
    def remaining_s(self) -> float:
        """Seconds that are left; 0 or less if it has ended."""
        return self.at - self._clock()

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the deadline may be another one."""
        self._subscribers.append(callback)

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        """Call it no more."""
        self._subscribers.remove(callback)

    def _tell(self) -> None:
        for callback in tuple(self._subscribers):
            callback()


class Mandate:
    """The right to act as master for one term: held until its lease's deadline, or until it is laid down.

    Over is over: a lease that is renewed after its deadline, or granted anew, does not bring a mandate back. Somebody
    who asked in between has been told that it is over, and has begun to act on it.
    """

    def __init__(self, lease: LeaseDeadline) -> None:
        self._lease = lease
        self._is_over = False
        self._on_until: Callable[[float], None] | None = None
        lease.subscribe(self._note)

    @property
    def is_held(self) -> bool:
        """Whether this node may acknowledge and admit at this very moment. To be asked each time, never kept."""
        if not self._is_over and self._lease.remaining_s <= 0:
            self.lay_down()
        return not self._is_over

    @property
    def until(self) -> float:
        """The moment at which it ends unless the lease is renewed, by the clock; minus infinity if it is over."""
        return self._lease.at if self.is_held else -math.inf

    @property
    def remaining_s(self) -> float:
        """Seconds until then; 0 if it is over."""
        return max(0.0, self._lease.remaining_s) if self.is_held else 0.0

    def tell(self, on_until: Callable[[float], None]) -> None:
        """Call `on_until` with `until` whenever that changes: for whoever compares it with the clock himself."""
        self._on_until = on_until

    def lay_down(self) -> None:
        """End it now, for good."""
        if not self._is_over:
            self._is_over = True
            self._lease.unsubscribe(self._note)
            if self._on_until is not None:
                self._on_until(-math.inf)

    def _note(self) -> None:
        if self.is_held and self._on_until is not None:
            self._on_until(self._lease.at)
