"""Estimates percentiles and most frequent values of any number of messages, in bounded memory, with known errors.

`LogHistogram` counts in buckets whose bounds grow by a constant factor (as DDSketch, Masson et al. 2019): a quantile is
accurate within RELATIVE_ERROR of its value, for any distribution and any order of merges.

`HeavyHitters` keeps at most `capacity` counters (Misra and Gries 1982; merged as by Agarwal et al. 2012): a true count
is never below the returned one and exceeds it by at most `error`, which is at most n / (capacity + 1) for n values. So
every value that occurs more than `error` times is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import ceil, exp, floor, log

import msgspec
import numpy as np

from ha.arrow.heads import Int64s

RELATIVE_ERROR = 0.01
_LOG_GROWTH = log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_ZERO = -1
"""The bucket of values below 1."""
BUCKET_LIMIT = 1 + ceil(log(2.0**63) / _LOG_GROWTH)
"""Upper limit (exclusive) of bucket numbers, which begin with -1."""


def buckets_of(values: Int64s) -> Int64s:
    """Returns the bucket of each value; values below 1 share one."""
    found = np.ceil(np.log(np.maximum(values, 1)) / _LOG_GROWTH).astype(np.int64)
    found[values < 1] = _ZERO
    return found


class LogHistogram(msgspec.Struct):
    """A histogram: counts by bucket, and the exact minimum and maximum. Values are int; those below 1 count as 0."""

    counts: dict[int, int] = {}
    total: int = 0
    minimum: int = 0
    maximum: int = 0

    def add(self, counts: Iterable[tuple[int, int]], minimum: int, maximum: int) -> None:
        """Adds values, given as (bucket, count) pairs (see `buckets_of`), with the smallest and the largest of them."""
        if self.total:
            minimum, maximum = min(self.minimum, minimum), max(self.maximum, maximum)
        added = 0
        for bucket, count in counts:
            self.counts[bucket] = self.counts.get(bucket, 0) + count
            added += count
        if added:
            self.minimum, self.maximum = minimum, maximum
            self.total += added

    def merge(self, other: LogHistogram) -> None:
        """Adds all values of `other`."""
        if other.total:
            self.add(other.counts.items(), other.minimum, other.maximum)

    def quantile(self, q: float) -> float | None:
        """Returns the approximate value of rank floor(q · (n - 1)), counted from 0, with 0 ≤ q ≤ 1; None if there
        are no values."""
        if not self.total:
            return None
        rank = floor(q * (self.total - 1))
        for bucket in sorted(self.counts):
            rank -= self.counts[bucket]
            if rank < 0:
                middle = 0.0 if bucket == _ZERO else 2 * exp(bucket * _LOG_GROWTH) / (1 + exp(_LOG_GROWTH))
                if middle * RELATIVE_ERROR < 0.49:
                    middle = float(round(middle))  # the bucket has only one integer, so this is exact
                return min(max(middle, float(self.minimum)), float(self.maximum))
        return float(self.maximum)


class HeavyHitters(msgspec.Struct):
    """At most `capacity` values with their counts, which are at most `error` too low; `total` values were counted."""

    capacity: int
    counts: dict[str, int] = {}
    error: int = 0
    total: int = 0

    def add(self, counts: Iterable[tuple[str, int]]) -> None:
        """Adds (value, count) pairs, with exact counts."""
        for value, count in counts:
            self.counts[value] = self.counts.get(value, 0) + count
            self.total += count
        self._prune()

    def merge(self, other: HeavyHitters) -> None:
        """Adds the values of `other`."""
        for value, count in other.counts.items():
            self.counts[value] = self.counts.get(value, 0) + count
        self.total += other.total
        self.error += other.error
        self._prune()

    def _prune(self) -> None:
        if len(self.counts) > self.capacity:
            cut = heapq.nlargest(self.capacity + 1, self.counts.values())[-1]
            self.counts = {value: count - cut for value, count in self.counts.items() if count > cut}
            self.error += cut

    def top(self, count: int) -> list[tuple[str, int]]:
        """Returns up to `count` values with the highest counts, as (value, count), highest first, ties by value."""
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:count]
