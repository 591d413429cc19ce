"""Since when a slave lacks something, as far as its reports tell. Times in seconds of any one clock."""

from __future__ import annotations

import math


class CaughtUp:
    """When a slave last had all that there was at that moment, as far as its reports tell.

    A slave of a busy master never reports the log's end. But what it reports now was the end a while ago: since the
    report that was made then, by the latest. (RocketMQ looks at what was last sent before, which is the same in kind.)
    """

    __slots__ = ("_mark_at", "_mark_offset", "at")

    def __init__(self) -> None:
        self.at = -math.inf
        self._mark_offset = 0
        self._mark_at = -math.inf

    def note_report(self, offset: int, end: int, now: float) -> None:
        """It has the log up to `offset`."""
        if offset >= end:
            self.at = now
        elif offset >= self._mark_offset:
            self.at = max(self.at, self._mark_at)
        else:
            return  # what it lacked at the mark it still lacks
        self._mark_offset, self._mark_at = end, now
