"""One seed, from the first start to the last stop, and what came of it.

faults       nodes start, clients work, faults happen at their times
convergence  no more faults; everyone runs; producers stop; in CONVERGENCE_S all must be equal and consumed
stop         every node stops cleanly; what is on the disks is judged
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack

import trio
import trio.testing

from tests.checkers.violation import Violation
from tests.sim.cluster import Cluster
from tests.sim.faults import Faults
from tests.sim.groups.live import GroupRun
from tests.sim.machines import HA_PORT
from tests.sim.network import Network
from tests.sim.process import OWNER, Processes
from tests.sim.run import Outcome, Run
from tests.sim.scenario import MASTER, AnyPlan, Plan
from tests.sim.watch import Watch
from tests.sim.workload import TOPIC, Consumer, Producer
from tests.sim.world import World

START_S = 40.0
CALM_S = 3.0
READ_S = 30.0
STUCK_S = 45.0
"""What has not come together so long after the faults is looked at by the operator, and again after as long"""


class _Log(logging.Handler):
    """Takes what nodes log into the trace."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = OWNER.get()
        name = process.machine.name if process is not None else "-"
        self._world.note(f"{name} {record.levelname} {record.getMessage()}")


def run_plan(plan: AnyPlan) -> Outcome:
    """Run one scenario. Deterministic: the plan decides everything, to the last line of the trace."""
    from trio._core import _run  # private: there is no public way to seed the scheduler

    gc.collect()
    # What is there already need not be looked at again: it took half of the time after 500 runs. Before the world is
    # made, as what is frozen is never collected.
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
    gc.set_threshold(100_000, 10, 10)  # nothing that is collected has an effect: seldom is cheaper
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(plan.seed)
    random.seed(plan.seed)
    began = time.process_time()
    clock = trio.testing.MockClock(autojump_threshold=0)
    try:
        trio.run(_run_of(world, plan, outcome).run, clock=clock, instruments=[Processes()])
    except Exception as error:
        import traceback

        text = "".join(traceback.format_exception(error))
        outcome.violations.append(Violation("simulator", f"the run itself failed: {error!r}\n{text}"))
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

    async def _live(self, nursery: trio.Nursery) -> None:
        options, cluster, watch = self.plan.options, self.cluster, self.watch
        cluster.start_all()
        if not await self._until(self._all_open, START_S):
            watch.violate("convergence", "not every node has started without any fault")
            return
        began = trio.current_time()
        self.faults.schedule(self.plan.faults)
        self._write_back()
        producers = [Producer(cluster, options, watch, f"p{n}") for n in range(1, options.producer_count + 1)]
        consumers: list[Consumer] = [
            Consumer(cluster, options, watch, f"c{n}", MASTER if n == 1 else f"s{options.slave_count}")
            for n in range(1, options.consumer_count + 1)
        ]
        for run in [*(producer.run for producer in producers), *(consumer.run for consumer in consumers)]:
            nursery.start_soon(run)
        await trio.sleep_until(began + options.run_s)
        self.faults.stop_all()
        await trio.sleep(3.0)  # some load on the healed cluster
        for producer in producers:
            producer.pause()
        if await self._converge(producers):
            await self._calm(producers, nursery)
        await self._stop([*cluster.slaves, cluster.master, *([cluster.name_server] if cluster.name_server else [])])
        if not watch.violations or self._all_stopped():
            outcome = self.outcome
            outcome.excused_count = watch.check_end(clock_is_steady=self.faults.clock_is_steady)
            outcome.given_up_count = watch.given_up_count

    async def _calm(self, producers: list[Producer], nursery: trio.Nursery) -> None:
        """Nothing is wrong any more: every put is PUT_OK, and a new consumer gets everything."""
        watch, cluster = self.watch, self.cluster
        watch.on_converged()
        for producer in producers:
            producer.resume()
        reader = Consumer(cluster, cluster.options, watch, "c9", MASTER)
        nursery.start_soon(reader.run)
        await trio.sleep(CALM_S)
        for producer in producers:
            producer.stop()
        if await self._converge(producers):
            ends = cluster.queue_ends()
            if await self._until(lambda: reader.has_reached(ends), READ_S):
                watch.check_consumed(TOPIC)
            else:
                watch.violate("convergence", f"a consumer has read {reader.next_offsets} of {ends} in {READ_S} s")

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
        if not super()._is_converged(producers):
            return False
        return not self.cluster.damaged_node or self.watch.logs_are_alike()

    def _differences(self) -> str:
        cluster = self.cluster
        master = cluster.node(MASTER)
        if master is None:
            return "the master does not run"
        end = master.store.log.max_offset.value
        for name in cluster.machines:
            node = cluster.node(name)
            if node is None:
                return f"{name} does not run"
            reason = node.not_ready()
            if reason:
                return f"{name}: {reason}"
            log = node.store.log
            link = node.ha_client.statistics() if node.ha_client is not None else None
            if log.max_offset.value != end or log.dispatched_offset.value != end or log.flushed_offset.value != end:
                ends = f"log {log.max_offset.value}, flushed {log.flushed_offset.value}, dispatched "
                return f"{name}: {ends}{log.dispatched_offset.value}, master's log {end}, {link}"
            if name == cluster.damaged_node and not node.store.scrub.statistics().round_count:
                return f"{name}: its scrub has not gone through the files once since they were damaged"
        return ""


def planted(bug: str) -> ExitStack:
    """Return a context in which the bug of that name is planted; an empty one for ""."""
    stack = ExitStack()
    if bug:
        from tests.sim.bugs import BUGS  # these import all that they break
        from tests.sim.groups.bugs import GROUP_BUGS

        stack.enter_context(BUGS[bug]() if bug in BUGS else GROUP_BUGS[bug]())
    return stack


def run_job(job: tuple[AnyPlan, str, bool]) -> Outcome:
    """Run a plan with a bug planted, or none; for a worker process. The last is whether the trace is wanted."""
    plan, bug, keep_trace = job
    with planted(bug):
        outcome = run_plan(plan)
    if not keep_trace:
        outcome.trace = []
    return outcome
