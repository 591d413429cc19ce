"""Tasks of jobs run in this process, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from pyspark.sql import SparkSession

from ha.spark.jobs.waves import Runner


def inline_runner(wave_size: int = 8) -> Runner:
    """Runs the tasks one after the other, `wave_size` per wave."""

    def run(function: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterator[list[Any]]:
        for begin in range(0, len(tasks), wave_size):
            yield [function(task) for task in tasks[begin : begin + wave_size]]

    return run


class _InlineContext:
    """The part of a SparkContext that `ha.spark.jobs.tasks` uses; a job runs its tasks one after the other."""

    defaultParallelism = 2  # noqa: N815 - Spark's name

    def __init__(self, before_tasks: Callable[[], object]) -> None:
        self._before_tasks = before_tasks
        self._items: Sequence[Any] = ()

    def setJobGroup(self, *_: object, **__: object) -> None:
        pass

    def cancelJobGroup(self, group: str) -> None:
        pass

    def statusTracker(self) -> _InlineContext:
        return self

    def getJobIdsForGroup(self, group: str) -> list[int]:
        return []

    def parallelize(self, items: Sequence[Any], count: int) -> _InlineContext:
        self._items = items
        return self

    def mapPartitions(self, function: Callable[[list[Any]], Iterator[Any]]) -> _InlineContext:
        self._function = function
        return self

    def collect(self) -> list[Any]:
        self._before_tasks()
        return [made for item in self._items for made in self._function([item])]


class _InlineSpark:
    def __init__(self, context: _InlineContext) -> None:
        self.sparkContext = context
        self.conf = SimpleNamespace(get=lambda name, default: default)

    def getTags(self) -> set[str]:
        return set()


def inline_spark(before_tasks: Callable[[], object] = lambda: None) -> SparkSession:
    """A session for `run_tasks`, which calls `before_tasks` before the tasks of each job."""
    return cast(SparkSession, _InlineSpark(_InlineContext(before_tasks)))
