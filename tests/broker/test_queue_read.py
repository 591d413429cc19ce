"""Wrong queue entries are never skipped, and never answered with another message. Reads of neighbouring messages."""

import random
from array import array
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from ha.broker import queue_read
from ha.broker.choosing import Wanted, WrongEntryError
from ha.broker.queue_read import (
    UNREADABLE_RETRY_S,
    QueueRead,
    QueueReader,
    ReadStatus,
    Span,
    gathered,
    near_end,
    read_spans,
    read_spans_nowait,
)
from ha.errors import DamagedBytes
from ha.protocol.codes import ResponseCode
from ha.protocol.compiled import pure
from ha.protocol.record import RECORD_PLACE, decode_records
from ha.protocol.store_files import ENTRY
from ha.store.commitlog import CommitLog
from ha.store.consume_queue import QueueEntry
from ha.store.mapped_file import RunBlocking
from ha.store.watched_offset import WatchedOffset
from tests.broker.few_descriptors import FewDescriptors
from tests.broker.node import PULL, Node, open_node
from tests.broker.pop_client import POP


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
async def node(tmp_path: Path) -> AsyncIterator[Node]:
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
"""Invalid entries."""
ELSEWHERE = {
    "a size of less than a record": {"size": 5},
    "the message before": {"physical_offset": 0},
    "the middle of a record": {"physical_offset": 300},
}
"""Only the record read shows that it is another one."""


@pytest.mark.parametrize("changes", [*IMPOSSIBLE.values(), *ELSEWHERE.values()], ids=[*IMPOSSIBLE, *ELSEWHERE])
async def test_wrong_entry_is_not_skipped(node: Node, changes: dict[str, int]) -> None:
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
async def test_wrong_entry_is_not_skipped_by_a_tag_filter(node: Node, changes: dict[str, int]) -> None:
    """Its tag hash may be wrong, too."""
    sound = sound_entries(node)
    tags_code = sound[0].tags_code
    queue = Entries([sound[0], sound[1]._replace(tags_code=tags_code + 1, **changes), sound[2]])
    reader = QueueReader(node.store.log, node.broker.options, run_blocking=node.store.run_blocking)
    found = await read(reader, queue, 0, frozenset({tags_code}))
    assert (found.status, found.next_offset, found.message_count) == (ReadStatus.FOUND, 1, 1)
    found = await read(reader, queue, 1, frozenset({tags_code}))
    assert (found.status, found.next_offset) == (ReadStatus.OFFSET_FOUND_NULL, 1)


async def test_repaired_entry_is_read_and_hopeless_one_given_up(node: Node) -> None:
    sound = sound_entries(node)
    queue = Entries([sound[0], sound[2], sound[2]])
    asked: list[int] = []

    async def repair_entry(queue: Any, queue_offset: int) -> bool:
        asked.append(queue_offset)
        if len(asked) == 6:
            queue.entries[1] = sound[1]
        return True

    reader = QueueReader(
        node.store.log, node.broker.options, run_blocking=node.store.run_blocking, repair_entry=repair_entry
    )
    found = await read(reader, queue, 1)
    assert (found.status, found.next_offset, asked) == (ReadStatus.OFFSET_FOUND_NULL, 1, [1] * 4)
    found = await read(reader, queue, 1)
    assert (found.status, found.next_offset, asked) == (ReadStatus.FOUND, 3, [1] * 6)
    assert [record.body for record in decode_records(found.body)] == [b"1", b"2"]


async def test_queue_whose_file_cannot_be_opened_is_read_later(tmp_path: Path) -> None:
    """The requests ended the broker."""
    disk = FewDescriptors()
    async with open_node(tmp_path, disk=disk) as node:
        await node.send()
        await node.dispatched()
        disk.exhaust(node, "TT")
        pulled = await node.pull()
        assert (pulled.code, pulled.remark, pulled.ext_fields["nextBeginOffset"]) == (19, "OFFSET_FOUND_NULL", "0")
        place: dict[str, Any] = {"topic": "TT", "queueId": 0}
        asked: dict[int, dict[str, Any]] = {14: {"consumerGroup": "g"}, 29: {"timestamp": 1}, 32: {}}
        for code, fields in asked.items():
            assert (await node.ask(code, **place, **fields)).code == ResponseCode.SYSTEM_BUSY
        disk.is_exhausted = False
        assert [record.body for record in node.records(await node.pull())] == [b"hello"]
        for code, fields in asked.items():
            assert (await node.ask(code, **place, **fields)).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("code", [11, 200050])
async def test_consumer_that_waits_reads_again_what_could_not_be_read(tmp_path: Path, code: int) -> None:
    """Nobody woke it when files could be opened again."""
    disk = FewDescriptors()
    async with open_node(tmp_path, disk=disk) as node:
        await node.send()
        await node.dispatched()
        fields = {**POP, "pollTime": 9000}
        if code == 11:
            fields = {**PULL, "queueOffset": 0, "sysFlag": 6, "suspendTimeoutMillis": 9000}
        disk.exhaust(node, "TT")
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def consume() -> None:
                assert [record.body for record in node.records(await node.ask(code, **fields))] == [b"hello"]
                assert trio.current_time() - began == pytest.approx(UNREADABLE_RETRY_S, abs=0.01)

            await wait_all_tasks_blocked()
            disk.is_exhausted = False


@pytest.mark.parametrize("code", [11, 200050])
async def test_consumer_that_waits_does_not_repeat_a_repair_that_is_impossible(tmp_path: Path, code: int) -> None:
    """Each attempt to find the entry's record may read 256 MiB."""
    async with open_node(tmp_path) as node:
        await node.send()
        await node.dispatched()
        fields = {**POP, "pollTime": 9000}
        if code == 11:
            fields = {**PULL, "queueOffset": 0, "sysFlag": 6, "suspendTimeoutMillis": 9000}
        attempted_at = []

        async def fail(*_: Any) -> bool:
            attempted_at.append(trio.current_time() - began)
            return False

        requests = node.broker.pop.requests
        for reader in (node.broker.puller._reader, requests._taker._reader):
            reader._repair_entry = fail
        with patch.object(QueueReader, "_read_once", side_effect=WrongEntryError(0)):
            began = trio.current_time()
            await node.ask(code, **fields)
        assert attempted_at == [0.0, 9.0]


SEGMENT_SIZE = 1 << 20


class Log:
    """A log with some bytes in memory, and some that the system has cached. Other reads return all or a part of the
    requested bytes."""

    def __init__(self, hot_from: int, shares: list[float], damaged: range, cached: range = range(0)) -> None:
        self.hot_from = hot_from
        self.cached = cached
        self.shares = shares
        self.damaged = damaged
        self.min_offset = 0
        self.max_offset = WatchedOffset(len(CONTENT))
        self.read_counts: list[int] = []
        self.cached_counts: list[int] = []

    def read_nowait(self, physical_offset: int, size_max: int) -> memoryview | None:
        segment_end = physical_offset - physical_offset % SEGMENT_SIZE + SEGMENT_SIZE
        if physical_offset < self.hot_from:
            return None
        return memoryview(CONTENT)[physical_offset : min(physical_offset + size_max, segment_end)]

    def read_cached(self, physical_offset: int, size_max: int) -> memoryview | None:
        if physical_offset not in self.cached or physical_offset in self.damaged:
            return None
        end = min(self._end(physical_offset, size_max), self.cached.stop)
        self.cached_counts.append(end - physical_offset)
        return memoryview(CONTENT)[physical_offset:end]

    async def read(self, physical_offset: int, size_max: int, found_by: str) -> memoryview:
        await trio.lowlevel.checkpoint()
        if physical_offset in self.damaged:
            raise DamagedBytes(self.damaged.start, self.damaged.stop, "test", is_hopeless=False)
        share = self.shares[len(self.read_counts) % len(self.shares)]
        end = self._end(physical_offset, max(1, int(size_max * share)))
        self.read_counts.append(end - physical_offset)
        return memoryview(CONTENT)[physical_offset:end]

    def _end(self, physical_offset: int, size: int) -> int:
        end = min(physical_offset + size, physical_offset - physical_offset % SEGMENT_SIZE + SEGMENT_SIZE)
        return min(end, self.damaged.start) if physical_offset < self.damaged.start else end


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
    st.tuples(st.integers(0, len(CONTENT)), st.integers(0, len(CONTENT))),
)
def test_messages_read_together_are_the_chosen_ones(
    wishes: list[tuple[int, int]], hot_from: int, shares: list[float], damage_at: int, cached: tuple[int, int]
) -> None:
    messages, at = [], 0
    for gap, size in wishes:
        if at + gap + size <= len(CONTENT):
            messages.append((at + gap, size))
            at += gap + size
    if not messages:
        return
    damaged = range(damage_at, damage_at + 10)
    for log in (Log(hot_from, shares, range(0), range(*cached)), Log(hot_from, shares, damaged, range(*cached))):
        is_hit = any(begin < log.damaged.stop and log.damaged.start < begin + size for begin, size in messages)
        if is_hit and log.damaged and damage_at < hot_from:
            continue
        spans = trio.run(read_spans, cast(CommitLog, log), wanted_at(messages))
        for begin, size in messages:  # also if bytes in between are damaged
            pieces = [span[max(0, begin - base) : max(0, begin + size - base)] for base, span in spans]
            assert b"".join(pieces) == CONTENT[begin : begin + size]


def wanted_at(messages: list[tuple[int, int]]) -> Wanted:
    """Messages with these offsets and sizes, the only ones of their queue."""
    places, sizes = zip(*messages, strict=True)
    return Wanted(array("q", range(len(messages))), array("q", places), array("q", sizes))


QUEUE_ID = 3


@given(
    st.lists(
        st.tuples(st.integers(0, 30) | st.just(0), st.integers(1, 100), st.sampled_from("........sqop")),
        min_size=1,
        max_size=12,
    ),
    st.lists(st.integers(0, 1500), max_size=5),
    st.data(),
)
def test_compiled_gathering_equals_python(
    records: list[tuple[int, int, str]], cuts: list[int], data: st.DataObject
) -> None:
    """Records in spans that end anywhere; sometimes one is wrong or missing."""
    messages, log, expected, wrong = [], b"", b"", -1
    for number, (gap, size, fault) in enumerate(records):
        log += b"-" * gap
        right = [size, QUEUE_ID, number, 5 + len(log)]
        if fault != ".":
            right["sqop".index(fault)] += 1
        if wrong < 0 and (fault != "." or size < RECORD_PLACE.size):
            wrong = number
        messages.append((5 + len(log), size))
        record = RECORD_PLACE.pack(*right).ljust(size, b"x")[:size]
        expected += record
        log += record
    wanted = wanted_at(messages)
    ends = sorted({0, len(log), *(cut for cut in cuts if cut < len(log))})
    forms: st.SearchStrategy[type[bytes] | type[memoryview]] = st.sampled_from([bytes, memoryview])
    spans: list[Span] = [(5 + begin, data.draw(forms)(log[begin:end])) for begin, end in pairwise(ends)]
    for gather in (gathered, pure(gathered)):
        if wrong < 0:
            assert gather(spans, wanted, QUEUE_ID) == expected
        else:
            with pytest.raises(WrongEntryError) as found:
                gather(spans, wanted, QUEUE_ID)
            assert found.value.queue_offset == wrong
    missing = data.draw(st.integers(0, len(spans) - 1))
    lacking = spans[:missing] + spans[missing + 1 :]
    begin, end = spans[missing][0], spans[missing][0] + len(spans[missing][1])
    if wrong < 0 and any(place < end and begin < place + size for place, size in messages):
        for gather in (gathered, pure(gathered)):
            with pytest.raises(ValueError, match="none of the spans"):
                gather(lacking, wanted, QUEUE_ID)


@given(gaps_and_sizes, st.integers(0, 70_000), st.integers(0, 400_000), st.data())
def test_compiled_near_end_equals_python(
    wishes: list[tuple[int, int]], gap_max: int, size_max: int, data: st.DataObject
) -> None:
    messages, at = [], 0
    for gap, size in wishes:
        messages.append((at + gap, size))
        at += gap + size
    number = data.draw(st.integers(0, len(messages) - 1))
    begin = messages[number][0] + data.draw(st.integers(0, messages[number][1] - 1))
    ends = [near(wanted_at(messages), number, begin, gap_max, size_max) for near in (near_end, pure(near_end))]
    assert ends[0] == ends[1]
    read = [(place, size) for place, size in messages[number:] if place < ends[0]]
    assert sum(read[-1]) == ends[0]
    assert len(read) == 1 or ends[0] - begin <= size_max
    assert all(after - (place + size) <= gap_max for (place, size), (after, _) in pairwise(read))


async def test_near_messages_share_a_read_and_far_ones_do_not() -> None:
    near = [(at, 1000) for at in range(0, 500_000, 125_000)]
    far = [(at, 1000) for at in range(0, 1_500_000, 150_000)]
    for messages, count in ((near, 1), (far, 10)):
        log = Log(len(CONTENT), [1.0], range(0))
        await read_spans(cast(CommitLog, log), wanted_at(messages))
        assert len(log.read_counts) == count
    for gap in (0, 3096):
        log = Log(len(CONTENT), [1.0], range(0))
        messages = [(at, 1000) for at in range(0, len(CONTENT) - 1000, 1000 + gap)]
        await read_spans(cast(CommitLog, log), wanted_at(messages))
        assert max(log.read_counts) <= 1024 * 1024


@pytest.mark.parametrize("gap", [0, 100_000, 150_000])
def test_other_tasks_run_after_a_mebibyte_of_cached_bytes(gap: int) -> None:
    size = 100_000
    messages = [(at, size) for at in range(0, len(CONTENT) - size, size + gap)]
    log = Log(len(CONTENT), [1.0], range(0), range(len(CONTENT)))
    missing = read_spans_nowait(cast(CommitLog, log), wanted_at(messages), 0, [], 1024 * 1024)
    assert missing is not None
    assert 0 <= sum(log.cached_counts) - 1024 * 1024 < size


async def test_messages_after_a_segment_that_is_deleted_during_the_read_are_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were skipped together with those of the deleted segment."""
    async with open_node(tmp_path, store_changes={"segment_size": 4096}) as node:
        for number in range(5):
            await node.send(b"%d" % number * 1000)
        await node.dispatched()
        log = node.store.log
        assert len(log.segments) == 2

        async def deleting(log: CommitLog, wanted: Wanted) -> list[Span]:
            if log.min_offset == 0:
                await log.delete_first()
            return await read_spans(log, wanted)

        monkeypatch.setattr(queue_read, "read_spans", deleting)
        answer = await node.pull()
        first = int(answer.ext_fields["nextBeginOffset"]) - len(node.records(answer))
        assert 0 < first < 5
        assert [record.body[:1] for record in node.records(answer)] == [b"%d" % number for number in range(first, 5)]
