"""`sound_records` accepts the same records as `verify_record`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.protocol.compiled import pure
from ha.protocol.record import Filler, Message, encode_host, sound_records, verify_record
from ha.protocol.record_encoding import encode_filler, encode_record

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
def test_a_flipped_bit_ends_it(place: int) -> None:
    """Of the CRC, the offset, the magic number, the body, and the sizes: of properties nobody could tell."""
    log = bytearray(log_of([Message("T", 0, b"body" * 20)] * 3))
    size = len(log) // 3
    log[size + place if place >= 0 else 2 * size - 1] ^= 1
    for find in TWINS:
        assert find(bytes(log), BASE, len(log)) == (size, 0)
        assert find(bytes(log), BASE + 1, len(log)) == (0, -1)


def test_longer_properties_than_there_may_be() -> None:
    size_max = 32767
    log = bytearray(log_of([Message("T", 0, b"body", b"p" * size_max)]) + b"p")
    log[:4] = len(log).to_bytes(4, "big")
    properties_at = len(log) - size_max - 1
    log[properties_at - 2 : properties_at] = (size_max + 1).to_bytes(2, "big")
    for find in TWINS:
        assert find(bytes(log), BASE, len(log)) == one_by_one(bytes(log), len(log)) == (0, -1)
