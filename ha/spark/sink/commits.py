"""Selects the rows of a topic that belong to batches committed by their sink.

A message without the sink's property belongs to no batch and is always committed. A message with it is committed if a
commit record of its batch names its queue offset. So rows of aborted attempts, of batches still being written, and
second copies of a row are excluded.

A row is decided once its batch, or a later one of its sink, is committed. Until then it is pending: a stream stops
before the first pending row and continues there after the next commit (`committed_source`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ha.errors import OptionError
from ha.protocol.properties import find_property
from ha.spark.sink.control import ControlRecord
from ha.spark.sink.identity import SINK_PROPERTY, SINK_PROPERTY_BYTES, SinkPart, parse_sink_property
from ha.spark.source.log_source import QueueSlice

COLUMNS_NEEDED = ("topic", "brokerName", "queueId", "queueOffset", "propertiesString")


class Commits:
    """The commit records that have been read from the commit topic."""

    def __init__(self, records: Iterable[ControlRecord] = ()) -> None:
        self._commits: dict[tuple[str, int], ControlRecord] = {}
        self._last: dict[str, int] = {}
        self._brokers: set[tuple[str, str]] = set()  # (topic, broker) of all commits ever added
        self.add(records)

    def add(self, records: Iterable[ControlRecord]) -> None:
        """Adds records that were read later; only commits are kept."""
        for record in records:
            if record.kind == "commit":
                self._commits.setdefault((record.sink, record.batch), record)  # a batch's first commit counts
                self._last[record.sink] = max(record.batch, self._last.get(record.sink, -1))
                self._brokers.update((topic, name) for topic, brokers in record.ranges.items() for name in brokers)

    def within(self, slices: Iterable[QueueSlice]) -> Commits:
        """Returns the commits whose queue offset ranges overlap one of `slices`: all that a task needs to `mask` their
        rows."""
        wanted = list(slices)
        part = Commits(record for record in self._commits.values() if any(_touches(record, piece) for piece in wanted))
        part._brokers = self._brokers
        return part

    def mask(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Returns for each row of `batch`, which has the COLUMNS_NEEDED, whether it is committed, or not written by a
        sink.

        Raises OptionError if the commit of a row's batch names several brokers for the row's topic, and neither this
        commit nor any other of the topic names the row's broker: the row can't be assigned to one of these brokers.
        """
        found = np.ones(batch.num_rows, np.bool_)
        for row, part in _marked(batch):
            found[row] = self._names(part, *_place(batch, row))
        return found

    def committed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the rows of `batch` that are committed, or not written by a sink. Errors as in `mask`."""
        mask = self.mask(batch)
        return batch if mask.all() else batch.filter(pa.array(mask))

    def first_pending(self, batch: pa.RecordBatch) -> tuple[int, SinkPart] | None:
        """Returns the first row whose batch may still be committed, and its part; None if there is none. The sink of
        such a row has committed neither that batch nor a later one.
        """
        return next(((row, part) for row, part in _marked(batch) if part.batch > self._last.get(part.sink, -1)), None)

    def _names(self, part: SinkPart, topic: str, broker_name: str, queue_id: int, queue_offset: int) -> bool:
        commit = self._commits.get((part.sink, part.batch))
        brokers = commit.ranges.get(topic) if commit is not None else None
        if not brokers:
            return False
        queues = brokers.get(broker_name)
        if queues is None and len(brokers) == 1:
            # A store directory may be read under another name; with a single broker there is no ambiguity.
            queues = next(iter(brokers.values()))
        elif queues is None and (topic, broker_name) not in self._brokers:
            reason = f"{broker_name} is in no commit of {topic}, but {' and '.join(sorted(brokers))} are"
            raise OptionError("brokerName", reason, "for each directory, the name of its broker when it was written")
        spans = queues.get(queue_id, []) if queues is not None else []
        at = bisect_right(spans, queue_offset, key=lambda span: span[0]) - 1
        return at >= 0 and queue_offset < spans[at][1]


def _touches(record: ControlRecord, piece: QueueSlice) -> bool:
    queue = piece.queue
    for queues in record.ranges.get(queue.topic, {}).values():  # the broker may be read under another name
        spans = queues.get(queue.queue_id, [])
        if spans and spans[0][0] < piece.end and piece.begin < spans[-1][1]:
            return True
    return False


def _marked(batch: pa.RecordBatch) -> Iterable[tuple[int, SinkPart]]:
    """Yields (row, part) for each row that a sink wrote."""
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
