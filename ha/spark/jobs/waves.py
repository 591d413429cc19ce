"""Runs many small tasks on a SparkSession's executors, with a bounded number of results on the driver at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

from ha.spark.jobs.tasks import run_tasks

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

TASKS_PER_CORE = 8
"""Number of tasks per core in a wave: enough to balance tasks of unequal length, few enough to show progress and limit
the results in memory.
"""


class Runner(Protocol):
    """Runs `function` on each task, and yields the results in order, a list for each wave (tasks that run together)."""

    def __call__(self, function: Callable[[TaskT], ResultT], tasks: Sequence[TaskT], /) -> Iterator[list[ResultT]]: ...


def spark_runner(spark: SparkSession) -> Runner:
    """Returns a runner that uses the executors of `spark`; errors as in `run_tasks`."""
    size = max(1, spark.sparkContext.defaultParallelism * TASKS_PER_CORE)

    def run(function: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterator[list[Any]]:
        for begin in range(0, len(tasks), size):
            yield run_tasks(spark, function, tasks[begin : begin + size], _no_steps)

    return run


def _no_steps(done: int, total: int) -> None:
    """Does nothing: callers report progress after each wave."""
