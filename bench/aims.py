"""Performance targets relative to peers, and whether the figures of a file meet them: `bench/run aims FILE`.

Ratios are of medians, halog / peer. If a peer has several releases or settings, the best one counts at each point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.cases import CASES
from bench.table import OURS, medians, point_text

Line = dict[str, Any]
ROCKETMQ = ("rocketmq",)
IN_FLIGHT = (1, 16, 64, 256)


@dataclass(frozen=True)
class Aim:
    """A target: the ratio of a figure of a case, at these points, to that of the best side whose name starts with one
    of `beside`; a minimum for rates, a maximum if `is_cost`.
    """

    what: str
    case: str
    key: str
    points: tuple[Any, ...]
    beside: tuple[str, ...]
    ratio: float
    is_cost: bool = False
    ours: str = OURS


AIMS = (
    Aim("sends/s, Java client", "sends", "rate", IN_FLIGHT, ROCKETMQ, 1.3),
    Aim("their p99, ms", "sends", "p99_ms", IN_FLIGHT, ROCKETMQ, 0.5, is_cost=True),
    Aim("servers' CPU s a million of them", "sends", "cpu_us", IN_FLIGHT, ROCKETMQ, 0.5, is_cost=True),
    Aim("master's own memory, MiB", "sends", "master_mib", IN_FLIGHT, ROCKETMQ, 0.2, is_cost=True),
    Aim("sends/s, cheap generator, 1 connection", "load", "rate", (16, 64, 256, 1024), ROCKETMQ, 3),
    Aim("sends/s, cheap generator, 64 connections", "load-64", "rate", (16, 64, 256, 1024), ROCKETMQ, 3),
    Aim("messages/s in batches of 32, Java client", "batches", "rate", (1, 4, 16), ROCKETMQ, 1.5),
    Aim("sends/s, SDK", "sdk", "rate", IN_FLIGHT, ("kafka",), 1),
    Aim("sends/s, SDK", "sdk", "rate", IN_FLIGHT, ("nats",), 1),
    Aim("sends/s, SDK, 128 a call", "sdk", "rate", (256,), ("kafka",), 1, ours="halog, send_many"),
    Aim("sends/s, one in flight on each connection", "connections", "rate", IN_FLIGHT, ("postgres",), 1),
    Aim("sends/s, one in flight on each connection", "connections", "rate", (16, 64, 256), ("redis",), 1),
    Aim("catch-up, MB/s, bytes", "catchup", "mb_per_s", ("fresh slave",), ROCKETMQ, 4),
    Aim("catch-up, MB/s, bytes", "catchup", "mb_per_s", ("fresh slave",), ("iperf3",), 0.4),
    Aim("catch-up, MB/s, queues built", "catchup", "queues_mb_per_s", ("fresh slave",), ROCKETMQ, 2.5),
    Aim("messages/s consumed, Java client", "consumption", "rate", ("pull 32", "pull 1,024", "push"), ROCKETMQ, 1),
    Aim("messages/s consumed, SDK", "consumption", "rate", ("pull 1,024",), ROCKETMQ, 0.7, ours="halog, its SDK"),
    Aim("s to READY", "starting", "seconds", ("empty store",), ROCKETMQ, 0.1, is_cost=True),
    Aim("s to READY", "starting", "seconds", ("after kill -9",), ROCKETMQ, 0.2, is_cost=True),
)


def markdown(lines: Sequence[Line]) -> str:
    """Returns a table of the targets for which the file has both sides."""
    runs = [line for line in lines if line["kind"] == "run"]
    cases = {case.name: case for case in CASES}
    rows = [
        "| measurement | point | halog | best peer | its figure | ratio | target | met |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for aim in AIMS:
        case = cases[aim.case]
        found = medians(runs, case)
        digits = next(metric.digits for metric in case.metrics if metric.key == aim.key)
        for point in aim.points:
            theirs = {
                side: figures[aim.key]
                for (at, side), figures in found.items()
                if at == point and side.startswith(aim.beside) and aim.key in figures
            }
            ours = found.get((point, aim.ours), {}).get(aim.key)
            if ours is None or not theirs:
                continue
            best = (min if aim.is_cost else max)(theirs, key=lambda side: theirs[side])
            ratio = ours / theirs[best]
            is_met = ratio <= aim.ratio if aim.is_cost else ratio >= aim.ratio
            sign = "≤" if aim.is_cost else "≥"
            rows.append(
                f"| {aim.what} | {point_text(point)} | {ours:,.{digits}f} | {best} | {theirs[best]:,.{digits}f} "
                f"| **{ratio:.2f}** | {sign} {aim.ratio:g} | {'yes' if is_met else 'no'} |"
            )
    return "\n".join(rows) + "\n"
