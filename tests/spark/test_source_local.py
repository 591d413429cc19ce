"""Store directories as a source: what is planned and what its tasks read, against the manifest and the plain codec.

The tasks are run here, as Spark would run them: pickled, then read. No Spark is started.
"""

import base64
import errno
import json
import logging
import pickle
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from ha.arrow import LogReader, ReadOptions, RowFilter, log_reader
from ha.arrow.queues import QueueFiles
from ha.arrow.schema import COLUMNS
from ha.arrow.segments import Segment, Segments
from ha.errors import OptionError, RecordsGone, StoreUnreadable
from ha.protocol.store_files import BROKER_FILE
from ha.spark.source.batch_reader import HalogReader, plan_batch
from ha.spark.source.local import LocalSource, RangePartition
from ha.spark.source.log_source import LogPartition, QueueKey
from ha.spark.source.offsets import decode_positions
from ha.spark.source.options import parse_options
from ha.spark.source.schema import spark_schema
from ha.spark.source.stores import find_stores
from ha.spark.source.stream_reader import HalogStreamReader, StreamPlanner
from ha.spark.views import catalog_views
from tests.arrow.stores import StoreWriter
from tests.protocol.golden import STORES, manifest
from tests.spark.stores import live_store, make_store, message, named, records_of
from tests.unpacking import unpack_store

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BY_QUEUE = {"maxRecordsPerPartition": "1000000"}


def reader_of(path: Any, columns: Iterable[str] = tuple(COLUMNS), **given: str) -> HalogReader:
    return HalogReader(parse_options({"path": str(path), **given}, "batch"), spark_schema(columns))


def tasks_of(reader: HalogReader) -> list[LogPartition]:
    return [pickle.loads(pickle.dumps(task)) for task in reader.partitions()]


def rows_of(reader: HalogReader, tasks: Iterable[LogPartition] | None = None) -> list[dict[str, Any]]:
    """The rows of the tasks, each read by its own reader."""
    rows: list[dict[str, Any]] = []
    for task in tasks_of(reader) if tasks is None else tasks:
        for found in pickle.loads(pickle.dumps(reader)).read(task):
            assert isinstance(found, pa.RecordBatch)
            assert found.schema.equals(reader.schema)
            # The JVM does not look for a null where the schema says that there is none.
            for name in {"keys", "properties"} & set(found.schema.names):
                column = found.column(name)
                inner = column.flatten() if name == "keys" else column.items
                assert not inner.null_count
            rows += found.to_pylist()
    return rows


def ids_of(rows: Iterable[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return sorted((row["topic"], row["queueId"], row["queueOffset"]) for row in rows)


def numbers_of(rows: Iterable[dict[str, Any]]) -> list[int]:
    return sorted(int(row["body"]) for row in rows)


# ---- against the manifest of a real broker


def expected_row(entry: dict[str, Any], broker: str) -> dict[str, Any]:
    """A row as the manifest's own parser saw the record."""
    properties = entry["properties"]
    return {
        "topic": entry["topic"],
        "brokerName": broker,
        "queueId": entry["queueId"],
        "queueOffset": entry["queueOffset"],
        "physicalOffset": entry["offset"],
        "storeSize": entry["size"],
        "bodySize": entry["bodyLength"],
        "tags": properties.get("TAGS"),
        "keys": properties["KEYS"].split() if "KEYS" in properties else None,
        "properties": sorted(properties.items()),
        "bornTimestamp": EPOCH + timedelta(milliseconds=entry["bornTimestamp"]),
        "storeTimestamp": EPOCH + timedelta(milliseconds=entry["storeTimestamp"]),
        "bornHost": entry["bornHost"],
        "storeHost": entry["storeHost"],
        "sysFlag": entry["sysFlag"],
        "flag": entry["flag"],
        "reconsumeTimes": entry["reconsumeTimes"],
        "preparedTransactionOffset": entry["preparedTransactionOffset"],
        "uniqKey": properties.get("UNIQ_KEY"),
        "crcOk": True,
    }


@pytest.mark.parametrize("version", STORES)
def test_a_real_broker_s_store_equals_its_manifest_row_by_row(version: str, tmp_path: Path) -> None:
    path = unpack_store(version, tmp_path / "store")
    golden = manifest(version)
    entries = [entry for entry in golden["commitlog"] if entry["kind"] == "message"]
    queued = {(topic, queue_id, place): at for topic, queue_id, place, at, _, _ in golden["consumequeue"]}
    everything = rows_of(reader_of(path, brokerName="broker-a"))
    wanted = {
        entry["offset"]: expected_row(entry, "broker-a") for entry in entries if entry["offset"] in queued.values()
    }
    assert [row["physicalOffset"] for row in everything] == sorted(wanted)
    for row in everything:
        mine = {name: row[name] for name in wanted[row["physicalOffset"]]}
        mine["properties"] = sorted(mine["properties"])
        assert mine == wanted[row["physicalOffset"]]

    # The bodies as a real consumer got them, decompressed; by queue, cut into small tasks.
    reader = reader_of(path, topic=golden["topic"], maxRecordsPerPartition="5")
    tasks = tasks_of(reader)
    assert len(tasks) > 5
    by_place = {(row["queueId"], row["queueOffset"]): row for row in rows_of(reader, tasks)}
    stored = {(item["queueId"], item["queueOffset"]): item for item in golden["stored"]}
    assert stored.keys() <= by_place.keys()
    assert len(by_place) == sum(topic == golden["topic"] for topic, _, _ in queued)
    for place, item in stored.items():
        assert by_place[place]["body"] == base64.b64decode(item["body_base64"])
        assert by_place[place]["msgId"] == item["offsetMsgId"]


# ---- tasks and times


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1000 messages in two topics, with segments of 32 KiB."""
    path = tmp_path_factory.mktemp("stores") / "broker-a"
    for begin in range(0, 1000, 100):  # ten store times at least
        messages = [message(n, topic="delays" if n % 5 == 0 else "flights") for n in range(begin, begin + 100)]
        make_store(path, messages, segment_size=32 << 10)
    return path


def test_messages_of_a_light_queue_are_filtered_by_their_own_topic_and_keys(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", [message(number, queue_id=0) for number in range(6)])
    with LogReader(path) as reader:
        entries = reader.entries("flights", 0, 2, 5)
    queue = path / "consumequeue" / "%LMQ%mine" / "0"
    queue.mkdir(parents=True)
    (queue / "00000000000000000000").write_bytes(entries.tobytes().ljust(20 * 1000, b"\0"))
    source = LocalSource([str(path)])
    options = parse_options({"path": str(path), "topic": "%LMQ%mine"}, "batch")
    for columns in (("topic", "queueOffset"), ("topic", "queueOffset", "uniqKey")):
        for where, expected in (
            (RowFilter(), [0, 1, 2]),
            (RowFilter(topics=frozenset({"flights"})), [0, 1, 2]),
            (RowFilter(topics=frozenset({"%LMQ%mine"})), []),
            (RowFilter(keys=frozenset({"U00000003"})), [1]),
        ):
            tasks = plan_batch(source, options, columns)
            batches = [batch for task in tasks for batch in task.read(ReadOptions(columns=columns, where=where))]
            rows = [row for batch in batches for row in batch.to_pylist()]
            assert [(row["topic"], row["queueOffset"]) for row in rows] == [("flights", at) for at in expected]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"tags": "tag0 || tag2"}, [number for number in range(40) if number % 3 != 1]),
        ({"tags": "*"}, list(range(40))),
        ({"keys": "n2 k7 U00000030"}, [2, 7, 9, 16, 23, 30, 37]),
        ({"tags": "tag0", "keys": "n2"}, [9, 30]),
        ({"tags": "none"}, []),
    ],
)
def test_options_select_messages_by_tag_and_key(tmp_path: Path, given: dict[str, str], wanted: list[int]) -> None:
    """By range and by queue, whatever the columns need. A stream's positions move past the other messages."""
    path = make_store(tmp_path / "broker-a", [message(number) for number in range(40)])
    for more in ({}, BY_QUEUE, {"topic": "flights"}, {"isolation": "read_committed"}):
        assert numbers_of(rows_of(reader_of(path, **given, **more))) == wanted
        assert len(rows_of(reader_of(path, ("queueId",), **given, **more))) == len(wanted)
    options = parse_options({"path": str(path), "startingOffsets": "earliest", **given}, "stream")
    reader = HalogStreamReader(options, spark_schema(("body",)))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    batches = [batch for task in reader.partitions(start, end) for batch in reader.read(task)]
    assert numbers_of([row for batch in batches for row in batch.to_pylist()]) == wanted
    assert end["flights"] == dict.fromkeys(end["flights"], 10)
    assert len(end["flights"]) == 4
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    reader.stop()


def test_everything_is_read_once_by_range_and_by_queue(flights: Path) -> None:
    wanted = list(range(1000))
    by_range = reader_of(flights, maxBytesPerPartition="20k")
    tasks = tasks_of(by_range)
    assert all(isinstance(task, RangePartition) for task in tasks)
    assert len(tasks) >= sum(file.stat().st_size for file in (flights / "commitlog").iterdir()) // (20 << 10) - 2
    rows = rows_of(by_range, tasks)
    assert [row["physicalOffset"] for row in rows] == [record.physical_offset for record in records_of(flights)]
    assert numbers_of(rows) == wanted
    for given in (
        {"subscribe": "flights,delays"},
        {"subscribePattern": ".*", "minPartitions": "7"},
        {"maxRecordsPerPartition": "33"},
        {"startingOffsets": "earliest", "endingTimestamp": str(1 << 50)},
    ):
        assert numbers_of(rows_of(reader_of(flights, **given))) == wanted, given
    assert len(tasks_of(reader_of(flights, subscribePattern=".*", minPartitions="7"))) == 7
    assert len(tasks_of(reader_of(flights, maxRecordsPerPartition="33"))) == 31
    # 800 records of four queues are worth no more than one task; how many there are is not known of a range.
    assert len(tasks_of(reader_of(flights, topic="flights", **BY_QUEUE))) == 1


def test_topics_that_are_most_of_the_log_are_read_in_its_order(flights: Path, tmp_path: Path) -> None:
    most = reader_of(flights, topic="flights")
    rows = rows_of(most)
    assert all(isinstance(task, RangePartition) for task in tasks_of(most))
    offsets = [row["physicalOffset"] for row in rows]
    assert offsets == sorted(offsets)
    assert numbers_of(rows) == [n for n in range(1000) if n % 5]
    few = reader_of(flights, topic="delays")  # a fifth
    assert not any(isinstance(task, RangePartition) for task in tasks_of(few))
    assert numbers_of(rows_of(few)) == list(range(0, 1000, 5))
    # Light queues show records of other queues, which a range shows once.
    path = make_store(tmp_path / "light", [message(n, topic="%LMQ%a") for n in range(10)])
    assert not any(isinstance(task, RangePartition) for task in tasks_of(reader_of(path, topic="%LMQ%a")))
    assert numbers_of(rows_of(reader_of(path, topic="%LMQ%a"))) == list(range(10))
    # Batch queues are not shown in a range at all.
    (path / "batchconsumequeue" / "t" / "0").mkdir(parents=True)
    assert not any(isinstance(task, RangePartition) for task in tasks_of(reader_of(path)))


def test_time_range_selects_by_store_time(flights: Path) -> None:
    records = records_of(flights)
    times = sorted({record.store_timestamp_ms for record in records})
    begin, end = times[len(times) // 3], times[2 * len(times) // 3]
    found = rows_of(reader_of(flights, startingTimestamp=str(begin), endingTimestamp=str(end)))
    wanted = sorted(int(record.body) for record in records if begin <= record.store_timestamp_ms < end)
    assert 0 < len(wanted) < 1000
    assert numbers_of(found) == wanted


def test_an_empty_log_has_no_tasks_and_spark_s_own_reads_nothing(tmp_path: Path) -> None:
    from pyspark.sql.datasource import InputPartition

    reader = reader_of(make_store(tmp_path / "empty", []))
    assert tasks_of(reader) == []
    assert list(reader.read(InputPartition(None))) == []


# ---- several directories


def test_equal_names_mean_replicas(tmp_path: Path) -> None:
    for name in ("one/store", "two/store", "three"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    one, two, three = (str(tmp_path / name) for name in ("one/store", "two/store", "three"))
    assert find_stores([one, three]).replicas == {"store": (one,), "three": (three,)}
    assert find_stores([one, two, three], ["a", "b", "a"]).replicas == {"a": (one, three), "b": (two,)}
    assert find_stores([str(tmp_path / "*/store")], ["a", "a"]).replicas == {"a": (one, two)}
    assert find_stores([str(tmp_path / "t*")]).replicas == {"three": (three,), "two": (str(tmp_path / "two"),)}
    with pytest.raises(OptionError, match="brokerName: it is missing, and 2 directories are called 'store'"):
        find_stores([one, two])
    with pytest.raises(OptionError, match="brokerName: 1 names for 2 directories"):
        find_stores([one, two], ["a"])
    with pytest.raises(StoreUnreadable, match="no directory matches"):
        find_stores([str(tmp_path / "none*")])


def test_master_and_slave_are_read_once_under_their_broker_s_name(tmp_path: Path) -> None:
    master = named(make_store(tmp_path / "data/master", [message(n) for n in range(100)]), "broker-a")
    slave = Path(shutil.copytree(master, tmp_path / "data/slave"))
    make_store(master, [message(n) for n in range(100, 120)])
    rows = rows_of(reader_of(tmp_path / "data/*"))
    assert numbers_of(rows) == list(range(120))
    assert {row["brokerName"] for row in rows} == {"broker-a"}
    assert {row["brokerName"] for row in rows_of(reader_of(slave))} == {"broker-a"}, "as by `servers`"
    assert find_stores([str(master), str(slave)]).replicas == {"broker-a": (str(master), str(slave))}
    for store in (master, slave):  # of RocketMQ
        (store / "config" / BROKER_FILE).unlink()
    assert find_stores([str(master), str(slave)]).replicas == {"master": (str(master), str(slave))}
    with pytest.raises(OptionError, match=r"brokerName: .*/master and .*/slave are replicas of one log"):
        find_stores([str(master), str(slave)], ["a", "b"])
    with closing(LocalSource([str(master), str(slave)])) as source:
        old = {"flights": {"master:0": 25, "slave:0": 30, "slave:1": 3}}
        found = decode_positions(old, source.brokers())
        assert found == {QueueKey("flights", "master", 0): 25, QueueKey("flights", "master", 1): 3}


def test_brokers_of_several_clusters_may_have_one_name(tmp_path: Path) -> None:
    for place in ("east", "west", "north"):
        named(make_store(tmp_path / place, [message(n) for n in range(20)]), "broker-a")
    make_store(tmp_path / "new", [])
    named(tmp_path / "new", "broker-b")
    found = find_stores([str(tmp_path / "*")])
    assert sorted(found.replicas) == ["broker-b", "east", "north", "west"]
    assert found.brokers.aliases == {"new": "broker-b"}


def test_different_logs_are_not_taken_for_replicas(tmp_path: Path) -> None:
    one, two = (str(make_store(tmp_path / name, [message(n) for n in range(20)])) for name in ("one", "two"))
    with pytest.raises(OptionError, match=r"brokerName: .*/one and .*/two are different logs, and both are named 'x'"):
        find_stores([one, two], ["x", "x"])
    three = str(named(make_store(tmp_path / "three", [message(n) for n in range(20)]), "two"))
    with pytest.raises(OptionError, match=r"brokerName: .*/two and .*/three are different logs"):
        find_stores([two, three])
    assert find_stores([two, three], ["a", "b"]).replicas == {"a": (two,), "b": (three,)}


def test_paths_that_are_no_stores_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        StoreUnreadable, match=f"{tmp_path}/none can't be read as a store: the directory does not exist"
    ):
        reader_of(tmp_path / "none").partitions()
    with pytest.raises(StoreUnreadable, match="commitlog"):
        reader_of(tmp_path).partitions()


def test_columns_of_kafka_s_source(tmp_path: Path) -> None:
    """Names and types are those of spark-sql-kafka's documentation, "Creating a Kafka Source for Batch Queries"."""
    plain = message(2)
    bare = msgspec.structs.replace(plain, properties=b"")
    store = make_store(tmp_path / "s", [message(1), bare])
    options = parse_options({"path": str(store), "kafkaColumns": "true", "topic": "flights"}, "batch")
    schema = spark_schema(options.columns)
    assert schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    first, second = sorted(rows_of(HalogReader(options, schema)), key=lambda row: int(row["value"]))
    assert first.pop("timestamp") > datetime(2020, 1, 1, tzinfo=UTC)
    assert first == {
        "key": b"k1 n1",
        "value": b"00000001",
        "topic": "flights",
        "partition": 1,
        "offset": 0,
        "timestampType": 1,
        "headers": [
            {"key": "UNIQ_KEY", "value": b"U00000001"},
            {"key": "KEYS", "value": b"k1 n1"},
            {"key": "TAGS", "value": b"tag1"},
        ],
    }
    assert (second["key"], second["headers"]) == (None, [])
    some = parse_options({"path": str(store), "kafkaColumns": "true", "columns": "Offset,value,brokerName"}, "batch")
    assert rows_of(HalogReader(some, spark_schema(some.columns)))[0] == {
        "offset": 0,
        "value": b"00000001",
        "brokerName": "s",
    }
    with pytest.raises(OptionError, match="there is no column 'value'"):
        parse_options({"path": str(store), "columns": "value"}, "batch")


def test_two_brokers_are_read_as_one_table(tmp_path: Path) -> None:
    make_store(tmp_path / "broker-a", [message(n) for n in range(20)])
    make_store(tmp_path / "broker-b", [message(n) for n in range(20, 50)])
    rows = rows_of(reader_of(tmp_path / "broker-*"))
    assert numbers_of(rows) == list(range(50))
    assert {row["brokerName"] for row in rows if int(row["body"]) < 20} == {"broker-a"}
    chosen = reader_of(tmp_path / "broker-*", assign='{"flights":["broker-b:1"]}')
    assert numbers_of(rows_of(chosen)) == list(range(21, 50, 4))
    both = reader_of(tmp_path / "broker-*", assign='{"flights":[1]}')
    assert numbers_of(rows_of(both)) == list(range(1, 50, 4))


def test_deleted_topics_are_not_read_and_keep_their_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(
        tmp_path / "s", [message(n) for n in range(4000)] + [message(n, topic="other") for n in range(8)]
    )
    make_store(store, [], clear="flights")
    assert {row["topic"] for row in rows_of(reader_of(store))} == {"other"}
    assert rows_of(reader_of(store, topic="flights", minPartitions="3")) == []
    with closing(LocalSource([str(store)])) as source:
        assert source.queue_range(QueueKey("flights", "s", 0)) == (1000, 1000)
    read_count = 0
    read = QueueFiles.read

    def counted(queue: QueueFiles, begin: int, end: int) -> Any:
        nonlocal read_count
        read_count += 1
        return read(queue, begin, end)

    monkeypatch.setattr(QueueFiles, "read", counted)
    with closing(LocalSource([str(store)])) as source:
        assert source.queue_range(QueueKey("flights", "s", 0)) == (1000, 1000)
    assert 0 < read_count < 200, "blank entries are not read one by one"
    make_store(store, [message(n) for n in range(4000, 4004)])
    assert numbers_of(rows_of(reader_of(store, topic="flights"))) == list(range(4000, 4004))


@pytest.mark.parametrize("count", [4, 6, 20])
def test_a_stream_notices_that_its_topic_was_created_again(tmp_path: Path, count: int) -> None:
    """With RocketMQ its queue offsets begin at 0 again, and soon reach those that the query has read."""

    def planned(**given: str) -> tuple[StreamPlanner, Any]:
        options = parse_options({"path": str(log.root), "topic": "flights", **given}, "stream")
        source = stack.enter_context(closing(LocalSource(options.paths)))
        return StreamPlanner(source, options, lambda: 0.0), options

    def put(begin: int, end: int) -> None:
        for number in range(begin, end):
            log.put(message(number, queue_id=number % 2))

    log = StoreWriter(tmp_path / "s")
    put(0, 6)
    with ExitStack() as stack:
        planner, _ = planned(startingOffsets="earliest")
        start = planner.initial()
        end = json.loads(json.dumps(planner.latest(start, ReadAllAvailable())))
        assert planner.latest(end, ReadAllAvailable()) == end
        put(6, 8)
        later = planner.latest(end, ReadAllAvailable())
        assert sum(len(task.slices) for task in planner.partitions(end, later)) == 2  # type: ignore[attr-defined,misc]
        log.delete_topic("flights")
        put(100, 100 + count)
        for attempt in (planner, planned()[0]):
            with pytest.raises(RecordsGone, match="created again"):
                attempt.latest(end, ReadAllAvailable())
            with pytest.raises(RecordsGone, match="created again"):
                attempt.partitions(start, end)
        planner, options = planned(failOnDataLoss="false")
        assert planner.partitions(start, end) == []
        tasks = planner.partitions(end, planner.latest(end, ReadAllAvailable()))
        batches = [batch for task in tasks for batch in task.read(options.read_options(("body",)))]
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert numbers_of(rows) == list(range(100, 100 + count))


def test_topics_whose_names_differ_in_case_share_no_view(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [message(0), message(1, topic="Flights"), message(2, topic="other")])
    made: list[str] = []
    view = SimpleNamespace(createOrReplaceTempView=made.append)
    reader = SimpleNamespace(options=lambda **_: SimpleNamespace(load=lambda: view))
    for setting in ("false", "true"):
        spark = SimpleNamespace(
            conf=SimpleNamespace(get=lambda _, setting=setting: setting),
            dataSource=SimpleNamespace(register=lambda _: None),
            read=SimpleNamespace(format=lambda _: reader),
        )
        if setting == "false":
            with pytest.raises(OptionError, match=r"^spark.sql.caseSensitive: the topics Flights, flights would have"):
                catalog_views(cast(SparkSession, spark), str(store))
            assert made == []
        else:
            assert catalog_views(cast(SparkSession, spark), str(store)) == ["Flights", "flights", "other"]
    assert made == ["`Flights`", "`flights`", "`other`"]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The topics of the queues whose ends were searched, in this order."""
    found: list[str] = []
    find_end = QueueFiles.find_end

    def noted(queue: QueueFiles) -> int:
        found.append(Path(queue.directory).parent.name)
        return find_end(queue)

    monkeypatch.setattr(QueueFiles, "find_end", noted)
    return found


def test_planning_examines_only_the_queues_that_are_read(tmp_path: Path, examined: list[str]) -> None:
    messages = [message(n, topic="few" if n % 10 == 0 else f"other-{n % 3}") for n in range(200)]
    store = make_store(tmp_path / "s", messages, segment_size=16 << 10)
    examined.clear()
    assert numbers_of(rows_of(reader_of(store, topic="few"))) == list(range(0, 200, 10))
    assert set(examined) == {"few"}
    examined.clear()
    assert len(tasks_of(reader_of(store, subscribePattern="fe.*"))) == 1
    assert set(examined) == {"few"}
    examined.clear()
    with closing(LocalSource([str(store)])) as source:
        planner = StreamPlanner(source, parse_options({"path": str(store), "topic": "few"}, "stream"))
        end = planner.initial()
        assert planner.latest(end, planner.default_limit())["few"] == end["few"]
    assert set(examined) == {"few"}


def test_a_stream_of_a_part_of_the_queues_examines_only_these(tmp_path: Path, examined: list[str]) -> None:
    messages = [message(n, topic=f"topic-{n % 5}", queue_id=n // 5) for n in range(5 * 260)]
    store = make_store(tmp_path / "s", messages, queue_entry_count=20)
    for topic_count, examined_count in ((1, 260), (2, 5 * 260)):  # a fifth, and more than a quarter
        topics = frozenset(f"topic-{number}" for number in range(topic_count))
        with closing(LocalSource([str(store)])) as source:
            for _ in range(3):
                source.refresh()
                examined.clear()
                for queue in source.queues(topics):
                    source.queue_range(queue)
            assert len(examined) == examined_count


def test_queues_of_an_unchanged_log_are_not_read_again(
    tmp_path: Path, examined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "s", [message(n, queue_id=n % 300) for n in range(900)], queue_entry_count=20)
    now_s = 100.0
    monkeypatch.setattr(log_reader, "monotonic", lambda: now_s)
    one = QueueKey("flights", "s", 7)
    with closing(LocalSource([str(store)])) as source:

        def look() -> tuple[bool, int]:
            """Whether the source says that something may have changed, and of how many queues the end is searched."""
            examined.clear()
            has_changed = source.refresh()
            for queue in source.queues(None):
                source.queue_range(queue)
            return has_changed, len(examined)

        assert look() == (True, 300)
        assert look() == (True, 300)  # now the log's end is known
        assert look() == (True, 300)  # the log may have grown while the queues were read
        assert look() == (False, 0)
        assert look() == (False, 0)
        make_store(store, [message(900, queue_id=7)], queue_entry_count=20)
        assert look() == (True, 300)
        assert source.queue_range(one) == (0, 4)
        assert look() == (True, 300)
        assert look() == (False, 0)
        make_store(store, [], queue_entry_count=20, clear="flights")  # which writes nothing into the log
        now_s += 14
        assert look() == (False, 0)
        now_s += 1
        assert look() == (True, 300)
        assert source.queue_range(one) == (4, 4)


def test_longest_replica_is_read(tmp_path: Path) -> None:
    behind, ahead = tmp_path / "slave-1", tmp_path / "slave-2"
    make_store(behind, [message(n) for n in range(100)])
    shutil.copytree(behind, ahead)
    make_store(ahead, [message(n) for n in range(100, 150)])
    reader = reader_of(f"{behind},{ahead}", brokerName="a,a")
    assert numbers_of(rows_of(reader)) == list(range(150))
    source = LocalSource([str(behind), str(ahead)], ["a", "a"])
    shutil.rmtree(ahead)
    source.refresh()
    assert max(source.queue_range(queue).end for queue in source.queues(None)) == 25
    make_store(ahead, [message(n) for n in range(160)])
    source.refresh()
    assert max(source.queue_range(queue).end for queue in source.queues(None)) == 40
    source.close()
    shutil.rmtree(ahead)
    shutil.rmtree(behind)
    with pytest.raises(StoreUnreadable):
        rows_of(reader)


def test_replica_whose_disk_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_store(tmp_path / "master", [message(n) for n in range(100)]), tmp_path / "slave"
    shutil.copytree(first, second)
    source = LocalSource([str(first), str(second)], ["a", "a"])
    broken = [second]
    real = Segments.buffer

    def buffer(self: Segments, segment: Segment) -> memoryview | None:
        if self.directory.parent in broken:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, segment)

    monkeypatch.setattr(Segments, "buffer", buffer)
    monkeypatch.setattr(log_reader, "monotonic", lambda: 0.0)  # queues are read again after some time in any case
    make_store(first, [message(n) for n in range(100, 120)])
    assert source.refresh()
    assert sum(source.queue_range(queue).end for queue in source.queues(None)) == 120
    source.refresh()  # the reader of the other replica compares the end of the log with the one at its last refresh
    assert not source.refresh()
    assert [line.split(" error=")[0] for line in caplog.messages] == [
        f"source.replica_unreadable path={second} broker=a"
    ]
    broken.append(first)
    with pytest.raises(StoreUnreadable, match="Input/output error"):
        source.refresh()
    broken.clear()
    source.refresh()
    assert sum(source.queue_range(queue).end for queue in source.queues(None)) == 120
    source.close()


@pytest.mark.parametrize("by_queue", [True, False])
def test_task_switches_replica_when_files_vanish(
    tmp_path: Path, by_queue: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "master", tmp_path / "slave"
    make_store(first, [message(n, body=b"%08d" % n * 100) for n in range(200)], segment_size=16 << 10)
    shutil.copytree(first, second)
    given = {"brokerName": "a,a", "maxRecordsPerBatch": "10", **(BY_QUEUE if by_queue else {})}
    reader = reader_of(f"{first},{second}", ["body"], **given)
    tasks = tasks_of(reader)
    found: list[bytes] = []
    for task in tasks:
        batches: Iterator[pa.RecordBatch] = reader.read(task)
        found += next(batches).column("body").to_pylist()
        shutil.rmtree(first, ignore_errors=True)
        for batch in batches:
            assert batch.schema.names == ["body"]
            found += batch.column("body").to_pylist()
    assert sorted(int(body[:8]) for body in found) == list(range(200))
    assert "source.replica_failed" in caplog.text
    shutil.rmtree(second)
    with pytest.raises(StoreUnreadable):
        rows_of(reader, tasks)


@pytest.mark.parametrize("by", [{}, BY_QUEUE], ids=["by range", "by queue"])
@pytest.mark.parametrize("loss", ["true", "false"])
def test_records_deleted_in_one_replica_are_read_from_another(tmp_path: Path, loss: str, by: dict[str, str]) -> None:
    """Also with failOnDataLoss=false: no record is left out that still exists anywhere."""
    first, second = tmp_path / "master", tmp_path / "slave"
    make_store(first, [message(n) for n in range(300)], segment_size=16 << 10)
    shutil.copytree(first, second)
    reader = reader_of(f"{first},{second}", brokerName="a,a", failOnDataLoss=loss, **by)
    tasks = tasks_of(reader)
    with live_store(first, segment_size=16 << 10) as live:
        assert live.clean() > 0
    assert numbers_of(rows_of(reader, tasks)) == list(range(300))  # planned before
    assert numbers_of(rows_of(reader)) == list(range(300))  # planned after: of equals, the one that has more


def test_stream_survives_restart_and_resync_of_its_slave(tmp_path: Path) -> None:
    """The slave's directory is closed and opened, then emptied and filled again under a running stream."""
    master, slave = tmp_path / "master", tmp_path / "slave"
    make_store(master, [message(n) for n in range(100)], segment_size=16 << 10)
    shutil.copytree(master, slave)
    given = {"path": str(slave), "startingOffsets": "earliest"}
    patient = {**given, "fetchOffset.numRetries": "200", "fetchOffset.retryIntervalMs": "50"}
    options = parse_options(patient, "stream")
    planner = StreamPlanner(LocalSource(options.paths), options)
    reader = reader_of(slave, ["body"])
    found: list[int] = []

    def trigger(at: dict[str, Any]) -> dict[str, Any]:
        end: dict[str, Any] = json.loads(json.dumps(planner.latest(at, planner.default_limit())))
        found.extend(numbers_of(rows_of(reader, planner.partitions(at, end))))
        return end

    at = trigger(planner.initial())
    make_store(slave, [message(n) for n in range(100, 150)], segment_size=16 << 10)  # recovered, written, closed
    make_store(master, [message(n) for n in range(100, 150)], segment_size=16 << 10)
    at = trigger(at)
    assert found == list(range(150))

    def empty_the_slave() -> None:
        for folder in ("commitlog", "consumequeue", "index"):
            for file in (slave / folder).rglob("*"):
                if file.is_file():
                    file.unlink()

    def fill_the_slave() -> None:
        shutil.copytree(master / "commitlog", slave / "commitlog", dirs_exist_ok=True)
        shutil.copytree(master / "consumequeue", slave / "consumequeue", dirs_exist_ok=True)

    empty_the_slave()
    impatient = StreamPlanner(
        LocalSource(options.paths), parse_options({**given, "fetchOffset.numRetries": "0"}, "stream")
    )
    with pytest.raises(RecordsGone, match="flights queue 0 of slave"):
        impatient.latest(at, planner.default_limit())
    make_store(master, [message(n) for n in range(150, 200)], segment_size=16 << 10)
    timer = threading.Timer(0.3, fill_the_slave)
    timer.start()
    at = trigger(at)
    timer.join()
    trigger(at)
    assert sorted(found) == list(range(200))
    planner.close()


# ---- retention between planning and reading


@pytest.mark.parametrize("by_queue", [True, False])
def test_fail_on_data_loss_for_records_deleted_after_planning(
    tmp_path: Path, by_queue: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "broker-a"
    named = BY_QUEUE if by_queue else {}
    with live_store(path, segment_size=16 << 10) as live:
        live.put([message(n) for n in range(500)])
        strict, lenient = reader_of(path, **named), reader_of(path, failOnDataLoss="false", **named)
        tasks = tasks_of(strict)
        assert live.clean() > 1
        first = records_of(path)[0]
        with pytest.raises(RecordsGone, match="failOnDataLoss") as caught:
            rows_of(strict, tasks)
        if by_queue:
            assert "flights queue 0" in caught.value.what
            assert caught.value.first == 0
        with caplog.at_level(logging.WARNING, "ha.spark"):
            assert numbers_of(rows_of(lenient, tasks)) == list(range(int(first.body), 500))
        assert "source.records_missing" in caplog.text
        # A new plan starts with the existing records.
        assert numbers_of(rows_of(reader_of(path, **named))) == list(range(int(first.body), 500))


def test_a_stream_over_a_log_that_grows_rolls_and_is_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "broker-a"
    with live_store(path, segment_size=16 << 10) as live:
        live.put([message(n) for n in range(10)])
        options = parse_options({"path": str(path), "startingOffsets": "earliest"}, "stream")
        planner = StreamPlanner(LocalSource(options.paths), options)
        reader = reader_of(path, ["body"])
        at = planner.initial()
        found: list[int] = []
        for begin in range(10, 400, 30):
            end = planner.latest(at, planner.default_limit())
            found += numbers_of(rows_of(reader, planner.partitions(at, end)))
            at = json.loads(json.dumps(end))
            live.clean()  # only what was read
            live.put([message(n, topic="flights" if begin < 200 else "later") for n in range(begin, begin + 30)])
        end = planner.latest(at, planner.default_limit())
        found += numbers_of(rows_of(reader, planner.partitions(at, end)))
        assert planner.latest(end, planner.default_limit()) == end
        assert sorted(found) == list(range(400))
        assert records_of(path)[0].physical_offset > 0
        planner.close()


def test_damaged_records_are_reported_skipped_or_fatal(tmp_path: Path) -> None:
    from ha.errors import CorruptLog

    path = make_store(tmp_path / "broker-a", [message(n) for n in range(100)])
    victim = records_of(path)[50]
    [log] = (path / "commitlog").iterdir()
    with log.open("r+b") as file:
        file.seek(victim.physical_offset + 88)  # its body
        file.write(b"x")
    rows = rows_of(reader_of(path, ["body", "crcOk", "physicalOffset", "topic"], topic="flights"))
    assert len(rows) == 100
    assert [row["physicalOffset"] for row in rows if not row["crcOk"]] == [victim.physical_offset]
    rows = rows_of(reader_of(path, ["body"], verifyCrc="true", damagedRecords="skip"))
    assert numbers_of(rows) == [n for n in range(100) if n != int(victim.body)]
    with pytest.raises(CorruptLog, match=str(log)):
        rows_of(reader_of(path, ["body"], verifyCrc="true", damagedRecords="fail"))


def test_keys_are_found_where_an_index_file_is_missing(tmp_path: Path) -> None:
    """For example because the index was off for a while: the files say up to where each of them has all keys."""
    store = make_store(
        tmp_path / "store", [message(number) for number in range(300)], index_slot_count=50, index_entry_count=200
    )
    files = sorted((store / "index").iterdir())
    assert len(files) > 4
    files[2].unlink()
    with LogReader(store) as reader:
        for number in range(0, 300, 10):
            options = ReadOptions(columns=("body",), where=RowFilter(keys=frozenset({f"k{number}"})))
            found = [row for batch in reader.read_range(0, reader.end_offset(), options) for row in batch.to_pylist()]
            assert found == [{"body": b"%08d" % number}]
