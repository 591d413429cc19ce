"""Codec of etcd's JSON gateway: requests to bytes, answers to structs, keys and values to a group's view.

The gateway's JSON has bytes in base64 and int64 values as strings, and omits zero, empty and false values.
Source: rpc.proto and kv.proto of etcd 3.4 (etcdserverpb, mvccpb), as grpc-gateway maps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from ha.errors import RemoteProtocolError

from .agreement import GroupRecord, GroupView, MasterRecord, MemberRecord, SwitchRequest

GROUP, MASTER, MEMBERS, SWITCH = b"group", b"master", b"members/", b"switch"

_DIGITS_MAX = 19
"""Maximum number of digits of an int64"""

ValueT = TypeVar("ValueT")
Json = dict[str, Any]


class KeyValue(msgspec.Struct, frozen=True, kw_only=True):
    """A key with its value, revisions and lease id, as in mvccpb.KeyValue."""

    key: bytes
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Header of an answer (etcdserverpb.ResponseHeader)."""

    revision: int = 0
    """Revision of the store at the time of the answer."""


class RangeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a range request."""

    header: Header = Header()
    kvs: list[KeyValue] = []


class OperationAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to one operation of a transaction."""

    response_range: RangeAnswer | None = None


class TxnAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a transaction. `succeeded`: whether its conditions held."""

    header: Header
    succeeded: bool = False
    responses: list[OperationAnswer] = []


class LeaseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a grant, also part of a KeepAliveAnswer, where a TTL of 0 means that the lease does not exist."""

    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")


class KeepAliveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a keep-alive stream."""

    result: LeaseAnswer


class AuthenticateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an authentication request."""

    token: str = ""


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An error from etcd's JSON gateway. `code`: gRPC's status code, by default 2 (UNKNOWN)."""

    code: int = 2
    message: str = ""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """mvccpb.Event: a change of a key."""

    kv: KeyValue
    type: str = "PUT"


class WatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Content of one message of a watch: events, or the notice that the watch was created or canceled."""

    created: bool = False
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0
    """If the watch was canceled because its start revision was compacted: the lowest revision that a watch can start
    from; otherwise 0."""
    events: list[Event] = []


class WatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the stream of a watch: a result or an error."""

    result: WatchResult = WatchResult()
    error: Json | None = None


def decode(line: bytes, kind: type[ValueT]) -> ValueT:
    """Decodes an answer of `kind`. Raises RemoteProtocolError if it is not one."""
    try:
        return msgspec.json.decode(line, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not an answer of etcd: {error}") from None


def encode(request: Json) -> bytes:
    """Returns the body of a request. Bytes become base64; integers stay integers, which the gateway accepts."""
    return msgspec.json.encode(request)


def group_prefix(cluster: str, broker_name: str) -> bytes:
    """Returns the prefix of a group's keys. No group's prefix starts with another's, whatever the names are."""
    return f"/halog/{quote(cluster, safe='')}/{quote(broker_name, safe='')}/".encode()


def prefix_end(prefix: bytes) -> bytes:
    """Returns the first key after all keys with `prefix`, which ends in a slash."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def value_of(record: msgspec.Struct) -> bytes:
    """Returns the stored value of a record; equal records give equal bytes."""
    return msgspec.json.encode(record, order="deterministic")


def read_view(prefix: bytes, keys: Mapping[bytes, KeyValue], revision: int) -> GroupView:
    """Decodes a group's keys. Raises RemoteProtocolError if a record was not written by halog; unknown keys are
    ignored.

    An invalid request for a switch, which an operator may have written by hand, becomes a refused request, so that it
    does not block elections.
    """
    members, member_lease_ids = {}, {}
    for key, found in keys.items():
        name = key.removeprefix(prefix)
        broker_id = name.removeprefix(MEMBERS)
        if broker_id != name and broker_id.isdigit() and len(broker_id) <= _DIGITS_MAX:
            members[int(broker_id)] = record_of(found, MemberRecord)
            member_lease_ids[int(broker_id)] = found.lease
    group, master, switch = (keys.get(prefix + name) for name in (GROUP, MASTER, SWITCH))
    if switch is not None and not switch.value:
        switch = None
    return GroupView(
        revision=revision,
        group=record_of(group, GroupRecord) if group else None,
        group_revision=group.mod_revision if group else 0,
        master=record_of(master, MasterRecord) if master else None,
        master_revision=master.create_revision if master else 0,
        master_lease_id=master.lease if master else 0,
        members=members,
        member_lease_ids=member_lease_ids,
        switch=_switch_of(switch) if switch else None,
        switch_revision=switch.mod_revision if switch else 0,
    )


def _switch_of(found: KeyValue) -> SwitchRequest:
    try:
        return record_of(found, SwitchRequest)
    except RemoteProtocolError as error:
        return SwitchRequest(to=None, refusal=str(error))


def by_key(found: Iterable[KeyValue]) -> dict[bytes, KeyValue]:
    """Returns the given entries by key."""
    return {each.key: each for each in found}


def record_of(found: KeyValue, kind: type[ValueT]) -> ValueT:
    """Decodes the record in a key. Raises RemoteProtocolError if it was not written by halog."""
    try:
        return msgspec.json.decode(found.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"key {found.key.decode(errors='replace')} holds no {kind.__name__}: {error}"
        ) from None


def is_master_of(revision: int) -> Json:
    """Returns the comparison that holds if the master's key was created at `revision`; 0: if the key does not exist."""
    return {"name": MASTER, "target": "CREATE", "create_revision": revision}


def is_unchanged(name: bytes, revision: int) -> Json:
    """Returns the comparison that holds if the key was last changed at `revision`; 0: if the key does not exist."""
    return {"name": name, "target": "MOD", "mod_revision": revision}


def put(name: bytes, record: msgspec.Struct, lease_id: int = 0) -> Json:
    """Returns the operation that writes a record."""
    return {"name": name, "value": value_of(record), "lease": lease_id}


def clear(name: bytes) -> Json:
    """Returns the operation that empties a key without deleting it, so that its new revision makes the comparison of a
    late attempt fail."""
    return {"name": name, "value": b""}


def delete(name: bytes) -> Json:
    """Returns the operation that deletes a key if it exists."""
    return {"name": name}


def range_request(prefix: bytes) -> Json:
    """Returns the request for all keys of a group."""
    return {"key": prefix, "range_end": prefix_end(prefix)}


def watch_request(prefix: bytes, start_revision: int) -> Json:
    """Returns the request for all changes from `start_revision` on."""
    return {"create_request": {**range_request(prefix), "start_revision": start_revision}}


def txn_request(prefix: bytes, compare: Iterable[Json], operations: Iterable[Json]) -> Json:
    """Returns the transaction that does the operations if all comparisons hold, else reads all keys of the group."""

    def placed(part: Json) -> Json:
        return {"key": prefix + part["name"], **{name: value for name, value in part.items() if name != "name"}}

    return {
        "compare": [placed(each) for each in compare],
        "success": [
            {"request_put" if "value" in each else "request_delete_range": placed(each)} for each in operations
        ],
        "failure": [{"request_range": range_request(prefix)}],
    }
