"""Converts a DataFrame's rows to messages. Names of columns may be in any case, and those in brackets are Kafka's.

    body (value)          binary or string     required, not null, not empty
    topic                 string               null: the option topic
    tags                  string               one tag
    keys (key)            string, array,       words to find the message by; binary is UTF-8 text
                          or binary
    properties (headers)  map, or as in Kafka  the application's own; RocketMQ's are dropped (see below)
    queueId (partition)   integer              pins the row to a queue (null: round robin)
    brokerName            string               broker of queueId
    flag                  integer              int32 that the broker stores

A DataFrame read from a log has system properties in `properties`. Its TAGS and KEYS are used for a row without `tags`
or `keys`. Properties that brokers and clients set (UNIQ_KEY, CLUSTER, WAIT, …) are dropped, as they describe the
message that was read, not the one to send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from ha.client import Message
from ha.errors import OptionError, SinkFailed
from ha.protocol import properties as names
from ha.spark.sink.identity import SINK_PROPERTY

COLUMN_TYPES: dict[str, tuple[str, ...]] = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>", "binary"),
    "properties": ("map<string,string>", "array<struct<key:string,value:binary>>"),
    "queueId": ("int", "bigint", "smallint", "tinyint"),
    "brokerName": ("string",),
    "flag": ("int", "bigint", "smallint", "tinyint"),
}
_KAFKA_NAMES = {"value": "body", "key": "keys", "headers": "properties", "partition": "queueId"}
_COLUMNS = {**{name.lower(): name for name in COLUMN_TYPES}, **_KAFKA_NAMES}
_ACCEPTED = "body (or value), topic, tags, keys (key), properties (headers), queueId (partition), brokerName, flag"
_NOT_SENT = frozenset(
    {
        names.UNIQ_KEY,
        names.WAIT,
        names.DELAY,
        names.CLUSTER,
        names.MSG_REGION,
        names.TRACE_ON,
        names.RETRY_TOPIC,
        names.REAL_TOPIC,
        names.REAL_QUEUE_ID,
        names.TRANSACTION_PREPARED,
        names.PRODUCER_GROUP,
        names.INNER_NUM,
        names.INNER_BASE,
        names.MAX_RECONSUME_TIMES,
        names.RECONSUME_TIME,
        names.TIMER_DELAY_SEC,
        names.TIMER_DELAY_MS,
        names.TIMER_DELIVER_MS,
        names.CRC32,
        SINK_PROPERTY,
    }
)


class Row(NamedTuple):
    """A message to send. `queue_id`: the queue to store it in (None: any). `broker_name`: the broker of that queue
    (None: any); ignored without `queue_id`. `head`: all values except the body, as one text."""

    message: Message
    queue_id: int | None
    broker_name: str | None
    head: str


def check_columns(columns: Sequence[tuple[str, str]], topic: str | None) -> None:
    """Checks the columns of a DataFrame, given as (name, Spark type) pairs. Raises OptionError if a column is unknown,
    given twice, missing, or of a type that is not accepted.

    `topic`: the option topic; if it is None, the column topic is required.
    """
    found: dict[str, str] = {}
    for given, kind in columns:
        name = _COLUMNS.get(given.lower(), given)
        if name in ("delayLevel", "delay"):
            raise OptionError(
                name,
                "delayed messages are stored in another topic, where a repeated attempt could not find them",
                f"the columns {_ACCEPTED}",
            )
        if name not in COLUMN_TYPES:
            raise OptionError(name, "the sink has no such column", f"the columns {_ACCEPTED}")
        if kind not in COLUMN_TYPES[name]:
            raise OptionError(given, f"the column is of type {kind}", " or ".join(COLUMN_TYPES[name]))
        if name in found:
            raise OptionError(given, f"it means the same as the column {found[name]}", "one of the two")
        found[name] = given
    if "body" not in found:
        raise OptionError("body", "the column is missing", f"the columns {_ACCEPTED}")
    if "topic" not in found and topic is None:
        raise OptionError("topic", "neither the option nor the column is there", "one of the two")
    if "brokerName" in found and "queueId" not in found:
        raise OptionError("brokerName", "it requires queueId, which is missing", "both, or neither")


def read_rows(batch: pa.RecordBatch, default_topic: str | None) -> Iterator[Row]:
    """Yields the rows of `batch`, whose columns have passed `check_columns`. Raises SinkFailed for a row without a body
    or topic, with a flag that is no int32, or with a key or header that is not UTF-8."""
    count = batch.num_rows
    columns = {
        _COLUMNS[name.lower()]: column.to_pylist()
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    nothing: list[None] = [None] * count
    bodies = columns.get("body", nothing)
    topics = columns.get("topic", nothing)
    tags = columns.get("tags", nothing)
    keys = columns.get("keys", nothing)
    maps = columns.get("properties", nothing)
    queue_ids = columns.get("queueId", nothing)
    broker_names = columns.get("brokerName", nothing)
    flags = columns.get("flag", nothing)
    for row in range(count):
        body = bodies[row]
        if not body:
            raise SinkFailed("a row has no body: brokers refuse empty messages; filter such rows or give them a body")
        if isinstance(body, str):
            body = body.encode("utf-8", "surrogatepass")
        topic = topics[row] or default_topic
        if not topic:
            raise SinkFailed("a row has no topic: its column topic is null and there is no option topic")
        given = _properties(maps[row])
        tag = tags[row] or given.get(names.TAGS)
        words = _text("key", keys[row]) or given.get(names.KEYS) or ""
        own = {
            name: value
            for name, value in given.items()
            if value and name not in _NOT_SENT and name not in (names.TAGS, names.KEYS)
        }
        if not isinstance(words, str):
            words = names.KEY_SEPARATOR.join(word for word in words if word)
        flag = flags[row] or 0
        if not -(1 << 31) <= flag < 1 << 31:
            raise SinkFailed(f"flag: {flag} is no int32")
        queue_id, broker_name = queue_ids[row], broker_names[row]
        message = Message(topic, body, tag, words, own, flag)
        head = f"{topic}\0{queue_id}\0{broker_name}\0{flag}\0{tag}\0{words}\0{sorted(own.items()) if own else ''}"
        yield Row(message, queue_id, broker_name, head)


def _text(column: str, value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise SinkFailed(f"{column}: {value!r} is no UTF-8, but RocketMQ's keys and properties are text") from None


def _properties(given: Any) -> dict[str, str]:
    """Returns the entries of a map, or of Kafka's headers; of headers with the same name, the last one counts."""
    pairs = ((pair["key"], pair["value"]) if isinstance(pair, dict) else pair for pair in given or ())
    return {name: _text("headers", value) for name, value in pairs if name}


def with_identity(message: Message, part_text: str, unique_key: str) -> Message:
    """Returns `message` with the sink's property and unique id."""
    return Message(
        message.topic,
        message.body,
        message.tags,
        message.keys,
        {names.UNIQ_KEY: unique_key, SINK_PROPERTY: part_text, **message.properties},
        message.flag,
    )
