"""The machines of one run, of pairs and groups alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from ha.namesrv import NameServer
from ha.node import Node
from ha.node.platform import Platform
from ha.protocol.store_files import segment_name
from tests.checkers.store import StoreImage
from tests.sim.process import Machine, Process, leaves
from tests.sim.scenario import INDEX_SLOT_COUNT, MASTER, NAME_SERVER, RunOptions

if TYPE_CHECKING:
    from tests.sim.network import Network
    from tests.sim.observer import Observer
    from tests.sim.sockets import Host
    from tests.sim.world import World

ROOT = Path("/store")
LISTEN_PORT, HA_PORT, NAME_SERVER_PORT = 10_911, 10_912, 9_876
START_AGAIN_S = 1.5
"""Delay before a process that ended on its own is restarted"""


@cache
def segment_path(start: int) -> Path:
    """The path of the segment that begins at a physical offset; one object, which keeps its hash."""
    return ROOT / "commitlog" / segment_name(start)


def address_of(name: str) -> str:
    """Return a machine's address."""
    if name == MASTER:
        return "10.0.0.1"
    if name == NAME_SERVER:
        return "10.0.0.100"
    return f"10.0.0.{1 + int(name[1:])}" if name[0] in "sm" else f"10.0.{'pcdtq'.index(name[0]) + 1}.{name[1:]}"


def common_config(options: RunOptions, name: str) -> dict[str, Any]:
    """The part of a node's configuration that is the same for pairs and groups."""
    return {
        "broker_name": "broker-a",
        "bind_address": address_of(name),
        "listen_port": LISTEN_PORT,
        "ha_listen_port": HA_PORT,
        "admin_listen_port": 10_913,
        "register_name_server_period_ms": 10_000,
        "store_path_root_dir": str(ROOT),
        "segment_size": options.segment_size,
        "mapped_file_size_consume_queue_bytes": 20 * options.queue_entries,
        "index_slot_count": INDEX_SLOT_COUNT,
        "index_entry_count": options.index_entries,
        "flush_thorough_interval_ms": 3_000,
        "sync_flush_timeout_ms": options.sync_flush_timeout_ms,
        "clean_forcibly": False,
        "ha_heartbeat_interval_ms": options.heartbeat_ms,
        "ha_housekeeping_interval_ms": options.housekeeping_ms,
        "ha_transfer_batch_size_bytes": options.transfer_batch_bytes,
        "slave_timeout_ms": options.slave_timeout_ms,
        "default_topic_queue_nums": 4,
    }


class Machines:
    """Every machine. They exist from the start, processes do not."""

    def __init__(
        self, world: World, network: Network, options: RunOptions, watch: Observer, nursery: trio.Nursery
    ) -> None:
        self.world = world
        self.network = network
        self.watch = watch
        self.machines: dict[str, Machine] = {}
        """Machines that run a broker"""
        self.name_server: Machine | None = None
        self.is_over = False
        """No process is restarted from now on"""
        self.excused: dict[str, set[str]] = {}
        """Node -> names of the errors that injected faults may cause"""
        self.misread_to = 0
        """End of the master's log when damage that no node can notice left a valid record there, for example of another
        queue"""
        self._segment_size = options.segment_size
        self._nursery = nursery

    def _add(self, name: str, run: Callable[[Platform], object]) -> Machine:
        host = self.network.add_host(name, address_of(name))
        machine = Machine(self.world, self.network, host, ROOT, self._nursery)
        machine.run = run  # type: ignore[assignment]
        machine.on_ended = self._ended
        machine.on_open = self._opened
        machine.on_crash = self._crashed
        machine.on_power_lost = self._power_lost
        self.excused[name] = set()
        return machine

    def add_client(self, name: str) -> Host:
        """Adds a machine without a process, for a producer or a consumer."""
        return self.network.add_host(name, address_of(name))

    def host(self, name: str) -> Host:
        """Return a machine's place in the network."""
        return self.network.hosts[address_of(name)]

    def everyone(self) -> Iterator[Machine]:
        """The nodes and the name server."""
        yield from self.machines.values()
        if self.name_server is not None:
            yield self.name_server

    def start_all(self) -> None:
        """Starts whatever is not running, name server and master first."""
        machines = [*([self.name_server] if self.name_server else []), *self.machines.values()]
        for machine in machines:
            if not machine.is_running:
                self.start(machine)

    def start(self, machine: Machine) -> None:
        """Start a node that is down."""
        if machine.is_running or self.is_over:
            return
        if machine.name in self.machines:
            self.watch.on_start(machine)
        machine.start()

    def node(self, name: str) -> Node | None:
        """Return the node that runs on a machine; None if none is open."""
        process = self.machines[name].process
        return process.node if process is not None else None

    @property
    def master_name(self) -> str | None:
        """The current master; None while there is none."""
        raise NotImplementedError

    def queue_ends(self) -> dict[int, int]:
        """Returns the number of messages in the master's log by queue id."""
        raise NotImplementedError

    def damaged(self, machine: Machine, path: Path, begin: int, end: int) -> None:
        """Bytes [`begin`, `end`) of a file of a node that is down were damaged."""
        raise NotImplementedError

    def image(self, machine: Machine, *, end: int | None = None) -> StoreImage:
        """Returns a node's current files; `end`: the end of its log, if known."""
        files = machine.disk.image(ROOT)
        return StoreImage(files, self._segment_size, end=end, name=machine.name, misread_to=self.misread_to)

    def open_images(self) -> dict[str, StoreImage]:
        """Returns the files of the nodes that have opened their store."""
        return {name: self.image(machine) for name, machine in self.machines.items() if self.node(name) is not None}

    def read(self, name: str, offset: int, size: int, *, durable: bool = False) -> bytes:
        """Returns current bytes of a node's log, or those certainly on its disk; fewer if there are fewer."""
        machine, segment_size = self.machines[name], self._segment_size
        found = b""
        while len(found) < size:
            at = offset + len(found)
            start = at - at % segment_size
            inode = machine.disk.inodes.get(segment_path(start))
            if inode is None:
                break
            content = inode.durable if durable else inode.content
            piece = content[at - start : at - start + size - len(found)]
            if not piece:
                break  # the file was truncated
            found += piece
        return found

    # ---- what happens to them

    def _crashed(self, machine: Machine, kind: str) -> None:
        if machine.name in self.machines:
            self.watch.on_crash(machine, kind)

    def _power_lost(self, machine: Machine) -> None:
        if machine.name in self.machines:
            self.watch.on_power_lost(machine)

    def _opened(self, machine: Machine) -> None:
        if machine.name in self.machines:
            self.watch.on_open(machine)

    def _ended(self, process: Process) -> None:
        machine, failure = process.machine, process.failure
        names = {type(leaf).__name__ for leaf in leaves(failure)} if failure is not None else set()
        is_excused = names <= self.excused[machine.name]
        if machine.name in self.machines or failure is not None:
            self.watch.on_end(machine, failure, is_excused=is_excused)
        self.world.timers.call_in(0.0, self._look_for_tasks, process)
        if failure is not None and not self.is_over:
            self._restart(machine, names, is_excused=is_excused)

    def _restart(self, machine: Machine, errors: set[str], *, is_excused: bool) -> None:
        """A process ended on its own with these errors, which injected faults explain or not."""
        self.world.timers.call_in(START_AGAIN_S, self.start, machine)

    def _look_for_tasks(self, process: Process) -> None:
        self.watch.on_node_stopped(process.machine.name, [task.name for task in process.tasks])


@asynccontextmanager
async def open_name_server(address: str, platform: Platform) -> AsyncIterator[NameServer]:
    """A name server that serves while the block runs."""
    server = NameServer()
    with platform.bind("listenPort", address, NAME_SERVER_PORT) as port:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, port.listen())
            yield server
            nursery.cancel_scope.cancel()
