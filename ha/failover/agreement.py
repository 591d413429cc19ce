"""The state that the members of a group agree on, and the interface of the service that keeps it.

Four kinds of keys below one prefix, `/halog/{cluster}/{brokerName}/`:

    group          GroupRecord    permanent: term, master, sync-state set
    master         MasterRecord   attached to the master's lease; without this key there is no master
    members/{id}   MemberRecord   attached to that member's lease; of two processes with the same id, only one owns it
    switch         SwitchRequest  an operator's request, or the reason why it was refused

Contract for every implementation:

* Linearizable. `view` shows the effect of every call that returned before it started. Each change is atomic, and has a
  `revision` higher than that of every change before it.
* A lease and the keys attached to it live for at least the granted time, counted from the moment at which the service
  executes the grant or the last renewal, not from the sending of the request. They may live longer (etcd: by some
  seconds, and by another whole period if its leader changes).
* Every call ends within its `timeout_s`, with AgreementUnavailable if it got no answer. A call that changes something
  may then have been executed, or may still be, unless `outcome_unknown` is false. Each method says in which state of
  the group it may be executed late; in any other state it has no effect. To find out whether it was executed, read the
  view. Then repeat the change or make another: of all changes with the same `group_revision` at most one is executed.
* Cancelling a call has the same effect as its timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from ha.errors import AgreementError

TIMEOUT_S = 2.0
"""Default timeout of a call, in seconds."""


RecordAge = tuple[int, int]
"""Epoch and version of a GroupRecord."""


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The group's permanent state, kept even if no member is alive. Written only by the master, or by an election."""

    epoch: int
    """Term of the present or last master; 0 before the first."""
    master_id: int | None
    """Broker id of the present or last master, or of the member to which it handed over; None before the first."""
    sync_state_set: frozenset[int]
    """Broker ids of the members whose acknowledgements sends wait for. If `ack_count` is None, each of them has
    acknowledged every byte that was acknowledged to clients."""
    ack_count: int | None = None
    """Number of members of the sync-state set that acknowledge each message, the master included; None: all of them."""
    version: int = 0
    """Version of the record within its term, which grows with each change; 0 in records of earlier releases."""

    @property
    def age(self) -> RecordAge:
        """Epoch and version. This pair grows with each change of the record, so a lower one shows that the service was
        rolled back."""
        return self.epoch, self.version


class MasterRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The master and its addresses."""

    broker_id: int
    epoch: int
    """The master's term, as in the group's record."""
    ha_address: str
    """Address (host:port) to which slaves connect for replication."""
    broker_address: str
    """Address (host:port) to which clients connect."""
    reads_run_ids: bool = False
    """Whether slaves may send it their run ids in the replication handshake."""


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Record of a member, which exists while the member's lease does. In an election it also contains the end of the
    member's log."""

    epoch: int
    """Last term in its log; 0 for an empty log."""
    max_offset: int
    """Physical offset of its log's end (bytes) while it stands for election, otherwise 0."""
    ha_address: str
    broker_address: str
    priority: int = 0
    """Among candidates with equal logs, the one with the lowest priority is elected (brokerElectionPriority)."""
    drains: bool = False
    """Whether the member's node is stopping, so that another member should become master."""
    run_id: int = 0
    """Distinguishes this process from others with the same broker id; 0: unknown."""
    stands_for: int = 0
    """Epoch of the election in which the member stands, 0 for none. Such a member no longer follows a master of a lower
    epoch, so its log ends at `max_offset` and will not grow before a master is elected."""
    is_complete: bool = True
    """Whether the log is known to have every byte that the member acknowledged. False for example after a stop that may
    have lost unwritten pages, until the member has caught up with a master (durable_state.py). True in records of
    earlier releases."""
    is_new: bool = False
    """Whether the member started without a log on its disk, and its log has never been complete since."""
    known_epoch: int = 0
    known_version: int = 0
    """Version of the newest GroupRecord on its disk; `known_epoch` is the epoch of that record."""
    lease_ttl_s: float = 0.0
    """Requested time of its lease; 0 in records of earlier releases."""

    @property
    def known_age(self) -> RecordAge:
        """Epoch and version of the newest GroupRecord on the member's disk; (0, 0) if it has none."""
        return self.known_epoch, self.known_version


class SwitchRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An operator's request for another master, or its refusal."""

    to: int | None
    """Broker id of the next master; None: any member except the current master."""
    reason: str = ""
    epoch: int | None = None
    """The term to end; the request has no effect on later ones. None: the current term."""
    refusal: str = ""
    """Why the master refused the request; "" in a request that is not answered yet."""
    refused_revision: int = 0
    """With a refusal: the revision of the request that it answers."""


class Lease(msgspec.Struct, frozen=True):
    """A granted lease."""

    id: int
    ttl_s: float
    """Granted time in seconds, which may be longer than requested."""


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """All keys of the group at one moment. The revision of a missing key is 0."""

    revision: int
    """The service's revision: all changes up to it are included."""
    group: GroupRecord | None = None
    group_revision: int = 0
    """Revision of the last change of `group`; the next change has to name it."""
    master: MasterRecord | None = None
    master_revision: int = 0
    """Revision at which the present master created its key; each later master has a higher one."""
    master_lease_id: int = 0
    """Id of the lease to which the master's key is attached. It shows a member that it became master even if the answer
    was lost."""
    members: Mapping[int, MemberRecord] = {}
    """Members whose lease is alive, by broker id."""
    member_lease_ids: Mapping[int, int] = {}
    """Id of the lease to which each member's key is attached, by broker id. It distinguishes two processes with one
    broker id."""
    switch: SwitchRequest | None = None
    switch_revision: int = 0


class Seen(msgspec.Struct, frozen=True):
    """One item of a watch: a view of the group."""

    view: GroupView
    """The state after a change, or at the start; its `revision` grows, except at a restart."""
    is_restart: bool
    """Whether changes since the previous view may have been skipped; True for the first view."""


class AgreementUnavailable(AgreementError):
    """No usable answer in time: the service, its quorum or the network is not available."""

    def __init__(self, what: str, reason: str, *, outcome_unknown: bool) -> None:
        doubt = "; it may have been executed, or may still be" if outcome_unknown else ""
        super().__init__(f"{what}: {reason}{doubt}")
        self.what = what
        self.reason = reason
        self.outcome_unknown = outcome_unknown
        """Whether a change may have been executed, or may still be. False for calls that change nothing."""


class Outdated(AgreementError):
    """The change's precondition no longer holds; nothing was changed. `view`: the group at that moment."""

    def __init__(self, what: str, view: GroupView) -> None:
        super().__init__(f"{what}: the group has changed, it is at revision {view.revision} now")
        self.what = what
        self.view = view


class LeaseLost(AgreementError):
    """The lease has ended, and with it every key that was attached to it. Nothing was changed."""

    def __init__(self, what: str, lease: Lease) -> None:
        super().__init__(f"{what}: lease {lease.id:x} has ended")
        self.what = what
        self.lease = lease


class BrokerIdTaken(AgreementError):
    """The member's key is attached to another live lease: that of another process with this broker id, or of an earlier
    run of this member. Nothing was changed.
    """

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
    """One group's changes, in order, for one task. Ends only if cancelled."""

    def __aiter__(self) -> Watch:
        """Returns itself."""

    async def __anext__(self) -> Seen:
        """Waits for the next change, or the first view. Cancelling loses nothing.

        Raises nothing: while the service can't be reached it waits and retries, then continues where it was, or with a
        new view (`is_restart`) if the missed changes are no longer available.
        """


class Agreement(Protocol):
    """The service that keeps one group's keys. Every async method may raise AgreementUnavailable.

    `timeout_s`: maximum duration of the whole call, in seconds of the trio clock.
    """

    async def view(self, *, timeout_s: float = TIMEOUT_S) -> GroupView:
        """Reads the group. Linearizable: never the state of a server that lost its quorum."""

    def watch(self) -> AbstractAsyncContextManager[Watch]:
        """Watches the group: the first view at once, then one after each later change."""

    async def create_group(self, group: GroupRecord, *, timeout_s: float = TIMEOUT_S) -> int:
        """Writes the first record of the group; returns its revision. Raises Outdated if there is one already.

        May be executed late, but only while there is no record.
        """

    async def change_group(
        self, group: GroupRecord, *, group_revision: int, master_revision: int, timeout_s: float = TIMEOUT_S
    ) -> int:
        """As master: replaces the record that has `group_revision` by `group`; returns the new revision.

        Raises Outdated unless that record is unchanged and the master's key is the one created at `master_revision`.
        May be executed late, but only while both hold. Any other change of the record, even with the same content,
        prevents it.
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
        """Becomes master: atomically replaces the record that has `group_revision` by `group`, and creates the master's
        key.

        Returns the revision of both. Raises Outdated if the record has changed or there is a master; LeaseLost if the
        lease has ended. May be executed late, but only while there is no master, the record is unchanged, and the lease
        lives.
        """

    async def hand_over(
        self, group: GroupRecord, *, group_revision: int, master_revision: int, timeout_s: float = TIMEOUT_S
    ) -> int:
        """As master: hands over. Atomically does `change_group`, deletes the master's key, and removes any request for
        a switch.

        Returns the revision of this change. Fails, and may be executed late, like `change_group`.
        """

    async def resign(self, *, master_revision: int, timeout_s: float = TIMEOUT_S) -> None:
        """Deletes the master's key if it is the one created at `master_revision`; else does nothing.

        May be executed late, but only while that key exists.
        """

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = TIMEOUT_S) -> Lease:
        """Gets a lease of at least `ttl_s`. If that fails, an unused lease may remain until it expires."""

    async def renew(self, lease: Lease, *, timeout_s: float = TIMEOUT_S) -> float:
        """Renews the lease; returns the granted seconds. Raises LeaseLost if it has ended.

        The service counts these seconds from a moment during the call, so a safe deadline counts them from before it.
        """

    async def revoke(self, lease: Lease, *, timeout_s: float = TIMEOUT_S) -> None:
        """Ends the lease and deletes its keys; does nothing if it has ended already."""

    async def put_member(
        self, broker_id: int, member: MemberRecord, *, lease: Lease, timeout_s: float = TIMEOUT_S
    ) -> int:
        """Writes the record of member `broker_id`; returns its revision.

        Raises BrokerIdTaken if the key is attached to another lease, from which it is never taken over. Raises
        LeaseLost if `lease` has ended. If both hold, either error may be raised.

        Once this has returned, no earlier `put_member` of the same node can be executed, whatever its outcome was.
        """

    async def request_switch(self, request: SwitchRequest, *, timeout_s: float = TIMEOUT_S) -> int:
        """Requests another master, replacing any earlier request; returns the revision.

        May be executed late in any state of the group; but once it has returned, it will not be executed again.
        """

    async def refuse_switch(
        self, refused: SwitchRequest, *, switch_revision: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Replaces the request whose revision is `switch_revision` by `refused`; does nothing if it is gone.

        May be executed late, but only while that request exists.
        """
