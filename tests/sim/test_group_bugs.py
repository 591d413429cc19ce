"""Each planted bug of groups is noticed by the checker that it names, in a small scenario.

`python -m tests.sim.planted` shows how many seeds of the whole simulation it takes.
"""

from typing import Any

import pytest

from tests.sim.__main__ import show
from tests.sim.groups.bugs import GROUP_BUGS
from tests.sim.runner import run_plan
from tests.sim.scenario import Fault, GroupOptions, GroupPlan
from tests.sim.test_bugs import assert_noticed

SMALL: dict[str, Any] = {
    "member_count": 2,
    "segment_size": 65_536,
    "producer_count": 1,
    "burst_max": 8,
    "pause_s": 0.1,
    "run_s": 8.0,
}
SEEDS_TRIED = 6
"""The effect of a seed changes with every task that a node starts; most bugs are shown by more than half of the seeds.
"""


def at(moment_s: float, kind: str, node: str, duration_s: float, *, other: str = "p1", number: int = 0) -> Fault:
    return Fault(at_s=moment_s, kind=kind, node=node, other=other, duration_s=duration_s, number=number)


APART = [at(3.0, "apart", "master", 4.0), at(3.1, "reset", "m1", 0.0, other="m2")]
"""The first master's key ends while producers and consumers still use it"""

SHOWN_BY: dict[str, tuple[dict[str, Any], list[Fault]]] = {
    "expand_window": (
        {"base_s": 0.01, "jitter_s": 0.02, "service_delay_s": 0.15, "burst_max": 2, "pause_s": 0.02},
        [at(moment_s, "kill", "slave", 0.3) for moment_s in (3.0, 4.0, 5.0, 6.0, 7.0)],
    ),
    "confirmed_by_who_is_there": ({}, APART),
    "offsets_beside_the_log": ({}, [at(3.5, "kill", "m1", 1.0)]),
    "stale_tail_after_cut": ({"body_size_max": 2000}, APART),
    "power_loss_is_not_noticed": (
        {"member_count": 3, "flush": "ASYNC_FLUSH", "lease_ttl_ms": 3000},
        [at(4.0, "power", "master", 0.1), at(4.02, "reset", "m1", 0.0, other="m2")],
    ),
    "older_record_is_believed": ({}, [at(3.0, "kill", "slave", 1.5), at(4.0, "service_restored", "m1", 0.0, number=3)]),
    "lease_read_from_cache": ({"policy": "alone"}, APART),
    "timer_lost_in_failover": ({"timer_pause_s": 0.1}, [at(4.0, "kill", "master", 4.0)]),
    "pop_ack_not_in_the_log": ({"pop_pause_s": 0.1}, [at(4.0, "kill", "master", 4.0)]),
    "pop_checkpoint_not_in_the_log": ({"pop_pause_s": 0.1}, [at(4.0, "kill", "master", 4.0)]),
    "member_key_taken_over": ({}, [at(3.0, "duplicate_id", "slave", 4.5, number=1)]),
}
"""Bug -> options (the rest as SMALL), faults"""


def scenario(name: str, more: int = 0) -> GroupPlan:
    options, faults = SHOWN_BY[name]
    faults = sorted(faults, key=lambda fault: fault.at_s)
    return GroupPlan(seed=1 + more, options=GroupOptions(**{**SMALL, **options}), faults=tuple(faults))


@pytest.mark.parametrize("name", SHOWN_BY)
def test_planted_bug_is_caught(name: str) -> None:
    assert_noticed(GROUP_BUGS[name], [scenario(name, more) for more in range(SEEDS_TRIED)])


@pytest.mark.parametrize(
    "name",
    [
        "expand_window",
        "stale_tail_after_cut",
        "member_key_taken_over",
        "timer_lost_in_failover",
        "power_loss_is_not_noticed",
        "older_record_is_believed",
    ],
)
def test_scenario_passes_without_the_bug(name: str) -> None:
    outcome = run_plan(scenario(name))
    assert not outcome.violations, show(outcome)


def test_every_bug_has_a_scenario() -> None:
    assert set(SHOWN_BY) == set(GROUP_BUGS)
