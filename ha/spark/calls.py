"""Runs calls concurrently, and raises halog's errors as themselves, not in an exception group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

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


@asynccontextmanager
async def bounded_calls(
    call: Callable[[T], Awaitable[None]], bound: int
) -> AsyncIterator[Callable[[T], Awaitable[None]]]:
    """Yields a function that waits until fewer than `bound` calls run, then starts `call` with its argument in a task.

    Waits for all calls when the block ends. Errors as in `unwrapped_tasks`.
    """
    room = anyio.Semaphore(bound)

    async def run(argument: T) -> None:
        try:
            await call(argument)
        finally:
            room.release()

    async with unwrapped_tasks() as tasks:

        async def start(argument: T) -> None:
            await room.acquire()
            tasks.start_soon(run, argument)

        yield start
