"""Runs failovers: `scripts/failovers --failovers 100`. tests/failover/failovers.py describes a failover.

Exit code 0 if every promise held, 1 if not; the stores and logs of that run are kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import trio
from rich.console import Console
from rich.table import Table

from scripts.directories import free_directory
from tests.failover.failovers import KINDS, Outcome, run_failovers
from tests.failover.grpc_clients import LANGUAGES
from tests.faults.switch import why_not

console = Console(highlight=False, soft_wrap=True)
FAILOVERS_EACH = 10
"""Number of failovers per group."""


def table_of(outcome: Outcome, title: str) -> Table:
    """Returns the results of a run."""
    table = Table("", "value", title=title, title_justify="left")
    for what, figures in outcome.lines():
        table.add_row(what, figures)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/failovers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--failovers", type=int, default=100, help="number of failovers (default: %(default)s)")
    parser.add_argument(
        "--in-flight",
        type=int,
        nargs="+",
        default=[1, 16, 64],
        help="messages in flight, alternating per group (default: 1 16 64)",
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, help="kinds of failover (default: all that this machine supports)"
    )
    parser.add_argument(
        "--grpc", nargs="+", choices=LANGUAGES, default=(), help="run RocketMQ 5's gRPC clients as well"
    )
    parser.add_argument("--seed", type=int, help="seed of the first group (default: random)")
    parser.add_argument(
        "--directory", type=free_directory, help="empty directory for stores and logs (default: a temporary directory)"
    )
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    directory = options.directory or Path(tempfile.mkdtemp(prefix="halog-failovers-"))
    missing = why_not()
    if missing and not options.kinds:
        console.print(f"network cuts are skipped: {missing}")
    kinds = options.kinds or [kind for kind in KINDS if kind != "cut" or not missing]
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:7.1f} s  {text}", markup=False)

    outcomes: dict[int, Outcome] = {in_flight: Outcome() for in_flight in options.in_flight}
    left = options.failovers
    for number in range(1_000_000):
        if left <= 0:
            break
        in_flight = options.in_flight[number % len(options.in_flight)]
        count = min(left, FAILOVERS_EACH)
        chance = random.Random(seed + number)
        drawn = [kinds[each % len(kinds)] for each in range(count)]
        chance.shuffle(drawn)
        say(f"group {number}: {count} failovers, {in_flight} in flight")
        folder = directory / str(number)
        run = partial(run_failovers, folder, drawn, in_flight, seed + number, say, languages=options.grpc)
        outcome = trio.run(run)
        outcomes[in_flight].add(outcome)
        left -= count
        if outcome.violations:
            for violation in outcome.violations[:20]:
                console.print(violation, style="bold red", markup=False)
            console.print(f"Seed {seed}. Stores and logs are in {folder}", markup=False)
            return 1
        shutil.rmtree(folder, ignore_errors=True)
    total = Outcome()
    for in_flight, outcome in outcomes.items():
        if outcome.gaps:
            console.print(table_of(outcome, f"{in_flight} in flight, seed {seed}"))
            total.add(outcome)
    console.print(table_of(total, "All"))
    shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
