"""The messages of one queue that a consumer holds, and the queue offset up to which all are finished.

Messages finish in any order. The offset to commit is the lowest unfinished one, so a crash repeats messages but never
loses one. Source: ProcessQueue.
"""

from __future__ import annotations

from collections import deque

import anyio
import msgspec

from ha.client.messages import ReceivedMessage

_OVERHEAD = 1024
"""Approximate bytes of memory per message in addition to its body."""


class BudgetStatistics(msgspec.Struct, frozen=True):
    """Number of messages that a consumer holds over all queues, and their bytes (see `ProcessQueue.byte_count`)."""

    message_count: int
    byte_count: int


class Budget:
    """Limits the messages and bytes held over all queues of a consumer."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._count = 0
        self._bytes = 0
        self._room: anyio.Event | None = None  # exists only while a task waits: an event costs more than a message

    def statistics(self) -> BudgetStatistics:
        """Returns the messages and bytes held at present."""
        return BudgetStatistics(self._count, self._bytes)

    @property
    def has_room(self) -> bool:
        """Whether more messages may be fetched."""
        return self._count < self._count_max and self._bytes < self._bytes_max

    @property
    def room_bytes(self) -> int:
        """Number of bytes left within the limit; 0 or less if it is reached."""
        return self._bytes_max - self._bytes

    async def wait_room(self) -> None:
        """Returns when more messages may be fetched."""
        while not self.has_room:
            if self._room is None:
                self._room = anyio.Event()
            await self._room.wait()

    def take(self, count: int, size: int) -> None:
        """Adds `count` messages of `size` bytes in total, even beyond the limits."""
        self._count += count
        self._bytes += size

    def release(self, count: int, size: int) -> None:
        """Subtracts `count` messages of `size` bytes in total, and wakes `wait_room` if there is room."""
        self._count -= count
        self._bytes -= size
        if self._room is not None and self.has_room:
            self._room.set()
            self._room = None


class ProcessQueue:
    """The messages of one queue from a start offset on, until it is dropped.

    `put` adds messages in the order of their offsets, `take` returns them in that order, `finish` completes one.
    """

    def __init__(self, next_offset: int, budget: Budget, *, count_max: int, bytes_max: int, span_max: int) -> None:
        self.next_offset = next_offset
        """Queue offset of the next pull."""
        self.is_dropped = False
        """Whether `drop` was called: no messages can be added or taken, and `finish` has no effect."""
        self._budget = budget
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._span_max = span_max
        self._waiting: deque[ReceivedMessage] = deque()
        self._unfinished: deque[int] = deque()  # offsets, ascending; those in _finished_early are done
        self._finished_early: set[int] = set()
        self._count = 0
        self._bytes = 0
        self._room: anyio.Event | None = None

    @property
    def commit_offset(self) -> int:
        """The first unfinished queue offset: everything before it was handled or filtered out."""
        return self._unfinished[0] if self._unfinished else self.next_offset

    @property
    def count(self) -> int:
        """Number of messages held, including those being handled."""
        return self._count

    @property
    def byte_count(self) -> int:
        """Bytes held: bodies, and `_OVERHEAD` for each message."""
        return self._bytes

    @property
    def last_offset(self) -> int:
        """The highest queue offset of the messages held; 0 if there are none."""
        return self._unfinished[-1] if self._unfinished else 0

    @property
    def has_room(self) -> bool:
        """Whether this queue is below its own limits, so that it may be pulled from."""
        return (
            self._count < self._count_max
            and self._bytes < self._bytes_max
            and self.next_offset - self.commit_offset <= self._span_max
        )

    @property
    def room_bytes(self) -> int:
        """Bytes left for this queue within its own and the consumer's limit; 0 or less if one of them is reached."""
        return min(self._bytes_max - self._bytes, self._budget.room_bytes)

    async def wait_room(self) -> None:
        """Returns when this queue and the budget have room, or the queue is dropped."""
        while True:
            while not self.has_room and not self.is_dropped:
                if self._room is None:
                    self._room = anyio.Event()
                await self._room.wait()
            if self._budget.has_room or self.is_dropped:
                return
            await self._budget.wait_room()

    def put(self, messages: list[ReceivedMessage], next_offset: int) -> None:
        """Adds the messages of a pull; `next_offset` is the queue offset of the next pull. Don't call it after
        `drop`."""
        assert not self.is_dropped
        size = sum(len(message.stored_body) + _OVERHEAD for message in messages)
        self._waiting.extend(messages)
        self._unfinished.extend(message.queue_offset for message in messages)
        self._count += len(messages)
        self._bytes += size
        self._budget.take(len(messages), size)
        self.next_offset = next_offset

    def take(self) -> ReceivedMessage | None:
        """Returns the next message to handle; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, message: ReceivedMessage) -> None:
        """Puts a taken message back to the front, to be handled again. No effect after `drop`."""
        if not self.is_dropped:
            self._waiting.appendleft(message)

    def finish(self, message: ReceivedMessage) -> None:
        """Completes a taken message, which may raise `commit_offset`."""
        if self.is_dropped:
            return
        size = len(message.stored_body) + _OVERHEAD
        self._count -= 1
        self._bytes -= size
        self._budget.release(1, size)
        unfinished, early = self._unfinished, self._finished_early
        early.add(message.queue_offset)
        while unfinished and unfinished[0] in early:
            early.remove(unfinished.popleft())
        if self._room is not None and self.has_room:
            self._room.set()
            self._room = None

    def drop(self) -> None:
        """Discards the waiting messages. `commit_offset` no longer changes."""
        if not self.is_dropped:
            self.is_dropped = True
            self._waiting.clear()
            self._budget.release(self._count, self._bytes)
            self._count = self._bytes = 0
            if self._room is not None:
                self._room.set()
