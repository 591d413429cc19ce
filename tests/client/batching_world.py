"""A producer and brokers that answer on demand."""

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from ha.client import ClientOptions, Message, MessageQueue, Producer, SendResult
from ha.errors import HalogError
from ha.protocol.batch import decode_batch
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from tests.client.fake_broker import FakeServer, Handler, name_server, route_body, serving, serving_all

QUEUE = MessageQueue("T", "a", 1)
SINGLE, BATCH = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE


def bodies(command: RemotingCommand) -> list[bytes]:
    """The bodies of the messages in a request."""
    if command.code == SINGLE:
        return [bytes(command.body)]
    assert command.code == BATCH
    return [body for _, body, _ in decode_batch(command.body)]


async def settled() -> None:
    """Runs until every task waits for an answer."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


class Broker:
    """Stores every message; each queue counts its messages. Answers at once, or after `release` while held."""

    def __init__(self, refuse: Callable[[RemotingCommand], int | None] = lambda command: None) -> None:
        self.commands: list[RemotingCommand] = []
        self.status = 0
        self._refuse = refuse
        self._ends: Counter[str] = Counter()
        self._places = itertools.count(1)
        self._released: anyio.Event | None = None

    def hold(self) -> None:
        self._released = anyio.Event()

    def release(self) -> None:
        assert self._released is not None
        self._released.set()
        self._released = None

    def __call__(self, command: RemotingCommand) -> RemotingCommand | Awaitable[RemotingCommand]:
        self.commands.append(command)
        answer = self.answer(command)
        return answer if self._released is None else self._later(answer, self._released)

    @staticmethod
    async def _later(answer: RemotingCommand, released: anyio.Event) -> RemotingCommand:
        await released.wait()
        return answer

    def answer(self, command: RemotingCommand) -> RemotingCommand:
        code = self._refuse(command)
        if code is not None:
            return command.reply(code, "no")
        queue_id, count = command.ext_fields["e"], len(bodies(command))
        places = ",".join(f"place {next(self._places)}" for _ in range(count))
        fields = {"msgId": places, "queueId": queue_id, "queueOffset": str(self._ends[queue_id])}
        self._ends[queue_id] += count
        return command.reply(self.status, None, fields)

    @property
    def sent(self) -> list[list[bytes]]:
        """The bodies of each request."""
        return [bodies(command) for command in self.commands]


class World:
    """A producer with brokers named a, b, …; `send` starts a send whose outcome is added to `outcomes` by its body."""

    def __init__(self, producer: Producer, servers: list[FakeServer], tasks: anyio.abc.TaskGroup) -> None:
        self.producer = producer
        self.servers = servers
        self.outcomes: dict[bytes, SendResult | HalogError] = {}
        self.tasks = tasks
        self._grown = anyio.Event()

    async def send(
        self,
        message: Message | bytes,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
        scope: anyio.CancelScope | None = None,
    ) -> None:
        """Returns when the send waits or has ended, so that the next one is sent after it."""
        known = message if isinstance(message, Message) else Message("T", message)

        async def run() -> None:
            with scope or anyio.CancelScope():
                try:
                    self.outcomes[bytes(known.body)] = await self.producer.send(known, queue=queue, timeout_s=timeout_s)
                except HalogError as error:
                    self.outcomes[known.body] = error
                self._grown.set()

        self.tasks.start_soon(run)
        await settled()

    def add(self, outcomes: Iterable[tuple[bytes, SendResult | HalogError]]) -> None:
        self.outcomes.update(outcomes)
        self._grown.set()

    async def came(self, count: int, server: int = 0) -> None:
        await self.servers[server].received(count)

    async def until_all(self, count: int) -> None:
        while len(self.outcomes) < count:
            self._grown = anyio.Event()
            await self._grown.wait()

    def result(self, body: bytes) -> SendResult:
        outcome = self.outcomes[body]
        assert isinstance(outcome, SendResult), outcome
        return outcome


@asynccontextmanager
async def open_world(
    handlers: list[Handler],
    options: ClientOptions | None = None,
    delay_max_s: float = 60,
    outcome_count: int = 0,
) -> AsyncIterator[World]:
    """A producer and one broker per handler. A batch waits for the request before it at most `delay_max_s`.

    Once the producer is closed, waits until `outcome_count` sends have ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ha.client.batching._BATCH_DELAY_MAX_S", delay_max_s)
        patch.setattr("ha.client.batching._TIMEOUT_MIN_S", 0.0)
        async with serving_all(handlers) as servers, anyio.create_task_group() as tasks:
            body = route_body({chr(97 + i): {0: server.address} for i, server in enumerate(servers)})
            async with serving(name_server(dict.fromkeys(("T", "Other"), body))) as names:
                known = options or ClientOptions(batching=True)
                async with Producer(names.address, group="g", options=known) as producer:
                    world = World(producer, servers, tasks)
                    yield world
                await world.until_all(outcome_count)
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_world_of_one(*arguments: Any, **options: Any) -> AsyncIterator[tuple[World, Broker]]:
    """`open_world` with one broker."""
    broker = Broker()
    async with open_world([broker], *arguments, **options) as world:
        yield world, broker
