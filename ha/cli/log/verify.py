"""`ha log verify`: checks whether a store is sound, and locates the damage."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from ha.arrow import LogReader
from ha.audit.findings import KINDS, NOTICES, Finding
from ha.audit.range import RangeFacts
from ha.cli.log.checksums import bad_blocks, has_checksums, lost_end
from ha.cli.log.examination import Examination
from ha.cli.log.places import Place, Places
from ha.cli.log.stores import opened, span_of

_TAIL_BYTES = 64 << 10
MEANINGS = {
    **KINDS,
    "checksum": "bytes that changed since they were written, by halog's checksum files",
    "overlap": "a segment file that is longer than the distance to the next one",
    "missing_file": "a segment file that is missing or too short",
    "tail": "bytes after the last confirmed record: an interrupted or unfinished write, or a damaged last record",
}
NOTICE_KINDS = frozenset(NOTICES) | {"tail"}


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. Unknown offsets and queue ids are -1."""

    kind: str
    is_damage: bool
    file: str
    """Path relative to the store directory; "" if no file contains the bytes. In that case, `file_begin` and `file_end`
    are positions in the whole log or queue."""
    file_begin: int
    file_end: int
    physical_offset: int
    topic: str
    queue_id: int
    queue_offset: int
    detail: str


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `ha log verify`. Offsets are physical, in bytes.

    `findings` has at most `examples_max` findings of each kind; `damage_count` and `counts` include all of them.
    """

    path: str
    begin: int
    end: int
    examined_end: int
    is_complete: bool
    is_clean: bool
    """Whether the examined part has no damage"""
    resume: str
    """Options with which the command examines the rest; "" if nothing is left"""
    segment_count: int
    queue_count: int
    record_count: int
    record_bytes: int
    has_checksums: bool
    damage_count: int
    counts: dict[str, int]
    findings: list[Found]
    duration_s: float


def verify(
    path: Path,
    *,
    from_: int | None,
    to: int | None,
    examples_max: int,
    stop: threading.Event,
    progress: Callable[[int, int], None],
) -> VerifyResult:
    """Examines the physical offsets [from_, to) of the store at `path`; None: from the start, to the end.

    If `stop` is set, ends early, and returns the result for the part examined by then. `progress` is called with the
    number of bytes examined and in total. Raises StoreUnreadable if the store can't be read, UsageError if its log is
    not empty but has no bytes in [from_, to).
    """
    started_s = time.monotonic()
    with opened(path) as (reader,):
        span = span_of(reader.min_offset, reader.end_offset(), from_, to)
        examination = Examination([reader], [""], span, examples_max)

        def watch(facts: RangeFacts) -> None:
            _check_blocks(examination, reader, facts.begin, facts.end)

        _check_files(examination, reader)
        examination.run(stop, progress, watch)
        if examination.is_complete and (to is None or to >= reader.end_offset()):
            _check_tail(examination, reader)
        return _result(examination, reader, to, time.monotonic() - started_s)


def _check_blocks(examination: Examination, reader: LogReader, begin: int, end: int) -> None:
    for block in bad_blocks(reader, begin, end):
        detail = f"physical offsets [{block.begin}, {block.end})"
        length = block.end - block.begin
        examination.findings.add(
            Finding(kind="checksum", copy="", physical_offset=block.begin, length=length, detail=detail)
        )


def _check_files(examination: Examination, reader: LogReader) -> None:
    segments = reader.segments()
    for segment, following in pairwise(segments):
        if segment.end > following.start:
            detail = f"{segment.size} bytes, of which {segment.end - following.start} are also in the next file"
            length = segment.end - following.start
            examination.findings.add(
                Finding(kind="overlap", copy="", physical_offset=following.start, length=length, detail=detail)
            )
        elif segment.end < following.start:
            length = following.start - segment.end
            detail = f"{length} bytes between the neighbouring files"
            examination.findings.add(
                Finding(kind="missing_file", copy="", physical_offset=segment.end, length=length, detail=detail)
            )


def _check_tail(examination: Examination, reader: LogReader) -> None:
    """Reports damaged and missing bytes after the confirmed end that were flushed, which only checksum files show, and
    bytes that are not the zeros of a preallocated file."""
    end = reader.end_offset()
    _check_blocks(examination, reader, end, sys.maxsize)
    for lost in lost_end(reader):
        length = lost.end - lost.begin
        detail = f"{length} bytes at the end of the log, by the checksum files"
        examination.findings.add(
            Finding(kind="missing_file", copy="", physical_offset=lost.begin, length=length, detail=detail)
        )
    tail = b"".join(bytes(view) for view in reader.bytes_at(end, end + _TAIL_BYTES))
    length = len(tail.rstrip(b"\0"))
    if length:
        detail = f"{length}{' or more' if length == _TAIL_BYTES else ''} bytes"
        examination.findings.add(Finding(kind="tail", copy="", physical_offset=end, length=length, detail=detail))


def _result(examination: Examination, reader: LogReader, to: int | None, duration_s: float) -> VerifyResult:
    findings = examination.findings
    counts = findings.by_kind()
    damage_count = sum(count for kind, count in counts.items() if kind not in NOTICE_KINDS)
    places = Places(reader)
    shown = sorted(
        (finding for found in findings.examples.values() for finding in found),
        key=lambda finding: (finding.kind in NOTICE_KINDS, finding.physical_offset, finding.kind),
    )
    fold = examination.folds[0]
    return VerifyResult(
        path=str(reader.path),
        begin=examination.begin,
        end=examination.span.end,
        examined_end=examination.reached,
        is_complete=examination.is_complete,
        is_clean=not damage_count,
        resume=examination.resume_options(to),
        segment_count=len(reader.segments()),
        queue_count=len(reader.queues()),
        record_count=fold.record_count,
        record_bytes=fold.byte_count,
        has_checksums=has_checksums(reader.path),
        damage_count=damage_count,
        counts=counts,
        findings=[_found(finding, places.of(finding)) for finding in shown],
        duration_s=duration_s,
    )


def _found(finding: Finding, place: Place) -> Found:
    return Found(
        kind=finding.kind,
        is_damage=finding.kind not in NOTICE_KINDS,
        file=place.file,
        file_begin=place.begin,
        file_end=place.end,
        physical_offset=finding.physical_offset,
        topic=finding.topic,
        queue_id=finding.queue_id,
        queue_offset=finding.queue_offset,
        detail=finding.detail,
    )
