"""A streaming query from a log into a Delta table, for the tests of resilience; as a program, with a Spark of its own
that stands still where a test wants to kill it.

python -m tests.spark.resilience_query STORE TABLE CHECKPOINT STAGE BATCH REACHED
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from ha.spark import HalogDataSource
from ha.spark.jobs.archive_read import delta_session
from ha.spark.options import parse_options
from ha.spark.stream_reader import HalogStreamReader
from tests.spark.jars import delta_settings

BEFORE_TASKS = "before tasks"
IN_A_TASK = "in a task"
AFTER_COMMIT = "after commit"
NOWHERE = "nowhere"
HOLD_S_MAX = 300.0
"""Nobody came to kill it."""


def start_into_delta(
    spark: SparkSession, source: str, path: Path, table: Path, checkpoint: Path, *, once: bool, **options: Any
) -> StreamingQuery:
    """A query that appends what it reads to the table at `table`; `once`: until all that is there now is read."""
    rows = spark.readStream.format(source).option("columns", "topic,queueId,queueOffset,body")
    writer = (
        rows.options(startingOffsets="earliest", **options)
        .load(str(path))
        .writeStream.format("delta")
        .option("checkpointLocation", str(checkpoint))
    )
    return (writer.trigger(availableNow=True) if once else writer).start(str(table))


def holding_source(stage: str, batch: int, checkpoint: Path, reached: Path) -> type[HalogDataSource]:
    """A data source `halog-holding` that makes the file `reached` and stands still in a stage of a batch.

    Which batch it is the checkpoint tells. Made in a function, so that Spark carries it to its workers by value.
    """

    def hold_at(where: str, committed: int) -> None:
        if where == stage and (checkpoint / "commits" / str(committed)).exists():
            reached.touch()
            threading.Event().wait(HOLD_S_MAX)
            raise RuntimeError(f"not killed {where}")

    class HoldingReader(HalogStreamReader):
        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
            hold_at(BEFORE_TASKS, batch - 1)  # offsets/N is written, no task has begun
            return super().partitions(start, end)

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            for rows in super().read(partition):
                yield rows.slice(0, rows.num_rows // 2)
                if context.partitionId() == 1:  # the other ends
                    hold_at(IN_A_TASK, batch - 1)
                yield rows.slice(rows.num_rows // 2)

        def commit(self, end: dict[str, Any]) -> None:
            hold_at(AFTER_COMMIT, batch)
            super().commit(end)

    class HoldingSource(HalogDataSource):
        @classmethod
        def name(cls) -> str:
            return "halog-holding"

        def streamReader(self, schema: StructType) -> HalogStreamReader:
            return HoldingReader(parse_options(self.options, "stream"), schema)

    return HoldingSource


SMALL_BATCHES = {"maxOffsetsPerTrigger": 200, "minPartitions": 2}


def main(path: Path, table: Path, checkpoint: Path, stage: str, batch: int, reached: Path) -> None:
    """Runs the query to its end, if it is let."""
    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_HOSTNAME="localhost", PYSPARK_PYTHON=sys.executable)
    builder = SparkSession.Builder().master("local[2]")
    for name, value in delta_settings().items():
        builder = builder.config(name, value)
    spark = (
        builder.config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "1")
        # It does not live long enough for good machine code to pay.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .getOrCreate()
    )
    session = delta_session(spark)
    session.conf.set("spark.databricks.delta.snapshotPartitions", "1")
    session.dataSource.register(holding_source(stage, batch, checkpoint, reached))
    start_into_delta(session, "halog-holding", path, table, checkpoint, once=True, **SMALL_BATCHES).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    STORE, TABLE, CHECKPOINT, STAGE, BATCH, REACHED = sys.argv[1:]
    main(Path(STORE), Path(TABLE), Path(CHECKPOINT), STAGE, int(BATCH), Path(REACHED))
