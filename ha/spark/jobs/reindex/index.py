"""Builds index files from the keys of the log.

Pass 1 writes, for each range of the log, a work file of keys (`record_digest.KEY`) in the order of the log. The
number of keys in each work file determines which keys belong to which index file. Index files are therefore built
independently of each other, each from slices of one or several work files, by the store's own `IndexFile`. This takes
memory for the slot table (4 bytes per slot) and a chunk of keys, regardless of the number of keys.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ha.protocol.record_digest import KEY, KEY_SIZE
from ha.protocol.store_files import index_file_size
from ha.store.files import OsDisk
from ha.store.index_file import IndexFile, blank_slots

_CHUNK_KEYS = 1 << 19
_EARLIEST_ZONE_S = -12 * 3600


class KeySlice(msgspec.Struct, frozen=True):
    """Keys [begin, end) of a work file, counted from 0."""

    path: str
    begin: int
    end: int


class IndexFilePlan(msgspec.Struct, frozen=True):
    """An index file to build: its name, its keys, and the last key of the previous file (None for the first file), from
    whose store time the time of the first entry is counted."""

    name: str
    slices: tuple[KeySlice, ...]
    before: KeySlice | None


def plan_index_files(keys: Sequence[tuple[Path, int]], entry_count_max: int) -> list[IndexFilePlan]:
    """Cuts the keys into index files. `keys`: each work file with its number of keys, in the order of the log.

    A file takes `entry_count_max` - 1 keys, as entry 0 is never used. Reads the first key of each file, for its name;
    may raise OSError. A broker names new files after its local time, in any time zone, and their names must sort after
    these. A file is therefore named after the store time of its first key in the time zone UTC-12 or, if that is not
    later than the previous name, one millisecond after the previous name.
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
        first = KeySlice(current[0].path, current[0].begin, current[0].begin + 1)
        _, _, stored_ms = KEY.unpack(read_keys(first))
        name_ms = max(stored_ms, name_ms + 1)
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


def read_keys(part: KeySlice) -> bytes:
    """Returns the keys of a slice, as bytes."""
    with open(part.path, "rb") as file:
        file.seek(part.begin * KEY_SIZE)
        return file.read((part.end - part.begin) * KEY_SIZE)


def build_index_file(plan: IndexFilePlan, directory: Path, *, slot_count: int, entry_count_max: int) -> None:
    """Writes one index file, sparse and of full size, and syncs it. Raises OSError.

    The file gets its name when it is complete. If a file of this name exists, an earlier attempt finished it; it is
    kept.
    """
    path = directory / plan.name
    if path.exists():
        return
    partial = directory / f"{plan.name}.partial"
    partial.unlink(missing_ok=True)
    created = OsDisk().create(partial, index_file_size(slot_count, entry_count_max), allocate=False)
    file = IndexFile(created, slot_count, entry_count_max)
    file.slots = blank_slots(slot_count)
    if plan.before is not None:
        _, _, file.begin_timestamp_ms = KEY.unpack(read_keys(plan.before))
    for keys in _chunks(plan.slices):
        file.put(keys, new_bytes_max=0)
    file.write(file.take_unwritten())
    created.sync()
    partial.rename(path)


def _chunks(slices: Sequence[KeySlice]) -> Iterator[bytes]:
    for part in slices:
        for begin in range(part.begin, part.end, _CHUNK_KEYS):
            yield read_keys(KeySlice(part.path, begin, min(part.end, begin + _CHUNK_KEYS)))


def _name(store_ms: int) -> str:
    seconds, ms = divmod(store_ms, 1000)
    return time.strftime("%Y%m%d%H%M%S", time.gmtime(seconds + _EARLIEST_ZONE_S)) + f"{ms:03d}"
