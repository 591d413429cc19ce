"""A few seeds of whole failover groups."""

from itertools import pairwise

import msgspec
import pytest

from tests.sim.__main__ import show
from tests.sim.groups.scenario import draw_group_plan
from tests.sim.runner import run_plan
from tests.sim.scenario import AnyPlan, Fault, GroupOptions, GroupPlan

SEEDS = range(1, 5)
"""`python -m tests.sim --groups` runs any number"""


@pytest.mark.parametrize("seed", SEEDS)
def test_group_keeps_its_promises_under_faults(seed: int) -> None:
    outcome = run_plan(draw_group_plan(seed, {"run_s": 6}))
    assert not outcome.violations, show(outcome, "run_s=6")
    assert outcome.acknowledged_count


@pytest.mark.parametrize("seed", [32, 68])
def test_a_new_master_continues_what_pop_consumers_have_in_flight(seed: int) -> None:
    outcome = run_plan(draw_group_plan(seed, {"pop_pause_s": 0.3}))
    assert not outcome.violations, show(outcome, "pop_pause_s=0.3")
    assert outcome.term_count > 1


def test_group_without_faults_rejects_and_loses_nothing() -> None:
    outcome = run_plan(draw_group_plan(1, {"run_s": 4, "fault_count": 0}))
    assert not outcome.violations, show(outcome, "run_s=4,fault_count=0")
    assert set(outcome.statuses) == {"PUT_OK"}
    assert outcome.consumed_count >= outcome.acknowledged_count


@pytest.mark.parametrize("kind", ["kill", "service_cut", "switch"])
def test_the_master_changes_under_load(kind: str) -> None:
    """A kill, a cut from the service and a switchover each end a term."""
    fault = Fault(at_s=2.0, kind=kind, node="master", other="p1", duration_s=3.0, number=1)
    options = GroupOptions(member_count=3, policy="all", producer_count=1, run_s=5.0)
    outcome = run_plan(GroupPlan(seed=1, options=options, faults=(fault,)))
    assert not outcome.violations, show(outcome)
    assert outcome.faults[kind] == 1
    masters = {line.split()[2] for line in outcome.trace if " service: m" in line}
    assert len(masters) > 1, (kind, masters)


@pytest.mark.parametrize("number", [0, 1], ids=["empty", "copied"])
@pytest.mark.parametrize("node", ["master", "slave"])
def test_duplicate_broker_id_is_rejected(node: str, number: int) -> None:
    """It ends once the first one's lease has been renewed for two lease times; clients notice nothing."""
    fault = Fault(at_s=2.0, kind="duplicate_id", node=node, other="p1", duration_s=6.0, number=number)
    options = GroupOptions(member_count=3, policy="all", producer_count=1, run_s=8.0)
    outcome = run_plan(GroupPlan(seed=1, options=options, faults=(fault,)))
    assert not outcome.violations, show(outcome)
    [ended] = [line for line in outcome.trace if " d" in line and line.endswith(" ended ExceptionGroup")]
    assert 6.0 <= float(ended.split()[0]) <= 8.0, ended
    assert set(outcome.statuses) == {"PUT_OK"}
    assert outcome.term_count == 1


def test_a_cut_between_members_stops_sends_for_about_a_lease() -> None:
    """Both reach the service, so neither lease ends. The master is m1 or m2, and the cut is between the two."""
    fault = Fault(at_s=4.0, kind="partition", node="m1", other="m2", duration_s=20.0)
    options = GroupOptions(
        member_count=2, policy="all", producer_count=1, burst_max=1, pause_s=0.05, run_s=26.0, lease_ttl_ms=2000,
        heartbeat_ms=5000, housekeeping_ms=20_000,
    )  # fmt: skip
    outcome = run_plan(GroupPlan(seed=1, options=options, faults=(fault,)))
    assert not outcome.violations, show(outcome)
    sent = [line.split() for line in outcome.trace if " p1 " in line]
    times = [float(at) for at, _, _, status, *_ in sent if status == "PUT_OK" and 3.0 < float(at) < 26.0]
    longest_s = max(later - earlier for earlier, later in pairwise(times))
    assert 2.0 < longest_s < 4.0
    assert outcome.term_count == 1


def test_a_plan_of_a_group_survives_its_file() -> None:
    plan = draw_group_plan(7, {"member_count": 2})
    found: AnyPlan = msgspec.json.decode(msgspec.json.encode(plan), type=AnyPlan)
    assert found == plan
    assert isinstance(found, GroupPlan)
