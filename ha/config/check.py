"""Parses and checks values by the types of the configuration structs, and describes what a field accepts."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from ha.errors import ConfigError

from .secret import SecretStr

DERIVED = -1
"""Default of a number that depends on other keys; not a valid input."""

JAVA_RANGES = {"int": (-(2**31), 2**31 - 1), "long": (-(2**63), 2**63 - 1)}

PATTERN_WORDS = {
    r"^[^\s@#;,]*$": "a name of at most 127 characters without spaces, @ # ; or ,",
    r"^[A-Za-z0-9._:-]*$": "a host name or an IP address",
    r"^$|^[A-Za-z0-9._-]+:\d{1,5}(;[A-Za-z0-9._-]+:\d{1,5})*;?$": "host:port, several separated by ;",
    r"^$|^[A-Za-z0-9._-]+:\d{1,5}$": "host:port",
    r"^$|^https?://[A-Za-z0-9._-]+:\d{1,5}(;https?://[A-Za-z0-9._-]+:\d{1,5})*;?$": (
        "http://host:port or https://host:port, several separated by ;"
    ),
    r"^$|^https?://[^\s/]+(/\S*)?$": "a URL that starts with http:// or https://",
    r"^([01]?\d|2[0-3])(;([01]?\d|2[0-3]))*;?$": "hours from 00 to 23, several separated by ;",
    r"^[1-9]\d{0,8}[smhd]( +[1-9]\d{0,8}[smhd])*$": "times such as 30s 5m 2h 1d, separated by spaces",
}


@cache
def fields(struct: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    """Returns the struct's fields by key: its own first, then inherited ones."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    own = struct.__annotations__
    return {field.encode_name: field for field in sorted(info.fields, key=lambda field: field.name not in own)}


def parse(key: str, field_type: inspect.Type, text: str) -> Any:
    """Parses `text` as a value of `field_type`. Raises ConfigError for `key` if a boolean or number has the wrong form;
    `check_value` checks everything else."""
    match _without_none(field_type):
        case inspect.BoolType():
            if text.lower() not in ("true", "false"):
                raise ConfigError(key, f"{text!r} is not a boolean", "true or false")
            return text.lower() == "true"
        case inspect.IntType() as kind:
            return parse_integer(key, text, accepted(kind))
        case inspect.LiteralType(values=values):
            by_text = {str(value): value for value in values}
            return by_text.get(text, text)
        case inspect.CustomType(cls=cls) if cls is SecretStr:
            return SecretStr(text)
        case _:
            return text


def parse_integer(key: str, text: str, accepted_values: str) -> int:
    """Parses up to 40 decimal digits with an optional sign, like Java's parseInt, but does not check the range. Raises
    ConfigError for other text."""
    if not re.fullmatch(r"[+-]?[0-9]{1,40}", text):
        raise ConfigError(key, f"{text!r} is not an integer", accepted_values)
    return int(text)


def check_java(key: str, java_type: str, text: str) -> None:
    """Checks the value of a key that halog does not use against its Java type. Raises ConfigError if it does not
    match."""
    match java_type:
        case "boolean":
            parse(key, inspect.BoolType(), text)
        case "int" | "long":
            low, high = JAVA_RANGES[java_type]
            words = f"an integer from {low} to {high}"
            if not low <= parse_integer(key, text, words) <= high:
                raise ConfigError(key, f"{text} overflows a Java {java_type}", words)
        case "double" | "float":
            if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[dDfF]?", text):
                raise ConfigError(key, f"{text!r} is not a number", "a number such as 0.75")


def accepted(field_type: inspect.Type) -> str:
    """Describes the values that a field of this type accepts."""
    match _without_none(field_type):
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return ", ".join(str(value) for value in values)
        case inspect.IntType(ge=low, le=high):
            return f"an integer from {max(low or 0, 0)} to {high}"  # DERIVED is the only negative value
        case inspect.StrType(pattern=str(pattern)):
            return PATTERN_WORDS[pattern]
        case inspect.CustomType(cls=cls) if cls is SecretStr:
            return "text, which is never displayed"
        case _:
            return "text"


def check_bounds(config: msgspec.Struct) -> list[ConfigError]:
    """Returns an error for each value that its type does not allow. msgspec's constructor does not check."""
    errors = []
    for key, field in fields(type(config)).items():
        value = getattr(config, field.name)
        if not (field.default == DERIVED and value == DERIVED):
            errors += check_value(key, field.type, value)
    return errors


def check_addresses(key: str, addresses: str) -> list[ConfigError]:
    """Returns an error for each port that is not from 1 to 65535. `addresses` are separated by ; and their format must
    be valid."""
    return [
        ConfigError(key, f"{address} has an invalid port", "addresses with ports from 1 to 65535")
        for address in addresses.split(";")
        if address and not 1 <= int(address.rpartition(":")[2]) <= 65_535
    ]


def check_value(key: str, field_type: inspect.Type, value: object) -> list[ConfigError]:
    """Returns an error if the type does not allow the value."""
    reason = _wrong(field_type, value)
    return [] if reason is None else [ConfigError(key, reason, accepted(field_type))]


def _wrong(field_type: inspect.Type, value: object) -> str | None:
    if value is None and isinstance(field_type, inspect.UnionType):
        return None
    match _without_none(field_type):
        case inspect.CustomType(cls=cls) if cls is SecretStr:
            if not isinstance(value, SecretStr):
                return "it is not a SecretStr"  # without showing the value
            return None if _is_utf8(value.reveal()) else "it is not UTF-8 text"
        case inspect.BoolType():
            return None if isinstance(value, bool) else f"{value!r} is not a boolean"
        case inspect.LiteralType(values=values):
            return None if value in values and not isinstance(value, bool) else f"{value!r} is not one of them"
        case inspect.IntType(ge=low, le=high):
            if not isinstance(value, int) or isinstance(value, bool):
                return f"{value!r} is not an integer"
            if high is not None and value > high:
                java_type = next((name for name, (_, top) in JAVA_RANGES.items() if top == high), None)
                return f"{value} is too large" if java_type is None else f"{value} overflows a Java {java_type}"
            return f"{value} is too small" if value < max(low or 0, 0) else None
        case inspect.StrType(pattern=pattern, max_length=length):
            if not isinstance(value, str):
                return f"{value!r} is not text"
            if any(ord(character) < 32 for character in value) or not _is_utf8(value):
                return f"{value!r} contains characters that are not UTF-8 text"
            if length is not None and len(value) > length:
                return f"{value[:20]}… has {len(value)} characters"
            return None if pattern is None or re.search(pattern, value) else f"{value!r} has the wrong format"
    return None


def _is_utf8(text: str) -> bool:
    """Returns whether `text` can be encoded as UTF-8. Lone surrogates can't: they stand for bytes of a file or of the
    environment that are not UTF-8."""
    return not any(0xD800 <= ord(character) < 0xE000 for character in text)


def _without_none(field_type: inspect.Type) -> inspect.Type:
    if isinstance(field_type, inspect.UnionType):
        (field_type,) = (each for each in field_type.types if not isinstance(each, inspect.NoneType))
    return field_type


def raise_errors(errors: list[ConfigError]) -> None:
    """Raises the first error, with the others in its `others`. Returns if there are none."""
    if errors:
        first, *others = errors
        raise ConfigError(first.key, first.reason, first.accepted, others=tuple(others))
