"""Runs the application's handler, and finishes, retries or sends back each message depending on the outcome.

A message is handled when the handler returns; it has failed if the handler raises or takes too long. With CONCURRENTLY,
a failed message is sent back to the broker for later redelivery, or dropped if the consumer is BROADCASTING. With
ORDERLY, its queue waits and the message is retried here. Sources: ConsumeMessageConcurrentlyService,
ConsumeMessageOrderlyService.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from ha.client.callbacks import failure_of
from ha.client.held_queue import HeldQueue
from ha.client.messages import ReceivedMessage
from ha.client.process_queue import ProcessQueue
from ha.client.push_options import ConsumeMode, MessageModel, PushOptions
from ha.client.send_back import SendBack
from ha.client.waiting import wait_any
from ha.errors import RetryLater

_log = logging.getLogger(__name__)

Handler = Callable[[ReceivedMessage], Awaitable[None]]
"""Handles one message. If it raises, the message has failed; see PushConsumer."""

_SEND_BACK_PAUSE_S = 5.0
"""Pause in seconds before this consumer retries a failed message that it could not send back to the broker."""
_QUEUE_SLICE = 32
"""With ORDERLY: maximum number of messages of one queue that a worker handles before other queues are served."""


class HandlingStatistics(msgspec.Struct, frozen=True):
    """Since the start, by topic: handler calls that succeeded, calls that failed, and the seconds spent in both."""

    handled: dict[str, int]
    failed: dict[str, int]
    seconds: dict[str, float]


class Handling:
    """Passes messages to `handler`. `serve` runs the workers; `fill` adds messages."""

    def __init__(
        self,
        handler: Handler,
        mode: ConsumeMode,
        model: MessageModel,
        options: PushOptions,
        send_back: SendBack,
        *,
        needs_lock: bool,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._handler = handler
        self._is_orderly = mode is ConsumeMode.ORDERLY
        self._model = model
        self._options = options
        self._send_back = send_back
        self._needs_lock = needs_lock
        self._wall_clock_ms = wall_clock_ms
        self._timers = _Timers()
        self._is_finishing = False
        self._not_async: TypeError | None = None
        """Raised by `serve` once a call has found that the handler is not async."""
        # Bounded by the limits of the process queues: an item is one message, or one queue.
        self._ready, self._ready_to_take = anyio.create_memory_object_stream[tuple[HeldQueue, ProcessQueue | None]](
            math.inf
        )
        self._handled: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()

    def statistics(self) -> HandlingStatistics:
        """Returns a snapshot of the counters."""
        return HandlingStatistics(dict(self._handled), dict(self._failed), dict(self._seconds))

    def fill(self, held: HeldQueue, count: int) -> None:
        """Schedules `count` new messages of `held`; with ORDERLY, schedules the queue instead, unless it is scheduled
        already."""
        if self._is_orderly:
            self._schedule(held)
            return
        for _ in range(count):
            self._put_ready(held, held.process_queue)

    async def serve(self) -> None:
        """Runs the handlers until cancelled, or until `finish` was called and all have ended. Raises TypeError, alone
        or in an ExceptionGroup, if the handler is not async."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._timers.serve)
            async with anyio.create_task_group() as workers:
                for _ in range(self._options.concurrency):
                    workers.start_soon(self._work, self._ready_to_take)
            tasks.cancel_scope.cancel()
        if self._not_async is not None:
            raise self._not_async

    def finish(self) -> None:
        """Ends `serve` once the running handlers have ended; no further handler starts."""
        self._is_finishing = True
        self._ready.close()

    def close(self) -> None:
        """Closes the channel of ready messages. Call it after `serve` has ended."""
        self._ready.close()
        self._ready_to_take.close()

    async def call(self, message: ReceivedMessage) -> Exception | None:
        """Calls the handler. Returns None if it succeeded, otherwise its exception (see `failure_of`), or TimeoutError
        after `consume_timeout_s`. If the handler is not async, raises TypeError, and `serve` ends with it: the handler
        would fail for every message."""
        started = anyio.current_time()
        failure: Exception | None = None
        is_async = True
        scope = anyio.CancelScope(deadline=started + self._options.consume_timeout_s)
        try:
            with scope:
                handled = self._handler(message)
                if is_async := inspect.isawaitable(handled):
                    await handled
        except (Exception, anyio.get_cancelled_exc_class(), BaseExceptionGroup) as error:
            failure = failure_of(error)
        if not is_async:
            self._not_async = TypeError(f"the handler is not async: it returned {handled!r}, which can't be awaited")
            self.finish()
            raise self._not_async
        if failure is None and scope.cancelled_caught:
            failure = TimeoutError(f"not handled within {self._options.consume_timeout_s:g} s")
        topic = message.topic
        self._seconds[topic] += anyio.current_time() - started  # type: ignore[assignment]
        (self._handled if failure is None else self._failed)[topic] += 1
        return failure

    def _put_ready(self, held: HeldQueue, process_queue: ProcessQueue | None) -> None:
        try:
            self._ready.send_nowait((held, process_queue))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass  # the consumer is shutting down

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
            if failure is None or await self._is_resolved(message, failure):
                process_queue.finish(message)
            else:
                again = message.__replace__(reconsume_times=message.reconsume_times + 1)
                self._timers.add(_SEND_BACK_PAUSE_S, lambda: self._retry(held, process_queue, again))
        finally:
            held.end_handling(self._wall_clock_ms())

    async def _is_resolved(self, message: ReceivedMessage, failure: Exception) -> bool:
        """Sends a failed message back to the broker; with BROADCASTING, drops it instead, and logs that. Returns False
        if it could not be sent back, so that this consumer must handle it again."""
        if isinstance(failure, RetryLater):
            delay_level = failure.delay_level
        else:
            delay_level = 0 if message.body_error is None else -1  # a retry would be unreadable as well
        if self._model is MessageModel.BROADCASTING:
            _log.error(
                "client.message_dropped message=%s topic=%s", message.message_id, message.topic, exc_info=failure
            )
            return True
        if not isinstance(failure, RetryLater):
            _log.warning(
                "client.message_failed message=%s topic=%s", message.message_id, message.topic, exc_info=failure
            )
        return await self._send_back.redeliver(message, delay_level)

    def _retry(self, held: HeldQueue, process_queue: ProcessQueue, message: ReceivedMessage) -> None:
        process_queue.put_back(message)
        self._put_ready(held, process_queue)

    async def _handle_in_order(self, held: HeldQueue) -> None:
        for _ in range(_QUEUE_SLICE):
            process_queue = held.process_queue
            if process_queue is None or held.is_revoked or self._is_finishing:
                break
            if self._needs_lock and not held.is_locked:
                break  # the queue restarts once it is locked again
            message = process_queue.take()
            if message is None:
                break
            held.begin_handling()
            try:
                failure = await self.call(message)
                if failure is None or await self._is_dead(message, failure):
                    process_queue.finish(message)
                else:
                    process_queue.put_back(message.__replace__(reconsume_times=message.reconsume_times + 1))
                    self._timers.add(self._options.suspend_s, lambda: self._put_ready(held, None))
                    return  # the queue stays scheduled: the timer makes it ready again
            finally:
                held.end_handling(self._wall_clock_ms())
        else:
            self._put_ready(held, None)  # behind the other queues
            return
        held.is_scheduled = False

    async def _is_dead(self, message: ReceivedMessage, failure: Exception) -> bool:
        """Makes a failed message a dead letter if it should not be retried: it has no retries left, its body is
        unreadable, or the handler raised `RetryLater(-1)`. With BROADCASTING, drops it instead. Returns False if this
        consumer must handle it again."""
        if not isinstance(failure, RetryLater):
            _log.warning(
                "client.message_failed message=%s topic=%s", message.message_id, message.topic, exc_info=failure
            )
        times_max = self._options.reconsume_times_max
        is_last = times_max is not None and message.reconsume_times >= times_max
        if isinstance(failure, RetryLater):
            is_last |= failure.delay_level < 0
        elif message.body_error is not None:
            is_last = True  # a retry would be unreadable as well
        if not is_last or self._model is MessageModel.BROADCASTING:
            return is_last
        return await self._send_back.make_dead_letter(message)


class _Timers:
    """Calls functions after a delay, all in one task."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._sooner = anyio.Event()

    def add(self, delay_s: float, call: Callable[[], None]) -> None:
        """Schedules `call` to be called after `delay_s`."""
        due = anyio.current_time() + delay_s
        if not self._due or due < self._due[0][0]:
            self._sooner.set()
        heapq.heappush(self._due, (due, next(self._numbers), call))

    async def serve(self) -> None:
        """Makes the calls when due, until cancelled."""
        while True:
            now = anyio.current_time()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._sooner = anyio.Event()
            await wait_any(self._due[0][0] - now if self._due else math.inf, self._sooner)
