"""Writes the same messages into a halog store (through `ha.store`, without a broker) and into Kafka (by Spark's sink).

Each side's directory gets a `filled.json` when it is complete, so that `--keep` finds it again; a directory without one
is filled again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import trio
from pyspark.sql import SparkSession

from bench.spark import messages
from bench.spark.kafka import Kafka
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions

_FORMAT = 1
"""Increase this when `messages` changes."""
_ROWS_AT_ONCE = 4096
_KAFKA_SCHEMA = (
    "key binary, value binary, headers array<struct<key:string,value:binary>>, partition int"  # the sink's column names
)
_ARROW_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("partition", pa.int32()),
    ]
)


def is_filled(folder: Path, rows: int) -> bool:
    """Whether an earlier run left exactly these messages in `folder`."""
    try:
        return bool(json.loads((folder / "filled.json").read_text()) == _stamp(rows))
    except (OSError, ValueError):
        return False


def mark_filled(folder: Path, rows: int) -> None:
    (folder / "filled.json").write_text(json.dumps(_stamp(rows)))


def _stamp(rows: int) -> dict[str, Any]:
    return {"format": _FORMAT, "rows": rows}


def fill_store(folder: Path, rows: int) -> float:
    """Creates a store of `rows` messages in `folder`, with consume queues and without an index. Returns seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    trio.run(_fill_store, folder, rows)
    mark_filled(folder, rows)
    return time.monotonic() - began


async def _fill_store(folder: Path, rows: int) -> None:
    options = StoreOptions(root=folder, index_enabled=False, stop_timeout_s=600)
    async with open_message_store(options) as store:
        for numbers in messages.chunks(0, rows, 1, _ROWS_AT_ONCE):
            bodies = messages.bodies(numbers).reshape(-1).data
            size = messages.BODY_SIZE
            born_ms = time.time_ns() // 1_000_000
            chunk = [
                Message(
                    topic=messages.TOPIC,
                    queue_id=number % messages.QUEUE_COUNT,
                    body=bodies[row * size : (row + 1) * size],
                    properties=encode_properties(dict([("KEYS", messages.key(number)), *messages.properties(number)])),
                    born_timestamp_ms=born_ms,
                )
                for row, number in enumerate(numbers.tolist())
            ]
            for result in await store.log.put(chunk):
                if not result.status.is_stored:
                    raise SystemExit(f"the store rejected a message: {result.status.name} {result.remark}")
            await trio.lowlevel.checkpoint()
            if store.log.dispatched_offset.value < store.log.max_offset.value - (256 << 20):
                await store.log.dispatched_offset.wait_beyond(store.log.max_offset.value - (64 << 20))
        await store.log.dispatched_offset.wait_beyond(store.log.max_offset.value - 1)


def fill_kafka(spark: SparkSession, kafka: Kafka, rows: int) -> float:
    """Writes the same messages into Kafka's topic, by partition and in order. Returns seconds."""
    began = time.monotonic()
    kafka.delete_topic()
    kafka.create_topic()
    count = messages.QUEUE_COUNT

    def records(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for queue in batch.column(0).to_pylist():
                yield from kafka_batches(queue, rows)

    (
        spark.range(0, count, 1, numPartitions=count)
        .mapInArrow(records, _KAFKA_SCHEMA)
        .write.format("kafka")
        .option("kafka.bootstrap.servers", kafka.bootstrap)
        .option("topic", messages.TOPIC)
        .option("includeHeaders", "true")
        .option("kafka.batch.size", str(256 * 1024))
        .option("kafka.linger.ms", "5")
        .save()
    )
    return time.monotonic() - began


def kafka_batches(queue: int, rows: int) -> Iterator[pa.RecordBatch]:
    """Returns the records of one partition as columns for Spark's Kafka sink."""
    for numbers in messages.chunks(queue, rows, messages.QUEUE_COUNT, _ROWS_AT_ONCE):
        offsets = pa.array(range(0, (len(numbers) + 1) * messages.BODY_SIZE, messages.BODY_SIZE), pa.int32())
        bodies = pa.Array.from_buffers(
            pa.binary(), len(numbers), [None, offsets.buffers()[1], pa.py_buffer(messages.bodies(numbers))]
        )
        pairs = [messages.properties(number) for number in numbers.tolist()]
        flat = [pair for one in pairs for pair in one]
        headers = pa.ListArray.from_arrays(
            pa.array(range(0, len(flat) + 1, len(pairs[0])), pa.int32()),
            pa.StructArray.from_arrays(
                [pa.array([name for name, _ in flat]), pa.array([value.encode() for _, value in flat], pa.binary())],
                names=["key", "value"],
            ),
        )
        keys = pa.array([messages.key(number).encode() for number in numbers.tolist()], pa.binary())
        partitions = pa.array([queue] * len(numbers), pa.int32())
        yield pa.RecordBatch.from_arrays([keys, bodies, headers, partitions], schema=_ARROW_SCHEMA)
