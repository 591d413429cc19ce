"""Where each consume queue ended when it was synced last: the file `queueends`, halog's own.

A queue that lost its end while the node was down, its last entries zeroed or its last file gone, looks as one that ends
there. Whoever knows better has the lost part dispatched again; without, a master would give the queue offsets in it to
other messages. RocketMQ leaves the file alone: its queues only grow meanwhile, and one that ends later is no loss.

The content is JSON, topic -> queue id -> end (entries), behind its CRC-32 (8 hex digits) and a newline.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from isal.isal_zlib import crc32

from ha.store.files import Disk

logger = logging.getLogger(__name__)

QUEUE_ENDS_FILE = "queueends"

QueueEnds: TypeAlias = dict[str, dict[int, int]]

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_DECODER = msgspec.json.Decoder(dict[str, dict[_Number, _Number]])


def load_queue_ends(disk: Disk, path: Path) -> QueueEnds:
    """Read the file; empty if there is none or it is damaged: then nothing is known."""
    if not disk.exists(path):
        return {}
    guard, _, content = disk.read_bytes(path).partition(b"\n")
    try:
        if guard == _guard(content):
            return _DECODER.decode(content)
        reason = "its checksum is another"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error)
    logger.error("queue.ends_damaged file=%s reason=%r: queues that lost their ends go unnoticed", path, reason)
    return {}


def save_queue_ends(disk: Disk, path: Path, ends: QueueEnds) -> None:
    """Write the file and sync it. OSError if the disk refuses; what it says is then unknown."""
    content = msgspec.json.encode(ends)
    disk.write_bytes(path, _guard(content) + b"\n" + content)


def _guard(content: bytes) -> bytes:
    return b"%08x" % crc32(content)
