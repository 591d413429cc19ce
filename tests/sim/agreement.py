"""The agreement service, simulated: `ha.failover.agreement` within one trio run, on the run's own clock.

The service is one linearizable store; faults affect only the links to it. Each node has a link: requests and answers
are delayed, may be lost, and are held while the link is cut. So a request can be executed long after the node gave up
waiting for it; its comparisons decide whether it still has an effect. Watch events are delayed, in order; a watch
restarts if the next event was compacted while its link was cut.

Leases end by the world's timers, whatever the holding node does: a paused node finds out later. They end late by
chance, as etcd's do, and never early; a new leader renews all of them.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from ha.failover.agreement import (
    TIMEOUT_S,
    AgreementUnavailable,
    BrokerIdTaken,
    GroupRecord,
    GroupView,
    Lease,
    LeaseLost,
    MasterRecord,
    MemberRecord,
    Outdated,
    Seen,
    SwitchRequest,
    Watch,
)
from tests.sim.world import Timers

ResultT = TypeVar("ResultT")
RecordT = TypeVar("RecordT")


@dataclass
class Link:
    """A link between a node and the service. All fields may change at any time; times in seconds, drawn uniformly."""

    delay_s: tuple[float, float] = (0.0005, 0.002)
    """Delay of each request and each answer."""
    watch_delay_s: tuple[float, float] = (0.0005, 0.002)
    """Delay between a change and its watch event."""
    lost_request_share: float = 0.0
    lost_answer_share: float = 0.0
    """Share of requests that are executed without the node receiving the answer."""
    held_share: float = 0.5
    """Share of the requests sent while the link is cut (or the service is down) that arrive afterwards."""
    is_cut: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class _Lease:
    ttl_s: float
    ends_at: float
    keys: set[str] = field(default_factory=set)


@dataclass
class _Entry:
    record: object
    create_revision: int
    mod_revision: int
    lease_id: int


@dataclass(frozen=True)
class Snapshot:
    """A backup of the service."""

    revision: int
    entries: dict[str, _Entry]
    lease_ttls_s: dict[int, float]


class _NoLeaseError(Exception):
    pass


class SimAgreementService:
    """One group's keys and leases, and the links to them by node. `timers` has to run meanwhile."""

    def __init__(self, timers: Timers, chance: random.Random, *, lease_min_s: float = 1.0) -> None:
        self.timers = timers
        self.chance = chance
        self.lease_min_s = lease_min_s
        self.lease_late_s = (0.0, 1.0)
        """How much longer than its TTL a lease lives"""
        self.links: dict[str, Link] = {}
        self.is_down = False
        """No quorum: nothing is executed, and no lease ends"""
        self.revision = 1
        self.history: list[GroupView] = []
        """The view after each change, for checkers"""
        self._entries: dict[str, _Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._watches: list[SimWatch] = []
        self._compacted_revision = 0
        self._put_numbers: dict[tuple[int, int], int] = {}
        self._numbers = 0

    def client(self, node: str) -> SimAgreement:
        """Returns the client of `node`; all clients of one node share its link."""
        self.links.setdefault(node, Link())
        return SimAgreement(self, node)

    # faults

    def cut(self, node: str) -> None:
        """Cuts the link between `node` and the service."""
        self.links[node].is_cut = True

    def heal(self, node: str) -> None:
        """Undoes `cut`; held requests arrive."""
        self.links[node].is_cut = False
        self._deliver_held()

    def stop(self) -> None:
        """Loses the quorum."""
        self.is_down = True

    def start(self) -> None:
        """Undoes `stop`: a new leader renews all leases."""
        self.is_down = False
        self.change_leader()
        self._deliver_held()

    def change_leader(self) -> None:
        """Renews all leases."""
        for lease_id, lease in self._leases.items():
            self._extend(lease_id, lease)

    def compact(self) -> None:
        """Compacts the history: a watch that lacks some of it has to restart."""
        self._compacted_revision = self.revision

    def snapshot(self) -> Snapshot:
        """Returns a backup of the current state."""
        ttls_s = {lease_id: lease.ttl_s for lease_id, lease in self._leases.items()}
        return Snapshot(self.revision, {name: copy(entry) for name, entry in self._entries.items()}, ttls_s)

    def restore(self, snapshot: Snapshot, *, keeps_leases: bool = False) -> None:
        """Restores a backup. With its leases, as etcd does, all of them begin again, those that have ended since, too;
        without, as if the restore took longer than any of them, their keys are gone. Later leases are gone."""
        ttls_s = snapshot.lease_ttls_s if keeps_leases else {}
        self._leases = {lease_id: _Lease(ttl_s, 0.0) for lease_id, ttl_s in ttls_s.items()}
        self._entries = {}
        for name, entry in snapshot.entries.items():
            if not entry.lease_id or entry.lease_id in self._leases:
                self._entries[name] = copy(entry)
        for lease_id, lease in self._leases.items():
            lease.keys = {name for name, entry in self._entries.items() if entry.lease_id == lease_id}
            self._extend(lease_id, lease)
        self.revision = snapshot.revision + 1
        self._compacted_revision = min(self._compacted_revision, self.revision)
        self.history.append(self.view())
        for watch in self._watches:
            watch.start_over()

    # what is there

    def view(self) -> GroupView:
        """Returns all current keys, for checkers and for the service itself."""
        group, master, switch = (self._entries.get(name) for name in ("group", "master", "switch"))
        members = {
            int(name.removeprefix("members/")): entry
            for name, entry in sorted(self._entries.items())
            if name.startswith("members/")
        }
        return GroupView(
            revision=self.revision,
            group=_of_kind(group.record, GroupRecord) if group else None,
            group_revision=group.mod_revision if group else 0,
            master=_of_kind(master.record, MasterRecord) if master else None,
            master_revision=master.create_revision if master else 0,
            master_lease_id=master.lease_id if master else 0,
            members={id_: _of_kind(entry.record, MemberRecord) for id_, entry in members.items()},
            member_lease_ids={id_: entry.lease_id for id_, entry in members.items()},
            switch=_of_kind(switch.record, SwitchRequest) if switch else None,
            switch_revision=switch.mod_revision if switch else 0,
        )

    # carried out at one moment each

    def change(self, puts: dict[str, tuple[object, int]], removals: tuple[str, ...] = ()) -> int:
        """Writes and removes keys in one change; returns its revision. _NoLeaseError."""
        for _, lease_id in puts.values():
            if lease_id and lease_id not in self._leases:
                raise _NoLeaseError
        removed = [name for name in removals if name in self._entries]
        if not puts and not removed:
            return self.revision
        self.revision += 1
        for name in removed:
            self._unbind(name, self._entries.pop(name))
        for name, (record, lease_id) in puts.items():
            old = self._entries.get(name)
            if old is not None:
                self._unbind(name, old)
            created = old.create_revision if old is not None else self.revision
            self._entries[name] = _Entry(record, created, self.revision, lease_id)
            if lease_id:
                self._leases[lease_id].keys.add(name)
        view = self.view()
        self.history.append(view)
        for watch in self._watches:
            watch.tell_late(view)
        return self.revision

    def _unbind(self, name: str, entry: _Entry) -> None:
        if entry.lease_id in self._leases:
            self._leases[entry.lease_id].keys.discard(name)

    def grant(self, ttl_s: float) -> Lease:
        self._numbers += 1
        granted_s = max(float(math.ceil(ttl_s)), self.lease_min_s)
        lease = self._leases[self._numbers] = _Lease(granted_s, 0.0)
        self._extend(self._numbers, lease)
        return Lease(self._numbers, granted_s)

    def renew(self, lease: Lease) -> float:
        found = self._leases.get(lease.id)
        if found is None:
            raise _NoLeaseError
        self._extend(lease.id, found)
        return found.ttl_s

    def revoke(self, lease_id: int) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None:
            self.change({}, tuple(sorted(lease.keys)))
            del self._leases[lease_id]

    def _extend(self, lease_id: int, lease: _Lease) -> None:
        ends_at = trio.current_time() + lease.ttl_s + self.chance.uniform(*self.lease_late_s)
        lease.ends_at = self.timers.call_at(ends_at, self._end, lease_id)

    def _end(self, lease_id: int) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.ends_at <= trio.current_time() and not self.is_down:
            self.revoke(lease_id)

    def next_put_number(self) -> int:
        """Orders the puts of all members by the time of the request."""
        self._numbers += 1
        return self._numbers

    def put_member(self, broker_id: int, number: int, member: MemberRecord, lease_id: int) -> int:
        name = f"members/{broker_id}"
        held = self._entries.get(name)
        if held is not None and held.lease_id != lease_id:
            holder = _of_kind(held.record, MemberRecord)
            raise BrokerIdTaken("writing this member's record", broker_id, holder, held.lease_id)
        if number < self._put_numbers.get((broker_id, lease_id), 0):  # a later request was executed first
            if lease_id not in self._leases:
                raise _NoLeaseError
            return held.mod_revision if held is not None else self.revision
        revision = self.change({name: (member, lease_id)})
        self._put_numbers[broker_id, lease_id] = number
        return revision

    # the way there and back

    def passes(self, link: Link) -> bool:
        """Whether requests on this link get through now."""
        return not (link.is_cut or self.is_down)

    def later(self, delay_s: tuple[float, float], call: Callable[[], None]) -> None:
        """Calls after a delay drawn from this range."""
        self.timers.call_in(self.chance.uniform(*delay_s), call)

    def arrive(self, link: Link, call: Callable[[], None]) -> None:
        """Makes `call` as soon as the link passes, or never."""
        if self.passes(link):
            call()
        elif self.chance.random() < link.held_share:
            link.held.append(call)

    def _deliver_held(self) -> None:
        for link in self.links.values():
            if self.passes(link):
                held, link.held = link.held, []
                for call in held:
                    self.later(link.delay_s, lambda link=link, call=call: self.arrive(link, call))  # type: ignore[misc]
        for watch in self._watches:
            watch.catch_up()

    def add_watch(self, watch: SimWatch) -> None:
        """Registers it for all changes from now on."""
        self._watches.append(watch)

    def remove_watch(self, watch: SimWatch) -> None:
        self._watches.remove(watch)

    def is_compacted(self, revision: int) -> bool:
        """Whether changes behind `revision` are compacted."""
        return revision < self._compacted_revision


class SimWatch:
    """See `ha.failover.agreement.Watch`."""

    def __init__(self, service: SimAgreementService, link: Link) -> None:
        self._service = service
        self._link = link
        self._queue: deque[Seen] = deque()
        self._grown = trio.lowlevel.ParkingLot()
        self._under_way: deque[GroupView] = deque()
        """Changes that were made but not delivered yet, in order"""
        self._told_revision = -1
        """-1: it has to restart"""
        self.is_open = True

    def __aiter__(self) -> SimWatch:
        return self

    async def __anext__(self) -> Seen:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._queue:
            await self._grown.park()
        return self._queue.popleft()

    def tell_late(self, view: GroupView) -> None:
        """Delivers a change to the node, after those before it."""
        if self._told_revision >= 0:
            self._under_way.append(view)
            self._service.later(self._link.watch_delay_s, self._tell_next)

    def start_over(self) -> None:
        """Restarts with a complete view: the service was restored."""
        self._told_revision = -1
        self._under_way.clear()
        self.catch_up()

    def catch_up(self) -> None:
        """Continues after the link was cut, or starts; if that is impossible now, the node's next attempt is made when
        it heals."""
        if not self._service.passes(self._link):
            return
        if self._told_revision < 0 or (self._under_way and self._service.is_compacted(self._told_revision)):
            self._told_revision = -1
            self._service.later(self._link.delay_s, self._begin)
        for _ in range(len(self._under_way)):
            self._service.later(self._link.watch_delay_s, self._tell_next)

    def _begin(self) -> None:
        if self._told_revision < 0 and self._service.passes(self._link):
            self._under_way.clear()
            self._add(Seen(self._service.view(), is_restart=True))

    def _tell_next(self) -> None:
        # One call per waiting change, and more after a cut; each delivers the oldest.
        if self._told_revision >= 0 and self._under_way and self._service.passes(self._link):
            self._add(Seen(self._under_way.popleft(), is_restart=False))

    def _add(self, seen: Seen) -> None:
        if self.is_open:
            self._told_revision = seen.view.revision
            self._queue.append(seen)
            self._grown.unpark_all()


class SimAgreement:
    """See `ha.failover.agreement.Agreement`. `SimAgreementService.client` makes one."""

    def __init__(self, service: SimAgreementService, node: str) -> None:
        self._service = service
        self._link = service.links[node]

    async def view(self, *, timeout_s: float = TIMEOUT_S) -> GroupView:
        return await self._ask("reading the group", self._service.view, timeout_s, changes=False)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Watch]:
        watch = SimWatch(self._service, self._link)
        self._service.add_watch(watch)
        watch.catch_up()
        try:
            yield watch
        finally:
            watch.is_open = False
            self._service.remove_watch(watch)

    async def create_group(self, group: GroupRecord, *, timeout_s: float = TIMEOUT_S) -> int:
        def create() -> int:
            self._compare("creating the group", group_revision=0)
            return self._service.change({"group": (group, 0)})

        return await self._ask("creating the group", create, timeout_s)

    async def change_group(
        self, group: GroupRecord, *, group_revision: int, master_revision: int, timeout_s: float = TIMEOUT_S
    ) -> int:
        def change() -> int:
            self._compare("changing the group", group_revision, master_revision)
            return self._service.change({"group": (group, 0)})

        return await self._ask("changing the group", change, timeout_s)

    async def take_mastership(
        self,
        group: GroupRecord,
        master: MasterRecord,
        *,
        lease: Lease,
        group_revision: int,
        timeout_s: float = TIMEOUT_S,
    ) -> int:
        def take() -> int:
            self._compare("taking mastership", group_revision, 0)
            return self._service.change({"group": (group, 0), "master": (master, lease.id)})

        return await self._ask("taking mastership", take, timeout_s, lease)

    async def hand_over(
        self, group: GroupRecord, *, group_revision: int, master_revision: int, timeout_s: float = TIMEOUT_S
    ) -> int:
        def hand_over() -> int:
            self._compare("handing over", group_revision, master_revision)
            return self._service.change({"group": (group, 0)}, ("master", "switch"))

        return await self._ask("handing over", hand_over, timeout_s)

    async def resign(self, *, master_revision: int, timeout_s: float = TIMEOUT_S) -> None:
        def resign() -> None:
            if self._service.view().master_revision == master_revision:
                self._service.change({}, ("master",))

        await self._ask("resigning", resign, timeout_s)

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = TIMEOUT_S) -> Lease:
        return await self._ask("getting a lease", lambda: self._service.grant(ttl_s), timeout_s)

    async def renew(self, lease: Lease, *, timeout_s: float = TIMEOUT_S) -> float:
        return await self._ask("renewing the lease", lambda: self._service.renew(lease), timeout_s, lease)

    async def revoke(self, lease: Lease, *, timeout_s: float = TIMEOUT_S) -> None:
        await self._ask("ending the lease", lambda: self._service.revoke(lease.id), timeout_s)

    async def put_member(
        self, broker_id: int, member: MemberRecord, *, lease: Lease, timeout_s: float = TIMEOUT_S
    ) -> int:
        number = self._service.next_put_number()
        return await self._ask(
            "writing this member's record",
            lambda: self._service.put_member(broker_id, number, member, lease.id),
            timeout_s,
            lease,
        )

    async def request_switch(self, request: SwitchRequest, *, timeout_s: float = TIMEOUT_S) -> int:
        return await self._ask("requesting a switch", lambda: self._service.change({"switch": (request, 0)}), timeout_s)

    async def refuse_switch(
        self, refused: SwitchRequest, *, switch_revision: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        def refuse() -> None:
            if self._service.view().switch_revision == switch_revision:
                self._service.change({"switch": (refused, 0)})

        await self._ask("refusing a switch", refuse, timeout_s)

    def _compare(self, what: str, group_revision: int, master_revision: int | None = None) -> None:
        """Raises Outdated unless both have the expected revisions; `master_revision` None: any."""
        view = self._service.view()
        if view.group_revision != group_revision or master_revision not in (None, view.master_revision):
            raise Outdated(what, view)

    async def _ask(
        self,
        what: str,
        call: Callable[[], ResultT],
        timeout_s: float,
        lease: Lease | None = None,
        *,
        changes: bool = True,
    ) -> ResultT:
        """Sends a request, executes it when it arrives, and waits for the answer. The request is executed even if this
        task is cancelled."""
        service, link = self._service, self._link
        answers: list[ResultT | Exception] = []
        answered = trio.Event()

        def receive() -> None:
            answered.set()

        def carry_out() -> None:
            try:
                answers.append(call())
            except (Outdated, BrokerIdTaken, _NoLeaseError) as error:
                answers.append(error)
            if service.chance.random() >= link.lost_answer_share:
                service.later(link.delay_s, lambda: service.arrive(link, receive))

        if service.chance.random() >= link.lost_request_share:
            service.later(link.delay_s, lambda: service.arrive(link, carry_out))
        with trio.move_on_after(timeout_s):
            await answered.wait()
            answer = answers[0]
            if isinstance(answer, _NoLeaseError):
                assert lease is not None
                raise LeaseLost(what, lease)
            if isinstance(answer, Exception):
                raise answer
            return answer
        raise AgreementUnavailable(what, f"no answer within {timeout_s:g} s", outcome_unknown=changes)


def _of_kind(record: object, kind: type[RecordT]) -> RecordT:
    assert isinstance(record, kind)
    return record
