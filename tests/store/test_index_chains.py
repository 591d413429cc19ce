"""The scrub's check of index entries: each refers to the previous one of its slot."""

import itertools
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.protocol.compiled import pure
from ha.protocol.index_entries import Slots, count_used, follow_chains
from ha.protocol.store_files import INDEX_ENTRY, INDEX_ENTRY_SIZE

TWINS = [follow_chains, pure(follow_chains)]
SLOT_COUNT = 7

hashes = st.lists(st.sampled_from([0, 1, 6, 7, 8, 13, 14, 0x7FFFFFFF]), min_size=1, max_size=60)


def entries_of(key_hashes: list[int]) -> bytes:
    """Returns entries of contiguous records of 100 bytes, one key each, chained according to the specification."""
    newest: dict[int, int] = {}
    raw = b""
    for number, key_hash in enumerate(key_hashes, 1):
        slot = key_hash % SLOT_COUNT
        raw += INDEX_ENTRY.pack(key_hash, 100 * (number - 1), number // 3, newest.get(slot, 0))
        newest[slot] = number
    return raw


def follow(twin: Any, raw: bytes, cuts: list[int]) -> tuple[int, int, int, list[int]]:
    """Returns, over all chunks, the number of consistent entries and of used slots, the last offset, the slots."""
    newest = np.zeros(SLOT_COUNT, np.intc)
    fitting, free, last_physical = 0, 0, -1
    count = len(raw) // INDEX_ENTRY_SIZE
    for begin, stop in itertools.pairwise([0, *sorted(cut for cut in cuts if cut < count), count]):
        piece = raw[begin * INDEX_ENTRY_SIZE : stop * INDEX_ENTRY_SIZE]
        fits, frees, last_physical = twin(piece, newest.data, begin + 1, last_physical)
        fitting, free = fitting + fits, free + frees
        if fits < stop - begin:
            break
    return fitting, free, last_physical, newest.tolist()


@given(hashes, st.lists(st.integers(0, 60), max_size=3))
def test_sound_entries_are_accepted_in_chunks_of_any_size(key_hashes: list[int], cuts: list[int]) -> None:
    newest = [0] * SLOT_COUNT
    for number, key_hash in enumerate(key_hashes, 1):
        newest[key_hash % SLOT_COUNT] = number
    used = len({key_hash % SLOT_COUNT for key_hash in key_hashes})
    for twin in TWINS:
        assert follow(twin, entries_of(key_hashes), cuts) == (
            len(key_hashes), used, 100 * (len(key_hashes) - 1), newest,
        )  # fmt: skip


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("field", "value"),
    [(0, -1), (0, 5), (1, 100), (1, -1), (2, -1), (3, 0), (3, 1), (3, 4), (3, -1)],
    ids=lambda value: str(value),
)
def test_counting_stops_at_an_inconsistent_entry(twin: Any, field: int, value: int) -> None:
    fields = list(INDEX_ENTRY.iter_unpack(entries_of([0, 1, 7, 14, 8])))
    assert fields[3] == (14, 300, 1, 3)
    fields[3] = (*fields[3][:field], value, *fields[3][field + 1 :])
    raw = b"".join(INDEX_ENTRY.pack(*each) for each in fields)
    fitting, free, last_physical, newest = follow(twin, raw, [])
    assert (fitting, free, last_physical) == (3, 2, 200)
    assert newest == [3, 2, 0, 0, 0, 0, 0]


@given(hashes, st.lists(st.tuples(st.integers(0, 1 << 11), st.integers(0, 255)), max_size=3), st.integers(0, 60))
def test_both_implementations_agree_on_damaged_entries(
    key_hashes: list[int], damage: list[tuple[int, int]], cut: int
) -> None:
    raw = bytearray(entries_of(key_hashes))
    for place, value in damage:
        raw[place % len(raw)] = value
    compiled, python = (follow(twin, bytes(raw), [cut]) for twin in TWINS)
    assert compiled == python


@pytest.mark.parametrize("twin", [count_used, pure(count_used)])
def test_used_slots_are_counted_if_all_point_to_existing_entries(twin: Any) -> None:
    assert twin(slots_of(0, 4, 2), 5) == 2
    assert twin(slots_of(0, 5, 2), 5) == -1
    assert twin(slots_of(3, -1, 0), 5) == -1
    assert twin(slots_of(0), 1) == 0


def slots_of(*numbers: int) -> Slots:
    return memoryview(array("i", numbers))
