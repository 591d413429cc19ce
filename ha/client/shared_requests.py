"""Messages that share a request, each with a result of its own.

What may share one are messages of one topic, one `wait_stored` and one kind of compression; what a broker puts aside
(delays, transactions) or stores in a way of its own travels alone, as does everything to a topic whose broker has just
refused a batch. A broker knows a batch as a whole: its error is the error of each, and one that it will not take as
such is sent again message by message, so that one that is refused takes no other with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import anyio

from ha.client.messages import MessageQueue, SendResult
from ha.client.sender import RETRIED_ELSEWHERE, Outgoing, Sender, results_of, with_id
from ha.errors import BrokerError, HalogError, RouteNotFound
from ha.protocol.batch import ENTRY_SIZE_MIN
from ha.protocol.codes import ResponseCode

BATCH_COUNT_MAX = 128
"""Messages of a batch. More of them would cost less each, and have one side wait for the other for longer."""
BATCH_BYTES_MAX = 512 * 1024
"""Of bodies and properties, unless one alone is longer."""
FULL_IN_FLIGHT_MAX = 4
"""Requests for each broker, beside which a full batch may not leave."""
_REFUSED_S = 60.0
"""How long a topic's messages travel alone after a broker took them so and not as a batch."""

Kind = tuple[str, int, bool]
"""Topic, kind of compression and `wait_stored`: what messages of one request share."""
Outcome = SendResult | HalogError


def kind_of(message: Outgoing) -> Kind:
    """Those with the same may share a request."""
    return message.topic, message.sys_flag, message.waits


def size_of(message: Outgoing) -> int:
    """Bytes of its entry in a batch."""
    return ENTRY_SIZE_MIN + len(message.body) + len(message.properties)


class SharedRequests:
    """Sends several messages with one request each time, for one producer."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._alone_until: dict[str, float] = {}

    def travels_alone(self, topic: str) -> bool:
        """Whether its broker has refused a batch of late."""
        if not self._alone_until:
            return False
        until = self._alone_until.get(topic)
        if until is None:
            return False
        if anyio.current_time() < until:
            return True
        del self._alone_until[topic]
        return False

    async def send_many(
        self, messages: Sequence[Outgoing], queue: MessageQueue | None, timeout_s: float
    ) -> list[Outcome]:
        """What became of each, in their order; see Producer.send_many."""
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
        """What became of each message, in their order. `batches`: where those of each request stand among them; to a
        chosen queue one goes after the other, else so many at once."""
        outcomes: dict[int, Outcome] = {}

        async def send_on() -> None:
            for places in batches:
                try:
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
        """Where the messages of each request stand among `messages`."""
        gathering: dict[Kind, tuple[list[int], int]] = {}
        for place, message in enumerate(messages):
            kind, size = kind_of(message), size_of(message)
            alone = not message.may_join or self.travels_alone(message.topic)
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
        """Sends messages that may share a request, at `deadline` of the event loop's clock at the latest; what became
        of each, in their order. HalogError is what became of all."""
        left_s = max(0.0, deadline - anyio.current_time())
        if len(messages) == 1:
            return [(await self._sender.send(messages[0], queue, left_s)).result]
        batch, message_ids = self._sender.batch_of(messages)
        try:
            return results_of((await self._sender.send(batch, queue, left_s)).result, message_ids)
        except RouteNotFound:
            raise
        except BrokerError as error:
            if error.code in RETRIED_ELSEWHERE and error.code != ResponseCode.SYSTEM_ERROR:
                raise
        messages = list(map(with_id, messages, message_ids))
        alone = ((place,) for place in range(len(messages)))
        results = await self._outcomes(messages, alone, queue, deadline, len(messages))
        if not any(isinstance(result, HalogError) for result in results):
            self._alone_until[messages[0].topic] = anyio.current_time() + _REFUSED_S
        return results
