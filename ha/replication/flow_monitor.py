"""Bytes per second of one connection: measured always, limited if asked.

RocketMQ's FlowMonitor resets a counter every second in a thread of its own, and its default HA connection counts
headers only, which makes the limit ineffective. Here windows of one second are computed from the clock when somebody
looks, and whatever is sent is counted. Nor is all that a second allows sent in its first moment, as fast as the network
and the processors can, to whatever else they do then: each tenth of it allows a tenth more.
"""

from __future__ import annotations

_PART_COUNT = 10


class FlowMonitor:
    """Counts bytes in windows of one second from `now` (seconds, any monotonic clock) on."""

    __slots__ = ("_bytes_per_s_max", "_counted", "_rate", "_window_start", "total_bytes")

    def __init__(self, now: float, bytes_per_s_max: int | None = None) -> None:
        self._bytes_per_s_max = bytes_per_s_max
        self._window_start = now
        self._counted = 0
        self._rate = 0
        self.total_bytes = 0

    def count(self, size: int, now: float) -> None:
        """Add `size` bytes to the window of `now`."""
        self._roll(now)
        self._counted += size
        self.total_bytes += size

    def budget(self, now: float) -> int | None:
        """Bytes that may be sent at `now`; None if there is no limit."""
        if self._bytes_per_s_max is None:
            return None
        return max(0, self._bytes_per_s_max * self._part(now) // _PART_COUNT - self._counted)

    def next_budget(self, now: float) -> float:
        """When the budget grows."""
        part = self._part(now)
        return self._window_start + part * (1 / _PART_COUNT)

    def bytes_per_s(self, now: float) -> int:
        """Bytes in the last complete window (RocketMQ: transferredByteInSecond)."""
        self._roll(now)
        return self._rate

    def _part(self, now: float) -> int:
        """Which part of its window `now` is in, from 1 on."""
        self._roll(now)
        return min(_whole(self._window_start, now, 1 / _PART_COUNT), _PART_COUNT - 1) + 1

    def _roll(self, now: float) -> None:
        if now >= self._window_start + 1:
            windows = _whole(self._window_start, now, 1.0)
            self._rate = self._counted if windows == 1 else 0
            self._counted = 0
            self._window_start += windows


def _whole(began: float, now: float, length: float) -> int:
    """How many times `length` has passed. What was waited for has, however `now - began` is rounded."""
    count = int((now - began) / length)
    return count + (began + (count + 1) * length <= now)
