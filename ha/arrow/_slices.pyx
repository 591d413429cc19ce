"""Compiled twin of `take_slices` in slices.py."""

from libc.string cimport memcpy

import numpy as np
import pyarrow as pa


def take_slices(buffer not None, begins not None, sizes not None, kind=None):
    cdef const unsigned char[::1] data = np.frombuffer(buffer, np.uint8) if len(buffer) else np.empty(0, np.uint8)
    cdef const long long[::1] all_begins = begins, all_sizes = sizes
    cdef Py_ssize_t count = all_begins.shape[0], total = 0, index, at = 0, length = data.shape[0]
    cdef unsigned char[::1] copy
    cdef int[::1] offsets
    if all_sizes.shape[0] != count:
        raise ValueError(f"{count} begins and {all_sizes.shape[0]} sizes")
    for index in range(count):
        if not 0 <= all_begins[index] <= length - all_sizes[index] or all_sizes[index] < 0:
            raise ValueError(f"{all_sizes[index]} bytes at {all_begins[index]} of {length}")
        total += all_sizes[index]
    if total > 0x7FFFFFFF:
        raise OverflowError(f"{total} bytes are too many for an array")
    # Memory of the Arrow pool is reused by the next batch.
    taken = pa.allocate_buffer(total)
    bounds = np.empty(count + 1, np.int32)
    offsets = bounds
    offsets[0] = 0
    if total:
        copy = np.frombuffer(taken, np.uint8)
        for index in range(count):
            if all_sizes[index]:
                memcpy(&copy[at], &data[all_begins[index]], all_sizes[index])
            at += all_sizes[index]
            offsets[index + 1] = <int>at
    else:
        bounds[:] = 0
    return pa.Array.from_buffers(pa.binary() if kind is None else kind, count, [None, pa.py_buffer(bounds), taken])
