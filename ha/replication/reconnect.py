"""When a slave connects again after a connection was lost, or could not be made.

| what ended | next attempt |
| --- | --- |
| a connection over which the master was followed | at once, at most once in `interval_s_max` |
| what came of that, and any other attempt that failed | FIRST_S later, then twice that, up to `interval_s_max` |
| a session that only what the two hold kept from going on | `interval_s_max` later |

RocketMQ's slave waits five seconds in every case, in which a SYNC_MASTER answers SLAVE_NOT_AVAILABLE although nothing
is wrong any more. The waits grow while attempts fail, as a master that is down, or a port that is another's, would
otherwise be asked without pause, and are shortened by chance, so that the slaves of one master do not come together.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ha.replication.statistics import Condition

FIRST_S = 0.1
JITTER_SHARE = 0.5
"""A wait is shortened by up to this share of it."""

LOST = frozenset(
    {Condition.CONNECT_FAILED, Condition.CONNECTION_LOST, Condition.MASTER_CLOSED, Condition.HOUSEKEEPING_TIMEOUT}
)
"""Ends that say nothing of what master and slave hold."""


class Reconnect:
    """The waits of one slave; `jitter` returns numbers in [0, 1)."""

    def __init__(self, interval_s_max: float, jitter: Callable[[], float]) -> None:
        self._interval_s_max = interval_s_max
        self._jitter = jitter
        self._at_once = -math.inf
        self._failed_count = 0

    def wait_s(self, condition: Condition, now: float, *, has_followed: bool) -> float:
        """Return how long to wait after an end; `has_followed`: whether anything fitting had come before it."""
        if condition not in LOST:
            return self._interval_s_max
        if has_followed and now >= self._at_once + self._interval_s_max:
            self._at_once, self._failed_count = now, 0
            return 0.0
        longest_s = min(self._interval_s_max, math.ldexp(FIRST_S, min(self._failed_count, 32)))
        self._failed_count += 1
        return longest_s * (1 - JITTER_SHARE * self._jitter())

    def begin_again(self) -> None:
        """Forget what failed: the next attempts are another master's."""
        self._at_once, self._failed_count = -math.inf, 0
