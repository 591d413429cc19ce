"""Prints medians and ratios of a result file as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.cases import CASES, Case, Metric
from bench.growth import GROWTH
from bench.measure import spread

Line = dict[str, Any]
OURS = "halog"
FOREIGN = Metric("foreign_cores", "others' cores", 2)


def medians(runs: Sequence[Line], case: Case) -> dict[tuple[Any, str], dict[str, float]]:
    """Returns the median of each figure by point and side."""
    found: dict[tuple[Any, str], dict[str, float]] = {}
    for place, group in _grouped(runs, case).items():
        found[place] = {
            metric.key: statistics.median(values) for metric in case.metrics if (values := _values(group, metric))
        }
    return found


def ratios(runs: Sequence[Line], case: Case) -> dict[tuple[Any, str], dict[str, float]]:
    """Returns halog's median divided by the peer's, by point and peer, for each figure that both have."""
    all_medians = medians(runs, case)
    found = {}
    for (point, side), theirs in all_medians.items():
        ours = all_medians.get((point, OURS))
        if side != OURS and ours:
            found[point, side] = {key: ours[key] / value for key, value in theirs.items() if value and key in ours}
    return found


def markdown(lines: Sequence[Line]) -> str:
    """Returns a table for each case, then the failed and skipped blocks, machine, versions, terms and commands."""
    runs = [line for line in lines if line["kind"] == "run"]
    parts = [_table(runs, case) for case in (*CASES, *GROWTH) if any(run["case"] == case.name for run in runs)]
    parts += [
        f"- round {line['round']}, {line['case']}, {line['peer']}: {line['kind']}, {line['why'].splitlines()[0]}"
        for line in lines
        if line["kind"] in ("failed", "skipped")
    ]
    abouts = [line for line in lines if line["kind"] == "about"]
    if abouts:
        about = abouts[-1]
        parts.append("Machine: " + ", ".join(f"{name} {value}" for name, value in about["machine"].items()))
        parts.append("Versions: " + "; ".join(f"{name}: {value}" for name, value in about["versions"].items()))
        parts.append("Terms: " + ", ".join(f"{name} {value}" for name, value in about["terms"].items()))
        parts += [f"Command: `{command}`" for command in dict.fromkeys(each["command"] for each in abouts)]
    return "\n\n".join(parts) + "\n"


def _table(runs: Sequence[Line], case: Case) -> str:
    head = [case.axis, "side", *(metric.heading for metric in case.metrics), "rounds", FOREIGN.heading]
    rows = [f"## {case.question}", "", _row(head), "|" + "---|" * len(head)]
    compared = ratios(runs, case)
    for place, group in _grouped(runs, case).items():
        point, side = place
        cells = [spread(values, metric.digits) if (values := _values(group, metric)) else "" for metric in case.metrics]
        rows.append(_row([point_text(point), side, *cells, str(len(group)), _shown(group, FOREIGN)]))
        if place in compared:
            cells = [
                f"**{compared[place][metric.key]:.2f}**" if metric.key in compared[place] else ""
                for metric in case.metrics
            ]
            rows.append(_row([point_text(point), f"{OURS} / {side}", *cells, "", ""]))
    return "\n".join(rows)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def point_text(point: Any) -> str:
    """Formats a case's point for tables."""
    return f"{point:,}" if isinstance(point, int) else str(point)


def _shown(group: Sequence[Line], metric: Metric) -> str:
    values = _values(group, metric)
    return spread(values, metric.digits) if values else ""


def _values(group: Sequence[Line], metric: Metric) -> list[float]:
    return [run[metric.key] for run in group if metric.key in run]


def _grouped(runs: Sequence[Line], case: Case) -> dict[tuple[Any, str], list[Line]]:
    """Groups a case's runs by point and side: numbers sorted, words in order of appearance; halog first."""
    found: dict[tuple[Any, str], list[Line]] = {}
    for run in runs:
        if run["case"] == case.name:
            found.setdefault((run["point"], run["side"]), []).append(run)
    points = list(dict.fromkeys(point for point, _ in found))
    if all(isinstance(point, int) for point in points):
        points.sort()
    return dict(sorted(found.items(), key=lambda item: (points.index(item[0][0]), item[0][1] != OURS)))
