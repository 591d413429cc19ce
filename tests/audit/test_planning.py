"""Ranges of an audit: who holds them, and where they are cut."""

from ha.audit.planning import PlannedRange, plan_ranges, range_tasks
from ha.audit.range import CopyPlace


def place(name: str, begin: int, end: int) -> CopyPlace:
    return CopyPlace(name, f"/{name}", "b", begin, end)


def test_ranges_are_split_where_copies_start_and_end() -> None:
    assert plan_ranges([place("one", 0, 100), place("two", 30, 70)], 1000) == [
        PlannedRange(0, 30, (0,)),
        PlannedRange(30, 70, (0, 1)),
        PlannedRange(70, 100, (0,)),
    ]


def test_ranges_omit_bytes_that_no_copy_has() -> None:
    assert plan_ranges([place("one", 0, 10), place("two", 20, 30)], 1000) == [
        PlannedRange(0, 10, (0,)),
        PlannedRange(20, 30, (1,)),
    ]


def test_range_boundaries_do_not_depend_on_the_start_of_a_copy() -> None:
    """Otherwise a resumed audit would find none of its results after retention deleted a segment."""
    before = plan_ranges([place("one", 0, 100)], 16)
    after = plan_ranges([place("one", 20, 100)], 16)
    assert [(each.begin, each.end) for each in after] == [(20, 32), (32, 48), (48, 64), (64, 80), (80, 96), (96, 100)]
    assert after[1:] == before[2:]


def test_the_first_record_is_known_only_at_the_start_of_a_copy() -> None:
    places = [place("one", 0, 40), place("two", 20, 40)]
    tasks = range_tasks(plan_ranges(places, 20), places, 5, "id")
    assert [(task.begin, task.starts) for task in tasks] == [(0, (0,)), (20, (None, 20))]
