"""Conversion of a pull's records to messages, in bulk and singly."""

import copy
import pickle
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from ha.client import MessageQueue, ReceivedMessage
from ha.client.received import received, received_within
from ha.errors import BodyUnreadable
from ha.protocol.codes import SysFlag
from ha.protocol.compression import BODY_SIZE_MAX
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, decode_records, encode_host
from ha.protocol.record_encoding import encode_record

QUEUE = MessageQueue("T", "a", 1)


def one_by_one(body: bytes) -> list[ReceivedMessage]:
    return [received(each, QUEUE, BODY_SIZE_MAX) for each in decode_records(body)]


def all_at_once(body: bytes, wanted: frozenset[str] | None = None) -> list[ReceivedMessage]:
    messages, left_out = received_within(body, QUEUE, wanted, BODY_SIZE_MAX, 1 << 30)
    assert left_out is None
    return messages


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


def test_bulk_and_single_decoding_agree() -> None:
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
    each = one_by_one(body)
    assert all_at_once(body) == each
    assert all_at_once(body, frozenset(["a"])) == [each[1], each[3], each[5]]
    assert all_at_once(body, frozenset(["a", "b"])) == each[1:4] + each[5:]
    assert each[3].body == b"long " * 2000
    assert all_at_once(b"") == []


BOMBS = {
    "no deflated bytes": (b"no deflated bytes", "does not inflate"),
    "one byte too long": (zlib.compress(bytes(BODY_SIZE_MAX + 1)), "inflates to more than 4194304 bytes"),
}


@pytest.mark.parametrize("made", [one_by_one, all_at_once])
@pytest.mark.parametrize(("bomb", "reason"), BOMBS.values(), ids=BOMBS)
def test_uninflatable_body_is_an_error_of_its_message(
    bomb: bytes, reason: str, made: Callable[[bytes], list[ReceivedMessage]]
) -> None:
    longest = zlib.compress(bytes(BODY_SIZE_MAX))
    body = record(1) + record(2, bomb, SysFlag.COMPRESSED, UNIQ_KEY="U2") + record(3, longest, SysFlag.COMPRESSED)
    before, message, behind = made(body)
    assert (before.body, before.body_error, before.stored_body) == (b"body", None, b"body")
    assert (behind.body, behind.body_error) == (bytes(BODY_SIZE_MAX), None)
    assert message.body_error is not None
    assert reason in message.body_error
    assert (message.queue_offset, message.stored_body, message.compression) == (2, bomb, "zlib")
    with pytest.raises(BodyUnreadable, match=reason) as raised:
        _ = message.body
    assert raised.value.message_id == "U2"
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (type(copied), str(copied), vars(copied)) == (BodyUnreadable, str(raised.value), vars(raised.value))
    for same in (copy.deepcopy(message), pickle.loads(pickle.dumps(message)), message.__replace__()):
        assert same == message
        assert same.body_error == message.body_error
    assert message.__replace__(reconsume_times=9).stored_body == bomb
    assert message != message.__replace__(body_error=None)
    assert "body_error=" in repr(message)


def test_bodies_are_inflated_up_to_the_limit() -> None:
    packed = zlib.compress(bytes(1000))
    body = record(0, bytes(10)) + b"".join(record(number, packed, SysFlag.COMPRESSED) for number in range(1, 6))

    def taken(size_max: int) -> tuple[list[int], int | None]:
        messages, left_out = received_within(body, QUEUE, None, BODY_SIZE_MAX, size_max)
        return [message.queue_offset for message in messages], left_out

    assert taken(5010) == ([0, 1, 2, 3, 4, 5], None)
    assert taken(2010) == ([0, 1, 2], 3)
    assert taken(2011) == ([0, 1, 2, 3], 4)
    assert taken(0) == ([0], 1)  # always one message, so that reading makes progress
    messages, left_out = received_within(record(7, packed, SysFlag.COMPRESSED), QUEUE, None, BODY_SIZE_MAX, 0)
    assert (len(messages), left_out) == (1, None)


def pulled() -> ReceivedMessage:
    """As from a pull: no value was accessed yet."""
    (message,) = all_at_once(record(1, b"b", TAGS="a", KEYS="k1 k2", own="é"))
    return message


def made() -> ReceivedMessage:
    """The same message, constructed."""
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
def test_messages_compare_by_value(
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
        "reconsume_times=1, compression=None, body_error=None)"
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
    "body_error": "damaged",
}


@pytest.mark.parametrize("make", [pulled, made])
def test_message_is_immutable_and_replaceable(make: Callable[[], ReceivedMessage]) -> None:
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


def test_unsupported_compression_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4.frame", None)  # as if it were not installed
    body = record(1, b"packed", SysFlag.COMPRESSED | SysFlag.COMPRESSION_LZ4) + record(2)
    first, second = all_at_once(body)
    assert [first, second] == one_by_one(body)
    assert (first.body, first.compression, second.compression) == (b"packed", "lz4", None)
