"""The sink in Spark: batch writes, and a streaming query that dies in every stage and goes on from its checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from ha.spark import HalogDataSource
from tests.spark.clusters import running_cluster
from tests.spark.sink_query import start
from tests.spark.sink_steps import read_committed, read_topic, wait_for_messages

pytestmark = [pytest.mark.processes, pytest.mark.spark]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_cluster(tmp_path_factory.mktemp("sink-spark")) as started:
        yield started.name_server_address


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    spark.dataSource.register(HalogDataSource)
    return spark


def stored(servers: str, topic: str) -> list[str]:
    return sorted(message.body.decode() for message in read_topic(servers, topic))


def committed(servers: str, topic: str) -> list[str]:
    return [body.decode() for body in read_committed(servers, topic)]


@pytest.mark.spark_versions
def test_a_frame_is_written_and_read_back(session: SparkSession, servers: str) -> None:
    frame = session.range(0, 500, 1, 3).selectExpr(
        "concat('row ', id) AS body",
        "concat('T', id % 2) AS tags",
        "array(concat('k', id), 'all') AS keys",
        "map('number', cast(id AS string)) AS properties",
        "cast(id % 4 AS int) AS queueId",
    )
    frame.write.format("halog").option("servers", servers).option("topic", "written").mode("append").save()
    back = session.read.format("halog").option("servers", servers).option("subscribe", "written")
    rows = back.option("includeProperties", "true").load().collect()
    assert len(rows) == 500
    for row in rows:
        number = int(row.body[4:])
        assert (row.tags, row["keys"], row.queueId) == (f"T{number % 2}", [f"k{number}", "all"], number % 4)
        assert row.properties["number"] == str(number)
    assert len({row.uniqKey for row in rows}) == 500
    assert committed(servers, "written") == sorted(bytes(row.body).decode() for row in rows)


@pytest.mark.spark_versions
def test_from_topic_to_topic(session: SparkSession, servers: str, tmp_path: Path) -> None:
    """A stream over the network, of committed rows only, into another topic."""
    frame = session.range(300).selectExpr("cast(id AS string) AS body", "concat('T', id % 3) AS tags")
    frame.write.format("halog").options(servers=servers, topic="from").mode("append").save()
    rows = (
        session.readStream.format("halog")
        .options(servers=servers, subscribe="from", startingOffsets="earliest", readFrom="master")
        .options(isolation="read_committed", maxOffsetsPerTrigger="200")
        .load()
    )
    query = (
        rows.where("tags <> 'T2'")
        .select("body", "tags", "keys")
        .writeStream.format("halog")
        .options(servers=servers, topic="to", checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    assert [progress.numInputRows for progress in query.recentProgress] == [200, 100]
    assert committed(servers, "to") == stored(servers, "to") == sorted(str(n) for n in range(300) if n % 3 != 2)


def test_a_named_write_is_one_write(session: SparkSession, servers: str) -> None:
    writer = session.range(50).selectExpr("cast(id AS string) AS value").write.format("halog")
    writer = writer.options(servers=servers, topic="named", sinkId="daily-2026-11-21").mode("append")
    for _ in range(2):
        writer.save()
    assert stored(servers, "named") == sorted(str(number) for number in range(50))


def test_a_write_that_fails_does_not_block_a_stream(session: SparkSession, servers: str, tmp_path: Path) -> None:
    """A row without a body fails its task, after the rows before it were stored."""
    rows = session.range(0, 50, 1, 1)
    to_failing = {"servers": servers, "topic": "failing", "batchSize": "1"}
    for first, last_body in ((0, "''"), (100, "'last'")):
        frame = rows.selectExpr(f"CASE WHEN id = 49 THEN {last_body} ELSE string(id + {first}) END AS body")
        writer = frame.write.format("halog").options(**to_failing).mode("append")
        if first == 0:
            with pytest.raises(PySparkException, match="a row has no body"):
                writer.save()
            assert stored(servers, "failing")
        else:
            writer.save()
    stream = session.readStream.format("halog").options(servers=servers, subscribe="failing", readFrom="master")
    bodies: list[str] = []
    query = (
        stream.options(startingOffsets="earliest", isolation="read_committed")
        .load()
        .writeStream.foreachBatch(lambda batch, _: bodies.extend(bytes(row.body).decode() for row in batch.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert sorted(bodies) == sorted([*(str(number) for number in range(100, 149)), "last"])


@pytest.mark.parametrize(
    ("columns", "options", "mode", "message"),
    [
        ("id AS body", {}, "append", "body: the column is of type bigint; accepted: binary or string"),
        ("'x' AS body, 1 AS day", {}, "append", "day: the sink has no such column; accepted: .*queueId"),
        ("'x' AS body, 3 AS delayLevel", {}, "append", "delayLevel: delayed messages are stored in another topic"),
        (
            "'x' AS body",
            {"topics": "t"},
            "append",
            r"topics: no option for the sink has this name; accepted: did you mean topic\?",
        ),
        ("'x' AS body", {}, "overwrite", "mode: overwrite would replace the contents of a topic"),
    ],
)
def test_invalid_writes_are_refused_before_tasks_run(
    session: SparkSession, columns: str, options: dict[str, str], mode: str, message: str
) -> None:
    writer = session.range(1).selectExpr(*columns.split(", ")).write.format("halog").options(**options)
    with pytest.raises(PySparkException, match=message):
        writer.options(servers="127.0.0.1:1", topic="t").mode(mode).save()


def test_complete_mode_is_refused(session: SparkSession, tmp_path: Path) -> None:
    counts = (
        session.readStream.format("rate").load().selectExpr("cast(value AS string) AS body").groupBy("body").count()
    )
    query = (
        counts.select("body")
        .writeStream.format("halog")
        .options(servers="127.0.0.1:1", topic="t", checkpointLocation=str(tmp_path / "checkpoint"))
        .outputMode("complete")
        .start()
    )
    with pytest.raises(PySparkException, match="outputMode: complete would replace the contents of a topic"):
        query.awaitTermination(60)


def failing_source(flags: Path) -> type[HalogDataSource]:
    """A data source `halog-failing`: the batch after which a stage is numbered fails there, once (its flag file).

    Made in a function, so that Spark carries it to its workers by value."""

    def fail_at(stage: str, batch: str | int | None) -> None:
        if not stage.startswith(f"{batch} "):
            return
        try:
            (flags / stage).unlink()
        except FileNotFoundError:  # it failed before, maybe in the task beside this one
            return
        raise RuntimeError(f"injected: {stage}")

    def fail_in_task(stage: str) -> None:
        context = TaskContext.get()
        assert context is not None
        fail_at(stage, context.getLocalProperty("streaming.sql.batchId"))

    def halved(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.slice(0, batch.num_rows // 2)
            fail_in_task("2 while sending")
            yield batch.slice(batch.num_rows // 2)

    class Failing(DataSourceStreamArrowWriter):
        def __init__(self, inner: DataSourceStreamArrowWriter) -> None:
            self.inner = inner

        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            fail_in_task("1 before sending")
            message = self.inner.write(halved(iterator))
            fail_in_task("3 after sending")
            return message

        def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
            fail_at("4 before commit", batchId)
            self.inner.commit(list(messages), batchId)
            fail_at("5 after commit", batchId)

        def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
            self.inner.abort(list(messages), batchId)

    class FailingSource(HalogDataSource):
        @classmethod
        def name(cls) -> str:
            return "halog-failing"

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
            return Failing(super().streamWriter(schema, overwrite))

    return FailingSource


STAGES = ("1 before sending", "2 while sending", "3 after sending", "4 before commit", "5 after commit")


def write_lines(directory: Path, files: int, lines: int) -> list[str]:
    directory.mkdir()
    every = []
    for file in range(files):
        texts = [f"file {file} line {line}" for line in range(lines)]
        (directory / f"{file}.txt").write_text("\n".join(texts) + "\n")
        os.utime(directory / f"{file}.txt", (1_700_000_000 + file,) * 2)  # Spark goes by the age of files
        every += texts
    return sorted(every)


def test_a_query_that_dies_in_every_stage(session: SparkSession, servers: str, tmp_path: Path) -> None:
    expected = write_lines(tmp_path / "lines", files=len(STAGES) + 2, lines=60)
    flags = tmp_path / "flags"
    flags.mkdir()
    session.createDataFrame([], "a int")  # makes this the active session, where Spark looks for a source
    session.dataSource.register(failing_source(flags))
    for stage in STAGES:
        (flags / stage).touch()
    deaths = []
    for _ in range(len(STAGES) + 1):
        query = start(session, "halog-failing", servers, "dying", str(tmp_path / "lines"), str(tmp_path / "checkpoint"))
        try:
            query.awaitTermination(120)
        except PySparkException as error:
            deaths.append(next(stage for stage in STAGES if f"injected: {stage}" in str(error)))
        assert len(committed(servers, "dying")) % 60 == 0, "a batch is committed as a whole or not at all"
        assert max(Counter(stored(servers, "dying")).values(), default=1) == 1
    assert deaths == list(STAGES)
    assert stored(servers, "dying") == committed(servers, "dying") == expected


def test_a_query_whose_processes_are_killed(session: SparkSession, servers: str, tmp_path: Path) -> None:
    """SIGKILL to driver, JVM and Python workers amid a batch; the checkpoint goes on in another Spark."""
    expected = write_lines(tmp_path / "lines", files=2, lines=6000)
    arguments = [servers, "killed", str(tmp_path / "lines"), str(tmp_path / "checkpoint")]
    command = [sys.executable, "-m", "tests.spark.sink_query", *arguments]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            count = wait_for_messages(servers, "killed", 0, 240, process.poll)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert 0 < count < len(expected), (tmp_path / "log").read_text()
    start(session, "halog", *arguments).awaitTermination(120)
    assert stored(servers, "killed") == committed(servers, "killed") == expected
