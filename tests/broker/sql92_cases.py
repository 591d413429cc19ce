"""Expressions of SQL92 filters, and properties to try them on, for tests of the compiler and of RocketMQ's own.

Each expression is tried on each set of PROPERTIES. A verdict is a letter: T is true (the message is wanted), "-" is
false, unknown, or an exception while evaluating; E is no expression.
"""

import random
from collections.abc import Mapping, Sequence

from ha.broker.sql92 import FilterSyntaxError, compile_filter

PROPERTIES: tuple[Mapping[str, str], ...] = (
    {},
    {"a": "1", "b": "2", "c": "abc"},
    {"a": "5", "b": "5.0", "c": "5"},
    {"a": "-3", "b": "1e2", "c": "it's"},
    {"a": "abc", "b": "abc", "c": ""},
    {"a": "true", "b": "FALSE", "c": "True"},
    {"a": "3000000000", "b": "-2147483648", "c": "9223372036854775807"},
    {"a": "+7", "b": " 7 ", "c": "7d"},
    {"a": "007", "b": "0x1p3", "c": "NaN"},
    {"a": "\u0661\u0662", "b": "-0.0", "c": "\u4e2d\u6587"},
    {"a": "10", "c": "TagA", "TAGS": "TagA", "_x$1": "y"},
    {"b": "Infinity", "c": "1_000", "a": "12345678901234567890123"},
)

SINGLE: tuple[str, ...] = (
    # equality
    "a = 1", "a = 1.0", "a = '1'", "a = 1L", "a = 5", "a = 5.0", "1 = a", "1.0 = a", "'1' = a", "a = b", "b = a",
    "a <> 1", "a <> '1'", "a <> b", "a <> 5.0", "a = TRUE", "TRUE = a", "a = FALSE", "b = false", "a <> TRUE",
    "1 = 1", "1 = 1.0", "1 = 2", "'x' = 'x'", "'x' = 1", "1 = 'x'", "TRUE = TRUE", "TRUE = FALSE", "TRUE = 1",
    "1 = TRUE", "'true' = TRUE", "TRUE = 'true'", "a = NULL", "NULL = a", "NULL = NULL", "a <> NULL", "a = 1 = TRUE",
    "a = b = c", "(a = 1) = (b = 2)", "(a = 1) <> (b = 2)", "-a = -1", "-a = 1", "-(a) IS NULL", "-TRUE = TRUE",
    "a = 3000000000", "a = 3000000000L", "3000000000 = a", "c = 9223372036854775807", "c = 9223372036854775808",
    "b = -2147483648", "b = -2147483648L", "a = 2147483647", "a = 2147483648", "a = 12", "a = 7", "a = 0",
    "b = 8.0", "b = 7.0", "c = 7.0", "c = 7", "b = 100.0", "b = 0.5", "5.0 = 5", "3000000000 = 3000000000.0",
    # sizes
    "a > 0", "a > 1", "a >= 1", "a < 1", "a <= 1", "a > 1.5", "a > -5", "a > -5.5", "a > +4", "0 < a", "10 > a",
    "a > b", "a >= b", "a < b", "a <= b", "b > a", "a > 'x'", "'x' > a", "a > TRUE", "a > NULL", "a > (b = 2)",
    "a > 0 > 1", "a > 0.0", "a > .5", "a > 5.", "a > 1e0", "a > 1E1", "a > 1e400", "a > 1e-400", "a > 00", "a > 007",
    "a > 2147483648", "a > 5L", "a > 5l", "a > 0L", "c > 1.0", "c >= 1.0", "c < 1.0", "c = 1.0", "b < 1.0", "b > 1e308",
    "a > c", "c > c", "c >= c", "b = b", "-5 > a", "a < -(2)", "a < - -2", "- 'x' IS NULL", "5 > 3", "3 > 5",
    # between
    "a BETWEEN 1 AND 5", "a between 1 and 5", "a NOT BETWEEN 1 AND 5", "a BETWEEN 5 AND 1", "a BETWEEN 1 AND 1",
    "a NOT BETWEEN 5 AND 1", "a BETWEEN -5 AND 5", "a BETWEEN 5 AND -5", "a BETWEEN b AND 10", "a BETWEEN 0 AND b",
    "a BETWEEN 'a' AND 'z'", "a BETWEEN 'z' AND 'a'", "a BETWEEN 1 AND NULL", "a BETWEEN 1.5 AND 6",
    "a BETWEEN 1 AND 'z'", "a BETWEEN TRUE AND FALSE", "a NOT BETWEEN NULL AND 1", "a NOT BETWEEN 'a' AND 'z'",
    "a BETWEEN 1 AND 5 AND b BETWEEN 1 AND 6", "5 BETWEEN 1 AND a", "a BETWEEN 1 AND 5 = TRUE", "a BETWEEN 1 OR 5",
    "NOT a BETWEEN 1 AND 5", "NOT (a BETWEEN 1 AND 5)",
    # in
    "c IN ('abc')", "c IN ('x', 'abc', '5')", "c NOT IN ('abc')", "c not in ('abc', 'TagA')", "c IN ()", "c IN (1)",
    "c IN ('a','b','c','d','e','abc')", "c NOT IN ('a','b','c','d','e','abc')", "(c) IN ('abc')", "'abc' IN ('abc')",
    "-a IN ('1')", "c IN ('it''s')", "c IN ('')", "c IN 'abc'", "c IN ('abc',)", "c IN (c)", "+c IN ('abc')",
    "(c IN ('abc')) IN ('x')", "c IN ('abc') AND a IN ('1')", "NOT c IN ('abc')", "NOT (c IN ('abc'))",
    # null
    "a IS NULL", "a IS NOT NULL", "a is null", "missing IS NULL", "missing IS NOT NULL", "NULL IS NULL", "5 IS NULL",
    "(a > 1) IS NULL", "(a = 1) IS NOT NULL", "a IS NULL IS NULL", "a IS NULL = FALSE", "a IS", "a IS NOT", "a IS 5",
    "a IS NOT 5", "NOT a IS NULL", "(NOT a) IS NULL", "missing = 1 IS NULL", "TRUE IS NULL", "a NOT NULL",
    # text
    "c CONTAINS 'b'", "c contains 'ab'", "c NOT CONTAINS 'b'", "c CONTAINS ''", "c NOT CONTAINS ''", "c CONTAINS b",
    "'abc' CONTAINS 'b'", "5 CONTAINS '5'", "missing CONTAINS 'a'", "missing NOT CONTAINS 'a'", "(a = 1) CONTAINS 't'",
    "NOT missing CONTAINS 'a'", "NOT (missing CONTAINS 'a')", "c CONTAINS 'b' CONTAINS 'c'", "c CONTAINS '''s'",
    "c STARTSWITH 'a'", "c NOT STARTSWITH 'a'", "c STARTSWITH ''", "c NOT STARTSWITH ''", "missing STARTSWITH 'a'",
    "missing NOT STARTSWITH 'a'", "5 STARTSWITH '5'", "c ENDSWITH 'c'", "c NOT ENDSWITH 'c'", "c ENDSWITH ''",
    "missing NOT ENDSWITH 'a'", "c startswith 'Tag' and c endswith 'A'", "'abc' ENDSWITH 'c'", "-5 CONTAINS '5'",
    "c STARTSWITH 5", "c CONTAINS ('b')",
    # logic
    "a", "NOT a", "missing", "NOT missing", "TRUE", "FALSE", "NULL", "NOT NULL", "NOT TRUE", "5", "'x'", "-a", "+a",
    "NOT 5", "a AND b", "a OR b", "a AND 5", "5 OR a", "NOT NOT a", "NOT NOT (a = 1)", "NOT -a", "NOT (a)", "(a)",
    "a = 1 AND b = 2", "a = 1 OR b = 5.0", "a = 1 AND missing = 2", "a = 1 OR missing = 2", "missing = 1 OR a = 1",
    "missing = 1 AND a = 1", "NOT (a = 1 AND missing = 2)", "NOT (a = 1 OR missing = 2)", "NOT (missing = 1)",
    "a = 1 OR a = 5 OR a = 10", "a = 1 OR b = 2 AND c = 'x'", "(a = 1 OR b = 2) AND c = 'x'", "a > 1 OR c = 'abc'",
    "c = 'abc' OR a > 1", "a > 1 AND c = 'abc'", "c = 'nope' AND a > 1", "TRUE OR a > 1", "FALSE AND a > 1",
    "NULL OR TRUE", "NULL AND TRUE", "NULL AND FALSE", "NOT (NULL AND FALSE)", "NOT (NULL OR FALSE)", "TRUE AND a",
    "NOT a = 1", "NOT a > 1", "NOT (a > 1) AND b = 2", "a = 1 AND NOT b = 2", "a = 1 AND NOT (b = 2)",
    "((((a = 1))))", "(a = 1) OR ((b = 2) AND (NOT (c = 'x')))", "missing = other", "missing <> other", "a <> missing",
    # words and marks
    "index = 'x'", "notes = 'x'", "IN = 'x'", "_x$1 = 'y'", "TAGS = 'TagA'", "tags = 'TagA'", "$ = 1", "1a = 1",
    "a=1", "a  =\t1\r\n", "a\f=1", "a -- comment\n = 1", "a -- comment", "a = 1 -- comment", "a /* x */ = 1",
    "a = 1 /* open", "a/**/=/***/1", "a /* * / */ = 1", "a == 1", "a != 1", "a => 1", "a =< 1", "a < > 1", "a <>1",
    "a >= = 1", "", " ", "()", "(a = 1", "a = 1)", "a = 1 b = 2", "a = 1;", "a = 1 @", "a @ 1", "a LIKE 'x%'",
    "a = 'x", "a = ''", "c = ''", "a = 'x''y'", "a = ''''", "a = \"x\"", "a.b = 1", "a + 1 = 2", "a - 1 = 2",
    "a * 2 = 2", "a = 1 AND", "AND a = 1", "a = = 1", "a = 1 1", "a = 1 'x'", "a = 1 (b", "(a = 1 b)", "a NOT 5",
    "a = 1 NOT", "a = 0x10", "a = 010", "\u4e2d = 1", "c = '\u4e2d\u6587'", "a = 1 \u4e2d", "c CONTAINS '\u4e2d'",
    "\u0131S = 1", "a I\u017f NULL", "a = 1\u00a0", "a between 1 and", "a IN ('x'", "+ + a = 1", "- + a = 1",
    "+ -5 < a",
)  # fmt: skip


def verdicts_of(expression: str) -> str:
    """The verdicts of our compiler: a letter for each set of PROPERTIES."""
    try:
        is_wanted = compile_filter(expression)
    except FilterSyntaxError:
        return "E" * len(PROPERTIES)
    return "".join("T" if is_wanted(properties) else "-" for properties in PROPERTIES)


class Chance:
    """Generates random expressions, valid and invalid. Equal seeds give equal expressions."""

    def __init__(self, seed: int, *, has_texts: bool = True) -> None:
        """`has_texts`: with CONTAINS, STARTSWITH and ENDSWITH, which 4.9 does not know."""
        self._random = random.Random(seed)
        self._has_texts = has_texts

    def _one(self, *choices: str) -> str:
        return self._random.choice(choices)

    def _value(self) -> str:
        kind = self._random.random()
        if kind < 0.5:
            return self._one("a", "b", "c", "missing")
        if kind < 0.75:
            return self._one("1", "5", "-3", "5.0", "1e2", "7L", "3000000000", "+7", "0", "-2147483648")
        if kind < 0.9:
            return self._one("'abc'", "'5'", "''", "'it''s'", "'true'")
        if kind < 0.95:
            return self._one("TRUE", "FALSE", "NULL")
        return self._one("-a", "(a)", "+b", f"({self.condition(1)})")

    def _list(self) -> str:
        return ",".join(self._one("'abc'", "'5'", "'1'", "''", "'true'") for _ in range(self._random.randint(1, 6)))

    def condition(self, depth: int = 3) -> str:
        """An expression with conditions nested at most `depth` deep."""
        kind = self._random.random()
        if depth > 0 and kind < 0.45:
            joined = f" {self._one('AND', 'OR')} ".join(
                self.condition(depth - 1) for _ in range(self._random.randint(2, 4))
            )
            return self._one("{}", "({})", "({})", "NOT ({})").format(joined)
        value = self._value()
        if kind < 0.75:
            return f"{value} {self._one('=', '<>', '<', '<=', '>', '>=')} {self._value()}"
        negation = self._one("", "NOT ")
        if kind < 0.82:
            return f"{value} IS {negation}NULL"
        if kind < 0.88:
            return f"{value} {negation}IN ({self._list()})"
        if kind < 0.94 or not self._has_texts:
            return f"{value} {negation}BETWEEN {self._value()} AND {self._value()}"
        text = self._one("'b'", "''", "'abc'")
        return f"{value} {negation}{self._one('CONTAINS', 'STARTSWITH', 'ENDSWITH')} {text}"

    def expressions(self, count: int) -> Sequence[str]:
        """Generates `count` expressions, some of them truncated."""
        made = []
        for _ in range(count):
            text = self.condition()
            made.append(text[: self._random.randrange(len(text))] if self._random.random() < 0.05 else text)
        return made
