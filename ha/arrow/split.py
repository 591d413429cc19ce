"""Splits the property strings of many records into pieces `name 0x01 value`, if all strings have this form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ha.protocol.compiled import with_compiled_twin

Int64s = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Positions of the start, the separator and the end of each piece `name 0x01 value`. `row_bounds`: for each row,
    the number of pieces in the rows before it, followed by the number of all pieces.
    """

    starts: Int64s
    separators: Int64s
    ends: Int64s
    row_bounds: Int64s


@with_compiled_twin
def usual_pieces(raw: npt.NDArray[np.uint8], offsets: Int64s) -> Pieces | None:
    """Splits the strings `raw[offsets[i] : offsets[i + 1]]`, which lie end to end from 0 on, at 0x02.

    Returns None unless all bytes are ASCII and each piece has one 0x01, with at least one byte before and after it. A
    string may be empty, and may end with 0x02 or not.
    """
    if len(raw) and raw.max() >= 0x80:
        return None
    starts, separators, ends = piece_bounds(raw, offsets)
    if len(separators) != len(ends) or not ((starts < separators) & (separators + 1 < ends)).all():
        return None
    return Pieces(starts, separators, ends, np.searchsorted(starts, offsets))


def piece_bounds(raw: npt.NDArray[np.uint8], offsets: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Returns the starts of the pieces, the positions of 0x01 (one per piece in the usual form), and the ends."""
    ends, closes = _piece_ends(raw, offsets)
    starts = np.zeros_like(ends)
    starts[1:] = ends[:-1] + closes[:-1]
    return starts, np.flatnonzero(raw == 1), ends


def _piece_ends(raw: npt.NDArray[np.uint8], offsets: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the end of each piece, and the number of bytes to skip to the next one: 1 if 0x02 ends the piece, 0 if
    the end of the row does."""
    marks = np.flatnonzero(raw == 2)
    row_ends = offsets[1:]
    row_ends = row_ends[row_ends > offsets[:-1]]
    open_ends = row_ends[raw[row_ends - 1] != 2]
    if not len(open_ends):
        return marks, np.ones(len(marks), np.int64)
    at = np.searchsorted(marks, open_ends)
    return np.insert(marks, at, open_ends), np.insert(np.ones(len(marks), np.int64), at, 0)
