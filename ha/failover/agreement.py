"""What a group's members agree on, and what they may ask of the service that keeps it.

Five kinds of keys below one prefix, `/halog/{cluster}/{brokerName}/`:

    group          GroupRecord    for good: term, master, sync-state set
    master         MasterRecord   on the master's lease; no such key: there is no master
    members/{id}   MemberRecord   on the lease of each member that lives; of two processes with one id, of one alone
    switch         SwitchRequest  what an operator wants, or why he was refused

Contract, for every implementation:

* Linearizable. `view` shows all that any call had done that returned before it began, and each change happens at one
  moment, whole or not at all. Each change has a `revision`, higher than that of every change before it.
* A lease, and what hangs on it, lives for at least the time granted, counted from the moment at which its grant or its
  last renewal was carried out: so for at least as long as counted from before that was sent. How much longer is the
  service's business (etcd: up to some seconds, and a whole time more when its leader changes).
* Every call ends within its `timeout_s`, by AgreementUnavailable if need be. A call that changes something may then
  have been carried out, or may still be, unless `outcome_unknown` is false. Each of them says in which state of the
  group it may be carried out; once that is past, it has no effect. Who has to know looks at the view, and then makes
  the change again, or another: at most one of them is carried out.
* Cancelling a call is the same as its timing out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from ha.errors import AgreementError

TIMEOUT_S = 2.0
"""How long a call takes at most, unless it is told otherwise."""


RecordAge = tuple[int, int]
"""Epoch and version of a GroupRecord."""


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What has to survive every member. Written only by the master, or by the election of one."""

    epoch: int
    """Term of the present or last master; 0 before the first."""
    master_id: int | None
    """Broker id of that master, or of the member that is to be the next one."""
    sync_state_set: frozenset[int]
    """Broker ids of the members that have every acknowledged byte."""
    ack_count: int | None = None
    """How many of the set acknowledge each message, its master included; None: all of them."""
    version: int = 0
    """Higher with each change of the record within a term. 0 in records of releases without this."""

    @property
    def age(self) -> RecordAge:
        """Higher with each change, whoever made it: what shows that the service has gone back."""
        return self.epoch, self.version


class MasterRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The master, and where to find it."""

    broker_id: int
    epoch: int
    """Its term: that of the group's record."""
    ha_address: str
    """host:port for slaves."""
    broker_address: str
    """host:port for clients."""
    reads_run_ids: bool = False
    """Whether slaves may tell it their run ids in the handshake of replication."""


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A member that lives, and how much of the log it had when it wrote this."""

    epoch: int
    """Last term in its log; 0 for an empty log."""
    max_offset: int
    """Physical offset of its log's end (bytes)."""
    ha_address: str
    broker_address: str
    priority: int = 0
    """Among equally good candidates the lower goes first (brokerElectionPriority)."""
    drains: bool = False
    """Does not want to be master."""
    run_id: int = 0
    """Tells this run of its process from others with the same broker id; 0: not told."""
    stands_for: int = 0
    """The epoch whose election it stands in, 0 for none: it has stopped following anybody of a lower one, so its log
    ends at `max_offset` and will not grow before somebody is elected."""
    is_complete: bool = True
    """Its log still has every byte that it acknowledged. False after a stop that may have lost what the kernel had not
    written yet, until it has caught up with a master (durable_state.py). Members of releases without this say True."""
    is_new: bool = False
    """There has never been a log on its disk."""
    known_epoch: int = 0
    known_version: int = 0
    """Of the newest GroupRecord that it has on its disk."""

    @property
    def known_age(self) -> RecordAge:
        """Of that record."""
        return self.known_epoch, self.known_version


class SwitchRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An operator's wish for another master."""

    to: int | None
    """Broker id of the member that is to be master; None: any but the present one."""
    reason: str = ""
    epoch: int | None = None
    """Of the term that is to end: no later one is ended by it. None: whichever there is."""
    refusal: str = ""
    """Why the master will not. This is then the answer to a request, and asks for nothing."""
    refused_revision: int = 0
    """With a refusal: the revision of the request that it answers."""


class Lease(msgspec.Struct, frozen=True):
    """A lease as it was granted."""

    id: int
    ttl_s: float
    """What the service granted, which may be more than was asked for."""


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """All keys of the group at one moment. A revision is 0 where there is no key."""

    revision: int
    """Of the service when it looked: no change up to it is missing here."""
    group: GroupRecord | None = None
    group_revision: int = 0
    """Of the last change of `group`: what a change of it has to name."""
    master: MasterRecord | None = None
    master_revision: int = 0
    """At which this master took the key. Whoever takes it afterwards has a higher one."""
    master_lease_id: int = 0
    """The lease that the key hangs on: tells its owner after an answer was lost that it has become master."""
    members: Mapping[int, MemberRecord] = {}
    """By broker id; only those whose lease lives."""
    member_lease_ids: Mapping[int, int] = {}
    """By broker id: the lease that each member's key hangs on, which tells two processes with one id apart."""
    switch: SwitchRequest | None = None
    switch_revision: int = 0


class Seen(msgspec.Struct, frozen=True):
    """What a watch tells."""

    view: GroupView
    """After a change, or at the start; `revision` is higher with each, but for a restart."""
    is_restart: bool
    """Changes between the view before and this one, if any, were not told: always so with the first."""


class AgreementUnavailable(AgreementError):
    """No answer in time, or none that could be used: the service, its quorum or the way to it is not there."""

    def __init__(self, what: str, reason: str, *, outcome_unknown: bool) -> None:
        doubt = "; it may have been carried out, or may still be" if outcome_unknown else ""
        super().__init__(f"{what}: {reason}{doubt}")
        self.what = what
        self.reason = reason
        self.outcome_unknown = outcome_unknown
        """Whether a change may have happened, or happen yet. Always false for what changes nothing."""


class Outdated(AgreementError):
    """What the change was made for is not so any more; nothing was changed. `view` is what was there at that moment."""

    def __init__(self, what: str, view: GroupView) -> None:
        super().__init__(f"{what}: the group has changed, it is at revision {view.revision} now")
        self.what = what
        self.view = view


class LeaseLost(AgreementError):
    """The lease has ended, and with it every key that hung on it. Nothing was changed."""

    def __init__(self, what: str, lease: Lease) -> None:
        super().__init__(f"{what}: lease {lease.id:x} has ended")
        self.what = what
        self.lease = lease


class BrokerIdTaken(AgreementError):
    """The member's key hangs on another lease, which lives: another process has this broker id. Nothing was changed."""

    def __init__(self, what: str, broker_id: int, holder: MemberRecord, lease_id: int) -> None:
        super().__init__(
            f"{what}: the lease {lease_id:x} of the process at {holder.broker_address} (HA address "
            f"{holder.ha_address}) holds broker id {broker_id}: an earlier run of this member, or another process"
        )
        self.what = what
        self.broker_id = broker_id
        self.holder = holder
        self.lease_id = lease_id


class Watch(Protocol):
    """One group's changes, in order, for one task. Ends only by being cancelled."""

    def __aiter__(self) -> Watch:
        """Return itself."""

    async def __anext__(self) -> Seen:
        """Wait for the next change, or the first view. A cancelled wait loses nothing.

        Raises nothing else: while the service can't be reached it waits, tries again, and goes on where it was, or with
        a whole view (`is_restart`) if what was missed is not to be had any more.
        """


class Agreement(Protocol):
    """One group's keys. All calls: AgreementUnavailable. `timeout_s`: seconds of the trio clock for the whole call."""

    async def view(self, *, timeout_s: float = TIMEOUT_S) -> GroupView:
        """Return what there is now. Linearizable: never what an outvoted server remembers."""

    def watch(self) -> AbstractAsyncContextManager[Watch]:
        """Watch the group: the first view at once, then one after each change that is made from then on."""

    async def create_group(self, group: GroupRecord, *, timeout_s: float = TIMEOUT_S) -> int:
        """Write the first record of the group and return its revision. Outdated if there is one.

        May be carried out late: while there is no record.
        """

    async def change_group(
        self, group: GroupRecord, *, group_revision: int, master_revision: int, timeout_s: float = TIMEOUT_S
    ) -> int:
        """As the master, put `group` in the place of the record with `group_revision`; return the new one's revision.

        Outdated unless that record is still there and the master's key is the one taken at `master_revision`. May be
        carried out late: while both are so. Any other change of the record, one of the same content too, prevents it.
        """

    async def take_mastership(
        self,
        group: GroupRecord,
        master: MasterRecord,
        *,
        lease: Lease,
        group_revision: int,
        timeout_s: float = TIMEOUT_S,
    ) -> int:
        """Become master: in one, put `group` in the place of the record with `group_revision`, and take the key.

        Returns the revision of this change, which is both the record's and the key's. Outdated if the record has
        changed or there is a master; LeaseLost. May be carried out late: while there is no master, the record is still
        that one, and the lease lives.
        """

    async def hand_over(
        self, group: GroupRecord, *, group_revision: int, master_revision: int, timeout_s: float = TIMEOUT_S
    ) -> int:
        """As the master, stop being it: in one, `change_group`, remove the key, and remove any switch request.

        Returns the revision of this change. Outdated and lateness as for `change_group`.
        """

    async def resign(self, *, master_revision: int, timeout_s: float = TIMEOUT_S) -> None:
        """Remove the master's key if it is the one taken at `master_revision`; also well if it is gone already.

        May be carried out late: while that key is there.
        """

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = TIMEOUT_S) -> Lease:
        """Get a lease of at least `ttl_s`. If that fails, one may remain that nobody knows and that ends by itself."""

    async def renew(self, lease: Lease, *, timeout_s: float = TIMEOUT_S) -> float:
        """Have the lease begin anew; return the seconds that it was granted, counted from no earlier than this call.

        LeaseLost. The caller notes the time before it calls and counts from there.
        """

    async def revoke(self, lease: Lease, *, timeout_s: float = TIMEOUT_S) -> None:
        """End the lease, and with it its keys; also well if it has ended already."""

    async def put_member(
        self, broker_id: int, member: MemberRecord, *, lease: Lease, timeout_s: float = TIMEOUT_S
    ) -> int:
        """Write what `broker_id` says of itself; return its revision. LeaseLost; BrokerIdTaken.

        The key is written only if it is absent or hangs on `lease`: it is never taken over from another lease. A lease
        that has ended may be reported by either error.

        Once this has returned, no earlier `put_member` of the same node can be carried out any more, however it ended.
        """

    async def request_switch(self, request: SwitchRequest, *, timeout_s: float = TIMEOUT_S) -> int:
        """Ask for another master, in the place of whatever was asked before; return the revision.

        May be carried out late, whatever is there then; but once it has returned, it was carried out once for all.
        """

    async def refuse_switch(
        self, refused: SwitchRequest, *, switch_revision: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Put `refused` in the place of the request with this revision; also well if that is gone already.

        May be carried out late: while that request is there.
        """
