"""Builds Arrow arrays from NumPy's memory and from short lists of texts, without `pa.array`.

The first call of `pa.array` imports pandas (0.3 CPU seconds), only to check whether its argument is a pandas object.
Spark starts a Python process for each task slot and ends it after an idle minute, so that import would dominate small
queries. The common path uses this module; `pa.array` is for rare cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_TYPES = {np.dtype(np.int32): pa.int32(), np.dtype(np.int64): pa.int64(), np.dtype(np.bool_): pa.bool_()}


def from_numpy(
    values: npt.NDArray[Any], kind: pa.DataType | None = None, *, nulls: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Returns native int32, int64 or bool `values` as an Arrow array of the same type, or of type `kind`, which must
    have the same width.

    Contiguous numbers are not copied. Rows where `nulls` is true are null.
    """
    validity = None if nulls is None else _bits(~nulls)
    content = _bits(values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(_TYPES[values.dtype] if kind is None else kind, len(values), [validity, content])


def from_texts(texts: Sequence[str]) -> pa.Array:
    """Returns a short list of texts as an Arrow string array."""
    raw = [text.encode() for text in texts]
    offsets = np.zeros(len(raw) + 1, np.int32)
    np.cumsum([len(text) for text in raw], out=offsets[1:])
    return pa.Array.from_buffers(pa.string(), len(raw), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(raw))])


def to_mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Returns an Arrow array of booleans as a NumPy array; null becomes false."""
    validity, content = array.buffers()
    mask = _unpacked(content, array)
    return mask if validity is None else mask & _unpacked(validity, array)


def to_ints(array: pa.Array) -> npt.NDArray[np.int64]:
    """Returns an int32 array without nulls as NumPy's int64."""
    values = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array)]
    return values.astype(np.int64)


def _unpacked(bits: pa.Buffer, array: pa.Array) -> npt.NDArray[np.bool_]:
    whole = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return whole[array.offset : array.offset + len(array)].view(np.bool_)


def _bits(values: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
