"""Records as a broker stores them, made into messages as an application wants them."""

from __future__ import annotations

from ha.client.messages import MessageQueue, ReceivedMessage, StoredParts, messages_of
from ha.errors import RemoteProtocolError
from ha.protocol import properties as names
from ha.protocol.codes import SysFlag
from ha.protocol.compression import Compression, inflated, kind_of
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import find_property
from ha.protocol.record import MessageRecord, encode_host, split_records


def received(record: MessageRecord, queue: MessageQueue) -> ReceivedMessage:
    """The message in `record`, which came from `queue`. RemoteProtocolError if its body does not inflate."""
    body, compression = _inflated(record.body, record.sys_flag, record.physical_offset)
    return _received(record, queue, body, compression)


def received_all(body: bytes, queue: MessageQueue, wanted: frozenset[str] | None) -> list[ReceivedMessage]:
    """The messages in the records in `body`, which came from `queue`, with one of the tags `wanted` if not None.

    As `received` makes them one by one. RemoteProtocolError."""
    records: list[StoredParts] = [*split_records(body)]
    if wanted is not None:
        records = [parts for parts in records if find_property(parts[2], b"TAGS") in wanted]
    for number, parts in enumerate(records):
        fields, content, raw = parts[:3]
        if fields[7] & SysFlag.COMPRESSED:
            content, compression = _inflated(content, fields[7], fields[6])
            records[number] = (fields, content, raw, compression)
    return messages_of(queue, records)


def received_as_stored(record: MessageRecord, queue: MessageQueue) -> ReceivedMessage:
    """As `received`, but with the body as it is stored, and the name of its compression."""
    kind = kind_of(record.sys_flag)
    return _received(record, queue, record.body, None if kind is Compression.NONE else kind.value)


def _inflated(body: bytes, sys_flag: int, physical_offset: int) -> tuple[bytes, str | None]:
    """A body as its producer was given it, or as it is, with the name of the compression that stays."""
    kind = kind_of(sys_flag)
    try:
        found = inflated(body, kind)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"the body at {physical_offset}: {error}") from None
    return (body, kind.value) if found is None else (found, None)


def _received(record: MessageRecord, queue: MessageQueue, body: bytes, compression: str | None) -> ReceivedMessage:
    known = record.property_map()
    offset_message_id = encode_message_id(encode_host(*record.store_host), record.physical_offset)
    return ReceivedMessage(
        queue=queue,
        queue_offset=record.queue_offset,
        physical_offset=record.physical_offset,
        message_id=known.get(names.UNIQ_KEY) or offset_message_id,
        offset_message_id=offset_message_id,
        body=body,
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
    )
