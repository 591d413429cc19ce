"""Decodes columns of an archive from bodies, by a schema for each topic. Uses no Spark job.

A body is decoded as a whole: if it does not match its topic's schema, or one value does not fit its column's type, all
of its columns are null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ha.arrow.plain import plain_body
from ha.errors import OptionError
from ha.spark.jobs.archive.body_formats import body_format
from ha.spark.jobs.archive.manifest import BodyColumns


def body_fields(found: Iterable[BodyColumns], topic: str | None = None) -> list[pa.Field]:
    """Returns the columns of `topic` in `found` (None: of all topics), each once.

    Raises OptionError if they don't fit into one table: columns whose names are equal in lower case must have the same
    spelling and type.
    """
    fields: dict[str, pa.Field] = {}
    for columns in found:
        for of_topic, schema in columns.schemas.items():
            if topic in (None, of_topic):
                for field in body_format(columns.format).columns(schema):
                    known = fields.setdefault(field.name.lower(), field)
                    if known != field:
                        raise OptionError(
                            "schemas",
                            f"{field.name} of topic {of_topic} is {field.type}; there is {known.name}, {known.type}",
                            "one spelling and one type for each name in an archive",
                        )
    return list(fields.values())


def columns_of(found: Iterable[BodyColumns], topic: str) -> BodyColumns | None:
    """Returns the columns that the brokers' archives (`found`) have for `topic`; None if none has a schema for it.

    JSON schemas of several brokers are merged; schemas in other formats must be equal. Raises OptionError if they are
    not, if the formats differ, or if the columns don't fit into one table.
    """
    found = [columns for columns in found if topic in columns.schemas]
    if not found:
        return None
    body_fields(found, topic)
    schemas = [columns.schemas[topic] for columns in found]
    [kind, *others] = {columns.format for columns in found}
    if others or (kind != "json" and any(schema != schemas[0] for schema in schemas)):
        raise OptionError(
            "columns_from, schemas",
            f"brokers of the archive have different schemas of {topic}",
            "the same format and schema for all of them",
        )
    return BodyColumns(kind, {topic: {name: value for schema in schemas for name, value in schema.items()}})


class BodyDecoder:
    """Decodes columns from message bodies, by the schemas of their topics."""

    def __init__(self, columns: BodyColumns | None) -> None:
        self.fields = [] if columns is None else body_fields([columns])
        self._topics: dict[str, tuple[Callable[[bytes], Any], pa.StructType]] = {}
        if columns is not None:
            form = body_format(columns.format)
            for topic, schema in columns.schemas.items():
                self._topics[topic] = form.decoder(schema), form.columns(schema)

    def decode(self, topic: str, bodies: pa.Array, sys_flags: pa.Array, size_max: int) -> pa.StructArray:
        """Returns the columns decoded from `bodies`; null for a body that can't be decoded. `topic` must have a schema.

        `size_max` is the maximum size of a decompressed body, in bytes. Raises OptionError if there are compressed
        bodies that require a package that is not installed.
        """
        decode, arrow = self._topics[topic]
        flags = pc.fill_null(sys_flags, 0).to_pylist()
        plain = map(plain_body, bodies.to_pylist(), flags, repeat(size_max))
        return _array([None if body is None else decode(body) for body in plain], arrow)

    def append_columns(self, topic: str | None, rows: pa.RecordBatch, size_max: int) -> tuple[pa.RecordBatch, int]:
        """Appends the columns of all topics to rows of `topic`; returns the rows and the number of undecodable bodies.

        Columns of other topics are null. `size_max` and errors as in `decode`.
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


def _array(rows: list[Any], arrow: pa.DataType) -> pa.Array:
    """Returns `rows` as an Arrow array, with null for each row in which a value does not fit its type, such as a
    decimal with too many digits."""
    try:
        return pa.array(rows, arrow)
    except (ValueError, OverflowError):
        if len(rows) == 1:
            return pa.nulls(1, arrow)
    middle = len(rows) // 2
    return pa.concat_arrays([_array(rows[:middle], arrow), _array(rows[middle:], arrow)])
