"""One member of a group: decides, together with the other members through etcd, which role its node plays.

    async with open_member(agreement, role, options, state) as member:
        ...

Its tasks renew the lease, watch the group, check the broker id, record that the log is complete again, store the newest
record, and decide. Only the deciding task changes the role. It looks at the newest view of the group, and does one of
these until a newer view requires another:

    another member is master    follow it
    there is no master          stop appending to the log and stand for election (campaign.py)
    this member is master       serve until the lease's deadline, the loss of the key, an outdated record or a handover
                                (master_term.py)

The member has a role only while its own key is attached to its own lease (lease_keeper.py): of two processes with one
broker id only one follows, stands for election or is master.

A change whose answer was lost may or may not have happened; the view shows whether it did. A member recognizes the
master's key as its own by the lease to which the key is attached, not by the broker id, which an earlier process may
have written.

While the service can't be reached, a slave keeps its master, and a master continues until its lease's deadline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import trio

from ha.failover.agreement import (
    Agreement,
    AgreementUnavailable,
    BrokerIdTaken,
    GroupView,
    LeaseLost,
    MasterRecord,
    SwitchRequest,
)
from ha.failover.campaign import Campaign
from ha.failover.durable_state import DurableState
from ha.failover.election import Refusal, outdated_record
from ha.failover.lease import MasterLease
from ha.failover.master_term import MasterTerm
from ha.failover.member_state import MemberState
from ha.failover.membership import Membership
from ha.failover.options import MemberOptions
from ha.failover.role import Role
from ha.failover.switchover import SwitchoverRequests


class Member:
    """A member of a failover group. `run` is its task. Others may read `progress`, `known`, `keeper` and `state`."""

    def __init__(self, agreement: Agreement, role: Role, options: MemberOptions, state: DurableState) -> None:
        """`state`: its `begin` must already have returned."""
        self._agreement = agreement
        self._role = role
        self._options = options
        self._membership = Membership(agreement, role, options, state)
        self.state = state
        self.known = self._membership.known
        self.keeper = self._membership.keeper
        self.progress = self._membership.progress
        self.switches = SwitchoverRequests(agreement, self.known)
        self._ended_key = (0, 0)
        """Revision and epoch of the last master's key whose term this member ended"""
        self._term: MasterTerm | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Makes the node master, slave or candidate as the group's views require, until cancelled. Afterwards the node
        keeps its last role, but without the right to act as master.

        Raises ConfigError if another process has this member's broker id.
        """
        async with trio.open_nursery() as nursery:
            await self._role.become_slave(self._role.position.epoch, None)
            nursery.start_soon(self.keeper.run)
            nursery.start_soon(self.known.watch)
            nursery.start_soon(self._watch_id)
            nursery.start_soon(self._watch_completeness)
            nursery.start_soon(self._keep_record)
            task_status.started()
            while True:
                await self._decide()

    async def _watch_completeness(self) -> None:
        """Marks the log complete once it has caught up with a master in this process."""
        if not self.state.is_complete:
            await self._role.wait_caught_up()
            await self.state.mark_complete()
            with suppress(AgreementUnavailable, LeaseLost, BrokerIdTaken):  # else the next renewal publishes it
                await self.keeper.publish()

    async def _keep_record(self) -> None:
        """Stores the newest record of the group on disk; publishes this member's record again if the service was rolled
        back.
        """
        view: GroupView | None = None
        while True:
            before = view
            view = await self.known.latest.wait_value(lambda now: now is not None and now is not before)  # noqa: B023
            if view.group is None:
                continue
            own = view.members.get(self._options.broker_id)
            if before is not None and view.revision < before.revision:
                self.keeper.republish()
            elif view.group.age >= self.state.known_age:
                await self.state.note(view.group)
            elif own is None or own.known_age < self.state.known_age:  # the write makes a new view to check
                self.keeper.republish()

    async def leave(self) -> None:
        """Prepares for the node's stop: hands over if this member is master and another can take over, then ends the
        lease."""
        self._membership.is_leaving = True
        if self._term is not None:
            await self._term.hand_over(SwitchRequest(to=None, reason="its master stops"), leaves=True)
        with suppress(AgreementUnavailable):
            await self.keeper.revoke()

    def _has_master_key(self, view: GroupView) -> bool:
        """Returns whether the master's key is on this member's present lease, and its term has not ended."""
        held = self.keeper.held.value
        return (
            view.master is not None
            and view.master.broker_id == self._options.broker_id
            and held is not None
            and view.master_lease_id == held.lease.id
            and not self._has_ended(view)
        )

    def _has_ended(self, view: GroupView) -> bool:
        return _key_of(view) == self._ended_key

    async def _decide(self) -> None:
        view: GroupView = await self.known.latest.wait_value(lambda now: now is not None)
        if not self.keeper.broker_id.value.is_owned:
            await self._wait_id(view)
        elif view.master is None:
            await self._while_id_is_owned(self._stand)
        elif self._has_master_key(view) and outdated_record(view, self.state.known_age) is None:
            await self._be_master(view)
        else:
            await self._while_id_is_owned(partial(self._follow, view, view.master))

    async def _watch_id(self) -> None:
        """Checks in each view whether the member's key is still attached to its lease."""
        async for view in self.known.latest.eventual_values():
            if view is not None:
                self.keeper.check_view(view)

    async def _wait_id(self, view: GroupView) -> None:
        """Keeps the node a slave without a master until this member's key is attached to its own lease."""
        epoch = 0 if view.group is None else view.group.epoch
        broker_id = self.keeper.broker_id
        while not (state := broker_id.value).is_owned:
            self.progress.become_following(None, epoch, str(state.taken or "its key is not in the service yet"))
            await self._role.become_slave(epoch, None)
            await broker_id.wait_value(lambda now: now is not state)

    async def _while_id_is_owned(self, play: Callable[[], Awaitable[None]]) -> None:
        """Runs `play` until it returns; cancels it if this member loses its broker id."""

        async def watch() -> None:
            await self.keeper.broker_id.wait_value(lambda now: not now.is_owned)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await play()
            nursery.cancel_scope.cancel()

    async def _follow(self, view: GroupView, master: MasterRecord) -> None:
        """Follows the master, or nobody if this member must not follow it, until there is another master or none, or
        the reason not to follow has changed."""
        epoch = master.epoch
        own_epoch = self._role.position.epoch
        outdated = outdated_record(view, self.state.known_age)
        if master.broker_id == self._options.broker_id:
            if await self._end_own_key(view, epoch, outdated):
                return
        elif own_epoch > epoch:
            await self._follow_nobody(
                epoch,
                f"this log has epoch {own_epoch}, but the group's master has {epoch}: has the service lost data, or is "
                "this the store of another group?",
            )
        elif outdated is not None:
            await self._follow_nobody(epoch, outdated.reason)
        else:
            self.progress.become_following(master.broker_id, epoch)
            await self._role.become_slave(epoch, master)
        await self.known.latest.wait_value(
            lambda now: (
                _key_of(now) != _key_of(view)
                or (outdated is not None and outdated_record(now, self.state.known_age) != outdated)
            )
        )

    async def _follow_nobody(self, epoch: int, reason: str) -> None:
        self.progress.become_following(None, epoch)
        self.progress.explain(reason, needs_operator=True)
        await self._role.become_slave(epoch, None)

    async def _end_own_key(self, view: GroupView, epoch: int, outdated: Refusal | None) -> bool:
        """Becomes a slave, and removes this member's own master key if its term here is over, or must not begin.

        Returns whether the key was removed. The key of an earlier process of this member is left to expire.
        """
        self.progress.become_following(None, epoch, "the key of this member's earlier term has not ended yet")
        await self._role.become_slave(epoch, None)
        if outdated is not None and self._has_master_key(view):
            self._ended_key = _key_of(view)
        if not self._has_ended(view):
            return False
        if outdated is not None:
            self.progress.explain(outdated.reason, needs_operator=True)
            await self._membership.announce()  # before anybody can be elected by that record
        await self._resign(view.master_revision)
        return True

    async def _resign(self, master_revision: int) -> None:
        """Removes the key of a term that is over: it would not expire, as its lease is renewed."""
        while (view := self.known.view) is not None and view.master_revision == master_revision:
            try:
                await self._agreement.resign(master_revision=master_revision, timeout_s=self._options.call_timeout_s)
            except AgreementUnavailable as error:
                self.progress.explain(str(error))
                await trio.sleep(self._options.retry_s)
            await self.known.refresh()

    async def _stand(self) -> None:
        """Stands for election until there is a master."""
        campaign = Campaign(self._membership)
        view = self.known.view
        assert view is not None
        epoch = 0 if view.group is None else view.group.epoch
        self.progress.become_candidate(epoch)
        await self._role.become_slave(epoch, None)
        await campaign.run(view)
        if why_not := self._membership.why_not_stand:
            self.progress.explain(why_not)
            await self.known.latest.wait_value(lambda now: now.master is not None)

    async def _be_master(self, view: GroupView) -> None:
        held = self.keeper.held.value
        assert held is not None
        assert view.master is not None
        lease = MasterLease(held.deadline)
        if self.progress.state is not MemberState.CANDIDATE:  # an attempt without an answer was executed late
            self.progress.become_candidate(view.master.epoch)
        self.progress.become_master(view.master.epoch)
        term = self._term = MasterTerm(self._membership, lease, view)
        try:
            await term.run()
        finally:
            lease.end()
            self._term = None
            self._ended_key = _key_of(view)
        self.progress.become_fenced(term.end_reason)
        await self._role.become_slave(view.master.epoch, None)


def _key_of(view: GroupView) -> tuple[int, int]:
    """Returns the identity of one term's key: its revision and, as a restored service reuses revisions, its epoch."""
    return view.master_revision, 0 if view.master is None else view.master.epoch


@asynccontextmanager
async def open_member(
    agreement: Agreement,
    role: Role,
    options: MemberOptions,
    state: DurableState,
    *,
    leave_timeout_s: float = 3.0,
) -> AsyncIterator[Member]:
    """Runs a member while the block runs; then calls `Member.leave`, for at most `leave_timeout_s`."""
    member = Member(agreement, role, options, state)
    async with trio.open_nursery() as nursery:
        await nursery.start(member.run)
        try:
            yield member
        finally:
            with trio.move_on_after(leave_timeout_s, shield=True):
                await member.leave()
            nursery.cancel_scope.cancel()
