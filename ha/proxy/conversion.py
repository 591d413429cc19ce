"""Converts stored records to the messages that clients receive. Source: GrpcConverter."""

from __future__ import annotations

import hashlib
from typing import Any

from ha.errors import RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.protocol.compression import inflated, kind_of
from ha.protocol.pop import PRIORITY
from ha.protocol.properties import (
    KEY_SEPARATOR,
    KEYS,
    TAGS,
    TIMER_DELIVER_MS,
    TRANSACTION_PREPARED,
    UNIQ_KEY,
)
from ha.protocol.record import MessageRecord

from .messages import GZIP, IDENTITY, MD5, MessageType, set_milliseconds
from .properties import (
    BORN_HOST,
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    LITE_TOPIC,
    RESERVED,
    SHARDING_KEY,
    TRACE_CONTEXT,
)

_GZIP_MAGIC = b"\x1f\x8b"
_INT32_MAX = 0x7FFFFFFF


def set_message(message: Any, record: MessageRecord, properties: dict[str, str], topic: Any, size_max: int) -> None:
    """Fills an empty Message from a record, except for the fields that only a received message has, such as its handle.

    `topic` is the Resource as the client named it, because clients use it, with their own namespace, to acknowledge the
    message. A gzip body stays compressed. A body with another compression is unpacked, unless this is not possible or
    yields more than `size_max` bytes; then it stays as it is stored."""
    message.topic.resource_namespace, message.topic.name = topic.resource_namespace, topic.name
    own = message.user_properties
    for name, value in properties.items():
        if name not in RESERVED:
            own[name] = value
    body, encoding = _body(record, size_max)
    message.body = body
    system = message.system_properties
    tag = properties.get(TAGS)
    if tag:
        system.tag = tag
    if KEYS in properties:
        system.keys.extend(key for key in properties[KEYS].split(KEY_SEPARATOR) if key)
    system.message_id = properties.get(UNIQ_KEY, "")
    system.body_digest.type = MD5
    system.body_digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    system.body_encoding = encoding
    system.message_type = _type_of(properties)
    set_milliseconds(system.born_timestamp, record.born_timestamp_ms)
    system.born_host = properties.get(BORN_HOST) or f"{record.born_host[0]}:{record.born_host[1]}"
    set_milliseconds(system.store_timestamp, record.store_timestamp_ms)
    system.store_host = f"{record.store_host[0]}:{record.store_host[1]}"
    system.queue_id = record.queue_id
    system.queue_offset = record.queue_offset
    system.delivery_attempt = delivery_attempt(record.reconsume_times)
    _add_optional(system, properties)


def delivery_attempt(attempts_before: int) -> int:
    """Returns the number of a delivery, 1 for the first. Limited to the maximum of its int32 field, because producers
    can set any `attempts_before`."""
    return min(attempts_before + 1, _INT32_MAX)


def _add_optional(system: Any, properties: dict[str, str]) -> None:
    deliver_ms = properties.get(TIMER_DELIVER_MS, "")
    if deliver_ms.isdecimal() and len(deliver_ms) <= 15:
        set_milliseconds(system.delivery_timestamp, int(deliver_ms))
    if SHARDING_KEY in properties:
        system.message_group = properties[SHARDING_KEY]
    if TRACE_CONTEXT in properties:
        system.trace_context = properties[TRACE_CONTEXT]
    if LITE_TOPIC in properties:
        system.lite_topic = properties[LITE_TOPIC]
    priority = properties.get(PRIORITY, "")
    if priority.isdecimal() and len(priority) <= 9:
        system.priority = int(priority)
    if DLQ_ORIGIN_TOPIC in properties:
        system.dead_letter_queue.topic = properties[DLQ_ORIGIN_TOPIC]
        system.dead_letter_queue.message_id = properties.get(DLQ_ORIGIN_MESSAGE_ID, "")


def _body(record: MessageRecord, size_max: int) -> tuple[bytes, int]:
    """Returns the body and its encoding. Clients know only gzip, so bodies with other compressions are unpacked."""
    body = record.body
    if not record.sys_flag & SysFlag.COMPRESSED:
        return body, IDENTITY
    if body[:2] == _GZIP_MAGIC:
        return body, GZIP
    try:
        plain = inflated(body, kind_of(record.sys_flag), size_max)
    except RemoteProtocolError:
        plain = None
    return (body if plain is None else plain), IDENTITY  # as stored if it can't be unpacked, as in RocketMQ


def _type_of(properties: dict[str, str]) -> MessageType:
    if properties.get(TRANSACTION_PREPARED) == "true":
        return MessageType.TRANSACTION
    if TIMER_DELIVER_MS in properties:
        return MessageType.DELAY
    if SHARDING_KEY in properties:
        return MessageType.FIFO
    if PRIORITY in properties:
        return MessageType.PRIORITY
    return MessageType.LITE if LITE_TOPIC in properties else MessageType.NORMAL
