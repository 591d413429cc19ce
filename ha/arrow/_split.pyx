"""Compiled twin of `usual_pieces` in split.py."""

from libc.string cimport memchr

import numpy as np

from ha.arrow.split import Pieces


def usual_pieces(raw not None, offsets not None):
    cdef const unsigned char[::1] data = raw
    cdef const long long[::1] bounds = offsets
    cdef Py_ssize_t size = data.shape[0], row_count = bounds.shape[0] - 1
    cdef Py_ssize_t row, at, end, separator, stop, count = 0, piece_count = 0
    cdef unsigned char seen = 0
    cdef const unsigned char *begin
    cdef const unsigned char *found
    cdef long long[::1] starts, separators, ends, row_bounds
    for at in range(size):
        seen |= data[at]
        piece_count += data[at] == 1
    if seen >= 0x80:
        return None
    pieces = Pieces(*(np.empty(each, np.int64) for each in (piece_count, piece_count, piece_count, row_count + 1)))
    starts, separators, ends, row_bounds = pieces
    begin = &data[0] if size else NULL
    for row in range(row_count):
        row_bounds[row] = count
        at, end = bounds[row], bounds[row + 1]
        if not 0 <= at <= end <= size:
            raise ValueError(f"string {row} is at {at} to {end} of {size} bytes")
        while at < end:
            found = <const unsigned char *>memchr(begin + at, 1, end - at)
            if found == NULL:
                return None
            separator = found - begin
            found = <const unsigned char *>memchr(begin + at, 2, end - at)
            stop = end if found == NULL else found - begin
            if not at < separator < stop - 1 or count == piece_count:
                return None
            starts[count], separators[count], ends[count] = at, separator, stop
            count += 1
            at = stop + 1
    row_bounds[row_count] = count
    return pieces if count == piece_count else None  # a second 0x01 in a piece is one too many
