"""Measures what the Spark source spends on planning, without Spark: processor time of this process, size of offsets.

Each log has 30,000 messages in topics of at most 100 queues. A batch and a stream are planned as the driver's Python
does it. After the first micro-batch, the stream looks at the log, which has not changed, `--looks` times; the look that
reads all queues once more comes before them and is not counted. Queues that are at different offsets make an offset
longer, so its size is also computed for queues at random offsets that differ by less than 200.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import trio
from pyspark.sql.streaming.datasource import ReadAllAvailable

from bench.measure import empty_folder, report, spread
from ha.protocol.record import Message
from ha.spark.source.batch_reader import plan_batch
from ha.spark.source.offsets import OffsetMap, StreamOffset, encode_stream, subscribed
from ha.spark.source.opening import open_source
from ha.spark.source.options import parse_options
from ha.spark.source.stream_reader import StreamPlanner
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions

MESSAGE_COUNT = 30_000
_QUEUES_PER_TOPIC = 100
_AT_ONCE = 1_000
_OFFSETS_APART = 200


@dataclass(frozen=True)
class Point:
    """A log of `queue_count` queues, and how many of its topics the query reads; None: all."""

    queue_count: int
    topic_count: int | None = None

    @property
    def options(self) -> dict[str, str]:
        """The source's options for these topics."""
        if self.topic_count is None:
            return {"subscribePattern": ".*"}
        return {"subscribe": ",".join(topic_name(number) for number in range(self.topic_count))}


POINTS = (Point(10), Point(1_000), Point(10_000), Point(10_000, 1))


def topic_name(number: int) -> str:
    return f"topic-{number:03d}"


async def fill(root: Path, queue_count: int, message_count: int = MESSAGE_COUNT) -> None:
    """Writes messages in turns to all queues."""
    options = StoreOptions(root=root, index_enabled=False, stop_timeout_s=600)
    queues = [(topic_name(number // _QUEUES_PER_TOPIC), number % _QUEUES_PER_TOPIC) for number in range(queue_count)]
    async with open_message_store(options) as store:
        for first in range(0, message_count, _AT_ONCE):
            numbers = range(first, min(message_count, first + _AT_ONCE))
            places = [queues[number % queue_count] for number in numbers]
            for result in await store.log.put([Message(topic, queue_id, b"x") for topic, queue_id in places]):
                if not result.status.is_stored:
                    raise SystemExit(f"the store rejected a message: {result.status.name} {result.remark}")
            await trio.lowlevel.checkpoint()
        await store.log.dispatched_offset.wait_beyond(store.log.max_offset.value - 1)


def measured(root: Path, point: Point, look_count: int) -> dict[str, Any]:
    """Plans a batch and a stream once. Times in seconds of processor time, sizes in bytes of JSON."""
    given = {"path": str(root), **point.options}
    batch, stream = parse_options(given, "batch"), parse_options({**given, "startingOffsets": "earliest"}, "stream")
    began = time.process_time()
    with closing(open_source(batch)) as source:
        plan_batch(source, batch)
    batch_s = time.process_time() - began

    limit = ReadAllAvailable()
    # Without a pause between two looks, which an idle query makes after a long one.
    minutes = count(step=60)
    began = time.process_time()
    with closing(StreamPlanner(open_source(stream), stream, clock_s=lambda: next(minutes))) as planner:
        start = planner.initial()
        end = planner.latest(start, limit)
        planner.partitions(start, end)
        start_s = time.process_time() - began
        planner.latest(end, limit)
        began = time.process_time()
        for _ in range(look_count):
            if planner.latest(end, limit) != end:
                raise SystemExit("the log has changed")
        look_s = (time.process_time() - began) / look_count
    with closing(open_source(stream)) as source:
        queues, brokers = subscribed(source, stream), source.brokers()
        even = {queue: source.queue_range(queue).end for queue in queues}
    dice = random.Random(1)
    uneven = {queue: 1_000 + dice.randrange(_OFFSETS_APART) for queue in queues}

    def size(positions: OffsetMap) -> int:
        return len(json.dumps(encode_stream(StreamOffset(positions=positions), brokers)))

    return {
        "queues": point.queue_count,
        "queues_read": len(queues),
        "batch_s": batch_s,
        "start_s": start_s,
        "look_s": look_s,
        "offset_bytes": size(even),
        "uneven_offset_bytes": size(uneven),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench/run planning", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--looks", type=int, default=100, help="looks at the unchanged log per round")
    parser.add_argument("--queues-max", type=int, default=10_000, help="leave out logs with more queues")
    parser.add_argument("--directory", type=Path, help="directory for the stores (default: a temporary one)")
    options = parser.parse_args(words)
    points = [point for point in POINTS if point.queue_count <= options.queues_max]
    runs: list[dict[str, Any]] = []
    with empty_folder(options.directory) as folder:
        for queue_count in {point.queue_count for point in points}:
            trio.run(fill, folder / str(queue_count), queue_count)
        for number in range(-1, options.rounds):
            for point in points:
                found = {"round": number, **measured(folder / str(point.queue_count), point, options.looks)}
                if number >= 0:
                    runs.append(found)
    rows = []
    for place, point in enumerate(points):
        mine = runs[place :: len(points)]
        rows.append(
            [
                f"{point.queue_count:,}",
                f"{mine[0]['queues_read']:,}",
                *(spread([run[name] * 1000 for run in mine], 2) for name in ("batch_s", "start_s", "look_s")),
                f"{mine[0]['offset_bytes']:,}",
                f"{mine[0]['uneven_offset_bytes']:,}",
            ]
        )
    head = ["queues of the log", "queues read", "plan a batch, CPU ms", "start a stream, CPU ms"]
    head += ["look at an unchanged log, CPU ms", "offset, bytes", "offset of uneven queues, bytes"]
    report(f"Planning for a log of {MESSAGE_COUNT:,} messages, {options.rounds} rounds", runs, head, rows)


if __name__ == "__main__":
    main()
