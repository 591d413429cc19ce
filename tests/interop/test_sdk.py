"""The SDK with real brokers: messages are stored as reported, and read as they were sent."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio

from ha.client import Message, MessageQueue, Producer, PullConsumer, PullStatus, ReadFrom, SendStatus
from ha.errors import BrokerError, ConnectionFailed, RouteNotFound
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server

MESSAGE_COUNT = 2_000
T = TypeVar("T")


async def retry_on(passing: tuple[type[Exception], ...], attempt: Callable[[], Awaitable[T]]) -> T:
    """Retries `attempt` for a minute while it raises transient errors; returns its result."""
    with trio.move_on_after(60):
        while True:
            try:
                return await attempt()
            except passing as error:
                last = error
            await trio.sleep(0.2)
    raise last


async def read_all(consumer: PullConsumer, topic: str) -> dict[str, tuple[bytes, str | None, tuple[str, ...]]]:
    """Body, tag and keys by message id."""
    found = {}
    for queue in await consumer.queues(topic):
        offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
        while offset < end:
            result = await consumer.pull(queue, offset)
            assert result.next_offset > offset
            found.update({m.message_id: (m.body, m.tags, m.keys) for m in result.messages})
            offset = result.next_offset
    return found


@pytest.mark.usual_release("5.5.0")
async def test_sends_and_pulls_on_a_real_cluster(children: Children, release: Release) -> None:
    name_server = await start_name_server(children, release)
    master = RocketMqBroker(children, release, "master", name_server, "SYNC_MASTER")
    slave = RocketMqBroker(children, release, "slave", name_server, "SLAVE", broker_id=1)
    await master.start()
    async with Producer(name_server, group="sdk") as producer:
        # A broker is up before its topics are registered at the name server.
        alone = await retry_on((RouteNotFound, ConnectionFailed), lambda: producer.send(Message("sdk", b"alone")))
        expected = SendStatus.SLAVE_NOT_AVAILABLE if release.is_4 else SendStatus.FLUSH_SLAVE_TIMEOUT
        assert alone.status is expected
        await slave.start()
        for _ in range(200):
            if (await producer.send(Message("sdk", b"x"))).status is SendStatus.SEND_OK:
                break
            await trio.sleep(0.2)
        sent: dict[str, tuple[bytes, str | None, tuple[str, ...]]] = {}

        async def send(numbers: range) -> None:
            for number in numbers:
                body, tag, keys = b"%d " % number * (number % 50 + 1), f"tag{number % 3}", (f"k{number}", "all")
                result = await producer.send(Message("sdk", body, tags=tag, keys=keys, properties={"own": "é"}))
                assert result.status is SendStatus.SEND_OK
                sent[result.message_id] = (body, tag, keys)

        async with trio.open_nursery() as nursery:
            for first in range(64):
                nursery.start_soon(send, range(first, MESSAGE_COUNT, 64))
        batch = [Message("sdk", b"in a batch %d" % number, tags="batch") for number in range(10)]
        result = await producer.send_batch(batch)
        assert (result.status, len(result.offset_message_id.split(","))) == (SendStatus.SEND_OK, 10)
        sent |= {i: (m.body, "batch", ()) for i, m in zip(result.message_id.split(","), batch, strict=True)}
        await producer.send_oneway(Message("sdk", b"oneway"))
        refused = Message("sdk", b"x", properties={"long": "x" * 40_000})
        with pytest.raises(BrokerError) as caught:
            await producer.send(refused)
        assert caught.value.code == 13

    async with PullConsumer(name_server, group="sdk-reader", read_from=ReadFrom.MASTER) as consumer:
        found = await read_all(consumer, "sdk")
        assert sent.items() <= found.items()
        assert b"oneway" in {body for body, _, _ in found.values()}
        queue = alone.queue
        assert await consumer.committed_offset(queue) in (0, None)
        await consumer.commit(queue, 3)
        assert await consumer.committed_offset(queue) == 3
        filtered = await consumer.pull(queue, 0, tags="batch||tag1")
        assert {message.tags for message in filtered.messages} <= {"batch", "tag1"}
        end = await consumer.max_offset(queue)
        assert (await consumer.pull(queue, end)).status is PullStatus.NO_NEW_MSG
        assert (await consumer.pull(queue, end + 50)).status is PullStatus.OFFSET_ILLEGAL
        await check_long_poll(name_server, consumer, queue, end)

    async with PullConsumer(name_server, group="sdk-slave", read_from=ReadFrom.SLAVE) as consumer:
        # A slave copies its master's topics every few seconds; until then it does not know them.
        copied = await retry_on((BrokerError,), lambda: read_all(consumer, "sdk"))
        assert sent.items() <= copied.items()


async def check_long_poll(name_server: str, consumer: PullConsumer, queue: MessageQueue, end: int) -> None:
    """A long poll is answered with the message that arrives."""
    async with Producer(name_server, group="sdk") as producer, trio.open_nursery() as nursery:

        async def poll() -> None:
            started = trio.current_time()
            result = await consumer.pull(queue, end, wait_s=15)
            assert [message.body for message in result.messages] == [b"at last"]
            assert trio.current_time() - started < 10

        nursery.start_soon(poll)
        await trio.sleep(0.3)
        await producer.send(Message("sdk", b"at last"), queue=queue)
