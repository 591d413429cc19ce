"""Finds how far a log that is being written can be read by physical ranges without missing a record.

A node writes queue entries for one chunk of the log at a time, and within a chunk queue by queue (halog's chunks are at
most 1 MiB or one longer record, RocketMQ's are single records). A reader also examines one queue at a time. So the end
of the queue examined last says nothing about the queues examined before it, to which any number of entries may have
been added meanwhile. But once the reader has seen an entry, every queue that it examines afterwards has the entries of
all earlier chunks: only records within 1 MiB before that entry's record may lack theirs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ha.arrow.confirmed import Confirmed
from ha.arrow.deleted import created_at, is_deleted_by_rocketmq
from ha.arrow.heads import Heads
from ha.arrow.queues import BATCH_ENTRY_DTYPE, QueueId, Queues
from ha.arrow.segments import Segments
from ha.arrow.walking import Walker
from ha.protocol.codes import SysFlag
from ha.protocol.record_digest import VISIBLE
from ha.protocol.topic_names import is_queue_directory

_TAIL_BYTES = 2 << 20
"""Size in bytes of the examined end of the log: the last queued record, and the MiB of records before it"""


def settled_end(store: Path, segments: Segments, queues: Queues, confirmed: Confirmed, end: int) -> int:
    """Returns the physical offset, at most `end`, before which every visible record is in its queue as `confirmed` has
    examined it.

    `end` is a confirmed end of the log (physical offset) that was found before `confirmed` examined its first queue. If
    the last _TAIL_BYTES before it contain a visible record that is not queued, returns the offset of the first one.
    Records of deleted topics, and those without a usable topic and queue id, don't count: they are in no queue. Only
    needed for a node that runs or did not stop cleanly: a clean stop queues all records.
    """
    created: dict[QueueId, int] = {}
    deleted: dict[str, bool] = {}
    end = min(end, confirmed.end_offset)
    begin = max(segments.min_offset, end - _TAIL_BYTES)
    for offsets in Walker(segments, queues, confirmed).walk(begin, end, damages=[]):
        mapped = segments.mapped_at(int(offsets[0]))
        if mapped is None:
            continue
        segment, buffer = mapped
        heads = Heads(np.frombuffer(buffer, np.uint8), offsets - segment.start, segment.start)
        visible = np.isin(heads.sys_flag & int(SysFlag.TRANSACTION_MASK), VISIBLE)
        for row in np.flatnonzero(heads.sound & visible).tolist():
            at, size = int(heads.topic_at[row]), int(heads.topic_size[row])
            key = QueueId(
                str(heads.raw[at : at + size].tobytes(), "utf-8", "replace"), int(heads.field("queue_id")[row])
            )
            is_usable = is_queue_directory(key.topic, key.queue_id)
            if not is_usable or int(heads.field("queue_offset")[row]) < _queued_end(queues, confirmed, key):
                continue
            if key not in created:
                created[key] = created_at(queues, confirmed, key)
            if key.topic not in deleted:
                deleted[key.topic] = is_deleted_by_rocketmq(store, key.topic)
            if not deleted[key.topic] and offsets[row] >= created[key]:
                return int(offsets[row])
    return end


def _queued_end(queues: Queues, confirmed: Confirmed, key: QueueId) -> int:
    """Returns the queue offset after the queue's last message; 0 if there is no such queue."""
    queue = queues.get(key)
    end = 0 if queue is None else confirmed.queue_end(key)
    if queue is None or queue.dtype is not BATCH_ENTRY_DTYPE or not end:
        return end
    _, entries = queue.read(end - 1, end)
    return int(entries["base_offset"][-1]) + int(entries["batch_size"][-1]) if len(entries) else 0
