"""Implements `LogSource` over store directories, several of which may hold replicas of one broker's log.

Replicas of a log have the same bytes at the same physical offsets, so any of them can be read. The driver plans with
the longest one, and a task switches to another one if reading fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pyarrow as pa

from ha.arrow.log_reader import LogReader
from ha.arrow.places import LIGHT_QUEUE_PREFIX
from ha.arrow.read_options import ReadOptions, RowFilter
from ha.errors import RecordsGone, StoreUnreadable
from ha.spark.source.log_source import Brokers, LogPartition, LogSource, QueueKey, QueueRange, QueueSlice
from ha.spark.source.stores import Paths, find_stores

logger = logging.getLogger("ha.spark")

_SHARE_READ_BY_RANGE = 0.25
"""Minimum share of the log (0 to 1) that the topics of a query must have together to be read by physical range; with
less, they are read by queue. If each record has 1 KiB, a quarter of the records touches two thirds of the log's pages.
"""


class LocalSource(LogSource):
    """Implements `LogSource` over directories. Takes no lock and writes nothing; brokers may be running.

    The constructor and `refresh` raise StoreUnreadable if no replica of a broker can be read; if one of several can't,
    it is tried again at each refresh. The constructor also raises the errors of `find_stores`.
    """

    def __init__(self, paths: Sequence[str], broker_names: Sequence[str] = ()) -> None:
        found = find_stores(paths, broker_names)
        self._stores, self._brokers = found.replicas, found.brokers
        self._readers: dict[tuple[str, str], LogReader] = {}
        self._best: dict[str, Paths] = {}
        self._queues: dict[frozenset[str] | None, list[QueueKey]] = {}
        self._ranges: dict[QueueKey, QueueRange] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Reads the directories again, and chooses the replica from which each broker is read.

        Returns False if nothing has changed.
        """
        changed = [self._refresh_broker(broker, paths) for broker, paths in self._stores.items()]
        if any(changed):
            self._queues.clear()
            self._ranges.clear()
        return any(changed)

    def _refresh_broker(self, broker: str, paths: Paths) -> bool:
        reach: dict[str, tuple[int, int]] = {}
        refused: StoreUnreadable | None = None
        has_changed = False
        for path in paths:
            known = reader = self._readers.get((broker, path))
            is_changed = True
            try:
                if reader is None:
                    reader = LogReader(path, broker_name=broker)
                else:
                    is_changed = reader.refresh()
                # Comparing ends examines all queues, which is not needed for a single replica.
                reach[path] = (-reader.queued_end(), reader.min_offset) if len(paths) > 1 else (0, 0)
            except (StoreUnreadable, OSError) as found:
                error = found
                if isinstance(error, OSError):
                    error = StoreUnreadable(Path(path), error.strerror or str(error))
                refused = refused or error
                if reader is not None:
                    reader.close()
                if known is not None:
                    del self._readers[broker, path]
                    has_changed = True
                    logger.warning("source.replica_unreadable path=%s broker=%s error=%r", str(path), broker, error)
            else:
                self._readers[broker, path] = reader
                has_changed = has_changed or is_changed
        if not reach:
            assert refused is not None
            raise refused
        if has_changed:
            # The longest replica comes first; then the one that begins earlier, then the one that was read so far.
            last = self._best.get(broker, paths)
            order = sorted(reach, key=lambda path: (reach[path], last.index(path) if path in last else len(last)))
            self._best[broker] = tuple(order)
        return has_changed

    def _reader(self, broker: str) -> LogReader:
        return self._readers[broker, self._best[broker][0]]

    def brokers(self) -> Brokers:
        """Returns the brokers' names, in the order of their first path."""
        return self._brokers

    def min_offset(self, broker: str) -> int:
        """Returns the physical offset at which the log of `broker` begins."""
        return self._reader(broker).min_offset

    def queues(self, topics: frozenset[str] | None) -> list[QueueKey]:
        """Returns the queues of `topics` (None: of all topics), sorted."""
        if topics not in self._queues:
            self._queues[topics] = sorted(
                QueueKey(queue.topic, broker, queue.queue_id)
                for broker in self._stores
                for queue in self._reader(broker).queues(topics)
            )
        return list(self._queues[topics])

    def topics(self) -> list[str]:
        """Returns the topics that have a queue, sorted."""
        return sorted({topic for broker in self._stores for topic in self._reader(broker).topics()})

    def queue_range(self, queue: QueueKey) -> QueueRange:
        """Returns the readable queue offsets of `queue`."""
        found = self._ranges.get(queue)
        if found is None:
            begin, end = self._reader(queue.broker).queue_range(queue.topic, queue.queue_id)
            self._ranges[queue] = found = QueueRange(begin, end)
        return found

    def offset_for_time(self, queue: QueueKey, timestamp_ms: int) -> int | None:
        """Returns the queue offset of the first message stored at or after `timestamp_ms`; None if there is none."""
        return self._reader(queue.broker).offset_for_time(queue.topic, queue.queue_id, timestamp_ms)

    def physical_offset(self, queue: QueueKey, queue_offset: int) -> int:
        """Returns the physical offset of a message, from the consume queue."""
        return self._reader(queue.broker).physical_offset(queue.topic, queue.queue_id, queue_offset)

    def queue_bytes(self, queue: QueueKey, begin: int, end: int) -> int:
        """Returns the size of the records [begin, end) in bytes, from the consume queue."""
        return self._reader(queue.broker).queue_bytes(queue.topic, queue.queue_id, begin, end)

    def queue_partition(self, slices: Sequence[QueueSlice]) -> LogPartition:
        """Returns a task's partition for `slices`."""
        brokers = {part.queue.broker for part in slices}
        return QueuePartition(tuple(slices), {broker: self._best[broker] for broker in brokers})

    def range_partitions(
        self, bytes_each: int, count_min: int, topics: frozenset[str] | None
    ) -> list[LogPartition] | None:
        """Returns tasks that read `topics` (None: all) in physical ranges of the logs.

        In the order of the disk every page is read once, whereas each queue of a topic is spread over the whole log.
        Returns None if `topics` have less than _SHARE_READ_BY_RANGE of the log, if one of them is a light
        queue (its records may belong to other queues, and a range has each of them only once), or if there are batch
        queues, which can't be read by range. Raises StoreUnreadable if a log has records but no queues.
        """
        if topics is not None and any(topic.startswith(LIGHT_QUEUE_PREFIX) for topic in topics):
            return None
        if any(_has_batch_queues(self._best[broker][0]) for broker in self._stores):
            return None
        wanted = 0
        if topics is not None:
            wanted = sum(self.queue_bytes(queue, *self.queue_range(queue)) for queue in self.queues(topics))
            # Decides most cases without examining the queues of other topics.
            if wanted < _SHARE_READ_BY_RANGE * sum(self._reader(broker).size_min() for broker in self._stores):
                return None
        bounds = {}
        for broker in self._stores:
            reader = self._reader(broker)
            reader.check_has_queues()
            begin, end = reader.min_offset, reader.end_offset()
            if begin < end:
                bounds[broker] = begin, end
        total = sum(end - begin for begin, end in bounds.values())
        if topics is not None and wanted < total * _SHARE_READ_BY_RANGE:
            return None
        each = max(1, min(bytes_each, -(-total // max(1, count_min))))
        return [
            RangePartition(broker, self._best[broker], first, last, topics)
            for broker, (begin, end) in bounds.items()
            for first, last in self._reader(broker).split(begin, end, each)
        ]

    def close(self) -> None:
        """Unmaps all files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def _has_batch_queues(path: str) -> bool:
    return next(Path(path, "batchconsumequeue").glob("*/*"), None) is not None


class QueuePartition(LogPartition):
    """Reads slices of queues, one after the other. `replicas`: broker -> its directories, see `Paths`."""

    def __init__(self, slices: tuple[QueueSlice, ...], replicas: Mapping[str, Paths]) -> None:
        super().__init__()
        self.slices = slices
        self.replicas = dict(replicas)

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Yields the rows in the slices' order."""
        with closing(_Replicas(self.replicas, options)) as replicas:
            for queue, begin, end in self.slices:

                def rows(
                    reader: LogReader, at: int, options: ReadOptions, queue: QueueKey = queue, end: int = end
                ) -> _Batches:
                    return reader.read_queue(queue.topic, queue.queue_id, at, end, options)

                yield from replicas.read(queue.broker, begin, "queueOffset", rows)


class RangePartition(LogPartition):
    """Reads the queued records of `topics` (None: of all) that begin at physical offsets [begin, end) of a log."""

    def __init__(self, broker: str, paths: Paths, begin: int, end: int, topics: frozenset[str] | None = None) -> None:
        super().__init__()
        self.broker = broker
        self.paths = paths
        self.begin = begin
        self.end = end
        self.topics = topics

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        """Yields the rows in physical order."""
        options = msgspec.structs.replace(options, where=options.where.restrict(RowFilter(topics=self.topics)))

        def rows(reader: LogReader, at: int, options: ReadOptions) -> _Batches:
            return reader.read_range(at, self.end, options)

        with closing(_Replicas({self.broker: self.paths}, options)) as replicas:
            yield from replicas.read(self.broker, self.begin, "physicalOffset", rows)


_Batches = Iterator[pa.RecordBatch]
_Rows = Callable[[LogReader, int, ReadOptions], _Batches]


class _Replicas:
    """A task's readers, one per broker at a time. If a reader fails, one of the next replica replaces it."""

    def __init__(self, paths: Mapping[str, Paths], options: ReadOptions) -> None:
        self._paths = dict(paths)
        self._options = options
        self._open: dict[str, LogReader] = {}

    def read(self, broker: str, begin: int, position: str, rows: _Rows) -> _Batches:
        """Yields the batches that `rows` reads from `begin` on; on failure, continues with the next replica.

        The column `position` of the last batch shows where to continue. Raises the error of the last replica.
        """
        columns = self._options.columns
        while True:
            others = len(self._paths[broker]) > 1
            options = self._options
            if others:
                # Another replica may still have missing records, so they are an error regardless of the option.
                more = columns if position in columns else (*columns, position)
                options = msgspec.structs.replace(options, fail_on_data_loss=True, columns=more)
            try:
                reader = self._open.get(broker)
                if reader is None:
                    reader = self._open[broker] = LogReader(self._paths[broker][0], broker_name=broker)
                for batch in rows(reader, begin, options):
                    if not others:
                        yield batch
                    elif batch.num_rows:
                        begin = batch.column(position)[-1].as_py() + 1
                        yield batch.select(list(columns))
                return
            except (StoreUnreadable, RecordsGone, OSError) as error:
                if not others:
                    raise
                logger.warning(
                    "source.replica_failed path=%s broker=%s error=%r", self._paths[broker][0], broker, error
                )
                self._paths[broker] = self._paths[broker][1:]
                self._close(broker)

    def _close(self, broker: str) -> None:
        reader = self._open.pop(broker, None)
        if reader is None:
            return
        counts = reader.counts
        if counts.damaged or counts.gone:
            logger.warning(
                "source.records_missing path=%s damaged=%d skipped=%d gone=%d",
                reader.path,
                counts.damaged,
                counts.skipped,
                counts.gone,
            )
        reader.close()

    def close(self) -> None:
        for broker in list(self._open):
            self._close(broker)
