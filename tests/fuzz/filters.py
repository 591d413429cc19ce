"""Conditions of subscriptions: SQL92 expressions over a message's properties."""

from ha.broker.sql92 import EXPRESSION_LENGTH_MAX, FilterSyntaxError, compile_filter
from tests.broker.sql92_cases import PROPERTIES, Chance
from tests.fuzz.harness import Harness


def expressions(data: bytes) -> None:
    """Any text: the one error, of bounded length, or a condition that says yes or no to any properties."""
    text = str(data, "utf-8", "replace")
    fault = ""
    try:
        is_wanted = compile_filter(text)
    except FilterSyntaxError as error:
        fault = str(error)
    assert len(fault) < 2100
    if fault:
        return
    assert len(text) <= EXPRESSION_LENGTH_MAX
    for properties in (*PROPERTIES, dict.fromkeys("abc", text[:200])):
        assert is_wanted(properties) in (True, False)


def seeds() -> list[bytes]:
    """Expressions by chance, and some that are deep or long."""
    by_chance = [text.encode() for text in Chance(1).expressions(60)]
    deep = [b"(" * 300 + b"a = 1" + b")" * 300, b"NOT " * 300 + b"a", b"-" * 300 + b"1 = 1", b"a" + b" IS NULL" * 300]
    wide = [b" AND ".join([b"a = '1'"] * 250), b"a IN (%b)" % b",".join([b"'x'"] * 900)]
    return [*by_chance, *deep, *wide, b"a = '" + b"'" * 2000]


WORDS = (
    b" AND ",
    b" OR ",
    b"NOT ",
    b" IS NULL",
    b" BETWEEN ",
    b" IN (",
    b" CONTAINS ",
    b" STARTSWITH ",
    b" <= ",
    b" <> ",
    b"TRUE",
    b"'a'",
    b"9223372036854775807",
    b"1e400",
    b"1L",
    b"-",
    b"((((((((",
)

HARNESSES = {
    "filter_expressions": Harness(run=expressions, seeds=seeds, words=WORDS, seconds_max=4.0, memory_max=16 << 20)
}
