"""Heartbeats: which brokers receive them, and when, with servers that count them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from ha.client import Client, ClientOptions, Message, Producer, PushConsumer, ReceivedMessage
from ha.client.connection import Connection
from ha.errors import ConnectionFailed
from ha.protocol.bodies import ConsumerData, SubscriptionData, decode_heartbeat
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.remoting import FRAME_SIZE_MAX, RemotingCommand
from tests.client.backends import on_both_backends
from tests.client.fake_broker import FakeServer, name_server, route_body, serving, serving_all, stored


class Member:
    """A consumer that counts its notifications."""

    def __init__(self, group: str = "cg") -> None:
        self.group = group
        self.changes = 0
        self.asked: list[RemotingCommand] = []

    def describe(self) -> ConsumerData:
        return ConsumerData(group_name=self.group, subscription_data_set=[SubscriptionData(topic="T")])

    def on_members_changed(self) -> None:
        self.changes += 1

    async def answer(self, connection: Connection, command: RemotingCommand) -> RemotingCommand | None:
        self.asked.append(command)
        return command.reply(0, "done")


async def ignore(message: ReceivedMessage) -> None:
    pass


@asynccontextmanager
async def open_client(options: ClientOptions | None = None) -> AsyncIterator[tuple[Client, FakeServer, FakeServer]]:
    """A client that knows the route to a master and its slave."""
    async with serving_all([stored, stored]) as (master, slave):
        body = route_body({"a": {0: master.address, 1: slave.address}})
        async with serving(name_server({"T": body})) as names, Client(names.address, options=options) as client:
            await client.routes.find("T")
            yield client, master, slave


@on_both_backends(open_client)
async def test_producer_sends_heartbeats_to_masters_and_unregisters(
    client: Client, master: FakeServer, slave: FakeServer
) -> None:
    async with Producer(client, group="pg") as producer:
        await producer.send(Message("T", b"x"))
        await master.told(1)
        heartbeat = decode_heartbeat(master.memberships[0].body)
        assert heartbeat.client_id == client.client_id
        assert [each.group_name for each in heartbeat.producer_data_set] == ["pg"]
        assert heartbeat.consumer_data_set == []
    await master.told(2)
    goodbye = master.memberships[1]
    assert goodbye.code == RequestCode.UNREGISTER_CLIENT
    assert goodbye.ext_fields == {"clientID": client.client_id, "producerGroup": "pg"}
    assert slave.memberships == []


@on_both_backends(open_client)
async def test_consumer_sends_heartbeats_to_all_brokers_before_it_starts(
    client: Client, master: FakeServer, slave: FakeServer
) -> None:
    async with client.joined_consumer(Member()):
        for server in (master, slave):
            (command,) = server.memberships
            (data,) = decode_heartbeat(command.body).consumer_data_set
            assert (data.group_name, data.consume_type, data.message_model) == (
                "cg",
                "CONSUME_PASSIVELY",
                "CLUSTERING",
            )
            assert [each.topic for each in data.subscription_data_set] == ["T"]
    assert [server.memberships[-1].ext_fields["consumerGroup"] for server in (master, slave)] == ["cg", "cg"]


@on_both_backends(open_client)
async def test_a_group_that_is_added_as_a_heartbeat_starts_is_in_it(
    client: Client, master: FakeServer, slave: FakeServer
) -> None:
    """The broker counts as informed of all groups."""

    class Addresses(dict[str, int]):
        def items(self) -> Any:
            client.heartbeats.add_producer("late")
            return super().items()

    async with client.joined_consumer(Member()):
        await client.heartbeats._send_to_all(Addresses({master.address: 0}))
        groups = decode_heartbeat(master.memberships[1].body).producer_data_set
    assert [each.group_name for each in groups] == ["late"]


@on_both_backends(open_client, ClientOptions(heartbeat_interval_s=0.05))
async def test_heartbeats_are_repeated(client: Client, master: FakeServer, slave: FakeServer) -> None:
    async with client.joined_consumer(Member()):
        await master.told(4)
        await slave.told(4)
    assert client.heartbeats.statistics().answered_count >= 6


@on_both_backends(open_client)
async def test_reconnecting_sends_a_heartbeat_at_once(client: Client, master: FakeServer, slave: FakeServer) -> None:
    async with client.joined_consumer(Member()):
        assert len(master.memberships) == 1
        master.handler = lambda command: None
        connection = client.connections.to(master.address)
        await master.disconnect()
        with pytest.raises(ConnectionFailed):
            await connection.invoke(RemotingCommand(RequestCode.GET_MIN_OFFSET), 5)
        client.connections.to(master.address)
        await master.told(2)
        assert len(slave.memberships) == 1


@on_both_backends()
async def test_an_unreachable_broker_gets_no_repeated_heartbeats() -> None:
    async with serving(stored) as gone:
        pass
    async with serving(stored) as master:
        body = route_body({"a": {0: master.address, 1: gone.address}})
        async with serving(name_server({"T": body})) as names, Client(names.address) as client:
            await client.routes.find("T")
            async with client.joined_consumer(Member()):
                await anyio.sleep(0.5)
                assert client.heartbeats.statistics().failed_count <= 2


@on_both_backends(open_client)
async def test_broker_requests_reach_the_member_of_their_group(
    client: Client, master: FakeServer, slave: FakeServer
) -> None:
    master.handler = lambda command: None
    member = Member()
    async with client.joined_consumer(member):
        for group in ("cg", "other"):
            fields = {"consumerGroup": group}
            await master.ask(RemotingCommand(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, flag=2, ext_fields=fields))
            await master.ask(RemotingCommand(RequestCode.GET_CONSUMER_RUNNING_INFO, opaque=7, ext_fields=fields))
        await master.received(2)
        first, second = master.commands
        assert (first.opaque, first.code, first.remark) == (7, 0, "done")
        assert (second.code, second.remark) == (3, " request type 307 not supported")
        assert (member.changes, [each.code for each in member.asked]) == (1, [307])


@on_both_backends(open_client)
async def test_an_answer_that_can_not_be_sent_does_not_end_the_client(
    client: Client, master: FakeServer, slave: FakeServer
) -> None:
    class Talkative(Member):
        async def answer(self, connection: Connection, command: RemotingCommand) -> RemotingCommand | None:
            return command.reply(0, body=bytes(FRAME_SIZE_MAX))

    master.handler = lambda command: None
    async with client.joined_consumer(Talkative()):
        fields = {"consumerGroup": "cg"}
        await master.ask(RemotingCommand(RequestCode.GET_CONSUMER_RUNNING_INFO, opaque=7, ext_fields=fields))
        await master.received(1)
    [answer] = master.commands
    assert (answer.opaque, answer.code) == (7, ResponseCode.SYSTEM_ERROR)
    assert "the maximum is" in (answer.remark or "")


@on_both_backends(open_client, ClientOptions(heartbeat_interval_s=3600))
async def test_a_connection_that_is_opened_during_a_heartbeat_gets_its_own(
    client: Client, master: FakeServer, slave: FakeServer
) -> None:
    """The heartbeat in flight uses the connection before it."""
    before = client.connections.to(master.address)

    async def reconnect() -> RemotingCommand:
        before.hang_up("lost")
        assert client.connections.to(master.address) is not before
        raise ConnectionFailed(master.address, "lost", was_sent=True)

    async with client.joined_consumer(Member()):
        heartbeats = len(master.memberships)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(before, "invoke", lambda *_, **__: reconnect())
            await client.heartbeats._send_to(master.address)
        await master.told(heartbeats + 1)


@on_both_backends(open_client, ClientOptions(heartbeat_interval_s=3600))
async def test_a_group_that_is_added_during_a_heartbeat_is_announced_although_that_is_cancelled(
    client: Client, master: FakeServer, slave: FakeServer
) -> None:
    connection, is_sent = client.connections.to(master.address), anyio.Event()

    async def hang(*_: object, **__: object) -> None:
        is_sent.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(connection, "invoke", hang)
            tasks.start_soon(client.heartbeats._send_to, master.address)
            await is_sent.wait()
            client.heartbeats.add_producer("pg")
            await anyio.wait_all_tasks_blocked()  # `serve` has left out this broker
        tasks.cancel_scope.cancel()
    await master.told(1)
    groups = decode_heartbeat(master.memberships[-1].body).producer_data_set
    assert [each.group_name for each in groups] == ["pg"]


@on_both_backends(open_client)
async def test_client_joins_a_group_only_once(client: Client, master: FakeServer, slave: FakeServer) -> None:
    async with client.joined_consumer(Member()), Producer(client, group="cg"):
        with pytest.raises(ValueError, match="group cg already"):
            async with client.joined_consumer(Member()):
                pass
        with pytest.raises(ValueError, match="group cg already"):
            async with Producer(client, group="cg"):
                pass
    with pytest.raises(ValueError, match="on the shared client"):
        Producer(client, options=ClientOptions())


@on_both_backends(open_client)
async def test_a_group_that_can_not_be_encoded_does_not_end_the_client(
    client: Client, master: FakeServer, slave: FakeServer
) -> None:
    async with Producer(client, group="pg") as producer:
        await producer.send(Message("T", b"x"))
        with pytest.raises(ValueError, match="surrogates not allowed"):
            async with Producer(client, group="g\udc80") as refused:
                await refused.send(Message("T", b"x"))
        with pytest.raises(ValueError, match="surrogates not allowed"):
            async with client.joined_consumer(Member("g\udc80")):
                pass
        with pytest.raises(ValueError, match="surrogates not allowed"):
            async with PushConsumer(client, ignore, group="g\udc80", subscriptions={"T": "*"}):
                pass
        await client.heartbeats.beat()
    assert client.heartbeats.statistics().failed_count == 0


@on_both_backends()
async def test_shared_client_must_be_open() -> None:
    with pytest.raises(RuntimeError, match="not open"):
        async with Producer(Client("a:1")):
            pass


def test_heartbeat_bytes_equal_the_java_clients() -> None:
    """vectors §2, but for the fields' values."""
    data = ConsumerData(group_name="cg", subscription_data_set=[SubscriptionData(topic="t")])
    assert list(msgspec.to_builtins(data)) == [
        "consumeFromWhere",
        "consumeType",
        "groupName",
        "messageModel",
        "subscriptionDataSet",
        "unitMode",
    ]
