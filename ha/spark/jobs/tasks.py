"""Runs plain functions on executors, one item per task; reports progress and raises halog's errors on the driver."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ha.errors import DiskFailed, HalogError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

Item = TypeVar("Item")
Made = TypeVar("Made")

_LOOK_S = 0.2


def run_tasks(
    spark: SparkSession,
    function: Callable[[Item], Made],
    items: Sequence[Item],
    progress: Callable[[int, int], None],
) -> list[Made]:
    """Calls `function` on each item, in one task each, and returns the results in order. Without items, starts no job.

    `progress(done, total)` is called on this thread with numbers of tasks. Items and results are pickled. A HalogError
    of a task, or an OSError (as DiskFailed), is raised here after all other tasks have ended; the task is not retried,
    as it would fail again. Any other error fails the job as usual in Spark. Interrupting the call cancels the job.
    """
    from pyspark import InheritableThread

    if not items:
        return []
    context = spark.sparkContext
    group = f"halog-{uuid.uuid4()}"
    outcome: list[Any] = []

    def work() -> None:
        context.setJobGroup(group, getattr(function, "__name__", "halog"), interruptOnCancel=True)
        try:
            outcome.append(context.parallelize(items, len(items)).mapPartitions(_Guarded(function)).collect())
        except BaseException as error:
            outcome.append(error)

    thread = InheritableThread(target=work, session=spark)
    thread.start()
    try:
        progress(0, len(items))
        while thread.is_alive():
            thread.join(_LOOK_S)
            progress(min(_completed(context, group), len(items)), len(items))
    except BaseException:
        context.cancelJobGroup(group)
        raise
    [made] = outcome
    if isinstance(made, BaseException):
        raise made
    for found in made:
        if isinstance(found, _Failed):
            raise found.error
    progress(len(items), len(items))
    return list(made)


class _Failed:
    def __init__(self, error: HalogError) -> None:
        self.error = error


class _Guarded:
    """Applies the function to a partition; expected errors become values, as Spark would only pass on a traceback."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, items: Iterable[Any]) -> Iterable[Any]:
        for item in items:
            try:
                made = self._function(item)
            except HalogError as error:
                yield _Failed(error)
            except OSError as error:
                yield _Failed(DiskFailed(Path(error.filename or "a file"), "work", error.strerror or str(error)))
            else:
                yield made


def _completed(context: SparkContext, group: str) -> int:
    tracker = context.statusTracker()
    done = 0
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for stage in info.stageIds if info is not None else ():
            found = tracker.getStageInfo(stage)
            done += found.numCompletedTasks if found is not None else 0
    return done
