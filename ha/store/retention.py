"""Deletes old segments, and refuses puts when the disk is too full.

Each round deletes a limited number of segments, oldest first, never the last one: expired segments at the configured
hours or above diskMaxUsedSpaceRatio, and segments of any age above diskSpaceCleanForciblyRatio, unless
cleanFileForciblyEnable is off. Puts are refused above diskSpaceWarningLevelRatio. An expired segment that a registered
slave still needs is kept for longer, up to haRetainMaxBytes, but not while segments of any age are deleted. A
segment that is not dispatched, or that `release` keeps, is never deleted. Queues, index and epochs are adjusted to the
log's new first offset. Sources: DefaultMessageStore.CleanCommitLogService, CleanConsumeQueueService.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from ha.errors import DiskFailed, DiskFull
from ha.store.files import is_passing
from ha.store.mapped_file import Segment
from ha.store.store_parts import StoreParts

logger = logging.getLogger(__name__)

_MS_PER_H = 3_600_000


class Retention:
    """Checks the disk and deletes segments of one store."""

    def __init__(self, parts: StoreParts, wall_clock_ms: Callable[[], int]) -> None:
        self._parts = parts
        self._log = parts.log
        self._options = parts.options
        self._disk = parts.disk
        self._run_blocking = parts.run_blocking
        self._wall_clock_ms = wall_clock_ms
        self.lowest_needed: Callable[[], int | None] = lambda: None
        """Returns the lowest physical offset (bytes) that a registered slave still needs; None if none needs any"""
        self.release: Callable[[int], Awaitable[bool]] = _released
        """Called and awaited before a segment is deleted, with the physical offset (bytes) of its end; False keeps the
        segment"""
        self.disk_used_ratio = 0.0
        self.deleted_count = 0
        self._is_too_full = False
        self._is_pinned = False
        self._is_trimmed = True
        """Whether queues, index and terms have nothing before the log's first offset"""

    @property
    def is_writable(self) -> tuple[bool, str]:
        """Whether the disk had room for puts at the last check, and if not, how full it was."""
        if not self._is_too_full:
            return True, ""
        limit = self._options.disk_used_ratio_warning
        return False, f"disk is {self.disk_used_ratio:.1%} full, puts are refused above {limit:.0%}"

    async def run(self) -> None:
        """Checks the disk and deletes segments, every `clean_interval_s`, until cancelled. Raises OSError as
        `check_disk` and DiskFailed as `clean` does; after DiskFull, tries again at the next interval."""
        options = self._options
        clean_at = trio.current_time() + options.clean_first_s
        while True:
            await trio.sleep(options.clean_interval_s)
            await self.check_disk()
            if trio.current_time() >= clean_at:
                try:
                    await self.clean()
                except DiskFull as error:
                    logger.warning("retention.postponed reason=%r", str(error))

    async def check_disk(self) -> None:
        """Updates `disk_used_ratio` and `is_writable`. Raises OSError if the disk's usage can't be read."""
        usages = [
            await self._run_blocking(self._disk.usage, path)
            for path in {self._options.commitlog_path, self._options.root}
        ]
        self.disk_used_ratio = max(usage.used_ratio for usage in usages)
        is_too_full = self.disk_used_ratio > self._options.disk_used_ratio_warning
        if is_too_full != self._is_too_full:
            self._is_too_full = is_too_full
            state = "read_only" if is_too_full else "writable"
            logger.error("store.became_%s disk_used_ratio=%.3f", state, self.disk_used_ratio)

    async def clean(self, *, at_any_hour: bool = False) -> int:
        """Deletes the segments that are due now; returns how many. `at_any_hour`: deletes expired ones outside the
        configured hours, too.

        Raises DiskFull if files can't be written now, because the disk is full or too many files are open; DiskFailed
        for any other error of the disk.
        """
        try:
            async with self._log.maintenance_lock:
                return await self._clean(at_any_hour=at_any_hour)
        except OSError as error:
            path = Path(error.filename or self._options.commitlog_path)
            if is_passing(error):
                raise DiskFull(path, 0, error) from error
            raise DiskFailed(path, "clean", str(error)) from error

    async def _clean(self, *, at_any_hour: bool) -> int:
        options = self._options
        now_ms = self._wall_clock_ms()
        hour = time.localtime(now_ms // 1000).tm_hour
        is_forcible = options.clean_forcibly and self.disk_used_ratio > options.disk_used_ratio_forcible
        is_time = at_any_hour or hour in options.delete_when_hours or self.disk_used_ratio > options.disk_used_ratio_max
        deleted = 0
        if is_time or is_forcible:
            while deleted < options.delete_files_max and len(self._log.segments) > 1:
                segment = self._log.segments[0]
                if not is_forcible and not await self._is_expired(segment, now_ms):
                    break
                if self._is_undispatched(segment) or (not is_forcible and self._is_needed(segment)):
                    break
                if not await self.release(segment.end):
                    break
                path = segment.file.path
                del segment  # the last reference must not be here: dropping it waits for the disk
                self._is_trimmed = False
                await self._log.delete_first()
                deleted += 1
                logger.info("retention.segment_deleted file=%s reason=%s", path, "disk" if is_forcible else "age")
        self.deleted_count += deleted
        if not self._is_trimmed:
            await self._trim_derived()
            self._is_trimmed = True
        return deleted

    async def _is_expired(self, segment: Segment, now_ms: int) -> bool:
        try:
            modified_ms: int = await self._run_blocking(self._disk.modified_ms, segment.file.path)
        except FileNotFoundError:  # deleted by hand
            return True
        return modified_ms + self._options.reserved_h * _MS_PER_H <= now_ms

    def _is_undispatched(self, segment: Segment) -> bool:
        return self._log.dispatched_offset.value < segment.end

    def _is_needed(self, segment: Segment) -> bool:
        """Returns whether a slave needs a segment, and at most `retain_bytes_max` bytes lie between the segment's start
        and the end of the log.

        Not called while segments of any age are deleted: a disconnected slave must not stop the producers.
        """
        needed = self.lowest_needed()
        is_pinned = needed is not None and needed < segment.end
        if is_pinned and self._log.max_offset.value - segment.start > self._options.retain_bytes_max:
            logger.warning("retention.slave_limit_reached file=%s needed_from=%s", segment.file.path, needed)
            is_pinned = False
        if is_pinned and not self._is_pinned:
            logger.warning("retention.segment_kept file=%s needed_from=%s", segment.file.path, needed)
        self._is_pinned = is_pinned
        return is_pinned

    async def _trim_derived(self) -> None:
        min_offset = self._log.min_offset
        await self._run_blocking(self._parts.queues.correct_min, min_offset)
        if self._parts.index is not None:
            await self._run_blocking(self._parts.index.delete_before, min_offset)
        await self._parts.epochs.drop_before(min_offset)


async def _released(end: int) -> bool:
    return True
