"""Runs crash cycles: `scripts/crash-cycles --cycles 300 --seed 1`. tests/faults/cycles.py describes a cycle.

Exit code 0 if every promise held, 1 after the first violation; the stores and logs of that run are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from scripts.seeded import Say, add_options, run_seeded
from tests.faults.cycles import CYCLES_EACH, Outcome, run_cycles


def table_of(outcome: Outcome, seed: int) -> Table:
    """Returns the totals of all runs."""
    table = Table("", "count", title=f"crash cycles, seed {seed}", title_justify="left")
    for kind, count in sorted(outcome.cycles.items()):
        table.add_row(f"cycles: {kind}", f"{count:,}")
    table.add_row("cycles in total", f"{sum(outcome.cycles.values()):,}")
    table.add_row("starts after a crash", f"{outcome.recoveries:,}")
    table.add_row("messages sent", f"{outcome.sent:,}")
    for status, count in outcome.statuses.most_common():
        table.add_row(f"answered {status}", f"{count:,}")
    table.add_row("acknowledged (PUT_OK)", f"{outcome.acknowledged:,}")
    table.add_row("acknowledged but lost", f"{outcome.lost:,}")
    table.add_row("consumed", f"{outcome.consumed:,}")
    table.add_row("log bytes checked, all nodes", f"{outcome.checked_bytes:,}")
    table.add_row("minutes", f"{outcome.seconds / 60:.1f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/crash-cycles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=300, help="number of cycles (default: %(default)s)")
    parser.add_argument(
        "--cycles-each", type=int, default=CYCLES_EACH, help="number of cycles per cluster (default: %(default)s)"
    )
    add_options(parser)
    options = parser.parse_args()

    def run(seed: int, directory: Path, say: Say) -> Group:
        outcome = run_cycles(seed, options.cycles, directory, say, cycles_each=options.cycles_each)
        return Group(table_of(outcome, seed), *(Text(f"  {each}") for each in outcome.configurations))

    return run_seeded(options, "crash-cycles", run)


if __name__ == "__main__":
    sys.exit(main())
