"""One member of a group: decides, with the others and the service that they agree on, which role its node plays.

    async with open_member(agreement, role, options) as member:
        ...

Four tasks: the lease's, the watch's, one that notes when the log is complete again, and one that decides, the only one
that changes the role. The last looks at the newest view of the group and does one of three things until a newer one
says otherwise:

    somebody else has the office    follow them
    nobody has it                   let the log stand still, stand, take the office when it is this member's turn
    this member has it              be master until the lease's deadline, a lost key, an outdated answer, a hand-over

All that only while the member's own key is on its lease (`lease_keeper.py`): of two processes with one broker id one
plays a role.

A change whose answer was lost is neither made nor not made: the member looks at the view. Its own key is recognized by
the lease that it hangs on, so a key of the same node's earlier life is not mistaken for it.

While the service can't be reached a slave stays with its master, and a master goes on until its lease's deadline.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
import trio

from ha.failover.agreement import (
    Agreement,
    AgreementUnavailable,
    BrokerIdTaken,
    GroupView,
    LeaseLost,
    MasterRecord,
    MemberRecord,
    Outdated,
    SwitchRequest,
)
from ha.failover.durable_state import DurableState
from ha.failover.election import FOUNDED, Candidacy, Refusal, appointed, judge, may_found, outdated_record
from ha.failover.known_group import KnownGroup
from ha.failover.lead import Lead
from ha.failover.lease import Mandate
from ha.failover.lease_keeper import HeldLease, LeaseKeeper
from ha.failover.member_state import MemberProgress, MemberState
from ha.failover.options import MemberOptions
from ha.failover.planned_switch import SwitchDesk
from ha.failover.role import LogPosition, Role

logger = logging.getLogger(__name__)


class Member:
    """One member. `run` is its task; `progress` and `known` are for whoever shows or awaits them, `switches` for
    operators."""

    def __init__(self, agreement: Agreement, role: Role, options: MemberOptions, state: DurableState) -> None:
        """`state` has begun."""
        self._agreement = agreement
        self._role = role
        self._options = options
        self.state = state
        self.known = KnownGroup(agreement, options)
        self.switches = SwitchDesk(agreement, self.known)
        self._standing: tuple[LogPosition, int] | None = None
        """While this member stands for election: the end of its log, and the epoch it stands for"""
        self._laid_down = (0, 0)
        """Revision and epoch of the last key that this member laid down: a restored service uses revisions again"""
        self._followed = (0, -math.inf)
        """The lease on which this member last followed a master, or was one, and when it began to"""
        self._is_leaving = False
        self._lead: Lead | None = None
        self.progress = MemberProgress()
        self.keeper = LeaseKeeper(agreement, options, self._member_record)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Play roles until cancelled. The node's role is then whatever it was, and its mandate laid down.

        ConfigError if another process has this member's broker id.
        """
        async with trio.open_nursery() as nursery:
            await self._role.become_slave(self._role.position.epoch, None)
            nursery.start_soon(self.keeper.run)
            nursery.start_soon(self.known.watch)
            nursery.start_soon(self._watch_id)
            nursery.start_soon(self._complete)
            nursery.start_soon(self._remember)
            task_status.started()
            while True:
                await self._decide()

    async def _complete(self) -> None:
        """Say that the log is complete once it has caught up with a master in this life."""
        if not self.state.is_complete:
            await self._role.wait_caught_up()
            await self.state.mark_complete()
            with suppress(AgreementUnavailable, LeaseLost, BrokerIdTaken):  # the next renewal publishes it, then
                await self.keeper.publish()

    async def _remember(self) -> None:
        """Keep the newest record of the group; publish what this member knows if the service has lost it."""
        view: GroupView | None = None
        while True:
            before = view
            view = await self.known.seen.wait_value(lambda now: now is not None and now is not before)  # noqa: B023
            if view.group is None:
                continue
            if (before is not None and view.revision < before.revision) or view.group.age < self.state.known_age:
                self.keeper.publish_again()
            else:
                await self.state.note(view.group)

    async def leave(self) -> None:
        """Hand the office over if this member has it and somebody can take it; then give the lease back.

        For a node that stops. It takes no office any more.
        """
        self._is_leaving = True
        lead = self._lead
        if lead is not None:
            await lead.hand_over(SwitchRequest(to=None, reason="its master stops"), leaves=True)
        with suppress(AgreementUnavailable):
            await self.keeper.revoke()

    # What it says of itself

    def _member_record(self) -> MemberRecord:
        return self._record_of(self._role.position) if self._standing is None else self._record_of(*self._standing)

    def _record_of(self, position: LogPosition, stands_for: int = 0) -> MemberRecord:
        options = self._options
        return MemberRecord(
            epoch=position.epoch,
            max_offset=position.max_offset,
            ha_address=options.ha_address,
            broker_address=options.broker_address,
            run_id=options.run_id,
            priority=options.priority,
            drains=self._is_leaving,
            stands_for=stands_for,
            is_complete=self.state.is_complete,
            is_new=self.state.is_new,
            known_epoch=self.state.known_age[0],
            known_version=self.state.known_age[1],
        )

    def _is_own(self, view: GroupView) -> bool:
        """Whether the office is this member's there, by the lease that it has now, and was not laid down."""
        held = self.keeper.held.value
        return (
            view.master is not None
            and view.master.broker_id == self._options.broker_id
            and held is not None
            and view.master_lease_id == held.lease.id
            and not self._is_laid_down(view)
        )

    def _is_laid_down(self, view: GroupView) -> bool:
        return _key_of(view) == self._laid_down

    # What is done

    async def _decide(self) -> None:
        view: GroupView = await self.known.seen.wait_value(lambda now: now is not None)
        if not self.keeper.broker_id.value.is_owned:
            await self._wait_id(view)
        elif view.master is None:
            await self._while_id_is_owned(self._stand)
        elif self._is_own(view) and outdated_record(view, self.state.known_age) is None:
            await self._be_master(view)
        else:
            await self._while_id_is_owned(partial(self._follow, view, view.master))

    async def _watch_id(self) -> None:
        """Have the keeper look at each view: whether the member's key is still on its lease."""
        async for view in self.known.seen.eventual_values():
            if view is not None:
                self.keeper.saw(view)

    async def _wait_id(self, view: GroupView) -> None:
        """Play no role until this member's key is on its lease."""
        epoch = 0 if view.group is None else view.group.epoch
        broker_id = self.keeper.broker_id
        while not (state := broker_id.value).is_owned:
            self.progress.become_following(None, epoch, str(state.taken or "its key is not in the service yet"))
            await self._role.become_slave(epoch, None)
            await broker_id.wait_value(lambda now: now is not state)

    async def _while_id_is_owned(self, play: Callable[[], Awaitable[None]]) -> None:
        """Play a role, but no longer than the broker id is this member's."""

        async def watch() -> None:
            await self.keeper.broker_id.wait_value(lambda now: not now.is_owned)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await play()
            nursery.cancel_scope.cancel()

    async def _follow(self, view: GroupView, master: MasterRecord) -> None:
        """Follow another master, or nobody if that one can't be followed, until somebody else has the office."""
        epoch = master.epoch
        own_epoch = self._role.position.epoch
        outdated = outdated_record(view, self.state.known_age)
        if master.broker_id == self._options.broker_id:
            reason = "the key of this member's earlier term has not ended yet"
            self.progress.become_following(None, epoch, reason)
            await self._role.become_slave(epoch, None)
            if outdated is not None and self._is_own(view):
                self._laid_down = _key_of(view)
            if self._is_laid_down(view):
                if outdated is not None:
                    self.progress.note(outdated.reason, is_wrong=True)
                    await self._announce()  # before anybody can be elected by that record
                await self._resign(view.master_revision)
                return
        elif own_epoch > epoch:
            self.progress.become_following(None, epoch)
            reason = (
                f"this log has epoch {own_epoch}, but the group's master has {epoch}: has the service lost what it "
                "knew, or is this the store of another group?"
            )
            self.progress.note(reason, is_wrong=True)
            await self._role.become_slave(epoch, None)
        elif outdated is not None:
            self.progress.become_following(None, epoch)
            self.progress.note(outdated.reason, is_wrong=True)
            await self._role.become_slave(epoch, None)
        else:
            self.progress.become_following(master.broker_id, epoch)
            await self._role.become_slave(epoch, master)
            self._note_followed()
        await self.known.seen.wait_value(
            lambda now: (
                _key_of(now) != _key_of(view) or (outdated is not None and now.group_revision != view.group_revision)
            )
        )

    async def _resign(self, master_revision: int) -> None:
        """Remove the key of a term that is over: nobody else does, its lease goes on."""
        while (view := self.known.view) is not None and view.master_revision == master_revision:
            try:
                await self._agreement.resign(master_revision=master_revision, timeout_s=self._options.call_timeout_s)
            except AgreementUnavailable as error:
                self.progress.note(str(error))
                await trio.sleep(self._options.retry_s)
            await self.known.look()

    async def _stand(self) -> None:
        """Nobody has the office: stand for it until somebody has it."""
        vacant_since = trio.current_time()
        view = self.known.view
        assert view is not None
        epoch = 0 if view.group is None else view.group.epoch
        self.progress.become_candidate(epoch)
        await self._role.become_slave(epoch, None)
        position = self._role.position
        self._standing = position, epoch + 1
        try:
            if not self._is_leaving:
                await self._take_at_once(view, self._member_record())
            if self._is_vacant() and await self._announce():
                await self._campaign(vacant_since, position)
        finally:
            self._standing = None
        # Nobody in office is no reason to come back at once: what could be done was done, or this member leaves.
        if self._is_leaving:
            await self.known.seen.wait_value(lambda now: now.master is not None)

    async def _take_at_once(self, view: GroupView, own: MemberRecord) -> None:
        """A planned switch should take no longer than need be: two trips to the service less than an election."""
        candidacy = appointed(view, self._options.broker_id, own, self._options)
        if candidacy is None or not await self._has_fit_lease():
            return
        if self._is_vacant() and self._settled_at(view, leases=1) <= trio.current_time():
            await self._take(view, candidacy)

    async def _has_fit_lease(self) -> bool:
        """Whether enough is left of the lease to begin a term with; it is renewed first if that takes it."""
        held = await self.keeper.wait_held()
        if not held.is_fit:
            await self.keeper.try_soon()
            held = await self.keeper.wait_held()
        return held.is_fit

    def _settled_at(self, view: GroupView, *, leases: int) -> float:
        """When all members that live have had the time to say what they know of the group, by the trio clock.

        A service that was restored from an older state may have lost their leases. A member that has followed a master
        on the lease that it has now has heard what there was to hear. Any other has just started, or has lost its lease
        by that, and waits for so many lease times: others have noticed by then, and written their records again.
        """
        held: HeldLease | None = self.keeper.held.value
        if held is None:
            return math.inf
        lease_id, followed_at = self._followed
        is_followed = lease_id == held.lease.id and followed_at > self.known.went_back_at
        if is_followed or view.group is None or not view.group.epoch:
            return -math.inf
        since = max(held.granted_at, self.known.went_back_at)
        return since + leases * held.lease.ttl_s

    def _note_followed(self) -> None:
        held = self.keeper.held.value
        if held is not None:
            self._followed = held.lease.id, trio.current_time()

    async def _announce(self) -> bool:
        """Say how much of the log there is, and look who else stands; tell whether there is still nobody in office."""
        while True:
            await self.keeper.wait_held()
            try:
                await self.keeper.publish()
                break
            except LeaseLost as error:
                self.keeper.lose(error.lease)
            except (AgreementUnavailable, BrokerIdTaken) as error:
                self.progress.note(str(error))
                await trio.sleep(self._options.retry_s)
        await self.known.look()
        return self._is_vacant()

    def _is_vacant(self) -> bool:
        view = self.known.view
        return view is not None and view.master is None and not self._is_leaving

    async def _campaign(self, vacant_since: float, position: LogPosition) -> None:
        while self._is_vacant():
            view = self.known.view
            assert view is not None
            if view.group is None:
                await self._found(view, position)
                continue
            if view.group.epoch + 1 != self._member_record().stands_for:
                return  # an office was taken and lost again in the meantime: stand anew
            # The service was restored from an older state, or this member has learned of a newer record since.
            if view.members.get(self._options.broker_id) != self._member_record():
                self.keeper.publish_again()
                await self._announce()
                continue
            verdict = judge(view, self._options.broker_id, self._options)
            if isinstance(verdict, Refusal):
                self.progress.note(verdict.reason, is_wrong=verdict.is_wrong)
                await self._wait_newer(view)
                continue
            all_stand = all(each.stands_for > view.group.epoch for each in view.members.values())
            settled_at = self._settled_at(view, leases=1 if all_stand else 2)
            wait_s = max(vacant_since, settled_at) + verdict.delay_s - trio.current_time()
            if wait_s > 0 and await self._wait_newer(view, wait_s):
                continue
            if not await self._has_fit_lease():
                self.progress.note("its lease is too short for the time that the service takes to answer")
                await trio.sleep(self._options.retry_s)
                continue
            await self._take(view, verdict)

    async def _wait_newer(self, view: GroupView, at_most_s: float = math.inf) -> bool:
        """Wait for a newer view, and tell whether there is one."""
        with trio.move_on_after(at_most_s):
            await self.known.seen.wait_value(lambda now: now.revision != view.revision)
            return True
        return False

    async def _found(self, view: GroupView, position: LogPosition) -> None:
        """Write the first record of a group that has none."""
        refusal = may_found(view, position, self._options)
        if refusal is not None:
            self.progress.note(refusal.reason, is_wrong=refusal.is_wrong)
            await self._wait_newer(view)
            return
        try:
            await self._agreement.create_group(FOUNDED, timeout_s=self._options.call_timeout_s)
        except Outdated as error:
            self.known.saw(error.view)
        except AgreementUnavailable as error:
            self.progress.note(str(error))
            await trio.sleep(self._options.retry_s)
        await self.known.look()

    async def _take(self, view: GroupView, candidacy: Candidacy) -> None:
        """Try to take the office; what came of it is in the view afterwards."""
        if candidacy.is_unclean:
            logger.error("member_unclean_election epoch=%d: acknowledged messages may be lost", candidacy.group.epoch)
        elif candidacy.doubt:
            text = "member_elected_in_doubt epoch=%d reason=%r: acknowledged messages may be lost"
            logger.warning(text, candidacy.group.epoch, candidacy.doubt)
        options = self._options
        if candidacy.group.epoch == 1:  # such a group has acknowledged nothing that could be missing
            with trio.move_on_after(options.call_timeout_s):  # a full disk is no reason not to be elected
                await self.state.mark_complete()
        held = await self.keeper.wait_held()
        master = MasterRecord(
            broker_id=options.broker_id,
            epoch=candidacy.group.epoch,
            ha_address=options.ha_address,
            broker_address=options.broker_address,
            reads_run_ids=True,
        )
        try:
            revision = await self._agreement.take_mastership(
                candidacy.group,
                master,
                lease=held.lease,
                group_revision=view.group_revision,
                timeout_s=options.call_timeout_s,
            )
        except Outdated as error:
            self.known.saw(error.view)
        except LeaseLost as error:
            self.keeper.lose(error.lease)
        except AgreementUnavailable as error:
            self.progress.note(str(error))
            await self.known.look()
        else:
            self.known.saw(
                msgspec.structs.replace(
                    view,
                    revision=revision,
                    group=candidacy.group,
                    group_revision=revision,
                    master=master,
                    master_revision=revision,
                    master_lease_id=held.lease.id,
                )
            )

    async def _be_master(self, view: GroupView) -> None:
        held = self.keeper.held.value
        assert held is not None
        assert view.master is not None
        mandate = Mandate(held.deadline)
        self._note_followed()
        if self.progress.state is not MemberState.CANDIDATE:  # a try whose answer was lost was carried out late
            self.progress.become_candidate(view.master.epoch)
        self.progress.become_master(view.master.epoch)
        lead = self._lead = Lead(
            self.known,
            self.keeper,
            self._agreement,
            self._role,
            self._options,
            self.progress,
            mandate,
            view,
            self.state,
        )
        try:
            await lead.run()
        finally:
            mandate.lay_down()
            self._lead = None
            self._laid_down = _key_of(view)
        self.progress.become_fenced(lead.end_reason)
        await self._role.become_slave(view.master.epoch, None)


def _key_of(view: GroupView) -> tuple[int, int]:
    """What tells one term's key from any other: its revision and its epoch, zeros where there is none."""
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
    """Be a member while the block runs; at its end hand over what there is to hand over, in at most that time."""
    member = Member(agreement, role, options, state)
    async with trio.open_nursery() as nursery:
        await nursery.start(member.run)
        try:
            yield member
        finally:
            with trio.move_on_after(leave_timeout_s, shield=True):
                await member.leave()
            nursery.cancel_scope.cancel()
