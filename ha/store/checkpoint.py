"""The checkpoint file: up to which store time the log and what is derived from it are on the disk.

4096 bytes; int64 each: physicMsgTimestamp, logicsMsgTimestamp, indexMsgTimestamp (ms), masterFlushedOffset,
confirmPhyOffset (bytes; 5.x). Source: StoreCheckpoint.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct

import msgspec

from ha.store.files import Disk

CHECKPOINT_SIZE = 4096
SAFETY_MARGIN_MS = 3000
_FIELDS = Struct(">qqqqq")


class Checkpoint(msgspec.Struct, kw_only=True):
    """The file's fields. Times are store times of records, ms since the epoch."""

    physic_timestamp_ms: int = 0
    logics_timestamp_ms: int = 0
    index_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirm_offset: int = 0

    @property
    def min_timestamp_ms(self) -> int:
        """Records stored until then are in the log and in the queues for sure; abnormal recovery starts from there."""
        return max(0, min(self.physic_timestamp_ms, self.logics_timestamp_ms) - SAFETY_MARGIN_MS)

    def encode(self) -> bytes:
        """Return the file's content."""
        return _FIELDS.pack(
            self.physic_timestamp_ms,
            self.logics_timestamp_ms,
            self.index_timestamp_ms,
            self.master_flushed_offset,
            self.confirm_offset,
        ).ljust(CHECKPOINT_SIZE, b"\x00")


def load_checkpoint(disk: Disk, path: Path) -> Checkpoint:
    """Read the file. All zero if there is none or it is short: recovery then starts at the first segment."""
    if not disk.exists(path):
        return Checkpoint()
    raw = disk.read_bytes(path)
    if len(raw) < _FIELDS.size:
        return Checkpoint()
    physic, logics, index, flushed, confirm = _FIELDS.unpack_from(raw)
    return Checkpoint(
        physic_timestamp_ms=physic,
        logics_timestamp_ms=logics,
        index_timestamp_ms=index,
        master_flushed_offset=flushed,
        confirm_offset=confirm,
    )


def save_checkpoint(disk: Disk, path: Path, checkpoint: Checkpoint) -> None:
    """Write the file in place and sync it; the fields lie in one sector. OSError if the disk refuses."""
    if not disk.exists(path) or disk.size(path) != CHECKPOINT_SIZE:
        disk.write_bytes(path, checkpoint.encode())
        return
    file = disk.open(path)
    file.pwrite(checkpoint.encode()[: _FIELDS.size], 0)
    file.sync()
