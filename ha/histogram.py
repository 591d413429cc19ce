"""Histograms of durations, for /metrics."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (
    *(0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5),
    *(0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds in seconds of all buckets but the last: from the append of one message, which takes some tens of
microseconds, to the longest timeouts of a put."""


class Histogram:
    """Counts durations by length, and adds them up. All durations are in seconds.

    `counts[n]` is the number of durations above `BOUNDS_S[n - 1]` and up to `BOUNDS_S[n]` (not cumulative); the last
    item is the number of those above all bounds.
    """

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Adds a duration of `seconds`, `count` times."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += count
        self.sum_s += seconds * count
