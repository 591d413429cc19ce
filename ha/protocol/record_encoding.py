"""Records of messages, as they get into the log: one, a run of single ones, a batch. What a record is: `record.py`."""

from __future__ import annotations

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
TOPIC_ALWAYS_FITS = 31
"""Characters of a topic that is short enough whatever they are: in UTF-8 each takes at most 4 bytes."""

_PROPERTY_CRC_NAME = b"__CRC32#\x01"
_HOST_V4_SIZE = 8
_HOST_V6_SIZE = 20
_SIZE_WITHOUT_PARTS = RECORD_SIZE_MIN - 2 * _HOST_V4_SIZE - 1
"""A record's size without its hosts, body, topic and its length, and properties."""
_SIZE_AND_MAGIC = Struct(">ii")
_UINT16 = Struct(">H")
_INT64 = Struct(">q")
_INT32_INT64 = Struct(">iq")
_HEAD_V4 = HEADS[0]
_HEADS_OF_BATCH = {size: Struct(f">iiiiiqq{size}si") for size in (48, 60, 72)}
"""What records of one batch share stands as one byte string between what each has of its own."""

ResultT = TypeVar("ResultT")


@lru_cache(maxsize=4096)
def _topic_field(topic: str) -> bytes:
    """Length and name of a topic as records have them: V1's if it fits, else V2's.

    What doesn't fit V2 either has a wrong length, and is for `record_pieces` to refuse.
    """
    raw = topic.encode()
    size = len(raw)
    return b"%c%b" % (size, raw) if size <= TOPIC_SIZE_V1_MAX else _UINT16.pack(size & 0xFFFF) + raw


def record_size(message: Message, *, store_host_size: int = _HOST_V4_SIZE, append_property_crc: bool = False) -> int:
    """Return how many bytes the record of `message` takes."""
    properties = message.properties
    size = (
        _SIZE_WITHOUT_PARTS
        + len(message.born_host)
        + store_host_size
        + len(message.body)
        + len(_topic_field(message.topic))
        + len(properties)
    )
    if append_property_crc:
        size += PROPERTY_CRC_SIZE + (1 if properties and properties[-1] != 2 else 0)
    return size


@with_compiled_twin
def record_pieces(
    message: Message,
    queue_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    append_property_crc: bool = False,
) -> tuple[bytes, bytes | memoryview, bytes]:
    """Return what makes up the record of `message`: all before its body, the body as it is, all behind.

    V2 is made for topics over 127 bytes, V1 otherwise. LocalProtocolError if the topic is longer than V2 allows or the
    properties exceed 32767 bytes.
    """
    topic_field = _topic_field(message.topic)
    body = message.body
    properties = message.properties
    born_host = message.born_host
    properties_size = len(properties)
    if append_property_crc:
        if properties and properties[-1] != 2:
            properties += b"\x02"
        properties_size = len(properties) + PROPERTY_CRC_SIZE
    if properties_size > PROPERTIES_SIZE_MAX or len(topic_field) > 2 + PROPERTIES_SIZE_MAX:
        raise LocalProtocolError(
            f"topic of {len(topic_field) - 2} or properties of {properties_size} bytes exceed a record's fields"
        )
    sys_flag = message.sys_flag & ~HOSTS_V6
    if len(born_host) == _HOST_V4_SIZE and len(store_host) == _HOST_V4_SIZE:
        head = _HEAD_V4
    else:
        if len(born_host) == _HOST_V6_SIZE:
            sys_flag |= SysFlag.BORNHOST_V6
        if len(store_host) == _HOST_V6_SIZE:
            sys_flag |= SysFlag.STOREHOST_V6
        head = HEADS[sys_flag & HOSTS_V6]
    body_size = len(body)
    behind = b"%b%b%b" % (topic_field, _UINT16.pack(properties_size), properties)
    before = head.pack(
        head.size + body_size + len(behind) + (PROPERTY_CRC_SIZE if append_property_crc else 0),
        MAGIC_V1 if len(topic_field) <= 1 + TOPIC_SIZE_V1_MAX else MAGIC_V2,
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
        body_size,
    )
    if append_property_crc:
        digits = f"{crc32(behind, crc32(body, crc32(before))) & CRC_MASK:010d}"[::-1]
        behind = b"%b%b%b\x02" % (behind, _PROPERTY_CRC_NAME, digits.encode())
    return before, body, behind


@with_compiled_twin
def record_run(
    messages: Sequence[Message],
    first: int,
    queue_offsets: dict[tuple[str, int], int],
    physical_offset: int,
    room: int,
    store_timestamp_ms: int,
    store_host: bytes,
    *,
    body_size_max: int,
    properties_size_max: int,
    result: Callable[[PutStatus, int, int, int, int], ResultT],
) -> tuple[bytes, list[ResultT]]:
    """Return the records of `messages[first:]` that fit `room` bytes, one behind the other, and what `result` makes of
    each: PUT_OK, its physical offset, size, queue offset and store time.

    `queue_offsets` has the next one of each queue (topic, queue id), and is moved on. It ends before the first message
    that is not usual: of a queue that is not there, with a topic of more than TOPIC_ALWAYS_FITS characters, a body or
    properties over their limits, or the bits of a transaction.
    """
    pieces: list[bytes | memoryview] = []
    results: list[ResultT] = []
    end = physical_offset + room
    for number in range(first, len(messages)):
        message = messages[number]
        topic, body, properties = message.topic, message.body, message.properties
        key = (topic, message.queue_id)
        queue_offset = queue_offsets.get(key)
        if (
            queue_offset is None
            or len(topic) > TOPIC_ALWAYS_FITS
            or len(body) > body_size_max
            or len(properties) > properties_size_max
            or message.sys_flag & SysFlag.TRANSACTION_MASK
        ):
            break
        record = record_pieces(message, queue_offset, physical_offset, store_timestamp_ms, store_host)
        size = len(record[0]) + len(body) + len(record[2])
        if size > end - physical_offset:
            break
        pieces += record
        queue_offsets[key] = queue_offset + 1
        results.append(result(PutStatus.PUT_OK, physical_offset, size, queue_offset, store_timestamp_ms))
        physical_offset += size
    return b"".join(pieces), results


@with_compiled_twin
def is_batch_of_one_queue(messages: Sequence[Message]) -> bool:
    """Whether `messages` differ in nothing but flag, body and properties, as those of a client's batch do."""
    first = messages[0]
    topic, queue_id, sys_flag, born_host = first.topic, first.queue_id, first.sys_flag, first.born_host
    born_timestamp_ms, reconsume_times = first.born_timestamp_ms, first.reconsume_times
    prepared_transaction_offset = first.prepared_transaction_offset
    for message in messages:
        if (
            message.queue_id != queue_id
            or message.sys_flag != sys_flag
            or message.born_timestamp_ms != born_timestamp_ms
            or message.reconsume_times != reconsume_times
            or message.prepared_transaction_offset != prepared_transaction_offset
            or message.topic != topic
            or message.born_host != born_host
        ):
            return False
    return True


@with_compiled_twin
def batch_pieces(
    messages: Sequence[Message],
    sizes: Sequence[int],
    *,
    queue_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
) -> list[bytes | memoryview]:
    """Return what makes up the records, one after the other, of `messages` that `is_batch_of_one_queue` is true of.

    `sizes` are their records' (`record_size`). The first one gets the offsets given, each of the others the next.
    LocalProtocolError as of `record_pieces`.
    """
    first = messages[0]
    topic_field = _topic_field(first.topic)
    if len(topic_field) > 2 + PROPERTIES_SIZE_MAX:
        raise LocalProtocolError(f"topic of {len(topic_field) - 2} bytes exceeds a record's field")
    magic = MAGIC_V1 if len(topic_field) <= 1 + TOPIC_SIZE_V1_MAX else MAGIC_V2
    sys_flag = first.sys_flag & ~HOSTS_V6
    if len(first.born_host) == _HOST_V6_SIZE:
        sys_flag |= SysFlag.BORNHOST_V6
    if len(store_host) == _HOST_V6_SIZE:
        sys_flag |= SysFlag.STOREHOST_V6
    shared = b"".join(
        (
            _INT32_INT64.pack(sys_flag, first.born_timestamp_ms),
            first.born_host,
            _INT64.pack(store_timestamp_ms),
            store_host,
            _INT32_INT64.pack(first.reconsume_times, first.prepared_transaction_offset),
        )
    )
    pack_head, pack_size, queue_id = _HEADS_OF_BATCH[len(shared)].pack, _UINT16.pack, first.queue_id
    pieces: list[bytes | memoryview] = []
    for message, size in zip(messages, sizes, strict=True):
        body, properties = message.body, message.properties
        properties_size = len(properties)
        if properties_size > PROPERTIES_SIZE_MAX:
            raise LocalProtocolError(f"properties of {properties_size} bytes exceed a record's field")
        crc = crc32(body) & CRC_MASK
        pieces += (
            pack_head(size, magic, crc, queue_id, message.flag, queue_offset, physical_offset, shared, len(body)),
            body,
            topic_field,
            pack_size(properties_size),
            properties,
        )
        queue_offset += 1
        physical_offset += size
    return pieces


def encode_record(
    message: Message,
    *,
    queue_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    store_host: bytes,
    append_property_crc: bool = False,
) -> bytes:
    """Return the record of `message`; errors as of `record_pieces`."""
    return b"".join(
        record_pieces(message, queue_offset, physical_offset, store_timestamp_ms, store_host, append_property_crc)
    )


def encode_filler(remaining: int) -> bytes:
    """Return the 8 bytes that end a segment with `remaining` bytes (at least 8) left."""
    if remaining < FILLER_SIZE_MIN:
        raise LocalProtocolError(f"a filler needs {FILLER_SIZE_MIN} bytes, {remaining} are left")
    return _SIZE_AND_MAGIC.pack(remaining, FILLER_MAGIC)
