"""The nodes of one run, and the operator who looks after them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ha.config import Config
from ha.namesrv import NameServer
from ha.node.node import Node, open_node
from ha.node.platform import Platform
from ha.replication.statistics import Condition
from tests.checkers.store import StoreImage
from tests.sim.disk import Inode
from tests.sim.process import Machine, Process, leaves
from tests.sim.scenario import INDEX_SLOT_COUNT, MASTER, NAME_SERVER, Options

if TYPE_CHECKING:
    from ha.store.damage import Damage
    from tests.sim.network import Network
    from tests.sim.sockets import Host
    from tests.sim.watch import Watch
    from tests.sim.world import World

ROOT = Path("/store")
APART = frozenset({Condition.MASTER_BEHIND, Condition.DIVERGED, Condition.OFFSET_MISMATCH})
LISTEN_PORT, HA_PORT, NAME_SERVER_PORT = 10_911, 10_912, 9_876


def address_of(name: str) -> str:
    """Return a machine's address."""
    if name == MASTER:
        return "10.0.0.1"
    if name == NAME_SERVER:
        return "10.0.0.100"
    return f"10.0.0.{1 + int(name[1:])}" if name[0] == "s" else f"10.0.{'pc'.index(name[0]) + 1}.{name[1:]}"


def config_of(options: Options, name: str) -> Config:
    """Return a node's configuration."""
    is_slave = name != MASTER
    name_server = address_of(NAME_SERVER if options.separate_name_server else MASTER)
    embeds = not is_slave and not options.separate_name_server
    flush = options.slave_flush if is_slave else options.master_flush
    return Config(
        broker_role="SLAVE" if is_slave else options.role,
        broker_name="broker-a",
        broker_id=int(name[1:]) if is_slave else 0,
        bind_address=address_of(name),
        listen_port=LISTEN_PORT,
        ha_listen_port=HA_PORT,
        admin_listen_port=10_913,
        name_server_addresses="" if embeds else f"{name_server}:{NAME_SERVER_PORT}",
        ha_master_address=f"{address_of(MASTER)}:{HA_PORT}" if is_slave and not options.learn_master else "",
        register_name_server_period_ms=10_000,
        store_path_root_dir=str(ROOT),
        mapped_file_size_commit_log_bytes=options.segment_size,
        mapped_file_size_consume_queue_bytes=20 * options.queue_entries,
        max_hash_slot_num=INDEX_SLOT_COUNT,
        max_index_num=options.index_entries,
        flush_disk_type=flush,
        flush_interval_commit_log_ms=options.flush_interval_ms,
        flush_commit_log_thorough_interval_ms=3_000,
        sync_flush_timeout_ms=options.sync_flush_timeout_ms,
        clean_file_forcibly_enable=False,
        ha_send_heartbeat_interval_ms=options.heartbeat_ms,
        ha_housekeeping_interval_ms=options.housekeeping_ms,
        ha_transfer_batch_size_bytes=options.transfer_batch_bytes,
        slave_timeout_ms=options.slave_timeout_ms,
        in_sync_replicas=options.in_sync_replicas or None,
        min_in_sync_replicas=options.min_in_sync_replicas or None,
        all_ack_in_sync_state_set=options.all_in_sync,
        ha_start_from=options.start_from,
        ha_overlap_max_bytes=options.overlap_bytes,
        default_topic_queue_nums=4,
    )


class Cluster:
    """Every machine, and what an operator does with them. Machines are there from the start, processes are not."""

    def __init__(self, world: World, network: Network, options: Options, watch: Watch, nursery: trio.Nursery) -> None:
        self.world = world
        self.network = network
        self.options = options
        self.watch = watch
        self.damaged_node = ""
        """The one node of which bytes of a file were damaged"""
        self.is_over = False
        """Nothing is restarted any more"""
        self._nursery = nursery
        self._lost_power: dict[str, None] = {}
        self._may_be_apart = False
        self._lost_tail = False
        """Whether damage may have made the master's log end earlier"""
        self.excused: dict[str, set[str]] = {}
        """Node -> names of the errors that the faults done to it may end it with"""
        names = [MASTER, *(f"s{number}" for number in range(1, options.slave_count + 1))]
        self.machines = {name: self._add(name, partial(open_node, config_of(options, name))) for name in names}
        self.name_server: Machine | None = None
        if options.separate_name_server:
            self.name_server = self._add(NAME_SERVER, partial(_open_name_server, address_of(NAME_SERVER)))

    def _add(self, name: str, run: Callable[[Platform], object]) -> Machine:
        host = self.network.add_host(name, address_of(name))
        machine = Machine(self.world, self.network, host, ROOT, self._nursery)
        machine.run = run  # type: ignore[assignment]
        machine.on_ended = self._ended
        machine.on_open = self._opened
        machine.on_crash = self._crashed
        self.excused[name] = set()
        return machine

    def add_client(self, name: str) -> Host:
        """Add a machine without a process, for a producer or a consumer."""
        return self.network.add_host(name, address_of(name))

    def host(self, name: str) -> Host:
        """Return a machine's place in the network."""
        return self.network.hosts[address_of(name)]

    @property
    def master(self) -> Machine:
        """The master's machine."""
        return self.machines[MASTER]

    @property
    def slaves(self) -> list[Machine]:
        """The slaves' machines."""
        return [machine for name, machine in self.machines.items() if name != MASTER]

    def everyone(self) -> Iterator[Machine]:
        """The nodes and the name server."""
        yield from self.machines.values()
        if self.name_server is not None:
            yield self.name_server

    def start_all(self) -> None:
        """Start what does not run, name server and master first."""
        machines = [*([self.name_server] if self.name_server else []), *self.machines.values()]
        for machine in machines:
            if not machine.is_running:
                self.start(machine)

    def node(self, name: str) -> Node | None:
        """Return the node that runs on a machine; None if none is open."""
        process = self.machines[name].process
        return process.node if process is not None else None

    # ---- the operator

    def start(self, machine: Machine) -> None:
        """Start a node that is down, with what has to be done before."""
        if machine.is_running or self.is_over:
            return
        if machine is self.master and MASTER in self._lost_power:
            self._after_power_loss()
        self._lost_power.pop(machine.name, None)
        if machine.name in self.machines:
            self.watch.on_start(machine)
        machine.start()

    def _after_power_loss(self) -> None:
        own = self.image(self.master)
        image = self._longer_log(own)
        if image is None:
            return
        if self.options.after_power_loss == "plain" and not self._lost_tail:
            self._may_be_apart = True  # slaves that are ahead are emptied when they are found to be stuck
            if self.world.chance("operator").random() < 0.5:  # all are started anew: slaves that are ahead come first
                for slave in self.slaves:
                    if slave.is_running:
                        slave.kill()
                        self.world.timers.call_in(0.1, self.start, slave)
            return
        self.world.note(f"operator: {image.name}'s log to {image.sound_end} replaces {MASTER}'s to {own.sound_end}")
        self._replace_log(image)
        self._restart_slaves()

    def _longer_log(self, own: StoreImage) -> StoreImage | None:
        """The slaves' longest log, if it goes beyond the master's without a gap."""
        image = max(map(self.image, self.slaves), key=lambda image: image.sound_end)
        begins_ok = not own.segments or image.begin <= own.sound_end
        return image if image.sound_end > own.sound_end and begins_ok else None

    def _restart_slaves(self) -> None:
        """Their logs may go on beyond the new one of the master, with a part of a record: recovery cuts that off."""
        for slave in self.slaves:
            if slave.is_running:
                slave.kill()
                self.world.timers.call_in(1.0, self.start, slave)

    def _replace_log(self, image: StoreImage) -> None:
        """The master gets another log, up to where that is sound; of its own it keeps what is before that one's begin.

        What it knows of its old log is removed, and to the next process it has crashed.
        """
        inodes = self.master.disk.inodes
        for path in list(inodes):
            folder, *rest = path.relative_to(ROOT).parts
            is_kept = folder == "commitlog" and int(rest[0]) < image.begin
            if folder in ("commitlog", "checksums", "consumequeue", "index", "checkpoint") and not is_kept:
                del inodes[path]
        for start, segment in image.segments.items():
            kept = image.sound_end - start
            if kept > 0:
                content = bytearray(segment[:kept]).ljust(image.segment_size, b"\0")
                inodes[ROOT / "commitlog" / f"{start:020d}"] = Inode(content)
        inodes[ROOT / "abort"] = Inode(bytearray())
        self.watch.on_replaced_log(image.name, image.begin, image.sound_end)

    def damaged(self, machine: Machine, path: Path, begin: int, end: int) -> None:
        """Bytes [`begin`, `end`) of a file of a node that is down were damaged: it may refuse to start."""
        self.damaged_node = machine.name
        self.excused[machine.name].add("CorruptLog")
        start = int(path.name) if path.parent.name == "commitlog" and path.name.isdigit() else -1
        if start < 0:
            begin = end = 0
        elif end >= len(machine.disk.inodes[path].content):  # the file is shorter now
            begin, end = start + begin, start + self.options.segment_size
        else:
            begin, end = start + begin, start + end
        cuts_tail = self.watch.on_damage(machine.name, begin, end)
        if cuts_tail and machine is self.master:
            self._lost_tail = True
            self._lost_power[MASTER] = None

    def _replace(self, machine: Machine) -> None:
        """A node refuses its damaged store: a slave gets an empty one, the master the longest sound log there is."""
        if machine is not self.master:
            self.empty(machine)
            return
        own = self.image(machine)
        self._take_over(self._longer_log(own) or own)

    def _take_over(self, image: StoreImage) -> None:
        """The master gets a log that may lack some of its own; whoever has more is emptied later."""
        machine = self.master
        if machine.is_running:
            machine.kill()
        self.world.note(f"operator: {image.name}'s log to {image.sound_end} replaces {MASTER}'s, which is damaged")
        self.watch.on_other_log(MASTER)
        self._replace_log(image)
        for path in [path for path in machine.disk.inodes if path.parent.name == "config"]:
            del machine.disk.inodes[path]  # a table that can't be read stops a node, too; clients make it anew
        self._may_be_apart = True
        self._restart_slaves()
        self.start(machine)

    def empty(self, machine: Machine) -> None:
        """Empty a slave's store, and start it again."""
        self.watch.on_wipe(machine.name)
        self.world.note(f"operator: {machine.name} is emptied")
        if machine.is_running:
            machine.kill()
        machine.disk.inodes.clear()
        self.start(machine)

    def look_at_stuck(self) -> None:
        """Help nodes that can't go on by themselves: a master that waits for bytes that no peer has, slaves apart."""
        apart = []
        for slave in self.slaves:
            node = self.node(slave.name)
            link = node.ha_client.statistics() if node is not None and node.ha_client is not None else None
            if link is not None and link.condition in APART:
                apart.append(slave)
        if apart and self._lost_tail and self.options.role == "SYNC_MASTER":
            self._lost_tail = False  # what the slave has was acknowledged: never empty what may be the only good copy
            self._take_over(max(map(self.image, apart), key=lambda image: image.sound_end))
            return
        for slave in apart:
            if self._may_be_apart or self._lost_tail or self.damaged_node == slave.name:
                self.empty(slave)
        node = self.node(MASTER)
        hopeless = [each for each in node.store.damage.open if each.is_hopeless] if node is not None else []
        if hopeless:
            self._give_up(hopeless, [slave for slave in self.slaves if slave not in apart])

    def _give_up(self, damages: list[Damage], slaves: list[Machine]) -> None:
        """The master has damage that no peer could heal.

        What a slave has of it is put in its place. If none has any of it, the log ends there.
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
            self._replace(machine)

    def image(self, machine: Machine, *, end: int | None = None) -> StoreImage:
        """Return a node's files as they are now; `end`: where its log ends, if that is known."""
        return StoreImage(machine.disk.image(ROOT), self.options.segment_size, end=end, name=machine.name)

    def open_images(self) -> dict[str, StoreImage]:
        """Return the files of the nodes that have opened their store."""
        return {name: self.image(machine) for name, machine in self.machines.items() if self.node(name) is not None}

    def queue_ends(self) -> dict[int, int]:
        """Return queue id -> how many messages the master's log has of it."""
        ends: dict[int, int] = {}
        for record in self.image(self.master).records():
            ends[record.queue_id] = record.queue_offset + 1
        return ends

    # ---- what happens to them

    def _crashed(self, machine: Machine, kind: str) -> None:
        if kind == "power":
            self._lost_power[machine.name] = None
        if machine.name in self.machines:
            self.watch.on_crash(machine, kind)

    def _opened(self, machine: Machine) -> None:
        if machine.name in self.machines:
            self.watch.on_open(machine)

    def _ended(self, process: Process) -> None:
        machine, failure = process.machine, process.failure
        names = {type(leaf).__name__ for leaf in leaves(failure)} if failure is not None else set()
        if machine.name in self.machines or failure is not None:
            self.watch.on_end(machine, failure, is_excused=names <= self.excused[machine.name])
        self.world.timers.call_in(0.0, self._look_for_tasks, process)
        if "CorruptLog" in names and names <= self.excused[machine.name] and not self.is_over:
            self.world.timers.call_in(1.5, self._replace, machine)
        elif failure is not None and not self.is_over:
            self.world.timers.call_in(1.5, self.start, machine)

    def _look_for_tasks(self, process: Process) -> None:
        self.watch.on_node_stopped(process.machine.name, [task.name for task in process.tasks])


@asynccontextmanager
async def _open_name_server(address: str, platform: Platform) -> AsyncIterator[NameServer]:
    server = NameServer()
    with platform.bind("listenPort", address, NAME_SERVER_PORT) as port:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, port.listen())
            yield server
            nursery.cancel_scope.cancel()
