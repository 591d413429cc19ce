"""Reads the log as a table, with a batch reader that plans in one process and is pickled for the tasks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing

from pyspark.sql.datasource import DataSourceReader, InputPartition

from ha.arrow.places import LIGHT_QUEUE_PREFIX
from ha.arrow.read_options import DEFAULT_COLUMNS, RowFilter
from ha.arrow.schema import QUEUE_COLUMNS
from ha.spark.source.log_source import LogPartition, LogSource
from ha.spark.source.offsets import check_topics_exist, ending_positions, starting_positions, subscribed
from ha.spark.source.opening import open_source
from ha.spark.source.options import SourceOptions
from ha.spark.source.planning import queue_tasks, slices_between
from ha.spark.source.positions import AtOffsets, AtTime, AtTimes
from ha.spark.source.worker import TaskReader
from ha.spark.worker_errors import without_traceback

logger = logging.getLogger("ha.spark")


class HalogReader(TaskReader, DataSourceReader):
    """Reads the rows that the options select.

    Does not accept a query's filters (`pushFilters`), so Spark applies them to the rows. Spark 4.2 keeps one plan for
    each loaded DataFrame: if a filter reduced what is read, other queries of the DataFrame, and other branches of the
    same query, would lack rows. A reader learns neither of these queries nor of their filters.
    """

    @without_traceback()
    def partitions(self) -> Sequence[InputPartition]:
        """Plans the tasks for the log as it is now; messages stored later are not read. Errors as in `open_source` and
        `plan_batch`.

        With `servers`, logs the names of the brokers that are read: a broker that is not registered now is missing
        without an error.
        """
        with closing(open_source(self.options)) as source:
            if self.options.servers:
                logger.info("source.brokers_read brokers=%s", ",".join(source.brokers()))
            return plan_batch(source, self.options, self.columns)


def plan_batch(
    source: LogSource, options: SourceOptions, columns: tuple[str, ...] = DEFAULT_COLUMNS
) -> list[LogPartition]:
    """Returns the tasks of a batch.

    Whole topics are read by physical range, in the order of the disk, if `LogSource.range_partitions` returns tasks for
    them. They are read by queue if maxRecordsPerPartition is set, or if neither the columns nor the options `tags` and
    `keys` need a record. Everything else is read by queue, too. Raises RecordsGone as in `slices_between`; OptionError
    for invalid offsets or topics; and the errors of `source`.
    """
    check_topics_exist(source, options)
    if options.reads_whole_topics and options.max_records_per_partition is None:
        topics = source.topics() if options.reads_everything else {queue.topic for queue in subscribed(source, options)}
        # If queue entries have all that is needed (as for a count), no record is read. Reading by queue is then
        # faster, by 80 ns per record. But a light queue may have records of other queues, which a range has only once.
        is_light = any(topic.startswith(LIGHT_QUEUE_PREFIX) for topic in topics)
        if is_light or options.where != RowFilter() or not QUEUE_COLUMNS.issuperset(columns):
            wanted = None if options.reads_everything else frozenset(topics)
            count_min = options.min_partitions or options.cores
            ranges = source.range_partitions(options.max_bytes_per_partition, count_min, wanted)
            if ranges is not None:
                return ranges
    queues = subscribed(source, options)
    start = starting_positions(source, options, queues)
    end = ending_positions(source, options, queues)
    if not isinstance(options.starting, AtOffsets) or isinstance(options.ending, AtTime | AtTimes):
        # Times may cross offsets: a start later than the end means an empty range, not lost records.
        end = {queue: max(offset, start[queue]) for queue, offset in end.items()}
    slices = slices_between(source, start, end, fail_on_data_loss=options.fail_on_data_loss)
    return queue_tasks(slices, source, options)
