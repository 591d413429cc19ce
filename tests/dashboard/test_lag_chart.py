"""The lag of a group as a line: what is known, in proportion, without inventing anything."""

from ha.admin.dashboard.lag_chart import HEIGHT, ROW_COUNT, SPAN_S, lag_chart
from ha.admin.dashboard.source import LagPoint

NOW_S, NOW_MS = 5000.0, 1_700_000_000_000


def points(*ages_and_lags: tuple[int, int]) -> list[LagPoint]:
    return [LagPoint(NOW_S - age_s, NOW_MS - age_s * 1000, lag) for age_s, lag in ages_and_lags]


def test_a_line_needs_two_points() -> None:
    assert lag_chart([]) is lag_chart(points((0, 1))) is None


def test_the_line_begins_again_after_a_gap() -> None:
    chart = lag_chart(points((3600, 0), (3540, 10), (300, 5), (285, 2), (0, 1)))
    assert chart is not None
    assert chart.path == f"M0,{HEIGHT}L60,0M3300,500L3315,800M{SPAN_S},900"
    assert chart.sentence == "now 1, at first 0, at most 10"
    assert [point.behind_count for point in chart.rows] == [1, 2, 5, 10, 0]


def test_what_is_older_than_an_hour_is_left_out() -> None:
    chart = lag_chart(points((3601, 1000), (15, 0), (0, 0)))
    assert chart is not None
    assert (chart.top, chart.sentence) == (1, "now 0, at first 0, at most 0")


def test_the_line_goes_on_if_the_clock_was_set_back() -> None:
    """The table has the times that the clock had."""
    earlier = [LagPoint(NOW_S + age_s, NOW_MS - 3_600_000, 3) for age_s in (15, 30)]
    chart = lag_chart([*points((15, 1), (0, 2)), *earlier])
    assert chart is not None
    assert chart.path == f"M{SPAN_S - 45},667L{SPAN_S - 30},333L{SPAN_S - 15},0L{SPAN_S},0"
    assert [point.at_ms - NOW_MS for point in chart.rows] == [-3_600_000, -3_600_000, 0, -15_000]


def test_the_table_is_short() -> None:
    chart = lag_chart(points(*((age_s, 1) for age_s in range(3585, -1, -15))))
    assert chart is not None
    assert len(chart.rows) == ROW_COUNT
    assert chart.rows[0].at_ms == NOW_MS
