"""Rate-limited log lines."""

from ha.log_rate_limiter import KEY_COUNT_MAX, LINE_COUNT_MAX, LogRateLimiter


def test_one_line_per_interval_reports_the_occurrences() -> None:
    limiter = LogRateLimiter()
    counts = [limiter.admit("a", now) for now in (100, 101, 159.9, 160, 161, 1000)]
    assert counts == [1, 0, 0, 3, 0, 2]


def test_one_call_can_report_several_occurrences() -> None:
    limiter = LogRateLimiter()
    assert [limiter.admit("a", now, 5) for now in (100, 101, 160)] == [5, 0, 10]


def test_keys_and_lines_are_bounded() -> None:
    limiter = LogRateLimiter()
    logged = sum(limiter.admit(number, 100) > 0 for number in range(10_000))
    assert logged == LINE_COUNT_MAX
    assert len(limiter._keys) == KEY_COUNT_MAX
    assert limiter.admit("later", 160) == 1
