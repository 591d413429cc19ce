"""Segments, the fixed-size files of the commitlog, and the worker that creates the next one in advance.

A segment's name is the physical offset of its first byte, in 20 decimal digits. A segment is created at its full size
or not at all. With `preallocate`, its disk space is reserved at that time, so a full disk can only prevent the creation
of the next segment. Without `preallocate`, a put that finds the disk full fails with DiskFailed. Nothing is written
through the map, where a full disk would be a SIGBUS. Sources: MappedFile, AllocateMappedFileService.
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
"""Alignment in bytes of the end of the range that `Segment.sync` writes back. The rest after it, the tail, is left to
the sync itself, because appends during the sync nearly always change only pages of the tail or after it."""
_BULK_BYTES = 1 << 20
"""Minimum number of unsynced bytes before the tail: fewer are not written back before the sync, which then blocks
appends only for a moment. A write-back would mean waiting for the disk twice."""


class RunBlocking(Protocol):
    """Runs `call(*arguments)` where it may block, and returns its result; like `trio.to_thread.run_sync`."""

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        """Runs `call(*arguments)` and returns its result. Raises what `call` raises."""


async def run_in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a blocking call in a worker thread. Once the call has started, waits for its result even if cancelled."""
    return await trio.to_thread.run_sync(call, *arguments)


async def fetch(file: File, size: int, position: int, run_blocking: RunBlocking) -> bytes | bytearray:
    """Returns up to `size` bytes from `position`; fewer only at the file's end. Raises OSError.

    If the page cache has all of them, they are read at once, without a Trio checkpoint; otherwise by a worker.
    """
    cached = file.pread_nowait(size, position)
    if cached is not None and len(cached) == size:
        return cached
    found: bytes = await run_blocking(file.pread, size, position)
    return found


def segment_starts(names: list[str]) -> list[int]:
    """Returns the start (offset in bytes) that each file name in `names` stands for, ascending. Ignores names that are
    not those of segments."""
    return sorted(start for name in names if (start := segment_start(name)) is not None)


class Segment:
    """One file of the commitlog, which begins at physical offset `start`. `view` is its map, or None if it is not
    mapped."""

    __slots__ = ("file", "size", "start", "view")

    def __init__(self, start: int, size: int, file: File) -> None:
        self.start = start
        self.size = size
        self.file = file
        self.view: memoryview | None = None

    @property
    def end(self) -> int:
        """Physical offset after its last byte."""
        return self.start + self.size

    def map(self) -> memoryview:
        """Maps the file, if it is not mapped, and returns the map. Raises OSError."""
        view = self.view
        if view is None:
            view = self.view = self.file.map(self.size)
        return view

    def sync(self, flushed: int, target: int) -> None:
        """Flushes this segment's part of the physical offsets [`flushed`, `target`). Blocking. Raises OSError."""
        begin = max(flushed - self.start, 0)
        tail = min(target - self.start, self.size)
        tail -= tail % _TAIL_BYTES
        if tail - begin >= _BULK_BYTES:
            self.file.write_back(begin, tail - begin)
        self.file.sync()


class SegmentAllocator:
    """Creates segments in advance, in a worker. At most one is ready and one being created."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        segment_size: int,
        *,
        run_blocking: RunBlocking,
        retry_s: float,
        preallocate: bool,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._segment_size = segment_size
        self._run_blocking = run_blocking
        self._retry_s = retry_s
        self._preallocate = preallocate
        self._wanted: int | None = None
        self._ready: Segment | None = None
        self._failure: DiskFull | OSError | None = None
        self._retry_at = -math.inf
        self._work = trio.lowlevel.ParkingLot()
        self._takers = trio.lowlevel.ParkingLot()
        self._making = trio.Lock()
        """Held while a file is created or deleted"""

    def want(self, start: int) -> None:
        """Makes `run` create the segment at `start`, unless it is ready or being created, or an attempt failed less
        than `retry_s` ago."""
        if self._wanted == start or (self._ready is not None and self._ready.start == start):
            return
        if self._failure is not None and trio.current_time() < self._retry_at:
            return
        self._failure = None
        self._wanted = start
        self._work.unpark_all()

    def take_nowait(self, start: int) -> Segment | None:
        """Returns the segment at `start`, which the caller then owns; None if it is not ready."""
        ready = self._ready
        if ready is None or ready.start != start:
            return None
        self._ready = None
        return ready

    async def take(self, start: int, timeout_s: float) -> Segment:
        """Waits for the segment at `start`, which the caller then owns. First deletes a segment that was created for
        another start.

        Raises OSError if that segment can't be deleted; DiskFull or OSError if the segment at `start` can't be created;
        trio.TooSlowError after `timeout_s`.
        """
        with trio.fail_after(timeout_s):
            if self._wanted != start:
                await self.drop_ready()  # of a log that was to begin elsewhere
                self.want(start)
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
        """Deletes the segment that was created, or is being created, and not taken, so that only the log's own files
        remain. Raises OSError."""
        self._wanted = None
        async with self._making:
            if self._ready is not None:
                path = self._ready.file.path
                try:
                    await self._run_blocking(self._disk.unlink, path)
                finally:
                    if not self._disk.exists(path):  # even after an error, if only the directory could not be synced
                        self._ready = None

    async def run(self) -> None:
        """Creates the segments that `want` requests, until cancelled."""
        while True:
            start = self._wanted
            if start is None:
                await self._work.park()
                continue
            async with self._making:
                segment = await self._try_make(start)
                self._ready = segment  # a call of `drop_ready` that waits for `_making` deletes it
                if self._wanted == start:
                    self._wanted = None
            self._takers.unpark_all()

    async def _try_make(self, start: int) -> Segment | None:
        try:
            segment: Segment = await self._run_blocking(self._make, start)
        except OSError as error:
            path = self._directory / segment_name(start)
            self._failure = DiskFull(path, self._segment_size) if is_full(error) else error
            self._retry_at = trio.current_time() + self._retry_s
            logger.error(
                "commitlog.segment_create_failed file=%s size_bytes=%d reason=%r", path, self._segment_size, str(error)
            )
            return None
        return segment

    def _make(self, start: int) -> Segment:
        path = self._directory / segment_name(start)
        file = self._disk.create(path, self._segment_size, allocate=self._preallocate)
        segment = Segment(start, self._segment_size, file)
        try:
            segment.map()
        except OSError:
            self._disk.unlink(path)  # so that the next attempt finds no file
            raise
        return segment
