"""Implements `Agreement` (agreement.py) with etcd 3.4 or newer, through its JSON gateway.

Every change of a group's keys is one transaction, which succeeds only if the keys have the revisions that the change is
based on. If the answer is lost, the transaction is sent again to the next endpoint. At most one of these attempts
succeeds, and the keys that a failed one returns show whether an earlier one succeeded.

Leases: etcd counts whole seconds, so the requested time is rounded up. The minimum is one and a half times etcd's
election timeout, rounded up (2 s by default). The answer contains the granted time. The leader notices an expired lease
within half a second, and removes it by a transaction; a new leader renews all leases. So a key is removed between 0 and
about 1 s after its lease has expired, or a whole period later if etcd's leader changes.

Releases of 3.4 and 3.5 without the fix of etcd's issue 15247 may also expire a lease too early, or renew one that has
expired, after their leader was frozen. So leases serve to replace a dead owner, but don't guarantee that there is only
one owner.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import trio

from ha.errors import RemoteProtocolError

from .agreement import (
    TIMEOUT_S,
    AgreementUnavailable,
    BrokerIdTaken,
    GroupRecord,
    GroupView,
    Lease,
    LeaseLost,
    MasterRecord,
    MemberRecord,
    Outdated,
    SwitchRequest,
    Watch,
)
from .etcd_client import NOT_FOUND, EtcdClient, EtcdOptions, EtcdStatistics, Refused, open_etcd_client
from .etcd_values import (
    GROUP,
    MASTER,
    MEMBERS,
    SWITCH,
    Json,
    KeepAliveAnswer,
    KeyValue,
    LeaseAnswer,
    RangeAnswer,
    TxnAnswer,
    by_key,
    clear,
    decode,
    delete,
    group_prefix,
    is_master_of,
    is_unchanged,
    put,
    range_request,
    read_view,
    record_of,
    txn_request,
    value_of,
)
from .etcd_watch import EtcdWatch

__all__ = ["EtcdAgreement", "EtcdOptions", "EtcdStatistics", "open_etcd_agreement"]


class EtcdAgreement:
    """One group's keys in etcd; implements `ha.failover.agreement.Agreement`. Opened by `open_etcd_agreement`."""

    def __init__(self, client: EtcdClient, cluster: str, broker_name: str) -> None:
        self._client = client
        self._prefix = group_prefix(cluster, broker_name)

    def statistics(self) -> EtcdStatistics:
        """Returns the client's counters."""
        return self._client.statistics()

    async def view(self, *, timeout_s: float = TIMEOUT_S) -> GroupView:
        return await self._view("reading the group", timeout_s)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Watch]:
        watch = EtcdWatch(self._client, self._prefix)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            yield watch
            nursery.cancel_scope.cancel()

    async def create_group(self, group: GroupRecord, *, timeout_s: float = TIMEOUT_S) -> int:
        return await self._change(
            "creating the group",
            [],
            [put(GROUP, group)],
            timeout_s,
            group_revision=0,
            is_ours=lambda view: False,  # another member may have created an equal record
        )

    async def change_group(
        self, group: GroupRecord, *, group_revision: int, master_revision: int, timeout_s: float = TIMEOUT_S
    ) -> int:
        def is_ours(view: GroupView) -> bool:
            # No other member may change the record while the key is ours.
            return view.master_revision == master_revision and view.group == group

        return await self._change(
            "changing the group",
            [is_master_of(master_revision)],
            [put(GROUP, group)],
            timeout_s,
            group_revision=group_revision,
            is_ours=is_ours,
        )

    async def take_mastership(
        self,
        group: GroupRecord,
        master: MasterRecord,
        *,
        lease: Lease,
        group_revision: int,
        timeout_s: float = TIMEOUT_S,
    ) -> int:
        def is_ours(view: GroupView) -> bool:
            return (
                view.master_lease_id == lease.id
                and view.master == master
                and view.group == group
                and view.master_revision == view.group_revision
            )

        return await self._change(
            "taking mastership",
            [is_master_of(0)],
            [put(GROUP, group), put(MASTER, master, lease.id)],
            timeout_s,
            lease,
            group_revision=group_revision,
            is_ours=is_ours,
        )

    async def hand_over(
        self, group: GroupRecord, *, group_revision: int, master_revision: int, timeout_s: float = TIMEOUT_S
    ) -> int:
        return await self._change(
            "handing over",
            [is_master_of(master_revision)],
            [put(GROUP, group), delete(MASTER), clear(SWITCH)],
            timeout_s,
            group_revision=group_revision,
            is_ours=lambda view: view.master is None and view.group == group,
        )

    async def resign(self, *, master_revision: int, timeout_s: float = TIMEOUT_S) -> None:
        await self._txn("resigning", [is_master_of(master_revision)], [delete(MASTER)], timeout_s)

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = TIMEOUT_S) -> Lease:
        what = "getting a lease"
        try:
            answer, _ = await self._client.call(
                what, "/v3/lease/grant", {"TTL": math.ceil(ttl_s)}, timeout_s=timeout_s, changes=True
            )
            granted = decode(answer, LeaseAnswer)
        except (Refused, RemoteProtocolError) as error:
            raise _unusable(what, error) from None
        return Lease(granted.id, float(granted.ttl))

    async def renew(self, lease: Lease, *, timeout_s: float = TIMEOUT_S) -> float:
        what = "renewing the lease"
        try:
            answer, _ = await self._client.call(
                what, "/v3/lease/keepalive", {"ID": lease.id}, timeout_s=timeout_s, changes=True
            )
            ttl = decode(answer, KeepAliveAnswer).result.ttl
        except Refused as refused:
            if refused.code != NOT_FOUND:
                raise _unusable(what, refused) from None
            ttl = 0
        except RemoteProtocolError as error:
            raise _unusable(what, error) from None
        if ttl <= 0:
            raise LeaseLost(what, lease)
        return float(ttl)

    async def revoke(self, lease: Lease, *, timeout_s: float = TIMEOUT_S) -> None:
        what = "ending the lease"
        try:
            await self._client.call(what, "/v3/lease/revoke", {"ID": lease.id}, timeout_s=timeout_s, changes=True)
        except Refused as refused:
            if refused.code != NOT_FOUND:
                raise _unusable(what, refused) from None

    async def put_member(
        self, broker_id: int, member: MemberRecord, *, lease: Lease, timeout_s: float = TIMEOUT_S
    ) -> int:
        what, name = "writing this member's record", MEMBERS + b"%d" % broker_id

        def check(found: KeyValue) -> None:
            # The next attempt succeeds only if the key still has the revision found here, and therefore this lease.
            if found.mod_revision and found.lease != lease.id:
                try:
                    holder = record_of(found, MemberRecord)
                except RemoteProtocolError as error:
                    raise AgreementUnavailable(what, str(error), outcome_unknown=False) from None
                raise BrokerIdTaken(what, broker_id, holder, found.lease)

        return await self._replace(what, name, member, timeout_s, lease, check=check)

    async def request_switch(self, request: SwitchRequest, *, timeout_s: float = TIMEOUT_S) -> int:
        return await self._replace("requesting a switch", SWITCH, request, timeout_s)

    async def refuse_switch(
        self, refused: SwitchRequest, *, switch_revision: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        await self._txn(
            "refusing a switch",
            [is_unchanged(SWITCH, switch_revision)],
            [put(SWITCH, refused)],
            timeout_s,
        )

    async def _view(self, what: str, timeout_s: float) -> GroupView:
        try:
            answer, _ = await self._client.call(
                what, "/v3/kv/range", range_request(self._prefix), timeout_s=timeout_s, changes=False
            )
            found = decode(answer, RangeAnswer)
            return read_view(self._prefix, by_key(found.kvs), found.header.revision)
        except (Refused, RemoteProtocolError) as error:
            raise AgreementUnavailable(what, str(error), outcome_unknown=False) from None

    async def _txn(
        self,
        what: str,
        compare: Iterable[Json],
        operations: Iterable[Json],
        timeout_s: float,
        lease: Lease | None = None,
    ) -> tuple[int, TxnAnswer, bool]:
        """Sends a transaction until an endpoint answers.

        Returns its revision (0 if a comparison failed), the answer, and whether an earlier attempt may have succeeded.
        Raises AgreementUnavailable if there is no usable answer; LeaseLost if `lease` has ended.
        """
        request = txn_request(self._prefix, compare, operations)
        try:
            answer, in_doubt = await self._client.call(what, "/v3/kv/txn", request, timeout_s=timeout_s, changes=True)
        except Refused as refused:
            if lease is not None and refused.code == NOT_FOUND and not refused.in_doubt:
                raise LeaseLost(what, lease) from None
            raise _unusable(what, refused) from None
        try:
            txn = decode(answer, TxnAnswer)
        except RemoteProtocolError as error:
            raise _unusable(what, error) from None
        return (txn.header.revision if txn.succeeded else 0), txn, in_doubt

    async def _change(
        self,
        what: str,
        compare: Iterable[Json],
        operations: Iterable[Json],
        timeout_s: float,
        lease: Lease | None = None,
        *,
        group_revision: int,
        is_ours: Callable[[GroupView], bool],
    ) -> int:
        """Changes the key `group`, whose revision is `group_revision`; returns the new revision.

        `is_ours`: returns whether a view shows this change; called if the answer to an attempt was lost. Raises
        Outdated if a comparison failed and this change was not made; AgreementUnavailable if it is not known whether
        it was made, or there is no usable answer; LeaseLost if `lease` has ended.
        """
        compare = [*compare, is_unchanged(GROUP, group_revision)]
        revision, txn, in_doubt = await self._txn(what, compare, operations, timeout_s, lease)
        if revision:
            return revision
        try:
            view = read_view(self._prefix, _found(txn), txn.header.revision)
        except RemoteProtocolError as error:
            raise AgreementUnavailable(what, str(error), outcome_unknown=in_doubt) from None
        if in_doubt and view.group_revision != group_revision:
            if is_ours(view):
                return view.group_revision
            raise AgreementUnavailable(what, "the group has changed meanwhile", outcome_unknown=True)
        raise Outdated(what, view)

    async def _replace(
        self,
        what: str,
        name: bytes,
        record: MemberRecord | SwitchRequest,
        timeout_s: float,
        lease: Lease | None = None,
        *,
        check: Callable[[KeyValue], None] = lambda found: None,
    ) -> int:
        """Replaces the present value of a key, and returns the new revision. No late attempt can be executed
        afterwards.

        `check` gets the present entry (revision 0: none) and raises if it must not be replaced. Raises
        AgreementUnavailable if there is no usable answer or, without `lease`, if an attempt without an answer may have
        been executed and its record replaced since; LeaseLost if `lease` has ended.
        """
        deadline = trio.current_time() + timeout_s
        key, expected = self._prefix + name, 0
        operations = [put(name, record, lease.id if lease is not None else 0)]
        may_come_late = False
        while True:
            remaining_s = deadline - trio.current_time()
            compare = [is_unchanged(name, expected)]
            try:
                revision, txn, in_doubt = await self._txn(what, compare, operations, remaining_s, lease)
                if revision:
                    return revision
                may_come_late = may_come_late or in_doubt
                found = _found(txn).get(key, KeyValue(key=key))
                check(found)
            except AgreementUnavailable as error:
                outcome_unknown = error.outcome_unknown or may_come_late
                raise AgreementUnavailable(what, error.reason, outcome_unknown=outcome_unknown) from None
            if in_doubt and found.value == value_of(record):
                return found.mod_revision
            if in_doubt and lease is None:
                # The request may have been written, served and removed: it must not be written twice.
                raise AgreementUnavailable(what, "the request has changed meanwhile", outcome_unknown=True)
            expected = found.mod_revision


@asynccontextmanager
async def open_etcd_agreement(
    options: EtcdOptions, cluster: str, broker_name: str, *, chance: random.Random | None = None
) -> AsyncIterator[EtcdAgreement]:
    """Opens the agreement of one group. It connects when it is first used. `chance` randomizes pauses between retries.

    Calls in progress when the block ends raise AgreementUnavailable.
    """
    async with open_etcd_client(options, chance) as client:
        yield EtcdAgreement(client, cluster, broker_name)


def _found(txn: TxnAnswer) -> dict[bytes, KeyValue]:
    """Returns the keys that a failed transaction returned."""
    ranges = [each.response_range for each in txn.responses if each.response_range is not None]
    return by_key(ranges[0].kvs) if ranges else {}


def _unusable(what: str, error: Refused | RemoteProtocolError) -> AgreementUnavailable:
    in_doubt = error.in_doubt if isinstance(error, Refused) else True
    return AgreementUnavailable(what, str(error), outcome_unknown=in_doubt)
