"""A group of members with fake roles in one trio run: what they do is checked after each event."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from ha.errors import ConfigError
from ha.failover.agreement import GroupRecord, GroupView, Lease, MasterRecord, RecordAge, Seen, Watch
from ha.failover.durable_state import DurableState, StartConditions
from ha.failover.member import Member
from ha.failover.member_state import MemberState
from ha.failover.options import MemberOptions
from ha.failover.role import LogPosition, Term
from tests.sim.agreement import SimAgreement, SimAgreementService, Snapshot
from tests.sim.process import leaves
from tests.sim.world import Timers

ResultT = TypeVar("ResultT")


async def until(is_so: Callable[[], bool]) -> None:
    """Poll every 10 ms of the virtual clock, for at most a minute: there is no event for the condition."""
    with trio.fail_after(60):
        while not is_so():  # noqa: ASYNC110
            await trio.sleep(0.01)


class Way(SimAgreement):
    """One node's link to the agreement, with a switch for each fault."""

    _numbers = itertools.count()

    def __init__(self, service: SimAgreementService, id_: int) -> None:
        name = f"{id_}/{next(self._numbers)}"  # each process of a node has its own link
        service.client(name)
        super().__init__(service, name)
        self._name = name
        self._is_watch_held = False
        self._watch_moved = trio.lowlevel.ParkingLot()
        self.loses: set[str] = set()
        """Calls (as errors name them) whose next answer is lost after they were executed"""

    @property
    def is_cut(self) -> bool:
        return self._link.is_cut

    def cut(self, is_cut: bool, *, held_share: float = 0.5) -> None:
        self._link.held_share = held_share
        (self._service.cut if is_cut else self._service.heal)(self._name)

    def delay(self, *, each_way_s: float = 0.001, watch_s: float = 0.001) -> None:
        self._link.delay_s, self._link.watch_delay_s = (each_way_s, each_way_s), (watch_s, watch_s)

    def lose(self, share: float) -> None:
        """Lose these shares of the requests and of the answers."""
        self._link.lost_request_share = self._link.lost_answer_share = share

    def hold_watch(self, is_held: bool) -> None:
        self._is_watch_held = is_held
        self._watch_moved.unpark_all()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Watch]:
        async with super().watch() as watch:
            yield _HeldWatch(self, watch)

    async def _ask(
        self,
        what: str,
        call: Callable[[], ResultT],
        timeout_s: float,
        lease: Lease | None = None,
        *,
        changes: bool = True,
    ) -> ResultT:
        if what not in self.loses:
            return await super()._ask(what, call, timeout_s, lease, changes=changes)
        self.loses.remove(what)
        self._link.lost_answer_share = 1.0
        try:
            return await super()._ask(what, call, timeout_s, lease, changes=changes)
        finally:
            self._link.lost_answer_share = 0.0


class _HeldWatch:
    def __init__(self, way: Way, watch: Watch) -> None:
        self._way = way
        self._watch = watch

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Seen:
        seen = await self._watch.__anext__()
        while self._way._is_watch_held:
            await self._way._watch_moved.park()
        return seen


class MemoryFile:
    """A member's durable state, which survives its processes."""

    def __init__(self) -> None:
        self.content: bytes | None = None

    async def read(self) -> bytes | None:
        await trio.lowlevel.checkpoint()
        return self.content

    async def write(self, content: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.content = content


class FakeRole:
    """A node without a log. `story`: the roles that its member gave it."""

    def __init__(self, group: Group, id_: int) -> None:
        self._group = group
        self._id = id_
        self.position = LogPosition(0, 0)
        self.story: list[str] = []
        self.term: Term | None = None
        self.following: int | None = None
        self.become_master_s = 0.0
        self.is_holding = False
        self.held_by: set[int] = set()
        """Members that have the whole log, for `wait_replicated_to`."""
        self.confirmed: frozenset[int] = frozenset()
        self.living: Mapping[int, int] = {}
        self._wanted: frozenset[int] | None = None
        self._moved = trio.lowlevel.ParkingLot()
        self.has_caught_up = trio.Event()
        self.catches_up = True
        """Whether it catches up with any master that it follows"""
        self.known_age: Callable[[], RecordAge] = lambda: (0, 0)
        """Returns the age of the newest record of the group on its disk"""

    async def wait_caught_up(self) -> None:
        await self.has_caught_up.wait()

    async def become_master(self, term: Term) -> None:
        self.story.append(f"master of {term.epoch}")
        assert self.known_age()[0] >= term.epoch, "it may acknowledge, and a restored service is not noticed"
        self.following = None
        self.held_by.clear()
        await trio.sleep(self.become_master_s)
        self.position = LogPosition(term.epoch, self.position.max_offset + 100)
        self.has_caught_up.set()
        self.term = term
        self.confirmed = term.sync_state_set
        self._group.check()

    async def become_slave(self, epoch: int, master: MasterRecord | None) -> None:
        await trio.lowlevel.checkpoint()
        following = None if master is None else master.broker_id
        if self.term is not None:
            assert not self.term.lease.is_held
        self.term, self._wanted, self.is_holding = None, None, False
        if following != self.following or not self.story:
            self.story.append(f"slave of {following}")
        self.following = following
        if master is not None:
            self.position = LogPosition(master.epoch, self.position.max_offset)
            if self.catches_up:
                self.has_caught_up.set()
        self._group.check()

    async def wait_wanted_set(self) -> frozenset[int]:
        while self._wanted is None:
            await self._moved.park()
        return self._wanted

    def want(self, *ids: int) -> None:
        self._wanted = frozenset(ids)
        self._moved.unpark_all()

    def set_live_members(self, members: Mapping[int, int]) -> None:
        self.living = members

    def confirm_set(self, sync_state_set: frozenset[int]) -> None:
        group = self._group.view.group
        assert group is not None
        assert self.term is None or not self.term.lease.is_held or group.sync_state_set == sync_state_set
        assert self.known_age() >= group.age, "it may acknowledge, and a restored service is not noticed"
        self.confirmed, self._wanted = sync_state_set, None

    def hold_puts(self) -> None:
        assert self.term is not None, "not master"
        self.is_holding = True

    async def wait_replicated_to(self, broker_id: int) -> None:
        while broker_id not in self.held_by:
            await self._moved.park()

    def caught_up(self, broker_id: int) -> None:
        self.held_by.add(broker_id)
        self._group.nodes[broker_id].role.position = self.position
        self._moved.unpark_all()

    def release_puts(self) -> None:
        self.is_holding = False


class Node:
    """One member with its role and its link to the service."""

    def __init__(self, group: Group, id_: int, file: MemoryFile, **options: object) -> None:
        self.id = id_
        self.file = file
        self.boot_id = "1"
        self.was_stopped_cleanly = True
        self.group = group
        self.role = group.make_role(group, id_)
        self.way = Way(group.service, id_)
        given = {
            "ha_address": f"10.0.0.{id_}:10912",
            "broker_address": f"10.0.0.{id_}:10911",
            "lease_ttl_s": 2.0,
            **options,
        }
        self.options = MemberOptions(broker_id=id_, **given)  # type: ignore[arg-type]
        self.state_on_disk = DurableState(file)
        self.role.known_age = lambda: self.state_on_disk.known_age
        self.member = Member(self.way, self.role, self.options, self.state_on_disk)
        self.is_dead = False
        self.refusal: ConfigError | None = None
        """Why the member ended"""
        self.ended = trio.Event()
        self._scope = trio.CancelScope()

    async def begin(self) -> None:
        await self.state_on_disk.begin(
            StartConditions(
                boot_id=self.boot_id,
                flushes_first=False,
                was_stopped_cleanly=self.was_stopped_cleanly,
                is_empty=self.role.position == LogPosition(0, 0),
                has_term=self.role.position.epoch > 0,
                is_shorter=False,
                member=f"c/b/{self.id}",
            )
        )

    async def run(self) -> None:
        try:
            with self._scope:
                await self.begin()
                await self.member.run()
        except* ConfigError as group:
            [self.refusal] = leaves(group)  # type: ignore[assignment]
            self.is_dead = True
        self.ended.set()

    def kill(self) -> None:
        """As kill -9: its lease remains until it expires."""
        self.is_dead = True
        self.way.cut(True)
        self._scope.cancel()
        self.role.term = None

    @property
    def state(self) -> MemberState:
        return self.member.progress.state

    @property
    def may_acknowledge(self) -> bool:
        return self.role.term is not None and self.role.term.lease.is_held


class Group:
    """Members 1 to n, by `open_group`."""

    make_role: Callable[[Group, int], FakeRole] = FakeRole

    def __init__(self, nursery: trio.Nursery) -> None:
        self.timers = Timers()
        self.service = SimAgreementService(self.timers, random.Random(1))
        self.service.lease_late_s = (0.0, 0.5)
        self._checked_count = 0
        self.nodes: dict[int, Node] = {}
        self.others: list[Node] = []
        """Further processes with the id of one of `nodes`"""
        self._nursery = nursery
        self.allows_unclean = False
        self._terms: dict[int, int] = {}
        self.masters: list[tuple[int, int]] = []
        """(epoch, id) of each master so far"""

    def add(self, id_: int, **options: object) -> Node:
        return self._start(Node(self, id_, MemoryFile(), **options))

    def _start(self, node: Node) -> Node:
        self.nodes[node.id] = node
        self._nursery.start_soon(node.run)
        return node

    def restart(self, id_: int, *, lost_bytes: int | None = None, **options: object) -> Node:
        """Start another process on the same store. `lost_bytes`: lost with the power; None: it was only killed."""
        before = self.nodes[id_]
        node = Node(self, id_, before.file, **options)
        node.was_stopped_cleanly = False
        node.boot_id = before.boot_id if lost_bytes is None else before.boot_id + "1"
        epoch, max_offset = before.role.position.epoch, before.role.position.max_offset
        node.role.position = LogPosition(epoch, max_offset - (lost_bytes or 0))
        node.role.catches_up = lost_bytes is None
        return self._start(node)

    @property
    def view(self) -> GroupView:
        return self.service.view()

    @property
    def master(self) -> Node | None:
        """The node that has the master's key."""
        master = self.view.master
        return None if master is None else self.nodes[master.broker_id]

    async def wait_master(self, *, other_than: int | None = None) -> Node:
        """Wait until somebody serves, for at most a minute."""

        def serving() -> list[Node]:
            return [node for node in self.nodes.values() if node.may_acknowledge and node.id != other_than]

        await until(lambda: bool(serving()))
        return serving()[0]

    async def settle(self) -> None:
        """Wait until all follow the master."""

        def is_settled() -> bool:
            masters = [node for node in self.nodes.values() if node.may_acknowledge]
            others = [node for node in self.nodes.values() if node not in masters and not node.is_dead]
            return bool(masters) and all(node.role.following == masters[0].id for node in others)

        await until(is_settled)

    async def in_set(self, *ids: int) -> None:
        """Let replication change the set to these."""
        master = await self.wait_master()
        master.role.want(*ids)
        await until(lambda: master.role.confirmed == frozenset(ids))

    def restore(self, snapshot: Snapshot, *, keeps_leases: bool = False) -> None:
        """Restore a backup of the service."""
        self.check()
        self.service.restore(snapshot, keeps_leases=keeps_leases)
        self._checked_count = len(self.service.history)

    def put_record(self, record: GroupRecord) -> None:
        """Write a record, as an operator does with `etcdctl put`."""
        self.check()
        self.service.change({"group": (record, 0)})
        self._checked_count = len(self.service.history)

    def check(self) -> None:
        """Assert that at most one node can acknowledge, each term has one master, and each change was valid."""
        history = self.service.history
        while self._checked_count < len(history):
            before = history[self._checked_count - 1] if self._checked_count else GroupView(revision=0)
            self._check_change(before, history[self._checked_count])
            self._checked_count += 1
        everyone = [*self.nodes.values(), *self.others]
        acknowledging = [node for node in everyone if node.may_acknowledge]
        assert len(acknowledging) <= 1, [node.id for node in acknowledging]
        for node in everyone:
            if node.role.term is not None:
                assert self._terms.setdefault(node.role.term.epoch, node.id) == node.id

    def _check_change(self, before: GroupView, view: GroupView) -> None:
        if view.master is not None and view.master_revision != before.master_revision:
            assert view.group is not None
            assert view.master.epoch == view.group.epoch
            assert not self.masters or view.master.epoch > self.masters[-1][0]
            assert before.master is None
            self.masters.append((view.master.epoch, view.master.broker_id))
        old, new = before.group, view.group
        if old is not None and new is not None and old.sync_state_set != new.sync_state_set:
            # Only the master adds members; an election only removes them.
            is_election = view.master_revision != before.master_revision and view.master is not None
            is_unclean = is_election and self.allows_unclean and new.sync_state_set == {new.master_id}
            assert not is_election or not old.epoch or is_unclean or new.sync_state_set <= old.sync_state_set
            assert is_election or before.master is not None


@asynccontextmanager
async def open_group(*ids: int) -> AsyncIterator[Group]:
    """Members with these ids, also checked every 10 ms."""
    async with trio.open_nursery() as nursery:
        group = Group(nursery)
        nursery.start_soon(group.timers.run)
        for id_ in ids:
            group.add(id_)

        async def look() -> None:
            while True:
                group.check()
                await trio.sleep(0.01)

        nursery.start_soon(look)
        yield group
        nursery.cancel_scope.cancel()


async def three(group: Group) -> Node:
    """Wait until members 1, 2 and 3 are in the set; return the master."""
    await group.settle()
    await group.in_set(1, 2, 3)
    return await group.wait_master()


@asynccontextmanager
async def open_three() -> AsyncIterator[tuple[Group, Node]]:
    """Members 1, 2 and 3, all in the set, and their master."""
    async with open_group(1, 2, 3) as group:
        yield group, await three(group)
