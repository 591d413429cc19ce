"""Converts stored records to received messages."""

from __future__ import annotations

from ha.client.messages import MessageQueue, ReceivedMessage, StoredParts, Unreadable, messages_of
from ha.errors import RemoteProtocolError
from ha.protocol import properties as names
from ha.protocol.codes import SysFlag
from ha.protocol.compression import inflated, kind_of
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import find_property
from ha.protocol.record import MessageRecord, encode_host, split_records


def received(record: MessageRecord, queue: MessageQueue, body_size_max: int) -> ReceivedMessage:
    """Returns the message in `record`, which came from `queue`.

    Sets `body_error` for a compressed body that is damaged or longer than `body_size_max` bytes."""
    body: bytes | None = record.body
    compression = unreadable = None
    if record.sys_flag & SysFlag.COMPRESSED:
        body, compression, unreadable = _inflated(record.body, record.sys_flag, body_size_max)
    known = record.property_map()
    offset_message_id = encode_message_id(encode_host(*record.store_host), record.physical_offset)
    return ReceivedMessage(
        queue=queue,
        queue_offset=record.queue_offset,
        physical_offset=record.physical_offset,
        message_id=known.get(names.UNIQ_KEY) or offset_message_id,
        offset_message_id=offset_message_id,
        body=record.body if body is None else body,
        tags=known.get(names.TAGS),
        keys=tuple(known.get(names.KEYS, "").split()),
        properties=known,
        flag=record.flag,
        born_timestamp_ms=record.born_timestamp_ms,
        store_timestamp_ms=record.store_timestamp_ms,
        born_host=record.born_host,
        store_host=record.store_host,
        reconsume_times=record.reconsume_times,
        compression=compression,
        body_error=None if unreadable is None else unreadable.reason,
    )


def received_within(
    body: bytes, queue: MessageQueue, wanted: frozenset[str] | None, body_size_max: int, size_max: int
) -> tuple[list[ReceivedMessage], int | None]:
    """Returns the messages in the records of `body`, which came from `queue`, and the queue offset of the first message
    that was omitted because of `size_max`; None if all are included. `wanted`: tags of the messages to return; None:
    all messages. `body_size_max`: as in `received`.

    Once the bodies add up to `size_max` bytes, the result ends before the next compressed message. The first message is
    always included. Raises RemoteProtocolError for invalid records."""
    records: list[StoredParts] = [*split_records(body)]
    if wanted is not None:
        records = [parts for parts in records if find_property(parts[2], b"TAGS") in wanted]
    size = 0
    for number, (fields, content, raw, *_) in enumerate(records):
        assert content is not None
        if fields[7] & SysFlag.COMPRESSED:
            if size >= size_max and number > 0:
                return messages_of(queue, records[:number]), fields[5]
            plain, compression, unreadable = _inflated(content, fields[7], body_size_max)
            records[number] = (fields, plain, raw, compression, unreadable)
            content = plain or b""
        size += len(content)
    return messages_of(queue, records), None


def _inflated(body: bytes, sys_flag: int, size_max: int) -> tuple[bytes | None, str | None, Unreadable | None]:
    """Returns (inflated body, None, None); (stored body, name of the compression, None) if the compression's package is
    not installed; or (None, name of the compression, `Unreadable`) if the body can't be inflated."""
    kind = kind_of(sys_flag)
    try:
        plain = inflated(body, kind, size_max)
    except RemoteProtocolError as error:
        return None, kind.value, Unreadable(body, str(error))
    return (body, kind.value, None) if plain is None else (plain, None, None)
