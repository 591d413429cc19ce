"""Samples memory and CPU time of a process tree from /proc, by each process's role in Spark."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1 << 20


@dataclass
class Peaks:
    """Peak memory in MiB, and CPU time.

    "Own" is anonymous memory; the rest of a resident set is file pages, mostly mapped log segments, which the kernel
    reclaims when needed.
    """

    executor_jvm: float = 0.0
    python_worker: float = 0.0
    """Own memory of the largest worker"""
    python_worker_resident: float = 0.0
    """Including mapped files"""
    executor: float = 0.0
    """A JVM's resident set plus its Python workers' own memory at the same time"""
    driver_jvm: float = 0.0
    driver_python: float = 0.0
    cpu_s: float = 0.0
    """Total CPU time of all processes, in seconds"""


@dataclass
class _Seen:
    parent: int
    role: str
    own: float
    resident: float
    cpu_s: float


@dataclass
class Watch:
    """Samples the process tree below `root` until closed; `peaks` holds the peaks since the last `restart`."""

    root: int
    interval_s: float = 0.25
    peaks: Peaks = field(default_factory=Peaks)
    _cpu: dict[int, float] = field(default_factory=dict)
    _cpu_before: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """Resets the peaks and the CPU time."""
        with self._lock:
            self.peaks = Peaks()
            self._cpu_before = dict(self._cpu)

    def close(self) -> None:
        """Stops sampling."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            seen = _tree(self.root)
            with self._lock:
                self._take(seen)

    def _take(self, seen: dict[int, _Seen]) -> None:
        peaks = self.peaks
        executors: dict[int, float] = {}
        for pid, found in seen.items():
            self._cpu[pid] = max(self._cpu.get(pid, 0.0), found.cpu_s)
            if found.role == "executor":
                peaks.executor_jvm = max(peaks.executor_jvm, found.resident)
                executors[pid] = executors.get(pid, 0.0) + found.resident
            elif found.role == "driver":
                peaks.driver_jvm = max(peaks.driver_jvm, found.resident)
            elif pid == self.root:
                peaks.driver_python = max(peaks.driver_python, found.own)
            elif found.role == "python":
                peaks.python_worker = max(peaks.python_worker, found.own)
                peaks.python_worker_resident = max(peaks.python_worker_resident, found.resident)
                owner = _executor_above(seen, pid)
                if owner is not None:
                    executors[owner] = executors.get(owner, 0.0) + found.own
        peaks.executor = max([peaks.executor, *executors.values()])
        peaks.cpu_s = sum(cpu - self._cpu_before.get(pid, 0.0) for pid, cpu in self._cpu.items())


def _executor_above(seen: dict[int, _Seen], pid: int) -> int | None:
    while pid in seen:
        if seen[pid].role == "executor":
            return pid
        pid = seen[pid].parent
    return None


def _tree(root: int) -> dict[int, _Seen]:
    everything = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            found = _look(int(entry.name))
            if found is not None:
                everything[int(entry.name)] = found
    mine = {root}
    grew = True
    while grew:
        new = {pid for pid, found in everything.items() if found.parent in mine} - mine
        grew = bool(new)
        mine |= new
    return {pid: everything[pid] for pid in mine if pid in everything}


def _look(pid: int) -> _Seen | None:
    folder = Path("/proc", str(pid))
    try:
        after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
        command = (folder / "cmdline").read_bytes()
    except OSError:
        return None  # the process has ended
    role = "other"
    if b"CoarseGrainedExecutorBackend" in command:
        role = "executor"
    elif b"org.apache.spark" in command:
        role = "driver"
    elif b"python" in command.split(b"\0", 1)[0]:
        role = "python"
    return _Seen(
        parent=int(after_name[1]),
        role=role,
        own=(resident - shared) * _PAGE / _MIB,
        resident=resident * _PAGE / _MIB,
        cpu_s=(int(after_name[11]) + int(after_name[12])) / _TICKS,
    )
