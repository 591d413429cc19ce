"""`ha log dump`: prints the records of a store as JSON lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from ha.arrow import LogReader, ReadOptions, RowFilter
from ha.arrow.queues import ENTRY_DTYPE
from ha.arrow.schema import TIMESTAMP
from ha.cli.log.examination import Span, opened, span_of
from ha.cli.showing import safe_json
from ha.protocol.codes import SysFlag
from ha.protocol.compression import BODY_SIZE_MAX

_NAMES = {
    "topic": "topic",
    "queueId": "queue",
    "queueOffset": "queue_offset",
    "physicalOffset": "physical_offset",
    "storeSize": "size",
    "tags": "tags",
    "keys": "keys",
    "uniqKey": "message_id",
    "msgId": "offset_message_id",
    "bornTimestamp": "born_timestamp_ms",
    "storeTimestamp": "store_timestamp_ms",
    "bornHost": "born_host",
    "storeHost": "store_host",
    "flag": "flag",
    "sysFlag": "sys_flag",
    "reconsumeTimes": "reconsume_times",
    "preparedTransactionOffset": "prepared_transaction_offset",
    "crcOk": "crc_ok",
    "properties": "properties",
    "body": "body",
}
"""Columns and their names in JSON, which are those of `ha consume --json` where it has them."""
ALL_COLUMNS = tuple(_NAMES)
_BATCH_ROWS, _BATCH_BYTES = 256, 4 << 20


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which records to print; None: no condition. Physical offsets are [from_, to)."""

    from_: int | None = None
    to: int | None = None
    where: RowFilter = RowFilter()
    count: int | None = None
    with_body: bool = True
    message_size_max: int = BODY_SIZE_MAX


class Dumped(msgspec.Struct):
    """What was printed and skipped. Offsets are physical, in bytes."""

    count: int = 0
    next_offset: int = 0
    """Offset to resume from: the end of the last record printed, or of the span"""
    is_complete: bool = False
    damaged_count: int = 0
    """Records printed that are not sound"""
    gaps: list[str] = []
    """Descriptions of bytes that are not records"""


def dump(path: Path, choice: Choice, stop: threading.Event) -> Dumped:
    """Print the chosen records of the store at `path`, until `stop` is set. StoreUnreadable."""
    done = Dumped()
    with opened(path) as (reader,):
        span = _span(reader, choice)
        done.next_offset = span.begin
        columns = tuple(name for name in ALL_COLUMNS if choice.with_body or name != "body")
        where = msgspec.structs.replace(choice.where, physical_begin=span.begin, physical_end=span.end)
        options = ReadOptions(
            columns=columns,
            batch_rows=_BATCH_ROWS,
            batch_bytes=_BATCH_BYTES,
            fail_on_data_loss=False,
            message_size_max=choice.message_size_max,
            where=where,
        )
        if not stop.is_set():
            done.is_complete = _print(_batches(reader, span, choice, options), choice, stop, done)
        if done.is_complete:
            done.next_offset = span.end
        done.gaps = [
            f"physical offsets [{damage.physical_offset}, {damage.resumed_at}) are not records: {damage.reason}"
            for damage in reader.damages
        ]
    sys.stdout.buffer.flush()
    return done


def _span(reader: LogReader, choice: Choice) -> Span:
    """Return the span of the log to read, narrowed by store time with the help of the queues."""
    begin, end = reader.min_offset, reader.end_offset()
    span = span_of(begin, end, choice.from_, choice.to)
    since_ms = choice.where.store_begin_ms
    if since_ms is not None and reader.queues():
        span = Span(min(span.end, max(span.begin, reader.physical_offset_for_time(since_ms))), span.end)
    return span


def _batches(reader: LogReader, span: Span, choice: Choice, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Yield batches in physical order: through the queues (and the key index) if a topic or key is given, otherwise
    from the log itself, with the records that are in no queue. Batch queues follow, queue by queue."""
    if choice.where.topics is None and choice.where.keys is None:
        yield from reader.walk_range(span.begin, span.end, options)
        return
    yield from reader.read_range(span.begin, span.end, options)
    for topic, queue_id in reader.queues():
        if choice.where.topics is not None and topic not in choice.where.topics:
            continue
        if reader.entries(topic, queue_id, 0, 0).dtype != ENTRY_DTYPE:
            begin, end = reader.queue_range(topic, queue_id)
            yield from reader.read_queue(topic, queue_id, begin, end, options)


def _print(batches: Iterator[pa.RecordBatch], choice: Choice, stop: threading.Event, done: Dumped) -> bool:
    """Print the batches; return whether all records were printed."""
    write = sys.stdout.buffer.write
    for batch in batches:
        for row in as_rows(batch):
            if stop.is_set() or done.count == choice.count:
                return False
            write(safe_json(row) + b"\n")
            done.count += 1
            done.damaged_count += row["crc_ok"] is False
            if row["physical_offset"] is not None:
                done.next_offset = row["physical_offset"] + (row["size"] or 1)
    return True


def as_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield each record of a batch as it is printed."""
    names = batch.schema.names
    columns = [_values(batch.column(name)) for name in names]
    shown = [_NAMES[name] for name in names]
    for values in zip(*columns, strict=True):
        yield _printable(dict(zip(shown, values, strict=True)))


def _values(column: pa.Array) -> list[Any]:
    if column.type == TIMESTAMP:
        return [None if value is None else value // 1000 for value in column.cast(pa.int64()).to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def _printable(row: dict[str, Any]) -> dict[str, Any]:
    if row["properties"] is not None:
        row["properties"] = dict(row["properties"])
    body = row.get("body")
    if body is not None:
        try:
            row["body"] = body.decode()
        except UnicodeDecodeError:
            del row["body"]
            row["body_base64"] = body
    elif "body" in row and row["crc_ok"] and row["sys_flag"] & SysFlag.COMPRESSED:
        del row["body"]
        row["body_error"] = "it can't be decompressed: it is damaged, or longer than maxMessageSize"
    return row
