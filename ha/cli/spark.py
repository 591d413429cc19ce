"""`ha spark …`: jobs over a log, each in a separate Spark session.

Spark is imported only when a job runs, so that other commands start without it. A job shows a progress bar on a
terminal (on standard error), and ends with a table, or with `--json` with its whole result.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from ha.cli.asking import Yes, print_dry_run_notice
from ha.cli.exits import (
    EXIT_BUG,
    EXIT_DAMAGED,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    EXIT_UNREADABLE,
    EXIT_USAGE,
    UsageError,
    needs_extra,
)
from ha.cli.flags import SERVERS_NAMES
from ha.cli.showing import WIDTH, bars, events_shown, notices, size, stoppable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

app = cyclopts.App(
    name="spark",
    help="Run jobs over the log on Apache Spark. Requires the extra 'spark': pip install 'halog[spark]'.",
    help_epilogue="If Spark can't start its Python processes, because the machine is busy, a job is restarted up to 4 "
    "times in a row, after 5, 10, 20 and 40 s; then the exit code is 69.",
    help_format="markdown",
)

Made = TypeVar("Made")

_NOT_STARTED = "Spark could not start a Python process within 10 s, as the machine is busy"
_PYTHON_ERROR = re.compile(r"\bha\.errors\.(\w+): (.*)$", re.MULTILINE)


@Parameter(name="*")
@dataclass
class Where:
    """Options of every job for Spark and its output."""

    master: Annotated[str, Parameter(help="Spark master: local[*], spark://host:port, yarn, k8s://…")] = "local[*]"
    conf: Annotated[list[str], Parameter(help="Spark setting, key=value (repeatable).", negative=())] = field(
        default_factory=list
    )
    json: Annotated[bool, Parameter(negative=(), help="Print the result as JSON instead of a table.")] = False


# ---- running one


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"--conf {pair!r} is invalid: use key=value, for example spark.executor.memory=2g")
        settings[key] = value
    return settings


@contextmanager
def _session(name: str, where: Where) -> Iterator[SparkSession]:
    settings = _settings(where.conf)
    with needs_extra("ha spark", "spark"):
        from ha.spark.session import open_session
    with open_session(f"ha spark {name}", where.master, settings) as session:
        yield session


def _restarting(job: Callable[[], Made], stop: Event | None = None) -> Made:
    """Return the result of `job`, which is restarted if Spark can't start its Python processes."""
    from ha.spark.restarts import with_restarts

    def report(delay_s: int, _: BaseException) -> None:
        notices().print(f"ha: {_NOT_STARTED}; restarting the job in {delay_s} s")

    return with_restarts(job, stop=stop, report=report)


def _check_stores(*paths: str) -> None:
    """Raise StoreUnreadable before a JVM is started for a wrong path."""
    from ha.arrow import LogReader

    for path in paths:
        LogReader(path).close()


def _show(result: Any, where: Where, tables: Callable[[Any], list[Table]]) -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if where.json:
        # Plain print: rich would wrap long lines.
        print(msgspec.json.format(msgspec.json.encode(result, enc_hook=str), indent=2).decode())
    else:
        for table in tables(result):
            console.print(table)
    code: int = result.exit_code
    return code


def _facts(title: str, facts: dict[str, Any]) -> Table:
    table = Table("what", "how much", title=title, title_justify="left")
    for name, value in facts.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:,}")
    return table


def _size_or_dash(value: float | None) -> str:
    return "–" if value is None else size(int(value))


def _ms_or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"


# ---- errors of a failed job


def is_job_failure(error: BaseException) -> bool:
    """Return whether `error` is Spark's report of a failure on an executor or in the JVM."""
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j")


def explain(error: BaseException) -> str:
    """Return the cause in one line: halog's own error if the message has one, else the start of the message."""
    from ha.spark.restarts import has_not_started

    found = _own_error(error)
    if found is not None:
        return found[1]
    if has_not_started(error):
        return f"{_NOT_STARTED}; run the command again"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"Spark: {lines[0]}" if lines else f"Spark: {type(error).__name__}"


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of the error on the executor; 69 if Spark could not start it, else 70 if it is not halog's
    own."""
    from ha.spark.restarts import has_not_started

    found = _own_error(error)
    if found is None:
        return EXIT_UNREACHABLE if has_not_started(error) else EXIT_BUG
    return _EXIT_CODES.get(found[0], EXIT_REFUSED)


def _own_error(error: BaseException) -> tuple[str, str] | None:
    """Return class and text of the last of halog's errors in an executor's traceback."""
    found = _PYTHON_ERROR.findall(str(error))
    return found[-1] if found else None


_EXIT_CODES = {
    "OptionError": EXIT_USAGE,
    "StoreUnreadable": EXIT_UNREADABLE,
    "CorruptLog": EXIT_DAMAGED,
    "ArchiveDamaged": EXIT_DAMAGED,
    "ArchiveConflict": EXIT_UNREACHABLE,
    "StoreLocked": EXIT_UNREACHABLE,
    "ConnectionFailed": EXIT_UNREACHABLE,
    "NameServersUnreachable": EXIT_UNREACHABLE,
    "RequestTimedOut": EXIT_UNREACHABLE,
}


# ---- the jobs


@app.command
def archive(
    path: Annotated[str, Parameter(help="Store directory of a slave, a stopped master, or a RocketMQ broker.")],
    *,
    archive: Annotated[str, Parameter(name="--to", help="Archive directory, created if missing.")],
    broker_name: Annotated[
        str | None, Parameter(help="Broker name in the archive (default: the broker's own).")
    ] = None,
    format: Literal["parquet", "delta"] = "parquet",
    topics: Annotated[
        list[str] | None, Parameter(name="--topic", negative=(), help="Only this topic (repeatable).")
    ] = None,
    every: Annotated[
        str | None,
        Parameter(help="Interval for new records, such as 5s or 2m, until stopped by SIGTERM (default: run once)."),
    ] = None,
    metrics_file: Annotated[
        str | None, Parameter(help="Write the lag to this file, for Prometheus' textfile collector.")
    ] = None,
    file_mib: Annotated[int, Parameter(help="Target size of a file in MiB.")] = 256,
    on_damage: Literal["report", "skip", "fail"] = "report",
    fail_on_data_loss: Annotated[
        bool, Parameter(help="Fail if retention deleted records before they were archived.")
    ] = True,
    where: Where = Where(),  # noqa: B008 - cyclopts reads the default of a flattened group
) -> int:
    """Write the log as Parquet or Delta, by topic and day, each record once. Run it again to continue.

    With --every it runs as a service, and logs a line with the lag for each commit on standard error.

    Exit codes: 0 done; 3 done, but some records were damaged or missing; 65 the archive is damaged, or of another log;
    66 the store can't be read.
    """
    every_s = None if every is None else _interval_s(every)
    _check_stores(path)
    with ExitStack() as stack:
        spark = stack.enter_context(_session("archive", where))
        show_progress = stack.enter_context(bars() if every_s is None else events_shown("ha.spark"))
        stop = stack.enter_context(stoppable())
        from ha.spark.jobs.archive import ArchiveOptions, ArchiveResult
        from ha.spark.jobs.archive import archive as run

        options = ArchiveOptions(
            path=path,
            archive=archive,
            broker_name=broker_name,
            format=format,
            topics=None if topics is None else tuple(topics),
            every_s=every_s,
            metrics_file=metrics_file,
            target_file_bytes=file_mib << 20,
            on_damage=on_damage,
            fail_on_data_loss=fail_on_data_loss,
        )
        result = _restarting(lambda: run(spark, options, show_progress, stop=stop), stop)

    def tables(done: ArchiveResult) -> list[Table]:
        return [
            _facts(
                f"Archive of {done.broker_name}",
                {
                    "in": done.archive,
                    "records archived now": done.rows,
                    "files, commits": f"{done.files:,} of {size(done.file_bytes)}, {done.commits:,}",
                    "small files merged": done.merged_files,
                    "log read": f"{size(done.log_bytes)} in {done.seconds:.1f} s",
                    "damaged records": done.damaged,
                    "holes": len(done.holes),
                    "covers physical offsets": f"{done.covered_begin:,} to {done.covered_end:,}, of {done.log_end:,}",
                },
            )
        ]

    return _show(result, where, tables)


@app.command
def erase(
    archive: Annotated[str, Parameter(help="Archive of `ha spark archive`.")],
    /,
    *,
    topic: Annotated[str, Parameter(help="Topic of the messages.")],
    keys: Annotated[
        list[str] | None,
        Parameter(name="--key", negative=(), help="Only messages with this key or UNIQ_KEY (repeatable)."),
    ] = None,
    broker_name: Annotated[str | None, Parameter(help="Only this broker's messages.")] = None,
    yes: Yes = False,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Erase messages of a topic, and the broker's copies of them, from an archive. Without --yes, count them.

    Stop the archiver of this archive before. The log is not changed.

    Exit codes: 0 done; 3 done, but some rows can't be searched; 65 the archive is damaged; 69 an archiver is running.
    """
    with _session("erase", where) as spark, bars() as show_progress:
        from ha.spark.jobs.archive.erase import EraseOptions, EraseResult
        from ha.spark.jobs.archive.erase import erase as run

        options = EraseOptions(
            archive=archive, topic=topic, keys=tuple(keys or ()), broker_name=broker_name, dry_run=not yes
        )
        result = _restarting(lambda: run(spark, options, show_progress))

    def tables(done: EraseResult) -> list[Table]:
        counts = ("rows", "files rewritten", "files deleted", "rows not searched")
        title = "Would be erased" if done.dry_run else "Erased"
        table = Table("broker", "topic", *counts, title=f"{title}: {done.rows:,} rows", title_justify="left")
        for each in done.topics:
            figures = (each.rows, each.rewritten_files, each.deleted_files, each.not_searched)
            table.add_row(each.broker_name, each.topic or "(damaged)", *(f"{figure:,}" for figure in figures))
        return [table]

    code = _show(result, where, tables)
    for name, end in result.covered.items():
        notices().print(f"ha: {name} was searched up to physical offset {end:,}, where its archive ends")
    notices().print(
        "ha: the log still has these messages, for consumers, Spark and ha.spark.topic, until retention deletes their "
        "segments (fileReservedTime), and earlier versions of a Delta table until VACUUM"
    )
    if result.dry_run:
        print_dry_run_notice()
    return code


def _interval_s(text: str) -> float:
    """Return a time in seconds, also of a number without a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--every {text!r} is no interval: use for example 5s, 500ms or 2m")
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2] or "s"]


@app.command
def audit(
    *paths: Annotated[str, Parameter(help="Store directories of one broker: its master's and slaves'.")],
    archive: Annotated[str | None, Parameter(help="Parquet archive of the same broker.")] = None,
    broker_name: Annotated[str | None, Parameter(help="Broker name in the archive.")] = None,
    names: Annotated[
        list[str] | None, Parameter(name="--name", negative=(), help="Name for each path (repeatable).")
    ] = None,
    examples: Annotated[int, Parameter(help="Maximum findings of each kind and copy to show; all are counted.")] = 100,
    html: Annotated[Path | None, Parameter(help="Write the report to this HTML file.")] = None,
    report_json: Annotated[Path | None, Parameter(help="Write the report to this JSON file.")] = None,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Compare copies of a log and check each of them: missing, extra, different, duplicate and out-of-order records,
    holes, wrong CRCs, queue entries that don't match.

    Exit codes: 0 clean; 1 damage; 4 nothing could be compared; 66 a store can't be read.
    """
    _check_stores(*paths)
    with _session("audit", where) as spark, bars() as show_progress:
        from ha.spark.jobs.audit import AuditOptions, AuditResult
        from ha.spark.jobs.audit import audit as run

        options = AuditOptions(
            paths=paths,
            names=tuple(names or ()),
            broker_name=broker_name,
            archive=archive,
            examples_max=examples,
        )
        result = _restarting(lambda: run(spark, options, show_progress))
    from ha.spark.jobs.audit.report import write_audit

    write_audit(result, html, report_json)

    def tables(done: AuditResult) -> list[Table]:
        copies = Table("copy", "records", "size", "physical offsets", "checksum", title="Audit", title_justify="left")
        for copy in done.copies:
            span = f"{copy.begin:,} to {copy.end:,}"
            copies.add_row(copy.name, f"{copy.record_count:,}", size(copy.byte_count), span, copy.digest[:16])
        found = Table("finding", "copy", "how many", title="Findings", title_justify="left")
        for kind, by_copy in done.found.items():
            for copy_name, count in by_copy.items():
                found.add_row(kind, copy_name, f"{count:,}")
        if not done.damage_count:
            verdict = "clean" if done.exit_code == 0 else "nothing to compare"
            return [copies, _facts(f"Verdict: {verdict}", {"compared with another copy": size(done.compared_bytes)})]
        return [copies, found]

    return _show(result, where, tables)


@app.command(name=["restore", "replay"])
def restore(
    source: Annotated[str, Parameter(help="Archive of `ha spark archive`, or a store directory with --from-store.")],
    /,
    *,
    topic: Annotated[str, Parameter(help="Topic to read from.")],
    servers: Annotated[
        str, Parameter(name=SERVERS_NAMES, help="Name servers of the target broker.", env_var="NAMESRV_ADDR")
    ] = "",
    target: Annotated[str | None, Parameter(name="--to", help="Topic to send to (default: the same name).")] = None,
    state: Annotated[str | None, Parameter(help="State file that lets a repeated run resume.")] = None,
    from_store: Annotated[bool, Parameter(negative=(), help="SOURCE is a store directory.")] = False,
    broker_name: Annotated[str | None, Parameter(help="Only this broker's messages.")] = None,
    queues: Annotated[list[int] | None, Parameter(name="--queue", negative=())] = None,
    tags: Annotated[list[str] | None, Parameter(name="--tag", negative=())] = None,
    keys: Annotated[list[str] | None, Parameter(name="--key", negative=())] = None,
    since: Annotated[datetime | None, Parameter(help="Stored at or after this time (default zone: UTC).")] = None,
    until: Annotated[datetime | None, Parameter(help="Stored before this time.")] = None,
    rate: Annotated[float | None, Parameter(help="Maximum messages per second.")] = None,
    skip_unsendable: Annotated[bool, Parameter(negative=(), help="Skip messages that no broker accepts.")] = False,
    dry_run: Annotated[bool, Parameter(negative=(), help="Only count the messages.")] = False,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Send messages of an archive or a store into a topic, each once and in each queue's order.

    Exit codes: 0 done; 3 done, but some were skipped or stored less safely than SEND_OK; 69 no broker reachable.
    """
    if from_store:
        _check_stores(source)
    with _session("restore", where) as spark, bars() as show_progress:
        from ha.spark.jobs.restore import RestoreOptions, RestoreResult
        from ha.spark.jobs.restore import restore as run

        options = RestoreOptions(
            topic=topic,
            archive=None if from_store else source,
            path=source if from_store else None,
            broker_name=broker_name,
            servers=servers,
            target=target,
            state=state if state is not None or dry_run else f"{target or topic}.replay.json",
            queues=None if queues is None else tuple(queues),
            begin_ms=_ms(since),
            end_ms=_ms(until),
            tags=None if tags is None else tuple(tags),
            keys=None if keys is None else tuple(keys),
            messages_per_s=rate,
            skip_unsendable=skip_unsendable,
            dry_run=dry_run,
        )
        result = _restarting(lambda: run(spark, options, show_progress))

    def tables(done: RestoreResult) -> list[Table]:
        facts: dict[str, Any] = {"messages that fit": done.rows}
        if not done.dry_run:
            facts |= {"sent now": done.sent, "there already": done.already, "kept in": options.state}
        facts["seconds"] = f"{done.seconds:.1f}"
        return [_facts(f"{done.topic} to {done.target}{' (dry run)' if done.dry_run else ''}", facts)]

    return _show(result, where, tables)


def _ms(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return int(aware.timestamp() * 1000)


@app.command
def stats(
    path: Annotated[str, Parameter(help="Store directory.")],
    *,
    out: Annotated[
        Path | None, Parameter(name="--to", help="Write tables, plots and an HTML page to this directory.")
    ] = None,
    topics: Annotated[
        list[str] | None, Parameter(name="--topic", negative=(), help="Only this topic (repeatable).")
    ] = None,
    since: Annotated[datetime | None, Parameter(help="Stored at or after this time (default zone: UTC).")] = None,
    until: Annotated[datetime | None, Parameter(help="Stored before this time.")] = None,
    top: Annotated[int, Parameter(help="Number of top keys and tags to show.")] = 20,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Count messages, sizes, rates, latencies, tags and keys, retries and dead letters of a log.

    Exit codes: 0 done; 3 done, but damaged records were skipped; 66 the store can't be read.
    """
    _check_stores(path)
    with _session("stats", where) as spark, bars() as show_progress:
        from ha.spark.jobs.stats import stats as run
        from ha.spark.jobs.stats.job import Figures, StatsOptions, StatsResult
        from ha.spark.jobs.stats.report import write_stats

        options = StatsOptions(
            path=path,
            topics=None if topics is None else tuple(topics),
            begin_ms=_ms(since),
            end_ms=_ms(until),
            top=top,
        )
        result = _restarting(lambda: run(spark, options, show_progress))
    if out is not None:
        write_stats(result, out)

    def tables(done: StatsResult) -> list[Table]:
        columns = ("messages", "size", "a second", "body p50, p99", "born to stored p50, p99", "retried")
        table = Table("topic", "queues", *columns, title=f"{done.broker_name}: what is in the log")

        def line(figures: Figures) -> list[str]:
            return [
                f"{figures.messages:,}",
                size(figures.record_bytes),
                f"{figures.messages_per_s:,.1f}",
                f"{_size_or_dash(figures.size_p50)}, {_size_or_dash(figures.size_p99)}",
                f"{_ms_or_dash(figures.latency_ms_p50)}, {_ms_or_dash(figures.latency_ms_p99)}",
                f"{figures.retried:,}",
            ]

        for topic in done.topics:
            table.add_row(topic.topic, f"{topic.queues}", *line(topic.figures))
        table.add_row("all", "", *line(done.total), style="bold")
        found = [table]
        for title, rows in (("tag", done.tags), ("key", done.keys)):
            if rows:
                frequent = Table(title, "topic", "messages", title=f"Most frequent {title}s", title_justify="left")
                for row in rows[:top]:
                    count = f"{row.count:,}" if not row.error else f"{row.count:,} to {row.count + row.error:,}"
                    frequent.add_row(row.value, row.topic, count)
                found.append(frequent)
        if out is not None:
            found.append(_facts("Written", {"tables, plots and stats.html in": str(out)}))
        return found

    return _show(result, where, tables)


@app.command
def lag(
    path: Annotated[str | None, Parameter(help="Store directory; alternatively use --servers.")] = None,
    *,
    servers: Annotated[
        str | None, Parameter(name=SERVERS_NAMES, help="Name servers, host:port joined with ';'.")
    ] = None,
    groups: Annotated[list[str] | None, Parameter(name="--group", negative=())] = None,
    topics: Annotated[list[str] | None, Parameter(name="--topic", negative=())] = None,
    queues: Annotated[bool, Parameter(negative=(), help="Show each queue as well as the groups.")] = False,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Show how far consumer groups are behind the end of the log: messages, bytes and seconds.

    Exit codes: 0 done, whatever the lag; 66 the store can't be read; 69 no broker reachable.
    """
    if path is not None:
        _check_stores(path)
    with _session("lag", where) as spark, bars() as show_progress:
        from ha.spark.jobs.lag import LagOptions, LagResult
        from ha.spark.jobs.lag import lag as run

        options = LagOptions(path=path, servers=servers, groups=tuple(groups or ()), topics=tuple(topics or ()))
        result = _restarting(lambda: run(spark, options, show_progress))

    def tables(done: LagResult) -> list[Table]:
        table = Table("group", "topics", "messages", "size", "oldest", "lost", title=f"Lag on {done.source}")
        for group in done.groups:
            oldest = "unknown" if group.seconds is None else f"{group.seconds:,.1f} s"
            table.add_row(
                group.group, f"{group.topics}", f"{group.messages:,}", size(group.bytes), oldest, f"{group.lost:,}"
            )
        found = [table]
        if queues:
            each = Table("group", "topic", "queue", "committed", "end", "messages", "size", "lost")
            for queue in done.queues:
                place = f"{queue.broker_name}:{queue.queue_id}"
                counts = (f"{queue.committed:,}", f"{queue.end:,}", f"{queue.messages:,}")
                each.add_row(queue.group, queue.topic, place, *counts, size(queue.bytes), f"{queue.lost:,}")
            found.append(each)
        return found

    return _show(result, where, tables)


@app.command
def reindex(
    path: Annotated[Path, Parameter(help="Store directory; its broker must be stopped.")],
    *,
    target: Annotated[Path | None, Parameter(name="--to", help="New directory for the rebuilt files.")] = None,
    in_place: Annotated[
        bool, Parameter(negative=(), help="Replace the store's files, and keep the old ones in before-reindex.")
    ] = False,
    force: Annotated[bool, Parameter(negative=(), help="Continue although the last broker crashed.")] = False,
    index: Annotated[bool, Parameter(help="Build the key index.")] = True,
    index_tags: Annotated[bool, Parameter(help="Index tags as well, like RocketMQ 5.4 and later.")] = True,
    index_slot_count: Annotated[int, Parameter(help="The broker's maxHashSlotNum.")] = 5_000_000,
    index_entry_count: Annotated[int, Parameter(help="The broker's maxIndexNum.")] = 20_000_000,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Rebuild consume queues and key index from the commitlog alone, byte for byte as a broker builds them.

    Exit codes: 0 done; 65 the log is damaged; 66 the store can't be read; 69 a broker is using the store.
    """
    with _session("reindex", where) as spark, bars() as show_progress:
        from ha.spark.jobs.reindex import ReindexResult
        from ha.spark.jobs.reindex import reindex as run
        from ha.spark.jobs.reindex.plan import ReindexOptions

        options = ReindexOptions(
            path=path,
            target=target,
            in_place=in_place,
            force=force,
            index_enabled=index,
            index_tags=index_tags,
            index_slot_count=index_slot_count,
            index_entry_count=index_entry_count,
        )
        result = _restarting(lambda: run(spark, options, show_progress))

    def tables(done: ReindexResult) -> list[Table]:
        return [
            _facts(
                "Queues and index rebuilt",
                {
                    "in": done.target,
                    "records": done.record_count,
                    "queues, entries": f"{done.queue_count:,}, {done.entry_count:,}",
                    "index files, keys": f"{done.index_file_count:,}, {done.key_count:,}",
                    "from physical offset": f"{done.begin_offset:,} to {done.end_offset:,}: {done.end_reason}",
                    "records in no order, dropped, unusable": (
                        f"{done.not_dense_count:,}, {done.dropped_count:,}, {done.unusable_count:,}"
                    ),
                    "set aside": done.set_aside or "nothing",
                    "seconds": f"{done.elapsed_s:.1f}",
                },
            )
        ]

    return _show(result, where, tables)
