"""Observations of a run, passed to the checkers of `tests.checkers`, and a check that only a simulation can do.

Everything here comes from outside the nodes: answers to clients, bytes between masters and slaves, and what the disks
hold and would hold after a power loss. `Holding` is the simulation's own check: it knows what was on each disk at each
power loss, and so for every acknowledged message whether some node still had it.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import trio

from tests.checkers import convergence, derived, durability, queue_offsets, soundness, statuses, tasks
from tests.checkers.acks import HaTap
from tests.checkers.history import (
    Accepted,
    Answered,
    Connected,
    Consumed,
    Converged,
    Crashed,
    Promise,
    Recovered,
)
from tests.checkers.prefix import Prefix
from tests.checkers.records import BadRecord, parse_at
from tests.checkers.statuses import Statuses
from tests.checkers.violation import Violation
from tests.sim.observer import Observer
from tests.sim.scenario import INDEX_SLOT_COUNT, MASTER, Options
from tests.sim.workload import TOPIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.cluster import Cluster
    from tests.sim.process import Machine
    from tests.sim.sockets import SimStream
    from tests.sim.world import World

SYNCED_LOOKS = 4
"""Bytes that were on the disk at this many looks, a second apart, have checksums by then"""


class Holding:
    """A message answered with PUT_OK: the nodes that had it then, and have not lost it since."""

    __slots__ = ("body_id", "end", "holders", "physical_offset")

    def __init__(self, body_id: bytes, physical_offset: int, end: int, holders: set[str]) -> None:
        self.body_id = body_id
        self.physical_offset = physical_offset
        self.end = end
        self.holders = holders


class Watch(Observer):
    """Collects the history, the violations and the statistics of one run."""

    def __init__(self, world: World, options: Options) -> None:
        super().__init__(world)
        self.options = options
        self.cluster: Cluster
        self.holdings: list[Holding] = []
        self.given_up_count = 0
        """Lost acknowledged messages that the operator dropped because they were behind unrepairable damage"""
        self._given_up: set[bytes] = set()
        self._synced: dict[str, deque[float]] = {}
        self._kept_to: dict[str, float] = {}
        """Node that lost power or the end of its log, until it opens its store -> what it kept, as an offset"""
        self._live: Statuses
        self._prefix = Prefix(MASTER)

    def follow(self, cluster: Cluster) -> None:
        """Records the cluster that is about to start."""
        self.cluster = cluster
        options = self.options
        slaves = [slave.name for slave in cluster.slaves]
        self._live = Statuses(self.history, self._read, self._read_disk, slaves, segment_size=options.segment_size)
        waits = options.role == "SYNC_MASTER"
        copies = 1
        if waits and not options.all_in_sync:
            copies = options.in_sync_replicas or 2
        self.history.add(
            Promise(
                MASTER,
                is_sync_flush=options.master_flush == "SYNC_FLUSH",
                copies=copies,
                slaves_flush=options.slave_flush == "SYNC_FLUSH",
                waits_for_slaves=waits,
            )
        )

    # ---- disks

    def _read(self, node: str, offset: int, size: int) -> bytes:
        return self.cluster.read(node, offset, size)

    def _read_disk(self, node: str, offset: int, size: int) -> bytes:
        return self.cluster.read(node, offset, size, durable=True)

    # ---- the wire

    def tap_ha(self, client: SimStream, server: SimStream) -> None:
        """Taps a new HA connection."""
        slave = client.host.name
        if slave == MASTER or server.host.name != MASTER:
            return  # a node that fetches bytes to repair its own, as after `on_damage`
        used_end = self.cluster.image(self.cluster.machines[slave]).used_end
        self.history.add(Connected(trio.current_time(), slave, used_end))
        tap = HaTap(
            slave,
            MASTER,
            lambda offset, size: self._read(slave, offset, size),
            lambda offset, size: self._read(MASTER, offset, size),
            segment_size=self.options.segment_size,
            read_slave_disk=(
                (lambda offset, size: self._read_disk(slave, offset, size))
                if self.options.slave_flush == "SYNC_FLUSH"
                else None
            ),
            on_report=lambda name, offset: self._live.on_report(MASTER, name, offset),
        )

        def listen(judge: Callable[[bytes], list[Violation]]) -> Callable[[bytes], None]:
            return lambda piece: self.judged(judge(piece))

        client.tap = listen(tap.from_slave)
        server.tap = listen(tap.from_master)

    # ---- clients

    def on_answer(self, answered: Answered) -> None:
        super().on_answer(answered)
        accepted = self.history.answers[-1]
        self.judged(self._live.on_answer(accepted))
        if answered.status == "PUT_OK":
            self._hold(accepted)

    def on_consumed(self, event: Consumed, physical_offset: int) -> None:
        super().on_consumed(event, physical_offset)
        self.judged(self._live.on_consumed(event, physical_offset))

    def _hold(self, accepted: Accepted) -> None:
        """Records which nodes have an acknowledged message now; the master may have lost it before its answer came."""
        begin = accepted.answered.physical_offset
        ends = {}
        for name in (MASTER, *(slave.name for slave in self.cluster.slaves)):
            end = self._end_of(accepted.sent.body_id, name, begin)
            # Such a node may have the pages of this message, but not those before it.
            if end is not None and end <= self._kept_to.get(name, math.inf):
                ends[name] = end
        if ends:
            self.holdings.append(Holding(accepted.sent.body_id, begin, max(ends.values()), set(ends)))

    def _end_of(self, body_id: bytes, node: str, begin: int) -> int | None:
        """Returns where a message that begins at `begin` of a node's log ends; None if it is not whole there."""
        segment_size = self.options.segment_size
        try:
            record = parse_at(partial(self._read, node), begin, begin + segment_size, segment_size)
        except BadRecord:
            return None
        return record.end if body_id in record.body else None

    # ---- nodes

    def on_start(self, machine: Machine) -> None:
        self._live.on_start(machine.name)

    def on_open(self, machine: Machine) -> None:
        node = machine.process.node if machine.process is not None else None
        assert node is not None
        self._kept_to.pop(machine.name, None)
        # The ports are open already, so the log may be longer by now.
        self.history.add(Recovered(trio.current_time(), machine.name, node.store.recovery.max_offset))
        # A damaged range may be known, and wait for a peer; and a failed write may have left bytes behind the end.
        if not self.cluster.damaged_node and "write" not in machine.disk.failed:
            image = self.cluster.image(machine, end=node.store.log.max_offset.value)
            self.judged(soundness.check(image, clock_is_steady=False))
        self.check_logs()

    def on_crash(self, machine: Machine, kind: str) -> None:
        super().on_crash(machine, kind)
        kept_to = self._kept_to.get(machine.name, math.inf)
        if kept_to < math.inf:  # it may have written other bytes behind that, and never opened its store completely
            self.history.add(Recovered(trio.current_time(), machine.name, int(kept_to)))
        if kind == "power":
            kept_to = self._kept_to[machine.name] = machine.disk.synced_log_end(machine.root / "commitlog")
            self._lose(machine.name, kept_to)

    def on_wipe(self, name: str) -> None:
        """The operator empties a store."""
        self.on_other_log(name)
        self._lose(name, -math.inf)

    def on_other_log(self, name: str) -> None:
        """A node will get a log that may differ from the one it had."""
        self.history.add(Crashed(trio.current_time(), name, "wipe"))

    def on_damage(self, name: str, begin: int, end: int) -> bool:
        """Bytes [begin, end) of a node's log were damaged, or those of another file if the range is empty.

        Returns whether the log may end earlier: in bytes that were not flushed long enough for a known checksum, the
        node can't tell damage from a torn tail, nor where the log ended behind it.
        """
        self.history.add(Crashed(trio.current_time(), name, "corrupt"))
        synced = self._synced.pop(name, ())
        settled = min(synced) if len(synced) == SYNCED_LOOKS else 0
        cuts_tail = begin < end and end > settled
        if cuts_tail:
            self._kept_to[name] = min(settled, self._kept_to.get(name, math.inf))
        for holding in self.holdings:
            is_cut = cuts_tail and holding.end > settled
            if holding.end > begin and (is_cut or holding.physical_offset < end):
                holding.holders.discard(name)
        return cuts_tail

    def note_synced(self) -> None:
        """Records how much of each node's log is on its disk; called once a second."""
        for machine in self.cluster.machines.values():
            process = machine.process
            if process is None or process.node is None or process.is_paused:
                self._synced.pop(machine.name, None)
                continue
            if machine.disk.faults.is_full:  # checksums are written once there is room
                continue
            end = min(machine.disk.synced_log_end(machine.root / "commitlog"), process.node.store.log.max_offset.value)
            self._synced.setdefault(machine.name, deque(maxlen=SYNCED_LOOKS)).append(end)

    def on_replaced_log(self, source: str, begin: int, end: int) -> None:
        """The master's log is now [begin, end) of a node's log (maybe its own), after its own bytes before that."""
        for holding in self.holdings:
            if holding.end <= begin:
                continue
            if source in holding.holders and holding.end <= end:
                holding.holders.add(MASTER)
            elif MASTER in holding.holders:
                holding.holders.discard(MASTER)
                if not holding.holders:
                    self._given_up.add(holding.body_id)

    def logs_are_alike(self) -> bool:
        """Whether all nodes' logs are equal over their common range."""
        return not convergence.check_logs(self.cluster.open_images(), MASTER)

    def _lose(self, name: str, kept_to: float) -> None:
        for holding in self.holdings:
            if holding.end > kept_to:
                holding.holders.discard(name)

    def check_logs(self) -> None:
        """Compares the slaves' logs with the master's, now."""
        self.judged(self._prefix.check(self.history, self.cluster.open_images()))

    def on_converged(self) -> None:
        """All nodes have the same log and know it; from now on every put must be PUT_OK."""
        now = trio.current_time()
        images = self.cluster.open_images()
        self.judged(convergence.check(self.history, images, MASTER))
        first = images[MASTER].begin
        alike = tuple(name for name, image in images.items() if image.begin == first)
        self.history.add(Converged(now, alike, images[MASTER].sound_end))
        for machine in self.cluster.machines.values():
            if machine.name in alike:
                self._regain(machine.name)
        self._live.calm(now)

    def _regain(self, name: str) -> None:
        for holding in self.holdings:
            if MASTER in holding.holders:
                holding.holders.add(name)

    # ---- the end

    def check_end(self, *, clock_is_steady: bool) -> int:
        """Checks the files of the stopped nodes; returns the number of acknowledged messages that are lost lawfully."""
        images = {machine.name: self.cluster.image(machine) for machine in self.cluster.machines.values()}
        master = images[MASTER]
        self.judged(durability.check(self.history, images))
        self.judged(self._prefix.check(self.history, images))
        self.judged(queue_offsets.check(self.history, master, MASTER))
        self.judged(statuses.check_refused(self.history, images))
        self.judged(convergence.check(self.history, images, MASTER))
        for image in images.values():
            self.judged(soundness.check(image, clock_is_steady=clock_is_steady))
            self.judged(derived.check(image, is_complete=True, index_slot_count=INDEX_SLOT_COUNT))
        self.judged(tasks.check_system_tasks())
        found = {record.body.partition(b"\n")[0]: record for record in master.records() if not record.is_copy}
        lost = 0
        for holding in self.holdings:
            record = found.get(holding.body_id)
            if record is None and holding.holders:
                text = (
                    f"{holding.body_id.decode()} at [{holding.physical_offset}, {holding.end}) was answered PUT_OK, "
                    f"{sorted(holding.holders)} had it and never lost it, and it is not in the master's log, "
                    f"{master.log_range()}"
                )
                self.violate("durability", text)
            lost += record is None
            self.given_up_count += record is None and holding.body_id in self._given_up
        return lost

    def check_consumed(self) -> None:
        """A consumer that started at 0 had enough time to receive everything."""
        self.judged(
            convergence.check(self.history, self.cluster.open_images(), MASTER, consumed_topics=frozenset({TOPIC}))
        )
