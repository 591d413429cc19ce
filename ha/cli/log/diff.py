"""`ha log diff`: finds the first difference between two stores, and counts all differences."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ha.arrow import LogReader, ReadOptions
from ha.audit.range import RangeFacts
from ha.cli.log.dump import shown_rows
from ha.cli.log.examination import Examination
from ha.cli.log.places import Place, Places
from ha.cli.log.stores import opened, span_of

_DIFFERENCES = frozenset({"different", "missing", "extra"})
_CHUNK_BYTES = 4 << 20


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two stores at the first difference. `record` is the record there; None if the store has none."""

    path: str
    file: str
    file_begin: int
    file_end: int
    record: dict[str, Any] | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference of the logs' bytes, unused bytes included."""

    physical_offset: int
    """Physical offset of the first byte that differs"""
    record_offset: int | None
    """Physical offset of the record that contains this byte; None if neither store has a record there"""
    differing_fields: list[str]
    left: Side
    right: Side


class DiffResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `ha log diff`. Offsets are physical, in bytes."""

    left: str
    right: str
    left_begin: int
    left_end: int
    right_begin: int
    right_end: int
    compared_begin: int
    compared_end: int
    is_complete: bool
    is_equal: bool
    """Whether the compared range is the same in both stores, except for unused bytes"""
    resume: str
    differing_ranges: int
    """Number of ranges of 16 MiB whose bytes differ"""
    counts: dict[str, int]
    """Kind of finding -> number: records that differ, records in one store only, and damage"""
    first: Difference | None
    duration_s: float


def diff(
    left: Path,
    right: Path,
    *,
    from_: int | None,
    to: int | None,
    stop: threading.Event,
    progress: Callable[[int, int], None],
) -> DiffResult:
    """Compares the part of [from_, to) that both stores hold, until `stop` is set.

    Raises StoreUnreadable if a store can't be read, UsageError if the stores share bytes but none in [from_, to).
    """
    started_s = time.monotonic()
    with opened(left, right) as readers:
        begin = max(reader.min_offset for reader in readers)
        end = min(reader.end_offset() for reader in readers)
        span = span_of(begin, max(begin, end), from_, to)
        examination = Examination(readers, ["left", "right"], span, 1)
        unequal: list[RangeFacts] = []

        def watch(facts: RangeFacts) -> None:
            if len({copy.digest for copy in facts.copies}) > 1 and not any(copy.is_gone for copy in facts.copies):
                unequal.append(facts)

        examination.run(stop, progress, watch)
        first = None
        if unequal:
            first = _first(readers, unequal[0].begin, end, _record_of(examination))
        counts = examination.findings.by_kind()
        return DiffResult(
            left=str(left),
            right=str(right),
            left_begin=readers[0].min_offset,
            left_end=readers[0].end_offset(),
            right_begin=readers[1].min_offset,
            right_end=readers[1].end_offset(),
            compared_begin=examination.begin,
            compared_end=examination.reached,
            is_complete=examination.is_complete,
            is_equal=not (_DIFFERENCES & counts.keys() or (unequal and "unreadable" in counts)),
            resume=examination.resume_options(to),
            differing_ranges=len(unequal),
            counts=counts,
            first=first,
            duration_s=time.monotonic() - started_s,
        )


def _record_of(examination: Examination) -> int | None:
    """Returns the physical offset of the first record that differs or that only one store has; None if there is
    none."""
    found = [
        finding.physical_offset
        for examples in examination.findings.examples.values()
        for finding in examples
        if finding.kind in _DIFFERENCES
    ]
    return min(found, default=None)


def _first(readers: list[LogReader], begin: int, end: int, record_offset: int | None) -> Difference | None:
    at = _first_byte(readers, begin, end)
    if at is None:
        return None
    if record_offset is not None and record_offset > at:
        record_offset = None  # unused bytes of a filler differ before it
    rows = [None if record_offset is None else _record(reader, record_offset) for reader in readers]
    fields: list[str] = []
    if rows[0] is not None and rows[1] is not None:
        names = {**rows[0], **rows[1]}
        fields = [name for name in names if rows[0].get(name) != rows[1].get(name)]
    sides = []
    for reader, row in zip(readers, rows, strict=True):
        offset = at if record_offset is None else record_offset
        place = _place(reader, offset, row)
        sides.append(
            Side(path=str(reader.path), file=place.file, file_begin=place.begin, file_end=place.end, record=row)
        )
    return Difference(
        physical_offset=at, record_offset=record_offset, differing_fields=fields, left=sides[0], right=sides[1]
    )


def _place(reader: LogReader, offset: int, row: dict[str, Any] | None) -> Place:
    length = row["size"] if row is not None and row["size"] else 1
    return Places(reader).of_log(offset, length)


def _first_byte(readers: list[LogReader], begin: int, end: int) -> int | None:
    """Returns the physical offset of the first byte of [begin, end) that differs; None if all are equal."""
    for low in range(begin, end, _CHUNK_BYTES):
        high = min(end, low + _CHUNK_BYTES)
        one, two = (b"".join(reader.bytes_at(low, high)) for reader in readers)
        if one != two:
            size = min(len(one), len(two))
            unlike = np.flatnonzero(np.frombuffer(one, np.uint8, size) != np.frombuffer(two, np.uint8, size))
            return low + (int(unlike[0]) if len(unlike) else size)
    return None


def _record(reader: LogReader, offset: int) -> dict[str, Any] | None:
    """Returns the record at `offset` as `ha log dump` prints it; None if there is none."""
    for run in reader.walk_runs(offset, offset + 1, ReadOptions()):
        for row in shown_rows(run):
            if row["physical_offset"] == offset:
                return row
    return None
