"""Cache of bytes that were recently read from the disk and verified, with read-ahead.

If a read begins where an earlier one ended, or shortly after, more bytes are read than were requested, and the
following reads find them here.

The cache helps a consumer that pulls several queues in turn, whose messages are interleaved in the log. Without it,
each pull from one of four queues would read and verify the messages of all four.
"""

from __future__ import annotations

from collections import deque

AHEAD_BYTES_MAX = 512 << 10
"""Maximum size in bytes to which read-ahead extends a read."""
_AHEAD_BLOCKS = 4
"""Maximum distance in blocks between cached bytes and the start of a read that counts as sequential."""
BYTES_MAX = 16 << 20
"""Size of the cache in bytes: enough for 16 queues that are pulled in turn, 1,024 messages of 1 KiB each time."""


class RecentReads:
    """The cache: holds the bytes of the latest reads, at most `bytes_max`, and looks them up by the block that contains
    an offset. Blocks have `block_size` bytes. Offsets are physical."""

    def __init__(self, block_size: int, bytes_max: int = BYTES_MAX) -> None:
        self._block_size = block_size
        self._bytes_max = bytes_max
        self._size = 0
        self._kept: deque[tuple[int, memoryview]] = deque()
        self._by_block: dict[int, tuple[int, memoryview]] = {}

    def find(self, physical_offset: int) -> memoryview | None:
        """Returns the cached bytes from an offset on, at least one; None if there are none."""
        found = self._by_block.get(physical_offset // self._block_size)
        if found is None:
            return None
        begin, verified = found
        at = physical_offset - begin
        return verified[at:] if 0 <= at < len(verified) else None

    def ahead(self, physical_offset: int) -> int:
        """Returns the minimum number of bytes to read from an offset that is not cached: if it follows cached bytes,
        twice the size of the read that brought them, up to AHEAD_BYTES_MAX; otherwise 0."""
        block = physical_offset // self._block_size
        for before in range(block, block - _AHEAD_BLOCKS - 1, -1):
            found = self._by_block.get(before)
            if found is not None:
                return min(2 * len(found[1]), AHEAD_BYTES_MAX)
        return 0

    def keep(self, begin: int, verified: memoryview) -> None:
        """Adds verified bytes of one segment, which begin at physical offset `begin`. Evicts the oldest reads if the
        cache exceeds `bytes_max`."""
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
        """Drops all cached bytes, because those of the log change."""
        self._kept.clear()
        self._by_block.clear()
        self._size = 0

    def _blocks(self, each: tuple[int, memoryview]) -> range:
        begin, verified = each
        return range(begin // self._block_size, (begin + len(verified) - 1) // self._block_size + 1)
