"""Measures `ha.arrow` without Spark, on one core: how fast a store becomes Arrow record batches.

The store is that of `bench/run spark`, in a warm page cache. Each case reads all of it in this process; rounds are
outermost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.measure import machine, machine_busy_s, spread
from bench.spark.__main__ import data_folder, say, warm_cache
from bench.spark.cases import HALOG_COLUMNS
from bench.spark.filling import fill_store, is_filled
from bench.spark.messages import BODY_SIZE, TOPIC
from ha.arrow import LogReader, ReadOptions, RowFilter

COLUMN_SETS: dict[str, tuple[str, ...]] = {
    "queueId alone (count)": ("queueId",),
    "header columns": ("topic", "queueId", "queueOffset", "physicalOffset", "storeTimestamp", "bodySize", "sysFlag"),
    "body": ("body",),
    "seven columns with body": HALOG_COLUMNS,
    "properties alone": ("properties",),
    "seven columns with body and properties": (*HALOG_COLUMNS, "properties"),
    "every column but crcOk": (
        *(
            "topic",
            "brokerName",
            "queueId",
            "queueOffset",
            "physicalOffset",
            "storeSize",
            "body",
            "bodySize",
            "bodyCRC",
        ),
        *("tags", "keys", "properties", "propertiesString", "bornTimestamp", "storeTimestamp", "bornHost", "storeHost"),
        *("sysFlag", "flag", "reconsumeTimes", "preparedTransactionOffset", "msgId", "uniqKey"),
    ),
}


def cases(reader: LogReader) -> dict[str, Callable[[], tuple[int, int]]]:
    """Returns name -> a function that runs the case and returns rows and bytes of log."""
    begin, end = reader.min_offset, reader.end_offset()
    whole = end - begin
    queues = [(queue_id, *reader.queue_range(TOPIC, queue_id)) for _, queue_id in reader.queues()]

    def boundaries() -> tuple[int, int]:
        found = 0
        for queue_id, first, last in queues:
            entries = reader.entries(TOPIC, queue_id, first, last)
            found += len(entries["physical_offset"].astype("i8")) + 0 * int(entries["size"].astype("i8").sum())
        return found, whole

    def walked() -> tuple[int, int]:
        return sum(len(positions) for positions in reader.walk(begin, end)), whole

    def by_queue(columns: tuple[str, ...]) -> Callable[[], tuple[int, int]]:
        options = ReadOptions(columns=columns)

        def read() -> tuple[int, int]:
            rows = 0
            for queue_id, first, last in queues:
                rows += count(reader.read_queue(TOPIC, queue_id, first, last, options))
            return rows, whole

        return read

    def by_range(options: ReadOptions) -> Callable[[], tuple[int, int]]:
        return lambda: (count(reader.read_range(begin, end, options)), whole)

    found = {"boundaries from consume queues": boundaries, "boundaries by a walk of sizes": walked}
    for name, columns in COLUMN_SETS.items():
        found[f"{name}, by queue"] = by_queue(columns)
        found[f"{name}, in physical order"] = by_range(ReadOptions(columns=columns))
    found["CRC of every body"] = by_range(ReadOptions(columns=("crcOk",)))
    where = RowFilter(tags=frozenset({"UA"}))
    found["seven columns with body, one tag in ten"] = by_range(ReadOptions(columns=HALOG_COLUMNS, where=where))
    return found


def count(batches: Iterable[pa.RecordBatch]) -> int:
    """Counts rows without keeping a batch."""
    return sum(batch.num_rows for batch in batches)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench/run arrow", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="run cases whose name contains one of these comma-separated words")
    parser.add_argument("--directory", type=Path, help="as for bench/run spark")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(words)
    pa.set_cpu_count(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    runs: list[dict[str, Any]] = []
    with data_folder(options.directory, options.keep) as folder:
        if not is_filled(folder / "store", options.rows):
            say(f"writing {options.rows:,} messages to a store")
            fill_store(folder / "store", options.rows)
        with LogReader(folder / "store") as reader:
            chosen = cases(reader)
            if options.only:
                wanted = options.only.split(",")
                chosen = {name: run for name, run in chosen.items() if any(word in name for word in wanted)}
            for number in range(-1, options.rounds):
                warm_cache(folder / "store")
                for name, run in chosen.items():
                    used, busy, began = time.process_time(), machine_busy_s(), time.monotonic()
                    rows, log_bytes = run()
                    wall_s, cpu_s = time.monotonic() - began, time.process_time() - used
                    line: dict[str, Any] = {
                        "round": number,
                        "case": name,
                        "rows": rows,
                        "log_bytes": log_bytes,
                        "seconds": wall_s,
                    }
                    line |= {"cpu_s": cpu_s, "foreign_cores": max(0.0, (machine_busy_s() - busy - cpu_s) / wall_s)}
                    print(json.dumps(line), flush=True)
                    if number >= 0:
                        runs.append(line)
    print(json.dumps({"machine": machine(), "pyarrow": pa.__version__}))
    print(f"\n{options.rows:,} messages of {BODY_SIZE} bytes, one core, {options.rounds} rounds\n")
    print("| case | CPU s | million records/s | GB/s of log | others' cores |\n|---|---|---|---|---|")
    for name in dict.fromkeys(run["case"] for run in runs):
        point = [run for run in runs if run["case"] == name]
        cpu_s = statistics.median(run["cpu_s"] for run in point)
        print(
            f"| {name} | {spread([run['cpu_s'] for run in point], 3)} | {point[0]['rows'] / cpu_s / 1e6:.2f} "
            f"| {point[0]['log_bytes'] / cpu_s / 1e9:.2f} | {spread([run['foreign_cores'] for run in point], 2)} |"
        )


if __name__ == "__main__":
    main()
