"""Heartbeats: who is told what and when, against servers that count them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import msgspec
import pytest

from ha.client import Client, ClientOptions, Message, Producer
from ha.client.connection import Connection
from ha.errors import ConnectionFailed
from ha.protocol.bodies import ConsumerData, SubscriptionData, decode_heartbeat
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from tests.client.fake_broker import FakeServer, name_server, route_body, serving, stored

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class Member:
    """A consumer that only counts what its client tells it."""

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


def run_with(
    backend: str,
    body: Callable[[Client, FakeServer, FakeServer], Awaitable[None]],
    options: ClientOptions | None = None,
) -> None:
    """Runs `body` with a client that knows the route to a master and its slave."""

    async def main() -> None:
        routes: dict[str, bytes] = {}
        with anyio.fail_after(20):
            async with serving(stored) as master, serving(stored) as slave, serving(name_server(routes)) as names:
                routes["T"] = route_body({"a": {0: master.address, 1: slave.address}})
                async with Client(names.address, options=options) as client:
                    await client.routes.find("T")
                    await body(client, master, slave)

    anyio.run(main, backend=backend)


@BACKENDS
def test_a_producer_is_told_to_masters_and_says_goodbye(backend: str) -> None:
    async def body(client: Client, master: FakeServer, slave: FakeServer) -> None:
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

    run_with(backend, body)


@BACKENDS
def test_a_consumer_is_told_to_all_brokers_before_it_begins(backend: str) -> None:
    async def body(client: Client, master: FakeServer, slave: FakeServer) -> None:
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

    run_with(backend, body)


@BACKENDS
def test_heartbeats_are_repeated(backend: str) -> None:
    async def body(client: Client, master: FakeServer, slave: FakeServer) -> None:
        async with client.joined_consumer(Member()):
            await master.told(4)
            await slave.told(4)
        assert client.heartbeats.statistics().answered_count >= 6

    run_with(backend, body, ClientOptions(heartbeat_interval_s=0.05))


@BACKENDS
def test_a_broker_that_was_reconnected_to_is_told_at_once(backend: str) -> None:
    async def body(client: Client, master: FakeServer, slave: FakeServer) -> None:
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

    run_with(backend, body)


@BACKENDS
def test_a_broker_that_is_gone_is_not_asked_again_and_again(backend: str) -> None:
    async def body(client: Client, master: FakeServer, slave: FakeServer) -> None:
        async with client.joined_consumer(Member()):
            slave.handler = stored
            await anyio.sleep(0.5)
            assert client.heartbeats.statistics().failed_count <= 2

    async def main() -> None:
        routes: dict[str, bytes] = {}
        with anyio.fail_after(20):
            async with serving(stored) as master, serving(name_server(routes)) as names:
                async with serving(stored) as gone:
                    pass
                routes["T"] = route_body({"a": {0: master.address, 1: gone.address}})
                async with Client(names.address) as client:
                    await client.routes.find("T")
                    await body(client, master, gone)

    anyio.run(main, backend=backend)


@BACKENDS
def test_what_brokers_ask_reaches_the_member_it_is_for(backend: str) -> None:
    async def body(client: Client, master: FakeServer, slave: FakeServer) -> None:
        member = Member()
        async with client.joined_consumer(member):
            for group in ("cg", "other"):
                changed = RemotingCommand(
                    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, flag=2, ext_fields={"consumerGroup": group}
                )
                await master.ask(changed)
                running = RemotingCommand(
                    RequestCode.GET_CONSUMER_RUNNING_INFO, opaque=7, ext_fields={"consumerGroup": group}
                )
                await master.ask(running)
            await master.received(2)
            first, second = master.commands
            assert (first.opaque, first.code, first.remark) == (7, 0, "done")
            assert (second.code, second.remark) == (3, " request type 307 not supported")
            assert member.changes == 1
            assert [command.ext_fields["consumerGroup"] for command in member.asked] == ["cg"]

    def silent(command: RemotingCommand) -> None:
        return None

    async def with_silent_master(client: Client, master: FakeServer, slave: FakeServer) -> None:
        master.handler = silent
        await body(client, master, slave)

    run_with(backend, with_silent_master)


@BACKENDS
def test_a_group_is_joined_once_per_client(backend: str) -> None:
    async def body(client: Client, master: FakeServer, slave: FakeServer) -> None:
        async with client.joined_consumer(Member()), Producer(client, group="cg"):
            with pytest.raises(ValueError, match="group cg already"):
                async with client.joined_consumer(Member()):
                    pass
            with pytest.raises(ValueError, match="group cg already"):
                async with Producer(client, group="cg"):
                    pass
        with pytest.raises(ValueError, match="on the shared client"):
            Producer(client, options=ClientOptions())

    run_with(backend, body)


@BACKENDS
def test_a_client_is_entered_before_it_is_shared(backend: str) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="not open"):
            async with Producer(Client("a:1")):
                pass

    anyio.run(main, backend=backend)


def test_heartbeats_are_written_as_the_jvm_writes_them() -> None:
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
