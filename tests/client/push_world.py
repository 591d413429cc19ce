"""A name server, a broker set with scripted answers, and push consumers of it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from ha.client import ClientOptions, PushConsumer, PushOptions, ReceivedMessage, StartFrom
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from tests.client.fake_broker import name_server, route_body, serving
from tests.client.group_broker import GroupBroker

PUSH = PushOptions(commit_interval_s=0.05, pull_pause_s=0.05, rebalance_interval_s=0.5, close_grace_s=1.0)


class World:
    """A broker set "a": brokers by id, and a consumer's inbox."""

    def __init__(self) -> None:
        self.brokers = {0: GroupBroker(), 1: GroupBroker()}
        self.inbox: list[ReceivedMessage] = []
        self.refuse: Callable[[ReceivedMessage], None] = lambda message: None
        self.routes: dict[str, bytes] = {}
        self.names = ""

    @property
    def master(self) -> GroupBroker:
        return self.brokers[0]

    async def handle(self, message: ReceivedMessage) -> None:
        self.inbox.append(message)
        self.refuse(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.inbox]

    def consumer(self, handler: Any = None, **arguments: Any) -> PushConsumer:
        usual = {"push": PUSH, "subscriptions": {"T": "*"}, "start_from": StartFrom.FIRST}
        usual["options"] = ClientOptions(route_refresh_interval_s=0.2)
        return PushConsumer(self.names, handler or self.handle, group="g", **{**usual, **arguments})

    def route(self, *ids: int, queue_nums: int = 2) -> None:
        """Sets the brokers that the name server knows."""
        addresses = {i: server.address for i in ids if (server := self.brokers[i].server) is not None}
        self.routes["T"] = route_body({"a": addresses}, queue_nums)
        self.routes["%RETRY%g"] = route_body({"a": addresses}, 1)


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """A master, a slave that the name server does not know yet, and the name server."""
    world = World()
    async with (
        serving(world.brokers[0].handle) as master,
        serving(world.brokers[1].handle) as slave,
        serving(name_server(world.routes)) as names,
    ):
        world.brokers[0].server, world.brokers[1].server = master, slave
        world.names = names.address
        world.route(0)
        yield world


async def until(condition: Callable[[], object]) -> None:
    while True:
        if condition():
            return
        await anyio.sleep(0.01)


async def tell(world: World, code: int, body: bytes = b"", opaque: int = 99, **fields: str) -> RemotingCommand | None:
    """Sends a request to the consumer over the master's connection; returns its answer, None for a oneway request."""
    server = world.master.server
    assert server is not None
    count = len(server.commands)
    flag = 2 if code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED else 0
    command = RemotingCommand(code, opaque=opaque, flag=flag, ext_fields=fields, body=body)
    await server.ask(command)
    if flag:
        return None
    await until(lambda: any(each.is_response for each in server.commands[count:]))
    return next(each for each in server.commands[count:] if each.is_response)


async def clean_up_fails() -> None:
    """Waits in a task group, in which a task fails when it is cancelled: trio raises a group of both."""

    async def child() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("clean-up failed")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child)
        await anyio.sleep_forever()
