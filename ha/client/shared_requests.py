"""Sends several messages in one request and returns a result for each.

Messages can share a request if they have the same topic, `wait_stored` and compression. Messages with a delay or
priority and half messages, which brokers store elsewhere, are sent alone, as are all messages of a topic whose broker
recently rejected a batch. A broker accepts or rejects a batch as a whole. A batch that was rejected for its content is
sent again message by message, so that one invalid message does not affect the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import anyio

from ha.client.messages import MessageQueue, SendResult
from ha.client.sender import RETRYABLE_CODES, Outgoing, Sender, results_of, with_id
from ha.errors import BrokerError, ConnectionFailed, HalogError, RouteNotFound
from ha.protocol.batch import ENTRY_SIZE_MIN
from ha.protocol.codes import ResponseCode

BATCH_COUNT_MAX = 128
"""Maximum number of messages of a batch. Larger batches cost less per message, but client and broker then wait longer
for each other."""
BATCH_BYTES_MAX = 512 * 1024
"""Maximum bytes of a batch, unless a single message is longer."""
FULL_IN_FLIGHT_MAX = 4
"""Maximum number of concurrent requests per broker for full batches."""
_BATCH_REJECTION_S = 60.0
"""Time in seconds for which a topic's messages are sent one per request, after a broker rejected them as a batch but
accepted each of them alone."""

Kind = tuple[str, int, bool]
"""Topic, `sys_flag` (compression) and `waits`, which all messages of one request share."""
Outcome = SendResult | HalogError


def kind_of(message: Outgoing) -> Kind:
    """Returns the kind of a message: those of the same kind can share a request."""
    return message.topic, message.sys_flag, message.waits


def size_of(message: Outgoing) -> int:
    """Returns the size of the message's entry in a batch in bytes, without a unique id that is added later."""
    return ENTRY_SIZE_MIN + len(message.body) + len(message.properties)


class SharedRequests:
    """Sends shared requests for one producer."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._rejecting_until: dict[str, float] = {}

    def rejects_batches(self, topic: str) -> bool:
        """Returns whether messages of `topic` are sent alone, because a broker rejected a batch within
        _BATCH_REJECTION_S."""
        if not self._rejecting_until:
            return False
        until = self._rejecting_until.get(topic)
        if until is None:
            return False
        if anyio.current_time() < until:
            return True
        del self._rejecting_until[topic]
        return False

    async def send_many(
        self, messages: Sequence[Outgoing], queue: MessageQueue | None, timeout_s: float
    ) -> list[Outcome]:
        """Returns the outcome of each message, in order; see Producer.send_many."""
        batches = self._batches(messages, keeps_order=queue is not None)
        brokers = sum(self._sender.broker_count(topic) for topic in {message.topic for message in messages})
        deadline = anyio.current_time() + timeout_s
        return await self._outcomes(messages, batches, queue, deadline, FULL_IN_FLIGHT_MAX * brokers)

    async def _outcomes(
        self,
        messages: Sequence[Outgoing],
        batches: Iterator[Sequence[int]],
        queue: MessageQueue | None,
        deadline: float,
        in_flight_max: int,
    ) -> list[Outcome]:
        """Sends one request for each item of `batches`, the indexes of its messages; returns the outcome of each
        message, in the order of `messages`.

        Requests to a chosen queue are sent one after the other, others up to `in_flight_max` concurrently."""
        outcomes: dict[int, Outcome] = {}

        async def send_on() -> None:
            for places in batches:
                try:
                    if not self._sender.is_open:  # closed during an earlier request
                        raise ConnectionFailed(messages[places[0]].topic, "this client was closed")
                    results = await self.results([messages[place] for place in places], queue, deadline)
                except HalogError as error:
                    results = [error] * len(places)
                outcomes.update(zip(places, results, strict=True))

        if queue is not None or len(messages) == 1:
            await send_on()
        else:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(in_flight_max, len(messages))):
                    tasks.start_soon(send_on)
        return [outcomes[place] for place in range(len(messages))]

    def _batches(self, messages: Sequence[Outgoing], *, keeps_order: bool) -> Iterator[Sequence[int]]:
        """Yields the indexes of each request's messages. `keeps_order`: a message is never sent in a later request than
        one that follows it."""
        gathering: dict[Kind, tuple[list[int], int]] = {}
        for place, message in enumerate(messages):
            kind, size = kind_of(message), size_of(message)
            alone = not message.is_batchable or self.rejects_batches(message.topic)
            if keeps_order and (alone or kind not in gathering):
                for places, _ in gathering.values():
                    yield places
                gathering.clear()
            if alone:
                yield [place]
                continue
            places, size_before = gathering.get(kind, ([], 0))
            if places and (len(places) == BATCH_COUNT_MAX or size_before + size > BATCH_BYTES_MAX):
                yield places
                places, size_before = [], 0
            places.append(place)
            gathering[kind] = places, size_before + size
        for places, _ in gathering.values():
            yield places

    async def results(self, messages: Sequence[Outgoing], queue: MessageQueue | None, deadline: float) -> list[Outcome]:
        """Sends messages that can share a request; returns the outcome of each, in order. Raises the HalogError with
        which the request failed, unless the batch was rejected for its content: then sends the messages singly.

        `deadline` is on the event loop's clock."""
        left_s = max(0.0, deadline - anyio.current_time())
        if len(messages) == 1:
            return [(await self._sender.send(messages[0], queue, left_s)).result]
        batch, message_ids = self._sender.batch_of(messages)
        try:
            return results_of((await self._sender.send(batch, queue, left_s)).result, message_ids)
        except RouteNotFound:
            raise
        except BrokerError as error:
            if error.was_sent or (error.code in RETRYABLE_CODES and error.code != ResponseCode.SYSTEM_ERROR):
                raise
        messages = list(map(with_id, messages, message_ids))
        alone = ((place,) for place in range(len(messages)))
        results = await self._outcomes(messages, alone, queue, deadline, len(messages))
        if not any(isinstance(result, HalogError) for result in results):
            self._rejecting_until[messages[0].topic] = anyio.current_time() + _BATCH_REJECTION_S
        return results
