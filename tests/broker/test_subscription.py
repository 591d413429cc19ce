"""TAG expressions."""

import pytest

from ha.broker.subscription import TAG_COUNT_MAX, is_tag_type, parse_tag_expression
from ha.errors import RemoteProtocolError

TAG_A = 2598919  # vectors §3: hash of "TagA"


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        *[(expression, None) for expression in ("*", "", None, "  ", " * ")],
        *[(expression, {TAG_A}) for expression in ("TagA", " TagA ", "TagA||TagA", "|| TagA ||")],
        (" TagA || a||b", {TAG_A, 97, 98}),
    ],
)
def test_selected_tags(expression: str | None, selected: set[int] | None) -> None:
    assert parse_tag_expression(expression) == selected


@pytest.mark.parametrize(
    ("expression", "error"),
    [("||", "names no tag"), (" || || ", "names no tag"), ("||".join(map(str, range(TAG_COUNT_MAX + 1))), "1025 tags")],
    ids=["none", "blank", "many"],
)
def test_invalid_expressions_are_refused(expression: str, error: str) -> None:
    with pytest.raises(RemoteProtocolError, match=error):
        parse_tag_expression(expression)


def test_absent_type_is_tag() -> None:
    assert [is_tag_type(each) for each in (None, "", "TAG", "SQL92")] == [True, True, True, False]
