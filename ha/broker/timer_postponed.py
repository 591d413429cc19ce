"""The due timer messages that can't be delivered yet because a record can't be read: their own, or that of a recall."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice

import trio


class PostponedTimers:
    """Messages by queue offset, with their timer codes (timer_index.py)."""

    def __init__(self) -> None:
        self._unreadable: dict[int, tuple[int, float]] = {}
        """Queue offset of each message that can't be read now -> timer code, and the time (Trio's clock) from which
        failed reads count (`BatchReader.lost_since`). The message whose last attempt is longest ago comes first"""
        self._waiting: dict[int, list[int]] = {}
        """Timer code of each recall in `_unreadable` for which messages wait -> their queue offsets"""
        self._retry_at = -math.inf
        """Time (Trio's clock) of the next attempt to read the messages in `_unreadable`"""

    def __len__(self) -> int:
        return len(self._unreadable) + sum(map(len, self._waiting.values()))

    def __contains__(self, queue_offset: int) -> bool:
        """Returns whether a message is here because its own record can't be read."""
        return queue_offset in self._unreadable

    @property
    def offsets(self) -> Iterator[int]:
        """Queue offsets of all messages, in no particular order."""
        return chain(self._unreadable, *self._waiting.values())

    @property
    def due_ms(self) -> Iterator[int]:
        """Due times in ms since the epoch, in no particular order."""
        return (code >> 1 for code in chain((code for code, _ in self._unreadable.values()), self._waiting))

    @property
    def recalls(self) -> set[int]:
        """Timer codes of the recalls that can't be read."""
        return {code for code, _ in self._unreadable.values() if not code % 2}

    def take(self, queue_offset: int, default_since: float) -> float:
        """Removes a message whose own record can't be read. Returns the time (Trio's clock) from which failed reads of
        it count; `default_since` if it was not here."""
        return self._unreadable.pop(queue_offset, (0, default_since))[1]

    def add(self, code: int, queue_offset: int, since: float) -> None:
        """Adds a message that can't be read now; it is retried after all others. `since`: as `take` returns it."""
        self._unreadable[queue_offset] = code, since

    def await_recall(self, code: int, queue_offset: int) -> None:
        """Adds a message that one of `recalls` may recall."""
        self._waiting.setdefault(code - 1, []).append(queue_offset)

    def take_waited(self) -> Iterator[tuple[int, int]]:
        """Removes and yields the messages (timer code, queue offset) whose recalls are no longer here."""
        if self._waiting:
            for code in self._waiting.keys() - self.recalls:
                for queue_offset in self._waiting.pop(code):
                    yield code + 1, queue_offset

    def due_for_retry(self, count_max: int, interval_s: float) -> list[tuple[int, int]]:
        """Returns messages (timer code, queue offset) whose own records can't be read, sorted: up to `count_max` whose
        last attempt is longest ago. Returns none if the last call that returned some was less than `interval_s` ago."""
        now = trio.current_time()
        if not self._unreadable or now < self._retry_at:
            return []
        self._retry_at = now + interval_s
        longest_ago = islice(self._unreadable.items(), count_max)
        return sorted((code, queue_offset) for queue_offset, (code, _) in longest_ago)

    def drop_before(self, queue_offset: int) -> None:
        """Removes the messages before `queue_offset`, which have been rolled (timers.py)."""
        self._unreadable = {at: each for at, each in self._unreadable.items() if at >= queue_offset}
        for code, waiting in self._waiting.items():
            self._waiting[code] = [at for at in waiting if at >= queue_offset]
