"""Limits of one pull, and answers for deleted messages."""

from pathlib import Path
from typing import Any

import pytest

from ha.broker.options import BrokerRole
from tests.broker.node import Node, open_node


async def fill(node: Node, count: int, size: int = 100) -> None:
    for number in range(count):
        assert (await node.send(bytes([number % 256]) * size)).code == 0
    await node.dispatched()


async def counts(node: Node, **changes: Any) -> tuple[int, str, str]:
    answer = await node.pull(0, **changes)
    assert answer.code == 0
    return len(node.records(answer)), answer.ext_fields["nextBeginOffset"], answer.ext_fields["suggestWhichBrokerId"]


async def test_message_count(node: Node) -> None:
    await fill(node, 50)
    assert await counts(node) == (32, "32", "0")
    assert await counts(node, maxMsgNums=1000) == (32, "32", "0")
    assert await counts(node, maxMsgNums=5) == (5, "5", "0")
    assert await counts(node, maxMsgNums=0) == (1, "1", "0")
    assert await counts(node, maxMsgNums=2**31 - 1) == (32, "32", "0")


async def test_message_bytes(node: Node) -> None:
    await fill(node, 5, 100_000)
    assert await counts(node) == (2, "2", "0")
    assert await counts(node, maxMsgBytes=1) == (1, "1", "0"), "one message always"


@pytest.mark.parametrize("slave_read_enable", [False, True])
async def test_reader_far_behind(tmp_path: Path, slave_read_enable: bool) -> None:
    async with open_node(tmp_path, access_in_memory_bytes_max=4000, slave_read_enable=slave_read_enable) as node:
        await fill(node, 50)
        assert await counts(node) == (8, "8", "1" if slave_read_enable else "0")


async def test_new_group_skips_messages_no_longer_in_memory(tmp_path: Path) -> None:
    async with open_node(tmp_path, access_in_memory_bytes_max=4000) as node:
        await fill(node, 5)
        place: dict[str, Any] = {"consumerGroup": "g", "topic": "TT", "queueId": 0}
        assert (await node.ask(14, **place)).ext_fields == {"offset": "0"}
        await fill(node, 20)
        assert (await node.ask(14, **place)).code == 22


async def test_interleaved_queues(node: Node) -> None:
    for number in range(20):
        await node.send(b"%d" % number, e=number % 3)
    await node.dispatched()
    answer = await node.pull(0, queueId=1)
    assert [record.body for record in node.records(answer)] == [b"%d" % n for n in range(1, 20, 3)]


async def test_filtered_entries_are_skipped(node: Node) -> None:
    for number in range(100):
        await node.send(b"%d" % number, i=f"TAGS\x01{'rare' if number == 90 else 'common'}\x02")
    await node.dispatched()
    answer = await node.pull(0, subscription="rare")
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (0, "100")
    assert [record.body for record in node.records(answer)] == [b"90"]


async def test_slave_reads(tmp_path: Path) -> None:
    """A slave serves topics of which it has messages, even if its table lacks them, and corrects no offset."""
    async with open_node(tmp_path) as node:
        await fill(node, 3)
    (tmp_path / "config" / "topics.json").unlink()
    (tmp_path / "config" / "topics.json.bak").unlink()
    async with open_node(tmp_path, role=BrokerRole.SLAVE, slave_read_enable=True) as node:
        assert node.broker.topics.get("TT") is None
        assert await counts(node) == (3, "3", "0")
        for offset, status in ((50, "OFFSET_OVERFLOW_BADLY"), (-1, "OFFSET_TOO_SMALL")):
            answer = await node.pull(offset)
            assert (answer.code, answer.remark) == (20, status)
            assert answer.ext_fields["nextBeginOffset"] == str(offset)
            assert answer.ext_fields["suggestWhichBrokerId"] == "0"
        assert (await node.pull(3)).code == 19
        assert (await node.pull(0, topic="Unknown")).code == 17
    async with open_node(tmp_path, role=BrokerRole.SLAVE) as node:
        answer = await node.pull(0)
        assert answer.code == 2
        assert answer.remark is not None
        assert answer.remark.startswith("[REJECTREQUEST]")
