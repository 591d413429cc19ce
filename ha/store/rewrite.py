"""Making sure, after a crash, that what the log shows is also on the disk.

A process that ended without closing its store may have written bytes that were never synced; and if it ended because a
sync failed, the kernel has marked its pages clean although they are not on the disk: they still read as written, and
no later sync writes them (https://lwn.net/Articles/752063/). Whoever then takes the log as it reads, goes on behind it
and acknowledges, loses all of that at the next power loss, since recovery ends at the first hole. So what is not known
to have been synced is written once more, which makes its pages dirty, and synced.

RocketMQ neither writes nor syncs anything here (CommitLog.recoverAbnormally).
"""

from __future__ import annotations

from collections.abc import Sequence

from ha.store.mapped_file import Segment

_CHUNK_BYTES = 1 << 20
_PAGE_BYTES = 4096


def write_again(segments: Sequence[Segment], begin: int, end: int) -> None:
    """Write the bytes of physical offsets [begin, end) to their files again, as they read, and sync these.

    Blocking; before anybody appends. OSError if the disk refuses: what is on it is then still in doubt.
    """
    for segment in segments:
        if segment.end <= begin or segment.start >= end:
            continue
        position = max(0, begin - segment.start)
        position -= position % _PAGE_BYTES
        stop = min(end - segment.start, segment.size)
        while position < stop:
            chunk = segment.file.pread(min(_CHUNK_BYTES, stop - position), position)
            segment.file.pwrite(chunk, position)
            position += len(chunk)
        segment.file.sync()
