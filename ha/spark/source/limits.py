"""Limits a micro-batch to a number of records or bytes, and delays it until there are enough records. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ha.spark.source.log_source import QueueKey
from ha.spark.source.offsets import OffsetMap

QueueBytes = Callable[[QueueKey, int, int], int]
"""Returns the size in bytes of the records [begin, end) of a queue."""


def record_count(start: Mapping[QueueKey, int], end: Mapping[QueueKey, int]) -> int:
    """Returns the number of records between two positions; a queue that ends at or before its start counts as 0."""
    return sum(max(0, offset - start[queue]) for queue, offset in end.items())


def limit_records(limit: int, start: Mapping[QueueKey, int], end: Mapping[QueueKey, int]) -> OffsetMap:
    """Returns ends of the queues, at most `end`, with about `limit` records after `start`, divided in proportion to
    each queue's records.

    As in spark-sql-kafka, a queue's share is rounded down, but a share below one record is raised to one so that no
    small queue starves. With many such queues, the shares can exceed `limit`. `start` has every queue of `end`.
    """
    total = record_count(start, end)
    if total <= limit:
        return dict(end)
    return {queue: min(offset, _share(limit, start[queue], offset, total)) for queue, offset in end.items()}


def _share(limit: int, begin: int, end: int, total: int) -> int:
    waiting = end - begin
    if waiting <= 0:
        return end
    return begin + max(1, limit * waiting // total)


def limit_bytes(
    limit: int, start: Mapping[QueueKey, int], end: Mapping[QueueKey, int], queue_bytes: QueueBytes
) -> OffsetMap:
    """Returns ends of the queues, at most `end`, with about `limit` bytes of records after `start`, divided in
    proportion to each queue's bytes.

    Each queue that has records gets at least one. A queue's end is found by bisection: about 20 calls of `queue_bytes`
    for a million records. `start` has every queue of `end`.
    """
    sizes = {queue: queue_bytes(queue, start[queue], offset) for queue, offset in end.items() if offset > start[queue]}
    total = sum(sizes.values())
    if total <= limit:
        return dict(end)
    found = dict(end)
    for queue, size in sizes.items():
        share = limit * size // total
        begin = start[queue]
        low, high = begin + 1, end[queue]  # the answer is in [low, high]
        while low < high:
            middle = (low + high + 1) // 2
            if queue_bytes(queue, begin, middle) <= share:
                low = middle
            else:
                high = middle - 1
        found[queue] = low
    return found


class TriggerDelay:
    """Decides whether a batch waits for more records (minOffsetsPerTrigger), for at most maxTriggerDelay.

    The delay counts from the last batch; the first batch of a query does not wait, as in spark-sql-kafka. The clock
    also runs while there is nothing to read, so that a single record after a long silence is not held back.
    """

    def __init__(self, records_min: int, delay_max_ms: int, clock_ms: Callable[[], int]) -> None:
        self._records_min = records_min
        self._delay_max_ms = delay_max_ms
        self._clock_ms = clock_ms
        self._last_batch_ms: int | None = None

    def holds_back(self, waiting: int) -> bool:
        """Returns whether a batch of `waiting` records must wait; True for 0. If it need not, the delay starts
        again."""
        now_ms = self._clock_ms()
        if waiting == 0:
            return True
        late = self._last_batch_ms is None or now_ms - self._last_batch_ms >= self._delay_max_ms
        if waiting < self._records_min and not late:
            return True
        self._last_batch_ms = now_ms
        return False
