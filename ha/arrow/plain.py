"""Converts one record at a time into rows: decompresses bodies, and divides inner batches into their messages."""

from __future__ import annotations

import zlib

from ha.arrow.read_options import RowFilter
from ha.errors import OptionError, RemoteProtocolError
from ha.protocol.batch import decode_batch
from ha.protocol.codes import SysFlag
from ha.protocol.compression import inflated, kind_of
from ha.protocol.message_id import encode_message_id
from ha.protocol.properties import KEY_SEPARATOR, decode_properties
from ha.protocol.record import CRC_MASK, MessageRecord, encode_host

MILLISECONDS_MAX = ((1 << 63) - 1) // 1000
"""Latest time (ms) that fits a timestamp column, which counts microseconds; later ones are null."""


def inflate(body: bytes, sys_flag: int, size_max: int) -> bytes:
    """Decompresses a body. Raises RemoteProtocolError if it is damaged or, decompressed, longer than `size_max` bytes;
    OptionError if a required package is not installed."""
    kind = kind_of(sys_flag)
    plain = inflated(body, kind, size_max)
    if plain is None:
        raise OptionError(
            "decompress",
            f"there are bodies compressed with {kind.value}, which requires a package that is not installed",
            "false, or install halog[compression] wherever the log is read",
        )
    return plain


def plain_body(body: bytes | None, sys_flag: int, size_max: int) -> bytes | None:
    """Returns a body, decompressed if it is compressed; None if it is damaged or longer than `size_max` bytes. Raises
    OptionError as in `inflate`."""
    if body is None or not sys_flag & SysFlag.COMPRESSED:
        return body
    try:
        return inflate(body, sys_flag, size_max)
    except RemoteProtocolError:
        return None


def plain_rows(
    record: MessageRecord, broker_name: str, body_size_max: int, *, decompress: bool = True
) -> list[dict[str, object]]:
    """Returns one row with all columns for a record, or one for each message of an inner batch. Timestamps in µs.

    A compressed body is None if it is damaged or longer than `body_size_max` bytes. An inner batch that can't be
    divided is one row without a body. Without `decompress` a compressed body is as stored, and a compressed inner batch
    is one row. Raises OptionError as in `inflate`.
    """
    is_compressed = bool(record.sys_flag & SysFlag.COMPRESSED)
    is_split = bool(record.sys_flag & SysFlag.INNER_BATCH) and (decompress or not is_compressed)
    crc_ok = zlib.crc32(record.body) & CRC_MASK == record.body_crc
    body = plain_body(record.body, record.sys_flag, body_size_max) if decompress else record.body
    parts = [(record.flag, body, record.properties)]
    first = record.queue_offset
    if is_split and body is not None:
        try:
            first = _inner_base(record)
            parts = [(flag, inner, properties) for flag, inner, properties in decode_batch(body)]
        except RemoteProtocolError:
            first, crc_ok, parts = record.queue_offset, False, [(record.flag, None, record.properties)]
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
                "bodySize": len(inner) if is_split and inner is not None else len(record.body),
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
    """Returns the queue offset of an inner batch's first message. Raises RemoteProtocolError if the property INNER_BASE
    is invalid."""
    text = decode_properties(record.properties).get("INNER_BASE")
    if text is None:
        return record.queue_offset
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise RemoteProtocolError(f"INNER_BASE {text[:40]!r} is no queue offset")
    return int(text)


def _micros(ms: int) -> int | None:
    """Converts a time to µs; None if the result overflows int64, as it may in a damaged head, which no CRC covers."""
    return ms * 1000 if -MILLISECONDS_MAX <= ms <= MILLISECONDS_MAX else None


def passes(where: RowFilter, row: dict[str, object]) -> bool:
    """Returns whether a row of `plain_rows` passes the filter."""

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
