"""Measures the effect of three replication keys, one at a time, on a master and a slave (docs/tuning.md).

haTransferBatchSize       how fast an empty slave copies a log, and the processor time of both nodes
haMaxGapNotInSync         (haSlaveFallbehindMax) the statuses and latencies of producers of a SYNC_MASTER while a
                          slave that is far behind catches up over a slow link (maxHaTransferByteInSecond)
haSendHeartbeatInterval   the processor time of an idle master and slave, and how long a frozen slave counts as in
                          sync, with haHousekeepingInterval four times as long
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.catchup import fill, one_run
from bench.measure import MIB, alone, cpu_s, empty_folder, report, spread
from scripts.nodes import Cluster, Node, cluster, wait_until_attached

TRANSFERS = (32 << 10, 128 << 10, 512 << 10, 1 << 20, (4 << 20) - 12)
GAPS_MIB = (1, 16, 64, 256)
HEARTBEATS_MS = (250, 1000, 5000)
HOUSEKEEPING_TIMES = 4
RATE = 200
"""Sends per second while the slave catches up."""


@contextmanager
def told(node: Node, **keys: object) -> Iterator[None]:
    """Adds keys to the command line of starts in the block."""
    before = node.command
    node.command = [*before, *(word for key, value in keys.items() for word in ("--set", f"{key}={value}"))]
    try:
        yield
    finally:
        node.command = before


def transfers(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Copies one log with frames of several sizes."""
    runs = []
    with cluster(folder, haStartFrom="first") as nodes:
        nodes.name_server.start()
        nodes.master.start()
        fill(nodes, options.mib, 1024)
        nodes.master.stop()
        for _ in range(options.rounds):
            for size in TRANSFERS:
                with told(nodes.master, haTransferBatchSize=size):
                    nodes.master.start()
                    runs.append({"case": "transfer", "bytes_each": size, **one_run(nodes)})
                    nodes.master.stop()
        nodes.name_server.stop()
    return runs


def gaps(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Sends at a steady rate while a slave catches up."""
    keys = {"haFlowControlEnable": "true", "maxHaTransferByteInSecond": options.link_mib * MIB}
    runs = []
    with cluster(folder, **keys) as nodes:
        for node in nodes.all:
            node.start()
        wait_until_attached(nodes)
        for gap_mib in GAPS_MIB:
            nodes.slave.stop()
            nodes.master.stop()
            with told(nodes.master, haMaxGapNotInSync=gap_mib * MIB):
                nodes.master.start()
            words = ["--in-flight", "4", "--batch", "32", "--bytes", str(options.behind_mib * MIB)]
            command = [sys.executable, "-m", "bench.load", "--broker", nodes.master.ready["remoting"], *words]
            subprocess.run(command, check=True, stdout=sys.stderr)
            nodes.slave.start()
            words = [
                "bench",
                "tuning",
                "--rate",
                str(RATE),
                "--seconds",
                str(options.seconds),
                "--in-flight",
                "4096",
                "--json",
            ]
            command = [sys.executable, "-m", "ha.cli", *words, "--servers", nodes.name_server_address]
            # Exit code 3 means that a message was not SEND_OK, which is expected here.
            done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
            if done.returncode not in (0, 3):
                raise SystemExit(f"ha bench ended with {done.returncode}")
            runs.append({"case": "gap", "gap_mib": gap_mib, **json.loads(done.stdout)})
            wait_until_attached(nodes, 60)
        for node in reversed(nodes.all):
            node.stop()
    return runs


def heartbeats(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures an idle pair, then one whose slave is frozen."""
    runs = []
    for heartbeat_ms in HEARTBEATS_MS:
        below = folder / f"every-{heartbeat_ms}"
        below.mkdir()
        keys = {"haSendHeartbeatInterval": heartbeat_ms, "haHousekeepingInterval": HOUSEKEEPING_TIMES * heartbeat_ms}
        with cluster(below, **keys) as nodes:
            for node in nodes.all:
                node.start()
            wait_until_attached(nodes)
            time.sleep(2)  # work left by the start
            pair = {"master": nodes.master.pid, "slave": nodes.slave.pid}
            before = {name: cpu_s([pid]) for name, pid in pair.items()}
            time.sleep(options.idle)
            used = {name: (cpu_s([pid]) - before[name]) / options.idle * 1e3 for name, pid in pair.items()}
            runs.append({"case": "heartbeat", "heartbeat_ms": heartbeat_ms, "cpu_ms_a_second": used, **frozen(nodes)})
            for node in reversed(nodes.all):
                node.stop()
        shutil.rmtree(below)
    return runs


def frozen(nodes: Cluster) -> dict[str, float]:
    """Returns how many seconds a frozen slave (SIGSTOP) counts as in sync."""
    os.kill(nodes.slave.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        while nodes.master.status()["ha"]["in_sync"]:
            time.sleep(0.05)  # HTTP has no notification
        return {"counts_s": time.monotonic() - began}
    finally:
        os.kill(nodes.slave.pid, signal.SIGCONT)


CASES: dict[str, Callable[[Path, argparse.Namespace], list[dict[str, Any]]]] = {
    "transfer": transfers,
    "gap": gaps,
    "heartbeat": heartbeats,
}


def tables(runs: list[dict[str, Any]]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yields title, heading and rows of each case that ran."""
    if found := [run for run in runs if run["case"] == "transfer"]:
        rows = []
        for size in TRANSFERS:
            same = [run for run in found if run["bytes_each"] == size]
            values = [spread([run[key] for run in same], digits) for key, digits in
                      (("mb_per_s", 0), ("master_cpu_s", 2), ("slave_cpu_s", 2))]  # fmt: skip
            rows.append([f"{size:,}", *values])
        yield "haTransferBatchSize: a copy", ["bytes", "MB/s", "master CPU s", "slave CPU s"], rows
    if found := [run for run in runs if run["case"] == "gap"]:
        statuses = ("SEND_OK", "SLAVE_NOT_AVAILABLE", "FLUSH_SLAVE_TIMEOUT")
        rows = [
            [str(run["gap_mib"]), *(f"{run['statuses'].get(status, 0):,}" for status in statuses)]
            + [f"{run['latency_ms'][name]:,.1f}" for name in ("p50", "p99", "max")]
            for run in found
        ]
        yield "haMaxGapNotInSync: sends", ["MiB", *statuses, "p50 ms", "p99 ms", "longest ms"], rows
    if found := [run for run in runs if run["case"] == "heartbeat"]:
        rows = [
            [f"{run['heartbeat_ms']:,}", f"{HOUSEKEEPING_TIMES * run['heartbeat_ms']:,}"]
            + [f"{run['cpu_ms_a_second'][name]:.1f}" for name in ("master", "slave")]
            + [f"{run['counts_s']:.1f}"]
            for run in found
        ]
        head = [
            "ms",
            "haHousekeepingInterval",
            "master CPU ms/s",
            "slave CPU ms/s",
            "a frozen slave stays in sync for s",
        ]
        yield "haSendHeartbeatInterval: idle nodes", head, rows


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Plots all three cases as a PNG. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    copies, sends, idle = figure.subplots(1, 3)
    for key, label in (("master_cpu_s", "master"), ("slave_cpu_s", "slave")):
        found = {size: [run[key] for run in runs if run.get("bytes_each") == size] for size in TRANSFERS}
        copies.plot(
            [size / 1024 for size in found], [statistics.median(each) for each in found.values()], "o-", label=label
        )
    copies.set(xscale="log", xlabel="haTransferBatchSize, KiB", ylabel="processor time of a copy, s")
    behind = [run for run in runs if run["case"] == "gap"]
    for status in ("SEND_OK", "SLAVE_NOT_AVAILABLE", "FLUSH_SLAVE_TIMEOUT"):
        shares = [100 * run["statuses"].get(status, 0) / run["sent"] for run in behind]
        sends.plot([run["gap_mib"] for run in behind], shares, "o-", label=status)
    sends.set(xscale="log", xlabel="haSlaveFallbehindMax, MiB", ylabel="of sends while a slave comes back, %")
    beats = [run for run in runs if run["case"] == "heartbeat"]
    idle.plot(
        [run["heartbeat_ms"] for run in beats],
        [run["counts_s"] for run in beats],
        "o-",
        label="a frozen slave counts for, s",
    )
    costs = [sum(run["cpu_ms_a_second"].values()) for run in beats]
    idle.plot([run["heartbeat_ms"] for run in beats], costs, "o-", label="both nodes with nothing to do, ms a second")
    idle.set(xscale="log", xlabel="haSendHeartbeatInterval, ms")
    for axes, points in (
        (copies, [size / 1024 for size in TRANSFERS]),
        (sends, GAPS_MIB),
        (idle, HEARTBEATS_MS),
    ):
        axes.set_ylim(bottom=0)
        axes.set_xticks(points, [f"{point:,.0f}" for point in points])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/run tuning", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated list (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=256, help="transfer: size of the log")
    parser.add_argument("--rounds", type=int, default=2, help="transfer: copies with each size")
    parser.add_argument("--behind-mib", type=int, default=96, help="gap: how far the slave is behind")
    parser.add_argument("--link-mib", type=int, default=8, help="gap: MiB per second to the slave")
    parser.add_argument("--seconds", type=float, default=12.0, help="gap: duration of the load")
    parser.add_argument(
        "--idle", type=float, default=5.0, help="heartbeat: duration of the idle measurement in seconds"
    )
    parser.add_argument("--directory", type=Path, help="directory for stores (default: a temporary one)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot all three cases as a PNG; requires matplotlib")
    options = parser.parse_args()
    if options.plot and set(options.cases.split(",")) != CASES.keys():
        parser.error("--plot requires all cases")
    if unknown := set(options.cases.split(",")) - CASES.keys():
        parser.error(f"--cases: {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    runs: list[dict[str, Any]] = []
    with alone():
        for case in options.cases.split(","):
            with empty_folder(options.directory) as folder:
                runs += CASES[case](folder, options)
    for number, (question, head, rows) in enumerate(tables(runs)):
        report(question, runs if number == 0 else [], head, rows)
    if options.plot:
        draw(runs, options.plot)


if __name__ == "__main__":
    main()
