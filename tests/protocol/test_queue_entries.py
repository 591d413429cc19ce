"""How far a piece of a queue's file holds entries: as the twins say, and as the rules do."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ha.protocol.compiled import pure
from ha.protocol.queue_entries import count_entries
from ha.protocol.store_files import BLANK_SIZE, ENTRY

TWINS = (count_entries, pure(count_entries))
INT64_MAX = (1 << 63) - 1

Count = Callable[[bytes, int], tuple[int, int, bool]]


def packed(*entries: tuple[int, int]) -> bytes:
    return b"".join(ENTRY.pack(physical_offset, size, -1) for physical_offset, size in entries)


@pytest.mark.parametrize("count", TWINS)
class TestEach:
    def test_empty_input_has_no_entries(self, count: Count) -> None:
        assert count(b"", 7) == (0, 7, True)

    def test_zeros_end_a_queue(self, count: Count) -> None:
        assert count(packed((100, 50), (150, 50), (0, 0), (200, 50)), 100) == (2, 200, True)

    def test_negative_offset_or_size_ends_a_queue(self, count: Count) -> None:
        assert count(packed((100, 50), (-1, 50)), 0) == (1, 150, True)
        assert count(packed((100, -50)), 0) == (0, 0, True)

    def test_gaps_between_records_are_allowed(self, count: Count) -> None:
        assert count(packed((100, 50), (1000, 50)), 0) == (2, 1050, True)

    def test_entry_that_points_back_is_damage(self, count: Count) -> None:
        assert count(packed((100, 50), (149, 50)), 0) == (1, 150, False)
        assert count(packed((100, 50)), 101) == (0, 101, False)

    def test_blank_entries_are_counted(self, count: Count) -> None:
        assert count(packed((0, BLANK_SIZE), (0, BLANK_SIZE), (300, 1), (0, BLANK_SIZE)), 200) == (4, 301, True)

    def test_maximum_offset_does_not_overflow(self, count: Count) -> None:
        largest = (INT64_MAX, BLANK_SIZE - 1)
        assert count(packed(largest, (0, 1)), 0) == (1, sum(largest), False)


near = st.integers(0, 40)
odd = st.sampled_from([-1, 0, INT64_MAX, -INT64_MAX - 1])


@given(
    st.lists(st.tuples(near | odd, near | st.sampled_from([-1, BLANK_SIZE, -BLANK_SIZE - 1])), max_size=12),
    near | st.just(INT64_MAX),
)
def test_twins_agree(entries: list[tuple[int, int]], last_end: int) -> None:
    assert TWINS[0](packed(*entries), last_end) == TWINS[1](packed(*entries), last_end)
