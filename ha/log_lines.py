"""Log lines that a thread writes: who logs waits neither for a file system nor for whoever reads a pipe.

A file on a disk that is busy deleting a segment took 12 to 68 ms for a line, and the event loop with it; a pipe that
nobody reads would stop it for good.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from queue import SimpleQueue

logger = logging.getLogger(__name__)

LINE_COUNT_MAX = 10_000
"""So many wait at most; what comes then is counted, and the count logged."""


class LogLines:
    """A stream for logging.StreamHandler: `write` takes whole lines, a thread writes them to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._lost_count = 0  # counted by who logs, under logging's lock; the thread knows what it has told
        self._thread = threading.Thread(target=self._run, name="log lines", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Have a line written. Never waits."""
        # What the thread itself logs is how many were lost.
        if self._waiting.qsize() < LINE_COUNT_MAX or threading.current_thread() is self._thread:
            self._waiting.put(line)
        else:
            self._lost_count += 1

    def flush(self) -> None:
        """Do nothing: called by logging after each line."""

    def drain(self, timeout_s: float) -> None:
        """Wait until what was logged before is written, but no longer than that."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(timeout_s)

    def _run(self) -> None:
        told_count = 0
        while True:
            waiting = self._waiting.get()
            if isinstance(waiting, threading.Event):
                waiting.set()
                continue
            lost_count = self._lost_count
            if lost_count > told_count:
                count, told_count = lost_count - told_count, lost_count
                logger.warning("process.log_lines_dropped count=%d reason=%r", count, "stderr is not read fast enough")
            raw = memoryview(waiting.encode(errors="backslashreplace"))
            with contextlib.suppress(OSError):  # nobody is there to read it, or its disk is full
                # Not through sys.stderr, whose lock a thread that waits here would hold to the end of the process.
                while raw:
                    raw = raw[os.write(self._descriptor, raw) :]
