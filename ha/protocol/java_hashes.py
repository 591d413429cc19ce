"""Java's String.hashCode of many strings at once, for tags codes and the key index.

The hash is Σ unit·31^(n−1−i) mod 2^32 over UTF-16 units. 31 is odd, so it has an inverse v mod 2^32, and with the
running sum S[i] = Σ_{k<i} unit[k]·v^k over bytes that hold many strings the hash of the string in bytes [a, b) is
(S[b] − S[a])·31^(b−1): one product and one sum per byte, whatever the strings' lengths. That holds where a byte is a
unit, in ASCII; other strings are `ha.protocol.properties.java_hash`'s.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32s = npt.NDArray[np.uint32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_INVERSE = pow(31, -1, 1 << 32)
_TABLE_SIZE_MIN = 1 << 16
_tables: tuple[UInt32s, UInt32s] = (np.empty(0, np.uint32), np.empty(0, np.uint32))


class RunningSums:
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


def as_signed(hashes: UInt32s) -> Int32s:
    """Return Java's view of the hashes."""
    return hashes.view(np.int32)


def key_hashes(hashes: UInt32s) -> Int32s:
    """Return what an index stores of hashes: their absolute value, 0 for −2^31, which has none."""
    signed = hashes.view(np.int32)
    absolute: Int32s = np.abs(signed)
    absolute[absolute < 0] = 0
    return absolute
