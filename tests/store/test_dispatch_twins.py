"""Compiled and Python code produce the same queues, index and arrivals, for any chunks of the log."""

import errno
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from ha.protocol.compiled import pure
from ha.protocol.properties import java_hash
from ha.protocol.record import FILLER_SIZE_MIN, Message, encode_host
from ha.protocol.record_digest import KEY, digest_records
from ha.protocol.record_encoding import encode_filler, encode_record, record_size
from ha.store import dispatch, index_file
from ha.store.dispatch import Arrival, Dispatcher
from ha.store.message_store import MessageStore
from tests.store.disks import MemoryDisk, run_inline
from tests.store.stores import ROOT, WallClock, small_options

SEGMENT = 16384
V6 = encode_host("2001:db8::1", 10911)

pieces = st.sampled_from(
    [
        b"TAGS\x01a\x02",
        b"TAGS\x01a tag\x02",
        b"TAGS\x01\xe5\x95\x86\x02",
        b"TAGS\x01\xff\x02",
        b"TAGS\x01\x02",
        b"TAGS\x02",
        b"TAGS\x01a\x01b\x02",
        b"TAG\x01a\x02",
        b"XTAGS\x01a\x02",
        b"KEYS\x01k1\x02",
        b"KEYS\x01k1 k2  k3\x02",
        b"KEYS\x01 \x02",
        b"KEYS\x01 k\x02",
        b"KEYS\x01k\xc3\xa9 k\x02",
        b"UNIQ_KEY\x017F00000100002A9F18B4AAC200000001\x02",
        b"UNIQ_KEY\x01short\x02",
        b"UNIQ_KEY\x01polygenelubricants\x02",
        b"UNIQ_KEY\x01\x02",
        b"UNIQ_KEYS\x01x\x02",
        b"WAIT\x01true\x02",
        b"\xe5\x95\x86\x01\xe5\x93\x81\x02",
        b"a b\x01c d\x02",
        b"DELAY\x013\x02",
        b"DELAY\x0199\x02",
        b"DELAY\x01x\x02",
        b"\x02",
        b"\x01",
    ]
)
usual = st.just([b"KEYS\x01order\x02", b"UNIQ_KEY\x017F00000100002A9F18B4AAC200000001\x02", b"TAGS\x01a\x02"])
properties = st.one_of(
    usual, usual, st.lists(pieces, max_size=5), st.lists(st.binary(max_size=20), max_size=2)
).flatmap(lambda parts: st.sampled_from([b"".join(parts), b"".join(parts).removesuffix(b"\x02")]))
queue_steps = st.one_of(*[st.just(0)] * 8, st.sampled_from([-3, -1, 1, 5, 100, 1 << 62]))
"""Difference between a record's queue offset and the next one of its queue."""
messages = st.tuples(
    st.builds(
        Message,
        topic=st.sampled_from(
            ["T", "T", "T", "U", "SCHEDULE_TOPIC_XXXX", "x" * 130, "商品", "a/b", "", ".", "%RETRY%"]
        ),
        queue_id=st.sampled_from([0, 0, 1, 7, -1]),
        body=st.sampled_from([b"", b"body", b"b" * 60, b"\x02TAGS\x01no\x02"]),
        properties=properties,
        # Not, prepared, committed, rolled back; compressed, an inner batch.
        sys_flag=st.sampled_from([0, 0, 0, 0x4, 0x8, 0xC, 0x1, 0x80]),
        born_host=st.sampled_from([bytes(8), bytes(8), V6]),
    ),
    queue_steps,
    st.sampled_from([bytes(8), bytes(8), V6]),
    st.sampled_from([0, 0, 1, 999, 50_000, -(1 << 62)]),
)
logs = st.lists(messages, min_size=1, max_size=40)
damages = st.lists(st.tuples(st.integers(0, 1 << 14), st.integers(0, 255)), max_size=2)


def raw_log(records: list[Any]) -> bytes:
    """Returns the records in segments, with fillers."""
    log = bytearray()
    next_offsets: dict[tuple[str, int], int] = {}
    now_ms = 1_700_000_000_000
    for message, step, store_host, later_ms in records:
        size = record_size(message, store_host_size=len(store_host))
        room = SEGMENT - len(log) % SEGMENT
        if size > room - FILLER_SIZE_MIN:
            log += encode_filler(room).ljust(room, b"\0")
        key = (message.topic, message.queue_id)
        at = max(next_offsets.get(key, 0) + step, 0)
        now_ms += max(later_ms, 0)
        log += encode_record(
            message,
            queue_offset=at,
            physical_offset=len(log),
            store_timestamp_ms=now_ms if later_ms >= 0 else later_ms,
            store_host=store_host,
        )
        if message.sys_flag & 0xC not in (0x4, 0xC) and at < 1 << 40:
            next_offsets[key] = at + 1
    return bytes(log)


TWINS: list[tuple[Any, str]] = [
    (dispatch, "digest_records"),
    (index_file, "chain_keys"),
    (index_file, "link_slots"),
]


async def outcome(
    log: bytes, is_compiled: bool, cuts: list[int], *, failing_write: int = -1, again: bool = False, **options: Any
) -> list[Any]:
    """Everything that dispatch leaves behind, after it has gone over the log twice.

    `again`: it begins at the log's begin each time that something comes.
    """
    disk = MemoryDisk()
    if failing_write >= 0:
        writes = iter(range(failing_write))

        def refuse(operation: str, path: Path) -> int | None:
            if operation != "pwrite" or "commitlog" in path.parts or next(writes, None) is not None:
                return None
            disk.refuse = lambda operation, path: None
            return errno.ENOSPC

        disk.refuse = refuse
    store = MessageStore(small_options(segment_size=SEGMENT, **options), disk, run_inline, WallClock())
    arrivals: dict[tuple[str, int], list[Any]] = {}

    def arrive(brought: list[Arrival]) -> None:
        for arrival in brought:
            kept = arrivals.setdefault((arrival.topic, arrival.queue_id), [0, []])
            kept[0] = arrival.max_queue_offset
            kept[1] += arrival.tags_codes

    store.dispatcher.subscribe(arrive)
    states: list[Any] = []
    with ExitStack() as patches:
        for module, name in TWINS:
            if not is_compiled:
                patches.enter_context(patch.object(module, name, pure(getattr(module, name))))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.log.allocator.run)
            position = 0
            for cut in [*sorted(cuts), len(log)]:
                while position < min(cut, len(log)):
                    size = min(cut, len(log), position - position % SEGMENT + SEGMENT) - position
                    await store.log.append_raw(position, log[position : position + size])
                    position += size
                if again:
                    store.log.dispatched_offset.reset(0)
                await catch_up(store.dispatcher)
            states.append(state(store))
            store.log.dispatched_offset.reset(0)
            await catch_up(store.dispatcher)
            states.append(state(store))
            nursery.cancel_scope.cancel()
    dispatcher = store.dispatcher
    files = {
        path: bytes(inode.content) for path, inode in disk.inodes.items() if path.is_relative_to(ROOT / "consumequeue")
    }
    told = [dispatcher.skipped_count, dispatcher.paused_reason, dispatcher.dispatched_timestamp_ms, list(arrivals)]
    return [*states, told, arrivals if failing_write < 0 else None, files]


async def catch_up(dispatcher: Dispatcher) -> None:
    """Goes on after a full disk, as `run` does."""
    await dispatcher.catch_up()
    while dispatcher.paused_reason.startswith("disk full"):
        await dispatcher.catch_up()


def state(store: MessageStore) -> list[Any]:
    """Returns the dispatched offset, all queues, and the whole index."""
    index_files = []
    if store.index is not None:
        for file in store.index.files:
            taken = file.take_unwritten()
            file.give_back(taken)
            entries = file.entries(1, file.next_entry)
            index_files.append([taken.header, taken.pages, file.slots and file.slots.tolist(), entries])
    queues = [[q.topic, q.queue_id, q.min_offset, q.max_offset, q.max_physical_offset] for q in store.queues]
    return [store.log.dispatched_offset.value, queues, index_files, store.index and store.index.end_physical_offset]


def both(log: bytes, cuts: list[int], **options: Any) -> tuple[list[Any], list[Any]]:
    compiled, python = (
        trio.run(
            lambda: outcome(log, is_compiled, cuts, **options),  # noqa: B023
            clock=MockClock(autojump_threshold=0),
        )
        for is_compiled in (True, False)
    )
    return compiled, python


@given(
    logs,
    damages,
    st.lists(st.integers(0, 1 << 14), max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1, 60]),
)
def test_both_implementations_have_the_same_result(
    records: list[Any],
    damage: list[tuple[int, int]],
    cuts: list[int],
    is_slave: bool,
    index_tags: bool,
    again: bool,
    torn: int,
) -> None:
    log = bytearray(raw_log(records))
    for place, value in damage:
        if place < len(log):
            log[place] = value
    del log[len(log) - torn :]
    compiled, python = both(bytes(log), cuts, is_slave=is_slave, index_tags=index_tags, again=again)
    assert compiled == python


@given(logs, st.integers(0, 12))
def test_a_full_disk_in_the_middle_changes_nothing(records: list[Any], failing_write: int) -> None:
    compiled, python = both(raw_log(records), [], failing_write=failing_write)
    whole, _ = both(raw_log(records), [])
    assert compiled[:2] == python[:2] == whole[:2]
    assert compiled[-1] == python[-1]


def test_a_queue_begins_at_its_first_message_although_the_disk_was_full_then() -> None:
    log = raw_log([(Message("T", 0, b"body"), 5, bytes(8), 0)])
    for outcomes in (both(log, []), both(log, [], failing_write=0)):
        for states in outcomes:
            assert states[0][1] == [["T", 0, 5, 6, len(log)]]


def test_scheduled_messages_are_due_when_their_level_says() -> None:
    times = [b"DELAY\x013\x02", b"DELAY\x01x\x02", b"TAGS\x01\xe5\x95\x86\x02DELAY\x012\x02", b"TAGS\x01TagA\x02", b""]
    records = [(Message("SCHEDULE_TOPIC_XXXX", 0, b"", each), 0, bytes(8), 0) for each in times]
    compiled, python = both(raw_log(records), [])
    assert compiled == python
    now_ms = 1_700_000_000_000
    assert compiled[3]["SCHEDULE_TOPIC_XXXX", 0] == [5, [now_ms + 10_000, 0, now_ms + 5_000, 2598919, 0]]


@pytest.mark.parametrize("cut", [0, 700, 5000])
def test_records_dispatched_before_are_skipped(cut: int) -> None:
    records = [(Message("T", n % 2, b"body", b"KEYS\x01k%d\x02" % n), 0, bytes(8), 0) for n in range(80)]
    log = raw_log(records)
    compiled, python = both(log, [cut], again=True)
    assert compiled == python
    assert compiled[:2] == both(log, [])[0][:2]


def test_the_one_hash_that_has_no_absolute_value_is_0() -> None:
    records = [(Message("T", 0, b"", b"KEYS\x01DWIECHC k\x02"), 0, bytes(8), 0)]
    assert java_hash("T#DWIECHC") == -(1 << 31)
    log = raw_log(records)
    for digest in (digest_records, pure(digest_records)):
        found = digest(
            log,
            0,
            SEGMENT,
            count_max=1,
            bytes_max=SEGMENT,
            delay_levels_ms=(),
            with_keys=True,
            with_tags=False,
        )
        assert [key_hash for key_hash, _, _ in KEY.iter_unpack(found.keys)] == [0, java_hash("T#k")]


@pytest.mark.parametrize("index_tags", [False, True])
def test_the_usual_records_over_several_index_files(index_tags: bool) -> None:
    records = [
        (
            Message(
                "T" if n % 5 else "U",
                n % 3,
                b"body",
                b"KEYS\x01k%d w\x02UNIQ_KEY\x01U%d\x02TAGS\x01t%d\x02" % (n, n, n % 4),
            ),
            0,
            bytes(8),
            n % 700,
        )
        for n in range(400)
    ]
    compiled, python = both(raw_log(records), [5000], index_tags=index_tags)
    assert compiled == python
    assert len(compiled[0][2]) > 20


def test_many_queues_at_once_whose_topics_end_alike() -> None:
    records = [(Message(f"{n % 35:02d}tail", n % 4, b"", b"TAGS\x01t%d\x02" % n), 0, bytes(8), 0) for n in range(280)]
    compiled, python = both(raw_log(records), [])
    assert compiled == python
    assert len(compiled[0][1]) == 140
