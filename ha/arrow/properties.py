"""Splits the property strings of many records at once at their two separators, with NumPy.

A row is regular if each of its pieces is `name 0x01 value` with one separator and neither part empty, and its bytes are
UTF-8. All other rows use the parser of `ha.protocol.properties`, the reference for every row.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ha.arrow.arrays import from_numpy, to_ints, to_mask
from ha.arrow.heads import Int64s
from ha.arrow.slices import as_text, interleaved, patched, take_slices, values_of
from ha.arrow.split import piece_bounds, usual_pieces
from ha.protocol.properties import decode_properties, find_property

_NAMES_IN_A_WORD = 62
_SPACE = 32
_MAP = pa.map_(pa.string(), pa.string())


class PropertyTable:
    """The properties of `count` rows, split from their property strings (a binary array without nulls)."""

    def __init__(self, strings: pa.Array, *, has_maps: bool = False) -> None:
        """`has_maps`: the caller will call `maps`, which copies the names of all properties in any case; so `find` may
        make that copy earlier, and search in it."""
        self._has_maps = has_maps
        self._strings = strings
        self.count = len(strings)
        raw, offsets = values_of(strings)
        self._raw = raw
        self._buffer = pa.py_buffer(raw)
        usual = usual_pieces(raw, offsets)
        irregular = np.zeros(self.count, bool)
        if usual is not None:
            starts, separators, ends, bounds = usual
            each = _pieces_of_each(starts, offsets)
            rows = np.repeat(np.arange(self.count), each or np.diff(bounds))
        else:
            starts, separators, ends, rows, irregular = self._split_one_by_one(raw, offsets)
            each = 0
        self._starts: Int64s = starts
        self._separators: Int64s = separators
        self._ends: Int64s = ends
        self._rows: Int64s = rows
        self._each = each
        self._irregular: Int64s = np.flatnonzero(irregular)
        self._irregular_values: list[bytes] = (
            strings.take(pa.array(self._irregular)).to_pylist() if len(self._irregular) else []
        )

    def _split_one_by_one(
        self, raw: npt.NDArray[np.uint8], offsets: Int64s
    ) -> tuple[Int64s, Int64s, Int64s, Int64s, npt.NDArray[np.bool_]]:
        """Returns begin, separator and end of the pieces of regular rows, their rows, and which rows are irregular."""
        starts, separators, ends = piece_bounds(raw, offsets)
        irregular = np.zeros(self.count, bool)
        if not _is_utf8(self._strings):
            irregular |= np.fromiter((not _decodes(v) for v in self._strings.to_pylist()), bool, self.count)
        rows = np.repeat(np.arange(self.count), np.diff(np.searchsorted(starts, offsets)))
        separator_counts = np.diff(np.searchsorted(separators, offsets))
        irregular |= separator_counts != np.bincount(rows, minlength=self.count)
        keep = ~irregular[rows]
        starts, ends, rows = starts[keep], ends[keep], rows[keep]
        separators = separators[np.repeat(~irregular, separator_counts)]
        wrong = ~((starts < separators) & (separators + 1 < ends))
        if wrong.any():
            irregular[rows[wrong]] = True
            keep = ~irregular[rows]
            starts, ends, rows, separators = starts[keep], ends[keep], rows[keep], separators[keep]
        return starts, separators, ends, rows, irregular

    def text(self) -> pa.Array:
        """Returns the property strings."""
        return as_text(self._strings)

    def find(self, name: bytes) -> pa.Array:
        """Returns the value of one property (by its ASCII name) per row, null where it is missing."""
        last = self._last_pieces(name)
        found = last >= 0
        chosen = last[found]
        index = np.cumsum(found, dtype=np.int64) - 1
        if len(chosen):
            bounds = np.empty(2 * len(chosen), np.int64)
            bounds[0::2] = self._separators[chosen] + 1
            bounds[1::2] = self._ends[chosen]
            values = interleaved(self._buffer, bounds, pa.string())
            array = values.take(from_numpy(2 * index, nulls=~found))
        else:
            array = pa.nulls(self.count, pa.string())
        if len(self._irregular):
            array = patched(array, self._irregular, [find_property(raw, name) for raw in self._irregular_values])
        return array

    def keys(self) -> pa.Array:
        """Returns the words of KEYS per row, null without the property."""
        found = self.find(b"KEYS")
        single = found.drop_null()
        raw, bounds = values_of(single)
        if not (raw == _SPACE).any() and not (bounds[1:] == bounds[:-1]).any():  # usual: one word per row
            is_valid = to_mask(found.is_valid())
            offsets = np.zeros(self.count + 1, np.int32)
            np.cumsum(is_valid, out=offsets[1:])
            return pa.ListArray.from_arrays(from_numpy(offsets), single, mask=from_numpy(~is_valid))
        array = pc.split_pattern(found, " ")
        _, bounds = values_of(array.flatten())
        if (bounds[1:] == bounds[:-1]).any():  # two spaces in a row make an empty word
            words = [None if v is None else [w for w in v if w] for v in array.to_pylist()]
            array = pa.array(words, array.type)
        return array

    def maps(self) -> pa.Array:
        """Returns all properties per row, as a map."""
        values = take_slices(self._buffer, self._separators + 1, self._ends - self._separators - 1, pa.string())
        offsets = np.zeros(self.count + 1, np.int32)
        np.cumsum(np.bincount(self._rows, minlength=self.count), out=offsets[1:])
        array = pa.MapArray.from_arrays(from_numpy(offsets), self._names, values, type=_MAP)
        repeated = self._rows_with_repeated_names(self._names)
        again = np.union1d(repeated, self._irregular)
        if len(again):
            strings = self._strings.take(pa.array(again)).to_pylist()
            array = patched(array, again, [list(decode_properties(raw).items()) for raw in strings])
        return array

    def _rows_with_repeated_names(self, names: pa.Array) -> Int64s:
        if not len(names):
            return np.empty(0, np.int64)
        if self._shared_names:
            is_repeated = len(set(self._shared_names)) < len(self._shared_names)
            return np.arange(self.count) if is_repeated else np.empty(0, np.int64)
        codes = to_ints(names.dictionary_encode().indices)
        starts = np.flatnonzero(np.diff(self._rows, prepend=-1))
        if int(codes.max()) < _NAMES_IN_A_WORD:
            # A bit for each name: a sum and a union of distinct bits are equal.
            bits = np.left_shift(1, codes)
            repeated = np.add.reduceat(bits, starts) != np.bitwise_or.reduceat(bits, starts)
            found: Int64s = self._rows[starts[repeated]]
            return found
        pairs = self._rows * (int(codes.max()) + 1) + codes
        _, first, times = np.unique(pairs, return_index=True, return_counts=True)
        return np.unique(self._rows[first[times > 1]])

    def _last_pieces(self, name: bytes) -> Int64s:
        """Returns for each row the index of its last piece with this name; -1 if it has none."""
        if self._has_maps and self._shared_names:
            each = len(self._shared_names)
            if name not in self._shared_names:
                return np.full(self.count, -1, np.int64)
            return np.arange(each - 1 - self._shared_names[::-1].index(name), len(self._starts), each)
        pieces = np.flatnonzero((self._separators - self._starts) == len(name))
        at = self._starts[pieces]
        for place, byte in enumerate(name):
            hits = self._raw[at + place] == byte
            pieces, at = pieces[hits], at[hits]
        last = np.full(self.count, -1, np.int64)
        last[self._rows[pieces]] = pieces
        return last

    @cached_property
    def _names(self) -> pa.Array:
        """The name of each piece."""
        return take_slices(self._buffer, self._starts, self._separators - self._starts, pa.string())

    @cached_property
    def _shared_names(self) -> list[bytes]:
        """The names in each row, if all rows have the same names in the same order, as the messages of one producer
        usually do; otherwise empty."""
        each = self._each
        if not each:
            return []
        sizes = (self._separators - self._starts).reshape(-1, each)
        if not bool((sizes == sizes[0]).all()):
            return []
        bounds = zip(self._starts[:each].tolist(), self._separators[:each].tolist(), strict=True)
        names = [self._raw[begin:end].tobytes() for begin, end in bounds]
        repeated = np.frombuffer(b"".join(names) * self.count, np.uint8)
        found = np.frombuffer(self._names.buffers()[2], np.uint8)[: len(repeated)]
        return names if np.array_equal(found, repeated) else []


def _pieces_of_each(starts: Int64s, offsets: Int64s) -> int:
    """Returns the number of pieces of each row, 0 if it differs between rows. Each piece lies within a row."""
    count = len(offsets) - 1
    each, rest = divmod(len(starts), count) if count else (0, 0)
    return each if not rest and each and bool((starts[::each] == offsets[:-1]).all()) else 0


def _is_utf8(strings: pa.Array) -> bool:
    try:
        strings.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _decodes(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
