"""Finds single messages for the dashboard: by queue offset, key, time, ID and physical offset.

Messages are read as for clients: bytes from disk are verified, cold messages are read in a worker thread, and damaged
and unconfirmed messages are not returned. A search for a key ends once it has read READ_BYTES_MAX bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ha.admin.dashboard.source import (
    FoundMessages,
    MessageDetail,
    MessageLine,
    Missing,
    Queue,
    QueuePart,
    SourceBusyError,
)
from ha.broker.batch_reader import BatchReader
from ha.broker.message_queries import has_key, read_record
from ha.broker.queue_read import ReadStatus
from ha.broker.queue_times import offset_at
from ha.broker.refused import RefusedError
from ha.errors import DamagedBytes, OffsetGone, RemoteProtocolError
from ha.protocol.codes import SysFlag
from ha.protocol.compression import Compression, inflated_begin, kind_of
from ha.protocol.message_id import decode_message_id, encode_message_id
from ha.protocol.properties import KEYS, TAGS, UNIQ_KEY
from ha.protocol.record import CRC_MASK, MessageRecord, decode_records, encode_host
from ha.protocol.topic_names import TABLES_TOPIC
from ha.store.consume_queue import ConsumeQueue
from ha.store.message_store import MessageStore

READ_BYTES_MAX = 8 * 1024 * 1024
"""Number of bytes of records after which a search for a key ends, even if there may be more messages."""
PREVIEW_BYTES = 256
"""Maximum number of bytes of a body that a list of messages shows."""
_LATEST_MS = (1 << 63) - 1

_WHY_NONE = {
    ReadStatus.MESSAGE_WAS_REMOVING: "The messages at this offset were deleted from the log.",
    ReadStatus.OFFSET_FOUND_NULL: "The messages at this offset are damaged; they may still be repaired.",
    ReadStatus.NO_MESSAGE_IN_QUEUE: "This queue is empty.",
    ReadStatus.OFFSET_OVERFLOW_ONE: "The queue ends here; the next message gets this offset.",
    ReadStatus.OFFSET_OVERFLOW_BADLY: "The queue ends before this offset.",
}


P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def reads_files(call: Callable[P, Coroutine[Any, Any, ResultT]]) -> Callable[P, Coroutine[Any, Any, ResultT]]:
    """Makes a method of `DashboardSource` or `DashboardActions` raise SourceBusyError if the store's files can't be
    read at present, for example because too many are open."""

    @wraps(call)
    async def reading(*arguments: P.args, **options: P.kwargs) -> ResultT:
        try:
            return await call(*arguments, **options)
        except RefusedError as error:
            raise SourceBusyError(error.remark) from error
        except OSError as error:
            raise SourceBusyError(str(error)) from error

    return reading


class MessageBrowser:
    """Reads messages of a store."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._reader = BatchReader(store)

    @reads_files
    async def queue(self, topic: str, queue_id: int, queue_offset: int, count: int) -> QueuePart | Missing:
        """See `DashboardSource.queue`."""
        queue = self._store.queues.get(topic, queue_id)
        if queue is None:
            return Missing(f"Queue {queue_id} of {topic} has no messages on this node.")
        queue_offset = max(queue_offset, queue.min_offset)
        read = await self._reader.read(queue, queue_offset, count)
        try:
            records = decode_records(read.body, verify_crc=False)
        except RemoteProtocolError as error:
            return Missing(f"The messages from offset {queue_offset} can't be read: {error}.")
        return QueuePart(
            queue=queue_range(queue),
            messages=[_line(record) for record in records],
            next_offset=read.next_offset,
            reason="" if records else _WHY_NONE.get(read.status, "No message of this queue starts at this offset."),
        )

    @reads_files
    async def offset_at(self, topic: str, queue_id: int, at_ms: int) -> int | Missing:
        """See `DashboardSource.offset_at`."""
        queue = self._store.queues.get(topic, queue_id)
        if queue is None:
            return Missing(f"Queue {queue_id} of {topic} has no messages on this node.")
        return await offset_at(self._store, queue, at_ms)

    @reads_files
    async def with_key(self, topic: str, key: str, count: int) -> FoundMessages:
        """See `DashboardSource.with_key`."""
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

    @reads_files
    async def message(self, physical_offset: int, body_size_max: int) -> MessageDetail | Missing:
        """See `DashboardSource.message`."""
        record = await self._record(physical_offset)
        if isinstance(record, Missing):
            return record
        if record.topic == TABLES_TOPIC:
            return Missing("Records of the tables are not shown, because they can contain passwords.")
        return self._detail(record, body_size_max)

    @reads_files
    async def message_by_id(self, message_id: str) -> int | Missing:
        """See `DashboardSource.message_by_id`."""
        try:
            host, port, physical_offset = decode_message_id(message_id)
        except RemoteProtocolError:
            return Missing("Not a message ID, which has 32 hexadecimal digits, or 56 with an IPv6 address.")
        record = await self._record(physical_offset)
        if isinstance(record, Missing) or record.store_host != (host, port):
            return Missing(
                "No message on this node has that message ID. Search for a unique ID, which clients assign, as a key."
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
                f"The log has no message at offset {physical_offset}; "
                f"its range is {max(0, log.min_offset)} to {log.dispatchable_end}."
            )
        except RemoteProtocolError:
            return Missing(f"No message starts at offset {physical_offset} of the log.")
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
    """Returns a queue's ID and range. `offset_at`: its queue offset at a requested time, if any."""
    return Queue(queue.queue_id, max(0, queue.min_offset), queue.max_offset, offset_at)


def _line(record: MessageRecord) -> MessageLine:
    properties = record.property_map()
    is_secret = record.topic == TABLES_TOPIC  # its bodies can contain passwords
    begin, is_cut, _ = (b"", False, "") if is_secret else _shown_body(record, PREVIEW_BYTES)
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
        body_begin=begin,
        is_body_cut=is_cut,
    )


def _shown_body(record: MessageRecord, size_max: int) -> tuple[bytes, bool, str]:
    """Returns up to `size_max` bytes of the body, decompressed if possible; whether it is cut; and a note for the user,
    "" for a body that was sent uncompressed."""
    body, kind = record.body, kind_of(record.sys_flag)
    stored = body[:size_max], len(body) > size_max
    if kind is Compression.NONE:
        return *stored, ""
    try:
        begun = inflated_begin(body, kind, size_max + 1)
    except RemoteProtocolError as error:
        return *stored, f"Marked as compressed, but {error}."
    if begun is None:
        return *stored, f"Compressed with {kind.value}; shown as stored, because halog[compression] is not installed."
    plain, is_whole = begun
    note = f"Compressed with {kind.value}; shown decompressed."
    if not is_whole and len(plain) <= size_max:
        note = f"Compressed with {kind.value} and truncated; shown as far as it can be decompressed."
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
