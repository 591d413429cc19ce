"""Reads queues continuously, pulling ahead while the program works on the previous messages.

One task per queue pulls, then waits until the program has taken the messages, so at most one response per queue is
buffered.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

import anyio
import anyio.lowlevel

from ha.client.messages import MessageQueue, PullResult, PullStatus, RawPull, Stretch
from ha.protocol.codes import MASTER_ID

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT", PullResult, RawPull)

Pull = Callable[[MessageQueue, int], Awaitable[PullResult]]

_QUICK_ANSWER_S = 0.1
"""Time in seconds within which a response without new messages counts as quick, so that a pause of _PAUSE_S follows."""
_PAUSE_S = 1.0


async def pull_on(
    pull: Callable[[MessageQueue, int], Awaitable[ResultT]], queue: MessageQueue, queue_offset: int
) -> ResultT:
    """Pulls from `queue_offset` until a response moves on (its `next_offset` is another), or shows that the queue ends
    there; returns that response.

    If the first response of a slave does not move on, pulls again at once, because the slave may lack the messages:
    this pull goes to the master, unless there is none or the program has chosen the slave. If the queue does not end at
    `queue_offset`, but a response does not move on, the message there can't be read at present: it is damaged and may
    be repaired, or the broker has too many files open. Then logs this once, and pulls again after a pause."""
    slave_id, is_logged = MASTER_ID, False
    while True:
        result = await pull(queue, queue_offset)
        if result.next_offset != queue_offset:
            return result
        if result.broker_id not in (MASTER_ID, slave_id):
            slave_id = result.broker_id
            continue
        if queue_offset >= result.max_offset:
            return result
        if not is_logged:
            is_logged = True
            _log.warning("client.message_not_readable queue=%s offset=%d", queue, queue_offset)
        await anyio.sleep(_PAUSE_S)


class Reading:
    """An async context manager, and inside its block an async iterator of `Stretch` objects; see
    PullConsumer.reading."""

    def __init__(
        self, find_positions: Callable[[], Awaitable[dict[MessageQueue, int]]], pull: Pull, *, ends: bool
    ) -> None:
        """`ends`: stop at the end of each queue instead of waiting for new messages."""
        self.positions: dict[MessageQueue, int] = {}
        """For each queue, the queue offset up to which all messages were returned or filtered out."""
        self._find_positions = find_positions
        self._pull = pull
        self._ends = ends
        self._ready: deque[tuple[Stretch | Exception, anyio.Event]] = deque()
        self._changed = anyio.Event()
        self._task_count = 0
        self._is_open = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.positions = await self._find_positions()
        await self._stack.enter_async_context(self._feeding())
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._ready.clear()
        # The error is the block's own: passing it through the task group would wrap it in an exception group.
        await self._stack.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Stretch:
        """Returns the next `Stretch`, of any of the queues. Safe to cancel: no message is lost.

        If a pull failed, raises its error once the earlier messages of the queue were returned; the queue is then no
        longer read. Raises RuntimeError outside the block."""
        await anyio.lowlevel.checkpoint()
        while not self._ready:
            if not self._is_open:
                raise RuntimeError("the reading is not open: iterate inside its block")
            if not self._task_count:
                raise StopAsyncIteration
            if self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()
        found, is_taken = self._ready.popleft()
        is_taken.set()
        if isinstance(found, Exception):
            raise found
        self.positions[found.queue] = found.next_offset
        return found

    @asynccontextmanager
    async def _feeding(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            for queue, offset in self.positions.items():
                self._task_count += 1
                tasks.start_soon(self._feed, queue, offset)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _feed(self, queue: MessageQueue, offset: int) -> None:
        """Pulls from `offset` on: to the end of the queue if `ends`, until an error, or until cancelled."""
        try:
            while True:
                asked_at = anyio.current_time()
                result = await pull_on(self._pull, queue, offset)
                begin, offset = offset, result.next_offset
                if result.status is PullStatus.OFFSET_ILLEGAL:
                    _log.warning("client.offset_moved queue=%s from=%d to=%d", queue, begin, offset)
                if result.messages:
                    await self._hand_out(Stretch(queue, result.messages, begin, offset, result.max_offset))
                elif offset != begin:
                    self.positions[queue] = offset  # all messages before it were returned or filtered out
                elif self._ends:
                    return
                elif anyio.current_time() - asked_at < _QUICK_ANSWER_S:
                    # The broker does not support long polls, or is a slave that is behind.
                    await anyio.sleep(_PAUSE_S)
        except Exception as error:  # raised by the iteration
            await self._hand_out(error)
        finally:
            self._task_count -= 1
            self._changed.set()

    async def _hand_out(self, found: Stretch | Exception) -> None:
        is_taken = anyio.Event()
        self._ready.append((found, is_taken))
        self._changed.set()
        await is_taken.wait()
