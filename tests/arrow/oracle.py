"""The expected table of records, by the reference codec: one record after the other, nothing vectorised."""

import zlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from ha.protocol.codes import SysFlag
from ha.protocol.message_id import encode_message_id
from ha.protocol.record import CRC_MASK, MessageRecord, decode_record, encode_host

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


def row(record: MessageRecord, broker_name: str, *, decompress: bool = True) -> dict[str, Any]:
    """Every column of one record."""
    known = record.property_map()
    keys = known.get("KEYS")
    body = record.body
    if decompress and record.sys_flag & SysFlag.COMPRESSED:
        body = zlib.decompress(body)
    return {
        "topic": record.topic,
        "brokerName": broker_name,
        "queueId": record.queue_id,
        "queueOffset": record.queue_offset,
        "physicalOffset": record.physical_offset,
        "storeSize": record.total_size,
        "body": body,
        "bodySize": len(record.body),
        "bodyCRC": record.body_crc,
        "tags": known.get("TAGS"),
        "keys": None if keys is None else [word for word in keys.split(" ") if word],
        "properties": known,
        "propertiesString": str(record.properties, "utf-8", "replace"),
        "bornTimestamp": moment(record.born_timestamp_ms),
        "storeTimestamp": moment(record.store_timestamp_ms),
        "bornHost": "{}:{}".format(*record.born_host),
        "storeHost": "{}:{}".format(*record.store_host),
        "sysFlag": record.sys_flag,
        "flag": record.flag,
        "reconsumeTimes": record.reconsume_times,
        "preparedTransactionOffset": record.prepared_transaction_offset,
        "msgId": encode_message_id(encode_host(*record.store_host), record.physical_offset),
        "uniqKey": known.get("UNIQ_KEY"),
        "crcOk": zlib.crc32(record.body) & CRC_MASK == record.body_crc,
    }


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Rows of batches, maps as dicts."""
    found = []
    for batch in batches:
        for line in batch.to_pylist():
            if line.get("properties") is not None:
                line["properties"] = dict(line["properties"])
            found.append(line)
    return found


def plain_rows(store: Path, offsets: Iterable[int], broker_name: str) -> list[dict[str, Any]]:
    """The rows of the records at these physical offsets."""
    segments = sorted((int(file.name), file.read_bytes()) for file in (store / "commitlog").iterdir())
    found = []
    for offset in offsets:
        start, raw = max((start, raw) for start, raw in segments if start <= offset)
        found.append(row(decode_record(raw, offset - start, verify_crc=False), broker_name))
    return found
