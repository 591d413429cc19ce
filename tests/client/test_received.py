"""What a pull's records become, all at once and one by one."""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from ha.client import MessageQueue, ReceivedMessage
from ha.client.received import received, received_all
from ha.errors import RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.protocol.compression import INFLATED_SIZE_MAX, Compression
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, decode_records, encode_host
from ha.protocol.record_encoding import encode_record

QUEUE = MessageQueue("T", "a", 1)


def record(number: int, body: bytes = b"body", sys_flag: int = 0, **properties: str) -> bytes:
    message = Message(
        "T" if number % 2 else "T" * 130,
        1,
        body,
        encode_properties(properties),
        flag=number,
        sys_flag=sys_flag,
        born_timestamp_ms=1_700_000_000_000 + number,
        born_host=encode_host("10.0.0.9" if number % 3 else "2001:db8::1", 40_000),
        reconsume_times=number,
    )
    return encode_record(
        message,
        queue_offset=number,
        physical_offset=1000 * number,
        store_timestamp_ms=1_700_000_000_500 + number,
        store_host=encode_host("10.0.0.1", 10911),
    )


def test_all_at_once_as_one_by_one() -> None:
    deflated = SysFlag.COMPRESSED | 3 << 8
    body = b"".join(
        [
            record(0),
            record(1, TAGS="a", KEYS="k1 k2", UNIQ_KEY="7F" * 16, own="é"),
            record(2, TAGS="b"),
            record(3, zlib.compress(b"long " * 2000), deflated, TAGS="a"),
            record(4, b"", own="x\x01y"),
            record(5, b"\x00" * 3000, TAGS="a", KEYS=" "),
        ]
    )
    one_by_one = [received(each, QUEUE) for each in decode_records(body)]
    assert received_all(body, QUEUE, None) == one_by_one
    assert received_all(body, QUEUE, frozenset(["a"])) == [one_by_one[1], one_by_one[3], one_by_one[5]]
    assert received_all(body, QUEUE, frozenset(["a", "b"])) == one_by_one[1:4] + one_by_one[5:]
    assert one_by_one[3].body == b"long " * 2000
    assert received_all(b"", QUEUE, None) == []


@pytest.mark.parametrize("bomb", [b"no deflated bytes", zlib.compress(bytes(INFLATED_SIZE_MAX + 1))])
def test_a_body_that_does_not_inflate_is_named(bomb: bytes) -> None:
    body = record(1) + record(2, bomb, SysFlag.COMPRESSED)
    with pytest.raises(RemoteProtocolError, match="the body at 2000: "):
        received_all(body, QUEUE, None)
    with pytest.raises(RemoteProtocolError, match="the body at 2000: "):
        [received(each, QUEUE) for each in decode_records(body)]


def pulled() -> ReceivedMessage:
    """As a pull brings it: nothing of it was looked at yet."""
    (message,) = received_all(record(1, b"b", TAGS="a", KEYS="k1 k2", own="é"), QUEUE, None)
    return message


def made() -> ReceivedMessage:
    """The same by hand."""
    return ReceivedMessage(
        QUEUE,
        1,
        1000,
        "0A00000100002A9F00000000000003E8",
        "0A00000100002A9F00000000000003E8",
        b"b",
        "a",
        ("k1", "k2"),
        {"TAGS": "a", "KEYS": "k1 k2", "own": "é"},
        flag=1,
        born_timestamp_ms=1_700_000_000_001,
        store_timestamp_ms=1_700_000_000_501,
        born_host=("10.0.0.9", 40_000),
        store_host=("10.0.0.1", 10911),
        reconsume_times=1,
    )


def same(message: ReceivedMessage) -> ReceivedMessage:
    return message


COPIES: dict[str, Callable[[ReceivedMessage], ReceivedMessage]] = {
    "itself": same,
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "pickled": lambda message: pickle.loads(pickle.dumps(message)),
    "replaced": lambda message: message.__replace__(),
}


@pytest.mark.parametrize("make", [pulled, made])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_message_is_a_value(
    make: Callable[[], ReceivedMessage], copied: Callable[[ReceivedMessage], ReceivedMessage]
) -> None:
    message = copied(make())
    for name in ReceivedMessage.__match_args__:
        assert getattr(message, name) == getattr(made(), name), name
    assert message == made() == pulled() == message
    assert repr(message) == (
        "ReceivedMessage(queue=MessageQueue(topic='T', broker_name='a', queue_id=1), queue_offset=1, "
        "physical_offset=1000, message_id='0A00000100002A9F00000000000003E8', "
        "offset_message_id='0A00000100002A9F00000000000003E8', body=b'b', tags='a', keys=('k1', 'k2'), "
        "properties={'TAGS': 'a', 'KEYS': 'k1 k2', 'own': 'é'}, flag=1, born_timestamp_ms=1700000000001, "
        "store_timestamp_ms=1700000000501, born_host=('10.0.0.9', 40000), store_host=('10.0.0.1', 10911), "
        "reconsume_times=1, compression=None)"
    )
    assert message.topic == "T"
    assert message.properties is message.properties
    match message:
        case ReceivedMessage(queue, offset, body=body):
            assert (queue, offset, body) == (QUEUE, 1, b"b")
    with pytest.raises(TypeError, match="unhashable"):
        hash(message)


CHANGES: dict[str, Any] = {
    "queue": MessageQueue("T", "b", 1),
    "queue_offset": 2,
    "physical_offset": 2,
    "message_id": "x",
    "offset_message_id": "x",
    "body": b"x",
    "tags": None,
    "keys": (),
    "properties": {},
    "flag": 2,
    "born_timestamp_ms": 2,
    "store_timestamp_ms": 2,
    "born_host": ("x", 1),
    "store_host": ("x", 1),
    "reconsume_times": 2,
    "compression": "lz4",
}


@pytest.mark.parametrize("make", [pulled, made])
def test_a_message_can_not_be_changed_but_another_made_of_it(make: Callable[[], ReceivedMessage]) -> None:
    message = make()
    assert CHANGES.keys() == set(ReceivedMessage.__match_args__)
    for name, value in CHANGES.items():
        with pytest.raises(AttributeError):
            setattr(message, name, value)
        with pytest.raises(AttributeError):
            delattr(message, name)
        changed = message.__replace__(**{name: value})
        assert getattr(changed, name) == value
        assert changed != message
        assert changed.__replace__(**{name: getattr(message, name)}) == message
    with pytest.raises(AttributeError):
        message.more = 1
    with pytest.raises(TypeError):
        message.__replace__(more=1)
    assert message == made()
    assert message != "another thing"


def test_what_stays_compressed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.client.received.inflated", lambda body, kind: body if kind is Compression.NONE else None)
    body = record(1, b"packed", SysFlag.COMPRESSED | SysFlag.COMPRESSION_LZ4) + record(2)
    first, second = received_all(body, QUEUE, None)
    assert [first, second] == [received(each, QUEUE) for each in decode_records(body)]
    assert (first.body, first.compression, second.compression) == (b"packed", "lz4", None)
