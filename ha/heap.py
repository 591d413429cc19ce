"""Keeps freed memory in the process for reuse."""

from __future__ import annotations

from functools import cache

_BLOCK_BYTES = 16 << 20


@cache
def keep_heap() -> None:
    """Makes the process keep up to 32 MiB of freed memory and reuse it. Only the first call has an effect.

    For workloads with large repeated allocations. By default glibc maps each block of 128 KiB or more separately, and
    returns free memory of 128 KiB or more at the end of the heap to the kernel, so each large allocation gets new
    pages, which can take longer than the work done in them. When a separately mapped block is freed, glibc raises the
    first threshold to its size and the second to twice its size. This function allocates and frees one block of 16 MiB,
    which is never written and so takes no memory. MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ in the environment
    take precedence. Source: mallopt(3).
    """
    bytes(_BLOCK_BYTES)
