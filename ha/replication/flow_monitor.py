"""Measures the bytes per second of one connection, and optionally limits them.

RocketMQ's FlowMonitor resets a counter every second in a separate thread, and its default HA connection counts headers
only, which makes the limit ineffective. Here the caller passes the time, from which the current window of one second is
computed, and counts headers and bodies. The budget of a second is released in tenths, so that it is not used up in a
burst that competes with everything else on the network and the processors.
"""

from __future__ import annotations

_PART_COUNT = 10


class FlowMonitor:
    """Counts bytes in consecutive windows of one second, the first of which starts at `now` (seconds of any monotonic
    clock). `bytes_per_s_max`: the limit; None: unlimited."""

    __slots__ = ("_bytes_per_s_max", "_counted", "_rate", "_window_start", "total_bytes")

    def __init__(self, now: float, bytes_per_s_max: int | None = None) -> None:
        self._bytes_per_s_max = bytes_per_s_max
        self._window_start = now
        self._counted = 0
        self._rate = 0
        self.total_bytes = 0

    def count(self, size: int, now: float) -> None:
        """Adds `size` bytes to the window of `now`."""
        self._roll(now)
        self._counted += size
        self.total_bytes += size

    def budget(self, now: float) -> int | None:
        """Number of bytes that may be sent at `now`; None if there is no limit."""
        if self._bytes_per_s_max is None:
            return None
        return max(0, self._bytes_per_s_max * self._part(now) // _PART_COUNT - self._counted)

    def next_budget(self, now: float) -> float:
        """Time at which the budget grows next, on the clock of `now`."""
        part = self._part(now)
        return self._window_start + part * (1 / _PART_COUNT)

    def bytes_per_s(self, now: float) -> int:
        """Number of bytes in the window before the current one (RocketMQ: transferredByteInSecond)."""
        self._roll(now)
        return self._rate

    def _part(self, now: float) -> int:
        """Returns which tenth of its window `now` is in, from 1 to 10."""
        self._roll(now)
        return min(_whole(self._window_start, now, 1 / _PART_COUNT), _PART_COUNT - 1) + 1

    def _roll(self, now: float) -> None:
        if now >= self._window_start + 1:
            windows = _whole(self._window_start, now, 1.0)
            self._rate = self._counted if windows == 1 else 0
            self._counted = 0
            self._window_start += windows


def _whole(began: float, now: float, length: float) -> int:
    """Returns how many times `length` has passed since `began`. At `began` + n × `length` it has passed n times,
    despite rounding."""
    count = int((now - began) / length)
    return count + (began + (count + 1) * length <= now)
