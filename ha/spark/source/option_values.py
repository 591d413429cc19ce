"""Parses values of options: numbers, times, sizes, choices, JSON. Does not know which options there are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ha.errors import OptionError

_DURATION_MS = {
    "": 1,
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_SIZE_BYTES = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
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
"""Valid alternatives, for error messages"""
QUEUE_TEXT = re.compile(r"(?:[^:]+:)?\d{1,9}")


class GivenOptions:
    """The given options by their canonical names. Each method checks one value and raises OptionError."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = {name: str(value).strip() for name, value in values.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str) -> str | None:
        """Return the option's text; None if it was not given."""
        value = self.values.get(name)
        if value == "":
            raise OptionError(name, "it is empty", "a value, or leave the option out")
        return value

    def words(self, name: str) -> tuple[str, ...] | None:
        """Return the comma-separated names."""
        value = self.text(name)
        if value is None:
            return None
        words = tuple(word for word in (part.strip() for part in value.split(",")) if word)
        if not words:
            raise OptionError(name, f"{value!r} names nothing", "names, separated by commas")
        return words

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """Return one of `choices`, in any case."""
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in choices:
            raise OptionError(name, f"{value!r} is none of its values", " or ".join(choices))
        return value.lower()

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        return self.choice(name, ("true", "false"), "true" if default else "false") == "true"

    def count(self, name: str, *, least: int = 1) -> int | None:
        """Return a whole number of at least `least`."""
        value = self.text(name)
        if value is None:
            return None
        if re.fullmatch(r"\d{1,18}", value) is None or int(value) < least:
            raise OptionError(name, f"{value!r} is not such a number", f"a whole number from {least} on")
        return int(value)

    def scaled(self, name: str, units: Mapping[str, int], accepted: str, *, least: int = 0) -> int | None:
        """Return a number with one of the suffixes `units`."""
        value = self.text(name)
        if value is None:
            return None
        found = re.fullmatch(r"(\d{1,15})\s*([a-z]*)", value.lower())
        if found is None or found[2] not in units or int(found[1]) * units[found[2]] < least:
            raise OptionError(name, f"{value!r} can't be read", accepted)
        return int(found[1]) * units[found[2]]

    def milliseconds(self, name: str) -> int | None:
        """Return a time in ms."""
        return self.scaled(name, _DURATION_MS, "a time such as 500ms, 30s, 15m or 2h")

    def size(self, name: str) -> int | None:
        """Return a size in bytes."""
        return self.scaled(name, _SIZE_BYTES, "a size above 0 in bytes, such as 1048576, 512k, 64m or 1g", least=1)

    def json_object(self, name: str) -> dict[str, Any]:
        """Return a JSON object; the option must be given."""
        value = self.text(name)
        assert value is not None
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise OptionError(name, f"it is no JSON ({error})", JSON_FORMS[name]) from None
        if not isinstance(found, dict):
            raise OptionError(name, f"it is JSON, but no object: {value}", JSON_FORMS[name])
        return found
