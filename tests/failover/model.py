"""Members with a model of a log: acknowledged entries must be in every later master's log, under all faults."""

from __future__ import annotations

import random

import trio

from ha.failover.agreement import MasterRecord, SwitchRequest
from ha.failover.role import LogPosition, Term
from tests.failover.group import FakeRole, Group, Node

WRITE_S = 0.03
COPY_S = 0.02
LATE_S = 0.7
"""Time without the whole log after which a member leaves the set."""

Entry = tuple[int, int]


class ModelRole(FakeRole):
    """A log of numbered entries, copied from the master of the highest known epoch."""

    def __init__(self, group: Group, id_: int) -> None:
        super().__init__(group, id_)
        assert isinstance(group, ModelGroup)
        self.model = group
        self.log: list[Entry] = []
        self.epoch = 0
        """Of the history"""
        self.adopted = 0
        self.held: dict[int, int] = {}
        self.held_at: dict[int, float] = {}

    async def become_master(self, term: Term) -> None:
        self.following = None
        await trio.sleep(self.become_master_s)
        model = self.model
        assert self.log[: len(model.acknowledged)] == model.acknowledged, (
            f"member {self._id} lacks acknowledged entries"
        )
        self.epoch = self.adopted = term.epoch
        self.held, self.held_at = {}, {id_: trio.current_time() for id_ in term.sync_state_set}
        self.term, self.confirmed, self._wanted = term, term.sync_state_set, None
        self.is_holding = False
        self._place()

    async def become_slave(self, epoch: int, master: MasterRecord | None) -> None:
        await trio.lowlevel.checkpoint()
        self.term, self._wanted = None, None
        self.adopted = max(self.adopted, epoch)
        self.following = None if master is None else master.broker_id
        self._place()

    async def wait_replicated_to(self, broker_id: int) -> None:
        while self.held.get(broker_id, -1) < len(self.log):  # noqa: ASYNC110
            await trio.sleep(COPY_S)

    def _place(self) -> None:
        self.position = LogPosition(self.epoch, len(self.log))

    # A node's regular work

    def write(self) -> None:
        """As master: append one entry, acknowledge what the set has, and update the set."""
        term = self.term
        if term is None:
            return
        if not self.is_holding and term.lease.is_held:
            self.log.append((term.epoch, len(self.log)))
            self._place()
        sets = [self.confirmed] if self._wanted is None else [self.confirmed, self._wanted]
        everywhere = min(self._has(members) for members in sets)
        if term.lease.is_held:
            self.model.acknowledge(self.log[:everywhere])
        self._look_at_set()

    def _has(self, members: frozenset[int]) -> int:
        """Return how much of the log enough members of a set have."""
        offsets = sorted((len(self.log) if id_ == self._id else self.held.get(id_, 0) for id_ in members), reverse=True)
        count = self.model.ack_count or len(members)
        return offsets[count - 1] if count <= len(offsets) else 0

    def _look_at_set(self) -> None:
        if self._wanted is not None:
            return
        now, done = trio.current_time(), len(self.model.acknowledged)
        fresh = {id_ for id_, at in self.held_at.items() if now - at <= LATE_S} | {self._id}
        stay = self.confirmed & fresh
        if self.model.ack_count and any(id_ != self._id and self.held.get(id_, 0) < done for id_ in stay):
            stay = self.confirmed
        come = {id_ for id_, offset in self.held.items() if id_ in fresh and offset >= len(self.log) - 1}
        come = {id_ for id_ in come if self.held[id_] >= done}
        if stay | come != self.confirmed:
            self.want(*stay, *come)

    def copy(self) -> None:
        """As slave: copy the master's log, unless its epoch is lower than the highest known one."""
        if self.following is None:
            return
        master = self.model.nodes[self.following].role
        assert isinstance(master, ModelRole)
        term = master.term
        if term is None or term.epoch < self.adopted or not self.model.reaches(self._id, self.following):
            return
        self.adopted = self.epoch = term.epoch
        self.log[:] = master.log
        self._place()
        master.held[self._id] = len(self.log)
        master.held_at[self._id] = trio.current_time()


class ModelGroup(Group):
    """All acknowledged entries, and which nodes reach each other."""

    make_role = ModelRole

    def __init__(self, nursery: trio.Nursery, ack_count: int | None = None) -> None:
        super().__init__(nursery)
        self.ack_count = ack_count
        self.acknowledged: list[Entry] = []
        self.apart: set[frozenset[int]] = set()

    def acknowledge(self, entries: list[Entry]) -> None:
        common = min(len(entries), len(self.acknowledged))
        assert entries[:common] == self.acknowledged[:common], "something else was acknowledged here before"
        self.acknowledged += entries[common:]

    def reaches(self, one: int, other: int) -> bool:
        return frozenset({one, other}) not in self.apart

    async def work(self) -> None:
        """Regular work of all nodes."""
        turn = 0
        while True:
            await trio.sleep(0.01)
            turn += 1
            for node in self.nodes.values():
                assert isinstance(node.role, ModelRole)
                if node.is_dead:
                    continue
                if turn % round(COPY_S / 0.01) == 0:
                    node.role.copy()
                if turn % round(WRITE_S / 0.01) == 0:
                    node.role.write()
            self.check()

    def add(self, id_: int, **options: object) -> Node:
        return super().add(id_, ack_count=self.ack_count, **options)

    def revive(self, id_: int) -> None:
        """Another process on the same store."""
        old = self.nodes[id_].role
        node = self.add(id_)
        assert isinstance(old, ModelRole)
        assert isinstance(node.role, ModelRole)
        node.role.log, node.role.epoch = old.log, old.epoch
        node.role._place()


class Mischief:
    """Draws faults and repairs, one after the other."""

    def __init__(self, group: ModelGroup, chance: random.Random) -> None:
        self._group = group
        self._chance = chance

    async def run(self, seconds: float) -> None:
        end = trio.current_time() + seconds
        while trio.current_time() < end:
            await trio.sleep(self._chance.uniform(0.05, 2.0))
            self._chance.choice(
                (
                    self._cut,
                    self._cut,
                    self._heal,
                    self._kill,
                    self._kill,
                    self._slow,
                    self._part,
                    self._service,
                    self._switch,
                )
            )()

    def mend(self) -> None:
        """Repair everything."""
        group = self._group
        group.apart.clear()
        if group.service.is_down:
            group.service.start()
        for id_, node in list(group.nodes.items()):
            if node.is_dead:
                group.revive(id_)
        for node in group.nodes.values():
            node.way.cut(False)
            node.way.delay()
            node.way.lose(0.0)

    def _node(self) -> Node:
        return self._chance.choice(list(self._group.nodes.values()))

    def _cut(self) -> None:
        node = self._node()
        if not node.is_dead:
            node.way.cut(True)

    def _heal(self) -> None:
        for node in self._group.nodes.values():
            if not node.is_dead:
                node.way.cut(False)

    def _kill(self) -> None:
        node = self._node()
        if node.is_dead:
            self._group.revive(node.id)
        else:
            node.kill()

    def _slow(self) -> None:
        way, chance = self._node().way, self._chance
        way.delay(each_way_s=chance.choice((0.001, 0.05, 0.3)), watch_s=chance.choice((0.001, 0.3, 3.0)))
        way.lose(chance.choice((0.0, 0.0, 0.2, 0.5)))

    def _part(self) -> None:
        one, other = self._chance.sample(list(self._group.nodes), 2)
        self._group.apart ^= {frozenset({one, other})}

    def _service(self) -> None:
        service = self._group.service
        draw = self._chance.random()
        if service.is_down:
            service.start()
        elif draw < 0.3:
            service.stop()
        elif draw < 0.6:
            service.change_leader()
        else:
            service.compact()

    def _switch(self) -> None:
        to = self._chance.choice((None, *self._group.nodes))
        self._group.service.change({"switch": (SwitchRequest(to=to), 0)})
