"""Records as a broker stores them, made into messages as an application wants them."""

from __future__ import annotations

import zlib

from ha.client.messages import MessageQueue, ReceivedMessage
from ha.errors import RemoteProtocolError
from ha.protocol import properties as names
from ha.protocol.codes import SysFlag
from ha.protocol.message_id import encode_message_id
from ha.protocol.record import MessageRecord, encode_host

INFLATED_SIZE_MAX = 64 * 1024 * 1024
_COMPRESSION_NAMES = {SysFlag.COMPRESSION_LZ4: "lz4", SysFlag.COMPRESSION_ZSTD: "zstd"}


def received(record: MessageRecord, queue: MessageQueue) -> ReceivedMessage:
    """The message in `record`, which came from `queue`. RemoteProtocolError if its body does not inflate."""
    body, compression = _inflated(record)
    return _received(record, queue, body, compression)


def received_as_stored(record: MessageRecord, queue: MessageQueue) -> ReceivedMessage:
    """As `received`, but with the body as it is stored, and the name of its compression."""
    kind = record.sys_flag & SysFlag.COMPRESSION_TYPE_MASK
    compression = _COMPRESSION_NAMES.get(kind, "zlib") if record.sys_flag & SysFlag.COMPRESSED else None
    return _received(record, queue, record.body, compression)


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


def _inflated(record: MessageRecord) -> tuple[bytes, str | None]:
    """The body as the producer was given it, and None; or as stored, and the name of the compression that it still
    has."""
    if not record.sys_flag & SysFlag.COMPRESSED:
        return record.body, None
    name = _COMPRESSION_NAMES.get(record.sys_flag & SysFlag.COMPRESSION_TYPE_MASK)
    if name is not None:
        return record.body, name
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(record.body, INFLATED_SIZE_MAX)
    except zlib.error as error:
        raise RemoteProtocolError(f"the body at {record.physical_offset} does not inflate: {error}") from None
    if not inflater.eof:
        raise RemoteProtocolError(
            f"the body at {record.physical_offset} does not inflate to at most {INFLATED_SIZE_MAX} bytes"
        )
    return body, None
