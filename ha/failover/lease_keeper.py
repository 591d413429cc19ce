"""Keeps one member's lease alive, and its record on it; finds out whether its broker id is its own.

A member has one lease: its own record hangs on it, and the master's key while it is master, so that whoever dies loses
both at once. It is renewed every third of its time; one that was lost is replaced by a new one, which brings back the
record, but no mandate.

The record's key tells whose the broker id is. A member whose key hangs on another lease plays no role: that lease is
its own earlier life's, which ends by itself, or that of another process, in which case this one ends:

    not owned ──the record is written──▶ owned ──another lease has the key──▶ not owned
        └──the other lease has not ended within WAIT_LEASES lease times──▶ ConfigError

A lease of a member that loses its key is given back, and with it the master's key if that hung on it.
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
"""In the time of one lease."""

WAIT_LEASES = 2
"""Lease times that a member waits for another lease to release its key: one that ends does so within one of them, or
two if the service's leader changes meanwhile."""

FIT_SHARE = 0.3
"""Of its time a lease must have left for a member to become master on it: less is gone before the first renewal."""


class HeldLease(msgspec.Struct, frozen=True):
    """A lease and until when it counts."""

    lease: Lease
    deadline: LeaseDeadline
    granted_at: float
    """When the answer came, by the trio clock: no earlier than the service granted it."""

    @property
    def is_fit(self) -> bool:
        """Whether enough of it is left to begin a term with."""
        return self.deadline.remaining_s >= self.lease.ttl_s * FIT_SHARE


class BrokerIdState(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a member's broker id is, as far as it knows."""

    is_owned: bool = False
    """Its key was written on its lease, and has not been found on another one since."""
    taken: BrokerIdTaken | None = None
    """Who has the key instead; None also where that is not known yet."""


class LeaseKeeper:
    """One member's lease. `run` owns it; `held` tells the present one, None while there is none."""

    def __init__(self, agreement: Agreement, options: MemberOptions, record: Callable[[], MemberRecord]) -> None:
        """`record` is asked what the member says of itself, each time it is written."""
        self._agreement = agreement
        self._options = options
        self._record = record
        self._published: tuple[int, MemberRecord] | None = None
        self._published_revision = 0
        """Of the record's last write on the present lease; 0 before the first"""
        self._taken_since: float | None = None
        self._revoking: Lease | None = None
        """A lease that is not used any more, and has not ended yet"""
        self._writing = trio.Lock()
        self._is_over = False
        self._wanted = trio.Event()
        self._tried = trio.Event()
        self.held: AsyncValue[HeldLease | None] = AsyncValue(None)
        self.fault = ""
        """Why the last call failed; "" if it did not."""
        self.broker_id: AsyncValue[BrokerIdState] = AsyncValue(BrokerIdState())

    async def run(self) -> None:
        """Hold a lease until cancelled, when it ends by itself, or until `revoke`.

        ConfigError if another process has this member's broker id.
        """
        while not self._is_over:
            self._wanted = trio.Event()
            pause_s = self._options.retry_s
            try:
                await self._give_back()
                held = self.held.value
                if held is None:
                    held = await self._grant()
                else:
                    await self._renew(held)
                await self.publish()
                pause_s = held.lease.ttl_s / RENEWALS
            except LeaseLost as error:
                self.lose(error.lease)
                self._note(str(error))
            except BrokerIdTaken as error:
                self._note(str(error))
                pause_s = self._patience_s(error)
            except AgreementUnavailable as error:
                self._taken_since = None  # while the service is away no lease ends
                self._note(str(error))
            else:
                self._note("")
            self._tried.set()
            self._tried = trio.Event()
            with trio.move_on_after(pause_s):
                await self._wanted.wait()

    async def publish(self) -> None:
        """Write the member's record as it is now, unless it stands there.

        AgreementUnavailable, LeaseLost; BrokerIdTaken, after which this member plays no role.
        """
        async with self._writing:
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
                self._disown(error)
                raise
            self._published = (held.lease.id, record)
            self._taken_since = None
            self.broker_id.value = BrokerIdState(is_owned=True)

    def saw(self, view: GroupView) -> None:
        """The group is so now: see whether the member's key is still what was written."""
        held, taken = self.held.value, self.broker_id.value.taken
        if held is None or view.revision < self._published_revision or not (self._published_revision or taken):
            return
        lease_id = view.member_lease_ids.get(self._options.broker_id, 0)
        if lease_id != held.lease.id and (taken is None or lease_id != taken.lease_id):
            # It is gone, or another lease's than was known: writing it again tells which.
            self._published = None
            self._wanted.set()

    def publish_again(self) -> None:
        """Write the record soon even if it was written on this lease: the service may have lost it."""
        self._published = None
        self._published_revision = 0
        self._wanted.set()

    async def try_soon(self) -> None:
        """Have the lease renewed now rather than when it is due; return when that has been tried."""
        self._wanted.set()
        await self._tried.wait()

    async def wait_held(self) -> HeldLease:
        """Wait for a lease and return it."""
        held: HeldLease = await self.held.wait_value(lambda now: now is not None)
        return held

    def lose(self, lease: Lease) -> None:
        """That lease has ended, the service says."""
        held = self.held.value
        if held is not None and held.lease.id == lease.id:
            held.deadline.end()
            self.held.value = None

    async def revoke(self) -> None:
        """Give the lease back. AgreementUnavailable: it then ends by itself."""
        self._is_over = True
        held = self.held.value
        if held is not None:
            self.lose(held.lease)
            await self._agreement.revoke(held.lease, timeout_s=self._options.call_timeout_s)

    def _disown(self, taken: BrokerIdTaken) -> None:
        """The key is on another lease."""
        known = self.broker_id.value
        if known.is_owned:
            logger.error("member_id_lost reason=%r: this member stops serving", str(taken))
            held = self.held.value
            if held is not None:
                self._revoking = held.lease
                self.lose(held.lease)
        elif known.taken is None or known.taken.lease_id != taken.lease_id:
            logger.warning("member_id_taken reason=%r: waiting for that lease to end", str(taken))
        self.broker_id.value = BrokerIdState(taken=taken)

    async def _give_back(self) -> None:
        """End the lease of a member that lost its key, as the master's key may still hang on it."""
        if self._revoking is not None:
            await self._agreement.revoke(self._revoking, timeout_s=self._options.call_timeout_s)
            self._revoking = None

    def _patience_s(self, taken: BrokerIdTaken) -> float:
        """Return for how long to wait until the key is tried again. ConfigError if there is nothing to wait for."""
        held = self.held.value
        lease_s = self._options.lease_ttl_s if held is None else held.lease.ttl_s
        now = trio.current_time()
        if self._taken_since is None:
            self._taken_since = now
        left_s = self._taken_since + WAIT_LEASES * lease_s - now
        if left_s <= 0:
            holder = taken.holder
            raise ConfigError(
                "brokerId",
                f"{taken.broker_id} belongs to another process, which runs at {holder.broker_address} "
                f"(HA address {holder.ha_address}) and has kept its lease in etcd for {WAIT_LEASES * lease_s:g} s",
                "an id that no other broker of the group has; if both are meant to be one, stop the other",
            )
        return min(left_s, self._options.retry_s if held is None else lease_s / RENEWALS)

    async def _grant(self) -> HeldLease:
        sent_at = trio.current_time()
        lease = await self._agreement.grant_lease(self._options.lease_ttl_s, timeout_s=self._options.call_timeout_s)
        held = HeldLease(lease, LeaseDeadline(drift=self._options.drift), trio.current_time())
        held.deadline.renewed(sent_at, lease.ttl_s)
        self._published_revision = 0
        self.held.value = held
        return held

    async def _renew(self, held: HeldLease) -> None:
        sent_at = trio.current_time()
        timeout_s = min(self._options.call_timeout_s, held.lease.ttl_s / RENEWALS)
        held.deadline.renewed(sent_at, await self._agreement.renew(held.lease, timeout_s=timeout_s))

    def _note(self, fault: str) -> None:
        if bool(fault) != bool(self.fault):
            if fault:
                logger.warning("member_lease_in_doubt reason=%r", fault)
            else:
                logger.info("member_lease_held")
        self.fault = fault
