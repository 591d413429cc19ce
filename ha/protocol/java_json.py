"""JSON as the JVM side (fastjson) writes it: bodies of remoting commands and the files in a store's config folder.

In addition to standard JSON, fastjson writes and this module reads:

* bare integer map keys: `{0:"10.0.0.1:10911"}`
* objects as map keys: `{{"brokerName":"b0","queueId":1,"topic":"t"}:9}`
* references to objects that occurred before: `{"$ref":"$.dataVersion"}`

The output of `dumps` has no whitespace, because the Go client splits brokerAddrs at "," and ":" in the raw text. In
loaded values, integer keys are strings, bare or not (`read_as` converts them if the type has int keys), and object keys
are tuples of (name, value) pairs.
"""

from __future__ import annotations

import re
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, TypeVar

import msgspec

from ha.errors import RemoteProtocolError

DEPTH_MAX = 64
"""Maximum nesting depth; RocketMQ's own bodies have up to 7 levels"""
OBJECT_KEY_TEXT_SIZE_MAX = 4 * 1024 * 1024
"""Maximum length, in characters, of a text with object keys: its parser is written in Python and reads about 15 MB/s"""
REFERENCED_VALUES_MAX = 100_000
"""Maximum number of values that all references in a text expand to, so that a short text can't expand without bound"""

ValueT = TypeVar("ValueT")

_STRING = r'"(?:[^"\\]|\\.)*+"'
# An unterminated string matches up to the end of the text: failing at each of its quotes would take quadratic time.
_BARE_KEY = re.compile(rf"({_STRING}?)|([{{,]\s*)(-?\d+)(?=\s*:)", re.DOTALL)
_TOKEN = re.compile(
    rf"\s*(?:({_STRING})|(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)|([{{}}\[\]:,])|(true|false|null)(?![A-Za-z]))", re.DOTALL
)
_LITERALS = {"true": True, "false": False, "null": None}
_decode_standard = msgspec.json.Decoder().decode


def dumps(value: Any, *, bare_integer_keys: bool = True) -> bytes:
    """Returns `value` (builtins and msgspec structs) as JSON in UTF-8 without whitespace.

    Struct fields and dict entries that are None are omitted. With `bare_integer_keys`, the text is as RocketMQ writes
    it by default. Without, integer keys are quoted and non-ASCII characters escaped, which makes it standard JSON, for
    peers of RocketMQ 4.9.4 or later (VERSION_STANDARD_JSON).
    """
    parts: list[str] = []
    quote = encode_basestring if bare_integer_keys else encode_basestring_ascii
    _write(msgspec.to_builtins(value), parts, quote, bare_integer_keys)
    return "".join(parts).encode()


def _write(value: Any, parts: list[str], quote: Any, bare_integer_keys: bool) -> None:
    if isinstance(value, str):
        parts.append(quote(value))
    elif isinstance(value, dict):
        separator = "{"
        for key, member in value.items():
            if member is None:
                continue
            if type(key) is str:
                name = quote(key)
            elif isinstance(key, tuple):
                of_key: list[str] = []
                _write(dict(key), of_key, quote, bare_integer_keys)
                name = "".join(of_key)
            else:
                name = str(key) if isinstance(key, int) and bare_integer_keys else quote(str(key))
            # Most members are texts and integers of large tables.
            if type(member) is str:
                parts.append(f"{separator}{name}:{quote(member)}")
            elif type(member) is int:
                parts.append(f"{separator}{name}:{member}")
            else:
                parts.append(f"{separator}{name}:")
                _write(member, parts, quote, bare_integer_keys)
            separator = ","
        parts.append("{}" if separator == "{" else "}")
    elif isinstance(value, list | tuple):
        separator = "["
        for member in value:
            parts.append(separator)
            separator = ","
            _write(member, parts, quote, bare_integer_keys)
        parts.append("[]" if separator == "[" else "]")
    else:
        parts.append(_scalar(value))


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def dumps_pretty(value: Any) -> bytes:
    """Returns `value` in the form of the files in config/: indented with tabs, bare integer keys.

    The entries of a map with integer keys share a line, as written by RocketMQ 4.9 and 5.3 (5.5 uses a line for each).
    """
    parts: list[str] = []
    _write_pretty(msgspec.to_builtins(value), parts, "\n")
    return "".join(parts).encode()


def _write_pretty(value: Any, parts: list[str], line_break: str) -> None:
    if isinstance(value, dict):
        inner = line_break + "\t"
        separator = "{"
        for key, member in value.items():
            if member is None:
                continue
            name = f"{inner}{encode_basestring(key)}" if isinstance(key, str) else key
            if type(member) is str:
                parts.append(f"{separator}{name}:{encode_basestring(member)}")
            elif type(member) is int:
                parts.append(f"{separator}{name}:{member}")
            else:
                parts.append(f"{separator}{name}:")
                _write_pretty(member, parts, inner)
            separator = ","
        parts.append("{}" if separator == "{" else line_break + "}")
    elif isinstance(value, list | tuple):
        inner = line_break + "\t"
        for index, member in enumerate(value):
            parts.append(("," if index else "[") + inner)
            _write_pretty(member, parts, inner)
        parts.append(line_break + "]" if value else "[]")
    else:
        parts.append(encode_basestring(value) if isinstance(value, str) else _scalar(value))


def loads(raw: bytes | bytearray | memoryview) -> Any:
    """Returns the value of the JSON text `raw`, with references resolved. Raises RemoteProtocolError if the text or a
    reference is invalid, or if the text exceeds a limit of this module.

    Invalid UTF-8 is read as U+FFFD, as in Java.
    """
    text = bytes(raw)
    try:
        value = _decode_standard(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _loads_dialect(text.decode("utf-8", "replace"))
    if text.count(b"[") + text.count(b"{") > DEPTH_MAX:
        _check_depth(value)
    if b'"$ref"' in text:
        value = _resolve(value)
    return value


def _check_depth(value: Any) -> None:
    """Raises RemoteProtocolError if `value` is nested deeper than DEPTH_MAX, as code that processes it may recurse."""
    level = [value]
    depth = 0
    while level := [each for each in level if type(each) is dict or type(each) is list]:
        depth += 1
        if depth > DEPTH_MAX:
            raise RemoteProtocolError(f"JSON nested deeper than {DEPTH_MAX}")
        level = [member for each in level for member in (each.values() if type(each) is dict else each)]


def read_as(value_type: type[ValueT], raw: bytes | bytearray | memoryview) -> ValueT:
    """Returns the JSON text `raw` as `value_type`, a msgspec struct or any type msgspec supports.

    As lenient as the Java side: numbers may be strings, integer keys may be quoted, unknown keys are ignored.
    Raises RemoteProtocolError as `loads`, or if the value does not match the type.
    """
    return as_type(value_type, loads(raw))


def as_type(value_type: type[ValueT], value: Any) -> ValueT:
    """Returns the loaded `value` as `value_type`, as leniently as `read_as`. Raises RemoteProtocolError if it does not
    match."""
    try:
        return msgspec.convert(value, value_type, strict=False, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        name = getattr(value_type, "__name__", value_type)
        raise RemoteProtocolError(f"the body is not of type {name}: {error}") from None


def _loads_dialect(text: str) -> Any:
    try:
        return _decode_standard(_BARE_KEY.sub(_quote_key, text))
    except (msgspec.DecodeError, RecursionError) as error:
        if not re.search(r"[{,]\s*\{", text):
            raise RemoteProtocolError(f"the body is not JSON: {error}") from None
    if len(text) > OBJECT_KEY_TEXT_SIZE_MAX:
        raise RemoteProtocolError(f"JSON with object keys of {len(text)} characters")
    return _ObjectKeyParser(text).parse()


def _quote_key(match: re.Match[str]) -> str:
    string, before, key = match.groups()
    return string if string is not None else f'{before}"{key}"'


class _ObjectKeyParser:
    """Recursive-descent parser of the whole dialect; used only for texts with object keys."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._mark: str | None = None
        self._value: Any = None
        self._next()

    def parse(self) -> Any:
        value = self._read(0)
        if self._mark is not None or self._text[self._position :].strip():
            raise self._wrong()
        return value

    def _wrong(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"the body is not JSON at character {self._position}")

    def _next(self) -> None:
        """Advances to the next token. `_mark` is then a punctuation mark, "value" (with the scalar in `_value`), or
        None at the end of the text and before an invalid token. Raises RemoteProtocolError for an invalid scalar."""
        match = _TOKEN.match(self._text, self._position)
        if match is None:
            self._mark = None
            return
        self._position = match.end()
        string, number, mark, literal = match.groups()
        self._mark = mark or "value"
        if mark:
            return
        try:
            self._value = _LITERALS[literal] if literal else _decode_standard(string or number)
        except msgspec.DecodeError:
            raise self._wrong() from None

    def _read(self, depth: int) -> Any:
        """Reads the value that starts at the current token and advances past it."""
        mark = self._mark
        if mark == "value":
            value = self._value
            self._next()
            return value
        if depth >= DEPTH_MAX:
            raise RemoteProtocolError(f"JSON nested deeper than {DEPTH_MAX}")
        if mark == "{":
            return self._read_object(depth + 1)
        if mark == "[":
            return self._read_array(depth + 1)
        raise self._wrong()

    def _read_object(self, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        self._next()
        while self._mark != "}":
            key = self._read(depth)
            if self._mark != ":":
                raise self._wrong()
            self._next()
            if isinstance(key, dict):
                key = tuple(key.items())
            elif not isinstance(key, str):
                key = str(key)
            try:
                found[key] = self._read(depth)
            except TypeError:  # an object key with a list or object among its values
                raise self._wrong() from None
            if self._mark == ",":
                self._next()
            elif self._mark != "}":
                raise self._wrong()
        self._next()
        return found

    def _read_array(self, depth: int) -> list[Any]:
        found = []
        self._next()
        while self._mark != "]":
            found.append(self._read(depth))
            if self._mark == ",":
                self._next()
            elif self._mark != "]":
                raise self._wrong()
        self._next()
        return found


_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d{1,9})\]")


def _resolve(root: Any) -> Any:
    """Returns `root` with each `{"$ref":"$.path"}` replaced by the value at that path.

    Raises RemoteProtocolError if a reference is invalid, if its target contains a reference, or if all targets together
    consist of more than REFERENCED_VALUES_MAX values.
    """
    budget = REFERENCED_VALUES_MAX

    def target_of(path: Any) -> Any:
        nonlocal budget
        target = _follow(root, path)
        budget -= _size_without_references(target, budget)
        return target

    def replaced(value: Any, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise RemoteProtocolError(f"JSON nested deeper than {DEPTH_MAX}")
        if isinstance(value, dict):
            if value.keys() == {"$ref"}:
                return target_of(value["$ref"])
            return {key: replaced(member, depth + 1) for key, member in value.items()}
        if isinstance(value, list):
            return [replaced(member, depth + 1) for member in value]
        return value

    return replaced(root, 0)


def _follow(root: Any, path: Any) -> Any:
    if not isinstance(path, str) or not path.startswith("$"):
        raise RemoteProtocolError(f"JSON reference {str(path)[:80]!r} does not start at the root")
    value, position = root, 1
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            raise RemoteProtocolError(f"JSON reference {path[:80]!r} can't be followed")
        name, index = step.groups()
        try:
            value = value[name] if index is None else value[int(index)]
        except (KeyError, IndexError, TypeError):
            raise RemoteProtocolError(f"JSON reference {path[:80]!r} has no target") from None
        position = step.end()
    return value


def _size_without_references(value: Any, limit: int) -> int:
    """Returns the number of values in `value`, itself included. Raises RemoteProtocolError if there are more than
    `limit`, or if one of them is a reference."""
    count, pending = 0, [value]
    while pending:
        count += 1
        if count > limit:
            raise RemoteProtocolError(f"JSON references expand to more than {REFERENCED_VALUES_MAX} values")
        current = pending.pop()
        if isinstance(current, dict):
            if "$ref" in current:
                raise RemoteProtocolError("a JSON reference points to another one")
            pending.extend(current.values())
        elif isinstance(current, list):
            pending.extend(current)
    return count
