"""In-memory state of the commitlog: its segments, and the offsets up to which it is written, flushed and dispatched.

Also returns bytes that are in memory, without waiting for the disk. `CommitLog` adds the appends; verified reads,
dispatch, flusher and recovery use this state. Knows neither peers nor the format of records. Source: MappedFileQueue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import trio

from ha.errors import OffsetGone
from ha.store.damage import DamageRegistry
from ha.store.mapped_file import RunBlocking, Segment
from ha.store.options import StoreOptions
from ha.store.watched_offset import WatchedOffset

UNLIMITED = (1 << 63) - 1
"""Value of `dispatch_limit` if there is no limit."""

_EMPTY = memoryview(b"")


class LogTail(NamedTuple):
    """The free end of the last segment: its file descriptor, the position of the next byte in the file, and the number
    of bytes from there to the end of the file."""

    descriptor: int
    position: int
    room: int


class SegmentedLog:
    """The segments of one log, contiguous and of one size, and its positions. Offsets are physical."""

    def __init__(self, options: StoreOptions, run_blocking: RunBlocking, damage: DamageRegistry) -> None:
        self._options = options
        self._run_blocking = run_blocking
        self.damage = damage
        self.segment_size = options.segment_size
        self.max_offset = WatchedOffset(0)
        self.flushed_offset = WatchedOffset(0)
        self.dispatched_offset = WatchedOffset(0)
        self.dispatch_limit = WatchedOffset(UNLIMITED)
        """Physical offset up to which records may be dispatched; only slaves get the bytes after it (RocketMQ:
        confirmOffset)"""
        self.generation = 0
        """Number of times that the log was set aside or truncated, which invalidates everything read before"""
        self.truncated: trio.Event | None = None
        """Event that is set when the truncation or reset in progress is complete; None if none is in progress.
        Meanwhile nothing is derived from the log"""
        self._segments: list[Segment] = []
        self._hot_floor = 0
        self._released_to = self._release_at = 0
        self._release_wanted = trio.Event()

    @property
    def min_offset(self) -> int:
        """Physical offset at which the log begins; -1 while there is no segment."""
        return self._segments[0].start if self._segments else -1

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments in order; the last one is written to."""
        return self._segments

    def segment_at(self, physical_offset: int) -> Segment:
        """Returns the segment whose file contains a physical offset, even if that is beyond `max_offset`. Raises
        OffsetGone if none does."""
        segments = self._segments
        if segments:
            number = (physical_offset - segments[0].start) // self.segment_size
            if 0 <= number < len(segments):
                return segments[number]
        raise OffsetGone(physical_offset, self.min_offset, self.max_offset.value)

    def read_hot(self, physical_offset: int, size_max: int) -> memoryview | None:
        """Returns up to `size_max` bytes from a physical offset on, of one segment, if they are certain to be in
        memory; else None.

        Empty at `max_offset`. Also None for offsets that the log does not hold, and if any damage is listed at or after
        the offset. The view stays valid while it is referenced, even if the segment is deleted.
        """
        end = self.max_offset.value
        if physical_offset == end:
            return _EMPTY
        if physical_offset > end or physical_offset < self._hot_floor:
            return None
        if physical_offset < end - self._options.hot_window_bytes:
            return None
        damage = self.damage
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

    async def sync(self, flushed: int, target: int) -> None:
        """Flushes everything in [`flushed`, `target`) to the disk. After OSError, it is unknown what is durable."""
        # References only the segments that are synced: an older one may be deleted meanwhile.
        for segment in [segment for segment in self._segments if segment.start < target and segment.end > flushed]:
            await self._run_blocking(segment.sync, flushed, target)

    # ---- dispatch

    @property
    def dispatchable_end(self) -> int:
        """Physical offset up to which records may be dispatched, and so be read by anyone but a slave: the end of the
        written part (with SYNC_FLUSH, of the flushed part), or `dispatch_limit` if that is lower."""
        written = self.flushed_offset if self._options.is_sync_flush else self.max_offset
        return min(written.value, self.dispatch_limit.value)

    def limit_dispatch(self, offset: int) -> None:
        """Sets the physical offset up to which records may be dispatched. Records beyond it that are already
        dispatched remain dispatched.

        `offset` may lie inside a record or after the end of the log.
        """
        if not self.dispatch_limit.raise_to(offset) and offset < self.dispatch_limit.value:
            self.dispatch_limit.reset(offset)

    # ---- changing the segments

    def adopt(self, segments: list[Segment], max_offset: int) -> None:
        """Starts with the log that recovery found: contiguous segments, and its end, which becomes the written, flushed
        and dispatched offset."""
        self._segments = segments
        if segments:
            segments[-1].map()
        for offset in (self.max_offset, self.flushed_offset, self.dispatched_offset):
            offset.reset(max_offset)
        self._hot_floor = max_offset
        self._released_to = max_offset

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

    def _truncate_memory(self, end: int) -> None:
        """Truncates the in-memory state at `end` and wakes all waiters."""
        self.generation += 1
        self._hot_floor = end  # the pages before may have been released
        self._released_to = min(self._released_to, end)
        self._release_at = 0
        if self.dispatch_limit.value != UNLIMITED:
            self.limit_dispatch(min(self.dispatch_limit.value, end))
        for offset in (self.dispatched_offset, self.flushed_offset, self.max_offset):
            offset.reset(min(offset.value, end))

    def begin_truncation(self, end: int) -> list[Segment]:
        """Truncates the log in memory at a flushed physical offset that it holds, while appends are held.

        Returns the segments whose files are to be truncated; the first of them stays, at least in part. Call
        `end_truncation` when that is done. Until then, reads below the new end wait, and nothing is derived from the
        log.
        """
        assert self.min_offset <= end <= self.flushed_offset.value
        self.truncated = trio.Event()
        number = sum(segment.start < end for segment in self._segments) or 1
        removed = self._segments[number - 1 :]
        self._segments = self._segments[:number]
        self._truncate_memory(end)
        self._segments[-1].map()
        return removed

    def end_truncation(self) -> None:
        """Ends a truncation or reset, and wakes the tasks that wait for it."""
        truncated, self.truncated = self.truncated, None
        assert truncated is not None
        truncated.set()

    async def wait_truncated(self) -> None:
        """Waits until no truncation or reset is in progress. Not a checkpoint if none is."""
        while self.truncated is not None:
            await self.truncated.wait()

    # ---- memory

    async def release_cold_pages(self) -> None:
        """Releases from memory the mapped pages that are more than 2 * `hot_window_bytes` before the log's end, each
        time that the log has grown by a quarter of `hot_window_bytes`. Runs until cancelled."""
        window = self._options.hot_window_bytes
        while True:
            await self._release_wanted.wait()
            self._release_wanted = trio.Event()
            release_to, generation = self.max_offset.value - 2 * window, self.generation
            await self._release(release_to)
            if generation != self.generation:
                continue  # set aside or truncated meanwhile: the next append asks again
            self._released_to = max(self._released_to, release_to)
            self._release_at = self._released_to + 2 * window + window // 4

    async def _release(self, release_to: int) -> None:
        # A separate method, so that the caller references no segment, which may be deleted meanwhile, while it waits.
        for old in [old for old in self._segments if old.end > self._released_to and old.start < release_to]:
            if old.view is not None:
                first = max(self._released_to, old.start)
                last = min(release_to, old.end)
                await self._run_blocking(old.file.cool, first - old.start, last - first)
