"""A master that is cut off with its clients."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.sim.__main__ import show
from tests.sim.runner import run_plan
from tests.sim.scenario import Fault, GroupOptions, GroupPlan


@pytest.mark.parametrize(("policy", "flush"), [("all", "SYNC_FLUSH"), ("count", "ASYNC_FLUSH")])
def test_7017_acknowledgements_of_an_isolated_master_are_not_lost(
    policy: Literal["all", "count"], flush: Literal["SYNC_FLUSH", "ASYNC_FLUSH"]
) -> None:
    """apache/rocketmq#7017: of three data centres one, with the master and a controller, was cut off from the others.
    There were two masters; messages sent to the old one were answered with SEND_OK, and lost when it came back as a
    slave.

    In halog the old master stops acknowledging when its lease ends, before another lease starts, and until then it
    acknowledges only what every electable member of the set has. Producers keep sending to it all the time.
    """
    options = GroupOptions(
        member_count=3, policy=policy, ack_count=2, flush=flush, producer_count=1, burst_max=8, pause_s=0.05, run_s=7.0
    )
    apart = Fault(at_s=2.0, kind="apart", node="master", other="p1", duration_s=4.0, number=1)
    outcome = run_plan(GroupPlan(seed=7017, options=options, faults=(apart,)))
    assert not outcome.violations, show(outcome)
    assert outcome.faults["apart"] == 1
    assert outcome.term_count >= 2, "nobody else was elected"
    assert outcome.cut_count, "nothing was sent to the former master"
    assert outcome.acknowledged_count > 10
