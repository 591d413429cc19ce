"""Telemetry, heartbeats, the end of clients, and transactions, with Apache's stubs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import trio
from rocketmq.grpc_protocol import definition_pb2 as definition
from rocketmq.grpc_protocol import service_pb2 as service
from trio.testing import MockClock

from ha.proxy.front import Front
from ha.proxy.options import FrontOptions
from ha.proxy.session import Producers, Session
from ha.proxy.telemetry import SUBSCRIPTION_COUNT_MAX
from tests.proxy.site import Chat, Client, Site, message, open_site

Code = definition.Code


@asynccontextmanager
async def chatting(client: Client) -> AsyncIterator[Chat]:
    """A Telemetry stream during the block."""
    chat = Chat(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(chat.run)
        try:
            yield chat
        finally:
            await chat.end()  # its thread can't be cancelled


def producer(*topics: str) -> definition.Settings:
    """A producer's settings."""
    settings = definition.Settings(client_type=definition.PRODUCER)
    settings.publishing.topics.extend(definition.Resource(name=topic) for topic in topics)
    settings.publishing.max_body_size = 1
    return settings


def consumer(group: str, topic: str, kind: int = definition.PUSH_CONSUMER) -> definition.Settings:
    """A consumer's settings."""
    settings = definition.Settings(client_type=kind)
    settings.subscription.group.name = group
    entry = settings.subscription.subscriptions.add()
    entry.topic.name = topic
    entry.expression.type = definition.TAG
    entry.expression.expression = "a || b"
    return settings


async def test_settings_of_a_producer(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site, chatting(Client(site.address)) as chat:
        answer = await chat.tell(producer("t"))
        assert answer.status.code == Code.OK
        settings = answer.settings
        assert settings.client_type == definition.PRODUCER
        assert [topic.name for topic in settings.publishing.topics] == ["t"]
        assert (settings.publishing.max_body_size, settings.publishing.validate_message_type) == (4 << 20, True)
        policy = settings.backoff_policy
        backoff = policy.exponential_backoff
        assert (policy.max_attempts, backoff.initial.ToMilliseconds(), backoff.max.ToMilliseconds()) == (3, 10, 1000)
        assert backoff.multiplier == 2


async def test_settings_of_a_consumer(tmp_path: Path) -> None:
    """The group decides order and attempts; the client is listed among the group's members."""
    async with open_site(tmp_path) as site, chatting(Client(site.address, "vm@1")) as chat:
        await site.group(
            "g",
            consume_message_orderly=True,
            retry_max_times=1,
            group_retry_policy={
                "type": "EXPONENTIAL",
                "exponentialRetryPolicy": {"initial": 1000, "max": 2000, "multiplier": 2},
            },
        )
        settings = (await chat.tell(consumer("g", "t"))).settings
        subscription, policy = settings.subscription, settings.backoff_policy
        assert (subscription.fifo, subscription.receive_batch_size) == (True, 32)
        assert subscription.long_polling_timeout.seconds == 20
        assert policy.max_attempts == 2
        assert policy.exponential_backoff.initial.ToMilliseconds() == 1000
        assert site.node.broker.clients.consumer_ids("g") == ["vm@1"]
        members = site.node.broker.clients.consumer_group("g")
        assert members is not None
        assert members.subscriptions["t"].expression == "a || b"
        settings = (await chat.tell(consumer("other", "t"))).settings
        assert not settings.subscription.fifo
        assert settings.backoff_policy.max_attempts == 17
        delays = [delay.seconds for delay in settings.backoff_policy.customized_backoff.next]
        assert delays[:5] + delays[-2:] == [1, 5, 10, 30, 60, 3600, 7200]


async def test_settings_of_a_group_that_retries_for_ever(tmp_path: Path) -> None:
    """retryMaxTimes=2147483647: the number of attempts does not fit into its field."""
    async with open_site(tmp_path) as site:
        await site.group("g", retry_max_times=0x7FFFFFFF)
        async with chatting(Client(site.address)) as chat:
            answer = await chat.tell(consumer("g", "t"))
            assert answer.settings.backoff_policy.max_attempts == 0x7FFFFFFF


async def test_settings_that_contain_a_policy(tmp_path: Path) -> None:
    """The group's policy replaces it, for example in a client that sends the settings that it was answered."""
    async with open_site(tmp_path) as site, chatting(Client(site.address)) as chat:
        first = (await chat.tell(consumer("g", "t"))).settings
        assert (await chat.tell(first)).settings.backoff_policy == first.backoff_policy


async def test_large_settings(tmp_path: Path) -> None:
    """As many topics as a client may have, with the longest names."""
    async with open_site(tmp_path) as site, chatting(Client(site.address)) as chat:
        answer = await chat.tell(producer(*(f"{number:0>127}" for number in range(1_024))))
        assert len(answer.settings.publishing.topics) == 1_024


SUBSCRIPTIONS = [definition.SubscriptionEntry(topic=definition.Resource(name="t"))] * (SUBSCRIPTION_COUNT_MAX + 1)


@pytest.mark.parametrize(
    "settings",
    [
        definition.Settings(client_type=1),
        producer("x" * 128),
        definition.Settings(
            subscription=definition.Subscription(group=definition.Resource(name="g"), subscriptions=SUBSCRIPTIONS)
        ),
    ],
    ids=["neither", "topic", "subscriptions"],
)
async def test_settings_that_are_refused(settings: definition.Settings, tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        chat = Chat(Client(site.address))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chat.run)
            await chat._send.send(service.TelemetryCommand(settings=settings))
            async for _ in chat.answers:
                pass
            await chat.end()
        assert chat.error is not None
        assert chat.error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def heartbeat(client: Client, group: str = "") -> int:
    """The code of a heartbeat."""
    request = service.HeartbeatRequest(group=definition.Resource(name=group), client_type=definition.PUSH_CONSUMER)
    code: int = (await client.call("Heartbeat", request)).status.code
    return code


async def test_heartbeats_and_the_end_of_a_client(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address, "vm@1")
        ending = service.NotifyClientTerminationRequest(group=definition.Resource(name="g"))
        assert await heartbeat(client, "g") == Code.UNRECOGNIZED_CLIENT_TYPE
        assert (await client.call("NotifyClientTermination", ending)).status.code == Code.UNRECOGNIZED_CLIENT_TYPE
        async with chatting(client) as chat:
            await chat.tell(consumer("g", "t"))
            assert await heartbeat(client, "g") == Code.OK
            assert site.node.broker.clients.consumer_ids("g") == ["vm@1"]
            assert (await client.call("NotifyClientTermination", ending)).status.code == Code.OK
            assert site.node.broker.clients.consumer_ids("g") == []


async def test_clients_that_come_and_go_on_one_connection(tmp_path: Path) -> None:
    """In Node.js, all clients of a process share one. It keeps nothing of those that have ended."""
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        for _ in range(3):
            async with chatting(client) as chat:
                await chat.tell(producer("t"))
                ending = service.NotifyClientTerminationRequest()
                assert (await client.call("NotifyClientTermination", ending)).status.code == Code.OK
        [connection] = site.server.connections
        assert len(connection._close_callbacks) == 1


async def test_settings_after_the_end_of_a_client(tmp_path: Path) -> None:
    """They end the stream, and register nothing that would stay for ever. Over another stream the client is back."""
    async with open_site(tmp_path) as site:
        client, clients = Client(site.address, "vm@1"), site.node.broker.clients
        for settings in (consumer("g", "t"), producer("t")):
            async with chatting(client) as chat:
                await chat.tell(settings)
                ending = service.NotifyClientTerminationRequest()
                assert (await client.call("NotifyClientTermination", ending)).status.code == Code.OK
                with pytest.raises(trio.EndOfChannel):
                    await chat.tell(settings)
            assert chat.error is None
            assert (clients.consumer_ids("g"), site.front._producers.topics) == ([], [])
        async with chatting(client) as chat:
            await chat.tell(consumer("g", "t"))
            assert clients.consumer_ids("g") == ["vm@1"]


async def test_client_that_ends_while_its_settings_wait_for_a_broker() -> None:
    """They register nothing."""

    class Brokers:
        def __init__(self) -> None:
            self.asked, self.goes_on = trio.Event(), trio.Event()
            self.heartbeats = 0

        async def group(self, group: str) -> None:
            self.asked.set()
            await self.goes_on.wait()

        async def heartbeat(self, session: Session) -> None:
            self.heartbeats += 1

        def forget(self, session: Session) -> None:
            pass

    brokers: Any = Brokers()
    front = Front(brokers, FrontOptions(), client_id="front", wall_clock_ms=lambda: 0)
    connection: Any = SimpleNamespace(peer=("h", 1), sessions={})
    session = Session(connection, "vm@1")
    connection.sessions["vm@1"] = session
    front._sessions[session] = None
    call: Any = SimpleNamespace()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            front._telemetry._answer, session, call, service.TelemetryCommand(settings=consumer("g", "t"))
        )
        await brokers.asked.wait()
        front._end_all(connection)
        brokers.goes_on.set()
    front._producers.add(session, ["t"])
    assert (brokers.heartbeats, session.settings, front._producers.topics) == (0, None, [])


async def test_heartbeats_are_passed_on_every_5_s(autojump_clock: MockClock) -> None:
    """More often they would cost much more than they do their client."""

    class Brokers:
        def __init__(self) -> None:
            self.heartbeats_at: list[float] = []

        async def heartbeat(self, session: Session) -> None:
            self.heartbeats_at.append(trio.current_time())

    brokers: Any = Brokers()
    front = Front(brokers, FrontOptions(), client_id="front", wall_clock_ms=lambda: 0)
    connection: Any = SimpleNamespace()
    session = Session(connection, "vm@1")
    session.settings = consumer("g", "t")
    for _ in range(12):
        assert (await front._heartbeat(session, None)).status.code == Code.OK
        await trio.sleep(1)
    began = brokers.heartbeats_at[0]
    assert brokers.heartbeats_at == [began, began + 5, began + 10]


async def test_lost_connections_end_their_clients(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address, "vm@1")
        async with trio.open_nursery() as nursery:
            chat = Chat(client)
            nursery.start_soon(chat.run)
            await chat.tell(consumer("g", "t"))
            assert site.node.broker.clients.consumer_ids("g") == ["vm@1"]
            [connection] = site.server.connections
            ended = trio.Event()
            connection.on_close(lambda _: ended.set())
            await trio.to_thread.run_sync(client.channel.close)
            await ended.wait()
            assert site.node.broker.clients.consumer_ids("g") == []
            await chat.end()


async def half(site: Site, client: Client, body: bytes) -> tuple[definition.Message, Any]:
    """Sends a half message; returns it and its entry."""
    sent = message("t", body)
    sent.system_properties.message_type = definition.TRANSACTION
    [entry] = (await client.send(sent)).entries
    assert entry.status.code == Code.OK
    return sent, entry


async def end(client: Client, message_id: str, transaction_id: str, resolution: int, source: int = 1) -> int:
    """The code of EndTransaction."""
    request = service.EndTransactionRequest(
        topic=definition.Resource(name="t"),
        message_id=message_id,
        transaction_id=transaction_id,
        resolution=resolution,
        source=source,
    )
    code: int = (await client.call("EndTransaction", request)).status.code
    return code


async def bodies(site: Site) -> list[bytes]:
    """What consumers of the topic see."""
    found = []
    for queue_id in range(4):
        answer = await site.node.pull(topic="t", queueId=queue_id)
        found += [record.body for record in site.node.records(answer)] if answer.body else []
    return found


async def test_transactions(tmp_path: Path) -> None:
    """Any connection of any client ends them, as the transaction id says where the half message is."""
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t", "TRANSACTION")
        committed, first = await half(site, client, b"committed")
        _, second = await half(site, client, b"rolled back")
        assert first.message_id == committed.system_properties.message_id
        assert await bodies(site) == []
        other = Client(site.address, "vm@2")
        assert await end(other, first.message_id, first.transaction_id, definition.COMMIT) == Code.OK
        assert await end(other, second.message_id, second.transaction_id, definition.ROLLBACK) == Code.OK
        assert await bodies(site) == [b"committed"]
        for transaction_id, code in (
            ("", Code.INVALID_TRANSACTION_ID),
            (first.message_id, Code.INTERNAL_SERVER_ERROR),
            ("a b c d", Code.INTERNAL_SERVER_ERROR),
            (first.transaction_id.replace("b0", "b1"), Code.INTERNAL_SERVER_ERROR),
            (f"{first.message_id} b0 \u00b2 1", Code.INTERNAL_SERVER_ERROR),
        ):
            assert await end(client, first.message_id, transaction_id, definition.COMMIT) == code, transaction_id


async def test_transaction_of_a_message_whose_id_has_blanks(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        client = Client(site.address)
        await site.topic("t", "TRANSACTION")
        sent = message("t", b"committed", "an id of words")
        sent.system_properties.message_type = definition.TRANSACTION
        [entry] = (await client.send(sent)).entries
        assert await end(client, entry.message_id, entry.transaction_id, definition.COMMIT) == Code.OK
        assert await bodies(site) == [b"committed"]


async def test_producers_are_asked_about_transactions(tmp_path: Path) -> None:
    async with open_site(tmp_path, transaction_timeout_s=0.5, transaction_check_interval_s=0.5) as site:
        client = Client(site.address)
        await site.topic("t", "TRANSACTION")
        async with chatting(client) as chat:
            await chat.tell(producer())  # names no topic: the half message makes it one of its topics
            sent, entry = await half(site, client, b"asked")
            asked = (await chat.answers.receive()).recover_orphaned_transaction_command
            assert asked.message.body == b"asked"
            assert asked.message.system_properties.message_id == sent.system_properties.message_id
            assert asked.message.topic.name == "t"
            assert asked.transaction_id.split(" ")[:2] == entry.transaction_id.split(" ")[:2]
            checked = await end(client, entry.message_id, asked.transaction_id, definition.COMMIT, source=2)
            assert checked == Code.OK
            assert await bodies(site) == [b"asked"]


async def test_producers_are_asked_about_half_messages_of_a_drained_broker(tmp_path: Path) -> None:
    """Its topics take no more messages, and it can't be stopped before the half messages are decided."""
    options = FrontOptions(heartbeat_interval_s=0.02)
    async with open_site(tmp_path, options, transaction_timeout_s=1.0, transaction_check_interval_s=0.5) as site:
        client = Client(site.address)
        await site.topic("t", "TRANSACTION")
        async with chatting(client) as chat:
            await chat.tell(producer())
            await half(site, client, b"asked")
            await site.topic("t", "TRANSACTION", write=0)
            with trio.fail_after(20):
                asked = (await chat.answers.receive()).recover_orphaned_transaction_command
            assert asked.message.body == b"asked"


async def test_clients_of_a_connection_are_limited(tmp_path: Path) -> None:
    async with open_site(tmp_path, FrontOptions(sessions_per_connection_max=2)) as site:
        client = Client(site.address)
        codes = []
        for number in range(3):
            client.metadata[0] = ("x-mq-client-id", f"vm@{number}")
            codes.append(await heartbeat(client))
        assert codes == [Code.UNRECOGNIZED_CLIENT_TYPE] * 2 + [Code.CLIENT_ID_REQUIRED]


async def test_topics_of_a_producer_are_limited() -> None:
    producers = Producers(2)
    connection: Any = SimpleNamespace()
    session = Session(connection, "vm@1")
    producers.add(session, ["a", "b", "c"])
    assert producers.topics == ["a", "b"]
    producers.remove(session)
    assert producers.topics == []


async def test_producers_that_have_ended(tmp_path: Path) -> None:
    """They are not asked about transactions any more, and the broker asks the front no more."""
    async with open_site(tmp_path) as site:
        client, clients = Client(site.address), site.node.broker.clients
        await site.topic("t", "TRANSACTION")
        async with chatting(client) as chat:
            await chat.tell(producer("t"))
            with trio.fail_after(10):
                while not clients.producer_group("t"):  # noqa: ASYNC110
                    await trio.sleep(0.01)
            ending = service.NotifyClientTerminationRequest()
            assert (await client.call("NotifyClientTermination", ending)).status.code == Code.OK
            with trio.fail_after(10):
                while clients.producer_group("t"):  # noqa: ASYNC110
                    await trio.sleep(0.01)
