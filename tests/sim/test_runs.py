"""A few seeds of the simulation, and determinism."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ha.broker.put import PutService
from tests.sim import runner
from tests.sim.__main__ import main, show
from tests.sim.runner import run_plan
from tests.sim.scenario import Options, Plan, draw_plan

REPOSITORY = Path(__file__).parents[2]
SEEDS = range(1, 13)
"""`python -m tests.sim` runs any number"""

PRINT_TRACE = """
from tests.sim.groups.scenario import draw_group_plan
from tests.sim.runner import run_plan
from tests.sim.scenario import draw_plan
outcome = run_plan({plan})
print(len(outcome.trace), outcome.fingerprint)
"""
PLANS = [
    "draw_plan(101, {'fault_count': 16, 'run_s': 15})",
    "draw_plan(102, {'fault_count': 16, 'run_s': 15})",
    "draw_group_plan(5, {'fault_count': 6, 'run_s': 4})",
]


@pytest.mark.parametrize("seed", SEEDS)
def test_pair_keeps_its_promises_under_faults(seed: int) -> None:
    outcome = run_plan(draw_plan(seed, {"run_s": 15}))
    assert not outcome.violations, show(outcome, "run_s=15")
    assert outcome.acknowledged_count


@pytest.mark.parametrize("seed", [15, 52, 65])
def test_pop_consumers_get_every_message_until_they_acknowledge_it(seed: int) -> None:
    outcome = run_plan(draw_plan(seed, {"pop_pause_s": 0.3}))
    assert not outcome.violations, show(outcome, "pop_pause_s=0.3")
    assert outcome.acknowledged_count


@pytest.mark.parametrize("plan", PLANS)
def test_a_seed_gives_the_same_trace_in_every_process(plan: str) -> None:
    """The two processes hash strings differently, and their objects have different addresses."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_TRACE.format(plan=plan)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=120)[0].split() for process in processes)
    assert first == second
    assert int(first[0]) > 300, "the trace says hardly anything"


def test_failed_seed_is_reported_with_commands_and_a_reduced_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tests.sim.shrink.RUN_COUNT_MAX", 3)
    overrides = {
        "run_s": 2,
        "fault_count": 2,
        "producer_count": 1,
        "slave_count": 1,
        "in_sync_replicas": 0,
        "pause_s": 0.3,
    }
    options = ",".join(f"{name}={value}" for name, value in overrides.items())
    arguments = ["--jobs", "1", "--seeds", "6", "--options", options, "--bug", "wrong_queue_offset_answered"]
    assert run_command(monkeypatch, *arguments) == 1
    said = capsys.readouterr().out
    seed = int(said.partition("failed seeds: ")[2].split()[0])
    assert f"runs               {seed} of {seed} seeds, failed 1" in said, "it stops there"
    again, smaller = re.findall(r"again: +python -m tests\.sim (.+)", said)
    assert again == f"--seeds 1 --first {seed} --options {options} --bug wrong_queue_offset_answered"
    plan = msgspec.json.decode(Path(smaller.split()[1]).read_bytes(), type=Plan)
    assert len(plan.faults) < len(draw_plan(seed, overrides).faults)

    for command in (again, smaller):
        assert run_command(monkeypatch, "--no-shrink", *command.split()) == 1
        assert f"FAILED seed {seed}:" in capsys.readouterr().out
    assert run_command(monkeypatch, *smaller.split()[:2]) == 0
    assert "lost               0" in capsys.readouterr().out


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`python -m tests.sim` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["tests.sim", *arguments])
    return main()


def test_two_seeds_give_two_traces() -> None:
    plan = draw_plan(1, {"run_s": 3, "fault_count": 0})
    assert run_plan(plan).fingerprint != run_plan(draw_plan(2, {"run_s": 3, "fault_count": 0})).fingerprint


def test_a_plan_survives_its_file() -> None:
    plan = draw_plan(7, {"slave_count": 3})
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert plan.options != Options()


def test_an_endless_loop_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one task of one node, without a checkpoint, so that virtual time stands still."""

    async def loop(service: PutService) -> None:
        while True:
            pass

    monkeypatch.setattr(PutService, "_run", loop)
    monkeypatch.setattr(runner, "CPU_S_MAX", 0.5)
    outcome = runner.run_plan(draw_plan(1))
    assert "endless loop" in str(outcome.violations[0])
    assert "in loop" in str(outcome.violations[0])
