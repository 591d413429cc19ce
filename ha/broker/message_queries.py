"""Requests for single messages: 12 QUERY_MESSAGE by key or unique key, 33 VIEW_MESSAGE_BY_ID by physical offset.

The key index contains hashes only, so each record that it names is checked. An answer is one frame: if not all messages
fit, it contains the newest ones (RocketMQ sends a frame that no client can read). VIEW_MESSAGE_BY_ID with a topic
returns a message only if it belongs to that topic. Access control relies on this; RocketMQ does not compare the topics.
Source: QueryMessageProcessor.
"""

from __future__ import annotations

import trio

from ha.broker.core import BrokerCore
from ha.broker.refused import refused_if_unreadable
from ha.errors import DamagedBytes, OffsetGone, RemoteProtocolError
from ha.protocol.admin_requests import QueryMessageRequest, ViewMessageRequest
from ha.protocol.codes import RequestCode, ResponseCode
from ha.protocol.headers import parse_header
from ha.protocol.properties import KEY_SEPARATOR, KEYS, UNIQ_KEY
from ha.protocol.record import RECORD_PLACE, RECORD_SIZE_MIN, MessageRecord, decode_record
from ha.protocol.remoting import FRAME_SIZE_MAX, RemotingCommand
from ha.remoting import RemotingConnection, RequestHandler
from ha.store.message_store import MessageStore

UNIQUE_KEY_COUNT_MAX = 32
"""Maximum number of messages found by unique key (RocketMQ: defaultQueryMaxNum)."""
ANSWER_SIZE_MAX = 15 * 1024 * 1024
"""Maximum bytes of records in one answer, unless a single record is larger; a frame has at most 16 MiB."""
DISPATCH_WAIT_S = 2.0
"""Maximum time in seconds that `is_in_queue` waits for the dispatch of a record; clients wait at least 3 s for an
answer."""


class MessageQueries:
    """Answers queries for messages from the log and its index."""

    def __init__(self, core: BrokerCore) -> None:
        self._store = core.store
        self._is_guarded = core.guard is not None

    def handlers(self) -> dict[int, RequestHandler]:
        """Returns the handlers by request code."""
        return {RequestCode.QUERY_MESSAGE: self.query, RequestCode.VIEW_MESSAGE_BY_ID: self.view}

    async def query(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """QUERY_MESSAGE (12): answers with the newest messages in a topic that have a key and were stored in a time
        range, oldest first; QUERY_NOT_FOUND if there are none. Raises RefusedError if the disk can't read."""
        request = parse_header(QueryMessageRequest, command.ext_fields)
        count_max = max(0, request.max_num)
        if request.unique_key_query:
            count_max = UNIQUE_KEY_COUNT_MAX
        with refused_if_unreadable():
            offsets = await self._store.query(
                request.topic, request.key, count_max, request.begin_timestamp, request.end_timestamp
            )
        found: list[bytes] = []
        size = 0
        for offset in sorted(set(offsets), reverse=True):
            raw = await self._matching(offset, request)
            if raw is None:
                continue
            size += len(raw)
            if found and size > ANSWER_SIZE_MAX:
                break
            found.append(raw)
        if not found:
            return command.reply(
                ResponseCode.QUERY_NOT_FOUND,
                "can not find message, maybe time range not correct",
                {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"},
            )
        files = self._store.index.files if self._store.index is not None else ()
        ext_fields = {
            "indexLastUpdateTimestamp": str(files[-1].end_timestamp_ms if files else 0),
            "indexLastUpdatePhyoffset": str(files[-1].end_physical_offset if files else 0),
        }
        return command.reply(ResponseCode.SUCCESS, None, ext_fields, b"".join(reversed(found)))

    async def view(self, connection: RemotingConnection, command: RemotingCommand) -> RemotingCommand:
        """VIEW_MESSAGE_BY_ID (33): answers with the message at a physical offset; SYSTEM_ERROR if there is none, if it
        is damaged, or if it is not in the requested topic. Raises RefusedError if the disk can't read."""
        request = parse_header(ViewMessageRequest, command.ext_fields)
        found, damage = await find_record(self._store, request.offset)
        reason = damage and f": {damage}"
        # In a failover group, records beyond the dispatch limit may still be truncated.
        if found is not None and request.offset + len(found[0]) <= self._store.log.dispatchable_end:
            raw, record = found
            is_of_topic = record.topic == request.topic
            if is_of_topic and self._is_guarded:
                is_of_topic = await is_in_queue(self._store, record)
            if not request.topic or is_of_topic:
                return command.reply(ResponseCode.SUCCESS, body=raw)
            reason = f" in topic {request.topic}"
        return command.reply(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {request.offset}{reason}")

    async def _matching(self, offset: int, request: QueryMessageRequest) -> bytes | None:
        """Returns the record at `offset` if it has the requested topic and key, and can be read; otherwise None."""
        found, _ = await find_record(self._store, offset)
        return found[0] if found is not None and has_key(found[1], request.topic, request.key) else None


def has_key(record: MessageRecord, topic: str, key: str) -> bool:
    """Returns whether a record belongs to `topic`, and `key` is its unique key or one of its keys."""
    if record.topic != topic:
        return False
    properties = record.property_map()
    return key == properties.get(UNIQ_KEY) or key in properties.get(KEYS, "").split(KEY_SEPARATOR)


async def find_record(store: MessageStore, physical_offset: int) -> tuple[tuple[bytes, MessageRecord] | None, str]:
    """Returns (result of `read_record`, ""), or (None, description) if the record is damaged, or (None, "") if there is
    no record at `physical_offset`. Raises RefusedError if the disk can't read.
    """
    try:
        with refused_if_unreadable():
            return await read_record(store, physical_offset), ""
    except DamagedBytes as damaged:
        return None, str(damaged)
    except (OffsetGone, RemoteProtocolError):
        return None, ""


async def is_in_queue(store: MessageStore, record: MessageRecord) -> bool:
    """Returns whether the queue that a record names has an entry for it. Waits at most DISPATCH_WAIT_S until the record
    is dispatched. Raises RefusedError if the disk can't read.

    Call this before granting access to a record because of its topic, if a client chose the physical offset. Otherwise
    a client could read other topics: a message body can contain a forged start of a record of any topic, whose size
    covers the records that follow in the log.
    """
    log = store.log
    with trio.move_on_after(DISPATCH_WAIT_S):
        while log.dispatched_offset.value <= record.physical_offset:
            await log.dispatched_offset.wait_beyond(log.dispatched_offset.value)
    queue = store.queues.get(record.topic, record.queue_id)
    with refused_if_unreadable():
        entries = [] if queue is None else queue.read(record.queue_offset, 1)
    return bool(entries) and entries[0][:2] == (record.physical_offset, record.total_size)


RECORD_SIZE_MAX = FRAME_SIZE_MAX
"""Maximum bytes of a record that is read by its offset. Clients choose the offset, and a message body can contain a
forged head of a record of any size."""


async def read_record(store: MessageStore, physical_offset: int) -> tuple[bytes, MessageRecord]:
    """Returns the record at `physical_offset`, as stored and decoded.

    Raises OffsetGone if the offset is outside the log, RemoteProtocolError if no valid record begins there,
    DamagedBytes if the record is damaged, and OSError.
    """
    log = store.log
    end = log.max_offset.value
    if not 0 <= log.min_offset <= physical_offset <= end - RECORD_SIZE_MIN:
        raise OffsetGone(physical_offset, log.min_offset, end)
    head = await log.read_all(physical_offset, RECORD_PLACE.size, "pull")
    size, _, _, says_offset = RECORD_PLACE.unpack(head)
    room = min(log.segment_at(physical_offset).end, end, physical_offset + RECORD_SIZE_MAX) - physical_offset
    if says_offset != physical_offset or not RECORD_SIZE_MIN <= size <= room:
        raise RemoteProtocolError(f"no record begins at {physical_offset}")
    raw = await log.read_all(physical_offset, size, "pull")
    return raw, decode_record(raw, verify_crc=False)
