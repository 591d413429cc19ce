"""Streams through Spark itself, with its checkpoints, over a store that is being written."""

import json
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ha.spark.restarts import with_restarts
from ha.spark.source.listener import LagListener, LagReport
from tests.spark.stores import live_store, message, records_of

Batch = list[int]


class StoppedError(Exception):
    """Raised by a test for a batch that must not finish."""


class Stream:
    """A query with a checkpoint; `batches` has each batch's rows by number, `runs` those of every execution."""

    def __init__(self, spark: SparkSession, path: Path, checkpoint: Path, **given: Any) -> None:
        self.spark = spark
        self.path = path
        self.checkpoint = checkpoint
        self.given = {"columns": "body", **given}
        self.batches: dict[int, Batch] = {}
        self.runs: list[tuple[int, Batch]] = []
        self.break_at: int | None = None

    def start(self, **trigger: Any) -> StreamingQuery:
        rows = self.spark.readStream.format("halog").options(**self.given).load(str(self.path))
        writer = rows.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(**trigger) if trigger else writer).start()

    def _take(self, rows: DataFrame, number: int) -> None:
        batch = sorted(int(row["body"]) for row in rows.collect())
        self.runs.append((number, batch))
        if self.break_at is not None and number >= self.break_at:
            raise StoppedError
        self.batches[number] = batch

    def read_all(self, **trigger: Any) -> StreamingQuery:
        """Runs until all present messages are read; again if the machine is too busy for Spark to start the query."""

        def run() -> StreamingQuery:
            query = self.start(**(trigger or {"availableNow": True}))
            try:
                assert query.awaitTermination(120)
            finally:
                query.stop()
            return query

        return with_restarts(run)

    def run_with(self, body: Callable[[StreamingQuery], None]) -> None:
        """Run with the default trigger while `body` does something."""
        query = self.start()
        try:
            body(query)
        finally:
            query.stop()

    @property
    def numbers(self) -> Batch:
        return sorted(number for batch in self.batches.values() for number in batch)


def process_all(query: StreamingQuery) -> None:
    """Twice, because the first run may end by a trigger that polled before the last messages were stored."""
    query.processAllAvailable()
    query.processAllAvailable()


@pytest.mark.spark_versions
def test_a_stream_moves_past_messages_that_are_not_selected(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "broker-a"
    with live_store(path) as live:
        live.put([message(n, queue_id=0) for n in range(30)])
        selected = {"tags": "tag1 || tag2", "startingOffsets": "earliest", "topic": "flights"}
        stream = Stream(spark, path, tmp_path / "checkpoint", **selected)
        progress = stream.read_all().lastProgress
        assert progress is not None
        assert json.loads(progress["sources"][0]["endOffset"])["flights"] == {"0": 30}
        live.put([message(n, queue_id=0, TAGS="tag0") for n in range(30, 40)])
        stream.read_all()
        assert stream.numbers == [n for n in range(30) if n % 3]
        live.put([message(n, queue_id=0) for n in range(40, 50)])
        stream.given["tags"] = "tag0"  # applies from the position on that the query has reached
        stream.read_all()
        assert stream.numbers == [n for n in range(30) if n % 3] + [42, 45, 48]


@pytest.mark.spark_versions
def test_a_stream_follows_a_log_that_rolls_and_gains_a_topic_and_goes_on_after_a_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "broker-a"
    with live_store(path, segment_size=32 << 10) as live:
        live.put([message(n) for n in range(100)])
        pattern = {"subscribePattern": "fl.*|later"}
        stream = Stream(spark, path, tmp_path / "checkpoint", startingOffsets="earliest", **pattern)

        def follow(query: StreamingQuery) -> None:
            process_all(query)
            assert stream.numbers == list(range(100))
            live.put([message(n) for n in range(100, 500)])  # 60 KB: the segment rolls
            process_all(query)
            live.put([message(n, topic="later", queue_id=2) for n in range(500, 520)])
            live.put([message(n, topic="unread") for n in range(1000, 1020)])
            process_all(query)
            assert stream.numbers == list(range(520))
            progress = query.lastProgress
            assert progress is not None
            [source] = progress.sources
            assert json.loads(source.endOffset)["later"] == {"2": 20}
            assert json.loads(source.latestOffset)["later"] == {"2": 20}

        measured: queue.Queue[LagReport] = queue.Queue()
        listener = LagListener({"path": str(path), **pattern}, publish=measured.put, interval_s=0)
        spark.streams.addListener(listener)
        try:
            stream.run_with(follow)
            report = measured.get(timeout=60)
            while report.messages or len(report.queues) < 5:  # four of flights, one of later
                report = measured.get(timeout=60)
        finally:
            spark.streams.removeListener(listener)
        assert {(lag.topic, lag.queue_id): lag.next_offset for lag in report.queues}["later", 2] == 20
        live.put([message(n) for n in range(520, 600)])
        stream.read_all()
        assert stream.numbers == list(range(600))
        assert len(records_of(path)) == 620
        assert len(list((path / "commitlog").iterdir())) > 2
    runs = len(stream.runs)
    stream.read_all()
    assert len(stream.runs) == runs  # nothing new, no batch


def test_unfinished_batches_are_read_again_unchanged(spark: SparkSession, tmp_path: Path) -> None:
    """From latest, broken at the second batch; each batch is the same the second time, though the log went on."""
    path = tmp_path / "broker-a"
    with live_store(path) as live:
        live.put([message(n) for n in range(50)])
        stream = Stream(spark, path, tmp_path / "checkpoint", maxOffsetsPerTrigger=40)  # from latest
        stream.break_at = 0
        with pytest.raises(StreamingQueryException, match="StoppedError"):
            stream.read_all()
        assert stream.runs == [(0, [])]  # what says where latest was
        live.put([message(n) for n in range(50, 150)])
        with pytest.raises(StreamingQueryException, match="StoppedError"):
            stream.read_all()
        assert stream.runs[1:] == [(0, [])]
        stream.break_at = 1
        with pytest.raises(StreamingQueryException, match="StoppedError"):
            stream.read_all()
        broken = stream.runs[-1]
        assert len(broken[1]) == 40
        live.put([message(n) for n in range(150, 160)])
        live.put([message(n, topic="later", queue_id=1) for n in range(160, 170)])
        stream.break_at = None
        stream.read_all()
        assert (1, stream.batches[1]) == broken
        assert stream.numbers == list(range(50, 170))
        assert all(len(batch) <= 40 + 5 for batch in stream.batches.values())


@pytest.mark.spark_versions
def test_available_now_respects_limits_and_ends(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "broker-a"
    with live_store(path) as live:
        live.put([message(n) for n in range(1000)])
        sizes = {record.total_size for record in records_of(path)}
        limit = 300 * max(sizes)
        stream = Stream(
            spark,
            path,
            tmp_path / "checkpoint",
            startingOffsets="earliest",
            maxBytesPerTrigger=limit,
            minOffsetsPerTrigger=500,
        )
        query = stream.read_all()
        assert [len(stream.batches[n]) for n in sorted(stream.batches)] == [300, 300, 300, 100]
        assert stream.numbers == list(range(1000))
        assert sum(progress.numInputRows for progress in query.recentProgress) == 1000


def test_stream_overtaken_by_retention_fails_or_continues(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "broker-a"
    with live_store(path, segment_size=32 << 10) as live:
        live.put([message(n) for n in range(100)])
        stream = Stream(spark, path, tmp_path / "checkpoint", startingOffsets="earliest")
        stream.read_all()
        live.put([message(n) for n in range(100, 700)])
        assert live.clean() > 0
        there = [int(record.body) for record in records_of(path)]
        assert there[0] > 100
        with pytest.raises(StreamingQueryException, match=r"RecordsGone: flights queue 0 of broker-a: offsets 25 to"):
            stream.read_all()
        assert stream.numbers == list(range(100))
        stream.given["failOnDataLoss"] = "false"
        stream.read_all()
        assert stream.numbers == [*range(100), *there]
