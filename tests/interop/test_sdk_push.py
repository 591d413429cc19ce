"""The SDK's push consumer on a running cluster, real or halog's, under asyncio and trio."""

from collections import Counter, defaultdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from ha.client import (
    Admin,
    Client,
    ClientOptions,
    Compression,
    ConsumeMode,
    Message,
    MessageModel,
    MessageQueue,
    PoppedMessage,
    Producer,
    PullConsumer,
    PushConsumer,
    PushOptions,
    ReceiptExpired,
    ReceivedMessage,
    RetryLater,
    SimpleConsumer,
    Sql92,
    StartFrom,
)
from ha.errors import BrokerError, ClientError
from tests.client.backends import on_both_backends
from tests.client.push_world import until
from tests.interop.processes import Child
from tests.interop.releases import resolve
from tests.interop.sdk_cluster import SdkCluster
from tests.interop.sdk_suite import Inbox, cluster, read_until, send_all

__all__ = ["cluster"]


def numbered(count: int) -> list[bytes]:
    return [b"m%d" % number for number in range(count)]


def consumer(cluster: SdkCluster, handler: Any, group: str, topic: str, **arguments: Any) -> PushConsumer:
    arguments = {"subscriptions": {topic: "*"}, "start_from": StartFrom.FIRST, **arguments}
    return PushConsumer(cluster.name_server, handler, group=group, **arguments)


async def until_saved(cluster: SdkCluster, group: str, topic: str, count: int) -> None:
    """Waits until the group's offsets add up to `count`; unsaved messages are repeated when a queue moves."""
    async with PullConsumer(cluster.name_server, group=group) as pull:
        queues = await pull.queues(topic)
        while sum([await pull.committed_offset(queue) or 0 for queue in queues]) < count:  # noqa: ASYNC110 - a broker
            await anyio.sleep(0.05)


@on_both_backends()
async def test_every_message_is_handled_once(cluster: SdkCluster) -> None:
    topic, group = cluster.name("all"), cluster.name("g")
    await send_all(cluster, topic, numbered(300), keys="k", properties={"own": "é"})
    inbox = Inbox()
    async with consumer(cluster, inbox, group, topic) as push:
        await inbox.wait(300)
        await send_all(cluster, topic, [b"later"])
        await inbox.wait(301)
        await until(lambda: push.statistics().held.message_count == 0)
        assert push.statistics().handling.handled == {topic: 301}
    assert sorted(inbox.bodies) == sorted([*numbered(300), b"later"])
    assert {message.properties["own"] for message in inbox.messages[:300]} == {"é"}


@on_both_backends()
async def test_tags_are_compared_exactly(cluster: SdkCluster) -> None:
    """AaAa and BBBB have the same hash, and brokers compare only hashes."""
    topic, group = cluster.name("tags"), cluster.name("g")
    for tag in ("AaAa", "BBBB", "other", "last"):
        await send_all(cluster, topic, [tag.encode()] * 3, tags=tag)
    inbox = Inbox()
    async with consumer(cluster, inbox, group, topic, subscriptions={topic: "AaAa || last"}):
        await inbox.wait(6)
    assert Counter(inbox.bodies) == {b"AaAa": 3, b"last": 3}


@on_both_backends()
async def test_members_share_the_queues_and_take_over(cluster: SdkCluster) -> None:
    topic, group = cluster.name("shared"), cluster.name("g")
    await send_all(cluster, topic, [b"first"])
    one, two = Inbox(), Inbox()
    push = PushOptions(commit_interval_s=0.1)
    async with consumer(cluster, one, group, topic, push=push) as first:
        await until(lambda: len(own(first, topic)) == 4)
        await one.wait(1)
        await until_saved(cluster, group, topic, 1)
        async with consumer(cluster, two, group, topic) as second:
            await until(lambda: len(own(first, topic)) == len(own(second, topic)) == 2)
            assert not set(first.assigned) & set(second.assigned)
            await send_all(cluster, topic, numbered(200))
            await until(lambda: len(one.messages) + len(two.messages) >= 201)
            assert len(one.messages) > 50
            assert len(two.messages) > 50
        await until(lambda: len(own(first, topic)) == 4)
        await send_all(cluster, topic, numbered(50))
        await until(lambda: len(one.messages) + len(two.messages) >= 251)
    assert Counter(one.bodies + two.bodies) == Counter([b"first", *numbered(200), *numbered(50)])


@pytest.mark.usefixtures("java")
async def test_a_java_client_and_this_one_share_a_group(cluster: SdkCluster) -> None:
    """Both compute the allocation; a queue that both or neither took would show."""
    topic, group = cluster.name("mixed"), cluster.name("g")
    release, java, inbox = resolve("5.5.0"), list[str](), Inbox()
    command = ["java", "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", release.client_class_path, "GroupMember"]

    async def start_java() -> Child:
        return cluster.children.start_soon(
            "java-member", [*command, cluster.name_server, group, topic], on_line=java.append
        )

    with anyio.fail_after(60):
        await send_all(cluster, topic, [b"first"])
        async with consumer(cluster, inbox, group, topic, push=PushOptions(commit_interval_s=0.1)) as push:
            await inbox.wait(1)
            await until_saved(cluster, group, topic, 1)
            child = await anyio.to_thread.run_sync(cluster.call, start_java)
            await until(lambda: "STARTED" in java and len(own(push, topic)) == 2)
            await anyio.sleep(2)  # time for the Java member to rebalance
            mine = {queue.queue_id for queue in own(push, topic)}
            await send_all(cluster, topic, numbered(200))
            await until(lambda: len(inbox.messages) + len(got(java)) >= 201)
            await anyio.sleep(0.5)
            assert Counter(inbox.bodies[1:] + [text for _, text in got(java)]) == Counter(numbered(200))
            assert {queue_id for queue_id, _ in got(java)} == {0, 1, 2, 3} - mine
            await send_compressed(cluster, topic, ({0, 1, 2, 3} - mine).pop())
            await until(lambda: len(got(java)) + len(inbox.messages) == 201 + len(COMPRESSIONS))
            assert [text for _, text in got(java)][-len(COMPRESSIONS) :] == [LONG] * len(COMPRESSIONS)
            await anyio.to_thread.run_sync(cluster.call, child.kill)
            await until(lambda: len(own(push, topic)) == 4)


_PACKAGES = {Compression.LZ4: "lz4", Compression.ZSTD: "zstandard"}
LONG = b"all work and no play " * 500
COMPRESSIONS = [each for each in Compression if each not in _PACKAGES or find_spec(_PACKAGES[each])]


async def send_compressed(cluster: SdkCluster, topic: str, queue_id: int) -> None:
    """Sends the same long body with every compression."""
    for compression in COMPRESSIONS:
        options = ClientOptions(compression=compression)
        async with Producer(cluster.name_server, options=options) as producer:
            await producer.send(Message(topic, LONG), queue=MessageQueue(topic, "broker-a", queue_id))


def got(lines: list[str]) -> list[tuple[int, bytes]]:
    """Queue and body of the messages that the Java member received."""
    words = [line.split(" ", 2) for line in lines if line.startswith("GOT ")]
    return [(int(queue_id), text.encode()) for _, queue_id, text in words]


def own(push: PushConsumer, topic: str) -> list[MessageQueue]:
    """The queues of `topic` among those assigned: the retry topic has one too."""
    return [queue for queue in push.assigned if queue.topic == topic]


@on_both_backends()
async def test_the_next_member_begins_where_the_last_one_ended(cluster: SdkCluster) -> None:
    topic, group = cluster.name("resumed"), cluster.name("g")
    await send_all(cluster, topic, numbered(100))
    first, second = Inbox(), Inbox()
    async with consumer(cluster, first, group, topic):
        await first.wait(100)
    await send_all(cluster, topic, [b"new"])
    async with consumer(cluster, second, group, topic):
        await second.wait(1)
        await anyio.sleep(0.5)
    assert second.bodies == [b"new"]


@on_both_backends()
async def test_unfinished_messages_are_redelivered(cluster: SdkCluster) -> None:
    """A handler that has not finished one message holds back the commit offset, whatever is finished behind it."""
    topic, group = cluster.name("unfinished"), cluster.name("g")
    async with Producer(cluster.name_server) as producer:
        queue = (await producer.queues(topic))[0]
        for each in numbered(50):
            await producer.send(Message(topic, each), queue=queue)
    stuck, others = [b"m7"], Inbox()

    async def handle(message: ReceivedMessage) -> None:
        await others(message)
        if message.body in stuck:
            await anyio.sleep_forever()

    push = PushOptions(close_grace_s=0.1, commit_interval_s=0.1)
    async with consumer(cluster, handle, group, topic, push=push):
        await others.wait(50)
        await until_saved(cluster, group, topic, 7)
    again = Inbox()
    async with consumer(cluster, again, group, topic):
        await again.wait(43)
        await anyio.sleep(0.5)
    assert sorted(again.bodies) == sorted(numbered(50)[7:])


@on_both_backends()
async def test_failing_message_is_redelivered_and_becomes_a_dead_letter(cluster: SdkCluster) -> None:
    topic, group = cluster.name("failing"), cluster.name("g")

    def refuse(message: ReceivedMessage) -> None:
        if message.body == b"bad":
            raise RetryLater(delay_level=1)

    await send_all(cluster, topic, [b"good", b"bad"], tags="t", keys="k", properties={"own": "x"})
    inbox = Inbox(refuse)
    async with consumer(
        cluster, inbox, group, topic, subscriptions={topic: "t"}, push=PushOptions(reconsume_times_max=2)
    ):
        await inbox.wait(4)
        bad = [message for message in inbox.messages if message.body == b"bad"]
        assert [message.reconsume_times for message in bad] == [0, 1, 2]
        assert {(message.topic, message.tags, message.keys) for message in bad} == {(topic, "t", ("k",))}
        assert {message.properties["own"] for message in bad} == {"x"}
        assert len({message.message_id for message in bad}) == 1
        (dead,) = await read_until(cluster, "%DLQ%" + group, 1)
    assert (dead.body, dead.properties["RETRY_TOPIC"]) == (b"bad", topic)
    assert inbox.bodies.count(b"good") == 1


@on_both_backends()
async def test_group_can_start_at_a_time(cluster: SdkCluster) -> None:
    topic, group = cluster.name("moment"), cluster.name("g")
    async with Producer(cluster.name_server) as producer:
        queue = (await producer.queues(topic))[0]
        await producer.send(Message(topic, b"before"), queue=queue)
        await anyio.sleep(1.1)
        moment = datetime.now(UTC)
        await producer.send(Message(topic, b"after"), queue=queue)
    inbox = Inbox()
    async with consumer(cluster, inbox, group, topic, start_from=moment):
        await inbox.wait(1)
        await anyio.sleep(0.3)
    # In a recently created queue brokers let a new group start with the first message all the same.
    assert inbox.bodies in ([b"after"], [b"before", b"after"])


@on_both_backends()
async def test_offset_beyond_the_queue_is_corrected(cluster: SdkCluster) -> None:
    topic, group = cluster.name("beyond"), cluster.name("g")
    inbox = Inbox()
    async with consumer(cluster, inbox, group, topic):
        await send_all(cluster, topic, numbered(8))
        await inbox.wait(8)
    async with PullConsumer(cluster.name_server, group=group) as pull:
        queues = await pull.queues(topic)
        # Not two in each: a busy broker refuses a message, and the producer sends it to another queue.
        ends = [await pull.max_offset(queue) for queue in queues]
        for queue in queues:
            await pull.commit(queue, 10_000)
        async with consumer(cluster, inbox, group, topic, push=PushOptions(commit_interval_s=0.2)):
            while [await pull.committed_offset(queue) for queue in queues] != ends:  # noqa: ASYNC110 - a broker
                await anyio.sleep(0.2)
            await send_all(cluster, topic, [b"next"])
            await inbox.wait(9)
    assert inbox.bodies[8:] == [b"next"]


@on_both_backends()
async def test_consumers_and_producers_share_a_client(cluster: SdkCluster) -> None:
    topic, groups = cluster.name("client"), [cluster.name("g"), cluster.name("g")]
    one, two = Inbox(), Inbox()
    async with Client(cluster.name_server) as client, Producer(client, group=cluster.name("p")) as producer:
        await producer.send(Message(topic, b"x"))
        async with (
            PushConsumer(client, one, group=groups[0], subscriptions={topic: "*"}, start_from=StartFrom.FIRST),
            PushConsumer(client, two, group=groups[1], subscriptions={topic: "*"}, start_from=StartFrom.FIRST),
        ):
            await one.wait(1)
            await two.wait(1)
        assert len(client.connections.addresses()) == 2


@on_both_backends()
async def test_every_member_of_a_broadcasting_group_gets_everything(cluster: SdkCluster, tmp_path: Path) -> None:
    topic, group = cluster.name("broadcast"), cluster.name("g")
    await send_all(cluster, topic, [b"first"])
    model, inboxes = MessageModel.BROADCASTING, [Inbox(), Inbox()]
    files = [tmp_path / "a" / "positions.json", tmp_path / "b" / "positions.json"]
    for round_number in (1, 2):
        async with (
            consumer(cluster, inboxes[0], group, topic, model=model, position_file=files[0]),
            consumer(cluster, inboxes[1], group, topic, model=model, position_file=files[1]),
        ):
            await send_all(cluster, topic, numbered(40))
            for inbox in inboxes:
                await inbox.wait(1 + 40 * round_number)
    expected = Counter([b"first", *numbered(40), *numbered(40)])
    assert [Counter(inbox.bodies) for inbox in inboxes] == [expected, expected]
    assert [file.exists() for file in files] == [True, True]


@on_both_backends()
async def test_messages_of_a_queue_stay_in_order(cluster: SdkCluster) -> None:
    """Two members; every seventh message fails at first and is retried before the next one."""
    topic, group = cluster.name("ordered"), cluster.name("g")
    tried: Counter[bytes] = Counter()

    def refuse(message: ReceivedMessage) -> None:
        tried[message.body] += 1
        if tried[message.body] == 1 and int(message.body.decode().rpartition("-")[2]) % 7 == 0:
            raise RetryLater

    async with Producer(cluster.name_server) as producer:
        queues = await producer.queues(topic)
        for number in range(20):
            for queue in queues:
                text = f"{queue.queue_id}-{number}".encode()
                await producer.send(Message(topic, text), queue=queue)
    one, two = Inbox(refuse), Inbox(refuse)
    push = PushOptions(suspend_s=0.05)
    mode = ConsumeMode.ORDERLY
    async with (
        consumer(cluster, one, group, topic, mode=mode, push=push),
        consumer(cluster, two, group, topic, mode=mode, push=push),
    ):
        await until(lambda: len(tried) == 80 and sum(tried.values()) >= 80 + 4 * 3)
    sequences = defaultdict(list)
    for message in one.messages + two.messages:
        sequences[message.queue.queue_id].append(message)
    for messages in sequences.values():
        numbers = [int(message.body.decode().rpartition("-")[2]) for message in messages]
        assert numbers == sorted(numbers)
    retried = [message for message in one.messages + two.messages if message.reconsume_times]
    assert {message.reconsume_times for message in retried} == {1}


async def test_order_and_messages_outlive_a_crash_of_the_broker(cluster: SdkCluster) -> None:
    """On one event loop only: a real broker takes long to restart."""
    topic, group = cluster.name("crash"), cluster.name("g")
    orderly, side = Inbox(), Inbox()
    with anyio.fail_after(120):
        async with (
            Producer(cluster.name_server) as producer,
            consumer(cluster, orderly, group, topic, mode=ConsumeMode.ORDERLY),
            consumer(cluster, side, group + "c", topic),
        ):
            queue = (await producer.queues(topic))[0]
            for number in range(20):
                await producer.send(Message(topic, b"%d" % number), queue=queue)
            await orderly.wait(20)
            await side.wait(20)
            await anyio.to_thread.run_sync(cluster.call, cluster.broker.kill)
            await anyio.to_thread.run_sync(cluster.call, cluster.broker.start)
            for number in range(20, 40):
                while True:
                    try:
                        await producer.send(Message(topic, b"%d" % number), queue=queue)
                        break
                    except ClientError:
                        await anyio.sleep(0.5)
            await until(lambda: {b"39"} <= set(orderly.bodies))
            await until(lambda: {b"39"} <= set(side.bodies))

    for inbox in (orderly, side):
        assert set(inbox.bodies) == {b"%d" % number for number in range(40)}
    # Only unsaved messages are repeated; new ones are in order.
    firsts = list(dict.fromkeys(orderly.bodies))
    assert firsts == [b"%d" % number for number in range(40)]


@on_both_backends()
async def test_an_ordered_message_that_always_fails_becomes_a_dead_letter(cluster: SdkCluster) -> None:
    topic, group = cluster.name("orderedfail"), cluster.name("g")

    def refuse(message: ReceivedMessage) -> None:
        if message.body == b"bad":
            raise RetryLater

    async with Producer(cluster.name_server) as producer:
        queue = (await producer.queues(topic))[0]
        for each in (b"bad", b"good"):
            await producer.send(Message(topic, each), queue=queue)
    inbox = Inbox(refuse)
    push = PushOptions(suspend_s=0.05, reconsume_times_max=2)
    async with consumer(cluster, inbox, group, topic, mode=ConsumeMode.ORDERLY, push=push):
        await inbox.wait(4)
        (dead,) = await read_until(cluster, "%DLQ%" + group, 1)
    assert inbox.bodies == [b"bad", b"bad", b"bad", b"good"]
    assert (dead.body, dead.properties["RETRY_TOPIC"]) == (b"bad", topic)


@on_both_backends()
async def test_a_lock_is_handed_on_when_its_holder_leaves(cluster: SdkCluster) -> None:
    topic, group = cluster.name("handed"), cluster.name("g")
    await send_all(cluster, topic, numbered(8))
    one, two = Inbox(), Inbox()
    async with consumer(cluster, one, group, topic, mode=ConsumeMode.ORDERLY) as first:
        await one.wait(8)
        async with consumer(cluster, two, group, topic, mode=ConsumeMode.ORDERLY) as second:
            await until(lambda: len(own(first, topic)) == len(own(second, topic)) == 2)
            await send_all(cluster, topic, numbered(40))
            await until(lambda: len(one.messages) + len(two.messages) == 48)
            assert two.messages
        await send_all(cluster, topic, numbered(8))
        await until(lambda: len(one.messages) + len(two.messages) == 56)


@on_both_backends()
async def test_conditions_on_properties(cluster: SdkCluster) -> None:
    topic, group = cluster.name("sql"), cluster.name("g")
    for amount in range(10):
        await send_all(cluster, topic, [b"%d" % amount], properties={"amount": str(amount)})
    inbox = Inbox()
    wanted = {topic: Sql92("amount BETWEEN 3 AND 5 OR amount = 9")}
    async with consumer(cluster, inbox, group, topic, subscriptions=wanted):
        await inbox.wait(4)
        await anyio.sleep(0.3)
    assert sorted(inbox.bodies) == [b"3", b"4", b"5", b"9"]
    with pytest.raises(BrokerError):
        async with consumer(cluster, inbox, cluster.name("g"), topic, subscriptions={topic: Sql92("amount >")}):
            pass


def simple(cluster: SdkCluster, *topics: str, wanted: str | Sql92 = "*", **arguments: Any) -> SimpleConsumer:
    usual = {"group": cluster.name("g"), "start_from": StartFrom.FIRST}
    return SimpleConsumer(cluster.name_server, subscriptions=dict.fromkeys(topics, wanted), **{**usual, **arguments})


async def receive_all(consumer: SimpleConsumer, count: int, **arguments: Any) -> list[PoppedMessage]:
    found: list[PoppedMessage] = []
    while len(found) < count:
        found += await consumer.receive(**arguments)
    return found


@on_both_backends()
async def test_simple_consumer_settles_messages(cluster: SdkCluster) -> None:
    """Messages in flight stay away; those given back, and those whose time is over, come again."""
    topic = cluster.name("simple")
    await send_all(cluster, topic, numbered(4), keys="k", properties={"own": "é"})
    async with simple(cluster, topic) as consumer:
        messages = await receive_all(consumer, 4, invisible_s=30, wait_s=10)
        assert sorted(message.body for message in messages) == numbered(4)
        assert {(message.topic, message.keys, message.properties["own"]) for message in messages} == {
            (topic, ("k",), "é")
        }
        done, returned, kept, ended = messages
        await done.ack()
        await returned.nack(1)
        await consumer.change_invisible_time(kept, 60)
        await consumer.change_invisible_time(ended, 1)
        again = await receive_all(consumer, 2, invisible_s=30, wait_s=10)  # RocketMQ is up to 4 s late
        assert sorted(message.body for message in again) == sorted([returned.body, ended.body])
        assert {(message.topic, message.reconsume_times) for message in again} == {(topic, 1)}
        for message in again:
            await message.ack()
        await kept.ack()
        with pytest.raises(ReceiptExpired, match="longer invisible_s"):
            await ended.ack()
        assert await consumer.receive(wait_s=5) == []


async def send_in_order(cluster: SdkCluster, topic: str, *bodies: bytes) -> None:
    async with Producer(cluster.name_server) as producer:
        for body in bodies:
            await producer.send(Message(topic, body))


@on_both_backends()
async def test_simple_consumer_keeps_the_order_of_a_queue(cluster: SdkCluster) -> None:
    """Also of a message that failed, and of one that was given out to a request that was cancelled."""
    topic = cluster.name("order")
    async with Admin(cluster.name_server) as admin:
        await admin.create_topic(topic, queue_count=1)
    await send_in_order(cluster, topic, *numbered(3))
    arguments: dict[str, Any] = {"group": cluster.name("g"), "mode": ConsumeMode.ORDERLY}
    async with simple(cluster, topic, **arguments) as consumer, simple(cluster, topic, **arguments) as other:
        [first] = await consumer.receive(1, invisible_s=60, wait_s=10)
        assert await other.receive(wait_s=0.5) == []
        await first.nack(1)
        again = await other.receive(2, invisible_s=60, wait_s=10)
        assert [(message.body, message.reconsume_times) for message in again] == [(b"m0", 1), (b"m1", 0)]
        for message in reversed(again):
            assert await consumer.receive(wait_s=0) == []
            await message.ack()
        [last] = await consumer.receive(wait_s=10)
        assert last.body == b"m2"
        await last.ack()
        with anyio.move_on_after(1):
            await consumer.receive(invisible_s=60, wait_s=30)
        await send_in_order(cluster, topic, b"cancelled", b"next")
        assert await other.receive(wait_s=1) == []
        [message] = await consumer.receive(1, wait_s=10)
        assert (message.body, message.reconsume_times) == (b"cancelled", 0)


@on_both_backends()
async def test_simple_consumer_waits_for_several_topics(cluster: SdkCluster) -> None:
    topics = [cluster.name("one"), cluster.name("two")]
    for topic in topics:
        await send_all(cluster, topic, [b"first"], tags="yes")
    async with simple(cluster, *topics, wanted="yes || other") as consumer:
        got = []
        async with anyio.create_task_group() as tasks:
            async for message in consumer.messages():
                got.append((message.topic, message.body))
                await message.ack()
                if len(got) == 2:
                    tasks.start_soon(send_tagged, cluster, topics[1])
                if len(got) == 3:
                    break
    assert sorted(got[:2]) == [(topics[0], b"first"), (topics[1], b"first")]
    assert got[2] == (topics[1], b"yes")


async def send_tagged(cluster: SdkCluster, topic: str) -> None:
    """Sends while the consumer waits."""
    await anyio.sleep(0.5)
    await send_all(cluster, topic, [b"no"], tags="no")
    await send_all(cluster, topic, [b"yes"], tags="yes")


@on_both_backends()
async def test_simple_consumer_filters_by_condition_and_priority(cluster: SdkCluster) -> None:
    topic = cluster.name("priority")
    async with Admin(cluster.name_server) as admin:
        await admin.create_topic(topic, queue_count=4, attributes={"message.type": "PRIORITY"})
    async with Producer(cluster.name_server) as producer:
        for priority in (1, 3, 0, 2, 9):
            result = await producer.send(
                Message(topic, b"%d" % priority, priority=priority, properties={"n": str(priority)})
            )
            assert result.queue.queue_id == min(priority, 3)
    async with Admin(cluster.name_server) as admin:
        while sum(each.max_offset for each in (await admin.topic_stats(topic)).values()) < 5:  # noqa: ASYNC110
            await anyio.sleep(0.05)  # what is acknowledged is in its queue a little later
    async with simple(cluster, topic, wanted=Sql92("n <> 2")) as consumer:
        messages = await receive_all(consumer, 4, wait_s=10)
    assert [message.body for message in messages] == [b"3", b"9", b"1", b"0"]


def test_invalid_consumer_arguments_are_rejected(tmp_path: Path) -> None:
    names = "127.0.0.1:1"
    with pytest.raises(ValueError, match="at least one topic"):
        PushConsumer(names, Inbox(), group="g", subscriptions={})
    with pytest.raises(ValueError, match="names no tag"):
        PushConsumer(names, Inbox(), group="g", subscriptions={"T": "||"})
    with pytest.raises(ValueError, match="BROADCASTING"):
        PushConsumer(names, Inbox(), group="g", subscriptions={"T": "*"}, position_file=tmp_path / "f")
