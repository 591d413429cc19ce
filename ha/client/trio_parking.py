"""Implements `Parking` for trio. parking.py imports this module only if trio runs."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from functools import partial
from typing import Any

from outcome import Value
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled


class TrioParking:
    """`Parking` for trio's tasks."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: list[Task | None] = []

    def wait(self) -> Awaitable[Any]:
        """See Parking."""
        tasks = self._tasks
        leave = partial(_leave, tasks, len(tasks))
        tasks.append(current_task())
        return wait_task_rescheduled(leave)  # noqa: ASYNC105  a coroutine of our own would cost as much again

    def give(self, values: Iterable[Any]) -> None:
        """See Parking."""
        for task, value in zip(self._tasks, values, strict=True):
            if task is not None:
                reschedule(task, Value(value))


def _leave(tasks: list[Task | None], place: int, raise_cancel: RaiseCancelT) -> Abort:
    tasks[place] = None
    return Abort.SUCCEEDED
