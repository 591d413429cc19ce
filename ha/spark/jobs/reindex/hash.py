"""Java's String.hashCode of the strings of a whole Arrow array, for tags codes and the key index.

The hash is Σ unit·31^(n−1−i) mod 2^32 over UTF-16 units. 31 is odd, so it has an inverse v mod 2^32, and with the
running sum S[i] = Σ_{k<i} unit[k]·v^k over bytes that hold many strings the hash of the string in bytes [a, b) is
(S[b] − S[a])·31^(b−1): one product and one sum per byte, whatever the strings' lengths. That holds where a byte is a
unit, in ASCII; other strings are `ha.protocol.properties.java_hash`'s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ha.protocol.properties import java_hash

UInt32s = npt.NDArray[np.uint32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_INVERSE = pow(31, -1, 1 << 32)
_TABLE_SIZE_MIN = 1 << 16
_tables: tuple[UInt32s, UInt32s] = (np.empty(0, np.uint32), np.empty(0, np.uint32))
_PIECE_BYTES = 1 << 20
"""Bytes summed at a time: bounds the tables of powers (4 MiB each) and what a batch needs besides itself."""


def java_hashes(strings: pa.StringArray) -> tuple[UInt32s, UInt32s]:
    """Return each string's hash, as unsigned, and 31^length (in UTF-16 units) mod 2^32; (0, 1) for null.

    The second makes hashes of joined strings: hash(a + b) = hash(a)·31^len(b) + hash(b). A string must not be longer
    than 1 MiB (a property has at most 32 KiB).
    """
    count = len(strings)
    hashes: UInt32s = np.zeros(count, np.uint32)
    powers: UInt32s = np.ones(count, np.uint32)
    if not count:
        return hashes, powers
    offsets, units = _offsets_and_bytes(strings)
    first = 0
    while first < count:
        stop = int(np.searchsorted(offsets, offsets[first] + _PIECE_BYTES, side="right")) - 1
        assert stop > first, "a string of more than 1 MiB"
        stop = min(stop, count)
        piece = slice(first, stop)
        base = int(offsets[first])
        inner = offsets[first : stop + 1] - base
        sums = _RunningSums(units[base : int(offsets[stop])])
        hashes[piece], powers[piece] = sums.hashes(inner[:-1], inner[1:])
        first = stop
    _correct_others(strings, offsets, units, hashes, powers)
    return hashes, powers


def _offsets_and_bytes(strings: pa.StringArray) -> tuple[Int64s, npt.NDArray[np.uint8]]:
    _, offsets, data = strings.buffers()
    width: type[Any] = np.int64 if pa.types.is_large_string(strings.type) else np.int32
    view = np.frombuffer(offsets, width)[strings.offset : strings.offset + len(strings) + 1].astype(np.int64)
    units = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return view, units


def _correct_others(
    strings: pa.StringArray, offsets: Int64s, units: npt.NDArray[np.uint8], hashes: UInt32s, powers: UInt32s
) -> None:
    """Hash again, one by one, the strings that are not ASCII; and give null the hash of nothing."""
    used = units[int(offsets[0]) : int(offsets[-1])]
    if len(used) and int(used.max()) >= 0x80:
        high = np.flatnonzero(used >= 0x80) + int(offsets[0])
        for row in np.unique(np.searchsorted(offsets, high, side="right") - 1).tolist():
            text = strings[row].as_py()
            if text is not None:
                hashes[row] = java_hash(text) & 0xFFFFFFFF
                powers[row] = pow(31, len(text.encode("utf-16-le", "surrogatepass")) // 2, 1 << 32)
    if strings.null_count:
        absent = strings.is_null().to_numpy(zero_copy_only=False)
        hashes[absent] = 0
        powers[absent] = 1


def as_signed(hashes: UInt32s) -> Int32s:
    """Return Java's view of the hashes."""
    return hashes.view(np.int32)


def key_hashes(hashes: UInt32s) -> Int32s:
    """Return what an index stores of hashes: their absolute value, 0 for −2^31, which has none."""
    signed = hashes.view(np.int32)
    absolute: Int32s = np.abs(signed)
    absolute[absolute < 0] = 0
    return absolute


class _RunningSums:
    """The running sum over some bytes, for hashes of slices of them."""

    def __init__(self, units: npt.NDArray[np.uint8]) -> None:
        """Over `units`, any of which may be in a slice. Tables of powers as long are kept: 8 bytes for each unit."""
        down, self._up = _powers(len(units))
        self._sums = np.zeros(len(units) + 1, np.uint32)
        np.cumsum(units * down[: len(units)], dtype=np.uint32, out=self._sums[1:])

    def hashes(self, begins: Int64s, ends: Int64s) -> tuple[UInt32s, UInt32s]:
        """Return the hash of each slice [begin, end), as unsigned, and 31^(its length) mod 2^32.

        The second makes hashes of joined strings: hash(a + b) = hash(a)·31^len(b) + hash(b).
        """
        up, sums = self._up, self._sums
        return (sums[ends] - sums[begins]) * up[np.maximum(ends - 1, 0)], up[ends - begins]


def _powers(count: int) -> tuple[UInt32s, UInt32s]:
    """v^i and 31^i for i up to `count`, at least; uint32 products wrap as they should."""
    global _tables
    if len(_tables[0]) <= count:
        size = max(_TABLE_SIZE_MIN, 1 << count.bit_length())
        up = np.full(size, 31, np.uint32)
        down = np.full(size, _INVERSE, np.uint32)
        up[0] = down[0] = 1
        _tables = np.multiply.accumulate(down, dtype=np.uint32), np.multiply.accumulate(up, dtype=np.uint32)
    return _tables
