"""The commitlog: consecutive records in segments of one size.

Messages that are put together become consecutive records, which one system call writes to the file of the last segment;
the bytes that a slave receives are written in the same way. Such a write does not wait for the disk. Readers find the
written bytes in the map. Appended bytes are first written (`max_offset`), later flushed (`flushed_offset`, raised by
the flusher) and dispatched (`dispatched_offset`, raised by dispatch). Records are made by record_maker.py; queues and
peers are unknown here.

A record that would leave less than 8 bytes of its segment goes to the next one, and a filler takes the rest. Sources:
CommitLog (asyncPutMessage, appendData), MappedFileQueue.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import trio

from ha.errors import DiskFailed, DiskFull, OffsetGone
from ha.histogram import Histogram
from ha.protocol.codes import PutStatus
from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_filler
from ha.store.checksums import Checksums
from ha.store.damage import DamageRegistry, FoundBy
from ha.store.files import Disk, is_passing
from ha.store.log_reset import make_waiting_segment, move_aside
from ha.store.mapped_file import RunBlocking, Segment, SegmentAllocator
from ha.store.options import StoreOptions
from ha.store.record_maker import NO_ROOM, AppendResult, RecordMaker
from ha.store.segmented_log import UNLIMITED, LogTail, SegmentedLog
from ha.store.verified_reads import VerifiedReads


class CommitLog(SegmentedLog):
    """The log of one store. One task appends at a time; any task reads."""

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
        super().__init__(options, run_blocking, damage)
        self._disk = disk
        self._directory = options.commitlog_path
        self._wall_clock_ms = wall_clock_ms
        self._maker = RecordMaker(options, initial_queue_offset)
        self.is_slave = options.is_slave
        """Whether the log's bytes come from a master; changes at run time in a member of a failover group"""
        self.last_store_timestamp_ms = 0
        """Store time of the newest known record, 0 if there is none; on a slave, dispatch sets it"""
        self.allocator = SegmentAllocator(
            disk,
            self._directory,
            options.segment_size,
            run_blocking=run_blocking,
            retry_s=options.allocate_retry_s,
            preallocate=options.preallocate,
        )
        self._torn_to = 0
        self._failure: DiskFailed | None = None
        """Error of the first failed write of records; None if none failed. Nothing is appended after it, and the node
        stops"""
        self._append_lock = trio.StrictFIFOLock()
        self.append_times = Histogram()
        """Durations of appends in seconds, including all waits, from the first try until the bytes are in the file"""
        self.verified = VerifiedReads(self, checksums, options, run_blocking)
        """Reads bytes from the files and compares them with their checksums"""
        self.on_reset: Callable[[], None] | None = None
        """Called during a reset, while the log is empty, to forget what is derived from the files that were set
        aside"""
        self.maintenance_lock = trio.Lock()
        """Serializes saving, retention, truncation and reset. Acquire it before `appends_held`"""
        self.before_delete: Callable[[int], Awaitable[None]] = _no_note
        """Awaited before a segment is deleted, with the physical offset at which the log will then begin. If it raises
        OSError, the segment stays"""

    def next_queue_offset(self, topic: str, queue_id: int) -> int:
        """Returns the queue offset (entries) that the next message put to a queue gets."""
        return self._maker.next_queue_offset(topic, queue_id)

    # ---- reading

    def read_nowait(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Returns up to `size_max` bytes of one segment for a pull, if they are certain to be in memory (`read_hot`) or
        a recent pull has read them; otherwise None."""
        hot = self.read_hot(physical_offset, size_max)
        return hot if hot is not None else self.verified.read_recent(physical_offset, size_max)

    def read_cached(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Like `read` for a pull, if the page cache has the bytes; otherwise None: then call `read`."""
        return self.verified.read_cached(physical_offset, size_max)

    async def read(self, physical_offset: int, size_max: int, found_by: FoundBy = "read") -> memoryview:
        """Returns bytes from a physical offset on: from memory if `read_hot` has them (for a pull, `read_nowait` or
        `read_cached`), otherwise from the file. A worker reads what the page cache lacks.

        At least one byte, up to `size_max`, of one segment; empty at `max_offset`. Bytes from the file are verified
        (verified_reads.py). Raises DamagedBytes if the first byte isn't what was written; the range is then listed as
        found by `found_by`. Raises OffsetGone outside [`min_offset`, `max_offset`]. Raises OSError if the disk can't
        read checksums, or bytes that have no checksum.
        """
        is_pull = found_by == "pull"
        known = self.read_nowait(physical_offset, size_max) if is_pull else self.read_hot(physical_offset, size_max)
        if known is None and is_pull:
            known = self.read_cached(physical_offset, size_max)
        if known is not None:
            await trio.lowlevel.checkpoint()
            return known
        return await self.verified.read(physical_offset, size_max, found_by)

    async def read_all(self, physical_offset: int, size: int, found_by: FoundBy = "read") -> bytes:
        """Returns exactly `size` bytes of one segment. Raises DamagedBytes if any of them isn't what was written;
        OffsetGone if the log does not hold all of them; OSError if the disk can't read."""
        raw = bytes(await self.read(physical_offset, size, found_by))
        while len(raw) < size:
            piece = await self.read(physical_offset + len(raw), size - len(raw), found_by)
            if not piece:
                raise OffsetGone(physical_offset + size, self.min_offset, self.max_offset.value)
            raw += piece
        return raw

    async def wait_healed(self, begin: int, end: int) -> None:
        """Waits until no byte of [begin, end) is listed as damaged."""
        await self.damage.wait_healed(begin, end)

    # ---- putting messages (master)

    def append(self, messages: Sequence[Message], began: float | None = None) -> list[AppendResult]:
        """Appends messages in order, independently, without waiting; returns the result of each.

        If there are fewer results than messages, the next message needs another segment (`add_segment`), or appends are
        held (`wait_appends_allowed`). `began`: trio's time at which the caller first tried, for `append_times`; by
        default now. Raises DiskFailed if the file can't be written, now or in an earlier call: the node must stop.
        """
        if self._append_lock.locked():
            return []
        began = trio.current_time() if began is None else began
        results = self._append(messages, 0)
        if results:
            self.append_times.observe(trio.current_time() - began)
        return results

    def append_batch(self, messages: Sequence[Message], began: float | None = None) -> list[AppendResult]:
        """Like `append`, for a client's batch, which must be contiguous in one segment: all messages or none.

        If one of the messages is illegal or the batch is too large, none is stored, and every result gives the reason:
        RocketMQ, too, refuses the whole request. Returns an empty list if nothing was appended because the batch needs
        another segment or `appends_are_held`. Raises DiskFailed as `append` does.
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
        """Fills up the last segment and adds the next one; returns why that failed, or None if it succeeded.

        For the one task that appends, when the last segment has no room. Waits for the segment for at most
        `segment_wait_s`. If cancelled, it changes nothing. Raises DiskFailed if the filler can't be written: the node
        must stop.
        """
        async with self.appends_held():
            return await self._roll()

    @property
    def appends_are_held(self) -> bool:
        """Whether another task appends, or keeps others from appending (`appends_held`): `append` then stores
        nothing."""
        return self._append_lock.locked()

    async def wait_appends_allowed(self) -> None:
        """Waits until `appends_are_held` is false."""
        await self._append_lock.acquire()
        self._append_lock.release()

    async def put(self, messages: Sequence[Message]) -> list[AppendResult]:
        """Appends messages in order, independently, waiting for segments as needed; returns the result of each.

        A message whose segment can't be created, or isn't ready within `segment_wait_s`, gets
        CREATE_MAPPED_FILE_FAILED. Raises DiskFailed if a file can't be written. If cancelled, the first messages may be
        in the log and the others not. For users of a store without a broker.
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
        """Appends those of `messages[first:]` that fit the last segment."""
        segment, position = self._tail()
        now_ms = self._store_clock_ms()
        if segment is None:
            return self._maker.run(messages, first, 0, NO_ROOM, now_ms)[1]
        room = self._maker.room_max - position
        records, results = self._maker.run(messages, first, segment.start + position, room, now_ms)
        self._write(segment, position, records, now_ms)
        return results

    def _write(self, segment: Segment, position: int, records: bytes, now_ms: int) -> None:
        """Writes records, made at `now_ms`, at the end of the last segment, and makes them visible. Raises DiskFailed
        if this write fails, or an earlier one failed."""
        if not records:
            return
        if self._failure is not None:  # the records that failed have used queue offsets, so later ones would leave gaps
            raise self._failure
        # Not through the map: a copy into the map may run in any order, so a kill during it would leave holes. The
        # kernel copies page by page, so a kill leaves a prefix. Also, the kernel would zero each page of the map
        # before the first write to it.
        try:
            self._pwrite(segment, records, position)
        except OSError as error:
            self._failure = DiskFailed(segment.file.path, "write", str(error))
            raise self._failure from error
        self.last_store_timestamp_ms = now_ms  # only for stored records: the checkpoint's times must be theirs
        self._publish(segment, position + len(records))

    def _store_clock_ms(self) -> int:
        """Returns the time of the wall clock in ms, but never less than the store time of the last record.

        Recovery relies on ascending store times: it compares them with the checkpoint's to decide which records were
        flushed and which have queue entries. RocketMQ relies on them, too, but stores whatever the clock says, so that
        records stored after the clock was set back seem older than those before. Here such records get the last
        record's store time until the clock has caught up. In both cases a lookup of these records by time is inaccurate
        by the step of the clock.
        """
        now_ms, last_ms = self._wall_clock_ms(), self.last_store_timestamp_ms
        return now_ms if now_ms > last_ms else last_ms

    # ---- appending a master's bytes (slave)

    async def append_raw(self, physical_offset: int, chunk: memoryview | bytes) -> None:
        """Appends bytes of the master's log at exactly `max_offset`, within one segment.

        If the log is empty, any offset is valid: the segment that contains it is created, and `max_offset` becomes the
        start of that segment, as in RocketMQ. A chunk that does not begin there is not written, and the next offset
        that the slave requests is `max_offset`. An empty chunk only creates the segment.

        Raises ValueError if the chunk does not begin at `max_offset` (of a log that is not empty) or crosses the end of
        a segment; DiskFull, OSError or TooSlowError if the next segment can't be created; OSError if the disk refuses
        the bytes; DiskFailed if it fails to overwrite what an earlier refusal left. If cancelled, it changes nothing.
        """
        began = trio.current_time()
        await self._lock_appends()
        try:
            size = len(chunk)
            if not self._segments:
                await self._add_segment(physical_offset - physical_offset % self.segment_size)
                self.verified.reset(self.max_offset.value)
                if physical_offset != self.max_offset.value:
                    return
            if physical_offset != self.max_offset.value:
                raise ValueError(f"append at {physical_offset}, but the log ends at {self.max_offset.value}")
            if size == 0:
                return
            await self.clear_torn()
            segment, position = self._tail()
            assert segment is not None
            if position == self.segment_size:
                await self._add_segment(segment.end)
                segment, position = self._tail()
                assert segment is not None
            if position + size > self.segment_size:
                raise ValueError(f"{size} bytes at {physical_offset} cross the end of the segment at {segment.end}")
            # Not through the map, as in `_write`: a body's CRC does not reveal every hole in a record.
            self._pwrite(segment, chunk, position)
            self._publish(segment, position + size)
        finally:
            self._append_lock.release()
            self.append_times.observe(trio.current_time() - began)

    def tail(self) -> LogTail | None:
        """Returns the place in a file at which the caller may write the master's next bytes itself. The caller must
        then call `note_appended`, without an await in between.

        None if only `append_raw` can append them: a new segment is needed, appends are held, a write failed, or the
        file has no descriptor.
        """
        segment, position = self._tail()
        descriptor = None if segment is None else segment.file.descriptor
        if segment is None or descriptor is None or position == self.segment_size:
            return None
        if self._append_lock.locked() or self.is_torn:
            return None
        return LogTail(descriptor, position, self.segment_size - position)

    def note_appended(self, size: int, began: float) -> None:
        """Raises `max_offset` by `size` bytes that the caller has written at the `tail`. `began`: trio's time at which
        the write began."""
        segment, position = self._tail()
        assert segment is not None
        self._publish(segment, position + size)
        self.append_times.observe(trio.current_time() - began)

    async def reset(self, first_offset: int) -> None:
        """Sets aside everything that the store holds, and starts empty at the segment that contains `first_offset`.

        Commitlog, consume queues, index and all that belongs to them are renamed to `NAME.aside-N` (log_reset.py);
        nothing is deleted. Afterwards `max_offset` is the start of that segment. After DiskFull or OSError nothing has
        changed. After DiskFailed the node must stop; the next start completes the reset, or deletes the new segment
        (`finish_reset`). If cancelled, the reset has either not begun or is complete.
        """
        first_offset -= first_offset % self.segment_size
        run, disk, options = self._run_blocking, self._disk, self._options
        async with self.maintenance_lock, self.appends_held(), self.verified.checksums_held():
            await self.allocator.drop_ready()
            with trio.CancelScope(shield=True):
                waiting = await run(make_waiting_segment, disk, options, first_offset)
                # While files are moved, nothing is derived from the log, and reads under way are not used.
                self.truncated = trio.Event()
                self.generation += 1
                try:
                    segment: Segment = await run(move_aside, disk, options, waiting)
                except OSError:
                    self.end_truncation()
                    raise
                except DiskFailed:
                    self._torn_to = UNLIMITED  # the store is left to recovery, as after a crash
                    raise
                self._segments = []
                self.last_store_timestamp_ms = 0
                self._truncate_memory(0)
                if self.on_reset is not None:
                    self.on_reset()
                self.verified.reset(first_offset)
                self._append_segment(segment)
                self.end_truncation()

    def _truncate_memory(self, end: int) -> None:
        self._maker.forget()
        self._torn_to = 0
        super()._truncate_memory(end)

    def set_next_queue_offsets(self, next_offsets: dict[tuple[str, int], int]) -> None:
        """Sets the next queue offset of each queue that has records which are not dispatched yet. For other queues it
        is the end of the consume queue."""
        self._maker.set_next_offsets(next_offsets)

    # ---- writing

    @asynccontextmanager
    async def appends_held(self) -> AsyncIterator[None]:
        """Keeps other tasks from appending until the block ends."""
        await self._lock_appends()
        try:
            yield
        finally:
            self._append_lock.release()

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
        """Whether bytes of a failed write may be in the file after the log's end, or a failed reset has left files
        moved.

        Such bytes may look like a record, because no CRC covers a whole record. Only recovery as after a crash can
        tell them from records.
        """
        return self._torn_to > self.max_offset.value

    async def clear_torn(self) -> None:
        """Overwrites the bytes that a failed write may have left after the log's end with zeros, and syncs them.

        Other bytes may follow only then: they could end where one of the old records begins, and recovery after a crash
        would take that one for theirs. Does nothing unless `is_torn`. Raises DiskFull if the disk is full, and
        DiskFailed if it fails: the kernel reports a failed sync to no other caller.
        """
        segment, position = self._tail()
        if segment is not None and self.max_offset.value < self._torn_to <= segment.end:
            file, run = segment.file, self._run_blocking
            try:
                await run(file.zero, position, self._torn_to - self.max_offset.value)
            except OSError as error:
                if is_passing(error):
                    raise DiskFull(file.path, 0, error) from error
                raise DiskFailed(file.path, "write", str(error)) from error
            try:
                await run(file.sync)
            except OSError as error:
                raise DiskFailed(file.path, "sync", str(error)) from error
            self._torn_to = 0

    def _publish(self, segment: Segment, position: int) -> None:
        """Raises `max_offset` to `position` in the last segment, up to which bytes were written; called once per chunk.
        Requests the next segment if more than half of this one is used, and the release of cold pages when it is
        due."""
        end = segment.start + position
        self.max_offset.raise_to(end)
        if position > self.segment_size // 2:
            self.allocator.want(segment.end)
        if end > self._release_at:
            self._release_wanted.set()

    async def _roll(self) -> AppendResult | None:
        """Fills up the last segment and adds the next one. Returns None or, if the next one is not available, the
        reason; then nothing has changed. Raises DiskFailed if the filler can't be written."""
        segment, position = self._tail()
        try:
            following = await self._next_segment(0 if segment is None else segment.end)
        except (DiskFull, OSError, trio.TooSlowError) as error:
            reason = str(error) or f"it was not ready after {self._options.segment_wait_s} s"
            return AppendResult(PutStatus.CREATE_MAPPED_FILE_FAILED, remark=f"create mapped file failed: {reason}")
        if segment is not None and position < self.segment_size:
            rest = self.segment_size - position
            filler = encode_filler(rest)
            if not self._options.preallocate:
                filler = filler.ljust(rest, b"\0")  # tmpfs needs space even to read a hole through the map
            try:
                self._pwrite(segment, filler, position)
            except OSError as error:
                raise DiskFailed(segment.file.path, "write", str(error)) from error
            self.max_offset.raise_to(segment.end)
        self._append_segment(following)
        return None

    async def _add_segment(self, start: int) -> None:
        self._append_segment(await self._next_segment(start))

    async def _next_segment(self, start: int) -> Segment:
        ready = self.allocator.take_nowait(start)
        return ready if ready is not None else await self.allocator.take(start, self._options.segment_wait_s)

    # ---- retention

    async def delete_first(self) -> None:
        """Deletes the oldest segment, which must not be the only one. Readers that hold views keep them. If it raises
        OSError, the segment stays."""
        assert len(self._segments) > 1
        await self.before_delete(self._segments[1].start)
        with trio.CancelScope(shield=True):  # a file that remains would be the log's first at the next start
            held = [self._segments.pop(0)]
            end = held[0].end
            try:
                await self._run_blocking(self._unlink, held)
            except OSError:
                self._segments[:0] = held
                raise
            self.damage.forget(0, end)

    def _unlink(self, held: list[Segment]) -> None:
        """Deletes the files of the one segment in `held` and clears the list. Called in a worker, because dropping the
        last reference to a deleted file waits until its blocks are freed."""
        self.verified.checksums.delete(held[0].start)
        with suppress(FileNotFoundError):  # deleted by hand
            self._disk.unlink(held[0].file.path)
        held.clear()


async def _no_note(begin: int) -> None:
    pass


__all__ = ["UNLIMITED", "CommitLog"]
