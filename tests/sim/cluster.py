"""The nodes of one run, and the simulated operator."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ha.config import Config
from ha.node import open_node
from ha.replication.statistics import Condition
from tests.checkers.prefix import first_difference
from tests.checkers.store import StoreImage
from tests.sim.disk import Inode
from tests.sim.machines import (
    HA_PORT,
    NAME_SERVER_PORT,
    ROOT,
    START_AGAIN_S,
    Machines,
    address_of,
    common_config,
    open_name_server,
)
from tests.sim.process import Machine
from tests.sim.scenario import MASTER, NAME_SERVER, Options
from tests.sim.workload import TOPIC

if TYPE_CHECKING:
    from ha.store.damage import DamagedRange
    from tests.sim.network import Network
    from tests.sim.watch import Watch
    from tests.sim.world import World

APART = frozenset({Condition.MASTER_BEHIND, Condition.DIVERGED, Condition.OFFSET_MISMATCH})


def config_of(options: Options, name: str) -> Config:
    """Returns a node's configuration."""
    is_slave = name != MASTER
    name_server = address_of(NAME_SERVER if options.separate_name_server else MASTER)
    embeds = not is_slave and not options.separate_name_server
    return Config(
        **common_config(options, name),
        broker_role="SLAVE" if is_slave else options.role,
        broker_id=int(name[1:]) if is_slave else 0,
        name_server_addresses="" if embeds else f"{name_server}:{NAME_SERVER_PORT}",
        ha_master_address=f"{address_of(MASTER)}:{HA_PORT}" if is_slave and not options.learn_master else "",
        flush_mode=options.slave_flush if is_slave else options.master_flush,
        flush_interval_ms=options.flush_interval_ms,
        in_sync_replicas=options.in_sync_replicas or None,
        min_in_sync_replicas=options.min_in_sync_replicas or None,
        all_ack_in_sync_state_set=options.all_in_sync,
        ha_start_from=options.start_from,
        ha_overlap_bytes_max=options.overlap_bytes,
    )


class Cluster(Machines):
    """A master and its slaves, and the operator's actions."""

    watch: Watch

    def __init__(self, world: World, network: Network, options: Options, watch: Watch, nursery: trio.Nursery) -> None:
        super().__init__(world, network, options, watch, nursery)
        self.options = options
        self.damaged_node = ""
        """The one node whose files were damaged"""
        self._damaged_bytes = (0, 0)
        """Where in its log (begin, end)"""
        self._lost_power: dict[str, None] = {}
        self._end_before_loss = 0
        """End of the master's log at its last power loss"""
        self._may_be_apart = False
        self._lost_tail = False
        self._was_cut_off = False
        """Whether damage may have shortened the master's log"""
        self.may_be_hidden = False
        """Whether damage hit bytes without a checksum, which no node can find"""
        names = [MASTER, *(f"s{number}" for number in range(1, options.slave_count + 1))]
        self.machines |= {name: self._add(name, partial(open_node, config_of(options, name))) for name in names}
        if options.separate_name_server:
            self.name_server = self._add(NAME_SERVER, partial(open_name_server, address_of(NAME_SERVER)))

    @property
    def master(self) -> Machine:
        """The master's machine."""
        return self.machines[MASTER]

    @property
    def master_name(self) -> str:
        return MASTER

    @property
    def slaves(self) -> list[Machine]:
        """The slaves' machines."""
        return [machine for name, machine in self.machines.items() if name != MASTER]

    # ---- the operator

    def start(self, machine: Machine) -> None:
        """Starts a stopped node, after the operator's preparations."""
        if machine.is_running or self.is_over:
            return
        if machine is self.master and MASTER in self._lost_power:
            self._after_power_loss()
        self._lost_power.pop(machine.name, None)
        super().start(machine)

    def _after_power_loss(self) -> None:
        own = self.image(self.master)
        image = self._longer_log(own)
        if image is None:
            # A slave may have, or still receive, part of a record that the master lost.
            self._may_be_apart |= own.sound_end < self._end_before_loss
            return
        if self.options.after_power_loss == "plain" and not self._lost_tail:
            self._may_be_apart = True  # slaves that are ahead are emptied once they are stuck
            if self.world.chance("operator").random() < 0.5:  # all are restarted: slaves that are ahead come first
                for slave in self.slaves:
                    if slave.is_running:
                        slave.kill()
                        self.world.timers.call_in(0.1, self.start, slave)
            return
        self.world.note(f"operator: {image.name}'s log to {image.sound_end} replaces {MASTER}'s to {own.sound_end}")
        # The slave keeps what lies behind damage, and is emptied if it is stuck.
        self._may_be_apart |= image.name == self.damaged_node and image.sound_end < image.used_end
        if self._lost_tail or _differ(own, image):
            self._remove_config(self.master)  # offsets and progress of what was lost, or of another history
        self._replace_log(image)
        self._restart_slaves()

    def _longer_log(self, own: StoreImage) -> StoreImage | None:
        """The slaves' longest log, if it extends the master's without a gap."""
        image = max(map(self.image, self.slaves), key=lambda image: image.sound_end)
        begins_ok = not own.segments or image.begin <= own.sound_end
        return image if image.sound_end > own.sound_end and begins_ok else None

    def _restart_slaves(self) -> None:
        """Restarts the slaves: recovery cuts off a partial record behind the master's new end."""
        for slave in self.slaves:
            if slave.is_running:
                slave.kill()
                self.world.timers.call_in(1.0, self.start, slave)

    def _replace_log(self, image: StoreImage) -> None:
        """Replaces the master's log by another, up to its last valid record, keeping its own segments before the start
        of that.

        If its own log ends before that, it is dropped: a log has no gap. It is dropped, too, if it was cut off before:
        then it has gone on with another history. Everything derived from the old log is
        removed, and the next process recovers as after a crash.
        """
        inodes = self.master.disk.inodes
        own = self.image(self.master)
        healthy = [own, *(self.image(slave) for slave in self.slaves if slave.name != image.name)]
        keeps_own = own.begin < image.begin <= own.sound_end and not self._was_cut_off
        for path in list(inodes):
            folder, *rest = path.relative_to(ROOT).parts
            is_kept = keeps_own and folder == "commitlog" and int(rest[0]) < image.begin
            if folder in ("commitlog", "checksums", "consumequeue", "index", "checkpoint") and not is_kept:
                del inodes[path]
        for start, segment in image.segments.items():
            kept = image.sound_end - start
            if kept > 0:
                content = bytearray(segment[:kept]).ljust(image.segment_size, b"\0")
                if image.name == self.damaged_node:
                    self._repair(start, content, healthy)
                inodes[ROOT / "commitlog" / f"{start:020d}"] = Inode(content)
        inodes[ROOT / "abort"] = Inode(bytearray())
        self.watch.on_replaced_log(image.name, image.begin if keeps_own else 0, image.sound_end)

    def _repair(self, start: int, segment: bytearray, healthy: list[StoreImage]) -> None:
        """Replaces damaged bytes of a copied segment by those of another node, as far as one has them.

        An operator finds them with `ha log verify` before the copy is used (docs/disaster-recovery.md).
        """
        begin = max(self._damaged_bytes[0], start)
        for image in healthy:
            end = min(self._damaged_bytes[1], start + len(segment), image.sound_end)
            if image.begin <= begin < end:
                segment[begin - start : end - start] = image.read(begin, end - begin)

    def damaged(self, machine: Machine, path: Path, begin: int, end: int) -> None:
        """Bytes [`begin`, `end`) of a file of a stopped node were damaged: it may refuse to start."""
        self.damaged_node = machine.name
        self.excused[machine.name].add("CorruptLog")
        start = int(path.name) if path.parent.name == "commitlog" and path.name.isdigit() else -1
        if start < 0:
            begin = end = 0
        elif end >= len(machine.disk.inodes[path].content):  # the file is shorter now
            begin, end = start + begin, start + self.options.segment_size
        else:
            begin, end = start + begin, start + end
        self._damaged_bytes = (begin, end)
        cuts_tail = self.watch.on_damage(machine.name, begin, end)
        self.may_be_hidden |= cuts_tail
        if cuts_tail and machine is self.master:
            sound_end = self.image(machine).sound_end
            if sound_end > begin:
                self.misread_to = sound_end
        if cuts_tail and machine is self.master:
            self._lost_tail = True
            self._lost_power[MASTER] = None

    def _replace(self, machine: Machine) -> None:
        """Handles a node that refuses its damaged store: a slave gets an empty one, the master the longest valid log
        there is. Not if it runs: an earlier attempt to start it was answered already."""
        if machine.is_running:
            return
        if machine is not self.master:
            self.empty(machine)
            return
        own = self.image(machine)
        self._take_over(self._longer_log(own) or own)

    def _take_over(self, image: StoreImage) -> None:
        """Gives the master a log that may lack some of its own; slaves that have more are emptied later."""
        machine = self.master
        if machine.is_running:
            machine.kill()
        self.world.note(f"operator: {image.name}'s log to {image.sound_end} replaces {MASTER}'s, which is damaged")
        self.watch.on_other_log(MASTER)
        self._replace_log(image)
        self._was_cut_off = image.name == MASTER
        self._remove_config(machine)  # an unreadable table also stops a node
        self._may_be_apart = True
        self._restart_slaves()
        self.start(machine)

    def _remove_config(self, machine: Machine) -> None:
        """Removes the tables of a stopped node; clients create them again."""
        for path in [path for path in machine.disk.inodes if path.parent.name == "config"]:
            del machine.disk.inodes[path]

    def empty(self, machine: Machine) -> None:
        """Empties a slave's store and restarts it."""
        self.watch.on_wipe(machine.name)
        self.world.note(f"operator: {machine.name} is emptied")
        if machine.is_running:
            machine.kill()
        machine.disk.inodes.clear()
        self.start(machine)

    def look_at_stuck(self) -> None:
        """Helps nodes that can't continue: a master waiting for bytes that no peer has, and diverged slaves."""
        apart = []
        for slave in self.slaves:
            node = self.node(slave.name)
            link = node.ha_client.statistics() if node is not None and node.ha_client is not None else None
            is_apart = link is not None and link.condition in APART
            if link is not None and (is_apart or self._hides_damage(slave) or self._keeps_damage(slave)):
                apart.append(slave)
        if apart and self._lost_tail and self.options.role == "SYNC_MASTER":
            self._lost_tail = False  # the slave's log was acknowledged: never empty what may be the only good copy
            self._take_over(max(map(self.image, apart), key=lambda image: image.sound_end))
            return
        for slave in apart:
            if self._may_be_apart or self._lost_tail or self.damaged_node == slave.name:
                self.empty(slave)
        node = self.node(MASTER)
        hopeless = [each for each in node.store.damage.open if each.is_hopeless] if node is not None else []
        if hopeless:
            self._give_up(hopeless, [slave for slave in self.slaves if slave not in apart])

    def _hides_damage(self, slave: Machine) -> bool:
        """Whether a slave's log differs from its master's in bytes that neither node can know to be damaged.

        Halog doesn't promise to find a flipped bit outside a body before the block has a checksum (docs/corruption.md).
        An operator who compares the logs does.
        """
        nodes = [self.node(MASTER), self.node(slave.name)]
        if not self.may_be_hidden or any(node is None or node.store.damage.open for node in nodes):
            return False
        return _differ(self.image(self.master), self.image(slave))

    def _keeps_damage(self, slave: Machine) -> bool:
        """Whether a slave can't be repaired, because its master's bytes don't match the checksums of what was damaged:
        these were made after such a bit had flipped, or the master has gone on from before the damage."""
        node = self.node(slave.name)
        return (
            (self.may_be_hidden or self._may_be_apart)
            and node is not None
            and any("is not what was written here" in each.heal_trouble for each in node.store.damage.open)
        )

    def _give_up(self, damages: list[DamagedRange], slaves: list[Machine]) -> None:
        """Handles damage of the master that no peer could repair.

        The bytes are copied from a slave that has them. If none has any, the log ends there.
        """
        machine = self.master
        machine.kill()
        patched = 0
        for damage in damages:
            for image in map(self.image, slaves):
                end = min(damage.end, image.sound_end)
                if not image.begin <= damage.begin < end:
                    continue
                start = damage.begin - damage.begin % self.options.segment_size
                inode = machine.disk.inodes[ROOT / "commitlog" / f"{start:020d}"]
                place, theirs = slice(damage.begin - start, end - start), image.read(damage.begin, end - damage.begin)
                if inode.content[place] != theirs:
                    inode.content[place] = inode.durable[place] = theirs
                    patched += 1
                    break
        self.world.note(f"operator: {len(damages)} ranges of {MASTER} are damaged for good, {patched} were patched")
        if patched:
            self.start(machine)
        else:
            sound = self.image(machine, end=min(damage.begin for damage in damages))
            self._take_over(self._longer_log(sound) or sound)

    def queue_ends(self) -> dict[int, int]:
        records = self.image(self.master).records()
        return {record.queue_id: record.queue_offset + 1 for record in records if record.topic == TOPIC}

    # ---- what happens to them

    def _crashed(self, machine: Machine, kind: str) -> None:
        if kind == "power":
            self._lost_power[machine.name] = None
            if machine is self.master:
                self._end_before_loss = self.image(machine).sound_end
        super()._crashed(machine, kind)

    def _restart(self, machine: Machine, errors: set[str], *, is_excused: bool) -> None:
        if "CorruptLog" in errors and is_excused:
            self.world.timers.call_in(START_AGAIN_S, self._replace, machine)
        else:
            super()._restart(machine, errors, is_excused=is_excused)


def _differ(left: StoreImage, right: StoreImage) -> bool:
    """Whether two logs differ within the range that both have."""
    begin, end = max(left.begin, right.begin), min(left.sound_end, right.sound_end)
    return first_difference(left, right, begin, end) is not None
