"""Messages batched by the SDK are stored by real brokers as if sent singly: once, at the reported offsets."""

from collections import Counter

import pytest
import trio

from ha.client import (
    Client,
    ClientOptions,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    ReceivedMessage,
    SendResult,
    SendStatus,
)
from ha.errors import BrokerError, ConnectionFailed, RouteNotFound
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.interop.test_sdk import retry_on

MESSAGE_COUNT = 3_000
"""Messages of tasks that send in a loop"""
MANY = 300
"""Messages sent with one call, concurrently"""
IN_FLIGHT = 100
TOPIC = "together"


async def read_all(consumer: PullConsumer) -> dict[str, ReceivedMessage]:
    """Messages by id; each must be there once."""
    found: dict[str, ReceivedMessage] = {}
    for queue in await consumer.queues(TOPIC):
        offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
        while offset < end:
            result = await consumer.pull(queue, offset)
            assert result.next_offset > offset
            for message in result.messages:
                assert message.message_id not in found
                found[message.message_id] = message
            offset = result.next_offset
    return found


@pytest.mark.usual_release("5.5.0")
@pytest.mark.parametrize("role", ["ASYNC_MASTER", "SYNC_MASTER"])
async def test_messages_sent_together(children: Children, release: Release, role: str) -> None:
    name_server = await start_name_server(children, release)
    master = RocketMqBroker(children, release, "master", name_server, role)
    await master.start()
    if role == "SYNC_MASTER":
        await RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1).start()
    results: dict[bytes, tuple[Message, SendResult]] = {}
    requests: Counter[int] = Counter()
    refused: list[BrokerError] = []

    def message_of(number: int) -> Message:
        # Every fifth body is compressed, and every seventh message has wait_stored=False.
        body = b"%d " % number * (3_000 if number % 5 == 0 else number % 50 + 1)
        return Message(
            TOPIC,
            body,
            tags=f"tag{number % 3}",
            keys=(f"k{number}", "all"),
            properties={"own": "é"},
            flag=number,
            wait_stored=number % 7 != 0,
        )

    options = ClientOptions(batching=True)
    async with Client(name_server, options=options) as client, Producer(client, group="sdk") as producer:
        for _ in range(200):
            first = await retry_on(
                (RouteNotFound, ConnectionFailed), lambda: producer.send(Message(TOPIC, b"before the others"))
            )
            if first.status is SendStatus.SEND_OK:
                break
            await trio.sleep(0.2)
        ordered = MessageQueue(TOPIC, first.queue.broker_name, 1)
        invoke = client.connections.invoke

        async def counted(address, command, timeout_s, *, is_prompt=True):  # type: ignore[no-untyped-def]
            requests[command.code] += 1
            return await invoke(address, command, timeout_s, is_prompt=is_prompt)

        client.connections.invoke = counted  # type: ignore[method-assign]

        async def send(numbers: range) -> None:
            for number in numbers:
                message = message_of(number)
                queue = ordered if number % IN_FLIGHT < 20 else None
                results[message.body] = (message, await producer.send(message, queue=queue))

        async def send_many() -> None:
            messages = [message_of(number) for number in range(MESSAGE_COUNT, MESSAGE_COUNT + MANY)]
            for message, outcome in zip(messages, await producer.send_many(messages), strict=True):
                assert isinstance(outcome, SendResult), outcome
                results[message.body] = (message, outcome)

        async def send_refused() -> None:
            with pytest.raises(BrokerError) as caught:
                await producer.send(Message(TOPIC, b"x", properties={"long": "x" * 40_000}))
            refused.append(caught.value)

        async with trio.open_nursery() as nursery:
            for start in range(IN_FLIGHT):
                nursery.start_soon(send, range(start, MESSAGE_COUNT, IN_FLIGHT))
            nursery.start_soon(send_many)
            nursery.start_soon(send_refused)
    assert {result.status for _, result in results.values()} == {SendStatus.SEND_OK}
    assert [error.code for error in refused] == [13]
    assert requests[320] > 0
    assert sum(requests.values()) < MESSAGE_COUNT / 4

    async with PullConsumer(name_server, group="sdk-reader") as consumer:
        found = await read_all(consumer)
        sent = {result.message_id: (message, result) for message, result in results.values()}
        assert found.keys() - sent.keys() == {m for m in found if found[m].body == b"before the others"}
        assert len(sent) == MESSAGE_COUNT + MANY
        for message_id, (message, result) in sent.items():
            got = found[message_id]
            assert (got.queue, got.queue_offset) == (result.queue, result.queue_offset)
            assert got.offset_message_id == result.offset_message_id
            assert (got.body, got.tags, got.keys, got.flag) == (message.body, message.tags, message.keys, message.flag)
            assert got.properties["own"] == "é"
        # Messages of one task to the chosen queue are in order.
        places = {int(message.body.split()[0]): result.queue_offset for message, result in results.values()}
        for start in range(20):
            mine = [places[number] for number in range(start, MESSAGE_COUNT, IN_FLIGHT)]
            assert mine == sorted(mine)


@pytest.mark.usual_release("4.9.7")
async def test_broker_with_a_smaller_message_limit(children: Children, release: Release) -> None:
    """A batch larger than its maxMessageSize is sent message by message."""
    name_server = await start_name_server(children, release)
    await RocketMqBroker(
        children, release, "master", name_server, "ASYNC_MASTER", extra={"maxMessageSize": 50_000}
    ).start()
    results: list[SendResult] = []
    async with Producer(
        name_server, group="sdk", options=ClientOptions(batching=True, compress_from_bytes=10**6)
    ) as producer:
        await retry_on((RouteNotFound, ConnectionFailed), lambda: producer.send(Message(TOPIC, b"first")))

        async def send(number: int) -> None:
            results.append(await producer.send(Message(TOPIC, b"%02d" % number + b"-" * 20_000)))

        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(send, number)
    async with PullConsumer(name_server, group="sdk-reader") as consumer:
        found = await read_all(consumer)
    assert len(results) == 30
    assert len(found) == 31
    for result in results:
        got = found[result.message_id]
        assert (got.queue, got.queue_offset) == (result.queue, result.queue_offset)
