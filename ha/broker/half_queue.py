"""State of half messages in RMQ_SYS_TRANS_HALF_TOPIC: which are ended, and the queue offset before which all are ended.

An op message in RMQ_SYS_TRANS_OP_HALF_TOPIC, tag d, lists ended half messages by queue offset: RocketMQ 5.x writes
several offsets, each followed by a comma; 4.9 writes a single one without a comma. A half message that stays open after
a check is stored again at the end of its queue; ending it by an earlier offset ends its latest copy. Sources:
TransactionalMessageServiceImpl, TransactionalMessageUtil.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

OP_TAG = "d"
WINDOW_COUNT_MAX = 4 * 1024 * 1024
"""Maximum number of half messages, from the first open one on, whose state is kept; each takes a byte."""
MOVED_COUNT_MAX = 65_536
"""Maximum number of half messages that were stored again and whose new queue offset is kept."""
READ_COUNT_MAX = 4096
"""Maximum number of ranges of the op queue that are kept, each with the last half message that it ends; with more,
neighbouring ranges are merged in pairs."""
MARK_COUNT_MAX = 64
"""Maximum number of uncommitted states in `ProgressMarks`."""

_OFFSET_DIGITS_MAX = 19


def encode_op(offsets: Iterable[int]) -> bytes:
    """Returns the body of an op message for half messages at `offsets` (queue offsets), in the form of 5.x."""
    return "".join(f"{offset}," for offset in offsets).encode()


def decode_op(body: bytes) -> list[int]:
    """Returns the queue offsets in the body of an op message of 4.9 or 5.x. Raises ValueError if it is malformed."""
    offsets = []
    for part in body.split(b","):
        if part:
            if len(part) > _OFFSET_DIGITS_MAX or not part.isdigit():
                raise ValueError(f"an op message contains {part[:40]!r}")
            offsets.append(int(part))
    return offsets


class HalfWindow:
    """State of the half messages from queue offset `start` on. All before it are ended or have a later copy. Offsets
    are queue offsets."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._ended = bytearray()
        self._moved: dict[int, int] = {}

    def end(self, offset: int) -> list[int]:
        """Ends the half message at `offset` and its later copies; returns the offsets of all of these, in order.

        Changes nothing and returns [] if the latest one is WINDOW_COUNT_MAX or more beyond `start`.
        """
        copies = [offset]
        while (later := self._moved.get(copies[-1])) is not None:
            copies.append(later)
        if copies[-1] - self.start >= WINDOW_COUNT_MAX:
            return []
        for at in copies:
            self._mark(at)
            self._moved.pop(at, None)
        return copies

    def move(self, offset: int, to: int) -> list[int]:
        """Records that the half message at `offset` was stored again at `to`; returns [].

        If it was ended meanwhile, ends the copy and returns what `end` returns. With more than MOVED_COUNT_MAX copies,
        forgets the oldest one: ending its original then no longer ends this copy.
        """
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
        """Returns whether the half message at `offset` is ended or was stored again."""
        at = offset - self.start
        return at < 0 or (at < len(self._ended) and self._ended[at] == 1)

    def next_open(self, offset: int) -> int:
        """Returns the first offset from `offset` on whose half message is not known to be ended or stored again."""
        at = max(0, offset - self.start)
        found = self._ended.find(0, at)
        return self.start + (found if found >= 0 else max(at, len(self._ended)))

    def next_ended(self, offset: int, limit: int) -> int:
        """Returns the first offset in [`offset`, `limit`) whose half message is ended or was stored again; `limit` if
        there is none."""
        found = self._ended.find(1, max(0, offset - self.start), max(0, limit - self.start))
        return self.start + found if found >= 0 else limit

    def open_count(self, end: int) -> int:
        """Returns the number of half messages before queue offset `end` that are not known to be ended or stored
        again."""
        return max(0, end - self.start - self._ended.count(1, 0, max(0, end - self.start)))

    def advance(self) -> None:
        """Moves `start` forward to the first half message that is open."""
        self.advance_to(self.next_open(self.start))

    def advance_to(self, offset: int) -> None:
        """Moves `start` forward to `offset`, which must not be lower."""
        del self._ended[: offset - self.start]
        self.start = offset


class OpReads:
    """Progress in the op queue, and the queue offset from which this broker, or the next master, reads it again."""

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset
        self._reads: deque[tuple[int, int]] = deque()
        """(queue offset of the first op message of a range that was read, highest queue offset of a half message that
        the range ends)"""

    def note(self, next_offset: int, last_half: int) -> None:
        """Records that the op messages before `next_offset` were read.

        `last_half`: highest queue offset of the half messages that they end, or -1 if they end none.
        """
        self._reads.append((self.next_offset, last_half))
        self.next_offset = next_offset
        if len(self._reads) > READ_COUNT_MAX:  # merge pairs of ranges
            reads = list(self._reads)
            self._reads = deque(
                (first, max(half for _, half in reads[at : at + 2]))
                for at, (first, _) in enumerate(reads)
                if at % 2 == 0
            )

    def needed_from(self, half_start: int) -> int:
        """Returns the queue offset of the first op message that may end half messages from `half_start` on. Forgets the
        op messages before it."""
        reads = self._reads
        while reads and reads[0][1] < half_start:
            reads.popleft()
        return reads[0][0] if reads else self.next_offset


class Progress(msgspec.Struct, frozen=True, gc=False):
    """Progress in both queues (queue offsets) when the log ended at `log_end` (bytes)."""

    log_end: int
    half_offset: int
    op_offset: int


class ProgressMarks:
    """Progress that can't be committed yet, as it depends on records that a crash could remove from the log's end."""

    def __init__(self) -> None:
        self._marks: list[Progress] = []
        self._last: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self._marks)

    def note(self, progress: Progress) -> None:
        """Adds `progress` if its queue offsets differ from the last ones added."""
        offsets = progress.half_offset, progress.op_offset
        if offsets != self._last:
            self._last = offsets
            self._marks.append(progress)
            if len(self._marks) > MARK_COUNT_MAX:
                del self._marks[1]

    def take(self, log_offset: int) -> Progress | None:
        """Removes all progress whose `log_end` is at most `log_offset` (bytes); returns the newest one removed, or
        None."""
        found = None
        while self._marks and self._marks[0].log_end <= log_offset:
            found = self._marks.pop(0)
        return found
