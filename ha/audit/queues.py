"""Checks the queue offsets of one queue, range by range, and combines the results in the order of the log, in bounded
memory.

A correct queue's offsets rise by one from record to record (by n after a record that holds a batch of n). Within a
range, the smallest set of records without which the offsets rise is reported (the complement of a longest rising
subsequence), so that one wrong offset is one finding and not one for each of its successors. (In a range with only two
or three records of a queue, a neighbour may be reported as well.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import msgspec
import numpy as np

from ha.arrow.heads import Int64s

SPANS_MAX = 1_000
"""Maximum number of separate spans of one queue kept while folding; with more, the lowest hole is closed: no later
record can fill it."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Queue offsets [begin, end) of records in the log, the first of them at `physical_offset`, stored in `hour`.

    Hours are counted from 1970 (UTC); -1 is unknown.
    """

    begin: int
    end: int
    physical_offset: int
    hour: int = -1


class QueueFacts(msgspec.Struct, array_like=True):
    """The records of one queue in one physical range: their `count`, and rising `spans` with gaps between them."""

    count: int
    spans: list[Span]
    strays: list[Span]
    """Records out of order or repeated, one span each, not in `spans`."""


def queue_facts(
    queue_offsets: Int64s, physical_offsets: Int64s, steps: Int64s | None = None, hours: Int64s | None = None
) -> QueueFacts:
    """Returns the facts of a queue's records, of which there is at least one, given in physical order.

    `steps`: number of queue offsets that each record takes; None for 1 each. `hours`: store time of each in hours since
    1970; None if unknown.
    """
    count = len(queue_offsets)
    hours = np.full(count, -1, np.int64) if hours is None else hours
    ends = queue_offsets + (1 if steps is None else steps)
    breaks = np.flatnonzero(queue_offsets[1:] != ends[:-1]) + 1
    strays: list[Span] = []
    if len(breaks) and (queue_offsets[1:] < ends[:-1]).any():
        rising = _in_order(queue_offsets.tolist())
        kept = np.zeros(count, dtype=bool)
        kept[rising] = True
        strays = [
            Span(int(queue_offsets[i]), int(ends[i]), int(physical_offsets[i]), int(hours[i]))
            for i in np.flatnonzero(~kept).tolist()
        ]
        queue_offsets, ends = queue_offsets[kept], ends[kept]
        physical_offsets, hours = physical_offsets[kept], hours[kept]
        breaks = np.flatnonzero(queue_offsets[1:] != ends[:-1]) + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(queue_offsets)]
    spans = [
        Span(int(queue_offsets[start]), int(ends[stop - 1]), int(physical_offsets[start]), int(hours[start]))
        for start, stop in zip(starts, stops, strict=True)
    ]
    return QueueFacts(count, spans, strays)


def _in_order(values: list[int]) -> list[int]:
    """Returns the indexes of a longest strictly rising subsequence.

    Searches from the front, which skips values that are too high, and from the back, which skips values that are too
    low. Of the two results, returns the one whose first and last values are closer together.
    """
    forward = _longest_rising(values)
    last = len(values) - 1
    backward = [last - position for position in reversed(_longest_rising([-value for value in reversed(values)]))]

    def spread(chosen: list[int]) -> int:
        return values[chosen[-1]] - values[chosen[0]]

    return backward if spread(backward) < spread(forward) else forward


def _longest_rising(values: list[int]) -> list[int]:
    """Returns the indexes of a longest strictly rising subsequence (patience sorting, O(n log n))."""
    tails: list[int] = []  # smallest last value of a rising sequence of each length
    tail_positions: list[int] = []
    previous = [-1] * len(values)
    for position, value in enumerate(values):
        length = bisect_left(tails, value)
        if length:
            previous[position] = tail_positions[length - 1]
        if length == len(tails):
            tails.append(value)
            tail_positions.append(position)
        elif value < tails[length]:  # of equal values, the first is kept
            tails[length] = value
            tail_positions[length] = position
    found = []
    position = tail_positions[-1]
    while position >= 0:
        found.append(position)
        position = previous[position]
    return found[::-1]


class QueueFold:
    """The state of one queue: call `add` range by range, then `holes`."""

    def __init__(self) -> None:
        self.count = 0
        self.repeated: list[Span] = []
        """Spans passed to the last `add` that contain a queue offset of an earlier record."""
        self.displaced: list[Span] = []
        """Spans that the last `add` found to be out of order. One of them may have been passed to an earlier `add`."""
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._places: list[int] = []
        self._closed: list[tuple[int, int, int]] = []
        self._aside: list[tuple[int, int]] = []
        self._high: int | None = None
        self._jump: tuple[int, Span] | None = None

    def add(self, facts: QueueFacts) -> None:
        """Folds the facts of the next range in the log."""
        self.count += facts.count
        self.repeated, self.displaced = [], []
        for span in facts.spans:
            if self._high is not None and span.begin < self._high:
                self._step_back(span)
            else:
                # A span that begins where the last one ended confirms it.
                if self._high is None or span.begin > self._high:
                    self._jump = (-1 if self._high is None else self._high, span)
                else:
                    self._jump = None
                self._high = span.end
            self._insert(span)
        for stray in facts.strays:
            if self._overlaps(stray):
                self.repeated.append(stray)
            else:
                self.displaced.append(stray)
                self._set_aside(stray)

    def _step_back(self, span: Span) -> None:
        """Handles a span that begins below the highest queue offset so far.

        It is out of order, or the span before it jumped ahead, or it repeats queue offsets (see `_insert`).
        """
        assert self._high is not None
        jump = self._jump
        if (
            jump is not None
            and jump[0] <= span.begin < span.end <= jump[1].begin
            and jump[1].end - jump[1].begin <= span.end - span.begin
        ):
            stray = jump[1]
            self.displaced.append(stray)
            at = bisect_left(self._begins, stray.begin)
            if at < len(self._begins) and (self._begins[at], self._ends[at]) == (stray.begin, stray.end):
                del self._begins[at], self._ends[at], self._places[at]
                self._set_aside(stray)
            self._high, self._jump = span.end, None
        elif not self._overlaps(span):
            self.displaced.append(span)
        else:
            self._high = max(self._high, span.end)

    def _overlaps(self, span: Span) -> bool:
        at = bisect_right(self._begins, span.begin)
        return (at > 0 and self._ends[at - 1] > span.begin) or (at < len(self._begins) and self._begins[at] < span.end)

    def _set_aside(self, span: Span) -> None:
        """Stores a span that is out of order: it may fill part of a hole, but must not create one before it."""
        if len(self._aside) < SPANS_MAX:
            self._aside.append((span.begin, span.end))

    def _insert(self, span: Span) -> None:
        """Adds the span's queue offsets; the span counts as repeated if an earlier record has any of them."""
        if self._overlaps(span):
            self.repeated.append(span)
        first = bisect_left(self._ends, span.begin)  # the first that ends at or after span.begin
        last = bisect_right(self._begins, span.end)  # one past the last that begins at or before span.end
        begin, end = span.begin, span.end
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        place = span.physical_offset if begin == span.begin else self._places[first]
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]
        self._places[first:last] = [place]
        if len(self._begins) > SPANS_MAX:
            self._closed.append((self._ends[0], self._begins[1], self._places[1]))
            del self._begins[1], self._ends[0], self._places[1]

    @property
    def begin(self) -> int:
        """Lowest queue offset found."""
        return self._begins[0]

    @property
    def end(self) -> int:
        """One past the highest queue offset found."""
        return self._ends[-1]

    def holes(self) -> list[tuple[int, int, int]]:
        """Returns the holes between the lowest and the highest queue offset: (begin, end, physical offset of the record
        after it)."""
        found = []
        for begin, end, place in [*self._closed, *zip(self._ends, self._begins[1:], self._places[1:], strict=False)]:
            for low, high in sorted(span for span in self._aside if begin <= span[0] < span[1] <= end):
                if low > begin:
                    found.append((begin, low, place))
                begin = max(begin, high)
            if begin < end:
                found.append((begin, end, place))
        return found
