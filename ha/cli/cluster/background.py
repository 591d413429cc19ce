"""Moves a command to the background once it is ready, so that its caller has to wait only until then."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from ha.cli.exits import EXIT_DONE, EXIT_REFUSED


class Background:
    """The process that `detach` moves to the background. Until then, it writes to the output of its parent."""

    def __init__(self, ready: int, log_file: Path) -> None:
        self._ready = ready
        self._log_file = log_file

    def detach(self) -> None:
        """Ends the process in the foreground with EXIT_DONE. From now on, output goes to the log."""
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        with suppress(BrokenPipeError):  # the process in the foreground was killed
            os.write(self._ready, b"!")
        os.close(self._ready)


def fork_to_background(log_file: Path) -> Background | int:
    """Forks. Returns a Background in the child; in the parent, waits until the child detaches or ends.

    The parent gets an exit code: EXIT_DONE once the child has detached, otherwise the child's, or EXIT_REFUSED if a
    signal ended it. Ctrl-C or SIGTERM to the parent stops the child with SIGTERM, and raises KeyboardInterrupt when it
    has ended. Must be called before threads start.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    readable, writable = os.pipe()

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    # Blocked until this process waits: Python drops exceptions that a signal raises in the fork hooks of other modules.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGTERM, before)
        os.close(readable)
        os.setsid()  # signals of the terminal don't reach it
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return Background(writable, log_file)
    os.close(writable)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        if os.read(readable, 1):
            return EXIT_DONE
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return code if code >= 0 else EXIT_REFUSED
    except KeyboardInterrupt:
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(readable)
