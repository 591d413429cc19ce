"""TAG expressions: remoting §4 "Filter TAG" and the transcript's rows about tags."""

from __future__ import annotations

import pytest

from ha.broker.subscription import TAG_COUNT_MAX, is_tag_type, parse_tag_expression
from ha.errors import RemoteProtocolError

TAG_A = 2598919  # vectors §3: hash of "TagA"


@pytest.mark.parametrize("expression", ["*", "", None, "  ", " * "])
def test_everything(expression: str | None) -> None:
    assert parse_tag_expression(expression) is None


@pytest.mark.parametrize("expression", ["TagA", " TagA ", "TagA||TagA", "|| TagA ||"])
def test_one_tag(expression: str) -> None:
    assert parse_tag_expression(expression) == frozenset({TAG_A})


def test_several_tags_are_trimmed() -> None:
    assert parse_tag_expression(" TagA || a||b") == frozenset({TAG_A, 97, 98})


@pytest.mark.parametrize("expression", ["||", " || || "])
def test_no_tag_at_all_is_refused(expression: str) -> None:
    with pytest.raises(RemoteProtocolError, match="names no tag"):
        parse_tag_expression(expression)


def test_too_many_tags_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="1025 tags"):
        parse_tag_expression("||".join(map(str, range(TAG_COUNT_MAX + 1))))


def test_absent_type_is_tag() -> None:
    assert is_tag_type(None)
    assert is_tag_type("")
    assert is_tag_type("TAG")
    assert not is_tag_type("SQL92")
