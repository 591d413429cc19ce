"""Keeps a virtual machine from returning free memory to its host: `python -m bench.held_memory`, as root.

Such a machine reports free blocks of 2 MiB and more to its host, which may pause it while it reclaims them: for up to
50 ms if a gibibyte becomes free at once, for example when a store is deleted. This program allocates one page in each
128 KiB of free memory, so that freed blocks are smaller, and allocates any block of 2 MiB that still becomes free.
Everything else remains available.

It prints a line when it is ready, after half a minute, and runs until its input ends. Meanwhile it disables the
kernel's proactive compaction (vm.compaction_proactiveness), which would undo the effect, and restores it at the
end.
"""

from __future__ import annotations

import mmap
import select
import sys
from pathlib import Path

from bench.measure import MIB

_PIECE_BYTES = 128 << 10
_BLOCK_BYTES = 2 * MIB
_BLOCK_COUNT_MAX = 2_500
_LEFT_FREE_BYTES = 150 * MIB
_LOOK_S = 0.02
_MADV_POPULATE_WRITE = 23
_PROACTIVENESS = Path("/proc/sys/vm/compaction_proactiveness")
_ZONES = ("DMA32", "Normal")
_FIRST_ORDER_FIELD = 4
_ORDERS = ((9, 1), (10, 2))
"""The last orders of /proc/buddyinfo, and how many blocks of 2 MiB an entry of each contains."""


def _free_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().partition("MemFree:")[2].split()[0]) * 1024


def free_block_count(buddyinfo: str) -> int:
    """Returns the number of free blocks of 2 MiB in the text of /proc/buddyinfo."""
    zones = [words for line in buddyinfo.splitlines() if (words := line.split())[3] in _ZONES]
    return sum(int(words[_FIRST_ORDER_FIELD + order]) * blocks for words in zones for order, blocks in _ORDERS)


def _filled(size: int, advice: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    memory.madvise(_MADV_POPULATE_WRITE)
    return memory


def _scattered() -> mmap.mmap:
    """Returns one page of each piece of free memory."""
    size = max(0, _free_bytes() - _LEFT_FREE_BYTES) // _PIECE_BYTES * _PIECE_BYTES
    memory = _filled(size, mmap.MADV_NOHUGEPAGE)
    for at in range(0, size, _PIECE_BYTES):
        memory.madvise(mmap.MADV_DONTNEED, at + mmap.PAGESIZE, _PIECE_BYTES - mmap.PAGESIZE)
    return memory


def main() -> None:
    before = _PROACTIVENESS.read_text()
    _PROACTIVENESS.write_text("0")
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        held = [_scattered()]
        block_count = 0
        print("holding", flush=True)
        while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            count = free_block_count(Path("/proc/buddyinfo").read_text())
            if 0 < count <= _BLOCK_COUNT_MAX - block_count:
                held.append(_filled(count * _BLOCK_BYTES, mmap.MADV_HUGEPAGE))
                block_count += count
    finally:
        _PROACTIVENESS.write_text(before)


if __name__ == "__main__":
    main()
