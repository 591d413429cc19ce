"""Runs a node in a thread, with its own Trio loop, for a program that runs on asyncio.

The two loops only exchange callbacks (`call_soon_threadsafe`, `run_sync_soon`), so neither ever waits for the other's
thread. Attributes with a comment "Trio" are used only in the node's thread. Of the others, two are set after the thread
has started, and read in both threads: `_token`, which the node's thread sets, and `_stop_at`, which asyncio's sets.
Each thread sets its attribute before it reads the other's, so that a request to stop is not lost while the node opens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import trio

from ha.broker.put_request import PutResult
from ha.config import Config
from ha.protocol.record import Message

from .node import Node
from .reading import Reading, ReadResult, wait_messages
from .startup import open_node

STOPPED = "the node has stopped"


class NodeInThread:
    """A node that runs in a thread, for the asyncio loop that opened it. Its methods do what those of `Node` do.

    Calls raise RuntimeError once the node stops."""

    def __init__(self, node: Node, thread: _NodeThread) -> None:
        self._node = node
        self._call = thread.call
        self.config = node.config
        self.remoting_address = node.remoting_address
        self.ha_address = node.ha_address
        self.admin_address = node.admin_address
        self.grpc_address = node.grpc_address
        self.name_server_address = node.name_server_address
        self.ready_line = node.ready_line

    async def put(self, message: Message) -> PutResult:
        """See `Node.put`. A cancelled put may still be stored."""
        result: PutResult = await self._call(self._node.put, message)
        return result

    async def put_many(self, messages: list[Message]) -> list[PutResult]:
        """See `Node.put_many`. A cancelled put may still be stored."""
        results: list[PutResult] = await self._call(self._node.put_many, messages)
        return results

    async def read(self, topic: str, queue_id: int, queue_offset: int, *, count_max: int = 32) -> ReadResult:
        """See `Node.read`."""
        result: ReadResult = await self._call(
            partial(self._node.read, topic, queue_id, queue_offset, count_max=count_max)
        )
        return result

    def messages(self, topic: str, queue_id: int, queue_offset: int = 0) -> Reading:
        """See `Node.messages`."""
        return Reading(partial(self._call, wait_messages, self._node.store, topic, queue_id), queue_offset)


@asynccontextmanager
async def open_node_in_thread(config: Config) -> AsyncIterator[NodeInThread]:
    """Runs a node in a thread during the block. Raises what `open_node` raises, always in exception groups.

    If the node fails, the block is cancelled and the error raised, as in an asyncio.TaskGroup. Leaving or cancelling
    the block stops the node and waits for its end. If that takes longer than shutdownTimeout, TimeoutError is raised,
    and the thread continues.
    """
    thread = _NodeThread(config)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(thread.serve())
        node = await thread.opened
        try:
            yield NodeInThread(node, thread)
        finally:
            await thread.end()


class _NodeThread:
    """The thread in which a node runs, and the calls that asyncio makes into it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Node] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._stop_at: float | None = None
        """Time at which a requested stop has to be complete (the asyncio loop's clock); None if none is requested"""
        self._token: trio.lowlevel.TrioToken | None = None
        self._opening = trio.CancelScope()  # Trio
        self._calls: trio.Nursery | None = None  # Trio; None while the node opens
        self._stop = trio.Event()  # Trio

    async def serve(self) -> None:
        """Starts the thread and waits until it ends; raises the exception that ended it. If cancelled, stops the node
        first."""
        thread = threading.Thread(target=self._run, name="halog-node", daemon=True)
        thread.start()
        try:
            await asyncio.shield(self._ended)
        except asyncio.CancelledError:
            await self.end()
            self._ended.result()
            raise
        finally:
            if self._ended.done():
                thread.join()  # it has nothing left to do

    async def end(self) -> None:
        """Stops the node and waits for its end, even if cancelled. Raises TimeoutError after shutdownTimeout."""
        if self._stop_at is None:
            self._stop_at = self._loop.time() + self._config.shutdown_timeout_ms / 1000
        self._in_thread(self._request_stop)
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.done():
            rest_s = self._stop_at - self._loop.time()
            if rest_s <= 0:
                raise TimeoutError(f"the node did not stop within shutdownTimeout={self._config.shutdown_timeout_ms}")
            try:
                await asyncio.wait([self._ended], timeout=rest_s)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def call(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """Calls `function` in the node's loop, and returns its result or raises its exception. If cancelled, cancels
        the call. Raises RuntimeError if the node has stopped."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        scope = trio.CancelScope()
        if not self._in_thread(self._start_call, answer, scope, partial(function, *arguments)):
            raise RuntimeError(STOPPED)
        try:
            return await answer
        except asyncio.CancelledError:
            self._in_thread(scope.cancel)
            raise

    def _in_thread(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Makes the node's loop call `function` soon. Returns False if the loop has ended or not started yet."""
        if self._token is None:
            return False
        try:
            self._token.run_sync_soon(function, *arguments)
        except trio.RunFinishedError:
            return False
        return True

    # ---- in the node's thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            trio.run(self._serve_node)
        except BaseException as caught:  # `serve` raises it; raised here, it would only end the thread
            error = caught
        self._settle_soon(self._ended, None, error)

    async def _serve_node(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._opening:
            if self._stop_at is not None:  # before there was a token
                return
            async with open_node(self._config) as node, trio.open_nursery() as self._calls:
                self._settle_soon(self.opened, node, None)
                await self._stop.wait()
                self._calls.cancel_scope.cancel()

    def _request_stop(self) -> None:
        if self._calls is None:
            self._opening.cancel()
        self._stop.set()

    def _start_call(
        self, answer: asyncio.Future[Any], scope: trio.CancelScope, function: Callable[[], Awaitable[Any]]
    ) -> None:
        assert self._calls is not None
        try:
            self._calls.start_soon(self._answer, answer, scope, function)
        except RuntimeError:  # the nursery is closed
            self._settle_soon(answer, None, RuntimeError(STOPPED))

    async def _answer(
        self, answer: asyncio.Future[Any], scope: trio.CancelScope, function: Callable[[], Awaitable[Any]]
    ) -> None:
        result: object = None
        error: Exception | None = RuntimeError(STOPPED)  # if the call is cancelled, as the node stops
        try:
            with scope:
                result, error = await function(), None
        except Exception as caught:  # raised by `call` in the other loop
            error = caught
        finally:
            self._settle_soon(answer, result, error)

    def _settle_soon(self, future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():  # cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
