"""The faults, and how they end.

kill, power             the process dies, with or without the machine; restarted `duration_s` later
kill_in_write, power_in_write   the same, within a later disk operation
stop                    a clean stop; restarted
pause                   SIGSTOP, then SIGCONT
clock                   the wall clock of a machine steps forward or back
partition, one_way      no bytes between two machines, in both or in one direction
isolate                 no bytes between a machine and any other
clog, lossy             slow and unreliable links
reset, cut_frame, half_open   of one connection, see network.py
disk_full, disk_slow, write_error, create_error, sync_error, read_error   see disk.py
flip_bit, zero_range, truncate_file   of any file of one node, while it is killed and restarted
restart_name_server     kill and restart of the name server, if it has its own machine
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from tests.sim.scenario import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.machines import Machines
    from tests.sim.process import Machine
    from tests.sim.sockets import Host, SimStream

CLOCK_STEPS_MS = (-3_600_000, -60_000, -1_500, -20, 20, 1_500, 60_000, 3_600_000)
DISK_ERRORS = {"DiskFailed", "DiskFull"}
READ_FOLDERS = ("", "commitlog", "consumequeue", "index")
"""Folders in the store whose files have the next failing read; "": any"""


def _of_running_machine(
    inject: Callable[[Faults, Fault, Machine], bool],
) -> Callable[[Faults, Fault], bool]:
    """Passes the fault's machine; the fault does not happen if that is not running."""

    def inject_if_running(self: Faults, fault: Fault) -> bool:
        machine = self._cluster.machines.get(fault.node)
        return machine is not None and machine.is_running and inject(self, fault, machine)

    return inject_if_running


def _of_connection(inject: Callable[[Faults, Fault, SimStream], bool]) -> Callable[[Faults, Fault], bool]:
    """Passes a connection between the fault's two machines; the fault does not happen if there is none."""

    def inject_if_connected(self: Faults, fault: Fault) -> bool:
        cluster = self._cluster
        found = cluster.network.connections(cluster.host(fault.node), cluster.host(fault.other))
        return bool(found) and inject(self, fault, found[fault.number % len(found)])

    return inject_if_connected


class Faults:
    """Injects the faults of a plan into a cluster, and undoes them."""

    def __init__(self, cluster: Machines) -> None:
        self._cluster = cluster
        self._timers = cluster.world.timers
        self.set_back_s = 0.0
        """By how much clocks were set back, all steps together"""

    def schedule(self, faults: tuple[Fault, ...]) -> None:
        """Schedules each fault at its time."""
        for fault in faults:
            self._timers.call_at(fault.at_s, self._do, fault)

    def _do(self, fault: Fault) -> None:
        cluster = self._cluster
        if cluster.is_over:
            return
        if getattr(self, f"_{fault.kind}")(fault):
            cluster.world.note(f"fault {fault.kind} {fault.node} {fault.other} {fault.duration_s}")
            cluster.watch.faults[fault.kind] += 1

    def _later(self, fault: Fault, call: Callable[..., None], *arguments: object) -> None:
        self._timers.call_in(fault.duration_s, call, *arguments)

    # ---- processes

    @_of_running_machine
    def _kill(self, fault: Fault, machine: Machine) -> bool:
        machine.kill()
        self._later(fault, self._cluster.start, machine)
        return True

    @_of_running_machine
    def _power(self, fault: Fault, machine: Machine) -> bool:
        machine.power_off()
        self._later(fault, self._cluster.start, machine)
        return True

    @_of_running_machine
    def _crash_in_write(self, fault: Fault, machine: Machine) -> bool:
        def crash() -> None:
            (machine.kill if fault.kind == "kill_in_write" else machine.power_off)()
            self._later(fault, self._cluster.start, machine)

        machine.disk.crash_after = (fault.number % 6, crash)
        return True

    _kill_in_write = _power_in_write = _crash_in_write

    @_of_running_machine
    def _stop(self, fault: Fault, machine: Machine) -> bool:
        machine.stop()
        self._timers.call_in(fault.duration_s + 12.0, self._cluster.start, machine)
        return True

    @_of_running_machine
    def _pause(self, fault: Fault, machine: Machine) -> bool:
        machine.pause()
        self._later(fault, machine.resume)
        return True

    def _clock(self, fault: Fault) -> bool:
        step_ms = CLOCK_STEPS_MS[fault.number % len(CLOCK_STEPS_MS)]
        self._cluster.machines[fault.node].clock_step_ms += step_ms
        self.set_back_s += max(0, -step_ms) / 1000
        return True

    def _restart_name_server(self, fault: Fault) -> bool:
        machine = self._cluster.name_server
        if machine is None or not machine.is_running:
            return False
        machine.kill()
        self._later(fault, self._cluster.start, machine)
        return True

    # ---- the network

    def _ways(self, fault: Fault) -> list[tuple[Host, Host]]:
        one, network = self._cluster.host(fault.node), self._cluster.network
        if fault.kind == "isolate":
            others = [host for host in network.hosts.values() if host is not one]
        else:
            others = [self._cluster.host(fault.other)]
        there = [(one, other) for other in others]
        return there if fault.kind == "one_way" else there + [(other, source) for source, other in there]

    def _cut(self, fault: Fault) -> bool:
        network = self._cluster.network
        for source, target in self._ways(fault):
            network.cut(source, target)
            self._later(fault, network.heal, source, target)
        return True

    _partition = _one_way = _isolate = _cut

    def _clog(self, fault: Fault) -> bool:
        network = self._cluster.network
        for source, target in self._ways(fault):
            network.link(source, target).clog_s = (0.05, 0.5, 3.0)[fault.number % 3]
            self._later(fault, network.heal, source, target)
        return True

    def _lossy(self, fault: Fault) -> bool:
        network = self._cluster.network
        for source, target in self._ways(fault):
            network.link(source, target).loss = (0.05, 0.3, 0.7)[fault.number % 3]
            self._later(fault, network.heal, source, target)
        return True

    @_of_connection
    def _reset(self, fault: Fault, stream: SimStream) -> bool:
        self._cluster.network.reset(stream, "fault")
        return True

    @_of_connection
    def _cut_frame(self, fault: Fault, stream: SimStream) -> bool:
        pipe = stream.out if fault.number & 1 else stream.into
        pipe.cut_after = 1 + fault.number % 997
        return True

    @_of_connection
    def _half_open(self, fault: Fault, stream: SimStream) -> bool:
        self._cluster.network.forget(stream)
        return True

    # ---- disks

    def _disk_full(self, fault: Fault) -> bool:
        machine = self._cluster.machines[fault.node]
        machine.disk_faults.is_full = True
        self._cluster.excused[fault.node] |= DISK_ERRORS  # a start needs space
        self._later(fault, self._empty_disk, machine)
        return True

    @staticmethod
    def _empty_disk(machine: Machine) -> None:
        machine.disk_faults.is_full = False

    def _disk_slow(self, fault: Fault) -> bool:
        machine = self._cluster.machines[fault.node]
        machine.disk_faults.slowness_s = (0.05, 0.6, 6.0)[fault.number % 3]
        self._later(fault, machine.disk_faults.speed_up)
        return True

    @_of_running_machine
    def _error(self, fault: Fault, machine: Machine) -> bool:
        operation = fault.kind.removesuffix("_error")
        if fault.number & 1 and operation == "sync":  # of the many synced files the most important one
            operation = "sync commitlog"
        if operation == "read":
            operation = f"read {READ_FOLDERS[fault.number % len(READ_FOLDERS)]}".rstrip()
        machine.disk_faults.fail_next[operation] = 1
        self._cluster.excused[fault.node] |= DISK_ERRORS
        return True

    _write_error = _create_error = _sync_error = _read_error = _error

    @_of_running_machine
    def _damage(self, fault: Fault, machine: Machine) -> bool:
        machine.kill()
        found = machine.disk.damage(fault.kind, fault.folder)
        if found is not None:
            self._cluster.damaged(machine, *found)
        self._later(fault, self._cluster.start, machine)
        return found is not None

    _flip_bit = _zero_range = _truncate_file = _damage

    # ---- the end of all faults

    def stop_all(self) -> None:
        """Undoes everything: links heal, disks work, stopped nodes start, paused ones continue."""
        cluster = self._cluster
        for source in cluster.network.hosts.values():
            for target in cluster.network.hosts.values():
                cluster.network.heal(source, target)
        cluster.network.spare_all()
        for machine in cluster.everyone():
            machine.disk_faults.is_full = False
            machine.disk_faults.speed_up()
            machine.disk_faults.fail_next.clear()
            machine.disk.crash_after = None
            if machine.process is not None and machine.process.stop_wanted.is_set():
                continue
            machine.resume()
        cluster.world.note(f"faults end at {trio.current_time():.3f}")
