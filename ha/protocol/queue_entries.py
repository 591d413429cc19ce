"""How far the begin of a piece of a consume queue's file holds entries, as a start finds them."""

from __future__ import annotations

from ha.protocol.compiled import with_compiled_twin
from ha.protocol.store_files import ENTRY

BLANK_SIZE = 0x7FFFFFFF
"""Record size in entries that only fill the room before a queue's first message (RocketMQ: fillPreBlank)."""


@with_compiled_twin
def count_entries(raw: bytes, last_end: int) -> tuple[int, int, bool]:
    """Return how many entries `raw` begins with, where the last record that they know ends, and whether they end there.

    `raw` are whole entries; `last_end` (bytes, not negative) is where the record before them ends. What follows the
    entries is none (no size, or a negative offset): the end of the queue. Or, False, it points back, to before the end
    of what comes before it: that is damage.
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
