"""Automatic batching of sends: messages that arrive while a request is in flight are sent together in the next one.

If no request is in flight, a message is sent at once, on its own. Later messages are collected in a batch, which is
sent when the response arrives. Each send still gets its own result. `shared_requests.py` decides which messages can
share a request and handles rejected batches.

A lane holds the messages that can be batched with each other, in order. A lane for a chosen queue holds all messages
for this queue, even those that must be sent alone, and has at most one request in flight, which keeps the order. Any
other lane may have one request in flight per broker with queues of the topic, and sends a full batch while it has fewer
than four per broker: waiting would not make a full batch larger, and brokers stay busy while the client wakes the
senders of the previous batch.

A request can take seconds if a slave is slow. A batch waits for the request before it at most `_BATCH_DELAY_MAX_S` and
is then sent concurrently, as it would be without batching. This applies to a lane for a chosen queue, too: brokers that
handle the requests of a connection concurrently, as RocketMQ's do, may then store its messages in another order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy

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

_BATCH_READY_COUNT = 32
"""Minimum number of messages with which a batch is sent at once. Before a smaller one is sent, the senders that were
just woken get time to add their next messages."""
_CHECKPOINTS_TO_JOIN = 2
"""Number of checkpoints until every woken task has run; trio runs the tasks of one scheduler pass in any order."""
_BATCH_DELAY_MAX_S = 0.1
"""Longest time that a batch waits for earlier requests of its lane, in seconds."""
_TIMEOUT_MIN_S = 2 * _BATCH_DELAY_MAX_S
"""Minimum timeout in seconds of a send that may be batched. One to a chosen queue with a shorter timeout may wait for
earlier ones until its timeout has passed; it then fails."""

_LaneKey = MessageQueue | Kind


class _Batch:
    """The messages of one request; only one if `kind` is None. The tasks that send them wait in `senders`, in the order
    of the messages."""

    __slots__ = ("byte_count", "created_at", "deadline", "is_sent", "kind", "messages", "senders", "timeout_s", "topic")

    def __init__(self, topic: str, kind: Kind | None, timeout_s: float, senders: Parking) -> None:
        self.topic = topic
        self.kind = kind
        self.messages: list[Outgoing | None] = []
        self.senders = senders
        self.byte_count = 0
        self.timeout_s = timeout_s
        self.created_at = anyio.current_time()
        self.deadline = self.created_at + timeout_s
        self.is_sent = False

    @property
    def is_full(self) -> bool:
        """Whether the batch has its maximum number of messages."""
        return len(self.messages) == BATCH_COUNT_MAX

    def withdraw(self, index: int) -> None:
        """Removes a message whose sender was cancelled; does nothing if it was sent."""
        if not self.is_sent:
            self.messages[index] = None

    def take_messages(self) -> list[Outgoing]:
        """Marks the batch as sent and returns the messages that were not withdrawn."""
        self.is_sent = True
        return [message for message in self.messages if message is not None]

    def deliver(self, results: list[SendResult | HalogError]) -> None:
        """Wakes the senders. `results` has one result for each message that was sent, in order."""
        if len(results) < len(self.messages):
            sent = iter(results)
            # A withdrawn message has no waiting sender, so any value will do.
            results = [results[0] if message is None else next(sent) for message in self.messages]
        self.senders.give(results)

    def fail(self, failure: HalogError) -> None:
        """Wakes all senders with `failure`."""
        self.senders.give([failure] * len(self.messages))


class _Lane:
    """Messages that can be batched with each other, or all those for a chosen `queue`, in order. `in_flight`: number of
    requests that are in flight or scheduled to be sent."""

    __slots__ = ("in_flight", "key", "queue", "waiting")

    def __init__(self, key: _LaneKey, queue: MessageQueue | None) -> None:
        self.key = key
        self.queue = queue
        self.in_flight = 0
        self.waiting: deque[_Batch] = deque()


class Batching:
    """Batches the sends of one producer; see `open_batching`."""

    def __init__(self, sender: Sender, shared: SharedRequests) -> None:
        self._sender = sender
        self._shared = shared
        self._new_parking = parking_here()
        self._lanes: dict[_LaneKey, _Lane] = {}
        self._scheduled: list[_Lane] = []
        self._scheduled_came = anyio.Event()
        self._delayed: deque[tuple[_Lane, _Batch]] = deque()
        self._delayed_came = anyio.Event()
        self._delivery_lock = anyio.Lock(fast_acquire=True)
        self._is_closed = False

    async def send(self, message: Outgoing, queue: MessageQueue | None, timeout_s: float) -> SendResult:
        """Sends `message`, alone or in a batch; see Producer.send.

        On cancellation a waiting message is withdrawn; one already sent may be stored."""
        is_alone = not message.is_batchable or timeout_s < _TIMEOUT_MIN_S or self._shared.rejects_batches(message.topic)
        kind = None if is_alone else kind_of(message)
        key = queue or kind
        if key is None or self._is_closed:
            return (await self._sender.send(message, queue, timeout_s)).result
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key, queue)
        waiting = lane.waiting
        if not waiting and self._may_send(lane, message.topic, lane.in_flight, is_full=False):
            lane.in_flight += 1
            try:
                return (await self._sender.send(message, queue, timeout_s)).result
            finally:
                self._on_answered(lane)
        size = size_of(message)
        batch = waiting[-1] if waiting else None
        if (
            batch is None
            or kind is None
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
        if index == BATCH_COUNT_MAX - 1 and self._may_send(lane, batch.topic, lane.in_flight, is_full=True):
            self._schedule(lane)
        try:
            result = await batch.senders.wait()
        except BaseException:
            batch.withdraw(index)
            raise
        if type(result) is not SendResult:
            # A copy: one exception raised in many tasks would collect the tracebacks of all.
            raise copy(result) from result.__cause__
        return result

    async def serve(self) -> None:
        """Sends waiting batches until cancelled; then the remaining sends fail with ConnectionFailed."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_delayed)
                while True:
                    self._scheduled_came = anyio.Event()
                    for lane in self._scheduled:
                        tasks.start_soon(self._drive, lane)
                    self._scheduled.clear()
                    await self._scheduled_came.wait()
        finally:
            self._is_closed = True
            for lane in self._lanes.values():
                while lane.waiting:
                    batch = lane.waiting.popleft()
                    batch.fail(_closed(batch))

    def _new_batch(self, lane: _Lane, topic: str, kind: Kind | None, timeout_s: float) -> _Batch:
        batch = _Batch(topic, kind, timeout_s, self._new_parking())
        lane.waiting.append(batch)
        self._delayed.append((lane, batch))
        if len(self._delayed) == 1:
            self._delayed_came.set()
        return batch

    def _may_send(self, lane: _Lane, topic: str, beside: int, *, is_full: bool) -> bool:
        """Returns whether a batch may be sent while `beside` other requests of the lane are in flight. `is_full`: the
        batch has its maximum number of messages."""
        if beside == 0 or lane.queue is not None:
            return beside == 0
        return beside < self._sender.broker_count(topic) * (FULL_IN_FLIGHT_MAX if is_full else 1)

    def _may_send_next(self, lane: _Lane, beside: int) -> bool:
        first = lane.waiting[0]
        return self._may_send(lane, first.topic, beside, is_full=first.is_full)

    def _on_answered(self, lane: _Lane) -> None:
        """Accounts for a finished request and schedules the next one."""
        lane.in_flight -= 1
        if lane.waiting:
            if self._may_send_next(lane, lane.in_flight):
                self._schedule(lane)
        elif lane.in_flight == 0:
            del self._lanes[lane.key]

    def _schedule(self, lane: _Lane) -> None:
        lane.in_flight += 1
        self._scheduled.append(lane)
        self._scheduled_came.set()

    async def _drive(self, lane: _Lane) -> None:
        """Sends the lane's batches one after the other until none is left or fewer requests are allowed."""
        waiting = lane.waiting
        try:
            while waiting:
                await self._send_batch(lane, waiting.popleft())
                if waiting and not self._may_send_next(lane, lane.in_flight - 1):
                    break  # delayed or full batches have started further requests
        finally:
            self._on_answered(lane)

    async def _send_delayed(self) -> None:
        """Schedules another request of a lane when one of its batches has waited for `_BATCH_DELAY_MAX_S`."""
        impatient = self._delayed
        while True:
            while impatient:
                lane, batch = impatient[0]
                if not batch.is_sent:
                    left_s = batch.created_at + _BATCH_DELAY_MAX_S - anyio.current_time()
                    if left_s > 0:
                        await anyio.sleep(left_s)
                        continue
                    self._schedule(lane)
                impatient.popleft()
            self._delayed_came = anyio.Event()
            await self._delayed_came.wait()

    async def _send_batch(self, lane: _Lane, batch: _Batch) -> None:
        messages = batch.take_messages()
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
            # One batch at a time: if the results of several batches arrived together, all their senders would run
            # before the next batches are sent, all at once, so that client and broker would alternately be idle.
            try:
                await self._delivery_lock.acquire()
            finally:
                batch.deliver(results)
            try:
                if not lane.waiting or len(lane.waiting[0].messages) < _BATCH_READY_COUNT:
                    for _ in range(_CHECKPOINTS_TO_JOIN):
                        await anyio.lowlevel.checkpoint()
            finally:
                self._delivery_lock.release()


def _closed(batch: _Batch) -> ConnectionFailed:
    return ConnectionFailed(batch.topic, "the producer was closed", was_sent=batch.is_sent)


@asynccontextmanager
async def open_batching(sender: Sender, shared: SharedRequests) -> AsyncIterator[Batching]:
    """Runs batching for the duration of the block; at its end waiting messages and batches in flight fail with
    ConnectionFailed."""
    batching = Batching(sender, shared)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batching.serve)
        try:
            yield batching
        finally:
            tasks.cancel_scope.cancel()
