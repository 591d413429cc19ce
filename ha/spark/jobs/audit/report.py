"""Writes an audit's result as an HTML page and as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ha.audit.findings import DAMAGE, HOUR_MS, KINDS, Finding
from ha.spark.jobs.audit.job import EXIT_NOTHING_COMPARED, AuditResult, TopicHour
from ha.spark.jobs.plots import Mark, Plot, extents, timed_bars
from ha.spark.jobs.report import Column, Verdict, heading, hour, moment, number, page, paragraph, picture, size, table

ROWS_MAX = 500
"""Maximum number of rows of a table on the page; the JSON has them all."""
_PLOTTED_HOURS = range(24 * 366 * 200)
"""Hours since 1970 that are plotted; damaged store timestamps may be outside."""
TOPICS_PLOTTED = 6


def audit_json(result: AuditResult) -> bytes:
    """Returns the whole result as indented JSON: its fields, `exit_code`, and the meaning of each kind."""
    whole = {"exit_code": result.exit_code, **msgspec.to_builtins(result), "kinds": KINDS}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)


def write_audit(result: AuditResult, html: Path | None = None, json: Path | None = None) -> None:
    """Writes the page and the JSON to the given paths (None: not written). Raises OSError if a file can't be
    written."""
    if json is not None:
        json.write_bytes(audit_json(result) + b"\n")
    if html is not None:
        html.write_text(audit_html(result), encoding="utf-8")


def audit_plots(result: AuditResult) -> list[Plot]:
    """Returns the plots: each copy's extent with the findings in it, then records by hour and findings by hour. The
    latter two are omitted if they would be empty."""
    bars = [(copy.name, copy.begin, copy.end) for copy in result.copies]
    marks = [
        Mark(finding.copy, finding.physical_offset, finding.kind)
        for finding in result.findings
        if finding.physical_offset >= 0
    ]
    plots = [extents("extents", "Extent of each copy, with the findings", bars, marks)]
    rows = [row for row in result.topic_hours if row.hour in _PLOTTED_HOURS]
    if rows:
        plots.append(_records_plot(rows))
    kinds: dict[str, dict[int, float]] = {}
    for row in rows:
        for kind, count in row.found.items():
            at = kinds.setdefault(kind.replace("_", " "), {})
            at[row.hour * HOUR_MS] = at.get(row.hour * HOUR_MS, 0) + count
    if kinds:
        plots.append(timed_bars("found", "Findings with a known hour", kinds, "findings", HOUR_MS, whole=True))
    return plots


def _records_plot(rows: list[TopicHour]) -> Plot:
    totals: dict[str, int] = {}
    for row in rows:
        totals[row.topic] = totals.get(row.topic, 0) + row.record_count
    largest = sorted(totals, key=lambda topic: (-totals[topic], topic))[:TOPICS_PLOTTED]
    series: dict[str, dict[int, float]] = {topic: {} for topic in largest}
    for row in rows:
        topic = row.topic if row.topic in series else "others"
        at = series.setdefault(topic, {})
        at[row.hour * HOUR_MS] = at.get(row.hour * HOUR_MS, 0) + row.record_count
    return timed_bars("records", "Records of the first copy", series, "records", HOUR_MS, whole=True)


def audit_html(result: AuditResult) -> str:
    """Returns the page as HTML."""
    parts = [paragraph(_lead(result))]
    parts += [
        heading("Copies"),
        table(
            [
                Column("copy"),
                Column("from", "number"),
                Column("to", "number"),
                Column("records", "number"),
                Column("bytes", "number"),
                Column("path", "long"),
                Column("SHA-256 of the ranges", "code"),
            ],
            [
                (
                    copy.name,
                    number(copy.begin),
                    number(copy.end),
                    number(copy.record_count),
                    size(copy.byte_count),
                    copy.path,
                    copy.digest and f"{copy.digest[:20]}…",
                )
                for copy in result.copies
            ],
            note=f"Digests are comparable where from, to and the size of a range ({size(result.range_bytes)}) agree; "
            "the JSON has them in full.",
        ),
    ]
    parts += [paragraph(note) for note in result.notes]
    plots = audit_plots(result)
    parts.append(picture(plots[0]))
    if result.only_in:
        parts += [
            heading("Held by some copies only"),
            table(
                [Column("from", "number"), Column("to", "number"), Column("bytes", "number"), Column("held by")],
                [(number(c.begin), number(c.end), size(c.end - c.begin), ", ".join(c.copies)) for c in result.only_in],
                note="Retention or lag. These ranges are checked in the copies that hold them.",
            ),
        ]
    parts += [heading("What was found"), _found(result)]
    if result.findings:
        parts += [heading("Findings in full"), _findings(result.findings)]
    parts.append(heading("By topic and hour"))
    parts += [picture(plot) for plot in plots[1:]]
    parts.append(_topic_hours(result))
    footer = f"halog audit of {moment(result.started_ms)}, {result.duration_s:.1f} s"
    return page("Audit of " + ", ".join(copy.name for copy in result.copies), _verdict(result), parts, footer)


def _verdict(result: AuditResult) -> tuple[Verdict, str]:
    if result.damage_count:
        return "bad", f"Not clean: {number(result.damage_count)} finding{'s' if result.damage_count != 1 else ''}"
    if result.exit_code == EXIT_NOTHING_COMPARED:
        return "note", "Nothing could be compared: the copies have no byte in common"
    return "good", "Clean"


def _lead(result: AuditResult) -> str:
    if len(result.copies) == 1:
        (copy,) = result.copies
        return f"{number(copy.record_count)} records, {size(copy.byte_count)}, checked individually: only one copy."
    return (
        f"{size(result.compared_bytes)} of log are in at least two copies and were compared byte by byte; every "
        "record was also checked individually, with its consume-queue entry."
    )


def _found(result: AuditResult) -> str:
    names = [copy.name for copy in result.copies]
    rows = []
    for kind, meaning in KINDS.items():
        counts = result.found.get(kind)
        if counts:
            weight = "damage" if kind in DAMAGE else "notice"
            rows.append((kind.replace("_", " "), weight, *(number(counts.get(name, 0)) for name in names), meaning))
    if not rows:
        return paragraph("Nothing: no damage and no notices.")
    return table(
        [Column("kind"), Column("weight"), *(Column(name, "number") for name in names), Column("meaning", "long")], rows
    )


def _findings(findings: tuple[Finding, ...]) -> str:
    ordered = sorted(findings, key=lambda finding: (finding.physical_offset, finding.copy, finding.kind))
    return table(
        [
            Column("physical offset", "number"),
            Column("copy"),
            Column("kind"),
            Column("topic"),
            Column("queue", "number"),
            Column("queue offset", "number"),
            Column("hour (UTC)"),
            Column("what", "long"),
        ],
        [
            (
                _known(finding.physical_offset),
                finding.copy,
                finding.kind.replace("_", "\u00a0"),
                finding.topic,
                _known(finding.queue_id),
                _known(finding.queue_offset),
                hour(finding.hour),
                (f"{number(finding.length)} bytes: " if finding.kind == "unreadable" else "") + finding.detail,
            )
            for finding in ordered[:ROWS_MAX]
        ],
        note=_cut(len(ordered), "some findings of each kind and copy are kept in full; all are counted above"),
    )


def _topic_hours(result: AuditResult) -> str:
    rows = sorted(result.topic_hours, key=lambda row: (not row.found, row.topic, row.hour))
    return table(
        [
            Column("topic"),
            Column("hour (UTC)"),
            Column("records", "number"),
            Column("bytes", "number"),
            Column("found", "long"),
        ],
        [
            (
                row.topic or "(unknown)",
                hour(row.hour),
                number(row.record_count),
                size(row.byte_count),
                ", ".join(f"{kind.replace('_', ' ')} {number(count)}" for kind, count in sorted(row.found.items())),
            )
            for row in rows[:ROWS_MAX]
        ],
        note=_cut(len(rows), "those with findings come first"),
    )


def _known(value: int) -> str:
    return "–" if value < 0 else number(value)


def _cut(count: int, remark: str) -> str:
    if count <= ROWS_MAX:
        return remark[0].upper() + remark[1:] + "."
    return f"The first {ROWS_MAX} of {number(count)} rows; {remark}. The JSON has the rest."
