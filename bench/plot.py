"""Plots the runs of a file: throughput, latency and other figures over a case's axis, and catch-up over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases import CASES, Case
from bench.growth import GROWTH
from bench.table import medians

Line = dict[str, Any]


def plot(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Writes a PNG for each case that has curves and returns the paths. Raises SystemExit without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots require matplotlib: pip install 'halog[spark]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = [line for line in lines if line["kind"] == "run"]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for case in (*CASES, *GROWTH):
        own = [run for run in runs if run["case"] == case.name]
        has_numbers = any(isinstance(run["point"], int) for run in own)
        has_curve = any("curve" in run for run in own)
        if not has_numbers and not has_curve:
            continue
        count = len(case.panels) if has_numbers else 1
        figure, axes = pyplot.subplots(1, count, figsize=(max(12, 5 * count), 5), squeeze=False)
        if has_numbers:
            _against_axis(axes[0], own, case)
        else:
            _over_time(axes[0][0], own)
        figure.suptitle(case.question)
        figure.tight_layout()
        written.append(folder / f"{case.name}.png")
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written


def _against_axis(axes: Any, runs: Sequence[Line], case: Case) -> None:
    """Draws a panel per group of figures; if a panel has several figures, the first is dotted."""
    found = medians(runs, case)
    for each, panel in zip(axes, case.panels, strict=True):
        for number, side in enumerate(dict.fromkeys(side for _, side in found)):
            for key in panel.keys:
                places = sorted(place for place in found if place[1] == side and isinstance(place[0], int))
                places = [place for place in places if key in found[place]]
                points, values = [point for point, _ in places], [found[place][key] for place in places]
                is_dotted = len(panel.keys) > 1 and key == panel.keys[0]
                label = f"{side} {_heading(case, key)}" if len(panel.keys) > 1 else side
                each.plot(points, values, "o:" if is_dotted else "o-", color=f"C{number % 10}", label=label)
        each.set_xscale("log", base=2)
        each.set_yscale("log")
        each.set_xlabel(case.axis)
        each.set_ylabel(panel.heading)
        each.grid(alpha=0.3)
        each.legend(fontsize="small")


def _heading(case: Case, key: str) -> str:
    return next(metric.heading for metric in case.metrics if metric.key == key)


def _over_time(axes: Any, runs: Sequence[Line]) -> None:
    """Draws the bytes of each run over time, with one color per side."""
    sides = list(dict.fromkeys(run["side"] for run in runs if "curve" in run))
    for run in runs:
        if "curve" in run:
            seconds, size = zip(*run["curve"], strict=True)
            label = run["side"] if run["round"] == 0 else None
            axes.plot(seconds, [each / 1e6 for each in size], color=f"C{sides.index(run['side'])}", label=label)
    axes.set_xlabel("s")
    axes.set_ylabel("MB the slave has")
    axes.grid(alpha=0.3)
    axes.legend()
