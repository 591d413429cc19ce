"""How far a log that is being written may be read by physical ranges without missing a record.

A node may fill its queues a chunk at a time, one queue after the other (halog: those of a MiB; RocketMQ: record by
record), and a reader looks at them one after the other too. So shortly before the last queued record there may be
others whose entries are still to come: a range over them would be read, and called read, without them.
"""

from __future__ import annotations

import numpy as np

from ha.arrow.confirmed import Confirmed
from ha.arrow.queues import BATCH_ENTRY_DTYPE, QueueFiles, QueueId
from ha.arrow.segments import Segments
from ha.arrow.walking import Walker
from ha.protocol.codes import SysFlag
from ha.protocol.heads import Heads
from ha.protocol.topic_names import is_queue_directory

_TAIL_BYTES = 2 << 20
"""The last queued record, and the MiB of records before it"""
_VISIBLE = (int(SysFlag.TRANSACTION_NOT), int(SysFlag.TRANSACTION_COMMIT))


def settled_end(segments: Segments, queues: dict[QueueId, QueueFiles], confirmed: Confirmed) -> int:
    """Return the physical offset before which every record that is to be queued is queued.

    A record that is visible and usable and not in its queue yet ends it; it can begin at most 1 MiB before the last
    queued one. Call it for a node that has not stopped cleanly only: one that has, has queued everything.
    """
    end = confirmed.end_offset
    begin = max(segments.min_offset, end - _TAIL_BYTES)
    for offsets in Walker(segments, queues, confirmed).walk(begin, end, damages=[]):
        segment = segments.find(int(offsets[0]))
        buffer = None if segment is None else segments.buffer(segment)
        if segment is None or buffer is None:
            continue
        heads = Heads(np.frombuffer(buffer, np.uint8), offsets - segment.start, segment.start)
        visible = np.isin(heads.sys_flag & int(SysFlag.TRANSACTION_MASK), _VISIBLE)
        for row in np.flatnonzero(heads.sound & visible).tolist():
            at, size = int(heads.topic_at[row]), int(heads.topic_size[row])
            key = QueueId(
                str(heads.raw[at : at + size].tobytes(), "utf-8", "replace"), int(heads.field("queue_id")[row])
            )
            if is_queue_directory(key.topic, key.queue_id) and int(heads.field("queue_offset")[row]) >= _reached(
                queues, confirmed, key
            ):
                return int(offsets[row])
    return end


def _reached(queues: dict[QueueId, QueueFiles], confirmed: Confirmed, key: QueueId) -> int:
    """The queue offset behind the queue's last message."""
    end = confirmed.queue_ends.get(key, 0)
    queue = queues.get(key)
    if queue is None or queue.dtype is not BATCH_ENTRY_DTYPE or not end:
        return end
    _, entries = queue.read(end - 1, end)
    return int(entries["base_offset"][-1]) + int(entries["batch_size"][-1]) if len(entries) else 0
