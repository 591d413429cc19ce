"""Which messages of a queue an answer has: from entries to places in the log, and whether these messages lie there.

Few entries are looked at one by one, many all at once as arrays, which costs more to begin and a tenth for each: both
find the same. Knows entries (`ha.protocol.store_files.ENTRY`) and the begin of records; reads nothing.

Source: DefaultMessageStore.getMessage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ha.protocol.entry_dtypes import ENTRY_DTYPE
from ha.protocol.heads import HEAD, gather
from ha.protocol.record import RECORD_PLACE
from ha.protocol.store_files import ENTRY, ENTRY_SIZE

BLANK_SIZE = 0x7FFFFFFF
"""Record size in an entry that stands for no message (RocketMQ: fillPreBlank)."""
ARRAYS_FROM = 80
"""So many entries, or messages, are looked at all at once: from there on it is the cheaper way."""

Int64s = npt.NDArray[np.int64]
Run = tuple[int, int]
"""Where messages that follow one another in the log begin, and end (physical offsets)."""

_PLACE_FIELDS = ("total_size", "queue_id", "queue_offset", "physical_offset")
_HEAD_FIELDS: Any = HEAD.fields
_PLACE_LAYOUT: Any = {
    "names": _PLACE_FIELDS,
    "formats": [HEAD[name] for name in _PLACE_FIELDS],
    "offsets": [_HEAD_FIELDS[name][1] for name in _PLACE_FIELDS],
    "itemsize": RECORD_PLACE.size,
}
_PLACE: np.dtype[np.void] = np.dtype(_PLACE_LAYOUT)
"""RECORD_PLACE as a type of arrays."""


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
    """Messages that an answer will have: queue offsets, physical offsets and sizes, all of the same length."""

    queue_offsets: Sequence[int] | Int64s
    physical_offsets: Sequence[int] | Int64s
    sizes: Sequence[int] | Int64s

    def one_by_one(self) -> list[Wanted]:
        """Each message alone."""
        columns = (self.queue_offsets, self.physical_offsets, self.sizes)
        lists = (column.tolist() if isinstance(column, np.ndarray) else column for column in columns)
        return [Wanted([queue_offset], [place], [size]) for queue_offset, place, size in zip(*lists, strict=True)]

    def runs(self) -> list[Run]:
        """Where they are, joined where they are adjacent."""
        places, sizes = self.physical_offsets, self.sizes
        if isinstance(places, np.ndarray) and isinstance(sizes, np.ndarray):
            ends = places + sizes
            borders = np.flatnonzero(places[1:] != ends[:-1])
            begins = np.concatenate((places[:1], places[borders + 1]))
            return list(zip(begins.tolist(), np.concatenate((ends[borders], ends[-1:])).tolist(), strict=True))
        runs: list[Run] = []
        begin = end = -1
        for place, size in zip(places, sizes, strict=True):
            if place != end:
                if begin >= 0:
                    runs.append((begin, end))
                begin = place
            end = place + size
        runs.append((begin, end))
        return runs

    def check(self, body: bytes, queue_id: int) -> None:
        """WrongEntryError unless each record in `body`, one after the other, says that it is where its entry stands."""
        if isinstance(self.sizes, np.ndarray):
            self._check_all(body, queue_id, self.sizes)
            return
        at = 0
        place_of = RECORD_PLACE.unpack_from
        for queue_offset, place, size in zip(self.queue_offsets, self.physical_offsets, self.sizes, strict=True):
            if size < RECORD_PLACE.size or place_of(body, at) != (size, queue_id, queue_offset, place):
                raise WrongEntryError(queue_offset)
            at += size

    def _check_all(self, body: bytes, queue_id: int, sizes: Int64s) -> None:
        # What is shorter than a place is none, and those behind it are not where they would have to be.
        short = np.flatnonzero(sizes < RECORD_PLACE.size)
        count = int(short[0]) if len(short) else len(sizes)
        positions = np.cumsum(sizes[:count]) - sizes[:count]
        places = gather(np.frombuffer(body, np.uint8), positions, _PLACE)
        is_right = (
            (places["total_size"] == sizes[:count])
            & (places["queue_id"] == queue_id)
            & (places["queue_offset"] == self.queue_offsets[:count])
            & (places["physical_offset"] == self.physical_offsets[:count])
        )
        if not is_right.all():
            count = int(is_right.argmin())
        if count < len(sizes):
            raise WrongEntryError(int(self.queue_offsets[count]))

    @staticmethod
    def joined(messages: Sequence[Wanted]) -> Wanted | None:
        """All of some that are one by one; None if there are none."""
        if not messages:
            return None
        queue_offsets = [each.queue_offsets[0] for each in messages]
        return Wanted(
            queue_offsets, [each.physical_offsets[0] for each in messages], [each.sizes[0] for each in messages]
        )

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


def choose(entries: bytes, queue_offset: int, limits: Limits, tags_codes: frozenset[int] | None) -> Choice:
    """Choose among `entries`, the first of which is at `queue_offset`, the messages with one of these tag hashes.

    WrongEntryError for an entry that can't be right, if nothing before it is wanted.
    """
    if len(entries) < ARRAYS_FROM * ENTRY_SIZE:
        return choose_one_by_one(entries, queue_offset, limits, tags_codes)
    return choose_at_once(entries, queue_offset, limits, tags_codes)


def choose_one_by_one(entries: bytes, queue_offset: int, limits: Limits, tags_codes: frozenset[int] | None) -> Choice:
    """As `choose`."""
    count_max, bytes_max, log_start, log_end = limits
    queue_offsets: list[int] = []
    places: list[int] = []
    sizes: list[int] = []
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


def choose_at_once(entries: bytes, queue_offset: int, limits: Limits, tags_codes: frozenset[int] | None) -> Choice:
    """As `choose`."""
    table = np.frombuffer(entries, ENTRY_DTYPE)
    places = table["physical_offset"].astype(np.int64)
    sizes = table["size"].astype(np.int64)
    is_message = sizes != BLANK_SIZE
    rows = np.flatnonzero(is_message)
    row_places, row_sizes = places[rows], sizes[rows]
    # Sums that wrap around are of rows that are wrong themselves, and nothing behind the first of these counts.
    is_wrong = (row_sizes <= 0) | (row_places < 0) | (row_places > limits.log_end - row_sizes)
    is_wrong[1:] |= row_places[1:] < (row_places + row_sizes)[:-1]
    scanned_count = int(rows[is_wrong.argmax()]) if is_wrong.any() else len(table)
    chosen = is_message & (places >= limits.log_start)
    if tags_codes is not None:
        chosen &= np.isin(table["tags_code"], np.fromiter(tags_codes, np.int64, len(tags_codes)))
    found = np.flatnonzero(chosen[:scanned_count])
    if not len(found):
        if scanned_count < len(table):
            raise WrongEntryError(queue_offset + scanned_count)
    else:
        fitting = int(np.searchsorted(np.cumsum(sizes[found]), limits.bytes_max, side="right"))
        count = min(limits.count_max, max(1, fitting))
        if count < len(found):
            scanned_count = int(found[count])
            found = found[:count]
    has_removed = bool((places[:scanned_count] < limits.log_start).any())
    return Choice(Wanted(found + queue_offset, places[found], sizes[found]), scanned_count, has_removed)
