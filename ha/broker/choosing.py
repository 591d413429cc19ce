"""Chooses the messages of a pull's answer from queue entries, and checks that the records read are the chosen ones.

Knows the formats of queue entries (`ha.protocol.store_files.ENTRY`) and of a record's first fields; does no I/O.

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
    """Limits of one answer, and the range of the log from which messages can be chosen.

    count_max: maximum number of messages.
    bytes_max: maximum size of all messages together; the first message may be larger.
    log_start, log_end: physical offsets of the start and the end of the log.
    """

    count_max: int
    bytes_max: int
    log_start: int
    log_end: int


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """The chosen messages, ascending: queue offsets, physical offsets and sizes, in arrays of equal length.

    No two messages overlap, and none is empty.
    """

    queue_offsets: array[int]
    physical_offsets: array[int]
    sizes: array[int]

    def split(self) -> list[Wanted]:
        """Returns a `Wanted` for each message."""
        columns = zip(self.queue_offsets, self.physical_offsets, self.sizes, strict=True)
        return [Wanted(*(array("q", [number]) for number in message)) for message in columns]

    def check(self, body: bytes, queue_id: int) -> None:
        """Checks that `body` is the concatenation of the chosen records.

        Raises WrongEntryError for the first record whose size, queue id or offsets differ from those of its entry.
        """
        at = 0
        place_of = RECORD_PLACE.unpack_from
        for queue_offset, place, size in zip(self.queue_offsets, self.physical_offsets, self.sizes, strict=True):
            if size < RECORD_PLACE.size or place_of(body, at) != (size, queue_id, queue_offset, place):
                raise WrongEntryError(queue_offset)
            at += size

    @staticmethod
    def joined(messages: Sequence[Wanted]) -> Wanted | None:
        """Returns one `Wanted` for all of `messages`, each of which has one message, as from `split`; None if there are
        none."""
        if not messages:
            return None
        rows = [(each.queue_offsets[0], each.physical_offsets[0], each.sizes[0]) for each in messages]
        return Wanted(*(array("q", column) for column in zip(*rows, strict=True)))

    @property
    def count(self) -> int:
        """Number of messages."""
        return len(self.sizes)


class Choice(NamedTuple):
    """The result of `choose`.

    scanned_count: number of entries, from the first one on, that were chosen or skipped; the next read starts after
    them.
    has_removed: whether retention has deleted the message of any of these entries.
    """

    wanted: Wanted
    scanned_count: int
    has_removed: bool


@with_compiled_twin
def choose(entries: bytes, queue_offset: int, limits: Limits, tags_codes: frozenset[int] | None) -> Choice:
    """Chooses messages from `entries`, which start at `queue_offset`, up to the limits: those with a tag hash in
    `tags_codes`, or all if it is None.

    Stops before an invalid entry: one whose size is not positive, that overlaps the message before it, or that points
    beyond the log's end. Raises WrongEntryError for this entry if no message before it was chosen.
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
