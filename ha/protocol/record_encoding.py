"""Encodes messages as commitlog records, one at a time or several in a row. `record.py` describes the format."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import TypeVar

from isal.isal_zlib import crc32

from ha.errors import LocalProtocolError
from ha.protocol.codes import PutStatus, SysFlag
from ha.protocol.compiled import with_compiled_twin
from ha.protocol.properties import PROPERTIES_SIZE_MAX
from ha.protocol.record import (
    CRC_MASK,
    FILLER_MAGIC,
    FILLER_SIZE_MIN,
    HEADS,
    HOSTS_V6,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_SIZE_MIN,
    TOPIC_SIZE_V1_MAX,
    Message,
)

PROPERTY_CRC_SIZE = 20

_HOST_V4_SIZE = 8
_HOST_V6_SIZE = 20
_SIZE_WITHOUT_PARTS = RECORD_SIZE_MIN - 2 * _HOST_V4_SIZE - 1
"""Record size without hosts, body, topic and its length, and properties, in bytes"""
_SIZE_AND_MAGIC = Struct(">ii")
_UINT16 = Struct(">H")
_UNCOUNTED = (SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_ROLLBACK)

ResultT = TypeVar("ResultT")


@lru_cache(maxsize=4096)
def topic_field(topic: str) -> bytes:
    """Returns a record's topic field, which is length and name: in V1's form if the topic fits it, otherwise in V2's.

    The length is wrong for a topic of more than 65535 bytes; `encode_record` refuses topics of more than 32767.
    """
    raw = topic.encode()
    size = len(raw)
    return b"%c%b" % (size, raw) if size <= TOPIC_SIZE_V1_MAX else _UINT16.pack(size & 0xFFFF) + raw


def record_size(message: Message, *, store_host_size: int = _HOST_V4_SIZE, append_property_crc: bool = False) -> int:
    """Returns the size of the record of `message` in bytes."""
    return (
        _SIZE_WITHOUT_PARTS
        + len(message.born_host)
        + store_host_size
        + len(message.body)
        + len(topic_field(message.topic))
        + _stored_properties_size(message.properties, append_property_crc)
    )


def _stored_properties_size(properties: bytes, append_property_crc: bool) -> int:
    if not append_property_crc:
        return len(properties)
    return len(properties) + PROPERTY_CRC_SIZE + (1 if properties and properties[-1] != 2 else 0)


def encode_record(
    message: Message,
    *,
    queue_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    append_property_crc: bool = False,
) -> bytes:
    """Returns the record of `message`: V2 for topics of more than 127 bytes, V1 otherwise.

    Raises LocalProtocolError if the topic or the stored properties (with the CRC) exceed 32767 bytes. Raises
    OverflowError if a number does not fit its field.
    """
    field, body, properties, born_host = topic_field(message.topic), message.body, message.properties, message.born_host
    properties_size = _stored_properties_size(properties, append_property_crc)
    if properties_size > PROPERTIES_SIZE_MAX or len(field) > 2 + PROPERTIES_SIZE_MAX:
        raise LocalProtocolError(
            f"topic of {len(field) - 2} or properties of {properties_size} bytes exceed a record's fields"
        )
    sys_flag = message.sys_flag & ~HOSTS_V6
    if len(born_host) == _HOST_V6_SIZE:
        sys_flag |= SysFlag.BORNHOST_V6
    if len(store_host) == _HOST_V6_SIZE:
        sys_flag |= SysFlag.STOREHOST_V6
    head = HEADS[sys_flag & HOSTS_V6]
    try:
        packed = head.pack(
            head.size + len(body) + len(field) + _UINT16.size + properties_size,
            MAGIC_V1 if len(field) <= 1 + TOPIC_SIZE_V1_MAX else MAGIC_V2,
            crc32(body) & CRC_MASK,
            message.queue_id,
            message.flag,
            queue_offset,
            physical_offset,
            sys_flag,
            message.born_timestamp_ms,
            born_host,
            store_timestamp_ms,
            store_host,
            message.reconsume_times,
            message.prepared_transaction_offset,
            len(body),
        )
    except struct.error as error:
        raise OverflowError(str(error)) from None
    record = b"".join(
        (
            packed,
            body,
            field,
            _UINT16.pack(properties_size),
            properties,
            b"\x02" if append_property_crc and properties and properties[-1] != 2 else b"",
        )
    )
    if append_property_crc:
        digits = f"{crc32(record) & CRC_MASK:010d}"[::-1]
        record += b"__CRC32#\x01%b\x02" % digits.encode()
    return record


@with_compiled_twin
def record_run(
    messages: Sequence[Message],
    first: int,
    queue_offsets: dict[tuple[str, int], int],
    advanced: dict[tuple[str, int], int],
    physical_offset: int,
    room: int,
    store_timestamp_ms: int,
    store_host: bytes,
    *,
    body_size_max: int,
    properties_size_max: int,
    append_property_crc: bool,
    result: Callable[[PutStatus, int, int, int, int], ResultT],
) -> tuple[bytes, list[ResultT]]:
    """Encodes messages as consecutive records, from `messages[first]` on. Returns the records as one byte string, and
    for each the value of `result`, called with PUT_OK, physical offset, size, queue offset and store time.

    `physical_offset`: that of the first record. `queue_offsets` holds the next queue offset of each (topic, queue id),
    unless `advanced` does; only `advanced` is updated. A prepared or rolled back message gets queue offset 0 and
    neither needs nor advances that of its queue. The run ends before the first message whose record exceeds what is
    left of `room` bytes, whose queue offset is missing, whose body or properties exceed their limits, or whose topic
    needs V2.

    Raises OverflowError if a number does not fit its field; discard `advanced` then.
    """
    records: list[bytes] = []
    results: list[ResultT] = []
    for number in range(first, len(messages)):
        message = messages[number]
        is_counted = message.sys_flag & SysFlag.TRANSACTION_MASK not in _UNCOUNTED
        key = (message.topic, message.queue_id)
        queue_offset = advanced.get(key, queue_offsets.get(key)) if is_counted else 0
        size = record_size(message, store_host_size=len(store_host), append_property_crc=append_property_crc)
        if (
            queue_offset is None
            or size > room
            or len(message.body) > body_size_max
            or len(message.properties) > properties_size_max
            or _stored_properties_size(message.properties, append_property_crc) > PROPERTIES_SIZE_MAX
            or len(topic_field(message.topic)) > 1 + TOPIC_SIZE_V1_MAX
        ):
            break
        records.append(
            encode_record(
                message,
                queue_offset=queue_offset,
                physical_offset=physical_offset,
                store_timestamp_ms=store_timestamp_ms,
                store_host=store_host,
                append_property_crc=append_property_crc,
            )
        )
        if is_counted:
            advanced[key] = queue_offset + 1
        results.append(result(PutStatus.PUT_OK, physical_offset, size, queue_offset, store_timestamp_ms))
        physical_offset += size
        room -= size
    return b"".join(records), results


def encode_filler(remaining: int) -> bytes:
    """Returns the first 8 bytes of the filler for the last `remaining` bytes of a segment. Raises LocalProtocolError if
    `remaining` is less than 8."""
    if remaining < FILLER_SIZE_MIN:
        raise LocalProtocolError(f"a filler needs {FILLER_SIZE_MIN} bytes; {remaining} are left")
    return _SIZE_AND_MAGIC.pack(remaining, FILLER_MAGIC)
