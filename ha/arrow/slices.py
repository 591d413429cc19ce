"""Copies many slices of one buffer into one Arrow array, once, in C++.

An Arrow binary array of m values is a buffer and m+1 ascending offsets. With the starts and ends of the slices as
offsets, every other value is a slice and the rest are the gaps: taking the slices copies only them. (Spark's Arrow
reader does not support view types, so one copy is necessary.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ha.arrow.arrays import from_numpy
from ha.arrow.heads import Int64s
from ha.protocol.compiled import with_compiled_twin

_SPAN_MAX = (1 << 31) - 1


def interleaved(buffer: pa.Buffer, bounds: Int64s, kind: pa.DataType) -> pa.Array:
    """Returns the array of the consecutive pieces [bounds[i], bounds[i+1]) of `buffer`; bounds ascend within 2 GiB."""
    first = int(bounds[0])
    offsets = (bounds - first).astype(np.int32)
    piece = buffer.slice(first, int(bounds[-1]) - first)
    return pa.Array.from_buffers(kind, len(bounds) - 1, [None, pa.py_buffer(offsets), piece])


@with_compiled_twin
def take_slices(buffer: pa.Buffer, begins: Int64s, sizes: Int64s, kind: pa.DataType | None = None) -> pa.Array:
    """Returns the slices `buffer[begin : begin + size]` as a binary array (or one of type `kind`, unchecked). They may
    come in any order and lie any distance apart."""
    kind = pa.binary() if kind is None else kind
    count = len(begins)
    if count == 0:
        return pa.Array.from_buffers(kind, 0, [None, pa.py_buffer(bytes(4)), pa.py_buffer(b"")])
    ends = begins + sizes
    if int(ends[-1]) - int(begins[0]) > _SPAN_MAX or (count > 1 and bool((begins[1:] < ends[:-1]).any())):
        # Not ascending, overlapping or too far apart: copy each slice separately.
        view = memoryview(buffer)
        pieces = [bytes(view[b:e]) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)]
        return pa.array(pieces, pa.binary()).view(kind)
    bounds = np.empty(2 * count + 1, np.int64)
    bounds[0:-1:2] = begins
    bounds[1::2] = ends
    # Arrow sizes the result by the mean of all pieces, and copies it again when that is too small. Where slices are
    # longer than gaps, an extra piece at the end, which is not taken, raises the mean enough.
    wanted = int(begins[0]) + 2 * (int(sizes.sum()) + count)
    bounds[-1] = max(int(ends[-1]), min(wanted, buffer.size, int(begins[0]) + _SPAN_MAX))
    return interleaved(buffer, bounds, kind).take(from_numpy(np.arange(0, 2 * count - 1, 2, dtype=np.int64)))


def values_of(array: pa.Array) -> tuple[npt.NDArray[np.uint8], Int64s]:
    """Returns the bytes of a binary array without nulls, and its count+1 offsets into them (starting at 0)."""
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    raw = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return raw[offsets[0] : offsets[-1]], offsets - offsets[0]


def patched(array: pa.Array, rows: Int64s, values: list[Any]) -> pa.Array:
    """Returns `array` with the values at `rows` replaced by `values` (Python objects)."""
    index = np.arange(len(array), dtype=np.int64)
    index[rows] = len(array) + np.arange(len(rows), dtype=np.int64)
    return pa.concat_arrays([array, pa.array(values, array.type)]).take(pa.array(index))


def as_text(array: pa.Array) -> pa.Array:
    """Returns a binary array as strings; bytes that are not UTF-8 become U+FFFD, as in Java."""
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if v is None else str(v, "utf-8", "replace") for v in array.to_pylist()], pa.string())
