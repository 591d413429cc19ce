"""Measures the SDK's replicated sends and pulls on asyncio and Trio, and the processor time of each message.

A name server, a SYNC_MASTER (ASYNC_FLUSH) and a SLAVE run as processes, sdk_load.py as a fourth. Every send awaits its
own result; a run with a message that the slave did not acknowledge fails. Rounds are outermost, so that a slow minute
affects all points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.measure import MIB, cpu_s, empty_folder, machine_busy_s, report, spread
from scripts.nodes import Cluster, cluster, wait_until_attached

#: Brokers return at most 32 messages per pull by default, as in RocketMQ.
_LARGE_PULLS = {"maxTransferCountOnMessageInMemory": 1024, "maxTransferBytesOnMessageInMemory": 4 * MIB}


def one_run(nodes: Cluster, what: str, backend: str, arguments: list[str]) -> dict[str, Any]:
    """Runs one load and measures its cost on the servers. Raises SystemExit if the slave lacks a message."""
    roots = [nodes.master.pid, nodes.slave.pid]
    command = [sys.executable, "-m", "bench.sdk_load", what, "--backend", backend]
    command += ["--name-server", nodes.name_server_address, *arguments]
    before = [cpu_s([root]) for root in roots]
    busy, started = machine_busy_s(), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run: dict[str, Any] = json.loads(done.stdout) | {"what": what}
    wall, used = time.monotonic() - started, [cpu_s([root]) - was for root, was in zip(roots, before, strict=True)]
    if what == "produce" and run["statuses"].keys() != {"SEND_OK"}:
        raise SystemExit(f"not every message was acknowledged by the slave: {run['statuses']}")
    run["master_us"], run["slave_us"] = (each / run["n_all"] * 1e6 for each in used)
    client_s = run["client_us"] * run["n_all"] / 1e6
    run["foreign_cores"] = max(0.0, (machine_busy_s() - busy - sum(used) - client_s) / wall)
    return run


def table(runs: list[dict[str, Any]], question: str, point: str, columns: dict[str, tuple[str, float, int]]) -> None:
    """Prints the runs and a table of them. `columns`: heading -> key of a run, divisor, and number of digits."""
    rows = []
    for value, backend in dict.fromkeys((run[point], run["backend"]) for run in runs):
        at = [run for run in runs if (run[point], run["backend"]) == (value, backend)]
        cells = [spread([run[key] / divisor for run in at], digits) for key, divisor, digits in columns.values()]
        others = statistics.median(run["foreign_cores"] for run in at)
        rows.append([f"{value:,}", backend, *cells, f"{others:.2f}"])
    report(question, runs, [point.replace("_", " "), "event loop", *columns, "others' cores"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--pull", type=int, nargs="+", default=[32, 1024], help="messages per pull")
    parser.add_argument("--backends", nargs="+", choices=["trio", "asyncio"], default=["trio", "asyncio"])
    parser.add_argument("--size", type=int, default=1024, help="bytes per body")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm", type=float, default=2.0)
    parser.add_argument("--count", type=int, default=300_000, help="messages to pull")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-batching", action="store_true", help="send each message in a separate request")
    parser.add_argument("--directory", type=Path, help="directory for stores (default: a temporary one)")
    options = parser.parse_args()
    sends: list[dict[str, Any]] = []
    pulls: list[dict[str, Any]] = []
    common = ["--size", str(options.size), "--seconds", str(options.seconds), "--warm", str(options.warm)]
    if options.without_batching:
        common.append("--without-batching")
    with empty_folder(options.directory) as folder, cluster(folder, **_LARGE_PULLS) as nodes:
        for node in nodes.all:
            node.start()
        wait_until_attached(nodes)
        for number in range(options.rounds):
            for in_flight in options.in_flight:
                for backend in options.backends:
                    run = one_run(nodes, "produce", backend, [*common, "--in-flight", str(in_flight)])
                    sends.append(run | {"round": number})
                    print(f"# round {number}, {in_flight} in flight, {backend}: {run['rate']:,.0f}/s", file=sys.stderr)
        for number in range(options.rounds):
            for pull in options.pull:
                for backend in options.backends:
                    run = one_run(nodes, "consume", backend, ["--count", str(options.count), "--pull", str(pull)])
                    pulls.append(run | {"round": number, "a_pull": pull})
                    print(f"# round {number}, {pull} a pull, {backend}: {run['rate']:,.0f}/s", file=sys.stderr)
        for node in reversed(nodes.all):
            node.stop()
    head = f"{options.size} bytes, SYNC_MASTER + SLAVE, ASYNC_FLUSH, {options.rounds} rounds"
    way = "each in a separate request" if options.without_batching else "batched as they come"
    table(
        sends,
        f"Replicated sends with the SDK, each awaited, {way}: {head}",
        "in_flight",
        {
            "messages/s": ("rate", 1, 0),
            "p50 ms": ("p50_us", 1e3, 2),
            "p99 ms": ("p99_us", 1e3, 2),
            "client CPU µs": ("client_us", 1, 1),
            "master CPU µs": ("master_us", 1, 1),
            "slave CPU µs": ("slave_us", 1, 1),
        },
    )
    table(
        pulls,
        f"Reading with the SDK, the next pull of each queue under way: {head}",
        "a_pull",
        {
            "messages/s": ("rate", 1, 0),
            "client CPU µs": ("client_us", 1, 1),
            "master CPU µs": ("master_us", 1, 1),
            "messages a pull": ("per_pull", 1, 0),
        },
    )


if __name__ == "__main__":
    main()
