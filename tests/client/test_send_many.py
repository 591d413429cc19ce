"""Producer.send_many with servers that answer on demand: which messages share requests, and their results."""

import anyio
import pytest

from ha.client import ClientOptions, Message, MessageQueue, SendResult, SendStatus
from ha.client.shared_requests import BATCH_BYTES_MAX, BATCH_COUNT_MAX, FULL_IN_FLIGHT_MAX
from ha.errors import BrokerError, ConnectionFailed, HalogError, RequestTimedOut, RouteNotFound
from ha.protocol.codes import ResponseCode
from tests.client.backends import on_both_backends
from tests.client.batching_world import (
    BATCH,
    QUEUE,
    SINGLE,
    Broker,
    World,
    bodies,
    open_world,
    open_world_of_one,
    settled,
)

WITHOUT = ClientOptions(batching=False, compress_from_bytes=10_000_000)
BOTH = pytest.mark.parametrize("options", [WITHOUT, ClientOptions(batching=True)])


def numbered(count: int, topic: str = "T") -> list[Message]:
    return [Message(topic, b"%d" % number) for number in range(count)]


def places(outcomes: list[SendResult | HalogError]) -> list[tuple[MessageQueue, int]]:
    found = []
    for outcome in outcomes:
        assert isinstance(outcome, SendResult), outcome
        assert outcome.status is SendStatus.SEND_OK
        found.append((outcome.queue, outcome.queue_offset))
    return found


@on_both_backends()
@BOTH
async def test_each_message_gets_its_own_result(options: ClientOptions) -> None:
    broker = Broker()
    async with open_world([broker], options) as world:
        count = 2 * BATCH_COUNT_MAX + 10
        outcomes = await world.producer.send_many(numbered(count))
        assert sorted(map(len, broker.sent)) == [10, BATCH_COUNT_MAX, BATCH_COUNT_MAX]
        told = dict(zip([b"%d" % number for number in range(count)], places(outcomes), strict=True))
        for command in broker.commands:
            queue = MessageQueue("T", "a", int(command.ext_fields["e"]))
            assert [told[sent] for sent in bodies(command)] == [(queue, n) for n in range(len(bodies(command)))]
        assert len({outcome.message_id for outcome in outcomes if isinstance(outcome, SendResult)}) == count


@on_both_backends(open_world_of_one, WITHOUT)
async def test_none_one_and_any_iterable(world: World, broker: Broker) -> None:
    assert await world.producer.send_many([]) == []
    assert broker.sent == []
    assert len(places(await world.producer.send_many(message for message in numbered(1)))) == 1
    assert [command.code for command in broker.commands] == [SINGLE]


@on_both_backends()
async def test_incompatible_messages_use_separate_requests() -> None:
    broker = Broker()
    mixed = [
        Message("T", b"0"),
        Message("Other", b"1"),
        Message("T", b"2", delay_level=3),
        Message("T", b"3", wait_stored=False),
        Message("T", b"4"),
        Message("Other", b"5"),
        Message("T", b"6", wait_stored=False),
    ]
    async with open_world([broker], WITHOUT) as world:
        outcomes = await world.producer.send_many(mixed)
        assert sorted(broker.sent) == [[b"0", b"4"], [b"1", b"5"], [b"2"], [b"3", b"6"]]
        assert [queue.topic for queue, _ in places(outcomes)] == [message.topic for message in mixed]


@on_both_backends()
async def test_chosen_queue_gets_requests_in_order() -> None:
    broker = Broker()
    messages = numbered(2 * BATCH_COUNT_MAX)
    messages[1] = Message("T", b"1", delay_level=3)
    messages[2] = Message("T", b"2", wait_stored=False)
    async with open_world([broker], WITHOUT) as world:
        broker.hold()
        async with anyio.create_task_group() as tasks:

            async def send() -> None:
                queue_and_offset = places(await world.producer.send_many(messages, queue=QUEUE))
                assert queue_and_offset == [(QUEUE, number) for number in range(len(messages))]

            tasks.start_soon(send)
            await world.came(1)
            await settled()
            assert broker.sent == [[b"0"]]
            broker.release()
        assert [sent for request in broker.sent for sent in request] == [message.body for message in messages]
        assert [len(request) for request in broker.sent] == [1, 1, 1, BATCH_COUNT_MAX, BATCH_COUNT_MAX - 3]


@on_both_backends()
async def test_requests_in_flight_per_broker_are_limited() -> None:
    broker = Broker()
    count = (FULL_IN_FLIGHT_MAX + 2) * BATCH_COUNT_MAX
    async with open_world([broker], WITHOUT) as world:
        broker.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.producer.send_many, numbered(count))
            await world.came(FULL_IN_FLIGHT_MAX)
            await settled()
            assert len(broker.commands) == FULL_IN_FLIGHT_MAX
            broker.release()
        assert sum(map(len, broker.sent)) == count


@on_both_backends()
async def test_request_size_is_limited() -> None:
    broker = Broker()
    part = BATCH_BYTES_MAX // 3
    async with open_world([broker], WITHOUT) as world:
        messages = [Message("T", b"%d" % number + b"-" * part) for number in range(4)]
        places(await world.producer.send_many([*messages, Message("T", b"!" * (2 * BATCH_BYTES_MAX))]))
        assert sorted(map(len, broker.sent)) == [1, 2, 2]


@on_both_backends()
@pytest.mark.parametrize("queue", [None, QUEUE])
async def test_rejected_message_does_not_fail_the_others(queue: MessageQueue | None) -> None:
    broker = Broker(lambda command: ResponseCode.MESSAGE_ILLEGAL if b"1" in bodies(command) else None)
    async with open_world([broker], WITHOUT) as world:
        first, bad, last = await world.producer.send_many(numbered(3), queue=queue)
        assert isinstance(bad, BrokerError)
        assert bad.code == ResponseCode.MESSAGE_ILLEGAL
        assert len(places([first, last])) == 2
        assert broker.sent[0] == [b"0", b"1", b"2"]
        assert sorted(broker.sent[1:]) == [[b"0"], [b"1"], [b"2"]]


@on_both_backends()
async def test_messages_are_sent_singly_after_a_rejected_batch() -> None:
    broker = Broker(lambda command: ResponseCode.MESSAGE_ILLEGAL if command.code == BATCH else None)
    async with open_world([broker], WITHOUT) as world:
        for _ in range(2):
            assert len(places(await world.producer.send_many(numbered(3)))) == 3
        assert [len(request) for request in broker.sent] == [3, 1, 1, 1, 1, 1, 1]


@on_both_backends(open_world_of_one, WITHOUT)
async def test_invalid_message_prevents_the_whole_send(world: World, broker: Broker) -> None:
    with pytest.raises(ValueError, match="a body of 0 bytes"):
        await world.producer.send_many([Message("T", b"good"), Message("T", b"")])
    assert broker.sent == []


@on_both_backends(open_world_of_one, WITHOUT)
async def test_common_failure_is_reported_for_each_message(world: World, broker: Broker) -> None:
    nowhere, there = await world.producer.send_many([Message("Nowhere", b"x"), Message("T", b"y")])
    assert isinstance(nowhere, RouteNotFound)
    assert isinstance(there, SendResult)
    broker.hold()
    outcomes = await world.producer.send_many(numbered(3), timeout_s=0.05)
    assert [type(outcome) for outcome in outcomes] == [RequestTimedOut] * 3
    broker.release()


@on_both_backends()
@pytest.mark.parametrize("count", [3, 8 * BATCH_COUNT_MAX])
async def test_closing_fails_requests_in_flight_and_later_ones(*, count: int) -> None:
    broker = Broker()
    async with open_world([broker], WITHOUT, outcome_count=count) as world:
        broker.hold()

        async def send() -> None:
            outcomes = await world.producer.send_many(numbered(count))
            world.add((b"%d" % number, outcome) for number, outcome in enumerate(outcomes))

        world.tasks.start_soon(send)
        await world.came(1)
    assert {type(outcome) for outcome in world.outcomes.values()} == {ConnectionFailed}
    assert ("T: this client was closed" in map(str, world.outcomes.values())) == (count > 3)


@on_both_backends(open_world_of_one, WITHOUT)
async def test_send_many_can_be_cancelled(world: World, broker: Broker) -> None:
    broker.hold()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.producer.send_many, numbered(8 * BATCH_COUNT_MAX))
            await world.came(FULL_IN_FLIGHT_MAX)
            scope.cancel()
    broker.release()
    assert scope.cancelled_caught
    await settled()
    assert len(broker.commands) == FULL_IN_FLIGHT_MAX
    assert len(places(await world.producer.send_many(numbered(3)))) == 3
