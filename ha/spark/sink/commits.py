"""Reading committed data only: which rows of a topic belong to batches that their sink has committed.

A message without the sink's property is nobody's batch and always counts. One with it counts if a commit record of its
batch names its queue offset. So rows of aborted attempts, of batches still being written, and second copies of a row
are left out.

A row is decided once its batch, or a later one of its sink, is committed. Until then it is pending: a reader who
follows a topic stops before the first pending row and goes on there when a commit has come (`sink_committed_source`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ha.protocol.properties import find_property
from ha.spark.sink.control import ControlRecord
from ha.spark.sink.identity import SINK_PROPERTY, SINK_PROPERTY_BYTES, SinkPart, parse_sink_property

if TYPE_CHECKING:
    from ha.spark.source.log_source import QueueSlice

COLUMNS_NEEDED = ("topic", "brokerName", "queueId", "queueOffset", "propertiesString")


class Commits:
    """What the commit topic said when it was read."""

    def __init__(self, records: Iterable[ControlRecord] = ()) -> None:
        self._commits: dict[tuple[str, int], ControlRecord] = {}
        self._last: dict[str, int] = {}
        self.add(records)

    def add(self, records: Iterable[ControlRecord]) -> None:
        """Take in what was read later."""
        for record in records:
            if record.kind == "commit":
                self._commits[record.sink, record.batch] = record
                self._last[record.sink] = max(record.batch, self._last.get(record.sink, -1))

    def within(self, slices: Iterable[QueueSlice]) -> Commits:
        """What is needed to tell the rows of `slices` apart, for a task to take along."""
        wanted = list(slices)
        return Commits(record for record in self._commits.values() if any(_touches(record, piece) for piece in wanted))

    def mask(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """For each row of `batch`, which has the COLUMNS_NEEDED, whether it is committed, or no sink's."""
        found = np.ones(batch.num_rows, np.bool_)
        for row, part in _marked(batch):
            found[row] = self._names(part, *_place(batch, row))
        return found

    def committed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of `batch` that are committed, or no sink's."""
        mask = self.mask(batch)
        return batch if mask.all() else batch.filter(pa.array(mask))

    def pending(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """For each row, whether its batch may still be committed: none of its sink's as late has been yet."""
        found = np.zeros(batch.num_rows, np.bool_)
        for row, part in _marked(batch):
            found[row] = part.batch > self._last.get(part.sink, -1)
        return found

    def _names(self, part: SinkPart, topic: str, broker_name: str, queue_id: int, queue_offset: int) -> bool:
        commit = self._commits.get((part.sink, part.batch))
        brokers = commit.ranges.get(topic) if commit is not None else None
        if not brokers:
            return False
        # A store directory may be read under a name of its own; with one broker there is no doubt which is meant.
        queues = brokers.get(broker_name) or (next(iter(brokers.values())) if len(brokers) == 1 else {})
        spans = queues.get(queue_id, [])
        at = bisect_right(spans, queue_offset, key=lambda span: span[0]) - 1
        return at >= 0 and queue_offset < spans[at][1]


def _touches(record: ControlRecord, piece: QueueSlice) -> bool:
    queue = piece.queue
    for queues in record.ranges.get(queue.topic, {}).values():  # whatever the broker is called here
        spans = queues.get(queue.queue_id, [])
        if spans and spans[0][0] < piece.end and piece.begin < spans[-1][1]:
            return True
    return False


def _marked(batch: pa.RecordBatch) -> Iterable[tuple[int, SinkPart]]:
    """The rows that a sink wrote, and which part each is of."""
    texts = batch.column("propertiesString")
    maybe = pc.fill_null(pc.match_substring(texts, SINK_PROPERTY + "\x01"), False)
    for row in np.flatnonzero(maybe.to_numpy(zero_copy_only=False)):
        value = find_property(texts[int(row)].as_py().encode(), SINK_PROPERTY_BYTES)
        part = parse_sink_property(value) if value is not None else None
        if part is not None:
            yield int(row), part


def _place(batch: pa.RecordBatch, row: int) -> tuple[str, str, int, int]:
    return (
        batch.column("topic")[row].as_py(),
        batch.column("brokerName")[row].as_py(),
        batch.column("queueId")[row].as_py(),
        batch.column("queueOffset")[row].as_py(),
    )
