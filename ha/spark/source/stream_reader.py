"""Reads the log as a stream: micro-batches between two positions of every queue.

The reader on the driver lives as long as the query, in one Python process, and keeps the log open. State that must
survive that process is in the offsets (see `offsets`): a batch that is run again after a restart reads the same
records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from ha.arrow.queues import UNWRITTEN
from ha.spark.source.limits import TriggerDelay, limit_bytes, limit_records, record_count
from ha.spark.source.log_source import LogPartition, LogSource, QueueKey
from ha.spark.source.offsets import (
    OffsetMap,
    StreamOffset,
    decode_stream,
    encode_positions,
    encode_stream,
    missing_topics,
    starting_positions,
    subscribed,
)
from ha.spark.source.opening import open_source
from ha.spark.source.options import SourceOptions
from ha.spark.source.planning import queue_tasks, report_loss, slices_between, wait_for
from ha.spark.source.positions import LATEST, AtEdge, AtOffsets, AtTime, AtTimes
from ha.spark.source.worker import TaskReader
from ha.spark.worker_errors import without_traceback

logger = logging.getLogger("ha.spark")

_LOOK_FREE_S = 0.001
_LOOK_REST_FACTOR = 4
_LOOK_REST_MAX_S = 1.0
"""Maximum delay of an examination of the log after one that found nothing and took longer than _LOOK_FREE_S. The delay
is _LOOK_REST_FACTOR times the duration of that examination, so that an idle query costs about a fifth of a core (more
if an examination takes over 0.25 s). Spark polls an idle query every 10 ms, and examining 256 queues takes as long.
"""

_TASKS_EXPECTED = 256
"""Number of tasks above which a micro-batch without a limit causes a warning, as it has no result until all tasks are
done.
"""


class StreamPlanner:
    """Plans the micro-batches of a stream reader on the driver, over any `LogSource`. Not thread-safe."""

    def __init__(
        self, source: LogSource, options: SourceOptions, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._options = options
        self._clock_s = clock_s
        self._delay = TriggerDelay(
            options.min_offsets_per_trigger or 0, options.max_trigger_delay_ms, lambda: int(clock_s() * 1000)
        )
        self._rests_until_s = 0.0
        self._target: OffsetMap | None = None
        self._latest: OffsetMap = {}
        self._read_up: dict[str, Any] | None = None

    def initial(self) -> dict[str, Any]:
        """Returns the offset at which a new query starts. Raises OptionError as in `starting_positions`."""
        self._source.refresh()
        for topic in missing_topics(self._source, self._options):
            logger.warning('stream.topic_missing topic=%r hint="it is read from its first message on"', topic)
        positions = starting_positions(self._source, self._options, subscribed(self._source, self._options))
        initial = "latest" if self._may_be_latest() else "offsets"
        offset = StreamOffset(positions=positions, initial=initial, read=self._read_places(positions))
        return encode_stream(offset, self._source.brokers())

    def _may_be_latest(self) -> bool:
        starting = self._options.starting
        if isinstance(starting, AtOffsets):
            return any(offset == LATEST for queues in starting.offsets.values() for offset in queues.values())
        if isinstance(starting, AtTime | AtTimes):
            return self._options.no_match == "latest"
        return starting == AtEdge(LATEST)

    def freeze(self) -> None:
        """Fixes the current ends of the queues as the end of the query (Trigger.AvailableNow)."""
        self._source.refresh()
        self._target = self._ends()

    def _look(self) -> bool:
        """Refreshes the log, unless the last refresh was recent, expensive and found nothing.

        Returns whether the log may have changed.
        """
        began_s = self._clock_s()
        if began_s < self._rests_until_s or not self._source.refresh():
            return False
        ends = self._ends()
        took_s = self._clock_s() - began_s
        if ends == self._latest and took_s > _LOOK_FREE_S:
            self._rests_until_s = began_s + took_s + min(_LOOK_REST_MAX_S, _LOOK_REST_FACTOR * took_s)
        return True

    def _ends(self) -> OffsetMap:
        return {queue: self._source.queue_range(queue).end for queue in subscribed(self._source, self._options)}

    def latest(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Returns the offset at which the next batch ends, within `limit` and the options' limits; with
        ReadAllAvailable, without any limit.

        Returns `start` itself if there is no batch yet. Raises RecordsGone as in `_still_there`; OptionError if `start`
        may be an offset of other brokers.
        """
        if not self._look() and start == self._read_up:
            return start
        brokers = self._source.brokers()
        at = decode_stream(start, brokers)
        start_of = self._still_there(at)
        self._latest = self._ends()
        ends = self._latest if self._target is None else self._target
        appeared: OffsetMap = {}
        for queue in ends:
            if queue not in start_of:
                begin = self._source.queue_range(queue).begin
                if begin < ends[queue]:
                    appeared[queue] = begin
        start_of |= appeared
        end_of = {queue: max(offset, ends.get(queue, offset)) for queue, offset in start_of.items()}
        is_read_up = at.initial is None and end_of == at.positions and not appeared
        self._read_up = start if is_read_up else None
        if not isinstance(limit, ReadAllAvailable):
            end_of = self._limited(start_of, end_of, limit)
        unchanged = end_of == at.positions and appeared.keys().isdisjoint(at.positions)
        if unchanged and at.initial != "latest":
            return start
        # A query that starts at "latest" runs one empty batch, so that its checkpoint stores that position.
        started = dict(start_of) if at.initial is not None else appeared
        return encode_stream(StreamOffset(positions=end_of, started=started, read=self._read_places(end_of)), brokers)

    def _still_there(self, at: StreamOffset) -> OffsetMap:
        """Returns the positions without those of queues that were deleted, or created again. If a queue's end moved
        back, its position is that end. The position of a queue that is away (see `LogSource.is_away`) stays.

        Raises RecordsGone for deleted queues and for ends that moved back, unless failOnDataLoss is off. First waits
        for these ends; see `wait_for`.
        """
        positions = at.positions
        found = self._without_created_again(at)
        for queue, end in self._wait_for(found).items():
            reason = "its topic was deleted" if end == 0 else f"the queue went back to {end}; this is another log now"
            report_loss(self._options.fail_on_data_loss, str(queue), end, positions[queue], reason)
            if end == 0:
                del found[queue]
            else:
                found[queue] = end
        return found

    def _without_created_again(self, at: StreamOffset) -> OffsetMap:
        """Returns the positions without those of queues whose last read message has been replaced by another one.

        Raises RecordsGone for such queues, unless failOnDataLoss is off; then all messages of the new topic are read.
        """
        found = dict(at.positions)
        for queue, offset in at.positions.items():
            last = min(offset, self._source.queue_range(queue).end) - 1
            if last < 0 or queue.broker not in at.read:
                continue
            if at.read[queue.broker] <= self._source.physical_offset(queue, last) < UNWRITTEN:
                reason = "its topic was deleted and created again, or this is another log now"
                report_loss(self._options.fail_on_data_loss, str(queue), 0, offset, reason)
                del found[queue]
        return found

    def _read_places(self, positions: OffsetMap) -> dict[str, int]:
        """Returns for each broker a physical offset after all messages before `positions`, if it is known.

        Empty with `servers`.
        """
        places: dict[str, int] = {}
        for queue, offset in positions.items() if not self._options.servers else ():
            if offset:
                place = self._source.physical_offset(queue, offset - 1)
                places[queue.broker] = max(places.get(queue.broker, 0), place + 1)
        return {broker: place for broker, place in places.items() if 0 < place <= UNWRITTEN}

    def _wait_for(self, positions: OffsetMap) -> OffsetMap:
        interval_s = self._options.offset_retry_interval_ms / 1000
        return wait_for(self._source, positions, self._options.offset_retries, lambda: time.sleep(interval_s))

    def _limited(self, start: OffsetMap, end: OffsetMap, limit: ReadLimit) -> OffsetMap:
        options = self._options
        records_min, records_max = options.min_offsets_per_trigger, options.max_offsets_per_trigger
        bytes_max = options.max_bytes_per_trigger
        if isinstance(limit, ReadMaxRows):
            records_max = limit.max_rows
        elif isinstance(limit, ReadMinRows):
            records_min = limit.min_rows
        elif isinstance(limit, ReadMaxBytes):
            bytes_max = limit.max_bytes
        # With AvailableNow nothing waits, as no more records are read.
        if records_min and self._target is None and self._delay.holds_back(record_count(start, end)):
            return start
        if records_max is not None:
            end = limit_records(records_max, start, end)
        if bytes_max is not None:
            end = limit_bytes(bytes_max, start, end, self._queue_bytes)
        return end

    def _queue_bytes(self, queue: QueueKey, begin: int, end: int) -> int:
        size = self._source.queue_bytes(queue, begin, end)
        assert size is not None  # with servers, the limit is refused
        return size

    def default_limit(self) -> ReadLimit:
        """Returns one of the limits that the options set; ReadAllAvailable if they set none.

        The API accepts only one limit. `latest` applies all that the options set, unless it is given ReadAllAvailable.
        """
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def report_latest(self) -> dict[str, Any] | None:
        """Returns the ends of the queues that `latest` found last, without limits; None if it was not called yet, or
        found no queue."""
        return dict(encode_positions(self._latest, self._source.brokers())) or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[LogPartition]:
        """Returns the tasks of a batch. Raises RecordsGone as in `slices_between` and in the source's `archived_tasks`,
        and for queues that were created again."""
        brokers = self._source.brokers()
        first, last = decode_stream(start, brokers), decode_stream(end, brokers)
        # After a restart of the broker, its log may first have to reach the offsets that were read before.
        self._wait_for(last.positions)
        slices = slices_between(
            self._source,
            first.positions | last.started,
            self._without_created_again(last),
            fail_on_data_loss=self._options.fail_on_data_loss,
        )
        record_count = sum(part.entry_count for part in slices)
        archived, slices = self._source.archived_tasks(slices)
        tasks = [*archived, *queue_tasks(slices, self._source, self._options)]
        if len(tasks) > _TASKS_EXPECTED and self._options.is_trigger_unlimited:
            logger.warning(
                'stream.batch_large tasks=%d records=%d hint="limit batches with maxBytesPerTrigger, such as 16g"',
                len(tasks),
                record_count,
            )
        return tasks

    def close(self) -> None:
        """Closes the log."""
        self._source.close()


class HalogStreamReader(TaskReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Implements Spark's stream reader. The driver uses a planner, created at the first call; tasks only `read`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._planner: StreamPlanner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}

    @property
    def planner(self) -> StreamPlanner:
        """The planner. The first access creates it and opens the log, with the errors of `open_source`."""
        if self._planner is None:
            self._planner = StreamPlanner(open_source(self.options), self.options)
        return self._planner

    @without_traceback()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Returns the offset at which a new query starts."""
        return self.planner.initial()

    @without_traceback()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Returns the offset at which the next batch ends."""
        return self.planner.latest(start, limit)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Returns the limit that the options set; see `StreamPlanner.default_limit`."""
        return self.planner.default_limit()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Returns the last known ends of the queues; see `StreamPlanner.report_latest`."""
        return self.planner.report_latest()

    @without_traceback()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fixes the current ends of the queues as the end of the query."""
        self.planner.freeze()

    @without_traceback()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Returns the tasks of a batch."""
        return self.planner.partitions(start, end)

    def stop(self) -> None:
        """Closes the log."""
        if self._planner is not None:
            self._planner.close()
            self._planner = None
