"""python -m tests.sim.planted [NAME …] [--seeds 200] [--first 1]

Plants each bug of `tests.sim.bugs`, and in failover groups those of `tests.sim.groups.bugs`, and runs seeds until the
checker that it names notices. Prints a table: the bug, the seed that showed it, the checker, and its report. Exit code
1 if a bug is not noticed.

Cheap seeds come first; seeds whose scenario can't show a bug are not run. A seed that fails without the bug proves
nothing and is skipped.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tests.checkers.violation import Violation
from tests.sim.bugs import BUGS
from tests.sim.groups.bugs import GROUP_BUGS
from tests.sim.groups.scenario import draw_group_plan
from tests.sim.planting import Bug, PlanT
from tests.sim.runner import run_plan
from tests.sim.scenario import AnyPlan, draw_plan


@dataclass(frozen=True)
class Caught:
    """A seed that shows a bug, its cost (seconds of CPU), and the report of the checker that must notice it."""

    seed: int
    cpu_s: float
    violation: Violation


def try_plan(bug: Bug[PlanT], plan: PlanT) -> Caught | None:
    """Runs one scenario with a bug planted; None if the checker that must notice it did not."""
    with bug():
        outcome = run_plan(plan)
    violation = bug.noticed(outcome.violations)
    return None if violation is None else Caught(plan.seed, outcome.cpu_s, violation)


def hunt(bug: Bug[PlanT], draw: Callable[[int], PlanT], first: int, count: int) -> Caught | None:
    """Runs seeds, cheap ones first, until one that passes without the bug shows it to its checker."""
    plans = [plan for seed in range(first, first + count) if bug.can_show(plan := draw(seed))]
    for plan in sorted(plans, key=_cost):
        caught = try_plan(bug, plan)
        if caught is not None and not run_plan(plan).violations:
            return caught
    return None


def _cost(plan: AnyPlan) -> float:
    """Approximate number of messages of a run, which determines its cost."""
    options = plan.options
    per_burst_s = options.pause_s + 10 * options.base_s
    return options.run_s * options.producer_count * (1 + options.burst_max) / 2 / per_burst_s


def _report(bug: Bug[PlanT], draw: Callable[[int], PlanT], first: int, count: int) -> bool:
    """Prints a line of the table; returns whether the bug is noticed."""
    caught = hunt(bug, draw, first, count)
    if caught is None:
        print(f"{bug.name:36} NOT NOTICED in {count} seeds: {bug.says}", flush=True)
        return False
    text = caught.violation.text.splitlines()[0][:160]
    print(f"{bug.name:36} seed {caught.seed:3} ({caught.cpu_s:4.1f} s)  {bug.found_by:13} {text}", flush=True)
    return True


def main() -> int:
    about = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(prog="python -m tests.sim.planted", description=about)
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs (all)")
    parser.add_argument(
        "--seeds", type=int, default=200, help="number of seeds within which each bug must be noticed (200)"
    )
    parser.add_argument("--first", type=int, default=1, help="the first one (1)")
    arguments = parser.parse_args()
    missed = 0
    for name in arguments.names or [*BUGS, *GROUP_BUGS]:
        if name in BUGS:
            missed += not _report(BUGS[name], draw_plan, arguments.first, arguments.seeds)
        else:
            missed += not _report(GROUP_BUGS[name], draw_group_plan, arguments.first, arguments.seeds)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
