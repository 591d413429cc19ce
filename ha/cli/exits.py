"""Exit codes, and the error for an invalid command line."""

from __future__ import annotations

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
    """The command line is invalid; the message says what is accepted."""
