"""Converts keys to the entries of an index file, each of which is chained to the previous entry in its slot."""

from __future__ import annotations

from ha.protocol.compiled import with_compiled_twin
from ha.protocol.record_digest import KEY
from ha.protocol.store_files import INDEX_ENTRY

Slots = memoryview
"""A slot table: int32 in native byte order"""
PAGE_SLOTS = 1024
"""Number of slots in a page, the unit in which a slot table is written to its file"""
SECONDS_MAX = 0x7FFFFFFF


@with_compiled_twin
def chain_keys(keys: bytes, slots: Slots, first: int, begin_ms: int) -> tuple[bytes, int]:
    """Returns the entries of `keys` (`record_digest.KEY`), numbered from `first`, and the number of slots that get
    their first entry. Does not change `slots`; `link_slots` does.

    `slots` holds the number of the newest entry of each slot (0: none). An entry's time is in seconds since `begin_ms`,
    the file's begin timestamp (0 if `begin_ms` is 0). A new file (`first` is 1) has no begin timestamp yet: pass the
    end timestamp of the previous file (0: none). It is used for entry 1 only; the later entries use the store time of
    entry 1, which becomes the begin timestamp.
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
    """Points `slots` to the entries of `keys`, numbered from `first`, and marks the changed pages in `dirty_pages`."""
    slot_count = len(slots)
    for number, (key_hash, _, _) in enumerate(KEY.iter_unpack(keys), first):
        slot = key_hash % slot_count
        slots[slot] = number
        dirty_pages[slot // PAGE_SLOTS] = 1


@with_compiled_twin
def count_used(slots: Slots, stop: int) -> int:
    """Returns how many of `slots` are not 0; -1 if one of them is negative, or not below `stop`. Raises ValueError if
    there are no slots."""
    if min(slots) < 0 or max(slots) >= stop:
        return -1
    return len(slots) - slots.tolist().count(0)


@with_compiled_twin
def follow_chains(entries: bytes, newest: Slots, first: int, last_physical: int) -> tuple[int, int, int]:
    """Checks that `entries`, whole and numbered from `first`, continue the chains of the entries before them.

    `newest` holds the number of the newest preceding entry of each slot (0: none) and is updated; `last_physical` is
    the physical offset in the preceding entry. Returns the number of valid entries before the first invalid one, how
    many of them are the first in their slot, and the physical offset in the last of them (`last_physical` if there is
    none). The compiled twin releases the GIL, because a file may have 20 million entries.
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
