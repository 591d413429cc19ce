"""Scenarios in which the simulation found halog breaking a promise, kept as they were understood."""

from __future__ import annotations

import pytest

from tests.sim.__main__ import show
from tests.sim.runner import Outcome, run_plan
from tests.sim.scenario import Fault, Options, Plan


def run(options: Options, *faults: Fault, seed: int = 1) -> Outcome:
    outcome = run_plan(Plan(seed=seed, options=options, faults=faults))
    assert not outcome.violations, show(outcome)
    return outcome


@pytest.mark.parametrize(("node", "seed"), [("m", 1), ("s1", 2)])
def test_what_a_failed_sync_left_unwritten_is_written_after_the_restart(node: str, seed: int) -> None:
    """A sync fails, and the kernel marks the pages clean. The node starts again, goes on behind them, and loses power.

    It believed what it read: recovery after the power loss found holes in front of acknowledged messages, of a
    SYNC_FLUSH master too, and refused to start.
    """
    options = Options(
        role="SYNC_MASTER",
        slave_count=1,
        master_flush="SYNC_FLUSH",
        slave_flush="SYNC_FLUSH",
        segment_size=65_536,
        body_size_max=3000,
        burst_max=12,
        pause_s=0.05,
        run_s=9.0,
    )
    outcome = run(
        options,
        Fault(at_s=2.0, kind="disk_slow", node=node, duration_s=1.0, number=1),
        Fault(at_s=2.5, kind="sync_error", node=node),
        Fault(at_s=6.0, kind="power", node=node, duration_s=0.5),
        seed=seed,
    )
    assert outcome.faults["sync_error"] == 1
