"""Tasks of jobs run in this process, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ha.spark.jobs.waves import Runner


def inline_runner(wave_size: int = 8) -> Runner:
    """Run the tasks one after the other, `wave_size` a wave."""

    def run(function: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterator[list[Any]]:
        for begin in range(0, len(tasks), wave_size):
            yield [function(task) for task in tasks[begin : begin + wave_size]]

    return run
