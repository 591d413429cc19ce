"""How often a repeated thing is said."""

from __future__ import annotations

from ha.repeats import KEY_COUNT_MAX, LINE_COUNT_MAX, Repeats


def test_once_in_a_minute_with_how_often_it_was() -> None:
    repeats = Repeats()
    counts = [repeats.count_if_due("a", now) for now in (100, 101, 159.9, 160, 161, 1000)]
    assert counts == [1, 0, 0, 3, 0, 2]


def test_what_comes_many_times_at_once() -> None:
    repeats = Repeats()
    assert [repeats.count_if_due("a", now, 5) for now in (100, 101, 160)] == [5, 0, 10]


def test_each_thing_by_itself_up_to_so_many_lines() -> None:
    repeats = Repeats()
    said = sum(repeats.count_if_due(number, 100) > 0 for number in range(10_000))
    assert said == LINE_COUNT_MAX
    assert len(repeats._said) == KEY_COUNT_MAX
    assert repeats.count_if_due("later", 160) == 1
