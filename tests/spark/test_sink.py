"""The sink without Spark, with real halog processes: each row once, through failures of an attempt at any time."""

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import pyarrow as pa
import pytest

from ha.arrow import LogReader
from ha.arrow.read_options import ReadOptions
from ha.client import Admin, Message, MessageQueue, Producer, PullConsumer, SendResult, SendStatus
from ha.errors import (
    BrokerError,
    ConnectionFailed,
    OptionError,
    RecordsGone,
    RemoteProtocolError,
    RequestTimedOut,
    SinkFailed,
)
from ha.spark.sink import control, partition, writers
from ha.spark.sink.committed_source import CommittedSource
from ha.spark.sink.control import ControlRecord
from ha.spark.sink.identity import SinkPart
from ha.spark.sink.options import COMMIT_TOPIC, parse_sink_options
from ha.spark.source import network_pull
from ha.spark.source.local import LocalSource
from ha.spark.source.log_source import QueueKey, QueueSlice
from scripts.nodes import Cluster, cluster, reserved_ports, wait_until_attached
from tests.spark.clusters import running_cluster, running_groups
from tests.spark.sink_steps import (
    attempt,
    bodies,
    commit,
    dying_after,
    frame,
    options_for,
    read_committed,
    read_topic,
    wait_for_messages,
)
from tests.spark.stores import KilledError

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("sink")) as started:
        yield started


@pytest.fixture
def servers(nodes: Cluster) -> str:
    return nodes.name_server_address


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A unique topic."""
    return f"t-{abs(hash(request.node.name)) % 10**10}-{time.monotonic_ns()}"


def stored(servers: str, topic: str) -> list[bytes]:
    return sorted(message.body for message in read_topic(servers, topic))


def test_columns_become_what_consumers_see(servers: str, topic: str) -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "value": ["text", "é"],
            "topic": [topic, topic],
            "tags": ["TagA", None],
            "keys": [["k1", "k2"], None],
            "properties": pa.array(
                [[("own", "x"), ("UNIQ_KEY", "not this one"), ("WAIT", "false")], [("TAGS", "B"), ("KEYS", "k3 k4")]],
                pa.map_(pa.string(), pa.string()),
            ),
            "queueId": pa.array([2, 2], pa.int32()),
            "brokerName": ["broker-a", None],
            "flag": pa.array([7, None], pa.int64()),
        }
    )
    part = SinkPart("columns", 0, 4)
    commit(options_for(servers), attempt(options_for(servers), part, [batch]))
    first, second = read_topic(servers, topic)
    assert (first.body, first.tags, first.keys, first.flag) == (b"text", "TagA", ("k1", "k2"), 7)
    assert (second.body, second.tags, second.keys, second.flag) == ("é".encode(), "B", ("k3", "k4"), 0)
    assert first.queue == second.queue == MessageQueue(topic, "broker-a", 2)
    assert first.properties["own"] == "x"
    assert first.properties["HALOG_SINK"] == "columns/0/4"
    assert len(first.message_id) == len(second.message_id) == 32
    assert first.message_id != second.message_id
    assert "WAIT" not in first.properties


@pytest.mark.parametrize("stage", ["before sending", "while sending", "before commit", "after commit"])
def test_an_attempt_that_dies_is_finished_by_the_next(servers: str, topic: str, stage: str) -> None:
    """The second batch of a sink dies in each stage; the rows come again in another order, as after a shuffle."""
    options = options_for(servers, topic=topic)
    sink = f"dies-{topic}"
    rows = [*bodies(95), b"twice", b"twice", b"twice"]
    before = attempt(options, SinkPart(sink, 0, 0), [frame(bodies(20, 1000))])
    commit(options, before)
    part = SinkPart(sink, 1, 0)
    if stage == "before sending":
        with pytest.raises(KilledError):
            attempt(options, part, dying_after([]))
        stored_by_then = 0
    elif stage == "while sending":
        with pytest.raises(KilledError):
            attempt(options, part, dying_after([frame(rows[:30] + rows[-2:])]))
        stored_by_then = 32
    else:
        result = attempt(options, part, [frame(rows)])
        stored_by_then = len(rows)
        if stage == "after commit":
            commit(options, result)
    assert len(read_topic(servers, topic)) == 20 + stored_by_then
    if stage != "after commit":
        assert read_committed(servers, topic) == sorted(bodies(20, 1000))
    random.Random(1).shuffle(rows)
    again = attempt(options, part, [frame(rows[:50]), frame(rows[50:])], is_repeated=stage == "while sending")
    assert again.already_committed == (stage == "after commit")
    assert again.found_count == (0 if stage == "after commit" else stored_by_then)
    assert again.strays == 0
    commit(options, again)
    expected = sorted(bodies(20, 1000) + rows)
    assert stored(servers, topic) == read_committed(servers, topic) == expected
    ids = Counter(message.message_id for message in read_topic(servers, topic))
    assert set(ids.values()) == {1}
    following = attempt(options, SinkPart(sink, 2, 0), [frame([b"next"])])
    commit(options, following)
    assert following.found_count == 0
    assert read_committed(servers, topic) == sorted([*expected, b"next"])


def test_the_first_batch_of_a_sink_dies(servers: str, topic: str) -> None:
    """No commit tells where to search yet; the first control record does. The topic is full of other messages."""

    async def fill() -> None:
        async with Producer(servers) as producer:
            for _ in range(4):
                await producer.send_batch([Message(topic, b"foreign") for _ in range(100)])

    anyio.run(fill)
    options = options_for(servers, topic=topic)
    part = SinkPart(f"first-{topic}", 0, 1)
    with pytest.raises(KilledError):
        attempt(options, part, dying_after([frame(bodies(25))]))
    again = attempt(options, part, [frame(bodies(60))])
    assert (again.found_count, again.row_count) == (25, 60)
    commit(options, again)
    assert stored(servers, topic) == sorted([b"foreign"] * 400 + bodies(60))
    assert read_committed(servers, topic) == stored(servers, topic)


def test_two_partitions_of_equal_rows_are_two(servers: str, topic: str) -> None:
    options = options_for(servers, topic=topic)
    sink = f"equal-{topic}"
    with pytest.raises(KilledError):
        attempt(options, SinkPart(sink, 0, 0), dying_after([frame(bodies(30))]))
    results = [attempt(options, SinkPart(sink, 0, number), [frame(bodies(30))]) for number in range(2)]
    assert [result.found_count for result in results] == [30, 0]
    commit(options, *results)
    assert read_committed(servers, topic) == stored(servers, topic) == sorted(bodies(30) * 2)


def test_several_topics_in_one_partition(servers: str, topic: str) -> None:
    options = options_for(servers)
    part = SinkPart(f"topics-{topic}", 0, 0)
    names = [f"{topic}-{number % 3}" for number in range(60)]
    with pytest.raises(KilledError):
        attempt(options, part, dying_after([frame(bodies(20), topic=names[:20])]))
    again = attempt(options, part, [frame(bodies(60), topic=names)])
    assert again.found_count == 20
    commit(options, again)
    for number in range(3):
        assert read_committed(servers, f"{topic}-{number}") == sorted(bodies(60)[number::3])


def test_unmatched_messages_of_an_attempt_are_not_committed(servers: str, topic: str) -> None:
    """Rows changed between two attempts: nothing is lost; the old ones stay hidden from committed readers."""
    options = options_for(servers, topic=topic)
    part = SinkPart(f"changed-{topic}", 0, 0)
    with pytest.raises(KilledError):
        attempt(options, part, dying_after([frame(bodies(10))]))
    again = attempt(options, part, [frame(bodies(10, first=5))])
    assert (again.found_count, again.strays) == (5, 5)
    commit(options, again)
    assert read_committed(servers, topic) == sorted(bodies(10, first=5))
    assert stored(servers, topic) == sorted(bodies(15))


def test_two_attempts_at_once_leave_one_for_committed_readers(servers: str, topic: str) -> None:
    """A speculative copy, or a lost executor that still runs: any consumer sees both, a committed reader one."""
    options = options_for(servers, topic=topic)
    sink = f"twins-{topic}"
    commit(options, attempt(options, SinkPart(sink, 0, 0), [frame([b"first"])]))
    part = SinkPart(sink, 1, 0)

    def with_a_twin() -> Iterator[pa.RecordBatch]:
        yield frame(bodies(30))
        attempt_in_a_process(servers, topic, part)  # it finds 30 rows and sends the other 30
        yield frame(bodies(30, first=30))

    result = attempt(options, part, with_a_twin())
    commit(options, result)
    assert read_committed(servers, topic) == sorted([b"first", *bodies(60)])
    assert Counter(stored(servers, topic)) == Counter([b"first", *bodies(60), *bodies(30, first=30)])


def attempt_in_a_process(servers: str, topic: str, part: SinkPart, rows: int = 60) -> None:
    subprocess.run(writer_command(servers, topic, part, rows), check=True, timeout=120, cwd=ROOT)


def writer_command(servers: str, topic: str, part: SinkPart, rows: int) -> list[str]:
    numbers = map(str, (part.batch, part.partition, rows))
    return [sys.executable, "-m", "tests.spark.sink_steps", servers, topic, part.sink, *numbers]


def test_a_stream_of_committed_rows_waits_for_a_commit(nodes: Cluster, topic: str) -> None:
    """Read from the slave's directory: the stable end stands before what may still be committed, then passes it."""
    servers = nodes.name_server_address
    options = options_for(servers, topic=topic)
    sink = f"stable-{topic}"
    queue = [0] * 5

    def rows_and_ends() -> tuple[list[bytes], int]:
        source.refresh()
        key = QueueKey(topic, "broker-a", 0)
        begin, end = source.queue_range(key)
        partition = pickle.loads(pickle.dumps(source.queue_partition([QueueSlice(key, begin, end)])))
        found = [body for batch in partition.read(ReadOptions(columns=("body",))) for body in batch[0].to_pylist()]
        return found, end

    first = attempt(options, SinkPart(sink, 0, 0), [frame(bodies(5), queueId=queue)])
    commit(options, first)
    wait_for_slave(nodes)
    source = CommittedSource(LocalSource([str(nodes.slave_store)]), stops_at_pending=True)
    try:
        assert rows_and_ends() == (bodies(5), 5)
        second = attempt(options, SinkPart(sink, 1, 0), [frame(bodies(5, 5), queueId=queue)])
        wait_for_slave(nodes)
        assert rows_and_ends() == (bodies(5), 5)
        lost = attempt(options, SinkPart(sink, 1, 1), [frame(bodies(5, 10), queueId=queue)])
        commit(options, second)  # without the lost part, as if its task's rows had changed
        assert lost.row_count == 5
        wait_for_slave(nodes)
        assert rows_and_ends() == (bodies(10), 15)
    finally:
        source.close()


@pytest.mark.parametrize("names_sink", [False, True])
def test_an_aborted_write_blocks_no_stream_unless_it_can_be_repeated(
    servers: str, topic: str, names_sink: bool
) -> None:
    """Without sinkId, nothing can commit the rows later, and a task that still runs stores no more of them."""
    more = {"sinkId": f"named-{topic}"} if names_sink else {}
    options = options_for(servers, topic=topic, **more)
    first = writers.BatchWriter(options)
    part = SinkPart(first._sink, 0, 0)
    attempt(options, part, [frame(bodies(5), queueId=[0] * 5)])
    first.abort([None])
    commit(options, attempt(options, SinkPart(f"again-{topic}", 0, 0), [frame(bodies(5, 10), queueId=[0] * 5)]))

    async def send_plain() -> None:
        async with Producer(servers) as producer:
            await producer.send(Message(topic, b"plain"), queue=MessageQueue(topic, "broker-a", 0))

    anyio.run(send_plain)
    late = attempt(options, part, [frame(bodies(7), queueId=[0] * 7)])
    assert late.already_committed != names_sink
    following = [] if names_sink else sorted([*bodies(5, 10), b"plain"])
    assert read_committed(servers, topic, stops_at_pending=True) == following
    if names_sink:
        assert (late.found_count, late.row_count) == (5, 7)
        first.commit([writers.SinkMessage(late)])
        expected = sorted([*bodies(7), *bodies(5, 10), b"plain"])
        assert read_committed(servers, topic, stops_at_pending=True) == expected


def test_a_write_that_can_not_be_aborted_keeps_its_own_error(caplog: pytest.LogCaptureFixture) -> None:
    with reserved_ports(1) as (port,):
        options = options_for(f"127.0.0.1:{port}", topic="t", sendTimeout="1s")
        writers.BatchWriter(options).abort([None])
    assert "sink.abort_failed sink=write-" in caplog.text


def wait_for_slave(nodes: Cluster) -> None:
    """Waits until the slave has dispatched everything that the master has."""
    end = nodes.master.status()["commitlog"]["max_offset"]
    give_up = time.monotonic() + 30
    with LogReader(nodes.slave_store) as reader:
        while reader.end_offset() < end:
            assert time.monotonic() < give_up
            time.sleep(0.05)  # nobody announces what a process wrote to its files
            reader.refresh()


def test_repeated_sigkill(servers: str, topic: str) -> None:
    rows = 3000
    part = SinkPart(f"killed-{topic}", 0, 0)
    counts = []
    for _ in range(2):
        before = len(read_topic(servers, topic))
        with subprocess.Popen(writer_command(servers, topic, part, rows), cwd=ROOT) as process:
            wait_for_messages(servers, topic, before, 120, process.poll)
            os.kill(process.pid, signal.SIGKILL)
        counts.append(len(read_topic(servers, topic)))
    assert 0 < counts[0] < counts[-1] < rows
    options = options_for(servers, topic=topic)
    result = attempt(options, part, [frame(bodies(rows))])
    commit(options, result)
    assert 0 < result.found_count < rows
    assert stored(servers, topic) == read_committed(servers, topic) == sorted(bodies(rows))


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("kind", [RequestTimedOut, ConnectionFailed])
def test_send_with_unknown_outcome_is_searched_for(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, is_stored: bool, kind: type[Exception]
) -> None:
    real = Producer.send_batch
    lost: list[MessageQueue | None] = []

    async def send_batch(self: Producer, messages: list[Message], *, queue: MessageQueue | None = None) -> SendResult:
        result = await real(self, messages, queue=queue) if is_stored or len(lost) >= 4 else None
        if len(lost) < 4:
            lost.append(queue)
            raise RequestTimedOut("a", 1.0) if kind is RequestTimedOut else ConnectionFailed("a", "lost")
        assert result is not None
        return result

    options = options_for(servers, topic=topic)
    commit(options, attempt(options, SinkPart(f"unknown-{topic}", 0, 0), [frame(bodies(5, 1000))]))
    monkeypatch.setattr(Producer, "send_batch", send_batch)
    commit(options, attempt(options, SinkPart(f"unknown-{topic}", 1, 0), [frame(bodies(100))]))
    assert stored(servers, topic) == read_committed(servers, topic) == sorted(bodies(100) + bodies(5, 1000))
    assert len(lost) == 4


@pytest.mark.parametrize("is_kept", [True, False])
def test_rows_that_a_replaced_master_may_not_have_kept_are_committed(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """The commit named queue offsets that the next master of a failover group did not have, or had for other rows."""
    real = Producer.send_batch
    weak_count = 0

    async def send_batch(self: Producer, messages: list[Message], *, queue: MessageQueue | None = None) -> SendResult:
        nonlocal weak_count
        weak_count += 1
        if weak_count > 4:
            return await real(self, messages, queue=queue)
        assert queue is not None
        if is_kept:
            offset = (await real(self, messages, queue=queue)).queue_offset
        else:
            async with PullConsumer(servers) as consumer:
                offset = await consumer.max_offset(queue)
        return SendResult(SendStatus.FLUSH_SLAVE_TIMEOUT, "", "", queue, offset, "")

    options = options_for(servers, topic=topic)
    commit(options, attempt(options, SinkPart(f"weak-{topic}", 0, 0), [frame(bodies(5, 1000))]))
    monkeypatch.setattr(Producer, "send_batch", send_batch)
    result = attempt(options, SinkPart(f"weak-{topic}", 1, 0), [frame(bodies(100))])
    commit(options, result)
    assert stored(servers, topic) == read_committed(servers, topic) == sorted(bodies(100) + bodies(5, 1000))
    assert bool(result.doubtful) == is_kept


@pytest.mark.parametrize("replaced_by", ["nothing", "a message", "another row"])
def test_rows_that_a_broker_lost_before_the_fence_are_not_committed(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, replaced_by: str
) -> None:
    """A master answers FLUSH_DISK_TIMEOUT, loses power, and recovers without the rows; others get their offsets."""

    async def lose(self: Producer, messages: list[Message], *, queue: MessageQueue | None = None) -> SendResult:
        assert queue is not None
        async with PullConsumer(servers) as consumer:
            return SendResult(SendStatus.FLUSH_DISK_TIMEOUT, "", "", queue, await consumer.max_offset(queue), "")

    options = options_for(servers, topic=topic, sendTimeout="60s")
    sink = f"lost-{topic}"
    commit(options, attempt(options, SinkPart(sink, 0, 0), [frame(bodies(5, 1000))]))
    part = SinkPart(sink, 1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Producer, "send_batch", lose)
        result = attempt(options, part, [frame(bodies(3), queueId=[2] * 3)])
    others: list[bytes] = []
    if replaced_by == "a message":
        others = [b"plain"] * 3

        async def send() -> None:
            async with Producer(servers) as producer:
                await producer.send_batch(
                    [Message(topic, body) for body in others], queue=MessageQueue(topic, "broker-a", 2)
                )

        anyio.run(send)
    elif replaced_by == "another row":
        others = bodies(3, 10)
        attempt(options, part, [frame(others, queueId=[2] * 3)])
    began_s = time.monotonic()
    with pytest.raises(SinkFailed, match=rf"queue 2 of broker-a no longer has .* rows of {part.text}"):
        commit(options, result)
    assert time.monotonic() - began_s < 20
    again = attempt(options, part, [frame(bodies(3), queueId=[2] * 3)])
    assert (again.row_count, again.found_count) == (3, 0)
    commit(options, again)
    committed_others = others if replaced_by == "a message" else []
    assert read_committed(servers, topic) == sorted([*bodies(3), *bodies(5, 1000), *committed_others])


def test_a_commit_that_a_broker_lost_before_the_fence_is_no_success(servers: str, topic: str) -> None:
    """The task found the commit of an earlier attempt; the broker then recovered without it."""
    options = options_for(servers, topic=topic)
    part = SinkPart(f"uncommitted-{topic}", 1, 0)
    rows = attempt(options, part, [frame(bodies(5))])
    found = partition.PartResult(part, already_committed=True, committed_row_count=5, row_count=5)
    with pytest.raises(SinkFailed, match=f"the commit of batch 1 of {part.sink} is lost"):
        commit(options, found)
    commit(options, rows)
    commit(options, found)
    assert read_committed(servers, topic) == bodies(5)


def test_rows_at_a_broker_that_name_servers_do_not_know_are_not_sent_again(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker restarts after it has stored a request, and its topic is looked up before it has registered."""
    real, real_queues = Producer.send_batch, control.existing_queues
    lost: list[MessageQueue | None] = []

    async def send_batch(self: Producer, messages: list[Message], *, queue: MessageQueue | None = None) -> SendResult:
        result = await real(self, messages, queue=queue)
        if not lost:
            lost.append(queue)
            raise ConnectionFailed("a", "lost")
        return result

    async def existing_queues(consumer: PullConsumer, name: str) -> list[MessageQueue]:
        return [MessageQueue(name, "broker-b", 0)] if lost and name == topic else await real_queues(consumer, name)

    options = options_for(servers, topic=topic)
    part = SinkPart(f"restart-{topic}", 1, 0)
    commit(options, attempt(options, SinkPart(part.sink, 0, 0), [frame(bodies(5, 1000))]))
    with monkeypatch.context() as patch:
        patch.setattr(Producer, "send_batch", send_batch)
        patch.setattr(partition, "existing_queues", existing_queues)
        patch.setattr(partition, "_NEW_TOPIC_PATIENCE_S", 0)
        with pytest.raises(SinkFailed, match="no master of broker-a can be written to, and it may hold rows of batch"):
            attempt(options, part, [frame(bodies(10))])
    commit(options, attempt(options, part, [frame(bodies(10))]))
    assert stored(servers, topic) == read_committed(servers, topic) == sorted(bodies(10) + bodies(5, 1000))


def test_busy_broker_is_retried_and_a_rejection_is_final(
    servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Producer.send_batch
    answers = [BrokerError("a", 2, "[PC_SYNCHRONIZED]broker busy")] * 3

    async def send_batch(self: Producer, messages: list[Message], *, queue: MessageQueue | None = None) -> SendResult:
        if answers:
            raise answers.pop()
        return await real(self, messages, queue=queue)

    monkeypatch.setattr(Producer, "send_batch", send_batch)
    options = options_for(servers, topic=topic)
    attempt(options, SinkPart(f"busy-{topic}", 0, 0), [frame(bodies(30))])
    assert stored(servers, topic) == sorted(bodies(30))
    answers[:] = [BrokerError("a", 13, "the message is illegal")]
    with pytest.raises(SinkFailed, match=r"refuses rows for good: .*the message is illegal"):
        attempt(options, SinkPart(f"busy-{topic}", 1, 0), [frame([b"x"])])
    answers[:] = [BrokerError("a", 2, "broker busy")] * 1000
    short = msgspec.structs.replace(options, send_timeout_s=1.0)
    with pytest.raises(SinkFailed, match=r"took no rows for 1 s \(sendTimeout\): .*broker busy"):
        attempt(short, SinkPart(f"busy-{topic}", 2, 0), [frame([b"x"])])


def test_no_more_requests_than_in_flight(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Producer.send_batch
    under_way = most = 0

    async def send_batch(self: Producer, messages: list[Message], *, queue: MessageQueue | None = None) -> SendResult:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            assert len(messages) <= 10
            return await real(self, messages, queue=queue)
        finally:
            under_way -= 1

    monkeypatch.setattr(Producer, "send_batch", send_batch)
    attempt(options_for(servers, topic=topic), SinkPart(f"flight-{topic}", 0, 0), [frame(bodies(300))])
    assert most == 3


def test_rows_that_can_not_be_sent_say_why(servers: str, topic: str) -> None:
    options = options_for(servers, topic=topic)
    cases = (
        (frame([b""]), "a row has no body"),
        (pa.RecordBatch.from_pydict({"body": [b"x"], "topic": pa.array([None], pa.string())}), "no topic"),
        (frame([b"x"], queueId=[77]), r"queueId: .* has no queue 77; it has broker-a:0, broker-a:1"),
        (frame([b"x"], queueId=[0], brokerName=["broker-z"]), "has no queue 0 of broker broker-z"),
        (frame([b"x"], tags=["a\x02b"]), "a row can't be a message"),
        (frame([b"x" * (5 << 20)]), "a row can't be a message: a body of"),
        (frame([b"x"], keys=["k" * 40_000]), "a row can't be a message|refuses rows for good"),
    )
    for number, (batch, reason) in enumerate(cases):
        told = msgspec.structs.replace(options, topic=None) if reason == "no topic" else options
        with pytest.raises(SinkFailed, match=reason):
            attempt(told, SinkPart(f"bad-{topic}", 0, number), [batch])
    assert stored(servers, topic) == []


def test_checkpoint_set_back_is_detected(servers: str, topic: str) -> None:
    options = options_for(servers, topic=topic)
    sink = f"back-{topic}"
    for batch in range(2):
        commit(options, attempt(options, SinkPart(sink, batch, 0), [frame(bodies(5))]))
    with pytest.raises(SinkFailed, match=r"batch 0 of .* batch 1 is committed already: the checkpoint was set back"):
        attempt(options, SinkPart(sink, 0, 0), [frame(bodies(5))])
    other = attempt(options, SinkPart(sink, 1, 0), [frame(bodies(6))])
    with pytest.raises(SinkFailed, match="is committed with 5 rows and came again with 6"):
        commit(options, other)
    assert len(stored(servers, topic)) == 10


def test_records_of_a_sink_are_found_behind_many_of_others(servers: str, topic: str) -> None:
    options = options_for(servers, topic=topic)
    sink = f"behind-{topic}"
    commit(options, attempt(options, SinkPart(sink, 0, 0), [frame(bodies(5))]))

    async def crowd() -> None:
        record = msgspec.json.encode(ControlRecord("commit", "somebody-else", 3))
        async with Producer(servers) as producer:
            for queue in await producer.queues(COMMIT_TOPIC):
                for _ in range(4):
                    messages = [Message(COMMIT_TOPIC, record, tags="somebody-else") for _ in range(1000)]
                    await producer.send_batch([*messages, Message(COMMIT_TOPIC, b"no json", tags=sink)], queue=queue)

    anyio.run(crowd)
    assert attempt(options, SinkPart(sink, 0, 0), [frame(bodies(5))]).already_committed
    assert len(stored(servers, topic)) == 5


def test_rows_stored_less_safely_than_required_are_not_committed(tmp_path: Path) -> None:
    """Without its slave a SYNC_MASTER stores and says SLAVE_NOT_AVAILABLE: the commit waits for the slave."""
    with cluster(tmp_path) as nodes:
        nodes.name_server.start()
        nodes.master.start()
        servers = nodes.name_server_address
        options = options_for(servers, topic="unsafe", sendTimeout="2s")
        result = attempt(options, SinkPart("unsafe", 0, 0), [frame(bodies(25))])
        assert {queue.broker_name for queue in result.doubtful} == {"broker-a"}
        with pytest.raises(SinkFailed, match=r"SLAVE_NOT_AVAILABLE.*acceptStatus takes only SEND_OK"):
            commit(options, result)
        assert read_committed(servers, "unsafe") == []
        lenient = options_for(servers, topic="unsafe", acceptStatus="slave_not_available")
        other = attempt(lenient, SinkPart("lenient", 0, 0), [frame(bodies(5, 100))])
        commit(lenient, other)
        assert read_committed(servers, "unsafe") == sorted(bodies(5, 100))
        nodes.slave.start()
        wait_until_attached(nodes)
        again = attempt(options, SinkPart("unsafe", 0, 0), [frame(bodies(25))])
        assert (again.found_count, {queue.broker_name for queue in again.doubtful}) == (25, {"broker-a"})
        commit(options, again)
        assert read_committed(servers, "unsafe") == sorted(bodies(25) + bodies(5, 100))
        for node in reversed(nodes.all):
            node.stop()


def test_broker_that_may_hold_rows_must_be_up(servers: str, topic: str) -> None:
    options = options_for(servers, topic=topic)
    sink = f"absent-{topic}"
    result = attempt(options, SinkPart(sink, 0, 0), [frame(bodies(5))])
    result.floors[topic]["broker-b"] = {0: 7}  # as if the topic were on two brokers then
    commit(options, result)
    with pytest.raises(SinkFailed, match="no master of broker-b can be written to, and it may hold rows of batch 1"):
        attempt(options, SinkPart(sink, 1, 0), [frame(bodies(5))])


def test_a_topic_that_only_one_of_two_groups_has(tmp_path: Path) -> None:
    """The first batch creates the topic on the one group that it sends to; later the other one has it, too."""
    with running_groups(tmp_path) as (servers, _):
        options = options_for(servers, topic="t")

        async def create_on_second() -> None:
            async with Admin(servers) as admin:
                await admin.create_topic("t", queue_count=4, broker_names=["broker-b"])

        commit(options, attempt(options, SinkPart("s", 0, 0), [frame(bodies(5))]))
        assert {message.queue.broker_name for message in read_topic(servers, "t")} == {"broker-a"}
        with pytest.raises(KilledError):
            attempt(options, SinkPart("s", 1, 0), dying_after([frame(bodies(5, 5))]))
        again = attempt(options, SinkPart("s", 1, 0), [frame(bodies(10, 5))])
        assert again.found_count == 5
        commit(options, again)
        with pytest.raises(KilledError):
            attempt(options, SinkPart("s", 2, 0), dying_after([frame(bodies(5, 15))]))
        anyio.run(create_on_second)
        again = attempt(options, SinkPart("s", 2, 0), [frame(bodies(10, 15))])
        assert again.found_count == 5
        commit(options, again)
        assert stored(servers, "t") == read_committed(servers, "t") == sorted(bodies(25))


def test_a_group_that_stopped_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    """No commit has floors of its queues yet, as the topic is new there."""
    with running_groups(tmp_path) as (servers, second):
        options = options_for(servers, topic="t")

        async def create(topic: str, broker_name: str) -> None:
            async with Admin(servers) as admin:
                await admin.create_topic(topic, queue_count=1, broker_names=[broker_name])

        anyio.run(create, COMMIT_TOPIC, "broker-a")
        anyio.run(create, "t", "broker-a")
        commit(options, attempt(options, SinkPart("stops", 0, 0), [frame(bodies(5))]))
        anyio.run(create, "t", "broker-b")
        part = SinkPart("stops", 1, 0)
        with pytest.raises(KilledError):
            attempt(options, part, dying_after([frame(bodies(20, 5))]))
        assert {message.queue.broker_name for message in read_topic(servers, "t")} == {"broker-a", "broker-b"}
        second.stop()
        stopped = "no master of broker-b can be written to, and it may hold rows of batch"
        with pytest.raises(SinkFailed, match=f"{stopped} 1"):
            attempt(options, part, [frame(bodies(20, 5))])
        second.start()
        anyio.run(create, COMMIT_TOPIC, "broker-b")  # this sink's records stay on broker-a, by its name
        again = attempt(options, part, [frame(bodies(20, 5))])
        assert again.found_count == 20
        commit(options, again)
        assert stored(servers, "t") == read_committed(servers, "t") == sorted(bodies(25))
        second.stop()
        with pytest.raises(SinkFailed, match=f"{stopped} 2"):
            attempt(options, SinkPart("stops", 2, 0), [frame(bodies(5, 25))])


def test_a_topic_that_brokers_do_not_create(tmp_path: Path) -> None:
    with cluster(tmp_path, autoCreateTopicEnable="false") as nodes:
        nodes.name_server.start()
        nodes.master.start()
        options = options_for(nodes.name_server_address, topic="nobody", sendTimeout="2s")
        with pytest.raises(SinkFailed, match=r"topic: no name server of servers=.* knows nobody"):
            attempt(options, SinkPart("x", 0, 0), [frame(bodies(5))])
        nodes.master.stop()
        nodes.name_server.stop()


def test_no_name_server() -> None:
    with reserved_ports(1) as (port,):
        nobody = f"127.0.0.1:{port}"
        options = options_for(nobody, topic="t", sendTimeout="1s")
        with pytest.raises(SinkFailed, match=f"servers: .*{nobody}"):
            writers._write(options, SinkPart("x", 0, 0), iter([frame([b"x"])]), False, None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RecordsGone("t queue 0 of b", 3, 9, "its queue ends at 3"),
            "queue offsets 3 to 8 of t queue 0 of b are gone: its queue ends at 3$",
        ),
        (RemoteProtocolError("a route with 2 and 70000 queues"), "a route with 2 and 70000 queues"),
        (BrokerError("a", 1, "no"), "no"),
    ],
)
def test_errors_of_brokers_are_failures_of_the_sink(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(partition.PartWriter, "write", fail)
    monkeypatch.setattr(writers, "commit_parts", fail)
    options = options_for("127.0.0.1:1", topic="t")
    with pytest.raises(SinkFailed, match=f"the sink's batch is not stored: .*{message}"):
        writers._write(options, SinkPart("x", 0, 0), iter([frame([b"x"])]), False, None)
    with pytest.raises(SinkFailed, match=f"the sink's batch is not stored: .*{message}"):
        writers._commit(options, [])


def test_an_error_of_one_of_several_pulls_is_raised_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise RemoteProtocolError("a route with 2 and 70000 queues")

    monkeypatch.setattr(network_pull, "_fill", fail)

    async def pull() -> None:
        settings = network_pull.PullSettings(retry_s=1.0)
        async with PullConsumer("127.0.0.1:1", group="g") as consumer:
            await network_pull.pull_slots(consumer, MessageQueue("t", "b", 0), 0, 1_000_000, settings)

    with pytest.raises(RemoteProtocolError):
        anyio.run(pull)


def test_only_an_invalid_server_address_is_an_option_error() -> None:
    with pytest.raises(OptionError, match="servers"):
        parse_sink_options({"servers": "nowhere"})
