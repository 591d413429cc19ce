"""`erase`: removes all messages of a topic, or those with given keys, from an archive.

Copies of the topic's messages in the broker's own topics (delayed and half messages, retries, dead letters) are removed
with them. Files without such rows stay as they are; the others are written again without the rows, or deleted. For each
broker, this is one commit of the manifest, like a merge, so a kill at any moment leaves either all of these rows of a
broker in the archive or none. A Delta or Iceberg table is updated afterwards; its earlier versions have the rows until
they are deleted.

The manifest records where in the log the erased messages were, for the audit, but not their keys. The log is not
changed: its readers get the messages until retention deletes their segments.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from ha.errors import DiskFailed, OptionError
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.archive.files import FileOptions, MergeTask, Written, file_batches, write_files
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
from ha.spark.jobs.archive.match import SEARCHED, Finds, Found, Match
from ha.spark.jobs.archive.options import EXIT_INCOMPLETE, archive_path
from ha.spark.jobs.archive.passes import task_attempt
from ha.spark.jobs.archive.read import steady_state
from ha.spark.jobs.archive.table import follow, open_table
from ha.spark.jobs.tasks import run_tasks


class EraseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an erasure: the messages to erase, and where."""

    archive: str
    topic: str
    keys: tuple[str, ...] = ()
    """Erase only messages with one of these keys (a word of KEYS, or the UNIQ_KEY); none: the whole topic"""
    broker_name: str | None = None
    """Broker whose messages are erased; default: all brokers"""
    dry_run: bool = True
    """Only count the messages that would be erased"""


class ErasedTopic(msgspec.Struct, frozen=True, kw_only=True):
    """The rows erased from one topic of a broker: the given topic, or a topic with copies of its messages.

    `topic` is "" for damaged rows whose topic is unknown.
    """

    broker_name: str
    topic: str
    rows: int
    rewritten_files: int
    deleted_files: int
    not_searched: int
    """Number of rows that may have to be erased but can't be searched: damaged ones, and compressed batches"""


class EraseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The number of erased rows by topic; in a dry run, of the rows that would be erased."""

    archive: str
    dry_run: bool
    topics: tuple[ErasedTopic, ...]
    covered: dict[str, int]
    """Broker -> physical offset (bytes) up to which its log was archived; later messages were not searched"""

    @property
    def rows(self) -> int:
        """Number of erased (in a dry run: matching) rows in all topics."""
        return sum(topic.rows for topic in self.topics)

    @property
    def not_searched(self) -> int:
        """Number of rows that may have to be erased but can't be searched."""
        return sum(topic.not_searched for topic in self.topics)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0, or 3 if there are rows that can't be searched."""
        return EXIT_INCOMPLETE if self.not_searched else 0


class SearchTask(msgspec.Struct, frozen=True):
    """Task of `search_file`: search one file for matching rows."""

    archive: str
    file: ArchivedFile
    match: Match


class RewriteTask(msgspec.Struct, frozen=True):
    """Task of `rewrite_file`: write the one file of `merge` again without its matching rows."""

    merge: MergeTask
    match: Match


def search_file(task: SearchTask) -> Found:
    """Finds the matching rows of a file. Errors as in `file_batches`."""
    finds = Finds()
    for batch in file_batches(Path(task.archive), task.file.path, list(SEARCHED)):
        finds.add(task.match, task.file.topic, batch)
    return finds.found()


def rewrite_file(task: RewriteTask, attempt: int = 0) -> Written:
    """Writes the task's file again, into staging and without its matching rows. `attempt` as in `write_range`; errors
    as in `file_batches`, and OSError if the new file can't be written."""
    [source] = task.merge.sources
    batches = file_batches(Path(task.merge.archive), source.path)
    rows = (batch.filter(pa.array(~task.match.find(source.topic, batch))) for batch in batches)
    return write_files(task.merge, rows, attempt)


def _rewrite_file(task: RewriteTask) -> Written:
    return rewrite_file(task, task_attempt())


def erase(
    spark: SparkSession,
    options: EraseOptions,
    progress: Progress = no_progress,
    *,
    failpoint: Callable[[str], None] = no_failure,
) -> EraseResult:
    """Erases the messages that `options` select, or only counts them (`dry_run`). Progress is reported in files.

    Raises OptionError; ArchiveDamaged; DiskFailed; ArchiveConflict if an archiver or another erasure of a broker is
    running (with `dry_run`, only if a merge or erasure in progress does not end), or if another program changes the
    table. Brokers are processed one after another, so after an error some may already be done; run it again.
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


Hits = list[tuple[ArchivedFile, Found]]
"""(file, search result) of each file that has matching rows, or rows that can't be searched"""


class _Erasing:
    """Erases messages in one broker's part of an archive."""

    def __init__(self, spark: SparkSession, manifest: Manifest, match: Match, progress: Progress) -> None:
        self._spark = spark
        self._run_tasks = partial(run_tasks, spark)
        self._manifest = manifest
        self._match = match
        self._progress = progress

    def run(self, *, dry_run: bool) -> tuple[State, list[ErasedTopic]]:
        if dry_run:
            state = steady_state(self._manifest)
            return state, _by_topic(state, self._search(state))
        with self._manifest.locked():
            state = self._manifest.recover()
            hits = self._search(state)
            self._commit(state, hits)
        return state, _by_topic(state, hits)

    def _commit(self, state: State, hits: Hits) -> None:
        changed = [(file, found) for file, found in hits if found.rows]
        if state.scope is None:
            return
        table = open_table(self._spark, self._manifest.archive, state.scope)
        if changed:
            commit = Commit(
                sequence=state.sequence + 1,
                kind="erase",
                time_ms=time.time_ns() // 1_000_000,
                scope=state.scope,
                covered_begin=state.covered_begin or 0,
                covered_end=state.covered_end or 0,
                added=self._rewrite(state, changed),
                removed=tuple(file.path for file, _ in changed),
                erased=self._erasure(state, changed),
            )
            self._manifest.commit(commit)
            self._manifest.apply(commit)
            self._manifest.clear_staging()
            state.fold(commit)
        if table is not None:
            self._manifest.failpoint("follow")
            follow(table, self._manifest.archive, state)

    def _search(self, state: State) -> Hits:
        """Returns the files that have matching rows, or rows that can't be searched."""
        hits: Hits = []
        candidates = []
        for file in state.files.values():
            if file.topic == self._match.topic and not self._match.keys:
                hits.append((file, Found(file.rows, 0, (), file.queues)))
            elif self._match.may_be_in(file.topic):
                candidates.append(file)
        tasks = [SearchTask(str(self._manifest.archive), file, self._match) for file in candidates]
        searched = self._run_tasks(search_file, tasks, partial(self._progress, "search"))
        hits += [
            (file, found) for file, found in zip(candidates, searched, strict=True) if found.rows or found.not_searched
        ]
        return hits

    def _rewrite(self, state: State, changed: Hits) -> tuple[ArchivedFile, ...]:
        """Writes the files in `changed` again without their matching rows, and returns the new files."""
        sequence = state.sequence + 1
        run = self._manifest.stage(sequence)
        left = [(file, found) for file, found in changed if found.rows < file.rows]
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
            for number, (file, _) in enumerate(left)
        ]
        written: list[Written] = self._run_tasks(_rewrite_file, tasks, partial(self._progress, "rewrite"))
        for (file, found), each in zip(left, written, strict=True):
            assert each.rows == file.rows - found.rows, f"{file.path} has changed"
        return tuple(file for each in written for file in each.files)

    def _erasure(self, state: State, changed: Hits) -> Erasure:
        spans: dict[str, list[QueueSpan]] = {}
        places: set[int] = set()
        for file, found in changed:
            spans.setdefault(file.topic or "", []).extend(found.spans)
            places.update(found.physical_offsets)
        is_whole = not self._match.keys
        return Erasure(
            rows=sum(found.rows for _, found in changed),
            topics={self._match.topic: state.covered_end or 0} if is_whole else {},
            physical_offsets=tuple(sorted(places)),
            spans={topic: _joined(of_topic) for topic, of_topic in spans.items() if topic},
        )


def _joined(spans: list[QueueSpan]) -> tuple[QueueSpan, ...]:
    joined: dict[int, QueueSpan] = {}
    for span in spans:
        known = joined.get(span.queue_id, span)
        rows = span.rows if known is span else known.rows + span.rows
        joined[span.queue_id] = QueueSpan(span.queue_id, min(known.first, span.first), max(known.last, span.last), rows)
    return tuple(span for _, span in sorted(joined.items()))


def _by_topic(state: State, hits: Hits) -> list[ErasedTopic]:
    by_topic: dict[str, Hits] = {}
    for file, found in hits:
        by_topic.setdefault(file.topic or "", []).append((file, found))
    return [
        ErasedTopic(
            broker_name=state.broker_name,
            topic=topic,
            rows=sum(found.rows for _, found in files),
            rewritten_files=sum(0 < found.rows < file.rows for file, found in files),
            deleted_files=sum(found.rows == file.rows for file, found in files),
            not_searched=sum(found.not_searched for _, found in files),
        )
        for topic, files in sorted(by_topic.items())
    ]
