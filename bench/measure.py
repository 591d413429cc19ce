"""What the benchmarks share: processor time and memory from /proc, medians with their spread, what the machine is."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Sequence[int]) -> float:
    """Processor seconds, user and system, that these processes have used; all of their threads."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


def machine_busy_s() -> float:
    """Processor seconds that the whole machine has used, by anybody."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_PER_S


def memory_mib(pid: int) -> dict[str, float]:
    """Resident MiB: `anonymous` is the process's own, `files` are pages of mapped files, which the kernel takes back
    at need."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile", "RssShmem"):
            found[name] = int(value.split()[0]) / 1024
    return {"anonymous": found["RssAnon"], "files": found["RssFile"] + found["RssShmem"]}


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
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
    """median (least-greatest)"""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


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
    """A folder for stores and logs, below `parent` (default: the temporary directory), removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="halog-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
