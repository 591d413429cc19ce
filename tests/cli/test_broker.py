"""`ha broker`: brokers are added and drained while producers and consumers of the SDK run, on a virtual clock."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from itertools import count
from typing import Any

import anyio
import pytest
import trio
from anyio.abc import ByteStream
from trio.testing import MockClock

from ha.cli import run
from ha.cli.broker import Drained, Joined, Left, drain_broker, join_broker
from ha.cli.exits import UsageError
from ha.client import (
    AclCredentials,
    Admin,
    Client,
    ClientOptions,
    ConsumerProgress,
    Message,
    MessageModel,
    MessageQueue,
    Producer,
    PushConsumer,
    QueueProgress,
    ReceivedMessage,
    SimpleConsumer,
    TransactionState,
)
from ha.config.secret import SecretStr
from ha.errors import BrokerError, HalogError
from ha.protocol import java_json
from ha.protocol.access_bodies import ALLOW, CUSTOM, PolicyEntryInfo, PolicyInfo, UserInfo
from ha.protocol.bodies import ConsumerData, GroupConfig, HeartbeatData, SubscriptionData, TopicConfig
from ha.protocol.codes import Permission, RequestCode
from ha.protocol.remoting import RemotingCommand
from tests.cli.doctoring import closed_port
from tests.client.fake_broker import serving
from tests.client.our_broker import OverTrio
from tests.load.memory_cluster import Host, MemoryNetwork

A, B = "10.0.0.1", "10.0.0.2"
NAMES = f"{A}:9876"
ROUTES_REFRESHED_S = 40


async def test_an_absurd_count_of_a_name_server_is_not_believed() -> None:
    """int() rejects so many digits."""

    def answer(command: RemotingCommand) -> RemotingCommand:
        return command.reply(0, ext_fields={"wipeTopicCount": "9" * 5000})

    async with serving(answer) as names, Client([names.address]) as client, Admin(client) as admin:
        assert await admin.wipe_write_permission("broker-a") == 0


class World:
    """Master broker-a, with the name server, and an SDK that reaches it. `add` starts broker-b."""

    client: Client
    admin: Admin

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.reported: list[Left] = []

    def add(self, **config: Any) -> Any:
        names = {"broker_name": "broker-b", "name_server_addresses": NAMES}
        return Host(self.network, B).node("ASYNC_MASTER", **names, **config)

    async def connect(self, host: str, port: int) -> ByteStream:
        return OverTrio(await self.network.connect("10.0.9.9", f"{host}:{port}"))

    async def drain(self, name: str, wait_s: float, settle_s: float = ROUTES_REFRESHED_S) -> Drained:
        return await drain_broker(self.admin, self.client, name, wait_s, settle_s, self.reported.append)


@asynccontextmanager
async def world(credentials: AclCredentials | None = None, **config: Any) -> AsyncIterator[World]:
    found = World()
    async with (
        Host(found.network, A).node("ASYNC_MASTER", **config),
        Client([NAMES], options=ClientOptions(connect=found.connect, credentials=credentials)) as found.client,
        Admin(found.client) as found.admin,
    ):
        yield found


async def test_a_broker_is_added_and_drained_without_a_failed_send(autojump_clock: MockClock) -> None:
    sent: dict[bytes, str] = {}
    """Body -> broker name"""
    failures: list[HalogError] = []
    consumed: list[bytes] = []
    numbers = count()

    async def handle(message: ReceivedMessage) -> None:
        consumed.append(message.body)

    async def send_on(producer: Producer) -> None:
        while True:
            body = b"%d" % next(numbers)
            try:
                result = await producer.send(Message("orders", body))
                sent[body] = result.queue.broker_name
            except HalogError as error:
                failures.append(error)
            await trio.sleep(0.2)

    async def brokers_of_next_sends() -> set[str]:
        known = len(sent)
        await trio.sleep(10)
        return set(list(sent.values())[known:])

    async with world() as cluster, AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        await cluster.admin.create_topic("orders", queue_count=3)
        await cluster.admin.create_group(GroupConfig(group_name="billing", retry_max_times=5))
        await stack.enter_async_context(
            PushConsumer(cluster.client, handle, group="billing", subscriptions={"orders": "*"})
        )
        producer = await stack.enter_async_context(Producer(cluster.client, group="shop"))
        for _ in range(3):
            tasks.start_soon(send_on, producer)
        assert await brokers_of_next_sends() == {"broker-a"}

        async with cluster.add():
            assert await join_broker(cluster.admin, "broker-b") == Joined("broker-b", ["orders"], ["billing"])
            assert (await cluster.admin.topic_configs("broker-b"))["orders"].write_queue_nums == 3
            assert (await cluster.admin.groups(broker_names=["broker-b"]))["billing"].retry_max_times == 5
            assert await join_broker(cluster.admin, "broker-b") == Joined("broker-b", [], [])
            await trio.sleep(ROUTES_REFRESHED_S)
            assert await brokers_of_next_sends() == {"broker-a", "broker-b"}

            assert await cluster.drain("broker-b", 600) == Drained("broker-b", True, Left())
            assert await brokers_of_next_sends() == {"broker-a"}
        assert await brokers_of_next_sends() == {"broker-a"}  # broker-b has stopped
        tasks.cancel_scope.cancel()
        await stack.aclose()
    assert not failures
    assert len(consumed) == len(set(consumed))
    assert set(sent) <= set(consumed)
    assert {"broker-a", "broker-b"} == set(sent.values())


async def test_a_broker_that_joins_copies_all_settings_of_a_topic(autojump_clock: MockClock) -> None:
    config = TopicConfig(
        topic_name="orders",
        read_queue_nums=2,
        write_queue_nums=2,
        perm=Permission.READ,
        topic_filter_type="MULTI_TAG",
        topic_sys_flag=2,
        order=True,
        attributes={"message.type": "FIFO"},
    )
    async with world() as cluster:
        await cluster.admin.change_topic(config, attributes=config.attributes)
        async with cluster.add():
            await join_broker(cluster.admin, "broker-b")
            assert (await cluster.admin.topic_configs("broker-b"))["orders"] == config


ROOT = AclCredentials("root", "the-secret-of-root")
WITH_USERS = {
    "authentication_enabled": True,
    "authorization_enabled": True,
    "init_authentication_user": SecretStr(json.dumps({"username": "root", "password": "the-secret-of-root"})),
    "inner_client_authentication_credentials": SecretStr(
        json.dumps({"accessKey": "inner", "secretKey": "the-secret-inside"})
    ),
}


async def test_nothing_is_created_on_the_only_broker(autojump_clock: MockClock) -> None:
    async with world() as cluster:
        assert await join_broker(cluster.admin, "broker-a") == Joined("broker-a", [], [])


def policies_of(actions: list[str], *resources: str) -> list[PolicyInfo]:
    entries = [
        PolicyEntryInfo(resource=resource, actions=actions, source_ips=None, decision=ALLOW) for resource in resources
    ]
    return [PolicyInfo(policy_type=CUSTOM, entries=entries)]


async def test_users_of_the_other_brokers_are_created_with_their_policies(autojump_clock: MockClock) -> None:
    """Without them, the new broker would refuse the clients that its topics bring to it."""
    policies = policies_of(["Pub"], "Topic:orders")
    async with world(ROOT, **WITH_USERS) as cluster, cluster.add(**WITH_USERS):
        admin = cluster.admin
        await admin.create_user(UserInfo(username="shop", password="the-secret-of-shop"), broker_names=["broker-a"])
        await admin.update_policies("shop", policies, broker_names=["broker-a"])
        for users in (["shop"], []):
            assert await join_broker(admin, "broker-b") == Joined("broker-b", [], [], users)
            known = await admin.users(broker_names=["broker-b"])
            assert [(user.username, user.password) for user in known if user.username not in ("root", "inner")] == [
                ("shop", "the-secret-of-shop")
            ]
            assert (await admin.policies(broker_names=["broker-b"]))["shop"] == policies


async def test_nothing_is_created_for_an_account_that_may_not_list_the_users(autojump_clock: MockClock) -> None:
    async with world(ROOT, **WITH_USERS) as cluster, cluster.add(**WITH_USERS):
        await cluster.admin.create_topic("orders", broker_names=["broker-a"])
        await cluster.admin.create_user(UserInfo(username="ops", password="the-secret-of-ops"))
        await cluster.admin.update_policies("ops", policies_of(["Create", "Update", "Get"], "Topic:*", "Group:*"))
        options = ClientOptions(connect=cluster.connect, credentials=AclCredentials("ops", "the-secret-of-ops"))
        async with Client([NAMES], options=options) as client, Admin(client) as admin:
            with pytest.raises(UsageError, match="does not list its users: repeat it as a super user"):
                await join_broker(admin, "broker-b")
        assert "orders" not in await cluster.admin.topic_configs("broker-b")


@pytest.mark.parametrize(
    ("code", "remark", "is_joined"),
    [
        (3, " request type 3005 not supported", True),  # RocketMQ before 5.3
        (
            1,
            "java.lang.IllegalStateException: The authenticationMetadataProvider is not configured, org.X.y(X.java:1)",
            True,
        ),
        (1, "java.io.IOException: disk", False),
    ],
)
async def test_only_brokers_without_users_have_none(
    code: int, remark: str, is_joined: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> list[UserInfo]:
        raise BrokerError(f"{A}:10911", code, remark)

    monkeypatch.setattr(Admin, "users", refuse)
    async with world() as cluster, cluster.add():
        with nullcontext() if is_joined else pytest.raises(BrokerError):
            assert await join_broker(cluster.admin, "broker-b") == Joined("broker-b", [], [])


async def undecided(_: object) -> TransactionState:
    return TransactionState.UNKNOWN


async def test_what_a_broker_still_holds_is_told(autojump_clock: MockClock) -> None:
    async with world() as cluster, cluster.add():
        await cluster.admin.create_topic("orders", queue_count=1)
        await cluster.admin.create_group(GroupConfig(group_name="billing"))
        queue = MessageQueue("orders", "broker-b", 0)
        async with Producer(cluster.client, group="shop", check=undecided) as producer:
            for _ in range(3):
                await producer.send(Message("orders", b"x"), queue=queue)
            await producer.send(Message("orders", b"x", delay_level=18), queue=queue)
            await producer.send(Message("orders", b"x", delay_s=86_400), queue=queue)
            await producer.send_in_transaction(Message("orders", b"x"), undecided, queue=queue)
            await cluster.admin.reset_offsets("billing", "orders", None)
            await producer.send(Message("orders", b"x"), queue=queue)
            await producer.send(Message("orders", b"x"), queue=queue)
            found = await cluster.drain("broker-b", 100)
            left = Left(groups={"billing": 2}, delayed_count=1, timer_count=1, half_count=1)
            assert found == Drained("broker-b", False, left)
            assert cluster.reported[-1] == left
            await cluster.admin.add_write_permission("broker-b")
            await trio.sleep(ROUTES_REFRESHED_S)
            found = await cluster.drain("broker-a", 0)
            assert found == Drained("broker-a", False, Left())  # nothing, but producers may have old routes
    assert str(left) == (
        "group billing: 2 messages; 1 delayed messages; 1 timer messages; 1 half messages of transactions"
    )


@pytest.mark.parametrize("is_delayed", [True, False])
async def test_a_message_that_moves_meanwhile_is_left(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, is_delayed: bool
) -> None:
    """A delayed message is delivered, or a consumer sends a message back, while the command looks."""
    figures, progress = Admin.broker_figures, Admin.consumer_progress

    async def figures_then_moved(self: Admin, address: str) -> dict[str, str]:
        found = await figures(self, address)
        found["scheduleMessageOffset_3"] = f"0,{int(is_delayed)}"
        move()
        return found

    async def progress_then_moved(self: Admin, group: str, *arguments: Any, **settings: Any) -> ConsumerProgress:
        found = await progress(self, group, *arguments, **settings)
        if group == "billing" and arguments:  # not where it looks for the group's topics
            queue = QueueProgress(MessageQueue("orders", "broker-a", 0), 1, int(is_delayed), 0, 0)
            found = ConsumerProgress(group, [queue], 0.0)
            move()
        return found

    def move() -> None:
        nonlocal is_delayed
        if not has_moved:
            has_moved.append(True)
            is_delayed = not is_delayed

    has_moved: list[bool] = []
    monkeypatch.setattr(Admin, "broker_figures", figures_then_moved)
    monkeypatch.setattr(Admin, "consumer_progress", progress_then_moved)
    async with world() as cluster, cluster.add():
        await cluster.admin.create_topic("orders")
        await cluster.admin.create_group(GroupConfig(group_name="billing"))
        await cluster.admin.reset_offsets("billing", "orders", None)
        assert not (await cluster.drain("broker-a", 0, settle_s=0)).is_drained


async def test_what_pop_consumers_have_in_flight_is_left(autojump_clock: MockClock) -> None:
    """Whether it is acknowledged, or was given back and waits in the retry topic, which nobody has read yet."""
    async with world() as cluster, cluster.add():
        await cluster.admin.create_topic("orders", queue_count=1)
        await cluster.admin.create_group(GroupConfig(group_name="billing"))
        queue = MessageQueue("orders", "broker-b", 0)
        async with (
            Producer(cluster.client, group="shop") as producer,
            SimpleConsumer(cluster.client, group="billing", subscriptions={"orders": "*"}) as consumer,
        ):
            await producer.send(Message("orders", b"0"), queue=queue)
            [message] = await consumer.receive(invisible_s=30)
            assert (await cluster.drain("broker-b", 5)).left == Left(groups={"billing": 1})
            await trio.sleep(60)
            assert (await cluster.drain("broker-b", 5)).left == Left(groups={"billing": 1})
            [message] = await consumer.receive(invisible_s=30)
            assert (message.body, message.reconsume_times) == (b"0", 1)
            assert (await cluster.drain("broker-b", 5)).left == Left(groups={"billing": 1})
            await message.ack()
            assert (await cluster.drain("broker-b", 5)).left == Left()


@pytest.mark.parametrize("is_online", [True, False])
async def test_messages_are_left_for_a_group_that_has_no_offset_on_the_broker(
    is_online: bool, autojump_clock: MockClock
) -> None:
    """It subscribes, or has offsets on another broker: it has not found the broker's queues yet."""
    consumer = ConsumerData(group_name="billing", subscription_data_set=[SubscriptionData(topic="orders")])
    heartbeat = HeartbeatData(client_id="c", consumer_data_set=[consumer])
    async with world() as cluster, cluster.add(), Producer(cluster.client, group="shop") as producer:
        await cluster.admin.create_topic("orders", queue_count=1, broker_names=["broker-a"])
        await cluster.admin.create_group(GroupConfig(group_name="billing"), broker_names=["broker-a"])
        if is_online:
            command = RemotingCommand(RequestCode.HEART_BEAT, body=java_json.dumps(heartbeat))
            await cluster.client.connections.request(f"{A}:10911", command)
        else:
            await cluster.admin.reset_offsets("billing", "orders", None)
        await cluster.admin.create_topic("orders", queue_count=1)
        for _ in range(2):
            await producer.send(Message("orders", b"x"), queue=MessageQueue("orders", "broker-b", 0))
        found = await cluster.drain("broker-b", 5)
    assert found == Drained("broker-b", False, Left(groups={"billing": 2}))


async def test_groups_in_broadcast_mode_are_not_waited_for(autojump_clock: MockClock) -> None:
    """Their members keep their offsets themselves: brokers don't know which messages they have consumed."""

    async def handle(_: ReceivedMessage) -> None:
        pass

    async with world() as cluster, cluster.add():
        await cluster.admin.create_topic("orders", queue_count=1)
        async with (
            Producer(cluster.client, group="shop") as producer,
            PushConsumer(
                cluster.client,
                handle,
                group="billing",
                subscriptions={"orders": "*"},
                model=MessageModel.BROADCASTING,
            ),
        ):
            await producer.send(Message("orders", b"x"), queue=MessageQueue("orders", "broker-b", 0))
            found = await cluster.drain("broker-b", 100)
    assert found == Drained("broker-b", True, Left())


async def test_the_settle_time_begins_when_the_name_servers_have_no_route(autojump_clock: MockClock) -> None:
    """A route that the command itself has cached does not begin it again."""
    async with world() as cluster, cluster.add():
        await cluster.admin.create_topic("orders", queue_count=1)
        began = trio.current_time()
        found = await cluster.drain("broker-b", 100)
        took_s = trio.current_time() - began
    assert (found.is_drained, took_s) == (True, ROUTES_REFRESHED_S)


async def test_name_servers_that_give_write_permission_back_lose_it_again(autojump_clock: MockClock) -> None:
    """They do when a topic of the broker changes (RouteInfoManager.registerBroker). Producers may then have got the
    route, so the settle time begins again."""
    async with world() as cluster, cluster.add(), anyio.create_task_group() as tasks:
        await cluster.admin.create_topic("orders", queue_count=1)

        async def change() -> None:
            await trio.sleep(33)
            options = ClientOptions(connect=cluster.connect)
            async with Client([NAMES], options=options) as other, Admin(other) as admin:
                await admin.create_topic("orders", queue_count=2)

        tasks.start_soon(change)
        began = trio.current_time()
        found = await cluster.drain("broker-b", 100)
        took_s = trio.current_time() - began
        route = await cluster.admin.route("orders")
    assert (found.is_drained, took_s) == (True, 35 + ROUTES_REFRESHED_S)  # it looks every 5 s
    assert {each.broker_name for each in route.write_queues} == {"broker-a"}
    assert {each.broker_name for each in route.read_queues} == {"broker-a", "broker-b"}


async def test_a_broker_is_not_drained_by_a_look_that_began_before_producers_had_new_routes(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message may still arrive after such a look has passed its queue."""
    looks: list[float] = []

    async def look_for_2_s(*_: object) -> Left:
        looks.append(trio.current_time() - began)
        await trio.sleep(2)
        return Left()

    monkeypatch.setattr("ha.cli.broker._look", look_for_2_s)
    async with world() as cluster:
        began = trio.current_time()
        assert await cluster.drain("broker-a", 600, settle_s=36) == Drained("broker-a", True, Left())
    assert looks[-1] >= 36


async def test_a_new_master_is_asked(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def look_and_switch(_: Admin, __: Client, ___: str, address: str) -> Left:
        asked.append(address)
        if len(asked) > 1:
            return Left()
        names = {"broker_name": "broker-b", "name_server_addresses": NAMES}
        await stack.enter_async_context(Host(cluster.network, "10.0.0.3").node("ASYNC_MASTER", **names))
        return Left(timer_count=1)

    monkeypatch.setattr("ha.cli.broker._look", look_and_switch)
    async with world() as cluster, cluster.add(), AsyncExitStack() as stack:
        found = await cluster.drain("broker-b", 600, settle_s=0)
    assert found == Drained("broker-b", True, Left())
    assert asked == [f"{B}:10911", "10.0.0.3:10911"]


async def test_a_broker_whose_topics_nobody_else_has_is_not_drained(autojump_clock: MockClock) -> None:
    async with world() as cluster, cluster.add():
        await cluster.admin.create_topic("orders", broker_names=["broker-b"])
        with pytest.raises(UsageError, match="no other broker takes messages of orders; ha broker join broker-a"):
            await cluster.drain("broker-b", 0)
        with pytest.raises(UsageError, match="no broker broker-c; known brokers: broker-a, broker-b"):
            await cluster.drain("broker-c", 0)
        await join_broker(cluster.admin, "broker-a")
        await cluster.drain("broker-b", 0)


async def test_a_broker_is_not_drained_if_the_only_other_one_is(autojump_clock: MockClock) -> None:
    async with world() as cluster, cluster.add():
        await cluster.admin.create_topic("orders", queue_count=1)
        assert (await cluster.drain("broker-b", 100)).is_drained
        with pytest.raises(UsageError, match="if broker-b is drained, ha broker undrain broker-b"):
            await cluster.drain("broker-a", 100)
        assert (await cluster.drain("broker-b", 100)).is_drained  # again, as long as broker-a takes messages


@pytest.fixture
def nowhere() -> Iterator[str]:
    with closed_port() as address:
        yield address


@pytest.mark.parametrize("words", [["drain", "b"], ["undrain", "b"], ["join", "b"]], ids=" ".join)
def test_nobody_there(words: list[str], nowhere: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["broker", *words, "--servers", nowhere, "--timeout", "5"]) == 69
    assert "no name server can be reached" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--wait", "-1"), ("--settle", "3601")])
def test_usage_errors(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["broker", "drain", "b", f"{flag}={value}"]) == 2
    assert f"{flag} must be from 0" in capsys.readouterr().err
