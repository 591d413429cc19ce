"""Defines the log's columns in Spark's types, and checks schemas given by the user.

The data source API has no column pruning: a user selects the columns with the option `columns` or with `.schema(…)`.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ha.arrow.read_options import DEFAULT_COLUMNS
from ha.arrow.schema import COLUMNS, check_columns
from ha.errors import OptionError
from ha.spark.source.kafka_columns import SOURCES, kafka_column

SPARK_TYPES: dict[str, DataType] = {
    **{name: from_arrow_type(type_) for name, type_ in COLUMNS.items()},
    # Declaring elements as non-null, which they are, saves the JVM two checks of each text.
    "keys": ArrayType(StringType(), containsNull=False),
    "properties": MapType(StringType(), StringType(), valueContainsNull=False),
}

KAFKA_TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(
        StructType([StructField("key", StringType()), StructField("value", BinaryType())]), containsNull=False
    ),
}
_TYPES = {**SPARK_TYPES, **KAFKA_TYPES}


def types_of(*, kafka: bool) -> dict[str, DataType]:
    """Returns the types of the columns that can be selected; `kafka`: with the option kafkaColumns."""
    return _TYPES if kafka else SPARK_TYPES


def spark_schema(columns: Iterable[str] = DEFAULT_COLUMNS) -> StructType:
    """Returns the schema of `columns`, in this order, all nullable. Raises OptionError for an unknown or repeated
    name."""
    return StructType([StructField(name, _TYPES[name]) for name in check_columns(columns, _TYPES)])


def read_columns(selected: Iterable[str], *, kafka: bool) -> tuple[str, ...]:
    """Returns the log's columns that have to be read for the selected ones."""
    return tuple(dict.fromkeys(SOURCES.get(name, name) if kafka else name for name in selected))


def columns_of(schema: StructType, *, kafka: bool = False) -> tuple[str, ...]:
    """Returns the columns that a user's schema names, in its order; as in Spark, case does not matter.

    Raises OptionError for a schema without columns, and for a column that does not exist, is repeated, has another type
    (nothing is cast), or is NOT NULL (fields of a damaged record may be null).
    """
    columns = []
    types = types_of(kafka=kafka)
    by_lower_name = {name.lower(): name for name in types}
    for field in schema.fields:
        name = by_lower_name.get(field.name.lower())
        if name is None:
            raise OptionError("schema", f"there is no column {field.name!r}", ", ".join(types))
        wanted = types[name]
        if field.dataType.simpleString() != wanted.simpleString():
            raise OptionError(
                "schema",
                f"column {name} is {wanted.simpleString()}, not {field.dataType.simpleString()}",
                f"{name} {wanted.simpleString()} (cast it after loading)",
            )
        if not field.nullable:
            raise OptionError(
                "schema", f"column {name} is NOT NULL, and can be null", f"{name} {wanted.simpleString()}"
            )
        if name in columns:
            raise OptionError("schema", f"column {name} is named twice", "each column at most once")
        columns.append(name)
    if not columns:
        raise OptionError("schema", "it has no column", "at least one of " + ", ".join(types))
    return tuple(columns)


def batch_schema(schema: StructType) -> pa.Schema:
    """Returns the schema that Spark expects of every batch: the Arrow form of `schema` in UTC."""
    return to_arrow_schema(schema, timezone="UTC")


def conform(batch: pa.RecordBatch, schema: pa.Schema, selected: tuple[str, ...]) -> pa.RecordBatch:
    """Returns the selected columns of `batch` with the schema `schema`.

    Copies nothing if all are columns of the log: the schemas then differ only in the case of names and in nullability.
    """
    if batch.schema.equals(schema):
        return batch
    if tuple(batch.schema.names) == selected:
        return pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    arrays = [kafka_column(name, batch.column(SOURCES.get(name, name))) for name in selected]
    return pa.RecordBatch.from_arrays(
        [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)], schema=schema
    )
