"""Finds messages by key in a store's index files, for readers that don't own them.

The layout is in `ha.protocol.store_files`. A file does not store its number of slots. RocketMQ's files have room for
four entries for each slot; this is assumed of every file, and checked against its entries.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ha.arrow.heads import Int64s
from ha.protocol.store_files import (
    INDEX_ENTRY,
    INDEX_ENTRY_SIZE,
    INDEX_HEADER_SIZE,
    INDEX_SLOT,
    INDEX_SLOT_SIZE,
    IndexHeader,
    index_entry_position,
    index_key,
    index_key_hash,
    index_slot_position,
)

_ENTRIES_PER_SLOT = 4
_CHECKED_ENTRIES = 16
_CHAIN_MAX = 10_000_000


class KeyHits(NamedTuple):
    """Physical offsets (ascending) of records that may have one of the keys, according to the index files.

    `spans`: physical offsets of the first and the last record of each file, ascending. A file has all keys of the
    records between these two; the two themselves may also have keys in another file.
    """

    offsets: Int64s
    spans: list[tuple[int, int]]

    def may_be_at(self, physical_offsets: Int64s) -> npt.NDArray[np.bool_]:
        """Returns a mask of the records that may have one of the keys: those found in the index, and those that are not
        between the two records of any of `spans`."""
        begins, ends = np.array(self.spans, np.int64).T
        file = np.searchsorted(begins, physical_offsets) - 1
        is_between: npt.NDArray[np.bool_] = (file < 0) | (physical_offsets >= ends[file])
        return is_between | np.isin(physical_offsets, self.offsets)


def find_keys(directory: Path, topics: Iterable[str], keys: Iterable[str]) -> KeyHits | None:
    """Looks up `keys` under each topic. Returns None if there is no index or it has no entries, or if one of its files
    can't be opened, is shorter than a header (being created), or does not have room for four entries for each slot.

    Hits are found by hash, so the caller has to compare the records' own keys.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return None
    hashes = sorted({index_key_hash(index_key(topic, key)) for topic in topics for key in keys})
    found: list[int] = []
    spans: list[tuple[int, int]] = []
    for name in names:
        path = directory / name
        try:
            raw = path.open("rb")
        except OSError:
            return None
        if os.fstat(raw.fileno()).st_size < INDEX_HEADER_SIZE:  # being created, or left by a crash
            raw.close()
            return None
        with raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            header = IndexHeader.unpack(mapped[:INDEX_HEADER_SIZE])
            if header.index_count <= 1:
                continue
            slot_count = _slot_count(mapped, header)
            if slot_count is None:
                return None
            spans.append((header.begin_physical_offset, header.end_physical_offset))
            for wanted in hashes:
                found.extend(_chain(mapped, slot_count, wanted))
    return KeyHits(np.unique(np.array(found, np.int64)), sorted(spans)) if spans else None


def _slot_count(mapped: mmap.mmap, header: IndexHeader) -> int | None:
    unit = INDEX_SLOT_SIZE + _ENTRIES_PER_SLOT * INDEX_ENTRY_SIZE
    slot_count, rest = divmod(len(mapped) - INDEX_HEADER_SIZE, unit)
    if rest or not slot_count or header.index_count > _ENTRIES_PER_SLOT * slot_count:
        return None
    step = max(1, (header.index_count - 1) // _CHECKED_ENTRIES)
    for number in range(1, header.index_count, step):
        key_hash, physical_offset, _, previous = INDEX_ENTRY.unpack_from(
            mapped, index_entry_position(slot_count, number)
        )
        (newest,) = (
            INDEX_SLOT.unpack_from(mapped, index_slot_position(key_hash % slot_count)) if key_hash >= 0 else (0,)
        )
        is_plausible = number <= newest < _ENTRIES_PER_SLOT * slot_count and 0 <= previous < number
        if not is_plausible or physical_offset < header.begin_physical_offset:
            return None
    return slot_count


def _chain(mapped: mmap.mmap, slot_count: int, wanted: int) -> list[int]:
    (number,) = INDEX_SLOT.unpack_from(mapped, index_slot_position(wanted % slot_count))
    found = []
    for _ in range(_CHAIN_MAX):
        if number <= 0 or number >= _ENTRIES_PER_SLOT * slot_count:
            break
        key_hash, physical_offset, _, previous = INDEX_ENTRY.unpack_from(
            mapped, index_entry_position(slot_count, number)
        )
        if key_hash == wanted:
            found.append(physical_offset)
        if previous >= number:
            break
        number = previous
    return found
