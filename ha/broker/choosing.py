"""Which messages of a queue an answer has: from entries to places in the log, and whether these messages lie there.

Knows entries (`ha.protocol.store_files.ENTRY`) and the begin of records; reads nothing.

Source: DefaultMessageStore.getMessage.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ha.protocol.compiled import with_compiled_twin
from ha.protocol.record import RECORD_PLACE
from ha.protocol.store_files import BLANK_SIZE, ENTRY


class WrongEntryError(Exception):
    """The entry at `queue_offset` does not point to its message."""

    def __init__(self, queue_offset: int) -> None:
        super().__init__(queue_offset)
        self.queue_offset = queue_offset


class Limits(NamedTuple):
    """What an answer may have: so many messages, so many bytes of more than one, and of the log [`log_start`,
    `log_end`), as much as there is."""

    count_max: int
    bytes_max: int
    log_start: int
    log_end: int


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """Messages that an answer will have, ascending: queue offsets, physical offsets and sizes, all of the same length.

    None overlaps another one, and none is empty.
    """

    queue_offsets: array[int]
    physical_offsets: array[int]
    sizes: array[int]

    def one_by_one(self) -> list[Wanted]:
        """Each message alone."""
        columns = zip(self.queue_offsets, self.physical_offsets, self.sizes, strict=True)
        return [Wanted(*(array("q", [number]) for number in message)) for message in columns]

    def check(self, body: bytes, queue_id: int) -> None:
        """WrongEntryError unless each record in `body`, one after the other, says that it is where its entry stands."""
        at = 0
        place_of = RECORD_PLACE.unpack_from
        for queue_offset, place, size in zip(self.queue_offsets, self.physical_offsets, self.sizes, strict=True):
            if size < RECORD_PLACE.size or place_of(body, at) != (size, queue_id, queue_offset, place):
                raise WrongEntryError(queue_offset)
            at += size

    @staticmethod
    def joined(messages: Sequence[Wanted]) -> Wanted | None:
        """All of some that are one by one; None if there are none."""
        if not messages:
            return None
        rows = [(each.queue_offsets[0], each.physical_offsets[0], each.sizes[0]) for each in messages]
        return Wanted(*(array("q", column) for column in zip(*rows, strict=True)))

    @property
    def count(self) -> int:
        """How many."""
        return len(self.sizes)


class Choice(NamedTuple):
    """What was chosen of some entries: how many were looked at, and whether any of those is of a message that
    retention took."""

    wanted: Wanted
    scanned_count: int
    has_removed: bool


@with_compiled_twin
def choose(entries: bytes, queue_offset: int, limits: Limits, tags_codes: frozenset[int] | None) -> Choice:
    """Choose among `entries`, the first of which is at `queue_offset`, the messages with one of these tag hashes.

    WrongEntryError for an entry that can't be right, if nothing before it is wanted.
    """
    count_max, bytes_max, log_start, log_end = limits
    queue_offsets, places, sizes = array("q"), array("q"), array("q")
    total_size = scanned_count = previous_end = 0
    has_removed = False
    for place, size, tags_code in ENTRY.iter_unpack(entries):
        if size != BLANK_SIZE:
            if size <= 0 or place < previous_end or place + size > log_end:
                if sizes:
                    break
                raise WrongEntryError(queue_offset + scanned_count)
            previous_end = place + size
        if place < log_start:
            has_removed = True
        elif size != BLANK_SIZE and (tags_codes is None or tags_code in tags_codes):
            if sizes and (len(sizes) == count_max or total_size + size > bytes_max):
                break
            total_size += size
            queue_offsets.append(queue_offset + scanned_count)
            places.append(place)
            sizes.append(size)
        scanned_count += 1
    return Choice(Wanted(queue_offsets, places, sizes), scanned_count, has_removed)
