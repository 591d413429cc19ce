"""What is known of the half messages of RMQ_SYS_TRANS_HALF_TOPIC: which are ended, and how far all of them are.

An op message in RMQ_SYS_TRANS_OP_HALF_TOPIC, tag d, says which half messages are ended, by their queue offsets: 5.x
writes several of them, each followed by a comma, 4.9 a single bare one. A half message that is to live on, because it
was asked about or must not be yet, is stored anew at the end of its queue; whoever ends it by an offset that it had
earlier ends it all the same. Source: TransactionalMessageServiceImpl, TransactionalMessageUtil.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

OP_TAG = "d"
WINDOW_COUNT_MAX = 4 * 1024 * 1024
"""So many half messages, from the first open one on, are known to be ended or not; a byte for each."""
MOVED_COUNT_MAX = 65_536
"""Of so many half messages that were stored anew it is known where they are now."""
READ_COUNT_MAX = 4096
"""So many stretches of the op queue are told apart that half messages still wait for."""
MARK_COUNT_MAX = 64

_OFFSET_DIGITS_MAX = 19


def encode_op(offsets: Iterable[int]) -> bytes:
    """The body of an op message for half messages at `offsets`, in the form of 5.x."""
    return "".join(f"{offset}," for offset in offsets).encode()


def decode_op(body: bytes) -> list[int]:
    """The queue offsets in the body of an op message, of 4.9 or 5.x. ValueError if it is none."""
    offsets = []
    for part in body.split(b","):
        if part:
            if len(part) > _OFFSET_DIGITS_MAX or not part.isdigit():
                raise ValueError(f"an op message says {part[:40]!r}")
            offsets.append(int(part))
    return offsets


class HalfWindow:
    """Which half messages at `start` (a queue offset) and after are ended. All before it are ended or live on later."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._ended = bytearray()
        self._moved: dict[int, int] = {}

    def end(self, offset: int) -> list[int]:
        """The half message at `offset` is ended, and so is its later self; returns the offsets that it had, in order.

        Empty if it is too far ahead to be remembered.
        """
        had = []
        at: int | None = offset
        while at is not None:
            if at - self.start >= WINDOW_COUNT_MAX:
                return []
            self._mark(at)
            had.append(at)
            at = self._moved.pop(at, None)
        return had

    def move(self, offset: int, to: int) -> list[int]:
        """The half message at `offset` lives on at `to`; if it was ended meanwhile, so is that: see `end`."""
        was_ended = self.is_ended(offset)
        self._mark(offset)
        if was_ended:
            return self.end(to)
        if len(self._moved) >= MOVED_COUNT_MAX:
            del self._moved[next(iter(self._moved))]
        self._moved[offset] = to
        return []

    def _mark(self, offset: int) -> None:
        at = offset - self.start
        if at >= 0:
            if at >= len(self._ended):
                self._ended.extend(bytes(at + 1 - len(self._ended)))
            self._ended[at] = 1

    def is_ended(self, offset: int) -> bool:
        """Whether nothing more is to be done about the half message at `offset`."""
        at = offset - self.start
        return at < 0 or (at < len(self._ended) and self._ended[at] == 1)

    def next_open(self, offset: int) -> int:
        """The first offset at or after `offset` that is not known to be ended."""
        at = max(0, offset - self.start)
        found = self._ended.find(0, at)
        return self.start + (found if found >= 0 else max(at, len(self._ended)))

    def next_ended(self, offset: int, limit: int) -> int:
        """The first offset at or after `offset` that is known to be ended; `limit` if none is before it."""
        found = self._ended.find(1, max(0, offset - self.start), max(0, limit - self.start))
        return self.start + found if found >= 0 else limit

    def open_count(self, end: int) -> int:
        """How many half messages before `end` are not known to be ended."""
        return max(0, end - self.start - self._ended.count(1, 0, max(0, end - self.start)))

    def advance(self) -> None:
        """Let it start at the first half message that is not ended."""
        self.advance_to(self.next_open(self.start))

    def advance_to(self, offset: int) -> None:
        """Let it start at `offset`, which is not before its start."""
        del self._ended[: offset - self.start]
        self.start = offset


class OpReads:
    """How far the op queue has been read, and from where on a later process has to read it again."""

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset
        self._reads: deque[tuple[int, int]] = deque()
        """First op of what was read, and the last half message that it speaks of"""

    def note(self, next_offset: int, last_half: int) -> None:
        """What is before `next_offset` has been read; half messages up to `last_half` are in what was new of it."""
        self._reads.append((self.next_offset, last_half))
        self.next_offset = next_offset
        if len(self._reads) > READ_COUNT_MAX:  # tell every two of them no longer apart
            reads = list(self._reads)
            self._reads = deque(
                (first, max(half for _, half in reads[at : at + 2]))
                for at, (first, _) in enumerate(reads)
                if at % 2 == 0
            )

    def needed_from(self, half_start: int) -> int:
        """The first op that may be about half messages at or after `half_start`."""
        reads = self._reads
        while reads and reads[0][1] < half_start:
            reads.popleft()
        return reads[0][0] if reads else self.next_offset


class Progress(msgspec.Struct, frozen=True, gc=False):
    """How far both queues are done with, as queue offsets, when the log ended at `log_end` (bytes)."""

    log_end: int
    half_offset: int
    op_offset: int


class ProgressMarks:
    """States of progress that are not safe yet: what they rest on is in the log, but might be lost with its end."""

    def __init__(self) -> None:
        self._marks: list[Progress] = []
        self._last: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self._marks)

    def note(self, progress: Progress) -> None:
        """Remember `progress` if it is another one."""
        offsets = progress.half_offset, progress.op_offset
        if offsets != self._last:
            self._last = offsets
            self._marks.append(progress)
            if len(self._marks) > MARK_COUNT_MAX:
                del self._marks[1]

    def take(self, log_offset: int) -> Progress | None:
        """The newest progress that is safe with the log before `log_offset` (bytes), if there is one."""
        found = None
        while self._marks and self._marks[0].log_end <= log_offset:
            found = self._marks.pop(0)
        return found
