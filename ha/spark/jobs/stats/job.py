"""`ha spark stats`: computes statistics of a log: counts, sizes, rates and latencies of messages, the most frequent
keys and tags, retries and dead letters.

Each task counts the messages of one physical range of the log: exact sums for each queue and interval (`Cell`), and
sketches. The driver merges the results. Percentiles are accurate within RELATIVE_ERROR of their value, and the counts
of top keys and tags within the error shown beside them; everything else is exact. The results of ranges are kept until
the job succeeds, so that another attempt reuses them (`ha.spark.jobs.finished`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow.compute as pc

from ha.arrow import LogReader, ReadOptions
from ha.errors import OptionError
from ha.protocol.topic_names import DLQ_PREFIX, RETRY_PREFIX
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.finished import LogFiles, finished_tasks, task_key
from ha.spark.jobs.stats.range import HOUR_MS, MINUTE_MS, SEPARATOR, Cell, StatsTask, stats_of_range
from ha.spark.jobs.stats.sketches import RELATIVE_ERROR, HeavyHitters, LogHistogram
from ha.spark.jobs.waves import Runner, spark_runner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CELLS_MAX = 200_000
"""Maximum number of (topic, queue, interval) cells. Further ones are summed by topic and interval, under ALL_QUEUES,
and when there are as many of these sums, all the rest under OTHER_TOPICS, in interval 0."""
_BY_MINUTE_MAX_MS = 3 * HOUR_MS
_LAST_BYTES = 8 << 20
"""Bytes read at the start and at the end to find the first and the last record; more than the largest record"""
ALL_QUEUES = -1
OTHER_TOPICS = "(other topics)"


class StatsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to count in the store directory `path`. Times are store timestamps in ms since 1970, [begin, end)."""

    path: str
    broker_name: str | None = None
    topics: tuple[str, ...] | None = None
    """Topics to count; None: all, including the broker's own"""
    begin_ms: int | None = None
    end_ms: int | None = None
    top: int = 20
    """Number of top keys and tags to return"""
    tracked: int = 10_000
    """Number of counters for keys, and as many for tags: the error is at most (values counted) / tracked"""
    range_bytes: int = 256 << 20
    """Bytes of the log per task"""
    unfinished: str | None = None
    """Directory for results until the job succeeds; None: `ha.spark.jobs.finished.state_folder()`"""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a set of messages. `body_bytes` and `size_…` are sizes of bodies as stored, in bytes; latency is from
    born to store timestamp. `retried`: number of messages with reconsumeTimes above 0. `first_ms` and `last_ms`: lowest
    and highest store timestamp, in ms since 1970. Percentiles are None if there are no messages."""

    messages: int
    record_bytes: int
    body_bytes: int
    seconds: float
    """Time span over which rates are computed: from the first to the last counted message of all, or the part of it in
    the interval; at least 1"""
    messages_per_s: float
    bytes_per_s: float
    size_p50: float | None
    size_p90: float | None
    size_p99: float | None
    size_max: int
    latency_ms_p50: float | None
    latency_ms_p90: float | None
    latency_ms_p99: float | None
    latency_ms_max: int
    born_after_store: int
    """Number of messages stored before they were born, because clocks disagree; their latency counts as 0"""
    retried: int
    reconsume_times_max: int
    first_ms: int
    last_ms: int


class QueueHour(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table. `hour_ms` is the start of the hour (ms since 1970, UTC). `queue_id` -1 (ALL_QUEUES): the sum
    of the cells beyond CELLS_MAX."""

    topic: str
    queue_id: int
    hour_ms: int
    figures: Figures


class TopicFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a topic over the whole time; `queues` is the number of its queues with messages."""

    topic: str
    queues: int
    figures: Figures


class HourFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all topics in the hour that starts at `hour_ms` (ms since 1970, UTC)."""

    hour_ms: int
    figures: Figures


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all topics in the interval that starts at `begin_ms`, and each topic's number of messages."""

    begin_ms: int
    figures: Figures
    messages: dict[str, int]


class Frequent(msgspec.Struct, frozen=True):
    """A tag or a key of a topic: between `count` and `count + error` messages have it."""

    topic: str
    value: str
    count: int
    error: int


class GroupTrouble(msgspec.Struct, frozen=True):
    """Numbers of messages in a consumer group's retry topic and in its dead-letter topic."""

    group: str
    retry_messages: int
    dead_letters: int


class StatsResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the job, with totals and a table of topics, queues and hours (`rows`)."""

    path: str
    broker_name: str
    begin: int
    end: int
    """End of the range that was read, [begin, end) in physical offsets"""
    total: Figures
    topics: tuple[TopicFigures, ...]
    hours: tuple[HourFigures, ...]
    rows: tuple[QueueHour, ...]
    interval_ms: int
    intervals: tuple[Interval, ...]
    """The points of the plots: one per minute if the counted messages span less than three hours, else one per hour"""
    tags: tuple[Frequent, ...]
    keys: tuple[Frequent, ...]
    groups: tuple[GroupTrouble, ...]
    size_curve: tuple[tuple[float, float], ...]
    """(share of all messages, maximum body size of that share)"""
    latency_ms_curve: tuple[tuple[float, float], ...]
    damaged: int
    """Number of records that could not be read and are not counted"""
    gone_end: int | None
    """End (physical offset) of the last range in which records were deleted before they could be counted; None if there
    is none"""
    relative_error: float
    """Relative error of percentiles"""
    duration_s: float

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0, or 3 if damaged or deleted records were skipped."""
        return 3 if self.damaged or self.gone_end is not None else 0


def stats(spark: SparkSession, options: StatsOptions, progress: Progress = no_progress) -> StatsResult:
    """Counts the messages of `options.path`, except those in batch queues. Progress in bytes of the log, stage "count".

    Raises OptionError, StoreUnreadable or DiskFailed. After an error or a kill, call it again with the same options:
    finished ranges are not read again.
    """
    with finished_tasks("stats", options, options.unfinished) as finished:
        return stats_with(finished.runner(spark_runner(spark), _keys(options.path)), options, progress)


def _keys(path: str) -> Callable[[StatsTask], bytes]:
    files = cache(partial(LogFiles, path))
    return lambda task: task_key("stats", task, files().queues, files().between(task.begin, task.end))


def stats_with(run: Runner, options: StatsOptions, progress: Progress = no_progress) -> StatsResult:
    """Like `stats`, but runs the tasks with `run`."""
    for name in ("top", "tracked", "range_bytes"):
        if getattr(options, name) < 1:
            raise OptionError(name, f"{getattr(options, name)} is too little", "1 or more")
    started_s = time.monotonic()
    with LogReader(Path(options.path), broker_name=options.broker_name) as reader:
        broker_name, begin, end = reader.broker_name, reader.min_offset, reader.end_offset()
        interval_ms = _interval_ms(reader, options)
    # The cuts do not depend on what retention deleted, so that a later attempt has the same ranges.
    first = begin - begin % options.range_bytes
    ranges = [(max(at, begin), min(at + options.range_bytes, end)) for at in range(first, end, options.range_bytes)]
    tasks = [
        StatsTask(
            str(Path(options.path).absolute()),
            broker_name,
            low,
            high,
            options.topics,
            options.begin_ms,
            options.end_ms,
            options.tracked,
            interval_ms,
        )
        for low, high in ranges
    ]
    cells: dict[tuple[str, int, int], Cell] = {}
    tags, keys = HeavyHitters(options.tracked), HeavyHitters(options.tracked)
    damaged = 0
    gone_end = None
    progress("count", 0, end - begin)
    for wave in run(stats_of_range, tasks):
        for part in wave:
            for key, cell in part.cells.items():
                _cell(cells, key).merge(cell)
            tags.merge(part.tags)
            keys.merge(part.keys)
            damaged += part.damaged
            gone_end = part.end if part.is_gone else gone_end
        progress("count", wave[-1].end - begin, end - begin)
    return StatsResult(
        path=options.path,
        broker_name=broker_name,
        begin=begin,
        end=end,
        damaged=damaged,
        gone_end=gone_end,
        relative_error=RELATIVE_ERROR,
        duration_s=time.monotonic() - started_s,
        tags=_frequent(tags, options.top),
        keys=_frequent(keys, options.top),
        interval_ms=interval_ms,
        **_tables(cells, interval_ms),
    )


def _interval_ms(reader: LogReader, options: StatsOptions) -> int:
    """Returns the length of the intervals to count by: a minute if the counted part of the time between the first and
    the last record is less than _BY_MINUTE_MAX_MS, else an hour."""
    begin, end = reader.min_offset, reader.end_offset()
    reading = ReadOptions(columns=("storeTimestamp",), on_damage="skip", fail_on_data_loss=False)
    times_us: list[int] = []
    for low, high, index in ((begin, min(end, begin + _LAST_BYTES), 0), (max(begin, end - _LAST_BYTES), end, -1)):
        columns = (pc.drop_null(batch.column(0)) for batch in reader.read_range(low, high, reading))
        found = [column for column in columns if len(column)]
        times_us += [column[index].value for column in (found[:1] if index == 0 else found[-1:])]
    if len(times_us) < 2:
        return HOUR_MS
    first_ms, last_ms = (time_us // 1000 for time_us in times_us)
    first_ms = first_ms if options.begin_ms is None else max(first_ms, options.begin_ms)
    last_ms = last_ms if options.end_ms is None else min(last_ms, options.end_ms)
    return HOUR_MS if last_ms - first_ms >= _BY_MINUTE_MAX_MS else MINUTE_MS


def _cell(cells: dict[tuple[str, int, int], Cell], key: tuple[str, int, int]) -> Cell:
    if key not in cells and len(cells) >= CELLS_MAX:
        key = (key[0], ALL_QUEUES, key[2])
        if key not in cells and len(cells) >= 2 * CELLS_MAX:
            key = (OTHER_TOPICS, ALL_QUEUES, 0)
    return cells.setdefault(key, Cell())


def _tables(cells: dict[tuple[str, int, int], Cell], interval_ms: int) -> dict[str, Any]:
    total = Cell()
    by_topic: dict[str, Cell] = {}
    by_hour: dict[int, Cell] = {}
    by_interval: dict[int, Cell] = {}
    rows: dict[tuple[str, int, int], Cell] = {}
    messages: dict[int, dict[str, int]] = {}
    queues: dict[str, set[int]] = {}
    for (topic, queue_id, interval), cell in cells.items():
        hour = interval * interval_ms // HOUR_MS
        total.merge(cell)
        by_topic.setdefault(topic, Cell()).merge(cell)
        by_hour.setdefault(hour, Cell()).merge(cell)
        by_interval.setdefault(interval, Cell()).merge(cell)
        rows.setdefault((topic, queue_id, hour), Cell()).merge(cell)
        counts = messages.setdefault(interval, {})
        counts[topic] = counts.get(topic, 0) + cell.messages
        queues.setdefault(topic, set()).add(queue_id)
    seconds = _seconds(total.first_ms, total.last_ms)

    def within(begin_ms: int, length_ms: int, cell: Cell) -> Figures:
        low, high = max(total.first_ms, begin_ms), min(total.last_ms, begin_ms + length_ms)
        return figures(cell, _seconds(low, high))

    trouble: dict[str, list[int]] = {}
    for topic, cell in by_topic.items():
        for index, prefix in enumerate((RETRY_PREFIX, DLQ_PREFIX)):
            if topic.startswith(prefix):
                trouble.setdefault(topic.removeprefix(prefix), [0, 0])[index] += cell.messages
    return {
        "total": figures(total, seconds),
        "topics": tuple(
            TopicFigures(topic=topic, queues=len(queues[topic]), figures=figures(by_topic[topic], seconds))
            for topic in sorted(by_topic, key=lambda topic: (-by_topic[topic].record_bytes, topic))
        ),
        "hours": tuple(
            HourFigures(hour_ms=hour * HOUR_MS, figures=within(hour * HOUR_MS, HOUR_MS, cell))
            for hour, cell in sorted(by_hour.items())
        ),
        "rows": tuple(
            QueueHour(
                topic=topic, queue_id=queue_id, hour_ms=hour * HOUR_MS, figures=within(hour * HOUR_MS, HOUR_MS, cell)
            )
            for (topic, queue_id, hour), cell in sorted(rows.items())
        ),
        "intervals": tuple(
            Interval(
                begin_ms=interval * interval_ms,
                figures=within(interval * interval_ms, interval_ms, cell),
                messages=messages[interval],
            )
            for interval, cell in sorted(by_interval.items())
        ),
        "size_curve": _curve(total.sizes),
        "latency_ms_curve": _curve(total.latency_ms),
        "groups": tuple(GroupTrouble(group, *trouble[group]) for group in sorted(trouble)),
    }


def _curve(histogram: LogHistogram) -> tuple[tuple[float, float], ...]:
    shares = [*(percent / 100 for percent in range(100)), 0.995, 0.999, 1.0]
    found = ((share, histogram.quantile(share)) for share in shares)
    return tuple((share, value) for share, value in found if value is not None)


def _seconds(begin_ms: int, end_ms: int) -> float:
    return max(end_ms - begin_ms, 1000) / 1000


def figures(cell: Cell, seconds: float) -> Figures:
    """Returns the figures of `cell`, with rates over `seconds`."""
    size = [cell.sizes.quantile(q) for q in (0.5, 0.9, 0.99)]
    latency = [cell.latency_ms.quantile(q) for q in (0.5, 0.9, 0.99)]
    return Figures(
        messages=cell.messages,
        record_bytes=cell.record_bytes,
        body_bytes=cell.body_bytes,
        seconds=seconds,
        messages_per_s=cell.messages / seconds,
        bytes_per_s=cell.record_bytes / seconds,
        size_p50=size[0],
        size_p90=size[1],
        size_p99=size[2],
        size_max=cell.sizes.maximum,
        latency_ms_p50=latency[0],
        latency_ms_p90=latency[1],
        latency_ms_p99=latency[2],
        latency_ms_max=cell.latency_ms.maximum,
        born_after_store=cell.early,
        retried=cell.retried,
        reconsume_times_max=cell.reconsume_times_max,
        first_ms=cell.first_ms,
        last_ms=cell.last_ms,
    )


def _frequent(hitters: HeavyHitters, count: int) -> tuple[Frequent, ...]:
    found = []
    for joined, seen in hitters.top(count):
        topic, _, value = joined.partition(SEPARATOR)
        found.append(Frequent(topic, value, seen, hitters.error))
    return tuple(found)
