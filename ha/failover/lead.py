"""One term of a member as master: the lease's deadline, the set's changes, the hand-over.

Every change of the group's record goes through here, one after the other, and names the revision of the master's key: a
term that is over can change nothing.
"""

from __future__ import annotations

import logging

import msgspec
import trio

from ha.failover.agreement import Agreement, AgreementUnavailable, GroupRecord, GroupView, Outdated, SwitchRequest
from ha.failover.durable_state import DurableState
from ha.failover.election import acknowledges_by_count, choose_target, outdated_record
from ha.failover.known_group import KnownGroup
from ha.failover.lease import Mandate
from ha.failover.lease_keeper import LeaseKeeper
from ha.failover.member_state import MemberProgress
from ha.failover.options import MemberOptions
from ha.failover.planned_switch import is_open
from ha.failover.role import Role, Term

logger = logging.getLogger(__name__)

DEADLINE_PASSED = "its lease's deadline has passed"
OFFICE_IS_LOST = "this member is not master any more"


class Lead:
    """One term of a member as master: until its end is told by the clock, the view, or itself."""

    def __init__(
        self,
        known: KnownGroup,
        keeper: LeaseKeeper,
        agreement: Agreement,
        role: Role,
        options: MemberOptions,
        progress: MemberProgress,
        mandate: Mandate,
        view: GroupView,
        state: DurableState,
    ) -> None:
        assert view.master is not None
        assert view.group is not None
        self._known = known
        self._keeper = keeper
        self._agreement = agreement
        self._role = role
        self._options = options
        self._progress = progress
        self._mandate = mandate
        self._epoch = view.master.epoch
        self._revision = view.master_revision
        self._first = view.group
        self._state = state
        self._scope = trio.CancelScope()
        self._changing = trio.Lock()
        self._serves = trio.Event()
        self.end_reason = ""

    async def run(self) -> None:
        """Be master until that is over; `end_reason` says why."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_deadline)
                nursery.start_soon(self._watch_key)
                nursery.start_soon(self._watch_record)
                nursery.start_soon(
                    self._keep_set
                )  # before it serves: its first put may wait for somebody to be dropped
                nursery.start_soon(self._tell_who_lives)
                try:
                    await self._state.note(self._first)
                    await self._role.become_master(Term(self._epoch, self._first.sync_state_set, self._mandate))
                finally:
                    self._serves.set()
                self._progress.become_serving(self._options.broker_id)
                nursery.start_soon(self._keep_switches)

    def _end(self, reason: str) -> None:
        self._mandate.lay_down()
        self.end_reason = self.end_reason or reason
        self._scope.cancel()

    async def _watch_deadline(self) -> None:
        keeper = self._keeper
        held = keeper.held.value
        while self._mandate.is_held:
            # Renewals move the deadline; the clock may be another than the one that is slept by.
            with trio.move_on_after(self._mandate.remaining_s):
                await keeper.held.wait_value(lambda now: now is not held)
        fault = keeper.fault
        self._end(f"{DEADLINE_PASSED}{fault and ': '}{fault}")

    async def _watch_key(self) -> None:
        view: GroupView = await self._known.seen.wait_value(
            lambda now: now.master_revision != self._revision or now.master is None or now.master.epoch != self._epoch
        )
        master = view.master
        self._end("its key is gone" if master is None else f"member {master.broker_id} has the office")

    async def _watch_record(self) -> None:
        """A service that was restored may show this term, and a set that was another one since."""
        view: GroupView = await self._known.seen.wait_value(
            lambda now: now.group is not None and now.group.age < self._state.known_age
        )
        outdated = outdated_record(view, self._state.known_age)
        self._end("" if outdated is None else outdated.reason)

    async def _keep_set(self) -> None:
        """Have the record say which set replication wants, one wish after the other."""
        while True:
            wanted = await self._role.wait_wanted_set()
            assert self._options.broker_id in wanted, wanted
            async with self._changing:
                await self._state.note(await self._put_set(wanted))
            logger.info("member_sync_state_set epoch=%d set=%s", self._epoch, sorted(wanted))
            self._role.confirm_set(wanted)

    async def _tell_who_lives(self) -> None:
        """Let replication know of each change of who has a lease, once there is a term to tell it of."""
        await self._serves.wait()
        told: dict[int, int] = {}
        while True:
            view: GroupView = await self._known.seen.wait_value(lambda now: _runs(now) != told)  # noqa: B023
            told = _runs(view)
            self._role.note_living(told)

    async def _put_set(self, wanted: frozenset[int]) -> GroupRecord:
        """Return the record when it says `wanted`: by an answer, or by what is there if an answer was lost."""
        while True:
            view, group = self._view_of_term()
            if view.master_revision != self._revision:
                await trio.sleep_forever()  # until `_watch_key` ends the term
            if group.sync_state_set == wanted:
                return group
            changed = msgspec.structs.replace(group, sync_state_set=wanted, version=group.version + 1)
            try:
                revision = await self._agreement.change_group(
                    changed,
                    group_revision=view.group_revision,
                    master_revision=self._revision,
                    timeout_s=self._options.call_timeout_s,
                )
            except Outdated as error:
                self._known.saw(error.view)
                if error.view.revision < view.revision:
                    await self._known.look()
            except AgreementUnavailable:
                await trio.sleep(self._options.retry_s)
                await self._known.look()
            else:
                self._known.saw(
                    msgspec.structs.replace(view, revision=revision, group=changed, group_revision=revision)
                )
                return changed

    def _view_of_term(self) -> tuple[GroupView, GroupRecord]:
        view = self._known.view
        assert view is not None
        assert view.group is not None
        return view, view.group

    async def _keep_switches(self) -> None:
        """Do what operators ask for."""
        while True:
            view: GroupView = await self._known.seen.wait_value(lambda now: is_open(now.switch))
            assert view.switch is not None
            refusal = await self.hand_over(view.switch)
            if not refusal:
                return
            logger.warning("member_switch_refused to=%s reason=%r", view.switch.to, refusal)
            refused = msgspec.structs.replace(view.switch, refusal=refusal, refused_revision=view.switch_revision)
            try:
                await self._agreement.refuse_switch(
                    refused, switch_revision=view.switch_revision, timeout_s=self._options.call_timeout_s
                )
            except AgreementUnavailable:
                await trio.sleep(self._options.retry_s)
            with trio.move_on_after(self._options.call_timeout_s):
                await self._known.seen.wait_value(lambda now: now.switch_revision != view.switch_revision)  # noqa: B023

    async def hand_over(self, request: SwitchRequest, *, leaves: bool = False) -> str:
        """Hand the office over; return why not, or "" when it has been laid down.

        Until the next master has everything, nothing has changed if this fails. Then this term is over, however the
        transaction ends: one whose answer was lost may be carried out later. With `leaves` this member is no longer in
        the set afterwards.
        """
        await self._serves.wait()
        async with self._changing:
            if not self._mandate.is_held:
                return OFFICE_IS_LOST
            view, _ = self._view_of_term()
            target = choose_target(view, self._options.broker_id, request)
            if isinstance(target, str):
                return target
            self._role.hold_puts()
            try:
                with trio.move_on_after(self._options.switch_timeout_s) as scope:
                    await self._role.wait_held_by(target)
                view, group = self._view_of_term()
                if scope.cancelled_caught:
                    return f"member {target} did not have everything within {self._options.switch_timeout_s:g} s"
                if view.master_revision != self._revision:
                    return OFFICE_IS_LOST
                self._mandate.lay_down()
            finally:
                if self._mandate.is_held:
                    self._role.release_puts()
            kept = group.sync_state_set
            if leaves and not acknowledges_by_count(group):  # else the others of the set may lack what n acknowledged
                kept -= {self._options.broker_id}
            handed = msgspec.structs.replace(group, master_id=target, sync_state_set=kept, version=group.version + 1)
            with trio.CancelScope(shield=True):  # bounded by its own timeout; half a hand-over would be a slow one
                await self._lay_down(view, handed)
        self._end(f"handed over to member {target}: {request.reason or 'asked to'}")
        return ""

    async def _lay_down(self, view: GroupView, handed: GroupRecord) -> None:
        try:
            revision = await self._agreement.hand_over(
                handed,
                group_revision=view.group_revision,
                master_revision=self._revision,
                timeout_s=self._options.call_timeout_s,
            )
        except Outdated as error:
            self._known.saw(error.view)
        except AgreementUnavailable as error:
            logger.warning("member_hand_over_in_doubt reason=%r", str(error))
        else:
            self._known.saw(
                msgspec.structs.replace(
                    view,
                    revision=revision,
                    group=handed,
                    group_revision=revision,
                    master=None,
                    master_revision=0,
                    master_lease_id=0,
                    switch=None,
                    switch_revision=0,
                )
            )


def _runs(view: GroupView) -> dict[int, int]:
    """Return who has a lease: broker id -> run id."""
    return {broker_id: member.run_id for broker_id, member in view.members.items()}
