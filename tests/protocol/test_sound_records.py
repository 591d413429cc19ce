"""`sound_records` accepts the same records as `verify_record`."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.protocol.compiled import pure
from ha.protocol.record import (
    HEADS,
    MAGIC_V1,
    MAGIC_V2,
    Filler,
    Message,
    RecordHead,
    encode_host,
    scan_record,
    sound_records,
    split_records,
    verify_record,
)
from ha.protocol.record_digest import digest_records
from ha.protocol.record_encoding import encode_filler, encode_record

from .twins import outcome

V6 = encode_host("2001:db8::1", 10911)
BASE = 1 << 40
TWINS = (sound_records, pure(sound_records))

messages = st.builds(
    Message,
    topic=st.sampled_from(["T", "商品", "x" * 130, ""]),
    queue_id=st.integers(0, 3),
    body=st.sampled_from([b"", b"body", b"b" * 300]),
    properties=st.sampled_from([b"", b"KEYS\x01k\x02", b"\xff" * 40]),
    born_host=st.sampled_from([bytes(8), V6]),
)


def log_of(chosen: list[Message]) -> bytes:
    log = b""
    for number, message in enumerate(chosen):
        log += encode_record(
            message, queue_offset=number, physical_offset=BASE + len(log), store_timestamp_ms=1, store_host=bytes(8)
        )
    return log


def one_by_one(log: bytes, end: int) -> tuple[int, int]:
    """The result according to `verify_record` and the physical offset in each record."""
    at, last = 0, -1
    while at < end:
        try:
            size = verify_record(log, at, end)
        except RemoteProtocolError:
            break
        if isinstance(size, Filler) or int.from_bytes(log[at + 28 : at + 36], "big") != BASE + at:
            break
        at, last = at + size, at
    return at, last


@given(st.lists(messages, max_size=8), st.data())
def test_sound_records_are_those_that_verification_accepts(chosen: list[Message], data: st.DataObject) -> None:
    log = bytearray(log_of(chosen) + data.draw(st.sampled_from([b"", bytes(200), encode_filler(100), b"\xff" * 9])))
    for place in data.draw(st.lists(st.integers(0, max(len(log) - 1, 0)), max_size=2)) if log else []:
        log[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(log), len(log) // 2]))
    for find in TWINS:
        assert find(bytes(log), BASE, end) == one_by_one(bytes(log), end)


@pytest.mark.parametrize("place", [8, 28, 4, 100, -1])
def test_flipped_bit_ends_the_sound_records(place: int) -> None:
    """Of the CRC, the offset, the magic number, the body, and the sizes: of properties nobody could tell."""
    log = bytearray(log_of([Message("T", 0, b"body" * 20)] * 3))
    size = len(log) // 3
    log[size + place if place >= 0 else 2 * size - 1] ^= 1
    for find in TWINS:
        assert find(bytes(log), BASE, len(log)) == (size, 0)
        assert find(bytes(log), BASE + 1, len(log)) == (0, -1)


LIMITS = [
    (MAGIC_V1, 127, 32767, True),
    (MAGIC_V1, 128, 0, False),
    (MAGIC_V1, 0, 32768, False),
    (MAGIC_V2, 32767, 32767, True),
    (MAGIC_V2, 32768, 0, False),
    (MAGIC_V2, 0, 32768, False),
]
"""Magic, topic size, properties size, and whether a record with them is sound"""


def record_of(magic: int, topic_size: int, properties_size: int, sys_flag: int) -> bytes:
    head = HEADS[sys_flag]
    topic = topic_size.to_bytes(1 if magic == MAGIC_V1 else 2, "big") + b"t" * topic_size
    size = head.size + len(topic) + 2 + properties_size
    hosts = (bytes(20 if sys_flag & flag else 8) for flag in (0x10, 0x20))
    fields = head.pack(size, magic, 0, 0, 0, 0, BASE, sys_flag, 0, next(hosts), 7, next(hosts), 0, 0, 0)
    return fields + topic + properties_size.to_bytes(2, "big") + b"p" * properties_size


@pytest.mark.parametrize(("magic", "topic_size", "properties_size", "is_sound"), LIMITS)
@pytest.mark.parametrize("sys_flag", [0, 0x10, 0x20, 0x30])
def test_all_parsers_have_the_same_limits(
    magic: int, topic_size: int, properties_size: int, is_sound: bool, sys_flag: int
) -> None:
    record = record_of(magic, topic_size, properties_size, sys_flag)
    size = len(record)
    for find in TWINS:
        assert find(record, BASE, len(record)) == ((size, 0) if is_sound else (0, -1))
    for split in (split_records, pure(split_records)):
        parts = outcome(split, record)
        assert isinstance(parts, list) == is_sound
        assert not is_sound or parts[0][0] == HEADS[sys_flag].unpack_from(record)
    for digest in (digest_records, pure(digest_records)):
        options: dict[str, Any] = {"delay_levels_ms": (), "with_keys": False, "with_tags": False}
        found = digest(record, BASE, BASE + len(record), count_max=1, bytes_max=1, **options)
        assert (found.count, found.store_timestamp_ms) == ((1, 7) if is_sound else (0, -1))
    assert isinstance(scan_record(record, 0, len(record)), RecordHead) == is_sound
