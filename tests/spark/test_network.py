"""The log over the network: brokers send what was stored, for every kind of request; errors name the option."""

import logging
import pickle
import threading
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import pyarrow as pa
import pytest
from anyio.from_thread import start_blocking_portal
from pyspark.sql.streaming.datasource import ReadAllAvailable
from trio.testing import MockClock

from ha.arrow.read_options import ReadOptions, RowFilter
from ha.client import Admin, Message, MessageQueue, Producer, PullConsumer, PullStatus, RawPull, ReadFrom
from ha.client.routes import Routes
from ha.errors import BrokerError, ConnectionFailed, NameServersUnreachable, OptionError, RecordsGone, RouteNotFound
from ha.protocol.batch import encode_batch
from ha.protocol.codes import ResponseCode, SysFlag
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message as Record
from ha.protocol.record_encoding import encode_record
from ha.protocol.remoting import RemotingCommand
from ha.spark.source.batch_reader import HalogReader
from ha.spark.source.log_source import QueueKey, QueueRange, QueueSlice
from ha.spark.source.network import NetworkPartition, NetworkSettings, NetworkSource, _read_slice, network_settings
from ha.spark.source.network_pull import PullSettings, Slot, pull_slots, with_retries
from ha.spark.source.offsets import StreamOffset, decode_stream, encode_stream
from ha.spark.source.options import parse_options
from ha.spark.source.schema import spark_schema
from ha.spark.source.stream_reader import HalogStreamReader, StreamPlanner
from scripts.nodes import Cluster, reserved_ports
from tests.arrow.stores import STORE_HOST
from tests.spark.clusters import running_cluster

COLUMNS = (
    "topic",
    "brokerName",
    "queueId",
    "queueOffset",
    "physicalOffset",
    "body",
    "tags",
    "keys",
    "storeTimestamp",
    "uniqKey",
)
COUNT = 1500


def message(number: int) -> Message:
    """Of sizes from 1 byte to 100 KB, so that answers end by count and by size."""
    size = 100_000 if number % 97 == 0 else 1 + number % 1000
    return Message("flights", (b"%d " % number).ljust(size, b"x"), tags=f"T{number % 3}", keys=(f"k{number}", "all"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("network"), slaveReadEnable="true") as started:
        anyio.run(fill, started.name_server_address)
        yield started


async def fill(servers: str) -> None:
    async with Producer(servers) as producer:
        await producer.send(Message("other", b"x"))
        queues = await producer.queues("flights")
        for first in range(0, COUNT, 50):
            queue = queues[first // 50 % 2]  # two of the queues; the others stay empty
            await producer.send_batch([message(number) for number in range(first, first + 50)], queue=queue)


def settings(nodes: Cluster, **more: object) -> NetworkSettings:
    return NetworkSettings(servers=(nodes.name_server_address,), pull_timeout_s=5, **more)  # type: ignore[arg-type]


async def pulled_one_by_one(servers: str, queue: MessageQueue) -> list[dict[str, object]]:
    """The queue as the SDK's plain codec reads it."""
    rows: list[dict[str, object]] = []
    async with PullConsumer(servers, group="plain") as consumer:
        at, end = 0, await consumer.max_offset(queue)
        while at < end:
            result = await consumer.pull(queue, at)
            rows += [
                {
                    "topic": found.topic,
                    "brokerName": queue.broker_name,
                    "queueId": queue.queue_id,
                    "queueOffset": found.queue_offset,
                    "physicalOffset": found.physical_offset,
                    "body": found.body,
                    "tags": found.tags,
                    "keys": list(found.keys),
                    "storeTimestamp": found.store_timestamp_ms * 1000,
                    "uniqKey": found.message_id,
                }
                for found in result.messages
            ]
            at = result.next_offset
    return rows


def rows_of(partition: NetworkPartition, options: ReadOptions) -> list[dict[str, object]]:
    table = pa.Table.from_batches(partition.read(options))
    at = table.schema.get_field_index("storeTimestamp")
    if at >= 0:
        table = table.set_column(at, "storeTimestamp", table.column(at).cast(pa.int64()))
    rows: list[dict[str, object]] = table.to_pylist()
    return rows


@pytest.mark.processes
@pytest.mark.parametrize("read_from", list(ReadFrom))
def test_a_queue_reads_the_same_as_with_the_plain_consumer(nodes: Cluster, read_from: ReadFrom) -> None:
    source = NetworkSource(settings(nodes, read_from=read_from))
    try:
        queues = source.queues(frozenset({"flights", "nobody knows it"}))
        assert [queue.queue_id for queue in queues] == [0, 1, 2, 3]
        assert source.brokers() == ("broker-a",)
        assert source.brokers().are_registered
        assert source.refresh()
        assert source.brokers().are_registered
        assert {"flights", "other"} <= set(source.topics())
        assert {"TBW102", "broker-a"}.isdisjoint(source.topics())
        assert source.queue_range(queues[0]) == QueueRange(0, COUNT // 2)
        assert source.queue_range(queues[3]) == QueueRange(0, 0)
        assert source.range_partitions(1, 1, None) is None
        slices = [QueueSlice(queues[1], 0, COUNT // 2), QueueSlice(queues[0], 3, 700), QueueSlice(queues[2], 0, 0)]
        partition = pickle.loads(pickle.dumps(source.queue_partition(slices)))
    finally:
        source.close()
    plain = {
        number: anyio.run(pulled_one_by_one, nodes.name_server_address, MessageQueue("flights", "broker-a", number))
        for number in (0, 1)
    }
    assert len(plain[0]) == len(plain[1]) == COUNT // 2
    found = rows_of(partition, ReadOptions(columns=COLUMNS, batch_rows=100))
    assert found == plain[1] + plain[0][3:700]


@pytest.mark.processes
def test_tags_are_asked_of_the_broker_and_each_row_comes_once(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = PullConsumer.pull_raw

    async def pull_raw(self: PullConsumer, *args: object, **more: object) -> RawPull:
        asked.append(more["tags"])
        return await real(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(PullConsumer, "pull_raw", pull_raw)
    # So small that answers reach behind their slot.
    monkeypatch.setattr("ha.spark.source.network_pull.FILTERED_SLOT_ENTRIES", 70)
    partition = NetworkPartition((QueueSlice(QueueKey("flights", "broker-a", 0), 10, 740),), settings(nodes))
    where = RowFilter(tags=frozenset({"T1"}))
    found = rows_of(partition, ReadOptions(columns=("queueOffset", "tags", "body"), where=where))
    assert set(asked) == {"T1"}
    plain = anyio.run(pulled_one_by_one, nodes.name_server_address, MessageQueue("flights", "broker-a", 0))
    wanted = [row for row in plain[10:740] if row["tags"] == "T1"]
    assert [(row["queueOffset"], row["body"]) for row in found] == [(row["queueOffset"], row["body"]) for row in wanted]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"tags": "T1 || T2"}, lambda row: row["tags"] in ("T1", "T2")),
        ({"tags": "*"}, lambda row: True),
        ({"keys": "k7 k8 k103"}, lambda row: row["keys"][0] in ("k7", "k8", "k103")),
        ({"tags": "T1", "keys": "k7 k8"}, lambda row: row["keys"][0] == "k7"),
        ({"tags": "T1,T2"}, lambda row: False),
    ],
)
def test_options_select_messages_by_tag_and_key(
    nodes: Cluster, given: dict[str, str], wanted: Callable[[dict[str, Any]], bool]
) -> None:
    """The positions of a stream move past messages that are not selected."""
    plain = [
        row
        for number in (0, 1)
        for row in anyio.run(pulled_one_by_one, nodes.name_server_address, MessageQueue("flights", "broker-a", number))
    ]
    given = {"servers": nodes.name_server_address, "topic": "flights", **given}
    schema = spark_schema(("queueId", "queueOffset", "tags", "keys"))
    batch = HalogReader(parse_options(given, "batch"), schema)
    stream = HalogStreamReader(parse_options({**given, "startingOffsets": "earliest"}, "stream"), schema)
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    for reader, tasks in ((batch, batch.partitions()), (stream, stream.partitions(start, end))):
        rows = [row for task in tasks for rows in reader.read(task) for row in rows.to_pylist()]
        assert rows == [{name: row[name] for name in schema.names} for row in plain if wanted(row)]
    assert end["flights"] == {"0": COUNT // 2, "1": COUNT // 2, "2": 0, "3": 0}
    stream.stop()


@pytest.mark.processes
def test_a_time_is_found_to_the_message(nodes: Cluster) -> None:
    queue = MessageQueue("flights", "broker-a", 0)
    times = [row["storeTimestamp"] // 1000 for row in anyio.run(pulled_one_by_one, nodes.name_server_address, queue)]  # type: ignore[operator]
    source = NetworkSource(settings(nodes))
    try:
        key = QueueKey(*msgspec.structs.astuple(queue))
        for time_ms in (0, times[0], times[200], times[200] + 1, times[-1]):
            assert source.offset_for_time(key, time_ms) == next(
                n for n, stored in enumerate(times) if stored >= time_ms
            )
        assert source.offset_for_time(key, times[-1] + 1) is None
        assert source.offset_for_time(key._replace(queue_id=3), 0) is None
    finally:
        source.close()


@pytest.mark.processes
def test_missing_range_is_an_error_or_skipped(nodes: Cluster) -> None:
    piece = QueueSlice(QueueKey("flights", "broker-a", 0), COUNT // 2 - 5, COUNT // 2 + 5)
    partition = NetworkPartition((piece,), NetworkSettings(servers=(nodes.name_server_address,), pull_timeout_s=1))
    with pytest.raises(RecordsGone, match="flights queue 0 of broker-a") as caught:
        list(partition.read(ReadOptions(columns=("queueOffset",))))
    assert (caught.value.first, caught.value.end) == (COUNT // 2, COUNT // 2 + 5)


@pytest.mark.processes
def test_query_goes_on_after_one_of_its_topics_was_deleted(nodes: Cluster) -> None:
    """It raised RouteNotFound at each restart, even with failOnDataLoss=false."""

    async def delete() -> None:
        async with Producer(nodes.name_server_address) as producer:
            await producer.send(Message("gone", b"x"))
        async with Admin(nodes.name_server_address) as admin:
            await admin.delete_topic("gone")

    anyio.run(delete)
    source = NetworkSource(settings(nodes))
    try:
        gone, other = QueueKey("gone", "broker-a", 0), QueueKey("other", "broker-a", 0)
        end = source.queue_range(other).end
        positions = {gone: 5, other: end}
        brokers = source.brokers()
        start = encode_stream(StreamOffset(positions=positions), brokers)
        given = {"servers": nodes.name_server_address, "subscribe": "gone,other", "fetchOffset.numRetries": "1"}
        planner = StreamPlanner(source, parse_options(given, "stream"))
        with pytest.raises(RecordsGone, match="its topic was deleted"):
            planner.latest(start, ReadAllAvailable())
        planner = StreamPlanner(source, parse_options({**given, "failOnDataLoss": "false"}, "stream"))
        after = decode_stream(planner.latest(start, ReadAllAvailable()), brokers)
        assert gone not in after.positions
        assert after.positions[other] == end
        with pytest.raises(ConnectionFailed, match="not registered"):
            source.queue_range(QueueKey("gone", "broker-that-is-away", 0))
        # A batch that was planned before.
        task = source.queue_partition([QueueSlice(gone, 0, 1), QueueSlice(other, 0, end)])
        with pytest.raises(RecordsGone, match=r"gone queue 0 of broker-a: offsets 0 to 0 .* its topic was deleted"):
            list(task.read(ReadOptions()))
        assert sum(batch.num_rows for batch in task.read(ReadOptions(fail_on_data_loss=False))) == end
    finally:
        source.close()


@pytest.mark.processes
def test_stream_keeps_its_position_while_name_servers_know_no_broker(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers register every 30 s with a name server that was restarted. It read all messages again."""

    async def nobody(self: PullConsumer) -> list[str]:
        return []

    source = NetworkSource(settings(nodes))
    try:
        given = {"servers": nodes.name_server_address, "subscribe": "flights", "startingOffsets": "earliest"}
        start = StreamPlanner(source, parse_options(given, "stream")).initial()
        end = StreamPlanner(source, parse_options(given, "stream")).latest(start, ReadAllAvailable())
        monkeypatch.setattr(PullConsumer, "broker_names", nobody)
        planner = StreamPlanner(source, parse_options(given, "stream"))
        assert planner.latest(end, ReadAllAvailable()) == end
        tasks = cast(list[NetworkPartition], planner.partitions(start, end))
        assert sum(part.entry_count for task in tasks for part in task.slices) == COUNT
    finally:
        source.close()


@pytest.mark.processes
def test_batch_names_the_brokers_that_it_reads(nodes: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ha.spark")
    options = parse_options({"servers": nodes.name_server_address, "subscribe": "flights"}, "batch")
    assert HalogReader(options, spark_schema(options.columns)).partitions()
    assert caplog.messages == ["source.brokers_read brokers=broker-a"]


@pytest.mark.processes
def test_stream_reads_a_broker_that_registers_later(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first message, also with startingOffsets=latest."""
    first_queues = PullConsumer.queues
    has_second = False

    async def broker_names(self: PullConsumer) -> list[str]:
        return ["broker-a", "broker-b"] if has_second else ["broker-a"]

    async def queues(self: PullConsumer, topic: str) -> list[MessageQueue]:
        found = await first_queues(self, topic)
        return [*found, MessageQueue(topic, "broker-b", 0)] if has_second else found

    async def end(self: PullConsumer, queue: MessageQueue) -> int:
        return 7

    async def begin(self: PullConsumer, queue: MessageQueue) -> int:
        return 3

    for name, answer in (
        ("broker_names", broker_names),
        ("queues", queues),
        ("max_offset", end),
        ("min_offset", begin),
    ):
        monkeypatch.setattr(PullConsumer, name, answer)
    source = NetworkSource(settings(nodes))
    try:
        planner = StreamPlanner(source, parse_options({"servers": "s:1", "subscribe": "flights"}, "stream"))
        at = planner.latest(planner.initial(), ReadAllAvailable())
        has_second = True
        after = planner.latest(at, ReadAllAvailable())
        [task] = cast(list[NetworkPartition], planner.partitions(at, after))
        assert task.slices == (QueueSlice(QueueKey("flights", "broker-b", 0), 3, 7),)
    finally:
        source.close()


def test_source_is_not_opened_without_the_other_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name servers know no broker, then the first one that registers, then all."""
    answers = [[], ["a"], ["a", "b"]]

    async def broker_names(self: PullConsumer) -> list[str]:
        return answers.pop(0)

    monkeypatch.setattr(PullConsumer, "broker_names", broker_names)
    with pytest.raises(ConnectionFailed, match=r"^s:1;s:2: no broker is registered"):
        NetworkSource(NetworkSettings(servers=("s:1", "s:2")))
    assert answers == [["a"], ["a", "b"]]


@pytest.mark.processes
def test_stream_waits_for_a_broker_that_restarts(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it plans a batch. It raised RouteNotFound."""
    real_names, real_end = PullConsumer.broker_names, PullConsumer.max_offset
    away = [True, True]

    async def broker_names(self: PullConsumer) -> list[str]:
        return [] if away else await real_names(self)

    async def max_offset(self: PullConsumer, queue: MessageQueue) -> int:
        if away:
            away.pop()
            raise RouteNotFound("flights", "a", 17, "no route")
        return await real_end(self, queue)

    source = NetworkSource(settings(nodes))
    try:
        monkeypatch.setattr(PullConsumer, "broker_names", broker_names)
        monkeypatch.setattr(PullConsumer, "max_offset", max_offset)
        away.append(True)
        assert source.queue_range(QueueKey("flights", "broker-a", 0)) == QueueRange(0, COUNT // 2)
    finally:
        source.close()


@pytest.mark.processes
def test_stream_goes_on_after_a_restart_of_the_name_server(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[str] = []
    real = Routes.ask_name_servers

    async def ask(self: Routes, command: RemotingCommand) -> RemotingCommand:
        if failures:
            raise NameServersUnreachable("a:1", failures.pop())
        return await real(self, command)

    monkeypatch.setattr(Routes, "ask_name_servers", ask)
    source = NetworkSource(settings(nodes))
    try:
        failures.append("Connection refused")
        assert source.refresh()
        failures.append("Connection refused")
        assert "flights" in source.topics()
    finally:
        source.close()


def test_name_servers_that_do_not_answer_name_the_option() -> None:
    with reserved_ports(1) as (port,):
        nobody = f"127.0.0.1:{port}"
        with pytest.raises(OptionError, match=f"servers: .*{nobody}.*Connection refused") as caught:
            NetworkSource(NetworkSettings(servers=(nobody,)))
    assert caught.value.option == "servers"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("readFrom", "nearest"),
        ("pullTimeout", "soon"),
        ("pullTimeout", "1ms"),
        ("pullBatchSize", "0"),
        ("pullBatchSize", "4097"),
        ("pullBatchSize", "many"),
    ],
)
def test_invalid_options(option: str, value: str) -> None:
    with pytest.raises(OptionError) as caught:
        network_settings(["a:1"], {option: value})
    assert caught.value.option == option


def test_options_as_given() -> None:
    given = {"readFrom": "Slave", "pullTimeout": "1500ms", "pullBatchSize": "64"}
    assert network_settings(["a:1", "b:2"], given) == NetworkSettings(
        servers=("a:1", "b:2"), read_from=ReadFrom.SLAVE, pull_timeout_s=1.5, pull_count=64
    )


class FakeConsumer:
    """A queue of [low, high) whose broker answers with at most `most` messages; a body is the offsets it holds."""

    def __init__(self, low: int, high: int, most: int) -> None:
        self.low, self.high, self.most = low, high, most
        self.waiting = self.waiting_most = 0
        self.failures: list[Exception] = []

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
        self.waiting += 1
        self.waiting_most = max(self.waiting, self.waiting_most)
        await anyio.lowlevel.checkpoint()
        self.waiting -= 1
        if self.failures:
            raise self.failures.pop()
        if at < self.low:
            return RawPull(PullStatus.OFFSET_ILLEGAL, b"", self.low, self.low, self.high, 0)
        if at >= self.high:
            return RawPull(PullStatus.NO_NEW_MSG, b"", self.high, self.low, self.high, 0)
        count = min(self.most, max_messages, self.high - at)
        body = b"".join(b"%d," % offset for offset in range(at, at + count))
        return RawPull(PullStatus.FOUND, body, at + count, self.low, self.high, 0)


QUEUE = MessageQueue("T", "a", 0)


def pull(consumer: FakeConsumer, begin: int, end: int, pulls: PullSettings) -> tuple[list[int], int, int]:
    """All offsets from `begin` to `end`, how many are gone, and how many calls it took."""
    found: list[int] = []
    gone = calls = 0
    while begin < end:
        slots = anyio.run(pull_slots, cast(PullConsumer, consumer), QUEUE, begin, end, pulls)
        found += [int(text) for slot in slots for body in slot.bodies for text in body.split(b",") if text]
        gone += sum(slot.gone for slot in slots)
        begin = slots[-1].end
        calls += 1
    return found, gone, calls


@pytest.mark.parametrize("most", [1, 3, 8, 32])
@pytest.mark.parametrize(("begin", "end"), [(0, 100), (7, 64), (31, 33), (5, 6)])
def test_offsets_are_read_once_in_order_with_short_answers(most: int, begin: int, end: int) -> None:
    consumer = FakeConsumer(0, 100, most)
    found, gone, calls = pull(consumer, begin, end, PullSettings(lanes=3, slot_entries=8))
    assert (found, gone) == (list(range(begin, end)), 0)
    assert calls == -(-(end - begin) // 24)
    assert consumer.waiting_most == min(3, -(-(end - begin) // 8))


def test_deleted_messages_are_an_error_or_counted() -> None:
    with pytest.raises(RecordsGone) as caught:
        pull(FakeConsumer(50, 100, 8), 0, 100, PullSettings())
    assert (caught.value.first, caught.value.end) == (0, 32)
    found, gone, _ = pull(FakeConsumer(50, 100, 8), 0, 100, PullSettings(fail_on_data_loss=False))
    assert (found, gone) == (list(range(50, 100)), 50)


class LeavingOut:
    """A queue of 64 messages whose broker can't read those of `lost`; the entries of `blank` are no messages."""

    topic = "T"

    def __init__(self, lost: range, blank: range) -> None:
        self.lost, self.blank = lost, blank

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
        end = min(at + max_messages, 64)
        there = [offset for offset in range(at, end) if offset not in self.lost and offset not in self.blank]
        body = b"".join(
            encode_record(
                Record(self.topic, 0, b"x"),
                queue_offset=n,
                physical_offset=n,
                store_timestamp_ms=n,
                store_host=STORE_HOST,
            )
            for n in there
        )
        if there:
            return RawPull(PullStatus.FOUND, body, end, 0, 64, 0, "FOUND")
        remark = "MESSAGE_WAS_REMOVING" if set(range(at, end)) & set(self.lost) else "NO_MATCHED_MESSAGE"
        return RawPull(PullStatus.NO_MATCHED_MSG, b"", end, 0, 64, 0, remark)


@pytest.mark.parametrize("entries", [5, 32])
@pytest.mark.parametrize("topic", ["T", "%LMQ%T"])
def test_messages_that_the_broker_leaves_out_are_an_error_or_counted(entries: int, topic: str) -> None:
    def gone(consumer: LeavingOut, *, fail_on_data_loss: bool = True) -> int:
        settings = PullSettings(slot_entries=entries, fail_on_data_loss=fail_on_data_loss)
        queue = MessageQueue(topic, "a", 0)
        found = anyio.run(pull_slots, cast(PullConsumer, consumer), queue, 0, 64, settings)
        return sum(slot.gone for slot in found)

    assert gone(LeavingOut(range(0), range(5, 12))) == 0
    if topic == "T":
        with pytest.raises(RecordsGone, match="or are damaged") as caught:
            gone(LeavingOut(range(40, 50), range(5, 12)))
        assert 40 <= caught.value.first < caught.value.end <= 50
        assert gone(LeavingOut(range(40, 50), range(5, 12)), fail_on_data_loss=False) == 10


class AwayFor(LeavingOut):
    """A broker that restarts: name servers don't know its topic for the first `pulls` pulls, and the broker itself for
    the first `looks` looks."""

    def __init__(self, pulls: int, looks: int) -> None:
        super().__init__(range(0), range(0))
        self.pulls, self.looks = pulls, looks

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
        if self.pulls > 0:
            self.pulls -= 1
            raise RouteNotFound("T", "a", 17, "no route")
        return await super().pull_raw(queue, at, max_messages=max_messages, tags=tags)

    async def broker_names(self) -> list[str]:
        self.looks -= 1
        return [] if self.looks >= 0 else ["a"]


def read_away(pulls: int, looks: int, *, timeout_s: float = 30.0, **options: Any) -> int:
    """The number of rows read from such a broker, whose queue has 64 messages."""
    return read_from(AwayFor(pulls, looks), timeout_s=timeout_s, **options)


def read_from(consumer: LeavingOut, *, timeout_s: float = 30.0, **options: Any) -> int:
    """The number of rows that a task reads from the queue."""
    return len(values_from(consumer, "T", 0, 64, timeout_s=timeout_s, columns=("queueOffset",), **options))


def values_from(
    consumer: LeavingOut,
    topic: str,
    begin: int,
    end: int,
    *,
    timeout_s: float = 30.0,
    pull_count: int = 64,
    **options: Any,
) -> list[dict[str, Any]]:
    """The rows that a task reads of [begin, end)."""
    settings = NetworkSettings(servers=("s:1",), pull_timeout_s=timeout_s, pull_count=pull_count)
    with start_blocking_portal("asyncio") as portal:
        client = SimpleNamespace(portal=portal, consumer=consumer, call_with_retries=portal.call)
        piece = QueueSlice(QueueKey(topic, "a", 0), begin, end)
        batches = _read_slice(cast(Any, client), piece, settings, ReadOptions(**options))
        return [row for batch in batches for row in batch.to_pylist()]


def test_task_logs_messages_that_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    """One line per slice, with the counts of all its pulls; blank entries are not messages."""
    assert read_from(LeavingOut(range(0), range(5, 12)), fail_on_data_loss=False) == 57
    assert caplog.messages == []
    assert read_from(LeavingOut(range(40, 50), range(5, 12)), fail_on_data_loss=False) == 47
    assert caplog.messages == ["source.records_missing queue='T queue 0 of a' damaged=0 skipped=0 gone=10"]


class Damaged(LeavingOut):
    """A queue of 64 messages; the body CRCs of the first three are wrong."""

    def __init__(self) -> None:
        super().__init__(range(0), range(0))

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
        raw = await super().pull_raw(queue, at, max_messages=max_messages, tags=tags)
        sized = b"\0\0\0\x01"
        return msgspec.structs.replace(raw, body=raw.body.replace(sized + b"x", sized + b"y", max(0, 3 - at)))


@pytest.mark.parametrize("pull_count", [2, 64])
@pytest.mark.parametrize(("on_damage", "skipped"), [("skip", 3), ("report", 0)])
def test_task_logs_damaged_messages(
    on_damage: str, skipped: int, pull_count: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = values_from(Damaged(), "T", 0, 64, pull_count=pull_count, verify_crc=True, on_damage=on_damage)
    assert len(rows) == 64 - skipped
    assert caplog.messages == [f"source.records_missing queue='T queue 0 of a' damaged=3 skipped={skipped} gone=0"]


class InBatches(LeavingOut):
    """A queue of 64 messages in inner batches of 10 (the last of 4), which the broker sends whole."""

    def __init__(self) -> None:
        super().__init__(range(0), range(0))

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
        body = b""
        base = at // 10 * 10
        while base < min(at + max_messages, 64):
            count = min(10, 64 - base)
            inner = encode_batch([(0, b"%d" % n, b"") for n in range(base, base + count)])
            properties = encode_properties({"INNER_NUM": str(count), "INNER_BASE": str(base)})
            message = Record("T", 0, inner, properties=properties, sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP)
            body += encode_record(
                message, queue_offset=base, physical_offset=base, store_timestamp_ms=base, store_host=STORE_HOST
            )
            base += count
        return RawPull(PullStatus.FOUND, body, base, 0, 64, 0, "FOUND")


@pytest.mark.parametrize("pull_count", [4, 32, 64])
def test_batch_across_slots_or_tasks_is_returned_once(pull_count: int) -> None:
    found = []
    for begin, end in ((0, 25), (25, 64)):
        found += values_from(InBatches(), "T", begin, end, pull_count=pull_count, columns=("queueOffset", "body"))
    assert [(row["queueOffset"], row["body"]) for row in found] == [(n, b"%d" % n) for n in range(64)]


class Light(LeavingOut):
    """The light queue %LMQ%mine of 64 messages: its records have the id and offsets of another queue. The broker
    filters by no tags here."""

    def __init__(self) -> None:
        super().__init__(range(0), range(0))

    def properties(self, number: int) -> dict[str, str]:
        own = {"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%mine", "INNER_MULTI_QUEUE_OFFSET": f"7,{number}"}
        return {"TAGS": f"T{number % 2}", **own}

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
        end = min(at + max_messages, 64)
        body = b"".join(
            encode_record(
                Record("T", 5, b"%d" % n, properties=encode_properties(self.properties(n))),
                queue_offset=1000 + 3 * n,
                physical_offset=n,
                store_timestamp_ms=n,
                store_host=STORE_HOST,
            )
            for n in range(at, end)
        )
        return RawPull(PullStatus.FOUND, body, end, 0, 64, 0, "FOUND")


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        (RowFilter(), range(64)),
        (RowFilter(tags=frozenset({"T1"})), range(1, 64, 2)),
    ],
)
def test_light_queue_is_read_by_its_own_offsets(where: RowFilter, wanted: range) -> None:
    columns = ("queueOffset", "body", "queueId", "topic")
    found = values_from(Light(), "%LMQ%mine", 0, 64, pull_count=32, columns=columns, where=where)
    assert [tuple(row.values()) for row in found] == [(n, b"%d" % n, 0, "T") for n in wanted]


@pytest.mark.parametrize("topic", ["SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"])
def test_tags_of_delayed_messages_are_not_asked_of_the_broker(topic: str) -> None:
    """Their queue entries have a time instead of the tags' hash, so the broker would find none."""

    class Delayed(LeavingOut):
        async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
            asked.add(tags)
            return await super().pull_raw(queue, at, max_messages=max_messages, tags=tags)

    asked: set[str] = set()
    where = RowFilter(tags=frozenset({"T1"}))
    assert values_from(Delayed(range(0), range(0)), topic, 0, 64, columns=("body",), where=where) == []
    assert asked == {"*"}


@pytest.mark.parametrize("offsets", ["7", "7,x", "7,9999999999999999999", ""])
def test_offset_in_a_light_queue_is_null_if_the_message_lacks_it(offsets: str) -> None:
    class Lacking(Light):
        def properties(self, number: int) -> dict[str, str]:
            return {**super().properties(number), "INNER_MULTI_QUEUE_OFFSET": offsets}

    found = values_from(Lacking(), "%LMQ%mine", 0, 64, columns=("queueOffset",))
    assert [row["queueOffset"] for row in found] == [None] * 64


class SentTo(LeavingOut):
    """As `LeavingOut`, with messages of the pulled topic."""

    topic = "%LMQ%mine"


def test_message_sent_to_a_light_queue_has_its_offset() -> None:
    found = values_from(SentTo(range(0), range(0)), "%LMQ%mine", 3, 64, columns=("queueOffset",))
    assert [row["queueOffset"] for row in found] == list(range(3, 64))


class Timed:
    """A broker of `inner`'s queue, in which message n is stored at n ms; its answer for a time may be the message
    before it, as RocketMQ 4.9's."""

    def __init__(self, inner: LeavingOut) -> None:
        self.inner = inner
        self.pull_count = 0

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str = "*") -> RawPull:
        self.pull_count += 1
        return await self.inner.pull_raw(queue, at, max_messages=max_messages, tags=tags)

    async def offset_for_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        return timestamp_ms - 1

    def search(self, timestamp_ms: int, topic: str = "T") -> int | None:
        source, key = self.source(topic)
        return source.offset_for_time(key, timestamp_ms)

    def source(self, topic: str) -> tuple[NetworkSource, QueueKey]:
        source = object.__new__(NetworkSource)
        key = QueueKey(topic, "a", 0)
        source._settings = NetworkSettings(servers=("s:1",))
        source._ranges = {key: QueueRange(0, 64)}
        source._client = cast(Any, SimpleNamespace(consumer=self, call_with_retries=anyio.run))
        return source, key


class Skipping(LeavingOut):
    """A broker that answers with the next message that it can read, as RocketMQ's."""

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
        while at < 63 and (at in self.lost or at in self.blank):
            at += 1
        return await super().pull_raw(queue, at, max_messages=max_messages, tags=tags)


class Garbled(LeavingOut):
    """A broker that sends the records of `lost`, although they are damaged."""

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
        raw = await super().pull_raw(queue, at, max_messages=max_messages, tags=tags)
        damaged = b"\xff" * 100 if at in self.lost else b""
        return msgspec.structs.replace(raw, status=PullStatus.FOUND, body=damaged + raw.body) if damaged else raw


@pytest.mark.parametrize("broker", [LeavingOut, Skipping, Garbled])
def test_a_time_is_found_although_messages_can_not_be_read(broker: type[LeavingOut]) -> None:
    consumer = Timed(broker(range(40, 45), range(60, 64)))
    assert [consumer.search(time_ms) for time_ms in (1, 20, 39, 46, 59)] == [1, 20, 39, 46, 59]
    assert consumer.search(42) in range(40, 46)


@pytest.mark.parametrize("broker", [LeavingOut, Skipping, Garbled])
def test_a_physical_offset_is_that_of_the_first_message_that_can_be_read(broker: type[LeavingOut]) -> None:
    source, key = Timed(broker(range(40, 45), range(20, 60))).source("T")
    assert [source.physical_offset(key, offset) for offset in (1, 42, 50, 63)] == [1, -1, -1, 63]
    assert [source.first_physical_offset(key, begin, 64) for begin in (1, 20, 42, 63)] == [1, 60, 60, 63]


@pytest.mark.parametrize("broker", [LeavingOut, Skipping])
@pytest.mark.parametrize("lost", [range(1, 63), range(0)])
def test_a_search_for_a_time_skips_many_messages_that_can_not_be_read(broker: type[LeavingOut], lost: range) -> None:
    """Damaged messages, or blank entries. It pulled one after the other."""
    consumer = Timed(broker(lost, range(1, 63)))
    assert consumer.search(63) in range(1, 64)
    assert consumer.pull_count < 20


def test_a_time_is_found_in_a_light_queue_and_in_inner_batches() -> None:
    """Whose records have offsets of other queues, or the offset at which their batch begins."""
    times_ms = (1, 20, 39, 46, 63)
    assert [Timed(Light()).search(time_ms, "%LMQ%mine") for time_ms in times_ms] == list(times_ms)
    assert [Timed(InBatches()).search(time_ms) for time_ms in (1, 10, 20, 33, 60)] == [10, 10, 20, 40, 60]
    assert Timed(InBatches()).search(61) is None


@pytest.mark.parametrize(("pulls", "looks"), [(1, 1), (3, 3), (1, 0)])
def test_task_waits_for_a_broker_that_restarts(pulls: int, looks: int) -> None:
    """With one look less than pulls, the broker is back between a pull and a look."""
    assert read_away(pulls, looks) == 64
    assert read_away(pulls, looks, fail_on_data_loss=False) == 64


def test_task_waits_for_a_broker_that_restarts_while_spark_is_busy() -> None:
    """The time for which Spark works on a batch is not part of pullTimeout."""
    consumer = AwayFor(0, 0)
    settings = NetworkSettings(servers=("s:1",), pull_timeout_s=10, pull_count=1)
    now_s = 0.0
    with start_blocking_portal("asyncio") as portal, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ha.spark.source.network.monotonic", lambda: now_s)
        client = SimpleNamespace(portal=portal, consumer=consumer, call_with_retries=portal.call)
        options = ReadOptions(columns=("queueOffset",), batch_rows=16)
        rows = _read_slice(cast(Any, client), QueueSlice(QueueKey("T", "a", 0), 0, 64), settings, options)
        count = next(rows).num_rows
        assert count == 16  # the next 16 may have been pulled, too, but no more
        now_s, consumer.pulls, consumer.looks = 60.0, 1, 1
        assert count + sum(batch.num_rows for batch in rows) == 64


class Hanging(LeavingOut):
    """A broker that does not answer pulls from queue offset 16 on."""

    def __init__(self) -> None:
        super().__init__(range(0), range(0))
        self.is_asked, self.is_cancelled = threading.Event(), threading.Event()

    async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
        if at < 16:
            return await super().pull_raw(queue, at, max_messages=max_messages, tags=tags)
        self.is_asked.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.is_cancelled.set()
        raise AssertionError("not reached")


def test_task_that_ends_early_does_not_wait_for_pulls() -> None:
    """As with LIMIT, or if a damaged record ends the query."""
    consumer = Hanging()
    settings = NetworkSettings(servers=("s:1",), pull_count=1)
    with start_blocking_portal("asyncio") as portal:
        client = SimpleNamespace(portal=portal, consumer=consumer, call_with_retries=portal.call)
        options = ReadOptions(columns=("queueOffset",), batch_rows=16)
        rows = _read_slice(cast(Any, client), QueueSlice(QueueKey("T", "a", 0), 0, 64), settings, options)
        assert next(rows).num_rows == 16
        assert consumer.is_asked.wait(10)
        cast(Generator[Any], rows).close()
        assert consumer.is_cancelled.wait(10)


def test_broker_that_stays_away_is_an_error_and_a_deleted_topic_a_loss() -> None:
    with pytest.raises(RouteNotFound):
        read_away(1000, 1000, timeout_s=0.3)
    with pytest.raises(RecordsGone, match="its topic was deleted"):
        read_away(1000, 0)
    assert read_away(1000, 0, fail_on_data_loss=False) == 0


def test_slot_waits_for_messages_from_when_the_broker_lacks_them() -> None:
    """A broker that comes back after a while has dispatched all messages only a moment later."""

    class Recovering(FakeConsumer):
        async def pull_raw(self, queue: MessageQueue, at: int, *, max_messages: int, tags: str) -> RawPull:
            if anyio.current_time() - began < 25:
                raise ConnectionFailed("a", "lost")
            self.high = 100 if anyio.current_time() - began > 45 else 0
            return await super().pull_raw(queue, at, max_messages=max_messages, tags=tags)

    consumer = Recovering(0, 0, 8)
    began = 0.0

    async def main() -> list[Slot]:
        nonlocal began
        began = anyio.current_time()
        return await pull_slots(cast(PullConsumer, consumer), QUEUE, 0, 20, PullSettings(retry_s=30))

    slots = anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
    assert b"".join(slots[0].bodies).count(b",") == 20


def test_transient_errors_are_retried_and_others_raised() -> None:
    consumer = FakeConsumer(0, 100, 8)
    going = BrokerError("a", ResponseCode.GO_AWAY, "please go away")
    consumer.failures = [ConnectionFailed("a", "lost"), BrokerError("a", 2, "busy"), going]
    assert pull(consumer, 0, 20, PullSettings())[0] == list(range(20))
    consumer.failures = [BrokerError("a", 26, "no such group")]
    with pytest.raises(BrokerError, match="no such group"):
        pull(consumer, 0, 100, PullSettings())

    async def hopeless() -> None:
        raise ConnectionFailed("a", "still lost")

    with pytest.raises(ConnectionFailed, match="still lost"):
        anyio.run(with_retries, hopeless, 0.1)
