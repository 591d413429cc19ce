"""Ends a script by KeyboardInterrupt, so that it stops the processes that it started."""

from __future__ import annotations

import signal

EXIT_CODE = 130
"""Of an interrupted script: 128 + SIGINT"""


def interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt at SIGINT, SIGTERM and SIGHUP. Without this a shell's background jobs ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def first_cause(error: BaseException) -> BaseException:
    """Return the first exception inside nested exception groups; `error` itself if it is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _interrupt(_signal: int, _frame: object) -> None:
    signal.raise_signal(signal.SIGINT)  # Trio delivers it only at safe points
