"""`start` and `stop` for programs that can't use an `async with` block, such as callbacks of a framework.

The block runs in a separate task, because a task group must be left by the task that entered it, while the callbacks
of a framework may run in different tasks.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Any, Self

import anyio

from ha.client.parking import is_trio

_log = logging.getLogger(__name__)

_tasks: set[asyncio.Task[None]] = set()
"""The running asyncio tasks, kept here because asyncio itself has only weak references to them."""


class Startable(ABC):
    """An async context manager that can also be opened with `start` and closed with `stop`."""

    _holder: _Holder | None = None
    _is_entered = False
    _stack: AsyncExitStack

    @abstractmethod
    async def _open(self, stack: AsyncExitStack) -> None:
        """Opens the parts of this object, and adds each to `stack`, which closes them."""

    async def __aenter__(self) -> Self:
        """Opens this object. Raises RuntimeError if it is open already, and the errors of `_open`."""
        if self._is_entered:
            raise RuntimeError("already open: create another one, or share this one")
        self._is_entered = True
        try:
            async with AsyncExitStack() as stack:
                await self._open(stack)
                self._stack = stack.pop_all()
        except BaseException:
            self._is_entered = False
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # Not `__aexit__` with `error`: the task groups in the stack would wrap it in an exception group.
            await self._stack.aclose()
        finally:
            self._is_entered = False

    async def start(self) -> Self:
        """Opens the object as entering the block would; may be called from any task. Returns the object; call
        `stop` at the end.

        Raises the errors of entering the block, and RuntimeError if the object is already started. If the call is
        cancelled, it closes the object before it ends."""
        if self._holder is not None:
            raise RuntimeError("already started: call stop() first")
        holder = self._holder = _Holder(self)
        _spawn(holder.run)
        try:
            await holder.wait(holder.is_open)
        except BaseException:
            self._holder = None
            with anyio.CancelScope(shield=True):  # each step of closing has its own time limit
                await holder.is_closed.wait()
            raise
        return self

    async def stop(self) -> None:
        """Closes the object as leaving the block would; may be called from any task. Does nothing if the object is not
        started.

        Raises the error that ended the block, if one did; it was logged at that time. If the call is cancelled, it also
        cancels the block and does not wait until everything is closed: the block may itself be waiting for the calling
        task, for example if a handler of the consumer calls `stop`."""
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.is_closing.set()
            await holder.wait(holder.is_closed)


class _Holder:
    """Holds the block of `manager` open until `is_closing` is set."""

    def __init__(self, manager: AbstractAsyncContextManager[Any]) -> None:
        self._manager = manager
        self._scope = anyio.CancelScope()
        self._error: Exception | None = None
        self.is_open = anyio.Event()
        """Set once the block has been entered, or entering it has failed."""
        self.is_closing = anyio.Event()
        self.is_closed = anyio.Event()

    async def run(self) -> None:
        try:
            with self._scope:
                async with self._manager:
                    self.is_open.set()
                    await self.is_closing.wait()
        except Exception as error:  # raised by start() or stop()
            self._error = error
            if self.is_open.is_set() and not self.is_closing.is_set():
                _log.error("client.ended kind=%s", type(self._manager).__name__, exc_info=error)
        finally:
            self.is_open.set()
            self.is_closed.set()

    async def wait(self, event: anyio.Event) -> None:
        """Waits for `event` and raises the error of the block, if any. If the call is cancelled, so is the block."""
        try:
            await event.wait()
        except BaseException:
            self._scope.cancel()
            raise
        if self._error is not None:
            raise self._error


def _spawn(function: Callable[[], Awaitable[None]]) -> None:
    """Starts a task that runs `function` and does not outlive the event loop. `function` must raise nothing except
    cancellation."""
    if is_trio():
        import trio

        trio.lowlevel.spawn_system_task(function, context=contextvars.copy_context())
        return
    task = asyncio.ensure_future(function())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
