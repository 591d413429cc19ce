"""Records that any producer may have stored, as messages of gRPC clients."""

from __future__ import annotations

from typing import Any

import pytest

from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, decode_record, encode_host
from ha.protocol.record_encoding import encode_record
from ha.proxy.conversion import set_message
from ha.proxy.messages import make


@pytest.mark.parametrize(
    ("name", "field"), [("_SYS_MSG_PRIORITY_", "priority"), ("TIMER_DELIVER_MS", "delivery_timestamp")]
)
@pytest.mark.parametrize("digits", ["\u00b2", "-1", "9" * 16, "x"])
def test_properties_that_are_no_number(name: str, field: str, digits: str) -> None:
    system = converted(Message("t", 0, b"x", encode_properties({name: digits})))
    assert not system.HasField(field)


def test_reconsume_times_that_are_the_largest() -> None:
    assert converted(Message("t", 0, b"x", b"", reconsume_times=0x7FFFFFFF)).delivery_attempt == 0x7FFFFFFF


def converted(message: Message) -> Any:
    host = encode_host("127.0.0.1", 10911)
    data = encode_record(message, queue_offset=0, physical_offset=0, store_timestamp_ms=1, store_host=host)
    record = decode_record(data)
    found = make("Message")
    set_message(found, record, record.property_map(), make("Resource", name="t"), 1 << 20)
    return found.system_properties
