"""How fast a new slave copies an existing log from its first byte (haStartFrom=first).

A master writes the log alone first. The time is measured from the slave's READY line until both commitlogs end at the
same offset, according to their admin ports, which are queried every 10 ms; the slave builds its queues and index
meanwhile.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.measure import MIB, cpu_s, empty_folder, machine_busy_s, report, spread
from scripts.nodes import Cluster, cluster, log_range


def fill(nodes: Cluster, size_mib: int, body_size: int) -> None:
    """Writes a log of approximately this size to the master."""
    command = [sys.executable, "-m", "bench.load", "--broker", nodes.master.ready["remoting"], "--in-flight", "32"]
    subprocess.run([*command, "--size", str(body_size), "--bytes", str(size_mib * MIB)], check=True, stdout=sys.stderr)


def one_run(nodes: Cluster) -> dict[str, Any]:
    """Measures a new slave until it reaches the master's end."""
    end = log_range(nodes.master)[1]
    before, busy, began = cpu_s([nodes.master.pid]), machine_busy_s(), time.monotonic()
    ready_s = nodes.slave.start()
    started = time.monotonic()
    while log_range(nodes.slave)[1] < end:
        time.sleep(0.01)
        if time.monotonic() - started > 600:
            raise SystemExit(f"after 10 minutes the slave is at {log_range(nodes.slave)[1]:,} of {end:,} bytes")
    seconds = time.monotonic() - started
    master_s, slave_s = cpu_s([nodes.master.pid]) - before, cpu_s([nodes.slave.pid])
    foreign = (machine_busy_s() - busy - master_s - slave_s) / (time.monotonic() - began)
    first = log_range(nodes.slave)[0]
    nodes.slave.stop()
    shutil.rmtree(nodes.slave_store)
    return {
        "bytes": end - first,
        "ready_s": ready_s,
        "seconds": seconds,
        "mb_per_s": (end - first) / 1e6 / seconds,
        "master_cpu_s": master_s,
        "slave_cpu_s": slave_s,
        "foreign_cores": foreign,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=2048, help="size of the log")
    parser.add_argument("--size", type=int, default=1024, help="bytes per message body")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, help="haTransferBatchSize in bytes (default: halog's)")
    parser.add_argument("--directory", type=Path, help="directory for stores (default: a temporary one)")
    options = parser.parse_args()
    keys: dict[str, object] = {"haStartFrom": "first"}
    if options.batch:
        keys["haTransferBatchSize"] = options.batch
    with empty_folder(options.directory) as folder, cluster(folder, **keys) as nodes:
        nodes.name_server.start()
        nodes.master.start()
        fill(nodes, options.mib, options.size)
        runs = [one_run(nodes) for _ in range(options.rounds)]
        nodes.master.stop()
        nodes.name_server.stop()
    row = [
        f"{runs[0]['bytes'] / MIB:,.0f}",
        spread([run["seconds"] for run in runs], 2),
        spread([run["mb_per_s"] for run in runs]),
        spread([run["master_cpu_s"] for run in runs], 2),
        spread([run["slave_cpu_s"] for run in runs], 2),
        spread([run["foreign_cores"] for run in runs], 2),
    ]
    head = ["log MiB", "seconds", "MB/s", "master CPU s", "slave CPU s", "others' cores"]
    report(f"Catch-up of a fresh slave, messages of {options.size} bytes, {options.rounds} rounds", runs, head, [row])


if __name__ == "__main__":
    main()
