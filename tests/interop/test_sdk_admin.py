"""The SDK's producer and Admin on a running cluster, real or halog's own, under asyncio and trio."""

import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from ha.client import (
    Admin,
    ClientOptions,
    Compression,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    PushOptions,
    ReceivedMessage,
    SendResult,
    SendStatus,
    StartFrom,
    TransactionState,
)
from ha.errors import BrokerError, RouteNotFound
from ha.protocol.bodies import GroupConfig
from ha.protocol.recall_handle import decode_recall_handle
from tests.client.backends import on_both_backends
from tests.client.push_world import until
from tests.interop.sdk_cluster import SdkCluster
from tests.interop.sdk_suite import Inbox, cluster, read_until, send_all

__all__ = ["cluster"]

PACKAGES = {Compression.LZ4: "lz4", Compression.ZSTD: "zstandard"}


@on_both_backends()
@pytest.mark.parametrize("compression", list(Compression))
async def test_bodies_arrive_as_they_were_sent(cluster: SdkCluster, compression: Compression) -> None:
    if compression in PACKAGES and find_spec(PACKAGES[compression]) is None:
        pytest.skip(f"{PACKAGES[compression]} is not installed")
    topic = cluster.name(compression.value)
    bodies = [b"x", b"text " * 2000, bytes(range(256)) * 16_000]
    async with Producer(cluster.name_server, options=ClientOptions(compression=compression)) as producer:
        for each in bodies:
            assert (await producer.send(Message(topic, each))).status is SendStatus.SEND_OK
    found = await read_until(cluster, topic, 3)
    assert sorted(message.body for message in found) == sorted(bodies)
    assert {message.compression for message in found} == {None}


@on_both_backends()
async def test_transactions_are_committed_rolled_back_or_checked(cluster: SdkCluster) -> None:
    topic, group = cluster.name("tx"), cluster.name("txg")
    asked: Counter[bytes] = Counter()
    states = {b"yes": TransactionState.COMMIT, b"no": TransactionState.ROLLBACK, b"later": TransactionState.UNKNOWN}

    async def check(message: ReceivedMessage) -> TransactionState:
        asked[message.body] += 1
        return TransactionState.COMMIT if message.body == b"later" else TransactionState.UNKNOWN

    async with Producer(cluster.name_server, group=group, check=check) as producer:
        for text, state in states.items():

            async def local(sent: SendResult, state: TransactionState = state) -> TransactionState:
                assert sent.status is SendStatus.SEND_OK
                return state

            result = await producer.send_in_transaction(Message(topic, text, tags="t"), local)
            assert (result.state, result.is_acknowledged) == (state, state is not TransactionState.UNKNOWN)

        async def failing(sent: SendResult) -> TransactionState:
            raise LookupError("no such account")

        with pytest.raises(LookupError):
            await producer.send_in_transaction(Message(topic, b"raised"), failing)
        inbox = Inbox()
        async with PushConsumer(
            cluster.name_server, inbox, group=group, subscriptions={topic: "*"}, start_from=StartFrom.FIRST
        ):
            await inbox.wait(2)
            await until(lambda: asked[b"raised"])
            await anyio.sleep(0.5)
    assert sorted(inbox.bodies) == [b"later", b"yes"]
    assert asked[b"later"] == 1


@on_both_backends()
async def test_transaction_needs_a_check_function(cluster: SdkCluster) -> None:
    async def local(sent: SendResult) -> TransactionState:
        raise AssertionError("not called")

    async with Producer(cluster.name_server) as producer:
        with pytest.raises(ValueError, match="check="):
            await producer.send_in_transaction(Message("T", b"x"), local)


@on_both_backends()
async def test_a_delayed_message_comes_when_it_is_due(cluster: SdkCluster) -> None:
    topic, group = cluster.name("delayed"), cluster.name("g")
    inbox = Inbox()
    async with PushConsumer(
        cluster.name_server, inbox, group=group, subscriptions={topic: "*"}, start_from=StartFrom.FIRST
    ):
        await send_all(cluster, topic, [b"now"])
        await inbox.wait(1)
        started = anyio.current_time()
        await send_all(cluster, topic, [b"level"], delay_level=2)
        await inbox.wait(2)
        assert 1.9 <= anyio.current_time() - started < 5
    assert inbox.bodies == [b"now", b"level"]


@on_both_backends()
async def test_a_timed_message_comes_when_it_is_due(cluster: SdkCluster) -> None:
    """RocketMQ delivers up to a second early."""
    topic, group = cluster.name("timed"), cluster.name("g")
    inbox = Inbox()
    async with PushConsumer(
        cluster.name_server, inbox, group=group, subscriptions={topic: "*"}, start_from=StartFrom.FIRST
    ):
        await send_all(cluster, topic, [b"now"])
        started = anyio.current_time()
        await send_all(cluster, topic, [b"timed"], delay_s=3.0)
        await inbox.wait(2)
        assert anyio.current_time() - started >= (3.0 if cluster.is_halog else 2.0)


@on_both_backends()
async def test_a_recalled_message_does_not_come(cluster: SdkCluster) -> None:
    topic, group = cluster.name("recalled"), cluster.name("g")
    inbox = Inbox()
    async with (
        PushConsumer(cluster.name_server, inbox, group=group, subscriptions={topic: "*"}, start_from=StartFrom.FIRST),
        Producer(cluster.name_server, group=cluster.name("p")) as producer,
    ):
        await send_all(cluster, topic, [b"now"])
        deliver_at_ms = int(time.time() * 1000) + 4_000
        sent = [await producer.send(Message(topic, text, deliver_at_ms=deliver_at_ms)) for text in (b"no", b"yes")]
        named = decode_recall_handle(sent[0].recall_handle or "")
        assert (named.topic, named.broker_name, named.unique_key) == (topic, "broker-a", sent[0].message_id)
        # A real broker rounds the due time down to a second, and names one millisecond later.
        rounded_ms = deliver_at_ms if cluster.is_halog else (deliver_at_ms - 1) // 1000 * 1000
        assert named.timestamp_ms == rounded_ms + 1
        assert await producer.recall(sent[0].recall_handle or "") == sent[0].message_id
        await inbox.wait(2)
        await anyio.sleep(1)
        assert inbox.bodies == [b"now", b"yes"]
        with pytest.raises(BrokerError) as caught:
            await producer.recall(sent[1].recall_handle or "")
        assert (caught.value.code, caught.value.remark) == (604, "recall failed, timestamp invalid")


@on_both_backends()
async def test_topics_are_made_shown_and_deleted(cluster: SdkCluster) -> None:
    topic = cluster.name("made")
    async with Admin(cluster.name_server) as admin:
        await admin.create_topic(topic, queue_count=3)
        await until_true(lambda: admin.topics(), lambda topics: topic in topics)
        assert len((await admin.route(topic)).read_queues) == 3
        assert (await admin.topic_configs("broker-a"))[topic].write_queue_nums == 3
        await admin.create_topic(topic, queue_count=5)
        await until_true(lambda: admin.topic_configs("broker-a"), lambda c: c[topic].write_queue_nums == 5)
        await send_all(cluster, topic, [b"%d" % number for number in range(10)])
        stats = await until_true(
            lambda: admin.topic_stats(topic), lambda s: sum(each.max_offset for each in s.values()) == 10
        )
        assert {queue.topic for queue in stats} == {topic}
        await admin.delete_topic(topic)
        await until_true(lambda: admin.topics(), lambda topics: topic not in topics)
        with pytest.raises(RouteNotFound):
            await admin.route(topic)


async def until_true(ask: Any, holds: Any) -> Any:
    """Polls `ask` until `holds` is true for its answer, and returns that."""
    while True:
        answer = await ask()
        if holds(answer):
            return answer
        await anyio.sleep(0.1)


@on_both_backends()
async def test_the_cluster_and_its_brokers(cluster: SdkCluster) -> None:
    async with Admin(cluster.name_server) as admin:
        (broker,) = await admin.brokers()
        assert (broker.cluster, broker.name) == ("InteropCluster", "broker-a")
        assert broker.addresses == {0: cluster.broker.address}
        figures = await admin.broker_figures(broker.addresses[0])
        assert int(figures["commitLogMaxOffset"]) >= 0
        with pytest.raises(BrokerError):
            await admin.create_topic("no such name!")


@on_both_backends()
async def test_groups_and_their_members(cluster: SdkCluster) -> None:
    topic, group, producers = cluster.name("members"), cluster.name("g"), cluster.name("p")
    await send_all(cluster, topic, [b"x"])
    async with Admin(cluster.name_server) as admin, Producer(cluster.name_server, group=producers) as producer:
        await admin.create_group(GroupConfig(group_name=group, retry_max_times=3))
        made = (await admin.groups())[group]
        assert made.retry_max_times == 3
        await admin.create_group(replace(made, retry_queue_nums=2, attributes={"what": "it was read with"}))
        changed = (await admin.groups())[group]
        assert changed == replace(made, retry_queue_nums=2)
        assert (await admin.consumer_connections(group)).connection_set == []
        await producer.send(Message(topic, b"x"))
        found = await until_true(lambda: admin.producer_connections(producers), lambda found: found)
        assert [each.client_id for each in found] == [producer.client_id]
        inbox = Inbox()
        async with PushConsumer(
            cluster.name_server, inbox, group=group, subscriptions={topic: "a||b"}, start_from=StartFrom.FIRST
        ) as push:
            members = await admin.consumer_connections(group)
            assert [each.client_id for each in members.connection_set] == [push.client_id]
            assert members.subscription_table[topic].sub_string == "a||b"
            await until(lambda: push.assigned)
        assert (await admin.consumer_connections(group)).connection_set == []
        await admin.delete_group(group)
        await until_true(lambda: admin.groups(), lambda groups: group not in groups)


@on_both_backends()
async def test_progress_and_resets(cluster: SdkCluster) -> None:
    topic, group = cluster.name("progress"), cluster.name("g")
    await send_all(cluster, topic, [b"%d" % number for number in range(20)])
    inbox = Inbox()
    push_options = PushOptions(commit_interval_s=0.2)
    async with (
        Admin(cluster.name_server) as admin,
        PushConsumer(
            cluster.name_server,
            inbox,
            group=group,
            subscriptions={topic: "*"},
            start_from=StartFrom.FIRST,
            push=push_options,
        ) as push,
    ):
        await inbox.wait(20)
        progress = await until_true(
            lambda: admin.consumer_progress(group, topic), lambda p: len(p.queues) == 4 and p.lag == 0
        )
        assert sum(each.broker_offset for each in progress.queues) == 20
        assert topic in await admin.topics_of(group)
        assert group in await admin.groups_of(topic)
        # Back to the beginning while the group is online: everything is received again.
        found = await admin.reset_offsets(group, topic, datetime.now(UTC) - timedelta(hours=1))
        assert set(found.values()) == {0}
        assert {queue.topic for queue in found} == {topic}
        await inbox.wait(40)
        await until(lambda: push.statistics().held.message_count == 0)
        await anyio.sleep(0.5)
        assert Counter(inbox.bodies) == Counter({b"%d" % number: 2 for number in range(20)})


@on_both_backends()
async def test_messages_are_found_by_key_id_place_and_time(cluster: SdkCluster) -> None:
    topic = cluster.name("found")
    begin = datetime.now(UTC)
    async with Producer(cluster.name_server) as producer, Admin(cluster.name_server) as admin:
        sent = await producer.send(Message(topic, b"one", keys=("k1", "both")))
        await producer.send(Message(topic, b"two", keys=("k2", "both")))
        await read_until(cluster, topic, 2)
        both = await until_true(lambda: admin.messages_by_key(topic, "both"), lambda found: len(found) == 2)
        assert sorted(message.body for message in both) == [b"one", b"two"]
        assert [message.body for message in await admin.messages_by_key(topic, "k2")] == [b"two"]
        assert await admin.messages_by_key(topic, "nobody") == []
        by_id = await admin.message_by_id(topic, sent.message_id)
        by_place = await admin.message_at(sent.offset_message_id)
        assert by_id is not None
        assert by_id == by_place
        assert (by_id.body, by_id.queue, by_id.queue_offset) == (b"one", sent.queue, sent.queue_offset)
        assert await admin.message_by_id(topic, "0" * 32) is None
        end = datetime.now(UTC) + timedelta(seconds=1)
        bodies = [message.body async for message in admin.messages_between(topic, begin, end)]
        assert sorted(bodies) == [b"one", b"two"]
        assert [message async for message in admin.messages_between(topic, end)] == []


@on_both_backends()
async def test_running_info_of_a_group_member(cluster: SdkCluster) -> None:
    """307, 309 and 221 reach the consumer through the broker; a member answers what RocketMQ's tools read."""
    topic, group = cluster.name("running"), cluster.name("g")
    inbox = Inbox()
    async with Producer(cluster.name_server) as producer, Admin(cluster.name_server) as admin:
        sent = await producer.send(Message(topic, b"again"))
        async with PushConsumer(
            cluster.name_server, inbox, group=group, subscriptions={topic: "*"}, start_from=StartFrom.FIRST
        ) as push:
            await inbox.wait(1)
            info = await admin.running_info(group, push.client_id)
            assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
            assert {queue_topic for queue_topic, _, _ in info.queues} >= {topic}
            assert info.statuses[topic].consume_failed_msgs == 0
            done = await admin.consume_directly(group, push.client_id, sent.offset_message_id)
            assert done.consume_result == "CR_SUCCESS"
            assert inbox.bodies == [b"again", b"again"]
            status = await admin.consumer_status(topic, group)
            assert set(status) == {push.client_id}
            assert sum(status[push.client_id].values()) == 1


@on_both_backends()
async def test_pulling_beside_a_group_does_not_disturb_it(cluster: SdkCluster) -> None:
    topic, group = cluster.name("beside"), cluster.name("g")
    await send_all(cluster, topic, [b"x"])
    async with (
        PullConsumer(cluster.name_server, group=group) as pull,
        PushConsumer(cluster.name_server, Inbox(), group=group, subscriptions={topic: "*"}) as push,
    ):
        for queue in await pull.queues(topic):
            await pull.pull(queue, 0)
        await until(lambda: len([queue for queue in push.assigned if queue.topic == topic]) == 4)
