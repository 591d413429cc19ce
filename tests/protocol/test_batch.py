"""The batch codec against the released client's bytes, and its compiled twins against the Python functions."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.batch import decode_batch, encode_batch
from ha.protocol.compiled import pure

BATCH = bytes.fromhex(
    "00000034000000000000000000000000000000026869001c4b455953016b30025741495401747275650254414753015461674102"
    "0000002200000000000000000000000700000002796f000a57414954017472756502"
)
ENTRIES = [(0, b"hi", b"KEYS\x01k0\x02WAIT\x01true\x02TAGS\x01TagA\x02"), (7, b"yo", b"WAIT\x01true\x02")]
BOTH = pytest.mark.parametrize("decode", [decode_batch, pure(decode_batch)], ids=["compiled", "Python"])

entries = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=40), st.binary(max_size=40)))


def test_batch_of_the_released_client() -> None:
    assert decode_batch(BATCH) == ENTRIES
    assert encode_batch(ENTRIES) == BATCH


@BOTH
def test_truncated_batch_is_refused(decode: Callable[..., Any]) -> None:
    for size in set(range(len(BATCH))) - {0x34}:
        with pytest.raises(RemoteProtocolError):
            decode(BATCH[:size])


@BOTH
@pytest.mark.parametrize(
    ("position", "value"),
    [
        (3, b"\x33"),
        (3, b"\x00"),
        (3, b"\x35"),
        (0, b"\xff"),
        (16, b"\xff"),
        (19, b"\x03"),
        (22, b"\xff\xff"),
        (16, b"\x7f"),
    ],
)
def test_batch_with_inconsistent_sizes_is_refused(decode: Callable[..., Any], position: int, value: bytes) -> None:
    damaged = bytearray(BATCH)
    damaged[position : position + len(value)] = value
    with pytest.raises(RemoteProtocolError):
        decode(damaged)


@given(entries=entries)
def test_twins_encode_alike(entries: list[tuple[int, bytes, bytes]]) -> None:
    assert encode_batch(entries) == pure(encode_batch)(entries)


@pytest.mark.parametrize("encode", [encode_batch, pure(encode_batch)], ids=["compiled", "Python"])
def test_properties_have_a_maximum_size(encode: Callable[..., Any]) -> None:
    assert (
        encode([(1, b"a", b"p" * 32767)])
        == bytes(2) + b"\x80\x16" + bytes(11) + b"\x01\0\0\0\x01a\x7f\xff" + b"p" * 32767
    )
    with pytest.raises(LocalProtocolError, match="32768"):
        encode([(0, b"", b""), (0, b"a", b"p" * 32768)])


@BOTH
def test_number_of_messages_is_limited(decode: Callable[..., Any]) -> None:
    raw = encode_batch([(0, b"a", b"")] * 3)
    assert len(decode(raw, count_max=3)) == 3
    with pytest.raises(RemoteProtocolError, match="more than 2"):
        decode(raw, count_max=2)
