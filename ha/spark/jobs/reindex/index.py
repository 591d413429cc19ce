"""Index files from keys that are already in the log's order: an entry's place depends on nothing but its number.

Pass 1 leaves, for each range of the log, a file of `KEY_DTYPE` in physical order. Their counts say which keys are in
which index file, so each file is built alone, from slices of one or several of them. Within a file an entry points to
the one before it in its slot: found by sorting a chunk by slot, and for the first of each slot in a table of all slots.
Memory: the slot table (4 B a slot) and a chunk, however large the file is. Sources: IndexFile, IndexService.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ha.protocol.entry_dtypes import INDEX_ENTRY_DTYPE
from ha.protocol.store_files import INDEX_HEADER_SIZE, IndexHeader, index_entry_position, index_file_size

KEY_DTYPE = np.dtype([("key_hash", "<i4"), ("physical_offset", "<i8"), ("store_ms", "<i8")])
"""A key on its way into the index: hash as the index stores it, record's physical offset (bytes), store time (ms)."""
_CHUNK = 1 << 19
_SECONDS_MAX = 0x7FFFFFFF
_EARLIEST_ZONE_S = -12 * 3600

Keys = npt.NDArray[np.void]


class KeySlice(msgspec.Struct, frozen=True):
    """Keys [begin, end) of a file of `KEY_DTYPE`."""

    path: str
    begin: int
    end: int


class IndexFilePlan(msgspec.Struct, frozen=True):
    """One index file to be built: its name, the keys in it, and the last key of the file before it."""

    name: str
    slices: tuple[KeySlice, ...]
    before: KeySlice | None


def plan_index_files(keys: Sequence[tuple[Path, int]], entry_count_max: int) -> list[IndexFilePlan]:
    """Cut the keys (files of `KEY_DTYPE` with their counts, in the log's order) into index files.

    A file takes `entry_count_max` − 1 keys, as entry 0 is never used. Reads one key per file, for the names: they must
    ascend, also towards those that a broker will give later by its local clock, wherever it is. So a file is named
    after the store time of its first key as the clocks 12 hours west of Greenwich show it, and a name already taken is
    raised by a millisecond.
    """
    room = entry_count_max - 1
    plans: list[IndexFilePlan] = []
    current: list[KeySlice] = []
    taken = 0
    name_ms = 0
    last: KeySlice | None = None
    before: KeySlice | None = None

    def finish() -> None:
        nonlocal current, taken, name_ms, before
        name_ms = max(int(read_keys(current[0])[0]["store_ms"]), name_ms + 1)
        plans.append(IndexFilePlan(_name(name_ms), tuple(current), before))
        current, taken, before = [], 0, last

    for path, count in keys:
        at = 0
        while at < count:
            step = min(count - at, room - taken)
            current.append(KeySlice(str(path), at, at + step))
            at += step
            taken += step
            last = KeySlice(str(path), at - 1, at)
            if taken == room:
                finish()
    if current:
        finish()
    return plans


def read_keys(part: KeySlice) -> Keys:
    """Read a slice into memory."""
    return np.fromfile(part.path, KEY_DTYPE, count=part.end - part.begin, offset=part.begin * KEY_DTYPE.itemsize)


def build_index_file(plan: IndexFilePlan, directory: Path, *, slot_count: int, entry_count_max: int) -> int:
    """Write one index file, sparse and of full size, and sync it; return its entries.

    The file appears under its name when it is whole: a name that exists was finished by an earlier attempt and is kept.
    """
    path = directory / plan.name
    if path.exists():
        return sum(part.end - part.begin for part in plan.slices)
    partial = directory / f"{plan.name}.partial"
    header = IndexHeader()
    if plan.before is not None:
        end = read_keys(plan.before)[0]
        header.begin_timestamp_ms = int(end["store_ms"])
    slots = np.zeros(slot_count, np.int32)
    number = 1
    with partial.open("wb") as file:
        file.truncate(index_file_size(slot_count, entry_count_max))
        for keys in _chunks(plan.slices):
            file.seek(index_entry_position(slot_count, number))
            file.write(_entries(keys, number, slots, header).tobytes())
            number += len(keys)
        header.hash_slot_count = int(np.count_nonzero(slots))
        header.index_count = number
        _write_table(file.fileno(), slots)
        file.seek(0)
        file.write(header.pack())
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return number - 1


def _chunks(slices: Sequence[KeySlice]) -> Iterator[Keys]:
    for part in slices:
        for begin in range(part.begin, part.end, _CHUNK):
            yield read_keys(KeySlice(part.path, begin, min(part.end, begin + _CHUNK)))


def _entries(keys: Keys, first: int, slots: npt.NDArray[np.int32], header: IndexHeader) -> Keys:
    """Entries `first`… of the file; `slots` and `header` are brought up to date."""
    count = len(keys)
    stored = keys["store_ms"].astype(np.int64)
    entries = np.empty(count, INDEX_ENTRY_DTYPE)
    entries["key_hash"] = keys["key_hash"]
    entries["physical_offset"] = keys["physical_offset"]
    begin_ms = header.begin_timestamp_ms
    if first == 1:
        # The very first entry counts from the end of the file before: begin is set behind it.
        header.begin_timestamp_ms = int(stored[0])
        header.begin_physical_offset = int(keys["physical_offset"][0])
    seconds = _seconds(stored, header.begin_timestamp_ms)
    if first == 1:
        seconds[:1] = _seconds(stored[:1], begin_ms)
    entries["seconds"] = seconds
    header.end_timestamp_ms = int(stored[-1])
    header.end_physical_offset = int(keys["physical_offset"][-1])

    # One number that sorts by slot, then by place: plain integers sort several times faster than by a stable argsort.
    ordered = np.sort((keys["key_hash"] % np.int64(len(slots))) << 20 | np.arange(count))
    slot, place = ordered >> 20, ordered & ((1 << 20) - 1)
    previous = np.empty(count, np.int32)
    previous[1:] = first + place[:-1]
    is_first = np.empty(count, np.bool_)
    is_first[0] = True
    np.not_equal(slot[1:], slot[:-1], out=is_first[1:])
    previous[is_first] = slots[slot[is_first]]
    entries["previous"][place] = previous
    is_last = np.append(is_first[1:], True)
    slots[slot[is_last]] = first + place[is_last]
    return entries


def _seconds(stored_ms: npt.NDArray[np.int64], begin_ms: int) -> npt.NDArray[np.int64]:
    if begin_ms <= 0:
        return np.zeros(len(stored_ms), np.int64)
    return np.clip((stored_ms - begin_ms) // 1000, 0, _SECONDS_MAX)


def _write_table(descriptor: int, slots: npt.NDArray[np.int32]) -> None:
    """Write the slots, but not their untouched pages: a file of few keys stays as small on disk as a broker's."""
    step = 1 << 16
    for begin in range(0, len(slots), step):
        part = slots[begin : begin + step]
        if part.any():
            os.pwrite(descriptor, part.astype(">i4").tobytes(), INDEX_HEADER_SIZE + begin * 4)


def _name(store_ms: int) -> str:
    seconds, ms = divmod(store_ms, 1000)
    return time.strftime("%Y%m%d%H%M%S", time.gmtime(seconds + _EARLIEST_ZONE_S)) + f"{ms:03d}"
