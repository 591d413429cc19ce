"""Runs the source and the jobs on one small store, on any Spark; the results can be compared.

    python -m tests.spark.scale_jobs MASTER STORE FOLDER    writes FOLDER/results.json

`results.json` must not depend on where it was computed: rows are sorted, files are identified by their content.
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.dataset
from pyspark.sql import DataFrame, SparkSession

from ha.spark.jobs.archive import ArchiveOptions, archive
from ha.spark.jobs.audit import AuditOptions, audit
from ha.spark.jobs.lag import LagOptions, lag
from ha.spark.jobs.reindex import ReindexOptions, reindex
from ha.spark.jobs.stats import StatsOptions, stats

COLUMNS = (
    "topic,queueId,queueOffset,physicalOffset,body,tags,keys,properties,bornTimestamp,storeTimestamp,bornHost,crcOk"
)
SOURCE = {"subscribePattern": ".*", "columns": COLUMNS, "minPartitions": "4"}
NOW_MS = 1_800_000_000_000


def run_jobs(spark: SparkSession, store: Path, folder: Path) -> dict[str, Any]:
    built, archived = folder / "built", folder / "archive"
    sizes = ReindexOptions(path=store, target=built, index_slot_count=500, index_entry_count=2000, range_bytes=1 << 18)
    reindexed = reindex(spark, sizes)
    archive(spark, ArchiveOptions(path=str(store), archive=str(archived), broker_name="b", range_bytes=16 << 20))
    audited = audit(spark, AuditOptions(paths=(str(store), str(store)), range_bytes=1 << 20))
    counted = stats(spark, StatsOptions(path=str(store), range_bytes=1 << 20))
    lagging = lag(spark, LagOptions(path=str(store), now_ms=NOW_MS))
    return {
        "batch": rows_digest(spark.read.format("halog").options(**SOURCE).load(str(store))),
        "stream": rows_digest(streamed(spark, store, folder / "stream")),
        "reindex": [reindexed.entry_count, reindexed.key_count, *files_digest(built)],
        "archive": digest(
            str(sorted(row.items())) for row in pyarrow.dataset.dataset(parquet_files(archived)).to_table().to_pylist()
        ),
        "audit": [audited.exit_code, audited.damage_count, plain(audited.copies), plain(audited.topic_hours)],
        "stats": plain([counted.total, counted.topics, counted.hours, counted.rows, counted.tags, counted.groups]),
        "lag": plain(lagging.groups) + plain(lagging.queues),
    }


def streamed(spark: SparkSession, store: Path, folder: Path) -> DataFrame:
    """All rows, in several micro-batches, through Parquet files."""
    frame = (
        spark.readStream.format("halog")
        .options(subscribePattern=".*", columns=COLUMNS, startingOffsets="earliest", maxOffsetsPerTrigger="700")
        .load(str(store))
    )
    query = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "rows"))
    )
    query.awaitTermination()
    return spark.read.parquet(str(folder / "rows"))


def plain(made: Any) -> Any:
    return json.loads(msgspec.json.encode(made))


def digest(lines: Iterable[str]) -> list[Any]:
    ordered = sorted(lines)
    return [len(ordered), hashlib.sha256("\n".join(ordered).encode()).hexdigest()]


def rows_digest(frame: DataFrame) -> list[Any]:
    return digest(str(sorted(row.items())) for row in frame.toArrow().to_pylist())


def files_digest(folder: Path) -> list[Any]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return digest(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files)


def parquet_files(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*.parquet") if not path.name.startswith((".", "_"))]


def main() -> None:
    master, store, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    builder = SparkSession.Builder().master(master).appName("halog scale test")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        results = run_jobs(spark, store, folder)
        # Where it ran: the driver and, unless that is all, two executors.
        results["hosts"] = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()
    finally:
        spark.stop()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
