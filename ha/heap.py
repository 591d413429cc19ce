"""Keeps freed memory in the process for reuse."""

from __future__ import annotations

from functools import cache

_BLOCK_BYTES = 16 << 20


@cache
def keep_heap() -> None:
    """Makes the process keep up to 32 MiB of freed memory and reuse it; has an effect once.

    For workloads with large repeated allocations. glibc maps each block of 128 KiB or more separately and returns free
    memory at the end of the heap to the kernel; it raises both limits only when such a block is freed. Until then every
    allocation gets new pages, which can take longer than the work done in them. Freeing one large block makes glibc
    keep twice its size; the block is untouched and costs nothing. MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ in
    the environment take precedence. Source: mallopt(3).
    """
    bytes(_BLOCK_BYTES)
