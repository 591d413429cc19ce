"""Exit codes, which docs/cli.md explains, and the error for an invalid command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_DONE = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_STORED_WEAKLY = 3
EXIT_NOT_READY = 4
EXIT_DAMAGED = 65
EXIT_UNREADABLE = 66
EXIT_UNREACHABLE = 69
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class UsageError(Exception):
    """The command can't be carried out as given; the message says why, or what is accepted."""


@contextmanager
def needs_extra(command: str, extra: str) -> Iterator[None]:
    """Turns the ModuleNotFoundError of an import in the block into a UsageError that names the missing extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"{command} needs {error.name}: pip install 'halog[{extra}]'") from None
