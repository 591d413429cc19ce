"""One member's place in its group: its view of the group, its lease, and the record that it publishes."""

from __future__ import annotations

import math

import trio

from ha.failover.agreement import (
    Agreement,
    AgreementUnavailable,
    BrokerIdTaken,
    GroupView,
    LeaseLost,
    MasterRecord,
    MemberRecord,
)
from ha.failover.durable_state import DurableState
from ha.failover.known_group import KnownGroup
from ha.failover.lease_keeper import HeldLease, LeaseKeeper, foreign_lease_s
from ha.failover.member_state import MemberProgress
from ha.failover.options import MemberOptions
from ha.failover.role import LogPosition, Role


class Membership:
    """State that the tasks of one member share. Owned by its Member."""

    def __init__(self, agreement: Agreement, role: Role, options: MemberOptions, state: DurableState) -> None:
        self.agreement = agreement
        self.role = role
        self.options = options
        self.state = state
        self.known = KnownGroup(agreement, options)
        self.progress = MemberProgress()
        self.keeper = LeaseKeeper(agreement, options, self.record)
        self.is_leaving = False
        """Whether the node is stopping, so that this member must not become master."""
        self.electable_at = -math.inf
        """Time of Trio's clock before which this member does not become master, because of `disk_trouble`. It stands
        for election nevertheless, as others may need to know its log."""
        self.disk_trouble = ""
        """Why the disk did not let this member become master; "" if it never refused."""
        self._standing: tuple[LogPosition, int] | None = None
        """End of the log and epoch of the election while this member stands for election; otherwise None"""

    def record(self) -> MemberRecord:
        """Returns the member's record as it should be published now."""
        options = self.options
        # A growing offset would cause a write to the service at each renewal, and nobody reads it before an election.
        position, stands_for = self._standing or (LogPosition(self.role.position.epoch, 0), 0)
        known_epoch, known_version = self.state.known_age
        return MemberRecord(
            epoch=position.epoch,
            max_offset=position.max_offset,
            ha_address=options.ha_address,
            broker_address=options.broker_address,
            run_id=options.run_id,
            priority=options.priority,
            drains=self.is_leaving,
            stands_for=stands_for,
            is_complete=self.state.is_complete,
            is_new=self.state.is_new,
            known_epoch=known_epoch,
            known_version=known_version,
            lease_ttl_s=options.lease_ttl_s,
        )

    def stand(self, epoch: int) -> None:
        """Makes this member, with its log as it is now, a candidate in the election of `epoch`: `record` contains that
        from now on, and `announce` publishes it."""
        self._standing = self.role.position, epoch

    def stop_standing(self) -> None:
        """Reverses `stand`."""
        self._standing = None

    def master_record(self, epoch: int) -> MasterRecord:
        """Returns the value of the master's key for this member as master of `epoch`."""
        options = self.options
        return MasterRecord(
            broker_id=options.broker_id,
            epoch=epoch,
            ha_address=options.ha_address,
            broker_address=options.broker_address,
            reads_run_ids=True,
        )

    @property
    def why_not_stand(self) -> str:
        """Why this member must not become master; "" if it may."""
        if self.is_leaving:
            return "this member stops"
        return "this member only copies the log (asyncLearner)" if self.options.is_learner else ""

    @property
    def is_electable(self) -> bool:
        """Whether the newest view has no master, and this member may become master."""
        view = self.known.view
        return view is not None and view.master is None and not self.why_not_stand

    async def announce(self) -> None:
        """Publishes the member's record, retrying until that succeeds, then calls `KnownGroup.refresh` once."""
        while True:
            await self.keeper.wait_held()
            try:
                await self.keeper.publish()
                break
            except LeaseLost as error:
                self.keeper.mark_lost(error.lease)
            except (AgreementUnavailable, BrokerIdTaken) as error:
                self.progress.explain(str(error))
                await trio.sleep(self.options.retry_s)
        await self.known.refresh()

    def settled_at(self, view: GroupView, held: HeldLease) -> float:
        """Returns the time of Trio's clock by which all live members can have published what they know of the group.

        Minus infinity if there is nothing to wait for. `held`: the lease on which this member would become master.

        A service that was restored from an older state may have lost the leases of live members, or have an earlier
        lease of a member that has restarted since: its key then shows what the earlier process knew, and the present
        one can't write it. So a member that has just started or was cut off waits as long as a foreign lease can hold a
        key. The wait is not needed if the group's record has changed since this member first published its own on
        this lease: the master that changed it knew the newest record.
        """
        since = max(held.since, self.known.rolled_back_at)
        has_changed = since == held.since and view.group_revision > self.keeper.first_revision > 0
        if has_changed or view.group is None or not view.group.epoch:
            return -math.inf
        return since + foreign_lease_s(held.lease.ttl_s, *view.members.values())
