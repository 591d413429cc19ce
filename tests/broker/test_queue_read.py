"""Entries of a queue that do not point to their messages: never skipped, never answered with another message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ha.broker.queue_read import QueueRead, QueueReader, ReadStatus
from ha.protocol.record import decode_records
from ha.store.consume_queue import QueueEntry
from tests.broker.node import Node, open_node


class Entries:
    """A queue with these entries."""

    def __init__(self, entries: list[QueueEntry]) -> None:
        self.entries = entries
        self.queue_id = 0
        self.min_offset = 0
        self.max_offset = len(entries)

    def read(self, queue_offset: int, count: int) -> list[QueueEntry]:
        return self.entries[queue_offset : queue_offset + count]


@pytest.fixture
async def node(tmp_path: Path, autojump_clock: object) -> AsyncIterator[Node]:
    async with open_node(tmp_path) as node:
        for number in range(3):
            await node.send(b"%d" % number)
        await node.dispatched()
        yield node


def sound_entries(node: Node) -> list[QueueEntry]:
    queue = node.store.queues.get("TT", 0)
    assert queue is not None
    return queue.read(0, 3)


async def read(reader: QueueReader, queue: Any, offset: int, tags_codes: frozenset[int] | None = None) -> QueueRead:
    return await reader.read(queue, offset, message_count_max=32, message_bytes_max=1 << 20, tags_codes=tags_codes)


IMPOSSIBLE = {
    "no size": {"size": 0},
    "a size below zero": {"size": -1},
    "a size that reaches beyond the log": {"size": 1 << 20},
    "an offset beyond the log": {"physical_offset": 1 << 40},
    "an offset below zero": {"physical_offset": -1},
}
"""No entry of any message."""
ELSEWHERE = {
    "a size of less than a record": {"size": 5},
    "the message before": {"physical_offset": 0},
    "the middle of a record": {"physical_offset": 300},
}
"""Only the record that is read tells that it is not this one."""


@pytest.mark.parametrize("changes", [*IMPOSSIBLE.values(), *ELSEWHERE.values()], ids=[*IMPOSSIBLE, *ELSEWHERE])
async def test_a_wrong_entry_is_not_skipped(node: Node, changes: dict[str, int]) -> None:
    sound = sound_entries(node)
    queue = Entries([sound[0], sound[1]._replace(**changes), sound[2]])
    reader = QueueReader(node.store.log, node.broker.options)
    found = await read(reader, queue, 0)
    if found.status is ReadStatus.FOUND:
        assert (found.next_offset, [record.body for record in decode_records(found.body)]) == (1, [b"0"])
    else:
        assert (found.status, found.next_offset) == (ReadStatus.OFFSET_FOUND_NULL, 0)
    found = await read(reader, queue, 1)
    assert (found.status, found.next_offset, found.body) == (ReadStatus.OFFSET_FOUND_NULL, 1, b"")


@pytest.mark.parametrize("changes", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
async def test_nor_is_one_whose_tag_nobody_asked_for(node: Node, changes: dict[str, int]) -> None:
    """Its tag may be what is wrong with it."""
    sound = sound_entries(node)
    tags_code = sound[0].tags_code
    queue = Entries([sound[0], sound[1]._replace(tags_code=tags_code + 1, **changes), sound[2]])
    reader = QueueReader(node.store.log, node.broker.options)
    found = await read(reader, queue, 0, frozenset({tags_code}))
    assert (found.status, found.next_offset, found.message_count) == (ReadStatus.FOUND, 1, 1)
    found = await read(reader, queue, 1, frozenset({tags_code}))
    assert (found.status, found.next_offset) == (ReadStatus.OFFSET_FOUND_NULL, 1)


async def test_a_mended_entry_is_read_and_one_that_can_not_be_is_given_up(node: Node) -> None:
    sound = sound_entries(node)
    queue = Entries([sound[0], sound[2], sound[2]])
    asked: list[int] = []

    async def mend(queue: Any, queue_offset: int) -> bool:
        asked.append(queue_offset)
        if len(asked) == 6:
            queue.entries[1] = sound[1]
        return True

    reader = QueueReader(node.store.log, node.broker.options, mend=mend)
    found = await read(reader, queue, 1)
    assert (found.status, found.next_offset, asked) == (ReadStatus.OFFSET_FOUND_NULL, 1, [1] * 4)
    found = await read(reader, queue, 1)
    assert (found.status, found.next_offset, asked) == (ReadStatus.FOUND, 3, [1] * 6)
    assert [record.body for record in decode_records(found.body)] == [b"1", b"2"]
