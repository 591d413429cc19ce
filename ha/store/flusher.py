"""Flushes the log to the disk, and answers the requests that wait for it.

With SYNC_FLUSH, one fdatasync follows another while there is new data; each serves every request that came before it
(group commit). With ASYNC_FLUSH, the log is flushed at intervals, if enough pages are dirty, a segment was filled, or
the last flush was long ago. A worker syncs, never through the map (msync would hold the GIL); if much is dirty, it
first writes back all but the end of the range (`Segment.sync`). A failed sync is never retried: the kernel may have
dropped the pages and would then report success. Sources: CommitLog.GroupCommitService, FlushRealTimeService.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from ha.errors import DiskFailed
from ha.histogram import Histogram
from ha.protocol.codes import PutStatus
from ha.store.commitlog import CommitLog
from ha.store.deadlines import DeadlineTimer
from ha.store.offset_waiters import OffsetWaiters
from ha.store.options import StoreOptions

logger = logging.getLogger(__name__)

_PAGE_SIZE = 4096

OnDone = Callable[[PutStatus], None]


class Flusher:
    """Flushes one log, and advances its `flushed_offset`."""

    def __init__(self, log: CommitLog, options: StoreOptions) -> None:
        self._log = log
        self._options = options
        self._waiters: OffsetWaiters[OnDone] = OffsetWaiters()
        self._timer = DeadlineTimer(self._expire)
        self._flush_lock = trio.Lock()
        self.failure: DiskFailed | None = None
        """Error of the first failed sync; None if none failed. Nothing is flushed after it"""
        self.sync_count = 0
        self.sync_times = Histogram()
        """Durations of the syncs in seconds"""
        self.flushed_timestamp_ms = 0
        """Store time up to which records are on the disk [checkpoint: physicMsgTimestamp]"""

    @property
    def waiting_count(self) -> int:
        """Number of requests not yet answered."""
        return len(self._waiters)

    def request(self, physical_offset: int, deadline: float, on_done: OnDone) -> None:
        """Calls `on_done` with PUT_OK when everything before a physical offset is flushed; with FLUSH_DISK_TIMEOUT if
        that has not happened by `deadline`, if a flush fails or `run` ends, or if the log is truncated before the
        offset.

        `deadline` is in trio's clock. `on_done` is called exactly once, synchronously, and before this method returns
        if the answer is known by then.
        """
        if self._log.flushed_offset.value >= physical_offset:
            on_done(PutStatus.PUT_OK)
            return
        if self.failure is not None:
            on_done(PutStatus.FLUSH_DISK_TIMEOUT)
            return
        self._waiters.add(physical_offset, deadline, on_done)
        self._timer.note(deadline)

    async def run(self) -> None:
        """Flushes until cancelled. Raises DiskFailed if a sync fails. At the end, waiting requests get
        FLUSH_DISK_TIMEOUT."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._timer.run)
                await (self._flush_at_once() if self._options.is_sync_flush else self._flush_at_intervals())
        finally:
            for on_done in self._waiters.drain():
                on_done(PutStatus.FLUSH_DISK_TIMEOUT)

    async def flush(self) -> None:
        """Flushes everything written so far. Raises DiskFailed if a sync fails, or has failed before."""
        log = self._log
        async with self._flush_lock:
            if self.failure is not None:
                raise self.failure
            generation = log.generation
            flushed = log.flushed_offset.value
            target = log.max_offset.value
            stored_ms = log.last_store_timestamp_ms
            if flushed >= target:
                return
            began = trio.current_time()
            try:
                await log.sync(flushed, target)
            except OSError as error:
                self.failure = DiskFailed(self._options.commitlog_path, "fdatasync", str(error))
                raise self.failure from error
            self.sync_count += 1
            self.sync_times.observe(trio.current_time() - began)
            if generation != log.generation:
                return  # the log was set aside or truncated meanwhile
            log.flushed_offset.raise_to(target)
            self.flushed_timestamp_ms = max(self.flushed_timestamp_ms, stored_ms)
        for on_done in self._waiters.reach(target):
            on_done(PutStatus.PUT_OK)

    def fail_beyond(self, physical_offset: int) -> None:
        """Completes requests that wait for a flush beyond a physical offset with FLUSH_DISK_TIMEOUT: those bytes were
        truncated."""
        for on_done in self._waiters.take_beyond(physical_offset):
            on_done(PutStatus.FLUSH_DISK_TIMEOUT)

    async def _flush_at_once(self) -> None:
        log = self._log
        while True:
            await log.max_offset.wait_beyond(log.flushed_offset.value)
            await self.flush()

    async def _flush_at_intervals(self) -> None:
        log = self._log
        options = self._options
        thorough_at = trio.current_time() + options.flush_thorough_interval_s
        while True:
            await trio.sleep(options.flush_interval_s)
            flushed = log.flushed_offset.value
            written = log.max_offset.value
            dirty_pages = written // _PAGE_SIZE - flushed // _PAGE_SIZE
            has_full_segment = written // log.segment_size > flushed // log.segment_size
            now = trio.current_time()
            if dirty_pages >= options.flush_least_pages or has_full_segment or now >= thorough_at:
                thorough_at = now + options.flush_thorough_interval_s
                await self.flush()

    def _expire(self, now: float) -> float:
        for on_done in self._waiters.expire(now):
            on_done(PutStatus.FLUSH_DISK_TIMEOUT)
        return self._waiters.next_deadline
