"""What a pull's records become, all at once and one by one."""

from __future__ import annotations

import zlib

import pytest

from ha.client import MessageQueue
from ha.client.compression import INFLATED_SIZE_MAX
from ha.client.received import received, received_all
from ha.errors import RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, decode_records, encode_host, encode_record

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
