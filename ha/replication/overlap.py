"""The end of a slave's log, compared with the master's bytes before anything is appended behind it.

The protocol carries offsets and no checksum. A master that lost its tail, or another master altogether, may grow past
a slave's end, and a slave that just appends what comes from there has two histories in one log from then on (RocketMQ
does that). So a halog slave asks for its last bytes once more at the begin of every connection. A master, halog's or
RocketMQ's, sends from wherever it is asked to; nothing about it needs to be known. Logs that parted anywhere before
differ here as well, since every record says its store time and its place in its queue.
"""

from __future__ import annotations


class Overlap:
    """`held`: what the slave holds from physical offset `start` on, up to its end. `position`: compared up to here."""

    __slots__ = ("_held", "early_heartbeat_count", "end", "position", "start")

    def __init__(self, start: int, held: bytes) -> None:
        assert held
        self.start = self.position = start
        self.end = start + len(held)
        self._held = memoryview(held)
        self.early_heartbeat_count = 0

    def feed(self, chunk: memoryview) -> memoryview | None:
        """Compare the master's next bytes. Returns what lies behind `end`; None if the logs differ, at `position`."""
        held = self._held[self.position - self.start :][: len(chunk)]
        received = chunk[: len(held)]
        if held != received:
            self.position += next(i for i, (a, b) in enumerate(zip(held, received, strict=True)) if a != b)
            return None
        self.position += len(held)
        return chunk[len(held) :]

    @property
    def is_compared(self) -> bool:
        """Whether all of it was compared and found equal."""
        return self.position == self.end


def overlap_start(first_offset: int, end: int, segment_size: int, size_max: int) -> int:
    """Return from where to compare: at most `size_max` bytes before `end`, in the segment that the last byte is in.

    Never 0, which as a request means the master's last segment; `end` if there is nothing to compare. `first_offset`
    is the first that both sides hold, as far as that is known.
    """
    if end <= 0:
        return end
    segment_start = (end - 1) // segment_size * segment_size
    return min(end, max(end - size_max, segment_start, first_offset, 1))
