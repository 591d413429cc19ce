"""Simulates power losses: `scripts/power-loss --states 5000 --seed 1`. tests/store/recording.py describes a state.

Each seed runs a workload on a single store and one on a master with a slave, draws moments of each, and checks five
disk states per moment. Exit code 1, with the seed and the moment, at the first state that breaks a promise.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from random import Random

from rich.console import Console
from rich.table import Table

from tests.store.power_loss import Checked, Losses, live_alone, live_replicated

MOMENTS_EACH = 40

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/power-loss", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--states", type=int, default=5000, help="minimum number of disk states (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first workload (default: %(default)s)")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # recovery logs what it truncates for each state
    total, counts, began, seed = Checked(), Counter[str](), time.monotonic(), options.seed
    while total.states < options.states:
        for live in (live_alone, live_replicated):
            recording = live(seed)
            chance = Random(seed)
            losses = Losses(recording, chance)
            try:
                for position in sorted(chance.sample(range(recording.moments), MOMENTS_EACH)):
                    losses.check_moment(position)
            except AssertionError as error:
                console.print(f"\n{live.__name__}: {error}", style="bold red", markup=False)
                return 1
            total.add(losses.checked)
            counts += recording.counts
        elapsed_s = time.monotonic() - began
        console.print(f"{elapsed_s:7.1f} s  seed {seed}: {total.states:,} states so far", markup=False)
        seed += 1
    table = Table("", "count", title=f"power losses, seeds {options.seed} to {seed - 1}", title_justify="left")
    table.add_row("workloads", f"{2 * (seed - options.seed):,}")
    table.add_row("messages answered PUT_OK", f"{counts['PUT_OK']:,}")
    table.add_row("power losses", f"{total.moments:,}")
    table.add_row("sectors with unknown contents", f"{total.doubtful:,}")
    table.add_row("disk states", f"{total.states:,}")
    table.add_row("disk states with a second power loss during recovery", f"{total.second_crashes:,}")
    table.add_row("recoveries", f"{total.recoveries:,}")
    table.add_row("acknowledged messages checked", f"{total.acknowledged * 5:,}")
    table.add_row("acknowledged but lost", "0")
    table.add_row("minutes", f"{(time.monotonic() - began) / 60:.1f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
