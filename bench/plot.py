"""Curves of a file of runs: throughput and latency against messages in flight, catch-up over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases import CASES, Case
from bench.table import medians

Line = dict[str, Any]


def plot(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Writes a PNG for each case that has curves; returns where. SystemExit without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots need matplotlib, which the extra spark has: pip install 'halog[spark]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = [line for line in lines if line["kind"] == "run"]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for case in CASES:
        own = [run for run in runs if run["case"] == case.name]
        has_numbers = any(isinstance(run["point"], int) for run in own)
        has_curve = any("curve" in run for run in own)
        if not has_numbers and not has_curve:
            continue
        figure, axes = pyplot.subplots(1, 2 if has_numbers else 1, figsize=(12, 5), squeeze=False)
        if has_numbers:
            _against_in_flight(axes[0], own, case)
        else:
            _over_time(axes[0][0], own)
        figure.suptitle(case.question)
        figure.tight_layout()
        written.append(folder / f"{case.name}.png")
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written


def _against_in_flight(axes: Any, runs: Sequence[Line], case: Case) -> None:
    """Left the rate, right p50 (dotted) and p99."""
    found = medians(runs, case)
    for number, side in enumerate(dict.fromkeys(side for _, side in found)):
        places = sorted(place for place in found if place[1] == side and isinstance(place[0], int))
        points = [point for point, _ in places]
        colour = f"C{number % 10}"
        axes[0].plot(points, [found[place]["rate"] for place in places], "o-", color=colour, label=side)
        for key, style in (("p50_ms", "o:"), ("p99_ms", "o-")):
            axes[1].plot(
                points, [found[place][key] for place in places], style, color=colour, label=f"{side} {key[:3]}"
            )
    for each, heading in zip(axes, ("messages a second", "latency, ms"), strict=True):
        each.set_xscale("log", base=2)
        each.set_yscale("log")
        each.set_xlabel(case.axis)
        each.set_ylabel(heading)
        each.grid(alpha=0.3)
        each.legend(fontsize="small")


def _over_time(axes: Any, runs: Sequence[Line]) -> None:
    """Each run's bytes, a colour for each side."""
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
