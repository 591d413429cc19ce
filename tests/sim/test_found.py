"""Scenarios in which the simulation found halog breaking a promise, or a judge wrong, kept as they were understood."""

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


def test_a_slave_that_lost_its_stale_tail_with_its_power_follows_again() -> None:
    """The master loses its tail with its power, the slave is apart; then it loses power within what it has too much.

    Its recovery cut the torn record off, so that it agreed with its master again, and it followed. The judge of
    prefixes held it for one that had grown behind a stale tail.
    """
    options = Options(
        slave_count=1,
        slave_flush="SYNC_FLUSH",
        start_from="last",
        after_power_loss="plain",
        transfer_batch_bytes=32_768,
        heartbeat_ms=500,
        housekeeping_ms=2500,
        slave_timeout_ms=500,
        sync_flush_timeout_ms=500,
        producer_count=1,
        pause_s=1.0,
        body_size_max=2500,
        base_s=0.0001,
        jitter_s=0.02,
        window=16_384,
        split_chance=0.0,
        run_s=21.1,
    )
    outcome = run(
        options,
        Fault(at_s=3.21, kind="cut_frame", node="s1", other="m", duration_s=0.43, number=326_810_878),
        Fault(at_s=5.862, kind="power", node="m", other="p1", duration_s=5.813),
        Fault(at_s=18.112, kind="power", node="s1", other="p1", duration_s=0.365),
        seed=661,
    )
    assert any("s1 WARNING ha_client_diverged" in line for line in outcome.trace)
    assert any("s1 WARNING log_truncated" in line for line in outcome.trace)
