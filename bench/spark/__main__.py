"""Compares the log as a Spark table with spark-sql-kafka: the same messages in both, read by one Spark application.

Rounds are outermost, and every second one runs in reverse order, so that other load affects both sides equally. Each
run prints one line of JSON: wall time, processor time of the application (JVM and Python workers) and of Kafka's
broker, and how many cores other programs used. At the end it prints a table of medians with (minimum-maximum).

halog reads files without a broker, except on the side "halog servers"; the processor time of brokers has its own
column. `--compare` compares the runs of two versions of halog.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from bench.measure import machine, machine_busy_s, spread
from bench.spark import kafka as kafka_side
from bench.spark.broker import broker_over
from bench.spark.cases import THROUGH_BROKER, Case, Sources, all_cases, make_archives
from bench.spark.filling import fill_kafka, fill_store, is_filled, mark_filled
from bench.spark.messages import BODY_SIZE
from bench.spark.processes import ProcessTree
from bench.spark.session import jvm_pid, spark_application

QUESTIONS = {
    "columns": "seven columns with body",
    "properties": "with properties / headers",
    "count": "count(*)",
    "filter": "topic and tag filter (one message in ten)",
    "micro-batch": "micro-batch, median",
    "parquet": "log to Parquet, zstd",
    "view": "archive and log as one table, default columns",
    "audit": "audit of two copies",
}
SIDES = (
    "Kafka",
    "Kafka, tuned",
    "halog",
    THROUGH_BROKER,
    "halog archive",
    "Parquet",
    "halog all archived",
    "halog tail in log",
)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run spark", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=2_000_000, help="messages of 1 KiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1, help="warm-up rounds")
    parser.add_argument("--only", help=f"comma-separated list of {', '.join(QUESTIONS)}")
    parser.add_argument("--sides", help=f"comma-separated list of {', '.join(map(_word, SIDES))} (default: all)")
    parser.add_argument("--directory", type=Path, help="directory for about 9 GB of data (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the data in --directory for the next run")
    parser.add_argument("--no-kafka", action="store_true", help="only halog: no broker, no Maven")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--memory", default="4g", help="heap of the application's JVM")
    parser.add_argument("--stream-rows", type=int, default=20_000, help="rows of a micro-batch")
    parser.add_argument("--stream-batches", type=int, default=30)
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="of the application")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of halog's reads")
    parser.add_argument("--cold", action="store_true", help="let halog's runs start Python workers that Spark ended")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--table", type=Path, help="only print the table of the runs in a file made by --output")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="only compare the runs in two such files"
    )
    options = parser.parse_args(words)
    if options.keep and options.directory is None:
        parser.error("--keep requires --directory")
    unknown = set((options.only or "columns").split(",")) - QUESTIONS.keys()
    if unknown:
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; choose from {', '.join(QUESTIONS)}")
    unknown = set((options.sides or "halog").split(",")) - set(map(_word, SIDES))
    if unknown:
        parser.error(f"--sides: unknown {', '.join(sorted(unknown))}; choose from {', '.join(map(_word, SIDES))}")
    return options


def _word(side: str) -> str:
    """Returns the side's name for the option `--sides`."""
    return side.replace(", ", "-").replace(" ", "-")


def is_chosen(options: argparse.Namespace, name: str, side: str) -> bool:
    """Whether the options `--only` and `--sides` choose this case."""
    in_names = options.only is None or name in options.only.split(",")
    return in_names and (options.sides is None or _word(side) in options.sides.split(","))


@contextmanager
def data_folder(directory: Path | None, keep: bool) -> Iterator[Path]:
    """The directory of store and broker; deleted at the end unless kept."""
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="halog-bench-"))
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / ".halog-bench"
    if not mark.exists() and any(directory.iterdir()):
        raise SystemExit(
            f"--directory: {directory} holds something else; folders in it would be deleted, so give another"
        )
    with mark.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"--directory: another benchmark is using {directory}") from None
        yield from _data_folder(directory, mark, keep)


def _data_folder(directory: Path, mark: Path, keep: bool) -> Iterator[Path]:
    try:
        yield directory
    finally:
        for name in ("output", "local", "warehouse", "archives", "broker", *([] if keep else ["store", "kafka"])):
            shutil.rmtree(directory / name, ignore_errors=True)
        if not keep:
            mark.unlink()
            if not any(directory.iterdir()):
                directory.rmdir()


def say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def one_run(case: Case, spark: SparkSession, application: ProcessTree, broker: ProcessTree | None) -> dict[str, Any]:
    """Runs one job and measures its cost."""
    used, served = application.cpu_s(), broker.cpu_s() if broker else 0.0
    busy, began = machine_busy_s(), time.monotonic()
    found = case.run(spark)
    wall_s = time.monotonic() - began
    cpu_s = application.cpu_s() - used
    broker_cpu_s = broker.cpu_s() - served if broker else 0.0
    foreign = (machine_busy_s() - busy - cpu_s - broker_cpu_s) / wall_s
    share = found["batches"] if case.unit == "s/batch" else 1
    return {
        "case": case.name,
        "side": case.side,
        "unit": case.unit,
        "seconds": found.pop("seconds", wall_s),
        "cpu_s": cpu_s / share,
        "broker_cpu_s": broker_cpu_s / share,
        "foreign_cores": max(0.0, foreign),
        "wall_s": wall_s,
        "log_bytes": case.log_bytes,
        **found,
    }


def collect_garbage(spark: SparkSession) -> None:
    """Collects garbage, so that each run starts with a clean heap."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    jvm.java.lang.System.gc()


def wake_workers(spark: SparkSession, sources: Sources) -> None:
    """Makes Spark start its Python workers, which it ends after an idle minute, for example while Kafka runs."""
    few = sources.halog(spark, ("queueId", "queueOffset"))
    few.where("queueOffset < 1").count()
    few.count()


def warm_cache(folder: Path) -> None:
    """Reads every file once, so that the following runs find it in memory."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def check_same(runs: list[dict[str, Any]], rows: int) -> None:
    """Rejects a run that saw other rows than it should."""
    for run in runs:
        if "rows" in run and run["rows"] != rows:
            raise SystemExit(f"{run['case']} by {run['side']} saw {run['rows']:,} rows of {rows:,}")


def by_case(runs: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Returns (case, side) -> its runs, in the order of the tables."""
    points: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        points.setdefault((run["case"], run["side"]), []).append(run)
    order = list(QUESTIONS)
    return dict(sorted(points.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Returns a row per case and side: seconds, Kafka's time as a multiple, processor seconds, other load, and the
    medians per GB of log.
    """
    points = by_case(runs)
    medians = {point: statistics.median(run["seconds"] for run in found) for point, found in points.items()}
    rows = []
    for (case, side), point in points.items():
        digits = _digits(point)
        rivals = [medians.get((case, rival)) for rival in ("Kafka", "Kafka, tuned")]
        of_kafka = side.startswith("Kafka")
        has_broker = of_kafka or side == THROUGH_BROKER
        rows.append(
            [
                QUESTIONS[case],
                side,
                spread([run["seconds"] for run in point], digits),
                *("" if of_kafka or rival is None else f"{rival / medians[case, side]:.1f}" for rival in rivals),
                spread([run["cpu_s"] for run in point], digits),
                spread([run["broker_cpu_s"] for run in point], digits) if has_broker else "",
                spread([run["foreign_cores"] for run in point], 2),
                *(_per_gb(point, name) for name in ("seconds", "cpu_s")),
                _per_gb(point, "broker_cpu_s") if has_broker else "",
            ]
        )
    return rows


def _digits(point: list[dict[str, Any]]) -> int:
    return 3 if point[0]["unit"] == "s/batch" else 2


def _per_gb(point: list[dict[str, Any]], name: str) -> str:
    """Returns the median per GB (10^9 bytes) of log, for a case that reads all of it."""
    log_bytes = point[0].get("log_bytes")
    return f"{statistics.median(run[name] for run in point) / log_bytes * 1e9:.2f}" if log_bytes else ""


def compared(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[list[str]]:
    """Returns a row per case and side that both have: seconds and processor seconds of both, and their ratios."""
    befores, afters = by_case(old), by_case(new)
    rows = []
    for (case, side), before in befores.items():
        after = afters.get((case, side))
        if after is None:
            continue
        row = [QUESTIONS[case], side]
        for name in ("seconds", "cpu_s"):
            values = [[run[name] for run in point] for point in (before, after)]
            ratio = statistics.median(values[0]) / statistics.median(values[1])
            row += [*(spread(each, _digits(before)) for each in values), f"{ratio:.2f}"]
        rows.append(row)
    return rows


HEAD = [
    *("what", "side", "seconds", "Kafka / this", "tuned / this", "application CPU s", "broker CPU s", "others' cores"),
    *("s/GB of log", "application CPU s/GB", "broker CPU s/GB"),
]
HEAD_COMPARED = ["what", "side", "old, s", "new, s", "old / new", "old, CPU s", "new, CPU s", "old / new"]


def show(head: list[str], rows: list[list[str]]) -> None:
    """Prints a table."""
    print("| " + " | ".join(head) + " |\n" + "|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def runs_of(file: Path) -> list[dict[str, Any]]:
    """Returns the valid runs in the lines of `--output`, including those of an interrupted run."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line.get("round", -1) >= 0]


def measure(options: argparse.Namespace, folder: Path, emit: Any) -> list[dict[str, Any]]:
    """Fills missing stores, then runs all rounds. Returns the valid runs."""
    settings = {"spark.python.unix.domain.socket.enabled": "true"}  # benefits only halog; Kafka's side has no Python
    settings |= dict(setting.split("=", 1) for setting in options.conf)
    with ExitStack() as stack:
        if not is_filled(folder / "store", options.rows):
            say(f"writing {options.rows:,} messages to a store")
            say(f"took {fill_store(folder / 'store', options.rows):.0f} s")
        kafka = None
        jars: list[Path] = []
        if not options.no_kafka:
            jars = kafka_side.connector_jars()
            if not is_filled(folder / "kafka", options.rows):
                shutil.rmtree(folder / "kafka", ignore_errors=True)
            kafka = stack.enter_context(kafka_side.kafka_broker(folder / "kafka"))
        spark = stack.enter_context(
            spark_application(folder, cores=options.cores, memory=options.memory, jars=jars, settings=settings)
        )
        if kafka is not None and not is_filled(folder / "kafka", options.rows):
            say(f"writing {options.rows:,} messages to Kafka")
            say(f"took {fill_kafka(spark, kafka, options.rows):.0f} s")
            mark_filled(folder / "kafka", options.rows)
        application = stack.enter_context(ProcessTree([jvm_pid(spark)]))
        halog = None
        if is_chosen(options, "columns", THROUGH_BROKER):
            halog = stack.enter_context(broker_over(folder / "store", folder / "broker"))
        brokers = [each.pid for each in (kafka, halog) if each is not None]
        broker = stack.enter_context(ProcessTree(brokers)) if brokers else None
        sources = Sources(
            store=folder / "store",
            bootstrap=kafka.bootstrap if kafka is not None else None,
            output=folder / "output",
            cores=options.cores,
            archives=folder / "archives",
            servers=halog.name_server if halog is not None else None,
            stream_rows=options.stream_rows,
            stream_batches=options.stream_batches,
            halog_options=dict(option.split("=", 1) for option in options.option),
        )
        cases = [case for case in all_cases(sources) if is_chosen(options, case.name, case.side)]
        if any(case.name == "view" for case in cases):
            say("archiving the log for the view")
            make_archives(spark, sources)
        if any(case.side.startswith("halog") for case in cases):
            from ha.spark import HalogDataSource

            spark.dataSource.register(HalogDataSource)
        counted: list[dict[str, Any]] = []
        for number in range(-options.warm_up, options.rounds):
            warm_cache(folder / "store")
            warm_cache(folder / "kafka")
            for case in cases if number % 2 == 0 else reversed(cases):
                if case.side.startswith("halog") and not options.cold:
                    wake_workers(spark, sources)
                collect_garbage(spark)
                run = {"round": number, **one_run(case, spark, application, broker)}
                emit(run)
                check_same([run], options.rows)
                say(
                    f"round {number}: {case.name} by {case.side}: {run['seconds']:.3f} {case.unit}, "
                    f"CPU {run['cpu_s']:.2f} + broker {run['broker_cpu_s']:.2f} s, "
                    f"others {run['foreign_cores']:.2f} cores"
                )
                if number >= 0:
                    counted.append(run)
        emit(versions())
    return counted


def versions() -> dict[str, Any]:
    found = {name: importlib.metadata.version(name) for name in ("pyspark", "pyarrow", "numpy")}
    return {"machine": machine(), **found, "kafka": kafka_side.BROKER_VERSION, "command": " ".join(sys.argv)}


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(words)
    if options.table is not None:
        show(HEAD, table(runs_of(options.table)))
        return
    if options.compare is not None:
        show(HEAD_COMPARED, compared(*map(runs_of, options.compare)))
        return
    # A broker that outlives the benchmark would lock the data directory: exit through the code that stops it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with data_folder(options.directory, options.keep) as folder, ExitStack() as stack:
        file = stack.enter_context(options.output.open("a")) if options.output else None

        def emit(line: dict[str, Any]) -> None:
            text = json.dumps(line)
            print(text, flush=True)
            if file is not None:
                print(text, file=file, flush=True)

        runs = measure(options, folder, emit)
    print(f"\n{options.rows:,} messages of {BODY_SIZE} bytes, {options.cores} cores, {options.rounds} rounds\n")
    show(HEAD, table(runs))


if __name__ == "__main__":
    main()
