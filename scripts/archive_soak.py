"""Runs a writer, an archiver and readers of one topic against each other, and kills them (see `scripts/archive-soak`).

Exit code 0 if each message was there once, in the stream and in every table; 1 if not, and the files are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.table import Table

from scripts.seeded import Say, add_options, run_seeded
from tests.spark.view_soak import run_soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/archive-soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="duration in minutes (default: %(default)s)")
    add_options(parser)
    options = parser.parse_args()

    def soak(seed: int, directory: Path, say: Say) -> Table:
        outcome = run_soak(directory, minutes=options.minutes, seed=seed, on_event=say)
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
        return table

    return run_seeded(options, "archive-soak", soak)


if __name__ == "__main__":
    sys.exit(main())
