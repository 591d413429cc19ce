"""Plans the queue offsets that a batch reads from a `LogSource`, and divides them among tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ha.errors import RecordsGone
from ha.spark.source.log_source import LogPartition, LogSource, QueueKey, QueueSlice
from ha.spark.source.offsets import OffsetMap
from ha.spark.source.options import SourceOptions

logger = logging.getLogger("ha.spark")

RECORDS_WORTH_A_TASK = 8192
"""Minimum number of records for which a task is worth starting: a start takes about 5 ms, reading a record 1–2 µs."""
RECORDS_PER_TASK = 262_144
"""Maximum records of a task where sizes are unknown: the default of maxBytesPerPartition in records of 1 KiB"""


def report_loss(fail_on_data_loss: bool, what: str, first: int, end: int, reason: str) -> None:
    """Raises RecordsGone for offsets [first, end) of `what`, or logs a warning if `fail_on_data_loss` is off."""
    loss = RecordsGone(what, first, end, reason)
    if fail_on_data_loss:
        raise loss
    logger.warning("source.offsets_skipped of=%r first=%d last=%d reason=%r", what, first, end - 1, reason)


def wait_for(
    source: LogSource,
    wanted: Mapping[QueueKey, int],
    retries: int,
    pause: Callable[[], None],
) -> OffsetMap:
    """Refreshes `source` up to `retries` times, until no queue ends before its offset in `wanted`. Returns the queues
    that still do, with their ends.

    `pause` is called before each refresh. An end moves back while a replica is copied again or recovers, which is
    transient, and when a topic is deleted. Queues that are away are never returned, as their ends are unknown.
    """
    for attempt in range(retries + 1):
        short = {}
        for queue, offset in wanted.items():
            end = source.queue_range(queue).end
            if end < offset and not source.is_away(queue):
                short[queue] = end
        if not short or attempt == retries:
            return short
        logger.warning(
            "source.queue_end_moved_back queue=%r end=%d read_to=%d",
            next(iter(short)),
            next(iter(short.values())),
            wanted[next(iter(short))],
        )
        pause()
        source.refresh()
    raise AssertionError("not reached")


def slices_between(
    source: LogSource, start: Mapping[QueueKey, int], end: Mapping[QueueKey, int], *, fail_on_data_loss: bool
) -> list[QueueSlice]:
    """Returns the slices to read between two positions, sorted, without missing records.

    A queue without a start begins with its first record. Raises RecordsGone, unless `fail_on_data_loss` is off, for
    records that retention deleted, for a queue whose `end` is before its `start`, and for offsets after the queue's end
    (its topic was deleted, or this is another log now). A queue that is away is not checked for the latter: the task
    that reads it waits for its broker.
    """
    slices = []
    for queue in sorted(end):
        there = source.queue_range(queue)
        first, last = start.get(queue, there.begin), end[queue]
        if last < first:
            reason = f"it went back to {last}: the topic was deleted, or this is another log now"
            report_loss(fail_on_data_loss, str(queue), last, first, reason)
            continue
        if last > there.end and last > first and not source.is_away(queue):
            reason = f"the queue ends at {there.end}: the topic was deleted, or this is another log now"
            report_loss(fail_on_data_loss, str(queue), max(first, there.end), last, reason)
            last = there.end
        if first < there.begin and first < last:
            reason = f"retention deleted them, the first record there is {there.begin}"
            report_loss(fail_on_data_loss, str(queue), first, min(there.begin, last), reason)
            first = there.begin
        if first < last:
            slices.append(QueueSlice(queue, first, last))
    return slices


def task_count(
    record_count: int,
    byte_count: int | None,
    *,
    min_partitions: int | None,
    cores: int,
    records_max: int | None,
    bytes_max: int,
) -> int:
    """Returns the number of tasks for `record_count` records with `byte_count` bytes in total (None: unknown); 0 if
    there are no records.

    At least `min_partitions`; without it `cores`, or fewer so that each task has RECORDS_WORTH_A_TASK. No task reads
    more than `records_max` records (None: no limit), or (if records have about the same size) `bytes_max` bytes; if the
    size is unknown, RECORDS_PER_TASK records. At most one task per record.
    """
    if record_count == 0:
        return 0
    wanted = [min_partitions or min(cores, _ceil(record_count, RECORDS_WORTH_A_TASK))]
    if records_max is not None:
        wanted.append(_ceil(record_count, records_max))
    wanted.append(_ceil(record_count, RECORDS_PER_TASK) if byte_count is None else _ceil(byte_count, bytes_max))
    return min(record_count, max(wanted))


def _ceil(amount: int, each: int) -> int:
    return -(-amount // each)


def deal_out(slices: Sequence[QueueSlice], count: int) -> list[list[QueueSlice]]:
    """Divides `slices` into `count` parts with the same number of records (±1), in their order; into fewer parts if
    there are fewer records.

    Small queues share a task and a large one is split: sixteen queues of a topic do not require sixteen tasks per
    batch.
    """
    total = sum(part.entry_count for part in slices)
    parts: list[list[QueueSlice]] = []
    taken = 0
    current: list[QueueSlice] = []
    for queue, begin, end in slices:
        while begin < end:
            room = total * (len(parts) + 1) // count - taken
            step = min(room, end - begin)
            if step > 0:
                current.append(QueueSlice(queue, begin, begin + step))
                begin += step
                taken += step
            if step == room:
                parts.append(current)
                current = []
    return [part for part in parts if part]


def total_bytes(slices: Sequence[QueueSlice], source: LogSource) -> int | None:
    """Returns the size of all records in `slices` in bytes; None if it is unknown."""
    total = 0
    for part in slices:
        size = source.queue_bytes(*part)
        if size is None:
            return None
        total += size
    return total


def queue_tasks(slices: Sequence[QueueSlice], source: LogSource, options: SourceOptions) -> list[LogPartition]:
    """Returns the tasks that read `slices`; `task_count` and the options determine how many."""
    count = task_count(
        sum(part.entry_count for part in slices),
        total_bytes(slices, source),
        min_partitions=options.min_partitions,
        cores=options.cores,
        records_max=options.max_records_per_partition,
        bytes_max=options.max_bytes_per_partition,
    )
    return [source.queue_partition(part) for part in deal_out(slices, count)] if count else []
