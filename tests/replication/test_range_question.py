"""The range question, which only a halog master understands, byte by byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.protocol.ha_frame import TransferHeader, TransferParser
from ha.replication.range_question import RANGE_QUESTION, OpeningParser, encode_range_answer


def test_the_question_is_a_report_of_minus_one() -> None:
    assert int.from_bytes(RANGE_QUESTION, "big", signed=True) == -1


def test_the_answer_is_two_heartbeats() -> None:
    events = list(TransferParser().feed(encode_range_answer(4096, 9000)))
    assert events == [TransferHeader(4096, 0), TransferHeader(9000, 0)]


@pytest.mark.parametrize("size", [1, 3, 8, 16, 24])
def test_the_question_is_found_in_chunks_of_any_size(size: int) -> None:
    stream = RANGE_QUESTION + (7).to_bytes(8, "big")
    parser = OpeningParser()
    passed = b"".join(bytes(parser.feed(stream[at : at + size])) for at in range(0, len(stream), size))
    assert parser.is_question
    assert passed == (7).to_bytes(8, "big")


@given(st.lists(st.binary(max_size=12)))
def test_anything_else_passes_through_unchanged(chunks: list[bytes]) -> None:
    parser = OpeningParser()
    stream = b"".join(chunks)
    passed = b"".join(bytes(parser.feed(chunk)) for chunk in chunks)
    if stream.startswith(RANGE_QUESTION):
        assert parser.is_question
        assert passed == stream[8:]
    elif len(stream) < 8 and RANGE_QUESTION.startswith(stream):
        assert passed == b""
    else:
        assert not parser.is_question
        assert passed == stream


def test_a_later_question_is_not_recognized() -> None:
    parser = OpeningParser()
    parser.feed(bytes(8))
    assert parser.feed(RANGE_QUESTION) == RANGE_QUESTION
    assert not parser.is_question
