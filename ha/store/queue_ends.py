"""The file `queueends`, halog's own: the end of each consume queue at its last sync.

A queue that lost its end while the node was down, because its last entries were zeroed or its last file was deleted,
looks like a complete, shorter queue. The recorded end reveals the loss, and the lost entries are dispatched again;
otherwise a master would give their queue offsets to other messages. RocketMQ ignores the file. While RocketMQ uses the
store, queues only grow, and a queue that ends after its recorded end counts as complete.

The content is JSON, topic -> queue id -> end (entries), preceded by its CRC-32 (8 hex digits) and a newline.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from isal.isal_zlib import crc32

from ha.store.files import Disk, read_if_readable

logger = logging.getLogger(__name__)

QUEUE_ENDS_FILE = "queueends"

QueueEnds: TypeAlias = dict[str, dict[int, int]]

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_DECODER = msgspec.json.Decoder(dict[str, dict[_Number, _Number]])


def load_queue_ends(disk: Disk, path: Path) -> QueueEnds:
    """Returns the recorded ends; none if there is no file or it is damaged. Raises OSError."""
    if not disk.exists(path):
        return {}
    guard, _, content = read_if_readable(disk, path).partition(b"\n")
    try:
        if guard == _guard(content):
            return _DECODER.decode(content)
        reason = "its checksum is wrong"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error)
    logger.error('queue.ends_damaged file=%s reason=%r hint="lost ends of queues can\'t be detected"', path, reason)
    return {}


def save_queue_ends(disk: Disk, path: Path, ends: QueueEnds) -> None:
    """Writes and syncs the file. After OSError, the file's content is unknown."""
    content = msgspec.json.encode(ends)
    disk.write_bytes(path, _guard(content) + b"\n" + content)


def _guard(content: bytes) -> bytes:
    return b"%08x" % crc32(content)
