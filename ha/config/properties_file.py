"""Java's properties format (java.util.Properties.load), as RocketMQ's broker.conf is written in it. Text in, pairs out.

    key=value   key: value   key value   a line continues behind a backslash at its end   # and ! begin a comment line
    \\t \\n \\r \\f \\uXXXX are the characters they stand for; before anything else a backslash is dropped

Two departures: the text is UTF-8 (Java: Latin-1), and blanks at the end of a value are dropped, where RocketMQ takes a
number followed by a blank for no number and silently keeps the default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_BLANKS = " \t\f"
_SEPARATOR = re.compile(r"(?P<key>(?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(?P<value>.*)", re.DOTALL)


def parse_properties(text: str) -> list[tuple[str, str]]:
    """The (key, value) pairs in order, repeated keys included. ValueError, naming the line, for a bad \\u escape."""
    pairs = []
    for number, line in _logical_lines(text):
        match = _SEPARATOR.fullmatch(line)
        assert match is not None  # the pattern takes any text
        try:
            pairs.append((_unescape(match["key"]), _unescape(match["value"]).rstrip()))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return pairs


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations joined, without comments and empty ones; with the number of the first."""
    parts: list[str] = []
    first = 0
    for number, natural in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        line = natural.lstrip(_BLANKS)
        if not parts:
            if not line or line[0] in "#!":
                continue
            first = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            parts.append(line[:-1])
            continue
        parts.append(line)
        yield first, "".join(parts)
        parts = []
    if parts:
        yield first, "".join(parts)


def _unescape(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        escape = match[1]
        if escape[0] != "u":
            return _CONTROL.get(escape, escape)
        if len(escape) == 1:
            raise ValueError("\\u must be followed by four hexadecimal digits")
        return chr(int(escape[1:], 16))

    return _ESCAPE.sub(character, text) if "\\" in text else text
