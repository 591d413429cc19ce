"""SQL92 filters: verdicts equal to those of RocketMQ's own filter, and limits of expressions.

tests/fixtures/sql92/verdicts.tsv is what rocketmq-filter 5.5.0 said (tests/interop/test_sql92.py writes and checks it):
an expression as a Python literal, and a letter for each set of properties of `sql92_cases`.
"""

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ha.broker.sql92 import DEPTH_MAX, EXPRESSION_LENGTH_MAX, TERM_COUNT_MAX, FilterSyntaxError, compile_filter
from ha.broker.sql92.compiling import STACK_MAX
from tests.broker.sql92_cases import SINGLE, verdicts_of

TABLE = Path(__file__).parents[1] / "fixtures" / "sql92" / "verdicts.tsv"


def table() -> Iterator[tuple[str, str]]:
    for line in TABLE.read_text().splitlines():
        expression, _, verdicts = line.rpartition("\t")
        yield ast.literal_eval(expression), verdicts


def test_verdicts_equal_rocketmqs() -> None:
    """336 expressions on 12 sets of properties."""
    known = dict(table())
    assert list(known) == list(SINGLE)
    ours = {expression: verdicts_of(expression) for expression in known}
    assert {expression: each for expression, each in ours.items() if each != known[expression]} == {}


def refused(expression: str) -> str:
    with pytest.raises(FilterSyntaxError) as caught:
        compile_filter(expression)
    assert len(str(caught.value)) < 400
    return str(caught.value)


def test_errors_name_the_problem() -> None:
    assert refused("a = ") == "unexpected end in 'a = '"
    assert refused("a = = 1") == "unexpected '=' in 'a = = 1'"
    assert refused('a = "x"') == "unexpected '\"' in 'a = \"x\"'"
    assert "limits of BETWEEN are the wrong way round" in refused("a BETWEEN 5 AND 1")
    assert "IN looks at a property" in refused("'abc' IN ('abc')")
    assert "can't be compared" in refused("a = NULL")
    assert "only numbers and properties" in refused("a > 'x'")
    assert "where a condition has to be" in refused("5")
    assert "too large" in refused("a = 9223372036854775808")
    assert "too small" in refused("a > 0.0")


def test_length_is_bounded() -> None:
    padded = "a = 1".ljust(EXPRESSION_LENGTH_MAX)
    assert compile_filter(padded)({"a": "1"})
    assert "4096 are accepted" in refused(padded + " ")


def test_terms_are_bounded() -> None:
    many = " OR ".join(["a"] * TERM_COUNT_MAX)
    compile_filter(many)
    assert "more than 512 properties" in refused(many + " OR a")
    many_elements = ",".join(["'x'"] * 1000)
    assert compile_filter(f"a IN ({many_elements})")({"a": "x"}), "elements of a list are no terms"


def test_depth_is_bounded() -> None:
    at_most = "NOT " * (DEPTH_MAX - 1) + "a"
    assert compile_filter(at_most)({"a": "1"})
    assert "more than 64" in refused("NOT " * DEPTH_MAX + "a")
    assert "more than 64" in refused("a" + " IS NULL" * (DEPTH_MAX + 1))
    assert "more than 64" in refused("-" * 70 + "5 = 1")
    for opening in ("(", "-", "+", "NOT "):
        assert "too many parentheses" in refused(opening * (STACK_MAX + 1) + "a")
    chain = " AND ".join(["a = '1'"] * 250)
    assert compile_filter(chain)({"a": "1"}), "a chain is not deep"


def test_odd_numbers_in_properties() -> None:
    is_one = compile_filter("a = 1")
    assert is_one({"a": "0" * 30_000 + "1"})
    assert not is_one({"a": "1" * 30_000})
    assert not is_one({"a": "\U0001d7cf"}), "a digit beyond the basic plane is none to Java"
    is_infinite = compile_filter("a > 1e308")
    for text in ("1e999", "Infinity", "0x1p5000", "NaN"):
        assert is_infinite({"a": text}), text
    for text in ("inf", "nan", "1_0", "0x1", "", " ", "1e", "e1", "1" + "\u00a0"):
        assert not compile_filter("a > -1.0 OR NOT (a > -1.0)")({"a": text}), text


def test_long_digits_are_read_in_linear_time() -> None:
    """The time was quadratic: a property of 32,000 digits and a letter stopped the broker for half a minute."""
    is_wanted = compile_filter("a > 1.5")
    began = time.process_time()
    for text in (8000 * "1" + "x", "1." + 8000 * "1" + "x", 8000 * "1" + "." + 8000 * "1" + "e" + 8000 * "1" + "x"):
        assert not is_wanted({"a": text})
    assert is_wanted({"a": 300 * "1" + "." + 4000 * "1"})
    assert time.process_time() - began < 1
