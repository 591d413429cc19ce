"""One term of a member as master: the lease's deadline, changes of the sync-state set, and the handover.

Every change of the group's record during a term is made here, one at a time, and names the revision of the master's
key, so a term that is over can change nothing.
"""

from __future__ import annotations

import logging

import msgspec
import trio

from ha.errors import DamagedBytes, DiskFull
from ha.failover.agreement import AgreementUnavailable, GroupRecord, GroupView, Outdated, SwitchRequest
from ha.failover.election import acknowledges_by_count, choose_target, outdated_record
from ha.failover.lease import MasterLease
from ha.failover.membership import Membership
from ha.failover.role import Term
from ha.failover.switchover import is_open

logger = logging.getLogger(__name__)

DEADLINE_PASSED = "the deadline of its lease has passed"
NO_LONGER_MASTER = "this member is no longer master"
NOTE_S_MAX = 5.0
"""Maximum time in seconds for writing the first record of a term to the disk, which waits while the disk is full."""
PROMOTION_RETRY_S = 5.0
"""Time in seconds for which a member whose disk did not let it become master leaves the office to others. Afterwards it
tries again if there is still no master. Shorter than the delay of an unclean election."""


class MasterTerm:
    """One term as master. It begins with a view in which this member has the master's key. It ends with the lease, with
    a view in which the key is another one or the record is missing or outdated, when this member hands over, or when
    its disk does not let it begin to serve.
    """

    def __init__(self, membership: Membership, lease: MasterLease, view: GroupView) -> None:
        assert view.master is not None
        assert view.group is not None
        self._membership = membership
        self._known = membership.known
        self._role = membership.role
        self._options = membership.options
        self._lease = lease
        self._epoch = view.master.epoch
        self._revision = view.master_revision
        self._first_record = view.group
        self._scope = trio.CancelScope()
        self._change_lock = trio.Lock()
        self._started = trio.Event()
        self.end_reason = ""

    async def run(self) -> None:
        """Acts as the master until the term ends; then `end_reason` holds the reason."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_deadline)
                nursery.start_soon(self._watch_key)
                nursery.start_soon(self._watch_record)
                nursery.start_soon(self._keep_set)  # before serving: the first put may wait for a lost member
                nursery.start_soon(self._pass_on_live_members)
                try:
                    why_not = await self._start()
                except BaseException:
                    self._lease.end()  # `hand_over` may wait for the start
                    raise
                finally:
                    self._started.set()
                if why_not:
                    logger.error("member.not_promoted epoch=%d reason=%r", self._epoch, why_not)
                    self._membership.electable_at = trio.current_time() + PROMOTION_RETRY_S
                    self._membership.disk_trouble = why_not
                    self._end(why_not)
                    return
                self._membership.progress.become_serving(self._options.broker_id)
                nursery.start_soon(self._serve_switch_requests)

    async def _start(self) -> str:
        """Makes the node master. Returns "" if that succeeded; otherwise why its disk does not allow it now."""
        with trio.move_on_after(NOTE_S_MAX) as scope:
            await self._membership.state.note(self._first_record)
        if scope.cancelled_caught:
            return f"the group's record could not be written to the disk within {NOTE_S_MAX:g} s"
        try:
            await self._role.become_master(Term(self._epoch, self._first_record.sync_state_set, self._lease))
        except (DiskFull, DamagedBytes) as error:
            return str(error)
        return ""

    def _end(self, reason: str) -> None:
        self._lease.end()
        self.end_reason = self.end_reason or reason
        self._scope.cancel()

    async def _watch_deadline(self) -> None:
        keeper = self._membership.keeper
        held = keeper.held.value
        while self._lease.is_held:
            # Renewals extend the deadline, and the lease's clock may differ from the clock of `trio.move_on_after`.
            with trio.move_on_after(self._lease.remaining_s):
                await keeper.held.wait_value(lambda now: now is not held)
        error = keeper.last_error
        self._end(f"{DEADLINE_PASSED}{error and ': '}{error}")

    async def _watch_key(self) -> None:
        view: GroupView = await self._known.latest.wait_value(
            lambda now: now.master_revision != self._revision or now.master is None or now.master.epoch != self._epoch
        )
        master = view.master
        self._end("its key is gone" if master is None else f"member {master.broker_id} is master")

    async def _watch_record(self) -> None:
        """Ends the term if the service has lost the record, or was restored to an older one, whose sync-state set may
        be out of date."""
        state = self._membership.state
        view: GroupView = await self._known.latest.wait_value(
            lambda now: now.group is None or now.group.age < state.known_age
        )
        outdated = outdated_record(view, state.known_age)
        self._end("the group's record is gone" if outdated is None else outdated.reason)

    async def _keep_set(self) -> None:
        """Writes each sync-state set that replication wants into the group's record."""
        while True:
            wanted = await self._role.wait_wanted_set()
            assert self._options.broker_id in wanted, wanted
            async with self._change_lock:
                record = await self._write_set(wanted)
            await self._membership.state.note(record)  # may wait for room on the disk, which must not delay a handover
            self._membership.progress.explain("")
            logger.info("member.sync_state_set_changed epoch=%d set=%s", self._epoch, sorted(wanted))
            self._role.confirm_set(wanted)

    async def _pass_on_live_members(self) -> None:
        """Passes each change of the live members on to replication, once this node has become master."""
        await self._started.wait()
        passed_on: dict[int, int] = {}
        while True:
            view: GroupView = await self._known.latest.wait_value(lambda now: _live_members(now) != passed_on)  # noqa: B023
            passed_on = _live_members(view)
            self._role.set_live_members(passed_on)

    async def _write_set(self, wanted: frozenset[int]) -> GroupRecord:
        """Writes `wanted` as the sync-state set; returns the group's record that has it.

        If an answer is lost, a later view shows whether the set was written. Waits until cancelled if the term is over.
        """
        while True:
            current = self._current()
            if current is None:
                await trio.sleep_forever()  # until `_watch_key` or `_watch_record` ends the term
            view, group = current
            if group.sync_state_set == wanted:
                return group
            changed = msgspec.structs.replace(group, sync_state_set=wanted, version=group.version + 1)
            try:
                revision = await self._membership.agreement.change_group(
                    changed,
                    group_revision=view.group_revision,
                    master_revision=self._revision,
                    timeout_s=self._options.call_timeout_s,
                )
            except Outdated as error:
                self._known.update(error.view)
                if error.view.revision < view.revision:
                    await self._known.refresh()
            except AgreementUnavailable as error:
                self._membership.progress.explain(str(error))
                await trio.sleep(self._options.retry_s)
                await self._known.refresh()
            else:
                self._known.apply(revision, changed)
                return changed

    def _current(self) -> tuple[GroupView, GroupRecord] | None:
        """Returns the newest view and its record; None if it shows that this term is over.

        A restored service may have neither the key nor a record.
        """
        view = self._known.view
        if view is None or view.group is None or view.master_revision != self._revision:
            return None
        return view, view.group

    async def _serve_switch_requests(self) -> None:
        """Hands over, or refuses, whenever an operator requests a switch."""
        latest, call_timeout_s = self._known.latest, self._options.call_timeout_s
        while True:
            view: GroupView = await latest.wait_value(lambda now: is_open(now.switch))
            assert view.switch is not None
            refusal = await self.hand_over(view.switch)
            if not refusal:
                return
            logger.warning("member.switch_refused to=%s reason=%r", view.switch.to, refusal)
            refused = msgspec.structs.replace(view.switch, refusal=refusal, refused_revision=view.switch_revision)
            try:
                await self._membership.agreement.refuse_switch(
                    refused, switch_revision=view.switch_revision, timeout_s=call_timeout_s
                )
            except AgreementUnavailable:
                await trio.sleep(self._options.retry_s)
            with trio.move_on_after(call_timeout_s):
                await latest.wait_value(lambda now: now.switch_revision != view.switch_revision)  # noqa: B023

    async def hand_over(self, request: SwitchRequest, *, leaves: bool = False) -> str:
        """Hands over to another member. Returns "" if that has ended this term, otherwise why it was not possible.

        A failure before the next master has the whole log changes nothing. After that the term is over, even if the
        transaction fails; if its answer is lost, it may be executed later. `leaves`: also removes this member from the
        sync-state set, unless the group acknowledges by count (`acknowledges_by_count`).
        """
        await self._started.wait()
        async with self._change_lock:
            current = self._current()
            if current is None or not self._lease.is_held:
                return NO_LONGER_MASTER
            target = choose_target(current[0], self._options.broker_id, request)
            if isinstance(target, str):
                return target
            self._role.hold_puts()
            try:
                with trio.move_on_after(self._options.switch_timeout_s) as scope:
                    await self._role.wait_replicated_to(target)
                current = self._current()
                if scope.cancelled_caught:
                    return f"member {target} did not have the whole log within {self._options.switch_timeout_s:g} s"
                if current is None:
                    return NO_LONGER_MASTER
                view, group = current
                self._lease.end()
            finally:
                if self._lease.is_held:
                    self._role.release_puts()
            kept = group.sync_state_set
            if leaves and not acknowledges_by_count(group):  # by count, the others may lack acknowledged messages
                kept -= {self._options.broker_id}
            handed = msgspec.structs.replace(group, master_id=target, sync_state_set=kept, version=group.version + 1)
            with trio.CancelScope(shield=True):  # has its own timeout; an interrupted handover would only be slower
                await self._write_handover(view, handed)
        self._end(f"handed over to member {target}: {request.reason or 'requested'}")
        return ""

    async def _write_handover(self, view: GroupView, handed: GroupRecord) -> None:
        try:
            revision = await self._membership.agreement.hand_over(
                handed,
                group_revision=view.group_revision,
                master_revision=self._revision,
                timeout_s=self._options.call_timeout_s,
            )
        except Outdated as error:
            self._known.update(error.view)
        except AgreementUnavailable as error:
            logger.warning("member.handover_unconfirmed reason=%r", str(error))
        else:
            gone = {"master": None, "master_revision": 0, "master_lease_id": 0, "switch": None, "switch_revision": 0}
            self._known.apply(revision, handed, **gone)


def _live_members(view: GroupView) -> dict[int, int]:
    """Returns the run id (0 if unknown) of each member with a lease, by broker id."""
    return {broker_id: member.run_id for broker_id, member in view.members.items()}
