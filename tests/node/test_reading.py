"""Waiting for messages of a node's own queues, while a member's log is truncated."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from ha.node import reading
from ha.node.reading import ReadResult, wait_messages
from ha.store.message_store import MessageStore
from ha.store.watched_offset import WatchedOffset


async def test_the_log_is_truncated_during_a_read(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatched = WatchedOffset(1000)
    store = cast(MessageStore, SimpleNamespace(log=SimpleNamespace(dispatched_offset=dispatched)))
    messages: list[Any] = []

    async def read_queue(*arguments: object) -> ReadResult:
        await trio.sleep(1)
        found = ReadResult(messages=list(messages), next_offset=5, min_offset=0, max_offset=5)
        if dispatched.value == 1000:
            dispatched.reset(800)
        return found

    async def store_another() -> None:
        await trio.sleep(10)
        messages.append("another")
        dispatched.raise_to(900)

    monkeypatch.setattr(reading, "read_queue", read_queue)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store_another)
        with trio.fail_after(60):
            assert await wait_messages(store, "t", 0, 5) == messages
