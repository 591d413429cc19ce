"""Checks the application's callbacks, and handles their exceptions, which fail one message, not the producer or
consumer."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from types import FunctionType, MethodType

import anyio

from ha.client.parking import is_trio

_log = logging.getLogger(__name__)


def check_async(callback: object, name: str) -> None:
    """Raises TypeError if `callback` is a function or method that is defined by `def` instead of `async def`.

    Accepts all other callables, including lambdas and decorated functions: whether they return an awaitable is known
    only once they are called."""
    if (
        isinstance(callback, FunctionType | MethodType)
        and not inspect.iscoroutinefunction(callback)
        and not hasattr(callback, "__wrapped__")
        and callback.__name__ != "<lambda>"
    ):
        raise TypeError(f"{name} is not async: define {callback.__qualname__} by `async def`")


def failure_of(error: BaseException) -> Exception:
    """Returns the failure of a callback that raised `error` in this task. An Exception is returned as it is.

    If this task is being cancelled, a cancellation is raised again, and other errors in its group are only logged.
    Otherwise, the cancellation came from something that the callback awaited, such as an asyncio task that was
    cancelled. A RuntimeError is then returned, because raising the CancelledError here would end this task silently.
    Raises a group that contains any other BaseException, such as KeyboardInterrupt."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, BaseExceptionGroup):
        cancelled, failed = error.split(anyio.get_cancelled_exc_class())
        if cancelled is None or not isinstance(failed, Exception | None):
            raise error  # such as KeyboardInterrupt
        if failed is not None and _is_cancelled():
            _log.warning(
                "client.callback_failed reason=%r", "it was cancelled, and its clean-up failed", exc_info=failed
            )
            raise cancelled
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
