"""`start` and `stop`, and the use of clients that are not open."""

import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
import pytest

from ha.client import (
    Admin,
    Client,
    ClientOptions,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    ReceivedMessage,
    SimpleConsumer,
)
from ha.client.starting import Startable
from tests.client.backends import on_both_backends
from tests.client.fake_broker import stored
from tests.client.test_producer import Cluster, open_producer

NAMES = "127.0.0.1:1"


async def in_another_task(function: Callable[[], Awaitable[object]]) -> None:
    async def call() -> None:
        await function()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)


@on_both_backends(open_producer, [stored])
async def test_start_and_stop_in_different_tasks(other: Producer, cluster: Cluster) -> None:
    producer = Producer(cluster.name_server.address, group="started")
    await in_another_task(producer.start)
    assert (await producer.send(Message("T", b"x"))).status.name == "SEND_OK"
    await in_another_task(producer.stop)
    unregistered = [each.ext_fields["producerGroup"] for each in cluster.brokers[0].memberships if each.code == 35]
    assert unregistered == ["started"]
    with pytest.raises(RuntimeError, match="not open: use it inside"):
        await producer.send(Message("T", b"x"))
    await producer.stop()
    assert await producer.start() is producer
    with pytest.raises(RuntimeError, match="already started"):
        await producer.start()
    await producer.send(Message("T", b"y"))
    await producer.stop()


@on_both_backends(open_producer, [stored])
async def test_a_shared_client_can_be_started(other: Producer, cluster: Cluster) -> None:
    client = Client(cluster.name_server.address)
    producer = Producer(client)
    with pytest.raises(RuntimeError, match="the shared client is not open"):
        await producer.start()
    await client.start()
    await producer.start()
    await producer.send(Message("T", b"x"))
    await producer.stop()
    await client.stop()


@on_both_backends()
async def test_a_client_that_a_forked_process_opens_has_an_identity_of_its_own(
    *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in web servers that load a program once and fork their workers. A broker would take them for one member."""
    client = Client(NAMES)
    parents = client.client_id, client.unique_ids.next()
    monkeypatch.setattr(os, "getpid", lambda: 77)
    async with client:
        assert "@77#" in client.client_id
        assert client.unique_ids.next()[:12] != parents[1][:12]  # address and process id
        own = client.client_id
    async with client:
        assert client.client_id == own


class Service(Startable):
    """A service with a task that fails once `is_failing` is set, or on entry."""

    def __init__(self, *, fails_on_entry: bool = False) -> None:
        self.fails_on_entry = fails_on_entry
        self.is_failing = anyio.Event()

    async def _open(self, stack: AsyncExitStack) -> None:
        if self.fails_on_entry:
            raise OSError("no port")
        tasks = await stack.enter_async_context(anyio.create_task_group())
        tasks.start_soon(self.fail)

    async def fail(self) -> None:
        await self.is_failing.wait()
        raise OSError("no disk")


@on_both_backends()
async def test_start_raises_the_errors_of_entering() -> None:
    service = Service(fails_on_entry=True)
    for _ in range(2):
        with pytest.raises(OSError, match="no port"):
            await service.start()


@on_both_backends()
async def test_stop_raises_the_error_that_ended_it() -> None:
    service = Service()
    await service.start()
    service.is_failing.set()
    with pytest.raises(ExceptionGroup) as caught:
        await service.stop()
    assert [str(error) for error in caught.value.exceptions] == ["no disk"]


@on_both_backends()
async def test_a_cancelled_start_closes() -> None:
    class Slow(Client):
        left = False

        async def _open(self, stack: AsyncExitStack) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                self.left = True

    client = Slow(NAMES)
    for _ in range(2):
        client.left = False
        with anyio.move_on_after(0.01):
            await client.start()
        assert client.left


@on_both_backends(open_producer, [stored])
async def test_opening_twice_is_refused_and_harmless(producer: Producer, cluster: Cluster) -> None:
    """It would lose the tasks of the first opening: Trio ended with an internal error."""
    with pytest.raises(RuntimeError, match="already open"):
        await producer.start()
    with pytest.raises(RuntimeError, match="already open"):
        await producer.__aenter__()
    assert (await producer.send(Message("T", b"x"))).status.name == "SEND_OK"


@on_both_backends()
@pytest.mark.parametrize("batching", [False, True])
async def test_sending_before_the_block_says_what_to_do(*, batching: bool) -> None:
    producer = Producer(NAMES, options=ClientOptions(batching=batching))
    message = Message("T", b"x")
    sends: list[Callable[[], Awaitable[object]]] = [
        lambda: producer.send(message),
        lambda: producer.send(Message("T", b"x", delay_s=1)),
        lambda: producer.send_many([message]),
        lambda: producer.send_batch([message]),
        lambda: producer.send_oneway(message),
        lambda: producer.queues("T"),
    ]
    for send in sends:
        with pytest.raises(RuntimeError, match=r"use it inside `async with …:`, or between `await start\(\)`"):
            await send()


@on_both_backends()
async def test_reading_before_the_block_says_what_to_do() -> None:
    consumer = SimpleConsumer(NAMES, group="g", subscriptions={"T": "*"})
    uses: list[Callable[[], Awaitable[object]]] = [
        lambda: PullConsumer(NAMES).queues("T"),
        consumer.receive,
        lambda: anext(consumer.messages()),
        lambda: Admin(NAMES).brokers(),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="not open: use it inside"):
            await use()


def test_state_of_a_push_consumer_before_the_block_says_what_to_do() -> None:
    async def handle(message: ReceivedMessage) -> None:
        raise AssertionError

    consumer = PushConsumer(NAMES, handle, group="g", subscriptions={"T": "*"})
    for look in (lambda: consumer.assigned, consumer.statistics):
        with pytest.raises(RuntimeError, match="use it inside"):
            look()


@on_both_backends(open_producer, [stored])
async def test_a_body_that_is_not_bytes_says_what_to_do(producer: Producer, cluster: Cluster) -> None:
    text, number = Message("T", "text"), Message("T", 7)  # type: ignore[arg-type]
    for send in (producer.send, producer.send_oneway):
        with pytest.raises(TypeError, match=r"bytes, not str: use text.encode\(\)"):
            await send(text)
    with pytest.raises(TypeError, match="bytes, not int"):
        await producer.send_batch([number])
    with pytest.raises(TypeError, match="bytes, not str"):
        await producer.send_many([Message("T", b"x"), text])
    assert not cluster.sends()
