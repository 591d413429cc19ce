"""Formats log records as JSON, one object per line, for log collectors.

This project logs `component.event key=value …` with the values as arguments, so the format string tells which argument
belongs to which field. An object has `time` (UTC), `level`, `logger`, `event`, the fields (numbers, booleans and None
as such, other values as text), `message` (the message of the text format) and, if there is one, `exception`. A field
with one of these names gets a `_` appended: `level_`. A record whose first word is not a name (`_NAME`), such as one of
another library, has neither `event` nor fields.
"""

from __future__ import annotations

import json
import logging
import re
import time
from functools import lru_cache

_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.(\d+))?([a-zA-Z%])")
_PAIR = re.compile(rf'(?<![\w.%])([A-Za-z_]\w*)=(?:"([^"]*)"|((?:{_CONVERSION.pattern}|[^\s%])+))')
_EVENT = re.compile(rf"((?:{_CONVERSION.pattern}|[^\s%])+)")
_NAME = re.compile(r"[a-z][\w.]*")
_KEYS = frozenset({"time", "level", "logger", "event", "message", "exception"})

Place = tuple[str, int, int]
"""A part of a format string, the index of the first logging argument that it formats, and the number of arguments that
it formats."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object in ASCII, without a line break."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns `record` as one line of JSON."""
        message = record.getMessage()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
        }
        entry |= _fields(record)
        entry["message"] = message
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Returns the event and its fields; {} if the record has no event."""
    arguments = record.args or ()
    if not isinstance(record.msg, str) or not isinstance(arguments, tuple):
        return {}
    event, pairs = _parse(record.msg)
    name = _value(event, arguments)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return {}
    fields = {f"{key}_" if key in _KEYS else key: _value(place, arguments) for key, place in pairs}
    return {"event": name} | fields


@lru_cache(1024)
def _parse(template: str) -> tuple[Place, tuple[tuple[str, Place], ...]]:
    """Finds the event and the fields in a format string."""

    def place(begin: int, text: str) -> Place:
        text = text.rstrip(",;:")
        return text, _count(template[:begin]), _count(text)

    event = _EVENT.match(template)
    pairs = tuple(
        (pair[1], place(pair.start(2), pair[2]) if pair[2] is not None else place(pair.start(3), pair[3]))
        for pair in _PAIR.finditer(template)
    )
    return place(0, event[0] if event else ""), pairs


def _count(text: str) -> int:
    return sum(conversion[2] != "%" for conversion in _CONVERSION.finditer(text))


def _value(place: Place, arguments: tuple[object, ...]) -> object:
    """Returns a number, boolean or None itself if it is the whole value, otherwise the formatted text."""
    text, first, count = place
    if not arguments:  # then logging does not format the message either
        return text
    alone = _CONVERSION.fullmatch(text)
    if alone is None or count != 1:
        return text % arguments[first : first + count]
    argument = arguments[first]
    if argument is None or isinstance(argument, bool | int | float):
        return argument
    return str(argument)[: int(alone[1])] if alone[1] else str(argument)
