"""Measures replicated sends per second, their latency, and their processor time on the servers.

A name server, a SYNC_MASTER (ASYNC_FLUSH) and a SLAVE run as processes, load.py as a fourth. A run with a message that
the slave did not acknowledge fails. Rounds are outermost, so that a slow minute affects all points.

With `--scrape` or `--viewers` it measures the cost of monitoring instead: one long load is divided into intervals of
`--seconds` in which the nodes are, alternately, watched and not watched; the order changes from round to round.
Watching means that /metrics of master and slave is read at this interval, and that this many overviews of the master's
dashboard are open. The growth of the log is compared between neighbouring intervals, because the machine's speed varies
more over time than the effect.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from bench.measure import cpu_s, empty_folder, machine_busy_s, memory_mib, report, spread
from ha.admin.dashboard.live import POLL_S
from scripts.nodes import Cluster, cluster, wait_until_attached

STRETCH_SPARE_S = 0.25
"""Additional time in seconds for each interval: the master is queried for the end of its log."""


def one_run(nodes: Cluster, in_flight: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one load and measures its cost. Raises SystemExit if the slave lacks a message."""
    roots = [nodes.master.pid, nodes.slave.pid]
    command = _load(nodes, in_flight, options, options.seconds)
    before = [cpu_s([root]) for root in roots]
    busy, started = machine_busy_s(), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run = _all_acknowledged(done.stdout)
    wall, used = time.monotonic() - started, [cpu_s([root]) - was for root, was in zip(roots, before, strict=True)]
    run["master_us"], run["slave_us"] = (each / run["n_all"] * 1e6 for each in used)
    client_s = run["client_us"] * run["n_all"] / 1e6
    run["foreign_cores"] = (machine_busy_s() - busy - sum(used) - client_s) / wall
    return run


def _load(nodes: Cluster, in_flight: int, options: argparse.Namespace, seconds: float) -> list[str]:
    command = [sys.executable, "-m", "bench.load", "--broker", nodes.master.ready["remoting"]]
    command += ["--in-flight", str(in_flight), "--size", str(options.size)]
    return [*command, "--seconds", str(seconds), "--warm", str(options.warm)]


def _all_acknowledged(line: str) -> dict[str, Any]:
    """Returns the figures of a load. Raises SystemExit if the slave lacks a message."""
    run: dict[str, Any] = json.loads(line)
    if run["codes"] != {"0": run["n_all"]}:
        raise SystemExit(f"not every message was acknowledged by the slave: {run['codes']}")
    return run


class Watchers:
    """A thread that queries the nodes like Prometheus and open overviews, while `are_on` is set."""

    def __init__(self, nodes: Cluster, scrape_s: float | None, viewer_count: int) -> None:
        self._nodes = nodes
        self._scrape_s = scrape_s
        self._viewer_count = viewer_count
        self._is_over = threading.Event()
        self.are_on = threading.Event()
        self.scrapes_s: list[float] = []
        """Duration of each query of /metrics, in seconds."""

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Runs the thread while the block does; an error in the thread is raised at the end of the block."""
        with ThreadPoolExecutor(1) as threads:
            looks = threads.submit(self._look)
            try:
                yield
            finally:
                self._is_over.set()
        looks.result()

    def _look(self) -> None:
        host, _, port = self._nodes.master.ready["admin"].rpartition(":")
        viewers = [HTTPConnection(host, int(port), timeout=10) for _ in range(self._viewer_count)]
        on_s = view_due_s = 0.0
        scrape_due_s = self._scrape_s or 0.0
        last = time.monotonic()
        while not self._is_over.wait(0.02):
            now = time.monotonic()
            on_s += (now - last) * self.are_on.is_set()
            last = now
            if viewers and on_s >= view_due_s:
                view_due_s += POLL_S
                _view(viewers)
            if self._scrape_s and on_s >= scrape_due_s:
                scrape_due_s += self._scrape_s
                self._scrape()

    def _scrape(self) -> None:
        for node in (self._nodes.master, self._nodes.slave):
            began = time.perf_counter()
            with urllib.request.urlopen(f"http://{node.ready['admin']}/metrics", timeout=10) as page:
                page.read()
            self.scrapes_s.append(time.perf_counter() - began)


def _view(viewers: list[HTTPConnection]) -> None:
    """Sends the queries of all overviews at the same moment, on connections that stay open, as browsers do."""
    for viewer in viewers:
        _ask(viewer)
    for viewer in viewers:
        try:
            viewer.getresponse().read()
        except (ConnectionError, HTTPException):  # it was closed since its last query
            viewer.close()
            _ask(viewer)
            viewer.getresponse().read()


def _ask(viewer: HTTPConnection) -> None:
    try:
        viewer.request("GET", "/dashboard/live.json")
    except ConnectionError:
        viewer.close()
        viewer.request("GET", "/dashboard/live.json")


def compare(nodes: Cluster, in_flight: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the intervals of one load, watched or not, with the MB of log per second."""
    command = _load(nodes, in_flight, options, 2 * options.rounds * (options.seconds + STRETCH_SPARE_S) + 5)
    stretches: list[dict[str, Any]] = []
    watchers = Watchers(nodes, options.scrape, options.viewers)
    with watchers.looking(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
        time.sleep(options.warm)
        for number in range(options.rounds):
            for is_watched in ((False, True), (True, False))[number % 2]:
                watchers.are_on.set() if is_watched else watchers.are_on.clear()
                began, begin = time.monotonic(), _log_end(nodes)
                time.sleep(options.seconds)
                end, took = _log_end(nodes), time.monotonic() - began
                stretch = {"in_flight": in_flight, "round": number, "is_watched": is_watched}
                stretches.append(stretch | {"mb_per_s": (end - begin) / took / 1e6})
                if load.poll() is not None:
                    raise SystemExit("the load ended before the last interval; increase --seconds")
        watchers.are_on.clear()
        _all_acknowledged(load.communicate()[0])
    print(
        f"# {len(watchers.scrapes_s)} scrapes of {statistics.median(watchers.scrapes_s or [0]) * 1e3:.1f} ms",
        file=sys.stderr,
    )
    return stretches


def _log_end(nodes: Cluster) -> int:
    with urllib.request.urlopen(f"http://{nodes.master.ready['admin']}/status", timeout=10) as page:
        end: int = json.load(page)["commitlog"]["max_offset"]
    return end


def comparison(stretches: list[dict[str, Any]], in_flight: list[int]) -> list[list[str]]:
    """Returns a row per point: MB of log per second without and with watching, and the difference between pairs."""
    rows = []
    for count in in_flight:
        rates: list[list[float]] = [
            [each["mb_per_s"] for each in stretches if each["in_flight"] == count and each["is_watched"] is is_watched]
            for is_watched in (False, True)
        ]
        less = [(1 - watched / alone) * 100 for alone, watched in zip(*rates, strict=True)]
        first, middle, third = statistics.quantiles(less, n=4) if len(less) > 1 else less * 3
        whole = (1 - sum(rates[1]) / sum(rates[0])) * 100
        row = [str(count), *(spread(rate, 1) for rate in rates), f"{middle:.1f} ({first:.1f} to {third:.1f})"]
        rows.append([*row, f"{whole:.1f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--size", type=int, default=1024, help="bytes per body")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flush", choices=["ASYNC_FLUSH", "SYNC_FLUSH"], default="ASYNC_FLUSH")
    parser.add_argument(
        "--scrape", type=float, metavar="S", help="compare with reading /metrics at this interval in seconds"
    )
    parser.add_argument("--viewers", type=int, default=0, metavar="N", help="compare with N open overviews")
    parser.add_argument("--directory", type=Path, help="directory for stores (default: a temporary one)")
    options = parser.parse_args()
    if options.viewers and options.seconds % POLL_S:
        parser.error(f"with --viewers, --seconds must be a multiple of {POLL_S:g}, the interval of queries")
    is_compared = bool(options.scrape or options.viewers)
    runs: list[dict[str, Any]] = []
    with empty_folder(options.directory) as folder, cluster(folder, flushDiskType=options.flush) as nodes:
        for node in nodes.all:
            node.start()
        wait_until_attached(nodes)
        for number in range(0 if is_compared else options.rounds):
            for in_flight in options.in_flight:
                run = one_run(nodes, in_flight, options)
                runs.append(run | {"round": number})
                print(f"# round {number}, {in_flight} in flight: {run['rate']:,.0f}/s", file=sys.stderr)
        for in_flight in options.in_flight if is_compared else ():
            runs += compare(nodes, in_flight, options)
        memory = {node.name: memory_mib(node.pid) for node in nodes.all}
        for node in reversed(nodes.all):
            node.stop()
    if is_compared:
        watchers = [f"/metrics of both brokers is read every {options.scrape:g} s"] if options.scrape else []
        watchers += [f"{options.viewers} overviews of the master are open"] if options.viewers else []
        question = f"Log written by replicated sends, and while {' and '.join(watchers)}"
        head = ["in flight", "MB/s", "while watched", "less by %, of pairs (quartiles)", "of all"]
        report(question, runs, head, comparison(runs, options.in_flight))
        return
    rows = []
    for in_flight in options.in_flight:
        point = [run for run in runs if run["in_flight"] == in_flight]
        rows.append(
            [
                str(in_flight),
                spread([run["rate"] for run in point]),
                spread([run["p50_us"] / 1e3 for run in point], 2),
                spread([run["p99_us"] / 1e3 for run in point], 2),
                spread([run["master_us"] for run in point], 1),
                spread([run["slave_us"] for run in point], 1),
                spread([run["client_us"] for run in point], 1),
                f"{statistics.median(run['foreign_cores'] for run in point):.2f}",
            ]
        )
    head = [
        "in flight",
        "messages/s",
        "p50 ms",
        "p99 ms",
        "master CPU µs",
        "slave CPU µs",
        "client CPU µs",
        "others' cores",
    ]
    question = (
        f"Replicated sends of {options.size} bytes, SYNC_MASTER + SLAVE, {options.flush}, {options.rounds} rounds"
    )
    report(question, runs, head, rows)
    print(json.dumps({"resident_mib": memory}))
    print("\n| process | resident MiB, own | of mapped files |\n|---|---|---|")
    for name, resident in memory.items():
        print(f"| {name} | {resident['anonymous']:.0f} | {resident['files']:.0f} |")


if __name__ == "__main__":
    main()
