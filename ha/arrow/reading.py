"""Reads a store directory as one stream of Arrow record batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa

from ha.arrow.log_reader import LogReader
from ha.arrow.read_options import DEFAULT_COLUMNS, ReadOptions, RowFilter
from ha.arrow.schema import arrow_schema, check_columns


def read_arrow(
    path: str | Path,
    *,
    topic: str | Iterable[str] | None = None,
    columns: Iterable[str] = DEFAULT_COLUMNS,
    where: RowFilter | None = None,
    broker_name: str | None = None,
    options: ReadOptions | None = None,
) -> pa.RecordBatchReader:
    """Returns the current messages of a store directory as a stream of record batches.

    With `topic` (one or several), reads the queues of these topics one after the other; otherwise the whole log in
    physical order, then the batch queues. `where` filters the rows; `columns` and `where` replace those in `options`.
    Raises StoreUnreadable if `path` is not a store, and OptionError as `check_columns` does. The stream raises the
    errors of `LogReader.read_queue` and, without `topic`, StoreUnreadable if the log has records but no queues.

        ha.spark.read_arrow("data/slave", topic="flights", columns=["tags", "body"]).read_all()
    """
    names = check_columns(columns)
    settings = msgspec.structs.replace(options or ReadOptions(), columns=names, where=where or RowFilter())
    reader = LogReader(path, broker_name=broker_name)
    topics = None if topic is None else {topic} if isinstance(topic, str) else set(topic)
    return pa.RecordBatchReader.from_batches(arrow_schema(names), _batches(reader, topics, settings))


def _batches(reader: LogReader, topics: set[str] | None, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    with reader:
        if topics is None:
            reader.check_has_queues()
            yield from reader.read_range(reader.min_offset, reader.end_offset(), options)
        for key in reader.batch_queues() if topics is None else reader.queues(topics):
            begin, end = reader.queue_range(*key)
            yield from reader.read_queue(*key, begin, end, options)
