"""Decodes Avro bodies by the schema with which they were written. Requires fastavro, except for `columns`.

A body is exactly one record: in the plain binary encoding, or in the single-object encoding, which begins with a marker
and the schema's fingerprint. A body with the fingerprint of another schema is decoded as if it were plain. The headers
of schema registries are not supported: they look like the first field of a record, so a body with a header can't be
distinguished from a body without one.

fastavro reads the underlying types. The logical types that have a type in Spark are converted here, because fastavro
would round a decimal that has too many digits, and can't represent all dates and times. Symbols of enums are looked up
here as well, because fastavro accepts negative indexes and counts them from the end. It also accepts a negative index
of a type in a union, and does not return this index, so a body with the invalid index -1 or -2 is decoded all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Context, Decimal
from io import BytesIO
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pyarrow as pa

from ha.arrow.schema import TIMESTAMP
from ha.errors import OptionError

ACCEPTED = "an Avro schema of a record, as JSON (.avsc)"
DECIMAL_DIGITS_MAX = 38
_MARKER = b"\xc3\x01"
_PRIMITIVES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_TIMES = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-micros"): TIMESTAMP,
    ("long", "timestamp-millis"): TIMESTAMP,
}
"""(Avro type, logical type) -> Arrow type of the column"""
_EXACT = Context(prec=DECIMAL_DIGITS_MAX)
_WITHOUT_MEANING = frozenset({"doc", "aliases", "default", "order"})
"""Attributes of a schema that affect neither columns nor values"""
_Convert = Callable[[Any], Any] | None
"""Converts a value that fastavro returned, other than None, to the value for Arrow; None if no conversion is needed.
Raises ValueError or IndexError if the value does not fit.
"""


def stored_schema(given: str | tuple[bytes, str]) -> dict[str, Any]:
    """Returns the schema to store (see BodyFormat): `given`, which is the JSON of a record schema, without the
    attributes in _WITHOUT_MEANING."""
    if not isinstance(given, str):
        raise ValueError("it is no text")
    avro = _fastavro()
    schema = json.loads(given)
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise ValueError("it is not of a record")
    try:
        avro.parse_schema(schema)
        _Types().of(schema, "")  # checks attributes that fastavro does not check
    except (avro.UnknownType, avro.SchemaParseException, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return dict(_without(schema, _WITHOUT_MEANING))


def columns(stored: dict[str, Any]) -> pa.StructType:
    """Returns the columns of a stored schema; see BodyFormat."""
    arrow, _ = _Types().of(stored, "")
    return arrow


def decoder(stored: dict[str, Any]) -> Callable[[bytes], Any]:
    """Returns a function that decodes bodies of a stored schema; see BodyFormat."""
    avro = _fastavro()
    schema = avro.parse_schema(_with_enum_indexes(_without(stored, frozenset({"logicalType"}))))
    fingerprint = avro.fingerprint(avro.to_parsing_canonical_form(stored), "CRC-64-AVRO")
    head = _MARKER + bytes.fromhex(fingerprint)
    read = avro.schemaless_reader
    _, convert = _Types().of(stored, "")

    def decoded(body: bytes) -> Any:
        stream = BytesIO(body)
        if body.startswith(head):
            stream.seek(len(head))
        try:
            record = read(stream, schema, None)
            if stream.tell() < len(body):
                return None
            return record if convert is None else convert(record)
        except (EOFError, IndexError, StopIteration, ValueError):
            return None

    return decoded


def _with_enum_indexes(schema: Any) -> Any:
    """Returns `schema` with each enum replaced by a record whose only field is the symbol's index. The encoding is the
    same."""
    if isinstance(schema, list):
        return [_with_enum_indexes(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    if schema["type"] == "enum":
        return {**schema, "type": "record", "fields": [{"name": "index", "type": "int"}]}
    nested = ("type", "items", "values", "fields")
    return {name: _with_enum_indexes(value) if name in nested else value for name, value in schema.items()}


def _fastavro() -> Any:
    try:
        from fastavro import schemaless_reader
        from fastavro.schema import (
            SchemaParseException,
            UnknownType,
            fingerprint,
            parse_schema,
            to_parsing_canonical_form,
        )
    except ModuleNotFoundError as error:
        accepted = "pip install 'halog[avro]', where the driver runs and on the executors"
        raise OptionError("columns_from", f"fastavro is missing ({error})", accepted) from None
    return SimpleNamespace(
        schemaless_reader=schemaless_reader,
        SchemaParseException=SchemaParseException,
        UnknownType=UnknownType,
        fingerprint=fingerprint,
        parse_schema=parse_schema,
        to_parsing_canonical_form=to_parsing_canonical_form,
    )


def _without(schema: Any, attributes: frozenset[str]) -> Any:
    """Returns `schema` without the given attributes of its types and fields."""
    if isinstance(schema, list):
        return [_without(member, attributes) for member in schema]
    if not isinstance(schema, dict):
        return schema
    nested = ("type", "items", "values", "fields")
    return {
        name: _without(value, attributes) if name in nested else value
        for name, value in schema.items()
        if name not in attributes
    }


class _Types:
    """Converts the types of a valid schema to Arrow; each named type must be defined before its first use."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[pa.DataType, _Convert] | None] = {}
        """Full name of a type -> converted type; None while the type's definition is being converted"""

    def of(self, schema: Any, namespace: str) -> tuple[pa.DataType, _Convert]:
        """Returns the Arrow type of `schema`, and the conversion of its values. Raises ValueError if no column can have
        the type.

        `namespace`: the namespace of the enclosing type; "" for none.
        """
        if isinstance(schema, list):
            members = [member for member in schema if member != "null"]
            if len(members) != 1:
                raise ValueError(f"a column can't have the type of the union {json.dumps(schema)}")
            return self.of(members[0], namespace)
        if isinstance(schema, str):
            schema = {"type": schema}
        kind = schema["type"]
        if not isinstance(kind, str):
            return self.of(kind, namespace)
        if kind in _PRIMITIVES:
            return _primitive(schema, kind)
        if kind == "array":
            arrow, convert = self.of(schema["items"], namespace)
            return pa.list_(arrow), None if convert is None else _of_items(convert)
        if kind == "map":
            arrow, convert = self.of(schema["values"], namespace)
            return pa.map_(pa.string(), arrow), None if convert is None else _of_fields(convert)
        if kind in ("record", "enum", "fixed"):
            return self._define(schema, kind, namespace)
        found = self._named.get(kind if "." in kind else _full_name(kind, namespace))
        if found is None:
            reason = "a column can't have the type null" if kind == "null" else f"{kind} contains itself"
            raise ValueError(reason)
        return found

    def _define(self, schema: dict[str, Any], kind: str, namespace: str) -> tuple[pa.DataType, _Convert]:
        name = schema["name"]
        full_name = name if "." in name else _full_name(name, schema.get("namespace", namespace))
        self._named[full_name] = None
        if kind == "enum":
            made: tuple[pa.DataType, _Convert] = pa.string(), _symbol_of(schema["symbols"])
        elif kind == "fixed":
            made = _fixed(schema, full_name)
        else:
            made = self._record(schema, full_name)
        self._named[full_name] = made
        return made

    def _record(self, schema: dict[str, Any], full_name: str) -> tuple[pa.DataType, _Convert]:
        namespace = full_name.rpartition(".")[0]
        types = {field["name"]: self.of(field["type"], namespace) for field in schema["fields"]}
        if not types:
            raise ValueError(f"{full_name} has no fields")
        converts = [(name, convert) for name, (_, convert) in types.items() if convert is not None]
        return pa.struct([(name, arrow) for name, (arrow, _) in types.items()]), _of_record(converts)


def _full_name(name: str, namespace: str) -> str:
    return f"{namespace}.{name}" if namespace else name


def _primitive(schema: dict[str, Any], kind: str) -> tuple[pa.DataType, _Convert]:
    logical = schema.get("logicalType")
    if kind == "bytes" and logical == "decimal":
        return _decimal(schema)
    convert = _micros if logical == "timestamp-millis" and kind == "long" else None
    return _TIMES.get((kind, str(logical)), _PRIMITIVES[kind]), convert


def _fixed(schema: dict[str, Any], full_name: str) -> tuple[pa.DataType, _Convert]:
    logical, size = schema.get("logicalType"), schema["size"]
    if size < 1:
        raise ValueError(f"{full_name} has no bytes")  # a short body could hold an array of any number of empty values
    if logical == "decimal":
        return _decimal(schema)
    if logical == "uuid" and size == 16:
        return pa.string(), lambda value: str(UUID(bytes=value))
    return pa.binary(), None


def _decimal(schema: dict[str, Any]) -> tuple[pa.DataType, _Convert]:
    precision, scale = schema["precision"], schema.get("scale", 0)
    if precision > DECIMAL_DIGITS_MAX:
        raise ValueError(f"a decimal of {precision} digits; a column has {DECIMAL_DIGITS_MAX} at most")
    limit = 10**precision

    def convert(value: bytes) -> Decimal:
        unscaled = int.from_bytes(value, "big", signed=True)
        if abs(unscaled) >= limit:
            raise ValueError("more digits than the schema allows")
        return Decimal(unscaled).scaleb(-scale, _EXACT)

    return pa.decimal128(precision, scale), convert


def _micros(millis: int) -> int:
    return millis * 1000


def _symbol_of(symbols: list[str]) -> Callable[[Any], Any]:
    """Returns the conversion of an enum, which `_with_enum_indexes` has replaced by a record, to one of `symbols`."""

    def convert(record: dict[str, int]) -> str:
        index = record["index"]
        if index < 0:
            raise ValueError("a negative index of a symbol")
        return symbols[index]

    return convert


def _of_items(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda items: [None if item is None else convert(item) for item in items]


def _of_fields(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda fields: {key: None if value is None else convert(value) for key, value in fields.items()}


def _of_record(converts: list[tuple[str, Callable[[Any], Any]]]) -> _Convert:
    """Returns the conversion of a record, which changes the fields in `converts` in place; None if there are none."""

    def convert(record: dict[str, Any]) -> dict[str, Any]:
        for name, convert_field in converts:
            if record[name] is not None:
                record[name] = convert_field(record[name])
        return record

    return convert if converts else None
