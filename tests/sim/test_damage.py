"""Damaged files in the simulation: bytes on another node are kept, others are dropped, and the checkers know."""

from typing import Any

import pytest

from tests.sim.__main__ import show
from tests.sim.bugs import BUGS
from tests.sim.run import Outcome
from tests.sim.runner import run_plan
from tests.sim.scenario import DAMAGE, Fault, Options, Plan

CLUSTER: dict[str, Any] = {
    "role": "SYNC_MASTER",
    "slave_count": 1,
    "master_flush": "SYNC_FLUSH",
    "slave_flush": "SYNC_FLUSH",
    "segment_size": 8192,
    "producer_count": 1,
    "consumer_count": 1,
    "burst_max": 4,
    "run_s": 12.0,
}


def damage(kind: str, node: str) -> Plan:
    faults = [
        Fault(at_s=at_s, kind=kind, node=node, other="p1", duration_s=0.5, folder="commitlog") for at_s in (4.0, 8.0)
    ]
    return Plan(seed=1, options=Options(**CLUSTER), faults=tuple(faults))


def run(plan: Plan) -> Outcome:
    outcome = run_plan(plan)
    assert not outcome.violations, show(outcome)
    return outcome


@pytest.mark.parametrize("node", ["m", "s1"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_message_on_the_other_node_is_not_lost(kind: str, node: str) -> None:
    outcome = run(damage(kind, node))
    assert outcome.faults[kind] == 2
    assert outcome.acknowledged_count > 50
    assert (outcome.excused_count, outcome.given_up_count) == (0, 0)


def test_operator_drops_records_behind_unrepairable_damage() -> None:
    """The slave was cut off all the time; the queues have to be rebuilt, and the damage prevents that."""
    options = Options(**{**CLUSTER, "role": "ASYNC_MASTER"})
    faults = (
        Fault(at_s=1.0, kind="isolate", node="s1", other="m", duration_s=60.0),
        Fault(at_s=10.0, kind="zero_range", node="m", other="s1", duration_s=0.5, folder="commitlog"),
    )
    # The seed decides where the damage is: in the last segment nothing behind it is dropped.
    for seed in range(1, 13):
        outcome = run(Plan(seed=seed, options=options, faults=faults))
        if any("are damaged for good, 0 were patched" in line for line in outcome.trace) and outcome.given_up_count:
            break
    assert any("are damaged for good, 0 were patched" in line for line in outcome.trace)
    assert 0 < outcome.given_up_count < outcome.excused_count


def test_damage_of_one_node_does_not_excuse_loss_on_another() -> None:
    plan = damage("flip_bit", "s1")
    crash = Fault(at_s=9.0, kind="kill", node="m", other="p1", duration_s=0.5)
    with BUGS["truncated_too_far"]():
        found = run_plan(Plan(seed=1, options=plan.options, faults=(*plan.faults, crash))).violations
    assert "durability" in {violation.checker for violation in found}
