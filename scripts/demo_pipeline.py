"""Runs the demo's Spark pipeline on the slave's files.

A stream computes delays by carrier and hour while messages arrive; then the log is archived to Parquet and plotted. All
results are compared with values computed from the flights.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

STREAM_TIMEOUT_S = 300.0
FLIGHT_SCHEMA = "carrier STRING, hour INT, dep_delay DOUBLE"


class PipelineError(Exception):
    """A result of Spark differs from the expected one; the message says which."""


Delays = dict[tuple[str, int], tuple[int, float]]
"""(carrier, hour of the scheduled departure) -> (flights, total departure delay in minutes)."""


def delays_of(bodies: Iterable[bytes]) -> Delays:
    """Computes the expected result of the stream."""
    found: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0, 0.0])
    for body in bodies:
        flight = json.loads(body)
        if flight["dep_delay"] is not None:
            cell = found[flight["carrier"], flight["hour"]]
            cell[0] += 1
            cell[1] += flight["dep_delay"]
    return {key: (int(count), total) for key, (count, total) in found.items()}


def flights_table(source: DataFrame) -> DataFrame:
    """Returns the delays by carrier and hour of the flights in message bodies."""
    from pyspark.sql.functions import col, count, from_json, sum

    parsed = source.select(from_json(col("body").cast("string"), FLIGHT_SCHEMA).alias("flight")).select("flight.*")
    known = parsed.where(col("dep_delay").isNotNull())
    return known.groupBy("carrier", "hour").agg(count("*").alias("flights"), sum("dep_delay").alias("minutes"))


def run_pipeline(
    spark: SparkSession,
    store: Path,
    directory: Path,
    topic: str,
    send_more: Callable[[], list[bytes]],
    say: Callable[[str], None],
) -> dict[str, str]:
    """Streams while more flights are sent, archives and plots. Returns rows of the result table.

    `send_more` sends more flights and returns all bodies in the topic. Raises PipelineError if a result is wrong, or if
    the stream ends or does not read all flights within STREAM_TIMEOUT_S.
    """
    import ha.spark
    from ha.spark.jobs.archive import ArchiveOptions, archive

    spark.dataSource.register(ha.spark.HalogDataSource)
    started = time.monotonic()
    messages = (
        spark.readStream.format("halog")
        .option("path", str(store))
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("columns", "body")
        .option("maxOffsetsPerTrigger", 100_000)
        .load()
    )
    query = (
        flights_table(messages)
        .writeStream.format("memory")
        .queryName("delays")
        .outputMode("complete")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .start()
    )
    try:
        _wait_for(query, lambda: _rows_read(query) > 0)
        say("the stream is running; sending more flights")
        sent: list[list[bytes]] = []
        sender = threading.Thread(target=lambda: sent.append(send_more()))
        sender.start()
        sender.join()
        if not sent:
            raise PipelineError("the additional flights could not be sent")
        bodies = sent[0]
        _wait_for(query, lambda: _rows_read(query) >= len(bodies))
        seconds = time.monotonic() - started
        batches = len({progress["batchId"] for progress in _progress(query) if progress["numInputRows"]})
        found = {(r["carrier"], r["hour"]): (r["flights"], r["minutes"]) for r in spark.table("delays").collect()}
    finally:
        query.stop()
    expected = delays_of(bodies)
    if found != expected:
        wrong = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
        raise PipelineError(f"{len(wrong)} of {len(expected)} delays are wrong, for example {wrong[:3]}")
    say(f"{len(bodies):,} flights in {batches} micro-batches, {seconds:.1f} s; all {len(found):,} results are correct")

    done = archive(spark, ArchiveOptions(path=str(store), archive=str(directory / "archive"), topics=(topic,)))
    parquet = spark.read.parquet(str(directory / "archive"))
    count = parquet.where(parquet.topic == topic).count()
    if count != len(bodies) or done.exit_code:
        raise PipelineError(f"the archive has {count:,} flights of {len(bodies):,}")
    size = f"{done.file_bytes / 1e6:,.1f} MB"
    say(f"{count:,} flights archived in {done.seconds:.1f} s: {done.files} Parquet files, {size}; second run: no rows")
    again = archive(spark, ArchiveOptions(path=str(store), archive=str(directory / "archive"), topics=(topic,)))
    if again.rows:
        raise PipelineError(f"archiving again found {again.rows:,} flights that were already archived")

    plot = directory / "delays.png"
    _plot(expected, plot)
    say(f"plot: {plot}")
    return {
        "streamed": f"{len(bodies):,} flights, {batches} micro-batches, {seconds:.1f} s",
        "archived to Parquet": f"{count:,} flights, {size}, {done.seconds:.1f} s",
        "plot": str(plot),
    }


def _progress(query: StreamingQuery) -> list[dict[str, Any]]:
    return [json.loads(progress.json) if hasattr(progress, "json") else progress for progress in query.recentProgress]


def _rows_read(query: StreamingQuery) -> int:
    by_batch = {progress["batchId"]: progress["numInputRows"] for progress in _progress(query)}
    return sum(by_batch.values())


def _wait_for(query: StreamingQuery, is_reached: Callable[[], bool]) -> None:
    give_up = time.monotonic() + STREAM_TIMEOUT_S
    while not is_reached():
        time.sleep(0.2)
        if not query.isActive:
            raise PipelineError("the stream ended unexpectedly")
        if time.monotonic() > give_up:
            raise PipelineError(f"timeout: the stream read {_rows_read(query):,} flights in {STREAM_TIMEOUT_S:g} s")


def _plot(delays: Delays, file: Path) -> None:
    """Plots the mean departure delay by hour for the largest carriers and for all carriers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes: dict[str, int] = defaultdict(int)
    for (carrier, _), (count, _) in delays.items():
        sizes[carrier] += count
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    hours = sorted({hour for _, hour in delays})
    for carrier in sorted(sizes, key=lambda name: -sizes[name])[:6]:
        known = [hour for hour in hours if (carrier, hour) in delays]
        axes.plot(known, [delays[carrier, h][1] / delays[carrier, h][0] for h in known], alpha=0.6, label=carrier)
    together = [
        (
            sum(delays[c, h][1] for c in sizes if (c, h) in delays),
            sum(delays[c, h][0] for c in sizes if (c, h) in delays),
        )
        for h in hours
    ]
    axes.plot(hours, [total / count for total, count in together], color="black", linewidth=2.5, label="all carriers")
    axes.set(xlabel="scheduled hour of departure", ylabel="mean departure delay, minutes")
    axes.set_xticks(hours)
    axes.set_title("Flights from New York in 2013, the six largest carriers", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, frameon=False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
