"""A streaming query from a log into a Delta table, for the tests of resilience; as a program, a separate Spark with one
query for each stage of a batch in which a test kills it.

python -m tests.spark.resilience_query STORE DIRECTORY
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from ha.spark import HalogDataSource
from ha.spark.jobs.archive.delta import delta_session
from ha.spark.source.options import parse_options
from ha.spark.source.stream_reader import HalogStreamReader
from tests.spark.jars import delta_settings

BEFORE_TASKS = "before-tasks"
IN_A_TASK = "in-a-task"
AFTER_COMMIT = "after-commit"
BETWEEN_COMMITS = "between-commits"
"""The stage in which the source is not called: the query can't be paused there, so it ends, because the checkpoint is
not writable."""
STAGES = (BEFORE_TASKS, IN_A_TASK, BETWEEN_COMMITS, AFTER_COMMIT)
HOLD_S_MAX = 900.0
"""The query was not killed in time."""
SMALL_BATCHES = {"maxOffsetsPerTrigger": 200, "minPartitions": 2}


class Places:
    """The files of a stage's query."""

    def __init__(self, directory: Path, stage: str) -> None:
        self.table = directory / f"table-{stage}"
        self.checkpoint = directory / f"checkpoint-{stage}"
        self.reached = directory / f"reached-{stage}"
        """A named pipe: a worker, which is another process, writes a line."""

    def is_planned(self, batch: int) -> bool:
        """Whether the checkpoint has the plan of the batch."""
        return (self.checkpoint / "offsets" / str(batch)).exists()

    def is_finished(self, batch: int) -> bool:
        """Whether the checkpoint has the batch as done."""
        return (self.checkpoint / "commits" / str(batch)).exists()

    @property
    def obstacle(self) -> Path:
        """A folder in place of the checkpoint's commit of batch 1, which prevents its writing."""
        return self.checkpoint / "commits" / "1"

    def version_count(self) -> int:
        """Number of commits in the Delta table."""
        return sum(1 for _ in (self.table / "_delta_log").glob("*[0-9].json"))


def start_into_delta(
    spark: SparkSession, source: str, path: Path, table: Path, checkpoint: Path, *, once: bool, **options: Any
) -> StreamingQuery:
    """A query that appends what it reads to the table at `table`; `once`: until everything present is read."""
    rows = spark.readStream.format(source).option("columns", "topic,queueId,queueOffset,body")
    writer = (
        rows.options(startingOffsets="earliest", **options)
        .load(str(path))
        .writeStream.format("delta")
        .option("checkpointLocation", str(checkpoint))
    )
    return (writer.trigger(availableNow=True) if once else writer).start(str(table))


def holding_source(stage: str, places: Places) -> type[HalogDataSource]:
    """A data source `halog-STAGE` that writes to `places.reached` and blocks in that stage of batch 1.

    The checkpoint tells which batch it is. Defined in a function, so that Spark pickles it to its workers by value.
    """

    def hold_at(where: str, finished: int) -> None:
        if where == stage and places.is_finished(finished):
            places.reached.write_text("reached\n")
            threading.Event().wait(HOLD_S_MAX)
            raise RuntimeError(f"not killed {where}")

    class HoldingReader(HalogStreamReader):
        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
            hold_at(BEFORE_TASKS, 0)  # offsets/1 is written, no task has started
            if stage == BETWEEN_COMMITS and places.is_finished(0):
                places.obstacle.mkdir(exist_ok=True)
            return super().partitions(start, end)

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            context = TaskContext.get()
            assert context is not None
            for rows in super().read(partition):
                yield rows.slice(0, rows.num_rows // 2)
                if context.partitionId() == 1:  # the other ends
                    hold_at(IN_A_TASK, 0)
                yield rows.slice(rows.num_rows // 2)

        def commit(self, end: dict[str, Any]) -> None:
            hold_at(AFTER_COMMIT, 1)
            super().commit(end)

    class HoldingSource(HalogDataSource):
        @classmethod
        def name(cls) -> str:
            return f"halog-{stage}"

        def streamReader(self, schema: StructType) -> HalogStreamReader:
            return HoldingReader(parse_options(self.options, "stream"), schema)

    return HoldingSource


def main(path: Path, directory: Path) -> None:
    """Runs one query per stage, all in one Spark, until it is killed. Prints each stage once it is reached."""
    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_HOSTNAME="localhost", PYSPARK_PYTHON=sys.executable)
    builder = SparkSession.Builder().master("local[3]")  # one task holds
    for name, value in delta_settings().items():
        builder = builder.config(name, value)
    spark = (
        builder.config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        # It does not live long enough for optimized machine code to pay off.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .getOrCreate()
    )
    session = short_lived(delta_session(spark))
    session.dataSource.register(HalogDataSource)
    for stage in STAGES:
        places = Places(directory, stage)
        session.dataSource.register(holding_source(stage, places))
        os.mkfifo(places.reached)
        reached = os.open(places.reached, os.O_RDONLY | os.O_NONBLOCK)
        query = start_into_delta(
            session, f"halog-{stage}", path, places.table, places.checkpoint, once=True, **SMALL_BATCHES
        )
        if stage == BETWEEN_COMMITS:
            with suppress(StreamingQueryException):
                query.awaitTermination()
            places.obstacle.rmdir()
        elif not select.select([reached], [], [], HOLD_S_MAX)[0]:
            raise TimeoutError(f"no query came to {stage}")
        print(stage, flush=True)
    threading.Event().wait(HOLD_S_MAX)


def short_lived(session: SparkSession) -> SparkSession:
    """The same session without code generation, which does not pay off for few rows."""
    session.conf.set("spark.sql.codegen.wholeStage", "false")
    session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    session.conf.set("spark.sql.shuffle.partitions", "1")
    session.conf.set("spark.databricks.delta.snapshotPartitions", "1")
    return session


if __name__ == "__main__":
    STORE, DIRECTORY = sys.argv[1:]
    main(Path(STORE), Path(DIRECTORY))
