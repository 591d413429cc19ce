"""Sends that travel together: what waits while a request is in flight leaves as one batch.

A send that finds nothing in flight leaves at once, as a request of its own: nobody waits for company. Those that come
meanwhile gather in a batch, which leaves when the answer is there. Each still gets its own result. What may share a
request, and what becomes of one that is refused, says `shared_requests.py`.

A lane is the messages that may leave with each other, in the order of their sends. One to a chosen queue has one
request in flight, so that order is kept there; the others have one for each broker that has queues of the topic. A
full batch gains nothing by waiting for more: there may be four for each, so that brokers have work while this side
wakes those whose results have come.

A request may take seconds where a slave is slow. No message waits that long for the one before it: after `_PATIENCE_S`
a batch leaves beside what is in flight, as it would without batching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import anyio
import anyio.lowlevel

from ha.client.messages import MessageQueue, SendResult
from ha.client.parking import Parking, parking_here
from ha.client.sender import Outgoing, Sender
from ha.client.shared_requests import (
    BATCH_BYTES_MAX,
    BATCH_COUNT_MAX,
    FULL_IN_FLIGHT_MAX,
    Kind,
    SharedRequests,
    kind_of,
    size_of,
)
from ha.errors import ConnectionFailed, HalogError

_GATHERED = 32
"""Those whose sends have just returned may send again at once: a batch of fewer gives them time to join it."""
_TURNS_TO_JOIN = 2
"""Of the event loop, until every task that was woken has run; trio runs those of one turn in any order."""
_PATIENCE_S = 0.1
_TIMEOUT_MIN_S = 2 * _PATIENCE_S
"""Who has less time than this does not wait for others."""

_LaneKey = MessageQueue | Kind


class _Batch:
    """Messages that leave together. Their senders wait in `senders`, each at its message's place."""

    __slots__ = ("byte_count", "deadline", "has_left", "kind", "messages", "senders", "timeout_s", "topic")

    def __init__(self, topic: str, kind: Kind, timeout_s: float, senders: Parking) -> None:
        self.topic = topic
        self.kind = kind
        self.messages: list[Outgoing | None] = []
        self.senders = senders
        self.byte_count = 0
        self.timeout_s = timeout_s
        self.deadline = anyio.current_time() + timeout_s
        self.has_left = False

    @property
    def is_full(self) -> bool:
        """No other message fits in."""
        return len(self.messages) == BATCH_COUNT_MAX

    def withdraw(self, index: int) -> None:
        """The message's sender waits no more. Nothing, if it has left."""
        if not self.has_left:
            self.messages[index] = None

    def leave(self) -> list[Outgoing]:
        """What is to be sent."""
        self.has_left = True
        return [message for message in self.messages if message is not None]

    def arrive(self, results: list[SendResult | HalogError]) -> None:
        """`results` of the messages that left, in their order."""
        if len(results) < len(self.messages):
            of_left = iter(results)
            # Nobody waits for the result of one that was withdrawn.
            results = [results[0] if message is None else next(of_left) for message in self.messages]
        self.senders.give(results)

    def fail(self, failure: HalogError) -> None:
        """What became of all."""
        self.senders.give([failure] * len(self.messages))


def _raise_again(failure: HalogError) -> NoReturn:
    """An error of its own for each: one that is raised in many tasks would gather the tracebacks of all."""
    error = type(failure).__new__(type(failure), *failure.args)
    error.__dict__.update(failure.__dict__)
    raise error from failure.__cause__


class _Lane:
    """What may leave together, in order. `in_flight` counts requests, those about to be made too."""

    __slots__ = ("in_flight", "key", "queue", "waiting")

    def __init__(self, key: _LaneKey, queue: MessageQueue | None) -> None:
        self.key = key
        self.queue = queue
        self.in_flight = 0
        self.waiting: deque[_Batch] = deque()


class Batching:
    """Sends for one producer; see `open_batching`."""

    def __init__(self, sender: Sender, shared: SharedRequests) -> None:
        self._sender = sender
        self._shared = shared
        self._new_parking = parking_here()
        self._lanes: dict[_LaneKey, _Lane] = {}
        self._wanted: list[_Lane] = []
        self._wanted_came = anyio.Event()
        self._impatient: deque[tuple[_Lane, _Batch]] = deque()
        self._impatient_came = anyio.Event()
        self._turn = anyio.Lock(fast_acquire=True)
        self._is_closed = False

    async def send(self, message: Outgoing, queue: MessageQueue | None, timeout_s: float) -> SendResult:
        """Sends `message`, alone or with others; see Producer.send.

        Cancelled, a message that still waits is withdrawn; one that has left may be stored."""
        if (
            not message.may_join
            or timeout_s < _TIMEOUT_MIN_S
            or self._is_closed
            or self._shared.travels_alone(message.topic)
        ):
            return (await self._sender.send(message, queue, timeout_s)).result
        kind = kind_of(message)
        key = queue or kind
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key, queue)
        waiting = lane.waiting
        if not waiting and self._may_leave(lane, message.topic, lane.in_flight, is_full=False):
            lane.in_flight += 1
            try:
                return (await self._sender.send(message, queue, timeout_s)).result
            finally:
                self._answered(lane)
        size = size_of(message)
        batch = waiting[-1] if waiting else None
        if (
            batch is None
            or batch.byte_count + size > BATCH_BYTES_MAX
            or batch.timeout_s != timeout_s
            or batch.kind != kind
            or len(batch.messages) == BATCH_COUNT_MAX
            or batch.messages[0] is None
        ):
            batch = self._new_batch(lane, message.topic, kind, timeout_s)
        messages = batch.messages
        index = len(messages)
        messages.append(message)
        batch.byte_count += size
        if index == BATCH_COUNT_MAX - 1 and self._may_leave(lane, batch.topic, lane.in_flight, is_full=True):
            self._want(lane)
        try:
            result = await batch.senders.wait()
        except BaseException:
            batch.withdraw(index)
            raise
        if type(result) is not SendResult:
            _raise_again(result)
        return result

    async def serve(self) -> None:
        """Sends what waits, until cancelled; then it fails."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hurry)
                while True:
                    self._wanted_came = anyio.Event()
                    for lane in self._wanted:
                        tasks.start_soon(self._drive, lane)
                    self._wanted.clear()
                    await self._wanted_came.wait()
        finally:
            self._is_closed = True
            for lane in self._lanes.values():
                for batch in lane.waiting:
                    batch.fail(_closed(batch))

    def _new_batch(self, lane: _Lane, topic: str, kind: Kind, timeout_s: float) -> _Batch:
        batch = _Batch(topic, kind, timeout_s, self._new_parking())
        lane.waiting.append(batch)
        self._impatient.append((lane, batch))
        if len(self._impatient) == 1:
            self._impatient_came.set()
        return batch

    def _may_leave(self, lane: _Lane, topic: str, beside: int, *, is_full: bool) -> bool:
        """Whether another request may be made `beside` so many, of a full batch or of less."""
        if beside == 0 or lane.queue is not None:
            return beside == 0
        return beside < self._sender.broker_count(topic) * (FULL_IN_FLIGHT_MAX if is_full else 1)

    def _next_may_leave(self, lane: _Lane, beside: int) -> bool:
        first = lane.waiting[0]
        return self._may_leave(lane, first.topic, beside, is_full=first.is_full)

    def _answered(self, lane: _Lane) -> None:
        """A request has left the lane: another one may."""
        lane.in_flight -= 1
        if lane.waiting:
            if self._next_may_leave(lane, lane.in_flight):
                self._want(lane)
        elif lane.in_flight == 0:
            del self._lanes[lane.key]

    def _want(self, lane: _Lane) -> None:
        lane.in_flight += 1
        self._wanted.append(lane)
        self._wanted_came.set()

    async def _drive(self, lane: _Lane) -> None:
        """Sends one batch of a lane after the other, while there are any."""
        waiting = lane.waiting
        try:
            while waiting:
                await self._send_batch(lane, waiting.popleft())
                if waiting and not self._next_may_leave(lane, lane.in_flight - 1):
                    break  # it was slow for a while, or batches were full, and needed more
        finally:
            self._answered(lane)

    async def _hurry(self) -> None:
        """Has batches leave that have waited for too long."""
        impatient = self._impatient
        while True:
            while impatient:
                lane, batch = impatient[0]
                if not batch.has_left:
                    left_s = batch.deadline - batch.timeout_s + _PATIENCE_S - anyio.current_time()
                    if left_s > 0:
                        await anyio.sleep(left_s)
                        continue
                    self._want(lane)
                impatient.popleft()
            self._impatient_came = anyio.Event()
            await self._impatient_came.wait()

    async def _send_batch(self, lane: _Lane, batch: _Batch) -> None:
        messages = batch.leave()
        if not messages:
            return
        try:
            results = await self._shared.results(messages, lane.queue, batch.deadline)
        except HalogError as error:
            batch.fail(error)
        except BaseException:
            batch.fail(_closed(batch))
            raise
        else:
            # In turns: else the senders of several batches whose results came at once would run first, their next
            # batches leave at once, and so on: one side idle while the other works.
            try:
                await self._turn.acquire()
            finally:
                batch.arrive(results)
            try:
                if not lane.waiting or len(lane.waiting[0].messages) < _GATHERED:
                    for _ in range(_TURNS_TO_JOIN):
                        await anyio.lowlevel.checkpoint()
            finally:
                self._turn.release()


def _closed(batch: _Batch) -> ConnectionFailed:
    return ConnectionFailed(batch.topic, "the producer was closed")


@asynccontextmanager
async def open_batching(sender: Sender, shared: SharedRequests) -> AsyncIterator[Batching]:
    """Batching for as long as the block lasts; at its end what waits or is in flight with others fails."""
    batching = Batching(sender, shared)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batching.serve)
        try:
            yield batching
        finally:
            tasks.cancel_scope.cancel()
