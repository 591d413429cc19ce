"""Finds a smaller scenario that breaks the same promise by leaving out faults, clients and nodes."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import msgspec

from tests.sim.groups.scenario import members_of
from tests.sim.run import Outcome
from tests.sim.runner import run_plan
from tests.sim.scenario import AnyPlan, GroupPlan

RUN_COUNT_MAX = 80


def shrink(failed: Outcome, flags: str = "") -> str:
    """Searches for the smallest scenario that breaks a promise that `failed` broke; returns its description.

    `flags` are the arguments, besides its file, of the command that runs it again.
    """
    checkers = {violation.checker for violation in failed.violations}
    best = failed
    runs = 0
    is_smaller = True
    while is_smaller and runs < RUN_COUNT_MAX:
        is_smaller = False
        for plan in _smaller(best.plan):
            if runs >= RUN_COUNT_MAX:
                break
            runs += 1
            outcome = run_plan(plan)
            if checkers & {violation.checker for violation in outcome.violations}:
                best, is_smaller = outcome, True
                break
    path = Path(gettempdir()) / f"simulation-{failed.plan.seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(best.plan), indent=1))
    faults = [f"    {fault}" for fault in best.plan.faults]
    options = msgspec.structs.asdict(best.plan.options)
    return "\n".join(
        [
            f"shrunk in {runs} runs to {len(best.plan.faults)} of {len(failed.plan.faults)} faults:",
            f"  {best.violations[0]}",
            f"  options: {', '.join(f'{key}={value}' for key, value in options.items())}",
            *faults,
            f"  again:   python -m tests.sim --plan {path}{flags}",
        ]
    )


def _smaller(plan: AnyPlan) -> Iterator[AnyPlan]:
    count = len(plan.faults)
    size = max(1, count // 2)
    while count and size >= 1:  # halves first, then single faults
        for begin in range(0, count, size):
            yield _with_faults(plan, plan.faults[:begin] + plan.faults[begin + size :])
        size //= 2
    options = plan.options
    last = max((fault.at_s for fault in plan.faults), default=0.0)
    fewer: dict[str, Any]
    if isinstance(plan, GroupPlan):
        fewer = {"member_count": plan.options.member_count - 1, "clock_speed": 1.0, "lease_late_s": 0.0}
    else:
        fewer = {"slave_count": plan.options.slave_count - 1, "separate_name_server": False}
    for key, value in {
        "consumer_count": 0,
        "producer_count": 1,
        **fewer,
        "run_s": round(last + 3.0, 1),
        "burst_max": 1,
        "split_chance": 0.0,
        "jitter_s": 0.0,
    }.items():
        if getattr(options, key) != value and (key != "run_s" or value < options.run_s):
            yield from _with_option(plan, key, value)


def _with_faults(plan: AnyPlan, faults: tuple[Any, ...]) -> AnyPlan:
    return msgspec.structs.replace(plan, faults=faults)


def _with_option(plan: AnyPlan, key: str, value: Any) -> Iterator[AnyPlan]:
    options: Any = msgspec.structs.replace(plan.options, **{key: value})
    if isinstance(plan, GroupPlan):
        if options.member_count < 2 or options.ack_count > options.member_count:
            return
        gone = set(members_of(plan.options)) - set(members_of(options))
    else:
        if options.slave_count < 1 or options.in_sync_replicas > options.slave_count + 1:
            return
        gone = {f"s{number}" for number in range(options.slave_count + 1, plan.options.slave_count + 1)}
    faults = tuple(fault for fault in plan.faults if not gone & {fault.node, fault.other})
    yield msgspec.structs.replace(plan, options=options, faults=faults)
