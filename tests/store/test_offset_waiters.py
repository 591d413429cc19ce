"""OffsetWaiters: found by offset or by deadline, never twice, and without leftovers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ha.store.offset_waiters import OffsetWaiters


def test_reach_returns_satisfied_items_lowest_first() -> None:
    waiters: OffsetWaiters[str] = OffsetWaiters()
    waiters.add(300, 9.0, "c")
    waiters.add(100, 9.0, "a")
    waiters.add(200, 9.0, "b")
    assert waiters.reach(99) == []
    assert waiters.reach(200) == ["a", "b"]
    assert waiters.reach(200) == []
    assert len(waiters) == 1


def test_expire_returns_late_items_of_any_offset() -> None:
    waiters: OffsetWaiters[str] = OffsetWaiters()
    waiters.add(100, 5.0, "patient")
    waiters.add(999, 1.0, "hasty")
    assert waiters.next_deadline == 1.0
    assert waiters.expire(0.9) == []
    assert waiters.expire(1.0) == ["hasty"]
    assert waiters.next_deadline == 5.0
    assert waiters.reach(1000) == ["patient"]
    assert waiters.next_deadline == math.inf


def test_expired_items_do_not_accumulate() -> None:
    waiters: OffsetWaiters[int] = OffsetWaiters()
    for number in range(1000):
        waiters.add(number, float(number), number)
        assert waiters.expire(float(number)) == [number]
    assert not waiters._by_offset
    assert not waiters._by_deadline


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))), st.lists(st.tuples(st.booleans(), st.integers(0, 20)))
)
def test_every_item_leaves_exactly_once(items: list[tuple[int, int]], moves: list[tuple[bool, int]]) -> None:
    waiters: OffsetWaiters[int] = OffsetWaiters()
    waiting = dict(enumerate(items))
    for number, (offset, deadline) in waiting.items():
        waiters.add(offset, float(deadline), number)
    for by_offset, value in moves:
        taken = waiters.reach(value) if by_offset else waiters.expire(float(value))
        expected = {n for n, (offset, deadline) in waiting.items() if (offset if by_offset else deadline) <= value}
        assert set(taken) == expected
        assert len(taken) == len(expected)
        for number in taken:
            del waiting[number]
        assert waiters.lowest_offset == min((offset for offset, _ in waiting.values()), default=math.inf)
    assert len(waiters) == len(waiting)
    assert sorted(waiters.drain()) == sorted(waiting)
    assert len(waiters) == 0
