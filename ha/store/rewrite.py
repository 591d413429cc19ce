"""Rewrites and syncs, after a crash, the bytes of the log that may exist only in the page cache.

A process that ended without closing its store may have written bytes that were never synced; and if it ended because a
sync failed, the kernel has marked its pages clean although they are not on the disk: they still read as written, and no
later sync writes them (https://lwn.net/Articles/752063/). A process that appended messages after these bytes and
acknowledged them would lose all these messages at the next power loss, since recovery ends at the first hole. So
everything that is not known to be synced is written again, which makes its pages dirty, and synced.

RocketMQ neither writes nor syncs anything here (CommitLog.recoverAbnormally).
"""

from __future__ import annotations

from collections.abc import Sequence

from ha.store.mapped_file import Segment

_CHUNK_BYTES = 1 << 20
_PAGE_BYTES = 4096


def write_again(segments: Sequence[Segment], begin: int, end: int) -> None:
    """Reads the bytes at physical offsets [begin, end), writes them again to the same places, and syncs them.

    Blocking. Called before anything is appended. After OSError, it is still unknown what the disk contains.
    """
    for segment in segments:
        if segment.end <= begin or segment.start >= end:
            continue
        position = max(0, begin - segment.start)
        position -= position % _PAGE_BYTES
        stop = min(end - segment.start, segment.size)
        # The file may be shorter, if another program has truncated it.
        while position < stop and (chunk := segment.file.pread(min(_CHUNK_BYTES, stop - position), position)):
            segment.file.pwrite(chunk, position)
            position += len(chunk)
        segment.file.sync()
