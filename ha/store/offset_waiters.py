"""Requests that wait until an offset is reached, each with its own deadline.

Used for group commit (until the offset is flushed) and group transfer (until n slaves have acknowledged the offset). No
request can block another: those whose offset is reached are found by offset, late ones by deadline, each in O(log n).
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class OffsetWaiters(Generic[T]):
    """A set of waiting items ordered by offset (bytes) and by deadline (trio clock, seconds)."""

    __slots__ = ("_by_deadline", "_by_offset", "_sequence", "_waiting")

    def __init__(self) -> None:
        self._by_offset: list[tuple[float, int]] = []
        self._by_deadline: list[tuple[float, int]] = []
        self._waiting: dict[int, T] = {}
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, offset: int, deadline: float, item: T) -> None:
        """Adds `item`, which waits until `reach(offset)` or `expire(deadline)`."""
        number = next(self._sequence)
        self._waiting[number] = item
        heappush(self._by_offset, (offset, number))
        heappush(self._by_deadline, (deadline, number))

    def reach(self, offset: int) -> list[T]:
        """Removes and returns every item that waits for `offset` or less, lowest first."""
        heap = self._by_offset
        reached = []
        while heap and heap[0][0] <= offset:
            item = self._waiting.pop(heappop(heap)[1], None)
            if item is not None:
                reached.append(item)
        self._drop_finished()
        return reached

    def expire(self, now: float) -> list[T]:
        """Removes and returns every item whose deadline is `now` or earlier, earliest first."""
        heap = self._by_deadline
        late = []
        while heap and heap[0][0] <= now:
            item = self._waiting.pop(heappop(heap)[1], None)
            if item is not None:
                late.append(item)
        self._drop_finished()
        return late

    def take_beyond(self, offset: int) -> list[T]:
        """Removes and returns every item that waits for more than `offset`, lowest first. O(n): for rare events."""
        beyond = sorted(each for each in self._by_offset if each[0] > offset and each[1] in self._waiting)
        items = [self._waiting.pop(number) for _, number in beyond]
        self._drop_finished()
        return items

    def drain(self) -> list[T]:
        """Removes and returns all items, oldest first."""
        items = list(self._waiting.values())
        self._waiting.clear()
        self._by_offset.clear()
        self._by_deadline.clear()
        return items

    @property
    def lowest_offset(self) -> float:
        """The lowest offset that an item still waits for; infinity if none does."""
        return self._by_offset[0][0] if self._by_offset else math.inf

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of an item that still waits; infinity if none does."""
        return self._by_deadline[0][0] if self._by_deadline else math.inf

    def _drop_finished(self) -> None:
        # An item that was removed from one heap is still listed in the other. Items expire roughly in the order of
        # their offsets, so clearing the tops keeps both heaps from growing while no slave acknowledges.
        for heap in (self._by_offset, self._by_deadline):
            while heap and heap[0][1] not in self._waiting:
                heappop(heap)
