"""What the sink's options, columns, ids and commit records mean, without a broker."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import anyio
import msgspec
import pyarrow as pa
import pytest

from ha.arrow.read_options import ReadOptions
from ha.client import MessageQueue, PullStatus, RawPull, SendStatus
from ha.errors import OptionError, RouteNotFound, SinkFailed
from ha.protocol.properties import encode_properties
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from ha.spark.sink.commit import commit_record, merged
from ha.spark.sink.commits import Commits
from ha.spark.sink.committed_source import CommittedSource
from ha.spark.sink.control import CommitTopic, ControlRecord, History, decode_control
from ha.spark.sink.identity import SINK_PROPERTY, SinkPart, UniqueKeys, parse_sink_property
from ha.spark.sink.options import COMMIT_TOPIC, SinkOptions, parse_sink_options
from ha.spark.sink.partition import PartResult, PartWriter, rows_of_part
from ha.spark.sink.rows import check_columns, read_rows
from ha.spark.source.log_source import LogPartition, LogSource, QueueKey, QueueRange, QueueSlice


def test_options_as_given() -> None:
    options = parse_sink_options(
        {
            "SERVERS": "a:1;b:2",
            "topic": "delays",
            "batchsize": "100",
            "batchBytes": "64k",
            "inFlight": "2",
            "sendTimeout": "2m",
            "acceptStatus": "slave_not_available, FLUSH_SLAVE_TIMEOUT",
            "sinkId": "daily.2026-11-21",
            "commitTopic": "c",
            "producerGroup": "g",
            "checkpointLocation": "x",
        }
    )
    assert options == SinkOptions(
        servers=("a:1", "b:2"),
        topic="delays",
        producer_group="g",
        batch_row_count=100,
        batch_bytes=65_536,
        in_flight=2,
        send_timeout_s=120.0,
        accepted=frozenset({SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE, SendStatus.FLUSH_SLAVE_TIMEOUT}),
        sink_id="daily.2026-11-21",
        commit_topic="c",
    )
    assert parse_sink_options({"servers": "a:1"}).accepted == {SendStatus.SEND_OK}


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({}, "servers"),
        ({"servers": "nowhere"}, "servers"),
        ({"servers": ""}, "servers"),
        ({"servers": "a:1", "topic": "no topic"}, "topic"),
        ({"servers": "a:1", "topic": ""}, "topic"),
        ({"servers": "a:1", "batchSize": "0"}, "batchSize"),
        ({"servers": "a:1", "batchSize": "lots"}, "batchSize"),
        ({"servers": "a:1", "batchBytes": "5m"}, "batchBytes"),
        ({"servers": "a:1", "batchSize": "10001"}, "batchSize"),
        ({"servers": "a:1", "inFlight": "-1"}, "inFlight"),
        ({"servers": "a:1", "inFlight": "257"}, "inFlight"),
        ({"servers": "a:1", "sendTimeout": "0s"}, "sendTimeout"),
        ({"servers": "a:1", "sendTimeout": "soon"}, "sendTimeout"),
        ({"servers": "a:1", "acceptStatus": "SEND_FINE"}, "acceptStatus"),
        ({"servers": "a:1", "sinkId": "a/b"}, "sinkId"),
        ({"servers": "a:1", "sinkId": "x" * 65}, "sinkId"),
        ({"servers": "a:1", "path": "/data"}, "path"),
        ({"servers": "a:1", "kafka.acks": "all"}, "kafka.acks"),
    ],
)
def test_invalid_options(given: dict[str, str], option: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_sink_options(given)
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("columns", "topic", "option"),
    [
        ([("topic", "string")], "t", "body"),
        ([("body", "string"), ("value", "string")], "t", "value"),
        ([("body", "string")], None, "topic"),
        ([("body", "struct<a:int>")], "t", "body"),
        ([("body", "string"), ("keys", "array<int>")], "t", "keys"),
        ([("body", "string"), ("queueId", "string")], "t", "queueId"),
        ([("body", "string"), ("brokerName", "string")], "t", "brokerName"),
        ([("body", "string"), ("delayLevel", "int")], "t", "delayLevel"),
        ([("body", "string"), ("whatever", "int")], "t", "whatever"),
    ],
)
def test_invalid_columns(columns: list[tuple[str, str]], topic: str | None, option: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_columns(columns, topic)
    assert caught.value.option == option


def test_a_row_without_a_body_or_topic_is_refused() -> None:
    for batch in (
        pa.RecordBatch.from_pydict({"body": pa.array([None], pa.binary())}),
        pa.RecordBatch.from_pydict({"body": [b""]}),
    ):
        with pytest.raises(SinkFailed, match="no body"):
            list(read_rows(batch, "t"))
    with pytest.raises(SinkFailed, match="no topic"):
        list(read_rows(pa.RecordBatch.from_pydict({"body": [b"x"]}), None))
    with pytest.raises(SinkFailed, match="flag: 2147483648 is no int32"):
        list(read_rows(pa.RecordBatch.from_pydict({"body": [b"x"], "flag": [1 << 31]}), "t"))


def heads_and_bodies(**columns: Any) -> list[tuple[str, bytes]]:
    return [(row.head, row.message.body) for row in read_rows(pa.RecordBatch.from_pydict(columns), "t")]


def test_rows_that_differ_anywhere_have_different_hashes() -> None:
    rows = [
        *heads_and_bodies(body=[b"a", b"b"]),
        *heads_and_bodies(body=[b"a"], tags=["x"]),
        *heads_and_bodies(body=[b"a"], keys=["x"]),
        *heads_and_bodies(body=[b"a"], flag=[1]),
        *heads_and_bodies(body=[b"a"], topic=["u"]),
        *heads_and_bodies(body=[b"a"], queueId=[0]),
        *heads_and_bodies(body=[b"a"], queueId=[0], brokerName=["b"]),
        *heads_and_bodies(body=[b"a"], properties=pa.array([[("p", "q")]], pa.map_(pa.string(), pa.string()))),
    ]
    keys = UniqueKeys(SinkPart("s", 1, 2))
    hashes = {keys.hash(*row) for row in rows}
    assert len(hashes) == len(rows)
    assert {UniqueKeys(SinkPart("s", 1, 2)).hash(*row) for row in reversed(rows)} == hashes
    assert UniqueKeys(SinkPart("s", 1, 3)).hash(*rows[0]) not in hashes
    assert UniqueKeys(SinkPart("s", 2, 2)).hash(*rows[0]) not in hashes
    first, second = (keys.key(keys.hash(*rows[0])) for _ in range(2))
    assert first != second
    assert first[:20] == second[:20]
    assert len(first) == 32
    assert bytes.fromhex(first)[10:14] == bytes(4)  # RocketMQ reads a time since the start of the month there


def test_the_property_reads_back() -> None:
    part = SinkPart("ad608c4a-9cea-499e-9f95-e51661a1ed27", 12, 3)
    assert parse_sink_property(part.text) == part
    for strange in ("", "a/b", "a/1/x", "/1/2", "a/1/2/3"):
        assert parse_sink_property(strange) is None


def result(partition: int, spans: list[tuple[int, int]], end: int, **more: Any) -> PartResult:
    rows = sum(end - begin for begin, end in spans)
    return PartResult(
        SinkPart("s", 1, partition),
        row_count=rows,
        ranges={"t": {"a": {0: spans}}},
        floors={"t": {"a": {0: end}}},
        **more,
    )


def test_commit_joins_its_parts() -> None:
    record = commit_record([result(0, [(10, 12), (15, 20)], 20), result(1, [(12, 15), (30, 31)], 31)])
    assert record == ControlRecord(
        "commit",
        "s",
        1,
        floors={"t": {"a": {0: 31}}},
        ranges={"t": {"a": {0: [(10, 20), (30, 31)]}}},
        row_count=11,
    )
    assert decode_control(msgspec.json.encode(record)) == record
    assert merged([(5, 6), (0, 2), (2, 3)]) == [(0, 3), (5, 6)]
    assert pickle.loads(pickle.dumps(result(0, [(1, 2)], 2))) == result(0, [(1, 2)], 2)
    with pytest.raises(SinkFailed, match="4 rows are stored at 3 queue offsets"):
        commit_record([result(0, [(10, 12)], 12), result(1, [(11, 13)], 13)])
    assert decode_control(b"{}") is None
    assert decode_control(b"no json") is None


def test_floors_of_an_earlier_attempt() -> None:
    commit = ControlRecord("commit", "s", 3, floors={"t": {"a": {0: 50}}})
    begins = (
        ControlRecord("begin", "s", 4, 1, floors={"u": {"a": {0: 7}}}),
        ControlRecord("begin", "s", 4, 1, floors={"u": {"a": {0: 9}}}),
    )
    history = History(commit, begins)
    assert history.committed_batch == 3
    assert history.floors("t", 4, 0) == {"a": {0: 50}}
    assert history.floors("u", 4, 1) == {"a": {0: 7}}
    assert history.floors("u", 4, 0) == {}
    assert (history.begin_count(4, 1), history.begin_count(4, 0)) == (2, 0)
    assert History(None, ()).committed_batch == -1


def rows_in_queue(offsets: list[int], *, topic: str = "t", broker: str = "a", part: str = "s/1/0") -> pa.RecordBatch:
    text = encode_properties({"HALOG_SINK": part} if part else {"KEYS": "HALOG_SINK"}).decode()
    count = len(offsets)
    return pa.RecordBatch.from_pydict(
        {
            "topic": [topic] * count,
            "brokerName": [broker] * count,
            "queueId": pa.array([0] * count, pa.int32()),
            "queueOffset": offsets,
            "propertiesString": [text] * count,
        }
    )


def test_committed_rows_are_those_in_commit_ranges() -> None:
    commits = Commits(
        [
            ControlRecord("commit", "s", 1, ranges={"t": {"a": {0: [(10, 12), (20, 21)]}}}, row_count=3),
            ControlRecord("begin", "s", 2, 0),
        ]
    )
    offsets = [9, 10, 11, 12, 19, 20, 21]
    named = [False, True, True, False, False, True, False]
    assert commits.mask(rows_in_queue(offsets)).tolist() == named
    assert commits.committed(rows_in_queue(offsets)).column("queueOffset").to_pylist() == [10, 11, 20]
    assert commits.mask(rows_in_queue(offsets, part="")).all()
    assert commits.mask(rows_in_queue(offsets, part="not a sink's")).all()
    assert not commits.mask(rows_in_queue(offsets, part="s/2/0")).any()
    assert not commits.mask(rows_in_queue(offsets, topic="u")).any()
    assert commits.mask(rows_in_queue(offsets, broker="slave")).tolist() == named  # a directory's name
    assert commits.first_pending(rows_in_queue(offsets, part="s/2/0")) == (0, SinkPart("s", 2, 0))
    assert commits.first_pending(rows_in_queue(offsets)) is None


def test_first_commit_of_a_batch_counts() -> None:
    """Two drivers that write the same batch may both commit it. The writers go by the first commit, too."""
    first, second = (
        ControlRecord("commit", "s", 1, ranges={"t": {"a": {0: [(begin, begin + 1)]}}}) for begin in (10, 11)
    )
    commits = Commits([first])
    commits.add([second])
    assert commits.mask(rows_in_queue([10, 11])).tolist() == [True, False]


def test_rows_of_several_brokers_are_not_read_under_other_names() -> None:
    queues = {0: [(9, 22)]}
    two = ControlRecord("commit", "s", 1, ranges={"t": {"a": queues, "b": queues}})
    later = ControlRecord("commit", "s", 2, ranges={"t": {"c": {0: [(90, 91)]}}})
    part = Commits([two, later]).within([QueueSlice(QueueKey("t", "b", 0), 9, 12)])
    assert part.mask(rows_in_queue([9, 10], broker="b")).all()
    # An aborted attempt can leave a row on a broker that its batch's commit doesn't name.
    assert not part.mask(rows_in_queue([9, 10], broker="c")).any()
    with pytest.raises(OptionError, match="brokerName: slave is in no commit of t, but a and b are; accepted: "):
        part.mask(rows_in_queue([9, 10], broker="slave"))


def test_kafka_s_columns_are_other_names_of_the_sink_s() -> None:
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch(
        {
            "KEY": pa.array([b"k1 k2", None], pa.binary()),
            "Value": pa.array([b"one", b"two"]),
            "Topic": pa.array(["t", "t"]),
            "partition": pa.array([3, None], pa.int32()),
            "headers": pa.array([[{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}], None], headers),
        }
    )
    kinds = ["binary", "binary", "string", "int", "array<struct<key:string,value:binary>>"]
    check_columns(list(zip(batch.schema.names, kinds, strict=True)), None)
    first, second = read_rows(batch, None)
    assert (first.message.keys, first.message.body, first.queue_id) == ("k1 k2", b"one", 3)
    assert (first.message.properties, second.message.properties) == ({"a": "2"}, {})
    assert (second.message.keys, second.queue_id) == ("", None)
    with pytest.raises(OptionError, match="key: it means the same as the column keys"):
        check_columns([("body", "string"), ("keys", "string"), ("key", "string")], "t")
    wrong = pa.record_batch({"key": pa.array([b"\xff"]), "value": pa.array([b"v"])})
    with pytest.raises(SinkFailed, match="no UTF-8"):
        list(read_rows(wrong, "t"))


class GrowingLog:
    """A queue and a commit topic. As in a store, the end of a queue is found when it is first asked for."""

    def __init__(self) -> None:
        self.bodies: dict[QueueKey, list[bytes]] = {ROWS: [], COMMITS: []}
        self.ends: dict[QueueKey, int] = {}
        self.listed: set[QueueKey] = set()

    def queues(self, topics: frozenset[str] | None) -> list[QueueKey]:
        found = [queue for queue in self.bodies if topics is None or queue.topic in topics]
        self.listed.update(found)
        return found

    def queue_range(self, queue: QueueKey) -> QueueRange:
        for known in self.listed - self.ends.keys():
            self.ends[known] = len(self.bodies[known])
        return QueueRange(0, self.ends[queue])

    def queue_partition(self, slices: Sequence[QueueSlice]) -> LogPartition:
        return GrowingPartition(self.bodies, slices)


class GrowingPartition(LogPartition):
    def __init__(self, bodies: dict[QueueKey, list[bytes]], slices: Sequence[QueueSlice]) -> None:
        super().__init__()
        self.bodies, self.slices = bodies, slices

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        for queue, begin, end in self.slices:
            rows = rows_in_queue(list(range(begin, end)), topic=queue.topic)
            yield rows.append_column("body", pa.array(self.bodies[queue][begin:end])).select(list(options.columns))


ROWS, COMMITS = QueueKey("t", "a", 0), QueueKey(COMMIT_TOPIC, "a", 0)


@pytest.mark.parametrize("stage", ["listed", "range"])
def test_a_batch_query_sees_all_rows_of_a_commit_or_none(stage: str) -> None:
    log = GrowingLog()
    log.bodies[ROWS] += [b"0", b"1"]
    source = CommittedSource(cast(LogSource, log), stops_at_pending=False)

    def commit() -> None:
        """The sink stores the rest of its batch and commits it."""
        log.bodies[ROWS] += [b"2", b"3"]
        record = ControlRecord("commit", "s", 1, ranges={"t": {"a": {0: [(0, 4)]}}}, row_count=4)
        log.bodies[COMMITS].append(msgspec.json.encode(record))

    [queue] = source.queues(frozenset({"t"}))
    if stage == "listed":
        commit()
    begin, end = source.queue_range(queue)
    if stage == "range":
        commit()
    partition = source.queue_partition([QueueSlice(queue, begin, end)])
    assert sum(batch.num_rows for batch in partition.read(ReadOptions(columns=("body",)))) in (0, 4)


class RestartingBrokers:
    """Brokers that name servers know after a few requests. Their commit topic is empty."""

    def __init__(self, back_at: int) -> None:
        """`back_at`: number of the last request before they are back."""
        self.requests = 0
        self.back_at = back_at

    async def queues(self, topic: str) -> list[MessageQueue]:
        self.requests += 1
        if self.requests <= self.back_at:
            raise RouteNotFound(topic, "a", 17, "no route")
        return [MessageQueue(topic, "a", 0)]

    async def broker_names(self) -> list[str]:
        self.requests += 1
        return ["a"] if self.requests > self.back_at else []

    async def max_offset(self, queue: MessageQueue) -> int:
        return 0

    min_offset = max_offset


class DamagedBroker:
    """A queue with messages of a sink and of others; of each, one has a damaged body."""

    async def pull_raw(self, queue: MessageQueue, at: int, **_: object) -> RawPull:
        owners = ["other", "other", "sink", "sink"]
        records = [
            encode_record(
                Message("t", 0, b"row", properties=encode_properties({SINK_PROPERTY: f"{owner}/1/0"})),
                queue_offset=number,
                physical_offset=number,
                store_timestamp_ms=number,
                store_host=encode_host("127.0.0.1", 10911),
            ).replace(b"row", b"raw" if number % 2 else b"row")
            for number, owner in enumerate(owners)
        ]
        return RawPull(PullStatus.FOUND, b"".join(records), 4, 0, 4, 0, "FOUND")


def test_damaged_messages_do_not_stop_the_search_for_rows() -> None:
    """A query could not be restarted while the message was in the log."""

    async def found() -> list[int]:
        queue, broker = MessageQueue("t", "a", 0), cast(Any, DamagedBroker())
        return [offset async for offset, _ in rows_of_part(broker, SinkPart("sink", 1, 0), queue, 0, 4, retry_s=1.0)]

    assert anyio.run(found) == [2]


async def history_of(consumer: RestartingBrokers) -> None:
    await CommitTopic(cast(Any, None), cast(Any, consumer), COMMIT_TOPIC, 1.0).history("sink")


async def ends_of(consumer: RestartingBrokers) -> None:
    clients = (cast(Any, None), cast(Any, consumer), cast(Any, None))
    writer = PartWriter(SinkOptions(servers=("s:1",)), SinkPart("sink", 1, 0), clients)
    await writer._ends([MessageQueue("t", "a", 0)], may_be_new=False)


@pytest.mark.parametrize("ask", [history_of, ends_of])
def test_brokers_that_are_away_are_not_taken_for_missing_topics(ask: Callable[[RestartingBrokers], Any]) -> None:
    """A batch would be written again."""
    with pytest.raises(SinkFailed, match="no broker is registered"):
        anyio.run(ask, RestartingBrokers(2))
    back = RestartingBrokers(1)
    anyio.run(ask, back)
    assert back.requests == 3  # the queues were asked for again, and read
