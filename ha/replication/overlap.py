"""Compares the end of a slave's log with the master's bytes before anything is appended.

The protocol carries physical offsets, but no checksums. A master that lost its tail, or a different master, may grow
past a slave's end; a slave that simply appends then has two histories in one log, as RocketMQ's do. So a halog slave
requests its last bytes again when it connects. Any master, halog or RocketMQ, sends from any physical offset that is
requested. Logs that differ at an earlier offset also differ in the head of the last record, which contains the record's
store time and its position in its queue. The end of a record proves less: a producer may have sent the same message
again. The filler at a segment's end proves nothing.

A power loss may leave a torn record at the end of a slave's log: the first part of its head was flushed, and later
sectors of it reached the disk, but not the rest of the sector that contains the first part. Only bodies have a
checksum, so recovery takes the record for an intact one. The comparison shows that it is torn: wherever the logs
differ, the bytes here are zeros from there to the end of the sector.
"""

from __future__ import annotations

from struct import Struct

import trio

from ha.protocol.record import MAGIC_V1, MAGIC_V2, RECORD_PLACE

HEAD_SIZE = 76
"""Size in bytes of a record's head, which ends with the store time, if the born host is an IPv6 address (the longest
case)
"""
SEARCH_BYTES_MAX = 64 << 20
"""Maximum number of bytes before the log's end that are searched for the head of a record. No record is larger, unless
maxMessageSize is"""
SEARCH_STEP_BYTES = 64 << 10
"""Bytes that are searched before other tasks run"""
SECTOR_SIZE = 512
"""Size in bytes of a sector, which a disk writes as a whole or not at all"""
_MAGIC = Struct(">i")
_MAGICS = _MAGIC.pack(MAGIC_V1), _MAGIC.pack(MAGIC_V2)
_MAGIC_AT = 4


class Overlap:
    """Compares the end of a slave's log with the master's bytes. `held`: the slave's bytes from physical offset `start`
    to the log's end. `position`: physical offset up to which they are compared. `torn_at`: once `is_compared`, physical
    offset from which the rest of a sector is missing here; None if no sector is incomplete. `early_heartbeat_count`:
    number of heartbeats that came before the comparison ended, counted by SlaveProtocol."""

    __slots__ = ("_held", "_torn_to", "early_heartbeat_count", "end", "position", "start", "torn_at")

    def __init__(self, start: int, held: bytes) -> None:
        assert held
        self.start = self.position = start
        self.end = start + len(held)
        self._held = memoryview(held)
        self.early_heartbeat_count = 0
        self.torn_at: int | None = None
        self._torn_to = start

    def feed(self, chunk: memoryview) -> memoryview | None:
        """Compares the master's next bytes. Returns those after `end`, which may be none; None if the logs differ, at
        `position`."""
        while chunk and not self.is_compared:
            is_torn = self.position < self._torn_to
            held = self._held[self.position - self.start : (self._torn_to if is_torn else self.end) - self.start]
            held, received = held[: len(chunk)], chunk[: len(held)]
            if is_torn or held == received:
                passed = len(held)
            else:
                passed = next(i for i, (a, b) in enumerate(zip(held, received, strict=True)) if a != b)
            self.position += passed
            chunk = chunk[passed:]
            if passed < len(held) and not self._skip_torn():
                return None
        return chunk

    def _skip_torn(self) -> bool:
        """Skips the bytes from `position` to the end of its sector, as torn. Returns False if the bytes here are not
        all zeros, so that the logs differ."""
        self._torn_to = min((self.position // SECTOR_SIZE + 1) * SECTOR_SIZE, self.end)
        if self.torn_at is None:
            self.torn_at = self.position
        return not any(self._held[self.position - self.start : self._torn_to - self.start])

    @property
    def is_compared(self) -> bool:
        """Whether all bytes were compared, and are equal except in torn sectors."""
        return self.position == self.end


def has_head(held: bytes, start: int) -> bool:
    """Returns whether the head of a record lies within `held`, the bytes from physical offset `start` on."""
    for magic in _MAGICS:
        at = len(held) - HEAD_SIZE + _MAGIC_AT + len(magic)
        while (at := held.rfind(magic, _MAGIC_AT, max(at, 0))) >= 0:
            begin = at - _MAGIC_AT
            if RECORD_PLACE.unpack_from(held, begin)[-1] == start + begin:  # a record states its physical offset
                return True
            at += len(magic) - 1
    return False


async def find_head(held: bytes, start: int) -> bool:
    """Like `has_head`, but lets other tasks run meanwhile: a message may be full of magic codes."""
    last = len(held) - HEAD_SIZE
    for begin in range(last // SEARCH_STEP_BYTES * SEARCH_STEP_BYTES, -1, -SEARCH_STEP_BYTES):
        if has_head(held[begin : begin + SEARCH_STEP_BYTES + HEAD_SIZE - 1], start + begin):
            return True
        await trio.lowlevel.checkpoint()
    return False


def overlap_start(first_offset: int, end: int, segment_size: int, size_max: int) -> int:
    """Returns the physical offset at which to start comparing: at most `size_max` bytes before `end`, in the segment of
    the last record's head.

    `end` if there is nothing to compare; otherwise never 0, which as a request means the master's last segment.
    `first_offset`: the first offset that both sides have, as far as that is known.
    """
    if end <= 0:
        return end
    segment_start = max(end - HEAD_SIZE, 0) // segment_size * segment_size
    return min(end, max(end - size_max, segment_start, first_offset, 1))
