"""Unconfirmed messages (behind the log's `dispatch_limit`) are invisible to clients."""

from typing import Any

import trio

from ha.protocol.remoting import RemotingCommand
from tests.broker.node import Node

ALWAYS: dict[str, Any] = {"beginTimestamp": 0, "endTimestamp": (1 << 63) - 1, "maxNum": 64}


async def max_queue_offset(node: Node) -> int:
    return int((await node.ask(30, topic="TT", queueId=0)).ext_fields["offset"])


async def test_message_is_invisible_before_it_is_confirmed(node: Node) -> None:
    sent = []
    for number in range(2):
        answer = await node.send(b"%d" % number, i=f"KEYS\x01k\x02UNIQ_KEY\x01U{number}")
        assert answer.code == 0
        sent.append(node.store.log.max_offset.value)
        if number == 0:
            await node.dispatched()
            node.store.log.limit_dispatch(sent[0])
    await trio.sleep(1)
    assert await max_queue_offset(node) == 1
    first = await node.pull(0)
    assert [record.body for record in node.records(first)] == [b"0"]
    assert (first.ext_fields["maxOffset"], first.ext_fields["nextBeginOffset"]) == ("1", "1")
    assert (await node.pull(1)).code != 0
    found = await node.ask(12, topic="TT", key="k", **ALWAYS)
    assert [record.body for record in node.records(found)] == [b"0"]
    assert (await node.ask(12, topic="TT", key="U1", _UNIQUE_KEY_QUERY=True, **ALWAYS)).code == 22
    assert (await node.ask(33, offset=sent[0])).code == 1
    assert (await node.ask(33, offset=0)).code == 0
    node.store.log.limit_dispatch(sent[1] - 1)
    await trio.sleep(1)
    assert (await node.ask(33, offset=sent[0])).code == 1
    assert await max_queue_offset(node) == 1


async def test_held_pull_is_answered_when_the_message_is_confirmed(node: Node) -> None:
    node.store.log.limit_dispatch(0)
    await node.send(b"first")
    answers: list[RemotingCommand] = []

    async def wait() -> None:
        answers.append(await node.pull(0, sysFlag=2 | 4, suspendTimeoutMillis=15_000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(3)
        assert not answers
        node.store.log.limit_dispatch(node.store.log.max_offset.value)
        began = trio.current_time()
    assert trio.current_time() - began < 1
    assert [record.body for record in node.records(answers[0])] == [b"first"]
    [record] = node.records(await node.ask(33, offset=0))
    assert record.body == b"first"
