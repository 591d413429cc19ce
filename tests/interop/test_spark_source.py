"""A live broker's store read by Spark equals, row by row, what RocketMQ's own consumer reads."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import trio
from pyspark.sql import SparkSession

from ha.spark import HalogDataSource
from tests.interop.java_client import Consumed, open_java_client
from tests.interop.processes import Children
from tests.interop.releases import Release
from tests.interop.rocketmq import RocketMqBroker, start_name_server
from tests.spark.conftest import spark  # noqa: F401 - a fixture

COUNT = 3_000

pytestmark = pytest.mark.spark


def rows_by_spark(session: SparkSession, store: Path, topic: str) -> list[Consumed]:
    columns = "queueId,queueOffset,physicalOffset,body,uniqKey,tags,keys"
    source = session.read.format("halog").option("path", str(store)).option("topic", topic).option("columns", columns)
    return sorted(
        Consumed(
            row.queueId,
            row.queueOffset,
            row.physicalOffset,
            int(row.body[:10]),
            len(row.body),
            zlib.crc32(row.body) & 0x7FFFFFFF,
            row.uniqKey,
            str(row.tags).replace("None", "null"),
            "null" if row["keys"] is None else ",".join(row["keys"]),
        )
        for row in source.load().toLocalIterator()
    )


@pytest.mark.usual_release("5.5.0")
async def test_spark_reads_what_the_java_consumer_reads(
    children: Children,
    release: Release,
    tmp_path: Path,
    spark: SparkSession,  # noqa: F811
) -> None:
    spark.dataSource.register(HalogDataSource)
    name_server = await start_name_server(children, release)
    broker = RocketMqBroker(
        children, release, "master", name_server, "ASYNC_MASTER", extra={"mappedFileSizeCommitLog": 1 << 20}
    )
    await broker.start()
    async with open_java_client(children, release, name_server) as client:
        await client.send_until("table", "SEND_OK")
        await client.run("produce", topic="table", count=COUNT, first=100, threads=2, acks=tmp_path / "acks")
        await client.run("produce", topic="table", count=COUNT // 4, first=50_000, batch=50, acks=tmp_path / "batches")
        consumed = await client.consume("table", tmp_path / "consumed")
    assert len(consumed) > COUNT + COUNT // 4
    assert len(list(broker.commitlog.iterdir())) > 3
    found = await trio.to_thread.run_sync(rows_by_spark, spark, broker.store, "table")
    assert found == sorted(consumed)
    await broker.stop()
