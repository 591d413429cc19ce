"""Failures of the application's callbacks: they affect one message, not the producer or consumer that calls them."""

from __future__ import annotations

import asyncio
import math

import anyio

from ha.client.parking import is_trio


def failure_of(error: BaseException) -> Exception:
    """Returns `error`, which a callback has raised in this task, as its failure.

    Re-raises a cancellation of this task. A CancelledError may also come from something that the callback has awaited,
    such as an asyncio task that was cancelled: if it went on, it would end this task without notice."""
    if isinstance(error, Exception):
        return error
    if _is_cancelled():
        raise error
    failure = RuntimeError("something that the callback has awaited was cancelled")
    failure.__cause__ = error
    return failure


def _is_cancelled() -> bool:
    if anyio.current_effective_deadline() == -math.inf or is_trio():
        return True
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
