"""Decodes JSON bodies by a Spark schema.

A missing field is null, and fields that are not in the schema are skipped. A body with a value of another type, such as
a string for an INT, can't be decoded. But DOUBLE and FLOAT accept whole numbers, DECIMAL accepts numbers and strings,
and DATE and TIMESTAMP accept strings in ISO 8601; a timestamp without an offset is in UTC.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any, TypedDict

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StringType, StructType

from ha.arrow.schema import TIMESTAMP

ACCEPTED = "a schema of Spark, such as: order_id BIGINT, amount DECIMAL(10, 2)"
_INT = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_LONG = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_TYPES: dict[str, tuple[Any, pa.DataType]] = {
    "boolean": (bool, pa.bool_()),
    "int": (_INT, pa.int32()),
    "bigint": (_LONG, pa.int64()),
    "float": (float, pa.float32()),
    "double": (float, pa.float64()),
    "string": (str, pa.string()),
    "date": (date, pa.date32()),
    "timestamp": (datetime, TIMESTAMP),
}
"""Name of a type in Spark -> type that msgspec decodes, Arrow type"""
_ALL_TYPES = ", ".join([*map(str.upper, _TYPES), "DECIMAL, ARRAY, MAP<STRING, …>, STRUCT"])


def stored_schema(given: str | tuple[bytes, str]) -> dict[str, Any]:
    """Returns the schema to store (see BodyFormat): column -> type in Spark's JSON. `given` is DDL or Spark's JSON."""
    if not isinstance(given, str):
        raise ValueError("it is no text")
    try:
        is_json = given.lstrip().startswith("{")
        schema = StructType.fromJson(json.loads(given)) if is_json else StructType.fromDDL(given)
    except (ValueError, LookupError, TypeError, PySparkException) as error:
        [reason, *_] = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(reason) from None
    if not isinstance(schema, StructType) or not schema.fields:
        raise ValueError("it has no fields")
    return {field.name: field.jsonValue()["type"] for field in schema.fields}


def columns(stored: dict[str, Any]) -> pa.StructType:
    """Returns the columns of a stored schema; see BodyFormat."""
    _, arrow = _types_of(_struct(stored))
    return arrow


def decoder(stored: dict[str, Any]) -> Callable[[bytes], Any]:
    """Returns a function that decodes bodies of a stored schema; see BodyFormat."""
    python, _ = _types_of(_struct(stored))
    decode = msgspec.json.Decoder(python).decode

    def decoded(body: bytes) -> Any:
        try:
            return decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    return decoded


def _struct(types: dict[str, Any]) -> StructType:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in types.items()]
    return StructType.fromJson({"type": "struct", "fields": fields})


def _types_of(kind: DataType) -> tuple[Any, pa.DataType]:
    """Returns the type for msgspec and the Arrow type of the Spark type `kind`.

    Raises ValueError if values of `kind` can't be decoded from JSON.
    """
    if isinstance(kind, StructType):
        members = {field.name: _types_of(field.dataType) for field in kind.fields}
        fields = {name: python | None for name, (python, _) in members.items()}
        shape: Any = TypedDict("Fields", fields, total=False)  # type: ignore[misc]
        return shape, pa.struct([(name, arrow) for name, (_, arrow) in members.items()])
    if isinstance(kind, ArrayType):
        python, arrow = _types_of(kind.elementType)
        return list[python | None], pa.list_(arrow)  # type: ignore[valid-type]
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        python, arrow = _types_of(kind.valueType)
        return dict[str, python | None], pa.map_(pa.string(), arrow)  # type: ignore[valid-type]
    if isinstance(kind, DecimalType):
        return Decimal, pa.decimal128(kind.precision, kind.scale)
    if kind.simpleString() not in _TYPES:
        raise ValueError(f"{kind.simpleString().upper()} can't be decoded from JSON; these types can: {_ALL_TYPES}")
    return _TYPES[kind.simpleString()]
