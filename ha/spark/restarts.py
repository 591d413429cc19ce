"""Runs a job or a streaming query again if Spark could not start one of its Python processes.

Spark gives a process ten seconds to connect to the JVM, and has no setting for that. The process spends 0.3 seconds of
CPU time until then, before it loads any data source, so on a machine with thirty runnable processes a core it may be
late.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

logger = logging.getLogger("ha.spark")

Result = TypeVar("Result")

DELAYS_S = (5, 10, 20, 40)
"""Delays before the restarts; after the last one the error is raised."""
_HEALTHY_S = 600.0
"""A run of at least this duration counts as a success: the delays begin again."""
_NOT_STARTED = re.compile(
    r"Python worker failed to connect back|waiting for the Python worker to connect back"
    r"|Python (daemon )?failed to launch worker"
)


def has_not_started(error: BaseException) -> bool:
    """Return whether Spark failed because one of its Python processes did not start in time."""
    return _NOT_STARTED.search(str(error)) is not None


def with_restarts(
    run: Callable[[], Result],
    *,
    stop: threading.Event | None = None,
    report: Callable[[int, BaseException], object] | None = None,
    clock_s: Callable[[], float] = monotonic,
) -> Result:
    """Return `run()`, and call it again, at most four times in a row, if Spark could not start a Python process.

        ha.spark.with_restarts(lambda: stream.writeStream.option("checkpointLocation", "c").start().awaitTermination())

    Waits 5, 10, 20 and 40 s. Only for work that resumes: a query with a checkpoint, or a job of `ha.spark.jobs`. Other
    errors are raised at once, as is the last one, and any while `stop` is set, which also ends the wait. `report` is
    called with the delay in seconds and the error before each wait (default: a warning is logged).
    """
    stop = threading.Event() if stop is None else stop
    report = _log if report is None else report
    restart_count = 0
    while True:
        began_s = clock_s()
        try:
            return run()
        except Exception as error:
            if clock_s() - began_s >= _HEALTHY_S:
                restart_count = 0
            if not has_not_started(error) or restart_count == len(DELAYS_S) or stop.is_set():
                raise
            delay_s = DELAYS_S[restart_count]
            report(delay_s, error)
            if stop.wait(delay_s):
                raise
            restart_count += 1


def _log(delay_s: int, error: BaseException) -> None:
    logger.warning('spark.python_not_started restart_in_s=%d hint="the machine is busy"', delay_s)
