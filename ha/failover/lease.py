"""The deadline of a member's lease, and the right to act as master, which ends at that deadline at the latest.

    deadline = (time before the grant or renewal was sent) + granted seconds x (1 - drift)

The service counts from when it processed the request, which is later than when it was sent, so the lease outlives this
deadline as long as the two clocks disagree by no more than `drift` of the time they measure. A renewal whose answer was
lost doesn't count; one that is answered late counts only for the time that is left of it.

The clock is the event loop's, which can't be stepped. It is read for each check, and no result is cached: a process
that was stopped finds the deadline passed at the first check after it resumes. This does not hold if the clock stops
as well: in a virtual machine that its host pauses, or on a suspended computer. In these cases the members of the
sync-state set protect the log: they acknowledge nothing to a master of a lower epoch (docs/failover.md).

Calls no service and starts no tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

DRIFT = 0.1
"""Share (0 to 1) of a measured time by which the clocks of a member and of the service may disagree."""

Clock = Callable[[], float]
"""Returns the seconds since an arbitrary fixed time; the clock is never set."""


class LeaseDeadline:
    """Time until which the owner of a lease may rely on it. Before the first call of `renewed` that time has passed."""

    def __init__(self, clock: Clock = trio.current_time, drift: float = DRIFT) -> None:
        self._clock = clock
        self._drift = drift
        self._deadline = -math.inf
        self._has_ended = False
        self._subscribers: list[Callable[[], None]] = []

    def renewed(self, sent_at: float, granted_s: float) -> None:
        """Extends the deadline: the service granted `granted_s` seconds to a request sent at clock time `sent_at`.

        Answers may arrive out of order: an older one never shortens what a newer one granted.
        """
        self._notify()  # shows subscribers a deadline that has already passed, before it is extended
        self._deadline = max(self._deadline, sent_at + granted_s * (1 - self._drift))
        self._notify()

    def end(self) -> None:
        """Ends the lease, because the service says that it ended; later answers don't count."""
        self._has_ended = True
        self._notify()

    @property
    def at(self) -> float:
        """The deadline, by the clock; minus infinity before the first `renewed` and after `end`."""
        return -math.inf if self._has_ended else self._deadline

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 or less once it has passed."""
        return self.at - self._clock()

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Calls `callback` whenever the deadline may have changed."""
        self._subscribers.append(callback)

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        """Reverses `subscribe`."""
        self._subscribers.remove(callback)

    def _notify(self) -> None:
        for callback in tuple(self._subscribers):
            callback()


class MasterLease:
    """The right to act as master for one term: held until the lease's deadline, or until `end`.

    It never comes back: a lease that is renewed after its deadline, or granted again, doesn't revive it. A caller that
    asked in between may have acted on the answer.
    """

    def __init__(self, deadline: LeaseDeadline) -> None:
        self._deadline = deadline
        self._is_over = False
        self._on_change: Callable[[float], None] | None = None
        deadline.subscribe(self._on_deadline)

    @property
    def is_held(self) -> bool:
        """Whether this node may acknowledge and accept requests at this moment. Ask each time, never cache."""
        if not self._is_over and self._deadline.remaining_s <= 0:
            self.end()
        return not self._is_over

    @property
    def until(self) -> float:
        """Time of the clock at which the right to act as master ends unless the lease is renewed; minus infinity if it
        has ended."""
        return self._deadline.at if self.is_held else -math.inf

    @property
    def remaining_s(self) -> float:
        """Seconds until the lease ends; 0 if it has ended."""
        return max(0.0, self._deadline.remaining_s) if self.is_held else 0.0

    def on_change(self, callback: Callable[[float], None]) -> None:
        """Calls `callback` with `until` whenever that may have changed, for a caller that compares it with the clock
        itself. Replaces any earlier callback."""
        self._on_change = callback

    def end(self) -> None:
        """Ends the right to act as master now and permanently."""
        if not self._is_over:
            self._is_over = True
            self._deadline.unsubscribe(self._on_deadline)
            if self._on_change is not None:
                self._on_change(-math.inf)

    def _on_deadline(self) -> None:
        if self.is_held and self._on_change is not None:
            self._on_change(self._deadline.at)
