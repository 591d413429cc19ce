"""What was read from the disk and verified of late, for reads of bytes that lie between or next to them.

Who comes back for what follows gets more read at once than was asked for, and finds it here the next time.

A consumer asks one queue after the other, and their messages lie in the log side by side: of four queues in turns each
read would fetch, and compare with its checksums, the bytes of all four.
"""

from __future__ import annotations

from collections import deque

AHEAD_BYTES_MAX = 512 << 10
"""So much at most is read at once because it is likely to be asked for next"""
_AHEAD_BLOCKS = 4
"""A read so many blocks behind what is kept goes on from there"""
BYTES_MAX = 16 << 20
"""At most so much is kept: what 16 queues in turns need with messages of 1 KiB, 1,024 a time."""


class RecentReads:
    """The latest `bytes_max` bytes that were read, by the blocks in which they begin. Offsets are physical."""

    def __init__(self, block_size: int, bytes_max: int = BYTES_MAX) -> None:
        self._block_size = block_size
        self._bytes_max = bytes_max
        self._size = 0
        self._kept: deque[tuple[int, memoryview]] = deque()
        self._by_block: dict[int, tuple[int, memoryview]] = {}

    def find(self, physical_offset: int) -> memoryview | None:
        """What is kept from an offset on, at least one byte; None if nothing is."""
        found = self._by_block.get(physical_offset // self._block_size)
        if found is None:
            return None
        begin, verified = found
        at = physical_offset - begin
        return verified[at:] if 0 <= at < len(verified) else None

    def ahead(self, physical_offset: int) -> int:
        """How many bytes are worth reading from an offset of which nothing is kept: twice as many as the last time if
        what is before it was read lately, else 0."""
        block = physical_offset // self._block_size
        for before in range(block, block - _AHEAD_BLOCKS - 1, -1):
            found = self._by_block.get(before)
            if found is not None:
                return min(2 * len(found[1]), AHEAD_BYTES_MAX)
        return 0

    def keep(self, begin: int, verified: memoryview) -> None:
        """Keep bytes of one segment that were found to be right, and drop the oldest of what is too much."""
        each = begin, verified
        self._kept.append(each)
        self._size += len(verified)
        for block in self._blocks(each):
            self._by_block[block] = each
        while self._size > self._bytes_max:
            oldest = self._kept.popleft()
            self._size -= len(oldest[1])
            for block in self._blocks(oldest):
                if self._by_block.get(block) is oldest:
                    del self._by_block[block]

    def clear(self) -> None:
        """Forget all: what is there may not be what the log holds now."""
        self._kept.clear()
        self._by_block.clear()
        self._size = 0

    def _blocks(self, each: tuple[int, memoryview]) -> range:
        begin, verified = each
        return range(begin // self._block_size, (begin + len(verified) - 1) // self._block_size + 1)
