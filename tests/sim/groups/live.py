"""One run of a failover group, from the first start to the last stop.

faults       members start, elect one, clients work, faults happen at their times
convergence  no more faults; everyone runs; producers stop; in CONVERGENCE_S all are in the set, equal and consumed
stop         every member stops cleanly; what is on the disks is judged
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from tests.sim.groups.faults import GroupFaults
from tests.sim.groups.group import Group
from tests.sim.groups.watch import GroupWatch
from tests.sim.groups.workload import GroupConsumer, GroupProducer
from tests.sim.machines import LISTEN_PORT
from tests.sim.run import Run
from tests.sim.scenario import GroupPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sim.network import Network
    from tests.sim.workload import Producer

START_S = 40.0
HEALED_S = 2.0
CALM_S = 2.0
READ_S = 30.0
LOOK_S = 1.0


class GroupRun(Run):
    """Members, and the service on which they agree."""

    plan: GroupPlan
    watch: GroupWatch
    cluster: Group

    def _open(self, network: Network, nursery: trio.Nursery) -> None:
        options = self.plan.options
        self.watch = GroupWatch(self.world, options)
        self.cluster = Group(self.world, network, options, self.watch, nursery)
        self.watch.cluster = self.cluster
        self.faults = GroupFaults(self.cluster)
        network.taps[LISTEN_PORT] = self.watch.tap_clients

    async def _live(self, nursery: trio.Nursery) -> None:
        options, group, watch = self.plan.options, self.cluster, self.watch
        group.start_all()
        if not await self._until(lambda: self._all_open() and group.master is not None, START_S):
            watch.violate("convergence", "not every member has started, or none is master, without any fault")
            return
        began = trio.current_time()
        self.faults.schedule(self.plan.faults)
        self._write_back()
        self._look()
        producers = [GroupProducer(group, watch, f"p{n}") for n in range(1, options.producer_count + 1)]
        consumers = [
            GroupConsumer(group, watch, f"c{n}", wanders=n > 1, seeks=True)
            for n in range(1, options.consumer_count + 1)
        ]
        for run in [*(producer.run for producer in producers), *(consumer.run for consumer in consumers)]:
            nursery.start_soon(run)
        await trio.sleep_until(began + options.run_s)
        self.faults.stop_all()
        await trio.sleep(HEALED_S)  # some load on the healed group
        for producer in producers:
            producer.pause()
        if await self._converge(producers):
            await self._calm(producers, nursery)
        members = [machine for name, machine in group.machines.items() if name != group.master]
        await self._stop([*members, *(m for m in group.machines.values() if m not in members)])
        if group.name_server is not None and group.name_server.is_running:
            await self._stop([group.name_server])
        self.outcome.term_count, self.outcome.cut_count = len(watch.terms), watch.cut_count
        if not watch.violations or self._all_stopped():
            self.outcome.excused_count = watch.check_end(clock_is_steady=self.faults.clock_is_steady)

    async def _calm(self, producers: list[GroupProducer], nursery: trio.Nursery) -> None:
        """Nothing is wrong any more: every put is PUT_OK, and a new consumer gets everything."""
        watch, group = self.watch, self.cluster
        watch.on_converged()
        for producer in producers:
            producer.resume()
        reader = GroupConsumer(group, watch, "c9")
        nursery.start_soon(reader.run)
        await trio.sleep(CALM_S)
        for producer in producers:
            producer.stop()
        if await self._converge(producers):
            ends = group.queue_ends(next(iter(group.machines)))
            if await self._until(lambda: reader.has_reached(ends), READ_S):
                watch.check_consumed()
            else:
                watch.violate("convergence", f"a consumer has read {reader.next_offsets} of {ends} in {READ_S} s")

    def _look(self) -> None:
        self.watch.look()
        if not self.cluster.is_over:
            self.world.timers.call_in(LOOK_S, self._look)

    def _look_after(self) -> None:
        """Empty the stores of members that kept what the set has lost: that log is never truncated by itself."""
        if self.watch.has_lost:
            self.cluster.empty_diverged()

    def _is_converged(self, producers: Sequence[Producer]) -> bool:
        # A sync that was slow may be about to fail.
        is_blocked = any(machine.process and machine.process.blocking_count for machine in self.cluster.everyone())
        return not is_blocked and super()._is_converged(producers)

    def _differences(self) -> str:
        group = self.cluster
        view = group.service.view()
        if view.master is None or view.group is None:
            return "there is no master"
        node = group.node(f"m{view.master.broker_id}")
        if node is None:
            return "the master does not run"
        end = node.store.log.max_offset.value
        for name in group.machines:
            node = group.node(name)
            if node is None:
                return f"{name} does not run"
            reason = node.not_ready()
            if reason:
                return f"{name}: {reason}"
            log = node.store.log
            if log.max_offset.value != end or log.dispatched_offset.value != end or log.flushed_offset.value != end:
                ends = f"log {log.max_offset.value}, flushed {log.flushed_offset.value}, dispatched "
                link = node.ha_client.statistics() if node.ha_client is not None else None
                return f"{name}: {ends}{log.dispatched_offset.value}, master's log {end}, {link}"
        members = {int(name[1:]) for name in group.machines}
        if view.group.sync_state_set != members:
            return f"the sync-state set is {sorted(view.group.sync_state_set)}"
        return ""
