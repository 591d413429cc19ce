"""Compares the end of a slave's log with the master's bytes before anything is appended.

The protocol carries offsets, but no checksums. A master that lost its tail, or a different master, may grow past a
slave's end; a slave that simply appends then has two histories in one log, as RocketMQ's do. So a halog
slave requests its last bytes again when it connects. Any master, halog or RocketMQ, sends from any offset that is
requested. Logs that differ anywhere before differ in the head of the last record, too, as it contains the record's
store time and its position in its queue. The end of a record proves less: a producer may have sent the same message
again. The filler at a segment's end proves nothing.
"""

from __future__ import annotations

from struct import Struct

from ha.protocol.record import MAGIC_V1, MAGIC_V2, RECORD_PLACE

HEAD_SIZE = 76
"""Size in bytes of a record's beginning, to the end of the store time, if the born host is an IPv6 address (the longest
case)
"""
SEARCH_BYTES_MAX = 64 << 20
"""Maximum bytes before the log's end in which the head of a record is searched. No record is that large unless
maxMessageSize is"""
_MAGIC = Struct(">i")
_MAGICS = _MAGIC.pack(MAGIC_V1), _MAGIC.pack(MAGIC_V2)
_MAGIC_AT = 4


class Overlap:
    """`held`: the slave's bytes from physical offset `start` to the end. `position`: how far they are compared."""

    __slots__ = ("_held", "early_heartbeat_count", "end", "position", "start")

    def __init__(self, start: int, held: bytes) -> None:
        assert held
        self.start = self.position = start
        self.end = start + len(held)
        self._held = memoryview(held)
        self.early_heartbeat_count = 0

    def feed(self, chunk: memoryview) -> memoryview | None:
        """Compare the master's next bytes. Returns those after `end`; None if the logs differ, at `position`."""
        held = self._held[self.position - self.start :][: len(chunk)]
        received = chunk[: len(held)]
        if held != received:
            self.position += next(i for i, (a, b) in enumerate(zip(held, received, strict=True)) if a != b)
            return None
        self.position += len(held)
        return chunk[len(held) :]

    @property
    def is_compared(self) -> bool:
        """Whether everything was compared and is equal."""
        return self.position == self.end


def has_head(held: bytes, start: int) -> bool:
    """Return whether the head of a record lies within `held`, the bytes from physical offset `start` on."""
    for magic in _MAGICS:
        at = len(held) - HEAD_SIZE + _MAGIC_AT + len(magic)
        while (at := held.rfind(magic, _MAGIC_AT, max(at, 0))) >= 0:
            begin = at - _MAGIC_AT
            if RECORD_PLACE.unpack_from(held, begin)[-1] == start + begin:  # a record states its physical offset
                return True
            at += len(magic) - 1
    return False


def overlap_start(first_offset: int, end: int, segment_size: int, size_max: int) -> int:
    """Return where to start comparing: at most `size_max` bytes before `end`, in the segment of the last record's head.

    Never 0, which as a request means the master's last segment; `end` if there is nothing to compare. `first_offset`:
    the first offset that both sides have, as far as that is known.
    """
    if end <= 0:
        return end
    segment_start = max(end - HEAD_SIZE, 0) // segment_size * segment_size
    return min(end, max(end - size_max, segment_start, first_offset, 1))
