"""`ha spark audit`: checks whether the copies of a log are equal, and whether each of them is undamaged.

The checks are those of `ha.audit`. Executors examine physical ranges of the log in every copy that has them; the driver
combines their results in the order of the log. The driver's memory depends on the number of queues and topics, not on
the size of the log. Every executor must see every path. Copies may be written to during the audit: each is examined up
to its confirmed end at the start.

Results of ranges are kept until the audit succeeds (`ha.spark.jobs.finished`). If it is interrupted, the next run
examines only the remaining ranges and those written to since; a note in its result says so.
"""

from __future__ import annotations

import os
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ha.arrow import LogReader
from ha.audit.findings import Finding, Findings
from ha.audit.fold import CopyFold
from ha.audit.planning import PlannedRange, check_tails, plan_ranges, range_tasks, unjoined_tasks
from ha.audit.range import CopyPlace, RangeTask, examine_range
from ha.errors import OptionError
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.audit.archive import ARCHIVE, ArchivePlace, ArchiveTask, archive_tasks, compare_archive, open_archive
from ha.spark.jobs.finished import LogFiles, finished_tasks, task_key
from ha.spark.jobs.waves import Runner, spark_runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXIT_CLEAN = 0
EXIT_DAMAGED = 1
EXIT_NOTHING_COMPARED = 4


class AuditOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an audit."""

    paths: tuple[str, ...]
    """Store directories. If only two copies have a range and differ, the first one counts as right."""
    names: tuple[str, ...] = ()
    """Names of the copies; default: the directories' names, made distinct."""
    broker_name: str | None = None
    archive: str | None = None
    """An archive of this log, compared with the first path; `broker_name` selects its part"""
    range_bytes: int = 32 << 20
    """Bytes per task. An executor's core needs about three times as much memory."""
    examples_max: int = 100
    """Maximum number of findings of each kind and copy to return in full; all are counted."""
    unfinished: str | None = None
    """Directory for the results of ranges until the audit succeeds; None: `ha.spark.jobs.finished.state_folder()`"""


class CopySummary(msgspec.Struct, frozen=True):
    """The audited part of one copy. Offsets in bytes."""

    name: str
    path: str
    begin: int
    end: int
    record_count: int
    byte_count: int
    digest: str
    """SHA-256 over the ranges' SHA-256, hex; "" for an archive."""


class Coverage(msgspec.Struct, frozen=True):
    """Physical offsets [begin, end) that only `copies` have, because of retention or lag; not damage."""

    begin: int
    end: int
    copies: tuple[str, ...]


class TopicHour(msgspec.Struct, frozen=True):
    """A row of the table by topic and hour: records and bytes of the first copy, and findings in all copies by kind.

    `hour`: hours since 1970 (UTC), -1 if unknown. `topic`: "" if unknown.
    """

    topic: str
    hour: int
    record_count: int
    byte_count: int
    found: dict[str, int]


class AuditResult(msgspec.Struct, frozen=True):
    """The result of an audit. `found`: kind -> copy -> count; `findings`: the first ones of each kind and copy."""

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
        """Exit code of the command: 0 clean; 1 damage; 4 no damage, but several copies were given and share no
        byte."""
        if self.damage_count:
            return EXIT_DAMAGED
        return EXIT_NOTHING_COMPARED if len(self.copies) > 1 and not self.compared_bytes else EXIT_CLEAN


def audit(spark: SparkSession, options: AuditOptions, progress: Progress = no_progress) -> AuditResult:
    """Audits `options.paths`. Progress is in bytes ("compare", "archive") and in copies ("queues").

    Raises OptionError for invalid options; StoreUnreadable for a store that can't be read; DiskFailed; with an archive
    ArchiveDamaged and ArchiveConflict (as in `archive_states`). After an error or a kill, run it again with the same
    options: finished ranges are not read again.
    """
    with finished_tasks("audit", options, options.unfinished) as finished:
        result = audit_with(finished.runner(spark_runner(spark), _Keys()), options, progress)
    note = finished.note()
    return result if note is None else msgspec.structs.replace(result, notes=(*result.notes, note))


class _Keys:
    """Computes the key under which the facts of a range are stored, from its task and the files that the task reads.

    Values that differ with each run (audit_id) are not part of the key. If a file of the archive can't be examined, the
    key is None, and the range is compared again.
    """

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
        states = [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]
        store = self._copy(task.store, task)
        archive = msgspec.structs.replace(archive, begin=0, end=0)  # not the covered range, which may grow between runs
        return task_key("audit archive", task.begin, task.end, task.start, task.examples_max, store, archive, states)

    def _copy(self, copy: CopyPlace, task: RangeTask | ArchiveTask) -> tuple[object, ...]:
        if copy.path not in self._logs:
            self._logs[copy.path] = LogFiles(copy.path)
        log = self._logs[copy.path]
        # No record spans segments, so an end of the log after these files does not affect the range.
        limit = min(copy.end, log.end_of(task.begin, task.end))
        return (copy.name, copy.path, copy.broker_name, limit, log.queues, log.between(task.begin, task.end))


def audit_with(run: Runner, options: AuditOptions, progress: Progress = no_progress) -> AuditResult:
    """Audits like `audit`, with a runner for the tasks."""
    started_s = time.time()
    readers = _open(options)
    try:
        places = _places(readers, options)
        archive = None if options.archive is None else open_archive(options.archive, options.broker_name)
        starts: dict[int, tuple[int, int | None]] = {}
        findings = Findings(options.examples_max)
        folds = [CopyFold(place, findings) for place in places]
        ranges = plan_ranges(places, options.range_bytes)
        tasks = range_tasks(ranges, places, options.examples_max, f"{os.getpid()} {started_s}")
        total = sum(planned.end - planned.begin for planned in ranges)
        done = cursor = 0
        progress("compare", 0, total)
        for wave in run(examine_range, tasks):
            part = slice(cursor, cursor + len(wave))
            cursor = part.stop
            while again := dict(unjoined_tasks(tasks[part], ranges[part], wave, folds)):
                results = chain.from_iterable(run(examine_range, list(again.values())))
                for number, facts in zip(again, results, strict=True):
                    wave[number] = facts
            for planned, facts in zip(ranges[part], wave, strict=True):
                findings.merge(facts.findings)
                for index, copy_facts in zip(planned.members, facts.copies, strict=True):
                    folds[index].add(facts.begin, facts.end, copy_facts)
                    if archive is not None and index == 0 and not copy_facts.is_gone:
                        starts[facts.begin] = (facts.end, copy_facts.first_start)
                done += facts.end - facts.begin
            progress("compare", done, total)
        check_tails(places, findings)
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


def _open(options: AuditOptions) -> list[LogReader]:
    if not options.paths:
        raise OptionError("paths", "no store is given", "one or more store directories")
    if options.names and len(set(options.names)) != len(options.paths):
        raise OptionError("names", f"{', '.join(options.names)} for {len(options.paths)} paths", "a distinct name each")
    if options.archive is not None and ARCHIVE in options.names:
        raise OptionError("names", f"{ARCHIVE} is the archive's name", "another name")
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
    ranges: list[PlannedRange],
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
    compared_bytes = sum(planned.end - planned.begin for planned in ranges if len(planned.members) > 1)
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
            f"not all bytes before it were examined"
            for fold in folds
            if fold.begin > fold.place.begin
        ),
        int(started_s * 1000),
        time.time() - started_s,
        options.range_bytes,
    )


def _only_in(ranges: list[PlannedRange], folds: list[CopyFold]) -> tuple[Coverage, ...]:
    found: list[Coverage] = []
    for planned in ranges:
        if len(planned.members) == len(folds):
            continue
        names = tuple(folds[index].place.name for index in planned.members)
        if found and found[-1].end == planned.begin and found[-1].copies == names:
            found[-1] = Coverage(found[-1].begin, planned.end, names)
        else:
            found.append(Coverage(planned.begin, planned.end, names))
    return tuple(found)
