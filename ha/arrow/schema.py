"""The columns of the log as a table: their names and Arrow types, and the parts of a record that they require.

Types are those that PySpark itself uses, with times in UTC, so that batches pass into Spark unchanged. Names follow
RocketMQ's MessageExt. Every column may be null, as few fields of a damaged record are known.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from ha.arrow.read_options import DEFAULT_COLUMNS
from ha.errors import OptionError

TIMESTAMP = pa.timestamp("us", tz="UTC")

COLUMNS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "brokerName": pa.string(),
    "queueId": pa.int32(),
    "queueOffset": pa.int64(),  # entries
    "physicalOffset": pa.int64(),  # bytes
    "storeSize": pa.int32(),  # bytes of the whole record
    "body": pa.binary(),
    "bodySize": pa.int32(),  # bytes, as stored
    "bodyCRC": pa.int32(),  # as stored
    "tags": pa.string(),
    "keys": pa.list_(pa.string()),
    "properties": pa.map_(pa.string(), pa.string()),
    "propertiesString": pa.string(),  # as stored: name 0x01 value 0x02 …
    "bornTimestamp": TIMESTAMP,
    "storeTimestamp": TIMESTAMP,
    "bornHost": pa.string(),  # address:port
    "storeHost": pa.string(),
    "sysFlag": pa.int32(),
    "flag": pa.int32(),
    "reconsumeTimes": pa.int32(),
    "preparedTransactionOffset": pa.int64(),
    "msgId": pa.string(),  # store host and physical offset in hex
    "uniqKey": pa.string(),  # the client's unique id
    "crcOk": pa.bool_(),  # false: the record is damaged
}

QUEUE_COLUMNS = frozenset({"topic", "brokerName", "queueId", "queueOffset", "physicalOffset", "storeSize"})
"""Columns known from the consume queue: reading only these touches no record."""

PROPERTY_COLUMNS = frozenset({"tags", "keys", "properties", "propertiesString", "uniqKey"})
"""Columns that require a record's properties."""


def check_columns(columns: Iterable[str], known: Iterable[str] = COLUMNS) -> tuple[str, ...]:
    """Returns `columns` as a tuple. Raises OptionError for an unknown or repeated column, or an empty list."""
    names = tuple(columns)
    for name in names:
        if name not in known:
            raise OptionError("columns", f"there is no column {name!r}", ", ".join(known))
        if names.count(name) > 1:
            raise OptionError("columns", f"{name} is named twice", "each column at most once")
    if not names:
        raise OptionError("columns", "no column is named", ", ".join(known))
    return names


def arrow_schema(columns: Iterable[str] = DEFAULT_COLUMNS) -> pa.Schema:
    """Returns the schema of a batch with `columns` in this order."""
    return pa.schema([pa.field(name, COLUMNS[name]) for name in check_columns(columns)])
