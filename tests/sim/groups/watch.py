"""Observations of a group, passed to the checkers of `tests.checkers`. All of them come from outside the members: the
service's state, answers to clients, files on the disks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from ha.failover.agreement import GroupView
from ha.protocol.remoting import RemotingParser
from tests.checkers import convergence, derived, kept, queue_offsets, soundness, tasks
from tests.checkers.confirmed import Confirmed
from tests.checkers.consumer_offsets import ConsumerOffsets, Place
from tests.checkers.history import Accepted, Answered, Consumed, Recovered, body_id_of
from tests.checkers.in_sync import InSync
from tests.checkers.terms import Terms
from tests.sim.observer import Observer
from tests.sim.scenario import INDEX_SLOT_COUNT, GroupOptions
from tests.sim.workload import TOPIC, answered_by, status_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sim.groups.group import Group
    from tests.sim.process import Machine
    from tests.sim.sockets import SimStream
    from tests.sim.world import World

CUT_FILE = "logcut"
"""Exists while a log is being truncated"""


class GroupWatch(Observer):
    """Collects the history, the violations and the statistics of one run."""

    def __init__(self, world: World, options: GroupOptions) -> None:
        super().__init__(world)
        self.options = options
        self.cluster: Group
        self.offsets = ConsumerOffsets()
        self.terms: set[int] = set()
        """Terms in which there was a master"""
        self.cut_count = 0
        """Number of truncations"""
        self._terms = Terms()
        self._confirmed = Confirmed()
        self._told = kept.QueueOffsets()
        self._in_sync = InSync(
            self._read,
            segment_size=options.segment_size,
            ack_count=options.ack_count if options.policy == "count" else None,
        )
        self._is_calm = False
        self._set: frozenset[str] = frozenset()
        """The service's set, or the one before it was restored from an older state"""
        self._newest = (0, 0)
        """Age of the newest record that ever existed"""
        self._age = (0, 0)
        """Age of the service's record"""
        self._leases_end_at = -math.inf
        self._restored_revision = 0
        self._lost: set[bytes] = set()
        """Ids of the bodies that all members of the set have lost in power losses"""
        self._end_before_power_loss = 0
        """Of the log of the member that lost power last"""
        self.has_lost = False
        """Whether all members of the set have lost part of the log in power losses, lawfully: messages, or other
        records that the set has confirmed. A member outside the set may still have it."""

    @property
    def _is_alone(self) -> bool:
        return self.options.policy == "alone"

    def _read(self, node: str, offset: int, size: int) -> bytes:
        return self.cluster.read(node, offset, size)

    # ---- the service

    def on_agreed(self, view: GroupView) -> None:
        """The service now holds this."""
        master, age = view.master, (0, 0) if view.group is None else view.group.age
        before, self._age = self._age, age
        if before < self._newest and master is not None and not self._is_restored(view):
            known = max((record.age for record in self.cluster.known_records()), default=(0, 0))
            if before < known:
                text = f"m{master.broker_id} is elected by a record of epoch and version {before}, and a member knows"
                self.violate("terms", f"{text} {known}")
            if before[0] < age[0]:
                self._terms.forget_beyond(known[0])
        if age < self._newest:
            self._hear_of_terms(view)
            return
        self._newest = age
        self._hear_of_terms(view)
        if view.group is not None:
            self._set = frozenset(f"m{id_}" for id_ in view.group.sync_state_set)
            self._confirmed.on_in_set(self._set)
            if not self._is_alone:
                self.judged(self._in_sync.on_set(self._set))

    def on_restored(self, revision: int, lease_s: float) -> None:
        """The service is about to return to `revision`, and to lose later leases. Members rely on them until they end,
        or until another master is elected.

        The older state may have the key of a master of then.
        """
        self._restored_revision = revision
        self._leases_end_at = self.world.timers.call_in(lease_s, self._end_of_leases)

    def _is_restored(self, view: GroupView) -> bool:
        """Whether the master's key was not written since the older state was restored."""
        return view.master is not None and view.master_revision <= self._restored_revision

    def _end_of_leases(self) -> None:
        self._hear_of_terms(self.cluster.service.view())

    def _hear_of_terms(self, view: GroupView) -> None:
        master = view.master
        if master is not None and self._is_restored(view):
            if self._terms.is_held_by(f"m{master.broker_id}", master.epoch):
                self._leases_end_at = -math.inf  # the older state has the lease of this key, so the key ends with it
            return
        if trio.current_time() < self._leases_end_at:
            if master is None:
                return
            # The master before the restore has seen that its key is gone; it may not answer any more.
            self._leases_end_at = -math.inf
            self._terms.on_agreed(trio.current_time(), "", 0)
        found = self._terms.on_agreed(
            trio.current_time(), "" if master is None else f"m{master.broker_id}", 0 if master is None else master.epoch
        )
        self.judged(found)
        if master is not None:
            self.terms.add(master.epoch)

    # ---- clients

    def tap_clients(self, client: SimStream, server: SimStream) -> None:
        """Taps the answers of a member on a new connection of a producer, as they are handed to the network."""
        parser, name, node = RemotingParser(), client.host.name, server.host.name

        def listen(piece: bytes) -> None:
            for answer in parser.feed(piece):
                sent = self.history.sent_by(name, answer.opaque)
                if sent is not None and status_of(answer) == "PUT_OK" and "msgId" in answer.ext_fields:
                    answered = answered_by(answer, trio.current_time(), name, node)
                    accepted = Accepted(sent, answered, len(self.history.events))
                    self.judged(self._in_sync.on_acknowledged(accepted))

        if name.startswith("p") and not self._is_alone:
            server.tap = listen

    def on_answer(self, answered: Answered) -> None:
        super().on_answer(answered)
        accepted = self.history.answers[-1]
        if answered.status == "PUT_OK":
            self.judged(self._terms.check_answer(answered.node, accepted.sent.time_s, answered.time_s, str(accepted)))
            if not self._is_alone:
                self.judged(self._told.on_acknowledged(accepted, is_lost=self._is_lost))
        elif self._is_calm and accepted.sent.time_s >= self._calm_since_s:
            self.violate("statuses", f"{accepted}: nothing disturbs the group, so it should be PUT_OK")

    def on_committed(self, place: Place, queue_offset: int, node: str, asked_s: float) -> None:
        """A consumer's commit was acknowledged."""
        now = trio.current_time()
        if not self._is_alone:
            running = self.cluster.node(node)
            self.offsets.on_committed(
                place, queue_offset, log_end=math.inf if running is None else running.store.log.max_offset.value
            )
        self.judged(self._terms.check_answer(node, asked_s, now, f"offset {queue_offset} of {place}"))

    def on_told(self, place: Place, told: int, least: int, node: str, asked_s: float) -> None:
        """A consumer received its committed offset, from a node that may have been master meanwhile."""
        if self._terms.check_answer(node, asked_s, trio.current_time(), "an offset"):
            return
        image = self.cluster.image(self.cluster.machines[node])
        due = least if asked_s > self.offsets.forgot_at_s else 0
        self.judged(self.offsets.check(place, told, due, node, image))

    # ---- members

    def on_open(self, machine: Machine) -> None:
        node = machine.process.node if machine.process is not None else None
        assert node is not None
        end = node.store.log.max_offset.value
        self.history.add(Recovered(trio.current_time(), machine.name, end))
        self._confirmed.on_crash(machine.name)
        if "write" not in machine.disk.failed:  # otherwise bytes may stand behind the end
            self.judged(soundness.check(self.cluster.image(machine, end=end), clock_is_steady=False))
        self.look()

    def on_crash(self, machine: Machine, kind: str) -> None:
        super().on_crash(machine, kind)
        if kind == "power":
            self._end_before_power_loss = self.cluster.image(machine).sound_end
        self._confirmed.on_crash(machine.name)
        self._terms.on_process_ended(trio.current_time(), machine.name)

    def on_end(self, machine: Machine, failure: BaseException | None, *, is_excused: bool) -> None:
        super().on_end(machine, failure, is_excused=is_excused)
        self._terms.on_process_ended(trio.current_time(), machine.name)

    def on_power_lost(self, machine: Machine) -> None:
        """Messages that no member of the set has are lost, lawfully; others must be kept."""
        if self.options.flush == "SYNC_FLUSH":
            return
        self._in_sync.on_power_lost(machine.name)
        if machine.name not in self._set:
            return
        left = [self.cluster.image(self.cluster.machines[name]) for name in sorted(self._set)]
        end = max(image.sound_end for image in left)
        held = {body_id_of(record.body) for image in left for record in image.records() if not record.is_copy}
        promised = {accepted.sent.body_id for accepted in self._in_sync.acknowledged}
        promised |= {accepted.sent.body_id for accepted in self.history.answers if accepted.answered.status == "PUT_OK"}
        promised |= {event.body_id for event in self.history.of(Consumed)}
        lost = promised - held - self._lost
        if lost:
            self.world.note(f"{len(lost)} messages are lost by all of {', '.join(sorted(self._set))}")
        self._lost |= lost
        self.has_lost |= end < self._end_before_power_loss
        self._in_sync.forget(self._is_lost)
        self._confirmed.forget_beyond(end, self.cluster.machines.keys() - self._set)
        self.offsets.forget_beyond(end, trio.current_time())

    def _is_lost(self, accepted: Accepted) -> bool:
        return accepted.sent.body_id in self._lost

    def look(self) -> None:
        """Compares what members have shown, now."""
        self.judged(self._confirmed.check(self.cluster.open_images()))

    def on_unlink(self, machine: Machine, path: Path) -> None:
        """A member removes a file: if its log has just been truncated, nothing may be left behind the end."""
        node = machine.process.node if machine.process is not None else None
        if path.name == CUT_FILE and node is not None:
            self.cut_count += 1
            end = node.store.log.max_offset.value
            self.judged(soundness.check(self.cluster.image(machine, end=end), clock_is_steady=False))

    def on_converged(self) -> None:
        """All members have the same log and know it; from now on every put must be PUT_OK."""
        images = self.cluster.open_images()
        self.judged(convergence.check(self.history, images, next(iter(images))))
        self._is_calm, self._calm_since_s = True, trio.current_time()
        self.look()

    def check_consumed(self) -> None:
        """A consumer that started at 0 had enough time to receive everything."""
        for image in self.cluster.open_images().values():
            self.judged(convergence.check_consumed(self.history, image, frozenset({TOPIC})))
        self._is_calm = False

    # ---- the end

    def check_end(self, *, clock_is_steady: bool) -> int:
        """Checks the files of the stopped members; returns how many acknowledged messages are lost lawfully."""
        lost = 0
        for machine in self.cluster.machines.values():
            image = self.cluster.image(machine)
            found, lost = kept.check(
                self.history, image, is_excused=self._is_excused, is_lost=lambda body_id: body_id in self._lost
            )
            self.judged(found)
            if not self._is_alone:
                self.judged(self._terms.check_log(self.history, image, is_lost=self._is_lost))
            self.judged(queue_offsets.check_log(image))
            self.judged(soundness.check(image, clock_is_steady=clock_is_steady))
            self.judged(derived.check(image, is_complete=False, index_slot_count=INDEX_SLOT_COUNT))
        if not self._is_alone:
            self.judged(self._in_sync.check())
        self.judged(tasks.check_system_tasks())
        return lost

    def _is_excused(self, accepted: Accepted) -> bool:
        return self._is_alone or self._is_lost(accepted)
