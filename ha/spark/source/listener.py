"""Measures how far streams are behind their log: in messages, bytes and seconds, per queue.

Spark's API has no metrics for a Python source, so the listener reads the log on the driver after each batch of a query,
and while the query is idle. Usage:

    listener = LagListener({"path": "data/slave", "topic": "flights"}, publish=print, metrics_file="lag.prom")
    spark.streams.addListener(listener)

Seconds are the age of the oldest unread message, which is the delay of the results. Headroom is the number of messages
that retention can delete before it reaches unread ones. If headroom is 0 while there is a lag, retention deletes unread
messages next. A query that hangs reports nothing: monitor `measured_at_ms` as well.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from ha.arrow.places import LIGHT_QUEUE_PREFIX
from ha.arrow.read_options import ReadOptions
from ha.errors import HalogError
from ha.spark.metrics import quoted, replace_metrics
from ha.spark.source.log_source import LogSource, QueueKey, QueueSlice
from ha.spark.source.offsets import OffsetMap, decode_stream, subscribed
from ha.spark.source.opening import open_source
from ha.spark.source.options import SourceOptions, parse_any

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

logger = logging.getLogger("ha.spark")

_ENDED_MAX = 100
"""Maximum number of ended queries in the metrics."""


class QueueLag(msgspec.Struct, frozen=True, kw_only=True):
    """The lag of a query in one queue."""

    topic: str
    broker: str
    queue_id: int
    next_offset: int
    """Queue offset that the query reads next"""
    end_offset: int
    """Queue offset after the last message that can be read"""
    messages: int
    """Number of messages in the queue that the query has not read yet"""
    bytes: int | None
    """Size of the unread messages' records in bytes; None if unknown, because they are read from brokers (the
    source's option `servers`)"""
    seconds: float
    """Age of the oldest unread message in seconds; 0 if there is none or it can't be read"""
    headroom: int
    """Number of messages before `next_offset` that are still in the log"""
    lost: int
    """Number of messages deleted before they were read"""


class LagReport(msgspec.Struct, frozen=True, kw_only=True):
    """The lag of one query at the time `measured_at_ms` (ms since 1970)."""

    query: str
    """Name of the query, or its id if it has none"""
    query_id: str
    batch_id: int | None
    """Id of the last finished batch"""
    measured_at_ms: int
    queues: tuple[QueueLag, ...]

    @property
    def messages(self) -> int:
        """Number of messages in all queues that the query has not read yet."""
        return sum(queue.messages for queue in self.queues)

    @property
    def bytes(self) -> int | None:
        """Size of the unread messages' records in bytes; None if it is unknown for a queue."""
        sizes = [queue.bytes for queue in self.queues]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def seconds(self) -> float:
        """Age of the oldest unread message in seconds; 0 if there is none."""
        return max((queue.seconds for queue in self.queues), default=0.0)

    @property
    def lost(self) -> int:
        """Number of messages deleted before they were read."""
        return sum(queue.lost for queue in self.queues)


def measure_lag(source: LogSource, options: SourceOptions, positions: OffsetMap, now_ms: int) -> tuple[QueueLag, ...]:
    """Refreshes `source` and returns the lag of `positions` in each queue, sorted by queue.

    Subscribed queues without a position count as unread. `now_ms` is in ms since 1970. Raises OptionError as in
    `subscribed`, and the errors of `source`.
    """
    source.refresh()
    queues = sorted({*positions, *subscribed(source, options)})
    ranges = {queue: source.queue_range(queue) for queue in queues}
    oldest = {}
    for queue in queues:
        begin = max(positions.get(queue, 0), ranges[queue].begin)
        if begin < ranges[queue].end:
            oldest[queue] = begin
    stored_ms = _store_times(source, oldest)
    found = []
    for queue in queues:
        first, end = ranges[queue]
        position = positions.get(queue, first)
        unread = oldest.get(queue)
        found.append(
            QueueLag(
                topic=queue.topic,
                broker=queue.broker,
                queue_id=queue.queue_id,
                next_offset=position,
                end_offset=end,
                messages=0 if unread is None else end - unread,
                bytes=0 if unread is None else source.queue_bytes(queue, unread, end),
                seconds=max(0, now_ms - stored_ms[queue]) / 1000 if queue in stored_ms else 0.0,
                headroom=max(0, min(position, end) - first),
                lost=max(0, min(first, end) - position),
            )
        )
    return tuple(found)


def _store_times(source: LogSource, offsets: Mapping[QueueKey, int]) -> dict[QueueKey, int]:
    """Returns the store time in ms of the record at each of `offsets`; records that no longer exist are skipped."""
    slices = [QueueSlice(queue, offset, offset + 1) for queue, offset in sorted(offsets.items())]
    # The rows of light queues have other topics, so each of these queues is read alone.
    found = dict(_stored(source, [piece for piece in slices if not _is_light(piece.queue)]))
    for piece in slices:
        if _is_light(piece.queue):
            found.update((piece.queue, stored_ms) for _, stored_ms in _stored(source, [piece]))
    return found


def _is_light(queue: QueueKey) -> bool:
    return queue.topic.startswith(LIGHT_QUEUE_PREFIX)


def _stored(source: LogSource, slices: list[QueueSlice]) -> Iterator[tuple[QueueKey, int]]:
    """Yields the queue, as its rows name it, and the store time in ms of each record of `slices`."""
    if not slices:
        return
    options = ReadOptions(columns=("topic", "brokerName", "queueId", "storeTimestamp"), fail_on_data_loss=False)
    for batch in source.queue_partition(slices).read(options):
        for topic, broker, queue_id, stored in zip(*batch.columns, strict=True):
            if stored.is_valid:  # as a number: Python's dates end with the year 9999
                yield QueueKey(topic.as_py(), broker.as_py(), queue_id.as_py()), stored.value // 1000


class LagListener(StreamingQueryListener):
    """Measures the lag of each query that reads the log given by `options`, which are those of the source.

    `publish` is called with each LagReport, on Spark's listener thread. `metrics_file` is rewritten with the newest
    report of each query, in Prometheus' text format, for the textfile collector. The last 100 queries that ended stay
    in it, marked as inactive. A query is measured at most once per `interval_s`. `queries` limits measuring to queries
    with these names (an unnamed query's name is its id). `source` is the index of the source within a query that reads
    several logs (default: the first Python source).

    Errors of measuring, of `publish` and of writing the file are logged: a listener never stops a query. The
    constructor raises OptionError if the options are invalid.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        *,
        publish: Callable[[LagReport], None] | None = None,
        metrics_file: str | Path | None = None,
        interval_s: float = 5.0,
        queries: Iterable[str] | None = None,
        source: int | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._options = parse_any(options)
        self._publish = publish
        self._metrics_file = None if metrics_file is None else Path(metrics_file)
        self._interval_ms = round(interval_s * 1000)
        self._queries = None if queries is None else frozenset(queries)
        self._source_index = source
        self._clock_ms = clock_ms
        self._names: dict[str, str] = {}
        self._last: dict[str, tuple[str, int]] = {}
        self._reports: dict[str, LagReport] = {}
        self._ended: dict[str, None] = {}
        """Ids of ended queries that have a report, in the order in which they ended"""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Stores the query's name, and removes an earlier query with this name and another id."""
        query_id = str(event.id)
        if event.name is not None:  # started again without its checkpoint, a query has another id
            for former in [known for known, name in self._names.items() if name == event.name and known != query_id]:
                self._forget(former)
        self._names[query_id] = event.name or query_id
        self._ended.pop(query_id, None)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Measures the query's lag, unless the last measurement is less than `interval_s` seconds old."""
        progress = event.progress
        query_id = str(progress.id)
        self._names[query_id] = progress.name or query_id
        end_offset = self._end_offset(progress.sources)
        if end_offset is not None:
            self._last[query_id] = end_offset, progress.batchId
            self._measure(query_id)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Measures the lag of a query that has no new batch, if it had one before: messages may be waiting all the
        same."""
        if str(event.id) in self._last:
            self._measure(str(event.id))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Marks the query as inactive in the metrics. If more than _ENDED_MAX queries have ended, removes the first of
        them."""
        query_id = str(event.id)
        if query_id not in self._reports:
            self._forget(query_id)
            return
        self._ended[query_id] = None
        if len(self._ended) > _ENDED_MAX:
            self._forget(next(iter(self._ended)))
        self._write_metrics()

    def _forget(self, query_id: str) -> None:
        for table in (self._names, self._last, self._reports, self._ended):
            table.pop(query_id, None)

    def _end_offset(self, sources: Iterable[Any]) -> str | None:
        """Returns the JSON of the batch's end offset in the measured source; None if there is none.

        The API shows only whether a source is written in Python. The measured source is the first one that is, unless
        the user gave its index.
        """
        for number, source in enumerate(sources):
            is_ours = "PythonMicroBatchStream" in str(source.description) and bool(source.endOffset)
            if is_ours and (self._source_index is None or number == self._source_index):
                return str(source.endOffset)
        return None

    def _measure(self, query_id: str) -> None:
        name = self._names.get(query_id, query_id)
        if self._queries is not None and name not in self._queries:
            return
        now_ms = self._clock_ms()
        known = self._reports.get(query_id)
        if known is not None and 0 <= now_ms - known.measured_at_ms < self._interval_ms:
            return
        end_offset, batch_id = self._last[query_id]
        try:
            with closing(open_source(self._options)) as source:
                positions = decode_stream(json.loads(end_offset), source.brokers()).positions
                queues = measure_lag(source, self._options, positions, now_ms)
        except (HalogError, OSError, ValueError) as error:  # ValueError: another source's offset
            logger.warning("lag.not_measured query=%r error=%r", name, str(error))
            return
        report = LagReport(query=name, query_id=query_id, batch_id=batch_id, measured_at_ms=now_ms, queues=queues)
        self._reports[query_id] = report
        if report.lost:
            logger.warning("lag.messages_lost query=%r count=%d", name, report.lost)
        self._write_metrics()
        if self._publish is not None:
            try:
                self._publish(report)
            except Exception:  # raised by the application
                logger.exception("lag.not_published query=%r", name)

    def _write_metrics(self) -> None:
        if self._metrics_file is not None:
            replace_metrics(self._metrics_file, prometheus_text(self._reports.values(), self._ended))


_METRICS: tuple[tuple[str, str, Callable[[QueueLag], float | None]], ...] = (
    ("halog_stream_lag_messages", "Messages of the queue that the query has not read yet.", lambda lag: lag.messages),
    ("halog_stream_lag_bytes", "Bytes of these messages.", lambda lag: lag.bytes),
    ("halog_stream_lag_seconds", "Age of the oldest of these messages.", lambda lag: lag.seconds),
    ("halog_stream_headroom_messages", "Messages read already that are still in the log.", lambda lag: lag.headroom),
    ("halog_stream_lost_messages", "Messages deleted before the query read them.", lambda lag: lag.lost),
)


def prometheus_text(reports: Iterable[LagReport], ended: Iterable[str] = ()) -> str:
    """Returns `reports` in Prometheus' text format; queries whose id is in `ended` are marked as inactive."""
    reports, ended = list(reports), set(ended)
    lines = []
    for name, help_text, value_of in _METRICS:
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        for report in reports:
            for lag in report.queues:
                value = value_of(lag)
                labels = f'query="{quoted(report.query)}",topic="{quoted(lag.topic)}",broker="{quoted(lag.broker)}"'
                if value is not None:
                    lines.append(f'{name}{{{labels},queue="{lag.queue_id}"}} {value}')
    for name, help_text in (
        ("halog_stream_active", "1 while the query runs."),
        ("halog_stream_measured_timestamp_seconds", "When the query's lag was last measured."),
    ):
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        for report in reports:
            active = 0 if report.query_id in ended else 1
            value = active if name.endswith("active") else report.measured_at_ms / 1000
            lines.append(f'{name}{{query="{quoted(report.query)}"}} {value}')
    return "\n".join(lines) + "\n"
