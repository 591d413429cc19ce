"""Parses options of the source and the sink: names in any case, and values (numbers, times, sizes, choices, JSON).

A table maps each option to a field of an options struct and to a `Reader` of its text; the struct has the defaults.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ha.errors import OptionError

_DURATION_MS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SIZE_BYTES = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
_LARGEST = 10**18 - 1
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_OFFSETS_FORM = 'earliest, latest, or JSON such as {"flights":{"0":23,"1":-2}} (-2 earliest, -1 latest)'
_TIMES_FORM = 'JSON such as {"flights":{"0":1700000000000}}, in ms since 1970'
JSON_FORMS = {
    "startingOffsets": _OFFSETS_FORM,
    "endingOffsets": _OFFSETS_FORM,
    "startingOffsetsByTimestamp": _TIMES_FORM,
    "endingOffsetsByTimestamp": _TIMES_FORM,
    "assign": 'JSON such as {"flights":[0,1]} or {"flights":["broker-a:0"]}',
    "paths": 'JSON such as ["data/a","data/b"]',
}
"""JSON option -> accepted form, for error messages"""
QUEUE_TEXT = re.compile(r"(?:.+:)?\d{1,9}")
"""Matches the name of a queue: `<queue id>` or `<broker name>:<queue id>`."""

Reader = Callable[[str, str], Any]
"""Returns the value of an option, given its name and its text, which is not empty. Raises OptionError if it is
invalid."""
Table = Mapping[str, tuple[str, Reader]]
"""Option -> field of the options struct, and reader."""


def known_option(key: str, names: Mapping[str, str], purpose: str) -> str:
    """Returns the canonical name of the option `key`, which may be in any case.

    `names`: canonical names by lower-case name. `purpose`: what the options are for, such as "reading", for
    the error message. Raises OptionError for an unknown option, and suggests a similar name if there is one.
    """
    lower = key.lower()
    if lower in names:
        return names[lower]
    close = difflib.get_close_matches(lower, names, n=1, cutoff=0.75)
    hint = f"did you mean {names[close[0]]}? All: " if close else ""
    every = ", ".join(sorted(names.values(), key=str.lower))
    raise OptionError(key, f"no option for {purpose} has this name", hint + every)


def words(name: str, text: str) -> tuple[str, ...]:
    """Returns the comma-separated names in `text`. A `Reader`, like `servers` and `flag`.

    Raises OptionError if `text` contains no name.
    """
    found = tuple(word for word in (part.strip() for part in text.split(",")) if word)
    if not found:
        raise OptionError(name, f"{text!r} names nothing", "names, separated by commas")
    return found


def tag_expression(name: str, text: str) -> frozenset[str] | None:
    """Returns the tags in `text`, which are joined by "||" as in RocketMQ's subscriptions, so that a comma is a part of
    a tag; None if it is "*", which stands for all messages. A `Reader`, like `keys`.

    Raises OptionError if `text` contains no tag.
    """
    from ha.client.subscription import wanted_tags  # the client is needed only with tags

    try:
        return wanted_tags(text)
    except ValueError:
        raise OptionError(name, f"{text!r} names no tag", "tags joined by ||, such as UA || DL") from None


def keys(name: str, text: str) -> frozenset[str]:
    """Returns the keys in `text`, which are separated by spaces as in a message's property KEYS."""
    return frozenset(text.split())


def servers(name: str, text: str) -> tuple[str, ...]:
    """Returns the name servers in `text`: addresses (host:port) separated by commas or semicolons.

    The SDK and the command line accept the same syntax.
    """
    from ha.client.options import name_server_addresses  # the client is needed only with servers

    try:
        return name_server_addresses(text)
    except ValueError as error:
        raise OptionError(name, str(error), "name servers as host:port, separated by commas or semicolons") from None


def topic_name(name: str, text: str) -> str:
    """Returns `text`, which must be the name of a topic or group. A `Reader`."""
    if _TOPIC.fullmatch(text) is None:
        raise OptionError(name, f"{text!r} can't be one", "1 to 127 of A-Z a-z 0-9 _ - % |")
    return text


def choice(*choices: str) -> Reader:
    """Returns a reader of one of `choices` (lower case). The text may be in any case; the value is in lower case."""

    def read(name: str, text: str) -> str:
        if text.lower() not in choices:
            raise OptionError(name, f"{text!r} is none of its values", " or ".join(choices))
        return text.lower()

    return read


def flag(name: str, text: str) -> bool:
    """Returns whether `text` is "true", in upper or lower case. Raises OptionError for all texts but "true" and
    "false"."""
    return bool(choice("true", "false")(name, text) == "true")


def count(least: int = 1, most: int = _LARGEST) -> Reader:
    """Returns a reader of whole numbers from `least` to `most`."""
    accepted = f"a whole number from {least} on" if most == _LARGEST else f"{least} to {most}"

    def read(name: str, text: str) -> int:
        if re.fullmatch(r"\d{1,18}", text) is None or not least <= int(text) <= most:
            raise OptionError(name, f"{text!r} is not such a number", accepted)
        return int(text)

    return read


def _scaled(units: Mapping[str, int], least: int, most: int, accepted: str) -> Reader:
    """Returns a reader of a whole number with an optional unit; its value is the number times the factor of the unit.

    `units`: unit -> factor, with "" for a number without a unit. `least` and `most` are the bounds of the value;
    `accepted` describes valid texts, for the error message.
    """

    def read(name: str, text: str) -> int:
        found = re.fullmatch(r"(\d{1,15})\s*([a-z]*)", text.lower())
        if found is None or found[2] not in units or not least <= int(found[1]) * units[found[2]] <= most:
            raise OptionError(name, f"{text!r} can't be read", accepted)
        return int(found[1]) * units[found[2]]

    return read


def milliseconds(
    least: int = 0, most: int = _LARGEST, accepted: str = "a time such as 500ms, 30s, 15m or 2h"
) -> Reader:
    """Returns a reader of times from `least` to `most` ms, in ms; a number without a unit is in ms."""
    return _scaled(_DURATION_MS, least, most, accepted)


def seconds(least: float, most: float, accepted: str) -> Reader:
    """Returns a reader of times from `least` to `most` seconds, in seconds; a number without a unit is in ms."""
    read = milliseconds(round(least * 1000), round(most * 1000), accepted)
    return lambda name, text: read(name, text) / 1000


def size(
    least: int = 1,
    most: int = _LARGEST,
    accepted: str = "a size above 0 in bytes, such as 1048576, 512k, 64m or 1g",
) -> Reader:
    """Returns a reader of sizes from `least` to `most`, in bytes."""
    return _scaled(_SIZE_BYTES, least, most, accepted)


class GivenOptions:
    """The given options by their canonical names. Methods raise OptionError for an empty or invalid value."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = {name: str(value).strip() for name, value in values.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str) -> str | None:
        """Returns the option's text; None if it was not given."""
        value = self.values.get(name)
        if value == "":
            raise OptionError(name, "it is empty", "a value, or leave the option out")
        return value

    def read(self, name: str, reader: Reader) -> Any:
        """Returns the option's value; None if it was not given."""
        text = self.text(name)
        return None if text is None else reader(name, text)

    def fields(self, table: Table) -> dict[str, Any]:
        """Returns the values of those options of `table` that were given, by field."""
        return {field: self.read(name, reader) for name, (field, reader) in table.items() if name in self}

    def json_object(self, name: str) -> dict[str, Any]:
        """Returns the JSON object that the option, one of JSON_FORMS, contains; it must be given."""
        value = self.text(name)
        assert value is not None
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise OptionError(name, f"it is no JSON ({error})", JSON_FORMS[name]) from None
        if not isinstance(found, dict):
            raise OptionError(name, f"it is JSON, but no object: {value}", JSON_FORMS[name])
        return found
