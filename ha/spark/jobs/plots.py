"""Draws the plots of the jobs with matplotlib, without a display: as PNG files, and as SVG for HTML pages.

A `Plot` is drawn with the colours of a `Palette`. For SVG, these are placeholders that become CSS variables of the
page, so that one picture suits light and dark mode.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

SERIES = ("#0077bb", "#ee7733", "#009988", "#cc3311", "#ee3377", "#997700", "#8877cc", "#888888")
"""Colours that red-green blind readers can tell apart, and that are readable on white and on black."""


class Palette(NamedTuple):
    """Colours of text, grid lines and background, which differ between light and dark pages."""

    ink: str
    grid: str
    paper: str


PRINT = Palette("#222222", "#d8d8d8", "#ffffff")
_MARKS = Palette("#010203", "#040506", "none")
_VARIABLES = {_MARKS.ink: "var(--ink)", _MARKS.grid: "var(--rule)"}

Draw = Callable[[Any, Palette], None]


class Plot(NamedTuple):
    """A plot, drawn by `draw(axes, palette)`. `name`: file name without .png; `title`: caption; sizes in inches."""

    name: str
    title: str
    draw: Draw
    height: float = 3.0
    width: float = 9.0


def to_png(plot: Plot, path: Path) -> None:
    """Saves the plot as a PNG file at `path`, on a white background. Raises OSError."""
    with _quiet():
        _figure(plot, PRINT).savefig(path, format="png", dpi=130, facecolor=PRINT.paper)


def to_svg(plot: Plot) -> str:
    """Returns the plot as an <svg> element for a page that defines --ink and --rule."""
    out = io.StringIO()
    with _quiet(), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        _figure(plot, _MARKS).savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for mark, variable in _VARIABLES.items():
        text = text.replace(mark, variable)
    # Ids are unique in a file, but not among the files of one page.
    text = re.sub(r'(id="|xlink:href="#|url\(#)', rf"\g<1>{plot.name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{plot.title}" ', 1).strip()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses warnings about missing glyphs: a topic in a script that the font lacks is drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _figure(plot: Plot, palette: Palette) -> Figure:
    with mpl.rc_context({"font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(plot.width, plot.height), layout="constrained")
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        plot.draw(axes, palette)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(palette.grid)
        axes.tick_params(colors=palette.ink, which="both", length=3)
        for label in (axes.xaxis.label, axes.yaxis.label, axes.xaxis.get_offset_text(), axes.yaxis.get_offset_text()):
            label.set_color(palette.ink)
        axes.set_axisbelow(True)
        legend = axes.get_legend()
        if legend is not None:
            legend.set_frame_on(False)
            for text in legend.get_texts():
                text.set_color(palette.ink)
        # Lays out the text while the font settings apply.
        figure.draw_without_rendering()
        return figure


def _time_axis(axes: Any, times_ms: Sequence[int], length_ms: int) -> None:
    locator = AutoDateLocator(minticks=2, maxticks=9)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.set_xlabel("time of storing (UTC)")
    if len(times_ms) == 1:
        axes.set_xlim(_time(times_ms[0] - 3 * length_ms), _time(times_ms[0] + 4 * length_ms))


def _time(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def timed_bars(
    name: str,
    title: str,
    series: dict[str, dict[int, float]],
    ylabel: str,
    length_ms: int,
    *,
    whole: bool = False,
) -> Plot:
    """Returns a plot of stacked bars. `series`: label -> start of an interval (ms since 1970) -> value.

    `length_ms`: length of the intervals. `whole`: whether values are counts; the y-axis then has ticks at integers
    only. There is no legend for a single series with the label "".
    """
    times = sorted({time for values in series.values() for time in values})

    def draw(axes: Any, palette: Palette) -> None:
        bottom = dict.fromkeys(times, 0.0)
        for number, (label, values) in enumerate(series.items()):
            heights = [values.get(time, 0.0) for time in times]
            axes.bar(
                [_time(time) for time in times],
                heights,
                width=0.85 * length_ms / 86_400_000,
                align="edge",
                bottom=[bottom[time] for time in times],
                color=SERIES[number % len(SERIES)],
                label=_shortened(label),
            )
            for time, height in zip(times, heights, strict=True):
                bottom[time] += height
        axes.grid(axis="y", color=palette.grid, linewidth=0.6)
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
        if whole:
            axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        axes.set_ylabel(ylabel)
        _time_axis(axes, times, length_ms)
        if len(series) > 1 or next(iter(series), ""):
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)

    return Plot(name, title, draw)


def timed_lines(name: str, title: str, series: dict[str, dict[int, float]], ylabel: str, length_ms: int) -> Plot:
    """Returns a plot with a line for each series (as in `timed_bars`) and a logarithmic y-axis, linear below 1.

    Each value is marked at the middle of its interval of `length_ms`.
    """
    times = sorted({time for values in series.values() for time in values})

    def draw(axes: Any, palette: Palette) -> None:
        for number, (label, values) in enumerate(series.items()):
            known = [time for time in times if time in values]
            axes.plot(
                [_time(time + length_ms // 2) for time in known],
                [values[time] for time in known],
                marker="o",
                markersize=3.5,
                linewidth=1.4,
                color=SERIES[number % len(SERIES)],
                label=label,
            )
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(axis="y", color=palette.grid, linewidth=0.6)
        axes.set_ylabel(ylabel)
        _time_axis(axes, times, length_ms)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)

    return Plot(name, title, draw)


def distribution(name: str, title: str, curves: dict[str, Sequence[tuple[float, float]]], xlabel: str) -> Plot:
    """Returns a plot of cumulative distributions. `curves`: label -> points (share 0…1, value).

    The x-axis is logarithmic, and linear below 1. Negative values are drawn as 0.
    """

    def draw(axes: Any, palette: Palette) -> None:
        for number, (label, curve) in enumerate(curves.items()):
            axes.step(
                [max(value, 0.0) for _, value in curve],
                [100 * share for share, _ in curve],
                where="post",
                linewidth=1.6,
                color=SERIES[number % len(SERIES)],
                label=label,
            )
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.set_ylim(0, 101)
        axes.grid(color=palette.grid, linewidth=0.6)
        axes.set_ylabel("messages (%) up to this")
        axes.set_xlabel(xlabel)
        if len(curves) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)

    return Plot(name, title, draw)


def ranked_bars(name: str, title: str, values: Sequence[tuple[str, float]], xlabel: str) -> Plot:
    """Returns a plot with a horizontal bar for each (label, value), the first at the top."""

    def draw(axes: Any, palette: Palette) -> None:
        labels = [_shortened(label) for label, _ in values]
        axes.barh(range(len(values)), [value for _, value in values], color=SERIES[0], height=0.7)
        axes.set_yticks(range(len(values)), labels)
        axes.invert_yaxis()
        axes.grid(axis="x", color=palette.grid, linewidth=0.6)
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.set_xlabel(xlabel)

    return Plot(name, title, draw, height=0.9 + 0.24 * max(1, len(values)))


_UNITS = ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "bytes"))


def bytes_scale(highest: int) -> tuple[int, str]:
    """Returns the largest unit of at most `highest` bytes, for an axis: its size in bytes and its name."""
    return next((1024**power, name) for power, name in _UNITS if highest >= 1024**power or not power)


class Mark(NamedTuple):
    """A marker on the bar with the label `bar`. Marks of the same `kind` share a colour and an entry in the legend."""

    bar: str
    physical_offset: int
    kind: str


def extents(name: str, title: str, bars: Sequence[tuple[str, int, int]], marks: Sequence[Mark]) -> Plot:
    """Returns a plot with a bar for each (label, begin, end), a range of physical offsets, and with `marks` on the
    bars."""
    rows = {label: row for row, (label, _, _) in enumerate(bars)}
    kinds = sorted({mark.kind for mark in marks})
    highest = max((end for _, _, end in bars), default=0)
    scale, unit = bytes_scale(highest)

    def draw(axes: Any, palette: Palette) -> None:
        for label, begin, end in bars:
            axes.barh(rows[label], (end - begin) / scale, left=begin / scale, color=SERIES[0], alpha=0.35, height=0.56)
        for number, kind in enumerate(kinds):
            found = [mark for mark in marks if mark.kind == kind]
            # Shifts marks by kind, so that different kinds at the same offset stay visible.
            shift = 0.0 if len(kinds) == 1 else 0.44 * (number / (len(kinds) - 1) - 0.5)
            axes.plot(
                [mark.physical_offset / scale for mark in found],
                [rows[mark.bar] + shift for mark in found],
                linestyle="none",
                marker="|" if len(found) > 200 else "D",
                markersize=5,
                color=SERIES[(number + 1) % len(SERIES)],
                label=kind.replace("_", " "),
            )
        axes.set_yticks(range(len(bars)), [_shortened(label) for label, _, _ in bars])
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.grid(axis="x", color=palette.grid, linewidth=0.6)
        axes.set_xlabel(f"physical offset ({unit})")
        if kinds:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)

    return Plot(name, title, draw, height=max(0.9 + 0.5 * len(bars), 0.6 + 0.2 * len(kinds)))


def _shortened(label: str) -> str:
    """Shortens a name from a log for a plot, and escapes characters that matplotlib would interpret."""
    shown = label if len(label) <= 36 else f"{label[:24]}…{label[-10:]}"
    shown = "".join(character if character.isprintable() else "·" for character in shown).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
