"""How keys become the entries of an index file: each is chained to the one before it in its slot."""

from __future__ import annotations

from ha.protocol.compiled import with_compiled_twin
from ha.protocol.record_digest import KEY
from ha.protocol.store_files import INDEX_ENTRY

Slots = memoryview
"""A slot table: int32 in the machine's byte order"""
PAGE_SLOTS = 1024
"""Slots that are written together"""
SECONDS_MAX = 0x7FFFFFFF


@with_compiled_twin
def chain_keys(keys: bytes, slots: Slots, first: int, begin_ms: int) -> tuple[bytes, int]:
    """Return the entries of `keys` (`record_digest.KEY`), numbered from `first` on, and how many slots were free.

    `slots` has the number of each slot's newest entry, 0 without one. `begin_ms` is the file's begin, 0 for a file that
    follows none; entry 1 begins its file.
    """
    slot_count = len(slots)
    staged: dict[int, int] = {}
    entries: list[bytes] = []
    free_count = 0
    pack = INDEX_ENTRY.pack
    for number, (key_hash, physical_offset, store_ms) in enumerate(KEY.iter_unpack(keys), first):
        seconds = min(max((store_ms - begin_ms) // 1000, 0), SECONDS_MAX) if begin_ms > 0 else 0
        slot = key_hash % slot_count
        previous = staged.get(slot) or slots[slot]
        free_count += previous == 0
        entries.append(pack(key_hash, physical_offset, seconds, previous))
        staged[slot] = number
        if number == 1:
            begin_ms = store_ms
    return b"".join(entries), free_count


@with_compiled_twin
def link_slots(keys: bytes, slots: Slots, first: int, dirty_pages: bytearray) -> None:
    """Have `slots` lead to the entries of `keys`, numbered from `first` on, and mark the pages this changes."""
    slot_count = len(slots)
    for number, (key_hash, _, _) in enumerate(KEY.iter_unpack(keys), first):
        slot = key_hash % slot_count
        slots[slot] = number
        dirty_pages[slot // PAGE_SLOTS] = 1


@with_compiled_twin
def lead_within(slots: Slots, stop: int) -> bool:
    """Whether none of `slots` leads to an entry at or beyond number `stop`, or to one that can't be."""
    return min(slots) >= 0 and max(slots) < stop


@with_compiled_twin
def follow_chains(entries: bytes, newest: Slots, first: int, last_physical: int) -> tuple[int, int, int]:
    """Compare `entries`, whole and numbered from `first` on, with those before them.

    `newest` has the number of each slot's newest entry before them, 0 without one, and is brought up to date;
    `last_physical` is the physical offset of the one before. Returns how many fit, up to the first that doesn't; how
    many of these were the first in their slots; and the physical offset of the last of them. The compiled twin lets
    other threads run meanwhile: a file may have 20 million entries.
    """
    slot_count = len(newest)
    fitting_count = free_count = 0
    for key_hash, physical_offset, seconds, previous in INDEX_ENTRY.iter_unpack(entries):
        slot = key_hash % slot_count
        if key_hash < 0 or seconds < 0 or previous != newest[slot] or physical_offset < last_physical:
            break
        free_count += previous == 0
        newest[slot] = first + fitting_count
        last_physical = physical_offset
        fitting_count += 1
    return fitting_count, free_count, last_physical
