"""Which timer messages are pending, in the order in which they are due.

Derived from the consume queue of rmq_sys_wheel_timer, whose entries have the timer code of their message as tags code
(`ha.protocol.record.timer_code`). Cost: 16 bytes for each message that is due in a later minute, about 150 bytes for
those of the current minute, and two heap operations for each message in its life.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from heapq import heapify, heappop, heappush

BUCKET_MS = 60_000


class TimerIndex:
    """Timer codes and queue offsets of pending messages. A code is 2 × due time (ms), plus 1 unless it is a recall."""

    def __init__(self) -> None:
        self._current: list[tuple[int, int]] = []
        """Heap of what is due before `_current_end`"""
        self._current_end = 0
        """In buckets since the epoch"""
        self._later: dict[int, array[int]] = {}
        """Bucket -> code and queue offset of each of its messages, in turn, by queue offset"""
        self._buckets: list[int] = []
        """Heap of the keys of `_later`"""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, code: int, queue_offset: int) -> None:
        """Adds a message. Unless it is due before all messages of later minutes, its queue offset is above theirs."""
        self._count += 1
        bucket = code // (2 * BUCKET_MS)
        if bucket < self._current_end:
            heappush(self._current, (code, queue_offset))
            return
        later = self._later.get(bucket)
        if later is None:
            later = self._later[bucket] = array("q")
            heappush(self._buckets, bucket)
        later.append(code)
        later.append(queue_offset)

    @property
    def next_due_ms(self) -> int | None:
        """When the first message is due, in ms since the epoch; None without one."""
        self._advance()
        return self._current[0][0] >> 1 if self._current else None

    def pop_due(self, now_ms: int, count_max: int) -> list[tuple[int, int]]:
        """Removes and returns the first messages that are due at `now_ms`, at most `count_max`."""
        due: list[tuple[int, int]] = []
        end = 2 * now_ms + 2
        while len(due) < count_max:
            self._advance()
            if not self._current or self._current[0][0] >= end:
                break
            due.append(heappop(self._current))
        self._count -= len(due)
        return due

    @property
    def lowest_offset(self) -> int | None:
        """The lowest queue offset of all messages; None without one."""
        current = min((queue_offset for _, queue_offset in self._current), default=None)
        later = min((later[1] for later in self._later.values()), default=None)
        return later if current is None else current if later is None else min(current, later)

    def drop_before(self, queue_offset: int) -> None:
        """Removes the messages before a queue offset."""
        self._current = [each for each in self._current if each[1] >= queue_offset]
        heapify(self._current)
        for bucket in list(self._later):
            later = self._later[bucket]
            passed = bisect_left(range(len(later) // 2), queue_offset, key=lambda at: later[2 * at + 1])
            del later[: 2 * passed]
            if not later:
                del self._later[bucket]
        self._buckets = sorted(self._later)
        self._count = len(self._current) + sum(map(len, self._later.values())) // 2

    def _advance(self) -> None:
        """Makes the next bucket the current one if that is used up."""
        if self._current or not self._buckets:
            return
        bucket = heappop(self._buckets)
        later = self._later.pop(bucket)
        self._current_end = bucket + 1
        self._current = list(zip(later[::2], later[1::2], strict=True))
        heapify(self._current)
