"""Bytes per second of one connection: measured always, limited if asked.

RocketMQ's FlowMonitor resets a counter every second in a thread of its own, and its default HA connection counts
headers only, which makes the limit ineffective. Here windows of one second are computed from the clock when somebody
looks, and whatever is sent is counted.
"""

from __future__ import annotations


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
        """Bytes that may still be sent in the window of `now`; None if there is no limit."""
        if self._bytes_per_s_max is None:
            return None
        self._roll(now)
        return max(0, self._bytes_per_s_max - self._counted)

    def next_window(self, now: float) -> float:
        """When the window of `now` ends and the budget is whole again."""
        self._roll(now)
        return self._window_start + 1

    def bytes_per_s(self, now: float) -> int:
        """Bytes in the last complete window (RocketMQ: transferredByteInSecond)."""
        self._roll(now)
        return self._rate

    def _roll(self, now: float) -> None:
        elapsed = now - self._window_start
        if elapsed >= 1:
            windows = int(elapsed)
            self._rate = self._counted if windows == 1 else 0
            self._counted = 0
            self._window_start += windows
