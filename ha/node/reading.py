"""Reads a node's own queues, for a program that embeds the node. The program gets the same messages as clients: bytes
from disk are verified, and a member of a failover group returns only confirmed messages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec
import trio

from ha.broker.batch_reader import BATCH_COUNT_MAX, BatchReader
from ha.protocol.record import MessageRecord, decode_records
from ha.store.message_store import MessageStore

UNREADABLE_RETRY_S = 1.0
"""Pause before the next attempt to read messages that can't be read at present, in seconds."""


class ReadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one read. Offsets are queue offsets; the queue holds [min_offset, max_offset).

    Continue reading at `next_offset`. If `next_offset` is the requested offset, nothing was read: at or above
    `max_offset`, because the queue ends there; below it, because the messages can't be read at present (they are
    damaged and may still be repaired, or too many files are open).
    """

    messages: list[MessageRecord]
    next_offset: int
    min_offset: int
    max_offset: int


class Reading:
    """An endless async iterator over the messages of one queue; see `Node.messages`."""

    def __init__(self, wait: Callable[[int], Awaitable[list[MessageRecord]]], queue_offset: int) -> None:
        """`wait` returns messages from a queue offset on, at least one."""
        self.next_offset = queue_offset
        """The queue offset after the last message returned; before the first one, the offset to start at."""
        self._wait = wait
        self._ready: deque[MessageRecord] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageRecord:
        """Returns the next message, and waits for it if necessary. Raises OSError if the disk can't read. After a
        cancellation or an error, the next call returns the same message."""
        if not self._ready:
            self._ready.extend(await self._wait(self.next_offset))
        message = self._ready.popleft()
        self.next_offset = message.queue_offset + 1
        return message


async def wait_messages(store: MessageStore, topic: str, queue_id: int, queue_offset: int) -> list[MessageRecord]:
    """Returns at least one message of a queue from `queue_offset` on; waits until there is one. Raises OSError if the
    disk can't read."""
    dispatched = store.log.dispatched_offset
    while True:
        seen = dispatched.value
        found = await read_queue(store, topic, queue_id, queue_offset, BATCH_COUNT_MAX)
        if found.messages:
            return found.messages
        if found.next_offset == queue_offset and dispatched.value == seen:  # else it was raised or reset meanwhile
            is_unreadable = queue_offset < found.max_offset
            with trio.move_on_after(UNREADABLE_RETRY_S if is_unreadable else math.inf):
                await dispatched.wait_beyond(seen)
        queue_offset = found.next_offset


async def read_queue(store: MessageStore, topic: str, queue_id: int, queue_offset: int, count_max: int) -> ReadResult:
    """See `Node.read`."""
    queue = store.queues.get(topic, queue_id)
    if queue is None:
        return ReadResult(messages=[], next_offset=queue_offset, min_offset=0, max_offset=0)
    queue_offset = max(queue_offset, queue.min_offset)
    read = await BatchReader(store).read(queue, queue_offset, count_max)
    return ReadResult(
        messages=decode_records(read.body, verify_crc=False),
        next_offset=read.next_offset if read.body else max(queue_offset, min(read.next_offset, read.max_offset)),
        min_offset=read.min_offset,
        max_offset=read.max_offset,
    )
