"""Java's String.hashCode of the strings of a whole Arrow array: `ha.protocol.java_hashes` over its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ha.protocol.java_hashes import Int64s, RunningSums, UInt32s
from ha.protocol.properties import java_hash

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
        sums = RunningSums(units[base : int(offsets[stop])])
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
