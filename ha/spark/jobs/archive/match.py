"""Selects the rows of an archive that `erase` removes."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ha.arrow.properties import PropertyTable
from ha.protocol.codes import SysFlag
from ha.protocol.properties import REAL_TOPIC, RETRY_TOPIC
from ha.protocol.topic_names import INTERNAL_TOPICS, is_system_topic
from ha.spark.jobs.archive.files import RAW_PROPERTIES
from ha.spark.jobs.archive.manifest import QueueSpan

SEARCHED = ("physicalOffset", "queueId", "queueOffset", "propertiesString", "sysFlag", RAW_PROPERTIES)
"""Columns that a search reads"""


class Match(msgspec.Struct, frozen=True):
    """Selects the rows of `topic` with one of `keys` (none: all), and their copies in the broker's own topics."""

    topic: str
    keys: tuple[str, ...]

    def may_be_in(self, topic: str | None) -> bool:
        """Returns whether files of `topic` may have rows that match."""
        return topic is None or topic == self.topic or topic in INTERNAL_TOPICS or is_system_topic(topic)

    @staticmethod
    def hidden_count(rows: pa.RecordBatch) -> int:
        """Returns the number of rows that may match but can't be searched: rows without a readable property string, and
        compressed batches."""
        flags = pc.fill_null(rows["sysFlag"], 0).to_numpy(zero_copy_only=False)
        is_compressed_batch = (flags & SysFlag.INNER_BATCH != 0) & (flags & SysFlag.COMPRESSED != 0)
        is_unknown = rows["propertiesString"].is_null().to_numpy(zero_copy_only=False)
        return int(np.count_nonzero(is_compressed_batch | is_unknown))

    def find(self, topic: str | None, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Returns which rows of a file of `topic` match; `rows` have the columns `SEARCHED`."""
        strings = pc.coalesce(rows[RAW_PROPERTIES], rows["propertiesString"].cast(pa.binary()))
        table = PropertyTable(pc.fill_null(strings, b""))
        found = np.ones(rows.num_rows, np.bool_)
        if topic != self.topic:
            found = _is_in(table.find(REAL_TOPIC.encode()), (self.topic,))
            found |= _is_in(table.find(RETRY_TOPIC.encode()), (self.topic,))
        if self.keys:
            has_key = _is_in(table.find(b"UNIQ_KEY"), self.keys)
            words = table.keys()
            hits = np.flatnonzero(_is_in(words.flatten(), self.keys))
            has_key[pc.list_parent_indices(words).to_numpy(zero_copy_only=False)[hits]] = True
            found &= has_key
        return found


def _is_in(values: pa.Array, wanted: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.is_in(values, pa.array(wanted, pa.string())).to_numpy(zero_copy_only=False)
    return found.copy()


class Found(msgspec.Struct, frozen=True):
    """The matching rows of one file: their number, physical offsets in bytes, and queue offsets by queue.

    `not_searched` is the result of `Match.hidden_count`.
    Without keys, `physical_offsets` is empty for a file of the topic itself, all rows of which match.
    """

    rows: int
    not_searched: int
    physical_offsets: tuple[int, ...]
    spans: tuple[QueueSpan, ...]


class Finds:
    """Collects the matching rows of one file."""

    def __init__(self) -> None:
        self._places: list[int] = []
        self._spans: dict[int, tuple[int, int, int]] = {}
        self._not_searched = 0

    def add(self, match: Match, topic: str | None, rows: pa.RecordBatch) -> None:
        """Adds the matching ones of `rows`, which are from a file of `topic` and have the columns `SEARCHED`."""
        self._not_searched += match.hidden_count(rows)
        chosen = rows.filter(pa.array(match.find(topic, rows)))
        self._places += chosen["physicalOffset"].to_pylist()
        for queue_id, offset in zip(chosen["queueId"].to_pylist(), chosen["queueOffset"].to_pylist(), strict=True):
            if queue_id is not None and offset is not None:
                low, high, count = self._spans.get(queue_id, (offset, offset, 0))
                self._spans[queue_id] = min(low, offset), max(high, offset), count + 1

    def found(self) -> Found:
        """Returns the rows found in all batches that were added."""
        spans = tuple(QueueSpan(queue_id, *span) for queue_id, span in sorted(self._spans.items()))
        return Found(len(self._places), self._not_searched, tuple(self._places), spans)
