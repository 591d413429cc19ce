"""What one consumer holds of one queue: messages that wait, messages that are handled, and how far everything is done.

Messages are finished in any order. What may be committed is the lowest queue offset that is not finished, so that a
crash repeats messages and never loses one. Source: ProcessQueue.
"""

from __future__ import annotations

from collections import deque

import anyio
import msgspec

from ha.client.messages import ReceivedMessage

_OVERHEAD = 1024
"""Bytes that a message takes beside its body, roughly."""


class BudgetStatistics(msgspec.Struct, frozen=True):
    """What is held now, over all queues."""

    message_count: int
    byte_count: int


class Budget:
    """Counts what all queues of a consumer hold, against its bounds."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._count = 0
        self._bytes = 0
        self._room: anyio.Event | None = None  # there only while somebody waits: an event costs more than a message

    def statistics(self) -> BudgetStatistics:
        """Return what is held."""
        return BudgetStatistics(self._count, self._bytes)

    @property
    def has_room(self) -> bool:
        """Whether more may be fetched."""
        return self._count < self._count_max and self._bytes < self._bytes_max

    @property
    def room_bytes(self) -> int:
        """How many bytes more may be held; 0 or less if there is no room."""
        return self._bytes_max - self._bytes

    async def wait_room(self) -> None:
        """Returns when more may be fetched."""
        while not self.has_room:
            if self._room is None:
                self._room = anyio.Event()
            await self._room.wait()

    def take(self, count: int, size: int) -> None:
        """So much more is held."""
        self._count += count
        self._bytes += size

    def give_back(self, count: int, size: int) -> None:
        """So much less is held."""
        self._count -= count
        self._bytes -= size
        if self._room is not None and self.has_room:
            self._room.set()
            self._room = None


class ProcessQueue:
    """One stretch of one queue, from `next_offset` on, until it is dropped.

    `put` brings messages in the order of their offsets, `take` hands them out in that order, `finish` ends one.
    """

    def __init__(self, next_offset: int, budget: Budget, *, count_max: int, bytes_max: int, span_max: int) -> None:
        self.next_offset = next_offset
        """Where the next pull begins."""
        self.is_dropped = False
        """Nothing is put or taken any more, and what is still finished does not count."""
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
        """The first queue offset that is not finished: everything before it was handled or not wanted."""
        return self._unfinished[0] if self._unfinished else self.next_offset

    @property
    def count(self) -> int:
        """Messages held, those being handled among them."""
        return self._count

    @property
    def byte_count(self) -> int:
        """Bytes held."""
        return self._bytes

    @property
    def waiting_count(self) -> int:
        """Messages that nobody has taken yet."""
        return len(self._waiting)

    @property
    def last_offset(self) -> int:
        """The highest queue offset held; 0 if none is."""
        return self._unfinished[-1] if self._unfinished else 0

    @property
    def has_room(self) -> bool:
        """Whether this queue may be pulled from."""
        return (
            self._count < self._count_max
            and self._bytes < self._bytes_max
            and self.next_offset - self.commit_offset <= self._span_max
        )

    @property
    def room_bytes(self) -> int:
        """How many bytes more may be held of this queue and all together; 0 or less if there is no room."""
        return min(self._bytes_max - self._bytes, self._budget.room_bytes)

    async def wait_room(self) -> None:
        """Returns when this queue and the budget have room."""
        while True:
            while not self.has_room and not self.is_dropped:
                if self._room is None:
                    self._room = anyio.Event()
                await self._room.wait()
            if self._budget.has_room or self.is_dropped:
                return
            await self._budget.wait_room()

    def put(self, messages: list[ReceivedMessage], next_offset: int) -> None:
        """Takes in what a pull brought; `next_offset` is where the next one begins."""
        assert not self.is_dropped
        size = sum(len(message.stored_body) + _OVERHEAD for message in messages)
        self._waiting.extend(messages)
        self._unfinished.extend(message.queue_offset for message in messages)
        self._count += len(messages)
        self._bytes += size
        self._budget.take(len(messages), size)
        self.next_offset = next_offset

    def take(self) -> ReceivedMessage | None:
        """The next message to be handled; None if there is none any more."""
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, message: ReceivedMessage) -> None:
        """`message`, which was taken, has to be handled once more: before all that wait."""
        if not self.is_dropped:
            self._waiting.appendleft(message)

    def finish(self, message: ReceivedMessage) -> None:
        """`message`, which was taken, is done."""
        if self.is_dropped:
            return
        size = len(message.stored_body) + _OVERHEAD
        self._count -= 1
        self._bytes -= size
        self._budget.give_back(1, size)
        unfinished, early = self._unfinished, self._finished_early
        early.add(message.queue_offset)
        while unfinished and unfinished[0] in early:
            early.remove(unfinished.popleft())
        if self._room is not None and self.has_room:
            self._room.set()
            self._room = None

    def drop(self) -> None:
        """Forgets what waits. `commit_offset` stays what it is."""
        if not self.is_dropped:
            self.is_dropped = True
            self._waiting.clear()
            self._budget.give_back(self._count, self._bytes)
            self._count = self._bytes = 0
            if self._room is not None:
                self._room.set()
