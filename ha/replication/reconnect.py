"""Decides when a slave reconnects after a connection was lost or could not be made.

| what ended | next attempt |
| --- | --- |
| a connection on which the master was followed | at once, but at most once in `interval_s_max` |
| an attempt that failed, or any other connection | after FIRST_S, doubled each time up to `interval_s_max` |
| an obstacle: other log, wrong secret, full disk | after `interval_s_max`, doubled each time; at most OBSTACLE_S_MAX |

RocketMQ's slave waits five seconds in every case, during which a SYNC_MASTER answers SLAVE_NOT_AVAILABLE although the
problem may be over. The waits in the second row, and those after a wrong secret, which may concern all slaves of a
master at once, are shortened at random, so that these slaves don't all connect at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ha.replication.statistics import Condition

FIRST_S = 0.1
OBSTACLE_S_MAX = 5.0
"""Maximum wait in seconds after an obstacle, which an operator usually has to remove. Without the doubling up to this
maximum, a member of a failover group, whose `interval_s_max` is shorter, would cost its master several connections, and
lines in its log, per second."""
JITTER_SHARE = 0.5
"""Maximum share (0 to 1) by which a wait after a failed attempt or a wrong secret is shortened at random."""

LOST = frozenset(
    {Condition.CONNECT_FAILED, Condition.CONNECTION_LOST, Condition.MASTER_CLOSED, Condition.HOUSEKEEPING_TIMEOUT}
)
"""Conditions of a connection that failed or was lost, so that another attempt may succeed soon."""


class Reconnect:
    """Computes the waits of one slave between its attempts to connect. `jitter` returns numbers in [0, 1)."""

    def __init__(self, interval_s_max: float, jitter: Callable[[], float]) -> None:
        self._interval_s_max = interval_s_max
        self._jitter = jitter
        self._immediate_at = -math.inf
        self._failed_count = self._obstacle_count = 0

    def wait_s(self, condition: Condition, now: float, *, has_followed: bool) -> float:
        """Returns the time to wait, in seconds, after a connection or attempt that ended with `condition`.
        `has_followed`: whether the master was followed on that connection."""
        if condition not in LOST:
            longest_s = min(OBSTACLE_S_MAX, math.ldexp(self._interval_s_max, min(self._obstacle_count, 32)))
            self._obstacle_count += 1
            if condition is not Condition.NOT_AUTHENTICATED:
                return longest_s
        elif has_followed and now >= self._immediate_at + self._interval_s_max:
            self._immediate_at = now
            self._failed_count = self._obstacle_count = 0
            return 0.0
        else:
            longest_s = min(self._interval_s_max, math.ldexp(FIRST_S, min(self._failed_count, 32)))
            self._failed_count += 1
        return longest_s * (1 - JITTER_SHARE * self._jitter())

    def reset(self) -> None:
        """Forgets earlier failures: the next attempts are to another master, or in another term."""
        self._immediate_at = -math.inf
        self._failed_count = self._obstacle_count = 0
