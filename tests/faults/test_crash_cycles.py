"""A few dozen crash cycles, every kind among them; `scripts/crash-cycles` does any number."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.cycles import KINDS, Outcome, Plan, Run

pytestmark = pytest.mark.processes

SEED = 5


def run(plan: Plan, directory: Path) -> Outcome:
    outcome = Run(plan, directory, print).run()
    print(outcome)
    assert outcome.lost == 0
    assert outcome.acknowledged > 0
    assert outcome.consumed >= outcome.acknowledged
    return outcome


def test_every_kind_of_crash_once(tmp_path: Path) -> None:
    plan = Plan(
        seed=SEED,
        cycle_count=len(KINDS),
        slave_count=1,
        flush="ASYNC_FLUSH",
        answers_max=100,
        pause_s=(0.05, 0.6),
        kinds=tuple(KINDS),
    )
    outcome = run(plan, tmp_path)
    assert set(outcome.cycles) == set(KINDS)


def test_crashes_of_three_nodes_that_flush_before_they_answer(tmp_path: Path) -> None:
    kinds = ("kill slave", "kill master", "kill slave", "kill master and slaves", "kill starting master", "kill slave")
    plan = Plan(
        seed=SEED + 1,
        cycle_count=len(kinds),
        slave_count=2,
        flush="SYNC_FLUSH",
        in_sync_replicas=2,
        answers_max=100,
        pause_s=(0.05, 0.6),
        kinds=kinds,
    )
    run(plan, tmp_path)
