"""The records at a log's end that are not dispatched yet, as far as whoever is about to put more must know of them.

A node that becomes a master goes on where its log ends, not where dispatch is: that waits until the other members of
the group have what is behind (`dispatch_limit`). The next message of a queue comes behind those, too. RocketMQ waits
for dispatch to reach the end (BrokerController.changeToMaster, recoverTopicQueueTable).
"""

from __future__ import annotations

from typing import NamedTuple

import trio

from ha.errors import CorruptLog
from ha.protocol.codes import SysFlag
from ha.protocol.record import Filler, Readable, RecordHead, Unparsable, scan_record
from ha.store.commitlog import CommitLog

_CHUNK_BYTES = 1 << 20
_VISIBLE = (SysFlag.TRANSACTION_NOT, SysFlag.TRANSACTION_COMMIT)


class Undispatched(NamedTuple):
    """`end`: where the last whole record ends (physical offset). `next_offsets`: of the queues that have one there.

    `store_timestamp_ms`: when the last of them was stored, -1 if there is none.
    """

    end: int
    next_offsets: dict[tuple[str, int], int]
    store_timestamp_ms: int


async def read_undispatched(log: CommitLog, begin: int) -> Undispatched:
    """Go along the records from where one begins to the log's end, while nobody appends.

    CorruptLog if there is something else, DamagedBytes if it isn't what was written: nobody can go on behind that.
    """
    position, end = begin, log.max_offset.value
    next_offsets: dict[tuple[str, int], int] = {}
    store_timestamp_ms = -1
    size = _CHUNK_BYTES
    while position < end:
        segment = log.segment_at(position)
        raw = await log.read_all(position, min(size, segment.end - position, end - position))
        consumed, last_ms = _count(raw, position, segment.end, log, next_offsets)
        store_timestamp_ms = max(store_timestamp_ms, last_ms)
        if not consumed:
            if position + len(raw) >= min(segment.end, end):
                break  # only a part of it has come
            size *= 4
            continue
        position, size = min(position + consumed, end), _CHUNK_BYTES
        await trio.lowlevel.checkpoint()
    return Undispatched(position, next_offsets, store_timestamp_ms)


def _count(
    raw: Readable, base: int, segment_end: int, log: CommitLog, next_offsets: dict[tuple[str, int], int]
) -> tuple[int, int]:
    """Note the queue offsets of the records at the begin of `raw`; return how many bytes they take, and when the last
    was stored (-1: there is none)."""
    at, last_ms = 0, -1
    while at < len(raw):
        found = scan_record(raw, at, len(raw))
        if isinstance(found, Filler):
            # Of a filler that a master sends in pieces the rest may be missing: it is no record's begin.
            return segment_end - base if base + at + found.total_size <= log.max_offset.value else at, last_ms
        if isinstance(found, RecordHead) and found.physical_offset == base + at:
            if found.sys_flag & SysFlag.TRANSACTION_MASK in _VISIBLE:
                next_offsets[found.topic, found.queue_id] = found.queue_offset + 1
            at += found.total_size
            last_ms = found.store_timestamp_ms
        elif found is None:
            break
        else:
            reason = found.reason if isinstance(found, Unparsable) else f"a record of {found.physical_offset}"
            segment = log.segment_at(base)
            raise CorruptLog(segment.file.path, base + at - segment.start, f"no record is there: {reason}")
    return at, last_ms


__all__ = ["Undispatched", "read_undispatched"]
