"""Reads and writes the checkpoint file: times up to which the log and the files derived from it are durable.

Its layout is `ha.protocol.store_files.Checkpoint`. Source: StoreCheckpoint. Where RocketMQ has zeros after its fields,
halog adds three parts:

    "HSUM", CRC-32          of RocketMQ's fields: with a flipped bit in a time, recovery would begin too late, or take a
                            torn tail for damage
    "HEND", int64, CRC-32   physical offset up to which a master's log was flushed; checksum files (checksums.py) show
                            this, too, but are not synced
    "HBEG", int64, CRC-32   physical offset at which the log begins, to detect missing first segments that retention did
                            not delete

The other two CRCs cover RocketMQ's fields and the 12 bytes before the CRC.

A checkpoint that is damaged, or whose fields RocketMQ has overwritten, is treated as missing: recovery after a crash
then scans the whole log.
"""

from __future__ import annotations

import logging
from pathlib import Path
from struct import Struct

from isal.isal_zlib import crc32

from ha.errors import RemoteProtocolError
from ha.protocol.store_files import CHECKPOINT_SIZE, Checkpoint
from ha.store.files import Disk, read_if_readable

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
    """Returns a store time, in ms, at which recovery may start: SAFETY_MARGIN_MS before the time up to which log and
    queues were synced; 0 if unknown."""
    newest = min(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms)
    return max(0, newest - SAFETY_MARGIN_MS)


def load_checkpoint(disk: Disk, path: Path) -> Checkpoint:
    """Returns the content of the checkpoint file. All fields are 0 if there is no file or it is damaged: recovery after
    a crash then starts at the first segment. Raises OSError."""
    if not disk.exists(path):
        return Checkpoint()
    raw = read_if_readable(disk, path)
    try:
        checkpoint = Checkpoint.unpack(raw)
        if raw[_GUARD_AT : _GUARD_AT + 4] == _GUARD_MAGIC and _guard(raw) != raw[_GUARD_AT : _GUARD_AT + _GUARD.size]:
            raise RemoteProtocolError("its checksum is wrong")
    except RemoteProtocolError as error:
        logger.error('checkpoint.damage_found file=%s reason=%r hint="recovery scans the whole log"', path, str(error))
        return Checkpoint()
    return checkpoint


def load_flushed_to(disk: Disk, path: Path) -> int:
    """Returns the physical offset up to which the log was certainly flushed; 0 if the file doesn't have it, or is
    damaged. Raises OSError."""
    return max(0, _load_offset(disk, path, _END_AT, _END_MAGIC))


def load_begin(disk: Disk, path: Path) -> int:
    """Returns the physical offset at which the log begins, or at which it should begin after a deletion of its first
    segments that may be incomplete; -1 if the file doesn't have it, or is damaged. Raises OSError."""
    return _load_offset(disk, path, _BEGIN_AT, _BEGIN_MAGIC)


def _load_offset(disk: Disk, path: Path, at: int, magic: bytes) -> int:
    """Returns the physical offset in the added part that begins at byte `at` of the file; -1 if the file doesn't have
    that part or a checksum is wrong."""
    raw = read_if_readable(disk, path) if disk.exists(path) else b""
    if len(raw) < at + _END.size or raw[_GUARD_AT:_END_AT] != _guard(raw):
        return -1
    offset: int = _END.unpack_from(raw, at)[1]
    return offset if raw[at : at + _END.size] == _end(raw, magic, offset) else -1


def _guard(fields: bytes) -> bytes:
    return _GUARD.pack(_GUARD_MAGIC, crc32(fields[:_GUARD_AT]))


def _end(fields: bytes, magic: bytes, offset: int) -> bytes:
    unproven = _END.pack(magic, offset, 0)[:-4]
    return _END.pack(magic, offset, crc32(unproven, crc32(fields[:_GUARD_AT])))


def save_checkpoint(disk: Disk, path: Path, checkpoint: Checkpoint, flushed_to: int, begin: int) -> None:
    """Writes the file in place and syncs it; everything that changes is in one sector. If it raises OSError, the file's
    content is unknown.

    `flushed_to`: physical offset up to which a master's log is flushed, 0 on a slave. `begin`: the log's first physical
    offset, -1 if it has none.
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
