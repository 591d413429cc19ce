"""Delayed messages and failing consumers: the same Java program with a real broker and halog's, at once.

Each broker gets the same messages from one client; the messages seen by consumers, and every record stored on the way
(SCHEDULE_TOPIC_XXXX, %RETRY%, %DLQ% and the topics themselves), must be equal.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import trio

from ha.protocol import java_json
from ha.protocol.batch import encode_batch
from ha.protocol.bodies import DelayOffsets
from ha.protocol.record import MessageRecord
from ha.protocol.remoting import RemotingCommand
from ha.protocol.topic_names import SCHEDULE_TOPIC
from ha.remoting import open_remoting_client
from tests.broker.node import SEND_V2, text
from tests.interop.broker import Broker
from tests.interop.halog import HalogBroker
from tests.interop.java_client import Event, JavaClient
from tests.interop.processes import Children, eventually
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker
from tests.interop.side_by_side import run_side_by_side, stored_records
from tests.interop.stored_files import queue_entries, records

# Three different levels; from the third on, which the first retry uses, as short as possible.
LEVELS_S = (2, 3, 1, 1, 1, 1, 60)
LEVELS = " ".join(f"{level}s" for level in LEVELS_S)
SETTINGS: dict[str, object] = {
    "messageDelayLevel": LEVELS,
    "flushDelayOffsetInterval": 1000,
    "timerWheelEnable": "false",
}
TIMES_MAX = 3
LATE_MS_MAX = 1000
# Properties that differ from run to run, or that only 5.x brokers add.
VOLATILE = {"UNIQ_KEY", "MSG_REGION", "TRACE_ON"}


class Shape(NamedTuple):
    """A record without values that differ from run to run."""

    topic: str
    queue_id: int
    sequence: int
    flag: int
    sys_flag: int
    reconsume_times: int
    prepared_transaction_offset: int
    properties: tuple[tuple[str, str], ...]


def shapes(found: Iterable[MessageRecord]) -> list[Shape]:
    """The messages of these tests, topic by topic."""
    made = []
    for record in found:
        if not record.body[:10].isdigit():
            continue
        properties = {name: value for name, value in record.property_map().items() if name not in VOLATILE}
        if properties.get("WAIT") == "true":
            del properties["WAIT"]  # 4.9.7 leaves it out, unless it rewrites the properties
        if "ORIGIN_MESSAGE_ID" in properties:
            properties["ORIGIN_MESSAGE_ID"] = properties["ORIGIN_MESSAGE_ID"][:8]  # the store's address
        # The queue of a producer's message is random.
        is_random = record.topic in ("later", "failing")
        if properties.get("REAL_TOPIC") in ("later", "failing"):
            properties["REAL_QID"] = "any"
        made.append(
            Shape(
                record.topic,
                -1 if is_random else record.queue_id,
                int(record.body[:10]),
                record.flag,
                record.sys_flag,
                record.reconsume_times,
                record.prepared_transaction_offset,
                tuple(sorted(properties.items())),
            )
        )
    return sorted(made)


async def deliver(client: JavaClient, broker: Broker) -> list[Event]:
    """Sends messages of three levels to a waiting consumer."""
    await client.send("later", 1, nameServer=broker.name_server, first=100)
    push = await client.start("push", nameServer=broker.name_server, topic="later", group="gl", count=13)
    await push.wait("got", 60, sequence=100)
    for level in (99, 2, 1, 3):
        delay = {"delay": level, "nameServer": broker.name_server}
        sent = await client.send("later", 4 if level < 99 else 1, first=10 * level, **delay)
        assert {event["status"] for event in sent} == {"SEND_OK"}
    return [event for event in await push.result() if event["event"] == "got"]


async def fail(client: JavaClient, broker: Broker) -> list[Event]:
    """Sends three messages to a consumer that fails them until they are dead letters."""
    await client.send("failing", 3, nameServer=broker.name_server, first=1)
    events = await client.run(
        "fail",
        nameServer=broker.name_server,
        topic="failing",
        group="gf",
        count=3 * (TIMES_MAX + 1),
        times=TIMES_MAX,
        limitS=60,
    )
    assert events[-1]["missing"] == 0, events
    return [event for event in events if event["event"] == "got"]


async def run_both(client: JavaClient, broker: Broker, seen: dict[str, Any]) -> None:
    async with trio.open_nursery() as nursery:

        async def keep(name: str, call: Any) -> None:
            seen[name] = await call(client, broker)

        nursery.start_soon(keep, "later", deliver)
        nursery.start_soon(keep, "failing", fail)

    def is_all_there() -> bool:
        dead = [record for record in records(broker.commitlog) if record.topic == "%DLQ%gf"]
        return len(dead) == 3

    await eventually("all messages are dead", is_all_there, 20)


@pytest.mark.usual_release("5.5.0")
async def test_delays_and_retries_are_those_of_rocketmq(children: Children, release: Release) -> None:
    seen: dict[str, dict[str, Any]] = {"real": {}, "ours": {}}

    async def use(client: JavaClient, broker: Broker) -> None:
        await run_both(client, broker, seen[broker.name])

    real, ours = await run_side_by_side(children, release, use, SETTINGS)
    for name, broker in (("real", real), ("ours", ours)):
        check_times(stored_records(broker))
        attempts: dict[int, list[tuple[Any, ...]]] = {}
        for event in seen[name]["failing"]:
            attempts.setdefault(event["sequence"], []).append(
                (event["reconsumeTimes"], event["topic"], event["delay"], event["retryTopic"], event["tags"])
            )
        assert attempts.keys() == {1, 2, 3}
        for found in attempts.values():
            assert [attempt[0] for attempt in found] == list(range(TIMES_MAX + 1))
        seen[name]["attempts"] = attempts
        assert {event["sequence"] for event in seen[name]["later"]} == {
            100,
            *range(10, 14),
            *range(20, 24),
            *range(30, 34),
        }
    assert seen["ours"]["attempts"] == seen["real"]["attempts"]
    assert shapes(stored_records(ours)) == shapes(stored_records(real))
    for broker in (real, ours):
        check_entries(broker)
    assert await refusals(ours, release) == await refusals(real, release)
    await check_copied(children, real)
    await check_taken_over(children, real, ours)


async def refusals(broker: Broker, release: Release) -> list[int]:
    """The response codes to invalid delays and messages sent back."""
    batch = encode_batch([(0, b"x", b"")])
    timers = [{"i": "TIMER_DELAY_SEC\x015\x02"}, {"i": "TIMER_DELIVER_MS\x0199\x02"}]  # 4.9 knows none
    sends: list[dict[str, Any]] = [
        *({"i": f"DELAY\x01{level}\x02"} for level in ("abc", "99999999999", " 1", "1.0", "0", "-1")),
        {"b": SCHEDULE_TOPIC, "i": ""},
        *([] if release.is_4 else timers),
    ]
    back = {"offset": 0, "group": "gf", "delayLevel": -1, "originTopic": "later", "unitMode": False}
    backs: list[dict[str, Any]] = [
        {},
        *({"offset": offset} for offset in (1, -1, 1 << 40, None)),
        *({"delayLevel": level} for level in (None, "x")),
        *({"group": group} for group in ([None] if release.is_4 else [None, "a/b", "", "g" * 200])),
    ]
    requests = [(310, b"x", {**SEND_V2, "b": "later", **changes}) for changes in sends]
    requests.append((320, batch, {**SEND_V2, "b": "later", "i": "DELAY\x012\x02", "m": True}))
    requests += [(36, b"", {**back, **changes}) for changes in backs]
    codes = []
    async with open_remoting_client() as client:
        for code, body, fields in requests:
            ext = {name: text(value) for name, value in fields.items() if value is not None}
            answer = await client.invoke(
                broker.address, RemotingCommand(code, version=479, ext_fields=ext, body=body), 10
            )
            codes.append(answer.code)
    return codes


async def check_copied(children: Children, real: RocketMqBroker) -> None:
    """A halog slave copies its real master's delay offsets."""
    slave = HalogBroker(children, "slave", real.name_server, "SLAVE", broker_id=1, extra=SETTINGS)
    await slave.start()
    copied = slave.store / "config" / "delayOffset.json"
    await eventually("the slave has copied the delay offsets", copied.exists, 20)
    await eventually("both say the same", lambda: delay_offsets(slave) == delay_offsets(real), 20)
    await slave.stop()


async def check_taken_over(children: Children, real: RocketMqBroker, ours: HalogBroker) -> None:
    """Both have the same delay offsets; with the real broker's files halog delivers the messages still waiting.

    One is of the last level, which is now short enough to be due at once.
    """
    for broker in (real, ours):
        await broker.stop()
    assert delay_offsets(real) == delay_offsets(ours)
    before = len(stored_records(real))
    shorter = {"messageDelayLevel": LEVELS.replace("60s", "1s")}
    heir = HalogBroker(children, "heir", ours.name_server, "ASYNC_MASTER", extra=shorter, store=real.store)
    await heir.start()
    await eventually("the message that waited is delivered", lambda: len(stored_records(heir)) > before, 20)
    await heir.stop()
    [added] = stored_records(heir)[before:]
    assert (added.topic, int(added.body[:10])) == ("later", 990)
    assert delay_offsets(heir) == {**delay_offsets(ours), 7: 1}


def delay_offsets(broker: Broker) -> dict[int, int]:
    try:
        text = (broker.store / "config" / "delayOffset.json").read_bytes()
    except FileNotFoundError:  # RocketMQ has moved it away in order to rewrite it
        return {}
    return {level: offset for level, offset in java_json.read_as(DelayOffsets, text).offset_table.items() if offset}


def check_entries(broker: Broker) -> None:
    """The entry of a delayed message contains its delivery time."""
    found = {record.physical_offset: record for record in stored_records(broker)}
    count = 0
    for (topic, queue_id), entries in queue_entries(broker.store).items():
        if topic == SCHEDULE_TOPIC:
            for physical_offset, _, due_ms in entries:
                assert due_ms == found[physical_offset].store_timestamp_ms + LEVELS_S[queue_id] * 1000
                count += 1
    assert count == sum(record.topic == SCHEDULE_TOPIC for record in found.values()) > 0


def check_times(found: list[MessageRecord]) -> None:
    """Each delivered record was stored within a second of when it was due."""
    scheduled = {}
    for record in found:
        properties = record.property_map()
        key = properties.get("UNIQ_KEY"), record.reconsume_times
        if record.topic == SCHEDULE_TOPIC:
            scheduled[key] = record
        elif key in scheduled and "REAL_TOPIC" in properties and not record.topic.startswith("%DLQ%"):
            due_ms = scheduled[key].store_timestamp_ms + LEVELS_S[int(properties["DELAY"]) - 1] * 1000
            assert 0 <= record.store_timestamp_ms - due_ms <= LATE_MS_MAX, record
