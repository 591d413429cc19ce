"""The commitlog: records one after another over segments of one size.

What is put together becomes one run of records, which the kernel writes to the last segment's file, as it does what a
slave gets; readers find both in the map. Neither waits for the disk. What is appended is written (`max_offset`), later
flushed (`flushed_offset`, raised by the flusher) and dispatched (`dispatched_offset`, raised by dispatch).
Makes no record itself (record_maker.py); knows no queues' files, no peers.

A record that leaves less than 8 bytes of its segment goes to the next one, and a filler takes the rest.
Sources: CommitLog (asyncPutMessage, appendData), MappedFileQueue.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from ha.errors import DiskFailed, DiskFull, OffsetGone
from ha.histogram import Histogram
from ha.protocol.codes import PutStatus
from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_filler
from ha.store.checksums import Checksums
from ha.store.damage import DamageRegistry, FoundBy
from ha.store.epochs import BACKUP_SUFFIX, EPOCH_FILE
from ha.store.files import Disk
from ha.store.mapped_file import RunBlocking, Segment, SegmentAllocator
from ha.store.options import StoreOptions
from ha.store.record_maker import NO_ROOM, AppendResult, RecordMaker
from ha.store.verified_reads import VerifiedReads
from ha.store.watched_offset import WatchedOffset

logger = logging.getLogger(__name__)

UNLIMITED = (1 << 63) - 1
"""`dispatch_limit` where there is none"""

_EMPTY = memoryview(b"")


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
        self._maker = RecordMaker(options, initial_queue_offset)
        self.segment_size = options.segment_size
        self.is_slave = options.is_slave
        """Whether its bytes are a master's; a member of a failover group changes that while it runs"""
        self.max_offset = WatchedOffset(0)
        self.flushed_offset = WatchedOffset(0)
        self.dispatched_offset = WatchedOffset(0)
        self.dispatch_limit = WatchedOffset(UNLIMITED)
        """Dispatch never passes it, and so nobody sees what lies behind it (RocketMQ: confirmOffset)"""
        self.last_store_timestamp_ms = 0
        """Store time of the newest record known; on a slave dispatch sets it"""
        self.allocator = SegmentAllocator(
            disk,
            self._directory,
            options.segment_size,
            run_blocking=run_blocking,
            retry_s=options.allocate_retry_s,
        )
        self._segments: list[Segment] = []
        self._hot_floor = 0
        self._cooled = self._cool_at = 0
        self._torn_to = 0
        self._failure: DiskFailed | None = None
        """Of a write of records: nothing is appended any more, as the node stops"""
        self._append_lock = trio.StrictFIFOLock()
        self._cool_wanted = trio.Event()
        self.append_times = Histogram()
        """From the first try of an append until its bytes are in the file, waits for the lock and a segment included"""
        self.generation = 0
        """Number of times that the log was set aside or truncated, which invalidates everything read before"""
        self.cut_under_way: trio.Event | None = None
        """Set when a cut of the log's end is done; meanwhile nothing is derived from the log"""
        self.verified = VerifiedReads(self, checksums, damage, options, run_blocking)
        """Checks what comes back from the disk"""
        self.on_reset: Callable[[], None] | None = None
        """Called while the log is empty, before its files are moved: forget what is derived from it"""
        self.keeping = trio.Lock()
        """Held by whoever saves, cleans, cuts or sets aside: one after the other. Taken before appends are held"""
        self.before_delete: Callable[[int], Awaitable[None]] = _no_note
        """Called with where the log is to begin before a segment is deleted. OSError: then it stays"""

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

    @property
    def dispatchable_end(self) -> int:
        """Up to where the log may be dispatched, and shown to anybody but a slave: with SYNC_FLUSH what is flushed."""
        written = self.flushed_offset if self._options.is_sync_flush else self.max_offset
        return min(written.value, self.dispatch_limit.value)

    def limit_dispatch(self, offset: int) -> None:
        """Let dispatch come no further than a physical offset from now on; what is dispatched already stays so.

        It may lie anywhere, also inside a record or behind the log's end.
        """
        if not self.dispatch_limit.raise_to(offset) and offset < self.dispatch_limit.value:
            self.dispatch_limit.reset(offset)

    def lift_dispatch_limit(self) -> None:
        """Let dispatch come as far as the log goes."""
        self.dispatch_limit.raise_to(UNLIMITED)

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        """Return the queue offset (entries) that the next message put to a queue gets."""
        return self._maker.next_queue_offset(topic, queue_id)

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

    def read_nowait(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Return up to `size_max` bytes of one segment, for a pull: what `read_hot` would, and what pulls have read of
        late. None if neither is there."""
        hot = self.read_hot(physical_offset, size_max)
        return hot if hot is not None else self.verified.read_recent(physical_offset, size_max)

    async def read(self, physical_offset: int, size_max: int, found_by: FoundBy = "read") -> memoryview:
        """Return what `read_hot` would, for a pull `read_nowait`, and cold bytes too: by a worker if not cached.

        At least one byte unless at `max_offset`; what this process didn't append is verified (see verified_reads.py).
        DamagedBytes if the first byte isn't what was written: `found_by` then says who noticed. OffsetGone outside
        [`min_offset`, `max_offset`]. OSError if the disk can't read.
        """
        known = (self.read_nowait if found_by == "pull" else self.read_hot)(physical_offset, size_max)
        if known is not None:
            await trio.lowlevel.checkpoint()
            return known
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

    def append(self, messages: Sequence[Message], began: float | None = None) -> list[AppendResult]:
        """Append messages in order, each for itself, without waiting; return what became of each.

        Fewer results than messages: the next one needs another segment (`add_segment`), or appends are held
        (`wait_appends_allowed`). `began`: when the caller first tried, for `append_times`. DiskFailed.
        """
        if self._append_lock.locked():
            return []
        began = trio.current_time() if began is None else began
        results = self._append(messages, 0)
        if results:
            self.append_times.observe(trio.current_time() - began)
        return results

    def append_batch(self, messages: Sequence[Message], began: float | None = None) -> list[AppendResult]:
        """As `append`, of messages that must lie in one segment, one after another (a client's batch): all or none.

        If one is illegal every result says so, as RocketMQ refuses the whole request. No results: as for `append`.
        """
        if self._append_lock.locked():
            return []
        began = trio.current_time() if began is None else began
        size = self._maker.batch_size(messages)
        if isinstance(size, AppendResult):
            return [size] * len(messages)
        segment, position = self._tail()
        if segment is None or position + size > self._maker.room_max:
            return []
        results = self._append(messages, 0)
        self.append_times.observe(trio.current_time() - began)
        return results

    async def add_segment(self) -> AppendResult | None:
        """Fill up the last segment and add the next one; return why that was not possible, None if it was.

        For the one task that appends, once the last segment has no room. Waits for at most `segment_wait_s`. Cancelled,
        it changes nothing.
        """
        await self._lock_appends()
        try:
            return await self._roll()
        finally:
            self._append_lock.release()

    @property
    def appends_are_held(self) -> bool:
        """Whether somebody else appends, or holds appends: `append` then takes nothing."""
        return self._append_lock.locked()

    async def wait_appends_allowed(self) -> None:
        """Wait until `appends_are_held` is false."""
        await self._append_lock.acquire()
        self._append_lock.release()

    async def put(self, messages: Sequence[Message]) -> list[AppendResult]:
        """Append messages in order, each for itself, waiting for segments as needed; return what became of each.

        A message for which no segment could be had within `segment_wait_s` has CREATE_MAPPED_FILE_FAILED. Cancelled, it
        leaves a prefix of the messages appended. For users of a store without a broker.
        """
        began = trio.current_time()
        await self._lock_appends()
        try:
            results = self._append(messages, 0)
            while len(results) < len(messages):
                failure = await self._roll()
                if failure is not None:
                    results.append(failure)
                results += self._append(messages, len(results))
            return results
        finally:
            self._append_lock.release()
            self.append_times.observe(trio.current_time() - began)

    def _append(self, messages: Sequence[Message], first: int) -> list[AppendResult]:
        """Append those of `messages[first:]` that fit the last segment."""
        segment, position = self._tail()
        now_ms = self._store_clock_ms()
        if segment is None:
            return self._maker.run(messages, first, 0, NO_ROOM, now_ms)[1]
        room = self._maker.room_max - position
        records, results = self._maker.run(messages, first, segment.start + position, room, now_ms)
        self._write(segment, position, records, now_ms)
        return results

    def _write(self, segment: Segment, position: int, records: bytes, now_ms: int) -> None:
        """Write records, made at `now_ms`, at the end of the last segment, and make them visible. DiskFailed."""
        if not records:
            return
        if self._failure is not None:  # the records that failed have used queue offsets, so later ones would leave gaps
            raise self._failure
        # Not through the map: a copy into it goes in any order, so a kill in its middle would leave holes, while the
        # kernel copies page by page, so a kill leaves a prefix. Besides, a page fault for a write zeroes the page.
        try:
            self._pwrite(segment, records, position)
        except OSError as error:
            self._failure = DiskFailed(segment.file.path, "write", str(error))
            raise self._failure from error
        self.last_store_timestamp_ms = now_ms  # recovery takes it for a record's: what is refused doesn't count
        self._publish(segment, position + len(records))

    def _store_clock_ms(self) -> int:
        """The wall clock, but never behind the last record.

        Recovery takes store times for an order: by the checkpoint's it tells what was flushed and what the queues have.
        RocketMQ does so too, but stores whatever the clock says. After it was set back its records seem older than what
        is before them; here they are as old as the last of those until the clock has caught up. Who looks messages up
        by time finds them either way, a step of the clock apart.
        """
        now_ms, last_ms = self._wall_clock_ms(), self.last_store_timestamp_ms
        return now_ms if now_ms > last_ms else last_ms

    # ---- appending a master's bytes (slave)

    async def append_raw(self, physical_offset: int, chunk: memoryview | bytes) -> None:
        """Append bytes of the master's log at exactly `max_offset`, within one segment.

        If the log is empty any offset is right: the segment that contains it is made, and `max_offset` is then that
        segment's start, as in RocketMQ. A chunk that does not begin there is not written, and the next offset that the
        slave asks for is `max_offset`. An empty chunk only makes the segment.

        ValueError if the caller did not check the chunk against `max_offset` and the segment's end; DiskFull, OSError
        or TooSlowError if the next segment can't be made; OSError if the disk refuses the bytes.
        """
        began = trio.current_time()
        await self._lock_appends()
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
            # Not through the map, as in `_write`: its body's CRC need not tell of holes in a record.
            self._pwrite(segment, chunk, position)
            self._publish(segment, position + size)
        finally:
            self._append_lock.release()
            self.append_times.observe(trio.current_time() - began)

    async def reset(self, first_offset: int) -> None:
        """Set everything that the store holds aside and start empty at the segment of `first_offset`.

        Commitlog, consume queues and index are renamed to `NAME.aside-N`; nothing is deleted. Afterwards `max_offset`
        is the start of the segment that contains `first_offset`. DiskFull if that can't be made: the log is then empty.
        """
        async with self.keeping, self.appends_held():
            await self.allocator.drop_ready()
            self._segments = []
            self.last_store_timestamp_ms = 0
            self._fall_to(0)
            if self.on_reset is not None:
                self.on_reset()
            await self._run_blocking(self._set_aside)
            self.verified.reset(first_offset - first_offset % self.segment_size)
            await self._add_segment(first_offset - first_offset % self.segment_size)

    def _fall_to(self, end: int) -> None:
        """Truncate the in-memory state at `end` and wake all waiters."""
        self.generation += 1
        self._maker.forget()
        self._hot_floor = end  # what is before may have been let go of long ago
        self._cooled = min(self._cooled, end)
        self._cool_at = self._torn_to = 0
        if self.dispatch_limit.value != UNLIMITED:
            self.limit_dispatch(min(self.dispatch_limit.value, end))
        for offset in (self.dispatched_offset, self.flushed_offset, self.max_offset):
            offset.reset(min(offset.value, end))

    @asynccontextmanager
    async def appends_held(self) -> AsyncIterator[None]:
        """Keep others from appending until the block ends."""
        await self._lock_appends()
        try:
            yield
        finally:
            self._append_lock.release()

    def begin_cut(self, end: int) -> list[Segment]:
        """Cut the log at a physical offset that it holds, in memory, while appends are held; call `end_cut` when the
        files are cut, too. Returns the segments that these are: the first one stays, or a part of it.

        Until then nobody reads what isn't in memory for sure, and nothing is derived.
        """
        assert self.min_offset <= end <= self.flushed_offset.value
        self.cut_under_way = trio.Event()
        number = sum(segment.start < end for segment in self._segments) or 1
        cut = self._segments[number - 1 :]
        self._segments = self._segments[:number]
        self._fall_to(end)
        self._segments[-1].map()
        return cut

    def end_cut(self) -> None:
        """Let everybody go on."""
        done, self.cut_under_way = self.cut_under_way, None
        assert done is not None
        done.set()

    async def wait_cut(self) -> None:
        """Wait until no cut is under way. No checkpoint if none is."""
        while self.cut_under_way is not None:
            await self.cut_under_way.wait()

    def count_on(self, next_offsets: dict[tuple[str, int], int]) -> None:
        """Set the next queue offsets of queues whose end dispatch does not know yet."""
        self._maker.count_on(next_offsets)

    def _set_aside(self) -> None:
        disk = self._disk
        number = 1
        root = self._options.root
        # The checkpoint first: it says where this log begins and until when it is flushed, and nothing of the next one.
        if disk.exists(root / "checkpoint"):
            disk.unlink(root / "checkpoint")
        directories = [self._directory, root / "consumequeue", root / "index", root / "checksums"]
        while any(disk.exists(path.with_name(f"{path.name}.aside-{number}")) for path in directories):
            number += 1
        for path in directories:
            if disk.exists(path):
                disk.rename(path, path.with_name(f"{path.name}.aside-{number}"))
            disk.make_dirs(path)
        for name in (EPOCH_FILE, EPOCH_FILE + BACKUP_SUFFIX):
            if disk.exists(root / name):
                disk.rename(root / name, root / f"{name}.aside-{number}")
        logger.warning("log_set_aside directory=%s number=%d", self._options.root, number)

    # ---- segments

    async def _lock_appends(self) -> None:
        try:
            self._append_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._append_lock.acquire()

    def _tail(self) -> tuple[Segment | None, int]:
        if not self._segments:
            return None, 0
        segment = self._segments[-1]
        return segment, self.max_offset.value - segment.start

    def _pwrite(self, segment: Segment, chunk: bytes | memoryview, position: int) -> None:
        try:
            segment.file.pwrite(chunk, position)
        except OSError:
            self._torn_to = max(self._torn_to, segment.start + position + len(chunk))
            raise

    @property
    def is_torn(self) -> bool:
        """Whether a part of what the disk refused may stand behind the end: only an abnormal recovery tells it from a
        record, as no CRC covers all of one."""
        return self._torn_to > self.max_offset.value

    def _publish(self, segment: Segment, position: int) -> None:
        """Make what was written up to `position` of the last segment visible, once for a whole chunk."""
        end = segment.start + position
        self.max_offset.raise_to(end)
        if position > self.segment_size // 2:
            self.allocator.want(segment.end)
        if end > self._cool_at:
            self._cool_wanted.set()

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
            try:
                self._pwrite(segment, encode_filler(self.segment_size - position), position)
            except OSError as error:
                raise DiskFailed(segment.file.path, "write", str(error)) from error
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

    async def keep_cool(self) -> None:
        """Release mapped pages far behind the end of the log from time to time, until cancelled."""
        window = self._options.hot_window_bytes
        while True:
            await self._cool_wanted.wait()
            self._cool_wanted = trio.Event()
            cool_to, generation = self.max_offset.value - 2 * window, self.generation
            await self._cool(cool_to)
            if generation != self.generation:
                continue  # set aside, or cut, meanwhile: the next append asks again
            self._cooled = max(self._cooled, cool_to)
            self._cool_at = self._cooled + 2 * window + window // 4

    async def _cool(self, cool_to: int) -> None:
        # A method of its own, so that no segment is referenced while waiting: it may be deleted meanwhile.
        for old in [old for old in self._segments if old.end > self._cooled and old.start < cool_to]:
            if old.view is not None:
                first = max(self._cooled, old.start)
                last = min(cool_to, old.end)
                await self._run_blocking(old.file.cool, first - old.start, last - first)

    # ---- for recovery and retention

    def adopt(self, segments: list[Segment], max_offset: int) -> None:
        """Take over what recovery found: contiguous segments and the end of the last good record."""
        self._segments = segments
        if segments:
            segments[-1].map()
        for offset in (self.max_offset, self.flushed_offset, self.dispatched_offset):
            offset.reset(max_offset)
        self._hot_floor = max_offset
        self._cooled = max_offset

    async def delete_first(self) -> None:
        """Delete the oldest segment (never the last). Readers that hold views keep them."""
        assert len(self._segments) > 1
        await self.before_delete(self._segments[1].start)
        held = [self._segments.pop(0)]
        self.verified.damage.forget(0, held[0].end)
        await self._run_blocking(self.verified.checksums.delete, held[0].start)
        await self._run_blocking(self._unlink, held)

    def _unlink(self, held: list[Segment]) -> None:
        """Delete the file of the one segment in `held`, and let go of it here, in a worker: the last to close a deleted
        file waits until its blocks are free, which are many."""
        self._disk.unlink(held[0].file.path)
        held.clear()

    async def sync(self, flushed: int, target: int) -> None:
        """Put everything in [`flushed`, `target`) on the disk. OSError if that failed: it is then in doubt."""
        # Only those that are synced are held meanwhile: an older one may be deleted.
        for segment in [segment for segment in self._segments if segment.start < target and segment.end > flushed]:
            await self._run_blocking(segment.sync, flushed, target)


async def _no_note(begin: int) -> None:
    pass


__all__ = ["UNLIMITED", "CommitLog"]
