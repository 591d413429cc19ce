"""The log's columns in Spark's types, and checks of a schema given by the user.

The data source API has no column pruning: a user selects the columns with the option `columns` or with `.schema(…)`.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from ha.arrow.schema import COLUMNS, DEFAULT_COLUMNS, check_columns
from ha.errors import OptionError

SPARK_TYPES: dict[str, DataType] = {
    **{name: from_arrow_type(type_) for name, type_ in COLUMNS.items()},
    # Elements are declared non-null, which they are, so that the JVM does not check each text, twice for each row.
    "keys": ArrayType(StringType(), containsNull=False),
    "properties": MapType(StringType(), StringType(), valueContainsNull=False),
}

_BY_LOWER_NAME = {name.lower(): name for name in COLUMNS}


def spark_schema(columns: Iterable[str] = DEFAULT_COLUMNS) -> StructType:
    """Return the schema of `columns`, in this order, all nullable. OptionError for an unknown or repeated name."""
    return StructType([StructField(name, SPARK_TYPES[name]) for name in check_columns(columns)])


def columns_of(schema: StructType) -> tuple[str, ...]:
    """Return the columns that a user's schema names, in its order; as in Spark, case does not matter.

    OptionError for a name that is not a column, a repeated one, one that is NOT NULL (as a damaged record's fields may
    be null), and another type than the column's: nothing is cast.
    """
    columns = []
    for field in schema.fields:
        name = _BY_LOWER_NAME.get(field.name.lower())
        if name is None:
            raise OptionError("schema", f"there is no column {field.name!r}", ", ".join(COLUMNS))
        wanted = SPARK_TYPES[name]
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
        raise OptionError("schema", "it has no column", "at least one of " + ", ".join(COLUMNS))
    return tuple(columns)


def batch_schema(schema: StructType) -> pa.Schema:
    """Return the schema that Spark expects of every batch: the Arrow form of `schema` in UTC."""
    return to_arrow_schema(schema, timezone="UTC")


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return `batch` under `schema`, which differs only in spelling and nullability. Copies nothing."""
    if batch.schema.equals(schema):
        return batch
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)
