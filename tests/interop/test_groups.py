"""Broker groups are added and drained while RocketMQ's Java clients send and consume."""

import pytest
import trio

from ha.cli.broker import Joined, drain_broker, join_broker
from ha.client import Admin, Client
from ha.protocol.bodies import GroupConfig
from tests.interop.halog import HalogBroker, start_halog_name_server
from tests.interop.java_client import Call, open_java_client, read_acks
from tests.interop.processes import Children
from tests.interop.releases import Release

pytestmark = pytest.mark.processes

A, B, C = NAMES = ("broker-a", "broker-b", "broker-c")
QUEUES_EACH = 2
SETTLE_S = 3.0
"""The Java clients of these tests look up routes every second."""


async def stored_on(admin: Admin, name: str) -> int:
    """Number of messages of topic orders on a broker."""
    stats = await admin.topic_stats("orders")
    return sum(each.max_offset for queue, each in stats.items() if queue.broker_name == name)


async def more_sends(produce: Call, count: int = 1_000) -> None:
    """Waits until so many more messages are acknowledged."""
    told = [event["acked"] for event in produce.events if event["event"] == "progress"]
    await produce.wait("progress", acked=(told[-1] if told else 0) + count)


async def wait_consumed(push: Call, count: int) -> None:
    with trio.fail_after(60):
        while sum(event["event"] == "got" for event in push.events) < count:
            await push.grown.wait()


@pytest.mark.usual_release("4.9.7")
async def test_groups_come_and_go_without_a_failed_send(children: Children, release: Release) -> None:
    name_server = await start_halog_name_server(children)
    brokers = {
        name: HalogBroker(children, name, name_server, "ASYNC_MASTER", extra={"brokerName": name}) for name in NAMES
    }
    for name in (A, B):
        await brokers[name].start()
    acks, until = children.folder / "acks", children.folder / "until"
    async with (
        open_java_client(children, release, name_server) as java,
        Client([name_server]) as client,
        Admin(client) as admin,
    ):
        await admin.create_topic("orders", queue_count=QUEUES_EACH)
        await admin.create_group(GroupConfig(group_name="billing"))
        push = await java.start("push", topic="orders", group="billing", count=1_000_000, limitS=300)
        await push.wait("started")
        produce = await java.start(
            "produce", topic="orders", count=1_000_000, threads=4, pauseMs=4, until=until, acks=acks
        )
        await more_sends(produce)

        await brokers[C].start()
        assert await join_broker(admin, C) == Joined(C, ["orders"], ["billing"])
        with trio.fail_after(60):
            while await stored_on(admin, C) == 0:  # noqa: ASYNC110
                await trio.sleep(0.2)

        drained = await drain_broker(admin, client, A, 60, SETTLE_S, lambda left: None)
        assert drained.is_drained, drained
        last = await stored_on(admin, A)
        await more_sends(produce)
        assert await stored_on(admin, A) == last > 0
        await brokers[A].stop()
        await more_sends(produce)

        until.touch()
        [*_, done] = await produce.result()
        assert (done["errors"], done.get("SEND_OK")) == (0, done["acked"])
        await wait_consumed(push, done["acked"])
        got = [event["sequence"] for event in push.events if event["event"] == "got"]
    sent = read_acks(acks)
    assert sorted(got) == sorted(ack.sequence for ack in sent)
    assert {ack.store_host for ack in sent} == {broker.address for broker in brokers.values()}
