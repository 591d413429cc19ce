"""How far a log that is being written may be archived by physical ranges.

The end that a reader tells is that of the last record that stands in a queue. A node may fill its queues a chunk at a
time, one queue after the other (halog: up to 128 KiB; RocketMQ: record by record), and a reader looks at them one after
the other too. So shortly before that end there may be records whose entries are still to come: a range over them would
be called covered without them. Behind the first such record nothing is archived until its queue has reached it.

A record that no queue ever takes (halog passes over some that are unusable) holds the archive up only while it is this
close to the end of the log.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ha.arrow import LogReader, ReadOptions
from ha.protocol.codes import SysFlag

_TAIL_BYTES = 1 << 20
_VISIBLE = (int(SysFlag.TRANSACTION_NOT), int(SysFlag.TRANSACTION_COMMIT))


def settled_end(reader: LogReader, begin: int) -> int:
    """The physical offset up to which every record from `begin` on that is to be queued is queued."""
    end = reader.end_offset()
    begin = max(begin, reader.min_offset, end - _TAIL_BYTES)
    if begin >= end:
        return end
    options = ReadOptions(columns=("topic", "queueId", "queueOffset", "physicalOffset", "sysFlag"), decompress=False)
    for batch in reader.walk_range(begin, end, options):
        first = _first_missing(reader, batch)
        if first is not None:
            return first
    return end


def _first_missing(reader: LogReader, batch: pa.RecordBatch) -> int | None:
    rows = pa.Table.from_batches([batch]).drop_null()  # damaged records say nothing about queues
    visible = np.isin(rows["sysFlag"].to_numpy() & int(SysFlag.TRANSACTION_MASK), _VISIBLE)
    rows = rows.filter(pa.array(visible))
    places = rows["physicalOffset"].to_numpy()
    ends = {
        (row["topic"], row["queueId"]): reader.queue_range(row["topic"], row["queueId"]).end
        for row in rows.group_by(["topic", "queueId"]).aggregate([]).to_pylist()
    }
    queues = zip(rows["topic"].to_pylist(), rows["queueId"].to_pylist(), strict=True)
    reached = np.array([ends[queue] for queue in queues], np.int64)
    missing = places[rows["queueOffset"].to_numpy() >= reached]
    return int(missing.min()) if len(missing) else None
