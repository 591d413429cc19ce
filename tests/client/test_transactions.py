"""What becomes of a producer and of its transactions when its callbacks fail."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from ha.client import Client, Message, Producer, ReceivedMessage, TransactionState
from ha.protocol import record
from ha.protocol.codes import RequestCode
from ha.protocol.properties import encode_properties
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from tests.client.backends import on_both_backends
from tests.client.fake_broker import FakeServer, name_server, route_body, serving, stored
from tests.client.push_world import clean_up_fails, until

Check = Callable[[ReceivedMessage], Awaitable[Any]]
HALF = encode_record(
    record.Message("T", 0, b"half", encode_properties({"PGROUP": "g", "UNIQ_KEY": "A" * 32})),
    queue_offset=0,
    physical_offset=5,
    store_timestamp_ms=1,
    store_host=record.encode_host("127.0.0.1", 10911),
)


class World:
    """A broker, and a producer whose check is `check`."""

    def __init__(self, broker: FakeServer, producer: Producer) -> None:
        self.broker = broker
        self.producer = producer
        self.check: Check

    async def ask(self) -> None:
        """Asks the producer about a half message."""
        fields = {"tranStateTableOffset": "0", "commitLogOffset": "5", "msgId": "M"}
        code = RequestCode.CHECK_TRANSACTION_STATE
        await self.broker.ask(RemotingCommand(code, flag=2, ext_fields=fields, body=HALF))

    async def outcome(self) -> str:
        """Waits until the broker learns an outcome; returns it."""
        commands = self.broker.commands
        while not (ended := [each for each in commands if each.code == RequestCode.END_TRANSACTION]):
            await self.broker.received(len(commands) + 1)
            commands = self.broker.commands
        return ended[0].ext_fields["commitOrRollback"]


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    routes: dict[str, bytes] = {}

    async def check(message: ReceivedMessage) -> TransactionState:
        state: TransactionState = await world.check(message)
        return state

    async with serving(answer) as broker, serving(name_server(routes)) as names:
        routes["T"] = route_body({"a": {0: broker.address}}, 1)
        async with Producer(names.address, group="g", check=check) as producer:
            world = World(broker, producer)
            await producer.send(Message("T", b"opens the connection"))
            yield world


def answer(command: RemotingCommand) -> RemotingCommand | None:
    """A broker's answer; none to the outcome of a transaction, which is a oneway request."""
    return stored(command) if command.code == RequestCode.SEND_MESSAGE_V2 else None


async def returns_nothing(message: ReceivedMessage) -> None:
    pass


async def raises(message: ReceivedMessage) -> None:
    raise OSError("no database")


async def awaits_a_cancelled_task(message: ReceivedMessage) -> None:
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task


@on_both_backends()
async def test_check_ends_with_its_producer(*, caplog: pytest.LogCaptureFixture) -> None:
    """Its resources are those of the producer's block; the shared client, which calls it, goes on."""
    is_called, is_cancelled = anyio.Event(), anyio.Event()

    async def check(message: ReceivedMessage) -> TransactionState:
        is_called.set()
        try:
            await anyio.sleep_forever()
        finally:
            is_cancelled.set()
        raise AssertionError("unreachable")

    async with serving(answer) as broker:
        routes = {"T": route_body({"a": {0: broker.address}}, 1)}
        async with serving(name_server(routes)) as names, Client(names.address) as client:
            async with Producer(client, group="g", check=check) as producer:
                await producer.send(Message("T", b"opens the connection"))
                await World(broker, producer).ask()
                await is_called.wait()
            await is_cancelled.wait()
    assert not caplog.records


@on_both_backends(open_world)
@pytest.mark.parametrize("fails", [returns_nothing, raises])
async def test_failed_check_leaves_the_transaction_open(
    world: World, *, fails: Check, caplog: pytest.LogCaptureFixture
) -> None:
    await fail_and_commit(world, fails, caplog)


def test_check_that_awaits_a_cancelled_task_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    """Its CancelledError would end the producer's block, without notice."""

    async def main() -> bool:
        async with open_world() as world:
            await fail_and_commit(world, awaits_a_cancelled_task, caplog)
            return True
        return False

    assert anyio.run(main, backend="asyncio")


async def fail_and_commit(world: World, fails: Check, caplog: pytest.LogCaptureFixture) -> None:
    """The producer goes on after failed checks, and answers when the broker asks again."""
    world.check = fails
    with caplog.at_level(logging.ERROR, "ha.client.transactions"):
        for _ in range(5):  # more than the client has tasks for requests
            await world.ask()
        await until(lambda: len(caplog.records) == 5)
    assert {each.message.split()[0] for each in caplog.records} == {"client.transaction_check_failed"}

    async def commits(message: ReceivedMessage) -> TransactionState:
        return TransactionState.COMMIT

    world.check = commits
    await world.ask()
    assert await world.outcome() == "8"


@on_both_backends()
async def test_check_whose_clean_up_fails_at_the_end_does_not_fail_the_producer() -> None:
    begun = anyio.Event()

    async def check(message: ReceivedMessage) -> None:
        begun.set()
        await clean_up_fails()

    async with open_world() as world:
        world.check = check
        await world.ask()
        await begun.wait()


@on_both_backends(open_world)
async def test_callbacks_that_are_not_async_are_refused(world: World) -> None:
    def decide(_: object) -> TransactionState:
        return TransactionState.COMMIT

    callback: Any = decide
    with pytest.raises(TypeError, match="check is not async"):
        Producer("127.0.0.1:1", check=callback)
    with pytest.raises(TypeError, match="local is not async"):
        await world.producer.send_in_transaction(Message("T", b"half"), callback)
    assert [bytes(each.body) for each in world.broker.commands] == [b"opens the connection"]


@on_both_backends(open_world)
async def test_local_must_return_a_state(world: World) -> None:
    async def local(result: object) -> Any:
        return None

    with pytest.raises(TypeError, match="local has returned None, which is no TransactionState"):
        await world.producer.send_in_transaction(Message("T", b"half"), local)


@on_both_backends()
async def test_outcome_that_comes_after_the_producer_was_closed_is_not_acknowledged() -> None:
    async with (
        serving(answer) as broker,
        serving(name_server({"T": route_body({"a": {0: broker.address}}, 1)})) as names,
    ):

        async def local(_: object) -> TransactionState:
            await producer.stop()
            return TransactionState.COMMIT

        producer = Producer(names.address, group="g", check=local)
        await producer.start()
        result = await producer.send_in_transaction(Message("T", b"half"), local)
        assert (result.state, result.is_acknowledged) == (TransactionState.COMMIT, False)
