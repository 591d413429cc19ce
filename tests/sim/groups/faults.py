"""Further faults of a group, besides those that `tests.sim.faults` injects into any machine.

service_cut             no connection between a member and the service
cut_off                 and none between the member and any other machine
apart                   and none between the member and other members; clients still reach it
service_down            the service has no quorum: no answers, no lease ends; the new leader renews all leases
service_leader          all leases are renewed
service_slow            requests, answers and watch events of a member are slow
service_lossy           some of a member's requests are lost, and some answers to executed requests
service_compact         watches that are behind have to restart
switch                  the operator requests a switchover
blackout                several members lose power at once, and in half of the cases the service, too
service_restored        an older state of the service is restored, with or without its leases, while all members are
                        present. No other fault happens until the operator has restored the newest record of any
                        member's disk
duplicate_id            a second process with a member's broker id starts beside it, with an empty or a copied store
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import trio

from ha.failover.agreement import SwitchRequest
from tests.sim.agreement import Link
from tests.sim.faults import Faults
from tests.sim.groups.scenario import MASTER_NOW, SLAVE_NOW, WITH_LEASES
from tests.sim.scenario import Fault

if TYPE_CHECKING:
    from tests.sim.groups.group import Group
    from tests.sim.process import Process

PUT_BACK_LEASES = 5
"""Lease times after which the operator has restored the newest record in a restored service"""
SLOW_S = ((0.0, 0.2), (0.1, 0.6), (0.3, 2.0))
"""Delays of requests and answers; a call times out after 1 s"""
SLOW_WATCH_S = ((0.0, 0.3), (0.5, 1.5), (2.0, 6.0))


class GroupFaults(Faults):
    """Injects the faults of a plan into a group, and undoes them."""

    _cluster: Group
    _quiet_until = -math.inf
    """No other fault happens while the operator restores the service"""

    def _do(self, fault: Fault) -> None:
        group = self._cluster
        if trio.current_time() < self._quiet_until:
            return
        if fault.node in (MASTER_NOW, SLAVE_NOW):
            members = [name for name in group.machines if fault.node == MASTER_NOW or name != group.master_name]
            if fault.node == MASTER_NOW and group.master_name is not None:
                members = [group.master_name]
            fault = msgspec.structs.replace(fault, node=members[fault.number % len(members)])
        if fault.other == fault.node:
            names = [name for name in group.machines if name != fault.node]
            fault = msgspec.structs.replace(fault, other=names[fault.number % len(names)])
        super()._do(fault)

    def _link(self, fault: Fault) -> Link:
        return self._cluster.service.links[fault.node]

    def _service_cut(self, fault: Fault) -> bool:
        service = self._cluster.service
        service.cut(fault.node)
        self._later(fault, service.heal, fault.node)
        return True

    def _cut_off(self, fault: Fault) -> bool:
        self._service_cut(fault)
        return self._cut(msgspec.structs.replace(fault, kind="isolate"))

    def _apart(self, fault: Fault) -> bool:
        self._service_cut(fault)
        for other in self._cluster.machines:
            if other != fault.node:
                self._cut(msgspec.structs.replace(fault, kind="partition", other=other))
        return True

    def _service_down(self, fault: Fault) -> bool:
        service = self._cluster.service
        if service.is_down:
            return False
        service.stop()
        self._later(fault, self._service_up)
        return True

    def _service_up(self) -> None:
        service = self._cluster.service
        if service.is_down:
            service.start()

    def _service_leader(self, fault: Fault) -> bool:
        self._cluster.service.change_leader()
        return True

    def _service_compact(self, fault: Fault) -> bool:
        self._cluster.service.compact()
        return True

    def _service_slow(self, fault: Fault) -> bool:
        link = self._link(fault)
        link.delay_s = SLOW_S[fault.number % 3]
        link.watch_delay_s = SLOW_WATCH_S[fault.number // 3 % 3]
        self._later(fault, self._cluster.mend_link, fault.node)
        return True

    def _service_lossy(self, fault: Fault) -> bool:
        link = self._link(fault)
        link.lost_request_share = (0.0, 0.3, 0.6)[fault.number % 3]
        link.lost_answer_share = (0.6, 0.3, 0.1)[fault.number // 3 % 3]
        self._later(fault, self._cluster.mend_link, fault.node)
        return True

    def _switch(self, fault: Fault) -> bool:
        service = self._cluster.service
        if service.is_down:
            return False
        to = None if fault.number & 1 else 1 + fault.number // 2 % len(self._cluster.machines)
        service.change({"switch": (SwitchRequest(to=to, reason="drawn"), 0)})
        return True

    def _blackout(self, fault: Fault) -> bool:
        group = self._cluster
        names = list(group.machines)
        spared = names[fault.number // 2 % len(names)] if fault.number // 8 % 3 == 0 else ""
        machines = [machine for name, machine in group.machines.items() if name != spared and machine.is_running]
        for number, machine in enumerate(machines):
            machine.power_off()
            self._timers.call_in(fault.duration_s * (1 + number), group.start, machine)
        if fault.number & 1:
            self._service_down(fault)
        return bool(machines)

    def _service_restored(self, fault: Fault) -> bool:
        group = self._cluster
        service = group.service
        if not service.snapshots or any(_is_ending(machine.process) for machine in group.everyone()):
            return False
        self.stop_all()
        group.start_all()
        lease_s = group.options.lease_ttl_ms / 1000
        self._quiet_until = trio.current_time() + PUT_BACK_LEASES * lease_s
        self._timers.call_at(self._quiet_until, self._put_back)
        snapshot = service.snapshots[fault.number % len(service.snapshots)]
        group.watch.on_restored(snapshot.revision, lease_s)
        service.restore(snapshot, keeps_leases=fault.other == WITH_LEASES)
        return True

    def _put_back(self) -> None:
        """Does what docs/failover.md tells the operator to do."""
        service = self._cluster.service
        view = service.view()
        newest = max(self._cluster.known_records(), key=lambda record: record.age, default=None)
        if newest is not None and (view.group is None or newest.age > view.group.age):
            self._cluster.world.note(f"operator puts back {newest}")
            service.change({"group": (newest, 0)})

    def _duplicate_id(self, fault: Fault) -> bool:
        group = self._cluster
        if not group.start_duplicate(fault.node, with_copy=bool(fault.number & 1)):
            return False
        self._later(fault, group.end_duplicate, int(fault.node[1:]))
        return True

    def stop_all(self) -> None:
        super().stop_all()
        self._cluster.end_duplicates()
        service = self._cluster.service
        for name in self._cluster.machines:
            service.heal(name)
            self._cluster.mend_link(name)
        self._service_up()
        self._put_back()


def _is_ending(process: Process | None) -> bool:
    """Whether a process will soon not be present, although nothing disturbs it."""
    return process is not None and (process.stop_wanted.is_set() or "sync" in process.disk.failed)
