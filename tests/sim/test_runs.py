"""A few seeds of the simulation, and that a seed decides everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.sim.__main__ import show
from tests.sim.runner import run_plan
from tests.sim.scenario import Options, Plan, draw_plan

REPOSITORY = Path(__file__).parents[2]
SEEDS = range(1, 13)
"""`python -m tests.sim` runs as many as one likes"""

RUN_TWICE = """
from tests.sim.runner import run_plan
from tests.sim.scenario import draw_plan
outcome = run_plan(draw_plan({seed}, {{"fault_count": 16, "run_s": 15}}))
print(len(outcome.trace), outcome.fingerprint)
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_keeps_its_promises_whatever_happens(seed: int) -> None:
    outcome = run_plan(draw_plan(seed, {"run_s": 15}))
    assert not outcome.violations, show(outcome, "run_s=15")
    assert outcome.acknowledged_count


@pytest.mark.parametrize("seed", [101, 102])
def test_one_seed_gives_one_trace_in_any_process(seed: int) -> None:
    """Strings hash differently in the two, objects have other addresses."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN_TWICE.format(seed=seed)],
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


def test_two_seeds_give_two_traces() -> None:
    plan = draw_plan(1, {"run_s": 3, "fault_count": 0})
    assert run_plan(plan).fingerprint != run_plan(draw_plan(2, {"run_s": 3, "fault_count": 0})).fingerprint


def test_a_plan_survives_its_file() -> None:
    plan = draw_plan(7, {"slave_count": 3})
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert plan.options != Options()
