"""Options of the store. Names contain the unit.

The key of the configuration file is in brackets, if there is one; its unit may be another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from ha.protocol.properties import DELAY_LEVELS_MS


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Directory, sizes, intervals and limits of a store. Defaults are RocketMQ's, unless the option's description says
    otherwise or RocketMQ has no such option."""

    root: Path
    """[storePathRootDir] directory of the store"""
    commitlog_directory: Path | None = None
    """[storePathCommitLog] directory of the commitlog's segments; None: `root`/commitlog"""
    segment_size: int = 1 << 30
    """[mappedFileSizeCommitLog] size of a segment in bytes"""
    preallocate: bool = True
    """[preallocateCommitLog] whether a segment's disk space is allocated when the segment is created. RocketMQ
    allocates it as the segment is written"""
    queue_entry_count: int = 300_000
    """[mappedFileSizeConsumeQueue / 20] number of entries of a consume-queue file"""
    index_enabled: bool = True
    """[messageIndexEnable] whether messages are indexed by their keys"""
    index_slot_count: int = 5_000_000
    """[maxHashSlotNum] number of hash slots of an index file"""
    index_entry_count: int = 20_000_000
    """[maxIndexNum] number of entries of an index file"""
    index_tags: bool = True
    """[indexTags] whether the index also has an entry `topic#T#tag` for the tag of each message, as in RocketMQ 5.4 and
    later; 4.9 and 5.3 have none"""

    is_slave: bool = False
    """[brokerRole=SLAVE, or etcdEndpoints is set] whether the store opens with a log that is a copy of a master's. In
    such a log, dispatch waits at bytes that are no record, instead of skipping them"""
    dispatch_confirmed: bool = False
    """[etcdEndpoints is set] whether the log's `dispatch_limit` begins at the end of the records that were confirmed
    before the last stop; otherwise there is no limit at first"""
    store_host: bytes = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
    """[brokerIP1:listenPort] store host of new records, as `encode_host` returns it"""
    message_size_max: int = 4 << 20
    """[maxMessageSize] maximum size of a message body in bytes"""
    append_property_crc: bool = False
    """[enabledAppendPropCRC] whether each record gets a property with the CRC of the record"""
    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
    """[messageDelayLevel] delays of the delay levels, from level 1 on"""

    flush_mode: Literal["ASYNC_FLUSH", "SYNC_FLUSH"] = "ASYNC_FLUSH"
    """[flushDiskType] whether puts are answered before (ASYNC_FLUSH) or after (SYNC_FLUSH) their flush"""
    flush_interval_s: float = 0.5
    """[flushIntervalCommitLog] with ASYNC_FLUSH, interval at which the log is checked for a due flush"""
    flush_least_pages: int = 4
    """[flushCommitLogLeastPages] with ASYNC_FLUSH, minimum number of dirty 4 KiB pages for which a check flushes; it
    also does if a segment has become full"""
    flush_thorough_interval_s: float = 10.0
    """[flushCommitLogThoroughInterval] with ASYNC_FLUSH, time since the last flush after which a check flushes any
    dirty page"""
    derived_flush_interval_s: float = 10.0
    """Interval at which consume queues and index are synced. RocketMQ syncs them every second if they have 2 dirty
    pages, and every 60 s in any case"""
    checkpoint_interval_s: float = 1.0
    """Interval at which the checksums of flushed blocks and the checkpoint are written"""

    open_files_max: int = 2048
    """Number of files that the process may open. Queues keep up to a quarter of them open, and up to three quarters
    during recovery, when no connections need any; in both cases at most 16,384"""
    recovery_scan_bytes: int = 64 << 20
    """Size of the log's end that is checked record by record after a clean stop. RocketMQ checks the last segment (5.x)
    or the last three (4.9)"""

    segment_wait_s: float = 5.0
    """Maximum time in seconds that a put waits for its next segment (RocketMQ: AllocateMappedFileService, 5 s)"""
    allocate_retry_s: float = 1.0
    """Time after a failed creation of a segment during which puts that need one fail at once; the next put then tries
    again"""
    hot_window_bytes: int = 64 << 20
    """Size of the log's end that is read from the map; older bytes are read from the file"""

    checksum_block_size: int = 32 << 10
    """Size in bytes of a block, the part of the log that one checksum covers. A cold read reads whole blocks, and a
    block that does not match its checksum is damaged as a whole"""
    scrub_bytes_per_s: int = 5 << 20
    """[scrubBytesPerSecond] maximum rate of the scrub; 0 disables it, except for rounds that are requested"""
    scrub_pause_s: float = 3600.0
    """[scrubPauseSeconds] pause between two rounds of the scrub"""
    scrub_first_s: float = 60.0
    """Time between the start and the first round of the scrub"""

    clean_interval_s: float = 10.0
    """[cleanResourceInterval] interval at which expired files are deleted"""
    clean_first_s: float = 60.0
    """Time after the start before which nothing is deleted"""
    delete_when_hours: frozenset[int] = frozenset({4})
    """[deleteWhen] hours of the day (0 to 23, local time) at which expired segments are deleted"""
    reserved_h: float = 72.0
    """[fileReservedTime] time in hours after its last write at which a segment expires"""
    disk_used_ratio_max: float = 0.75
    """[diskMaxUsedSpaceRatio / 100] used share of the disk above which expired segments are deleted at any hour"""
    clean_forcibly: bool = True
    """[cleanFileForciblyEnable] whether segments may be deleted before they expire"""
    disk_used_ratio_forcible: float = 0.85
    """[diskSpaceCleanForciblyRatio / 100] used share of the disk above which segments are deleted before they expire,
    if `clean_forcibly`"""
    disk_used_ratio_warning: float = 0.90
    """[diskSpaceWarningLevelRatio / 100] used share of the disk above which the store refuses puts"""
    delete_files_max: int = 10
    """[deleteFileBatchMax] maximum number of segments deleted in one round"""
    retain_bytes_max: int = 8 << 30
    """[haRetainMaxBytes] maximum distance in bytes from the start of an expired segment to the end of the log at which
    the segment is kept for a slave that still needs it. RocketMQ keeps none"""

    stop_timeout_s: float = 8.0
    """[0.7 × shutdownTimeout] maximum time for closing the store, including its last flush, dispatch and checkpoint"""

    @property
    def commitlog_path(self) -> Path:
        """Directory of the segments."""
        return self.commitlog_directory or self.root / "commitlog"

    @property
    def is_sync_flush(self) -> bool:
        """Whether puts are acknowledged only when flushed."""
        return self.flush_mode == "SYNC_FLUSH"
