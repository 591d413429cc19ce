"""The first message of a queue is found once its send is answered, while the queue's files are being created."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ha.protocol.remoting import RemotingCommand
from tests.broker.node import Node, open_node
from tests.store.disks import run_inline


async def pull(node: Node, topic: str) -> RemotingCommand:
    return await node.pull(topic=topic, queueId=1)


async def ask_end(node: Node, topic: str) -> RemotingCommand:
    return await node.ask(30, topic=topic, queueId=1)


async def ask_end_by_time(node: Node, topic: str) -> RemotingCommand:
    return await node.ask(29, topic=topic, queueId=1, timestamp=1 << 60)


async def ask_by_key(node: Node, topic: str) -> RemotingCommand:
    return await node.ask(12, topic=topic, key="K", beginTimestamp=0, endTimestamp=1 << 60, maxNum=10)


@pytest.mark.parametrize("ask", [pull, ask_end, ask_end_by_time, ask_by_key])
async def test_new_queue_is_known_at_once(tmp_path: Path, ask: Any) -> None:
    made_s: list[float] = []

    async def make_slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "_make_next_files":
            await trio.sleep(1)
            made_s.append(trio.current_time())
        return await run_inline(call, *arguments)

    async with open_node(tmp_path, run_blocking=make_slowly) as node:
        for topic in [f"T{number}" for number in range(20)]:  # in which order tasks run is chance
            began = trio.current_time()
            await node.send(b"before", b=topic, e=0)
            await node.send(b"first", b=topic, e=1, i="KEYS\x01K\x02")  # its files are the worker's next
            assert trio.current_time() - began < 1  # sends do not wait for queues
            answer = await ask(node, topic)
            assert trio.current_time() == made_s[-1] == began + 2
            if "offset" in answer.ext_fields:
                assert answer.ext_fields["offset"] == "1"
            else:
                assert [record.body for record in node.records(answer)] == [b"first"]


async def test_query_does_not_wait_for_the_whole_log(tmp_path: Path) -> None:
    async def make_slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "_make_next_files":
            await trio.sleep(60)
        return await run_inline(call, *arguments)

    async with open_node(tmp_path, run_blocking=make_slowly) as node:
        await node.send(b"first")
        began = trio.current_time()
        assert (await ask_end(node, "TT")).ext_fields["offset"] == "0"
        assert trio.current_time() - began == 3
