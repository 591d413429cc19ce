"""Shared by the sink's tests: attempts at a part without Spark, and reading of topics.

As a program, `python -m tests.spark.sink_steps SERVERS TOPIC SINK BATCH PARTITION ROWS` makes one attempt, for a test
that kills it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import anyio
import pyarrow as pa

from ha.arrow.read_options import ReadOptions
from ha.client import PullConsumer, ReceivedMessage
from ha.errors import RouteNotFound
from ha.spark.sink.commit import commit_parts
from ha.spark.sink.committed_source import CommittedSource
from ha.spark.sink.identity import SinkPart
from ha.spark.sink.options import SinkOptions, parse_sink_options
from ha.spark.sink.partition import PartResult, PartWriter, open_clients
from ha.spark.source.log_source import QueueSlice
from ha.spark.source.network import NetworkSettings, NetworkSource
from tests.spark.stores import KilledError


def options_for(servers: str, **more: str) -> SinkOptions:
    """Small requests, so that there are many."""
    return parse_sink_options({"servers": servers, "batchSize": "10", "inFlight": "3", "sendTimeout": "20s", **more})


def frame(bodies: Iterable[bytes], **columns: Any) -> pa.RecordBatch:
    """Rows with these bodies."""
    return pa.RecordBatch.from_pydict({"body": pa.array(list(bodies), pa.binary()), **columns})


def bodies(count: int, first: int = 0) -> list[bytes]:
    """Return `count` different bodies."""
    return [b"row %d" % number for number in range(first, first + count)]


def dying_after(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the batches, then raises KilledError."""
    yield from batches
    raise KilledError


def attempt(
    options: SinkOptions, part: SinkPart, batches: Iterable[pa.RecordBatch], *, is_repeated: bool = False
) -> PartResult:
    """Makes one attempt at `part`, as a task does."""

    async def main() -> PartResult:
        with anyio.fail_after(120):
            async with open_clients(options) as clients:
                # No Python worker of Spark's is left behind here, so nothing needs to settle for long.
                writer = PartWriter(options, part, clients, is_repeated=is_repeated, settle_s=0.2)
                return await writer.write(batches)

    return anyio.run(main)


def commit(options: SinkOptions, *results: PartResult) -> None:
    """Commits, as the driver does."""
    anyio.run(commit_parts, options, results)


def read_topic(servers: str, topic: str) -> list[ReceivedMessage]:
    """Every message of `topic`, as any consumer sees it."""

    async def main() -> list[ReceivedMessage]:
        found: list[ReceivedMessage] = []
        async with PullConsumer(servers, group="sink-test") as consumer:
            try:
                queues = await consumer.queues(topic)
            except RouteNotFound:
                return []
            for queue in queues:
                at, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
                while at < end:
                    result = await consumer.pull(queue, at)
                    found += result.messages
                    at = result.next_offset
        return found

    return anyio.run(main)


def wait_for_messages(servers: str, topic: str, more_than: int, timeout_s: float, check: Callable[[], object]) -> int:
    """Returns the number of messages in `topic` once there are more than `more_than` or time is up; `check` is called
    meanwhile."""

    async def main() -> int:
        count = 0
        with anyio.move_on_after(timeout_s):
            async with PullConsumer(servers, group="sink-test") as consumer:
                while count <= more_than:
                    check()
                    try:
                        count = sum([await consumer.max_offset(queue) for queue in await consumer.queues(topic)])
                    except RouteNotFound:
                        count = 0
                    await anyio.sleep(0.02)  # brokers send no event for counts
        return count

    return anyio.run(main)


def read_committed(servers: str, topic: str, *, stops_at_pending: bool = False) -> list[bytes]:
    """The bodies that a reader of committed data sees, sorted; with `stops_at_pending`, those that a stream sees."""
    inner = NetworkSource(NetworkSettings(servers=(servers,), pull_timeout_s=10))
    source = CommittedSource(inner, stops_at_pending=stops_at_pending)
    try:
        slices = [QueueSlice(queue, *source.queue_range(queue)) for queue in source.queues(frozenset({topic}))]
        partition = source.queue_partition([piece for piece in slices if piece.entry_count])
        return sorted(body for batch in partition.read(ReadOptions(columns=("body",))) for body in batch[0].to_pylist())
    finally:
        source.close()


if __name__ == "__main__":
    SERVERS, TOPIC, SINK, BATCH, PARTITION, ROWS = sys.argv[1:]
    frames = [frame(bodies(10, first)) for first in range(0, int(ROWS), 10)]
    attempt(options_for(SERVERS, topic=TOPIC), SinkPart(SINK, int(BATCH), int(PARTITION)), frames)
