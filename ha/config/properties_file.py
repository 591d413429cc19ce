"""Parses Java's properties format (java.util.Properties.load), the format of RocketMQ's broker.conf.

    key=value   key: value   key value   a backslash at the end continues a line   # and ! start a comment line
    \\t \\n \\r \\f \\uXXXX are escapes; a backslash before any other character is dropped

Two differences: the text is UTF-8 (Java: Latin-1), and spaces at the end of a value are removed, because RocketMQ
silently ignores a number that is followed by a space, and keeps the default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_BLANKS = " \t\f"
_SEPARATOR = re.compile(r"(?P<key>(?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(?P<value>.*)", re.DOTALL)


def parse_properties(text: str) -> list[tuple[str, str]]:
    """Returns (key, value) pairs in order, including repeated keys. Raises ValueError, with the line, for an invalid
    \\u escape.
    """
    pairs = []
    for number, line in _logical_lines(text):
        match = _SEPARATOR.fullmatch(line)
        assert match is not None  # the pattern matches any text
        try:
            pairs.append((_unescape(match["key"]), _unescape(match["value"]).rstrip()))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return pairs


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields (number of its first line, text) for each logical line. Skips comments and blank lines."""
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
