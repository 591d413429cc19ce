"""What the members of a failover group read: answers of etcd, and records of the tables in the log."""

from typing import Any

import msgspec

from ha.errors import RemoteProtocolError
from ha.failover.agreement import GroupRecord, MasterRecord, MemberRecord, SwitchRequest
from ha.failover.etcd_values import (
    AuthenticateAnswer,
    ErrorAnswer,
    KeepAliveAnswer,
    KeyValue,
    LeaseAnswer,
    RangeAnswer,
    TxnAnswer,
    WatchAnswer,
    by_key,
    decode,
    group_prefix,
    read_view,
    value_of,
)
from ha.protocol.access_bodies import UserConfig
from ha.protocol.bodies import DataVersion, GroupConfig, TopicConfig
from ha.protocol.group_records import SnapshotPart, TablesRecord, decode_tables_record, encode_tables_record
from tests.fuzz.harness import Harness

ANSWERS: tuple[type[Any], ...] = (
    RangeAnswer,
    TxnAnswer,
    WatchAnswer,
    LeaseAnswer,
    KeepAliveAnswer,
    AuthenticateAnswer,
    ErrorAnswer,
)
PREFIX = group_prefix("c", "b")
GROUP = GroupRecord(epoch=3, master_id=1, sync_state_set=frozenset({1, 2}))
MASTER = MasterRecord(epoch=3, broker_id=1, ha_address="h:2", broker_address="h:1")
MEMBER = MemberRecord(epoch=3, max_offset=100, ha_address="h:2", broker_address="h:1")
SWITCH = SwitchRequest(to=2, reason="update")
RECORDS = ((b"group", GROUP), (b"master", MASTER), (b"members/1", MEMBER), (b"switch", SWITCH))


def etcd_answers(data: bytes) -> None:
    """The first byte chooses: an answer of that kind, or a line `key value` for each key that a group has. One error,
    or a view whose records are the same when written and read again."""
    if not data:
        return
    number = data[0] % (len(ANSWERS) + 1)
    try:
        if number == len(ANSWERS):
            pairs = [line.partition(b" ") for line in data[1:].split(b"\n")]
            view_again([KeyValue(key=PREFIX + name, value=value) for name, _, value in pairs])
            return
        answer = decode(data[1:], ANSWERS[number])
        if isinstance(answer, RangeAnswer):
            view_again(answer.kvs)
        elif isinstance(answer, WatchAnswer):
            view_again([event.kv for event in answer.result.events])
    except RemoteProtocolError:
        pass


def view_again(found: list[KeyValue]) -> None:
    """Read a view, write its records, and read them."""
    view = read_view(PREFIX, by_key(found), 7)
    singles = ((b"group", view.group), (b"master", view.master), (b"switch", view.switch))
    records: dict[bytes, msgspec.Struct] = {name: record for name, record in singles if record is not None}
    records |= {b"members/%d" % broker_id: member for broker_id, member in view.members.items()}
    keys = [KeyValue(key=PREFIX + name, value=value_of(record)) for name, record in records.items()]
    again = read_view(PREFIX, by_key(keys), 7)
    for name in ("group", "master", "switch", "members"):
        assert getattr(again, name) == getattr(view, name), name


def tables_records(data: bytes) -> None:
    """Any body of a record of the tables: the one error, or a record that is the same when written and read again."""
    try:
        record = decode_tables_record(data)
    except RemoteProtocolError:
        return
    assert decode_tables_record(encode_tables_record(record)) == record


def answer_seeds() -> list[bytes]:
    """One of each kind; what etcd leaves out is left out."""
    kvs = [KeyValue(key=PREFIX + name, value=value_of(record), mod_revision=5) for name, record in RECORDS]
    held = msgspec.json.encode(kvs)
    keys = b"\n".join(name + b" " + value_of(record) for name, record in RECORDS)
    return [
        b'\x00{"header":{"revision":"7"},"kvs":%b,"count":"4"}' % held,
        b'\x01{"header":{"revision":"7"},"succeeded":true,"responses":[{"response_range":{"kvs":%b}}]}' % held,
        b'\x02{"result":{"header":{},"events":[{"type":"DELETE","kv":%b}]}}' % msgspec.json.encode(kvs[0]),
        b'\x02{"result":{"canceled":true,"compact_revision":"9","cancel_reason":"x"}}',
        b'\x02{"error":{"grpc_code":4,"details":[]}}',
        b'\x03{"ID":"7587","TTL":"2"}',
        b'\x04{"result":{"ID":"7587"}}',
        b'\x05{"token":"t"}',
        b'\x06{"code":5,"message":"no lease"}',
        b"\x07" + keys,
        b"\x07members/%b %b" % (b"9" * 5000, value_of(MEMBER)),
    ]


def record_seeds() -> list[bytes]:
    """A change of everything, and a part of a snapshot."""
    change = TablesRecord(
        epoch=3,
        topics={"T": TopicConfig(topic_name="T"), "gone": None},
        topics_version=DataVersion(counter=2, timestamp=7),
        groups={"g": GroupConfig(group_name="g")},
        groups_version=DataVersion(counter=1),
        users={"u": UserConfig(username="u", password="p"), "gone": None},
        users_version=DataVersion(counter=4),
        removed_offsets=["gone@g"],
        offsets={"T@g": {0: 5, 3: 1 << 40}},
        delays={3: 17},
    )
    return [encode_tables_record(record) for record in (change, TablesRecord(epoch=3, snapshot=SnapshotPart(2, True)))]


WORDS = (
    b'"kvs":[',
    b'"error":{',
    b'"events":[{"kv":{',
    b'"compact_revision":"',
    b"members/",
    b'"syncStateSet":[',
    b'"snapshot":{"part":',
    b'"offsets":{"T@g":{"',
    b'"delays":{"',
    b"null",
    b"9223372036854775808",
    b"-1",
    b"1e999",
    b"[[[[",
)

HARNESSES = {
    "etcd_answers": Harness(run=etcd_answers, seeds=answer_seeds, words=WORDS, size_max=8192),
    "tables_records": Harness(run=tables_records, seeds=record_seeds, words=WORDS),
}
