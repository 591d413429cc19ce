"""Messages that are stored in a system topic first: redirecting them, and restoring them."""

from pathlib import Path

import pytest

from ha.broker.detour import (
    NOTED_SIZE_MAX,
    delay_level,
    is_half,
    parse_int,
    real_message,
    store_delayed,
    store_half,
    with_notes,
)
from ha.protocol.codes import PutStatus, SysFlag
from ha.protocol.properties import decode_properties, encode_properties
from ha.protocol.record import Message, decode_record, encode_host
from ha.protocol.record_encoding import encode_record
from ha.protocol.topic_names import HALF_TOPIC, SCHEDULE_TOPIC
from tests.broker.node import open_node

BORN_HOST = encode_host("10.0.0.9", 4321)


def message(**properties: str) -> Message:
    return Message("TT", 3, b"body", encode_properties(properties), 7, 1, 1_700_000_000_000, BORN_HOST, 2)


def stored(message: Message, append_property_crc: bool = False) -> bytes:
    return encode_record(
        message,
        queue_offset=5,
        physical_offset=1000,
        store_timestamp_ms=1_700_000_000_001,
        store_host=BORN_HOST,
        append_property_crc=append_property_crc,
    )


@pytest.mark.parametrize(("asked", "level"), [("1", 1), ("18", 18), ("19", 18), ("+2", 2), ("2147483647", 18)])
def test_delayed_message_is_stored_in_the_queue_of_its_level(asked: str, level: int) -> None:
    delayed = message(TAGS="a", DELAY=asked, REAL_TOPIC="forged", TIMER_DELAY_SEC="9")
    properties = decode_properties(delayed.properties)
    store_delayed(delayed, properties, delay_level(properties), 18)
    assert (delayed.topic, delayed.queue_id) == (SCHEDULE_TOPIC, level - 1)
    found = decode_properties(delayed.properties)
    assert found == {
        "TAGS": "a",
        "DELAY": asked if level < 18 or asked == "18" else "18",
        "REAL_TOPIC": "TT",
        "REAL_QID": "3",
    }
    assert delayed.properties.count(b"REAL_TOPIC") == 1


def test_half_message_is_visible_in_the_half_topic() -> None:
    half = message(TRAN_MSG="TRUE", PGROUP="pg")
    half.sys_flag |= SysFlag.TRANSACTION_PREPARED
    properties = decode_properties(half.properties)
    assert is_half(properties)
    store_half(half, properties)
    assert (half.topic, half.queue_id, half.sys_flag) == (HALF_TOPIC, 0, 1)
    assert decode_properties(half.properties) == {
        "TRAN_MSG": "TRUE",
        "PGROUP": "pg",
        "REAL_TOPIC": "TT",
        "REAL_QID": "3",
    }


@pytest.mark.parametrize("append_property_crc", [False, True])
def test_real_message_keeps_all_fields(append_property_crc: bool) -> None:
    original = message(TAGS="a", DELAY="3")
    delayed = message(TAGS="a", DELAY="3")
    store_delayed(delayed, decode_properties(delayed.properties), 3, 18)
    back = real_message(decode_record(stored(delayed, append_property_crc)))
    original.properties = delayed.properties
    assert back == original
    assert b"__CRC32#" not in back.properties


def test_record_without_its_real_topic() -> None:
    for properties in ({}, {"REAL_TOPIC": "TT"}, {"REAL_QID": "1"}, {"REAL_TOPIC": "TT", "REAL_QID": "x"}):
        with pytest.raises(ValueError, match=r"REAL_|input string"):
            real_message(decode_record(stored(message(**properties))))


@pytest.mark.parametrize("text", ["", "x", "1.0", " 1", "1_0", "2147483648", "-2147483649", "٣", "0x1"])
def test_invalid_java_integers(text: str) -> None:
    with pytest.raises(ValueError, match="For input string"):
        parse_int(text)


@pytest.mark.parametrize("append_crc", [False, True])
async def test_properties_with_notes_are_never_too_long_for_the_store(tmp_path: Path, append_crc: bool) -> None:
    """With one byte more the store refuses a message that it has acknowledged before."""
    async with open_node(tmp_path, store_changes={"append_property_crc": append_crc}) as node:
        notes = {"note": "x"}
        room = NOTED_SIZE_MAX - len(encode_properties(notes))
        for size in (room - 1, room, room + 1):
            filled = encode_properties({"f": "x" * (size - len(b"f\x01\x02"))})
            noted = with_notes(filled, notes)
            assert (noted != filled) == (size <= room)
            [result] = await node.broker.put_service.put([Message("TT", 0, b"body", noted)])
            assert result.status is PutStatus.PUT_OK, result.remark
