"""Wakes many tasks at once, each with its own value, at the lowest cost that asyncio and trio allow.

Cheaper than an `anyio.Event`: a task waits directly on its event loop, and is woken with its value instead of looking
it up.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, cast


class Parking(Protocol):
    """Tasks that each wait for a value, numbered from 0 in the order of their calls of `wait`."""

    def wait(self) -> Awaitable[Any]:
        """Takes the next number; returns an awaitable of that number's value, which must be awaited at once.

        If the task is cancelled, its number stays taken, and its value is dropped."""

    def give(self, values: Iterable[Any]) -> None:
        """Wakes all tasks: the nth call of `wait` gets the nth of `values`, which must have one value for each call.
        Call it only once."""


class _AsyncioParking:
    __slots__ = ("_futures", "_new_future")

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[Any]] = []
        self._new_future = asyncio.get_running_loop().create_future

    def wait(self) -> Awaitable[Any]:
        future = self._new_future()
        self._futures.append(future)
        return future

    def give(self, values: Iterable[Any]) -> None:
        for future, value in zip(self._futures, values, strict=True):
            if not future.done():
                future.set_result(value)


def clock_here() -> Callable[[], float]:
    """Returns the clock of the running event loop, in seconds; `anyio.current_time` would look it up at each call."""
    if is_trio():
        return cast(Callable[[], float], sys.modules["trio"].current_time)
    return asyncio.get_running_loop().time


def parking_here() -> Callable[[], Parking]:
    """Returns a function that makes a `Parking` for the running event loop. Imports trio only if the caller runs in
    trio.
    """
    if is_trio():
        from ha.client.trio_parking import TrioParking

        return TrioParking
    return _AsyncioParking


def is_trio() -> bool:
    """Returns whether the caller runs in trio's event loop; otherwise it runs in asyncio's."""
    return "trio" in sys.modules and bool(sys.modules["trio"].lowlevel.in_trio_task())
