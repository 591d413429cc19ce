"""Rebuilds consume-queue and index files from a commitlog alone, in parallel, byte for byte as a broker builds them.

    pass 1   a task per range of the log: writes entries to their places in the queues' files, keys to a work file
    queues   a task per group of queues: writes blank entries before the first one, syncs; queues that are not dense are
             built in order
    index    a task per index file, cut from the work files

Only summaries return to the driver: (ranges × queues in them) × about 40 bytes. A call with the same options after a
stop or kill resumes after the finished ranges; after a reboot it begins again. The files equal those of a broker except
for the index files' names (see `plan_index_files`), and for entries of records that retention has deleted from the log:
a broker may still have them, but they can't be rebuilt, and their messages can't be read.

Messages of topics that halog deleted stay out of the queues (`deletedTopics` in config/topics.json). RocketMQ keeps no
such record, so deleted topics come back, as when RocketMQ itself rebuilds its queues. If a topic was deleted and
created again, its later messages have the queue offsets of earlier ones; they are dropped, and counted
(`dropped_count`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from ha.arrow.deleted import deleted_topics
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.reindex.index import IndexFilePlan, build_index_file, plan_index_files
from ha.spark.jobs.reindex.plan import (
    FOLDERS,
    SET_ASIDE,
    WORK,
    Plan,
    ReindexOptions,
    begin_target,
    check_set_aside,
    make_plan,
    store_lock,
    swap_in,
    target_of,
)
from ha.spark.jobs.reindex.queues import QueuePart, clear_queue, complete_queue, join_parts, sync_files
from ha.spark.jobs.reindex.scan import (
    OrderedResult,
    RangeSummary,
    ScanTask,
    build_in_order,
    keys_path,
    scan_range,
)
from ha.spark.jobs.synced import replace_file
from ha.spark.jobs.tasks import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ReindexOptions", "ReindexResult", "reindex"]

Item = TypeVar("Item")
Made = TypeVar("Made")

_QUEUES_PER_TASK = 256


class RunTasks(Protocol):
    """Runs `function` on every item, in any order, and returns the results in the order of the items."""

    def __call__(
        self, function: Callable[[Item], Made], items: Sequence[Item], progress: Callable[[int, int], None]
    ) -> list[Made]:
        """Runs `function` on `items`; `progress` is called with the number of finished items and the total."""


class ReindexResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rebuild. `begin_offset` and `end_offset` are physical offsets (bytes)."""

    target: str
    """Directory that holds the new `consumequeue` and `index`"""
    set_aside: str | None
    """With `in_place`: directory for the replaced files of the store; otherwise None"""
    begin_offset: int
    end_offset: int
    end_reason: str
    """Why the bytes after the last record are not a record; "" if they are zeros, or if the last segment is full"""
    record_count: int
    queue_count: int
    entry_count: int
    """Number of queue entries, except those of deleted topics and the blank ones before a queue's first entry"""
    not_dense_count: int
    """Number of queues with gaps or repetitions in their queue offsets, which were built in order"""
    deleted_count: int = 0
    """Number of records without an entry because halog deleted their topic, according to `config/topics.json`"""
    dropped_count: int
    """Number of records without an entry because their queue offset was taken, or implausibly high"""
    unusable_count: int
    """Number of records without an entry because their topic or queue id can't be a directory"""
    key_count: int
    index_file_count: int
    range_count: int
    elapsed_s: float

    @property
    def exit_code(self) -> int:
        """Exit code of the command: always 0, even if records have no entry, as a broker would also have skipped
        them."""
        return 0


def reindex(spark: SparkSession, options: ReindexOptions, progress: Progress = no_progress) -> ReindexResult:
    """Builds `options.target` from the store at `options.path`. With `in_place`, moves the result into the store.

    `progress` gets the stages "log" (bytes), "queues" (queues) and "index" (files). Before anything is written, raises
    OptionError, StoreUnreadable, StoreLocked, or CorruptLog if a segment is missing or has another size than the
    others. Later, raises CorruptLog for damage before the log's last segment, StoreUnreadable for records of batch
    queues, RecordsGone if files vanish while they are read, and DiskFailed, or OSError if the driver can't read or
    write a file. Finished work stays in the target for another attempt.
    """
    if not options.in_place:
        return _build_with(spark, options, progress)
    store = options.path.absolute()
    with store_lock(store):
        target = target_of(options)
        check_set_aside(store, target)
        built = target / WORK / "built"
        if not built.exists():
            replace_file(built, msgspec.json.encode(_build_with(spark, options, progress)))
        result = msgspec.json.decode(built.read_bytes(), type=ReindexResult)
        swap_in(store, target)
        shutil.rmtree(target)
        return msgspec.structs.replace(result, target=str(store), set_aside=str(store / SET_ASIDE))


def _build_with(spark: SparkSession, options: ReindexOptions, progress: Progress) -> ReindexResult:
    return build_files(partial(run_tasks, spark), spark.sparkContext.defaultParallelism, options, progress)


def build_files(run: RunTasks, lanes: int, options: ReindexOptions, progress: Progress) -> ReindexResult:
    """Builds the target with tasks run by `run`, `lanes` at a time; the store is only read. Errors as in `reindex`."""
    began = time.monotonic()
    plan = make_plan(options)
    begin_target(plan)
    task = plan.task
    target, work = Path(task.target), Path(task.work)
    folders = FOLDERS if task.index_enabled else FOLDERS[:1]  # without an index, the store's index isn't replaced
    for name in folders:
        (target / name).mkdir(exist_ok=True)

    log_bytes = sum(log_range.end - log_range.begin for log_range in plan.ranges)
    summaries = run(
        partial(scan_range, task),
        plan.ranges,
        lambda done, of: progress("log", log_bytes * done // of, log_bytes),
    )
    summaries.sort(key=lambda summary: summary.number)
    queues = join_parts(summary.parts for summary in summaries)
    dense = [queue for queue in queues if queue.is_dense]
    in_order = _queues(run, lanes, plan, queues, progress)
    deleted_count = _clear_deleted(run, plan, queues, deleted_topics(options.path))
    index_files = _index(run, plan, summaries, progress)
    for name in folders:
        sync_files(target / name)
    last = summaries[-1] if summaries else None
    result = ReindexResult(
        target=str(target),
        set_aside=None,
        begin_offset=plan.ranges[0].begin if plan.ranges else 0,
        end_offset=last.end if last is not None else 0,
        end_reason=last.end_reason if last is not None else "",
        record_count=sum(summary.record_count for summary in summaries),
        queue_count=len(queues),
        entry_count=sum(queue.end - queue.begin for queue in dense)
        + sum(queue.entry_count for queue in in_order)
        - deleted_count,
        not_dense_count=len(in_order),
        deleted_count=deleted_count,
        dropped_count=sum(queue.dropped_count for queue in in_order),
        unusable_count=sum(summary.unusable_count for summary in summaries),
        key_count=sum(summary.key_count for summary in summaries),
        index_file_count=len(index_files),
        range_count=len(plan.ranges),
        elapsed_s=time.monotonic() - began,
    )
    if not options.in_place:
        shutil.rmtree(work)
    return result


def _queues(
    run: RunTasks, lanes: int, plan: Plan, queues: Sequence[QueuePart], progress: Progress
) -> list[OrderedResult]:
    """Finishes the dense queues and builds the others; returns the results of the latter."""
    total = len(queues)
    dense = [queue for queue in queues if queue.is_dense]
    others = [queue for queue in queues if not queue.is_dense]
    groups = [dense[first : first + _QUEUES_PER_TASK] for first in range(0, len(dense), _QUEUES_PER_TASK)]
    run(
        partial(_complete, plan.task),
        groups,
        lambda done, of: progress("queues", len(dense) * done // of, total),
    )
    # Each task walks the whole log for its queues, so there are no more tasks than run at a time.
    lanes = min(len(others), lanes)
    built = run(
        partial(build_in_order, plan.task, plan.ranges),
        [others[lane::lanes] for lane in range(lanes)],
        lambda done, of: progress("queues", len(dense) + len(others) * done // of, total),
    )
    return [queue for group in built for queue in group]


def _complete(task: ScanTask, queues: Sequence[QueuePart]) -> None:
    for queue in queues:
        complete_queue(Path(task.target), task.file_entries, queue)


def _clear_deleted(run: RunTasks, plan: Plan, queues: Sequence[QueuePart], deleted: Mapping[str, int]) -> int:
    """Removes the queue entries of deleted topics, and returns their number.

    `deleted`: topic -> physical offset before which its messages were deleted.
    """
    found = [queue for queue in queues if queue.topic in deleted]
    return sum(run(partial(_clear, plan.task, deleted), found, lambda done, of: None))


def _clear(task: ScanTask, deleted: Mapping[str, int], queue: QueuePart) -> int:
    return clear_queue(Path(task.target), task.file_entries, queue, deleted[queue.topic])


def _index(run: RunTasks, plan: Plan, summaries: Sequence[RangeSummary], progress: Progress) -> list[IndexFilePlan]:
    if not plan.task.index_enabled:
        return []
    counts = [(keys_path(plan.task.work, summary.number), summary.key_count) for summary in summaries]
    files = plan_index_files(counts, plan.entry_count_max)
    run(
        partial(
            build_index_file,
            directory=Path(plan.task.target) / "index",
            slot_count=plan.slot_count,
            entry_count_max=plan.entry_count_max,
        ),
        files,
        lambda done, of: progress("index", done, of),
    )
    return files
