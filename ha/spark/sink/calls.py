"""Runs a limited number of calls concurrently, and raises halog's errors as themselves, not in an exception group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from ha.errors import HalogError

T = TypeVar("T")


@asynccontextmanager
async def unwrapped_tasks() -> AsyncIterator[TaskGroup]:
    """Opens a task group that raises the first error as itself if all are HalogErrors; otherwise the exception
    group."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except ExceptionGroup as group:
        ours, others = group.split(HalogError)
        if others is not None or ours is None:
            raise
        raise _first(ours) from None


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


class BoundedCalls(Generic[T]):
    """Runs up to `bound` calls at once."""

    def __init__(self, tasks: TaskGroup, bound: int) -> None:
        self._tasks = tasks
        self._room = anyio.Semaphore(bound)

    async def start(self, call: Callable[[T], Awaitable[None]], argument: T) -> None:
        """Waits until fewer than `bound` calls run, then starts `call(argument)` in a task."""
        await self._room.acquire()
        self._tasks.start_soon(self._run, call, argument)

    async def _run(self, call: Callable[[T], Awaitable[None]], argument: T) -> None:
        try:
            await call(argument)
        finally:
            self._room.release()


@asynccontextmanager
async def bounded_calls(bound: int) -> AsyncIterator[BoundedCalls[Any]]:
    """Runs up to `bound` calls concurrently, and waits for all of them when the block ends. Errors as in
    `unwrapped_tasks`."""
    async with unwrapped_tasks() as tasks:
        yield BoundedCalls(tasks, bound)
