"""An index of the pending timer messages, in the order in which they are due.

Derived from the consume queue of rmq_sys_wheel_timer, whose entries have the timer code of their message as tags code
(`ha.protocol.record.timer_code`). Messages that are due in a later hour are kept by hour, in the order of the queue.
Shortly before an hour begins, `advance` sorts its messages in runs of at most `RUN_COUNT`, one run per call, and a heap
of the first message of each run yields them in the order of their due times.

Cost: 16 bytes per message, about 300 bytes per hour and per run, and about 150 bytes for each of the last `RUN_COUNT`
messages that were added for the current hour. The duration of a call does not grow with the number of pending messages,
except that `due_counts` visits each hour, `lowest_offset` and `drop_before` visit each hour and each run, and
`drop_before` visits each message of a run from which it removes some.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

BUCKET_MS = 3_600_000
LEAD_MS = 10_000
"""Time before the start of an hour at which its messages are sorted, in ms."""
RUN_COUNT = 2048
"""Maximum number of messages sorted at a time."""

Key = tuple[int, int]
"""Timer code and queue offset of a message. The code is 2 × due time (ms), plus 1 unless the message is a recall."""


class _Bucket:
    """The messages of a later hour. `entries`: alternately the code and the queue offset of a message, ordered by queue
    offset.
    """

    __slots__ = ("entries", "first_code")

    def __init__(self, code: int) -> None:
        self.entries = array("q")
        self.first_code = code


class _Run:
    """Sorted messages of the current hour. `entries` from `at` on: alternately the code and the queue offset of a
    message.
    """

    __slots__ = ("at", "entries", "lowest_offset")

    def __init__(self, codes: Sequence[int], queue_offsets: Sequence[int]) -> None:
        self.entries = array("q", bytes(16 * len(codes)))
        order = sorted(range(len(codes)), key=codes.__getitem__)  # stable: by queue offset among equal codes
        self.entries[::2] = array("q", [codes[at] for at in order])
        self.entries[1::2] = array("q", [queue_offsets[at] for at in order])
        self.at = 0
        self.lowest_offset = min(queue_offsets)

    def pop(self) -> Key | None:
        """Removes and returns the first message; None if there is none."""
        at, entries = self.at, self.entries
        if at == len(entries):
            return None
        key = entries[at], entries[at + 1]
        self.at = at + 2
        if self.at > len(entries) // 2:
            del entries[: self.at]
            self.at = 0
        return key

    def drop_before(self, queue_offset: int) -> int:
        """Removes the messages before a queue offset and returns how many."""
        entries, kept = self.entries, array("q")
        for at in range(self.at, len(entries), 2):
            if entries[at + 1] >= queue_offset:
                kept += entries[at : at + 2]
        dropped = (len(entries) - self.at - len(kept)) // 2
        self.entries, self.at, self.lowest_offset = kept, 0, queue_offset
        return dropped


class TimerIndex:
    """The pending messages in the order of their due times, each represented by its `Key`."""

    def __init__(self) -> None:
        self._recent: list[Key] = []
        """Heap of messages added for the current hour, at most `RUN_COUNT`"""
        self._heads: list[tuple[int, int, _Run]] = []
        """Heap of the first message of each run, with the rest of the run"""
        self._unsorted = array("q")
        """Messages of the current hour that are not in a run yet, as in a bucket"""
        self._current_end = 0
        """End of the current hour, in hours since the epoch"""
        self._later: dict[int, _Bucket] = {}
        self._hours: list[int] = []
        """Heap of the keys of `_later`"""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, code: int, queue_offset: int) -> None:
        """Adds a message. Those due after the current hour must be added in the order of their queue offsets."""
        self._count += 1
        hour = code // (2 * BUCKET_MS)
        if hour < self._current_end:
            self._add_recent((code, queue_offset))
            return
        bucket = self._later.get(hour)
        if bucket is None:
            bucket = self._later[hour] = _Bucket(code)
            heappush(self._hours, hour)
        elif code < bucket.first_code:
            bucket.first_code = code
        bucket.entries.append(code)
        bucket.entries.append(queue_offset)

    def _add_recent(self, key: Key) -> None:
        heappush(self._recent, key)
        if len(self._recent) >= RUN_COUNT:
            self._recent.sort()
            self._add_run([code for code, _ in self._recent], [queue_offset for _, queue_offset in self._recent])
            self._recent.clear()

    def _add_run(self, codes: Sequence[int], queue_offsets: Sequence[int]) -> None:
        run = _Run(codes, queue_offsets)
        code, queue_offset = run.entries[0], run.entries[1]
        run.at = 2
        heappush(self._heads, (code, queue_offset, run))

    def advance(self, now_ms: int) -> bool:
        """Begins the next hour if it is time, and sorts one run of the current hour's messages. Returns whether it has
        to be called again to sort more. `now_ms`: the wall clock."""
        if not self._unsorted:
            self._begin_hour(now_ms)
        if self._unsorted:
            piece = self._unsorted[-2 * RUN_COUNT :]
            del self._unsorted[-2 * RUN_COUNT :]
            self._add_run(piece[::2], piece[1::2])
        return bool(self._unsorted)

    def _begin_hour(self, now_ms: int) -> None:
        """Makes the next hour the current one if it begins within `LEAD_MS`, or has begun and no earlier message is
        left."""
        if not self._hours:
            return
        hour = self._hours[0]
        is_used_up = not self._heads and not self._recent
        if hour * BUCKET_MS <= now_ms + LEAD_MS and (is_used_up or hour * BUCKET_MS > now_ms):
            heappop(self._hours)
            self._unsorted = self._later.pop(hour).entries
            self._current_end = hour + 1

    @property
    def next_due_ms(self) -> int | None:
        """Due time of the first message, or a lower bound of it, in ms since the epoch; None if there is none."""
        firsts = [heap[0][0] for heap in (self._recent, self._heads) if heap]
        if self._unsorted:
            firsts.append(2 * BUCKET_MS * (self._current_end - 1))
        if not firsts and self._hours:
            firsts.append(self._later[self._hours[0]].first_code)
        return min(firsts) >> 1 if firsts else None

    def pop_due(self, now_ms: int, count_max: int) -> list[Key]:
        """Removes and returns messages that are due at `now_ms`, in order, at most `count_max`.

        Returns none while `advance` has to sort messages of an hour that has begun. Returns fewer than are due if a
        later hour has begun that `advance` has not made the current one yet.
        """
        due: list[Key] = []
        end = 2 * now_ms + 2
        if self._unsorted and (self._current_end - 1) * BUCKET_MS <= now_ms:
            return due
        for _ in range(count_max):
            is_recent = bool(self._recent) and (not self._heads or self._recent[0] < self._heads[0][:2])
            first_code = self._recent[0][0] if is_recent else self._heads[0][0] if self._heads else end
            if first_code >= end:
                break
            due.append(heappop(self._recent) if is_recent else self._pop_head())
        self._count -= len(due)
        return due

    def _pop_head(self) -> Key:
        code, queue_offset, run = heappop(self._heads)
        following = run.pop()
        if following is not None:
            heappush(self._heads, (*following, run))
        return code, queue_offset

    @property
    def lowest_offset(self) -> int | None:
        """Lower bound of the queue offsets of all messages; None if there are none."""
        lowest = [bucket.entries[1] for bucket in self._later.values()]
        lowest += [run.lowest_offset for _, _, run in self._heads]
        lowest += [queue_offset for _, queue_offset in self._recent]
        lowest += self._unsorted[1:2]
        return min(lowest, default=None)

    def drop_before(self, queue_offset: int) -> None:
        """Removes the messages before a queue offset."""
        recent = [key for key in self._recent if key[1] >= queue_offset]
        self._count -= len(self._recent) - len(recent)
        self._recent = recent
        heapify(self._recent)
        self._heads = list(self._heads_from(queue_offset))
        heapify(self._heads)
        self._count -= _drop_first(self._unsorted, queue_offset)
        for hour in list(self._later):
            entries = self._later[hour].entries
            self._count -= _drop_first(entries, queue_offset)
            if not entries:
                del self._later[hour]
        self._hours = list(self._later)
        heapify(self._hours)

    def _heads_from(self, queue_offset: int) -> Iterator[tuple[int, int, _Run]]:
        for head in self._heads:
            run = head[2]
            if run.lowest_offset >= queue_offset:
                yield head
                continue
            self._count -= run.drop_before(queue_offset)
            if head[1] >= queue_offset:
                yield head
                continue
            self._count -= 1
            following = run.pop()
            if following is not None:
                yield *following, run

    def due_counts(self, ends_ms: Sequence[int]) -> list[int]:
        """Returns how many messages are due by the first of the ascending times `ends_ms`, between each two successive
        ones, and after the last.

        Exact to the hour: the messages of a later hour are counted for the first of these times at or after the end of
        the hour, those of the current hour for `ends_ms[0]`.
        """
        counts = [0] * (len(ends_ms) + 1)
        counts[0] = self._count
        for hour, bucket in self._later.items():
            count = len(bucket.entries) // 2
            counts[0] -= count
            counts[bisect_left(ends_ms, (hour + 1) * BUCKET_MS)] += count
        return counts


def _drop_first(entries: array[int], queue_offset: int) -> int:
    """Removes the messages before a queue offset from `entries`, which are ordered by it; returns how many."""
    dropped = bisect_left(range(len(entries) // 2), queue_offset, key=lambda at: entries[2 * at + 1])
    del entries[: 2 * dropped]
    return dropped
