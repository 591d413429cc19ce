"""Explains a failed Spark job by halog's own error on an executor, and determines the exit code."""

from __future__ import annotations

import re

from ha.cli.exits import EXIT_BUG, EXIT_DAMAGED, EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_UNREADABLE, EXIT_USAGE

NOT_STARTED = "Spark could not start a Python process within 10 s, as the machine is busy"
_PYTHON_ERROR = re.compile(r"\bha\.errors\.(\w+): (.*)$", re.MULTILINE)


def is_job_failure(error: BaseException) -> bool:
    """Return whether `error` is Spark's report of a failure on an executor or in the JVM."""
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j")


def explain(error: BaseException) -> str:
    """Return the cause in one line: halog's own error if the message has one, else the start of the message."""
    from ha.spark.restarts import has_not_started

    found = _own_error(error)
    if found is not None:
        return found[1]
    if has_not_started(error):
        return f"{NOT_STARTED}; run the command again"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"Spark: {lines[0]}" if lines else f"Spark: {type(error).__name__}"


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of halog's own error on an executor. Without one: 69 if Spark could not start a Python
    process, otherwise 70."""
    from ha.spark.restarts import has_not_started

    found = _own_error(error)
    if found is None:
        return EXIT_UNREACHABLE if has_not_started(error) else EXIT_BUG
    return _EXIT_CODES.get(found[0], EXIT_REFUSED)


def _own_error(error: BaseException) -> tuple[str, str] | None:
    """Return class and text of the last of halog's errors in an executor's traceback; None if it has none."""
    found = _PYTHON_ERROR.findall(str(error))
    return found[-1] if found else None


_EXIT_CODES = {
    "OptionError": EXIT_USAGE,
    "StoreUnreadable": EXIT_UNREADABLE,
    "CorruptLog": EXIT_DAMAGED,
    "ArchiveDamaged": EXIT_DAMAGED,
    "ArchiveConflict": EXIT_UNREACHABLE,
    "StoreLocked": EXIT_UNREACHABLE,
    "ConnectionFailed": EXIT_UNREACHABLE,
    "NameServersUnreachable": EXIT_UNREACHABLE,
    "RequestTimedOut": EXIT_UNREACHABLE,
}
