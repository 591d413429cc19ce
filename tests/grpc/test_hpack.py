"""Header blocks, against the encoder of the package hpack."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.errors import RemoteProtocolError
from ha.grpc.hpack import TABLE_SIZE_MAX, HeaderDecoder, decode_huffman

NAMES = st.sampled_from([b":path", b"x-mq-client-id", b"x-mq-request-id", b"grpc-timeout"]) | st.binary(max_size=12)
HEADERS = st.lists(st.tuples(NAMES, st.binary(max_size=300), st.booleans()), max_size=12)


@given(st.lists(st.tuples(HEADERS, st.booleans()), max_size=8))
def test_blocks_of_another_encoder(lists: list[tuple[list[tuple[bytes, bytes, bool]], bool]]) -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(1 << 20)
    for headers, is_huffman in lists:
        block = encoder.encode(
            [hpack.NeverIndexedHeaderTuple(n, v) if s else (n, v) for n, v, s in headers], is_huffman
        )
        assert decoder.decode(block) == [(name, value) for name, value, _ in headers]


def test_table_of_another_size() -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder(1 << 20)
    for size in (TABLE_SIZE_MAX, 100, 0, 2000):
        encoder.header_table_size = size
        for value in (b"a" * 30, b"b" * 30, b"a" * 30):
            assert decoder.decode(encoder.encode([(b"name", value)])) == [(b"name", value)]


def test_table_size_that_was_not_offered() -> None:
    encoder = hpack.Encoder()
    encoder.header_table_size = TABLE_SIZE_MAX + 1
    with pytest.raises(RemoteProtocolError, match="table size"):
        HeaderDecoder(1 << 20).decode(encoder.encode([(b"a", b"b")]))


def test_headers_beyond_the_limit() -> None:
    """The list is refused, and the table stays that of the encoder."""
    encoder, decoder = hpack.Encoder(), HeaderDecoder(200)
    assert decoder.decode(encoder.encode([(b"a", b"x" * 50), (b"b", b"y" * 100)])) is None
    assert decoder.decode(encoder.encode([(b"a", b"x" * 50)])) == [(b"a", b"x" * 50)]


@pytest.mark.parametrize(
    "code",
    [b"\xff\xff\xff\xff", b"\xff", b"\x00"],
    ids=["the end-of-string symbol", "eight bits of padding", "padding of zeros"],
)
def test_invalid_huffman_codes(code: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_huffman(code)
