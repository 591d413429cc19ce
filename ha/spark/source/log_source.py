"""What planning asks of a log, wherever its bytes are.

Planning (offsets, limits, partitions) is written once over `LogSource`. There are two: `local` reads store
directories, `network` asks brokers. The driver holds the source; what a task gets is a `LogPartition`, which carries
names and numbers only and opens what it needs where it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ha.arrow.read_options import ReadOptions, RowFilter


class QueueKey(NamedTuple):
    """One queue of one broker. Sorts by topic, then broker, then number."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic} queue {self.queue_id} of {self.broker}"


class QueueRange(NamedTuple):
    """Queue offsets [begin, end) that can be read; (0, 0) for a queue that is not there."""

    begin: int
    end: int


class QueueSlice(NamedTuple):
    """Queue offsets [begin, end) of one queue."""

    queue: QueueKey
    begin: int
    end: int

    @property
    def entry_count(self) -> int:
        return self.end - self.begin


class LogPartition(InputPartition):
    """What one task reads. Must be picklable: no open file, no connection."""

    def __init__(self) -> None:
        super().__init__(None)

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Yield the rows, a batch of `options.columns` at a time. Runs on an executor.

        RecordsGone where records that were planned are no longer there, unless options.fail_on_data_loss is off.
        """
        raise NotImplementedError


class LogSource(Protocol):
    """The log as the driver sees it. Used by one thread; may keep state and connections between calls."""

    def refresh(self) -> None:
        """Look again: queues, ranges. Between two calls all answers fit together."""

    def brokers(self) -> tuple[str, ...]:
        """The brokers' names, in the order given. Offsets are written without them if there is only one."""

    def queues(self, topics: frozenset[str] | None) -> list[QueueKey]:
        """All queues of `topics` (None: of every topic; the network source refuses None if it can't list), sorted."""

    def topics(self) -> list[str]:
        """Every topic that has a queue, sorted; what `subscribePattern` is matched with."""

    def queue_range(self, queue: QueueKey) -> QueueRange:
        """What can be read of `queue` now, bounded by what is confirmed."""

    def offset_for_time(self, queue: QueueKey, timestamp_ms: int) -> int | None:
        """The first queue offset stored at or after `timestamp_ms`; None if there is none."""

    def queue_bytes(self, queue: QueueKey, begin: int, end: int) -> int | None:
        """The size of records [begin, end) in bytes; None if that can't be told without reading them."""

    def queue_partition(self, slices: Sequence[QueueSlice]) -> LogPartition:
        """What a task needs to read `slices`, in this order."""

    def range_partitions(self, bytes_each: int, count_min: int, where: RowFilter) -> list[LogPartition] | None:
        """The whole log cut into physical ranges, at least `count_min` of them, each of about `bytes_each` or less.

        `where` may spare some of it (physical offsets, brokers); what it does not spare, tasks filter. None if the log
        can't be read that way: then each queue is read by itself.
        """

    def close(self) -> None:
        """Let go of files and connections."""
