"""A topic as one table, from an archive and the log: each message once, while both change."""

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import ha.spark
from ha.client import Message as ClientMessage
from ha.client import Producer, PullConsumer, PullStatus
from ha.errors import OptionError
from ha.protocol.codes import SysFlag
from ha.protocol.record import Message
from ha.spark.jobs.archive import ArchiveOptions, archive
from ha.spark.jobs.archive.manifest import Scope, State
from ha.spark.jobs.audit.job import AuditOptions, audit_with
from ha.spark.restarts import with_restarts
from ha.spark.sink.options import COMMIT_TOPIC
from ha.spark.source.log_source import QueueKey
from ha.spark.topic_table import start_offsets
from tests.scenarios.brokers import Broker
from tests.spark.clusters import running_broker
from tests.spark.inline import inline_runner, inline_spark
from tests.spark.stores import KilledError, LiveStore, flights_and_others, live_store, message
from tests.spark.test_archive_spark import skip_without_delta
from tests.spark.test_archived_source import first_rows
from tests.spark.test_offsets import FakeLog

pytestmark = pytest.mark.spark

SEGMENT = 64 << 10

messages = partial(flights_and_others, padding=500)


def run_archive(spark: SparkSession, store: Path, target: Path, **changes: Any) -> None:
    options: dict[str, Any] = {"range_bytes": 40 << 10, **changes}
    given = {name: options.pop(name) for name in ("failpoint",) if name in options}
    archive(spark, ArchiveOptions(path=str(store), archive=str(target), **options), **given)


def numbers(table: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body[:8])) for row in table.select("body").collect())


@pytest.mark.parametrize("form", ["parquet", "delta", "iceberg"])
def test_each_message_is_there_once_while_both_change(spark: SparkSession, tmp_path: Path, form: str) -> None:
    if form == "delta":
        skip_without_delta(spark)
    store, target = tmp_path / "broker-b", tmp_path / "archive"

    def table() -> DataFrame:
        return ha.spark.topic(spark, "flights", archive=str(target), path=str(store))

    def killed_before(fatal: str) -> None:
        def kill(step: str) -> None:
            if step == fatal:
                raise KilledError

        with pytest.raises(KilledError):
            run_archive(spark, store, target, format=form, failpoint=kill)

    with live_store(store, SEGMENT) as live:
        live.put(messages(0, 300))
        run_archive(spark, store, target, format=form, compact_files_min=0)
        first = table()
        assert numbers(first) == list(range(300))
        assert {len(row.body) for row in first.select("body").collect()} == {508}
        live.put(messages(300, 450))
        assert numbers(table()) == list(range(450))
        # A commit that is not complete is none; the next run completes it.
        killed_before("mark applied")
        assert numbers(table()) == list(range(450))
        early, late = table(), table()
        run_archive(spark, store, target, format=form, compact_files_min=0)
        assert numbers(late) == numbers(table()) == list(range(450))
        live.put(messages(450, 460))
        late = table()
        delete_archived(live)
        assert numbers(late) == list(range(460))
        given = {"path": str(store), "archive": str(target), "topic": "flights"}
        assert sorted(int(row["body"][:8]) for row in first_rows(given)) == list(range(460))
        options = AuditOptions(paths=(str(store),), archive=str(target))
        assert audit_with(inline_runner(), options).exit_code == 0
        # The log no longer has the messages that were archived after this table was made.
        with pytest.raises(PySparkException, match="retention deleted them"):
            numbers(early)


def delete_archived(live: LiveStore) -> None:
    """Deletes all segments but the last."""
    assert live.clean() > 2


def test_a_log_has_less_than_the_archive(spark: SparkSession, tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    with live_store(store) as live:
        live.put(messages(0, 50))
        run_archive(spark, store, target, topics=("flights",))
        with pytest.raises(OptionError, match="does not contain the topic other"):
            ha.spark.topic(spark, "other", archive=str(target), path=str(store))
        run_archive(spark, store, tmp_path / "all")
        for name, error in {"nowhere": "has no queue in the log", COMMIT_TOPIC: "does not contain the topic"}.items():
            with pytest.raises(OptionError, match=error):
                ha.spark.topic(spark, name, archive=str(tmp_path / "all"), path=str(store))
    other = tmp_path / "broker-b2"
    with live_store(other) as live:
        live.put([message(1, topic="else")])
        table = ha.spark.topic(spark, "flights", archive=str(target), path=str(other))
        assert numbers(table) == list(range(50))
        stored = ha.spark.topic(spark, "flights", archive=str(target), path=str(other), decompress="false")
        compressed = [row.body for row in stored.collect() if row.sysFlag & SysFlag.COMPRESSED]
        assert sorted(int(zlib.decompress(body)[:8]) for body in compressed) == list(range(0, 50, 5))
        live.put(messages(0, 5))
        table = ha.spark.topic(spark, "flights", archive=str(target), path=str(other), brokerName="broker-b")
        with pytest.raises(PySparkException, match="it went back to"):
            numbers(table)


def test_a_hole_in_the_archive_is_no_loss_but_messages_deleted_later_are(spark: SparkSession, tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"

    def rare(number: int, queue_id: int) -> Message:
        return message(number, queue_id=queue_id)

    def fill_and_delete(*before: Message) -> None:
        live.put([*before, *(message(number, topic="other", body=bytes(500)) for number in range(300))])
        delete_archived(live)

    def table() -> DataFrame:
        return ha.spark.topic(spark, "flights", archive=str(target), path=str(store))

    with live_store(store, SEGMENT) as live:
        live.put([*messages(0, 100), rare(1000, 5)])
        run_archive(spark, store, target)
        fill_and_delete(rare(1001, 5), rare(1002, 6))
        run_archive(spark, store, target, fail_on_data_loss=False)
        archived = [*range(100), 1000]
        assert numbers(table()) == archived
        live.put([rare(1003, 7)])
        early = table()
        assert numbers(table()) == [*archived, 1003]
        fill_and_delete()
        with pytest.raises(PySparkException, match=r"queue 7 .*retention deleted them"):
            numbers(early)
        with pytest.raises(PySparkException, match=r"queue [57] .*retention deleted them"):
            numbers(table())
        run_archive(spark, store, target, fail_on_data_loss=False)
        assert numbers(table()) == archived


def test_queues_that_appear_later_do_not_fail_a_query(spark: SparkSession, tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"

    def table() -> DataFrame:
        return ha.spark.topic(spark, "flights", archive=str(target), path=str(store))

    with live_store(store) as live:
        live.put(messages(0, 20))
        run_archive(inline_spark(), store, target)
        early = table()
        live.put([message(20), message(21, queue_id=9)])
        assert numbers(early) == list(range(21))
        assert numbers(table()) == list(range(22))


def test_a_stream_reads_the_archive_then_the_log(spark: SparkSession, tmp_path: Path) -> None:
    store, target, out = tmp_path / "broker-b", tmp_path / "archive", tmp_path / "out"

    def run_query() -> None:
        given = {"path": str(store), "archive": str(target), "topic": "flights", "maxOffsetsPerTrigger": "90"}
        writer = spark.readStream.format("halog").options(**given).load().writeStream.format("parquet")
        query = writer.option("checkpointLocation", f"{out}-c").trigger(availableNow=True).start(str(out))
        assert query.awaitTermination(300)

    with live_store(store, SEGMENT) as live:
        for begin, archived in ((0, 300), (310, 600)):
            live.put(messages(begin, archived))
            run_archive(inline_spark(), store, target)
            live.put(messages(archived, archived + 10))
            delete_archived(live)
            with_restarts(run_query)
            assert numbers(spark.read.parquet(str(out))) == list(range(archived + 10))


class PartlyUnreadable(FakeLog):
    """A queue in which message n is at physical offset 100 n, as far as the broker can read it."""

    def __init__(self, unreadable: range) -> None:
        super().__init__()
        self.queue = self.add("flights", 0, 100)
        self.unreadable = unreadable

    def physical_offset(self, queue: QueueKey, queue_offset: int) -> int:
        return -1 if queue_offset in self.unreadable else 100 * queue_offset


@pytest.mark.parametrize("covered_end", [0, 1, 2950, 3000, 8000, 9900, 20_000])
@pytest.mark.parametrize("unreadable", [range(0), range(50, 51), range(50, 100), range(30)])
def test_messages_that_a_broker_can_not_read_do_not_hide_others(unreadable: range, covered_end: int) -> None:
    """They were taken for archived ones, and so were all messages before them."""
    log = PartlyUnreadable(unreadable)
    state = State(broker_name="a", scope=Scope("parquet"), covered_begin=0, covered_end=covered_end)
    [start] = start_offsets(log, "flights", [state]).values()
    behind = [offset for offset in range(100) if 100 * offset >= covered_end and offset not in unreadable]
    archived = [offset for offset in range(100) if 100 * offset < covered_end and offset not in unreadable]
    assert max(archived, default=-1) < start <= min(behind, default=100)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("startingTimestamp", "5"),
        ("startingOffsets", '{"flights":{"0":3}}'),
        ("endingTimestamp", "5"),
        ("subscribePattern", "f.*"),
        ("columns", "body"),
        ("isolation", "read_committed"),
        ("tags", "UA"),
        ("keys", "k1"),
    ],
)
def test_options_that_leave_messages_out_are_refused(option: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"^{option}"):
        ha.spark.topic(None, "flights", archive="a", path="s", **{option: value})  # type: ignore[arg-type]


@pytest.mark.processes
def test_the_log_is_pulled_from_a_broker(spark: SparkSession, tmp_path: Path) -> None:
    async def send(begin: int, end: int) -> None:
        async with Producer(servers) as producer, PullConsumer(servers, group="wait") as consumer:
            for number in range(begin, end):
                stored = await producer.send(ClientMessage("flights", b"%08d" % number))
                found = await consumer.pull(stored.queue, stored.queue_offset, wait_s=10)  # until the queue has it
                assert found.status is PullStatus.FOUND

    with running_broker(tmp_path) as servers:
        anyio.run(send, 0, 20)
        run_archive(spark, tmp_path / "m" / "store", tmp_path / "archive")
        anyio.run(send, 20, 30)
        table = ha.spark.topic(spark, "flights", archive=str(tmp_path / "archive"), servers=servers)
        with Broker(tmp_path / "u", "ASYNC_MASTER", namesrvAddr=servers, brokerName="broker-u").start():
            assert numbers(table) == list(range(30))
        assert {row.brokerName for row in table.select("brokerName").collect()} == {"broker-t"}
