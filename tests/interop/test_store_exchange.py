"""Stores change hands: halog opens and serves stores of real brokers, and the other way round."""

import json
import struct
import time
from collections import Counter
from pathlib import Path

import pytest
import trio

from ha.client import Message, Producer, PullConsumer, ReadFrom, SimpleConsumer, StartFrom
from ha.errors import HalogError
from ha.protocol.codes import RequestCode
from ha.protocol.remoting import RemotingCommand
from ha.remoting import open_remoting_client
from tests.interop.broker import Broker
from tests.interop.clusters import check_acknowledged
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import JavaClient, open_java_client, read_acks
from tests.interop.processes import Children
from tests.interop.releases import VERSIONS, Release
from tests.interop.rocketmq import RocketMqBroker
from tests.interop.stored_files import log_range, queue_entries
from tests.interop.test_sdk import retry_on

pytestmark = pytest.mark.processes

# About 10 MiB: the first segments are full.
MESSAGE_COUNT = 8_000
_MORE_COUNT = 1_000
SEGMENT_SIZE = 4 << 20
SETTINGS: dict[str, object] = {"mappedFileSizeCommitLog": SEGMENT_SIZE}


async def fill(client: JavaClient, folder: Path, first: int, count: int) -> Path:
    acks = folder / f"acks-{first}"
    done = (await client.run("produce", topic="goods", first=first, count=count, batch=100, threads=4, acks=acks))[-1]
    assert done["acked"] == count, done
    return acks


async def check_served(client: JavaClient, folder: Path, *acks_paths: Path) -> None:
    """A consumer reads exactly the acknowledged messages, at their queue offsets."""
    read = await client.consume("goods", folder / "read")
    found = {(m.queue_id, m.queue_offset): (m.sequence, m.crc, m.message_id, m.physical_offset) for m in read}
    acks = [ack for path in acks_paths for ack in read_acks(path)]
    expected = {
        (ack.queue_id, ack.queue_offset): (ack.sequence, ack.crc, ack.message_id, ack.physical_offset) for ack in acks
    }
    assert len(read) == len(expected)
    assert found == expected


async def hand_over(client: JavaClient, folder: Path, giver: Broker, taker: Broker, *, cleanly: bool) -> None:
    """`giver` writes and ends; `taker` opens its folder, serves it, and appends to it."""
    await giver.start()
    first_acks = await fill(client, folder, 0, MESSAGE_COUNT)
    if cleanly:
        await giver.stop()
    else:
        await giver.kill()
    end = log_range(giver.commitlog).end
    assert end > SEGMENT_SIZE
    await taker.start()
    assert log_range(taker.commitlog).end == end
    await client.wait_route("goods")
    await check_served(client, folder, first_acks)
    more_acks = await fill(client, folder, MESSAGE_COUNT, _MORE_COUNT)
    assert min(ack.physical_offset for ack in read_acks(more_acks)) == end
    await check_served(client, folder, first_acks, more_acks)
    check_acknowledged(first_acks, taker)
    check_acknowledged(more_acks, taker)
    entries = sum(len(queue) for (topic, _), queue in queue_entries(taker.store).items() if topic == "goods")
    assert entries == MESSAGE_COUNT + _MORE_COUNT


def ends(*usual: tuple[str, bool]) -> pytest.MarkDecorator:
    """Every release with both kinds of giver; all but the `usual` are long."""
    cases = []
    for version in VERSIONS:
        for cleanly in (True, False):
            marks = () if (version, cleanly) in usual else (pytest.mark.long,)
            name = f"{version}-{'stopped' if cleanly else 'killed'}"
            cases.append(pytest.param(version, cleanly, id=name, marks=marks))
    return pytest.mark.parametrize(("release", "cleanly"), cases, indirect=["release"], scope="session")


@ends(("5.5.0", False), ("4.9.7", True))
async def test_a_real_store_opens_in_halog(children: Children, release: Release, cleanly: bool) -> None:
    name_server = await start_halog_name_server(children)
    giver = RocketMqBroker(children, release, "real", name_server, "ASYNC_MASTER", extra=SETTINGS)
    taker = HalogBroker(children, "halog", name_server, "ASYNC_MASTER", extra=SETTINGS, store=giver.store)
    async with open_java_client(children, release, name_server) as client:
        await hand_over(client, children.folder, giver, taker, cleanly=cleanly)


@ends(("5.5.0", True), ("4.9.7", False))
async def test_a_halog_store_opens_in_a_real_broker(children: Children, release: Release, cleanly: bool) -> None:
    name_server = await start_halog_name_server(children)
    giver = HalogBroker(children, "halog", name_server, "ASYNC_MASTER", extra=SETTINGS)
    taker = RocketMqBroker(children, release, "real", name_server, "ASYNC_MASTER", extra=SETTINGS, store=giver.store)
    async with open_java_client(children, release, name_server) as client:
        await hand_over(client, children.folder, giver, taker, cleanly=cleanly)


# Due within a minute of the hand-over, and long before it.
TIMER_S, DELIVERED_S = 60, 1
INVISIBLE_S = 15
TIMERS: dict[str, object] = {"timerWheelEnable": "true", "recallMessageEnable": "true"}


only_5 = pytest.mark.parametrize("release", ["5.5.0"], indirect=True, scope="session")


async def timer_bodies(consumer: PullConsumer) -> Counter[bytes]:
    """How often each body is in the topic."""
    found: Counter[bytes] = Counter()
    for queue in await consumer.queues("timed"):
        offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
        while offset < end:
            result = await consumer.pull(queue, offset)
            found.update(message.body for message in result.messages)
            offset = result.next_offset
    return found


async def check_answers_to_slaves(broker: Broker) -> None:
    """60 and 61 have the same form from both makes."""
    async with open_remoting_client() as remoting:
        check_point = await remoting.invoke(broker.address, RemotingCommand(RequestCode.GET_TIMER_CHECK_POINT), 10)
        metrics = await remoting.invoke(broker.address, RemotingCommand(RequestCode.GET_TIMER_METRICS), 10)
    read_ms, _, own_offset, master_offset, *_ = struct.unpack(">7q", check_point.body)
    assert 0 <= time.time() * 1000 - read_ms < 60_000
    assert 2 <= own_offset <= 4
    assert 2 <= master_offset <= 4
    found = json.loads(bytes(metrics.body))
    assert set(found) == {"dataVersion", "timingCount"}
    assert set(found["dataVersion"]) == {"counter", "stateVersion", "timestamp"}
    assert set(found["timingCount"]) == {"timed"}
    assert set(found["timingCount"]["timed"]) == {"count", "timeStamp"}


async def pop_some(name_server: str, topic: str) -> None:
    """Three messages are popped, and one of them is acknowledged."""
    async with Producer(name_server, group="poppers") as producer:
        for body in (b"acknowledged", b"in flight 1", b"in flight 2"):
            await retry_on((HalogError,), lambda body=body: producer.send(Message(topic, body)))  # type: ignore[misc]
    async with simple_consumer(name_server, topic) as consumer:
        left = {b"acknowledged", b"in flight 1", b"in flight 2"}
        with trio.fail_after(30):
            while left:
                for message in await consumer.receive(32, invisible_s=INVISIBLE_S):
                    left.remove(message.body)
                    if message.body == b"acknowledged":
                        await message.ack()


async def popped_again(name_server: str, topic: str) -> Counter[bytes]:
    """Sends a new message; returns how often the group gets each body after the invisible time."""
    found: Counter[bytes] = Counter()
    async with Producer(name_server, group="poppers") as producer:
        await retry_on((HalogError,), lambda: producer.send(Message(topic, b"new")))
    async with simple_consumer(name_server, topic) as consumer:
        with trio.move_on_after(10):
            while True:
                for message in await consumer.receive(32, invisible_s=INVISIBLE_S):
                    found[message.body] += 1
                    await message.ack()
    return found


async def hand_back_pops(name_server: str, giver: Broker, taker: Broker) -> Counter[bytes]:
    """`taker` has two popped messages in flight, and stops; `giver` opens its folder.

    Returns what POP consumers get again.
    """
    await pop_some(name_server, "popped-back")
    popped_at = trio.current_time()
    await taker.stop()
    await giver.start()
    await trio.sleep_until(popped_at + INVISIBLE_S + 5)
    return await popped_again(name_server, "popped-back")


def simple_consumer(name_server: str, topic: str) -> SimpleConsumer:
    return SimpleConsumer(name_server, group="poppers", subscriptions={topic: "*"}, start_from=StartFrom.FIRST)


async def hand_over_timers(name_server: str, giver: Broker, taker: Broker) -> tuple[Counter[bytes], Counter[bytes]]:
    """`giver` delivers a message, keeps one that is due later and one that is recalled, has two popped messages in
    flight, and is killed; `taker` opens its folder.

    Returns how often each timer message is in the topic when all are due, and what POP consumers get again.
    """
    await giver.start()
    async with Producer(name_server, group="timers") as producer:
        async with PullConsumer(name_server, group="timers", read_from=ReadFrom.MASTER) as consumer:
            await retry_on((HalogError,), lambda: producer.send(Message("timed", b"now")))
            sent_at = trio.current_time()
            await producer.send(Message("timed", b"delivered", delay_s=DELIVERED_S))
            recalled = await producer.send(Message("timed", b"recalled", delay_s=TIMER_S))
            await producer.send(Message("timed", b"pending", delay_s=TIMER_S))
            assert await producer.recall(recalled.recall_handle or "") == recalled.message_id
            await trio.sleep(DELIVERED_S + 3)
            assert await timer_bodies(consumer) == {b"now": 1, b"delivered": 1}
        await check_answers_to_slaves(giver)
        await pop_some(name_server, "popped")
        await giver.kill()
        await taker.start()
        assert trio.current_time() - sent_at < TIMER_S - 5, "too slow a machine for this test"
    async with PullConsumer(name_server, group="timers", read_from=ReadFrom.MASTER) as consumer:
        await retry_on((HalogError,), lambda: timer_bodies(consumer))
        await trio.sleep_until(sent_at + TIMER_S - 2)
        assert b"pending" not in await timer_bodies(consumer), "it is not due"
        await trio.sleep_until(sent_at + TIMER_S + 3)
        return await timer_bodies(consumer), await popped_again(name_server, "popped")


@only_5
async def test_halog_takes_over_the_timers_of_a_real_broker(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    giver = RocketMqBroker(children, release, "real", name_server, "ASYNC_MASTER", extra=TIMERS)
    taker = HalogBroker(children, "halog", name_server, "ASYNC_MASTER", store=giver.store)
    timed, popped = await hand_over_timers(name_server, giver, taker)
    # Neither reads the other's POP records. The giver was killed before it saved the group's offsets.
    assert popped == {b"acknowledged": 1, b"in flight 1": 1, b"in flight 2": 1, b"new": 1}
    # Its progress is in files that halog does not read: what it delivered is delivered again.
    assert timed == {b"now": 1, b"delivered": 2, b"pending": 1}
    # A broker that stops saves the offsets, which are past what is in flight.
    assert await hand_back_pops(name_server, giver, taker) == {b"new": 1}


@only_5
async def test_a_real_broker_takes_over_the_timers_of_halog(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    often = {"flushDelayOffsetInterval": 1000}  # else slaves learn the progress after up to 10 s
    giver = HalogBroker(children, "halog", name_server, "ASYNC_MASTER", extra=often)
    taker = RocketMqBroker(children, release, "real", name_server, "ASYNC_MASTER", extra=TIMERS, store=giver.store)
    timed, popped = await hand_over_timers(name_server, giver, taker)
    # Neither reads the other's POP records. The giver was killed before it saved the group's offsets.
    assert popped == {b"acknowledged": 1, b"in flight 1": 1, b"in flight 2": 1, b"new": 1}
    assert timed == {b"now": 1, b"delivered": 2, b"pending": 1}
    assert await hand_back_pops(name_server, giver, taker) == {b"new": 1}
    # halog continues at its own position in a topic that both have served.
    assert await popped_again(name_server, "popped") == {b"in flight 1": 1, b"in flight 2": 1, b"new": 2}
