"""The first message of a queue is found by who was told that it is stored, while that queue's files are being made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from tests.broker.node import inline, open_node


async def test_a_new_queue_can_be_read_at_once(tmp_path: Path, autojump_clock: object) -> None:
    made_s = []

    async def make_slowly(call: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "_make_next_files":
            await trio.sleep(2)
            made_s.append(trio.current_time())
        return await inline(call, *arguments)

    async with open_node(tmp_path, run_blocking=make_slowly) as node:
        for queue_id in (0, 1):
            began = trio.current_time()
            await node.send(b"first", e=queue_id)
            assert trio.current_time() - began < 2  # whoever sends waits for no queue
            if queue_id == 0:
                answer = await node.pull(queueId=queue_id)
                assert [record.body for record in node.records(answer)] == [b"first"]
            else:
                answer = await node.ask(30, topic="TT", queueId=queue_id)
                assert answer.ext_fields["offset"] == "1"
            assert trio.current_time() == made_s[queue_id] == began + 2
