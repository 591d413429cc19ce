"""Records as a broker stores them, made into messages as an application wants them."""

from __future__ import annotations

from ha.client.compression import Compression, inflated, kind_of
from ha.client.messages import MessageQueue, ReceivedMessage
from ha.errors import RemoteProtocolError
from ha.protocol import properties as names
from ha.protocol.message_id import encode_message_id
from ha.protocol.record import MessageRecord, encode_host


def received(record: MessageRecord, queue: MessageQueue) -> ReceivedMessage:
    """The message in `record`, which came from `queue`. RemoteProtocolError if its body does not inflate."""
    kind = kind_of(record.sys_flag)
    try:
        body = inflated(record.body, kind)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"the body at {record.physical_offset}: {error}") from None
    return _received(record, queue, record.body, kind.value) if body is None else _received(record, queue, body, None)


def received_as_stored(record: MessageRecord, queue: MessageQueue) -> ReceivedMessage:
    """As `received`, but with the body as it is stored, and the name of its compression."""
    kind = kind_of(record.sys_flag)
    return _received(record, queue, record.body, None if kind is Compression.NONE else kind.value)


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
