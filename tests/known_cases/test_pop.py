"""Messages that POP consumers lost, got again after their acknowledgement, or waited for in vain.

#7914: messages that were not acknowledged were not delivered again if they were stored shortly before the pop.
#7724: another message was delivered again in place of one that retention had deleted.
#8479: after a topic was deleted and created again, messages in flight of the old one were retried without end.
#9105: messages were delivered to several consumers of a group.
#9956: messages whose invisible time was changed at the same time kept the broker busy, so that none was delivered.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import trio

from ha.protocol.record import Message
from tests.broker.node import Node, open_node
from tests.broker.pop_client import Popped, ack, change, pop_messages


async def put(node: Node, *bodies: bytes, queue_count: int = 4) -> None:
    """Puts messages to TT."""
    messages = [Message("TT", number % queue_count, body) for number, body in enumerate(bodies)]
    for start in range(0, len(messages), 500):
        await node.broker.put_service.put(messages[start : start + 500])
    await node.dispatched()


async def test_7914_messages_stored_while_others_are_popped_come_again(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        random = Random(7914)
        sent = {b"%d" % number for number in range(300)}
        done: set[bytes] = set()
        await node.send(b"0")

        async def send_all() -> None:
            for number in range(1, 300):
                await node.send(b"%d" % number, e=number % 4)
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            while done != sent:
                for message in await pop_messages(node, invisibleTime=700, pollTime=1000, maxMsgNums=8):
                    assert message.body not in done, "it was acknowledged"
                    if random.random() < 0.5:
                        assert (await ack(node, message)).code == 0
                        done.add(message.body)


async def test_7724_no_other_message_comes_in_place_of_a_deleted_one(tmp_path: Path) -> None:
    store: dict[str, Any] = {"segment_size": 1 << 15}
    async with open_node(tmp_path, store_changes=store) as node:
        await node.send(b"to be deleted")
        [message] = await pop_messages(node, invisibleTime=5000)
        await put(node, *(b"%d" % number for number in range(400)), queue_count=1)
        acknowledged = []
        while messages := await pop_messages(node, invisibleTime=60_000):
            for each in messages:
                assert (await ack(node, each)).code == 0
                acknowledged.append(each.body)
        assert len(acknowledged) == 400
        node.store.retention.disk_used_ratio = 0.99
        assert await node.store.retention.clean() > 0
        queue = node.store.queues.get("TT", 0)
        assert queue is not None
        assert queue.min_offset > message.handle.offset
        await trio.sleep(30)
        assert await pop_messages(node) == []
        found = node.broker.pop.statistics()
        assert (found.lost_count, found.in_flight_count, found.revived_count) == (1, 0, 0)


async def test_8479_topic_that_is_deleted_and_created_again(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.send(b"old")
        await put(node, *(b"old" for _ in range(50)))
        old = await pop_messages(node, invisibleTime=2000)
        assert (await node.ask(215, topic="TT")).code == 0
        assert (await node.send(b"new")).code == 0
        [message] = await pop_messages(node, invisibleTime=2000)
        assert message.body == b"new"
        assert (await ack(node, message)).code == 0
        assert (await ack(node, old[0])).code in (0, 208)
        await trio.sleep(20)
        assert await pop_messages(node) == []
        assert node.broker.pop.statistics().in_flight_count == 0


async def test_9105_each_message_goes_to_one_consumer_of_a_group(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.send(b"first")
        found: list[Popped] = []

        async def consume() -> None:
            while messages := await pop_messages(node, pollTime=500, maxMsgNums=3, invisibleTime=600_000):
                found.extend(messages)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(consume)
            for number in range(20):
                nursery.start_soon(partial(put, node, *(b"%d-%d" % (number, each) for each in range(10))))
        places = [(message.topic, message.handle.queue_id, message.handle.offset) for message in found]
        assert len(places) == len(set(places)) == 201


async def test_9956_messages_whose_time_is_changed_at_once_come_on_time(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.send(b"first")
        await put(node, *(b"%d" % number for number in range(1500)))
        messages: list[Popped] = []
        while more := await pop_messages(node, invisibleTime=60_000):
            messages += more
        for start in range(0, len(messages), 250):
            async with trio.open_nursery() as nursery:
                for message in messages[start : start + 250]:
                    nursery.start_soon(change, node, message, 3000)
        began = trio.current_time()
        await trio.sleep(3.2)
        assert node.broker.pop.statistics().revived_count == len(messages) == 1501
        again: set[bytes] = set()
        while more := await pop_messages(node):
            again |= {message.body for message in more}
        assert len(again) == 1501
        assert trio.current_time() - began < 4
