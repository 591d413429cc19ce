"""A frozen master: its pending requests move to its successor long before they time out."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ha.client import Client, ClientOptions, Message, MessageQueue, Producer, PullConsumer, replaced
from ha.client.connection import Connection
from ha.errors import ConnectionFailed
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import RemotingCommand
from tests.client.fake_broker import FakeServer, name_server, route_body, serving, stored

FOR_EVER_S = 3600.0
QUEUE = MessageQueue("T", "a", 0)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced, "SILENCE_S", 0.05)
    monkeypatch.setattr(replaced, "CHECK_INTERVAL_S", 0.01)


class World:
    """Two brokers of one name: the first is silent until it is woken, the second works."""

    def __init__(self) -> None:
        self.routes: dict[str, bytes] = {}
        self.woken = trio.Event()
        self.silent: FakeServer
        self.well: FakeServer
        self.names: FakeServer

    def master_is(self, broker: FakeServer) -> None:
        self.routes["T"] = route_body({"a": {0: broker.address}})

    @staticmethod
    def answer(command: RemotingCommand) -> RemotingCommand:
        if command.code == RequestCode.PULL_MESSAGE:
            fields = {"suggestWhichBrokerId": "0", "nextBeginOffset": "3", "minOffset": "0", "maxOffset": "3"}
            return command.reply(ResponseCode.PULL_NOT_FOUND, "", fields)
        return stored(command, 3)

    def keep_silent(self, command: RemotingCommand) -> Awaitable[RemotingCommand | None]:
        async def later() -> RemotingCommand | None:
            await self.woken.wait()
            return stored(command, 7)

        return later()

    async def looked(self, count: int) -> None:
        """Waits until the name server has received `count` more requests."""
        await self.names.received(len(self.names.commands) + count)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    async with (
        serving(made.keep_silent) as made.silent,
        serving(made.answer) as made.well,
        serving(name_server(made.routes)) as made.names,
    ):
        made.master_is(made.silent)
        with trio.fail_after(30):
            yield made


async def test_send_continues_at_the_new_master() -> None:
    async with world() as w:
        options = ClientOptions(send_timeout_s=FOR_EVER_S)
        async with Producer(w.names.address, group="g", options=options) as producer:
            offsets: list[int] = []

            async def send() -> None:
                offsets.append((await producer.send(Message("T", b"x"))).queue_offset)

            async with trio.open_nursery() as senders:
                for _ in range(3):
                    senders.start_soon(send)
                await w.silent.received(3)
                w.master_is(w.well)
            assert offsets == [3, 3, 3]


async def test_send_to_a_chosen_queue_fails_when_the_master_is_replaced() -> None:
    async with world() as w, trio.open_nursery() as nursery, Producer(w.names.address, group="g") as producer:

        async def replace() -> None:
            await w.silent.received(1)
            w.master_is(w.well)

        nursery.start_soon(replace)
        with pytest.raises(ConnectionFailed, match="replaced by another master"):
            await producer.send(Message("T", b"x"), queue=QUEUE, timeout_s=FOR_EVER_S)
        assert (await producer.send(Message("T", b"x"), queue=QUEUE)).queue_offset == 3


async def test_long_poll_alone_is_not_silence() -> None:
    async with (
        world() as w,
        Client(w.names.address) as client,
        trio.open_nursery() as nursery,
        PullConsumer(client, group="c") as consumer,
        Producer(client, group="g") as producer,
    ):
        ended = trio.Event()

        async def pull() -> None:
            assert (await consumer.pull(QUEUE, 0, wait_s=FOR_EVER_S)).max_offset == 3
            ended.set()

        nursery.start_soon(pull)
        await w.silent.received(1)
        asked = len(w.names.commands)
        await anyio.sleep(0.3)
        assert len(w.names.commands) == asked
        w.master_is(w.well)
        assert (await producer.send(Message("T", b"x"), timeout_s=FOR_EVER_S)).queue_offset == 3
        await ended.wait()


async def test_slow_master_is_not_disconnected() -> None:
    async with world() as w, trio.open_nursery() as nursery, Producer(w.names.address, group="g") as producer:

        async def wake() -> None:
            await w.looked(5)
            w.woken.set()

        nursery.start_soon(wake)
        assert (await producer.send(Message("T", b"x"), timeout_s=FOR_EVER_S)).queue_offset == 7
        assert w.silent.connection_count == 1


async def test_blocked_event_loop_is_not_silence(mock_clock: MockClock) -> None:
    """A check that comes late would find no response, although it has arrived and is only to be read."""
    looks: list[float] = []

    def silent(at_least_s: float) -> list[Connection]:
        looks.append(trio.current_time())
        return []

    connections: Any = SimpleNamespace(silent=silent)
    routes: Any = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(replaced.disconnect_replaced_masters, connections, routes)
        for pause_s in (0.01, 5.0, 0.01):
            await wait_all_tasks_blocked()
            mock_clock.jump(pause_s)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert looks == pytest.approx([0.01, 5.02])


async def test_reregistered_master_is_not_replaced() -> None:
    """Replaced and reinstated between two lookups: it is not replaced now."""
    async with (
        world() as w,
        trio.open_nursery() as nursery,
        Client(w.names.address) as client,
        Producer(client, group="g") as producer,
    ):
        routes = client.routes
        await producer.queues("T")
        w.master_is(w.well)
        routes.mark_stale("T")
        await routes.find("T")
        w.master_is(w.silent)
        routes.mark_stale("T")

        async def wake() -> None:
            await w.silent.received(1)
            await w.looked(5)
            w.woken.set()

        nursery.start_soon(wake)
        assert (await producer.send(Message("T", b"x"), timeout_s=FOR_EVER_S)).queue_offset == 7


async def test_former_master_that_is_a_slave_now_is_not_disconnected() -> None:
    async with world() as w, Client(w.names.address) as client, trio.open_nursery() as nursery:
        routes = client.routes
        await routes.find("T")
        w.routes["T"] = route_body({"a": {0: w.well.address, 1: w.silent.address}})
        routes.mark_stale("T")
        await routes.find("T")

        async def ask() -> None:
            await client.connections.invoke(w.silent.address, RemotingCommand(RequestCode.GET_MAX_OFFSET), FOR_EVER_S)

        nursery.start_soon(ask)
        await w.silent.received(1)
        await anyio.sleep(0.3)
        assert w.silent.address in client.connections.addresses()
        nursery.cancel_scope.cancel()


async def test_non_master_is_not_looked_up() -> None:
    async with world() as w, Client(w.names.address) as client, trio.open_nursery() as nursery:

        async def ask() -> None:
            await client.connections.invoke(w.silent.address, RemotingCommand(RequestCode.GET_MAX_OFFSET), FOR_EVER_S)

        nursery.start_soon(ask)
        await w.silent.received(1)
        await anyio.sleep(0.3)
        assert not w.names.commands
        assert client.connections.addresses() == [w.silent.address]
        nursery.cancel_scope.cancel()
