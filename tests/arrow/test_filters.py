"""Two filters combined pass the rows that pass both."""

from pathlib import Path

import pytest

from ha.arrow import RowFilter
from ha.arrow.key_index import find_keys

A, B, AB = frozenset("a"), frozenset("b"), frozenset("ab")


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (RowFilter(topics=AB), RowFilter(topics=A), RowFilter(topics=A)),
        (RowFilter(topics=A), RowFilter(topics=B), RowFilter(topics=frozenset())),
        (
            RowFilter(queue_ids=frozenset({1, 2})),
            RowFilter(queue_ids=frozenset({2})),
            RowFilter(queue_ids=frozenset({2})),
        ),
        (RowFilter(tags=AB), RowFilter(topics=A), RowFilter(tags=AB, topics=A)),
        (RowFilter(keys=A), RowFilter(), RowFilter(keys=A)),
        (
            RowFilter(queue_offset_begin=1, queue_offset_end=9),
            RowFilter(queue_offset_begin=2, queue_offset_end=8),
            RowFilter(queue_offset_begin=2, queue_offset_end=8),
        ),
        (
            RowFilter(physical_begin=1, physical_end=9),
            RowFilter(physical_begin=2, physical_end=10),
            RowFilter(physical_begin=2, physical_end=9),
        ),
        (
            RowFilter(store_begin_ms=5, store_end_ms=6),
            RowFilter(store_begin_ms=4, store_end_ms=7),
            RowFilter(store_begin_ms=5, store_end_ms=6),
        ),
    ],
)
def test_rows_pass_both_filters(one: RowFilter, other: RowFilter, both: RowFilter) -> None:
    assert one.restrict(other) == other.restrict(one) == both


def test_two_sets_of_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="keys"):
        RowFilter(keys=A).restrict(RowFilter(keys=A))


@pytest.mark.parametrize("size", [0, 1, 39])
def test_an_index_file_without_a_header_is_no_index(tmp_path: Path, size: int) -> None:
    """One that a broker is creating, or that a crash left."""
    (tmp_path / "20261128000000000").write_bytes(bytes(size))
    assert find_keys(tmp_path, ["t"], ["k"]) is None
