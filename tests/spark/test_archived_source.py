"""A stream that begins in an archive, without Spark: its planner and tasks, over real files of both."""

from __future__ import annotations

import json
import pickle
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from ha.arrow.confirmed import Confirmed
from ha.arrow.queues import QueueId
from ha.arrow.read_options import DEFAULT_COLUMNS
from ha.errors import ArchiveDamaged, CorruptLog, OptionError, RecordsGone
from ha.protocol.codes import SysFlag
from ha.protocol.store_files import ENTRY
from ha.spark.jobs.archive import ArchiveOptions, ArchiveResult, archive
from ha.spark.jobs.archive.manifest import Manifest, State
from ha.spark.jobs.archive.read import archive_states, steady_state
from ha.spark.source.archived_source import check_broker_names
from ha.spark.source.listener import measure_lag
from ha.spark.source.local import LocalSource
from ha.spark.source.log_source import LogPartition, QueueKey
from ha.spark.source.offsets import decode_stream
from ha.spark.source.opening import open_source
from ha.spark.source.options import SourceOptions, parse_any, parse_options
from ha.spark.source.planning import slices_between
from ha.spark.source.stream_reader import StreamPlanner
from ha.spark.topic_table import start_offsets
from tests.arrow.stores import StoreWriter
from tests.spark.inline import inline_spark
from tests.spark.stores import KilledError, flights_and_others, live_store, make_store, message

SEGMENT = 32 << 10

messages = partial(flights_and_others, padding=200)


class View:
    """A store, its archive, and the options of a stream over both."""

    def __init__(self, folder: Path, **given: str) -> None:
        self.store = folder / "broker-b"
        self.archive = folder / "archive"
        self.given = {"path": str(self.store), "archive": str(self.archive), "topic": "flights", **given}

    def run_archive(self, fatal: str = "", **changes: Any) -> ArchiveResult:
        def kill(step: str) -> None:
            if fatal and step.startswith(fatal):
                raise KilledError

        options = {"range_bytes": 16 << 10, "compact_files_min": 2, **changes}
        made = ArchiveOptions(path=str(self.store), archive=str(self.archive), **options)
        return archive(inline_spark(), made, failpoint=kill)

    def options(self, **more: str) -> SourceOptions:
        return parse_options({**self.given, **more}, "stream")

    @contextmanager
    def planner(self, **more: str) -> Iterator[StreamPlanner]:
        options = self.options(**more)
        with closing(open_source(options)) as source:
            yield StreamPlanner(source, options)

    def all_rows(self, **more: str) -> list[dict[str, Any]]:
        """The rows of a first micro-batch that reads everything."""
        return first_rows(self.given | more)

    def log_rows(self, **more: str) -> list[dict[str, Any]]:
        """The rows that the log alone has."""
        given = {name: value for name, value in self.given.items() if name != "archive"}
        return first_rows({**given, "startingOffsets": "earliest", **more})


def first_rows(given: dict[str, str]) -> list[dict[str, Any]]:
    options = parse_options(given, "stream")
    with closing(open_source(options)) as source:
        planner = StreamPlanner(source, options)
        start = planner.initial()
        tasks = planner.partitions(start, planner.latest(start, ReadAllAvailable()))
    return [row for task in tasks for row in rows_of(task, options)]


def rows_of(task: LogPartition, options: SourceOptions) -> list[dict[str, Any]]:
    task = pickle.loads(pickle.dumps(task))
    batches = list(task.read(options.read_options(options.columns)))
    assert all(batch.schema.names == list(options.columns) for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return sorted(int(row["body"][:8]) for row in rows)


class Reader:
    """A query: micro-batches, with a checkpoint that survives its process."""

    def __init__(self, view: View, **more: str) -> None:
        self.view = view
        self.more = more
        self.committed: dict[str, Any] | None = None
        self.planned: dict[str, Any] | None = None
        self.seen: Counter[int] = Counter()

    def run(self, batches: int, limit: ReadLimit | None = None, *, dies: bool = False) -> None:
        """Open the query, finish what was planned, and run some batches; `dies` in the middle of the last one."""
        with self.view.planner(**self.more) as planner:
            start = self.committed if self.committed is not None else json.loads(json.dumps(planner.initial()))
            for number in range(batches):
                if self.planned is None:
                    end = planner.latest(start, limit or planner.default_limit())
                    if end == start:
                        return
                    self.planned = json.loads(json.dumps(end))
                tasks = planner.partitions(start, self.planned)
                if dies and number == batches - 1:
                    return
                for task in tasks:
                    self.seen.update(numbers(rows_of(task, self.view.options(**self.more))))
                start = self.committed = self.planned
                self.planned = None


def test_a_stream_begins_with_the_archive_and_goes_on_in_the_log(tmp_path: Path) -> None:
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 200))
        expected = {(row["queueId"], row["queueOffset"]): row for row in view.log_rows()}
        view.run_archive()
        live.put(messages(200, 220))
        assert live.clean() > 2
        rows = view.all_rows()
        assert numbers(rows) == list(range(220))
        for row in rows:
            place = row["queueId"], row["queueOffset"]
            assert place not in expected or row == expected.pop(place)
        assert not expected
        # As without an archive, a stream can start elsewhere.
        assert view.all_rows(startingOffsets="latest") == []
        rows = view.all_rows(startingOffsets='{"flights":{"0":5,"1":-1,"2":53,"3":-2}}')
        assert Counter(row["queueId"] for row in rows) == {0: 50, 2: 2, 3: 55}


@pytest.mark.parametrize("seed", range(4))
def test_each_message_comes_once_whatever_happens_meanwhile(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    limits = [{}, {"maxOffsetsPerTrigger": "37"}, {"maxBytesPerTrigger": "4k"}]
    view = View(tmp_path)
    form = ("parquet", "iceberg")[seed % 2]
    reader = Reader(view, **dice.choice(limits))
    count = 0
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 20))
        view.run_archive(format=form)
        count = 20
        for _ in range(25):
            step = dice.choice(["put", "put", "archive", "kill", "delete", "read", "die"])
            if step == "put":
                more = dice.randrange(10, 80)
                live.put(messages(count, count + more))
                count += more
            elif step == "archive":
                view.run_archive(format=form)
            elif step == "kill":
                fatal = dice.choice(["link", "remove", "rename", "mark", "clear", "follow"])
                try:
                    view.run_archive(fatal, format=form)
                except KilledError:
                    pass
            elif step == "delete":
                view.run_archive(format=form)  # retention deletes only what is archived
                live.clean()
            else:
                reader.run(dice.randrange(1, 4), dies=step == "die")
        reader.run(1000)
    assert sorted(reader.seen) == list(range(count))
    assert set(reader.seen.values()) == {1}


def test_a_running_query_finds_what_was_archived_since_it_started(tmp_path: Path) -> None:
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 100))
        view.run_archive()
        with view.planner() as planner:
            read_to = planner.latest(planner.initial(), ReadAllAvailable())
            live.put(messages(100, 200))
            view.run_archive()
            live.put(messages(200, 205))
            live.clean()
            tasks = planner.partitions(read_to, planner.latest(read_to, ReadAllAvailable()))
            found = numbers([row for task in tasks for row in rows_of(task, view.options())])
    assert found == list(range(100, 205))


def test_a_batch_planned_while_a_node_recovers_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was killed removes the last entries of its queues, and writes them again.

    If that came between two looks at a queue, the queue seemed to begin at its end, so the archive was asked for what
    only the log had.
    """
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 300))
        view.run_archive()
        live.clean()
        live.put(messages(300, 400))
    (view.store / "abort").touch()
    queues = {file: file.read_bytes() for file in (view.store / "consumequeue").glob("flights/*/*")}
    begin = min(int(file.name) for file in (view.store / "commitlog").iterdir())
    find_end = Confirmed.queue_end

    def remove_entries(self: Confirmed, key: QueueId) -> int:
        assert self.end_offset > 0  # finds the ends of all queues
        for file, raw in queues.items():
            kept = ENTRY.size * sum(size > 0 and place < begin for place, size, _ in ENTRY.iter_unpack(raw))
            file.write_bytes(raw[:kept].ljust(len(raw), b"\0"))
        return find_end(self, key)

    with view.planner() as planner:
        start = planner.initial()
        end = planner.latest(start, ReadAllAvailable())
    with view.planner() as planner, monkeypatch.context() as patched:
        patched.setattr(Confirmed, "queue_end", remove_entries)
        tasks = planner.partitions(start, end)
    for file, raw in queues.items():
        file.write_bytes(raw)
    found = numbers([row for task in tasks for row in rows_of(task, view.options())])
    assert found == list(range(400))


def test_what_only_a_merge_of_files_has_replaced_is_read_from_the_new_file(tmp_path: Path) -> None:
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        for begin in range(0, 200, 50):
            live.put(messages(begin, begin + 50))
            view.run_archive(compact_files_min=0)
        live.put(messages(200, 210))
        live.clean()
        with view.planner(minPartitions="3") as planner:
            start = planner.initial()
            tasks = planner.partitions(start, planner.latest(start, ReadAllAvailable()))
            before = {path.name for path in view.archive.glob("topic=flights/*/*.parquet")}
            assert view.run_archive().merged_files
            assert not before & {path.name for path in view.archive.glob("topic=flights/*/*.parquet")}
            assert len(tasks) > 2
            assert numbers([row for task in tasks for row in rows_of(task, view.options())]) == list(range(210))
            for path in view.archive.glob("topic=flights/*/*.parquet"):
                path.unlink()
            with pytest.raises(ArchiveDamaged, match="missing"):
                rows_of(tasks[0], view.options())


def test_files_that_a_merge_replaces_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(tmp_path, minPartitions="1")
    with live_store(view.store, SEGMENT) as live:
        for begin in range(0, 200, 50):
            live.put(messages(begin, begin + 50))
            view.run_archive(compact_files_min=0)
        live.clean()
        with view.planner() as planner:
            start = planner.initial()
            [task, *_] = planner.partitions(start, planner.latest(start, ReadAllAvailable()))
        expected = numbers(rows_of(task, view.options()))
        assert len(expected) > 100
        merged: list[int] = []

        def state_then_merge(manifest: Manifest) -> State:
            state = steady_state(manifest)
            if not merged:
                merged.append(view.run_archive().merged_files)
            return state

        monkeypatch.setattr("ha.spark.jobs.archive.rows.steady_state", state_then_merge)
        assert numbers(rows_of(task, view.options())) == expected
        assert merged[0]


def test_messages_that_neither_has_are_a_loss_but_not_a_hole(tmp_path: Path) -> None:
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 100))
        view.run_archive()
        live.put(messages(100, 400))
        live.clean()
        with pytest.raises(RecordsGone, match="not in the archive"):
            view.all_rows()
        rest = numbers(view.all_rows(failOnDataLoss="false"))
        assert rest[:100] == list(range(100))
        assert 100 not in rest
        assert rest[-1] == 399
        view.run_archive(fail_on_data_loss=False)
        assert numbers(view.all_rows()) == rest


def test_a_task_fails_if_retention_deletes_what_it_was_to_read(tmp_path: Path) -> None:
    """With failOnDataLoss=false as well: planned again, the batch finds them in the archive."""
    view = View(tmp_path, failOnDataLoss="false")
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 200))
        view.run_archive()
        with view.planner() as planner:
            start = planner.initial()
            end = planner.latest(start, ReadAllAvailable())
            tasks = planner.partitions(start, end)
            live.put(messages(200, 210))
            live.clean()
            with pytest.raises(RecordsGone):
                [rows_of(task, view.options()) for task in tasks]
        with view.planner() as planner:
            again = [row for task in planner.partitions(start, end) for row in rows_of(task, view.options())]
            assert numbers(again) == list(range(200))


@pytest.mark.parametrize("rows_max", [1, 7, 90, 1000])
@pytest.mark.parametrize("is_merged", [False, True])
def test_tasks_have_a_maximum_of_archived_records(tmp_path: Path, rows_max: int, is_merged: bool) -> None:
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        for begin in range(0, 240, 40):
            live.put(messages(begin, begin + 40))
            view.run_archive(compact_files_min=2 if is_merged else 0)
        live.clean()
    options = view.options(maxRecordsPerPartition=str(rows_max))
    with view.planner(maxRecordsPerPartition=str(rows_max)) as planner:
        start = planner.initial()
        tasks = planner.partitions(start, planner.latest(start, ReadAllAvailable()))
    found = [numbers(rows_of(task, options)) for task in tasks]
    assert sorted(number for each in found for number in each) == list(range(240))
    assert max(map(len, found)) <= rows_max
    assert len(tasks) <= 2 * max(2, -(-240 // rows_max)) + 6


def test_a_queue_and_a_broker_that_only_the_archive_has(tmp_path: Path) -> None:
    view = View(tmp_path)
    make_store(view.store, messages(0, 50))
    view.run_archive()
    other = make_store(tmp_path / "broker-c", [message(number, queue_id=9) for number in range(50, 60)])
    rows = view.all_rows(path=str(other))
    assert numbers(rows) == list(range(60))
    assert Counter(row["brokerName"] for row in rows) == {"broker-b": 50, "broker-c": 10}
    # Another name for the archived broker.
    rows = view.all_rows(path=f"{other},{view.store}", brokerName="broker-c,broker-b")
    assert numbers(rows) == list(range(60))


@pytest.mark.parametrize(
    ("subscription", "topics"),
    [
        ({}, {"flights": 210, "other": 210}),
        ({"subscribePattern": "o.*"}, {"other": 210}),
        ({"assign": '{"flights":[1]}'}, {"flights": 53}),
    ],
)
def test_subscriptions(tmp_path: Path, subscription: dict[str, str], topics: dict[str, int]) -> None:
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 200))
        view.run_archive()
        live.put(messages(200, 210))
        assert live.clean()
        given = {"path": str(view.store), "archive": str(view.archive), **subscription}
        rows = first_rows(given)
    assert Counter(row["topic"] for row in rows) == topics


class Servers(LocalSource):
    """Two brokers as with `servers`; name servers don't know broker-b while it is away."""

    has_left = False

    def queues(self, topics: frozenset[str] | None) -> list[QueueKey]:
        return [queue for queue in super().queues(topics) if not (self.has_left and queue.broker == "broker-b")]


@pytest.mark.parametrize("fail_on_data_loss", ["true", "false"])
def test_positions_of_a_broker_that_is_away_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_on_data_loss: str
) -> None:
    """It went back to the end of the archive, or the query failed."""
    given = {"servers": "s:1", "failOnDataLoss": fail_on_data_loss, "fetchOffset.retryIntervalMs": "0"}
    view = View(tmp_path, **given)
    del view.given["path"]
    stores = [str(view.store), str(make_store(tmp_path / "broker-a", messages(1000, 1010)))]
    monkeypatch.setattr("ha.spark.source.opening._open", lambda options: Servers(stores))
    make_store(view.store, messages(0, 20))
    view.run_archive()
    make_store(view.store, messages(20, 30))
    reader = Reader(view)
    reader.run(2)
    read = json.dumps(reader.committed)
    make_store(view.store, messages(30, 40))
    with monkeypatch.context() as patched:
        patched.setattr(Servers, "has_left", True)
        reader.run(2)
        assert json.dumps(reader.committed) == read
        make_store(Path(stores[1]), messages(1010, 1020))  # the other broker is read meanwhile
        reader.run(2)
    assert sorted(reader.seen) == [*range(30), *range(1000, 1020)]
    reader.run(1, dies=True)
    with monkeypatch.context() as patched, view.planner() as planner:
        patched.setattr(Servers, "has_left", True)
        assert reader.committed is not None
        assert reader.planned is not None
        tasks = planner.partitions(reader.committed, reader.planned)
        assert numbers([row for task in tasks for row in rows_of(task, view.options())]) == list(range(30, 40))
    reader.run(2)
    assert sorted(reader.seen) == [*range(40), *range(1000, 1020)]
    assert set(reader.seen.values()) == {1}


def test_a_broker_that_may_have_two_names_is_not_read_twice() -> None:
    check_broker_names(["broker-a", "gone"], ["broker-a"])
    check_broker_names(["broker-a"], ["broker-a", "new"])
    with pytest.raises(OptionError, match="the brokers slave, but not broker-a"):
        check_broker_names(["slave"], ["broker-a"])


def test_columns_of_archived_rows(tmp_path: Path) -> None:
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 100))
        columns = {
            "columns": ",".join((*DEFAULT_COLUMNS, "propertiesString", "storeSize")),
            "includeProperties": "true",
        }
        expected = sorted(view.log_rows(**columns), key=lambda row: row["physicalOffset"])
        view.run_archive()
        live.put(messages(100, 101))
        view.run_archive()
        live.put([message(n, topic="other", body=bytes(500)) for n in range(200)])
        live.clean()
        rows = sorted(view.all_rows(**columns), key=lambda row: row["physicalOffset"])
        assert rows[:100] == expected
        stored = view.all_rows(columns="body,sysFlag", decompress="false")
        bodies = [zlib.decompress(row["body"]) for row in stored if row["sysFlag"] & SysFlag.COMPRESSED]
        assert sorted(int(body[:8]) for body in bodies) == list(range(0, 101, 5))
        assert sum(row["body"] is None for row in view.all_rows(maxMessageSize="100")) == 21
        with pytest.raises(OptionError, match="no column msgId"):
            view.all_rows(columns="msgId")


def test_a_damaged_row_of_the_archive_is_treated_as_one_of_the_log(tmp_path: Path) -> None:
    view = View(tmp_path)
    make_store(view.store, messages(0, 20), SEGMENT)
    [file] = (view.store / "commitlog").iterdir()
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"00000003" + bytes(200), b"X0000003" + bytes(200)))
    view.run_archive()
    with live_store(view.store, SEGMENT) as live:
        live.put([message(n, topic="other", body=bytes(500)) for n in range(200)])
        live.clean()
        rows = view.all_rows(columns="body,crcOk")
        assert [bytes(row["body"][:8]) for row in rows if not row["crcOk"]] == [b"X0000003"]
        assert len(rows) == 20
        assert 3 not in numbers(view.all_rows(damagedRecords="skip"))
        with pytest.raises(CorruptLog, match="flights is damaged"):
            view.all_rows(damagedRecords="fail")


@pytest.mark.parametrize("place", ["end", "middle"])
def test_a_damaged_file_of_the_archive_is_named(tmp_path: Path, place: str) -> None:
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 20))
        view.run_archive()
        live.put([message(n, topic="other", body=bytes(500)) for n in range(200)])
        live.clean()
        [file] = view.archive.glob("topic=flights/*/*.parquet")
        raw = bytearray(file.read_bytes())
        at = len(raw) - 8 if place == "end" else len(raw) // 4
        raw[at : at + 8] = bytes(8)
        file.write_bytes(raw)
        with pytest.raises(ArchiveDamaged, match=file.name):
            view.all_rows()


def test_lag_counts_archived_messages(tmp_path: Path) -> None:
    view = View(tmp_path)
    with live_store(view.store, SEGMENT) as live:
        live.put(messages(0, 200))
        view.run_archive()
        live.put(messages(200, 220))
        live.clean()
        reader = Reader(view, maxOffsetsPerTrigger="40")
        reader.run(1)
        assert reader.committed is not None
        with closing(open_source(view.options())) as source:
            positions = decode_stream(reader.committed, source.brokers()).positions
            queues = measure_lag(source, view.options(), positions, now_ms=1 << 42)
        assert sum(queue.messages for queue in queues) == 180
        assert not any(queue.lost for queue in queues)
        assert all(queue.seconds for queue in queues)
        assert all(queue.bytes for queue in queues)


def test_options_that_do_not_go_with_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(tmp_path)
    make_store(view.store, messages(0, 10))
    view.run_archive(topics=("flights",))
    given = view.given
    for more, said in (
        ({"startingTimestamp": "5"}, "startingTimestamp: archived messages"),
        ({"startingOffsetsByTimestamp": '{"flights":{"0":5}}'}, "startingOffsetsByTimestamp: archived messages"),
        ({"isolation": "read_committed"}, "isolation: an archive"),
        ({"tags": "UA"}, "tags: archived messages"),
        ({"keys": "k1"}, "keys: archived messages"),
    ):
        with pytest.raises(OptionError, match=said):
            parse_options({**given, **more}, "stream")
    with pytest.raises(OptionError, match=r"archive: it is for streams.*ha\.spark\.topic"):
        parse_options(given, "batch")
    assert parse_any(given).archive == str(view.archive)
    closed: list[LocalSource] = []
    monkeypatch.setattr(LocalSource, "close", lambda source: closed.append(source))
    refused = (
        ({"topic": "other"}, "does not contain the topic other"),
        ({"topic": "%LMQ%a"}, "light queue"),
        ({"archive": str(tmp_path)}, "holds no archive"),
        ({"archive": "s3://bucket/a"}, "s3://bucket/a"),
    )
    for more, said in refused:
        with pytest.raises(OptionError, match=said):
            open_source(view.options(**more))
    assert len(closed) == len(refused)


class CreatedAgain:
    """A store of RocketMQ with an archive, in which a topic is deleted and created again, also in between."""

    def __init__(self, folder: Path) -> None:
        self.view = View(folder)
        self.log = StoreWriter(self.view.store, segment_size=4096)
        self.next_number = 0

    def put(self, count: int) -> None:
        for number in range(self.next_number, self.next_number + count):
            self.log.put(message(number, queue_id=number % 2, body=b"%08d" % number))
        self.next_number += count

    def delete(self) -> None:
        self.log.delete_topic("flights")


@pytest.mark.parametrize("archived_again", [0, 4, 30])
@pytest.mark.parametrize("merges", [0, 2])
def test_a_topic_that_was_created_again_is_refused(tmp_path: Path, archived_again: int, merges: int) -> None:
    """Queue offsets, of which a query's position consists, don't tell its messages from the earlier ones."""
    made = CreatedAgain(tmp_path)
    made.put(10)
    made.view.run_archive()
    assert numbers(made.view.all_rows()) == list(range(10))
    made.delete()
    assert numbers(made.view.all_rows()) == list(range(10))
    if archived_again:
        made.put(archived_again)
        made.view.run_archive(compact_files_min=merges)
        with pytest.raises(OptionError, match="was deleted and created again"):
            made.view.all_rows()
    made.put(16)
    with pytest.raises(OptionError, match="was deleted and created again"):
        made.view.all_rows()
    new = View(tmp_path / "new", path=str(made.view.store))
    new.store = made.view.store
    new.run_archive()
    made.put(3)
    assert numbers(new.all_rows()) == list(range(10, made.next_number))


def test_a_day_of_a_clock_that_was_set_back_is_no_topic_that_was_created_again(tmp_path: Path) -> None:
    midnight_ms = 1_700_006_400_000
    view = View(tmp_path)
    log = StoreWriter(view.store)
    for begin in (0, 20):
        for number in range(begin, begin + 20):
            late_ms = -5000 if number % 7 == 3 else 5000
            log.put(message(number, body=b"%08d" % number), store_ms=midnight_ms + late_ms)
        view.run_archive(compact_files_min=2)
    assert numbers(view.all_rows()) == list(range(40))


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_table_of_a_topic_that_was_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    """It has each message of both topics once; physical offsets tell them apart."""
    made = CreatedAgain(tmp_path)

    def table() -> list[int]:
        states = archive_states(made.view.archive)
        files = [made.view.archive / path for state in states for path in state.files]
        rows = [row for file in files for row in pq.read_table(file, columns=["body"], partitioning=None).to_pylist()]
        options = parse_options({"path": str(made.view.store), "topic": "flights"}, "batch")
        with closing(open_source(options)) as source:
            starts = start_offsets(source, "flights", states)
            ends = {queue: source.queue_range(queue).end for queue in starts}
            slices = slices_between(source, starts, ends, fail_on_data_loss=True)
            rows += rows_of(source.queue_partition(slices), options)
        return numbers(rows)

    if is_remote:  # a broker does not tell where its log begins
        monkeypatch.setattr(LocalSource, "min_offset", lambda self, broker: None)
    made.put(20)
    made.view.run_archive()
    made.delete()
    assert table() == list(range(20))
    made.put(6)  # fewer than before
    assert table() == list(range(26))
    made.view.run_archive()
    assert table() == list(range(26))
    made.put(30)
    assert table() == list(range(56))
    made.delete()
    made.put(40)
    first, second, *others = sorted((made.view.store / "commitlog").iterdir())
    first.unlink()
    assert table() == [*range(26), *range(56, 96)]
    # Messages of the new topic are deleted, and no queue offset tells how many.
    for file in (second, *others[:-1]):
        file.unlink()
    with pytest.raises(RecordsGone, match="retention deleted them"):
        table()
