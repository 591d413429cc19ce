"""The jobs of `ha spark` that examine a log, or rebuild its consume queues and key index."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from ha.cli.flags import SERVERS_NAMES
from ha.cli.showing import bars, size
from ha.cli.spark.running import Where, check_stores, facts_table, moment_ms, restarting, show_result, spark_session


def audit(
    *paths: Annotated[str, Parameter(help="Store directories of one broker: its master's and slaves'.")],
    archive: Annotated[str | None, Parameter(help="Archive of the same broker.")] = None,
    broker_name: Annotated[str | None, Parameter(help="Broker name in the archive.")] = None,
    names: Annotated[
        list[str] | None, Parameter(name="--name", negative=(), help="Name for each path (repeatable).")
    ] = None,
    examples: Annotated[int, Parameter(help="Maximum findings of each kind and copy to show; all are counted.")] = 100,
    html: Annotated[Path | None, Parameter(help="Write the report to this HTML file.")] = None,
    report_json: Annotated[Path | None, Parameter(help="Write the report to this JSON file.")] = None,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Compare copies of a log and check each of them, to find missing, extra, different, duplicate and out-of-order
    records, holes, wrong CRCs, and queue entries that don't match.

    Exit codes: 0 clean; 1 damage; 4 nothing could be compared; 66 a store can't be read.
    """
    check_stores(*paths)
    with spark_session("audit", where) as spark, bars() as show_progress:
        from ha.spark.jobs.audit import AuditOptions, AuditResult
        from ha.spark.jobs.audit import audit as run

        options = AuditOptions(
            paths=paths,
            names=tuple(names or ()),
            broker_name=broker_name,
            archive=archive,
            examples_max=examples,
        )
        result = restarting(lambda: run(spark, options, show_progress))
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
            return [
                copies,
                facts_table(f"Verdict: {verdict}", {"compared with another copy": size(done.compared_bytes)}),
            ]
        return [copies, found]

    return show_result(result, where, tables)


def stats(
    path: Annotated[str, Parameter(help="Store directory.")],
    *,
    out: Annotated[
        Path | None, Parameter(name="--to", help="Write tables, plots and an HTML page to this directory.")
    ] = None,
    topics: Annotated[
        list[str] | None, Parameter(name="--topic", negative=(), help="Only this topic (repeatable).")
    ] = None,
    since: Annotated[
        datetime | None, Parameter(help="Only messages stored at or after this time (default zone: UTC).")
    ] = None,
    until: Annotated[datetime | None, Parameter(help="Only messages stored before this time.")] = None,
    top: Annotated[int, Parameter(help="Number of top keys and tags to show.")] = 20,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Show statistics of a log: messages, sizes, rates, latencies, tags, keys, retries and dead letters.

    Exit codes: 0 done; 3 done, but damaged or deleted records were skipped; 66 the store can't be read.
    """
    check_stores(path)
    with spark_session("stats", where) as spark, bars() as show_progress:
        from ha.spark.jobs.stats import stats as run
        from ha.spark.jobs.stats.job import Figures, StatsOptions, StatsResult
        from ha.spark.jobs.stats.report import write_stats

        options = StatsOptions(
            path=path,
            topics=None if topics is None else tuple(topics),
            begin_ms=moment_ms(since),
            end_ms=moment_ms(until),
            top=top,
        )
        result = restarting(lambda: run(spark, options, show_progress))
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
        if done.exit_code:
            deleted = "none" if done.gone_end is None else f"some before physical offset {done.gone_end:,}"
            facts = {"damaged records": done.damaged, "records deleted while the job ran": deleted}
            found.append(facts_table("Not counted", facts))
        if out is not None:
            found.append(facts_table("Written", {"tables, plots and stats.html in": str(out)}))
        return found

    return show_result(result, where, tables)


def lag(
    path: Annotated[str | None, Parameter(help="Store directory; alternatively use --servers.")] = None,
    *,
    servers: Annotated[
        str | None, Parameter(name=SERVERS_NAMES, help="Name servers, host:port joined with ';'.")
    ] = None,
    groups: Annotated[
        list[str] | None, Parameter(name="--group", negative=(), help="Only this consumer group (repeatable).")
    ] = None,
    topics: Annotated[
        list[str] | None, Parameter(name="--topic", negative=(), help="Only this topic (repeatable).")
    ] = None,
    queues: Annotated[bool, Parameter(negative=(), help="Show each queue as well as the groups.")] = False,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Show how far consumer groups are behind the end of the log: messages, bytes, and the age of the oldest one.

    With a store directory, the default is all groups and topics; with --servers, --group and --topic are required.

    Exit codes: 0 done, whatever the lag; 66 the store can't be read; 69 no broker reachable.
    """
    if path is not None:
        check_stores(path)
    with spark_session("lag", where) as spark, bars() as show_progress:
        from ha.spark.jobs.lag import LagOptions, LagResult
        from ha.spark.jobs.lag import lag as run

        options = LagOptions(path=path, servers=servers, groups=tuple(groups or ()), topics=tuple(topics or ()))
        result = restarting(lambda: run(spark, options, show_progress))

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

    return show_result(result, where, tables)


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
    index_slot_count: Annotated[
        int, Parameter(help="Hash slots of an index file (the broker's maxHashSlotNum).")
    ] = 5_000_000,
    index_entry_count: Annotated[
        int, Parameter(help="Entries of an index file (the broker's maxIndexNum).")
    ] = 20_000_000,
    where: Where = Where(),  # noqa: B008
) -> int:
    """Rebuild consume queues and key index from the commitlog alone, byte for byte as a broker builds them.

    Exit codes: 0 done; 65 the log is damaged; 66 the store can't be read; 69 a broker is using the store.
    """
    with spark_session("reindex", where) as spark, bars() as show_progress:
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
        result = restarting(lambda: run(spark, options, show_progress))

    def tables(done: ReindexResult) -> list[Table]:
        return [
            facts_table(
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

    return show_result(result, where, tables)


def _size_or_dash(value: float | None) -> str:
    return "–" if value is None else size(int(value))


def _ms_or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"
