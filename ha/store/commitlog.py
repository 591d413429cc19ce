"""The commitlog: records one after another over segments of one size.

Putting builds records straight in the map of the last segment; a slave's bytes are written to its file by the kernel.
Neither waits for the disk. What is appended is written (`max_offset`), later flushed (`flushed_offset`, raised by the
flusher) and dispatched (`dispatched_offset`, raised by dispatch). Knows records only as far as putting them needs; no
queues' files, no peers.

A record that leaves less than 8 bytes of its segment goes to the next one, and a filler takes the rest.
Sources: CommitLog (asyncPutMessage, DefaultAppendMessageCallback, appendData), MappedFileQueue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import trio

from ha.errors import DiskFull, LocalProtocolError, OffsetGone
from ha.protocol.codes import PutStatus, SysFlag
from ha.protocol.record import (
    FILLER_SIZE_MIN,
    PROPERTY_CRC_SIZE,
    TOPIC_SIZE_MAX,
    TOPIC_SIZE_V1_MAX,
    Message,
    encode_filler,
    encode_record_into,
    record_size,
)
from ha.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX
from ha.store.checksums import Checksums
from ha.store.damage import DamageRegistry, FoundBy
from ha.store.files import Disk
from ha.store.mapped_file import RunBlocking, Segment, SegmentAllocator
from ha.store.options import StoreOptions
from ha.store.verified_reads import VerifiedReads
from ha.store.watched_offset import WatchedOffset

logger = logging.getLogger(__name__)

PROPERTIES_SIZE_MAX = 32767
RECORD_OVERHEAD_MAX = 64 * 1024
"""A record may exceed maxMessageSize, which is about the body alone, by so much (RocketMQ: MessageExtEncoder)."""

_EMPTY = memoryview(b"")
_TOPIC_ALWAYS_FITS = 31
"""Characters of a topic that is short enough whatever they are: in UTF-8 each takes at most 4 bytes."""
_TRANSACTION_MASK = SysFlag.TRANSACTION_MASK
_UNCOUNTED = (SysFlag.TRANSACTION_PREPARED, SysFlag.TRANSACTION_ROLLBACK)


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """What became of one message. Offsets, size, time are −1 unless `status.is_stored`; `remark` says why it isn't."""

    status: PutStatus
    physical_offset: int = -1
    size: int = -1
    queue_offset: int = -1
    store_timestamp_ms: int = -1
    remark: str = ""

    @property
    def next_offset(self) -> int:
        """Physical offset behind the record: what must be flushed and acknowledged."""
        return self.physical_offset + self.size


class CommitLog:
    """The log of one store. One task appends at a time; anybody reads."""

    def __init__(
        self,
        disk: Disk,
        options: StoreOptions,
        *,
        run_blocking: RunBlocking,
        wall_clock_ms: Callable[[], int],
        initial_queue_offset: Callable[[str, int], int],
        checksums: Checksums,
        damage: DamageRegistry,
    ) -> None:
        self._disk = disk
        self._options = options
        self._directory = options.commitlog_path
        self._run_blocking = run_blocking
        self._wall_clock_ms = wall_clock_ms
        self._initial_queue_offset = initial_queue_offset
        self.segment_size = options.segment_size
        self._properties_size_max = PROPERTIES_SIZE_MAX - (PROPERTY_CRC_SIZE + 1 if options.append_property_crc else 0)
        self.max_offset = WatchedOffset(0)
        self.flushed_offset = WatchedOffset(0)
        self.dispatched_offset = WatchedOffset(0)
        self.last_store_timestamp_ms = 0
        """Store time of the newest record known; on a slave dispatch sets it"""
        self.allocator = SegmentAllocator(
            disk,
            self._directory,
            options.segment_size,
            run_blocking=run_blocking,
            warm_bytes=0 if options.is_slave else options.warm_ahead_bytes,
            retry_s=options.allocate_retry_s,
        )
        self._segments: list[Segment] = []
        self._queue_offsets: dict[tuple[str, int], int] = {}
        self._hot_floor = 0
        self._cooled = 0
        self._append_turn = trio.StrictFIFOLock()
        self._warm_wanted = trio.Event()
        self.generation = 0
        """How often the log was set aside"""
        self.verified = VerifiedReads(self, checksums, damage, options, run_blocking)
        """Checks what comes back from the disk"""
        self.on_reset: Callable[[], None] | None = None
        """Called while the log is empty, before its files are moved: forget what is derived from it"""

    # ---- what is there

    @property
    def min_offset(self) -> int:
        """First physical offset held; −1 while there is no segment."""
        return self._segments[0].start if self._segments else -1

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments in order; the last one is written to."""
        return self._segments

    def segment_at(self, physical_offset: int) -> Segment:
        """Return the segment that holds an offset. OffsetGone if none does."""
        segments = self._segments
        if segments:
            number = (physical_offset - segments[0].start) // self.segment_size
            if 0 <= number < len(segments):
                return segments[number]
        raise OffsetGone(physical_offset, self.min_offset, self.max_offset.value)

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        """Return the queue offset (entries) that the next message put to a queue gets."""
        return self._queue_offsets.get((topic, queue_id)) or self._initial_queue_offset(topic, queue_id)

    # ---- reading

    def read_hot(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Return up to `size_max` bytes of one segment if they are in memory for sure; None if they may be cold.

        Empty at `max_offset`. None also for offsets that the log does not hold. The view stays valid as long as it is
        held, even when the segment is deleted.
        """
        end = self.max_offset.value
        if physical_offset == end:
            return _EMPTY
        if physical_offset > end or physical_offset < self._hot_floor:
            return None
        if physical_offset < end - self._options.hot_window_bytes:
            return None
        damage = self.verified.damage
        if damage and damage.first_in(physical_offset, end) is not None:
            return None
        segments = self._segments
        number = (physical_offset - segments[0].start) // self.segment_size
        if number < 0:
            return None
        segment = segments[number]
        view = segment.view
        if view is None:
            return None
        position = physical_offset - segment.start
        return view[position : min(position + size_max, self.segment_size, end - segment.start)]

    async def read(self, physical_offset: int, size_max: int, found_by: FoundBy = "read") -> memoryview:
        """Return what `read_hot` would, and cold bytes too: read from the file, in a worker if they aren't cached.

        At least one byte unless at `max_offset`; what this process didn't append is verified (see verified_reads.py).
        DamagedBytes if the first byte isn't what was written: `found_by` then says who noticed. OffsetGone outside
        [`min_offset`, `max_offset`]. OSError if the disk can't read.
        """
        hot = self.read_hot(physical_offset, size_max)
        if hot is not None:
            await trio.lowlevel.checkpoint()
            return hot
        return await self.verified.read(physical_offset, size_max, found_by)

    async def read_all(self, physical_offset: int, size: int, found_by: FoundBy = "read") -> bytes:
        """Return exactly `size` bytes of one segment. DamagedBytes if any of them isn't what was written."""
        raw = bytes(await self.read(physical_offset, size, found_by))
        while len(raw) < size:
            piece = await self.read(physical_offset + len(raw), size - len(raw), found_by)
            if not piece:
                raise OffsetGone(physical_offset + size, self.min_offset, self.max_offset.value)
            raw += piece
        return raw

    async def wait_healed(self, begin: int, end: int) -> None:
        """Wait until no byte of [begin, end) is listed as damaged."""
        await self.verified.damage.wait_healed(begin, end)

    # ---- putting messages (master)

    async def put(self, messages: Sequence[Message]) -> list[AppendResult]:
        """Append messages in order, each for itself, and say what became of each.

        Waits only for its turn and when the next segment is not ready yet, at most `segment_wait_s`, after which
        CREATE_MAPPED_FILE_FAILED. Cancelled, it leaves a prefix of the messages appended.
        """
        await self._take_turn()
        try:
            return await self._put(messages)
        finally:
            self._append_turn.release()

    async def _put(self, messages: Sequence[Message]) -> list[AppendResult]:
        options = self._options
        store_host = options.store_host
        append_crc = options.append_property_crc
        size_of = (
            record_size
            if len(store_host) == 8 and not append_crc
            else partial(record_size, store_host_size=len(store_host), append_property_crc=append_crc)
        )
        room_max = self.segment_size - FILLER_SIZE_MIN
        body_size_max, properties_size_max = options.message_size_max, self._properties_size_max
        size_max = min(body_size_max + RECORD_OVERHEAD_MAX, room_max)
        ok = PutStatus.PUT_OK
        results: list[AppendResult] = []
        queue_offsets = self._queue_offsets
        now_ms = self._store_clock_ms()
        segment, position = self._tail()
        view = segment.view if segment is not None else None
        for message in messages:
            size = size_of(message)
            topic = message.topic
            if (
                size > size_max
                or len(message.body) > body_size_max
                or len(message.properties) > properties_size_max
                or len(topic) > _TOPIC_ALWAYS_FITS
            ):
                refusal = self._refusal(message, size, room_max)
                if refusal is not None:
                    results.append(refusal)
                    continue
            if view is None or position + size > room_max:
                self._publish(segment, position)
                failure = await self._roll()
                segment, position = self._tail()
                view = segment.view if segment is not None else None
                if failure is not None:
                    results.append(failure)
                    continue
                now_ms = self._store_clock_ms()
            assert segment is not None
            assert view is not None
            counted = message.sys_flag & _TRANSACTION_MASK not in _UNCOUNTED
            if counted:
                key = (topic, message.queue_id)
                queue_offset = queue_offsets.get(key, -1)
                if queue_offset < 0:
                    queue_offset = self._initial_queue_offset(*key)
            else:
                queue_offset = 0
            physical_offset = segment.start + position
            try:
                written = encode_record_into(
                    view,
                    position,
                    message,
                    queue_offset=queue_offset,
                    physical_offset=physical_offset,
                    store_timestamp_ms=now_ms,
                    store_host=store_host,
                    append_property_crc=append_crc,
                )
            except LocalProtocolError as error:
                results.append(AppendResult(PutStatus.MESSAGE_ILLEGAL, remark=str(error)))
                continue
            assert written == size, (written, size)
            position += size
            self.last_store_timestamp_ms = now_ms  # recovery takes it for a record's: what is refused doesn't count
            if counted:
                queue_offsets[key] = queue_offset + 1
            results.append(AppendResult(ok, physical_offset, size, queue_offset, now_ms))
        self._publish(segment, position)
        return results

    async def put_batch(self, messages: Sequence[Message]) -> list[AppendResult]:
        """Append messages that must lie in one segment, one after another (a client's batch): all of them or none.

        If one is illegal every result says so, as RocketMQ refuses the whole request.
        """
        options = self._options
        sizes = [
            record_size(m, store_host_size=len(options.store_host), append_property_crc=options.append_property_crc)
            for m in messages
        ]
        room_max = self.segment_size - FILLER_SIZE_MIN
        for message, size in zip(messages, sizes, strict=True):
            refusal = self._refusal(message, size, room_max)
            if refusal is not None:
                return [refusal] * len(messages)
        total = sum(sizes)
        if total > min(room_max, options.message_size_max + RECORD_OVERHEAD_MAX):
            remark = f"batch of {total} bytes exceeds what one segment or request may hold"
            return [AppendResult(PutStatus.MESSAGE_ILLEGAL, remark=remark)] * len(messages)
        await self._take_turn()
        try:
            segment, position = self._tail()
            if segment is None or position + total > room_max:
                failure = await self._roll()
                if failure is not None:
                    return [failure] * len(messages)
            return await self._put(messages)
        finally:
            self._append_turn.release()

    def _store_clock_ms(self) -> int:
        """The wall clock, but never behind the last record.

        Recovery takes store times for an order: by the checkpoint's it tells what was flushed and what the queues have.
        RocketMQ does so too, but stores whatever the clock says. After it was set back its records seem older than what
        is before them; here they are as old as the last of those until the clock has caught up. Who looks messages up
        by time finds them either way, a step of the clock apart.
        """
        now_ms, last_ms = self._wall_clock_ms(), self.last_store_timestamp_ms
        return now_ms if now_ms > last_ms else last_ms

    def _refusal(self, message: Message, size: int, room_max: int) -> AppendResult | None:
        options = self._options
        properties_size_max = self._properties_size_max
        if len(message.properties) > properties_size_max:
            return AppendResult(
                PutStatus.PROPERTIES_SIZE_EXCEEDED,
                remark=f"properties of {len(message.properties)} bytes, at most {properties_size_max} are allowed",
            )
        body_size = len(message.body)
        if body_size > options.message_size_max or size > options.message_size_max + RECORD_OVERHEAD_MAX:
            return AppendResult(
                PutStatus.MESSAGE_ILLEGAL,
                remark=f"body of {body_size} bytes, at most {options.message_size_max} are allowed",
            )
        if size > room_max:
            return AppendResult(
                PutStatus.MESSAGE_ILLEGAL,
                remark=f"record of {size} bytes does not fit a segment of {self.segment_size}",
            )
        topic = message.topic
        if len(topic) > _TOPIC_ALWAYS_FITS:
            topic_size = len(topic.encode())
            is_long = topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
            if topic_size > (TOPIC_SIZE_MAX if is_long else TOPIC_SIZE_V1_MAX):
                return AppendResult(PutStatus.MESSAGE_ILLEGAL, remark=f"topic of {topic_size} bytes is too long")
        return None

    # ---- appending a master's bytes (slave)

    async def append_raw(self, physical_offset: int, chunk: memoryview | bytes) -> None:
        """Append bytes of the master's log at exactly `max_offset`, within one segment.

        If the log is empty any offset is right: the segment that contains it is made, and `max_offset` is then that
        segment's start, as in RocketMQ. A chunk that does not begin there is not written, and the next offset that the
        slave asks for is `max_offset`. An empty chunk only makes the segment.

        ValueError if the caller did not check the chunk against `max_offset` and the segment's end; DiskFull, OSError
        or TooSlowError if the next segment can't be made; OSError if the disk refuses the bytes.
        """
        await self._take_turn()
        try:
            size = len(chunk)
            if not self._segments:
                await self._add_segment(physical_offset - physical_offset % self.segment_size)
                if physical_offset != self.max_offset.value:
                    return
            if physical_offset != self.max_offset.value:
                raise ValueError(f"append at {physical_offset}, but the log ends at {self.max_offset.value}")
            if size == 0:
                return
            segment, position = self._tail()
            assert segment is not None
            if position == self.segment_size:
                await self._add_segment(segment.end)
                segment, position = self._tail()
                assert segment is not None
            if position + size > self.segment_size:
                raise ValueError(f"{size} bytes at {physical_offset} cross the end of the segment at {segment.end}")
            # Not through the map: a copy goes in any order, so a kill in its middle would leave holes, which a record's
            # CRC, of the body only, need not tell. The kernel copies page by page: a kill leaves the begin.
            segment.file.pwrite(chunk, position)
            self._publish(segment, position + size)
        finally:
            self._append_turn.release()

    async def reset(self, first_offset: int) -> None:
        """Set everything that the store holds aside and start empty at the segment of `first_offset`.

        Commitlog, consume queues and index are renamed to `NAME.aside-N`; nothing is deleted. Afterwards `max_offset`
        is the start of the segment that contains `first_offset`. DiskFull if that can't be made: the log is then empty.
        """
        await self._take_turn()
        try:
            await self.allocator.drop_ready()
            self.generation += 1
            self._segments = []
            self._queue_offsets.clear()
            self.last_store_timestamp_ms = 0
            self._hot_floor = self._cooled = 0
            for offset in (self.max_offset, self.flushed_offset, self.dispatched_offset):
                offset.reset(0)
            if self.on_reset is not None:
                self.on_reset()
            await self._run_blocking(self._set_aside)
            self.verified.reset(first_offset - first_offset % self.segment_size)
            await self._add_segment(first_offset - first_offset % self.segment_size)
        finally:
            self._append_turn.release()

    def _set_aside(self) -> None:
        disk = self._disk
        number = 1
        root = self._options.root
        directories = [self._directory, root / "consumequeue", root / "index", root / "checksums"]
        while any(disk.exists(path.with_name(f"{path.name}.aside-{number}")) for path in directories):
            number += 1
        for path in directories:
            if disk.exists(path):
                disk.rename(path, path.with_name(f"{path.name}.aside-{number}"))
            disk.make_dirs(path)
        logger.warning("log_set_aside directory=%s number=%d", self._options.root, number)

    # ---- segments

    async def _take_turn(self) -> None:
        try:
            self._append_turn.acquire_nowait()
        except trio.WouldBlock:
            await self._append_turn.acquire()

    def _tail(self) -> tuple[Segment | None, int]:
        if not self._segments:
            return None, 0
        segment = self._segments[-1]
        return segment, self.max_offset.value - segment.start

    def _publish(self, segment: Segment | None, position: int) -> None:
        """Make what was written up to `position` of the last segment visible, once for a whole chunk."""
        if segment is None:
            return
        self.max_offset.raise_to(segment.start + position)
        if position > self.segment_size // 2:
            self.allocator.want(segment.end)
        if segment.warmed < self.segment_size and position > segment.warmed - self._options.warm_ahead_bytes // 2:
            self._warm_wanted.set()

    async def _roll(self) -> AppendResult | None:
        """Fill up the last segment and add the next; if that can't be had, change nothing and say why."""
        segment, position = self._tail()
        try:
            start = 0 if segment is None else segment.end
            following = self.allocator.take_nowait(start)
            if following is None:
                following = await self.allocator.take(start, self._options.segment_wait_s)
        except (DiskFull, OSError, trio.TooSlowError) as error:
            reason = str(error) or f"it was not ready after {self._options.segment_wait_s} s"
            return AppendResult(PutStatus.CREATE_MAPPED_FILE_FAILED, remark=f"create mapped file failed: {reason}")
        if segment is not None and position < self.segment_size:
            assert segment.view is not None
            segment.view[position : position + FILLER_SIZE_MIN] = encode_filler(self.segment_size - position)
            self.max_offset.raise_to(segment.end)
        self._append_segment(following)
        return None

    async def _add_segment(self, start: int) -> None:
        following = self.allocator.take_nowait(start)
        if following is None:
            following = await self.allocator.take(start, self._options.segment_wait_s)
        self._append_segment(following)

    def _append_segment(self, segment: Segment) -> None:
        if not self._segments and segment.start > 0:
            for offset in (self.max_offset, self.flushed_offset, self.dispatched_offset):
                offset.reset(segment.start)
        self._segments.append(segment)
        hot_from = segment.start - self._options.hot_window_bytes
        for old in self._segments[-2::-1]:
            if old.end >= hot_from:
                continue
            if old.view is None:
                break
            old.view = None

    async def keep_warm(self) -> None:
        """Fault in the map ahead of the end, and let the part far behind go, until cancelled.

        Not the former on a slave: what is written by the kernel needs no page in the map, readers find those that are
        written already, and to fault them in for writing costs several times what writing costs.
        """
        ahead = self._options.warm_ahead_bytes
        window = self._options.hot_window_bytes
        while True:
            await self._warm_wanted.wait()
            self._warm_wanted = trio.Event()
            segment, position = self._tail()
            if segment is None:
                continue
            begin = max(segment.warmed, position)
            end = min(position + 2 * ahead, self.segment_size)
            segment.warmed = max(end, segment.warmed)
            if begin < end and not self._options.is_slave:
                await self._run_blocking(segment.file.warm, begin, end - begin)
            cool_to = self.max_offset.value - 2 * window
            for old in list(self._segments):
                if old.view is not None and old.end > self._cooled and old.start < cool_to:
                    first = max(self._cooled, old.start)
                    last = min(cool_to, old.end)
                    await self._run_blocking(old.file.cool, first - old.start, last - first)
            self._cooled = max(self._cooled, cool_to)

    # ---- for recovery and retention

    def adopt(self, segments: list[Segment], max_offset: int) -> None:
        """Take over what recovery found: contiguous segments and the end of the last good record."""
        self._segments = segments
        if segments:
            segments[-1].map()
            segments[-1].warmed = max(0, max_offset - segments[-1].start)
        for offset in (self.max_offset, self.flushed_offset, self.dispatched_offset):
            offset.reset(max_offset)
        self._hot_floor = max_offset
        self._cooled = max_offset

    async def delete_first(self) -> Segment:
        """Delete the oldest segment (never the last) and return what it was. Readers that hold views keep them."""
        assert len(self._segments) > 1
        segment = self._segments.pop(0)
        self.verified.damage.forget(0, segment.end)
        await self._run_blocking(self.verified.checksums.delete, segment.start)
        await self._run_blocking(self._disk.unlink, segment.file.path)
        return segment

    async def sync(self, flushed: int, target: int) -> None:
        """Put everything in [`flushed`, `target`) on the disk. OSError if that failed: it is then in doubt."""
        for segment in list(self._segments):
            if segment.start < target and segment.end > flushed:
                await self._run_blocking(segment.file.sync)


__all__ = ["AppendResult", "CommitLog"]
