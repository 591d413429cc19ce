"""Single messages of a node's log, for the dashboard: by queue offset, key, time, id and place in the log.

Everything is read as clients' requests read it: bytes from the disk are verified, cold ones read in a worker, damaged
ones refused, and what is not confirmed yet shown to nobody. One question reads at most READ_BYTES_MAX, unless a
single message is larger.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from ha.admin.dashboard import FoundMessages, MessageDetail, MessageLine, Missing, Queue, QueuePart
from ha.broker.batch_reader import BatchReader
from ha.broker.message_queries import has_key, read_record
from ha.broker.queue_read import ReadStatus
from ha.broker.queue_times import offset_at
from ha.errors import DamagedBytes, OffsetGone, RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.protocol.compression import Compression, inflated_begin, kind_of
from ha.protocol.message_id import decode_message_id, encode_message_id
from ha.protocol.properties import KEYS, TAGS, UNIQ_KEY
from ha.protocol.record import CRC_MASK, MessageRecord, decode_records, encode_host

if TYPE_CHECKING:
    from ha.store.consume_queue import ConsumeQueue
    from ha.store.message_store import MessageStore

READ_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of records that a search for a key reads; one message more may be begun."""
_LATEST_MS = (1 << 63) - 1

_WHY_NONE = {
    ReadStatus.MESSAGE_WAS_REMOVING: "The messages at this offset are gone from the log.",
    ReadStatus.OFFSET_FOUND_NULL: "The messages at this offset can't be read: they are damaged, and may yet be healed.",
    ReadStatus.NO_MESSAGE_IN_QUEUE: "This queue holds no message.",
    ReadStatus.OFFSET_OVERFLOW_ONE: "The queue ends here: the next message gets this offset.",
    ReadStatus.OFFSET_OVERFLOW_BADLY: "The queue ends before this offset.",
}


class MessageBrowser:
    """Reads a store's messages."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._reader = BatchReader(store)

    async def queue(self, topic: str, queue_id: int, queue_offset: int, count: int) -> QueuePart | Missing:
        """`DashboardSource.queue`."""
        queue = self._store.queues.get(topic, queue_id)
        if queue is None:
            return Missing(f"Queue {queue_id} of {topic} has never held a message here.")
        queue_offset = max(queue_offset, queue.min_offset)
        read = await self._reader.read(queue, queue_offset, count)
        try:
            records = decode_records(read.body, verify_crc=False)
        except RemoteProtocolError as error:
            return Missing(f"The messages from offset {queue_offset} on can't be read: {error}.")
        return QueuePart(
            queue=queue_range(queue),
            messages=[_line(record) for record in records],
            next_offset=read.next_offset,
            reason="" if records else _WHY_NONE.get(read.status, "No message of this queue begins here."),
        )

    async def offset_at(self, topic: str, queue_id: int, at_ms: int) -> int | Missing:
        """`DashboardSource.offset_at`."""
        queue = self._store.queues.get(topic, queue_id)
        if queue is None:
            return Missing(f"Queue {queue_id} of {topic} has never held a message here.")
        return await offset_at(self._store, queue, at_ms)

    async def with_key(self, topic: str, key: str, count: int) -> FoundMessages:
        """`DashboardSource.with_key`."""
        offsets = sorted(set(await self._store.query(topic, key, count, 0, _LATEST_MS)), reverse=True)
        found: list[MessageLine] = []
        read_bytes = 0
        for offset in offsets:
            if read_bytes >= READ_BYTES_MAX:
                return FoundMessages(found, is_cut=True)
            try:
                raw, record = await read_record(self._store, offset)
            except (OffsetGone, DamagedBytes, RemoteProtocolError):
                continue
            read_bytes += len(raw)
            if has_key(record, topic, key):
                found.append(_line(record))
        return FoundMessages(found, is_cut=len(offsets) >= count)

    async def message(self, physical_offset: int, body_size_max: int) -> MessageDetail | Missing:
        """`DashboardSource.message`."""
        record = await self._record(physical_offset)
        return record if isinstance(record, Missing) else self._detail(record, body_size_max)

    async def message_by_id(self, message_id: str) -> int | Missing:
        """`DashboardSource.message_by_id`."""
        try:
            host, port, physical_offset = decode_message_id(message_id)
        except RemoteProtocolError:
            return Missing("That is no message id: one has 32 hexadecimal digits, or 56 with an IPv6 address.")
        record = await self._record(physical_offset)
        if isinstance(record, Missing) or record.store_host != (host, port):
            return Missing(
                "No message here has that message id. If it is a unique id, which clients make, look for it as a key."
            )
        return physical_offset

    async def _record(self, physical_offset: int) -> MessageRecord | Missing:
        log = self._store.log
        try:
            raw, record = await read_record(self._store, physical_offset)
        except DamagedBytes as damaged:
            return Missing(f"The message at offset {physical_offset} is damaged: {damaged}.")
        except OffsetGone:
            return Missing(
                f"The log holds no message at offset {physical_offset}; "
                f"it goes from {max(0, log.min_offset)} to {log.dispatchable_end}."
            )
        except RemoteProtocolError:
            return Missing(f"No message begins at offset {physical_offset} of the log.")
        if physical_offset + len(raw) > log.dispatchable_end:
            return Missing(f"The message at offset {physical_offset} is not confirmed yet.")
        return record

    def _detail(self, record: MessageRecord, body_size_max: int) -> MessageDetail:
        queue = self._store.queues.get(record.topic, record.queue_id)
        body, is_cut, note = _shown_body(record, body_size_max)
        return MessageDetail(
            line=_line(record),
            message_id=encode_message_id(encode_host(*record.store_host), record.physical_offset),
            born_timestamp_ms=record.born_timestamp_ms,
            born_host=_address(record.born_host),
            store_host=_address(record.store_host),
            flag=record.flag,
            system_flags=_system_flags(record.sys_flag),
            reconsume_times=record.reconsume_times,
            prepared_transaction_offset=record.prepared_transaction_offset,
            body_crc=record.body_crc,
            is_body_sound=zlib.crc32(record.body) & CRC_MASK == record.body_crc,
            properties=record.property_map(),
            body=body,
            is_body_cut=is_cut,
            body_note=note,
            queue=None if queue is None else queue_range(queue),
        )


def queue_range(queue: ConsumeQueue, offset_at: int | None = None) -> Queue:
    """What a queue holds now."""
    return Queue(queue.queue_id, max(0, queue.min_offset), queue.max_offset, offset_at)


def _line(record: MessageRecord) -> MessageLine:
    properties = record.property_map()
    return MessageLine(
        topic=record.topic,
        queue_id=record.queue_id,
        queue_offset=record.queue_offset,
        physical_offset=record.physical_offset,
        message_size=record.total_size,
        body_size=len(record.body),
        store_timestamp_ms=record.store_timestamp_ms,
        unique_id=properties.get(UNIQ_KEY, ""),
        tags=properties.get(TAGS, ""),
        keys=properties.get(KEYS, ""),
    )


def _shown_body(record: MessageRecord, size_max: int) -> tuple[bytes, bool, str]:
    """The body as the producer gave it, whether that is only its begin, and what is to be said of it."""
    body, kind = record.body, kind_of(record.sys_flag)
    stored = body[:size_max], len(body) > size_max
    if kind is Compression.NONE:
        return *stored, ""
    try:
        begun = inflated_begin(body, kind, size_max + 1)
    except RemoteProtocolError as error:
        return *stored, f"It says that it is compressed, but {error}."
    if begun is None:
        return *stored, f"Compressed with {kind.value}; shown as stored, as halog[compression] is not installed here."
    plain, is_whole = begun
    note = f"Stored compressed with {kind.value}; shown inflated."
    if not is_whole and len(plain) <= size_max:
        note = f"Stored compressed with {kind.value}, and cut there; shown as far as it inflates."
    return plain[:size_max], len(plain) > size_max, note


def _system_flags(sys_flag: int) -> list[str]:
    transaction = {
        SysFlag.TRANSACTION_PREPARED: "half message of a transaction",
        SysFlag.TRANSACTION_COMMIT: "committed in a transaction",
        SysFlag.TRANSACTION_ROLLBACK: "rolled back",
    }
    found = [
        name
        for bit, name in (
            (SysFlag.COMPRESSED, "compressed"),
            (SysFlag.MULTI_TAGS, "several tags"),
            (SysFlag.INNER_BATCH, "batch in one record"),
        )
        if sys_flag & bit
    ]
    state = transaction.get(sys_flag & SysFlag.TRANSACTION_MASK)
    return [*found, state] if state else found


def _address(host: tuple[str, int]) -> str:
    address, port = host
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
