"""Records that go the plain way, one after the other: inner batches, and compressed bodies."""

from __future__ import annotations

import zlib

import pyarrow as pa

from ha.arrow.read_options import RowFilter
from ha.errors import RemoteProtocolError
from ha.protocol.batch import decode_batch
from ha.protocol.codes import SysFlag
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import KEY_SEPARATOR, decode_properties
from ha.protocol.record import CRC_MASK, MessageRecord, encode_host

INFLATED_SIZE_MAX = 64 << 20
"""A body that inflates to more bytes is damage: RocketMQ's own limit is 4 MiB, of a client 16."""
MILLISECONDS_MAX = ((1 << 63) - 1) // 1000
"""Times beyond this are null in a timestamp column, which counts microseconds."""
_INFLATE_STEP = 1 << 16
_CODECS = {SysFlag.COMPRESSION_LZ4: "lz4", SysFlag.COMPRESSION_ZSTD: "zstd"}


def inflate(body: bytes, sys_flag: int) -> bytes:
    """Return the body as the producer was given it. RemoteProtocolError if it does not inflate within the limit."""
    codec = _CODECS.get(sys_flag & SysFlag.COMPRESSION_TYPE_MASK)
    try:
        if codec is None:
            inflater = zlib.decompressobj()
            plain = inflater.decompress(body, INFLATED_SIZE_MAX)
            is_whole = inflater.eof
        else:
            plain, is_whole = _inflate_stepwise(body, codec)
    except (zlib.error, OSError, pa.ArrowInvalid) as error:
        raise RemoteProtocolError(f"a body of {len(body)} bytes does not inflate: {error}") from None
    if not is_whole:
        raise RemoteProtocolError(f"a body of {len(body)} bytes does not inflate to at most {INFLATED_SIZE_MAX}")
    return plain


def _inflate_stepwise(body: bytes, codec: str) -> tuple[bytes, bool]:
    """The body inflated by one of Arrow's codecs, and whether that is all of it.

    Step by step, as a read allocates what is asked for and not what comes.
    """
    pieces = []
    room = INFLATED_SIZE_MAX
    with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
        while room and (piece := stream.read(min(_INFLATE_STEP, room))):
            pieces.append(piece)
            room -= len(piece)
        return b"".join(pieces), not (room == 0 and stream.read(1))


def plain_rows(record: MessageRecord, broker_name: str) -> list[dict[str, object]]:
    """Return every column of a record, or of each message in it if it is an inner batch. Timestamps in µs."""
    is_batch = bool(record.sys_flag & SysFlag.INNER_BATCH)
    crc_ok = zlib.crc32(record.body) & CRC_MASK == record.body_crc
    body: bytes | None = record.body
    if record.sys_flag & SysFlag.COMPRESSED:
        try:
            body = inflate(record.body, record.sys_flag)
        except RemoteProtocolError:
            body, crc_ok = None, False
    parts = [(record.flag, body, record.properties)]
    first = record.queue_offset
    if is_batch and body is not None:
        try:
            first = _inner_base(record)
            parts = [(flag, inner, properties) for flag, inner, properties in decode_batch(body)]
        except RemoteProtocolError:
            first, crc_ok = record.queue_offset, False
    store_host = encode_host(*record.store_host)
    rows: list[dict[str, object]] = []
    for number, (flag, inner, properties) in enumerate(parts):
        known = decode_properties(properties)
        keys = known.get("KEYS")
        rows.append(
            {
                "topic": record.topic,
                "brokerName": broker_name,
                "queueId": record.queue_id,
                "queueOffset": first + number,
                "physicalOffset": record.physical_offset,
                "storeSize": record.total_size,
                "body": inner,
                "bodySize": None if inner is None else len(inner),
                "bodyCRC": record.body_crc,
                "tags": known.get("TAGS"),
                "keys": None if keys is None else [word for word in keys.split(KEY_SEPARATOR) if word],
                "properties": list(known.items()),
                "propertiesString": str(properties, "utf-8", "replace"),
                "bornTimestamp": _micros(record.born_timestamp_ms),
                "storeTimestamp": _micros(record.store_timestamp_ms),
                "bornHost": f"{record.born_host[0]}:{record.born_host[1]}",
                "storeHost": f"{record.store_host[0]}:{record.store_host[1]}",
                "sysFlag": record.sys_flag,
                "flag": flag,
                "reconsumeTimes": record.reconsume_times,
                "preparedTransactionOffset": record.prepared_transaction_offset,
                "msgId": encode_message_id(store_host, record.physical_offset),
                "uniqKey": known.get("UNIQ_KEY"),
                "crcOk": crc_ok,
            }
        )
    return rows


def _inner_base(record: MessageRecord) -> int:
    """The queue offset of an inner batch's first message. RemoteProtocolError if its property says nothing usable."""
    text = decode_properties(record.properties).get("INNER_BASE")
    if text is None:
        return record.queue_offset
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise RemoteProtocolError(f"INNER_BASE {text[:40]!r} is no queue offset")
    return int(text)


def _micros(ms: int) -> int | None:
    """A time in µs, or None if that is no int64: no CRC covers a record's head."""
    return ms * 1000 if -MILLISECONDS_MAX <= ms <= MILLISECONDS_MAX else None


def passes(where: RowFilter, row: dict[str, object]) -> bool:
    """Tell whether a row of `plain_rows` passes the filter."""

    def within(name: str, begin: int | None, end: int | None) -> bool:
        value = row.get(name)
        assert value is None or isinstance(value, int)
        if begin is None and end is None:
            return True
        return value is not None and (begin is None or value >= begin) and (end is None or value < end)

    keys = row.get("keys")
    words = keys if isinstance(keys, list) else []
    store_begin = None if where.store_begin_ms is None else where.store_begin_ms * 1000
    store_end = None if where.store_end_ms is None else where.store_end_ms * 1000
    return (
        (where.topics is None or row.get("topic") in where.topics)
        and (where.queue_ids is None or row.get("queueId") in where.queue_ids)
        and (where.tags is None or row.get("tags") in where.tags)
        and (where.keys is None or row.get("uniqKey") in where.keys or not where.keys.isdisjoint(words))
        and within("queueOffset", where.queue_offset_begin, where.queue_offset_end)
        and within("physicalOffset", where.physical_begin, where.physical_end)
        and within("storeTimestamp", store_begin, store_end)
    )
