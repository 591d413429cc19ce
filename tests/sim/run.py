"""The phases of every run, of a pair or a group.

faults       nodes start, a group elects a master, clients work, faults happen at their times
convergence  faults are over; all nodes run; producers stop; within CONVERGENCE_S all must be equal and consumed
stop         every node stops cleanly; the files on the disks are checked
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from tests.checkers import pop, timers
from tests.checkers.history import Consumed, body_id_of
from tests.checkers.violation import Violation
from tests.sim.faults import Faults
from tests.sim.machines import HA_PORT, Machines
from tests.sim.network import Network
from tests.sim.observer import Observer
from tests.sim.pop import PopLedger
from tests.sim.scenario import CONVERGENCE_S, AnyPlan
from tests.sim.timers import TIMED_TOPIC, TimerLedger
from tests.sim.workload import TOPIC

if TYPE_CHECKING:
    from tests.checkers.store import StoreImage
    from tests.sim.process import Machine
    from tests.sim.workload import Consumer, Producer
    from tests.sim.world import World

START_S = 40.0
HEALED_S = 3.0
CALM_S = 3.0
READ_S = 60.0
"""Time for a new consumer to read everything; over the slowest links 2 MiB take half a minute"""
STOP_S = 60.0
TIMERS_S = 120.0
"""Time for timer messages that are due soon after the faults"""
POPS_S = 60.0
"""Time for POP consumers to acknowledge everything after the faults"""
LOOK_EVERY_S = 0.5
WRITE_BACK_EVERY_S = 1.0
BROKEN_S = 20.0
"""Time to converge for a run that has already broken a promise"""
VIRTUAL_S_MAX = 900.0


@dataclass
class Outcome:
    """The result of one run."""

    plan: AnyPlan
    violations: list[Violation] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    acknowledged_count: int = 0
    excused_count: int = 0
    """Acknowledged messages that are lost as the fault model allows"""
    given_up_count: int = 0
    """Intact messages behind damage that could not be repaired: the operator dropped them"""
    consumed_count: int = 0
    term_count: int = 0
    """Of a group: number of elections"""
    cut_count: int = 0
    """Of a group: number of truncations of unconfirmed log"""
    fingerprint: str = ""
    trace: list[str] = field(default_factory=list)


class Run:
    """One run. `_open` creates `watch`, `cluster` and `faults`; subclasses say which."""

    watch: Observer
    cluster: Machines
    faults: Faults
    healed_s = HEALED_S
    """Time under load after the last fault"""
    calm_s = CALM_S
    """Time under load after the cluster has converged"""

    def __init__(self, world: World, plan: AnyPlan, outcome: Outcome) -> None:
        self.world = world
        self.plan = plan
        self.outcome = outcome
        self._ledger: TimerLedger | None = None
        """With timer messages"""
        self._pops: PopLedger | None = None
        """With POP consumers"""
        self._poppers: list[Producer] = []
        self._master_name: str | None = None
        self._now_ms = 0
        """The master, and its clock, when it had delivered what was due"""

    # ---- what differs by kind of cluster

    def _open(self, network: Network, nursery: trio.Nursery) -> None:
        """Creates the machines; `nursery` is for their processes."""
        raise NotImplementedError

    def _producers(self) -> Sequence[Producer]:
        raise NotImplementedError

    def _timer_producer(self, ledger: TimerLedger) -> Producer:
        raise NotImplementedError

    def _pop_consumer(self, ledger: PopLedger, name: str) -> Producer:
        raise NotImplementedError

    def _may_lose(self) -> bool:
        """Whether a fault, or the policy, may have lost acknowledged messages."""
        raise NotImplementedError

    def _may_repeat(self) -> bool:
        """Whether timer messages may have been delivered twice."""
        raise NotImplementedError

    def _consumers(self) -> Sequence[Consumer]:
        raise NotImplementedError

    def _late_consumer(self) -> Consumer:
        """A consumer that reads everything from the start once the cluster has converged."""
        raise NotImplementedError

    def _check_end(self) -> None:
        """Checks the files of the stopped nodes."""
        raise NotImplementedError

    def _stop_order(self) -> list[list[Machine]]:
        """Machines that are stopped together, one group after the other."""
        raise NotImplementedError

    def _has_started(self) -> bool:
        return self._all_open()

    def _watch_periodically(self) -> None:
        """Starts what looks at the nodes regularly."""

    async def _live(self, nursery: trio.Nursery) -> None:
        """Starts everything, injects the faults under load, waits for convergence, stops, and checks the result."""
        cluster, watch, options = self.cluster, self.watch, self.plan.options
        cluster.start_all()
        if not await self._until(self._has_started, START_S):
            watch.violate("convergence", "without any fault, not every node has started, or none is master")
            return
        began = trio.current_time()
        self.faults.schedule(self.plan.faults)
        self._write_back()
        self._watch_periodically()
        producers = list(self._producers())
        if options.timer_pause_s:
            self._ledger = TimerLedger(watch)
            producers.append(self._timer_producer(self._ledger))
        if options.pop_pause_s:
            self._pops = PopLedger(watch)
            self._poppers = [self._pop_consumer(self._pops, f"q{n}") for n in (1, 2)]
            producers += self._poppers
        for run in [*(each.run for each in producers), *(each.run for each in self._consumers())]:
            nursery.start_soon(run)
        await trio.sleep_until(began + options.run_s)
        self.faults.stop_all()
        await trio.sleep(self.healed_s)
        for producer in producers:
            producer.pause()
        if await self._converge(producers):
            await self._calm(producers, nursery)
        for machines in self._stop_order():
            await self._stop(machines)
        if not watch.violations or self._all_stopped():
            self._check_end()
            self._check_timers()

    async def _calm(self, producers: Sequence[Producer], nursery: trio.Nursery) -> None:
        """Without faults every put is PUT_OK, and a new consumer gets everything."""
        watch, cluster = self.watch, self.cluster
        watch.on_converged()
        for producer in producers:
            producer.resume()
        reader = self._late_consumer()
        nursery.start_soon(reader.run)
        await trio.sleep(self.calm_s)
        senders = [producer for producer in producers if producer not in self._poppers]
        for producer in senders:
            producer.stop()
        await self._deliver_timers()  # or a delivery would come between two looks at the logs
        await self._drain_pops(senders)
        if await self._converge(producers):
            ends = cluster.queue_ends()
            if await self._until(lambda: reader.has_reached(ends), READ_S):
                watch.check_consumed()
            else:
                watch.violate("convergence", f"a consumer has read {reader.next_offsets} of {ends} in {READ_S} s")

    async def _deliver_timers(self) -> None:
        """Waits until the master has delivered what is due, and nothing becomes due before the nodes stop."""
        if self._ledger is None:
            return
        timeout_s = TIMERS_S + self.faults.set_back_s
        if await self._until(lambda: not self._due_soon(), timeout_s):
            self._master_name, self._now_ms = self.cluster.master_name, self._master_clock_ms()
        else:
            self.watch.violate("timers", f"the master has not delivered what is due in {timeout_s} s")

    async def _drain_pops(self, senders: Sequence[Producer]) -> None:
        """Waits until all messages of the log were popped and acknowledged, stops the consumers, and judges them."""
        pops = self._pops
        if pops is None:
            return
        pops.is_draining = True
        await self._until(lambda: all(sender.is_idle for sender in senders), POPS_S)
        log = self._master_image()
        readable = [record for record in log.records() if record.physical_offset >= log.misread_to]
        records = [record for record in readable if record.topic == TOPIC]
        keys = [key for key in (body_id_of(record.body) for record in records) if key is not None]
        await self._until(lambda: pops.finished.issuperset(keys) and not self._is_in_flight(), POPS_S)
        for consumer in self._poppers:
            consumer.stop()
        may_forget = self._may_lose() or self.watch.faults["clock"] > 0
        left = set() if self.watch.faults["clock"] else set(keys) - pops.finished
        self.watch.judged(pop.check(pops.deliveries, left, may_forget=may_forget))

    def _is_in_flight(self) -> bool:
        node = self.cluster.node(self.cluster.master_name or "")
        return node is None or node.broker.pop.statistics().in_flight_count > 0

    def _master_image(self) -> StoreImage:
        return self.cluster.image(self.cluster.machines[self.cluster.master_name or ""])

    def _due_soon(self) -> bool:
        node = self.cluster.node(self.cluster.master_name or "")
        if node is None:
            return True
        next_due_ms = node.broker.timers.statistics().next_due_ms
        return next_due_ms is not None and next_due_ms <= self._master_clock_ms() + 1000 * STOP_S

    def _master_clock_ms(self) -> int:
        return self.cluster.machines[self.cluster.master_name or ""].wall_clock_ms()

    def _check_timers(self) -> None:
        if self._ledger is None or not self._master_name:
            return
        image = self.cluster.image(self.cluster.machines[self._master_name])
        self.watch.judged(
            timers.check(
                self._ledger.sent(),
                image,
                TIMED_TOPIC,
                now_ms=self._now_ms,
                may_lose=self._may_lose(),
                may_repeat=self._may_repeat(),
                clock_is_steady=not self.faults.set_back_s,
            )
        )

    async def run(self) -> None:
        """Runs all phases; the result is in `outcome`."""
        world, options = self.world, self.plan.options
        network = Network(
            world,
            base_s=options.base_s,
            jitter_s=options.jitter_s,
            window=options.window,
            split_chance=options.split_chance,
        )
        with trio.CancelScope(deadline=VIRTUAL_S_MAX) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.timers.run)
                async with trio.open_nursery() as nodes:
                    self._open(network, nodes)
                    self.outcome.violations = self.watch.violations
                    self.outcome.statuses = self.watch.statuses
                    self.outcome.faults = self.watch.faults
                    await self._live(nodes)
                    nodes.cancel_scope.cancel()
                self.outcome.virtual_s = trio.current_time()
                self.outcome.acknowledged_count = self.watch.statuses["PUT_OK"]
                self.outcome.consumed_count = sum(1 for _ in self.watch.history.of(Consumed))
                nursery.cancel_scope.cancel()
        if scope.cancelled_caught:
            self.watch.violate("convergence", f"the run did not end within {VIRTUAL_S_MAX} s")

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        with trio.move_on_after(timeout_s):
            while not condition():  # noqa: ASYNC110  # looked at from outside, as an operator does
                await trio.sleep(LOOK_EVERY_S)
            return True
        return False

    def _all_open(self) -> bool:
        return all(machine.process is not None and machine.process.node for machine in self.cluster.everyone())

    def _write_back(self) -> None:
        for machine in self.cluster.machines.values():
            machine.disk.write_back()
        self.world.timers.call_in(WRITE_BACK_EVERY_S, self._write_back)

    async def _converge(self, producers: Sequence[Producer]) -> bool:
        began = trio.current_time()
        while not self._is_converged(producers):
            if self.watch.violations and trio.current_time() > began + BROKEN_S:
                return False
            if trio.current_time() > began + CONVERGENCE_S:
                self.watch.violate("convergence", f"not within {CONVERGENCE_S} s: {self._differences()}")
                return False
            self._look_after()
            self.cluster.start_all()
            await trio.sleep(LOOK_EVERY_S)
        self.world.note(f"converged after {trio.current_time() - began:.1f}")
        return True

    def _is_converged(self, producers: Sequence[Producer]) -> bool:
        return self._all_open() and all(producer.is_idle for producer in producers) and not self._differences()

    def _differences(self) -> str:
        """Returns why the cluster has not converged; "" if it has."""
        cluster = self.cluster
        if cluster.master_name is None:
            return "there is no master"
        master = cluster.node(cluster.master_name)
        if master is None:
            return "the master does not run"
        if cluster.network.is_half_open(HA_PORT):
            return "an HA connection is half-open"
        end = master.store.log.max_offset.value
        for name in cluster.machines:
            node = cluster.node(name)
            if node is None:
                return f"{name} does not run"
            reason = node.not_ready()
            if reason:
                return f"{name}: {reason}"
            if node.store.index is not None and not node.store.index.is_attached:
                return f"{name}: the index is being rebuilt"
            log = node.store.log
            if log.max_offset.value != end or log.dispatched_offset.value != end or log.flushed_offset.value != end:
                ends = f"log {log.max_offset.value}, flushed {log.flushed_offset.value}, dispatched "
                link = node.ha_client.statistics() if node.ha_client is not None else None
                return f"{name}: {ends}{log.dispatched_offset.value}, master's log {end}, {link}"
        return ""

    def _look_after(self) -> None:
        """Performs the operator's actions for nodes that need help."""

    async def _stop(self, machines: list[Machine]) -> None:
        self.cluster.is_over = True
        processes = []
        for machine in machines:
            if machine.process is not None:
                processes.append(machine.process)
                machine.stop()
        with trio.move_on_after(STOP_S):
            for process in processes:
                await process.ended.wait()
            await trio.sleep(0.001)  # the last one is also checked for remaining tasks
            return
        alive = [process.machine.name for process in processes if not process.ended.is_set()]
        self.watch.violate("tasks", f"{alive} did not stop within {STOP_S} s")

    def _all_stopped(self) -> bool:
        return not any(machine.is_running for machine in self.cluster.everyone())
