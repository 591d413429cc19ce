"""The compiled twins that write and split records do what the Python functions do (test_record.py tests either)."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.protocol.codes import PutStatus
from ha.protocol.compiled import pure
from ha.protocol.record import Message, encode_host, split_records
from ha.protocol.record_encoding import encode_record, record_run

from .test_record import BORN_MS, M1, STORE_HOST, hosts, messages, ports
from .twins import outcome

LIMITS: dict[str, Any] = {
    "body_size_max": 4 << 20,
    "properties_size_max": 32767,
    "append_property_crc": False,
    "result": lambda *parts: parts,
}
TWINS = (record_run, pure(record_run))

changes = st.one_of(
    *[st.just({})] * 8,
    st.fixed_dictionaries({"topic": st.sampled_from(["", "t" * 127, "ü" * 63, "t" * 128, "ü" * 64])}),
    st.fixed_dictionaries({"sys_flag": st.sampled_from([4, 8, 12, 0x31])}),
    st.fixed_dictionaries({"properties": st.sampled_from([0, 32746, 32747, 32748, 32767, 32768]).map(bytes)}),
    st.fixed_dictionaries({"properties": st.sampled_from([b"A\x01b", b"A\x01b\x02"])}),
)


@given(
    run=st.lists(st.tuples(messages, changes), min_size=1, max_size=6),
    same_queue=st.booleans(),
    unknown=st.integers(0, 6),
    first=st.integers(0, 2),
    room=st.sampled_from([-1, 0, 100, 200, 1000, 1 << 20]),
    sizes=st.sampled_from([(4 << 20, 32767), (3, 32767), (4 << 20, 5), (4 << 20, 40000)]),
    host=st.builds(encode_host, hosts, ports),
    has_crc=st.booleans(),
    is_view=st.booleans(),
)
def test_twins_write_the_same_runs(
    run: list[tuple[Message, dict[str, Any]]],
    same_queue: bool,
    unknown: int,
    first: int,
    room: int,
    sizes: tuple[int, int],
    host: bytes,
    has_crc: bool,
    is_view: bool,
) -> None:
    changed = [msgspec.structs.replace(message, **change) for message, change in run]
    if same_queue:
        for message in changed[1:]:
            message.topic, message.queue_id = changed[0].topic, changed[0].queue_id
    if is_view:
        changed[-1].body = memoryview(changed[-1].body)
    known = {(message.topic, message.queue_id): number for number, message in enumerate(changed) if number != unknown}
    limits = {
        **LIMITS,
        "body_size_max": sizes[0],
        "properties_size_max": sizes[1],
        "append_property_crc": has_crc,
    }
    found = []
    for write in TWINS:
        advanced = {key: number + 1 for key, number in known.items() if number % 3 == 0}
        written = outcome(write, changed, first, known, advanced, 1000, room, BORN_MS, host, **limits)
        found.append((written, advanced))
    assert found[0] == found[1]


@pytest.mark.parametrize("write", TWINS)
def test_a_run_is_its_records_one_after_another(write: Any) -> None:
    other = msgspec.structs.replace(M1, queue_id=M1.queue_id + 1)
    prepared = msgspec.structs.replace(M1, sys_flag=4)
    offsets = {(M1.topic, M1.queue_id): 7, (M1.topic, other.queue_id): 9}
    run = [M1, other, prepared, M1]
    advanced: dict[tuple[str, int], int] = {}
    raw, written = write(run, 0, offsets, advanced, 100, 1 << 20, BORN_MS, STORE_HOST, **LIMITS)
    expected, at = b"", 100
    for message, queue_offset, one in zip(run, [7, 9, 0, 8], written, strict=True):
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
    assert advanced == {(M1.topic, M1.queue_id): 9, (M1.topic, other.queue_id): 10}
    assert offsets == {(M1.topic, M1.queue_id): 7, (M1.topic, other.queue_id): 9}


@pytest.mark.parametrize("write", TWINS)
@pytest.mark.parametrize("change", [{"queue_id": 2**31}, {"flag": -(2**31) - 1}, {"born_timestamp_ms": 2**63}])
def test_a_number_that_does_not_fit_its_field_is_an_error(write: Any, change: dict[str, int]) -> None:
    put = msgspec.structs.replace(M1, **change)
    with pytest.raises(OverflowError):
        write([put], 0, {(put.topic, put.queue_id): 0}, {}, 0, 1 << 20, 0, STORE_HOST, **LIMITS)


@given(
    some=st.lists(messages, max_size=4),
    damage=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=2),
    cut=st.integers(0, 5),
    verify_crc=st.booleans(),
)
def test_twins_split_records_alike(
    some: list[Message], damage: list[tuple[int, int]], cut: int, verify_crc: bool
) -> None:
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
