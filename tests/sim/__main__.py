"""python -m tests.sim --seeds 1000 [--first SEED] [--groups | --pairs] [--bug NAME] [--options K=V,…] [--plan FILE]

Runs halog's nodes with simulated disks and networks, on a virtual clock. Each seed determines a scenario: the settings,
the load and the faults. By default, every seed runs a master with its slaves, and every fourth seed also runs a
failover group. Prints a summary at the end.

Exit code 1 if halog broke a promise, for example lost an acknowledged message. Then the output shows the seed, the
command that reproduces the failure, and a smaller scenario that fails as well, which is also written to a file for
--plan.
"""

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import msgspec

from tests.sim.groups.scenario import draw_group_plan
from tests.sim.run import Outcome
from tests.sim.runner import planted, run_job
from tests.sim.scenario import AnyPlan, Fault, GroupPlan, draw_plan
from tests.sim.shrink import shrink

FAILURES_SHOWN_MAX = 5
LINE_MAX = 300
PROGRESS_EVERY = 50
GROUP_EVERY = 4
"""Of this many seeds one also runs a failover group; with `--groups` each seed does"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim",
        description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="Number of seeds (default: %(default)s).")
    parser.add_argument(
        "--first", type=int, default=1, metavar="SEED", help="First seed; the others follow it (default: %(default)s)."
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--groups", action="store_true", help="Run only failover groups, one for every seed.")
    kinds.add_argument("--pairs", action="store_true", help="Run only masters with their slaves, no failover groups.")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="Number of processes (default: %(default)s).")
    parser.add_argument(
        "--options",
        default="",
        metavar="KEY=VALUE,…",
        help="Fixed settings instead of those of the seed, such as slave_count=1. Without --groups, no failover groups"
        " run.",
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="Run the scenario in this file instead of seeds.")
    parser.add_argument(
        "--bug",
        default="",
        metavar="NAME",
        help="Put a known bug of tests/sim/bugs.py into the nodes, to check that the run fails. Without --groups, no"
        " failover groups run.",
    )
    parser.add_argument("--trace", action="store_true", help="Print every event of each run.")
    parser.add_argument("--keep-going", action="store_true", help="Run the remaining seeds after a failure.")
    parser.add_argument("--no-shrink", action="store_true", help="Don't search for a smaller scenario that fails.")
    arguments = parser.parse_args()
    overrides = dict(pair.split("=", 1) for pair in arguments.options.split(",") if pair)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    plans: list[AnyPlan]
    if arguments.plan is not None:
        plans = [msgspec.json.decode(arguments.plan.read_bytes(), type=AnyPlan)]
    elif arguments.groups:
        plans = [draw_group_plan(seed, overrides) for seed in seeds]
    else:
        plans = [draw_plan(seed, overrides) for seed in seeds]
        if not overrides and not arguments.bug and not arguments.pairs:
            plans += [draw_group_plan(seed) for seed in seeds if seed % GROUP_EVERY == 0]
    began = time.monotonic()
    total = Totals()
    failed: list[Outcome] = []
    try:
        for outcome in _outcomes(plans, arguments.bug, min(arguments.jobs, len(plans)), keep_trace=arguments.trace):
            total.add(outcome)
            if total.runs % PROGRESS_EVERY == 0:
                print(f"{total.runs} runs, {total.failed} failed", file=sys.stderr, flush=True)
            if arguments.trace:
                print("\n".join(outcome.trace))
            if outcome.violations:
                failed.append(outcome)
                if len(failed) <= FAILURES_SHOWN_MAX:
                    print(show(outcome, arguments.options, arguments.bug), flush=True)
                else:
                    print(f"FAILED seed {outcome.plan.seed}: {str(outcome.violations[0])[:LINE_MAX]}", flush=True)
                if not arguments.keep_going:
                    break
    except KeyboardInterrupt:
        print("stopped; so far:")
    print(total.show(time.monotonic() - began))
    if failed:
        print("failed seeds:", *(outcome.plan.seed for outcome in failed))
        if not arguments.no_shrink:
            with planted(arguments.bug):
                print(shrink(failed[0], f" --bug {arguments.bug}" if arguments.bug else ""))
    return 1 if failed else 0


def _outcomes(plans: list[AnyPlan], bug: str, jobs: int, *, keep_trace: bool) -> Iterator[Outcome]:
    if jobs <= 1:
        for plan in plans:
            yield run_job((plan, bug, keep_trace))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise the workers would continue without the parent
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(run_job, [(plan, bug, keep_trace) for plan in plans], chunksize=1)


class Totals:
    """Sums over runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.seeds: set[int] = set()
        self.groups = self.terms = self.cuts = 0
        self.virtual_s = self.cpu_s = 0.0
        self.failed = self.consumed = self.excused = self.given_up = 0
        self.faults: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.lost = 0

    def add(self, outcome: Outcome) -> None:
        """Adds the result of one run."""
        self.runs += 1
        self.seeds.add(outcome.plan.seed)
        self.groups += isinstance(outcome.plan, GroupPlan)
        self.terms += outcome.term_count
        self.cuts += outcome.cut_count
        self.virtual_s += outcome.virtual_s
        self.cpu_s += outcome.cpu_s
        self.failed += bool(outcome.violations)
        self.lost += sum(violation.checker in ("durability", "kept") for violation in outcome.violations)
        self.excused += outcome.excused_count
        self.given_up += outcome.given_up_count
        self.consumed += outcome.consumed_count
        self.faults.update(outcome.faults)
        self.statuses.update(outcome.statuses)

    def show(self, took_s: float) -> str:
        """Returns the sums as text."""
        return "\n".join(
            [
                f"runs               {self.runs} of {len(self.seeds)} seeds, failed {self.failed}",
                f"of groups          {self.groups}: {self.terms} terms, {self.cuts} logs cut off",
                f"virtual hours      {self.virtual_s / 3600:.2f} (in {took_s:.0f} s, {self.cpu_s:.0f} s of processor)",
                f"faults injected    {sum(self.faults.values())}: {_counts(self.faults)}",
                f"sends by status    {_counts(self.statuses)}",
                f"acknowledged       {self.statuses['PUT_OK']}, consumed {self.consumed}",
                f"lost               {self.lost}  (beside {self.excused} that the mode allows to be lost: "
                f"power or damage took all copies; {self.given_up} that the operator gave up behind damage)",
            ]
        )


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def show(outcome: Outcome, options: str = "", bug: str = "") -> str:
    """Returns the description of a failed run, and the command that runs it again."""
    plan = outcome.plan
    command = f"python -m tests.sim{' --groups' if isinstance(plan, GroupPlan) else ''} --seeds 1 --first {plan.seed}"
    command += f" --options {options}" if options else ""
    command += f" --bug {bug}" if bug else ""
    described = msgspec.structs.asdict(plan.options)
    lines = [f"FAILED seed {plan.seed}: {len(outcome.violations)} violations"]
    lines += [f"  {violation}" for violation in outcome.violations[:FAILURES_SHOWN_MAX]]
    lines.append("  options: " + ", ".join(f"{key}={value}" for key, value in described.items()))
    lines.append(f"  faults:  {'; '.join(map(_fault_text, plan.faults))}")
    lines.append(f"  again:   {command}")
    return "\n".join(lines)


def _fault_text(fault: Fault) -> str:
    return f"{fault.at_s} {fault.kind} {fault.node} {fault.other} for {fault.duration_s} s"


if __name__ == "__main__":
    sys.exit(main())
