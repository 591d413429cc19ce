"""The compiled twins that write records write what those in Python do (test_record.py checks whichever runs)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import LocalProtocolError
from ha.protocol.codes import PutStatus
from ha.protocol.compiled import pure
from ha.protocol.record import Message, encode_host, split_records
from ha.protocol.record_encoding import (
    batch_pieces,
    encode_record,
    is_batch_of_one_queue,
    record_pieces,
    record_run,
    record_size,
)

from .test_record import BORN_MS, M1, M2, STORE_HOST, hosts, int64, messages, own_parts, ports
from .twins import outcome


@given(
    put=messages,
    properties_size=st.sampled_from([0, 1, 32746, 32747, 32748, 32767, 32768]),
    topic=st.sampled_from(["", "ü", "t" * 127, "t" * 128, "t" * 32767, "t" * 32768]),
    places=st.tuples(int64, int64, int64),
    host=st.builds(encode_host, hosts, ports),
    crc=st.booleans(),
    is_view=st.booleans(),
)
def test_records(
    put: Message,
    properties_size: int,
    topic: str,
    places: tuple[int, int, int],
    host: bytes,
    crc: bool,
    is_view: bool,
) -> None:
    large = msgspec.structs.replace(put, topic=topic, properties=bytes(properties_size))
    for one in (put, large):
        if is_view:
            one.body = memoryview(one.body)
        assert outcome(record_pieces, one, *places, host, crc) == outcome(pure(record_pieces), one, *places, host, crc)


@given(
    first=messages,
    others=st.lists(own_parts, max_size=5),
    offset=st.integers(-(2**63), 2**62),
    host=st.builds(encode_host, hosts, ports),
    is_view=st.booleans(),
)
def test_batches(
    first: Message, others: list[tuple[int, bytes, bytes]], offset: int, host: bytes, is_view: bool
) -> None:
    batch = [first]
    for flag, body, properties in others:
        batch.append(msgspec.structs.replace(first, flag=flag, body=body, properties=properties))
    if is_view:
        batch[-1].body = memoryview(batch[-1].body)
    sizes = [record_size(one, store_host_size=len(host)) for one in batch]
    places: dict[str, Any] = {"queue_offset": offset, "physical_offset": offset, "store_timestamp_ms": BORN_MS}
    made, expected = (make(batch, sizes, store_host=host, **places) for make in (batch_pieces, pure(batch_pieces)))
    assert b"".join(made) == b"".join(expected)


@given(some=st.lists(st.sampled_from([M1, M2]), min_size=1), other=messages)
def test_what_is_a_batch(some: list[Message], other: Message) -> None:
    for batch in (some, [*some, other], [other, other]):
        assert is_batch_of_one_queue(batch) == pure(is_batch_of_one_queue)(batch)


@given(
    run=st.lists(messages, min_size=1, max_size=6),
    changes=st.lists(
        st.sampled_from(
            [
                {},
                {},
                {},
                {"topic": "t" * 31},
                {"topic": "ü" * 31},
                {"topic": "t" * 32},
                {"sys_flag": 4},
                {"sys_flag": 0x31},
            ]
        ),
        min_size=6,
        max_size=6,
    ),
    unknown=st.integers(0, 6),
    first=st.integers(0, 2),
    room=st.sampled_from([0, 100, 200, 1000, 1 << 20]),
    sizes=st.sampled_from([(4 << 20, 32767), (3, 32767), (4 << 20, 5), (4 << 20, 40000)]),
    host=st.builds(encode_host, hosts, ports),
    is_view=st.booleans(),
)
def test_runs(
    run: list[Message],
    changes: list[dict[str, Any]],
    unknown: int,
    first: int,
    room: int,
    sizes: tuple[int, int],
    host: bytes,
    is_view: bool,
) -> None:
    run = [msgspec.structs.replace(one, **change) for one, change in zip(run, changes, strict=False)]
    if is_view:
        run[-1].body = memoryview(run[-1].body)
    known = {(one.topic, one.queue_id): number for number, one in enumerate(run) if number != unknown}
    limits: dict[str, Any] = {"body_size_max": sizes[0], "properties_size_max": sizes[1]}
    found = []
    for make in (record_run, pure(record_run)):
        offsets = dict(known)
        made = outcome(make, run, first, offsets, 1000, room, BORN_MS, host, **limits, result=lambda *parts: parts)
        found.append((made, offsets))
    assert found[0] == found[1]


def test_a_run_is_the_records_one_by_one() -> None:
    other = msgspec.structs.replace(M1, queue_id=M1.queue_id + 1)
    raw, made = record_run(
        [M1, other, M1],
        0,
        {(M1.topic, M1.queue_id): 7, (M1.topic, other.queue_id): 9},
        100,
        1 << 20,
        BORN_MS,
        STORE_HOST,
        body_size_max=1 << 20,
        properties_size_max=32767,
        result=lambda *parts: parts,
    )
    expected, at = b"", 100
    for message, queue_offset, one in zip([M1, other, M1], [7, 9, 8], made, strict=True):
        record = encode_record(
            message,
            queue_offset=queue_offset,
            physical_offset=at,
            store_timestamp_ms=BORN_MS,
            store_host=STORE_HOST,
        )
        assert one == (PutStatus.PUT_OK, at, len(record), queue_offset, BORN_MS)
        expected += record
        at += len(record)
    assert raw == expected


def test_no_byte_is_written_behind_the_sizes_given() -> None:
    """Wrong sizes are our own mistake, and must not become one of memory."""
    if batch_pieces is pure(batch_pieces):
        pytest.skip("nothing is compiled")
    places: dict[str, Any] = {"queue_offset": 0, "physical_offset": 0, "store_timestamp_ms": 0}
    size = record_size(M1)
    for sizes in ([size - 1], [0], [size + 1], [size, size], []):
        with pytest.raises(ValueError, match=r"long|shorter|longer"):
            batch_pieces([M1], sizes, store_host=STORE_HOST, **places)
    for sizes in ([-1], [2**31]):
        with pytest.raises(OverflowError):
            batch_pieces([M1], sizes, store_host=STORE_HOST, **places)


@pytest.mark.parametrize("change", [{"queue_id": 2**31}, {"flag": -(2**31) - 1}, {"born_timestamp_ms": 2**63}])
def test_a_number_that_fits_no_field_is_no_record(change: dict[str, int]) -> None:
    put = msgspec.structs.replace(M1, **change)
    for make in (record_pieces, pure(record_pieces)):
        with pytest.raises(Exception, match=r"too large|too big|requires|range|format") as caught:
            make(put, 0, 0, 0, STORE_HOST)
        assert not isinstance(caught.value, LocalProtocolError)


@given(
    some=st.lists(messages, max_size=4),
    damage=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=2),
    cut=st.integers(0, 5),
    verify_crc=st.booleans(),
)
def test_splitting(some: list[Message], damage: list[tuple[int, int]], cut: int, verify_crc: bool) -> None:
    pulled = bytearray()
    for one in some:
        pulled += encode_record(
            one, queue_offset=1, physical_offset=len(pulled), store_timestamp_ms=BORN_MS, store_host=STORE_HOST
        )
    del pulled[len(pulled) - cut :]
    for place, value in damage:
        if place < len(pulled):
            pulled[place] = value
    made, expected = (
        outcome(split, bytes(pulled), verify_crc=verify_crc) for split in (split_records, pure(split_records))
    )
    assert made == expected
