"""Writes log lines in a thread, so that logging never waits for a file system or for the reader of a pipe.

A write to a file on a disk that is busy deleting a segment took 12 to 68 ms, during which it would block the event
loop; a pipe that is not read would block the event loop forever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from queue import SimpleQueue

logger = logging.getLogger(__name__)

LINE_COUNT_MAX = 10_000
"""Maximum number of lines that wait to be written; further lines are dropped, and their number is logged."""


class LogLines:
    """A stream for logging.StreamHandler: `write` queues whole lines, and a thread writes them to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._dropped_count = 0  # counted under logging's lock; the thread keeps the number that it has logged
        self._thread = threading.Thread(target=self._run, name="log lines", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queues a line, or drops it if LINE_COUNT_MAX lines are waiting. Never waits."""
        # The thread's own lines are always queued: they only report how many lines were dropped.
        if self._queue.qsize() < LINE_COUNT_MAX or threading.current_thread() is self._thread:
            self._queue.put(line)
        else:
            self._dropped_count += 1

    def flush(self) -> None:
        """Does nothing: logging calls it after each line."""

    def drain(self, timeout_s: float) -> None:
        """Waits until the lines queued so far are written, for at most `timeout_s` seconds."""
        written = threading.Event()
        self._queue.put(written)
        written.wait(timeout_s)

    def _run(self) -> None:
        reported_count = 0
        while True:
            waiting = self._queue.get()
            if isinstance(waiting, threading.Event):
                waiting.set()
                continue
            dropped_count = self._dropped_count
            if dropped_count > reported_count:
                count, reported_count = dropped_count - reported_count, dropped_count
                logger.warning("process.log_lines_dropped count=%d reason=%r", count, "stderr is not read fast enough")
            raw = memoryview(waiting.encode(errors="backslashreplace"))
            with contextlib.suppress(OSError):  # the pipe is closed, or its disk is full
                # Not through sys.stderr, whose lock a blocked thread would hold until the process ends.
                while raw:
                    try:
                        raw = raw[os.write(self._descriptor, raw) :]
                    except BlockingIOError:  # another process that shares the pipe has made it non-blocking
                        select.select([], [self._descriptor], [])
