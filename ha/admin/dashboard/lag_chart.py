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
GAP_S = 60.0
"""Time between two samples, in seconds, above which the line has a gap."""
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
    now = points[-1].time_s
    shown = [point for point in points if now - point.time_s <= SPAN_S]
    most = max(point.behind_count for point in shown)
    top = max(1, most)
    path, last = "", None
    for point in shown:
        x = SPAN_S - (now - point.time_s)
        is_joined = last is not None and point.time_s - last <= GAP_S
        path += f"{'L' if is_joined else 'M'}{x:.0f},{HEIGHT - point.behind_count * HEIGHT / top:.0f}"
        last = point.time_s
    step = max(1, len(shown) // ROW_COUNT)
    return LagChart(
        path=path,
        top=top,
        sentence=f"now {count(shown[-1].behind_count)}, at first {count(shown[0].behind_count)}, at most {count(most)}",
        rows=list(islice(reversed(shown), 0, None, step))[:ROW_COUNT],
    )
