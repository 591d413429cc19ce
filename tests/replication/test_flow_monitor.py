"""Windows of one second, computed when they are read."""

from ha.replication.flow_monitor import FlowMonitor


def test_the_rate_is_that_of_the_last_complete_second() -> None:
    flow = FlowMonitor(100.0)
    flow.count(500, 100.0)
    flow.count(500, 100.9)
    assert flow.bytes_per_s(100.99) == 0
    assert flow.bytes_per_s(101.0) == 1000
    flow.count(7, 101.5)
    assert flow.bytes_per_s(102.2) == 7
    assert flow.bytes_per_s(103.2) == 0
    assert flow.total_bytes == 1007


def test_each_tenth_of_a_second_allows_a_tenth_more() -> None:
    flow = FlowMonitor(0.0, 1000)
    assert flow.budget(0.0) == 100
    flow.count(90, 0.05)
    assert flow.budget(0.05) == 10
    flow.count(30, 0.06)
    assert flow.budget(0.07) == 0
    assert flow.next_budget(0.07) == 0.1
    assert flow.budget(0.1) == 80
    assert flow.budget(0.95) == 880
    flow.count(880, 0.95)
    assert (flow.budget(0.99), flow.next_budget(0.99)) == (0, 1.0)
    assert flow.budget(1.0) == 100
    assert flow.next_budget(5.5) == 5.6


def test_the_budget_is_there_after_the_wait() -> None:
    """Despite rounding of the clock's values."""
    for began in (0.0, 0.1, 12.3, 100.7, 86_400.1, 1e9 + 0.3):
        flow = FlowMonitor(began, 1000)
        now = began
        for _ in range(50):
            flow.count(flow.budget(now) or 0, now)
            later = flow.next_budget(now)
            assert now < later <= now + 0.1001
            now = later
            assert flow.budget(now) == 100


def test_without_a_limit_there_is_no_budget() -> None:
    assert FlowMonitor(0.0).budget(3.0) is None
