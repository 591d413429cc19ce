"""Locks of queues: holders, lifetime and limits (RebalanceLockManager)."""

from pathlib import Path
from typing import Any

import pytest
import trio

from ha.protocol import java_json
from ha.protocol.bodies import LIST_SIZE_MAX
from ha.protocol.group_requests import QueueBody
from ha.protocol.remoting import FLAG_ONEWAY, RemotingCommand, encode_command
from tests.broker.node import Node, open_node


def body(client_id: object, *queue_ids: int, group: object = "g", topic: str = "TT") -> bytes:
    queues = [{"brokerName": "b0", "queueId": queue_id, "topic": topic} for queue_id in queue_ids]
    request = {"clientId": client_id, "consumerGroup": group, "mqSet": queues, "onlyThisBroker": False}
    return java_json.dumps(request)


async def lock(node: Node, client_id: str, *queue_ids: int, **changes: Any) -> list[int]:
    answer = await node.ask(41, body(client_id, *queue_ids, **changes))
    assert answer.code == 0
    return [queue["queueId"] for queue in java_json.loads(answer.body)["lockOKMQSet"]]


async def unlock(node: Node, client_id: str, *queue_ids: int) -> None:
    answer = await node.ask(42, body(client_id, *queue_ids))
    assert (answer.code, bytes(answer.body)) == (0, b"")


async def test_queue_has_one_holder(node: Node) -> None:
    answer = await node.ask(41, body("c1", 1))
    assert bytes(answer.body) == b'{"lockOKMQSet":[{"brokerName":"b0","queueId":1,"topic":"TT"}]}'
    answer = await node.ask(41, body("c2", 1))
    assert bytes(answer.body) == b'{"lockOKMQSet":[]}'
    assert await lock(node, "c2", 0, 1, 2, 2) == [0, 2]
    assert await lock(node, "c1", 0, 1, 2) == [1], "what it holds already too"


async def test_locks_are_per_group_and_topic(node: Node) -> None:
    assert await lock(node, "c1", 1) == [1]
    assert await lock(node, "c2", 1, group="h") == [1]
    assert await lock(node, "c3", 1, topic="Other") == [1]


async def test_only_the_holder_can_unlock(node: Node) -> None:
    await lock(node, "c1", 1, 2)
    await unlock(node, "c2", 1)
    assert await lock(node, "c2", 1) == []
    await unlock(node, "c1", 1, 7)
    assert await lock(node, "c2", 1, 2) == [1]


async def test_oneway_unlock(node: Node) -> None:
    """The Java client sends it at shutdown."""
    await lock(node, "c1", 1)
    stream = node.listener.connect()
    await stream.send_all(encode_command(RemotingCommand(42, flag=FLAG_ONEWAY, body=body("c1", 1))))
    await trio.sleep(1)
    assert await lock(node, "c2", 1) == [1]


async def test_lock_expires_60_seconds_after_its_last_renewal(node: Node) -> None:
    await lock(node, "c1", 1, 2)
    await trio.sleep(40)
    await lock(node, "c1", 1)
    await trio.sleep(20.1)
    assert await lock(node, "c2", 1, 2) == [2]
    await trio.sleep(39)
    assert await lock(node, "c2", 1) == []
    await trio.sleep(1)
    assert await lock(node, "c2", 1) == [1]
    assert node.broker.queue_locks.holder("g", QueueBody(broker_name="b0", queue_id=1, topic="TT")) == "c2"


async def test_message_that_an_orderly_consumer_sends_back_becomes_a_dead_letter(node: Node) -> None:
    """As in RocketMQ 5 (SendMessageProcessor.handleRetryAndDLQ): it was retried in place before."""
    await lock(node, "c1", 1)
    assert (await node.send(b="%RETRY%h", j=16)).code == 0
    assert node.broker.topics.get("%DLQ%h") is None, "another group"
    assert (await node.send(b="%RETRY%g", j=2, l=2)).code == 0
    assert node.store.queues.next_queue_offset("%DLQ%g", 0) == 1
    await trio.sleep(61)
    assert (await node.send(b="%RETRY%g", j=2, l=2)).code == 0
    assert node.store.queues.next_queue_offset("%DLQ%g", 0) == 1


async def test_closed_connection_keeps_its_locks(node: Node) -> None:
    """Its client may return, and still be working on the messages."""
    stream = node.listener.connect()
    await stream.send_all(encode_command(RemotingCommand(41, body=body("c1", 1))))
    await stream.receive_some()
    await stream.aclose()
    await trio.sleep(1)
    assert await lock(node, "c2", 1) == []


async def test_locks_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_node(tmp_path, queue_lock_count_max=3) as node:
        assert await lock(node, "c1", *range(5)) == [0, 1, 2]
        assert await lock(node, "c1", *range(5)) == [0, 1, 2], "renewing needs no room"
        assert len(node.broker.queue_locks) == 3
        assert caplog.text.count("queue_locks.full locks=3") == 1
        await unlock(node, "c1", 0)
        assert await lock(node, "c2", 7, 8) == [7]
        await trio.sleep(61)
        assert await lock(node, "c2", *range(5)) == [0, 1, 2]


async def test_malformed_requests(node: Node) -> None:
    for code in (41, 42):
        for refused in (
            b"",
            b"[1]",
            b'{"mqSet":7}',
            body("", 1),
            body("c", 1, group=""),
            body("c" * 256, 1),
            body("c", 1, group="g" * 256),
            body("c", 1, topic="t" * 256),
            b" " * (LIST_SIZE_MAX + 1),
        ):
            assert (await node.ask(code, refused)).code == 1, refused[:80]
    assert len(node.broker.queue_locks) == 0
