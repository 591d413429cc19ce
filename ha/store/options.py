"""Options of the store. Names contain the unit; the RocketMQ key is in brackets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ha.protocol.properties import DELAY_LEVELS_MS


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Directory, sizes, intervals and limits of a store; defaults are RocketMQ's unless the comment says otherwise."""

    root: Path
    """[storePathRootDir]"""
    commitlog_directory: Path | None = None
    """[storePathCommitLog] `root`/commitlog if None"""
    segment_size: int = 1 << 30
    """[mappedFileSizeCommitLog] bytes"""
    preallocate: bool = True
    """Whether segments get their space on the disk when they are made. RocketMQ's get it as they are written"""
    queue_entry_count: int = 300_000
    """[mappedFileSizeConsumeQueue / 20] entries of a consume-queue file"""
    index_enabled: bool = True
    """[messageIndexEnable]"""
    index_slot_count: int = 5_000_000
    """[maxHashSlotNum]"""
    index_entry_count: int = 20_000_000
    """[maxIndexNum]"""
    index_tags: bool = True
    """Index `topic#T#tag` too, as 5.4 and later do; False writes what 4.9 and 5.3 write"""

    is_slave: bool = False
    """[brokerRole=SLAVE] dispatch then waits at bytes that are no record instead of skipping them"""
    dispatch_confirmed: bool = False
    """[enableControllerMode] at start, `dispatch_limit` is the end of the records that were confirmed before, until it
    is moved"""
    store_host: bytes = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
    """[brokerIP1:listenPort] as `encode_host` returns it"""
    message_size_max: int = 4 << 20
    """[maxMessageSize] bytes of body"""
    append_property_crc: bool = False
    """[enabledAppendPropCRC]"""
    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
    """[messageDelayLevel]"""

    flush_mode: Literal["ASYNC_FLUSH", "SYNC_FLUSH"] = "ASYNC_FLUSH"
    """[flushDiskType]"""
    flush_interval_s: float = 0.5
    """[flushIntervalCommitLog] ASYNC_FLUSH"""
    flush_least_pages: int = 4
    """[flushCommitLogLeastPages] 4 KiB pages"""
    flush_thorough_interval_s: float = 10.0
    """[flushCommitLogThoroughInterval]"""
    derived_flush_interval_s: float = 10.0
    """How often consume queues and index are synced. RocketMQ: 60 s thoroughly, 1 s from 2 dirty pages on"""
    checkpoint_interval_s: float = 1.0
    """How often the checksums of flushed blocks and the checkpoint are written"""

    open_files_max: int = 2048
    """Number of files that the process may open. Queues use a quarter of them, and three quarters during recovery, when
    nothing else needs any; in both cases at most 16,384"""
    recovery_scan_bytes: int = 64 << 20
    """Size of the log's end that is checked record by record after a clean stop. RocketMQ checks the last segment (5.x)
    or the last three (4.9)"""

    segment_wait_s: float = 5.0
    """How long a put waits for its next segment (RocketMQ: AllocateMappedFileService, 5 s)"""
    allocate_retry_s: float = 1.0
    """Time after a failed creation of a segment during which puts that need one fail at once; the next put then tries
    again"""
    hot_window_bytes: int = 64 << 20
    """Size of the log's end that is read from the map; older bytes are read from the file"""

    checksum_block_size: int = 32 << 10
    """Bytes of the log that one checksum covers: the smallest range that is listed as damaged, and that a cold read
    reads"""
    scrub_bytes_per_s: int = 5 << 20
    """[scrubBytesPerSecond] rate of the scrub; 0 disables it"""
    scrub_pause_s: float = 3600.0
    """[scrubPauseSeconds] pause between two rounds of the scrub"""
    scrub_first_s: float = 60.0
    """Time between the start and the first round of the scrub"""

    clean_interval_s: float = 10.0
    """[cleanResourceInterval]"""
    clean_first_s: float = 60.0
    """Time after the start in which nothing is deleted"""
    delete_when_hours: frozenset[int] = frozenset({4})
    """[deleteWhen] local hours of the day"""
    reserved_h: float = 72.0
    """[fileReservedTime]"""
    disk_used_ratio_max: float = 0.75
    """[diskMaxUsedSpaceRatio / 100] above it expired segments are deleted at any hour"""
    clean_forcibly: bool = True
    """[cleanFileForciblyEnable]"""
    disk_used_ratio_forcible: float = 0.85
    """[diskSpaceCleanForciblyRatio] above it segments are deleted before they expire, if `clean_forcibly`"""
    disk_used_ratio_warning: float = 0.90
    """[diskSpaceWarningLevelRatio] above it the store refuses puts"""
    delete_files_max: int = 10
    """[deleteFileBatchMax] segments per round"""
    retain_bytes_max: int = 8 << 30
    """[haRetainMaxBytes] an expired segment that a slave still needs is kept while the log from it to the end has at
    most this size. RocketMQ keeps none"""

    stop_timeout_s: float = 8.0
    """Timeout of closing: the last flush, dispatch and checkpoint"""

    @property
    def commitlog_path(self) -> Path:
        """Directory of the segments."""
        return self.commitlog_directory or self.root / "commitlog"

    @property
    def is_sync_flush(self) -> bool:
        """Whether puts are acknowledged only when flushed."""
        return self.flush_mode == "SYNC_FLUSH"
