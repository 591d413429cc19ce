"""Commits a batch on the driver with one record, once all its rows are stored as safely as required; or aborts it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ha.client import MessageQueue, PullConsumer
from ha.errors import SinkFailed
from ha.spark.calls import bounded_calls
from ha.spark.sink.control import ControlRecord, Floors, Ranges
from ha.spark.sink.identity import SinkPart, hash_number
from ha.spark.sink.options import SinkOptions
from ha.spark.sink.partition import Doubtful, PartResult, open_clients, rows_of_part
from ha.spark.source.network_pull import with_retries

_log = logging.getLogger(__name__)

_CHECKS_AT_ONCE = 8
"""Number of queues from which rows are read again at the same time"""


async def commit_parts(options: SinkOptions, results: Sequence[PartResult]) -> None:
    """Commits the batch that consists of the parts `results`; does nothing if no part had a row.

    A broker whose status for a row was not in `options.accepted`, or on which a row was found rather than sent, must
    first store a fence with an accepted status: brokers flush and replicate in order, so the row is then as safe,
    unless the broker lost it before the fence. So these rows are read again after the fence.
    If an earlier attempt has committed the batch, only a fence is stored, to make that commit safe, and the commit is
    read again.

    Raises SinkFailed if the batch is already committed with another number of rows, if a record can't be stored, if a
    broker lost rows or the commit, or as `commit_record` does; ClientError; RecordsGone as `rows_of_part` does.
    """
    results = [result for result in results if result.row_count or result.already_committed]
    if not results:
        return
    part = results[0].part
    async with open_clients(options) as (_, consumer, commits):
        if any(result.already_committed for result in results):
            rows = sum(result.row_count for result in results)
            committed = max(result.committed_row_count for result in results)
            if rows != committed:
                raise SinkFailed(
                    f"batch {part.batch} of {part.sink} is committed with {committed} rows and came again with {rows}: "
                    "the checkpoint was set back, or another write has this sinkId; nothing was sent"
                )
            # An earlier attempt stored the record, which is safe if it is there after one with an accepted status.
            fence = ControlRecord("fence", part.sink)
            await commits.wait_pullable(await commits.append(fence, options.accepted))
            if (await commits.history(part.sink)).committed_batch != part.batch:
                raise SinkFailed(
                    f"the commit of batch {part.batch} of {part.sink} is lost; run the query or write again"
                )
            return
        for broker_name in sorted({queue.broker_name for result in results for queue in result.doubtful}):
            await commits.fence(broker_name, options.accepted)

        async def check(doubtful: tuple[SinkPart, MessageQueue, Doubtful]) -> None:
            await _check_kept(consumer, *doubtful, options.send_timeout_s)

        async with bounded_calls(check, _CHECKS_AT_ONCE) as start_check:
            for result in results:
                for queue, doubtful in result.doubtful.items():
                    await start_check((result.part, queue, doubtful))
        record = commit_record(results)
        await commits.append(record, options.accepted)
    found = sum(result.found_count for result in results)
    strays = sum(result.strays for result in results)
    _log.info(
        "sink.batch_committed sink=%s batch=%d rows=%d found=%d strays=%d",
        part.sink,
        part.batch,
        record.row_count,
        found,
        strays,
    )


async def _check_kept(
    consumer: PullConsumer, part: SinkPart, queue: MessageQueue, doubtful: Doubtful, retry_s: float
) -> None:
    """Raises SinkFailed if `queue` does not have the rows `doubtful` of `part`."""
    queue_end = await with_retries(lambda: consumer.max_offset(queue), retry_s)
    hash_sum = 0
    for begin, end in merged(doubtful.spans):
        async for _, key in rows_of_part(consumer, part, queue, begin, min(end, queue_end), retry_s):
            hash_sum += hash_number(key)
    if hash_sum != doubtful.hash_sum:
        raise SinkFailed(
            f"{queue.topic} queue {queue.queue_id} of {queue.broker_name} no longer has all rows of {part.text}: "
            "the broker lost messages; run the query or write again, which sends the missing rows"
        )


async def abort_batch(options: SinkOptions, sink: str, batch: int) -> None:
    """Commits a batch without rows: readers of committed data exclude all its messages, even those stored later, and
    streams no longer wait for it. A commit of the batch that is stored already stays valid.

    Raises SinkFailed if the record can't be stored; ClientError.
    """
    async with open_clients(options) as (_, _, commits):
        await commits.append(ControlRecord("commit", sink, batch), options.accepted)


def commit_record(results: Sequence[PartResult]) -> ControlRecord:
    """Returns the commit record of a batch with these parts.

    Raises SinkFailed if the parts are of several batches, or if the number of queue offsets differs from the number of
    rows, because two parts claim the same message.
    """
    part = results[0].part
    ranges: Ranges = {}
    floors: Floors = {}
    for result in results:
        if (result.part.sink, result.part.batch) != (part.sink, part.batch):
            raise SinkFailed(f"parts of two batches in one commit: {part.text} and {result.part.text}")
        for topic, brokers in result.ranges.items():
            for broker_name, queues in brokers.items():
                target = ranges.setdefault(topic, {}).setdefault(broker_name, {})
                for queue_id, spans in queues.items():
                    target.setdefault(queue_id, []).extend(spans)
        for topic, ends in result.floors.items():
            for broker_name, of_broker in ends.items():
                known = floors.setdefault(topic, {}).setdefault(broker_name, {})
                for queue_id, end in of_broker.items():
                    known[queue_id] = max(end, known.get(queue_id, 0))
    for brokers in ranges.values():
        for queues in brokers.values():
            for queue_id, spans in queues.items():
                queues[queue_id] = merged(spans)
    rows = sum(result.row_count for result in results)
    named = sum(
        end - begin
        for brokers in ranges.values()
        for queues in brokers.values()
        for spans in queues.values()
        for begin, end in spans
    )
    if named != rows:
        raise SinkFailed(f"{part.sink} batch {part.batch}: {rows} rows are stored at {named} queue offsets")
    return ControlRecord("commit", part.sink, part.batch, floors=floors, ranges=ranges, row_count=rows)


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the [begin, end) pairs sorted, with adjacent and overlapping ones joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
