"""Keeps a member's lease alive and the member's record attached to it; detects another process with the same broker id.

A member has one lease. The member's record is attached to this lease and, while the member is master, so is the
master's key: a member that dies loses both at once. The lease is renewed three times in its granted time. If it is
lost, the record is written again on a new lease, but the member is no longer master.

The lease of the record's key shows which process has the broker id. A member whose key is attached to another lease has
no role: it follows no master and does not stand for election. The other lease may belong to an earlier process of this
member; then it will expire. If it belongs to another process that is running, this process ends:

    not owned ──the record is written──▶ owned ──the key is on another lease──▶ not owned
        └──the other lease has not ended after FOREIGN_LEASE_PERIODS──▶ ConfigError

A member that loses its key revokes its own lease, which also deletes the master's key if that is attached to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import trio
from trio_util import AsyncValue

from ha.errors import ConfigError
from ha.failover.agreement import (
    Agreement,
    AgreementUnavailable,
    BrokerIdTaken,
    GroupView,
    Lease,
    LeaseLost,
    MemberRecord,
)
from ha.failover.lease import LeaseDeadline
from ha.failover.options import MemberOptions

logger = logging.getLogger(__name__)

RENEWALS = 3
"""Number of renewals in the time of one lease."""

FOREIGN_LEASE_PERIODS = 2
"""Number of lease times that a member waits for another lease to release its key: a lease that isn't renewed ends
within one, or within two if the service's leader changes meanwhile."""


FIT_SHARE = 0.3
"""Share (0 to 1) of a lease's time that must remain to become master on it, so that the first renewal is in time."""


def foreign_lease_s(own_s: float, *holders: MemberRecord) -> float:
    """Returns how long another lease can keep a key: `own_s` is the time of this member's lease, `holders` are records
    that may be attached to others. leaseTtl may have been changed since they were granted."""
    return FOREIGN_LEASE_PERIODS * max([own_s, *(holder.lease_ttl_s for holder in holders)])


class HeldLease(msgspec.Struct, frozen=True):
    """A lease and its deadline."""

    lease: Lease
    deadline: LeaseDeadline
    since: float
    """Time (Trio's clock) from which the lease is known to have existed without a break: that of the answer to its
    grant, or to the first renewal after its deadline. A lease that was renewed so late may have ended, and exist again
    because the service was restored."""

    @property
    def is_fit(self) -> bool:
        """Whether enough of the lease's time is left to start a term as master (FIT_SHARE)."""
        return self.deadline.remaining_s >= self.lease.ttl_s * FIT_SHARE


class BrokerIdState(msgspec.Struct, frozen=True, kw_only=True):
    """Owner of a member's broker id, as far as known."""

    is_owned: bool = False
    """Whether the member's key was written on this process's lease and has not been found on another one since."""
    taken: BrokerIdTaken | None = None
    """Error that names the other lease to which the key is attached; None if there is none, or it is not known yet."""


class LeaseKeeper:
    """One member's lease. `run` is its task; `held` is the present lease, None while there is none."""

    def __init__(self, agreement: Agreement, options: MemberOptions, record: Callable[[], MemberRecord]) -> None:
        """`record` returns the member's record as it should be published now; called by each `publish`."""
        self._agreement = agreement
        self._options = options
        self._record = record
        self._published: tuple[int, MemberRecord] | None = None
        self._published_revision = 0
        """Revision of the record's last write on the present lease; 0 before the first"""
        self.first_revision = 0
        """Revision of the record's first write since `HeldLease.since`; 0 before it."""
        self._taken_since: float | None = None
        self._revoking: Lease | None = None
        """A lease that is no longer used and has not ended yet"""
        self._write_lock = trio.Lock()
        self._is_revoked = False
        self._wake = trio.Event()
        self._tried = trio.Event()
        self.held: AsyncValue[HeldLease | None] = AsyncValue(None)
        self.last_error = ""
        """Why the last grant, renewal or publication in `run` failed; "" if it succeeded."""
        self.broker_id: AsyncValue[BrokerIdState] = AsyncValue(BrokerIdState())

    async def run(self) -> None:
        """Holds a lease and keeps the member's record on it. Ends after `revoke`; if cancelled, the lease expires.

        Raises ConfigError if another process has this member's broker id.
        """
        while not self._is_revoked:
            self._wake = trio.Event()
            pause_s = self._options.retry_s
            try:
                await self._revoke_unused()
                held = self.held.value
                if held is None:
                    held = await self._grant()
                    if self._is_revoked:
                        return  # without a key on it, the lease may expire
                    self._hold(held)
                else:
                    await self._renew(held)
                await self.publish()
                pause_s = held.lease.ttl_s / RENEWALS
            except LeaseLost as error:
                self.mark_lost(error.lease)
                self._log_change(str(error))
            except BrokerIdTaken as error:
                self._log_change(str(error))
                pause_s = self._foreign_lease_pause_s(error)
            except AgreementUnavailable as error:
                self._taken_since = None  # no lease ends while the service is not available
                self._log_change(str(error))
            else:
                self._log_change("")
            self._tried.set()
            self._tried = trio.Event()
            with trio.move_on_after(pause_s):
                await self._wake.wait()

    async def publish(self) -> None:
        """Writes the member's record as it is now, unless that was written already.

        Raises AgreementUnavailable if the service does not answer or the member has no lease; LeaseLost if the lease
        has ended; BrokerIdTaken if the key is attached to another lease, after which this member has no role.
        """
        async with self._write_lock:
            held, record = self.held.value, self._record()
            if held is None:
                raise AgreementUnavailable("put_member", "this member has no lease", outcome_unknown=False)
            if self._published == (held.lease.id, record):
                return
            self._published = None
            try:
                self._published_revision = await self._agreement.put_member(
                    self._options.broker_id, record, lease=held.lease, timeout_s=self._options.call_timeout_s
                )
            except BrokerIdTaken as error:
                self._lose_broker_id(error)
                raise
            self._published = (held.lease.id, record)
            self.first_revision = self.first_revision or self._published_revision
            self._taken_since = None
            self.broker_id.value = BrokerIdState(is_owned=True)

    def check_view(self, view: GroupView) -> None:
        """Makes `run` write the record again if its key in `view` is missing, or attached to an unknown lease.

        Ignores views that are older than the record's last write.
        """
        held, taken = self.held.value, self.broker_id.value.taken
        if held is None or view.revision < self._published_revision or not (self._published_revision or taken):
            return
        lease_id = view.member_lease_ids.get(self._options.broker_id, 0)
        if lease_id != held.lease.id and (taken is None or lease_id != taken.lease_id):
            # It is missing, or on an unknown lease: writing it again shows which.
            self._published = None
            self._wake.set()

    def republish(self) -> None:
        """Makes `run` write the record although it was written on this lease: the service may have lost it."""
        self._published = None
        self._published_revision = 0
        self._wake.set()

    async def wait_held(self) -> HeldLease:
        """Waits for a lease and returns it."""
        held: HeldLease = await self.held.wait_value(lambda now: now is not None)
        return held

    async def wait_fit(self) -> HeldLease | None:
        """Waits for a lease, and returns it if enough of its time is left to start a term, if necessary after one
        renewal. Returns None if too little is left even then.
        """
        held = await self.wait_held()
        if not held.is_fit:
            self._wake.set()
            await self._tried.wait()
            held = await self.wait_held()
        return held if held.is_fit else None

    def mark_lost(self, lease: Lease) -> None:
        """Stops using `lease`, if it is the present one: it has ended, or will be revoked."""
        held = self.held.value
        if held is not None and held.lease.id == lease.id:
            held.deadline.end()
            self.held.value = None

    async def revoke(self) -> None:
        """Ends the lease, and with it `run`. Raises AgreementUnavailable if the service does not answer; the lease then
        expires, as does one that `run` is getting now, which it does not use."""
        self._is_revoked = True
        held = self.held.value
        if held is not None:
            self.mark_lost(held.lease)
            await self._agreement.revoke(held.lease, timeout_s=self._options.call_timeout_s)

    def _lose_broker_id(self, taken: BrokerIdTaken) -> None:
        """Records that the key is attached to another lease: this member has no role until that lease has ended."""
        known = self.broker_id.value
        if known.is_owned:
            logger.error("member.id_lost reason=%r hint=%r", str(taken), "this member stops serving")
            held = self.held.value
            if held is not None:
                self._revoking = held.lease
                self.mark_lost(held.lease)
        elif known.taken is None or known.taken.lease_id != taken.lease_id:
            logger.warning("member.id_taken reason=%r hint=%r", str(taken), "waiting for that lease to end")
        self.broker_id.value = BrokerIdState(taken=taken)

    async def _revoke_unused(self) -> None:
        """Ends the lease that this member held when another process took its broker id.

        The master's key may still be attached to that lease, and would otherwise stay until the lease expires."""
        if self._revoking is not None:
            await self._agreement.revoke(self._revoking, timeout_s=self._options.call_timeout_s)
            self._revoking = None

    def _foreign_lease_pause_s(self, taken: BrokerIdTaken) -> float:
        """Returns the pause before the next try to write the key. Raises ConfigError after `foreign_lease_s`."""
        held = self.held.value
        lease_s = self._options.lease_ttl_s if held is None else held.lease.ttl_s
        now = trio.current_time()
        if self._taken_since is None:
            self._taken_since = now
        holder, wait_s = taken.holder, foreign_lease_s(lease_s, taken.holder)
        left_s = self._taken_since + wait_s - now
        if left_s <= 0:
            raise ConfigError(
                "brokerId",
                f"{taken.broker_id} belongs to another process, which runs at {holder.broker_address} "
                f"(HA address {holder.ha_address}) and has kept its lease in etcd for "
                f"{wait_s:g} s",
                "an id that no other broker of the group has; if both are meant to be one, stop the other",
            )
        return min(left_s, self._options.retry_s if held is None else lease_s / RENEWALS)

    async def _grant(self) -> HeldLease:
        sent_at = trio.current_time()
        lease = await self._agreement.grant_lease(self._options.lease_ttl_s, timeout_s=self._options.call_timeout_s)
        held = HeldLease(lease, LeaseDeadline(drift=self._options.drift), trio.current_time())
        held.deadline.renewed(sent_at, lease.ttl_s)
        return held

    async def _renew(self, held: HeldLease) -> None:
        sent_at = trio.current_time()
        timeout_s = min(self._options.call_timeout_s, held.lease.ttl_s / RENEWALS)
        granted_s = await self._agreement.renew(held.lease, timeout_s=timeout_s)
        if held.deadline.remaining_s <= 0 and self.held.value is held:
            self._hold(msgspec.structs.replace(held, since=trio.current_time()))
        held.deadline.renewed(sent_at, granted_s)

    def _hold(self, held: HeldLease) -> None:
        """Uses a lease from now on; the next `publish` writes the record in any case."""
        self._published = None
        self._published_revision = self.first_revision = 0
        self.held.value = held

    def _log_change(self, error: str) -> None:
        if bool(error) != bool(self.last_error):
            if error:
                logger.warning("member.lease_not_renewed reason=%r", error)
            else:
                logger.info("member.lease_renewed")
        self.last_error = error
