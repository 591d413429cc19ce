"""Resources of a process from /proc: private memory, CPU time, descriptors by kind."""

import os
from pathlib import Path
from typing import NamedTuple


class Footprint(NamedTuple):
    """`own_bytes`: resident pages that belong to no file (a mapped log is the kernel's to take back)."""

    own_bytes: int
    descriptor_count: int
    """All but those of files below `store`, whose number follows the log"""
    socket_count: int


def own_bytes(pid: int | str) -> int:
    """Memory of a process but for the files that it has mapped, such as the log that it writes."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def footprint(pid: int, store: Path) -> Footprint:
    """Measure a process whose store is at `store`."""
    others = sockets = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # closed meanwhile
        sockets += target.startswith("socket:")
        others += not target.startswith(str(store))
    return Footprint(own_bytes(pid), others, sockets)
