"""Transactions: the same Java producer and consumer against a real broker and halog's, at once.

The checks, the received messages and the stored records of both must be equal.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import trio

from ha.broker.half_queue import decode_op
from ha.protocol.record import MessageRecord
from ha.protocol.topic_names import HALF_TOPIC, OP_TOPIC
from tests.interop.broker import Broker
from tests.interop.halog import HalogBroker
from tests.interop.java_client import JavaClient
from tests.interop.processes import Children, eventually
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker
from tests.interop.side_by_side import run_side_by_side, stored_records

SETTINGS: dict[str, object] = {
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 3000,
    "flushConsumerOffsetInterval": 1000,
}
PLAN = ("commit", "rollback", "unknown-commit", "unknown-rollback", "unknown-unknown-commit")
SEEN = {1, 3, 5}
ASKED_COUNT = 4
# Properties that differ from run to run, or that only 5.x brokers add.
VOLATILE = {"UNIQ_KEY", "__transactionId__", "MSG_REGION", "TRACE_ON"}


class Shape(NamedTuple):
    """A record without values that differ from run to run."""

    topic: str
    sequence: int
    sys_flag: int
    properties: tuple[tuple[str, str], ...]


def shapes(found: list[MessageRecord]) -> list[Shape]:
    made = []
    for record in found:
        if record.topic not in (HALF_TOPIC, "transacted"):
            continue
        properties = {name: value for name, value in record.property_map().items() if name not in VOLATILE}
        if properties.get("WAIT") == "true":
            del properties["WAIT"]  # 4.9.7 leaves it out, unless it rewrites the properties
        properties["REAL_QID"] = "any"  # random
        if record.topic == "transacted":
            properties.pop("REAL_TOPIC", None)  # 5.5.0 leaves it out of committed messages
        made.append(Shape(record.topic, int(record.body[:10]), record.sys_flag, tuple(sorted(properties.items()))))
    return sorted(made)


async def transact(client: JavaClient, broker: Broker) -> dict[str, Any]:
    await client.send("transacted", 1, nameServer=broker.name_server, first=100)
    push = await client.start("push", nameServer=broker.name_server, topic="transacted", group="gt", count=5)
    await push.wait("got", 60, sequence=100)
    events = await client.run(
        "transact",
        nameServer=broker.name_server,
        topic="transacted",
        group="pt",
        plan=",".join(PLAN),
        asked=ASKED_COUNT,
        lingerMs=4000,
    )
    assert events[-1]["missing"] == 0, events
    got = [event["sequence"] for event in await push.result() if event["event"] == "got"]
    asked = [event for event in events if event["event"] == "asked"]
    for event in asked:
        del event["id"], event["queueOffset"], event["queueId"]
    return {
        "got": sorted(got),
        "sent": [(event["status"], event["state"]) for event in events if event["event"] == "sent"],
        "asked": sorted(asked, key=lambda event: (event["sequence"], event["time"])),
    }


def ended(found: list[MessageRecord]) -> set[int]:
    """The sequences of the half messages that op messages refer to."""
    halves = {record.queue_offset: record for record in found if record.topic == HALF_TOPIC}
    ops = [offset for record in found if record.topic == OP_TOPIC for offset in decode_op(record.body)]
    assert len(ops) == len(set(ops)) == len(PLAN)
    return {int(halves[offset].body) for offset in ops}


@pytest.mark.usual_release("5.5.0")
async def test_transactions_are_those_of_rocketmq(children: Children, release: Release) -> None:
    seen: dict[str, dict[str, Any]] = {}

    async def use(client: JavaClient, broker: Broker) -> None:
        seen[broker.name] = await transact(client, broker)

    # By default 5.x records ended transactions only every 3 s, and until then also checks those.
    real, ours = await run_side_by_side(children, release, use, SETTINGS, transactionOpBatchInterval=300)
    assert seen["ours"] == seen["real"]
    assert set(seen["ours"]["got"]) == {100, 0, *SEEN}
    for broker in (real, ours):
        await eventually("all ends are recorded", partial(is_ended, broker), 20)
        assert ended(stored_records(broker)) == {1, 2, 3, 4, 5}
        await broker.stop()
    assert shapes(stored_records(ours)) == shapes(stored_records(real))
    await check_taken_over(children, real, ours)


def is_ended(broker: Broker) -> bool:
    ops = [decode_op(record.body) for record in stored_records(broker) if record.topic == OP_TOPIC]
    return sum(map(len, ops)) == len(PLAN)


async def check_taken_over(children: Children, real: RocketMqBroker, ours: HalogBroker) -> None:
    """With the real broker's files halog checks no ended transaction."""
    before = len(stored_records(real))
    heir = HalogBroker(children, "heir", ours.name_server, "ASYNC_MASTER", extra=SETTINGS, store=real.store)
    await heir.start()
    await trio.sleep(5)
    await heir.stop()
    assert [record.topic for record in stored_records(heir)[before:]] == []
