"""Entries of a queue that do not point to their messages: never skipped, never answered with another message. And what
is read of the log together."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ha.broker.queue_read import QueueRead, QueueReader, ReadStatus, joined, read_runs
from ha.errors import DamagedBytes
from ha.protocol.compiled import pure
from ha.protocol.record import decode_records
from ha.protocol.store_files import ENTRY
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import QueueEntry
from ha.store.mapped_file import RunBlocking
from ha.store.watched_offset import WatchedOffset
from tests.broker.node import Node, open_node


class Entries:
    """A queue with these entries."""

    def __init__(self, entries: list[QueueEntry]) -> None:
        self.entries = entries
        self.queue_id = 0
        self.min_offset = 0
        self.max_offset = len(entries)

    async def fetch_raw(self, queue_offset: int, count: int, run_blocking: RunBlocking) -> bytes:
        return b"".join(ENTRY.pack(*entry) for entry in self.entries[queue_offset : queue_offset + count])


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
    reader = QueueReader(node.store.log, node.broker.options, run_blocking=node.store.run_blocking)
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
    reader = QueueReader(node.store.log, node.broker.options, run_blocking=node.store.run_blocking)
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

    reader = QueueReader(node.store.log, node.broker.options, run_blocking=node.store.run_blocking, mend=mend)
    found = await read(reader, queue, 1)
    assert (found.status, found.next_offset, asked) == (ReadStatus.OFFSET_FOUND_NULL, 1, [1] * 4)
    found = await read(reader, queue, 1)
    assert (found.status, found.next_offset, asked) == (ReadStatus.FOUND, 3, [1] * 6)
    assert [record.body for record in decode_records(found.body)] == [b"1", b"2"]


SEGMENT_SIZE = 1 << 20


class Log:
    """Has bytes, some in memory for sure. A read of others brings what it is asked for, or a part of it."""

    def __init__(self, hot_from: int, shares: list[float], damaged: range) -> None:
        self.hot_from = hot_from
        self.shares = shares
        self.damaged = damaged
        self.min_offset = 0
        self.max_offset = WatchedOffset(len(CONTENT))
        self.read_counts: list[int] = []

    def read_hot(self, physical_offset: int, size_max: int) -> memoryview | None:
        segment_end = physical_offset - physical_offset % SEGMENT_SIZE + SEGMENT_SIZE
        if physical_offset < self.hot_from:
            return None
        return memoryview(CONTENT)[physical_offset : min(physical_offset + size_max, segment_end)]

    async def read(self, physical_offset: int, size_max: int, found_by: str) -> memoryview:
        await trio.lowlevel.checkpoint()
        if physical_offset in self.damaged:
            raise DamagedBytes(self.damaged.start, self.damaged.stop, "test", is_hopeless=False)
        share = self.shares[len(self.read_counts) % len(self.shares)]
        end = physical_offset + max(1, int(size_max * share))
        end = min(end, physical_offset - physical_offset % SEGMENT_SIZE + SEGMENT_SIZE)
        if physical_offset < self.damaged.start:
            end = min(end, self.damaged.start)
        self.read_counts.append(end - physical_offset)
        return memoryview(CONTENT)[physical_offset:end]


CONTENT = random.Random(1).randbytes(3 * SEGMENT_SIZE)
gaps_and_sizes = st.lists(
    st.tuples(st.integers(1, 100) | st.integers(1, 60_000), st.integers(1, 2000) | st.integers(1, 400_000)),
    min_size=1,
    max_size=30,
)


@given(
    gaps_and_sizes,
    st.integers(0, len(CONTENT)),
    st.lists(st.floats(0.05, 1), min_size=1, max_size=4) | st.just([1.0]),
    st.integers(0, len(CONTENT) // 2),
)
def test_what_is_read_together_is_what_was_wanted(
    wishes: list[tuple[int, int]], hot_from: int, shares: list[float], damage_at: int
) -> None:
    runs, at = [], 0
    for gap, size in wishes:
        if at + gap + size <= len(CONTENT):
            runs.append((at + gap, at + gap + size))
            at += gap + size
    if not runs:
        return
    expected = b"".join(CONTENT[begin:end] for begin, end in runs)
    damaged = range(damage_at, damage_at + 10)
    for log in (Log(hot_from, shares, range(0)), Log(hot_from, shares, damaged)):
        is_hit = any(begin < log.damaged.stop and log.damaged.start < end for begin, end in runs) and bool(log.damaged)
        if is_hit and damage_at < hot_from:
            continue
        assert trio.run(read_runs, cast(CommitLog, log), runs) == expected  # also if what lies between is damaged


@given(st.binary(max_size=50), st.integers(0, 1 << 62), st.lists(st.tuples(st.integers(-2, 60), st.integers(-2, 60))))
def test_twins_join_the_same(span: bytes, base: int, places: list[tuple[int, int]]) -> None:
    runs = [(base + begin, base + end) for begin, end in places]
    expected = None
    if all(0 <= begin <= end <= len(span) for begin, end in places):
        expected = b"".join(span[begin:end] for begin, end in places)
    for join in (joined, pure(joined)):
        for form in (span, memoryview(span), memoryview(bytearray(span))):
            if expected is not None:
                assert join(form, base, runs) == expected
            else:
                with pytest.raises(ValueError, match="is not in"):
                    join(form, base, runs)


async def test_near_messages_are_one_read_and_far_ones_are_not(autojump_clock: object) -> None:
    near = [(at, at + 1000) for at in range(0, 500_000, 125_000)]
    far = [(at, at + 1000) for at in range(0, 1_500_000, 150_000)]
    for runs, count in ((near, 1), (far, 10)):
        log = Log(len(CONTENT), [1.0], range(0))
        await read_runs(cast(CommitLog, log), runs)
        assert len(log.read_counts) == count
    log = Log(len(CONTENT), [1.0], range(0))
    await read_runs(cast(CommitLog, log), [(at, at + 1000) for at in range(0, len(CONTENT), 4096)])
    assert max(log.read_counts) <= 512 * 1024
