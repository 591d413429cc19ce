"""POP in a failover group: a new master goes on with what was in flight, and a former one answers nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from ha.broker.broker import Broker
from ha.broker.options import BrokerRole
from ha.broker.standing import Standing
from ha.protocol.codes import ResponseCode
from ha.protocol.record import Message
from ha.protocol.topic_names import POP_TOPIC
from tests.broker.few_descriptors import FewDescriptors
from tests.broker.group_member import copy_log
from tests.broker.node import Node, open_node
from tests.broker.pop_client import Popped, ack, change, pop, pop_messages


def standing_of(member_id: int) -> Standing:
    return Standing("b0", member_id, is_slave=True, is_elected=True)


async def start_topic(broker: Broker, node: Node, count: int) -> None:
    """Makes TT with four queues and `count` messages."""
    assert not isinstance(await broker.topics.ensure("TT", 4), str)
    messages = [Message("TT", number % 4, b"%d" % number) for number in range(count)]
    for start in range(0, count, 200):
        results = await broker.put_service.put(messages[start : start + 200])
        assert all(result.status.is_stored for result in results)
    await node.dispatched()


async def pop_all(node: Node, invisible_ms: int) -> list[Popped]:
    found: list[Popped] = []
    while messages := await pop_messages(node, invisibleTime=invisible_ms):
        found += messages
    return found


async def test_ten_thousand_messages_in_flight_at_a_change_of_master(tmp_path: Path) -> None:
    async with open_node(tmp_path / "a", standing=standing_of(1), keeps_tables_in_log=True) as first:
        assert await first.broker.become_master(1)
        await start_topic(first.broker, first, 10_000)
        messages = await pop_all(first, 100_000)
        assert len(messages) == 10_000
        acknowledged, rest = messages[:400], messages[400:]
        for message in acknowledged:
            assert (await ack(first, message)).code == 0
        async with open_node(tmp_path / "b", standing=standing_of(2), keeps_tables_in_log=True) as second:
            await copy_log(first.store, second.store, first.store.log.max_offset.value)
            await first.broker.become_slave(2)
            assert (await pop(first)).code == 14
            assert (await ack(first, rest[0])).code == 14
            began = trio.current_time()
            assert await second.broker.become_master(2)
            await trio.sleep(0.1)
            assert second.broker.pop.statistics().in_flight_count == len(rest)
            assert (await pop(second)).code == 210
            for message in rest[:100]:
                assert (await ack(second, message)).code == 0  # with handles of the former master
            assert trio.current_time() - began < 60
            await trio.sleep(100)
            again = {message.body for message in await pop_all(second, 100_000)}
            assert again == {message.body for message in rest[100:]}


async def test_a_repeated_acknowledgement_waits_for_the_records_of_earlier_terms(tmp_path: Path) -> None:
    """The new master has its record, which changes nothing any more, but no other member may have it."""
    async with open_node(tmp_path / "a", standing=standing_of(1), keeps_tables_in_log=True) as first:
        assert await first.broker.become_master(1)
        await start_topic(first.broker, first, 1)
        [message] = await pop_messages(first, invisibleTime=100_000)
        assert (await ack(first, message)).code == 0
        sync: dict[str, Any] = {"role": BrokerRole.SYNC_MASTER, "keeps_tables_in_log": True}
        async with open_node(tmp_path / "b", standing=standing_of(2), **sync) as second:
            await copy_log(first.store, second.store, first.store.log.max_offset.value)
            assert await second.broker.become_master(2)
            assert (await ack(second, message)).code == ResponseCode.SLAVE_NOT_AVAILABLE


async def test_role_changes_of_one_broker(tmp_path: Path) -> None:
    async with open_node(tmp_path, standing=standing_of(1), keeps_tables_in_log=True) as node:
        assert await node.broker.become_master(1)
        await start_topic(node.broker, node, 20)
        messages = await pop_all(node, 50_000)
        assert (await ack(node, messages[0])).code == 0
        answers: list[int] = []

        async def wait() -> None:
            answers.append((await pop(node, pollTime=20_000)).code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(1)
            began = trio.current_time()
            await node.broker.become_slave(2)
        assert (answers, trio.current_time()) == ([14], began)
        assert node.broker.pop.statistics().in_flight_count == 0
        assert await node.broker.become_master(3)
        await trio.sleep(0.1)
        assert node.broker.pop.statistics().in_flight_count == 19
        await trio.sleep(50)
        assert len(await pop_all(node, 50_000)) == 19


async def test_slave_keeps_records_whose_snapshot_was_truncated(tmp_path: Path) -> None:
    """The new master does not have the snapshot that this one wrote last."""
    async with open_node(tmp_path, standing=standing_of(1), keeps_tables_in_log=True) as node:
        assert await node.broker.become_master(1)
        await start_topic(node.broker, node, 20)
        assert len(await pop_all(node, 50_000)) == 20
        await node.dispatched()
        end = node.store.log.max_offset.value
        node.broker.pop._pop_log._want_snapshot()
        await trio.sleep(1)
        await node.broker.become_slave(2)
        assert await node.broker.pop.release(end)
        await node.store.truncate(end)
        assert not await node.broker.pop.release(end)


@pytest.mark.parametrize("topic", [POP_TOPIC, "%RETRY%g_TT"])
async def test_queue_whose_file_cannot_be_opened_is_read_later(tmp_path: Path, topic: str) -> None:
    """It ended the new master."""
    disk = FewDescriptors()
    async with open_node(tmp_path, standing=standing_of(1), disk=disk) as node:
        assert await node.broker.become_master(1)
        await start_topic(node.broker, node, 2)
        messages = await pop_messages(node, invisibleTime=1000)
        assert (await change(node, messages[1], 50_000))[0].code == 0
        await trio.sleep(2)
        await node.broker.become_slave(2)
        disk.exhaust(node, topic)
        assert await node.broker.become_master(3)
        await trio.sleep(5)
        assert (await pop(node)).code == ResponseCode.SERVICE_NOT_AVAILABLE
        disk.is_exhausted = False
        assert [found.body for found in await pop_messages(node)] == [messages[0].body]
        assert node.broker.pop.statistics().in_flight_count == 2
