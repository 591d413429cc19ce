"""Writes a log's statistics as files: the table (Parquet, CSV), the whole result (JSON), the plots (PNG), and an
HTML page with tables and plots."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ha.spark.jobs.plots import Plot, bytes_scale, distribution, ranked_bars, timed_bars, timed_lines, to_png
from ha.spark.jobs.report import Column, Verdict, heading, hour, moment, number, page, paragraph, picture, size, table
from ha.spark.jobs.stats.job import Figures, Frequent, StatsResult
from ha.spark.jobs.stats.range import HOUR_MS, MINUTE_MS

TOPICS_PLOTTED = 6
RANKED_MAX = 20
ROWS_MAX = 500
_PLOTTED_MS = range(HOUR_MS * 24 * 366 * 200)
"""Store times in ms since 1970 that are plotted; damaged store timestamps may be outside."""

_MS = pa.timestamp("ms", tz="UTC")
_TYPES: dict[type, pa.DataType] = {int: pa.int64(), float: pa.float64()}


def stats_table(result: StatsResult) -> pa.Table:
    """Returns a row for each topic, queue and hour; times as UTC timestamps."""
    rows = [
        {"topic": row.topic, "queue_id": row.queue_id, "hour": row.hour_ms, **msgspec.structs.asdict(row.figures)}
        for row in result.rows
    ]
    fields = [pa.field("topic", pa.string()), pa.field("queue_id", pa.int32()), pa.field("hour", _MS)]
    for field in msgspec.structs.fields(Figures):
        kind = _MS if field.name in ("first_ms", "last_ms") else _TYPES.get(field.type, pa.float64())
        fields.append(pa.field(field.name, kind))
    table = pa.Table.from_pylist(rows, pa.schema(fields))
    return table.rename_columns(
        [name.replace("first_ms", "first").replace("last_ms", "last") for name in table.column_names]
    )


def write_stats(result: StatsResult, folder: Path) -> list[Path]:
    """Writes stats.parquet, .csv, .json and .html and a PNG for each plot into `folder`, which is created if missing.

    Returns the paths of the files. Raises OSError if one can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = stats_table(result)
    written = [folder / f"stats.{ending}" for ending in ("parquet", "csv", "json", "html")]
    pq.write_table(rows, written[0])
    pyarrow.csv.write_csv(rows, written[1])
    whole = {"exit_code": result.exit_code, **msgspec.to_builtins(result)}
    written[2].write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    written[3].write_text(stats_html(result), encoding="utf-8")
    for plot in stats_plots(result):
        written.append(folder / f"{plot.name}.png")
        to_png(plot, written[-1])
    return written


def stats_plots(result: StatsResult) -> list[Plot]:
    """Returns the plots; none if no message has a store time in _PLOTTED_MS."""
    found = [each for each in result.intervals if each.begin_ms in _PLOTTED_MS]
    if not found:
        return []
    length_ms = result.interval_ms
    unit_of_time = "minute" if length_ms == MINUTE_MS else "hour"
    scale, unit = bytes_scale(max(each.figures.record_bytes for each in found))
    topic_scale, topic_unit = bytes_scale(max(topic.figures.record_bytes for topic in result.topics))
    written = {each.begin_ms: each.figures.record_bytes / scale for each in found}
    latencies = {
        "99 %": {each.begin_ms: each.figures.latency_ms_p99 or 0.0 for each in found},
        "90 %": {each.begin_ms: each.figures.latency_ms_p90 or 0.0 for each in found},
        "median": {each.begin_ms: each.figures.latency_ms_p50 or 0.0 for each in found},
    }
    title = f"Messages by {unit_of_time} and topic"
    return [
        timed_bars("messages", title, _by_topic(result), "messages", length_ms, whole=True),
        timed_bars("written", f"Log written by {unit_of_time}", {"": written}, unit, length_ms),
        timed_lines("latency", f"From born to stored, by {unit_of_time}", latencies, "latency (ms)", length_ms),
        distribution("sizes", "Body sizes, as stored", {"": result.size_curve}, "body size (bytes)"),
        distribution("latencies", "From born to stored", {"": result.latency_ms_curve}, "latency (ms)"),
        ranked_bars(
            "topics",
            "Largest topics",
            [(topic.topic, topic.figures.record_bytes / topic_scale) for topic in result.topics[:RANKED_MAX]],
            f"log ({topic_unit})",
        ),
        *(
            ranked_bars(name, title, [(f"{each.value} ({each.topic})", each.count) for each in found], "messages")
            for name, title, found in (
                ("tags", "Most frequent tags", result.tags[:RANKED_MAX]),
                ("keys", "Most frequent keys", result.keys[:RANKED_MAX]),
            )
            if found
        ),
    ]


def _by_topic(result: StatsResult) -> dict[str, dict[int, float]]:
    largest = sorted(result.topics, key=lambda topic: -topic.figures.messages)[:TOPICS_PLOTTED]
    series: dict[str, dict[int, float]] = {topic.topic: {} for topic in largest}
    for each in result.intervals:
        if each.begin_ms in _PLOTTED_MS:
            for topic, count in each.messages.items():
                at = series.setdefault(topic if topic in series else "others", {})
                at[each.begin_ms] = at.get(each.begin_ms, 0.0) + count
    return series


_FIGURES = [
    Column("messages", "number"),
    Column("log", "number"),
    Column("messages/s", "number"),
    Column("size p50", "number"),
    Column("p99", "number"),
    Column("max", "number"),
    Column("latency p50 (ms)", "number"),
    Column("p99", "number"),
    Column("max", "number"),
    Column("retried", "number"),
]


def _cells(figures: Figures) -> list[str]:
    return [
        number(figures.messages),
        size(figures.record_bytes),
        number(figures.messages_per_s),
        size(figures.size_p50),
        size(figures.size_p99),
        size(figures.size_max),
        number(_rounded(figures.latency_ms_p50)),
        number(_rounded(figures.latency_ms_p99)),
        number(figures.latency_ms_max),
        number(figures.retried),
    ]


def _rounded(value: float | None) -> float | None:
    return value if value is None or value < 10 else round(value)


def stats_html(result: StatsResult) -> str:
    """Returns the page as HTML."""
    total = result.total
    plots = {plot.name: plot for plot in stats_plots(result)}
    parts = [paragraph(_lead(result))]
    if total.born_after_store:
        parts.append(
            paragraph(
                f"{number(total.born_after_store)} messages were stored before they were born by their own timestamps: "
                "clocks of producers and the broker disagree. Their latency counts as 0."
            )
        )
    if result.gone_end is not None:
        parts.append(
            paragraph(
                f"Records before physical offset {number(result.gone_end)} were deleted while the job ran. Those that "
                "it had not read are not in these figures."
            )
        )
    parts += _pictures(plots, "messages", "written", "latency", "latencies", "sizes")
    parts += [
        heading("Topics"),
        *_pictures(plots, "topics"),
        table(
            [Column("topic"), Column("queues", "number"), *_FIGURES],
            [(topic.topic, number(topic.queues), *_cells(topic.figures)) for topic in result.topics[:ROWS_MAX]],
            note=f"Percentiles are accurate within {result.relative_error:.0%}. Rates are over the whole time.",
        ),
    ]
    if result.groups:
        parts += [
            heading("Retries and dead letters"),
            table(
                [Column("consumer group"), Column("retried", "number"), Column("dead letters", "number")],
                [(g.group, number(g.retry_messages), number(g.dead_letters)) for g in result.groups],
            ),
        ]
    for name, title, found in (("tags", "Tags", result.tags), ("keys", "Keys", result.keys)):
        if found:
            parts += [heading(title), *_pictures(plots, name), _frequent(found)]
    parts += [
        heading("By topic, queue and hour"),
        table(
            [Column("topic"), Column("queue", "number"), Column("hour (UTC)"), *_FIGURES],
            [
                (row.topic, number(row.queue_id), hour(row.hour_ms // HOUR_MS), *_cells(row.figures))
                for row in result.rows[:ROWS_MAX]
            ],
            note=f"The first {ROWS_MAX} of {number(len(result.rows))} rows: the table beside this page has them all."
            if len(result.rows) > ROWS_MAX
            else "",
        ),
    ]
    return page(
        f"Statistics of {result.broker_name}", _verdict(result), parts, f"halog stats, {result.duration_s:.1f} s"
    )


def _verdict(result: StatsResult) -> tuple[Verdict, str]:
    if result.damaged:
        return "bad", f"{number(result.damaged)} damaged records are not in these figures; run an audit"
    if result.gone_end is not None:
        return "note", "Records that were deleted meanwhile are not in these figures"
    return "good", f"{number(result.total.messages)} messages, all readable"


def _lead(result: StatsResult) -> str:
    total = result.total
    if not total.messages:
        return "There is no message in this part of the log."
    return (
        f"{size(total.record_bytes)} of log in {len(result.topics)} topics, stored from {moment(total.first_ms)} to "
        f"{moment(total.last_ms)}; on average {number(total.messages_per_s)} messages/s, {size(total.bytes_per_s)}/s."
    )


def _pictures(plots: dict[str, Plot], *names: str) -> list[str]:
    return [picture(plots[name]) for name in names if name in plots]


def _frequent(found: Iterable[Frequent]) -> str:
    rows = list(found)
    error = rows[0].error
    note = "Counts are exact." if not error else f"True counts are up to {number(error)} higher."
    columns = [Column("topic"), Column("value", "long"), Column("messages", "number")]
    return table(columns, [(each.topic, each.value, number(each.count)) for each in rows], note=note)
