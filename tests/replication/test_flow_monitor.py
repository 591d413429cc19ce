"""Windows of one second, computed when somebody looks."""

from __future__ import annotations

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


def test_the_budget_is_whole_again_in_the_next_window() -> None:
    flow = FlowMonitor(0.0, 1000)
    assert flow.budget(0.0) == 1000
    flow.count(990, 0.25)
    assert flow.budget(0.5) == 10
    flow.count(30, 0.5)
    assert flow.budget(0.75) == 0
    assert flow.next_window(0.75) == 1.0
    assert flow.budget(1.0) == 1000
    assert flow.next_window(5.5) == 6.0


def test_without_a_limit_there_is_no_budget() -> None:
    assert FlowMonitor(0.0).budget(3.0) is None
