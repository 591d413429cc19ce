"""Implements the option isolation=read_committed: a `LogSource` that hides the uncommitted rows of another one.

`commits.py` finds the committed rows. A batch query first reads the commits, and then each queue to its end. It returns
all rows of these commits, and no row of a later one.

A stream stops before the first row that may still be committed, so that this row comes in a later micro-batch; to find
it, the driver reads the properties of every row once. A query that died in the middle of a batch and is never restarted
therefore blocks the streams that read its topic, like an open transaction in Kafka; so does a batch write whose driver
died. The log names a batch that blocks a stream for a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa

from ha.arrow.read_options import ReadOptions
from ha.spark.sink.commits import COLUMNS_NEEDED, Commits
from ha.spark.sink.control import decode_control
from ha.spark.sink.identity import SinkPart
from ha.spark.sink.options import COMMIT_TOPIC
from ha.spark.source.log_source import Brokers, LogPartition, LogSource, QueueKey, QueueRange, QueueSlice

_log = logging.getLogger(__name__)

_HELD_S = 60.0
"""Time in seconds after which a row that may still be committed, and at which a queue ends, is logged, and after which
its batch is logged again"""


class CommittedSource(LogSource):
    """Filters the rows of `inner`. `stops_at_pending`: whether each queue ends before its first row that may still be
    committed (for streams). `clock_s`: a monotonic clock in seconds."""

    def __init__(
        self,
        inner: LogSource,
        *,
        stops_at_pending: bool,
        commit_topic: str = COMMIT_TOPIC,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._stops_at_pending = stops_at_pending
        self._commit_topic = commit_topic
        self._commits = Commits()
        self._commits_read: dict[QueueKey, int] = {}
        self._stable: dict[QueueKey, int] = {}
        self._ranges: dict[QueueKey, QueueRange] = {}
        self._are_fresh = False
        self._clock_s = clock_s
        self._held: dict[QueueKey, tuple[int, float]] = {}  # the queue offset at which a queue ends, and since when
        self._held_logged_s: dict[tuple[str, int], float] = {}  # (sink, batch) -> time of the last line

    def refresh(self) -> bool:
        """Refreshes `inner` and the commits; returns False if nothing has changed."""
        has_changed = self._inner.refresh()
        if has_changed:
            self._ranges.clear()
            self._are_fresh = False
        return has_changed

    def brokers(self) -> Brokers:
        """Returns the brokers of `inner`."""
        return self._inner.brokers()

    def min_offset(self, broker: str) -> int | None:
        """Returns the physical offset at which the log of `broker` begins; None if `inner` does not know it."""
        return self._inner.min_offset(broker)

    def queues(self, topics: frozenset[str] | None) -> list[QueueKey]:
        """Returns the queues of `topics` in `inner`; for a batch query, first reads the commits."""
        if not self._stops_at_pending:
            self._read_commits()  # before any range: `inner` may fetch those of all known queues at once
        return self._inner.queues(topics)

    def topics(self) -> list[str]:
        """Returns the topics of `inner`."""
        return self._inner.topics()

    def queue_range(self, queue: QueueKey) -> QueueRange:
        """Returns the range of `queue` in `inner`; for a stream, up to the first row that may still be committed."""
        if queue not in self._ranges:
            begin, end = self._inner.queue_range(queue)
            if self._stops_at_pending and begin < end:
                # The commits are read after the range: rows without a commit are undecided.
                end = self._stable_end(queue, begin, end, self._read_commits())
            self._ranges[queue] = QueueRange(begin, end)
        return self._ranges[queue]

    def offset_for_time(self, queue: QueueKey, timestamp_ms: int) -> int | None:
        """Returns the queue offset of the first message stored at or after `timestamp_ms`.

        None if there is none, or if it is not before the end of `queue_range`.
        """
        found = self._inner.offset_for_time(queue, timestamp_ms)
        return found if found is not None and found < self.queue_range(queue).end else None

    def physical_offset(self, queue: QueueKey, queue_offset: int) -> int:
        """Returns the physical offset of a message in `inner`."""
        return self._inner.physical_offset(queue, queue_offset)

    def queue_bytes(self, queue: QueueKey, begin: int, end: int) -> int | None:
        """Returns the size of all records [begin, end) in bytes, committed or not; None if `inner` does not know it."""
        return self._inner.queue_bytes(queue, begin, end)

    def queue_partition(self, slices: Sequence[QueueSlice]) -> LogPartition:
        """Returns a task's partition for `slices`, with the commits that it needs."""
        return CommittedPartition(self._inner.queue_partition(slices), self._read_commits().within(slices))

    def range_partitions(
        self, bytes_each: int, count_min: int, topics: frozenset[str] | None
    ) -> list[LogPartition] | None:
        """Returns None: commits contain queue offsets, so only reads by queue can be filtered."""
        return None

    def close(self) -> None:
        """Closes `inner`."""
        self._inner.close()

    def _read_commits(self) -> Commits:
        if not self._are_fresh:
            slices = []
            for queue in self._inner.queues(frozenset({self._commit_topic})):
                begin, end = self._inner.queue_range(queue)
                begin = _resumed(self._commits_read, queue, begin, end)
                if begin < end:
                    slices.append(QueueSlice(queue, begin, end))
            if slices:
                columns = ("topic", "brokerName", "queueId", "queueOffset", "body")
                options = ReadOptions(columns=columns, fail_on_data_loss=False)
                for batch in self._inner.queue_partition(slices).read(options):
                    for *queue_of, offset, body in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                        if body:  # null where a record is damaged
                            record = decode_control(body)
                            if record is not None:
                                self._commits.add([record])
                            self._commits_read[QueueKey(*queue_of)] = offset + 1
            self._are_fresh = True
        return self._commits

    def _stable_end(self, queue: QueueKey, begin: int, end: int, commits: Commits) -> int:
        at = _resumed(self._stable, queue, begin, end)
        if at < end:
            options = ReadOptions(columns=COLUMNS_NEEDED, fail_on_data_loss=False)
            for batch in self._inner.queue_partition([QueueSlice(queue, at, end)]).read(options):
                pending = commits.first_pending(batch)
                if pending is not None:
                    row, part = pending
                    at = batch.column("queueOffset")[row].as_py()
                    self._note_held(queue, at, part)
                    break
                known = batch.column("queueOffset").drop_null()  # null where a record is damaged
                at = known[-1].as_py() + 1 if len(known) else at
        self._stable[queue] = at
        return at

    def _note_held(self, queue: QueueKey, queue_offset: int, part: SinkPart) -> None:
        """Logs a batch whose row at `queue_offset` has held the stream for _HELD_S; at most once a minute."""
        now = self._clock_s()
        held_at, since = self._held.get(queue, (-1, now))
        if held_at != queue_offset:
            self._held[queue] = (queue_offset, now)
        elif min(now - since, now - self._held_logged_s.get((part.sink, part.batch), since)) >= _HELD_S:
            self._held_logged_s[part.sink, part.batch] = now
            _log.warning(
                "stream.held topic=%r broker=%s queue=%d queue_offset=%d sink=%s batch=%d for_s=%d",
                queue.topic,
                queue.broker,
                queue.queue_id,
                queue_offset,
                part.sink,
                part.batch,
                now - since,
            )


def _resumed(ends: Mapping[QueueKey, int], queue: QueueKey, begin: int, end: int) -> int:
    """Returns the queue offset at which to continue in a queue that has the queue offsets [begin, end) and was read up
    to `ends[queue]`.

    If the queue ends before `ends[queue]`, its topic was created again, and the result is its first offset. `ends`
    comes from messages that were read, not from ends of queues: a queue may be empty for a moment, while a resync
    copies the log again.
    """
    at = max(begin, ends.get(queue, begin))
    return at if at <= end else begin


class CommittedPartition(LogPartition):
    """Reads `inner`, and skips rows that a sink wrote and that no commit in `commits` names."""

    def __init__(self, inner: LogPartition, commits: Commits) -> None:
        super().__init__()
        self.inner = inner
        self.commits = commits

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Yields the committed rows. Raises OptionError as in `Commits.mask`."""
        columns = options.columns
        more = tuple(name for name in COLUMNS_NEEDED if name not in columns)
        for batch in self.inner.read(msgspec.structs.replace(options, columns=(*columns, *more))):
            yield self.commits.committed(batch).select(list(columns))
