"""Both twins of the batch codec: the compiled one does what the one in Python does, whatever comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ha.errors import LocalProtocolError, RemoteProtocolError
from ha.protocol.batch import decode_batch, encode_batch
from ha.protocol.compiled import pure

from .twins import outcome

entries = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.binary(max_size=40), st.binary(max_size=40)))


@given(entries=entries)
def test_twins_write_alike(entries: list[tuple[int, bytes, bytes]]) -> None:
    assert encode_batch(entries) == pure(encode_batch)(entries)


@pytest.mark.parametrize("encode", [encode_batch, pure(encode_batch)], ids=["usual", "in Python"])
def test_properties_have_a_longest_size(encode: Callable[..., Any]) -> None:
    assert (
        encode([(1, b"a", b"p" * 32767)])
        == bytes(2) + b"\x80\x16" + bytes(11) + b"\x01\0\0\0\x01a\x7f\xff" + b"p" * 32767
    )
    with pytest.raises(LocalProtocolError, match="32768"):
        encode([(0, b"", b""), (0, b"a", b"p" * 32768)])


@given(entries=entries, cut=st.integers(0, 60), change=st.tuples(st.integers(0, 400), st.integers(0, 255)))
def test_twins_read_good_cut_and_changed_batches_alike(
    entries: list[tuple[int, bytes, bytes]], cut: int, change: tuple[int, int]
) -> None:
    raw = bytearray(encode_batch(entries))
    if entries:
        assert decode_batch(raw) == entries
    if change[0] < len(raw):
        raw[change[0]] = change[1]
    for got in (bytes(raw), bytes(raw[: max(0, len(raw) - cut)])):
        assert outcome(decode_batch, got) == outcome(pure(decode_batch), got)
        assert outcome(decode_batch, memoryview(got), count_max=2) == outcome(pure(decode_batch), got, count_max=2)


@given(raw=st.binary(max_size=200))
@example(b"\x80\x00\x00\x00" * 8)
@example(b"\x7f\xff\xff\xff" * 8)
@example(b"\x00\x00\x00\x16" + bytes(12) + b"\x7f\xff\xff\xff" + bytes(2))
@example(b"\x00\x00\x00\x16" + bytes(12) + b"\xff\xff\xff\xff" + bytes(2))
@example(b"\x00\x00\x00\x16" + bytes(16) + b"\xff\xff" + bytes(40))
def test_twins_read_any_bytes_alike(raw: bytes) -> None:
    assert outcome(decode_batch, raw) == outcome(pure(decode_batch), raw)


@pytest.mark.parametrize("decode", [decode_batch, pure(decode_batch)], ids=["usual", "in Python"])
def test_a_batch_has_at_most_so_many_messages(decode: Callable[..., Any]) -> None:
    raw = encode_batch([(0, b"a", b"")] * 3)
    assert len(decode(raw, count_max=3)) == 3
    with pytest.raises(RemoteProtocolError, match="more than 2"):
        decode(raw, count_max=2)
