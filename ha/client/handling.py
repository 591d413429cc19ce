"""The tasks that give messages to the application's handler, and what becomes of a message by how that ends.

A handler that returns has handled its message; one that raises, or takes too long, has not. CONCURRENTLY such a message
is given back to the broker, to come again later, and others go on. ORDERLY its queue waits and it is tried again.
Sources: ConsumeMessageConcurrentlyService, ConsumeMessageOrderlyService.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from ha.client.held_queue import HeldQueue
from ha.client.messages import ReceivedMessage
from ha.client.process_queue import ProcessQueue
from ha.client.push_options import ConsumeMode, MessageModel, PushOptions
from ha.client.returning import Returns
from ha.client.waiting import wait_any
from ha.errors import RetryLater

_log = logging.getLogger(__name__)

Handler = Callable[[ReceivedMessage], Awaitable[None]]
"""Handles one message: returning means that it was handled, raising that it has to come again."""

_GIVE_BACK_PAUSE_S = 5.0
"""Before a message that could not be given back either is handled again here."""
_TURN = 32
"""Messages of one queue that are handled before another queue has its turn, ORDERLY."""


class HandlingStatistics(msgspec.Struct, frozen=True):
    """Messages handled and not, by topic, since the start; `seconds` spent in handlers."""

    handled: dict[str, int]
    failed: dict[str, int]
    seconds: dict[str, float]


class Handling:
    """Hands messages to `handler`. `serve` does the work; `fill` tells it that there is some."""

    def __init__(
        self,
        handler: Handler,
        mode: ConsumeMode,
        model: MessageModel,
        options: PushOptions,
        returns: Returns,
        *,
        needs_lock: bool,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._handler = handler
        self._is_orderly = mode is ConsumeMode.ORDERLY
        self._model = model
        self._options = options
        self._returns = returns
        self._needs_lock = needs_lock
        self._wall_clock_ms = wall_clock_ms
        self._later = _Later()
        self._is_finishing = False
        # Its length is bounded by what queues may hold: an item is one message, or one queue.
        self._ready, self._ready_to_take = anyio.create_memory_object_stream[tuple[HeldQueue, ProcessQueue | None]](
            math.inf
        )
        self._handled: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()

    def statistics(self) -> HandlingStatistics:
        """Return what was done so far."""
        return HandlingStatistics(dict(self._handled), dict(self._failed), dict(self._seconds))

    def fill(self, held: HeldQueue, count: int) -> None:
        """`held` got `count` new messages."""
        if self._is_orderly:
            self._schedule(held)
            return
        for _ in range(count):
            self._put_ready(held, held.process_queue)

    async def serve(self) -> None:
        """Works until `finish` was called and every handler has ended, or it is cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._later.serve)
            async with anyio.create_task_group() as workers:
                for _ in range(self._options.concurrency):
                    workers.start_soon(self._work, self._ready_to_take)
            tasks.cancel_scope.cancel()

    def finish(self) -> None:
        """No further message is begun."""
        self._is_finishing = True
        self._ready.close()

    def close(self) -> None:
        """Call it when `serve` has ended."""
        self._ready.close()
        self._ready_to_take.close()

    async def call(self, message: ReceivedMessage) -> Exception | None:
        """Hands `message` to the handler; what that raised."""
        started = anyio.current_time()
        failure: Exception | None = None
        with anyio.CancelScope(deadline=started + self._options.consume_timeout_s) as scope:
            try:
                await self._handler(message)
            except Exception as error:  # the application's, of any kind: it concerns one message, not the consumer
                failure = error
        if scope.cancelled_caught:
            failure = TimeoutError(f"not handled within {self._options.consume_timeout_s:g} s")
        topic = message.topic
        self._seconds[topic] += anyio.current_time() - started  # type: ignore[assignment]
        (self._handled if failure is None else self._failed)[topic] += 1
        return failure

    def _put_ready(self, held: HeldQueue, process_queue: ProcessQueue | None) -> None:
        try:
            self._ready.send_nowait((held, process_queue))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass  # the consumer is about to end

    def _schedule(self, held: HeldQueue) -> None:
        if not held.is_scheduled:
            held.is_scheduled = True
            self._put_ready(held, None)

    async def _work(self, ready: MemoryObjectReceiveStream[tuple[HeldQueue, ProcessQueue | None]]) -> None:
        try:
            while True:
                held, process_queue = await ready.receive()
                if process_queue is None:
                    await self._handle_in_order(held)
                else:
                    await self._handle_one(held, process_queue)
        except anyio.EndOfStream:
            pass

    async def _handle_one(self, held: HeldQueue, process_queue: ProcessQueue) -> None:
        message = process_queue.take()
        if message is None or self._is_finishing:
            return
        held.begin_handling()
        try:
            failure = await self.call(message)
            if failure is None or await self._settled(message, failure):
                process_queue.finish(message)
            else:
                again = message.__replace__(reconsume_times=message.reconsume_times + 1)
                self._later.add(_GIVE_BACK_PAUSE_S, lambda: self._again(held, process_queue, again))
        finally:
            held.end_handling(self._wall_clock_ms())

    async def _settled(self, message: ReceivedMessage, failure: Exception) -> bool:
        """Whether a message that failed need not concern this consumer any more."""
        if isinstance(failure, RetryLater):
            delay_level = failure.delay_level
        else:
            delay_level = 0 if message.body_error is None else -1  # it would be as unreadable again
        if self._model is MessageModel.BROADCASTING:
            _log.error("message_given_up message=%s topic=%s", message.message_id, message.topic, exc_info=failure)
            return True
        if not isinstance(failure, RetryLater):
            _log.warning("message_failed message=%s topic=%s", message.message_id, message.topic, exc_info=failure)
        return await self._returns.give_back(message, delay_level)

    def _again(self, held: HeldQueue, process_queue: ProcessQueue, message: ReceivedMessage) -> None:
        process_queue.put_back(message)
        self._put_ready(held, process_queue)

    async def _handle_in_order(self, held: HeldQueue) -> None:
        for _ in range(_TURN):
            process_queue = held.process_queue
            if process_queue is None or held.is_revoked or self._is_finishing:
                break
            if self._needs_lock and not held.is_locked:
                break  # once the lock is back, the queue begins anew
            message = process_queue.take()
            if message is None:
                break
            held.begin_handling()
            try:
                failure = await self.call(message)
                if failure is None or await self._given_up(message, failure):
                    process_queue.finish(message)
                else:
                    process_queue.put_back(message.__replace__(reconsume_times=message.reconsume_times + 1))
                    self._later.add(self._options.suspend_s, lambda: self._put_ready(held, None))
                    return  # it stays scheduled
            finally:
                held.end_handling(self._wall_clock_ms())
        else:
            self._put_ready(held, None)  # behind the others
            return
        held.is_scheduled = False

    async def _given_up(self, message: ReceivedMessage, failure: Exception) -> bool:
        """Whether a message that failed was tried often enough and is a dead letter now."""
        if not isinstance(failure, RetryLater):
            _log.warning("message_failed message=%s topic=%s", message.message_id, message.topic, exc_info=failure)
        times_max = self._options.reconsume_times_max
        is_last = times_max is not None and message.reconsume_times >= times_max
        if isinstance(failure, RetryLater):
            is_last |= failure.delay_level < 0
        elif message.body_error is not None:
            is_last = True  # it would be as unreadable again
        if not is_last or self._model is MessageModel.BROADCASTING:
            return is_last
        return await self._returns.give_up(message)


class _Later:
    """Calls things later, in one task."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._sooner = anyio.Event()

    def add(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have `call` called in `delay_s`."""
        due = anyio.current_time() + delay_s
        if not self._due or due < self._due[0][0]:
            self._sooner.set()
        heapq.heappush(self._due, (due, next(self._numbers), call))

    async def serve(self) -> None:
        """Calls, until cancelled."""
        while True:
            now = anyio.current_time()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._sooner = anyio.Event()
            await wait_any(self._due[0][0] - now if self._due else math.inf, self._sooner)
