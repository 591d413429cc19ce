"""A few crash cycles of most kinds; `scripts/crash-cycles` runs any number of all kinds."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.demo.interruption import interrupt
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


def test_pair_survives_crashes(tmp_path: Path) -> None:
    kinds = (
        "kill master",
        "pause slave",
        "kill starting master",
        "kill master and slaves",
        "kill stopping slave",
        "kill name server",
        "pause, then kill master",
        "stop master",
        "kill slave",
    )
    run(plan_of(SEED, kinds, slave_count=1, flush="ASYNC_FLUSH"), tmp_path / "run")


def test_group_with_sync_flush_survives_crashes(tmp_path: Path) -> None:
    kinds = ("kill slave", "kill master", "kill master and slaves", "kill starting slave")
    run(plan_of(SEED + 1, kinds, slave_count=2, flush="SYNC_FLUSH", in_sync_replicas=2), tmp_path / "run")


def test_interrupted_the_script_ends_its_processes(tmp_path: Path) -> None:
    directory = tmp_path / "cycles"
    command = [sys.executable, "-m", "scripts.crash_cycles", "--directory", str(directory)]
    interrupt(command, "cycle 0: ", signal.SIGTERM, directory)


def plan_of(seed: int, kinds: tuple[str, ...], **changes: Any) -> Plan:
    assert set(kinds) <= set(KINDS)
    return Plan(
        seed=seed,
        cycle_count=len(kinds),
        answers_max=60,
        pause_s=(0.05, 0.3),
        slave_module="tests.faults.eager_slave",
        kinds=kinds,
        **changes,
    )
