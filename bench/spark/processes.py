"""Measures the processor time of a process and all its descendants, including ended ones that were never waited for.

Spark's Python daemon ignores SIGCHLD, so /proc never adds a dead worker's time to its parent. A thread samples every
`interval_s` and stores the last figure of each process; time used between the last sample and the end is lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessTree:
    """The processes in the trees of `roots`; a context manager that samples while it is open."""

    def __init__(self, roots: Iterable[int], *, interval_s: float = 0.2) -> None:
        self._roots = set(roots)
        self._interval_s = interval_s
        self._used: dict[tuple[int, int], float] = {}  # (pid, start in ticks) -> seconds
        self._mutex = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, daemon=True)

    def __enter__(self) -> ProcessTree:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def cpu_s(self) -> float:
        """Returns the user and system seconds that all of them have used since they started."""
        return self._look()

    def _keep_looking(self) -> None:
        while not self._done.wait(self._interval_s):
            self._look()

    def _look(self) -> float:
        parents: dict[int, int] = {}
        seen: dict[int, tuple[int, float]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # just ended
                continue
            pid = int(entry.name)
            parents[pid] = int(fields[1])
            seen[pid] = (int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
        members = set(self._roots & seen.keys())
        grown = True
        while grown:
            below = {pid for pid, parent in parents.items() if parent in members}
            grown = not below <= members
            members |= below
        with self._mutex:
            for pid in members:
                started, used = seen[pid]
                self._used[pid, started] = used
            return sum(self._used.values())
