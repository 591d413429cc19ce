"""`erase`: removes messages of a topic from a Parquet archive: all of them, or those with given keys.

Copies of the topic's messages in the broker's own topics (delayed and half messages, retries, dead
letters) are removed with them. Files without such rows stay as they are; the others are written again without the rows,
or deleted. That is one commit of the manifest, like a merge, so a kill at any moment leaves the archive with all of the
rows or with none.

The manifest records the physical offsets of what was erased, for the audit, and no keys. The log is not changed: it has
the messages until retention deletes their segments, and so have its readers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from ha.arrow.properties import PropertyTable
from ha.errors import ArchiveConflict, DiskFailed, OptionError
from ha.protocol.codes import SysFlag
from ha.protocol.properties import REAL_TOPIC, RETRY_TOPIC
from ha.protocol.topic_names import INTERNAL_TOPICS, is_system_topic
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.archive.files import RAW_PROPERTIES, FileOptions, MergeTask, Written, row_batches, write_files
from ha.spark.jobs.archive.manifest import (
    ArchivedFile,
    Commit,
    Erasure,
    Manifest,
    QueueSpan,
    State,
    brokers,
    no_failure,
)
from ha.spark.jobs.archive.options import archive_path
from ha.spark.jobs.archive.parquet import task_attempt
from ha.spark.jobs.archive.read import steady_state
from ha.spark.jobs.tasks import run_tasks

_SEARCHED = ("physicalOffset", "queueId", "queueOffset", "propertiesString", "sysFlag", RAW_PROPERTIES)


class EraseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to erase."""

    archive: str
    """A Parquet archive"""
    topic: str
    keys: tuple[str, ...] = ()
    """Only messages with one of these keys (a word of KEYS, or the UNIQ_KEY); none: the whole topic"""
    broker_name: str | None = None
    """Default: the messages of all brokers"""
    dry_run: bool = True
    """Count only"""


class ErasedTopic(msgspec.Struct, frozen=True, kw_only=True):
    """The erased rows of one topic of a broker, which is the given one, or has copies of its messages."""

    broker_name: str
    topic: str
    rows: int
    rewritten_files: int
    deleted_files: int
    not_searched: int
    """Rows that may have a key but can't be searched: damaged ones, and compressed batches"""


class EraseResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased, or in a dry run would be."""

    archive: str
    dry_run: bool
    topics: tuple[ErasedTopic, ...]
    covered: dict[str, int]
    """Broker -> physical offset in bytes up to which its log was archived, and searched here"""

    @property
    def rows(self) -> int:
        """Rows in all topics."""
        return sum(topic.rows for topic in self.topics)

    @property
    def not_searched(self) -> int:
        """Rows that may have a key but can't be searched."""
        return sum(topic.not_searched for topic in self.topics)

    @property
    def exit_code(self) -> int:
        """0, or 3 if there are rows that can't be searched."""
        return 3 if self.not_searched else 0


class Match(msgspec.Struct, frozen=True):
    """Which rows: those of `topic`, and copies of them, with one of `keys` (none: all)."""

    topic: str
    keys: tuple[str, ...]

    def may_be_in(self, topic: str | None) -> bool:
        """Return whether files of `topic` may have such rows."""
        return topic is None or topic == self.topic or topic in INTERNAL_TOPICS or is_system_topic(topic)

    def find(self, topic: str | None, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Return which rows of a file of `topic` match; `rows` have the columns `_SEARCHED`."""
        strings = pc.coalesce(rows[RAW_PROPERTIES], rows["propertiesString"].cast(pa.binary()))
        table = PropertyTable(pc.fill_null(strings, b""))
        found = np.ones(rows.num_rows, np.bool_)
        if topic != self.topic:
            found = _is_in(table.find(REAL_TOPIC.encode()), (self.topic,))
            found |= _is_in(table.find(RETRY_TOPIC.encode()), (self.topic,))
        if self.keys:
            has_key = _is_in(table.find(b"UNIQ_KEY"), self.keys)
            words = table.keys()
            hits = np.flatnonzero(_is_in(words.flatten(), self.keys))
            has_key[pc.list_parent_indices(words).to_numpy(zero_copy_only=False)[hits]] = True
            found &= has_key
        return found


def _is_in(values: pa.Array, wanted: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.is_in(values, pa.array(wanted, pa.string())).to_numpy(zero_copy_only=False)
    return found.copy()


class SearchTask(msgspec.Struct, frozen=True):
    """Search one file."""

    archive: str
    file: ArchivedFile
    match: Match


class Found(msgspec.Struct, frozen=True):
    """The matching rows of one file."""

    rows: int
    not_searched: int
    physical_offsets: tuple[int, ...]
    spans: tuple[QueueSpan, ...]


class RewriteTask(msgspec.Struct, frozen=True):
    """Write the file of `merge` again without its matching rows."""

    merge: MergeTask
    match: Match


def search_file(task: SearchTask) -> Found:
    """Find the matching rows of a file."""
    places: list[int] = []
    spans: dict[int, tuple[int, int, int]] = {}
    not_searched = 0
    with pq.ParquetFile(Path(task.archive, task.file.path)) as parquet:
        for batch in row_batches(parquet, range(parquet.num_row_groups), list(_SEARCHED)):
            if task.match.keys and task.file.topic in (task.match.topic, None):
                not_searched += _hidden_count(batch)
            chosen = batch.filter(pa.array(task.match.find(task.file.topic, batch)))
            places += chosen["physicalOffset"].to_pylist()
            for queue_id, offset in zip(chosen["queueId"].to_pylist(), chosen["queueOffset"].to_pylist(), strict=True):
                if queue_id is not None and offset is not None:
                    low, high, count = spans.get(queue_id, (offset, offset, 0))
                    spans[queue_id] = min(low, offset), max(high, offset), count + 1
    found = tuple(QueueSpan(queue_id, *span) for queue_id, span in sorted(spans.items()))
    return Found(len(places), not_searched, tuple(places), found)


def _hidden_count(rows: pa.RecordBatch) -> int:
    """Return the number of rows whose keys are unknown."""
    batches = pc.bit_wise_and(pc.fill_null(rows["sysFlag"], 0), pa.scalar(SysFlag.INNER_BATCH, pa.int32()))
    compressed = pc.bit_wise_and(pc.fill_null(rows["sysFlag"], 0), pa.scalar(SysFlag.COMPRESSED, pa.int32()))
    hidden = pc.and_(pc.not_equal(batches, 0), pc.not_equal(compressed, 0))
    return int(pc.sum(pc.or_(hidden, rows["propertiesString"].is_null())).as_py() or 0)


def rewrite_file(task: RewriteTask, attempt: int = 0) -> Written:
    """Write a file again into staging without its matching rows."""
    [source] = task.merge.sources

    def rows() -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(Path(task.merge.archive, source.path)) as parquet:
            for batch in row_batches(parquet, range(parquet.num_row_groups)):
                yield batch.filter(pa.array(~task.match.find(source.topic, batch)))

    return write_files(task.merge, rows(), attempt)


def _rewrite_file(task: RewriteTask) -> Written:
    return rewrite_file(task, task_attempt())


def erase(
    spark: SparkSession,
    options: EraseOptions,
    progress: Progress = no_progress,
    *,
    failpoint: Callable[[str], None] = no_failure,
) -> EraseResult:
    """Erase what `options` select, or count it. Progress in files.

    Raises OptionError, ArchiveDamaged, ArchiveConflict (an archiver is running; with `dry_run` it may), DiskFailed.
    """
    target = archive_path(options.archive)
    names = _broker_names(target, options)
    match = Match(options.topic, tuple(sorted(set(options.keys))))
    topics: list[ErasedTopic] = []
    covered = {}
    try:
        for name in names:
            job = _Erasing(spark, Manifest(target, name, failpoint=failpoint), match, progress)
            state, found = job.run(dry_run=options.dry_run)
            topics += found
            covered[name] = state.covered_end or 0
    except OSError as error:
        raise DiskFailed(Path(error.filename or target), "erasing", error.strerror or str(error)) from None
    return EraseResult(archive=str(target), dry_run=options.dry_run, topics=tuple(topics), covered=covered)


def _broker_names(target: Path, options: EraseOptions) -> list[str]:
    names = brokers(target)
    if not names:
        raise OptionError("archive", f"{target} holds no archive", "a directory that `archive` has written")
    if options.broker_name is not None and options.broker_name not in names:
        raise OptionError("broker_name", f"the archive has no broker {options.broker_name!r}", ", ".join(names))
    if any(not key or " " in key for key in options.keys):
        raise OptionError("keys", "a key is empty or has a space, which separates keys", "one key each")
    return names if options.broker_name is None else [options.broker_name]


class _Erasing:
    """One broker's part of an archive."""

    def __init__(self, spark: SparkSession, manifest: Manifest, match: Match, progress: Progress) -> None:
        self._run_tasks = partial(run_tasks, spark)
        self._manifest = manifest
        self._match = match
        self._progress = progress

    def run(self, *, dry_run: bool) -> tuple[State, list[ErasedTopic]]:
        if dry_run:
            state = self._checked(steady_state(self._manifest))
            return state, _by_topic(state, self._search(state))
        try:
            with self._manifest.locked():
                state = self._checked(self._manifest.recover())
                found = self._search(state)
                if found:
                    self._commit(state, found)
        except ArchiveConflict as error:
            reason = f"{error.reason}; stop it, erase, and start it again"
            raise ArchiveConflict(self._manifest.archive, reason) from None
        return state, _by_topic(state, found)

    def _checked(self, state: State) -> State:
        if state.scope is not None and state.scope.format != "parquet":
            reason = f"{self._manifest.archive} is in the format {state.scope.format}"
            raise OptionError("archive", reason, "a Parquet archive; for a Delta table, its own DELETE and VACUUM")
        return state

    def _search(self, state: State) -> dict[str, Found]:
        """Return the files that have matching rows, or rows that can't be searched."""
        found = {}
        candidates = []
        for file in state.files.values():
            if file.topic == self._match.topic and not self._match.keys:
                found[file.path] = Found(file.rows, 0, (), file.queues)
            elif self._match.may_be_in(file.topic):
                candidates.append(file)
        tasks = [SearchTask(str(self._manifest.archive), file, self._match) for file in candidates]
        searched = self._run_tasks(search_file, tasks, partial(self._progress, "search"))
        for file, each in zip(candidates, searched, strict=True):
            if each.rows or each.not_searched:
                found[file.path] = each
        return found

    def _commit(self, state: State, found: dict[str, Found]) -> None:
        changed = [state.files[path] for path, each in found.items() if each.rows]
        if not changed:
            return
        sequence = state.sequence + 1
        run = f"{sequence:08d}-{time.time_ns():x}"
        self._manifest.stage(run)
        left = [file for file in changed if found[file.path].rows < file.rows]
        tasks = [
            RewriteTask(
                MergeTask(
                    archive=str(self._manifest.archive),
                    broker_name=state.broker_name,
                    run=run,
                    sequence=sequence,
                    number=number,
                    sources=(file,),
                    files=FileOptions(target_file_bytes=1 << 62),
                ),
                self._match,
            )
            for number, file in enumerate(left)
        ]
        written: list[Written] = self._run_tasks(_rewrite_file, tasks, partial(self._progress, "rewrite"))
        for file, each in zip(left, written, strict=True):
            assert each.rows == file.rows - found[file.path].rows, f"{file.path} has changed"
        assert state.scope is not None
        commit = Commit(
            sequence=sequence,
            kind="erase",
            time_ms=time.time_ns() // 1_000_000,
            scope=state.scope,
            covered_begin=state.covered_begin or 0,
            covered_end=state.covered_end or 0,
            added=tuple(file for each in written for file in each.files),
            removed=tuple(file.path for file in changed),
            erased=self._erasure(state, changed, found),
        )
        self._manifest.commit(commit)
        self._manifest.apply(commit)
        self._manifest.clear_staging()

    def _erasure(self, state: State, changed: list[ArchivedFile], found: dict[str, Found]) -> Erasure:
        spans: dict[str, list[QueueSpan]] = {}
        places: list[int] = []
        for file in changed:
            spans.setdefault(file.topic or "", []).extend(found[file.path].spans)
            places += found[file.path].physical_offsets
        is_whole = not self._match.keys
        return Erasure(
            rows=sum(found[file.path].rows for file in changed),
            topics={self._match.topic: state.covered_end or 0} if is_whole else {},
            physical_offsets=tuple(sorted(set(places))),
            spans={topic: _joined(of_topic) for topic, of_topic in spans.items() if topic},
        )


def _joined(spans: list[QueueSpan]) -> tuple[QueueSpan, ...]:
    joined: dict[int, QueueSpan] = {}
    for span in spans:
        known = joined.get(span.queue_id, span)
        rows = span.rows if known is span else known.rows + span.rows
        joined[span.queue_id] = QueueSpan(span.queue_id, min(known.first, span.first), max(known.last, span.last), rows)
    return tuple(span for _, span in sorted(joined.items()))


def _by_topic(state: State, found: dict[str, Found]) -> list[ErasedTopic]:
    by_topic: dict[str, list[tuple[ArchivedFile, Found]]] = {}
    for path, each in found.items():
        by_topic.setdefault(state.files[path].topic or "", []).append((state.files[path], each))
    return [
        ErasedTopic(
            broker_name=state.broker_name,
            topic=topic,
            rows=sum(each.rows for _, each in files),
            rewritten_files=sum(0 < each.rows < file.rows for file, each in files),
            deleted_files=sum(each.rows == file.rows for file, each in files),
            not_searched=sum(each.not_searched for _, each in files),
        )
        for topic, files in sorted(by_topic.items())
    ]
