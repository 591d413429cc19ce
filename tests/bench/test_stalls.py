"""bench/run stalls reports what blocked the event loops and what happened at that time."""

from typing import Any

import pytest

from bench.held_memory import free_block_count
from bench.stalls import Timeline, markdown, merged, own_seconds


def hold(seconds: float, cpu_s: float, queued_s: float | None, task: str = "serve") -> dict[str, Any]:
    stack = ["server.py:1 serve", "store.py:7 append"]
    found = {"at_s": 10.0, "seconds": seconds, "cpu_s": cpu_s, "queued_s": queued_s, "collection_s": 0.003}
    return found | {"task": task, "stack": stack}


def report(*holds: dict[str, Any], delay_p99_s: float = 0.001) -> dict[str, Any]:
    return {
        "seconds": 30.0,
        "beat_count": 6000,
        "long_delay_count": len(holds),
        "delay_p99_s": delay_p99_s,
        "delay_max_s": 0.25,
        "step_count": 1_000_000,
        "long_hold_count": len(holds),
        "hold_max_s": max((each["seconds"] for each in holds), default=0.0),
        "delays": list(holds),
        "holds": list(holds),
    }


def test_own_part_of_a_hold() -> None:
    assert own_seconds(hold(0.05, 0.01, 0.03)) == pytest.approx(0.02)
    assert own_seconds(hold(0.05, 0.01, None)) == 0.05


def test_reports_of_restarted_nodes_are_merged() -> None:
    found = merged([report(hold(0.03, 0.03, 0.0), delay_p99_s=0.002), report(hold(0.04, 0.04, 0.0))])
    assert (found["seconds"], found["beat_count"], found["long_hold_count"]) == (60.0, 12_000, 2)
    assert (found["delay_p99_s"], found["hold_max_s"]) == (0.002, 0.04)
    for key in ("holds", "delays"):
        assert [each["seconds"] for each in found[key]] == [0.04, 0.03]


def test_timeline() -> None:
    timeline = Timeline([("copy 1", 5.0, 9.0), ("master deletes", 9.5, 9.6), ("copy 2", 9.55, 30.0)])
    assert timeline.during(9.58, 9.7) == ["master deletes", "copy 2"]
    assert timeline.during(9.1, 9.2) == []
    timeline = Timeline([("warming up", 5.0, 9.0)], [(5.0, 5.1, 0.01)])
    with timeline.span("copy 1"):
        timeline.forget()
        assert timeline.stolen_s(0.0, 1e12) == 0
        assert timeline.during(0.0, 1e12) == ["copy 1"]
    assert timeline.during(0.0, 1e12) == ["copy 1"]


def test_holds_are_sorted_by_their_own_part() -> None:
    reports = {
        "master": merged([report(hold(0.200, 0.005, 0.190, "pull"), hold(0.030, 0.025, 0.001, "append"))]),
        "slave": merged([report()]),
    }
    lines = markdown(reports, Timeline([("copy 1", 0.0, 20.0)])).splitlines()
    assert lines[2] == "| master | 30 | 1.0 | 250.0 | 2 of 6,000 | 1 | 200.0 | 2 of 1,000,000 | 1 | 25.0 |"
    assert lines[3] == "| slave | 30 | 1.0 | 250.0 | 0 of 6,000 | 0 | 0.0 | 0 of 1,000,000 | 0 | 0.0 |"
    where = "store.py:7 append < server.py:1 serve"
    assert lines[-2:] == [
        f"| master | 30.0 | 25.0 | 1.0 | 4.0 | 3.0 | 0.0 | `append` | {where} | copy 1 |",
        f"| master | 200.0 | 5.0 | 190.0 | 5.0 | 3.0 | 0.0 | `pull` | {where} | copy 1 |",
    ]


def test_time_taken_by_the_host_is_not_counted() -> None:
    looks = [(9.5, 9.52, 0.01), (9.94, 9.98, 0.03), (10.01, 10.3, 0.02), (10.5, 10.52, 0.01)]
    timeline = Timeline(stolen=looks)
    assert timeline.stolen_s(9.97, 10.0) == pytest.approx(0.05)
    assert timeline.stolen_s(10.1, 10.11) == pytest.approx(0.02)
    lines = markdown({"master": merged([report(hold(0.030, 0.025, 0.001))])}, timeline).splitlines()
    assert lines[2].endswith("| 1 of 6,000 | 0 | 30.0 | 1 of 1,000,000 | 0 | 25.0 |")
    assert "| 30.0 | 25.0 | 1.0 | 4.0 | 3.0 | 50.0 | `serve`" in lines[-1]


def test_free_blocks_are_counted_in_units_of_2_mib() -> None:
    """/proc/buddyinfo (proc(5)) has a column for each order, starting with one page."""
    buddyinfo = (
        "Node 0, zone      DMA      0      0      0      0      0      0      0      0      0      0      3\n"
        "Node 0, zone    DMA32      7      6      5      4      3      2      1      0      9      2     10\n"
        "Node 0, zone   Normal   4153   1454    126      5      1      1      0      2      0      1      0\n"
    )
    assert free_block_count(buddyinfo) == 2 + 2 * 10 + 1
