"""Redelivery of messages in flight whose records are deleted, or can't be read, when they are due."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker.queue_read import QueueRead, ReadStatus
from tests.broker.few_descriptors import FewDescriptors
from tests.broker.node import Node, open_node
from tests.broker.pop_client import ack, bodies, pop_messages


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with messages 0, 1 and 2, of which group g has popped all."""
    async with open_node(tmp_path) as node:
        for number in range(3):
            assert (await node.send(b"%d" % number)).code == 0
        assert len(await pop_messages(node)) == 3
        yield node


@pytest.mark.parametrize("is_found", [False, True])
async def test_messages_deleted_meanwhile_leave_the_state_when_they_are_due(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    """Retention deletes their segment before the queue knows: a read passes them, alone or with what follows."""
    revival = node.broker.pop._revival
    read = revival._reader.read

    async def read_after_deletion(queue: Any, offset: int, count_max: int) -> QueueRead:
        if offset >= 2 or is_found:
            return await read(queue, 2, 1)
        return QueueRead(ReadStatus.MESSAGE_WAS_REMOVING, 2, 0, 3)

    monkeypatch.setattr(revival._reader, "read", read_after_deletion)
    await trio.sleep(10.5)
    assert bodies(await pop_messages(node)) == [b"2"]
    assert (revival.lost_count, revival.revived_counts.total()) == (2, 1)


@pytest.fixture
async def unreadable(node: Node, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The queue offsets that can't be read when they are due."""
    offsets: set[int] = set()
    read = node.broker.pop._revival._reader.read

    async def read_some(queue: Any, offset: int, count_max: int) -> QueueRead:
        if queue is node.store.queues.get("TT", 0) and offset in offsets:
            return QueueRead(ReadStatus.OFFSET_FOUND_NULL, offset, 0, 3)
        return await read(queue, offset, 1)

    monkeypatch.setattr(node.broker.pop._revival._reader, "read", read_some)
    return offsets


async def test_message_that_can_not_be_read_for_a_minute_is_lost(node: Node, unreadable: set[int]) -> None:
    unreadable.update({0, 2})
    await trio.sleep(10.5)  # the invisible time
    assert bodies(await pop_messages(node, invisibleTime=1_000_000)) == [b"1"]
    await trio.sleep(50)
    unreadable.remove(2)
    await trio.sleep(1)
    assert bodies(await pop_messages(node, invisibleTime=1_000_000)) == [b"2"]
    assert node.broker.pop.statistics().lost_count == 0
    await trio.sleep(10)
    assert node.broker.pop.statistics().lost_count == 1
    assert await pop_messages(node) == []


async def test_minute_begins_again_when_a_message_could_be_read(
    node: Node, unreadable: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable.add(0)
    await trio.sleep(10 + 50)
    unreadable.remove(0)
    with monkeypatch.context() as patch:
        patch.setattr(type(node.store), "is_writable", (False, "the disk is full"))
        await trio.sleep(2)
        unreadable.add(0)
    await trio.sleep(50)
    assert node.broker.pop.statistics().lost_count == 0
    await trio.sleep(15)
    assert node.broker.pop.statistics().lost_count == 1


async def test_message_that_can_not_be_read_may_be_acknowledged(node: Node, unreadable: set[int]) -> None:
    """Nothing is remembered of it, which another message could inherit."""
    [message] = await pop_messages(node, consumerGroup="h", maxMsgNums=1)
    unreadable.add(0)
    await trio.sleep(11)
    assert node.broker.pop._revival._unreadable
    await ack(node, message, consumerGroup="h")
    await trio.sleep(11)
    assert [each.batch.queue.key[0] for each in node.broker.pop._revival._unreadable] == ["g"]


async def test_message_that_can_not_be_read_waits_for_the_repair_of_damage(node: Node, unreadable: set[int]) -> None:
    damage = node.store.damage.add(1, 2, file="f", reason="r", found_by="scrub", by_checksum=True)
    unreadable.add(0)
    await trio.sleep(1000)
    assert node.broker.pop.statistics().lost_count == 0
    node.store.damage.failed(damage, "no peer has it", is_hopeless=True)
    await trio.sleep(58)
    assert node.broker.pop.statistics().lost_count == 0
    await trio.sleep(4)
    assert node.broker.pop.statistics().lost_count == 1


async def test_no_message_is_lost_while_checksums_cannot_be_read(tmp_path: Path) -> None:
    """After a minute, all messages that were due counted as lost."""
    disk = FewDescriptors()
    async with open_node(tmp_path) as node:
        for number in range(3):
            await node.send(b"%d" % number)
        assert len(await pop_messages(node)) == 3
    async with open_node(tmp_path, disk=disk) as node:
        await trio.sleep(1)
        disk.exhaust(node, None)
        await trio.sleep(300)
        disk.is_exhausted = False
        await trio.sleep(5)
        assert len(await pop_messages(node)) == 3
        assert node.broker.pop.statistics().lost_count == 0


async def test_pop_that_waits_is_woken_by_the_repair_of_damage(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        await node.send(b"a")
        end = node.store.log.max_offset.value
        damage = node.store.damage.add(0, end, file="f", reason="r", found_by="scrub", by_checksum=True)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def wait() -> None:
                assert bodies(await pop_messages(node, pollTime=9000)) == [b"a"]
                assert trio.current_time() == repaired_at

            await trio.sleep(0.5)
            repaired_at = trio.current_time()
            node.store.damage.healed(damage, "a peer")


@pytest.mark.parametrize("name", [{"groupName": "g", "cleanOffset": True}, {"topic": "TT"}])
async def test_messages_of_a_group_or_topic_deleted_while_they_are_read_leave_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch, name: dict[str, Any]
) -> None:
    """The retry topic that was created for them stayed."""
    revival = node.broker.pop._revival
    read = revival._reader.read

    async def read_slowly(*place: Any) -> QueueRead:
        found = await read(*place)
        await trio.sleep(5)
        return found

    monkeypatch.setattr(revival._reader, "read", read_slowly)
    await trio.sleep(12)
    assert (await node.ask(207 if "groupName" in name else 215, **name)).code == 0
    await trio.sleep(10)
    assert not [topic for topic in node.broker.topics.table if topic.startswith("%RETRY%")]
    assert node.broker.offsets.topics_of("g") == []
