"""POP in order mode: a queue is blocked until the messages of its last pop are acknowledged or visible again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.broker.node import Node, open_node
from tests.broker.pop_client import ack, bodies, change, pop, pop_messages, popped_of

ORDER: dict[str, Any] = {"order": True, "queueId": 0}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with open_node(tmp_path) as node:
        for number in range(5):
            await node.send(b"%d" % number)
        yield node


async def test_queue_is_blocked_until_all_are_acknowledged(node: Node) -> None:
    answer = await pop(node, **ORDER, maxMsgNums=2)
    assert answer.ext_fields["reviveQid"] == "999"
    assert answer.ext_fields["orderCountInfo"] == "0 0 0"
    messages = popped_of(answer)
    assert bodies(messages) == [b"0", b"1"]
    assert node.broker.offsets.get("g", "TT", 0) == 0  # it moves when they are acknowledged
    assert (await pop(node, **ORDER)).code == 210
    assert (await ack(node, messages[1])).code == 0
    assert (await pop(node, **ORDER)).code == 210
    assert node.broker.offsets.get("g", "TT", 0) == 0
    assert (await ack(node, messages[0])).code == 0
    assert node.broker.offsets.get("g", "TT", 0) == 2
    assert bodies(await pop_messages(node, **ORDER)) == [b"2", b"3", b"4"]


async def test_redelivery_is_counted_and_leaves_out_the_acknowledged(node: Node) -> None:
    began = trio.current_time()
    messages = await pop_messages(node, **ORDER, maxMsgNums=3, invisibleTime=2000)
    assert (await ack(node, messages[1])).code == 0
    answer = await pop(node, **ORDER, pollTime=9000, invisibleTime=2000)
    assert trio.current_time() - began == pytest.approx(2.0, abs=0.002)
    again = popped_of(answer)
    assert bodies(again) == [b"0", b"2", b"3", b"4"]
    assert answer.ext_fields["orderCountInfo"] == "0 qo0%0 1;0 qo0%2 1;0 0 0"
    assert (await ack(node, again[0])).code == 0
    assert node.broker.offsets.get("g", "TT", 0) == 2
    assert {message.topic for message in again} == {"TT"}
    assert (await ack(node, messages[2])).code == 0  # an old handle
    assert node.broker.offsets.get("g", "TT", 0) == 2
    for message in again[1:]:
        assert (await ack(node, message)).code == 0
    assert node.broker.offsets.get("g", "TT", 0) == 5


async def test_same_attempt_gets_the_same_messages(node: Node) -> None:
    first = await pop(node, **ORDER, maxMsgNums=2, attemptId="one")
    again = await pop(node, **ORDER, maxMsgNums=2, attemptId="one")
    assert bodies(popped_of(first)) == bodies(popped_of(again)) == [b"0", b"1"]
    assert again.ext_fields["orderCountInfo"] == "0 0 0"
    assert (await pop(node, **ORDER, attemptId="two")).code == 210
    for message in popped_of(again):
        assert (await ack(node, message)).code == 0
    assert node.broker.offsets.get("g", "TT", 0) == 2


async def test_attempt_id_is_limited(node: Node) -> None:
    assert (await node.send(b"a")).code == 0
    assert (await pop(node, order=True, attemptId="x" * 256)).code == 29
    assert (await pop(node, order=True, attemptId="x" * 255)).code == 0


async def test_change_of_the_invisible_time_keeps_the_pop_time(node: Node) -> None:
    began = trio.current_time()
    [message] = await pop_messages(node, **ORDER, maxMsgNums=1, invisibleTime=10_000)
    await trio.sleep(1)
    answer, message = await change(node, message, 3000)
    assert int(answer.ext_fields["popTime"]) == message.handle.pop_time_ms
    assert int(answer.ext_fields["invisibleTime"]) == 4000
    answer = await pop(node, **ORDER, maxMsgNums=1, pollTime=9000)
    assert trio.current_time() - began == pytest.approx(4.0, abs=0.002)
    assert answer.ext_fields["orderCountInfo"] == "0 qo0%0 1;0 0 1"


async def test_queue_is_blocked_until_its_last_message_is_visible(node: Node) -> None:
    """As ConsumerOrderInfoManager.OrderInfo.needBlock: one invisible message suffices."""
    messages = await pop_messages(node, **ORDER, maxMsgNums=3, invisibleTime=2000)
    began = trio.current_time()
    await change(node, messages[1], 8000)
    again = popped_of(await pop(node, **ORDER, maxMsgNums=3, pollTime=9000))
    assert trio.current_time() - began == pytest.approx(8.0, abs=0.002)
    assert bodies(again) == [b"0", b"1", b"2"]


async def test_request_for_all_queues_waits_for_the_first_that_is_free(node: Node) -> None:
    await node.send(b"other", e=1)
    began = trio.current_time()
    for queue_id, invisible_ms in ((0, 6000), (1, 3000)):
        fields = {**ORDER, "queueId": queue_id, "invisibleTime": invisible_ms}
        assert await pop_messages(node, **fields)
    answer = await pop(node, **{**ORDER, "queueId": -1}, pollTime=9000)
    assert trio.current_time() - began == pytest.approx(3.0, abs=0.002)
    assert bodies(popped_of(answer)) == [b"other"]


async def test_waiting_request_is_woken_by_the_last_ack(node: Node) -> None:
    messages = await pop_messages(node, **ORDER, maxMsgNums=2, invisibleTime=60_000)
    began = trio.current_time()

    async def acknowledge_later() -> None:
        for message in messages:
            await trio.sleep(1)
            await ack(node, message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(acknowledge_later)
        assert bodies(await pop_messages(node, **ORDER, maxMsgNums=1, pollTime=9000)) == [b"2"]
        assert trio.current_time() - began == 2.0


async def test_waiting_request_gets_what_another_consumer_did_not_finish(node: Node) -> None:
    """It began to wait before the queue was blocked, and nothing arrives when the queue is free."""
    for message in await pop_messages(node, **ORDER):
        await ack(node, message)
    began = trio.current_time()
    found: list[tuple[float, list[bytes]]] = []

    async def wait(invisible_ms: int) -> None:
        messages = await pop_messages(node, **{**ORDER, "invisibleTime": invisible_ms}, pollTime=9000)
        found.append((trio.current_time() - began, bodies(messages)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, 3000)
        await wait_all_tasks_blocked()
        nursery.start_soon(wait, 60_000)
        await trio.sleep(1)
        await node.send(b"new")
    assert found == [(1.0, [b"new"]), (pytest.approx(4.0, abs=0.002), [b"new"])]


async def test_waiting_request_follows_the_time_of_a_blocked_queue(node: Node) -> None:
    """The acknowledgement of the message that is invisible for longest frees the queue earlier."""
    first, second = await pop_messages(node, **ORDER, maxMsgNums=2, invisibleTime=3000)
    await change(node, second, 8000)
    began = trio.current_time()

    async def acknowledge_later() -> None:
        await trio.sleep(1)
        await ack(node, second)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(acknowledge_later)
        assert bodies(await pop_messages(node, **ORDER, maxMsgNums=1, pollTime=9000)) == [first.body]
    assert trio.current_time() - began == pytest.approx(3.0, abs=0.002)


async def test_notification_waits_for_a_blocked_queue(node: Node) -> None:
    await pop_messages(node, **ORDER, maxMsgNums=2, invisibleTime=60_000)
    fields: dict[str, Any] = {"consumerGroup": "g", "topic": "TT", "queueId": 0, "pollTime": 1000, "bornTime": 0}
    assert (await node.ask(200054, **fields, order=True)).ext_fields["hasMsg"] == "false"
    assert (await node.ask(200054, **fields, order=False)).ext_fields["hasMsg"] == "true"


async def test_notification_comes_when_a_blocked_queue_is_free(node: Node) -> None:
    began = trio.current_time()
    await pop_messages(node, **ORDER, maxMsgNums=2, invisibleTime=3000)
    answer = await node.ask(
        200054, consumerGroup="g", topic="TT", queueId=0, pollTime=9000, bornTime=0, order=True, attemptId="other"
    )
    assert answer.ext_fields["hasMsg"] == "true"
    assert trio.current_time() - began == pytest.approx(3.0, abs=0.002)


async def test_other_queues_are_not_blocked(node: Node) -> None:
    await node.send(b"other", e=1)
    await pop_messages(node, **ORDER, maxMsgNums=1)
    assert bodies(await pop_messages(node, **{**ORDER, "queueId": -1})) == [b"other"]


async def test_blocked_queue_survives_a_restart(tmp_path: Path) -> None:
    async with open_node(tmp_path) as node:
        for number in range(4):
            await node.send(b"%d" % number)
        messages = await pop_messages(node, **ORDER, maxMsgNums=3, invisibleTime=60_000, attemptId="one")
        assert (await ack(node, messages[1])).code == 0
    async with open_node(tmp_path) as node:
        assert (await pop(node, **ORDER)).code == 210
        same = await pop_messages(node, **ORDER, maxMsgNums=3, invisibleTime=2000, attemptId="one")
        assert bodies(same) == [b"0", b"2"]
        await trio.sleep(2)
        answer = await pop(node, **ORDER)
        assert answer.ext_fields["orderCountInfo"] == "0 qo0%0 1;0 qo0%2 1;0 0 0"


async def test_messages_between_an_acknowledged_one_and_a_smaller_pop_are_delivered(node: Node) -> None:
    messages = await pop_messages(node, **ORDER, maxMsgNums=4, invisibleTime=2000)
    assert (await ack(node, messages[3])).code == 0
    await trio.sleep(3)
    [zero] = await pop_messages(node, **ORDER, maxMsgNums=1, invisibleTime=2000)
    assert (zero.body, (await ack(node, zero)).code) == (b"0", 0)
    assert bodies(await pop_messages(node, **ORDER)) == [b"1", b"2", b"4"]


async def test_acknowledged_messages_behind_one_that_is_no_longer_selected_block_nothing(node: Node) -> None:
    for tag in ("A", "B", "B"):
        await node.send(b"m", i=f"TAGS\x01{tag}\x02", e=1)
    fields: dict[str, Any] = {"order": True, "queueId": 1}
    _, second = await pop_messages(node, **fields, maxMsgNums=2, invisibleTime=1000)
    assert (await ack(node, second)).code == 0
    await trio.sleep(2)
    began = trio.current_time()
    [third] = await pop_messages(node, **fields, maxMsgNums=1, exp="B", expType="TAG", pollTime=9000)
    assert (third.record.queue_offset, trio.current_time()) == (2, began)
    assert (await ack(node, third)).code == 0
    assert node.broker.offsets.get("g", "TT", 1) == 3
