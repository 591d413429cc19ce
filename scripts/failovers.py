"""Runs failovers: `scripts/failovers --failovers 100`. tests/failover/failovers.py describes a failover.

Exit code 0 if every promise held, 1 if not; the stores and logs of that run are kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from functools import partial
from pathlib import Path

import trio
from rich.console import Group
from rich.table import Table

from scripts.seeded import Say, add_options, console, run_seeded
from tests.failover.failovers import KINDS, Outcome, run_failovers
from tests.failover.grpc_clients import LANGUAGES
from tests.faults.switch import why_not

FAILOVERS_EACH = 10
"""Number of failovers per group"""
VIOLATIONS_SHOWN_MAX = 20


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
    add_options(parser)
    options = parser.parse_args()
    missing = why_not()
    if missing and not options.kinds:
        console.print(f"network cuts are skipped: {missing}")
    kinds = options.kinds or [kind for kind in KINDS if kind != "cut" or not missing]

    def run(seed: int, directory: Path, say: Say) -> Group:
        outcomes: dict[int, Outcome] = {in_flight: Outcome() for in_flight in options.in_flight}
        for number, begun in enumerate(range(0, options.failovers, FAILOVERS_EACH)):
            in_flight = options.in_flight[number % len(options.in_flight)]
            count = min(FAILOVERS_EACH, options.failovers - begun)
            drawn = [kinds[each % len(kinds)] for each in range(count)]
            random.Random(seed + number).shuffle(drawn)
            say(f"group {number}: {count} failovers, {in_flight} in flight")
            folder = directory / str(number)
            outcome = trio.run(
                partial(run_failovers, folder, drawn, in_flight, seed + number, say, languages=options.grpc)
            )
            if outcome.violations:
                raise AssertionError("\n".join(outcome.violations[:VIOLATIONS_SHOWN_MAX]))
            outcomes[in_flight].add(outcome)
            shutil.rmtree(folder, ignore_errors=True)
        total = Outcome()
        tables = []
        for in_flight, outcome in outcomes.items():
            if outcome.gaps:
                tables.append(table_of(outcome, f"{in_flight} in flight, seed {seed}"))
                total.add(outcome)
        return Group(*tables, table_of(total, "All"))

    return run_seeded(options, "failovers", run)


if __name__ == "__main__":
    sys.exit(main())
