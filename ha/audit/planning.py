"""Cuts copies into ranges that are examined in parallel, and finds those that must be examined again.

A task searches for the first record of its range. If that is not where the last record of the preceding range ended,
the range is examined again from that end, so the result is the same as that of one walk through the whole log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from ha.audit.examined import Examined
from ha.audit.findings import Findings
from ha.audit.fold import CopyFold
from ha.audit.range import CopyPlace, RangeFacts, RangeTask
from ha.audit.walk import RawLog, walk_range

_TAIL_BYTES = 64 << 10


class PlannedRange(msgspec.Struct, frozen=True):
    """Physical offsets [begin, end), and the indexes of the copies that hold all of them."""

    begin: int
    end: int
    members: tuple[int, ...]


def plan_ranges(places: Sequence[CopyPlace], range_bytes: int) -> list[PlannedRange]:
    """Cuts the copies into ranges of at most `range_bytes`, in the order of the log.

    Cuts are at multiples of `range_bytes` and where a copy begins or ends. If retention deletes files before another
    attempt, that attempt therefore has the same ranges, except near the beginnings of the copies.
    """
    cuts = sorted({place.begin for place in places} | {place.end for place in places})
    ranges = []
    for low, high in pairwise(cuts):
        members = tuple(i for i, place in enumerate(places) if place.begin <= low and high <= place.end)
        if members:
            starts = range(low - low % range_bytes, high, range_bytes)
            ranges += [PlannedRange(max(at, low), min(at + range_bytes, high), members) for at in starts]
    return ranges


def range_tasks(
    ranges: Sequence[PlannedRange], places: Sequence[CopyPlace], examples_max: int, audit_id: str
) -> list[RangeTask]:
    """Returns a task for each range. The physical offset of a range's first record is known only at the start of a
    copy."""
    return [
        RangeTask(
            each.begin,
            each.end,
            tuple(places[index] for index in each.members),
            tuple(each.begin if places[index].begin == each.begin else None for index in each.members),
            examples_max,
            audit_id,
        )
        for each in ranges
    ]


def unjoined_tasks(
    tasks: Sequence[RangeTask], ranges: Sequence[PlannedRange], facts: Sequence[RangeFacts], folds: Sequence[CopyFold]
) -> Iterator[tuple[int, RangeTask]]:
    """Yields the index of each range that does not begin where the preceding one ended, and the task that examines it
    again. `facts` are the results of `tasks`; `folds` hold the state of each copy before the first of `tasks`."""
    ends = [fold.last_end for fold in folds]
    for number, (task, planned, found) in enumerate(zip(tasks, ranges, facts, strict=True)):
        starts: list[int | None] = []
        for index, copy_facts in zip(planned.members, found.copies, strict=True):
            if copy_facts.is_gone:
                ends[index] = None
                starts.append(None)
                continue
            expected = ends[index]
            if expected is not None and expected >= task.end:  # one record covers the whole range
                fits = copy_facts.first_start is None or copy_facts.first_start == expected
            else:
                fits = expected is None or expected == copy_facts.first_start
                ends[index] = copy_facts.next_start
            starts.append(copy_facts.first_start if fits else expected)
        if tuple(starts) != tuple(copy_facts.first_start for copy_facts in found.copies):
            yield number, msgspec.structs.replace(task, starts=tuple(starts))


def check_tails(places: Sequence[CopyPlace], findings: Findings) -> None:
    """Adds a finding for each shorter copy whose bytes after its end differ from the longest copy's record there.

    If a copy's last record is damaged, the copy ends before it, and looks shorter rather than damaged. The beginning of
    the record, followed by zeros, is an unfinished write, and no finding.
    """
    longest = max(places, key=lambda place: place.end)
    log = RawLog(longest.path)
    for place in places:
        if place.end >= longest.end or place.end <= longest.begin:
            continue
        stop = min(longest.end, place.end + _TAIL_BYTES)
        walked = walk_range(log, place.end, stop, longest.end, place.end)
        if not len(walked.positions) or walked.positions[0] != place.end:
            continue
        view = Examined(walked, place.broker_name)
        expected = view.raw(0)
        written = RawLog(place.path).read(place.end, place.end + len(expected)).rstrip(b"\0")
        if not expected.startswith(written):
            detail = f"not as in {longest.name}, and so not counted as the end of the log"
            findings.add(view.finding("different", place.name, 0, detail))
