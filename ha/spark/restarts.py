"""Runs a job or a streaming query again if Spark could not start one of its Python processes.

A process must connect to the JVM within ten seconds, a fixed timeout in Spark. The process needs 0.3 seconds of CPU
time for that, before it loads any data source, so it may be late on a machine with thirty runnable processes per core.
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
"""Delays before successive restarts, in seconds; an error after the last restart is raised."""
_HEALTHY_S = 600.0
"""Minimum duration of a run, in seconds, after which the number of restarts is reset to 0."""
_NOT_STARTED = re.compile(
    r"Python worker failed to connect back|waiting for the Python worker to connect back"
    r"|Python (daemon )?failed to launch worker"
)


def has_not_started(error: BaseException) -> bool:
    """Returns whether Spark failed because one of its Python processes did not start in time."""
    return _NOT_STARTED.search(str(error)) is not None


def with_restarts(
    run: Callable[[], Result],
    *,
    stop: threading.Event | None = None,
    report: Callable[[int, BaseException], object] | None = None,
    clock_s: Callable[[], float] = monotonic,
) -> Result:
    """Returns `run()`; if Spark could not start a Python process, waits 5 s and calls it again.

        ha.spark.with_restarts(lambda: stream.writeStream.option("checkpointLocation", "c").start().awaitTermination())

    Further restarts follow after 10, 20 and 40 s; then the error is raised. After a run of ten minutes or more, the
    count begins at zero again. Use it only for work that resumes where it stopped: a query with a checkpoint, or a job
    of `ha.spark.jobs`.

    Other errors are raised at once. When `stop` is set, a wait ends, and the error is raised instead of a restart.
    `report` is called before each wait with the delay in seconds and the error (default: log a warning).
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
