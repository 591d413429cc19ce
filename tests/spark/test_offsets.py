"""Offsets, limits, planning and decisions of a stream over a log in a dict. Starts no Spark."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows

from ha.arrow.read_options import ReadOptions
from ha.errors import OptionError, RecordsGone
from ha.spark.source.batch_reader import plan_batch
from ha.spark.source.limits import TriggerDelay, limit_bytes, limit_records
from ha.spark.source.log_source import Brokers, LogPartition, LogSource, QueueKey, QueueRange, QueueSlice
from ha.spark.source.offsets import (
    StreamOffset,
    decode_positions,
    decode_stream,
    encode_positions,
    encode_stream,
    ending_positions,
    starting_positions,
    subscribed,
)
from ha.spark.source.options import parse_options
from ha.spark.source.planning import deal_out, slices_between, task_count, wait_for
from ha.spark.source.stream_reader import StreamPlanner


class FakePartition(LogPartition):
    def __init__(self, slices: Sequence[QueueSlice]) -> None:
        super().__init__()
        self.slices = list(slices)

    def read(self, options: ReadOptions) -> Iterator[pa.RecordBatch]:
        raise AssertionError


class FakeLog(LogSource):
    """Queues with a first offset and store times: record n was stored at times[n − begin] and has 100 bytes."""

    def __init__(self, *brokers: str) -> None:
        self.names = Brokers(brokers or ("a",))
        self.begins: dict[QueueKey, int] = {}
        self.times: dict[QueueKey, list[int]] = {}
        self.refreshes = 0
        self.on_refresh: list[Any] = []
        self.is_unchanged = False

    def add(self, topic: str, queue_id: int, count: int, *, broker: str | None = None, begin: int = 0) -> QueueKey:
        queue = QueueKey(topic, broker or self.names[0], queue_id)
        self.begins.setdefault(queue, begin)
        times = self.times.setdefault(queue, [])
        times += [1000 + 10 * (self.begins[queue] + len(times) + n) for n in range(count)]
        return queue

    def retain(self, queue: QueueKey, begin: int) -> None:
        self.times[queue] = self.times[queue][begin - self.begins[queue] :]
        self.begins[queue] = begin

    def refresh(self) -> bool:
        self.refreshes += 1
        if self.on_refresh:
            self.on_refresh.pop(0)()
        return not self.is_unchanged

    def brokers(self) -> Brokers:
        return self.names

    def min_offset(self, broker: str) -> None:
        return None

    def physical_offset(self, queue: QueueKey, queue_offset: int) -> int:
        return -1

    def queues(self, topics: frozenset[str] | None) -> list[QueueKey]:
        return sorted(queue for queue in self.times if topics is None or queue.topic in topics)

    def topics(self) -> list[str]:
        return sorted({queue.topic for queue in self.times})

    def queue_range(self, queue: QueueKey) -> QueueRange:
        if queue not in self.times:
            return QueueRange(0, 0)
        return QueueRange(self.begins[queue], self.begins[queue] + len(self.times[queue]))

    def offset_for_time(self, queue: QueueKey, timestamp_ms: int) -> int | None:
        for number, stored_ms in enumerate(self.times.get(queue, [])):
            if stored_ms >= timestamp_ms:
                return self.begins[queue] + number
        return None

    def queue_bytes(self, queue: QueueKey, begin: int, end: int) -> int:
        return 100 * (end - begin)

    def queue_partition(self, slices: Sequence[QueueSlice]) -> LogPartition:
        return FakePartition(slices)

    def range_partitions(
        self, bytes_each: int, count_min: int, topics: frozenset[str] | None
    ) -> list[LogPartition] | None:
        return None

    def close(self) -> None:
        pass


def batch(**given: Any) -> Any:
    return parse_options({"path": "x", **given}, "batch")


def stream(**given: Any) -> Any:
    return parse_options({"path": "x", "fetchOffset.retryIntervalMs": "0", **given}, "stream")


def read_by(partitions: Sequence[LogPartition]) -> dict[QueueKey, list[int]]:
    """Which offsets of each queue the tasks read, checking that none is read twice."""
    found: dict[QueueKey, list[int]] = {}
    for partition in partitions:
        assert isinstance(partition, FakePartition)
        for queue, begin, end in partition.slices:
            found.setdefault(queue, []).extend(range(begin, end))
    for offsets in found.values():
        assert len(offsets) == len(set(offsets))
        offsets.sort()
    return found


# ---- JSON


def test_offsets_are_written_without_the_broker_if_there_is_one() -> None:
    positions = {QueueKey("b", "x", 0): 1, QueueKey("a", "x", 10): 3, QueueKey("a", "x", 2): 5}
    assert json.dumps(encode_positions(positions, ("x",))) == '{"a": {"2": 5, "10": 3}, "b": {"0": 1}}'
    positions = {QueueKey("a", "y", 0): 1, QueueKey("a", "x", 0): 2}
    assert json.dumps(encode_positions(positions, ("x", "y"))) == '{"a": {"x:0": 2, "y:0": 1}}'


queues_of = st.builds(
    QueueKey, st.sampled_from(["a", "%RETRY%g", "ü"]), st.sampled_from(["x", "y:z"]), st.integers(0, 99)
)
positions_of = st.dictionaries(queues_of, st.integers(0, 1 << 62), max_size=8)


@given(positions=positions_of, started=positions_of, initial=st.sampled_from([None, "latest", "offsets"]))
def test_offsets_survive_json(
    positions: dict[QueueKey, int], started: dict[QueueKey, int], initial: str | None
) -> None:
    offset = StreamOffset(positions=positions, started=started, initial=initial)
    brokers = Brokers(("x", "y:z"))
    written = json.dumps(encode_stream(offset, brokers))
    assert decode_stream(json.loads(written), brokers) == offset
    assert json.dumps(encode_stream(decode_stream(json.loads(written), brokers), brokers)) == written


def queues_at(*offsets: int, broker: str = "x", first: int = 0) -> dict[QueueKey, int]:
    return {QueueKey("t", broker, first + number): offset for number, offset in enumerate(offsets)}


def test_offsets_of_many_queues_are_written_as_runs() -> None:
    assert encode_positions(queues_at(*[7] * 31), ("x",)) == {"t": {str(number): 7 for number in range(31)}}
    assert encode_positions(queues_at(*[7] * 32), ("x",)) == {"t": {"0-31": 7}}
    near = [500 + number % 3 for number in range(40)]
    assert encode_positions(queues_at(*near), ("x",)) == {"t": {"0-39": [500, *(n % 3 for n in range(1, 40))]}}
    gaps = queues_at(*near) | queues_at(*near, broker="y", first=100) | queues_at(8, 8, broker="y", first=7)
    assert list(encode_positions(gaps, ("x", "y"))["t"]) == ["x:0-39", "y:7-8", "y:100-139"]
    for positions in (queues_at(*[7] * 32), queues_at(*near), gaps, queues_at(*range(1 << 61, (1 << 61) + 50))):
        written = json.dumps(encode_positions(positions, ("x", "y")))
        assert decode_positions(json.loads(written), Brokers(("x", "y"))) == positions


def test_offsets_of_ten_thousand_queues_are_small() -> None:
    positions = {
        QueueKey(f"topic-{topic}", "x", number): 1_000_000 + (topic * 31 + number * 17) % 10
        for topic in range(100)
        for number in range(100)
    }
    assert (
        len(json.dumps(encode_stream(StreamOffset(positions=positions), ("x",)))) < 40_000
    )  # 250,000 with a member for each queue


def test_a_checkpoint_of_the_old_form_goes_on() -> None:
    log = FakeLog()
    queues = [log.add("t", number, 5) for number in range(40)]
    # As earlier versions wrote it: one member for each queue.
    checkpoint = [json.dumps({"t": {str(number): 3 for number in range(40)}})]
    query = Query(log, checkpoint)
    assert query.trigger()
    assert query.read == {queue: [3, 4] for queue in queues}
    assert json.loads(checkpoint[1]) == {"t": {"0-39": 5}, "$broker": "a"}
    assert not Query(log, checkpoint).trigger()
    read_up = [json.dumps({"t": {str(number): 5 for number in range(40)}})]
    assert not Query(log, read_up).trigger(), "the other form alone is no reason for a batch"
    log.add("t", 7, 1)
    query = Query(log, checkpoint)
    assert query.trigger()
    assert query.read == {queues[7]: [5]}


def test_starting_offsets_may_be_a_stream_s_own() -> None:
    log = FakeLog()
    queues = [log.add("t", number, 5) for number in range(40)]
    offsets = stream(startingOffsets='{"t":{"0-37":2,"38-39":[1,2]}}')
    assert starting_positions(log, offsets, queues) == dict(zip(queues, [2] * 38 + [1, 3], strict=True))


@pytest.mark.parametrize("members", [{"0": "3"}, {"0-1": [3]}, {"0": [3]}, {"1-0": 3}, {"0-65536": 3}, {"0-": 3}])
def test_offsets_in_no_known_form_are_refused(members: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="checkpoint: t: "):
        decode_positions({"t": members}, Brokers(("x",)))


def test_offsets_of_other_brokers_are_refused() -> None:
    assert decode_stream({"a": {"x:0": 3}}, Brokers(("x",))).positions == {QueueKey("a", "x", 0): 3}
    with pytest.raises(OptionError, match="a queue y:0 is of a broker that is not read"):
        decode_stream({"a": {"y:0": 3}}, Brokers(("x",)))
    with pytest.raises(OptionError, match="a queue 0 is the name of 2 queues"):
        decode_stream({"a": {"0": 3}}, Brokers(("x", "y")))


def test_offsets_of_one_registered_broker_are_not_used_for_another() -> None:
    registered = Brokers(("b",), are_registered=True)
    here = {QueueKey("t", "b", 0): 3}
    assert decode_stream({"t": {"0": 3}, "$broker": "b"}, registered).positions == here
    assert decode_stream({"t": {"b:0": 3}}, registered).positions == here
    with pytest.raises(OptionError, match="t queue a:0 is of a broker that is not registered with the name servers"):
        decode_stream({"t": {"0": 3}, "$broker": "a"}, registered)
    with pytest.raises(OptionError, match="the broker of t queue 0 is not named, so it may be another one than b"):
        decode_stream({"t": {"0": 3}}, registered)
    # A single store may have been renamed.
    assert decode_stream({"t": {"0": 3}, "$broker": "a"}, Brokers(("b",))).positions == here


# ---- what is read, from where to where


def test_subscription() -> None:
    log = FakeLog("a", "b")
    one, two, three, other = (
        log.add("flights", 0, 1),
        log.add("flights", 1, 1, broker="b"),
        log.add("delays", 0, 1),
        log.add("flights-old", 0, 1),
    )
    assert subscribed(log, batch()) == [three, one, two, other]
    assert subscribed(log, batch(subscribe="flights,delays")) == [three, one, two]
    assert subscribed(log, batch(subscribePattern="flights")) == [one, two]
    assert subscribed(log, batch(subscribePattern="fl.*")) == [one, two, other]
    assert subscribed(log, batch(assign='{"flights":[0,1,2]}')) == [one, two]
    assert subscribed(log, batch(assign='{"flights":["a:0","a:1"]}')) == [one]


def test_starting_and_ending_positions() -> None:
    log = FakeLog()
    one, two = log.add("t", 0, 10, begin=5), log.add("t", 1, 4)
    both = [one, two]
    assert starting_positions(log, batch(), both) == {one: 5, two: 0}
    assert ending_positions(log, batch(), both) == {one: 15, two: 4}
    assert starting_positions(log, stream(), both) == {one: 15, two: 4}
    assert starting_positions(log, stream(startingOffsets='{"t":{"0":-2,"1":-1}}'), both) == {one: 5, two: 4}
    assert starting_positions(log, stream(startingOffsets='{"t":{"0":7,"1":2,"9":-1}}'), both) == {one: 7, two: 2}
    assert starting_positions(log, batch(startingTimestamp="1025"), both) == {one: 5, two: 3}
    by_time = {"startingOffsetsByTimestamp": '{"t":{"0":1061,"1":0}}'}
    assert starting_positions(log, batch(**by_time), both) == {one: 7, two: 0}
    # An end in the future is the end; a start is an error unless the strategy says latest.
    assert ending_positions(log, batch(endingTimestamp="1062"), both) == {one: 7, two: 4}
    with pytest.raises(OptionError, match="t queue 1 of a has no record stored at 1062 ms or later"):
        starting_positions(log, batch(startingTimestamp="1062"), both)
    latest = batch(startingTimestamp="1062", startingOffsetsByTimestampStrategy="latest")
    assert starting_positions(log, latest, both) == {one: 7, two: 4}


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ('{"t":{"0":1}}', "t queue 1 of a is left out"),
        ('{"t":{"0":1,"1":1},"u":{"0":1}}', "u is not read"),
        ('{"t":{"0":1,"1":1,"2":1}}', "t queue 2 of a does not exist"),
        ('{"t":{"b:0":1,"0":1,"1":1}}', "of a broker that is not read"),
    ],
)
def test_offsets_by_queue_must_be_of_all_queues_and_no_others(offsets: str, reason: str) -> None:
    log = FakeLog()
    queues = [log.add("t", 0, 5), log.add("t", 1, 5)]
    with pytest.raises(OptionError, match=reason) as caught:
        starting_positions(log, stream(startingOffsets=offsets), queues)
    assert caught.value.option == "startingOffsets"


def test_missing_topic_is_an_error_in_a_batch() -> None:
    log = FakeLog()
    log.add("flights", 0, 5)
    log.add("%RETRY%g", 0, 5)
    with pytest.raises(OptionError, match=r"subscribe: topic 'fligths' has no queue in the log; .* flights$"):
        plan_batch(log, batch(topic="fligths"))


def test_missing_queue_is_an_error_in_a_batch() -> None:
    log = FakeLog("a", "b")
    log.add("flights", 0, 5)
    log.add("flights", 1, 5, broker="b")
    assert len(read_by(plan_batch(log, batch(assign='{"flights":[0,1]}')))) == 2
    for queue in ("2", '"a:1"'):
        with pytest.raises(OptionError, match=r"assign: flights has no queue (2|a:1) in the log; .* a:0, b:1$"):
            plan_batch(log, batch(assign='{"flights":[0,' + queue + "]}"))


def test_stream_warns_of_topics_that_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    log = FakeLog()
    log.add("flights", 0, 5)
    assert StreamPlanner(log, stream(topic="later,flights")).initial()["$initial"] == "latest"
    assert [record.getMessage() for record in caplog.records] == [
        "stream.topic_missing topic='later' hint=\"it is read from its first message on\""
    ]


@pytest.mark.parametrize("given", [{}, {"maxBytesPerTrigger": "1g"}, {"maxOffsetsPerTrigger": "100000"}])
def test_large_batch_without_a_limit_is_warned_about(given: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    log = FakeLog()
    log.add("t", 0, 300)
    query = Query(log, [], startingOffsets="earliest", maxRecordsPerPartition="1", **given)
    assert query.trigger()
    warned = [record.getMessage() for record in caplog.records if "batch_large" in record.getMessage()]
    assert len(warned) == (0 if given else 1)
    assert all("tasks=300 records=300" in line for line in warned)


def test_crossing_times_are_an_empty_range() -> None:
    log = FakeLog()
    queue = log.add("t", 0, 10)
    options = batch(topic="t", startingTimestamp="1050", endingOffsets='{"t":{"0":2}}')
    assert plan_batch(log, options) == []
    assert read_by(plan_batch(log, batch(topic="t", startingTimestamp="1050"))) == {queue: [5, 6, 7, 8, 9]}


# ---- loss


def test_deleted_offsets_are_an_error_or_skipped(caplog: pytest.LogCaptureFixture) -> None:
    log = FakeLog()
    queue = log.add("t", 3, 10)
    log.retain(queue, 6)
    with pytest.raises(RecordsGone, match=r"t queue 3 of a: offsets 2 to 5 are gone: retention") as caught:
        slices_between(log, {queue: 2}, {queue: 9}, fail_on_data_loss=True)
    assert (caught.value.first, caught.value.end) == (2, 6)
    assert slices_between(log, {queue: 2}, {queue: 9}, fail_on_data_loss=False) == [QueueSlice(queue, 6, 9)]
    assert "source.offsets_skipped of='t queue 3 of a' first=2 last=5" in caplog.text
    assert slices_between(log, {queue: 2}, {queue: 4}, fail_on_data_loss=False) == []
    assert slices_between(log, {queue: 6}, {queue: 10}, fail_on_data_loss=True) == [QueueSlice(queue, 6, 10)]


def test_offsets_after_the_end_belong_to_another_log() -> None:
    log = FakeLog()
    queue = log.add("t", 0, 10)
    with pytest.raises(RecordsGone, match="offsets 10 to 14 are gone: the queue ends at 10"):
        slices_between(log, {queue: 8}, {queue: 15}, fail_on_data_loss=True)
    assert slices_between(log, {queue: 8}, {queue: 15}, fail_on_data_loss=False) == [QueueSlice(queue, 8, 10)]
    with pytest.raises(RecordsGone, match="offsets 10 to 11 are gone: it went back to 10"):
        slices_between(log, {queue: 12}, {queue: 10}, fail_on_data_loss=True)
    assert slices_between(log, {queue: 12}, {queue: 10}, fail_on_data_loss=False) == []


def test_log_being_copied_again_is_waited_for() -> None:
    log = FakeLog()
    queue = log.add("t", 0, 5)
    log.on_refresh = [lambda: log.add("t", 0, 2), lambda: log.add("t", 0, 3)]
    pauses: list[None] = []
    assert wait_for(log, {queue: 10}, 3, lambda: pauses.append(None)) == {}
    assert len(pauses) == 2
    assert wait_for(log, {queue: 11}, 3, lambda: pauses.append(None)) == {queue: 10}
    assert len(pauses) == 5


# ---- limits


def test_a_limit_is_shared_pro_rata_as_kafka_s_source_does() -> None:
    a, b, c, d = (QueueKey("t", "x", number) for number in range(4))
    start = {a: 0, b: 100, c: 7, d: 5}
    end = {a: 900, b: 190, c: 17, d: 5}
    assert limit_records(1000, start, end) == end
    # 900 + 90 + 10 = 1000 records: a tenth of each, rounded down but at least one, nothing for what has none.
    assert limit_records(100, start, end) == {a: 90, b: 109, c: 8, d: 5}
    assert limit_records(55, start, end) == {a: 49, b: 104, c: 8, d: 5}
    assert limit_records(1, start, end) == {a: 1, b: 101, c: 8, d: 5}


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=20),
    limit=st.integers(1, 3000),
)
def test_limit_advances_every_queue_within_bounds(sizes: list[int], limit: int) -> None:
    start = {QueueKey("t", "x", number): number for number in range(len(sizes))}
    end = {queue: start[queue] + size for queue, size in zip(start, sizes, strict=True)}
    found = limit_records(limit, start, end)
    taken = [found[queue] - start[queue] for queue in start]
    assert all(0 <= took <= size and (took > 0) == (size > 0) for took, size in zip(taken, sizes, strict=True))
    assert sum(taken) <= limit + len(sizes)
    if sum(sizes) <= limit:
        assert found == end


@given(data=st.data(), limit=st.integers(1, 5000))
def test_a_limit_of_bytes_takes_what_fits_and_one_record_at_least(data: st.DataObject, limit: int) -> None:
    record_sizes = {
        QueueKey("t", "x", number): data.draw(st.lists(st.integers(1, 500), max_size=30)) for number in range(3)
    }
    start = dict.fromkeys(record_sizes, 0)
    end = {queue: len(sizes) for queue, sizes in record_sizes.items()}
    found = limit_bytes(limit, start, end, lambda queue, begin, stop: sum(record_sizes[queue][begin:stop]))
    total = sum(map(sum, record_sizes.values()))
    for queue, sizes in record_sizes.items():
        share = limit * sum(sizes) // total if total > limit else sum(sizes)
        fits = [count for count in range(len(sizes) + 1) if sum(sizes[:count]) <= share]
        assert found[queue] == max(fits[-1], min(1, len(sizes)))


def test_a_batch_waits_for_enough_records_or_for_the_delay() -> None:
    now = [0]
    delay = TriggerDelay(10, 100, lambda: now[0])
    assert delay.holds_back(0)
    assert not delay.holds_back(3)  # the first batch of a query does not wait
    now[0] = 99
    assert delay.holds_back(9)
    assert not delay.holds_back(10)
    now[0] = 198
    assert delay.holds_back(1)
    now[0] = 199
    assert not delay.holds_back(1)
    now[0] = 1000
    assert delay.holds_back(0)
    assert not delay.holds_back(1)  # it is late already


# ---- tasks


def test_task_count() -> None:
    def count(records: int, size: int | None = 0, **more: Any) -> int:
        given = {"min_partitions": None, "cores": 2, "records_max": None, "bytes_max": 1 << 20, **more}
        return task_count(records, size, **given)

    assert count(0) == 0
    assert count(1) == 1
    assert count(8192) == 1
    assert count(8193) == 2
    assert count(100_000) == 2  # as many as there are cores
    assert count(100_000, 5 << 20) == 5  # unless there is too much for a task
    assert count(100_000, records_max=30_000) == 4
    assert count(100_000, min_partitions=7) == 7
    assert count(100_000, min_partitions=1) == 1
    assert count(3, min_partitions=7) == 3
    assert count(1 << 20, None) == 4


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=10),
    count=st.integers(1, 60),
)
def test_each_record_belongs_to_one_task_in_order(sizes: list[int], count: int) -> None:
    slices = [QueueSlice(QueueKey("t", "x", number), 10, 10 + size) for number, size in enumerate(sizes)]
    total = sum(sizes)
    count = min(count, total)
    parts = deal_out(slices, count)
    assert len(parts) == count
    flat = [(part.queue, offset) for task in parts for part in task for offset in range(part.begin, part.end)]
    assert flat == [(part.queue, offset) for part in slices for offset in range(part.begin, part.end)]
    amounts = [sum(part.entry_count for part in task) for task in parts]
    assert max(amounts) - min(amounts) <= 1


# ---- the stream


class Query:
    """Spark's use of a stream reader: every offset passes through JSON and the checkpoint."""

    def __init__(self, log: LogSource, checkpoint: list[str], **given: str) -> None:
        self.planner = StreamPlanner(log, stream(**given))
        self.limit = self.planner.default_limit()
        self.checkpoint = checkpoint  # the ends of the batches that were planned
        self.read: dict[QueueKey, list[int]] = {}

    def start(self) -> dict[str, Any]:
        start: dict[str, Any] = json.loads(
            self.checkpoint[-1] if self.checkpoint else json.dumps(self.planner.initial())
        )
        return start

    def trigger(self, limit: ReadLimit | None = None) -> bool:
        """Runs one batch; returns whether there was one."""
        start = self.start()
        end = json.dumps(self.planner.latest(start, limit or self.limit))
        if end == json.dumps(start):
            return False
        self.checkpoint.append(end)
        self.run(start, json.loads(end))
        return True

    def run(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        for queue, offsets in read_by(self.planner.partitions(start, end)).items():
            self.read.setdefault(queue, []).extend(offsets)


def test_an_unchanged_log_is_not_examined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log = FakeLog()
    one = log.add("t", 0, 5)
    query = Query(log, [], startingOffsets="earliest", minOffsetsPerTrigger="3")
    assert query.trigger()
    assert not query.trigger()
    log.is_unchanged = True
    with monkeypatch.context() as patch:
        for name in ("queues", "topics", "queue_range"):
            patch.delattr(FakeLog, name)
        assert not query.trigger()
    log.is_unchanged = False
    log.add("t", 0, 2)
    assert not query.trigger()
    log.is_unchanged = True
    query.planner._delay = TriggerDelay(3, 0, lambda: 0)  # nothing is stored, but the delay has passed
    assert query.trigger()
    assert query.read == {one: list(range(7))}


def test_stream_reads_everything_once_with_new_queues() -> None:
    log = FakeLog()
    one = log.add("t", 0, 5)
    query = Query(log, [], startingOffsets="earliest")
    assert query.trigger()
    assert not query.trigger()
    log.add("t", 0, 3)
    two = log.add("t", 1, 2, begin=4)  # appears later: from its first record, wherever that is
    assert query.trigger()
    log.add("u", 0, 0)  # a queue without a record is no reason for a batch
    assert not query.trigger()
    assert query.read == {one: list(range(8)), two: [4, 5]}


def test_stream_from_latest_keeps_its_start() -> None:
    log = FakeLog()
    one = log.add("t", 0, 5)
    checkpoint: list[str] = []
    assert Query(log, checkpoint).trigger()  # an empty batch that says where it began
    assert json.loads(checkpoint[0]) == {"t": {"0": 5}, "$broker": "a", "$start": {"t": {"0": 5}}}
    log.add("t", 0, 3)
    query = Query(log, checkpoint)
    assert query.trigger()
    assert query.read == {one: [5, 6, 7]}
    assert json.loads(checkpoint[1]) == {"t": {"0": 8}, "$broker": "a"}
    assert not query.trigger()


def test_a_query_continues_when_a_broker_is_added() -> None:
    log = FakeLog()
    one = log.add("t", 0, 5)
    checkpoint: list[str] = []
    query = Query(log, checkpoint, startingOffsets="earliest")
    assert query.trigger()
    log.names = Brokers(("a", "b"))
    log.add("t", 0, 1)
    two = log.add("t", 0, 2, broker="b")
    for running in (query, Query(log, checkpoint[:1])):
        assert running.trigger()
        assert running.read[one][-1] == 5
        assert running.read[two] == [0, 1]
    assert json.loads(checkpoint[1]) == {"t": {"a:0": 6, "b:0": 2}, "$start": {"t": {"b:0": 0}}}


def test_the_first_batch_is_read_again_as_it_was_planned() -> None:
    """Spark requests the initial offset again if the first batch was not finished; by then latest is higher."""
    log = FakeLog()
    one = log.add("t", 0, 5)
    query = Query(log, [])
    start = query.start()
    log.add("t", 0, 4)
    end = query.planner.latest(start, ReadAllAvailable())
    log.add("t", 0, 10)
    two = log.add("t", 1, 10)
    again = Query(log, [])
    again.run(again.start(), json.loads(json.dumps(end)))
    assert again.read == {one: [5, 6, 7, 8]}
    assert two not in again.read


def test_a_batch_with_a_new_queue_is_read_again_as_it_was_planned() -> None:
    log = FakeLog()
    one = log.add("t", 0, 5)
    query = Query(log, [], startingOffsets="earliest")
    assert query.trigger()
    two = log.add("t", 1, 6)
    assert query.trigger()
    start, end = map(json.loads, query.checkpoint[-2:])
    assert query.read == {one: list(range(5)), two: list(range(6))}
    log.retain(two, 4)
    again = Query(log, [])
    with pytest.raises(RecordsGone, match="t queue 1 of a: offsets 0 to 3"):
        again.run(start, end)


def test_limits_hold_together_and_all_available_ignores_them() -> None:
    log = FakeLog()
    one, two = log.add("t", 0, 300), log.add("t", 1, 100)
    query = Query(log, [], startingOffsets="earliest", maxOffsetsPerTrigger="40", maxBytesPerTrigger="2000")
    assert query.limit == ReadMaxRows(40)
    assert query.trigger()
    assert json.loads(query.checkpoint[-1])["t"] == {"0": 15, "1": 5}  # 2000 bytes are 20 records
    assert query.planner.report_latest() == {"t": {"0": 300, "1": 100}}
    assert query.trigger(ReadMaxRows(4))
    assert json.loads(query.checkpoint[-1])["t"] == {"0": 18, "1": 6}
    assert query.trigger(ReadAllAvailable())
    assert query.read == {one: list(range(300)), two: list(range(100))}
    assert Query(log, [], maxBytesPerTrigger="5").limit == ReadMaxBytes(5)
    assert Query(log, [], minOffsetsPerTrigger="5").limit == ReadMinRows(5)
    assert Query(log, []).limit == ReadAllAvailable()


def test_min_offsets_do_not_wait_under_available_now() -> None:
    log = FakeLog()
    one = log.add("t", 0, 3)
    waits = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "10", "maxTriggerDelay": "1h"}
    query = Query(log, [], **waits)
    assert query.trigger()
    log.add("t", 0, 9)
    assert not query.trigger()
    log.add("t", 0, 3)
    now = Query(log, query.checkpoint, maxOffsetsPerTrigger="10", **waits)
    now.planner.freeze()
    assert now.trigger()
    assert now.trigger()  # two are left, and no more will come
    assert now.read == {one: list(range(3, 15))}
    assert not now.trigger()


def test_available_now_reads_existing_messages_and_ends() -> None:
    log = FakeLog()
    one = log.add("t", 0, 100)
    query = Query(log, [], startingOffsets="earliest", maxOffsetsPerTrigger="30")
    query.planner.freeze()
    batches = 0
    while query.trigger():
        batches += 1
        log.add("t", 0, 50)
        log.add("u", 0, 50)
        assert batches < 10
    assert batches == 4
    assert query.read == {one: list(range(100))}


def test_stream_survives_a_completed_resync() -> None:
    log = FakeLog()
    one = log.add("t", 0, 10)
    query = Query(log, [], startingOffsets="earliest")
    assert query.trigger()
    times = log.times.pop(one)
    log.on_refresh = [lambda: None, lambda: None, lambda: log.times.update({one: times})]
    assert not query.trigger()
    log.add("t", 0, 2)
    assert query.trigger()
    assert query.read == {one: list(range(12))}


def test_a_deleted_topic_and_a_log_that_went_back_follow_fail_on_data_loss(caplog: pytest.LogCaptureFixture) -> None:
    log = FakeLog()
    gone, back = log.add("t", 0, 10), log.add("u", 0, 10)
    checkpoint: list[str] = []
    assert Query(log, checkpoint, startingOffsets="earliest").trigger()
    del log.times[gone]
    with pytest.raises(RecordsGone, match=r"t queue 0 of a: offsets 0 to 9 are gone: its topic was deleted"):
        Query(log, list(checkpoint)).trigger()
    goes_on = Query(log, checkpoint, failOnDataLoss="false")
    assert goes_on.trigger()
    assert "its topic was deleted" in caplog.text
    log.add("t", 0, 3)  # made again: all of it is new
    log.times[back] = log.times[back][:4]
    with pytest.raises(RecordsGone, match="u queue 0 of a: offsets 4 to 9 are gone: the queue went back to 4"):
        Query(log, list(checkpoint)).trigger()
    assert goes_on.trigger()
    log.add("u", 0, 2)
    assert goes_on.trigger()
    assert goes_on.read == {gone: [0, 1, 2], back: [4, 5]}


def test_unsubscribed_topic_keeps_its_offset() -> None:
    log = FakeLog()
    one, two = log.add("t", 0, 5), log.add("u", 0, 5)
    checkpoint: list[str] = []
    assert Query(log, checkpoint, startingOffsets="earliest").trigger()
    log.add("t", 0, 5)
    log.add("u", 0, 5)
    only = Query(log, checkpoint, topic="u")
    assert only.trigger()
    assert only.read == {two: [5, 6, 7, 8, 9]}
    both = Query(log, checkpoint)
    assert both.trigger()
    assert both.read == {one: [5, 6, 7, 8, 9]}


def test_idle_stream_delays_the_next_refresh() -> None:
    now = [100.0]
    log = FakeLog()
    log.add("t", 0, 5)

    def look(seconds: float) -> None:
        log.on_refresh = [lambda: now.__setitem__(0, now[0] + seconds)]

    planner = StreamPlanner(log, stream(startingOffsets="earliest"), clock_s=lambda: now[0])
    look(0)
    start = planner.initial()
    look(0.25)
    end = planner.latest(start, ReadAllAvailable())
    assert end["t"] == {"0": 5}
    seen = log.refreshes
    look(0.25)
    assert planner.latest(end, ReadAllAvailable()) == end  # something was found before: it polls at once
    assert log.refreshes == seen + 1
    now[0] += 0.99
    assert planner.latest(end, ReadAllAvailable()) == end
    assert log.refreshes == seen + 1
    now[0] += 0.02
    log.add("t", 0, 1)
    look(0.25)
    assert planner.latest(end, ReadAllAvailable())["t"] == {"0": 6}
    assert log.refreshes == seen + 2
