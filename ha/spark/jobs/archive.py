"""`archive`: the log as Parquet or Delta, partitioned by topic and day, each record once.

The driver plans ranges of the commitlog from where the archive ends to where the log's confirmed part ends; executors
read them with `ha.arrow` and (Parquet) write the files themselves; the driver commits. What was committed is never
read again, what was not is read anew: killed at any moment and run again, the archive has every record once (see
archive_manifest).

Store and archive must be at the same path on the driver and on every executor: one machine, or a shared file system
that knows flock, link and rename. Several brokers may be archived into one place, at the same time too.

Bodies are kept as stored, compressed ones with their sysFlag. Damaged records become rows with crcOk=false and what
could be told of them; those that tell no topic or time stand in the partition `__HIVE_DEFAULT_PARTITION__` (null).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from pyspark import TaskContext
from pyspark.sql import SparkSession

from ha.arrow import COLUMNS, LogReader, ReadOptions
from ha.errors import ArchiveDamaged, DiskFailed, OptionError, RecordsGone
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.archive_compaction import plan_merges
from ha.spark.jobs.archive_files import (
    EXTRA_COLUMNS,
    REQUIRED_COLUMNS,
    FileOptions,
    MergeTask,
    RangeTask,
    Written,
    merge_files,
    write_range,
)
from ha.spark.jobs.archive_manifest import Commit, Hole, LastRecord, Manifest, Scope, State, no_failure
from ha.spark.jobs.tasks import run_tasks

_RANGE_BYTES_MIN = 16 << 20
EXIT_INCOMPLETE = 3


class ArchiveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to archive and how. Sizes in bytes."""

    path: str
    """The store directory"""
    archive: str
    """The archive: a local path or file://"""
    broker_name: str | None = None
    """Default: the store directory's name"""
    format: Literal["parquet", "delta"] = "parquet"
    topics: tuple[str, ...] | None = None
    """Only these; None: all, the broker's own (RMQ_SYS_…, SCHEDULE_TOPIC_XXXX) included"""
    extra_columns: tuple[str, ...] = EXTRA_COLUMNS
    """Beside those needed to restore a message"""
    target_file_bytes: int = 256 << 20
    """As compressed"""
    range_bytes: int = 1 << 30
    """Of the log, for one task, at most"""
    row_group_bytes: int = 64 << 20
    buffer_bytes: int = 192 << 20
    """Rows held by one task before they are written"""
    compression_level: int = 3
    """zstd's"""
    compact_files_min: int = 4
    """Neighbouring small files that are worth a merge; 0: never merge"""
    on_damage: Literal["report", "skip", "fail"] = "report"
    fail_on_data_loss: bool = True
    """Records deleted before they were archived: RecordsGone, or go on and note the hole in the manifest"""
    every_s: float | None = None
    """Look for new records so often, until stopped; None: once"""


class ArchiveResult(msgspec.Struct, kw_only=True):
    """What one run did, and how the broker's part of the archive stands."""

    archive: str
    broker_name: str
    rows: int = 0
    """Archived by this run"""
    log_bytes: int = 0
    """Of the log, gone through by this run"""
    files: int = 0
    file_bytes: int = 0
    commits: int = 0
    damaged: int = 0
    holes: list[Hole] = []
    merged_files: int = 0
    """Small files replaced by larger ones"""
    covered_begin: int = 0
    covered_end: int = 0
    log_end: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0, or 3 if this run met damaged records or holes."""
        return EXIT_INCOMPLETE if self.damaged or self.holes else 0


def archive(
    spark: SparkSession,
    options: ArchiveOptions,
    progress: Progress = no_progress,
    *,
    stop: threading.Event | None = None,
    failpoint: Callable[[str], None] = no_failure,
) -> ArchiveResult:
    """Bring the archive up to the log's end, once or every `options.every_s` seconds until `stop` is set.

    Progress in bytes of the log ("archive") and files ("compact"). Raises OptionError, StoreUnreadable, CorruptLog,
    ArchiveConflict (another archiver of this broker), ArchiveDamaged (also: not the log that was archived before),
    RecordsGone, DiskFailed. After any error, and after a kill, run it again.
    """
    target = archive_path(options.archive)
    _check(options)
    stop = stop or threading.Event()
    started = time.monotonic()
    try:
        with LogReader(options.path, broker_name=options.broker_name) as reader:
            manifest = Manifest(target, reader.broker_name, failpoint=failpoint)
            with manifest.locked():
                job = _job_class(options)(spark, options, manifest, reader, progress)
                job.recover()
                while True:
                    job.run_pass(stop)
                    if options.every_s is None or stop.wait(options.every_s):
                        break
    except OSError as error:
        raise DiskFailed(Path(error.filename or target), "archiving", error.strerror or str(error)) from None
    job.result.seconds = time.monotonic() - started
    return job.result


def archive_path(archive: str) -> Path:
    """The directory named by the option `archive`. OptionError for another file system."""
    if archive.startswith("file:"):
        archive = archive.removeprefix("file:")
        archive = "/" + archive.lstrip("/")
    if "://" in archive or not archive:
        raise OptionError("archive", f"{archive!r} is on no file system that archive can write", "a path, file://…")
    return Path(archive).absolute()


class ArchiveJob:
    """One run over one broker's log; what Parquet and Delta have in common."""

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
        self.result = ArchiveResult(archive=str(manifest.archive), broker_name=reader.broker_name)
        self.state = State(broker_name=reader.broker_name)
        self._progress_begin = self._progress_end = 0
        self.scope = Scope(
            options.format,
            None if options.topics is None else tuple(sorted(options.topics)),
            (*REQUIRED_COLUMNS, *options.extra_columns),
            options.on_damage,
        )

    def recover(self) -> None:
        """Finish what a killed run left, and see that this archive and this log belong together."""
        self.state = self.manifest.recover()
        if self.state.scope not in (None, self.scope):
            raise OptionError(
                "topics, format, extra_columns, on_damage",
                f"the archive was begun with {_shown(self.state.scope)}, now asked is {_shown(self.scope)}",
                "the same as before, or another archive",
            )
        self._check_same_log()  # before anything of a killed run is redone from it

    def run_pass(self, stop: threading.Event) -> None:
        """Archive what the log has beyond the archive, then merge small files."""
        self.reader.refresh()
        self._check_same_log()  # a slave may have been given another tail, or another log, since the last pass
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
            except RecordsGone:
                self.reader.refresh()
                if self.options.fail_on_data_loss or self.reader.min_offset <= begin:
                    raise
                continue  # plan again, with the hole
            self.result.log_bytes += end - begin
            self.result.holes.extend(holes)
        self.result.covered_begin = self.state.covered_begin or 0
        self.result.covered_end = self.state.covered_end or 0
        if self.options.compact_files_min and not stop.is_set():
            self.compact()

    def append(self, ranges: list[tuple[int, int]], begin: int, end: int, holes: tuple[Hole, ...]) -> None:
        """Archive [begin, end), which is `ranges` put together, and commit. RecordsGone with nothing changed."""
        raise NotImplementedError

    def compact(self) -> None:
        """Merge small files."""
        raise NotImplementedError

    def tasks(self, ranges: list[tuple[int, int]], run: str, sequence: int) -> list[RangeTask]:
        """What the executors are to do for `ranges`."""
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
                columns=self.scope.columns,
                on_damage=options.on_damage,
                files=files,
            )
            for number, (begin, end) in enumerate(ranges)
        ]

    def range_progress(self, begin: int, end: int) -> Callable[[int, int], None]:
        """Turns tasks done of [begin, end) into bytes done of this pass."""
        before, total = begin - self._progress_begin, self._progress_end - self._progress_begin

        def show(done: int, tasks: int) -> None:
            self.progress("archive", before + (end - begin) * done // max(1, tasks), total)

        return show

    def commit_of(self, kind: Literal["append", "compact", "void"], covered_end: int, **fields: Any) -> Commit:
        """The next commit."""
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
        """Where to go on, and what is missing before that."""
        begin, first = self._begin(), self.reader.min_offset
        if begin >= first:
            return begin, ()
        reason = "deleted before it was archived"
        if self.options.fail_on_data_loss:
            what = f"the log of {self.reader.broker_name}"
            raise RecordsGone(what, begin, first, f"physical offsets {reason}; fail_on_data_loss=False goes on")
        return first, (Hole(begin, first, reason),)

    def _ranges(self, begin: int, log_end: int) -> list[tuple[int, int]]:
        each = min(self.options.range_bytes, max(_RANGE_BYTES_MIN, -(-(log_end - begin) // self.slots)))
        return self.reader.split(begin, min(log_end, begin + self.slots * each), each) if begin < log_end else []

    def _check_same_log(self) -> None:
        last = self.state.last
        if last is None or last.physical_offset < self.reader.min_offset:
            return
        if last.physical_offset + last.store_size > self.reader.queued_end():
            return  # a slave that is behind; there is nothing to do until it has caught up
        if self._record_at(last.physical_offset) != last:
            raise ArchiveDamaged(
                self.manifest.archive,
                f"{self.options.path} is not the log that was archived as {self.reader.broker_name} before: its record "
                f"at physical offset {last.physical_offset} is another one; give another broker_name or archive",
            )

    def _record_at(self, physical_offset: int) -> LastRecord | None:
        columns = ("physicalOffset", "storeSize", "bodyCRC", "storeTimestamp")
        options = ReadOptions(columns=columns, decompress=False)
        for batch in self.reader.read_range(physical_offset, physical_offset + 1, options):
            for row in batch.to_pylist():
                time_us = row["storeTimestamp"]
                if time_us is not None:
                    time_us = batch["storeTimestamp"].cast("int64")[0].as_py()
                return LastRecord(row["physicalOffset"], row["storeSize"], row["bodyCRC"], time_us)
        return None


class ParquetJob(ArchiveJob):
    """Files by the executors, commits by the manifest."""

    def append(self, ranges: list[tuple[int, int]], begin: int, end: int, holes: tuple[Hole, ...]) -> None:
        """See ArchiveJob."""
        sequence = self.state.sequence + 1
        run = f"{sequence:08d}-{time.time_ns():x}"
        self.manifest.stage(run)
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

    def compact(self) -> None:
        """See ArchiveJob."""
        options = self.options
        runs = plan_merges(
            self.state.files.values(),
            target_file_bytes=options.target_file_bytes,
            files_min=options.compact_files_min,
        )
        for start in range(0, len(runs), self.slots):
            chosen = runs[start : start + self.slots]
            sequence = self.state.sequence + 1
            run = f"{sequence:08d}-{time.time_ns():x}"
            self.manifest.stage(run)
            files = self.tasks([(0, 0)], run, sequence)[0].files
            tasks = [
                MergeTask(
                    archive=str(self.manifest.archive),
                    broker_name=self.reader.broker_name,
                    run=run,
                    sequence=sequence,
                    number=number,
                    sources=sources,
                    # A run may exceed the target by its last file: still one file.
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
        self.result.commits += 1
        self.result.files += len(commit.added)
        self.result.file_bytes += sum(file.bytes for file in commit.added)


def _write_range(task: RangeTask) -> Written:
    return write_range(task, _attempt())


def _merge_files(task: MergeTask) -> Written:
    return merge_files(task, _attempt())


def _attempt() -> int:
    context = TaskContext.get()
    return context.taskAttemptId() if context is not None else 0


def _job_class(options: ArchiveOptions) -> type[ArchiveJob]:
    if options.format == "delta":
        from ha.spark.jobs.delta import DeltaJob  # its module imports this one

        return DeltaJob
    return ParquetJob


def _check(options: ArchiveOptions) -> None:
    for name in ("target_file_bytes", "range_bytes", "row_group_bytes", "buffer_bytes"):
        if getattr(options, name) < 1:
            raise OptionError(name, f"{getattr(options, name)} bytes", "1 or more")
    if not -7 <= options.compression_level <= 22:
        raise OptionError("compression_level", f"zstd has no level {options.compression_level}", "-7 … 22")
    if options.every_s is not None and options.every_s <= 0:
        raise OptionError("every_s", f"{options.every_s} s", "more than 0, or None for once")
    if options.compact_files_min < 0:
        raise OptionError("compact_files_min", f"{options.compact_files_min} files", "0 (never merge) or 2 and more")
    for column in options.extra_columns:
        if column not in COLUMNS or column == "topic" or column in REQUIRED_COLUMNS:
            others = [name for name in COLUMNS if name != "topic" and name not in REQUIRED_COLUMNS]
            raise OptionError("extra_columns", f"{column!r} is none or always there", ", ".join(others))


def _shown(scope: Scope | None) -> str:
    return msgspec.json.encode(scope).decode()
