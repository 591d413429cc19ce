"""Compares the end of a slave's log with the master's bytes before anything is appended.

The protocol carries offsets, but no checksums. A master that lost its tail, or a different master, may grow past a
slave's end; a slave that simply appends then has two histories in one log, as RocketMQ's do. So a halog
slave requests its last bytes again when it connects. Any master, halog or RocketMQ, sends from any offset that is
requested. Logs that differ anywhere before differ here, too, as every record contains its store time and its position
in its queue.
"""

from __future__ import annotations


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


def overlap_start(first_offset: int, end: int, segment_size: int, size_max: int) -> int:
    """Return where to start comparing: at most `size_max` bytes before `end`, in the segment of the last byte.

    Never 0, which as a request means the master's last segment; `end` if there is nothing to compare. `first_offset`:
    the first offset that both sides have, as far as that is known.
    """
    if end <= 0:
        return end
    segment_start = (end - 1) // segment_size * segment_size
    return min(end, max(end - size_max, segment_start, first_offset, 1))
