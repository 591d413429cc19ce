"""Columns of an archive that are decoded from JSON bodies, by a schema for each topic. Uses no Spark job.

A body is decoded as a whole: if it is no JSON object, or one value does not fit its type, all of its columns are null.
A field that is missing is null, and fields that the schema does not have are skipped. Values are not converted: a
string is no number. The exceptions are whole numbers as DOUBLE or FLOAT, and dates, timestamps (ISO 8601, UTC without
an offset) and decimals, which may be strings.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from itertools import repeat
from typing import Annotated, Any, TypedDict

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StringType, StructType

from ha.arrow.plain import plain_body
from ha.arrow.schema import TIMESTAMP
from ha.errors import OptionError
from ha.spark.jobs.archive.manifest import BodyColumns

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
"""Spark's name -> types of msgspec and Arrow"""
_ACCEPTED = ", ".join([*map(str.upper, _TYPES), "DECIMAL, ARRAY, MAP<STRING, …>, STRUCT"])


def types_of(kind: DataType) -> tuple[Any, pa.DataType]:
    """Return the types with which msgspec and Arrow represent a type of Spark. OptionError for others."""
    if isinstance(kind, StructType):
        members = {field.name: types_of(field.dataType) for field in kind.fields}
        fields = {name: python | None for name, (python, _) in members.items()}
        shape: Any = TypedDict("Fields", fields, total=False)  # type: ignore[misc]
        return shape, pa.struct([(name, arrow) for name, (_, arrow) in members.items()])
    if isinstance(kind, ArrayType):
        python, arrow = types_of(kind.elementType)
        return list[python | None], pa.list_(arrow)  # type: ignore[valid-type]
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        python, arrow = types_of(kind.valueType)
        return dict[str, python | None], pa.map_(pa.string(), arrow)  # type: ignore[valid-type]
    if isinstance(kind, DecimalType):
        return Decimal, pa.decimal128(kind.precision, kind.scale)
    if kind.simpleString() not in _TYPES:
        raise OptionError("schemas", f"{kind.simpleString().upper()} can't be decoded from JSON", _ACCEPTED)
    return _TYPES[kind.simpleString()]


def _struct(types: dict[str, Any]) -> StructType:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in types.items()]
    return StructType.fromJson({"type": "struct", "fields": fields})


def body_fields(found: Iterable[BodyColumns], topic: str | None = None) -> list[pa.Field]:
    """Return the columns of `topic` (None: of all topics), each once. OptionError if they don't fit into one table."""
    fields: dict[str, pa.Field] = {}
    for columns in found:
        for of_topic, schema in columns.schemas.items():
            if topic in (None, of_topic):
                _, arrow = types_of(_struct(schema))
                for field in arrow:
                    known = fields.setdefault(field.name.lower(), field)
                    if known != field:
                        raise OptionError(
                            "schemas",
                            f"{field.name} of topic {of_topic} is {field.type}; there is {known.name}, {known.type}",
                            "one spelling and one type for each name in an archive",
                        )
    return list(fields.values())


def columns_of(found: Iterable[BodyColumns], topic: str) -> BodyColumns | None:
    """Return the columns of `topic` of several brokers, or None. OptionError if they don't fit into one table."""
    found = list(found)
    if not body_fields(found, topic):
        return None
    schemas = [columns.schemas.get(topic, {}) for columns in found]
    return BodyColumns("json", {topic: {name: kind for schema in schemas for name, kind in schema.items()}})


class BodyDecoder:
    """Decodes the bodies of an archive's topics."""

    def __init__(self, columns: BodyColumns | None) -> None:
        self.fields = [] if columns is None else body_fields([columns])
        self._topics: dict[str, tuple[msgspec.json.Decoder[Any], pa.StructType]] = {}
        for topic, schema in {} if columns is None else columns.schemas.items():
            python, arrow = types_of(_struct(schema))
            self._topics[topic] = msgspec.json.Decoder(python), arrow

    def decode(self, topic: str, bodies: pa.Array, sys_flags: pa.Array, size_max: int) -> pa.StructArray:
        """Return the columns of `topic`, which has a schema; null for a body that can't be decoded.

        `size_max` is the maximum size of a decompressed body, in bytes.
        """
        decoder, arrow = self._topics[topic]
        flags = pc.fill_null(sys_flags, 0).to_pylist()
        plain = map(plain_body, bodies.to_pylist(), flags, repeat(size_max))
        return _array([_decoded(decoder, body) for body in plain], arrow)

    def append_columns(self, topic: str | None, rows: pa.RecordBatch, size_max: int) -> tuple[pa.RecordBatch, int]:
        """Append all columns to archived rows of `topic`, and return also how many bodies could not be decoded.

        Columns of other topics are null. `size_max` as in `decode`.
        """
        columns: dict[str, pa.Array] = {}
        undecoded = 0
        if topic in self._topics:
            decoded = self.decode(topic, rows["body"], rows["sysFlag"], size_max)
            undecoded = decoded.null_count - rows["body"].null_count
            columns = dict(zip([field.name for field in decoded.type], decoded.flatten(), strict=True))
        for field in self.fields:
            found = columns.get(field.name)
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type) if found is None else found)
        return rows, undecoded


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes | None) -> Any:
    if body is None:
        return None
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _array(rows: list[Any], arrow: pa.DataType) -> pa.Array:
    """Return `rows` as Arrow, null for one that has a value which does not fit, such as a decimal with more digits."""
    try:
        return pa.array(rows, arrow)
    except (ValueError, OverflowError):
        if len(rows) == 1:
            return pa.nulls(1, arrow)
    middle = len(rows) // 2
    return pa.concat_arrays([_array(rows[:middle], arrow), _array(rows[middle:], arrow)])
