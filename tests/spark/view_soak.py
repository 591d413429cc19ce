"""A writer, an archiver and readers that run against each other and are killed: `scripts/archive-soak`.

    writer     a store with small segments; its retention deletes what is archived, at once
    archiver   `ha spark archive --every 1s`
    reader     a streaming query with the option `archive` into files, and a table of `ha.spark.topic` every two seconds

Each is a process with its own Spark, if any, which the soak kills with SIGKILL at times drawn from a seed, and starts
again. At the end a last archiver and a last query read the rest. Then

- the log has had every acknowledged message, and every queue offset once,
- the query's files have each queue offset from 0 to the end of the log once, with another body each, and so has the
  table,
- every table that was made meanwhile had each queue offset from 0 to some end once.

A reader that ends because retention was faster than its task is started again, as docs/spark.md says.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import trio

from ha.arrow import LogReader
from ha.cli.exits import EXIT_UNREACHABLE
from ha.errors import RecordsGone
from ha.protocol.codes import PutStatus
from ha.spark.jobs.archive.manifest import Manifest
from ha.store.message_store import open_message_store
from tests.spark.sessions import kill_session
from tests.spark.stores import message, store_options

ROOT = Path(__file__).parents[2]
TOPIC = "flights"
BROKER = "store"
"""The name of the store's directory"""
QUEUES = 4
SEGMENT = 512 << 10
BATCH = 40
_PAUSE_S = 0.2
_END_S = 1200.0
"""Limit of the last archiver and of the last query"""
_TRY_AGAIN = 75
"""Exit code of a reader that must be started again (EX_TEMPFAIL in sysexits.h)"""
_MERGED = re.compile("FILE_NOT_EXIST|PATH_NOT_FOUND|NoSuchFileException|FileNotFoundException")
"""What errors of Spark say if a merge has replaced a file of a table"""


class Places:
    """The files of a run."""

    def __init__(self, directory: Path) -> None:
        self.store = directory / BROKER
        self.archive = directory / "archive"
        self.acknowledged = directory / "acknowledged.txt"
        self.rows = directory / "rows"
        self.checkpoint = directory / "checkpoint"
        self.tables = directory / "tables.jsonl"
        self.logs = directory / "logs"


class Outcome(msgspec.Struct, kw_only=True):
    """What a run did."""

    acknowledged: int = 0
    rows: int = 0
    kills: dict[str, int] = {}
    ends: dict[str, int] = {}
    """Processes that ended without a kill: readers, because retention was faster"""
    tables: int = 0
    """Tables of the whole topic that were checked"""
    deleted_segments: int = 0
    archived_end: int = 0
    seconds: float = 0.0


# ---- the processes


async def write(places: Places, incarnation: str) -> None:
    """Put messages until killed; retention deletes archived segments."""

    async def is_archived(end: int) -> bool:
        return end <= _covered(places)

    numbers = iter(range(1 << 60))
    options = store_options(places.store, SEGMENT, reserved_h=0.0)
    with places.acknowledged.open("a", buffering=1) as acknowledged:
        async with open_message_store(options) as store:
            store.set_release(is_archived)
            while True:
                bodies = [f"{incarnation}-{next(numbers)}-".encode() for _ in range(BATCH)]
                batch = [message(n, queue_id=n % QUEUES, body=body + bytes(400)) for n, body in enumerate(bodies)]
                results = await store.log.put(batch)
                if any(result.status is not PutStatus.PUT_OK for result in results):
                    raise RuntimeError(results)
                acknowledged.write("".join(f"{body.decode()}\n" for body in bodies))
                if deleted := await store.retention.clean(at_any_hour=True):
                    acknowledged.write(f"deleted {deleted}\n")
                await trio.sleep(_PAUSE_S)


def read(places: Places, *, once: bool) -> None:
    """Run the query, and make tables of the topic meanwhile; `once`: until everything is read, then one table."""
    from pyspark.sql import functions as F  # noqa: N812

    import ha.spark
    from ha.spark.session import open_session

    def take(rows: Any, number: int) -> None:
        draft = places.rows / f".{number}.draft"
        pq.write_table(rows.select("queueId", "queueOffset", "body").toArrow(), draft)
        draft.replace(places.rows / f"{number}.parquet")

    def check_table(spark: Any) -> None:
        table = ha.spark.topic(spark, TOPIC, archive=str(places.archive), path=str(places.store))
        offset = F.col("queueOffset")
        counts = F.count("*").alias("count"), F.count_distinct(offset).alias("distinct"), F.max(offset).alias("last")
        found = [row.asDict() for row in table.groupBy("queueId").agg(*counts).collect()]
        with places.tables.open("a") as file:
            file.write(json.dumps(found) + "\n")

    places.rows.mkdir(exist_ok=True)
    with open_session("view soak", "local[2]", {"spark.sql.shuffle.partitions": "1"}) as spark:
        spark.dataSource.register(ha.spark.HalogDataSource)
        given = {
            "path": str(places.store),
            "archive": str(places.archive),
            "topic": TOPIC,
            "maxOffsetsPerTrigger": "4000",
        }
        stream = spark.readStream.format("halog").options(**given).load()
        writer = stream.writeStream.foreachBatch(take).option("checkpointLocation", str(places.checkpoint))
        query = writer.trigger(**({"availableNow": True} if once else {"processingTime": "1 second"})).start()
        if once:
            query.awaitTermination()
            check_table(spark)
            return
        while not query.awaitTermination(2):
            try:
                check_table(spark)
            except Exception as error:
                if not (_is_temporary(error) or _MERGED.search(str(error))):
                    raise


def _is_temporary(error: Exception) -> bool:
    """Return whether retention was faster than a task, or Spark could not start a Python process."""
    from ha.spark.restarts import has_not_started

    return isinstance(error, RecordsGone) or "ha.errors.RecordsGone: " in str(error) or has_not_started(error)


# ---- the run


class Process:
    """One of the processes, in its own session."""

    def __init__(self, name: str, command: Callable[[int], list[str]], places: Places) -> None:
        self.name = name
        self.command = command
        self.log = places.logs / f"{name}.log"
        self.starts = 0
        self._log_begin = 0
        self.running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and append its output to its log."""
        self.starts += 1
        with self.log.open("ab") as log:
            self._log_begin = log.tell()
            self.running = subprocess.Popen(
                self.command(self.starts), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """Kill all its processes."""
        if self.running is None:
            return
        kill_session(self.running)
        self.running.wait()
        self.running = None

    def check(self) -> None:
        """Raise AssertionError if it ended with an error after which it must not be started again."""
        assert self.running is not None
        code = self.running.returncode
        said = self.log.read_bytes()[self._log_begin :].decode(errors="replace")
        may_end = self.name == "reader" and code == _TRY_AGAIN
        may_end |= self.name == "archiver" and code == EXIT_UNREACHABLE and "could not start a Python process" in said
        assert may_end, f"the {self.name} ended with exit code {code}: {said[-4000:]}"


def run_soak(directory: Path, *, minutes: float, seed: int, on_event: Callable[[str], None]) -> Outcome:
    """Run all of it. AssertionError if a message is missing or there twice, or a process ended with another error."""
    places = Places(directory)
    for folder in (directory, places.logs):
        folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(seed)
    began_s = time.monotonic()
    outcome = Outcome()
    processes = _processes(places)
    try:
        _run(processes, places, dice, minutes * 60, outcome, on_event)
    finally:
        for process in processes:
            process.kill()
    on_event("the rest is archived and read")
    _finish(places)
    outcome.seconds = time.monotonic() - began_s
    _check(places, outcome)
    return outcome


def _processes(places: Places) -> list[Process]:
    directory = str(places.store.parent)

    def own(name: str) -> Callable[[int], list[str]]:
        return lambda start: [sys.executable, "-m", "tests.spark.view_soak", name, directory, str(start)]

    def archiver(_: int) -> list[str]:
        return [*_archive_command(places), "--every", "1s", "--metrics-file", str(places.logs / "archive.prom")]

    return [
        Process("writer", own("writer"), places),
        Process("archiver", archiver, places),
        Process("reader", own("reader"), places),
    ]


def _archive_command(places: Places) -> list[str]:
    program = [sys.executable, "-c", "import ha.cli; ha.cli.main()", "spark", "archive", "--path", str(places.store)]
    return [*program, "--to", str(places.archive), "--broker-name", BROKER, "--master", "local[2]"]


_KILLS_PER_MINUTE = {"writer": 4.0, "archiver": 1.5, "reader": 1.5}
_EARLY_KILLS = 0.25
"""Share of the kills that do not wait until the process has done something, as Spark needs time to start"""


def _run(
    processes: list[Process],
    places: Places,
    dice: random.Random,
    seconds: float,
    outcome: Outcome,
    on_event: Callable[[str], None],
) -> None:
    writer, archiver, reader = processes
    writer.start()
    _wait_for("the store", lambda: (places.store / "consumequeue" / TOPIC / "0").exists())
    archiver.start()
    _wait_for("the first commit", lambda: _covered(places) > 0)
    reader.start()

    def plan_kill(process: Process) -> None:
        kill_s[process] = time.monotonic() + dice.uniform(0.5, 1.5) * 60 / _KILLS_PER_MINUTE[process.name]
        before[process] = None if dice.random() < _EARLY_KILLS else _done(process, places)

    kill_s: dict[Process, float] = {}
    before: dict[Process, int | None] = {}
    for process in processes:
        plan_kill(process)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(outcome.kills) < len(processes):
        assert time.monotonic() < end_s + _END_S, f"killed only {outcome.kills}"
        time.sleep(0.2)
        for process in processes:
            assert process.running is not None
            if process.running.poll() is not None:
                process.check()
                outcome.ends[process.name] = outcome.ends.get(process.name, 0) + 1
                on_event(f"the {process.name} ended, and is started again")
            elif time.monotonic() >= kill_s[process] and before[process] != _done(process, places):
                outcome.kills[process.name] = outcome.kills.get(process.name, 0) + 1
                on_event(f"the {process.name} is killed; {_covered(places):,} bytes are archived")
            else:
                continue
            process.kill()
            process.start()
            plan_kill(process)


def _done(process: Process, places: Places) -> int:
    """Return a number that changes when the process has done something."""
    if process.name == "archiver":
        return _covered(places)
    file = places.acknowledged if process.name == "writer" else places.tables
    return file.stat().st_size if file.exists() else 0


def _covered(places: Places) -> int:
    return Manifest(places.archive, BROKER).state(applied_only=True).covered_end or 0


def _wait_for(what: str, is_there: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _END_S
    while not is_there():
        assert time.monotonic() < give_up, f"not within {_END_S} s: {what}"
        time.sleep(0.1)


def _finish(places: Places) -> None:
    last_reader = [sys.executable, "-m", "tests.spark.view_soak", "last-reader", str(places.store.parent), "0"]
    for name, command in (("archiver", _archive_command(places)), ("reader", last_reader)):
        with (places.logs / f"last-{name}.log").open("wb") as log:
            done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=_END_S, check=False)
        said = (places.logs / f"last-{name}.log").read_text(errors="replace")
        assert done.returncode == 0, f"the last {name} failed: {said[-4000:]}"


def _check(places: Places, outcome: Outcome) -> None:
    lines = places.acknowledged.read_text().splitlines(keepends=True)
    acknowledged = {line.strip() for line in lines if line.endswith("-\n")}
    outcome.acknowledged = len(acknowledged)
    outcome.deleted_segments = sum(int(line.split()[1]) for line in lines if line.startswith("deleted "))
    outcome.archived_end = _covered(places)
    with closing(LogReader(places.store, broker_name=BROKER)) as reader:
        ends = {queue: reader.queue_range(TOPIC, queue).end for queue in range(QUEUES)}
    rows = pa.concat_tables([pq.read_table(file) for file in places.rows.glob("*.parquet")])
    outcome.rows = len(rows)
    found = Counter(zip(rows["queueId"].to_pylist(), rows["queueOffset"].to_pylist(), strict=True))
    expected = {(queue, offset) for queue, end in ends.items() for offset in range(end)}
    assert not expected - found.keys(), f"the query lacks {sorted(expected - found.keys())[:5]} …"
    assert not found.keys() - expected, f"no queue has {sorted(found.keys() - expected)[:5]} …"
    twice = [place for place, times in found.items() if times > 1]
    assert not twice, f"the query has twice {twice[:5]} …"
    bodies = [body.rstrip(b"\0").decode() for body in pc.unique(rows["body"]).to_pylist()]
    assert len(bodies) == len(rows), "a body is in two places"
    assert acknowledged <= set(bodies), f"acknowledged, but lost: {sorted(acknowledged - set(bodies))[:5]} …"
    tables = [json.loads(line) for line in places.tables.read_text().splitlines()]
    outcome.tables = len(tables)
    for queue in (queue for table in tables for queue in table):
        assert queue["count"] == queue["distinct"] == queue["last"] + 1, f"a table had {queue}"
    assert {queue["queueId"]: queue["count"] for queue in tables[-1]} == ends, f"the last table had {tables[-1]}"


def main(name: str, directory: str, start: str) -> None:
    places = Places(Path(directory))
    if name == "writer":
        trio.run(write, places, start)
        return
    try:
        read(places, once=name == "last-reader")
    except Exception as error:
        if not _is_temporary(error):
            raise
        traceback.print_exc()
        sys.exit(_TRY_AGAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
