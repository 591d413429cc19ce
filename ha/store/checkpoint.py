"""Reading and writing the checkpoint file: until when the log and what is derived from it are on the disk.

Its layout is `ha.protocol.store_files.Checkpoint`. Source: StoreCheckpoint.
"""

from __future__ import annotations

from pathlib import Path

from ha.errors import RemoteProtocolError
from ha.protocol.store_files import CHECKPOINT_SIZE, Checkpoint
from ha.store.files import Disk

SAFETY_MARGIN_MS = 3000


def min_timestamp_ms(checkpoint: Checkpoint) -> int:
    """Return until which store time records are in log and queues for sure: where abnormal recovery may start."""
    newest = min(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms)
    return max(0, newest - SAFETY_MARGIN_MS)


def load_checkpoint(disk: Disk, path: Path) -> Checkpoint:
    """Read the file. All zero if there is none or it is short: recovery then starts at the first segment."""
    if not disk.exists(path):
        return Checkpoint()
    try:
        return Checkpoint.unpack(disk.read_bytes(path))
    except RemoteProtocolError:
        return Checkpoint()


def save_checkpoint(disk: Disk, path: Path, checkpoint: Checkpoint) -> None:
    """Write the file in place and sync it; all that changes lies in one sector. OSError if the disk refuses."""
    if not disk.exists(path) or disk.size(path) != CHECKPOINT_SIZE:
        disk.write_bytes(path, checkpoint.pack())
        return
    file = disk.open(path)
    file.pwrite(checkpoint.pack(), 0)
    file.sync()
