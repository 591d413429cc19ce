"""Queue offsets folded range by range give what one look at all of them gives, however the log is cut."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ha.audit.queues import QueueFold, Span, queue_facts


def fold(offsets: list[int], cuts: list[int]) -> tuple[QueueFold, list[Span], list[Span]]:
    """Feeds `offsets` cut at `cuts`; the physical offset of the n-th record is 1000 n."""
    folded = QueueFold()
    repeated: list[Span] = []
    displaced: list[Span] = []
    bounds = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(offsets)), len(offsets)]
    for low, high in pairwise(bounds):
        part = np.array(offsets[low:high], np.int64)
        folded.add(queue_facts(part, np.arange(low, high, dtype=np.int64) * 1000))
        repeated += folded.repeated
        displaced += folded.displaced
    return folded, repeated, displaced


@given(st.integers(0, 50), st.integers(1, 60), st.sets(st.integers(1, 58)), st.lists(st.integers(0, 60)))
def test_missing_offsets_are_holes_and_nothing_else_is_found(
    first: int, count: int, left_out: set[int], cuts: list[int]
) -> None:
    offsets = [first + number for number in range(count) if number not in left_out or number in (0, count - 1)]
    folded, repeated, displaced = fold(offsets, cuts)
    assert (folded.begin, folded.end, folded.count) == (offsets[0], offsets[-1] + 1, len(offsets))
    missing = {offset for low, high, _ in folded.holes() for offset in range(low, high)}
    assert missing == set(range(offsets[0], offsets[-1] + 1)) - set(offsets)
    assert repeated == displaced == []
    for _, end, place in folded.holes():
        assert offsets[place // 1000] == end


@settings(max_examples=200)
@given(st.integers(3, 40), st.data())
def test_one_wrong_offset_is_one_finding_at_its_record(count: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, count - 2))
    says = data.draw(st.one_of(st.integers(0, count - 1), st.integers(count + 5, 10**12)).filter(lambda v: v != wrong))
    cuts = data.draw(st.lists(st.integers(0, count), max_size=3))
    offsets = list(range(count))
    offsets[wrong] = says
    folded, repeated, displaced = fold(offsets, cuts)
    # A range with two or three records of the queue can't tell which is wrong: a neighbour may be named, too.
    neighbours = 1 if cuts else 0
    if says < wrong:
        assert (says, wrong * 1000) in [(span.begin, span.physical_offset) for span in repeated]
        assert len(repeated) + len(displaced) <= 1 + neighbours
    elif says >= count:
        assert repeated == []
        assert (says, wrong * 1000) in [(span.begin, span.physical_offset) for span in displaced]
        assert len(displaced) <= 1 + neighbours
    else:  # the record with the right offset comes later, so one of the two is reported
        assert len(repeated) + len(displaced) in (1, 2)
    assert [hole[:2] for hole in folded.holes()] == ([(wrong, wrong + 1)] if wrong else [])


def test_two_records_in_the_wrong_order_are_one_out_of_order() -> None:
    for cuts in ([], [2], [3], [2, 3], [1, 2, 3, 4]):
        folded, repeated, displaced = fold([0, 1, 3, 2, 4, 5], cuts)
        assert repeated == []
        assert len(displaced) == 1, cuts
        assert displaced[0].begin in (2, 3)
        assert folded.holes() == []


def test_a_record_that_holds_a_batch_takes_as_many_offsets() -> None:
    facts = queue_facts(np.array([0, 1, 11, 12]), np.arange(4), np.array([1, 10, 1, 1]))
    assert facts.spans == [Span(0, 13, 0)]


def test_memory_is_bounded_with_many_holes() -> None:
    folded = QueueFold()
    for number in range(5000):
        folded.add(queue_facts(np.array([2 * number]), np.array([number])))
    assert len(folded.holes()) == 4999
    assert folded.holes()[0] == (1, 2, 1)
    assert len(folded._begins) <= 1001
