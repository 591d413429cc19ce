"""Resources of a process from /proc: private memory, descriptors by kind."""

import os
from pathlib import Path
from typing import NamedTuple


class Footprint(NamedTuple):
    """`own_bytes`: resident pages that belong to no file (a mapped log is the kernel's to take back)."""

    own_bytes: int
    descriptor_count: int
    """All but those of files below `store`, whose number follows the log"""
    socket_count: int


def footprint(pid: int, store: Path) -> Footprint:
    """Measure a process whose store is at `store`."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:")]
    others = sockets = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # closed meanwhile
        sockets += target.startswith("socket:")
        others += not target.startswith(str(store))
    return Footprint(int(line.split()[1]) * 1024, others, sockets)
