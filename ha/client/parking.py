"""Tasks that wait for a value each and are given theirs all at once, as cheaply as either event loop can.

Beside an `anyio.Event` it saves what runs between a task and its event loop, and the way back to its value.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, cast


class Parking(Protocol):
    """Places for tasks, numbered from 0 in the order in which they come."""

    def wait(self) -> Awaitable[Any]:
        """To be awaited at once: takes the next place and returns the value that is given to it.

        Cancelled, its task goes, and the place stays: the value for it is dropped."""

    def give(self, values: Iterable[Any]) -> None:
        """Wakes all tasks, each with the value of its place. To be called once."""


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
    """The clock of the event loop that runs, in seconds: what `anyio.current_time` looks up with each call."""
    if is_trio():
        return cast(Callable[[], float], sys.modules["trio"].current_time)
    return asyncio.get_running_loop().time


def parking_here() -> Callable[[], Parking]:
    """What makes a `Parking` for the event loop that runs. Programs without trio need not have it."""
    if is_trio():
        from ha.client.trio_parking import TrioParking

        return TrioParking
    return _AsyncioParking


def is_trio() -> bool:
    """Whether the caller runs in trio's event loop; else it is asyncio's."""
    return "trio" in sys.modules and bool(sys.modules["trio"].lowlevel.in_trio_task())
