"""Reads a partition in a task, for batches and streams, and tunes the Python process that the task runs in."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from ha.heap import keep_heap
from ha.spark.source.log_source import LogPartition
from ha.spark.source.options import SourceOptions
from ha.spark.source.schema import batch_schema, columns_of, conform, read_columns
from ha.spark.worker_errors import without_traceback


class TaskReader:
    """The part of a reader that runs in tasks. The constructor raises OptionError as in `columns_of`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options = options
        self._selected = columns_of(schema, kafka=options.kafka_columns)
        self.columns = read_columns(self._selected, kafka=options.kafka_columns)
        self.schema: pa.Schema = batch_schema(schema)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields a task's rows; none for a partition of another class, which Spark passes to a task of a batch if none
        was planned. Errors as in `LogPartition.read`."""
        if not isinstance(partition, LogPartition):
            return
        keep_heap()
        with without_traceback():
            for batch in partition.read(self.options.read_options(self.columns)):
                yield conform(batch, self.schema, self._selected)
        _freeze_imports()


@cache
def _freeze_imports() -> None:
    """Excludes the existing objects, mostly modules, from garbage collection. Further calls have no effect.

    Spark's worker collects garbage after each task. With the 50,000 objects of NumPy, pyarrow and PySpark, that took 20
    ms of CPU time, 9 % of the samples in a profile of a worker that read 256 MiB per task.
    """
    gc.freeze()
