"""The cases: most are run on both sides, written as users of each side would write it.

Kafka runs with its defaults and with larger fetches (in streams also with two tasks for its 16 partitions). A case's
function runs the job once and returns what it found, so that both sides can be compared.
"""

from __future__ import annotations

import shutil
import statistics
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.readwriter import DataStreamReader

from bench.spark.messages import TOPIC, WANTED_CARRIER
from ha.arrow import DEFAULT_COLUMNS, LogReader

# Seven columns on each side; the rarer ones are each side's equivalents.
KAFKA_COLUMNS = ("topic", "partition", "offset", "key", "value", "timestamp", "timestampType")
HALOG_COLUMNS = ("topic", "queueId", "queueOffset", "keys", "body", "storeTimestamp", "sysFlag")
KAFKA_TUNING = {
    "kafka.max.partition.fetch.bytes": str(4 << 20),
    "kafka.max.poll.records": "4000",
    "kafka.receive.buffer.bytes": str(1 << 20),
    "kafka.fetch.max.wait.ms": "20",
}
"""Fewer and larger responses, and no wait at the log's end: the connector asks for offsets after each poll, and that
request waits behind a fetch for messages beyond the end, by default for half a second in each partition. Values were
chosen by trying 1 to 16 MiB and 500 to 16,000 records.
"""
ZSTD_LEVEL = 3
"""The default of Spark's Parquet writer."""
ARCHIVED_SHARE = 0.9
"""Share of the log in the partial archive."""
THROUGH_BROKER = "halog servers"
"""The side that reads halog's log through the option `servers`."""
STREAM_ROWS = 20_000
STREAM_BATCHES = 30

Run = Callable[[SparkSession], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One query on one side. `unit` is "s" for the job's time, "s/batch" if `run` returns `seconds` itself. `log_bytes`
    is the size of the log for a job that reads all of halog's log, otherwise 0.
    """

    name: str
    side: str
    run: Run
    unit: str = "s"
    log_bytes: int = 0


@dataclass(frozen=True)
class Sources:
    """Where the messages are. `bootstrap` is None without Kafka, `servers` (name servers of halog) without a broker;
    `output` is a directory that runs may fill and empty. `archives` contains what `make_archives` writes.
    """

    store: Path
    bootstrap: str | None
    output: Path
    cores: int
    archives: Path
    servers: str | None = None
    stream_rows: int = STREAM_ROWS
    stream_batches: int = STREAM_BATCHES
    stream_batches_skipped: int = 5
    halog_options: Mapping[str, str] | None = None

    @property
    def log_bytes(self) -> int:
        """Size of halog's log."""
        with LogReader(self.store) as reader:
            return reader.end_offset() - reader.min_offset

    @property
    def whole_archive(self) -> Path:
        """An archive of the whole log."""
        return self.archives / "whole"

    @property
    def partial_archive(self) -> Path:
        """An archive of the log without its last part."""
        return self.archives / "partial"

    def halog(self, spark: SparkSession, columns: tuple[str, ...], **options: str) -> DataFrame:
        where = options if "servers" in options else {"path": str(self.store), **options}
        reader = spark.read.format("halog").options(topic=TOPIC, columns=",".join(columns), **where)
        return reader.options(**dict(self.halog_options or {})).load()

    def kafka(self, spark: SparkSession, tuning: Mapping[str, str], *, headers: bool = False) -> DataFrame:
        assert self.bootstrap is not None
        reader = spark.read.format("kafka").option("kafka.bootstrap.servers", self.bootstrap)
        return reader.option("subscribe", TOPIC).option("includeHeaders", str(headers)).options(**tuning).load()


def all_cases(sources: Sources) -> list[Case]:
    """Returns every case, the sides of one query next to each other."""
    kafka: list[tuple[str, Mapping[str, str]]] = [("Kafka", {}), ("Kafka, tuned", KAFKA_TUNING)]
    if sources.bootstrap is None:
        kafka = []
    cases: list[Case] = []
    log_bytes = sources.log_bytes

    def add(
        name: str, on_kafka: Callable[[SparkSession, Mapping[str, str]], Any], on_halog: Run, log_bytes: int = 0
    ) -> None:
        cases.extend(Case(name, side, _with(on_kafka, tuning)) for side, tuning in kafka)
        cases.append(Case(name, "halog", on_halog, log_bytes=log_bytes))

    add(
        "columns",
        lambda spark, tuning: _to_nowhere(sources.kafka(spark, tuning).select(*KAFKA_COLUMNS)),
        lambda spark: _to_nowhere(sources.halog(spark, HALOG_COLUMNS)),
        log_bytes,
    )
    servers = sources.servers
    if servers is not None:
        cases.append(
            Case(
                "columns",
                THROUGH_BROKER,
                lambda spark: _to_nowhere(sources.halog(spark, HALOG_COLUMNS, servers=servers)),
                log_bytes=log_bytes,
            )
        )
    add(
        "properties",
        lambda spark, tuning: _to_nowhere(sources.kafka(spark, tuning, headers=True)),
        lambda spark: _to_nowhere(sources.halog(spark, (*HALOG_COLUMNS, "properties"))),
        log_bytes,
    )
    add(
        "count",
        lambda spark, tuning: {"rows": sources.kafka(spark, tuning).count()},
        lambda spark: {"rows": sources.halog(spark, ("queueId",)).count()},
    )
    add(
        "filter",
        lambda spark, tuning: _to_nowhere(_kafka_filtered(sources.kafka(spark, tuning, headers=True))),
        lambda spark: _to_nowhere(sources.halog(spark, (*HALOG_COLUMNS, "tags"), tags=WANTED_CARRIER)),
    )
    for side, tuning in kafka:
        few = sources.cores if tuning else None
        cases.append(Case("micro-batch", side, _with(stream_kafka, tuning, sources, few), "s/batch"))
    cases.append(Case("micro-batch", "halog", lambda spark: stream_halog(spark, sources), "s/batch"))
    add(
        "parquet",
        lambda spark, tuning: _to_parquet(sources.kafka(spark, tuning, headers=True), sources.output),
        lambda spark: _to_parquet(sources.halog(spark, (*HALOG_COLUMNS, "properties")), sources.output),
        log_bytes,
    )
    cases += [
        Case("parquet", "halog archive", lambda spark: _archive(spark, sources), log_bytes=log_bytes),
        Case("view", "Parquet", lambda spark: _to_nowhere(_parquet_alone(spark, sources))),
        Case("view", "halog all archived", lambda spark: _to_nowhere(_view(spark, sources, sources.whole_archive))),
        Case("view", "halog tail in log", lambda spark: _to_nowhere(_view(spark, sources, sources.partial_archive))),
        Case("audit", "halog", lambda spark: _audit(spark, sources), log_bytes=log_bytes),
    ]
    return cases


def make_archives(spark: SparkSession, sources: Sources) -> None:
    """Writes the archives of the case `view`: one of the whole log, and one without about a tenth at its end."""
    from ha.spark.jobs.archive import ArchiveOptions, archive

    shutil.rmtree(sources.archives, ignore_errors=True)
    archive(spark, ArchiveOptions(path=str(sources.store), archive=str(sources.whole_archive)))
    # The first commit has one range for each task that runs at once, and no other commit follows.
    each = int(sources.log_bytes * ARCHIVED_SHARE / spark.sparkContext.defaultParallelism)
    stop = threading.Event()
    partial = ArchiveOptions(path=str(sources.store), archive=str(sources.partial_archive), range_bytes=each)
    archive(spark, partial, lambda *_: stop.set(), stop=stop)


def _parquet_alone(spark: SparkSession, sources: Sources) -> DataFrame:
    """Reads the archive as plain Parquet, with the columns of the view."""
    table = spark.read.parquet(str(sources.whole_archive)).where(sql.col("topic") == TOPIC)
    return table.select(*(column for column in DEFAULT_COLUMNS if column in table.columns))


def _view(spark: SparkSession, sources: Sources, archive: Path) -> DataFrame:
    import ha.spark

    return ha.spark.topic(spark, TOPIC, archive=str(archive), path=str(sources.store))


def _with(function: Callable[..., dict[str, Any]], *arguments: Any) -> Run:
    return lambda spark: function(spark, *arguments)


def _to_nowhere(table: DataFrame) -> dict[str, Any]:
    table.write.format("noop").mode("overwrite").save()
    return {}


def _kafka_filtered(table: DataFrame) -> DataFrame:
    wanted = sql.lit(WANTED_CARRIER).cast("binary")
    of_carrier = sql.exists("headers", lambda header: (header["key"] == "TAGS") & (header["value"] == wanted))
    return table.where((sql.col("topic") == TOPIC) & of_carrier)


def stream_kafka(spark: SparkSession, tuning: Mapping[str, str], sources: Sources, tasks: int | None) -> dict[str, Any]:
    """Reads micro-batches from Kafka; `tasks` merges its partitions."""
    assert sources.bootstrap is not None
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", sources.bootstrap)
    table = _limited(reader.option("subscribe", TOPIC).options(**tuning), sources).load().select(*KAFKA_COLUMNS)
    return _stream(table.coalesce(tasks) if tasks else table, sources)


def stream_halog(spark: SparkSession, sources: Sources) -> dict[str, Any]:
    """Reads the same micro-batches from the store."""
    reader = spark.readStream.format("halog").option("path", str(sources.store)).option("topic", TOPIC)
    reader = reader.options(columns=",".join(HALOG_COLUMNS), **dict(sources.halog_options or {}))
    return _stream(_limited(reader, sources).load(), sources)


def _limited(reader: DataStreamReader, sources: Sources) -> DataStreamReader:
    return reader.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", str(sources.stream_rows))


def _stream(table: DataFrame, sources: Sources) -> dict[str, Any]:
    """Runs one query until enough full batches are done; `seconds` is the median of their trigger times."""
    checkpoint = sources.output / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    query = table.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        wanted = sources.stream_batches_skipped + sources.stream_batches
        while True:
            query.awaitTermination(1)
            done = [  # the limit is divided among the queues and rounded down
                progress
                for progress in query.recentProgress
                if progress["numInputRows"] > 0.9 * sources.stream_rows
                and progress["batchId"] >= sources.stream_batches_skipped
            ]
            last = query.lastProgress
            is_over = last is not None and (last["batchId"] > 3 * wanted or not last["numInputRows"])
            if len(done) >= sources.stream_batches or is_over:
                break
    finally:
        query.stop()
    if not done:
        counts = [progress["numInputRows"] for progress in query.recentProgress]
        raise SystemExit(f"no micro-batch had about {sources.stream_rows} rows: {counts}")
    durations = [progress["durationMs"] for progress in done[: sources.stream_batches]]
    last = query.lastProgress
    return {
        "seconds": statistics.median(each["triggerExecution"] for each in durations) / 1000,
        "batches": last["batchId"] + 1 if last else len(done),
        "batch_rows": sources.stream_rows,
        "parts_ms": {name: statistics.median(each.get(name, 0) for each in durations) for name in durations[0]},
    }


def _to_parquet(table: DataFrame, output: Path) -> dict[str, Any]:
    folder = output / "parquet"
    shutil.rmtree(folder, ignore_errors=True)
    table.write.option("compression", "zstd").parquet(str(folder))
    return _written(folder)


def _archive(spark: SparkSession, sources: Sources) -> dict[str, Any]:
    from ha.spark.jobs.archive import ArchiveOptions, archive

    folder = sources.output / "archive"
    shutil.rmtree(folder, ignore_errors=True)
    archive(spark, ArchiveOptions(path=str(sources.store), archive=str(folder), compression_level=ZSTD_LEVEL))
    return _written(folder)


def _audit(spark: SparkSession, sources: Sources) -> dict[str, Any]:
    """Compares the store with itself, as two copies of a log: both are read."""
    from ha.spark.jobs.audit import AuditOptions, audit

    unfinished = sources.output / "audit"
    found = audit(spark, AuditOptions(paths=(str(sources.store), str(sources.store)), unfinished=str(unfinished)))
    if found.damage_count:
        raise SystemExit(f"the audit found {found.damage_count} damaged records")
    return {"compared_bytes": found.compared_bytes}


def _written(folder: Path) -> dict[str, Any]:
    """Counts and deletes what a job wrote. Row counts come from Parquet's footers."""
    import pyarrow.parquet as parquet

    files = list(folder.rglob("*.parquet"))
    found = {
        "rows": sum(parquet.read_metadata(file).num_rows for file in files),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }
    shutil.rmtree(folder)
    return found
