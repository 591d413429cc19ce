"""A log in memory that implements ReplicatedLog, with disk faults, and content for it."""

import random
from collections.abc import Awaitable, Callable

import trio

from ha.errors import DamagedBytes, OffsetGone
from ha.protocol.record import FILLER_SIZE_MIN, Message
from ha.protocol.record_encoding import encode_filler, encode_record
from ha.replication.log import ReplicatedLog
from ha.store.damage import FoundBy
from ha.store.segmented_log import LogTail
from ha.store.watched_offset import WatchedOffset

SEGMENT_SIZE = 4096


def records(size: int, *, seed: int = 0, body_sizes: tuple[int, int] = (0, 300), stored_ms: int = 1) -> bytes:
    """The first `size` bytes of a log: records and fillers, drawn from `seed` except for the store time."""
    chance = random.Random(seed)
    content = b""
    while len(content) < size:
        at = len(content)
        record = encode_record(
            Message("topic", 0, chance.randbytes(chance.randint(*body_sizes))),
            queue_offset=chance.randrange(1 << 40),
            physical_offset=at,
            store_timestamp_ms=stored_ms,
            store_host=bytes(8),
        )
        left = SEGMENT_SIZE - at % SEGMENT_SIZE
        content += record if len(record) + FILLER_SIZE_MIN <= left else encode_filler(left).ljust(left, b"\0")
    return content[:size]


class MemoryLog:
    """Bytes from `first_offset` on; -1: no segment yet. `hot_bytes`: how much of the tail read_hot answers for."""

    def __init__(
        self,
        content: bytes = b"",
        *,
        first_offset: int = -1,
        segment_size: int = SEGMENT_SIZE,
        hot_bytes: int = 1 << 40,
        flushes: bool = True,
    ) -> None:
        if content and first_offset < 0:
            first_offset = 0
        self.min_offset = first_offset
        self.content = bytearray(content)
        self.max_offset = WatchedOffset(max(first_offset, 0) + len(content))
        self.flushed_offset = WatchedOffset(self.max_offset.value)
        self.segment_size = segment_size
        self.hot_bytes = hot_bytes
        self.flushes = flushes
        self.aside: list[tuple[int, bytes]] = []
        self.before_append: Callable[[], Awaitable[None]] | None = None
        self.cold_reads = 0
        self.damaged: tuple[int, int] | None = None
        self._healed = trio.lowlevel.ParkingLot()

    def put(self, content: bytes) -> None:
        """Append bytes of a master's own."""
        if self.min_offset < 0:
            self.min_offset = 0
        self.content += content
        self._publish(self.max_offset.value + len(content))

    def delete_before(self, offset: int) -> None:
        """Delete everything before `offset`, the start of a segment, as retention does."""
        assert offset % self.segment_size == 0
        del self.content[: offset - self.min_offset]
        self.min_offset = offset

    def bytes_at(self, offset: int, size: int) -> bytes:
        start = offset - self.min_offset
        return bytes(self.content[start : start + size])

    def read_hot(self, physical_offset: int, size_max: int) -> memoryview | None:
        if physical_offset < self.max_offset.value - self.hot_bytes:
            return None
        if not max(self.min_offset, 0) <= physical_offset <= self.max_offset.value:
            return None
        room = self.segment_size - physical_offset % self.segment_size
        size = min(size_max, room, self.max_offset.value - physical_offset)
        return memoryview(self.bytes_at(physical_offset, size))

    async def wait_healed(self, begin: int, end: int) -> None:
        await trio.lowlevel.checkpoint()
        while self.damaged is not None and self.damaged[0] < end and begin < self.damaged[1]:
            await self._healed.park()

    def damage(self, begin: int, end: int) -> None:
        """Mark [begin, end) as damaged: reads of it fail."""
        self.damaged = (begin, end)

    def heal(self, before: int | None = None) -> None:
        """Heal all damage, or the part before an offset."""
        self.damaged = (before, self.damaged[1]) if self.damaged is not None and before is not None else None
        self._healed.unpark_all()

    async def read(self, physical_offset: int, size_max: int, found_by: FoundBy = "read") -> memoryview | bytes:
        await trio.lowlevel.checkpoint()
        if self.damaged is not None and physical_offset < self.damaged[1]:
            if physical_offset >= self.damaged[0]:
                raise DamagedBytes(*self.damaged, "the test says so")
            size_max = min(size_max, self.damaged[0] - physical_offset)
        self.cold_reads += 1
        if not self.min_offset <= physical_offset <= self.max_offset.value:
            raise OffsetGone(physical_offset, self.min_offset, self.max_offset.value)
        room = self.segment_size - physical_offset % self.segment_size
        return self.bytes_at(physical_offset, min(size_max, room, self.max_offset.value - physical_offset))

    def tail(self) -> LogTail | None:
        return None

    def note_appended(self, size: int, began: float) -> None:
        raise NotImplementedError("it has no tail")

    async def append_raw(self, physical_offset: int, chunk: memoryview) -> None:
        if self.before_append is not None:
            await self.before_append()
        if self.min_offset < 0:
            self.min_offset = physical_offset - physical_offset % self.segment_size
            self.max_offset.reset(self.min_offset)
            self.flushed_offset.reset(self.min_offset)
            if physical_offset != self.min_offset:
                return
        assert physical_offset == self.max_offset.value, (physical_offset, self.max_offset.value)
        assert physical_offset % self.segment_size + len(chunk) <= self.segment_size
        self.content += chunk
        self._publish(self.max_offset.value + len(chunk))

    async def reset(self, first_offset: int) -> None:
        self.aside.append((self.min_offset, bytes(self.content)))
        self.content = bytearray()
        self.min_offset = first_offset
        self.max_offset.reset(first_offset)
        self.flushed_offset.reset(first_offset)

    def flush(self) -> None:
        self.flushed_offset.raise_to(self.max_offset.value)

    def _publish(self, end: int) -> None:
        self.max_offset.raise_to(end)
        if self.flushes:
            self.flush()


def _conforms(log: MemoryLog) -> ReplicatedLog:
    return log
