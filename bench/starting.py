"""How long a master takes from its start to READY: with an empty store, and with a large log after a clean stop and
after kill -9.

The log has `--mib` MiB. kill -9 leaves the abort file, so the next start checks the log, checksums included, from the
newest segment that the checkpoint covers, like RocketMQ; without a checkpoint it checks every segment. Resident memory
is read after READY.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench.catchup import fill
from bench.measure import cpu_s, empty_folder, memory_mib, report, spread
from scripts.nodes import Cluster, cluster, log_range


def start(nodes: Cluster, case: str) -> dict[str, Any]:
    """Starts the master and measures the start."""
    seconds = nodes.master.start(timeout_s=600)
    return {
        "case": case,
        "seconds": seconds,
        "cpu_s": cpu_s([nodes.master.pid]),
        "log_bytes": log_range(nodes.master)[1],
        **{f"rss_{kind}_mib": mib for kind, mib in memory_mib(nodes.master.pid).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=2048, help="size of the log")
    parser.add_argument("--size", type=int, default=1024, help="bytes per message body")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="directory for stores (default: a temporary one)")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with empty_folder(options.directory) as folder:
        for number in range(options.rounds):
            empty = folder / f"empty-{number}"
            empty.mkdir()
            with cluster(empty) as nodes:
                nodes.name_server.start()
                runs.append(start(nodes, "empty store"))
                nodes.master.stop()
        large = folder / "large"
        large.mkdir()
        with cluster(large) as nodes:
            nodes.name_server.start()
            nodes.master.start()
            fill(nodes, options.mib, options.size)
            end = log_range(nodes.master)[1]
            nodes.master.stop()
            for _ in range(options.rounds):
                runs.append(start(nodes, "after a clean stop"))
                nodes.master.stop()
            nodes.master.start()
            for case in ("after kill -9", "after kill -9, without a checkpoint"):
                for _ in range(options.rounds):
                    nodes.master.kill()
                    if "without" in case:
                        (nodes.master_store / "checkpoint").unlink(missing_ok=True)
                    run = start(nodes, case)
                    runs.append(run)
                    print(f"# {case}: {run['seconds']:.2f} s", file=sys.stderr)
                    if run["log_bytes"] != end:
                        raise SystemExit(f"the log ended at {end:,}, after recovery at {run['log_bytes']:,}")
            nodes.master.stop()
    rows = []
    for case in dict.fromkeys(run["case"] for run in runs):
        point = [run for run in runs if run["case"] == case]
        rows.append(
            [
                case,
                f"{point[0]['log_bytes'] / 1024 / 1024:,.0f}",
                spread([run["seconds"] for run in point], 2),
                spread([run["cpu_s"] for run in point], 2),
                spread([run["rss_anonymous_mib"] for run in point]),
                spread([run["rss_files_mib"] for run in point]),
            ]
        )
    head = ["start", "log MiB", "s to READY", "CPU s", "resident MiB, own", "of mapped files"]
    report(f"From start to READY, messages of {options.size} bytes, {options.rounds} rounds", runs, head, rows)


if __name__ == "__main__":
    main()
