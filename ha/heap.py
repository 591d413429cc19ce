"""What the process does with memory that it frees."""

from __future__ import annotations

from functools import cache

_BLOCK_BYTES = 16 << 20


@cache
def keep_heap() -> None:
    """Have the process keep up to 32 MiB that it frees, and use them again; once.

    For who makes and drops much again and again. glibc has a block of 128 KiB or more mapped for each use, gives the
    kernel what is free at the heap's end, and raises both limits only by what it sees freed: every page is made anew
    for what comes next, which can take longer than what is done in it. It keeps twice the size of the largest such
    block; an untouched one costs nothing. MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ in the environment go
    before it. Source: mallopt(3).
    """
    bytes(_BLOCK_BYTES)
