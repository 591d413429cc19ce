"""Runs a writer, an archiver and readers of one topic against each other, and kills them (see `scripts/archive-soak`).

Exit code 0 if each message was there once, in the stream and in every table, else 1; then the files are kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.spark.view_soak import run_soak

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/archive-soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="duration in minutes (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the kills (default: random)")
    parser.add_argument("--directory", type=Path, help="directory for all files (default: a temporary directory)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    directory = options.directory or Path(tempfile.mkdtemp(prefix="halog-archive-soak-"))
    began_s = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began_s:7.1f} s  {text}", markup=False)

    try:
        outcome = run_soak(directory, minutes=options.minutes, seed=seed, on_event=say)
    except AssertionError as error:
        console.print(f"\n{error}", style="bold red", markup=False)
        console.print(f"Seed {seed}. All files are in {directory}", markup=False)
        return 1
    shutil.rmtree(directory)
    table = Table("", "count", title=f"one view of archive and log, seed {seed}", title_justify="left")
    table.add_row("messages acknowledged", f"{outcome.acknowledged:,}")
    table.add_row("messages in the stream, each once", f"{outcome.rows:,}")
    table.add_row("tables with each message once", f"{outcome.tables:,}")
    table.add_row("segments deleted by retention", f"{outcome.deleted_segments:,}")
    table.add_row("bytes of the log archived", f"{outcome.archived_end:,}")
    for name, count in sorted(outcome.kills.items()):
        table.add_row(f"{name} killed", f"{count:,}")
    for name, count in sorted(outcome.ends.items()):
        table.add_row(f"{name} ended and was started again", f"{count:,}")
    table.add_row("minutes", f"{outcome.seconds / 60:.1f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
