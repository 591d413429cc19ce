"""How a member becomes master when there is none: it stops appending, publishes the end of its log, and waits its turn.

    at once      if the group's record names this member (the last master, or the one that it handed over to), and this
                 member has every acknowledged byte
    otherwise    it publishes its log's end, reads where the other members' logs end, and waits for the delay that
                 `evaluate` (election.py) returns: the better a candidate, the shorter the delay

A transaction whose answer was lost may or may not have made this member master; the view shows whether it did.
"""

from __future__ import annotations

import logging
import math

import trio

from ha.failover.agreement import AgreementUnavailable, GroupView, LeaseLost, MemberRecord, Outdated
from ha.failover.election import NEW_GROUP, Candidacy, Refusal, appointed_candidacy, evaluate, why_not_create
from ha.failover.lease_keeper import HeldLease, foreign_lease_s
from ha.failover.membership import Membership

logger = logging.getLogger(__name__)


class Campaign:
    """One member's candidacy, while there is no master.

    Call `run` only after `Role.become_slave` without a master, so that the log does not change.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._known = membership.known
        self._keeper = membership.keeper
        self._options = membership.options
        self._vacant_since = trio.current_time()

    async def run(self, view: GroupView) -> None:
        """Tries to become master. Returns once this or another member has become master since `view`, or if this member
        must not become master."""
        membership = self._membership
        membership.stand(_epoch(view) + 1)
        try:
            if not membership.why_not_stand:
                await self._take_at_once(view, membership.record())
            if membership.is_electable:
                await membership.announce()
                while membership.is_electable and await self._step(self._view):
                    pass
        finally:
            membership.stop_standing()

    @property
    def _view(self) -> GroupView:
        view = self._known.view
        assert view is not None
        return view

    async def _take_at_once(self, view: GroupView, own: MemberRecord) -> None:
        """Claims the master's key without an election, if this member may. This saves two round trips to the service in
        a planned switch."""
        membership = self._membership
        candidacy = appointed_candidacy(view, self._options.broker_id, own, self._options)
        if candidacy is None:
            return
        held = await self._keeper.wait_fit()
        if held is None or not membership.is_electable:
            return
        if max(membership.settled_at(view, held), membership.electable_at) <= trio.current_time():
            await self._take(view, candidacy, held)

    async def _step(self, view: GroupView) -> bool:
        """Acts on the present view; returns whether the campaign continues."""
        membership, options = self._membership, self._options
        if view.group is None:
            await self._create_group(view)
            return True
        if view.group.epoch + 1 != membership.record().stands_for:
            return False  # there was another master meanwhile
        # The published record is out of date or missing if the service was restored from an older state, or if this
        # member has learned of a newer group record since.
        if view.members.get(options.broker_id) != membership.record():
            self._keeper.republish()
            await membership.announce()
            return True
        verdict = evaluate(view, options.broker_id, options)
        if isinstance(verdict, Refusal):
            membership.progress.explain(verdict.reason, needs_operator=verdict.needs_operator)
            await self._wait_newer(view)
            return True
        held = await self._keeper.wait_fit()
        if held is None:
            membership.progress.explain("the lease is too short for the response time of the service")
            await trio.sleep(options.retry_s)
            return True
        if self._view.revision != view.revision:
            return True
        if membership.electable_at > trio.current_time():
            membership.progress.explain(membership.disk_trouble)
        earliest = max(self._vacant_since, membership.settled_at(view, held), membership.electable_at)
        if verdict.doubt:
            # The member with the longest log may be restarting, and can't publish while its earlier lease has its key.
            earliest = max(earliest, self._vacant_since + foreign_lease_s(held.lease.ttl_s, *view.members.values()))
        wait_s = earliest + verdict.delay_s - trio.current_time()
        if wait_s > 0:
            await self._wait_newer(view, wait_s)  # the lease may be another one afterwards
        else:
            await self._take(view, verdict, held)
        return True

    async def _wait_newer(self, view: GroupView, timeout_s: float = math.inf) -> None:
        """Waits for a view with another revision than `view`, for at most `timeout_s`."""
        with trio.move_on_after(timeout_s):
            await self._known.latest.wait_value(lambda now: now.revision != view.revision)

    async def _create_group(self, view: GroupView) -> None:
        """Writes the first record of the group; if that is not allowed, waits for a newer view."""
        membership = self._membership
        refusal = why_not_create(view, membership.role.position, self._options)
        if refusal is not None:
            membership.progress.explain(refusal.reason, needs_operator=refusal.needs_operator)
            await self._wait_newer(view)
            return
        try:
            await membership.agreement.create_group(NEW_GROUP, timeout_s=self._options.call_timeout_s)
        except Outdated as error:
            self._known.update(error.view)
        except AgreementUnavailable as error:
            membership.progress.explain(str(error))
            await trio.sleep(self._options.retry_s)
        await self._known.refresh()

    async def _take(self, view: GroupView, candidacy: Candidacy, held: HeldLease) -> None:
        """Tries to become master on the lease `held`; the view shows afterwards whether it worked."""
        membership, options, epoch = self._membership, self._options, candidacy.group.epoch
        if candidacy.is_unclean:
            logger.error("member.elected_unclean epoch=%d hint=%r", epoch, MAY_BE_LOST)
        elif candidacy.doubt:
            logger.warning("member.elected_in_doubt epoch=%d reason=%r hint=%r", epoch, candidacy.doubt, MAY_BE_LOST)
        if epoch == 1:  # such a group has acknowledged nothing that could be missing
            with trio.move_on_after(options.call_timeout_s):  # a full disk must not prevent an election
                await membership.state.mark_complete()
        master = membership.master_record(epoch)
        try:
            revision = await membership.agreement.take_mastership(
                candidacy.group,
                master,
                lease=held.lease,
                group_revision=view.group_revision,
                timeout_s=options.call_timeout_s,
            )
        except Outdated as error:
            self._known.update(error.view)
            if error.view.revision < view.revision:  # the service was rolled back
                await self._known.refresh()
        except LeaseLost as error:
            self._keeper.mark_lost(error.lease)
        except AgreementUnavailable as error:
            membership.progress.explain(str(error))
            if not error.outcome_unknown:  # a refusal may return at once: pause to avoid a busy loop
                await trio.sleep(options.retry_s)
            await self._known.refresh()
        else:
            new = {"master": master, "master_revision": revision, "master_lease_id": held.lease.id}
            self._known.apply(revision, candidacy.group, **new)


MAY_BE_LOST = "acknowledged messages may be lost"


def _epoch(view: GroupView) -> int:
    return 0 if view.group is None else view.group.epoch
