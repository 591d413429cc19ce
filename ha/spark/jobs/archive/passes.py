"""Runs `archive` over one broker's log: passes, ranges, commits, and the check that the log is still the same.

The executors write the files and the manifest commits them. Then the Delta or Iceberg table, if there is one, gets the
same files (see `table.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from ha.arrow import LogReader
from ha.arrow.plain import MILLISECONDS_MAX
from ha.errors import ArchiveDamaged, OptionError, RecordsGone, RemoteProtocolError
from ha.protocol.record import decode_record
from ha.spark.jobs import Progress
from ha.spark.jobs.archive.body_columns import body_fields, columns_of
from ha.spark.jobs.archive.compaction import plan_merges
from ha.spark.jobs.archive.files import (
    REQUIRED_COLUMNS,
    FileOptions,
    MergeTask,
    RangeTask,
    Written,
    last_record,
    merge_files,
    write_range,
)
from ha.spark.jobs.archive.manifest import BodyColumns, Commit, Hole, LastRecord, Manifest, Scope, State, brokers
from ha.spark.jobs.archive.options import ArchiveOptions, ArchiveResult, body_columns, table_name
from ha.spark.jobs.archive.progress import LagReports
from ha.spark.jobs.archive.table import ArchiveTable, follow, open_table
from ha.spark.jobs.tasks import run_tasks
from ha.spark.sink.options import COMMIT_TOPIC

logger = logging.getLogger("ha.spark")

_RANGE_BYTES_MIN = 16 << 20
_SEGMENT_BYTES_MAX = 1 << 31
_COMMITS_PER_EXPIRY = 64
"""Number of commits after which a continuous job deletes old versions of its table. Each time, it reads the file lists
of all versions.
"""

_LEFT_OUT = (COMMIT_TOPIC,)
"""Topics that an archive of all topics does not hold: the commits of sinks are useful only to readers of the log."""


class ArchiveJob:
    """Archives one broker's log in one or several passes."""

    def __init__(
        self, spark: SparkSession, options: ArchiveOptions, manifest: Manifest, reader: LogReader, progress: Progress
    ) -> None:
        self.spark = spark
        self.run = partial(run_tasks, spark)
        self.slots = max(1, spark.sparkContext.defaultParallelism)
        self.options = options
        self.manifest = manifest
        self.reader = reader
        self.progress = progress
        self.reports = LagReports(options.metrics_file)
        self.result = ArchiveResult(archive=str(manifest.archive), broker_name=reader.broker_name)
        self.state = State(broker_name=reader.broker_name)
        self._progress_begin = self._progress_end = 0
        self.scope = Scope(
            options.format,
            None if options.topics is None else tuple(sorted(options.topics)),
            (*REQUIRED_COLUMNS, *options.extra_columns),
            options.on_damage,
            _LEFT_OUT if options.topics is None else (),
            table=table_name(options),
            body_columns=body_columns(options),
        )
        self.table: ArchiveTable | None = None
        self._expired_commits = 0

    def recover(self) -> None:
        """Recovers the manifest after a killed run, checks that archive and log belong together, opens the table, and
        brings it up to date.

        Raises OptionError if the archive was created with other options, ArchiveDamaged if it is of another log; other
        errors as in `archive`.
        """
        self.state = self.manifest.recover()
        if self.state.scope is not None:
            self.scope = msgspec.structs.replace(self.scope, left_out=self.state.scope.left_out)
        if self.state.scope not in (None, self.scope):
            raise OptionError(
                "topics, format, iceberg_table, extra_columns, columns_from, schemas, on_damage",
                f"the archive was created with {_difference(self.state.scope, self.scope)}",
                "the same as before, or another archive",
            )
        self._check_other_brokers()
        self._check_same_log()
        self.table = open_table(self.spark, self.manifest.archive, self.scope)
        self._follow()

    def run_pass(self, stop: threading.Event) -> None:
        """Archives the log from the end of the archive on, then merges small files. Errors as in `archive`.

        `stop` ends the pass after the commit in progress.
        """
        self.reader.refresh()
        self._check_same_log()  # a slave's log may have been replaced, in part or as a whole, since the last pass
        self._check_queues()
        log_end = self.reader.end_offset()
        self._progress_begin, self._progress_end = self._begin(), log_end
        self.result.log_end = self.reader.queued_end()
        while not stop.is_set():
            begin, holes = self._plan_begin()
            if begin >= log_end and not holes:
                break
            ranges = self._ranges(begin, log_end)
            end = ranges[-1][1] if ranges else begin
            try:
                self.append(ranges, begin, end, holes)
            except RecordsGone as error:
                self.reader.refresh()
                if self.reader.min_offset > begin and not self.options.fail_on_data_loss:
                    continue  # plan again, with the hole
                if self.reader.min_offset > begin or self.options.every_s is None:
                    raise
                # Nothing was deleted: the broker is recovering from a crash, or a slave has less log than before.
                logger.warning("archive.log_moved_back broker=%r error=%r", self.reader.broker_name, str(error))
                break
            self.result.log_bytes += end - begin
            self.result.holes.extend(holes)
            self._report()
        self.result.covered_begin = self.state.covered_begin or 0
        self.result.covered_end = self.state.covered_end or 0
        if self.options.compact_files_min:
            self.compact(stop)
        self._expire()
        self._report()

    def _report(self) -> None:
        self.reports.report(self.reader, self.state.covered_end or 0, self.result)

    def append(self, ranges: list[tuple[int, int]], begin: int, end: int, holes: tuple[Hole, ...]) -> None:
        """Archives `ranges`, which cover physical offsets [begin, end), and commits.

        Raises RecordsGone if retention has deleted records; the archive is then unchanged.
        """
        sequence = self.state.sequence + 1
        run = self.manifest.stage(sequence)
        written: list[Written] = self.run(
            _write_range, self.tasks(ranges, run, sequence), self.range_progress(begin, end)
        )
        self._commit(
            self.commit_of(
                "append",
                end,
                added=tuple(file for each in written for file in each.files),
                holes=holes,
                damaged=sum(each.damaged for each in written),
                last=next((each.last for each in reversed(written) if each.last is not None), None),
            )
        )
        self.result.rows += sum(each.rows for each in written)
        self.result.damaged += sum(each.damaged for each in written)
        undecoded = sum((Counter(each.undecoded) for each in written), Counter[str]())
        for topic, count in sorted(undecoded.items()):
            self.result.undecoded[topic] = self.result.undecoded.get(topic, 0) + count
            logger.warning(
                "archive.bodies_not_decoded broker=%r topic=%r count=%d", self.reader.broker_name, topic, count
            )

    def compact(self, stop: threading.Event) -> None:
        """Merges small files, in one or more commits. Setting `stop` ends this after the commit in progress."""
        options = self.options
        runs = plan_merges(
            self.state.files.values(),
            target_file_bytes=options.target_file_bytes,
            files_min=options.compact_files_min,
        )
        for start in range(0, len(runs), self.slots):
            if stop.is_set():
                break
            chosen = runs[start : start + self.slots]
            sequence = self.state.sequence + 1
            run = self.manifest.stage(sequence)
            files = self.tasks([(0, 0)], run, sequence)[0].files
            tasks = [
                MergeTask(
                    archive=str(self.manifest.archive),
                    broker_name=self.reader.broker_name,
                    run=run,
                    sequence=sequence,
                    number=number,
                    sources=sources,
                    # A run may exceed the target by its last file, and must still become one file.
                    files=msgspec.structs.replace(files, target_file_bytes=2 * files.target_file_bytes),
                )
                for number, sources in enumerate(chosen)
            ]
            written: list[Written] = self.run(_merge_files, tasks, lambda done, total: None)
            merged = tuple(file.path for sources in chosen for file in sources)
            assert self.state.covered_end is not None
            added = tuple(file for each in written for file in each.files)
            self._commit(self.commit_of("compact", self.state.covered_end, added=added, removed=merged))
            self.result.merged_files += len(merged)
            self.progress("compact", start + len(chosen), len(runs))

    def _commit(self, commit: Commit) -> None:
        self.manifest.commit(commit)
        self.manifest.apply(commit)
        self.manifest.clear_staging()
        self.state.fold(commit)
        self._follow()
        self.result.commits += 1
        self.result.files += len(commit.added)
        self.result.file_bytes += sum(file.bytes for file in commit.added)

    def _follow(self) -> None:
        """Brings the table up to date with the manifest."""
        if self.table is not None and self.state.sequence:
            self.manifest.failpoint("follow")
            follow(self.table, self.manifest.archive, self.state)

    def _expire(self) -> None:
        """Deletes old versions of the table if this is due: at the end of a job that runs once, or
        _COMMITS_PER_EXPIRY commits after the last time in a continuous job."""
        is_due = self.options.every_s is None or self.result.commits - self._expired_commits >= _COMMITS_PER_EXPIRY
        if self.table is not None and is_due:
            self._expired_commits = self.result.commits
            self.table.expire()

    def tasks(self, ranges: list[tuple[int, int]], run: str, sequence: int) -> list[RangeTask]:
        """Returns the executors' tasks for `ranges`."""
        options = self.options
        files = FileOptions(
            target_file_bytes=options.target_file_bytes,
            row_group_bytes=options.row_group_bytes,
            buffer_bytes=options.buffer_bytes,
            compression_level=options.compression_level,
        )
        return [
            RangeTask(
                archive=str(self.manifest.archive),
                path=str(Path(options.path).absolute()),
                broker_name=self.reader.broker_name,
                begin=begin,
                end=end,
                run=run,
                sequence=sequence,
                number=number,
                topics=self.scope.topics,
                left_out=self.scope.left_out,
                columns=self.scope.columns,
                body_columns=self.scope.body_columns,
                on_damage=options.on_damage,
                files=files,
            )
            for number, (begin, end) in enumerate(ranges)
        ]

    def range_progress(self, begin: int, end: int) -> Callable[[int, int], None]:
        """Returns a progress callback that converts finished tasks of [begin, end) to bytes of this pass."""
        before, total = begin - self._progress_begin, self._progress_end - self._progress_begin

        def show(done: int, tasks: int) -> None:
            self.progress("archive", before + (end - begin) * done // max(1, tasks), total)

        return show

    def commit_of(self, kind: Literal["append", "compact"], covered_end: int, **fields: Any) -> Commit:
        """Returns the commit that follows the current state; `fields` are its other fields."""
        begin = self.state.covered_begin
        return Commit(
            sequence=self.state.sequence + 1,
            kind=kind,
            time_ms=time.time_ns() // 1_000_000,
            scope=self.scope,
            covered_begin=self.reader.min_offset if begin is None else begin,
            covered_end=covered_end,
            **fields,
        )

    def _begin(self) -> int:
        covered = self.state.covered_end
        return self.reader.min_offset if covered is None else covered

    def _plan_begin(self) -> tuple[int, tuple[Hole, ...]]:
        """Returns the physical offset to resume from, and the hole before it if retention deleted unarchived records.

        Raises RecordsGone instead of a hole, unless `fail_on_data_loss` is off.
        """
        begin, first = self._begin(), self.reader.min_offset
        if begin >= first:
            return begin, ()
        reason = "deleted before it was archived"
        if self.options.fail_on_data_loss:
            what = f"the log of {self.reader.broker_name}"
            raise RecordsGone(what, begin, first, f"physical offsets {reason}; fail_on_data_loss=False continues")
        return first, (Hole(begin, first, reason),)

    def _ranges(self, begin: int, log_end: int) -> list[tuple[int, int]]:
        each = min(self.options.range_bytes, max(_RANGE_BYTES_MIN, -(-(log_end - begin) // self.slots)))
        return self.reader.split(begin, min(log_end, begin + self.slots * each), each) if begin < log_end else []

    def _check_other_brokers(self) -> None:
        """Raises OptionError if the columns of this broker and of the others in the archive don't fit into one table,
        or if their schemas of a topic can't be combined (see `columns_of`)."""
        if self.state.scope is None and self.scope.body_columns is not None:
            archive = self.manifest.archive
            scopes = [Manifest(archive, name).state().scope for name in brokers(archive)] + [self.scope]
            found = [scope.body_columns for scope in scopes if scope is not None and scope.body_columns is not None]
            body_fields(found)
            for topic in self.scope.body_columns.schemas:
                columns_of(found, topic)

    def _check_same_log(self) -> None:
        last, begin, end = self.state.last, self.reader.min_offset, self.reader.queued_end()
        if last is None or last.physical_offset < begin:
            return
        if last.physical_offset + last.store_size > end:  # a slave that is behind, or another log
            last = self._archived_within(begin, end)
        if last is None:
            logger.warning(
                "archive.log_not_compared broker=%r log_begin=%d log_end=%d covered_end=%d",
                self.reader.broker_name,
                begin,
                end,
                self._begin(),
            )
        elif self._record_at(last.physical_offset) != last:
            raise ArchiveDamaged(
                self.manifest.archive,
                f"{self.options.path} is not the log that was archived as {self.reader.broker_name} before: its record "
                f"at physical offset {last.physical_offset} differs; give another broker_name or archive",
            )

    def _archived_within(self, begin: int, end: int) -> LastRecord | None:
        """Returns the last undamaged record in physical offsets [begin, end) of the last file that begins before `end`.

        None if that file has none, or there is no such file. Raises ArchiveDamaged if the file can't be read.
        """
        files = [file for file in self.state.files.values() if file.physical_begin < end]
        if not files:
            return None
        path = max(files, key=lambda file: file.physical_begin).path
        try:
            return last_record(self.manifest.archive / path, begin, end)
        except (OSError, pa.ArrowException) as error:
            raise ArchiveDamaged(self.manifest.archive, f"{path}: {error}") from None

    def _check_queues(self) -> None:
        """Checks that all messages of the log can be archived, so that the archive is complete.

        Raises OptionError for topics with batch queues, StoreUnreadable for a log without queues.
        """
        self.reader.check_has_queues()
        found = {queue.topic for queue in self.reader.batch_queues(self.scope.topics)} - set(self.scope.left_out)
        if found:
            reason = f"an archive can't hold batch queues, which {', '.join(sorted(found))} has"
            raise OptionError("topics", reason, "other topics")

    def _record_at(self, physical_offset: int) -> LastRecord | None:
        """Returns the record at a physical offset, or None if there is no valid one.

        It is read from the commitlog, because the queues may be incomplete after a crash of the broker.
        """
        raw = next(self.reader.bytes_at(physical_offset, physical_offset + _SEGMENT_BYTES_MAX), None)
        try:
            record = None if raw is None else decode_record(raw, verify_crc=False)
        except RemoteProtocolError:
            record = None
        if record is None:
            return None
        stored_us = record.store_timestamp_ms * 1000
        return LastRecord(
            record.physical_offset,
            record.total_size,
            record.body_crc,
            stored_us if abs(record.store_timestamp_ms) <= MILLISECONDS_MAX else None,
        )


def _difference(before: Scope, now: Scope) -> str:
    names = [name for name in Scope.__struct_fields__ if getattr(before, name) != getattr(now, name)]
    found = [
        f"{name} {_shown(getattr(before, name))}, not {_shown(getattr(now, name))}"
        for name in names
        if name != "body_columns"
    ]
    if before.body_columns != now.body_columns:
        found.append(_schema_difference(before.body_columns, now.body_columns))
    return "; ".join(found)


def _schema_difference(before: BodyColumns | None, now: BodyColumns | None) -> str:
    """Returns a description with the names of the topics only, because schemas may have thousands of characters."""
    if before is None or now is None or before.format != now.format:
        formats = [_shown(None if columns is None else columns.format) for columns in (before, now)]
        return f"columns_from {formats[0]}, not {formats[1]}"
    topics = sorted(before.schemas.keys() | now.schemas.keys())
    changed = [topic for topic in topics if before.schemas.get(topic) != now.schemas.get(topic)]
    return f"other schemas of {', '.join(changed)}"


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _write_range(task: RangeTask) -> Written:
    return write_range(task, task_attempt())


def _merge_files(task: MergeTask) -> Written:
    return merge_files(task, task_attempt())


def task_attempt() -> int:
    """Returns a number that no other attempt at a task of this application has; 0 outside of Spark."""
    context = TaskContext.get()
    return context.taskAttemptId() if context is not None else 0
