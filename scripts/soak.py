"""Runs the soak tests of tests/load (see `scripts/soak`). Exit code 0 if nothing was lost and nothing grew, else 1."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.directories import add_directory_option, create_directory
from tests.load import virtual_soak
from tests.load.flatness import growth_of_rows, growth_of_samples
from tests.load.real_soak import Row, soak
from tests.load.stopping import Kind, StopTally, stop_under_load

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
MIB = 1 << 20


def real(options: argparse.Namespace, directory: Path) -> bool:
    """Runs real processes for some minutes; returns whether the run passed."""

    def say(row: Row) -> None:
        console.print(
            f"{row.minute:5.1f} min  own {row.own_bytes / MIB:6.1f} MiB  fds {row.descriptor_count}  tasks "
            f"{row.task_count}  clients {row.clients_open}  in sync {row.slaves_in_sync}  acked {row.acked:,}"
        )

    outcome = soak(
        directory,
        minutes=options.minutes,
        slaves=options.slaves,
        idle=options.idle,
        active=options.active,
        sends_per_s=options.rate,
        row_s=min(60.0, options.minutes * 6),
        on_row=say,
    )
    table = Table(
        *("minute", "own MiB", "fds", "sockets", "tasks", "clients", "in sync", "sent", "acked"),
        *("slave: own MiB", "fds", "tasks"),
        title=f"1 master, {options.slaves} slaves, {options.idle} idle and {options.active} active clients",
        title_justify="left",
        box=None,
    )
    step = max(1, len(outcome.rows) // 20)
    for row in (*outcome.rows[:-1:step], outcome.rows[-1]):
        table.add_row(
            f"{row.minute:.1f}",
            f"{row.own_bytes / MIB:.1f}",
            *map(str, (row.descriptor_count, row.socket_count, row.task_count, row.clients_open, row.slaves_in_sync)),
            f"{row.sent:,}",
            f"{row.acked:,}",
            f"{row.slave_own_bytes_max / MIB:.1f}",
            *map(str, (row.slave_descriptors_max, row.slave_tasks_max)),
        )
    console.print(table)
    console.print(
        f"acknowledged {outcome.acked:,}, lost {outcome.lost}, connections lost {len(outcome.lost_connections)}, "
        f"statuses {outcome.statuses}, {outcome.checked_bytes:,} bytes of logs compared, "
        f"master's CPU {outcome.master_cpu_share:.0%} of one core"
    )
    for lost in outcome.lost_connections[:10]:
        console.print(f"  connection {lost}", markup=False)
    growth = growth_of_rows(outcome.rows)
    for line in growth:
        console.print(f"  grew: {line}", markup=False)
    return not growth and not outcome.lost and not outcome.lost_connections


def virtual(hours: int) -> bool:
    """Runs one process for some hours of virtual time; returns whether the run passed."""
    logging.getLogger("ha").propagate = False
    began = time.monotonic()
    table = Table("hour", "tasks", "objects", "blocks", "table entries", "files", title="virtual hours", box=None)

    def say(sample: virtual_soak.Sample) -> None:
        console.print(f"hour {sample.hour:g} after {time.monotonic() - began:.0f} s")
        files = sum(size for name, size in sample.tables.items() if name.startswith("files"))
        table.add_row(
            f"{sample.hour:g}",
            str(sample.task_count),
            f"{sample.object_count:,}",
            f"{sample.block_count:,}",
            f"{sum(sample.tables.values()) - files:,}",
            str(files),
        )

    report = virtual_soak.run(hours, on_sample=say)
    console.print(table)
    console.print(report.traffic, markup=False)
    growth = growth_of_samples(report.samples)
    for line in growth:
        console.print(f"  grew: {line}", markup=False)
    return not growth


def stops(count: int, directory: Path) -> bool:
    """Stops and kills a loaded master in turn, `count` times. Returns True; raises AssertionError if a response was
    incorrect."""
    tally = StopTally()
    for number in range(count):
        kind = Kind.STOP if number % 2 == 0 else Kind.KILL
        tally = stop_under_load(directory / str(number), kind, seed=number, tally=tally)
        shutil.rmtree(directory / str(number))
        if (number + 1) % 10 == 0:
            console.print(f"{number + 1:4} stops: {tally}", markup=False)
    console.print(tally, markup=False)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="duration in minutes (default: %(default)s)")
    parser.add_argument("--slaves", type=int, default=20, help="number of slaves (default: %(default)s)")
    parser.add_argument(
        "--idle", type=int, default=1000, help="number of idle client connections (default: %(default)s)"
    )
    parser.add_argument(
        "--active", type=int, default=200, help="number of active client connections (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=100.0, help="total sends per second (default: %(default)s)")
    parser.add_argument("--virtual-hours", type=int, help="run for this many hours of virtual time instead")
    parser.add_argument("--stops", type=int, help="stop and kill a loaded master this many times instead")
    add_directory_option(parser)
    options = parser.parse_args()
    if options.virtual_hours:
        return 0 if virtual(options.virtual_hours) else 1
    directory = create_directory(options.directory, "soak")
    is_well = stops(options.stops, directory) if options.stops else real(options, directory)
    if is_well:
        shutil.rmtree(directory)
    else:
        console.print(f"stores and logs are in {directory}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
