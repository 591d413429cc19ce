"""`ha spark …`: jobs over a log, each in a separate Spark session.

Spark is imported only when a job runs, so that other commands start without it. A job shows a progress bar on standard
error if that is a terminal. At the end it prints tables, or with `--json` its whole result.
"""

from __future__ import annotations

import cyclopts

from ha.cli.spark.archives import archive, erase, restore
from ha.cli.spark.logs import audit, lag, reindex, stats

app = cyclopts.App(
    name="spark",
    help="Run jobs over the log on Apache Spark. Requires the extra 'spark': pip install 'halog[spark]'.",
    help_epilogue="If Spark can't start its Python processes, because the machine is busy, a job is restarted up to 4 "
    "times in a row, after 5, 10, 20 and 40 s; then the exit code is 69.",
    help_format="markdown",
)

app.command(archive)
app.command(erase)
app.command(restore, name=["restore", "replay"])
app.command(audit)
app.command(stats)
app.command(lag)
app.command(reindex)
