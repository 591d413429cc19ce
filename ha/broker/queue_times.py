"""Store times of a queue's messages, and search by time. Source: DefaultMessageStore."""

from __future__ import annotations

from ha.broker.message_queries import read_record
from ha.broker.refused import refused_if_unreadable
from ha.errors import DamagedBytes, OffsetGone, RemoteProtocolError
from ha.store.consume_queue import ConsumeQueue
from ha.store.message_store import MessageStore

UNKNOWN_TIME_MS = 1 << 62
"""Store time of a damaged message; sorts after all others."""


def bounds(queue: ConsumeQueue | None) -> tuple[int, int]:
    """Returns the minimum and maximum queue offset; 0 for a queue that does not exist."""
    return (0, 0) if queue is None else (queue.min_offset, queue.max_offset)


async def store_time_ms(store: MessageStore, queue: ConsumeQueue, queue_offset: int) -> int:
    """Returns the store time (ms) of the message at `queue_offset`; -1 if it was deleted.

    UNKNOWN_TIME_MS if the message or its entry is damaged: a search then ends before it rather than after it. Raises
    RefusedError if the disk can't read.
    """
    try:
        with refused_if_unreadable():
            entries = queue.read(queue_offset, 1)
            if not entries:
                return -1
            # Reads the size from the record: a blank entry, which fills a gap, has only an offset.
            _, record = await read_record(store, entries[0].physical_offset)
            return record.store_timestamp_ms
    except OffsetGone:
        return -1
    except (DamagedBytes, RemoteProtocolError):
        return UNKNOWN_TIME_MS


async def known_store_time_ms(store: MessageStore, queue: ConsumeQueue | None, queue_offset: int) -> int:
    """As `store_time_ms`, but -1 for a damaged message or a queue that does not exist, as in RocketMQ's statistics."""
    if queue is None:
        return -1
    found = await store_time_ms(store, queue, queue_offset)
    return -1 if found == UNKNOWN_TIME_MS else found


async def offset_at(
    store: MessageStore, queue: ConsumeQueue | None, timestamp_ms: int, *, is_upper: bool = False
) -> int:
    """Returns the queue offset of the first message stored at or after `timestamp_ms`; the queue's end if there is
    none.

    With `is_upper`, that of the last message stored at or before `timestamp_ms`; the queue's start if there is none. 0
    for a queue that does not exist. Raises RefusedError if the disk can't read.
    """
    if queue is None or queue.min_offset >= queue.max_offset:
        return max(0, queue.min_offset) if queue is not None else 0
    low, high = queue.min_offset, queue.max_offset
    while low < high:
        middle = (low + high) // 2
        stored_ms = await store_time_ms(store, queue, middle)
        if stored_ms < timestamp_ms or (is_upper and stored_ms == timestamp_ms):
            low = middle + 1
        else:
            high = middle
    return max(queue.min_offset, low - 1) if is_upper else low
