"""Reads the records at a log's end that are not dispatched yet, for a node that is about to append messages as master.

A node that becomes a master appends at the end of its log, although dispatch waits until the other members of the group
have everything up to there (`dispatch_limit`). So the queue offset of a new message has to follow those of its queue's
records that are not dispatched yet. RocketMQ waits for dispatch to reach the end (BrokerController.changeToMaster,
recoverTopicQueueTable).
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
    """Facts about the records that are not dispatched yet, for a new master.

    `end`: physical offset at which the last complete record or filler ends. `next_offsets`: next queue offset of each
    queue that has such records. `store_timestamp_ms`: the newest store time of these records, -1 if there are none.
    """

    end: int
    next_offsets: dict[tuple[str, int], int]
    store_timestamp_ms: int


async def read_undispatched(log: CommitLog, begin: int) -> Undispatched:
    """Reads the records from `begin`, at which a record starts, to the end of the log, while nothing is appended.

    Raises CorruptLog if there are bytes that are neither a record nor a filler, DamagedBytes if bytes are damaged:
    nothing can be appended after either. Raises OSError if the log can't be read.
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
                break  # an incomplete record
            size *= 4
            continue
        position, size = min(position + consumed, end), _CHUNK_BYTES
        await trio.lowlevel.checkpoint()
    return Undispatched(position, next_offsets, store_timestamp_ms)


def _count(
    raw: Readable, base: int, segment_end: int, log: CommitLog, next_offsets: dict[tuple[str, int], int]
) -> tuple[int, int]:
    """Adds the next queue offsets after the complete records of `raw` to `next_offsets`. Returns how many bytes
    these records and a complete filler take, and the store time of the last record (-1 if there is none). Raises
    CorruptLog as `read_undispatched` does."""
    at, last_ms = 0, -1
    while at < len(raw):
        found = scan_record(raw, at, len(raw))
        if isinstance(found, Filler):
            # The rest of a filler that a master sends in pieces may be missing: no record begins there.
            return segment_end - base if base + at + found.total_size <= log.max_offset.value else at, last_ms
        if isinstance(found, RecordHead) and found.physical_offset == base + at:
            if found.sys_flag & SysFlag.TRANSACTION_MASK in _VISIBLE:
                next_offsets[found.topic, found.queue_id] = found.queue_offset + 1
            at += found.total_size
            last_ms = found.store_timestamp_ms
        elif found is None:
            break
        else:
            reason = found.reason if isinstance(found, Unparsable) else f"a record for {found.physical_offset}"
            segment = log.segment_at(base)
            raise CorruptLog(segment.file.path, base + at - segment.start, f"no record is there: {reason}")
    return at, last_ms
