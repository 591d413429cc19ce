"""Rate-limits log lines that untrusted peers can trigger, and reports how many were suppressed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

INTERVAL_S = 60.0
KEY_COUNT_MAX = 256
LINE_COUNT_MAX = 30


class LogRateLimiter:
    """Admits one line per key and interval, and at most `line_count_max` lines per interval overall.

    Remembers only the KEY_COUNT_MAX keys that occurred last. The next line of a forgotten key is treated as its first
    one, and the number of its suppressed lines is lost. Times are in seconds of one clock, which the caller chooses.
    """

    def __init__(self, interval_s: float = INTERVAL_S, *, line_count_max: int = LINE_COUNT_MAX) -> None:
        self._interval_s = interval_s
        self._line_count_max = line_count_max
        self._keys: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()  # time of the last line, suppressed count
        self._interval_began = -interval_s
        self._line_count = 0

    def admit(self, key: Hashable, now: float, count: int = 1) -> int:
        """Returns 0 if the line is suppressed; otherwise the number of occurrences of `key` since it was last logged,
        including this one.

        `count`: number of occurrences that this call reports.
        """
        if now - self._interval_began >= self._interval_s:
            self._interval_began, self._line_count = now, 0
        logged_at, suppressed = self._keys.pop(key, (-self._interval_s, 0))
        count += suppressed
        admitted = now - logged_at >= self._interval_s and self._line_count < self._line_count_max
        if admitted:
            self._line_count += 1
        self._keys[key] = (now, 0) if admitted else (logged_at, count)
        if len(self._keys) > KEY_COUNT_MAX:
            self._keys.popitem(last=False)
        return count if admitted else 0
