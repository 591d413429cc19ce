"""Keeps one member's lease alive, and its record on it.

A member has one lease: its own record hangs on it, and the master's key while it is master, so that whoever dies loses
both at once. It is renewed every third of its time; one that was lost is replaced by a new one, which brings back the
record, but no mandate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import trio
from trio_util import AsyncValue

from ha.failover.agreement import Agreement, AgreementUnavailable, Lease, LeaseLost, MemberRecord
from ha.failover.lease import LeaseDeadline
from ha.failover.options import MemberOptions

logger = logging.getLogger(__name__)

RENEWALS = 3
"""In the time of one lease."""

FIT_SHARE = 0.3
"""Of its time a lease must have left for a member to become master on it: less is gone before the first renewal."""


class HeldLease(msgspec.Struct, frozen=True):
    """A lease and until when it counts."""

    lease: Lease
    deadline: LeaseDeadline

    @property
    def is_fit(self) -> bool:
        """Whether enough of it is left to begin a term with."""
        return self.deadline.remaining_s >= self.lease.ttl_s * FIT_SHARE


class LeaseKeeper:
    """One member's lease. `run` owns it; `held` tells the present one, None while there is none."""

    def __init__(self, agreement: Agreement, options: MemberOptions, record: Callable[[], MemberRecord]) -> None:
        """`record` is asked what the member says of itself, each time it is written."""
        self._agreement = agreement
        self._options = options
        self._record = record
        self._published: tuple[int, MemberRecord] | None = None
        self._writing = trio.Lock()
        self._is_over = False
        self._wanted = trio.Event()
        self._tried = trio.Event()
        self.held: AsyncValue[HeldLease | None] = AsyncValue(None)
        self.fault = ""
        """Why the last call failed; "" if it did not."""

    async def run(self) -> None:
        """Hold a lease until cancelled, when it ends by itself, or until `revoke`."""
        while not self._is_over:
            self._wanted = trio.Event()
            pause_s = self._options.retry_s
            try:
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
            except AgreementUnavailable as error:
                self._note(str(error))
            else:
                self._note("")
            self._tried.set()
            self._tried = trio.Event()
            with trio.move_on_after(pause_s):
                await self._wanted.wait()

    async def publish(self) -> None:
        """Write the member's record as it is now, unless it stands there. AgreementUnavailable, LeaseLost."""
        async with self._writing:
            held, record = self.held.value, self._record()
            if held is None:
                raise AgreementUnavailable("put_member", "this member has no lease", outcome_unknown=False)
            if self._published == (held.lease.id, record):
                return
            self._published = None
            await self._agreement.put_member(
                self._options.broker_id, record, lease=held.lease, timeout_s=self._options.call_timeout_s
            )
            self._published = (held.lease.id, record)

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

    async def _grant(self) -> HeldLease:
        sent_at = trio.current_time()
        lease = await self._agreement.grant_lease(self._options.lease_ttl_s, timeout_s=self._options.call_timeout_s)
        held = HeldLease(lease, LeaseDeadline(drift=self._options.drift))
        held.deadline.renewed(sent_at, lease.ttl_s)
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
