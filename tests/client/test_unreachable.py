"""Retries while servers are unreachable: of which requests, and for how long."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import ByteStream

import ha.client
from ha.client import (
    Admin,
    Client,
    ClientOptions,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    SendStatus,
    SimpleConsumer,
)
from ha.client.backoff import PAUSE_S_FIRST, PAUSE_S_MAX, Backoff
from ha.errors import BrokerError, ClientError, ConnectionFailed, NameServersUnreachable, RemoteProtocolError
from ha.protocol.bodies import BrokerData, ClusterInfo
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.group_requests import encode_running_info
from ha.protocol.recall_handle import RecallHandle, encode_recall_handle
from ha.protocol.remoting import RemotingCommand
from tests.client.backends import on_both_backends
from tests.client.fake_broker import FakeServer, Handler, name_server, route_body, serving, serving_all, stored
from tests.client.push_world import until

QUEUE = MessageQueue("T", "a", 0)
RECALL_HANDLE = encode_recall_handle(RecallHandle("T", "a", 2_000_000_000_000, "K1"))


def answer(command: RemotingCommand) -> RemotingCommand:
    if command.code == RequestCode.PULL_MESSAGE:
        fields = {"suggestWhichBrokerId": "0", "nextBeginOffset": "5", "minOffset": "0", "maxOffset": "5"}
        return command.reply(ResponseCode.PULL_NOT_FOUND, "", fields)
    if command.code == RequestCode.GET_MAX_OFFSET:
        return command.reply(ResponseCode.SUCCESS, "", {"offset": "5"})
    return stored(command) if command.code == RequestCode.SEND_MESSAGE_V2 else command.reply(ResponseCode.SUCCESS)


class World:
    """A name server and a broker. `away` refuses connections until as many attempts were made."""

    names: FakeServer
    broker: FakeServer

    def __init__(self) -> None:
        self.attempts_left: dict[str, int] = {}

    def away(self, server: FakeServer, attempts: int) -> None:
        self.attempts_left[server.address] = attempts

    async def connect(self, host: str, port: int) -> ByteStream:
        address = f"{host}:{port}"
        if self.attempts_left.get(address, 0) > 0:
            self.attempts_left[address] -= 1
            raise ConnectionRefusedError
        return await anyio.connect_tcp(host, port)

    def options(self, **changes: object) -> ClientOptions:
        return ClientOptions(connect=self.connect, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    world = World()
    routes: dict[str, bytes] = {}
    async with AsyncExitStack() as stack:
        world.broker = await stack.enter_async_context(serving(answer))
        world.names = await stack.enter_async_context(serving(name_server(routes)))
        routes["T"] = route_body({"a": {0: world.broker.address}})
        yield world


@on_both_backends(open_world)
async def test_a_send_waits_until_the_name_server_is_back(world: World) -> None:
    world.away(world.names, 3)
    async with Producer(world.names.address, options=world.options()) as producer:
        assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
        assert producer.retry_count == 3
    assert len(world.broker.commands) == 1


@on_both_backends(open_world)
async def test_a_send_waits_until_the_broker_is_back(world: World) -> None:
    """More attempts than send_retries: an attempt that reached nobody has stored nothing."""
    world.away(world.broker, 6)
    async with Producer(world.names.address, options=world.options(send_retries=0)) as producer:
        assert (await producer.send(Message("T", b"x"))).status is SendStatus.SEND_OK
        assert producer.retry_count >= 2
    assert len(world.broker.commands) == 1


@on_both_backends(open_world)
async def test_a_send_gives_up_at_its_timeout(world: World) -> None:
    world.away(world.names, 1000)
    async with Producer(world.names.address, options=world.options()) as producer:
        with pytest.raises(NameServersUnreachable) as caught:
            await producer.send(Message("T", b"x"), timeout_s=0.5)
        address = world.names.address
        assert str(caught.value).startswith(f"no name server can be reached: {address}: can't connect: ")
        assert str(caught.value).count(address) == 1
        assert 1 <= producer.retry_count <= 4


@on_both_backends(open_world)
async def test_silent_name_server_does_not_outlast_a_send(world: World) -> None:
    """The send ends at its timeout, and the next one asks the other name server."""

    async def never() -> RemotingCommand | None:
        await anyio.sleep_forever()
        return None

    async with serving(lambda command: never()) as silent:
        options = world.options(request_timeout_s=60)
        async with Producer(silent.address, options=options) as producer:
            for send in (producer.send, producer.send_oneway):
                with pytest.raises(NameServersUnreachable, match="no response before the send's timeout"):
                    await send(Message("T", b"x"), timeout_s=0.2)
        async with Producer(f"{silent.address};{world.names.address}", options=options) as producer:
            with pytest.raises(NameServersUnreachable):
                await producer.send(Message("T", b"x"), timeout_s=0.2)
            assert (await producer.send(Message("T", b"x"), timeout_s=30)).status is SendStatus.SEND_OK


@on_both_backends(open_world)
async def test_tools_can_turn_waiting_off(world: World) -> None:
    world.away(world.names, 2)
    async with Producer(world.names.address, options=world.options(retry_unreachable=False)) as producer:
        with pytest.raises(NameServersUnreachable):
            await producer.send(Message("T", b"x"))
    async with PullConsumer(world.names.address, options=world.options(retry_unreachable=False)) as consumer:
        with pytest.raises(NameServersUnreachable):
            await consumer.max_offset(QUEUE)


@on_both_backends(open_world)
async def test_a_pause_before_a_retry_does_not_outlast_the_client(world: World) -> None:
    """The client is closed during the pause, so that its last attempt finds nothing to send with."""
    world.away(world.broker, 1000)
    failures: list[ConnectionFailed] = []

    async def fails(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(ConnectionFailed) as caught:
            await call()
        failures.append(caught.value)

    async with anyio.create_task_group() as tasks:
        client = Client(world.names.address, options=world.options())
        popping = SimpleConsumer(client, group="g", subscriptions={"T": "*"})
        async with client, Producer(client) as producer, PullConsumer(client) as consumer, popping:
            tasks.start_soon(fails, partial(producer.send, Message("T", b"x")))
            tasks.start_soon(fails, partial(consumer.max_offset, QUEUE))
            tasks.start_soon(fails, partial(producer.recall, RECALL_HANDLE))
            tasks.start_soon(fails, popping.receive)
            await until(lambda: producer.retry_count == 4)
    assert [failure.was_sent for failure in failures] == [False] * 4


@on_both_backends(open_world)
async def test_a_send_to_a_chosen_queue_is_not_retried(world: World) -> None:
    world.away(world.broker, 1)
    async with Producer(world.names.address, options=world.options()) as producer:
        with pytest.raises(ConnectionFailed) as caught:
            await producer.send(Message("T", b"x"), queue=QUEUE)
        assert not caught.value.was_sent
        assert (await producer.send(Message("T", b"x"), queue=QUEUE)).status is SendStatus.SEND_OK


@on_both_backends(open_world)
async def test_a_send_that_may_be_stored_is_retried_as_often_as_allowed(world: World) -> None:
    world.broker.handler = lambda command: b"\xff" * 8  # breaks the protocol, so that the client hangs up
    async with Producer(world.names.address, options=world.options(send_retries=1)) as producer:
        with pytest.raises(ConnectionFailed) as caught:
            await producer.send(Message("T", b"x"))
        assert caught.value.was_sent
    assert len(world.broker.commands) == 2


@on_both_backends(open_world)
async def test_a_consumer_waits_until_its_servers_are_back(world: World) -> None:
    world.away(world.names, 2)
    world.away(world.broker, 2)
    async with PullConsumer(world.names.address, options=world.options()) as consumer:
        assert (await consumer.pull(QUEUE, 5)).max_offset == 5
        assert await consumer.max_offset(QUEUE) == 5


@on_both_backends(open_world)
async def test_a_commit_that_may_be_executed_is_not_repeated(world: World) -> None:
    """It could be executed after one that was sent later."""
    world.broker.handler = lambda command: b"\xff" * 8
    async with PullConsumer(world.names.address, options=world.options()) as consumer:
        with pytest.raises(ConnectionFailed):
            await consumer.commit(QUEUE, 5)
    assert len(world.broker.commands) == 1


@on_both_backends(open_world)
async def test_a_commit_that_was_not_sent_is_repeated(world: World) -> None:
    world.away(world.broker, 2)
    async with PullConsumer(world.names.address, options=world.options()) as consumer:
        await consumer.commit(QUEUE, 5)
    assert len(world.broker.commands) == 1


def test_what_users_catch_can_be_imported_from_the_package() -> None:
    def names(error: type[Exception]) -> set[str]:
        return {error.__name__}.union(*map(names, error.__subclasses__()))

    assert names(ClientError) | {"HalogError", "RemoteProtocolError"} <= set(ha.client.__all__)
    assert set(ha.client.__all__) <= set(dir(ha.client))


@pytest.mark.parametrize(
    "wrong", [{"heartbeat_interval_s": 0}, {"route_refresh_interval_s": -1.0}, {"outbox_size_max": -1}], ids=str
)
def test_options_with_which_a_client_would_not_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"=(0|-1|-1\.0); accepted: (0 or more|more than 0)"):
        ClientOptions(**wrong)
    ClientOptions(send_retries=0, default_topic_queue_nums=0, compress_from_bytes=0, outbox_size_max=0)


def test_pauses_double_up_to_their_maximum() -> None:
    backoff = Backoff()
    pauses = [backoff.next_s() for _ in range(10)]
    longest = [min(PAUSE_S_FIRST * 2**number, PAUSE_S_MAX) for number in range(10)]
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True))
    assert len({round(pause / most, 6) for pause, most in zip(pauses, longest, strict=True)}) > 1
    backoff.reset()
    assert backoff.next_s() <= PAUSE_S_FIRST


@on_both_backends()
async def test_an_admin_without_a_master_reports_no_success() -> None:
    names = serving(lambda command: command.reply(ResponseCode.SUCCESS, body=b"{}"))
    async with names as server, Admin(server.address) as admin:
        for do in (lambda: admin.create_topic("T"), lambda: admin.delete_topic("T"), admin.groups):
            with pytest.raises(ConnectionFailed, match=f"{server.address}: no master is registered"):
                await do()


@on_both_backends()
async def test_an_admin_asks_each_master_until_one_knows_the_client() -> None:
    body = encode_running_info({}, {"of": "second"}, {}, [])
    handlers: list[Handler] = [
        lambda command: command.reply(ResponseCode.CONSUMER_NOT_ONLINE, "first"),
        lambda command: command.reply(ResponseCode.SUCCESS, body=body),
        lambda command: command.reply(ResponseCode.CONSUMER_NOT_ONLINE, "last"),
    ]
    async with serving_all(handlers) as [first, second, last]:

        def cluster(*servers: FakeServer) -> Handler:
            sets = {
                f"{at}": BrokerData(broker_name=f"{at}", broker_addrs={0: each.address})
                for at, each in enumerate(servers)
            }
            body = msgspec.json.encode(ClusterInfo(broker_addr_table=sets))
            return lambda command: command.reply(ResponseCode.SUCCESS, body=body)

        async with serving(cluster(first, second, last)) as names, Admin(names.address) as admin:
            assert (await admin.running_info("g", "c")).properties == {"of": "second"}
        async with serving(cluster(first, last)) as names, Admin(names.address) as admin:
            with pytest.raises(BrokerError, match="last"):
                await admin.running_info("g", "c")


@on_both_backends()
@pytest.mark.parametrize("is_periodic", [True, False])
async def test_malformed_route_of_a_forgotten_topic_does_not_end_the_client(*, is_periodic: bool) -> None:
    """The route is forgotten while it is refreshed, periodically or because its master is silent."""
    asked, forgotten = anyio.Event(), anyio.Event()
    route = route_body({"a": {0: "127.0.0.1:1"}}, 1)

    async def malformed(command: RemotingCommand) -> RemotingCommand:
        asked.set()
        await forgotten.wait()
        return command.reply(ResponseCode.SUCCESS, body=b"{}garbage")

    def answer(command: RemotingCommand) -> RemotingCommand | Awaitable[RemotingCommand]:
        is_second = len(names.commands) == 2
        return malformed(command) if is_second else command.reply(ResponseCode.SUCCESS, body=route)

    options = ClientOptions(route_refresh_interval_s=0.01 if is_periodic else 60.0)
    async with (
        serving(answer) as names,
        Client(names.address, options=options) as client,
        anyio.create_task_group() as tasks,
    ):
        await client.routes.find("T")
        if not is_periodic:
            tasks.start_soon(client.routes.is_replaced, "127.0.0.1:1")
        await asked.wait()
        client.routes.forget("T")
        forgotten.set()
        with pytest.raises(RemoteProtocolError):
            await client.routes.find("T")  # shares the request
        assert (await client.routes.find("T")).masters() == {"127.0.0.1:1"}
