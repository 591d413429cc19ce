"""`ha spark audit`: are the copies of a log equal, and each of them sound?

The log is cut into physical ranges; executors examine each range in every copy that has it (`audit_range`), the driver
folds their facts in order (`audit_fold`). What it holds at a time is bounded by queues and topics, not by the log.
Every executor must see every path. Copies may be written to while they are audited: each is taken up to its confirmed
end as it was at the beginning.

The ranges must join: a range looks for its first record by itself, and where that is not where the range in front of it
ended, it is examined again from there. So the result is that of one walk from end to end.

What ranges said is kept until the audit ends (`ha.spark.jobs.finished`): another attempt examines only the rest, and
what was written to since, and says so in the notes.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ha.arrow import LogReader
from ha.errors import OptionError, StoreUnreadable
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.audit.archive import ARCHIVE, ArchivePlace, ArchiveTask, archive_tasks, compare_archive, open_archive
from ha.spark.jobs.audit.examined import Examined
from ha.spark.jobs.audit.findings import Finding, Findings
from ha.spark.jobs.audit.fold import CopyFold
from ha.spark.jobs.audit.range import CopyPlace, RangeFacts, RangeTask, examine_range
from ha.spark.jobs.audit.walk import RawLog, walk_range
from ha.spark.jobs.finished import LogFiles, finished_tasks, task_key
from ha.spark.jobs.waves import Runner, spark_runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXIT_CLEAN = 0
EXIT_DAMAGED = 1
EXIT_NOTHING_COMPARED = 4
_TAIL_BYTES = 64 << 10


class AuditOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to audit."""

    paths: tuple[str, ...]
    """Store directories, the first being the one that others are told to differ from when it's one against one."""
    names: tuple[str, ...] = ()
    """How to call them; default: the directories' names, made distinct."""
    broker_name: str | None = None
    archive: str | None = None
    """A Parquet archive of this log, compared with the first path; `broker_name` says whose part, if there are more"""
    range_bytes: int = 32 << 20
    """Bytes of one task. An executor's core needs some three times as much memory."""
    examples_max: int = 100
    """Findings of each kind and copy that are told in full; all are counted."""
    unfinished: str | None = None
    """Folder for what was found until the audit ends; None: `ha.spark.jobs.finished.state_folder()`"""


class CopySummary(msgspec.Struct, frozen=True):
    """One copy: what was audited of it. Offsets in bytes."""

    name: str
    path: str
    begin: int
    end: int
    record_count: int
    byte_count: int
    digest: str
    """SHA-256 over the ranges' SHA-256, hex; "" for an archive."""


class Coverage(msgspec.Struct, frozen=True):
    """Physical bytes [begin, end) that only `copies` have: retention or lag, no damage."""

    begin: int
    end: int
    copies: tuple[str, ...]


class TopicHour(msgspec.Struct, frozen=True):
    """A line of the closing table: records and bytes of the first copy. `hour` counts from 1970 (UTC), −1: unknown."""

    topic: str
    hour: int
    record_count: int
    byte_count: int
    found: dict[str, int]


class AuditResult(msgspec.Struct, frozen=True):
    """What an audit found. `found` counts by kind and copy; `findings` shows some of each."""

    copies: tuple[CopySummary, ...]
    compared_bytes: int
    """Bytes that at least two copies have and that were compared."""
    only_in: tuple[Coverage, ...]
    found: dict[str, dict[str, int]]
    damage_count: int
    findings: tuple[Finding, ...]
    topic_hours: tuple[TopicHour, ...]
    notes: tuple[str, ...]
    started_ms: int
    duration_s: float
    range_bytes: int

    @property
    def exit_code(self) -> int:
        """0: clean; 1: not; 4: clean as far as it goes, but two or more copies were given and share no byte."""
        if self.damage_count:
            return EXIT_DAMAGED
        return EXIT_NOTHING_COMPARED if len(self.copies) > 1 and not self.compared_bytes else EXIT_CLEAN


def audit(spark: SparkSession, options: AuditOptions, progress: Progress = no_progress) -> AuditResult:
    """Audit `options.paths`. OptionError for options that can't be; StoreUnreadable for a path that is no store.

    After an error or a kill, run it again with the same options: finished ranges are not read again."""
    with finished_tasks("audit", options, options.unfinished) as finished:
        result = audit_with(finished.runner(spark_runner(spark), _Keys()), options, progress)
    note = finished.note()
    return result if note is None else msgspec.structs.replace(result, notes=(*result.notes, note))


class _Keys:
    """What the facts of a range follow from: the task, but for what only this attempt is about, and the files."""

    def __init__(self) -> None:
        self._logs: dict[str, LogFiles] = {}

    def __call__(self, task: RangeTask | ArchiveTask) -> bytes | None:
        if isinstance(task, RangeTask):
            copies = [self._copy(copy, task) for copy in task.copies]
            return task_key("audit", task.begin, task.end, task.starts, task.examples_max, copies)
        archive = task.archive
        try:
            found = [os.stat(Path(archive.path, file[0])) for file in archive.files]
        except OSError:
            return None
        told = (
            archive.path,
            archive.files,
            sorted(archive.topics or ()),
            archive.topics is None,
            archive.skips_damaged,
        )
        states = [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]
        store = self._copy(task.store, task)
        return task_key("audit archive", task.begin, task.end, task.start, task.examples_max, store, told, states)

    def _copy(self, copy: CopyPlace, task: RangeTask | ArchiveTask) -> tuple[object, ...]:
        if copy.path not in self._logs:
            self._logs[copy.path] = LogFiles(copy.path)
        log = self._logs[copy.path]
        # No record goes beyond its segment, so an end of the log behind that says nothing about the range.
        limit = min(copy.end, log.end_of(task.begin, task.end))
        return (copy.name, copy.path, copy.broker_name, limit, log.between(task.begin, task.end))


def audit_with(run: Runner, options: AuditOptions, progress: Progress = no_progress) -> AuditResult:
    """As `audit`, wherever `run` runs the ranges."""
    started_s = time.time()
    readers = _open(options)
    try:
        places = _places(readers, options)
        archive = None if options.archive is None else open_archive(options.archive, options.broker_name)
        starts: dict[int, tuple[int, int | None]] = {}
        findings = Findings(options.examples_max)
        folds = [CopyFold(place, findings) for place in places]
        ranges = plan(places, options.range_bytes)
        total = sum(end - begin for begin, end, _ in ranges)
        done = 0
        tasks = [
            RangeTask(
                begin,
                end,
                tuple(places[index] for index in members),
                _starts(places, members, begin),
                options.examples_max,
                f"{os.getpid()} {started_s}",
            )
            for begin, end, members in ranges
        ]
        cursor = 0
        progress("compare", 0, total)
        for wave in run(examine_range, tasks):
            wave_tasks = tasks[cursor : cursor + len(wave)]
            members_of = [members for _, _, members in ranges[cursor : cursor + len(wave)]]
            cursor += len(wave)
            _join(run, wave_tasks, members_of, wave, folds)
            for members, facts in zip(members_of, wave, strict=True):
                findings.merge(facts.findings)
                for index, copy_facts in zip(members, facts.copies, strict=True):
                    folds[index].add(facts.begin, facts.end, copy_facts)
                    if archive is not None and index == 0 and not copy_facts.is_gone:
                        starts[facts.begin] = (facts.end, copy_facts.first_start)
                done += facts.end - facts.begin
            progress("compare", done, total)
        _check_tails(readers, places, findings)
        archived = None
        if archive is not None:
            archived = _compare_archive(run, archive, places[0], starts, findings, progress)
        for index, (fold, reader) in enumerate(zip(folds, readers, strict=True)):
            progress("queues", index, len(folds))
            fold.finish(reader)
        progress("queues", len(folds), len(folds))
        return _result(options, folds, ranges, findings, archived, started_s)
    finally:
        for reader in readers:
            reader.close()


def plan(places: list[CopyPlace], range_bytes: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """(begin, end, indices of the copies that have it all), in order, each at most `range_bytes` long.

    They are cut at multiples of that, so that another attempt has the same ones whatever retention has taken."""
    cuts = sorted({place.begin for place in places} | {place.end for place in places})
    ranges = []
    for low, high in pairwise(cuts):
        members = tuple(i for i, place in enumerate(places) if place.begin <= low and high <= place.end)
        if members:
            cut = range(low - low % range_bytes, high, range_bytes)
            ranges += [(max(at, low), min(at + range_bytes, high), members) for at in cut]
    return ranges


def _open(options: AuditOptions) -> list[LogReader]:
    if not options.paths:
        raise OptionError("paths", "no store is given", "one or more store directories")
    if options.names and len(set(options.names)) != len(options.paths):
        raise OptionError("names", f"{', '.join(options.names)} for {len(options.paths)} paths", "a distinct name each")
    if options.archive is not None and ARCHIVE in options.names:
        raise OptionError("names", f"{ARCHIVE} is what the archive is called", "another name")
    if options.range_bytes < 1024:
        raise OptionError("range_bytes", f"{options.range_bytes} is too little", "1024 or more")
    return [LogReader(Path(path), broker_name=options.broker_name) for path in options.paths]


def _names(options: AuditOptions) -> list[str]:
    if options.names:
        return list(options.names)
    names = [Path(path).resolve().name or path for path in options.paths]
    return [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names, start=1)]


def _places(readers: list[LogReader], options: AuditOptions) -> list[CopyPlace]:
    places = []
    for name, reader in zip(_names(options), readers, strict=True):
        begin, end = reader.min_offset, reader.end_offset()
        places.append(CopyPlace(name, str(reader.path.absolute()), reader.broker_name, begin, max(begin, end)))
    return places


def _starts(places: list[CopyPlace], members: tuple[int, ...], begin: int) -> tuple[int | None, ...]:
    return tuple(begin if places[index].begin == begin else None for index in members)


def _join(
    run: Runner,
    tasks: list[RangeTask],
    members_of: list[tuple[int, ...]],
    wave: list[RangeFacts],
    folds: list[CopyFold],
) -> None:
    """Examines again, in place, the ranges that do not begin where the ones in front of them end."""
    while True:
        ends = [fold.last_end for fold in folds]
        again: list[tuple[int, RangeTask]] = []
        for number, (task, members, facts) in enumerate(zip(tasks, members_of, wave, strict=True)):
            starts: list[int | None] = []
            for index, copy_facts in zip(members, facts.copies, strict=True):
                if copy_facts.is_gone:
                    ends[index] = None
                    starts.append(None)
                    continue
                expected = ends[index]
                is_passed_over = expected is not None and expected >= task.end
                if is_passed_over:
                    fits = copy_facts.first_start is None or copy_facts.first_start == expected
                else:
                    fits = expected is None or expected == copy_facts.first_start
                    ends[index] = copy_facts.next_start
                starts.append(copy_facts.first_start if fits else expected)
            if tuple(starts) != tuple(copy_facts.first_start for copy_facts in facts.copies):
                again.append((number, msgspec.structs.replace(task, starts=tuple(starts))))
        if not again:
            return
        numbers = [number for number, _ in again]
        done = [facts for part in run(examine_range, [task for _, task in again]) for facts in part]
        for number, facts in zip(numbers, done, strict=True):
            wave[number] = facts


def _check_tails(readers: list[LogReader], places: list[CopyPlace], findings: Findings) -> None:
    """Whether the first record that a copy has not confirmed, but the longest one has, is absent, on its way, or wrong.

    A copy that has damaged the last record of its log no longer takes it for a record and looks merely shorter."""
    longest = max(range(len(places)), key=lambda index: places[index].end)
    for place in places:
        if place.end >= places[longest].end or place.end <= places[longest].begin:
            continue
        log = RawLog(places[longest].path)
        stop = min(places[longest].end, place.end + _TAIL_BYTES)
        walked = walk_range(log, place.end, stop, places[longest].end, place.end)
        if not len(walked.positions) or walked.positions[0] != place.end:
            continue
        view = Examined(walked, place.broker_name)
        wanted = view.raw(0)
        has = RawLog(place.path).read(place.end, place.end + len(wanted))
        written = has.rstrip(b"\0")
        if not wanted.startswith(written):
            detail = f"not as in {places[longest].name}, and so not taken for the end of the log"
            findings.add(view.finding("different", place.name, 0, detail))


def _compare_archive(
    run: Runner,
    archive: ArchivePlace,
    store: CopyPlace,
    starts: dict[int, tuple[int, int | None]],
    findings: Findings,
    progress: Progress,
) -> CopySummary:
    tasks = archive_tasks(store, archive, starts, findings.examples_max)
    total = sum(task.end - task.begin for task in tasks)
    done = rows = record_bytes = 0
    progress("archive", 0, total)
    for wave in run(compare_archive, tasks):
        for facts in wave:
            findings.merge(facts.findings)
            rows += facts.rows
            record_bytes += facts.record_bytes
            done += facts.end - facts.begin
        progress("archive", done, total)
    return CopySummary(ARCHIVE, archive.path, archive.begin, archive.end, rows, record_bytes, "")


def _result(
    options: AuditOptions,
    folds: list[CopyFold],
    ranges: list[tuple[int, int, tuple[int, ...]]],
    findings: Findings,
    archived: CopySummary | None,
    started_s: float,
) -> AuditResult:
    copies = tuple(
        CopySummary(
            fold.place.name,
            fold.place.path,
            fold.place.begin,
            fold.place.end,
            fold.record_count,
            fold.byte_count,
            fold.digest,
        )
        for fold in folds
    )
    compared_bytes = sum(end - begin for begin, end, members in ranges if len(members) > 1)
    only_in = _only_in(ranges, folds)
    if archived is not None:
        copies = (*copies, archived)
        first = folds[0].place
        begin, end = max(archived.begin, first.begin), min(archived.end, first.end)
        compared_bytes = max(compared_bytes, end - begin)
        spans = (
            (archived.begin, min(first.begin, archived.end), ARCHIVE),
            (max(archived.end, first.begin), first.end, first.name),
        )
        only_in += tuple(Coverage(low, high, (name,)) for low, high, name in spans if low < high)
    found: dict[str, dict[str, int]] = {}
    for (kind, copy), count in sorted(findings.counts.items()):
        found.setdefault(kind, {})[copy] = count
    cells = folds[0].cells
    by_cell: dict[tuple[str, int], dict[str, int]] = {}
    for (topic, hour, kind), count in findings.cells.items():
        by_cell.setdefault((topic, hour), {})[kind] = count
    topic_hours = tuple(
        TopicHour(topic, hour, *cells.get((topic, hour), (0, 0)), by_cell.get((topic, hour), {}))
        for topic, hour in sorted(set(cells) | set(by_cell))
    )
    return AuditResult(
        copies,
        compared_bytes,
        only_in,
        found,
        findings.damage_count,
        tuple(finding for key in sorted(findings.examples) for finding in findings.examples[key]),
        topic_hours,
        tuple(
            f"{fold.place.name}: retention deleted physical offsets up to {fold.begin} while the audit ran; "
            f"not all that stood in front of it was examined"
            for fold in folds
            if fold.begin > fold.place.begin
        ),
        int(started_s * 1000),
        time.time() - started_s,
        options.range_bytes,
    )


def _only_in(ranges: list[tuple[int, int, tuple[int, ...]]], folds: list[CopyFold]) -> tuple[Coverage, ...]:
    found: list[Coverage] = []
    for begin, end, members in ranges:
        if len(members) == len(folds):
            continue
        names = tuple(folds[index].place.name for index in members)
        if found and found[-1].end == begin and found[-1].copies == names:
            found[-1] = Coverage(found[-1].begin, end, names)
        else:
            found.append(Coverage(begin, end, names))
    return tuple(found)


__all__ = ["AuditOptions", "AuditResult", "StoreUnreadable", "audit", "plan"]
