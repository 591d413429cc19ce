"""Segments: the fixed-size files that the commitlog consists of, and the worker that makes the next one in time.

A segment is named after the physical offset of its first byte, 20 decimal digits. It exists at its full size or not at
all, with its space reserved, so that no put finds the disk full. Sources: MappedFile, AllocateMappedFileService.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import trio

from ha.errors import DiskFull
from ha.protocol.store_files import segment_name, segment_start
from ha.store.files import Disk, File, is_full

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16
"""Appends are nearly always in pages behind the last multiple of this."""
_BULK_BYTES = 1 << 20
"""From so much on what is before those pages goes to the disk first. Of less they wait for a moment only, and who waits
for the sync would wait for the disk twice."""


class RunBlocking(Protocol):
    """Runs `call(*arguments)` where it may block and returns its result; `trio.to_thread.run_sync` or its like."""

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        """Run it."""


async def run_in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    """Run a blocking call in a worker thread; it is waited for even if the caller is cancelled."""
    return await trio.to_thread.run_sync(call, *arguments)


async def fetch(file: File, size: int, position: int, run_blocking: RunBlocking) -> bytes | bytearray:
    """Read up to `size` bytes, by a worker where that would wait for the disk. No checkpoint where it would not."""
    cached = file.pread_nowait(size, position)
    if cached is not None and len(cached) == size:
        return cached
    found: bytes = await run_blocking(file.pread, size, position)
    return found


def segment_starts(names: list[str]) -> list[int]:
    """Return the starts of those `names` that name segments, ascending."""
    return sorted(start for name in names if (start := segment_start(name)) is not None)


class Segment:
    """One file of the commitlog. `view` is its map, or None while it is only read from the file."""

    __slots__ = ("file", "size", "start", "view")

    def __init__(self, start: int, size: int, file: File) -> None:
        self.start = start
        self.size = size
        self.file = file
        self.view: memoryview | None = None

    @property
    def end(self) -> int:
        """Physical offset behind its last byte."""
        return self.start + self.size

    def map(self) -> memoryview:
        """Map the file, if it is not; returns the map."""
        view = self.view
        if view is None:
            view = self.view = self.file.map(self.size)
        return view

    def sync(self, flushed: int, target: int) -> None:
        """Put what is in [`flushed`, `target`) on the disk, physical offsets of which a part may be in here. Blocking;
        OSError if that failed."""
        begin = max(flushed - self.start, 0)
        tail = min(target - self.start, self.size)
        tail -= tail % _TAIL_BYTES
        if tail - begin >= _BULK_BYTES:
            self.file.write_back(begin, tail - begin)
        self.file.sync()


class SegmentAllocator:
    """Makes segments ahead of their use, in a worker. At most one is ready and one being made."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        segment_size: int,
        *,
        run_blocking: RunBlocking,
        retry_s: float,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._segment_size = segment_size
        self._run_blocking = run_blocking
        self._retry_s = retry_s
        self._wanted: int | None = None
        self._ready: Segment | None = None
        self._failure: DiskFull | OSError | None = None
        self._retry_at = -math.inf
        self._work = trio.lowlevel.ParkingLot()
        self._takers = trio.lowlevel.ParkingLot()

    @property
    def failure(self) -> DiskFull | OSError | None:
        """Why the last attempt failed; None once one succeeded."""
        return self._failure

    def want(self, start: int) -> None:
        """Have the segment at `start` made, unless it is there, in the making, or just failed."""
        if self._wanted == start or (self._ready is not None and self._ready.start == start):
            return
        if self._failure is not None and trio.current_time() < self._retry_at:
            return
        self._failure = None
        self._wanted = start
        self._work.unpark_all()

    def take_nowait(self, start: int) -> Segment | None:
        """Return the segment at `start` if it is ready; it is then the caller's."""
        ready = self._ready
        if ready is None or ready.start != start:
            return None
        self._ready = None
        return ready

    async def take(self, start: int, timeout_s: float) -> Segment:
        """Wait for the segment at `start`. DiskFull or OSError if it can't be made, TooSlowError after `timeout_s`."""
        self.want(start)
        with trio.fail_after(timeout_s):
            while True:
                segment = self.take_nowait(start)
                if segment is not None:
                    return segment
                if self._failure is not None:
                    raise self._failure
                if self._wanted != start:
                    self.want(start)
                await self._takers.park()

    async def drop_ready(self) -> None:
        """Remove a segment that was made but not taken, so that nothing but the log's own files remains."""
        self._wanted = None
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.view = None
            await self._run_blocking(self._disk.unlink, ready.file.path)

    async def run(self) -> None:
        """Serve `want` until cancelled."""
        while True:
            start = self._wanted
            if start is None:
                await self._work.park()
                continue
            segment: Segment | None = None
            try:
                segment = await self._run_blocking(self._make, start)
            except OSError as error:
                path = self._directory / segment_name(start)
                self._failure = DiskFull(path, self._segment_size) if is_full(error) else error
                self._retry_at = trio.current_time() + self._retry_s
                logger.error(
                    "commitlog.segment_create_failed file=%s size_bytes=%d reason=%s", path, self._segment_size, error
                )
            if self._wanted == start:
                self._wanted = None
                self._ready = segment
            elif segment is not None:  # nobody wants it any more: the log was reset meanwhile
                await self._run_blocking(self._disk.unlink, segment.file.path)
            self._takers.unpark_all()

    def _make(self, start: int) -> Segment:
        file = self._disk.create(self._directory / segment_name(start), self._segment_size, allocate=True)
        segment = Segment(start, self._segment_size, file)
        segment.map()
        return segment
