"""Measures memory and time of every job over a large log, on two executors of a local cluster.

A child process runs the Spark driver and reports on stdout when each job starts and ends; this process samples the
child's process tree (scripts.process_memory). The log is synthetic and uses little disk space (scripts.sparse_store).
Prints a table; `--json` saves the results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.process_memory import Peaks, Watch
from scripts.spark_standalone import spark_environment
from scripts.sparse_store import SparseStore, write_sparse_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_GIB = 1 << 30
_FAILED = "failed: "
_BODIES = "topic,queueId,queueOffset,physicalOffset,body,tags,keys,storeTimestamp"
_HEADER = (
    "| job | s | CPU-s | shuffled MiB | executor, MiB | its JVM | a Python worker, own | with mapped files "
    "| driver JVM | driver Python | |\n| --- |" + " --- |" * 10
)


@dataclass(frozen=True)
class Measured:
    """Results of a job: its duration in seconds, and memory in MiB (see `Peaks`)."""

    job: str
    seconds: float
    shuffle_bytes: int
    said: str
    peaks: Peaks


def measure(
    store: Path, folder: Path, jobs: list[str], *, memory_mb: int, heap_mb: int, together: bool
) -> Iterator[Measured]:
    """Runs `jobs` over `store`, each with new executors unless `together`. Output goes below `folder`.

    A failed job is reported in `said`, with its traceback in a log in `folder`. Raises RuntimeError if the driver's
    process fails, for example because Spark doesn't start.
    """
    for group in [jobs] if together else [[job] for job in jobs]:
        command = [sys.executable, "-m", "scripts.spark_memory", "--child", ",".join(group)]
        command += ["--directory", str(folder), "--store", str(store)]
        command += ["--memory-mb", str(memory_mb), "--heap-mb", str(heap_mb)]
        log = folder / f"{group[0]}.log"
        with log.open("wb") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=spark_environment())
        watch = Watch(child.pid)
        assert child.stdout is not None
        try:
            for line in child.stdout:
                word, _, rest = line.partition(" ")
                if word == "BEGIN":
                    watch.restart()
                elif word == "END":
                    yield Measured(**json.loads(rest), peaks=watch.peaks)
        finally:
            code = child.wait()
            child.stdout.close()
            watch.close()
        if code:
            raise RuntimeError(f"{', '.join(group)} failed:\n" + "\n".join(log.read_text().splitlines()[-30:]))


# ---- the child: a driver


def _reindex(spark: SparkSession, store: Path, folder: Path) -> str:
    from ha.spark.jobs.reindex import ReindexOptions, reindex

    target = _fresh(folder / "built")
    result = reindex(spark, ReindexOptions(path=store, target=target))
    if not (store / "consumequeue").exists():  # the other jobs require queues
        for name in ("consumequeue", "index"):
            (target / name).rename(store / name)
    shutil.rmtree(target)
    return f"{result.record_count} records, {result.key_count} keys, {result.range_count} ranges"


def _count(spark: SparkSession, store: Path, folder: Path) -> str:
    frame = spark.read.format("halog").options(subscribePattern=".*", columns="queueId").load(str(store))
    return f"{frame.count()} rows"


def _batch(spark: SparkSession, store: Path, folder: Path) -> str:
    frame = spark.read.format("halog").options(subscribePattern=".*", columns=_BODIES).load(str(store))
    frame.write.format("noop").mode("overwrite").save()
    return "bodies read by Spark"


def _stream(spark: SparkSession, store: Path, folder: Path) -> str:
    options = {"subscribePattern": ".*", "columns": _BODIES, "startingOffsets": "earliest"}
    frame = spark.readStream.format("halog").options(**options, maxBytesPerTrigger=str(2 * _GIB)).load(str(store))
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", str(_fresh(folder / "checkpoint")))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return f"{len(query.recentProgress)} micro-batches of at most 2 GiB"


def _archive(spark: SparkSession, store: Path, folder: Path) -> str:
    from ha.spark.jobs.archive import ArchiveOptions, archive

    target = _fresh(folder / "archive")
    result = archive(spark, ArchiveOptions(path=str(store), archive=str(target)))
    shutil.rmtree(target)
    return f"{result.rows} rows, {result.files} files, {result.file_bytes >> 20} MiB"


def _audit(spark: SparkSession, store: Path, folder: Path) -> str:
    from ha.spark.jobs.audit import AuditOptions, audit

    result = audit(spark, AuditOptions(paths=(str(store), str(store))))
    return f"{result.compared_bytes >> 20} MiB compared, {result.damage_count} findings"


def _stats(spark: SparkSession, store: Path, folder: Path) -> str:
    from ha.spark.jobs.stats import StatsOptions, stats

    result = stats(spark, StatsOptions(path=str(store)))
    return f"{result.total.messages} messages, {len(result.rows)} rows"


def _lag(spark: SparkSession, store: Path, folder: Path) -> str:
    from ha.spark.jobs.lag import LagOptions, lag

    offsets = {f"{topic}@g": {0: 5, 1: 6, 2: 7, 3: 8} for topic in ("flights", "delays", "weather")}
    (store / "config").mkdir(exist_ok=True)
    (store / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": offsets}))
    result = lag(spark, LagOptions(path=str(store)))
    return f"{sum(group.messages for group in result.groups)} messages behind"


JOBS: dict[str, Callable[[SparkSession, Path, Path], str]] = {
    "reindex": _reindex,
    "count": _count,
    "batch": _batch,
    "stream": _stream,
    "archive": _archive,
    "audit": _audit,
    "stats": _stats,
    "lag": _lag,
}


def _fresh(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    return path


def _child(jobs: list[str], store: Path, folder: Path, memory_mb: int, heap_mb: int) -> None:
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().master(f"local-cluster[2,1,{memory_mb}]").appName("halog memory")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": f"{heap_mb}m",
        "spark.executor.cores": "1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    for job in jobs:
        print(f"BEGIN {job}", flush=True)
        shuffled, began = _shuffle_bytes(spark), time.monotonic()
        try:
            said = JOBS[job](spark, store, folder)
        except Exception as error:  # continue with the other jobs
            traceback.print_exc()
            said = f"{_FAILED}{type(error).__name__}"
        seconds = time.monotonic() - began
        time.sleep(0.5)  # one more sample
        facts = {"job": job, "seconds": seconds, "shuffle_bytes": _shuffle_bytes(spark) - shuffled, "said": said}
        print(f"END {json.dumps(facts)}", flush=True)
    spark.stop()


def _shuffle_bytes(spark: SparkSession) -> int:
    status: Any = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    return sum(status.apply(place).totalShuffleWrite() for place in range(status.size()))


# ---- the command


def main() -> int:
    """Writes the log, runs the jobs and prints the table."""
    parser = argparse.ArgumentParser(
        prog="scripts/spark-memory", description="Measure the memory of jobs over a large log."
    )
    parser.add_argument("--gib", type=int, default=20, help="size of the log in GiB (default: 20)")
    parser.add_argument("--segment-mib", type=int, default=1024, help="size of a segment in MiB (default: 1024)")
    parser.add_argument("--body-bytes", type=int, nargs="+", help="body sizes in bytes; segments use them in turn")
    parser.add_argument("--jobs", default=",".join(JOBS), help=f"comma-separated jobs (default: {','.join(JOBS)})")
    parser.add_argument(
        "--memory-mb", type=int, default=2048, help="total memory of an executor in MiB (default: 2048)"
    )
    parser.add_argument("--heap-mb", type=int, default=1024, help="JVM heap of an executor in MiB (default: 1024)")
    parser.add_argument("--directory", type=Path, help="directory for log and results (default: a temporary directory)")
    parser.add_argument("--store", type=Path, help="existing store to use instead of writing one")
    parser.add_argument("--together", action="store_true", help="run all jobs on the same executors")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child.split(","), options.store, options.directory, options.memory_mb, options.heap_mb)
        return 0
    jobs = options.jobs.split(",")
    if unknown := [job for job in jobs if job not in JOBS]:
        parser.error(f"unknown job: {', '.join(unknown)}; accepted are {', '.join(JOBS)}")
    with ExitStack() as stack:
        folder = options.directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halog-memory-")))
        folder.mkdir(parents=True, exist_ok=True)
        store = options.store or folder / "store"
        if not (store / "commitlog").exists():
            segment_bytes = options.segment_mib << 20
            wanted = SparseStore(store, options.gib * _GIB // segment_bytes, segment_bytes)
            if options.body_bytes:
                wanted = SparseStore(store, wanted.segment_count, segment_bytes, tuple(options.body_bytes))
            print(write_sparse_store(wanted), file=sys.stderr, flush=True)
        print(_HEADER)
        figures = []
        for found in measure(
            store, folder, jobs, memory_mb=options.memory_mb, heap_mb=options.heap_mb, together=options.together
        ):
            print(_row(found), flush=True)
            figures.append(asdict(found))
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")
    return any(found["said"].startswith(_FAILED) for found in figures)


def _row(found: Measured) -> str:
    peaks = found.peaks
    return (
        f"| {found.job} | {found.seconds:.1f} | {peaks.cpu_s:.1f} | {found.shuffle_bytes / (1 << 20):.1f} "
        f"| {peaks.executor:.0f} | {peaks.executor_jvm:.0f} | {peaks.python_worker:.0f} "
        f"| {peaks.python_worker_resident:.0f} | {peaks.driver_jvm:.0f} | {peaks.driver_python:.0f} | {found.said} |"
    )


if __name__ == "__main__":
    sys.exit(main())
