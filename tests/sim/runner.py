"""Runs a seed, deterministically."""

import gc
import logging
import random
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

import msgspec
import trio
import trio.testing

from tests.checkers.history import Crashed
from tests.checkers.violation import Violation
from tests.sim.cluster import Cluster
from tests.sim.faults import Faults
from tests.sim.groups.live import GroupRun
from tests.sim.machines import HA_PORT
from tests.sim.network import Network
from tests.sim.observer import SIMULATOR
from tests.sim.pop import PopConsumer, PopLedger
from tests.sim.process import OWNER, Machine, Processes
from tests.sim.run import Outcome, Run
from tests.sim.scenario import MASTER, AnyPlan, Plan
from tests.sim.timers import TimerLedger, TimerProducer
from tests.sim.watch import Watch
from tests.sim.workload import Consumer, Producer
from tests.sim.world import World

STUCK_S = 45.0
"""The operator looks at nodes that have not converged for this long after the faults, and again after as long"""

CPU_S_MAX = 300.0
"""Processor time after which a run is in an endless loop; most take about a second"""
_FRAMES_SHOWN = 10


class EndlessLoopError(Exception):
    """Ends the task of an endless loop."""


class _Log(logging.Handler):
    """Adds the nodes' log lines to the trace."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = OWNER.get()
        name = process.machine.name if process is not None else "-"
        self._world.note(f"{name} {record.levelname} {record.getMessage()}")


def run_plan(plan: AnyPlan) -> Outcome:
    """Runs one scenario. Deterministic: the plan decides everything, including the trace."""
    from trio._core import _run  # private: there is no public way to seed the scheduler

    gc.collect()
    # Excludes existing objects from garbage collection, which took half of the time after 500 runs. Called before the
    # world is created, because frozen objects are never collected.
    gc.freeze()
    world = World(plan.seed)
    outcome = Outcome(plan)
    handler = _Log(world)
    logger = logging.getLogger("ha")
    was_seeded = _run._ALLOW_DETERMINISTIC_SCHEDULING
    level, propagate, threshold, chance_state = logger.level, logger.propagate, gc.get_threshold(), random.getstate()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    gc.set_threshold(100_000, 10, 10)  # collected objects have no effect, so rare collection is cheaper
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(plan.seed)
    random.seed(plan.seed)
    began = time.process_time()
    clock = trio.testing.MockClock(autojump_threshold=0)
    scope = trio.CancelScope()
    try:
        with _ended_if_endless(outcome, scope):
            trio.run(_run_within, scope, _run_of(world, plan, outcome), clock=clock, instruments=[Processes()])
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        outcome.violations.append(Violation(SIMULATOR, f"the run itself failed: {error!r}\n{text}"))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        gc.set_threshold(*threshold)
        _run._ALLOW_DETERMINISTIC_SCHEDULING = was_seeded  # type: ignore[misc]
        random.setstate(chance_state)
    outcome.cpu_s = time.process_time() - began
    outcome.fingerprint = world.fingerprint
    outcome.trace = world.trace
    return outcome


@contextmanager
def _ended_if_endless(outcome: Outcome, scope: trio.CancelScope) -> Iterator[None]:
    """Ends a run that takes more than CPU_S_MAX: no deadline in virtual time ends a busy loop."""

    def end(number: int, frame: FrameType | None) -> None:
        place = "".join(traceback.format_stack(frame)[-_FRAMES_SHOWN:])
        outcome.violations.append(Violation(SIMULATOR, f"the run is in an endless loop:\n{place}"))
        scope.cancel()
        raise EndlessLoopError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S_MAX, CPU_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


async def _run_within(scope: trio.CancelScope, run: Run) -> None:
    with scope:
        await run.run()


def _run_of(world: World, plan: AnyPlan, outcome: Outcome) -> Run:
    return FixedRun(world, plan, outcome) if isinstance(plan, Plan) else GroupRun(world, plan, outcome)


class FixedRun(Run):
    """A master and its slaves."""

    plan: Plan
    watch: Watch
    cluster: Cluster

    def _open(self, network: Network, nursery: trio.Nursery) -> None:
        options = self.plan.options
        self.watch = Watch(self.world, options)
        self.cluster = Cluster(self.world, network, options, self.watch, nursery)
        self.watch.follow(self.cluster)
        network.taps[HA_PORT] = self.watch.tap_ha
        self.faults = Faults(self.cluster)
        self._looked = 0.0

    def _producers(self) -> list[Producer]:
        cluster, options = self.cluster, self.plan.options
        return [Producer(cluster, options, self.watch, f"p{n}") for n in range(1, options.producer_count + 1)]

    def _timer_producer(self, ledger: TimerLedger) -> Producer:
        options = msgspec.structs.replace(self.plan.options, burst_max=1, pause_s=self.plan.options.timer_pause_s)
        return TimerProducer(self.cluster, options, ledger, "t1")

    def _pop_consumer(self, ledger: PopLedger, name: str) -> PopConsumer:
        options = msgspec.structs.replace(self.plan.options, pause_s=self.plan.options.pop_pause_s)
        return PopConsumer(self.cluster, options, ledger, name)

    def _may_lose(self) -> bool:
        return any(crash.kind != "kill" for crash in self.watch.history.of(Crashed))

    def _may_repeat(self) -> bool:
        has_crashed = any(crash.node == MASTER for crash in self.watch.history.of(Crashed))
        was_late = any("broker.save_timed_out" in line for line in self.world.trace)
        return has_crashed or was_late or self.faults.set_back_s > 0 or self.watch.faults["disk_full"] > 0

    def _consumers(self) -> list[Consumer]:
        cluster, options = self.cluster, self.plan.options
        return [
            Consumer(cluster, options, self.watch, f"c{n}", MASTER if n == 1 else f"s{options.slave_count}")
            for n in range(1, options.consumer_count + 1)
        ]

    def _late_consumer(self) -> Consumer:
        return Consumer(self.cluster, self.plan.options, self.watch, "c9", MASTER)

    def _stop_order(self) -> list[list[Machine]]:
        cluster = self.cluster
        return [[*cluster.slaves, cluster.master, *([cluster.name_server] if cluster.name_server else [])]]

    def _check_end(self) -> None:
        # A flipped bit in bytes without a checksum may have changed a store time.
        is_steady = not self.faults.set_back_s and not self.cluster.may_be_hidden
        self.outcome.excused_count = self.watch.check_end(clock_is_steady=is_steady)
        self.outcome.given_up_count = self.watch.given_up_count

    def _write_back(self) -> None:
        self.watch.note_synced()
        super()._write_back()

    async def _converge(self, producers: Sequence[Producer]) -> bool:
        self._looked = trio.current_time()
        return await super()._converge(producers)

    def _look_after(self) -> None:
        now = trio.current_time()
        if now > self._looked + STUCK_S:
            self._looked = now
            self.cluster.look_at_stuck()

    def _is_converged(self, producers: Sequence[Producer]) -> bool:
        # Logs of one length may differ: what a master appends after a power loss may be as long as what it lost.
        return super()._is_converged(producers) and self.watch.logs_are_alike()

    def _differences(self) -> str:
        damaged = self.cluster.damaged_node
        found = super()._differences()
        node = self.cluster.node(damaged) if damaged and not found else None
        if node is not None and not node.store.scrub.statistics().round_count:
            return f"{damaged}: its scrub has not gone through the files once since they were damaged"
        if node is not None and not all(each.is_hopeless for each in node.store.damage.open):
            return f"{damaged}: its damage may still be healed"
        return found


def planted(bug: str) -> ExitStack:
    """Returns a context in which the bug of that name is planted; an empty one for ""."""
    stack = ExitStack()
    if bug:
        from tests.sim.bugs import BUGS  # these import all that they break
        from tests.sim.groups.bugs import GROUP_BUGS

        stack.enter_context(BUGS[bug]() if bug in BUGS else GROUP_BUGS[bug]())
    return stack


def run_job(job: tuple[AnyPlan, str, bool]) -> Outcome:
    """Runs a plan, with a bug planted unless "", in a worker process. The last item says whether to keep the trace."""
    plan, bug, keep_trace = job
    with planted(bug):
        outcome = run_plan(plan)
    if not keep_trace:
        outcome.trace = []
    return outcome
