"""One run of a failover group; see run.py for its phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio

from tests.checkers.history import Crashed
from tests.sim.groups.faults import GroupFaults
from tests.sim.groups.group import Group
from tests.sim.groups.watch import GroupWatch
from tests.sim.groups.workload import GroupConsumer, GroupProducer
from tests.sim.machines import LISTEN_PORT
from tests.sim.pop import GroupPopConsumer, PopLedger
from tests.sim.run import Run
from tests.sim.scenario import GroupPlan
from tests.sim.timers import GroupTimerProducer, TimerLedger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.sim.network import Network
    from tests.sim.process import Machine
    from tests.sim.workload import Producer

LOOK_S = 1.0


class GroupRun(Run):
    """Members and their agreement service."""

    plan: GroupPlan
    watch: GroupWatch
    cluster: Group
    healed_s = calm_s = 2.0

    def _open(self, network: Network, nursery: trio.Nursery) -> None:
        options = self.plan.options
        self.watch = GroupWatch(self.world, options)
        self.cluster = Group(self.world, network, options, self.watch, nursery)
        self.watch.cluster = self.cluster
        self.faults = GroupFaults(self.cluster)
        network.taps[LISTEN_PORT] = self.watch.tap_clients

    def _producers(self) -> list[GroupProducer]:
        count = self.plan.options.producer_count
        return [GroupProducer(self.cluster, self.watch, f"p{n}") for n in range(1, count + 1)]

    def _timer_producer(self, ledger: TimerLedger) -> GroupTimerProducer:
        options = self.plan.options
        options = msgspec.structs.replace(options, burst_max=1, pause_s=options.timer_pause_s)
        return GroupTimerProducer(self.cluster, options, ledger, "t1")

    def _pop_consumer(self, ledger: PopLedger, name: str) -> GroupPopConsumer:
        options = msgspec.structs.replace(self.plan.options, pause_s=self.plan.options.pop_pause_s)
        return GroupPopConsumer(self.cluster, options, ledger, name)

    def _may_lose(self) -> bool:
        return self.plan.options.policy == "alone" or any(
            crash.kind != "kill" for crash in self.watch.history.of(Crashed)
        )

    def _may_repeat(self) -> bool:
        return len(self.watch.terms) > 1 or any(self.watch.history.of(Crashed))

    def _consumers(self) -> list[GroupConsumer]:
        return [
            GroupConsumer(self.cluster, self.watch, f"c{n}", wanders=n > 1, seeks=True)
            for n in range(1, self.plan.options.consumer_count + 1)
        ]

    def _late_consumer(self) -> GroupConsumer:
        return GroupConsumer(self.cluster, self.watch, "c9")

    def _stop_order(self) -> list[list[Machine]]:
        group = self.cluster
        members = sorted(group.machines.values(), key=lambda machine: machine.name == group.master_name)
        name_server = group.name_server
        return [members, [name_server]] if name_server is not None and name_server.is_running else [members]

    def _has_started(self) -> bool:
        return self._all_open() and self.cluster.master_name is not None

    def _check_end(self) -> None:
        self.outcome.excused_count = self.watch.check_end(clock_is_steady=not self.faults.set_back_s)

    async def _live(self, nursery: trio.Nursery) -> None:
        await super()._live(nursery)
        self.outcome.term_count, self.outcome.cut_count = len(self.watch.terms), self.watch.cut_count

    def _watch_periodically(self) -> None:
        self._look()

    def _look(self) -> None:
        self.watch.look()
        if not self.cluster.is_over:
            self.world.timers.call_in(LOOK_S, self._look)

    def _look_after(self) -> None:
        """Empties the stores of members that kept records which the set has lost: such a log is never truncated
        automatically."""
        if self.watch.has_lost:
            self.cluster.empty_diverged()

    def _is_converged(self, producers: Sequence[Producer]) -> bool:
        # A slow sync may be about to fail.
        is_blocked = any(machine.process and machine.process.blocking_count for machine in self.cluster.everyone())
        return not is_blocked and super()._is_converged(producers)

    def _differences(self) -> str:
        view = self.cluster.service.view()
        if view.group is None:
            return "there is no group"
        members = {int(name[1:]) for name in self.cluster.machines}
        found = view.group.sync_state_set
        return super()._differences() or ("" if found == members else f"the sync-state set is {sorted(found)}")
