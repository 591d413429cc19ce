"""What strangers make happen again and again is said now and then, with how often it was: logs must not be theirs to
fill."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

INTERVAL_S = 60.0
KEY_COUNT_MAX = 256
LINE_COUNT_MAX = 30


class Repeats:
    """Decides whether something is worth a line: once per key and interval, and so many lines in each interval at all.

    Times are of any one clock, in seconds.
    """

    def __init__(self, interval_s: float = INTERVAL_S, *, line_count_max: int = LINE_COUNT_MAX) -> None:
        self._interval_s = interval_s
        self._line_count_max = line_count_max
        self._said: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()
        self._window_began = -interval_s
        self._line_count = 0

    def count_if_due(self, key: Hashable, now: float, count: int = 1) -> int:
        """Return 0 to keep quiet; otherwise how often `key` has come since it was last said, this time included.

        `count`: as often as that it comes now.
        """
        if now - self._window_began >= self._interval_s:
            self._window_began, self._line_count = now, 0
        said_at, unsaid = self._said.pop(key, (-self._interval_s, 0))
        count += unsaid
        if now - said_at >= self._interval_s and self._line_count < self._line_count_max:
            self._line_count += 1
            self._said[key] = (now, 0)
            due = count
        else:
            self._said[key] = (said_at, count)
            due = 0
        if len(self._said) > KEY_COUNT_MAX:
            self._said.popitem(last=False)
        return due
