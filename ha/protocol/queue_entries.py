"""Counts the valid entries at the start of a part of a consume-queue file, for recovery."""

from __future__ import annotations

from ha.protocol.compiled import with_compiled_twin
from ha.protocol.store_files import BLANK_SIZE, ENTRY


@with_compiled_twin
def count_entries(raw: bytes, last_end: int) -> tuple[int, int, bool]:
    """Returns the number of valid entries at the start of `raw`, the physical offset at which the last of their records
    ends (`last_end` if they have none), and whether the queue may end after them.

    `raw` holds whole entries; `last_end` is the physical offset at which the preceding record ends (at least 0). The
    queue may end if `raw` ends, or if the next 20 bytes are not an entry (size 0 or less, or a negative offset). It may
    not if the next entry points to an offset before the end of the last record, which is damage.
    """
    count = 0
    for physical_offset, size, _ in ENTRY.iter_unpack(raw):
        if physical_offset < 0 or size <= 0:
            break
        if size != BLANK_SIZE:
            if physical_offset < last_end:
                return count, last_end, False
            last_end = physical_offset + size
        count += 1
    return count, last_end, True
