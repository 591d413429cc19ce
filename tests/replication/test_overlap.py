"""A slave's end is compared with the master's before anything is appended: one log never has two histories."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import assume, given
from hypothesis import strategies as st
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from ha.protocol.record import MAGIC_V2
from ha.replication import ha_session, overlap
from ha.replication.ha_client import HAClient
from ha.replication.ha_service import HAService
from ha.replication.options import HAOptions
from ha.replication.overlap import (
    HEAD_SIZE,
    SEARCH_STEP_BYTES,
    SECTOR_SIZE,
    Overlap,
    find_head,
    has_head,
    overlap_start,
)
from ha.replication.statistics import Condition
from tests.replication.master_side import serve_as_rocketmq
from tests.replication.memory_log import SEGMENT_SIZE, MemoryLog, records

Serve = Callable[[trio.abc.Stream], object]
MASTERS = ("halog", "rocketmq")


def fed_in_chunks(overlap: Overlap, master: bytes, data: st.DataObject) -> bytes:
    """Feeds bytes in chunks of any size, none of which may differ; returns those after the end."""
    sent, rest = memoryview(master), b""
    while sent:
        size = data.draw(st.integers(1, len(sent)))
        behind = overlap.feed(sent[:size])
        assert behind is not None
        rest += behind
        sent = sent[size:]
    assert overlap.is_compared
    return rest


@given(st.binary(min_size=1, max_size=50), st.binary(max_size=20), st.data())
def test_equal_bytes_pass_in_chunks_of_any_size(held: bytes, more: bytes, data: st.DataObject) -> None:
    assert fed_in_chunks(Overlap(1000, held), held + more, data) == more


@given(st.binary(min_size=1, max_size=50), st.data())
def test_the_first_byte_that_differs_is_found(held: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(held) - 1))
    assume(any(held[at:][: SECTOR_SIZE - (1000 + at) % SECTOR_SIZE]))
    other = bytearray(held)
    other[at] ^= 1 << data.draw(st.integers(0, 7))
    overlap = Overlap(1000, held)
    cut = data.draw(st.integers(0, at))
    equal = overlap.feed(memoryview(other)[:cut])
    assert equal is not None
    assert not equal
    assert overlap.feed(memoryview(other)[cut:]) is None
    assert overlap.position == 1000 + at


@given(st.binary(min_size=1, max_size=2000), st.binary(max_size=20), st.data())
def test_missing_rests_of_sectors_are_no_other_history(log: bytes, more: bytes, data: st.DataObject) -> None:
    held, missing = bytearray(log), []
    for at in data.draw(st.sets(st.integers(0, len(log) - 1), max_size=3)):
        end = min(len(log), at + SECTOR_SIZE - (1000 + at) % SECTOR_SIZE)
        missing += [each for each in range(at, end) if log[each]]
        held[at:end] = bytes(end - at)
    overlap = Overlap(1000, bytes(held))
    assert fed_in_chunks(overlap, log + more, data) == more
    assert overlap.torn_at == (1000 + min(missing) if missing else None)


@pytest.mark.parametrize(
    ("first", "end", "start"),
    [
        (-1, 0, 0),  # empty
        (0, 1, 1),  # one byte: a request of 0 would mean the last segment
        (0, 2, 1),
        (0, 90, 1),
        (0, 1000, 900),
        (0, 4096, 3996),  # the end of a segment: its last bytes
        (0, 4096 + HEAD_SIZE - 1, 4096 + HEAD_SIZE - 101),  # this segment has no whole head of a record yet
        (0, 4096 + HEAD_SIZE, 4096),
        (4096, 4096, 4096),  # an empty segment after a resync
        (8192, 8200, 8192),
    ],
)
def test_where_the_comparison_starts(first: int, end: int, start: int) -> None:
    assert overlap_start(first, end, 4096, 100) == start
    assert overlap_start(first, end, 4096, 0) == end


@given(st.integers(0, 5), st.integers(0, 2 * SEGMENT_SIZE), st.integers(0, 2 * SEGMENT_SIZE))
def test_heads_are_found_by_the_offset_that_they_state(seed: int, start: int, end: int) -> None:
    log = records(2 * SEGMENT_SIZE, seed=seed, body_sizes=(0, 1500))
    begins = [at for at in range(len(log) - HEAD_SIZE + 1) if log[at + 28 : at + 36] == at.to_bytes(8, "big")]
    assert has_head(log[start:end], start) == any(start <= at <= end - HEAD_SIZE for at in begins)
    assert not has_head(log[start:end], start + 1)


@pytest.mark.parametrize("at", [0, SEARCH_STEP_BYTES - 75, SEARCH_STEP_BYTES - 1, 4 * SEARCH_STEP_BYTES - HEAD_SIZE])
async def test_other_tasks_run_while_a_head_is_searched_among_magic_codes(at: int, nursery: trio.Nursery) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    magic = MAGIC_V2.to_bytes(4, "big", signed=True)
    held = bytearray(magic * SEARCH_STEP_BYTES)
    held[at : at + 36] = bytes(4) + magic + bytes(20) + (1000 + at).to_bytes(8, "big")
    nursery.start_soon(count)
    assert not await find_head(bytes(held), 1001)
    assert turns > 1
    assert await find_head(bytes(held), 1000)


@asynccontextmanager
async def following(
    kind: str,
    master: MemoryLog,
    slave: MemoryLog,
    *,
    tells_min_offset: bool = False,
    housekeeping_s: float = 20.0,
    truncate: Callable[[int], Awaitable[None]] | None = None,
) -> AsyncIterator[tuple[HAClient, HAService]]:
    options = HAOptions(overlap_bytes_max=1000, housekeeping_interval_s=housekeeping_s)
    service = HAService(master, options)

    async def ask_min_offset() -> int | None:
        await trio.lowlevel.checkpoint()
        return master.min_offset if tells_min_offset else None

    async with trio.open_nursery() as nursery:

        async def connect(address: str) -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            ours, theirs = memory_stream_pair()
            if kind == "halog":
                nursery.start_soon(service.handle, theirs, "127.0.0.1:1")
            else:
                nursery.start_soon(serve_as_rocketmq, theirs, master)
            return ours

        client = HAClient(slave, options, connect, truncate=truncate, master_min_offset=ask_min_offset)
        nursery.start_soon(client.run)
        client.set_master("master:10912")
        await trio.sleep(1)
        yield client, service
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", MASTERS)
async def test_a_slave_continues_where_it_was(kind: str) -> None:
    content = records(2 * SEGMENT_SIZE + 300)
    master, slave = MemoryLog(content), MemoryLog(content[: SEGMENT_SIZE + 2000])
    async with following(kind, master, slave) as (client, service):
        assert slave.content == content
        assert client.statistics().condition is Condition.CONNECTED
        assert client.statistics().reported_offset == len(content)
        if kind == "halog":
            progress = service.statistics().slaves[0]
            assert progress.request_offset == SEGMENT_SIZE + 1000
            assert progress.ack_offset == len(content)
        master.put(b"more")
        await trio.sleep(1)
        assert slave.content == content + b"more"


@pytest.mark.parametrize("kind", MASTERS)
async def test_a_torn_record_at_the_end_is_copied_again(kind: str) -> None:
    content = random.Random(9).randbytes(2000)
    torn = bytearray(content[:1900])
    torn[1530:1536] = bytes(6)  # the rest of a sector
    master, slave = MemoryLog(content), MemoryLog(bytes(torn))

    async def truncate(offset: int) -> None:
        assert offset == 1530
        await trio.lowlevel.checkpoint()
        del slave.content[1500:]
        slave.max_offset.reset(1500)
        slave.flushed_offset.reset(1500)

    async with following(kind, master, slave, truncate=truncate) as (client, _):
        await trio.sleep(10)
        assert slave.content == content
        assert client.statistics().condition is Condition.CONNECTED
        assert client.statistics().ended_counts == {Condition.DAMAGED: 1}


@pytest.mark.parametrize("kind", MASTERS)
async def test_a_torn_record_that_is_not_the_only_difference_stays(kind: str) -> None:
    content = random.Random(9).randbytes(2000)
    torn = bytearray(content[:1900])
    torn[1530:1536] = bytes(6)
    torn[1800] ^= 1
    master, slave = MemoryLog(content), MemoryLog(bytes(torn))

    async def truncate(offset: int) -> None:
        raise AssertionError(offset)

    async with following(kind, master, slave, truncate=truncate) as (client, _):
        assert slave.content == torn
        assert client.statistics().condition is Condition.DIVERGED


@pytest.mark.parametrize("kind", MASTERS)
async def test_a_slave_with_the_whole_log_gets_nothing_new(kind: str) -> None:
    content = random.Random(2).randbytes(3000)
    master, slave = MemoryLog(content), MemoryLog(content)
    async with following(kind, master, slave) as (client, _):
        assert slave.content == content
        assert client.statistics().condition is Condition.CONNECTED
        assert client.statistics().reported_offset == 3000


@pytest.mark.parametrize("kind", MASTERS)
async def test_a_master_that_lost_its_tail_and_grew_past_the_slave_is_not_followed(kind: str) -> None:
    shared = random.Random(3).randbytes(2000)
    lost, written_since = b"acknowledged by the slave", random.Random(4).randbytes(500)
    master, slave = MemoryLog(shared + written_since), MemoryLog(shared + lost)
    async with following(kind, master, slave) as (client, service):
        await trio.sleep(30)
        assert slave.content == shared + lost
        statistics = client.statistics()
        assert statistics.condition is Condition.DIVERGED
        assert "differ at 20" in statistics.detail
        if kind == "halog":
            assert service.push2_slave_max_offset <= 2000


@pytest.mark.parametrize("kind", MASTERS)
@pytest.mark.parametrize(
    ("body_size", "end"),
    [(3000, 3050), (1500, SEGMENT_SIZE - 100), (1500, SEGMENT_SIZE), (1500, SEGMENT_SIZE + 50)],
    ids=["within a record", "within a filler", "behind a filler", "within a head"],
)
async def test_the_same_messages_stored_again_are_another_history(kind: str, body_size: int, end: int) -> None:
    """A master lost its tail, and its producers sent the same messages again. Only the store times differ."""
    logs = [records(2 * SEGMENT_SIZE, body_sizes=(body_size, body_size), stored_ms=ms) for ms in (1, 2)]
    master, slave = MemoryLog(logs[1]), MemoryLog(logs[0][:end])
    async with following(kind, master, slave) as (client, _):
        await trio.sleep(30)
        assert slave.content == logs[0][:end]
        assert client.statistics().condition is Condition.DIVERGED


async def test_a_log_without_records_is_compared_as_far_as_they_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ha_session, "SEARCH_BYTES_MAX", 2500)
    master, slave = MemoryLog(bytes(4000)), MemoryLog(bytes(4000))
    async with following("halog", master, slave) as (client, service):
        assert client.statistics().condition is Condition.CONNECTED
        assert service.statistics().slaves[0].request_offset == 1500


async def test_no_byte_is_searched_twice_for_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for the first ones of those searched before: a head may begin before them and end there."""
    searched: list[int] = []

    def note(held: bytes, start: int) -> bool:
        searched.append(len(held))
        return has_head(held, start)

    monkeypatch.setattr(overlap, "has_head", note)
    async with following("halog", MemoryLog(bytes(4000)), MemoryLog(bytes(4000))) as (client, _):
        assert client.statistics().condition is Condition.CONNECTED
    assert searched == [1000, 1000 + HEAD_SIZE - 1]
    searched.clear()
    assert not await find_head(bytes(SEARCH_STEP_BYTES), 0)
    assert searched == [SEARCH_STEP_BYTES]


@pytest.mark.parametrize("kind", MASTERS)
async def test_a_shorter_master_is_reported(kind: str) -> None:
    content = random.Random(5).randbytes(3000)
    master, slave = MemoryLog(content[:2500]), MemoryLog(content)
    async with following(kind, master, slave) as (client, _):
        await trio.sleep(6)
        assert client.statistics().condition is Condition.MASTER_BEHIND
        master.put(content[2500:] + b"new")  # the same bytes come back, for example from another slave
        await trio.sleep(20)
        assert client.statistics().condition is Condition.CONNECTED
        assert slave.content == content + b"new"


@pytest.mark.parametrize("at", [2000, 2500])
async def test_a_master_whose_bytes_are_damaged_is_not_shorter(at: int) -> None:
    """It waits until they are repaired, perhaps with the bytes of this slave."""
    content = random.Random(13).randbytes(3000)
    master, slave = MemoryLog(content + b"new", hot_bytes=0), MemoryLog(content)
    master.damage(at, 2600)
    async with following("halog", master, slave) as (client, _):
        await trio.sleep(60)
        statistics = client.statistics()
        assert statistics.condition is Condition.NO_DATA_YET
        assert f"the master has the bytes from {at} to the end here at 3000, but sends none" in statistics.detail
        assert statistics.connection_count == 2, "on the second one it asked"
        master.heal()
        await trio.sleep(1)
        assert client.statistics().condition is Condition.CONNECTED
        assert slave.content == content + b"new"


async def test_a_slave_that_cannot_read_its_end_says_so() -> None:
    master, slave = MemoryLog(bytes(3000)), MemoryLog(bytes(3000))

    async def read(*_: object) -> bytes:
        await trio.lowlevel.checkpoint()
        raise OSError(5, "Input/output error")

    slave.read = read  # type: ignore[method-assign,assignment]
    async with following("halog", master, slave) as (client, _):
        await trio.sleep(1)
        assert client.statistics().condition is Condition.DAMAGED
        assert client.statistics().detail == "the end of the log here can't be read: [Errno 5] Input/output error"


@pytest.mark.parametrize("housekeeping_s", [3.0, 20.0])
async def test_a_slave_whose_end_is_damaged_says_so(housekeeping_s: float) -> None:
    """A master that closes silent connections sooner than the slave waited for the repair hid why it waited."""
    content = random.Random(6).randbytes(3000)
    master, slave = MemoryLog(content + b"new"), MemoryLog(content)
    slave.damage(2500, 3000)
    async with following("halog", master, slave, housekeeping_s=housekeeping_s) as (client, _):
        await trio.sleep(30)
        assert client.statistics().ended_counts.keys() == {Condition.DAMAGED}
        assert "the end of the log here" in client.statistics().detail
        slave.heal()
        await trio.sleep(6)
        assert client.statistics().condition is Condition.CONNECTED
        assert slave.content == content + b"new"


@pytest.mark.parametrize("end", [2000, SEGMENT_SIZE])
async def test_a_master_that_ends_where_the_comparison_starts_is_reported(end: int) -> None:
    """It sends as little as a master that deleted these bytes; the range question on another connection shows which."""
    content = random.Random(9).randbytes(end + (1000 if end % SEGMENT_SIZE else 300))
    master, slave = MemoryLog(content[:end]), MemoryLog(content)
    async with following("halog", master, slave) as (client, _):
        await trio.sleep(20)
        statistics = client.statistics()
        assert statistics.condition is Condition.MASTER_BEHIND
        assert f"ends at {len(content)}, the master's at {end}" in statistics.detail
        master.put(content[end:] + b"new")
        await trio.sleep(20)
        assert client.statistics().condition is Condition.CONNECTED
        assert slave.content == content + b"new"


@pytest.mark.parametrize("kind", MASTERS)
async def test_a_slave_at_the_end_of_a_deleted_segment_continues_with_the_next(kind: str) -> None:
    content = random.Random(6).randbytes(SEGMENT_SIZE + 500)
    master, slave = MemoryLog(content), MemoryLog(content[:SEGMENT_SIZE])
    master.delete_before(SEGMENT_SIZE)
    async with following(kind, master, slave) as (client, _):
        await trio.sleep(20)
        assert slave.content == content
        assert client.statistics().condition is Condition.CONNECTED


@pytest.mark.parametrize(("kind", "end"), [("halog", 2 * SEGMENT_SIZE - 1000), ("rocketmq", 2000)])
async def test_a_longer_slave_is_compared_once_the_master_has_grown(kind: str, end: int) -> None:
    """A master that sends nothing before the slave's end may have deleted it, and a slave that then asked for its end
    itself, with nothing to compare, would have two histories in its log once a shorter master has grown past it."""
    content = random.Random(10).randbytes(2 * SEGMENT_SIZE)
    master, slave = MemoryLog(content[:end]), MemoryLog(content)
    async with following(kind, master, slave, tells_min_offset=True) as (client, _):
        await trio.sleep(60)
        assert client.statistics().condition is (Condition.MASTER_BEHIND if kind == "halog" else Condition.OUT_OF_RANGE)
        assert client.statistics().connection_count < 20
        master.put(random.Random(11).randbytes(2 * SEGMENT_SIZE))
        await trio.sleep(20)
        assert client.statistics().condition is Condition.DIVERGED
        assert slave.content == content


@pytest.mark.parametrize("tells_min_offset", [True, False])
async def test_a_slave_at_the_end_of_what_a_rocketmq_master_deleted_continues(tells_min_offset: bool) -> None:
    content = random.Random(12).randbytes(3 * SEGMENT_SIZE)
    master, slave = MemoryLog(content), MemoryLog(content[:SEGMENT_SIZE])
    master.delete_before(SEGMENT_SIZE)
    async with following("rocketmq", master, slave, tells_min_offset=tells_min_offset) as (client, _):
        await trio.sleep(30)
        assert slave.content == content
        assert client.statistics().condition is Condition.CONNECTED


async def test_a_slave_waits_for_a_rocketmq_master_without_its_position() -> None:
    content = records(3000)
    master, slave = MemoryLog(content[:1000]), MemoryLog(content)
    async with following("rocketmq", master, slave) as (client, _):
        await trio.sleep(30)
        assert client.statistics().condition is Condition.OUT_OF_RANGE
        await trio.sleep(60)
        assert client.statistics().condition is Condition.OUT_OF_RANGE
        assert client.statistics().connection_count == 2, "on the second one it asked, in vain"
        master.put(random.Random(8).randbytes(3000))
        await trio.sleep(2)
        assert client.statistics().condition is Condition.DIVERGED
        assert slave.content == content
    await wait_all_tasks_blocked()
