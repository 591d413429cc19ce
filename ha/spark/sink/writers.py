"""Spark's sink: `df.writeStream.format("halog")` and `df.write.format("halog").mode("append")`.

Exactly once per micro-batch, across failed tasks and restarted queries:

    identify    a row belongs to (query id, batch id, partition), which Spark passes to every task and repeats after a
                restart; each message has these three (HALOG_SINK), and a hash of the row (in UNIQ_KEY)
    find        a task searches the log for messages that an earlier attempt at its part stored, and sends only the
                rest; the topic `commitTopic` limits the search, so that usually nothing is scanned (partition.py)
    commit      the driver writes one record with the ranges of queue offsets of the whole batch (control.py)

Guarantees:
- A reader of committed data (commits.py) sees a batch all at once or not at all, and each row once, even after an
  aborted attempt, two concurrent attempts (speculation, a lost executor that still runs), or a request that arrived
  twice. Of the sink's messages, it sees only those in the ranges that a commit names.
- Any other consumer sees rows as they are stored, before the commit, and each row once as long as
  1. the rows of a partition are the same when Spark repeats it (their order may differ): the source is replayable, no
     rand() or current_timestamp(), and the query restarts with the same number of partitions;
  2. one attempt at a part runs at a time (spark.speculation=false);
  3. the query restarts before retention (fileReservedTime) deletes its messages from the topic or the commit topic;
  4. no request that a task gave up on reaches the broker after the next attempt has searched;
  5. all brokers that hold the commit topic are up when a query restarts in the middle of a batch (for the brokers of
     the target topic, the sink checks this).
  Otherwise no row is lost, but some may be stored twice. The first 20 digits of UNIQ_KEY are then the same, unless
  condition 1 is violated.
- A batch write has no id that Spark repeats: retried tasks store each row once, but a second run of the whole write
  stores all rows again, unless both runs have the same sinkId.

Costs: a task asks for the ends of a topic's queues and reads one record of the commit topic. Messages that others sent
to the topic since the sink's last commit are scanned. For a busy shared topic, that takes a long time after a long
stop.

Order: brokers with several threads may store concurrent requests in any order, and rows are spread over the queues in
turn; inFlight=1 and a queueId keep the rows of a partition in order.

A log is append-only, so complete and overwrite modes are refused, and an abort removes nothing. The abort of a batch
write without sinkId, which nothing can finish later, commits it without rows, so that no stream waits for it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import anyio
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from ha.errors import ClientError, NameServersUnreachable, OptionError, ProtocolError, RecordsGone, SinkFailed
from ha.spark.sink.commit import abort_batch, commit_parts
from ha.spark.sink.identity import SinkPart
from ha.spark.sink.options import SinkOptions, parse_sink_options
from ha.spark.sink.partition import PartResult, PartWriter, open_clients
from ha.spark.sink.rows import check_columns
from ha.spark.worker_errors import without_traceback

_log = logging.getLogger(__name__)

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
"""Local properties of the jobs of a micro-batch (StreamExecution.QUERY_ID_KEY, MicroBatchExecution.BATCH_ID_KEY)"""


class SinkMessage(WriterCommitMessage):
    """A task's result, sent to the driver for the commit."""

    def __init__(self, result: PartResult) -> None:
        self.result = result


class BatchWriter(DataSourceArrowWriter):
    """Writes the rows of one `df.write…save()`, identified by sinkId or a new id. Spark pickles the writer for the
    tasks."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._sink = options.sink_id or f"write-{uuid.uuid4()}"
        self._since_ms = None if options.sink_id else time.time_ns() // 1_000_000

    @without_traceback()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkMessage:
        """Stores the rows of one partition. Runs on an executor. Raises SinkFailed if a row is invalid or can't be
        stored, or if a queue becomes shorter while it is searched."""
        context = _context()
        part = SinkPart(self._sink, 0, context.partitionId())
        return _write(self._options, part, iterator, context.attemptNumber() > 0, self._since_ms)

    @without_traceback()
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commits the whole write. Raises SinkFailed as in `commit_parts`."""
        _commit(self._options, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Excludes the stored rows from what readers of committed data see, unless the write has a sinkId: then the
        next write with it reuses them. If this fails, it is only logged, so that Spark reports why the write failed."""
        _say_aborted(messages)
        if self._options.sink_id is not None:
            return
        try:
            with _sink_failures():
                anyio.run(abort_batch, self._options, self._sink, 0)
        except SinkFailed as error:
            _log.warning(
                'sink.abort_failed sink=%s batch=0 error="%s" hint="streams of committed rows wait at its rows"',
                self._sink,
                error,
            )


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes one micro-batch of a streaming query. Spark creates one writer for the tasks, and another one for the
    commit or abort."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    @without_traceback()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkMessage:
        """Stores the rows of one partition. Runs on an executor. Errors as in `BatchWriter.write`."""
        context = _context()
        query, batch = context.getLocalProperty(_QUERY_ID), context.getLocalProperty(_BATCH_ID)
        if query is None or batch is None:
            raise SinkFailed(f"Spark did not set the query and batch ({_QUERY_ID}, {_BATCH_ID})")
        part = SinkPart(query, int(batch), context.partitionId())
        return _write(self._options, part, iterator, context.attemptNumber() > 0, None)

    # Spark calls these with the arguments by position, and its own names are camel case.
    @without_traceback()
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commits the micro-batch. Raises SinkFailed as in `commit_parts`; the query then stops. It can be restarted if
        the commit could not be stored."""
        _commit(self._options, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Logs that the stored rows stay uncommitted; the next attempt at this batch reuses them."""
        _say_aborted(messages)


def make_batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """Returns the writer of a batch write. Raises OptionError for invalid options, columns or modes."""
    if overwrite:
        _refuse_mode("mode", "overwrite", 'mode("append")')
    parsed = parse_sink_options(options)
    _check(parsed, schema)
    return BatchWriter(parsed)


def make_stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """Returns the writer of a streaming query. Raises OptionError for invalid options, columns or modes."""
    if overwrite:
        _refuse_mode("outputMode", "complete", 'outputMode("append")')
    parsed = parse_sink_options(options)
    if parsed.sink_id is not None:
        raise OptionError(
            "sinkId", "a stream is known by its query's id, which is kept in the checkpoint", "leave it out"
        )
    _check(parsed, schema)
    return StreamWriter(parsed)


def _refuse_mode(option: str, mode: str, accepted: str) -> NoReturn:
    raise OptionError(option, f"{mode} would replace the contents of a topic, but a log is append-only", accepted)


def _check(options: SinkOptions, schema: StructType) -> None:
    check_columns([(field.name, field.dataType.simpleString()) for field in schema.fields], options.topic)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise SinkFailed("write() runs in Spark's tasks only")
    return context


def _write(
    options: SinkOptions,
    part: SinkPart,
    batches: Iterator[pa.RecordBatch],
    is_repeated: bool,
    since_ms: int | None,
) -> SinkMessage:
    async def write() -> PartResult:
        async with open_clients(options) as clients:
            writer = PartWriter(options, part, clients, is_repeated=is_repeated, since_ms=since_ms)
            return await writer.write(batches)

    with _sink_failures():
        return SinkMessage(anyio.run(write))


def _commit(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    results = [message.result for message in messages if isinstance(message, SinkMessage)]
    with _sink_failures():
        anyio.run(commit_parts, options, results)


@contextmanager
def _sink_failures() -> Iterator[None]:
    """Raises the errors of brokers, name servers and queues as SinkFailed."""
    try:
        yield
    except NameServersUnreachable as error:
        raise SinkFailed(f"servers: {error}") from None
    except RecordsGone as error:  # its own text names options of the source
        gone = f"queue offsets {error.first} to {error.end - 1} of {error.what} are gone: {error.reason}"
        raise SinkFailed(f"the sink's batch is not stored: {gone}") from None
    except (ClientError, ProtocolError) as error:
        raise SinkFailed(f"the sink's batch is not stored: {error}") from None


def _say_aborted(messages: Sequence[WriterCommitMessage | None]) -> None:
    rows = sum(message.result.row_count for message in messages if isinstance(message, SinkMessage))
    _log.warning("sink.batch_aborted tasks=%d rows_stored_at_least=%d", len(messages), rows)
