"""Counts the messages of one physical range by topic, queue and interval, and fills sketches. Runs on the executors.

Bodies and their CRCs are not read: sizes and times are fixed fields, tags and keys are in the properties.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ha.arrow import LogReader, ReadOptions, RowFilter
from ha.arrow.heads import Int64s
from ha.spark.jobs.stats.sketches import BUCKET_LIMIT, HeavyHitters, LogHistogram, buckets_of

COLUMNS = (
    "topic",
    "queueId",
    "queueOffset",
    "storeSize",
    "bodySize",
    "tags",
    "keys",
    "bornTimestamp",
    "storeTimestamp",
    "reconsumeTimes",
)
SEPARATOR = "\x01"
"""Separator of topic and tag or key in the values of the heavy hitters; no topic contains it."""
MINUTE_MS = 60_000
HOUR_MS = 3_600_000


class StatsTask(msgspec.Struct, frozen=True):
    """A task: count the messages whose records begin at physical offsets [begin, end) and were stored in
    [begin_ms, end_ms). For the other fields, see `StatsOptions`."""

    path: str
    broker_name: str
    begin: int
    end: int
    topics: tuple[str, ...] | None
    begin_ms: int | None
    end_ms: int | None
    tracked: int
    interval_ms: int


class Cell(msgspec.Struct):
    """Counts of one queue's messages in one interval. Sizes in bytes, times in ms."""

    messages: int = 0
    record_bytes: int = 0
    body_bytes: int = 0
    retried: int = 0
    """Number of messages with reconsumeTimes above 0"""
    reconsume_times_max: int = 0
    early: int = 0
    """Number of messages stored before they were born: the clocks of producer and broker disagree"""
    first_ms: int = 0
    last_ms: int = 0
    sizes: LogHistogram = msgspec.field(default_factory=LogHistogram)
    """Sizes of bodies as stored"""
    latency_ms: LogHistogram = msgspec.field(default_factory=LogHistogram)
    """Time from born to store timestamp"""

    def merge(self, other: Cell) -> None:
        """Adds the messages of `other`."""
        if not other.messages:
            return
        self.first_ms = min(self.first_ms, other.first_ms) if self.messages else other.first_ms
        self.last_ms = max(self.last_ms, other.last_ms)
        self.messages += other.messages
        self.record_bytes += other.record_bytes
        self.body_bytes += other.body_bytes
        self.retried += other.retried
        self.reconsume_times_max = max(self.reconsume_times_max, other.reconsume_times_max)
        self.early += other.early
        self.sizes.merge(other.sizes)
        self.latency_ms.merge(other.latency_ms)


class RangeStats(msgspec.Struct):
    """The counts of one task: `cells` by (topic, queue id, number of intervals since 1970), and sketches of tags and
    keys, whose values are topic + SEPARATOR + tag or key.

    `damaged`: number of records that could not be read. `end`: that of the task. `is_gone`: whether records were
    deleted before they were counted.
    """

    cells: dict[tuple[str, int, int], Cell]
    tags: HeavyHitters
    keys: HeavyHitters
    damaged: int
    end: int
    is_gone: bool = False


def stats_of_range(task: StatsTask) -> RangeStats:
    """Counts the messages of one range; skips damaged and deleted records. Raises StoreUnreadable and OSError."""
    found = RangeStats({}, HeavyHitters(task.tracked), HeavyHitters(task.tracked), 0, task.end)
    where = RowFilter(
        topics=None if task.topics is None else frozenset(task.topics),
        store_begin_ms=task.begin_ms,
        store_end_ms=task.end_ms,
    )
    options = ReadOptions(columns=COLUMNS, on_damage="skip", fail_on_data_loss=False, where=where)
    with LogReader(task.path, broker_name=task.broker_name) as reader:
        for batch in reader.read_range(task.begin, task.end, options):
            count_batch(batch, found, task.interval_ms)
        found.damaged += reader.counts.damaged
        found.is_gone = reader.counts.gone > 0
    return found


def count_batch(batch: pa.RecordBatch, found: RangeStats, interval_ms: int) -> None:
    """Adds the counts of one batch's rows to `found`, by intervals of `interval_ms`. Rows without a store timestamp
    count as damaged."""
    stored = batch.column("storeTimestamp")
    if stored.null_count:  # out of range: a damaged head, which no CRC covers
        found.damaged += stored.null_count
        batch = batch.filter(stored.is_valid())
    if not len(batch):
        return
    topics = batch.column("topic").dictionary_encode()
    codes = topics.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    queue_ids = _ints(batch, "queueId")
    store_ms = _ints(batch, "storeTimestamp") // 1000
    intervals = store_ms // interval_ms
    # One integer per group, combined from the indexes of distinct values: can't overflow, and integers sort fast.
    queue_values, queue_codes = np.unique(queue_ids, return_inverse=True)
    interval_values, interval_codes = np.unique(intervals, return_inverse=True)
    wide = (codes * len(queue_values) + queue_codes) * len(interval_values) + interval_codes
    keys, group = np.unique(wide, return_inverse=True)
    count = len(keys)
    # A born time of a client that does not send ms may be out of range, and null here: its latency counts as 0.
    born = pc.coalesce(batch.column("bornTimestamp"), batch.column("storeTimestamp"))
    latency = store_ms - np.asarray(born.cast(pa.int64()).to_numpy(zero_copy_only=False)) // 1000
    body_sizes = _ints(batch, "bodySize")
    reconsumed = _ints(batch, "reconsumeTimes")
    messages = np.bincount(group, minlength=count)
    record_bytes = _sums(group, _ints(batch, "storeSize"), count)
    body_bytes = _sums(group, body_sizes, count)
    retried = np.bincount(group[reconsumed > 0], minlength=count)
    early = np.bincount(group[latency < 0], minlength=count)
    most = _extreme(np.maximum, group, reconsumed, count)
    first, last = _extreme(np.minimum, group, store_ms, count), _extreme(np.maximum, group, store_ms, count)
    sizes = _histograms(group, body_sizes, count)
    latencies = _histograms(group, np.maximum(latency, 0), count)
    names = topics.dictionary.to_pylist()
    for index, key in enumerate(keys.tolist()):
        rest, interval_code = divmod(key, len(interval_values))
        code, queue_code = divmod(rest, len(queue_values))
        cell = Cell(
            int(messages[index]),
            int(record_bytes[index]),
            int(body_bytes[index]),
            int(retried[index]),
            int(most[index]),
            int(early[index]),
            int(first[index]),
            int(last[index]),
            sizes[index],
            latencies[index],
        )
        place = (names[code], int(queue_values[queue_code]), int(interval_values[interval_code]))
        found.cells.setdefault(place, Cell()).merge(cell)
    tags = batch.column("tags")
    found.tags.add(_counted(batch.column("topic"), tags))
    lists = batch.column("keys")
    found.keys.add(_counted(batch.column("topic").take(pc.list_parent_indices(lists)), pc.list_flatten(lists)))


def _ints(batch: pa.RecordBatch, name: str) -> Int64s:
    return np.asarray(batch.column(name).cast(pa.int64()).to_numpy(zero_copy_only=False))


def _sums(group: Int64s, values: Int64s, count: int) -> Int64s:
    """Returns the sum of the values of each group; exact up to 2^53, which no batch reaches."""
    return np.bincount(group, weights=values, minlength=count).astype(np.int64)


def _extreme(choose: np.ufunc, group: Int64s, values: Int64s, count: int) -> Int64s:
    """Returns the smallest or largest value of each group. Every group must have a value."""
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(count))
    return np.asarray(choose.reduceat(values[order], starts))


def _histograms(group: Int64s, values: Int64s, count: int) -> list[LogHistogram]:
    pairs, counts = np.unique(group * (BUCKET_LIMIT + 1) + buckets_of(values) + 1, return_counts=True)
    owners, buckets = np.divmod(pairs, BUCKET_LIMIT + 1)
    low, high = _extreme(np.minimum, group, values, count), _extreme(np.maximum, group, values, count)
    made = [LogHistogram() for _ in range(count)]
    bounds = np.searchsorted(owners, np.arange(count + 1))
    for index, histogram in enumerate(made):
        part = slice(bounds[index], bounds[index + 1])
        found = zip((buckets[part] - 1).tolist(), counts[part].tolist(), strict=True)
        histogram.add(found, int(low[index]), int(high[index]))
    return made


def _counted(topics: pa.Array, values: pa.Array) -> list[tuple[str, int]]:
    joined = pc.drop_null(pc.binary_join_element_wise(topics, values, SEPARATOR))
    counted = joined.value_counts()
    return list(zip(counted.field(0).to_pylist(), counted.field(1).to_pylist(), strict=True))
