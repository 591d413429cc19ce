"""Consume-queue entries of the rows to be read, and runs of records.

A place is one queue entry: queue, queue offset, physical offset and size of the record. Places of many queues are
merged into physical order for reads of the whole log.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ha.arrow.heads import Heads, Int64s, gather
from ha.arrow.queues import Entries, QueueId
from ha.arrow.read_options import ReadOptions, RowFilter
from ha.arrow.segments import Segment
from ha.protocol.store_files import BLANK_SIZE
from ha.protocol.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC

Mask = npt.NDArray[np.bool_]
LIGHT_QUEUE_PREFIX = "%LMQ%"
"""Prefix of the topics of light queues, whose entries point to records of other topics."""


class Places:
    """The consume-queue entries of rows. All arrays have one element per row."""

    def __init__(
        self,
        topics: str | Sequence[str],
        topic_numbers: Int64s,
        queue_ids: Int64s,
        queue_offsets: Int64s,
        physical_offsets: Int64s,
        sizes: Int64s,
        *,
        is_strict: Mask | bool = True,
        is_batch: bool = False,
    ) -> None:
        """`topics`: the topic of all rows, or a list of topics. `topic_numbers`: for each row, the index of its topic.

        `is_strict`: whether the record must have the topic, queue id and queue offset of its entry. False for light
        queues (%LMQ%).

        `is_batch`: a place may hold several messages, so the number of rows is known only from the records.
        """
        self.is_batch = is_batch
        self.is_one_queue = isinstance(topics, str)
        self.topics = [topics] if isinstance(topics, str) else topics
        self.topic_numbers = topic_numbers
        self.queue_ids = queue_ids
        self.queue_offsets = queue_offsets
        self.physical_offsets = physical_offsets
        self.sizes = sizes
        self.is_strict = is_strict

    def in_topics(self, wanted: Container[str]) -> Mask:
        """Returns a mask of the rows whose queue's topic is in `wanted`."""
        return np.array([topic in wanted for topic in self.topics], bool)[self.topic_numbers]

    def may_be_of_topics(self, wanted: Container[str]) -> Mask:
        """Returns a mask of the rows whose topic may be in `wanted`: every row of a light queue, whose records may have
        any topic, and the rows of queues of these topics."""
        found = [topic in wanted or topic.startswith(LIGHT_QUEUE_PREFIX) for topic in self.topics]
        return np.array(found, bool)[self.topic_numbers]

    def check(self, heads: Heads) -> None:
        """Marks records as unsound that differ from their entries in size or, where strict, topic, queue id or queue
        offset."""
        heads.sound &= heads.total_size == self.sizes
        same = (heads.field("queue_id") == self.queue_ids) & (heads.field("queue_offset") == self.queue_offsets)
        heads.sound &= (same & self._has_topic(heads)) | ~np.asarray(self.is_strict)

    def _has_topic(self, heads: Heads) -> Mask:
        """Returns a mask of the rows whose record has the topic of the queue."""
        topics = [bytes([len(topic)]) + topic for topic in map(os.fsencode, self.topics)]
        sizes = np.array([len(topic) for topic in topics])[self.topic_numbers]
        at = heads.body_at + heads.body_size + heads.is_v2  # the last byte of the topic's size
        same: Mask = heads.sound & (at + sizes <= heads.record_end)
        for size in {len(topic) for topic in topics}:
            rows = np.flatnonzero(same & (sizes == size))
            kind = np.dtype(f"S{size}")
            same[rows] = gather(heads.raw, at[rows], kind) == np.array(topics, kind)[self.topic_numbers[rows]]
        return same

    def keep(self, chosen: Mask | Int64s) -> Places:
        """Returns a copy with only the rows that `chosen` selects, as a mask or as row numbers."""
        return Places(
            self.topics[0] if self.is_one_queue else self.topics,
            self.topic_numbers[chosen],
            self.queue_ids[chosen],
            self.queue_offsets[chosen],
            self.physical_offsets[chosen],
            self.sizes[chosen],
            is_strict=self.is_strict if isinstance(self.is_strict, bool) else self.is_strict[chosen],
            is_batch=self.is_batch,
        )

    def __len__(self) -> int:
        return len(self.sizes)


class RecordRun(NamedTuple):
    """Records of one segment that a read has chosen and not decoded yet, at most as many as the options allow in a
    batch."""

    segment: Segment
    buffer: memoryview
    """The segment's bytes"""
    positions: Int64s
    """Positions of the records in `buffer`"""
    places: Places | None
    """Queue entries of the records; None if they were found by walking the log"""
    options: ReadOptions
    """The options of the read; `where` may be narrowed"""


def queue_mask(where: RowFilter, places: Places, *, has_batches: bool = False) -> Mask | None:
    """Returns a mask of the rows that pass the conditions of `where` on queue and offsets; None if it has none.

    `has_batches`: a row may hold several messages, whose own queue offsets are compared after decoding.
    """
    masks: list[Mask] = []
    if where.queue_offset_begin is not None and not has_batches:
        masks.append(places.queue_offsets >= where.queue_offset_begin)
    if where.queue_offset_end is not None and not has_batches:
        masks.append(places.queue_offsets < where.queue_offset_end)
    if where.physical_begin is not None:
        masks.append(places.physical_offsets >= where.physical_begin)
    if where.physical_end is not None:
        masks.append(places.physical_offsets < where.physical_end)
    if where.queue_ids is not None:
        masks.append(np.isin(places.queue_ids, list(where.queue_ids)))
    if where.topics is not None:
        masks.append(places.may_be_of_topics(where.topics))
    return np.logical_and.reduce(masks) if masks else None


def queue_places(key: QueueId, start: int, entries: Entries) -> Places:
    """Returns the places of consecutive entries of one queue, the first of them at queue offset `start`."""
    count = len(entries)
    return Places(
        key.topic,
        np.zeros(count, np.int64),
        np.full(count, key.queue_id, np.int64),
        np.arange(start, start + count, dtype=np.int64),
        entries["physical_offset"].astype(np.int64),
        entries["size"].astype(np.int64),
        is_strict=not key.topic.startswith(LIGHT_QUEUE_PREFIX),
    )


def merged_places(
    keys: Sequence[QueueId], pieces: list[Entries], starts: list[int], owners: list[int]
) -> tuple[Places, Int64s]:
    """Merges the entries of many queues into physical order, without blank entries. Returns the places and tags codes.

    `pieces`: consecutive entries of one queue each, the first of them at queue offset `starts[i]`; `owners[i]` is the
    index of the queue in `keys`, where light queues are last. A light queue's entry is dropped if another entry points
    to the same record. If several ordinary queues have an entry for a record, all are kept, because only the record
    shows which of them are stale.
    """
    counts = [len(piece) for piece in pieces]
    entries = np.concatenate(pieces)
    physical = entries["physical_offset"].astype(np.int64)
    owner = np.repeat(np.array(owners, np.int64), counts)
    offsets = np.concatenate(
        [np.arange(start, start + count, dtype=np.int64) for start, count in zip(starts, counts, strict=True)]
    )
    order = np.argsort(physical, kind="stable")
    # A blank entry may have the physical offset of a record, but is not an entry of it.
    order = order[entries["size"][order] != BLANK_SIZE]
    strict = np.array([not key.topic.startswith(LIGHT_QUEUE_PREFIX) for key in keys])
    if not strict.all():
        ascending = physical[order]
        order = order[strict[owner[order]] | (np.diff(ascending, prepend=-1) != 0)]
    owner = owner[order]
    queue_ids = np.array([key.queue_id for key in keys], np.int64)
    places = Places(
        [key.topic for key in keys],
        owner,
        queue_ids[owner],
        offsets[order],
        physical[order],
        entries["size"][order].astype(np.int64),
        is_strict=True if bool(strict.all()) else strict[owner],
    )
    return places, entries["tags_code"][order].astype(np.int64)


def is_scheduled(places: Places) -> Mask:
    """Returns a mask of the rows whose tags code is a delivery time, and not the hash of their tags."""
    return places.in_topics((SCHEDULE_TOPIC, TIMER_TOPIC))


def split_rows(sizes: Int64s, rows_max: int, bytes_max: int) -> Iterator[tuple[int, int]]:
    """Yields the runs (first row, end) into which rows of these `sizes` are cut: of at most `rows_max` rows and
    `bytes_max` bytes each, but of at least one row."""
    total = np.cumsum(sizes)
    low = 0
    while low < len(sizes):
        before = int(total[low - 1]) if low else 0
        high = int(np.searchsorted(total, before + bytes_max, side="right"))
        high = max(low + 1, min(high, low + rows_max))
        yield low, high
        low = high
