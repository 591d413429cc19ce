"""Handles standard streams that are closed, and standard output whose reader is gone, as in `ha … | head`.

A command that reports a result continues without output, and ends with its usual exit code. Commands that print
messages or records end when their output is no longer read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def open_missing_streams() -> None:
    """Opens /dev/null as standard input, output or error if the process was started without it (`<&-`, `>&-`)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


@contextmanager
def unread_output_dropped() -> Iterator[None]:
    """Ends the block, and discards all further standard output, if a write finds that the reader is gone."""
    try:
        yield
    except BrokenPipeError:
        drop_output(sys.stdout.fileno())


def drop_output(descriptor: int) -> None:
    """Discards further output to a descriptor, including what Python has buffered for it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
