"""Shared by all benchmarks: processor time and memory from /proc, the cost of a client's run, medians with their
spread, and a description of the machine.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LEFT_FREE_BYTES = 512 * MIB


def family(pid: int) -> list[int]:
    """Returns a process and all its descendants, including children of any thread."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:  # the thread has just ended
                continue
    return found


def cpu_s(pids: Sequence[int]) -> float:
    """Returns the user and system time of these processes and their descendants in seconds, for all threads; of ended
    descendants, only those that were waited for.
    """
    total = 0
    for pid in pids:
        for each in family(pid):
            fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
            total += sum(map(int, fields[11:15]))
    return total / _TICKS_PER_S


def machine_busy_s() -> float:
    """Returns the processor seconds that the whole machine has used."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_PER_S


def memory_mib(pid: int) -> dict[str, float]:
    """Returns the resident MiB of a process and its descendants: `anonymous` are their own pages, `files` pages of
    mapped files, which the kernel can reclaim.
    """
    found: Counter[str] = Counter()
    for each in family(pid):
        for line in Path(f"/proc/{each}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("RssAnon", "RssFile", "RssShmem"):
                found[name] += int(value.split()[0])
    return {"anonymous": found["RssAnon"] / 1024, "files": (found["RssFile"] + found["RssShmem"]) / 1024}


@dataclass
class Cost:
    """What a block of a benchmark used; set when `watched` ends."""

    seconds: float = 0.0
    client_cpu_s: float = 0.0
    server_cpu_s: dict[str, float] = field(default_factory=dict)
    foreign_cores: float = 0.0


@contextmanager
def watched(servers: Mapping[str, int]) -> Iterator[Cost]:
    """Measures what these processes (role: id), this process and its children use in the block, and how many cores
    other programs use. A server that is started in the block may be added to the mapping.
    """
    cost = Cost()
    before = {pid: cpu_s([pid]) for pid in servers.values()}
    busy, own, began = machine_busy_s(), _own_cpu_s(), time.monotonic()
    yield cost
    cost.seconds = time.monotonic() - began
    cost.client_cpu_s = _own_cpu_s() - own
    cost.server_cpu_s = {role: cpu_s([pid]) - before.get(pid, 0.0) for role, pid in servers.items()}
    used = cost.client_cpu_s + sum(cost.server_cpu_s.values())
    cost.foreign_cores = max(0.0, (machine_busy_s() - busy - used) / cost.seconds)


def _own_cpu_s() -> float:
    """Returns the processor seconds of this process and its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read_through(*paths: Path) -> None:
    """Loads these files into the page cache."""
    buffer = bytearray(1 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def hold_memory(ballast: Path) -> None:
    """Fills free memory with pages of a sparse file.

    A virtual machine may return free memory to its host; getting a page back costs a fault in the host, several times
    the cost of filling it. Memory used by the page cache is not returned, and is cheap to reuse.
    """
    ballast.unlink(missing_ok=True)
    free = int(Path("/proc/meminfo").read_text().partition("MemFree:")[2].split()[0]) * 1024
    with ballast.open("wb") as file:
        file.truncate(max(0, free - _LEFT_FREE_BYTES))
    read_through(ballast)


@contextmanager
def alone() -> Iterator[None]:
    """Holds the lock that the peers' benchmarks use, so that only one timed run is active on this machine."""
    path = os.environ.get("BENCH_LOCK") or Path(tempfile.gettempdir()) / "bench.lock"
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def machine() -> dict[str, Any]:
    """Describes the machine."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ":?")
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": cpu.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / MIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "halog": importlib.metadata.version("halog"),
        "trio": importlib.metadata.version("trio"),
        "msgspec": importlib.metadata.version("msgspec"),
    }


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Returns median (minimum-maximum), or the only value."""
    median = f"{statistics.median(values):,.{digits}f}"
    return median if len(values) == 1 else f"{median} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def report(question: str, runs: list[dict[str, Any]], head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints every run as JSON, then a table of medians."""
    for run in runs:
        print(json.dumps(run))
    print(json.dumps({"question": question, "command": " ".join(sys.argv), "machine": machine()}))
    print(f"\n{question}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


@contextmanager
def empty_folder(parent: Path | None) -> Iterator[Path]:
    """Creates a directory for stores and logs in `parent` (default: the temporary directory); deleted at the end."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="halog-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
