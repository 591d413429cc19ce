"""What dispatch makes of many records at once, column by column: the same as `scan_record` makes of each of them.

The fixed fields are gathered by `heads.py`. All property strings are joined and split on their separators at once; of
the pieces those named TAGS, KEYS and UNIQ_KEY are looked at, and hashed where they lie. Rows whose values are not ASCII
are scanned one by one: `scan_record` is the truth for every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ha.protocol.heads import Heads, Int64s, gather
from ha.protocol.java_hashes import RunningSums, UInt32s, as_signed
from ha.protocol.properties import DELAY_LEVELS_MS, KEYS, PROPERTIES_SIZE_MAX, TAGS, UNIQ_KEY
from ha.protocol.record import RECORD_SIZE_MIN, Readable, RecordHead, scan_record, schedule_code
from ha.protocol.topic_names import SCHEDULE_TOPIC

_INT32 = Struct(">i")
_END = 2
_SPACE = 32
_WORD = 8
"""Bytes of a piece that are compared at once"""


class Values(NamedTuple):
    """Values of one property, at most some a row: rows, ascending; Java hashes, unsigned; 31^length mod 2^32."""

    rows: Int64s
    hashes: UInt32s
    powers: UInt32s


_NO_ROWS = np.empty(0, np.int64)
_NO_HASHES = np.empty(0, np.uint32)
_NONE = Values(_NO_ROWS, _NO_HASHES, _NO_HASHES)


class RecordTable:
    """Sound records one after another, each where it says it is. Columns are int64, a row a record."""

    def __init__(self, buffer: Readable, heads: Heads, *, delay_levels_ms: Sequence[int]) -> None:
        """`heads` are all sound. See `scan_table`."""
        self.count = len(heads)
        self.total_size = heads.total_size
        self.queue_id = heads.field("queue_id").astype(np.int64)
        self.queue_offset = heads.field("queue_offset").astype(np.int64)
        self.physical_offset = heads.field("physical_offset").astype(np.int64)
        self.sys_flag = heads.sys_flag
        self.store_ms = heads.field("store_ms").astype(np.int64)
        self.tags_code = np.zeros(self.count, np.int64)
        """As of `RecordHead`"""
        self.topics: list[str]
        """The topics that there are, each once"""
        self.topic_of: Int64s
        """Per row, its topic's place in `topics`"""
        self.unique_keys = self.key_words = self.tags = _NONE
        """UNIQ_KEY, the words of KEYS in their order, and TAGS, of all rows but the odd ones"""
        self.odd: dict[int, RecordHead] = {}
        """Rows whose values are not in these columns"""
        self._find_topics(buffer, heads)
        if self.count and heads.properties_size.any():
            self._find_properties(buffer, heads, delay_levels_ms)
            if SCHEDULE_TOPIC in self.topics:
                self._correct_scheduled(buffer, heads, delay_levels_ms)

    def __len__(self) -> int:
        return self.count

    @property
    def size(self) -> int:
        """Bytes that the records take."""
        return int(self.total_size.sum())

    def _find_topics(self, buffer: Readable, heads: Heads) -> None:
        self.topics = []
        self.topic_of = np.zeros(self.count, np.int64)
        if not self.count:
            return
        begins, sizes = heads.topic_at, heads.topic_size
        size = int(sizes[0])
        if size and (sizes == size).all():
            names = gather(heads.raw, begins, np.dtype(f"V{size}")).view(np.uint8).reshape(self.count, size)
            if (names == names[0]).all():  # as usual
                self.topics = [str(names[0].tobytes(), "utf-8", "replace")]
                return
        ends = begins + sizes
        known: dict[bytes, int] = {}
        places: dict[str, int] = {}  # different bytes that are no UTF-8 may be one topic
        codes = []
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            name = bytes(buffer[begin:end])
            code = known.get(name)
            if code is None:
                code = known[name] = places.setdefault(str(name, "utf-8", "replace"), len(places))
            codes.append(code)
        self.topics = list(places)
        self.topic_of = np.array(codes, np.int64)

    def _find_properties(self, buffer: Readable, heads: Heads, delay_levels_ms: Sequence[int]) -> None:
        spans = zip(heads.properties_at.tolist(), heads.record_end.tolist(), strict=True)
        text = b"\x02".join([b"", *(buffer[begin:end] for begin, end in spans), bytes(_WORD)])
        pieces = _Pieces(text, heads.properties_size)
        tags, keys, unique = (pieces.find(name) for name in (TAGS, KEYS, UNIQ_KEY))
        odd = pieces.not_ascii((tags, keys, unique))
        if len(odd):
            tags, keys, unique = (found.without(odd) for found in (tags, keys, unique))
            for row in odd.tolist():
                head = scan_record(buffer, int(heads.positions[row]), len(buffer), delay_levels_ms=delay_levels_ms)
                assert isinstance(head, RecordHead)
                self.odd[row] = head
                self.tags_code[row] = head.tags_code
        if len(tags.rows) or len(keys.rows) or len(unique.rows):
            sums = RunningSums(pieces.units)
            self.tags, self.key_words, self.unique_keys = (
                Values(found.rows, *sums.hashes(found.begins, found.ends))
                for found in (tags, pieces.words(keys), unique)
            )
            self.tags_code[tags.rows] = as_signed(self.tags.hashes)

    def _correct_scheduled(self, buffer: Readable, heads: Heads, delay_levels_ms: Sequence[int]) -> None:
        for row in np.flatnonzero(self.topic_of == self.topics.index(SCHEDULE_TOPIC)).tolist():
            if row not in self.odd:
                properties = bytes(buffer[int(heads.properties_at[row]) : int(heads.record_end[row])])
                self.tags_code[row] = schedule_code(
                    properties, int(self.tags_code[row]), int(self.store_ms[row]), delay_levels_ms
                )


class _Found(NamedTuple):
    """Where values are in the joined text, and of which rows."""

    rows: Int64s
    begins: Int64s
    ends: Int64s

    def chosen(self, which: npt.NDArray[np.bool_]) -> _Found:
        return _Found(self.rows[which], self.begins[which], self.ends[which])

    def without(self, rows: Int64s) -> _Found:
        return self.chosen(~np.isin(self.rows, rows))


class _Pieces:
    """What stands between the separators of property strings: `text` begins with one, and has one behind each string
    and then `_WORD` bytes."""

    def __init__(self, text: bytes, sizes: Int64s) -> None:
        self.units = np.frombuffer(text, np.uint8)
        marks = np.flatnonzero(self.units == _END)
        self._begins = marks[:-1] + 1
        self._ends = marks[1:]
        self._row_begins = np.cumsum(sizes + 1) - sizes
        words = np.ndarray((len(text) - _WORD + 1,), "<u8", buffer=text, strides=(1,))
        self._words = words[self._begins]

    def find(self, name: str) -> _Found:
        """The value of a property in each row that has one: of several the last one, as an empty one is none."""
        mark = f"{name}\x01".encode()
        first = mark[:_WORD]
        hits = np.flatnonzero(self._words & ((1 << 8 * len(first)) - 1) == int.from_bytes(first, "little"))
        begins = self._begins[hits]
        for place in range(_WORD, len(mark)):
            is_so = self.units[begins + place] == mark[place]
            hits, begins = hits[is_so], begins[is_so]
        begins += len(mark)
        rows = np.searchsorted(self._row_begins, begins, "right") - 1
        found = _Found(rows, begins, self._ends[hits])
        is_some = found.begins < found.ends
        if not is_some.all():
            found = found.chosen(is_some)
        is_repeated = found.rows[1:] == found.rows[:-1]
        return found.chosen(np.append(~is_repeated, True)) if is_repeated.any() else found

    def not_ascii(self, kinds: Sequence[_Found]) -> Int64s:
        """The rows, ascending, of which any of these values has other bytes than ASCII."""
        high = np.flatnonzero(self.units >= 0x80)
        if not len(high):
            return _NO_ROWS
        rows = [found.rows[np.searchsorted(high, found.begins) != np.searchsorted(high, found.ends)] for found in kinds]
        return np.unique(np.concatenate(rows))

    def words(self, found: _Found) -> _Found:
        """What stands between the spaces of values."""
        rows, begins, ends = found
        spaces = np.flatnonzero(self.units == _SPACE)
        if not len(spaces) or not len(rows):
            return found
        place = np.searchsorted(begins, spaces, "right") - 1
        is_within = (place >= 0) & (spaces < ends[place])
        if not is_within.any():
            return found
        spaces, place = spaces[is_within], place[is_within]
        words = _Found(
            np.sort(np.append(rows, rows[place])),
            np.sort(np.append(begins, spaces + 1)),
            np.sort(np.append(ends, spaces)),
        )
        return words.chosen(words.begins < words.ends)


def scan_table(
    buffer: Readable,
    base_offset: int,
    *,
    count_max: int,
    bytes_max: int,
    delay_levels_ms: Sequence[int] = DELAY_LEVELS_MS,
) -> RecordTable:
    """Return the sound records at the begin of `buffer`, whose first byte is at physical offset `base_offset`.

    At most `count_max` that begin within its first `bytes_max` bytes, up to the first one for which `scan_record` has
    to say what it is: it is not whole, not sound, or not where it says.
    """
    positions: list[int] = []
    append = positions.append
    unpack = _INT32.unpack_from
    end = len(buffer)
    last = min(end - RECORD_SIZE_MIN, bytes_max - 1)
    at = 0
    while at <= last:
        (size,) = unpack(buffer, at)
        if size < RECORD_SIZE_MIN or at + size > end:
            break
        append(at)
        at += size
        if len(positions) == count_max:
            break
    heads = Heads(np.frombuffer(buffer, np.uint8), np.array(positions, np.int64), base_offset)
    # Longer fields than there may be are for scan_record to judge.
    is_usual = heads.sound & (heads.topic_size <= PROPERTIES_SIZE_MAX) & (heads.properties_size <= PROPERTIES_SIZE_MAX)
    if not is_usual.all():
        heads = heads.keep(np.arange(int(np.argmin(is_usual))))
    return RecordTable(buffer, heads, delay_levels_ms=delay_levels_ms)
