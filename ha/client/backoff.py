"""Computes the pauses between attempts. They grow as long as the attempts fail."""

from __future__ import annotations

import random

PAUSE_S_FIRST = 0.1
PAUSE_S_MAX = 2.0
JITTER_SHARE = 0.5
"""Maximum share (0 to 1) by which a pause is shortened at random, so that clients that lost a server together do not
all return at the same moment."""


class Backoff:
    """Computes the pauses between the attempts of one operation: PAUSE_S_FIRST seconds, then doubled each time up to
    `pause_s_max`."""

    def __init__(self, pause_s_max: float = PAUSE_S_MAX) -> None:
        self._pause_s_max = pause_s_max
        self.reset()

    def reset(self) -> None:
        """Starts again with the shortest pause, after an attempt that succeeded."""
        self._next_s = PAUSE_S_FIRST

    def next_s(self) -> float:
        """Returns the pause before the next attempt, in seconds, shortened at random by up to JITTER_SHARE of it."""
        pause_s = min(self._next_s, self._pause_s_max)
        self._next_s = 2 * pause_s
        return pause_s * (1 - JITTER_SHARE * random.random())
