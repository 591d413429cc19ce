"""Computes the time at which a slave last had the whole log, from its reports. Times in seconds of one clock."""

from __future__ import annotations

import math


class CaughtUp:
    """Time at which a slave last had everything that was in the log at that moment (`at`); -inf if it never had.

    A slave of a busy master never reports the log's end. But the offset that it reports now was the log's end at some
    earlier time. So the log's end and the time are noted at a report, and `at` is set to that time when a later report
    reaches that end. (RocketMQ uses the time of the last send in the same way.)
    """

    __slots__ = ("_mark_at", "_mark_offset", "at")

    def __init__(self) -> None:
        self.at = -math.inf
        self._mark_offset = 0
        self._mark_at = -math.inf

    def note_report(self, offset: int, end: int, now: float) -> None:
        """Records a report: the slave has the log up to `offset`; the log ends at `end`."""
        if offset >= end:
            self.at = now
        elif offset >= self._mark_offset:
            self.at = max(self.at, self._mark_at)
        else:
            return  # it still does not have what the log had at the mark
        self._mark_offset, self._mark_at = end, now
