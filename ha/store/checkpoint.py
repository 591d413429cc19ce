"""Reading and writing the checkpoint file: until when the log and what is derived from it are on the disk.

Its layout is `ha.protocol.store_files.Checkpoint`. Source: StoreCheckpoint. Behind its fields, where RocketMQ has
zeros, halog puts "HSUM" and the CRC-32 of the fields: a flipped bit in a time would have recovery begin too late, or
take a torn tail for damage. A checkpoint that is wrong counts as none, and recovery then looks at the whole log. So
does one that RocketMQ wrote over halog's, after a crash.

Behind that stands up to which physical offset the log of a master was flushed: "HEND", int64, and the CRC-32 of the
fields and these. Checksums prove that as well (checksums.py), but the newest of them are not synced. Then, "HBEG" and
the same way, where the log begins: a first segment that is gone, and that retention did not delete, is missed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from struct import Struct

from isal.isal_zlib import crc32

from ha.errors import RemoteProtocolError
from ha.protocol.store_files import CHECKPOINT_SIZE, Checkpoint
from ha.store.files import Disk

logger = logging.getLogger(__name__)

SAFETY_MARGIN_MS = 3000
_GUARD_AT = 48
_GUARD = Struct(">4sI")
_GUARD_MAGIC = b"HSUM"
_END_AT = _GUARD_AT + _GUARD.size
_END = Struct(">4sqI")
_END_MAGIC = b"HEND"
_BEGIN_AT = _END_AT + _END.size
_BEGIN_MAGIC = b"HBEG"


def min_timestamp_ms(checkpoint: Checkpoint) -> int:
    """Return until which store time records are in log and queues for sure: where abnormal recovery may start."""
    newest = min(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms)
    return max(0, newest - SAFETY_MARGIN_MS)


def load_checkpoint(disk: Disk, path: Path) -> Checkpoint:
    """Read the file. All zero if there is none or it is damaged: recovery then starts at the first segment."""
    if not disk.exists(path):
        return Checkpoint()
    raw = disk.read_bytes(path)
    try:
        checkpoint = Checkpoint.unpack(raw)
        if raw[_GUARD_AT : _GUARD_AT + 4] == _GUARD_MAGIC and _guard(raw) != raw[_GUARD_AT : _GUARD_AT + _GUARD.size]:
            raise RemoteProtocolError("its checksum is another one")
    except RemoteProtocolError as error:
        logger.error("checkpoint.damage_found file=%s reason=%s: recovery looks at the whole log", path, error)
        return Checkpoint()
    return checkpoint


def load_flushed_to(disk: Disk, path: Path) -> int:
    """Return up to which physical offset the log was flushed for sure; 0 if the file doesn't say."""
    if not disk.exists(path):
        return 0
    raw = disk.read_bytes(path)
    if len(raw) < _END_AT + _END.size or raw[_GUARD_AT:_END_AT] != _guard(raw):
        return 0
    _, flushed_to, _ = _END.unpack_from(raw, _END_AT)
    return flushed_to if raw[_END_AT : _END_AT + _END.size] == _end(raw, _END_MAGIC, flushed_to) else 0


def load_begin(disk: Disk, path: Path) -> int:
    """Return the physical offset that the log begins at, or began at when its first segments were about to be deleted;
    -1 if the file doesn't say."""
    if not disk.exists(path):
        return -1
    raw = disk.read_bytes(path)
    if len(raw) < _BEGIN_AT + _END.size or raw[_GUARD_AT:_END_AT] != _guard(raw):
        return -1
    _, begin, _ = _END.unpack_from(raw, _BEGIN_AT)
    return begin if raw[_BEGIN_AT : _BEGIN_AT + _END.size] == _end(raw, _BEGIN_MAGIC, begin) else -1


def _guard(fields: bytes) -> bytes:
    return _GUARD.pack(_GUARD_MAGIC, crc32(fields[:_GUARD_AT]))


def _end(fields: bytes, magic: bytes, offset: int) -> bytes:
    unproven = _END.pack(magic, offset, 0)[:-4]
    return _END.pack(magic, offset, crc32(unproven, crc32(fields[:_GUARD_AT])))


def save_checkpoint(disk: Disk, path: Path, checkpoint: Checkpoint, flushed_to: int, begin: int) -> None:
    """Write the file in place and sync it; all that changes lies in one sector. OSError if the disk refuses.

    `flushed_to`: up to where the log is flushed, as far as it is to say that; else 0. `begin`: its first physical
    offset, -1 if there is none.
    """
    fields = checkpoint.pack()
    added = _guard(fields) + _end(fields, _END_MAGIC, flushed_to) + _end(fields, _BEGIN_MAGIC, begin)
    content = fields[:_GUARD_AT] + added + fields[_GUARD_AT + len(added) :]
    if not disk.exists(path) or disk.size(path) != CHECKPOINT_SIZE:
        disk.write_bytes(path, content)
        return
    file = disk.open(path)
    file.pwrite(content, 0)
    file.sync()
