"""The jobs of `ha spark` that write an archive, erase messages from it, or send its messages to a topic."""

from __future__ import annotations

import re
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from ha.cli.asking import Yes, print_dry_run_notice
from ha.cli.exits import UsageError
from ha.cli.flags import SERVERS_NAMES
from ha.cli.showing import bars, events_shown, notices, size, stoppable
from ha.cli.spark.running import Where, check_stores, facts_table, moment_ms, restarting, show_result, spark_session

if TYPE_CHECKING:
    from ha.spark.jobs.archive import ArchiveResult


def archive(
    path: Annotated[str, Parameter(help="Store directory of a slave, a stopped master, or a RocketMQ broker.")],
    *,
    archive: Annotated[str, Parameter(name="--to", help="Archive directory, created if missing.")],
    broker_name: Annotated[
        str | None, Parameter(help="Broker name in the archive (default: the broker's own).")
    ] = None,
    format: Literal["parquet", "delta", "iceberg"] = "parquet",
    iceberg_table: Annotated[
        str | None,
        Parameter(help="CATALOG.NAMESPACE.TABLE in PyIceberg's configuration (default: the archive directory)."),
    ] = None,
    topics: Annotated[
        list[str] | None, Parameter(name="--topic", negative=(), help="Only this topic (repeatable).")
    ] = None,
    columns_from: Annotated[
        Literal["json", "avro", "protobuf"] | None,
        Parameter(help="Format of bodies from which columns are decoded, with --schema."),
    ] = None,
    schemas: Annotated[
        list[str] | None,
        Parameter(
            name="--schema",
            negative=(),
            help="TOPIC=FILE with the schema of the topic's bodies (repeatable). json: DDL or JSON of Spark; "
            "avro: .avsc; protobuf: TOPIC=FILE:MESSAGE, with a descriptor set of protoc.",
        ),
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
    """Write the log as Parquet, Delta or Iceberg, by topic and day, each record once. Run it again to continue.

    With --every, it runs as a service and, for each commit, logs a line with the lag on standard error.

    --on-damage: report writes a row with crcOk=false for a damaged record; skip omits the record; fail ends the job at
    the first damaged record.

    Exit codes: 0 done; 3 done, but some records were damaged or missing; 65 the archive is damaged, or of another log;
    66 the store can't be read.
    """
    every_s = None if every is None else _interval_s(every)
    given_schemas = dict(_schema(pair, columns_from) for pair in schemas or ())
    check_stores(path)
    with ExitStack() as stack:
        spark = stack.enter_context(spark_session("archive", where))
        show_progress = stack.enter_context(bars() if every_s is None else events_shown("ha.spark"))
        stop = stack.enter_context(stoppable())
        from ha.spark.jobs.archive import ArchiveOptions
        from ha.spark.jobs.archive import archive as run

        options = ArchiveOptions(
            path=path,
            archive=archive,
            broker_name=broker_name,
            format=format,
            iceberg_table=iceberg_table,
            topics=None if topics is None else tuple(topics),
            columns_from=columns_from,
            schemas=given_schemas,
            every_s=every_s,
            metrics_file=metrics_file,
            target_file_bytes=file_mib << 20,
            on_damage=on_damage,
            fail_on_data_loss=fail_on_data_loss,
        )
        result = restarting(lambda: run(spark, options, show_progress, stop=stop), stop)
    return show_result(result, where, _archive_tables)


def _archive_tables(done: ArchiveResult) -> list[Table]:
    facts = {
        "in": done.archive,
        "records archived now": done.rows,
        "files, commits": f"{done.files:,} of {size(done.file_bytes)}, {done.commits:,}",
        "small files merged": done.merged_files,
        "log read": f"{size(done.log_bytes)} in {done.seconds:.1f} s",
        "damaged records": done.damaged,
        **({"bodies not decoded": _counts(done.undecoded)} if done.undecoded else {}),
        "holes": len(done.holes),
        "covers physical offsets": f"{done.covered_begin:,} to {done.covered_end:,}, of {done.log_end:,}",
    }
    return [facts_table(f"Archive of {done.broker_name}", facts)]


def _counts(by_topic: dict[str, int]) -> str:
    return ", ".join(f"{topic} {count:,}" for topic, count in sorted(by_topic.items()))


def _schema(pair: str, columns_from: str | None) -> tuple[str, str | tuple[bytes, str]]:
    """Return the topic and the content of the file in TOPIC=FILE; with Protobuf also the message in
    TOPIC=FILE:MESSAGE. Raises UsageError if `pair` has another form, or if the file can't be read."""
    topic, _, file = pair.partition("=")
    message = ""
    if columns_from == "protobuf":
        file, _, message = file.rpartition(":")
    form = "TOPIC=FILE:MESSAGE" if columns_from == "protobuf" else "TOPIC=FILE"
    if not topic or not file or (columns_from == "protobuf" and not message):
        raise UsageError(f"--schema {pair!r} is invalid: use {form}")
    try:
        return topic, (Path(file).read_bytes(), message) if message else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--schema {pair!r}: {error}") from None


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
    """Erase messages of a topic, and the broker's copies of them, from an archive. Without --yes, only count them.

    Stop the archiver of this archive first. The log is not changed.

    Exit codes: 0 done; 3 done, but some rows can't be searched; 65 the archive is damaged; 69 an archiver is running.
    """
    with spark_session("erase", where) as spark, bars() as show_progress:
        from ha.spark.jobs.archive.erase import EraseOptions, EraseResult
        from ha.spark.jobs.archive.erase import erase as run

        options = EraseOptions(
            archive=archive, topic=topic, keys=tuple(keys or ()), broker_name=broker_name, dry_run=not yes
        )
        result = restarting(lambda: run(spark, options, show_progress))

    def tables(done: EraseResult) -> list[Table]:
        counts = ("rows", "files rewritten", "files deleted", "rows not searched")
        title = "Would be erased" if done.dry_run else "Erased"
        table = Table("broker", "topic", *counts, title=f"{title}: {done.rows:,} rows", title_justify="left")
        for each in done.topics:
            figures = (each.rows, each.rewritten_files, each.deleted_files, each.not_searched)
            table.add_row(each.broker_name, each.topic or "(damaged)", *(f"{figure:,}" for figure in figures))
        return [table]

    code = show_result(result, where, tables)
    for name, end in result.covered.items():
        notices().print(f"ha: {name} was searched up to physical offset {end:,}, where its archive ends")
    notices().print(
        "ha: the log still has these messages, for consumers, Spark and ha.spark.topic, until retention deletes their "
        "segments (fileReservedTime), and earlier versions of a Delta or Iceberg table until VACUUM or expiry"
    )
    if result.dry_run:
        print_dry_run_notice()
    return code


def _interval_s(text: str) -> float:
    """Parse an interval such as 500ms, 5s, 2m or 1h, or a number of seconds; return seconds.

    Raises UsageError for 0 and for any other text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--every {text!r} is no interval: use for example 5s, 500ms or 2m")
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2] or "s"]


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
    from_store: Annotated[bool, Parameter(negative=(), help="Read SOURCE as a store directory.")] = False,
    broker_name: Annotated[str | None, Parameter(help="Only this broker's messages.")] = None,
    queues: Annotated[
        list[int] | None, Parameter(name="--queue", negative=(), help="Only messages of this queue id (repeatable).")
    ] = None,
    tags: Annotated[
        list[str] | None, Parameter(name="--tag", negative=(), help="Only messages with this tag (repeatable).")
    ] = None,
    keys: Annotated[
        list[str] | None,
        Parameter(name="--key", negative=(), help="Only messages with this key or UNIQ_KEY (repeatable)."),
    ] = None,
    since: Annotated[
        datetime | None, Parameter(help="Only messages stored at or after this time (default zone: UTC).")
    ] = None,
    until: Annotated[datetime | None, Parameter(help="Only messages stored before this time.")] = None,
    rate: Annotated[float | None, Parameter(help="Maximum messages per second.")] = None,
    skip_unsendable: Annotated[bool, Parameter(negative=(), help="Skip messages that no broker accepts.")] = False,
    dry_run: Annotated[bool, Parameter(negative=(), help="Only count the messages.")] = False,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Send messages of an archive or a store into a topic, each once and in each queue's order.

    If --queue, --tag or --key is repeated, a message must match one of its values. A key is a word of KEYS.

    Exit codes: 0 done; 3 done, but some were skipped or stored less safely than SEND_OK; 69 no broker reachable.
    """
    if from_store:
        check_stores(source)
    with spark_session("restore", where) as spark, bars() as show_progress:
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
            begin_ms=moment_ms(since),
            end_ms=moment_ms(until),
            tags=None if tags is None else tuple(tags),
            keys=None if keys is None else tuple(keys),
            messages_per_s=rate,
            skip_unsendable=skip_unsendable,
            dry_run=dry_run,
        )
        result = restarting(lambda: run(spark, options, show_progress))

    def tables(done: RestoreResult) -> list[Table]:
        facts: dict[str, Any] = {"messages that fit": done.rows}
        if not done.dry_run:
            facts |= {"sent now": done.sent, "there already": done.already, "kept in": options.state}
        facts["seconds"] = f"{done.seconds:.1f}"
        return [facts_table(f"{done.topic} to {done.target}{' (dry run)' if done.dry_run else ''}", facts)]

    return show_result(result, where, tables)
