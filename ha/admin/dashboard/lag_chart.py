"""Lays out the lag of a group over time as a line, a sentence and a table, for a template.

Coordinates are seconds from the left, and per mille of the greatest lag from the top.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec

from .formats import count
from .source import LagPoint

SPAN_S = 3600
HEIGHT = 1000
GAP_MS = 60_000
"""Time between two samples, in ms, above which the line has a gap."""
ROW_COUNT = 12


class LagChart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart. `path`: SVG path of the line; `top`: lag in messages at the top edge, at least 1; `sentence`: a summary;
    `rows`: up to ROW_COUNT samples for the table, newest first, evenly spread."""

    path: str
    top: int
    sentence: str
    rows: Sequence[LagPoint]


def lag_chart(points: Sequence[LagPoint]) -> LagChart | None:
    """Returns the chart of the last SPAN_S; None for fewer than two points."""
    if len(points) < 2:
        return None
    now_ms = points[-1].at_ms
    shown = [point for point in points if 0 <= now_ms - point.at_ms <= SPAN_S * 1000]
    most = max(point.behind_count for point in shown)
    top = max(1, most)
    path, last_ms = "", None
    for point in shown:
        x = SPAN_S - (now_ms - point.at_ms) / 1000
        is_joined = last_ms is not None and point.at_ms - last_ms <= GAP_MS
        path += f"{'L' if is_joined else 'M'}{x:.0f},{HEIGHT - point.behind_count * HEIGHT / top:.0f}"
        last_ms = point.at_ms
    step = max(1, len(shown) // ROW_COUNT)
    return LagChart(
        path=path,
        top=top,
        sentence=f"now {count(shown[-1].behind_count)}, at first {count(shown[0].behind_count)}, at most {count(most)}",
        rows=list(islice(reversed(shown), 0, None, step))[:ROW_COUNT],
    )
