"""Implements the option kafkaColumns: returns rows with the columns of spark-sql-kafka, for queries written for it.

    key            binary     the keys, separated by spaces; null without keys
    value          binary     the body
    topic          string
    partition      int        queueId
    offset         long       queueOffset
    timestamp      timestamp  storeTimestamp
    timestampType  int        1 (LogAppendTime)
    headers        array of (key string, value binary): the properties, in the order stored

With several brokers a partition's number is not unique; `columns` can add brokerName.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from ha.protocol.properties import KEY_SEPARATOR

SOURCES = {
    "key": "keys",
    "value": "body",
    "topic": "topic",
    "partition": "queueId",
    "offset": "queueOffset",
    "timestamp": "storeTimestamp",
    "timestampType": "storeTimestamp",
    "headers": "properties",
}
"""Kafka's column -> the column of the log that it is made of"""
_LOG_APPEND_TIME = 1
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def kafka_column(name: str, column: pa.Array) -> pa.Array:
    """Returns Kafka's column `name`, converted from the log's `column` (see SOURCES); `column` itself if it needs no
    conversion."""
    if name == "key":
        return pc.binary_join(column, KEY_SEPARATOR).cast(pa.binary())
    if name == "timestampType":
        return pa.array([_LOG_APPEND_TIME] * len(column), pa.int32())
    if name == "headers":
        return column.cast(_HEADERS)
    return column
