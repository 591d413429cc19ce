"""With any prefix of the log, a new master delivers what is not acknowledged, and nothing that is.

A random workload runs on one broker. Then each of several prefixes of its log, ending with any record, becomes the log
of another one, as after the death of a master whose last records did not reach its successor.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import trio

from ha.broker.standing import Standing
from ha.protocol.record import decode_record
from tests.broker.group_member import copy_log
from tests.broker.node import Node, open_node
from tests.broker.pop_client import Popped, ack, change, pop_messages

PREFIX_COUNT = 8


class Workload:
    """Sends, pops, acknowledges, and delays; notes when the log was how long."""

    def __init__(self, node: Node, seed: int) -> None:
        self.node = node
        self.random = Random(seed)
        self.sent: dict[bytes, int] = {}
        """Body -> end of the log when the send was answered"""
        self.acknowledged: dict[bytes, int] = {}
        """Body -> end of the log when an acknowledgement within the invisible time was answered"""
        self.asked: set[bytes] = set()
        """Bodies that a consumer tried to acknowledge"""

    @property
    def log_end(self) -> int:
        return self.node.store.log.max_offset.value

    async def run(self) -> None:
        for number in range(60):
            body = b"%d" % number
            assert (await self.node.send(body, e=number % 2)).code == 0
            self.sent[body] = self.log_end
            if number % 3 == 0:
                await self.consume()
            await trio.sleep(self.random.random() / 5)

    async def consume(self) -> None:
        invisible_ms = self.random.choice((300, 900, 60_000))
        for message in await pop_messages(self.node, maxMsgNums=4, invisibleTime=invisible_ms):
            choice = self.random.random()
            if choice < 0.2:
                _, message = await change(self.node, message, self.random.choice((100, 2000, 60_000)))
            if choice < 0.6:
                await self.acknowledge(message)

    async def acknowledge(self, message: Popped) -> None:
        self.asked.add(message.body)
        assert message.body not in self.acknowledged
        assert (await ack(self.node, message)).code == 0
        self.acknowledged[message.body] = self.log_end


async def deliverable(node: Node) -> list[bytes]:
    """The messages of TT that group g will get from a broker."""
    state = node.broker.pop._pop_log.state
    assert state is not None
    found = []
    for topic in ("TT", "%RETRY%g_TT"):
        for queue_id in node.store.queues.topics().get(topic, ()):
            queue = node.store.queues.get(topic, queue_id)
            assert queue is not None
            popped = state.get(("g", topic, queue_id))
            for offset in range(queue.max_offset):
                if popped is None or offset >= popped.next_offset or offset in popped.batches:
                    [entry] = queue.read(offset, 1)
                    raw = await node.store.log.read_all(entry.physical_offset, entry.size)
                    found.append(decode_record(raw).body)
    return found


def record_ends(node: Node) -> list[int]:
    """The end of each record of the log."""
    return sorted(
        entry.physical_offset + entry.size
        for topic, queue_ids in node.store.queues.topics().items()
        for queue_id in queue_ids
        if (queue := node.store.queues.get(topic, queue_id)) is not None
        for entry in queue.read(0, queue.max_offset)
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_prefix_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    async with open_node(tmp_path / "first") as first:
        workload = Workload(first, seed)
        await workload.run()
        await first.dispatched()
        assert workload.acknowledged
        assert first.broker.pop.statistics().revived_count
        ends = record_ends(first)
        for number, end in enumerate(sorted(workload.random.sample(ends[10:], PREFIX_COUNT))):
            standing = Standing("b0", 2, is_slave=True, is_elected=True)
            async with open_node(tmp_path / f"{number}", standing=standing, keeps_tables_in_log=True) as second:
                await copy_log(first.store, second.store, end)
                monkeypatch.setattr(second.broker.pop._revival, "_deliver", _nothing)
                assert await second.broker.become_master(1)
                await second.broker.pop._pop_log.wait_loaded()
                found = await deliverable(second)
                assert len(found) == len(set(found)), "a message would be delivered twice"
                known = {body for body, stored in workload.sent.items() if stored <= end}
                assert known - workload.asked <= set(found), "a message is lost"
                done = {body for body, answered in workload.acknowledged.items() if answered <= end}
                assert not done & set(found), "a message would be delivered after its acknowledgement"


async def _nothing(*_: object) -> None:
    await trio.lowlevel.checkpoint()
