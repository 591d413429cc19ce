"""Archiving without Spark: the tasks run inline. Every record once, as read by the plain codec, through kills."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from struct import Struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trio
from py4j.java_gateway import JavaGateway
from py4j.protocol import Py4JJavaError

from ha.arrow import LogReader, read_arrow
from ha.errors import ArchiveConflict, ArchiveDamaged, DiskFailed, OptionError, RecordsGone, StoreUnreadable
from ha.protocol.codes import PutStatus
from ha.protocol.record import Message, encode_host
from ha.protocol.record_encoding import encode_record
from ha.spark.jobs.archive import ArchiveOptions, ArchiveResult, archive, archive_path, files
from ha.spark.jobs.archive.compaction import plan_merges
from ha.spark.jobs.archive.delta import DeltaTable, _bounds
from ha.spark.jobs.archive.files import read_task
from ha.spark.jobs.archive.manifest import (
    ArchivedFile,
    Erasure,
    Manifest,
    QueueSpan,
    State,
    escape_path_name,
    unescape_path_name,
)
from ha.spark.jobs.archive.progress import measure_archive_lag
from ha.spark.jobs.archive.read import archive_states
from ha.spark.jobs.audit.job import AuditOptions, audit_with
from ha.spark.sink.options import COMMIT_TOPIC
from ha.store.message_store import open_message_store
from tests.arrow.oracle import plain_rows
from tests.spark.derived_stores import store_options, write_store
from tests.spark.inline import inline_runner, inline_spark
from tests.spark.stores import KilledError, live_store, make_store, message, named, set_store_time
from tests.store.stores import dispatched
from tests.unpacking import unpack_store

DERIVED = ("properties", "msgId", "bodySize")
SPARK = inline_spark()


@pytest.fixture(scope="session")
def written_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 messages of every kind; read only."""
    root = tmp_path_factory.mktemp("archive") / "broker-b"
    trio.run(partial(write_store, root, 600))
    return root


@pytest.fixture(params=["4.9.7", "5.5.0"])
def golden_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack_store(request.param, tmp_path / "broker-a")


def options_of(store: Path, target: Path, **changes: Any) -> ArchiveOptions:
    given: dict[str, Any] = {"path": str(store), "archive": str(target), "range_bytes": 16 << 10}
    return ArchiveOptions(**given | changes)


def run(store: Path, target: Path, **changes: Any) -> ArchiveResult:
    return archive(SPARK, options_of(store, target, **changes))


def visible(target: Path) -> list[dict[str, Any]]:
    """The rows that a plain reader of the directory finds, in physical order per broker."""
    rows = []
    for path in target.glob("topic=*/date=*/*.parquet"):
        topic, day = (part.split("=", 1)[1] for part in path.relative_to(target).parts[:2])
        for row in pq.ParquetFile(path).read().to_pylist():
            row["topic"] = unescape_path_name(topic)
            assert row["storeTimestamp"].date() == date.fromisoformat(day)
            rows.append(row)
    return sorted(rows, key=lambda row: (row["brokerName"], row["physicalOffset"]))


def test_a_log_without_queues_is_refused(tmp_path: Path) -> None:
    """As from a copy of the commitlog alone: the archive would be complete, and empty."""
    store = make_store(tmp_path / "broker", [message(number) for number in range(20)])
    shutil.rmtree(store / "consumequeue")
    with pytest.raises(StoreUnreadable, match="reindex"):
        run(store, tmp_path / "archive")
    with pytest.raises(StoreUnreadable, match="reindex"):
        read_arrow(store).read_all()
    assert archive_states(tmp_path / "archive")[0].covered_end is None


def test_batch_queues_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "broker", [message(number) for number in range(20)])
    with LogReader(store) as reader:
        [entry] = reader.entries("flights", 0, 0, 1).tolist()
    queue = store / "batchconsumequeue" / "batches" / "0"
    queue.mkdir(parents=True)
    place = Struct(">qiqqqhii").pack(*entry, 1, 0, 1, -1, 0)
    (queue / "00000000000000000000").write_bytes(place.ljust(46 * 50, b"\0"))
    with pytest.raises(OptionError, match="can't hold batch queues, which batches has"):
        run(store, tmp_path / "archive")
    assert run(store, tmp_path / "archive", topics=("flights",)).rows == 20
    assert read_arrow(store, columns=["queueOffset"]).read_all().num_rows == 21


def queued_offsets(store: Path) -> list[int]:
    """The physical offsets of all queued records, by the consume queues' bytes."""
    found = set()
    for file in store.glob("consumequeue/*/*/*"):
        raw = file.read_bytes()
        for at in range(0, len(raw), 20):
            size = int.from_bytes(raw[at + 8 : at + 12])
            if size not in (0, 0x7FFFFFFF):
                found.add(int.from_bytes(raw[at : at + 8]))
    return sorted(found)


def expected(store: Path, broker_name: str) -> list[dict[str, Any]]:
    rows = plain_rows(store, queued_offsets(store), broker_name)
    for row, (_, raw) in zip(rows, raw_records(store), strict=True):
        row["body"] = raw_body(raw)
    return rows


def raw_records(store: Path) -> list[tuple[int, bytes]]:
    segments = sorted((int(file.name), file.read_bytes()) for file in (store / "commitlog").iterdir())
    found = []
    for offset in queued_offsets(store):
        start, raw = max((start, raw) for start, raw in segments if start <= offset)
        at = offset - start
        found.append((offset, raw[at : at + int.from_bytes(raw[at : at + 4])]))
    return found


def raw_body(record: bytes) -> bytes:
    sys_flag = int.from_bytes(record[36:40])
    at = 84 + 12 * bool(sys_flag & 16) + 12 * bool(sys_flag & 32)
    return record[at + 4 : at + 4 + int.from_bytes(record[at : at + 4])]


def rebuilt(row: dict[str, Any]) -> bytes:
    """The record that an archived row stands for."""

    def host(text: str) -> bytes:
        name, _, port = text.rpartition(":")
        return encode_host(name.strip("[]"), int(port))

    raw = row["propertiesRaw"]
    message = Message(
        topic=row["topic"],
        queue_id=row["queueId"],
        body=row["body"],
        properties=row["propertiesString"].encode() if raw is None else raw,
        flag=row["flag"],
        sys_flag=row["sysFlag"],
        born_timestamp_ms=round(row["bornTimestamp"].timestamp() * 1000),
        born_host=host(row["bornHost"]),
        reconsume_times=row["reconsumeTimes"],
        prepared_transaction_offset=row["preparedTransactionOffset"],
    )
    return encode_record(
        message,
        queue_offset=row["queueOffset"],
        physical_offset=row["physicalOffset"],
        store_timestamp_ms=round(row["storeTimestamp"].timestamp() * 1000),
        store_host=host(row["storeHost"]),
    )


def test_a_broker_has_its_own_name_unless_the_archive_has_its_directory_s(tmp_path: Path) -> None:
    store = make_store(tmp_path / "slave", [message(n) for n in range(10)])
    new, old = tmp_path / "new", tmp_path / "old"
    assert run(store, old).broker_name == "slave"  # as earlier versions named every broker
    named(store, "broker-a")
    make_store(store, [message(n) for n in range(10, 15)])
    assert run(store, new).broker_name == "broker-a"
    assert {row["brokerName"] for row in visible(new)} == {"broker-a"}
    assert run(store, old).rows == 5
    assert len(visible(old)) == 15
    assert run(store, old, broker_name="broker-a").rows == 15


def test_commits_of_sinks_are_archived_only_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(numbers: range) -> Path:
        messages = [message(n, topic=COMMIT_TOPIC if n % 3 == 0 else "flights") for n in numbers]
        return make_store(tmp_path / "s", messages)

    def topics(target: Path) -> Counter[str]:
        return Counter(row["topic"] for row in visible(target))

    def is_clean(target: Path) -> bool:
        options = AuditOptions(paths=(str(store),), archive=str(target))
        return audit_with(inline_runner(), options).exit_code == 0

    store = put(range(30))
    everything, named, old = tmp_path / "everything", tmp_path / "named", tmp_path / "old"
    run(store, everything)
    run(store, named, topics=(COMMIT_TOPIC,))
    with monkeypatch.context() as patch:
        patch.setattr("ha.spark.jobs.archive.passes._LEFT_OUT", ())  # as in earlier versions
        run(store, old)
    assert topics(everything) == {"flights": 20}
    assert topics(named) == {COMMIT_TOPIC: 10}
    put(range(30, 60))
    for target, expected_topics in ((everything, {"flights": 40}), (old, {"flights": 40, COMMIT_TOPIC: 20})):
        run(store, target)
        assert topics(target) == expected_topics
        assert is_clean(target)


def test_an_archive_of_a_rocketmq_store_equals_the_plain_codec(golden_store: Path, tmp_path: Path) -> None:
    result = run(golden_store, tmp_path / "archive")
    rows = visible(tmp_path / "archive")
    theirs = expected(golden_store, "broker-a")
    assert [{k: v for k, v in row.items() if k != "propertiesRaw"} for row in rows] == [
        {k: v for k, v in row.items() if k not in DERIVED} for row in theirs
    ]
    assert (result.rows, result.damaged, result.exit_code) == (len(theirs), 0, 0)
    assert result.covered_end == result.log_end


@pytest.mark.parametrize("kind", ["golden", "written"])
def test_each_row_holds_all_of_its_record_byte_for_byte(
    kind: str, golden_store: Path, written_store: Path, tmp_path: Path
) -> None:
    store = golden_store if kind == "golden" else written_store
    run(store, tmp_path / "archive")
    rows = visible(tmp_path / "archive")
    assert [(row["physicalOffset"], rebuilt(row)) for row in rows] == raw_records(store)


def test_second_run_archives_nothing(written_store: Path, tmp_path: Path) -> None:
    run(written_store, tmp_path / "archive")
    before = sorted(tmp_path.glob("archive/**/*"))
    result = run(written_store, tmp_path / "archive")
    assert (result.rows, result.commits, result.log_bytes) == (0, 0, 0)
    assert [path for path in sorted(tmp_path.glob("archive/**/*")) if path.name != "staging"] == [
        path for path in before if path.name != "staging"
    ]


def test_archive_has_every_record_once_after_kill_at_any_step(tmp_path: Path) -> None:
    written_store = tmp_path / "broker-b"
    trio.run(partial(write_store, written_store, 120))
    steps: list[str] = []
    settings: dict[str, Any] = {"range_bytes": 16 << 10, "compact_files_min": 2, "topics": ("flights",)}
    full = tmp_path / "full"
    archive(SPARK, options_of(written_store, full, **settings), failpoint=steps.append)
    offsets = [row["physicalOffset"] for row in visible(full)]
    assert offsets == sorted(set(offsets))
    kinds = {step.split()[0] for step in steps}
    assert kinds == {"clear", "link", "remove", "rename", "mark"}
    assert any(step.startswith("remove") for step in steps)
    for number in range(len(steps)):
        target = tmp_path / f"killed-{number}"
        left = number

        def kill(step: str) -> None:
            nonlocal left
            if left == 0:
                raise KilledError(step)
            left -= 1

        with pytest.raises(KilledError):
            archive(SPARK, options_of(written_store, target, **settings), failpoint=kill)
        seen = [row["physicalOffset"] for row in visible(target)]
        assert len(seen) == len(set(seen)), f"a row twice after a kill at {steps[number]}"
        assert set(seen) <= set(offsets)
        run(written_store, target, **settings)
        assert [row["physicalOffset"] for row in visible(target)] == offsets, f"after a kill at {steps[number]}"
        shutil.rmtree(target)


def archive_until_killed(store: str, target: str) -> None:
    archive(SPARK, options_of(Path(store), Path(target), every_s=0.01, range_bytes=32 << 10, compact_files_min=2))


@pytest.mark.processes
def test_archive_has_every_record_once_after_sigkill_while_log_grows(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    random_ = random.Random(5)
    store, target = tmp_path / "broker-l", tmp_path / "archive"

    def commits() -> int:
        return len(list(target.glob("_halog/*/commits/*.json")))

    with live_store(store, segment_size=256 << 10) as live:
        number = 0
        for _ in range(3):
            process = processes.Process(target=archive_until_killed, args=(str(store), str(target)))
            process.start()
            wanted = commits() + random_.randrange(1, 4)
            give_up = time.monotonic() + 60
            while commits() < wanted:
                assert time.monotonic() < give_up, "it does not get on"
                live.put([message(n, body=bytes(500)) for n in range(number, number + 40)])
                number += 40
                process.join(0.02)
            process.join(random_.uniform(0, 0.05))
            assert process.exitcode is None, "it was to run until killed"
            process.kill()
            process.join()
            seen = [row["physicalOffset"] for row in visible(target)]
            assert len(seen) == len(set(seen))
    run(store, target)
    assert [row["physicalOffset"] for row in visible(target)] == queued_offsets(store)


def test_archive_waits_for_records_not_queued_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As halog's dispatch leaves it in the middle of a chunk: queue 0 filled, queue 1 not yet."""
    monkeypatch.setattr("ha.arrow.log_reader._REWRITE_TIMEOUT_S", 0)
    store, target = tmp_path / "broker-q", tmp_path / "archive"
    make_store(store, [message(number, queue_id=number % 2) for number in range(100)])
    (store / "abort").touch()  # its broker runs
    [late] = (store / "consumequeue" / "flights" / "1").iterdir()
    whole = late.read_bytes()
    late.write_bytes(whole[: 40 * 20] + bytes(len(whole) - 40 * 20))
    result = run(store, target)
    seen = [row["queueId"] for row in visible(target)]
    assert seen == [0, 1] * 40 + [0]
    assert result.covered_end < result.log_end
    monkeypatch.setattr("ha.arrow.log_reader.sleep", None)  # the report does not wait for them
    monkeypatch.setattr("ha.arrow.log_reader._REWRITE_TIMEOUT_S", 60)
    with LogReader(store) as reader:
        lag = measure_archive_lag(reader, result.covered_end, 1 << 42)
    assert (lag.bytes, lag.seconds > 0) == (result.log_end - result.covered_end, True)
    late.write_bytes(whole)
    run(store, target)
    assert [row["physicalOffset"] for row in visible(target)] == queued_offsets(store)
    assert len(visible(target)) == 100


def test_reader_finishes_interrupted_merge(written_store: Path, tmp_path: Path) -> None:
    removed = 0

    def kill(step: str) -> None:
        nonlocal removed
        removed += step.startswith("remove")
        if removed and step.startswith("rename"):
            raise KilledError

    target = tmp_path / "archive"
    with pytest.raises(KilledError):
        archive(
            SPARK,
            options_of(written_store, target, topics=("flights",), range_bytes=64 << 10, compact_files_min=2),
            failpoint=kill,
        )
    missing = len(visible(target))
    [state] = archive_states(target)
    assert all((target / path).exists() for path in state.files)
    assert state.rows == len(visible(target)) > missing


def test_staged_files_of_killed_run_are_invisible_and_deleted(written_store: Path, tmp_path: Path) -> None:
    def kill(step: str) -> None:
        if step == "link commit":
            raise KilledError

    target = tmp_path / "archive"
    with pytest.raises(KilledError):
        archive(SPARK, options_of(written_store, target), failpoint=kill)
    assert list(target.glob("_halog/broker-b/staging/*/*.parquet"))
    assert visible(target) == []
    run(written_store, target)
    assert not list(target.glob("_halog/broker-b/staging/*"))


def test_task_that_still_writes_to_staging_does_not_end_the_job(
    written_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example one of an executor that Spark has given up. Its file is deleted later."""
    target = tmp_path / "archive"
    rmdir = os.rmdir
    late: list[Path] = []

    def remove_folder(path: str, *, dir_fd: int | None = None) -> None:
        if not late:
            [folder] = target.glob("_halog/*/staging/*")
            late.append(folder / "late.parquet")
            late[0].touch()
        rmdir(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", remove_folder)
        result = run(written_store, target)
    assert result.covered_end == result.log_end
    run(written_store, target)
    assert late
    assert not late[0].exists()


def test_two_archivers_of_one_broker_exclude_each_other(written_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    with (
        Manifest(target, "broker-b").locked(),
        pytest.raises(ArchiveConflict, match="another archiver or erasure is running"),
    ):
        run(written_store, target)
    # Where the lock has no effect, the commit's number decides.
    run(written_store, target)
    manifest = Manifest(target, "broker-b")
    state = manifest.state()
    late = manifest._commit(state.sequence)
    with pytest.raises(ArchiveConflict, match="first"):
        manifest.commit(late.__class__(**{f: getattr(late, f) for f in late.__struct_fields__} | {"added": ()}))
    assert manifest.state() == state


def test_brokers_share_an_archive(written_store: Path, golden_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    run(written_store, target)
    run(golden_store, target)
    counts = Counter(row["brokerName"] for row in visible(target))
    assert counts == {
        "broker-a": len(queued_offsets(golden_store)),
        "broker-b": len(queued_offsets(written_store)),
    }


def test_small_files_are_merged_to_target_size(written_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    settings: dict[str, Any] = {"topics": ("flights",), "range_bytes": 4 << 10, "target_file_bytes": 32 << 10}
    apart = run(written_store, tmp_path / "apart", compact_files_min=0, **settings)
    result = run(written_store, target, compact_files_min=2, **settings)
    sizes = sorted(path.stat().st_size for path in target.glob("topic=*/*/*"))
    assert result.merged_files > 5
    assert len(sizes) < apart.files / 2
    assert max(sizes) < 64 << 10
    assert [row["physicalOffset"] for row in visible(target)] == [
        row["physicalOffset"] for row in visible(tmp_path / "apart")
    ]
    for path in target.glob("topic=*/*/*"):
        column = pq.ParquetFile(path).metadata.row_group(0).column(0)
        assert column.compression == "ZSTD"


def test_stop_ends_merges(tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    for _ in range(2):
        make_store(store, [message(number, topic=f"t{number}") for number in range(6)])
        run(store, target, compact_files_min=0)
    stop = threading.Event()
    merges = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "compact":
            merges.append((done, total))
            stop.set()

    options = options_of(store, target, compact_files_min=2, every_s=30)
    result = archive(SPARK, options, progress, stop=stop)
    assert (merges, result.merged_files) == ([(2, 6)], 4)


@pytest.mark.parametrize("buffer_bytes", [1 << 20, 4 << 10], ids=["enough", "small"])
def test_each_of_many_topics_gets_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int) -> None:
    """With more than 64 topics, each batch that is read began a new file of each."""
    messages = [message(number, topic=f"t{number % 100}", queue_id=0) for number in range(2000)]
    store = make_store(tmp_path / "broker", messages)
    monkeypatch.setattr(files, "read_task", lambda task: in_slices(read_task(task), 100))
    result = run(store, tmp_path / "archive", range_bytes=1 << 30, compact_files_min=0, buffer_bytes=buffer_bytes)
    assert result.rows == len(visible(tmp_path / "archive")) == 2000
    if buffer_bytes > 1 << 19:
        assert result.files == 100
    else:
        assert 100 < result.files < 2000


def test_file_being_written_may_be_closed_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job failed with "tell of closed file", also when it was run again."""
    topics = ["a"] * 3 + ["b"] * 2 + ["a"]
    store = make_store(
        tmp_path / "broker",
        [message(number, topic=topic, queue_id=0, body=bytes(10_000)) for number, topic in enumerate(topics)],
    )
    monkeypatch.setattr(files, "_OPEN_FILES_MAX", 1)
    monkeypatch.setattr(files, "read_task", lambda task: in_slices(read_task(task), 1))
    # The third row flushes "a". The last one makes "b", now the largest, need the only place of an open file.
    result = run(store, tmp_path / "archive", range_bytes=1 << 30, compact_files_min=0, buffer_bytes=30_000)
    assert (result.rows, result.files) == (6, 2)
    assert [row["topic"] for row in visible(tmp_path / "archive")] == topics


def in_slices(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for first in range(0, batch.num_rows, rows):
            yield batch.slice(first, rows)


def test_manifest_describes_each_file(written_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    run(written_store, target)
    state = Manifest(target, "broker-b").state()
    assert sorted(state.files) == sorted(p.relative_to(target).as_posix() for p in target.glob("topic=*/*/*"))
    for path, file in state.files.items():
        rows = pq.ParquetFile(target / path).read().to_pylist()
        assert (file.rows, file.bytes) == (len(rows), (target / path).stat().st_size)
        assert file.physical_begin == rows[0]["physicalOffset"]
        assert file.physical_end == rows[-1]["physicalOffset"] + rows[-1]["storeSize"]
        for span in file.queues:
            offsets = [row["queueOffset"] for row in rows if row["queueId"] == span.queue_id]
            assert (span.first, span.last, span.rows) == (offsets[0], offsets[-1], len(offsets))
    assert state.covered_begin == 0


def archive_half_a_segment(store: Path, target: Path) -> int:
    """Archives a part of the first segment; returns the archive's end."""
    segments = sorted((store / "commitlog").iterdir())
    stop = threading.Event()

    def stop_early(stage: str, done: int, total: int) -> None:
        if done >= segments[0].stat().st_size // 2:
            stop.set()

    archive(SPARK, options_of(store, target, compact_files_min=0, range_bytes=8 << 10), stop_early, stop=stop)
    end = Manifest(target, "broker-b").state().covered_end
    assert end is not None
    assert 0 < end < int(segments[1].name)
    return end


def test_records_deleted_by_retention_are_an_error_or_a_hole(written_store: Path, tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    shutil.copytree(written_store, store)
    first = sorted((store / "commitlog").iterdir())
    run(store, target, topics=("flights",))
    manifest = Manifest(target, "broker-b")
    covered = manifest.state().covered_end
    shutil.rmtree(target)
    early = archive_half_a_segment(store, target)
    first[0].unlink()
    with pytest.raises(RecordsGone, match="fail_on_data_loss"):
        run(store, target)
    result = run(store, target, fail_on_data_loss=False)
    assert [(hole.begin, hole.end) for hole in result.holes] == [(early, int(first[1].name))]
    assert result.exit_code == 3
    offsets = [row["physicalOffset"] for row in visible(target)]
    assert offsets == [o for o in queued_offsets(written_store) if o < early or o >= int(first[1].name)]
    state = manifest.state()
    assert (state.covered_end, [(hole.begin, hole.end) for hole in state.holes]) == (
        covered,
        [(early, int(first[1].name))],
    )
    assert run(store, target, fail_on_data_loss=False).holes == []


def test_retention_during_a_pass_becomes_a_hole(written_store: Path, tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    shutil.copytree(written_store, store)
    segments = sorted((store / "commitlog").iterdir())
    early = archive_half_a_segment(store, target)
    spark = inline_spark(before_tasks=partial(segments[0].unlink, missing_ok=True))
    result = archive(spark, options_of(store, target, fail_on_data_loss=False))
    assert [(hole.begin, hole.end) for hole in result.holes] == [(early, int(segments[1].name))]
    assert [row["physicalOffset"] for row in visible(target)] == [
        offset for offset in queued_offsets(written_store) if offset < early or offset >= int(segments[1].name)
    ]


def test_a_damaged_record_is_a_row_or_skipped_and_counted(written_store: Path, tmp_path: Path) -> None:
    store = tmp_path / "broker-b"
    shutil.copytree(written_store, store)
    offset, raw = next((o, r) for o, r in raw_records(store) if len(raw_body(r)) > 100)
    segment = sorted((store / "commitlog").iterdir())[0]
    content = bytearray(segment.read_bytes())
    content[content.index(raw_body(raw)) + 50] ^= 0xFF
    segment.write_bytes(content)
    result = run(store, tmp_path / "reported")
    assert (result.damaged, result.exit_code) == (1, 3)
    rows = visible(tmp_path / "reported")
    assert [row["physicalOffset"] for row in rows if not row["crcOk"]] == [offset]
    assert len(rows) == len(queued_offsets(store))
    run(store, tmp_path / "skipped", on_damage="skip")
    rows = visible(tmp_path / "skipped")
    assert [row["physicalOffset"] for row in rows] == [o for o in queued_offsets(store) if o != offset]


@pytest.mark.parametrize("store_ms", [253_402_300_800_000, -62_135_596_800_001])
def test_a_damaged_store_time_is_in_no_day(tmp_path: Path, store_ms: int) -> None:
    """Of a year before 1 or after 9999. No checksum covers it, so the record counts as sound."""
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    make_store(store, [message(number) for number in range(3)])
    [_, (offset, raw), _] = raw_records(store)
    set_store_time(store, 1, store_ms)
    assert run(store, target).rows == 3
    [file] = target.glob("topic=*/date=__HIVE_DEFAULT_PARTITION__/*.parquet")
    table = pq.ParquetFile(file).read(["physicalOffset", "storeTimestamp", "body"])
    assert table["physicalOffset"].to_pylist() == [offset]
    assert table["storeTimestamp"].cast(pa.int64()).to_pylist() == [store_ms * 1000]
    assert table["body"].to_pylist() == [raw_body(raw)]


def test_delta_has_no_bounds_of_times_that_python_can_not_represent(tmp_path: Path) -> None:
    """In any of a file's row groups."""
    times = pa.array([0, 253_402_300_800_000_000], pa.int64()).cast(pa.timestamp("us", "UTC"))
    table = pa.table({"bornTimestamp": times, "flag": [1, 2], "storeTimestamp": times[:1].take(pa.array([0, 0]))})
    pq.write_table(table, tmp_path / "file", row_group_size=1)
    bounds = _bounds(pq.read_metadata(tmp_path / "file"))
    low = {"flag": 1, "storeTimestamp": "1970-01-01T00:00:00.000Z"}
    assert bounds == {"minValues": low, "maxValues": {**low, "flag": 2}}


@pytest.mark.spark
def test_a_conflict_of_delta_is_one_of_the_archive(tmp_path: Path) -> None:
    """Only py4j's JVM, without Delta: the exception is the one of Java from which Delta's conflicts inherit."""
    gateway = JavaGateway.launch_gateway(die_on_exit=True)

    class Failing(DeltaTable):
        def __init__(self, error: Any) -> None:
            self._archive = tmp_path
            self._session: Any = SimpleNamespace(sparkContext=SimpleNamespace(_gateway=gateway))
            self._error = error

        def _commit(self, *_: Any, is_merge: bool) -> None:
            raise Py4JJavaError("An error occurred while calling o1.commit.", self._error)

    try:
        conflict = Failing(gateway.jvm.java.util.ConcurrentModificationException("files were added"))
        reason = "another writer changed its Delta table: java.util.ConcurrentModificationException: files were added"
        with pytest.raises(ArchiveConflict, match=reason):
            conflict.commit(State(broker_name="b"), [], [], is_merge=False)
        other = Failing(gateway.jvm.java.lang.IllegalStateException("no table"))
        with pytest.raises(Py4JJavaError):
            other.commit(State(broker_name="b"), [], [], is_merge=False)
    finally:
        gateway.shutdown()


def test_another_log_under_the_same_name_is_refused(written_store: Path, golden_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    run(golden_store, target, broker_name="b")
    with pytest.raises(ArchiveDamaged, match="not the log that was archived as b"):
        run(written_store, target, broker_name="b")


def test_another_shorter_log_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    make_store(store, [message(number) for number in range(50)])
    shutil.copytree(store, tmp_path / "behind")
    make_store(store, [message(number) for number in range(50, 100)])
    assert run(store, target).rows == 100
    metrics = tmp_path / "lag.prom"
    assert run(tmp_path / "behind", target, broker_name="broker-b", metrics_file=str(metrics)).rows == 0
    with LogReader(tmp_path / "behind") as reader:
        headroom = reader.queued_end()
    assert f'halog_archive_headroom_bytes{{broker="broker-b"}} {headroom}' in metrics.read_text().splitlines()
    shutil.rmtree(store)
    make_store(store, [])
    assert run(store, target).rows == 0
    assert "archive.log_not_compared broker='broker-b'" in caplog.text
    make_store(store, [message(number + 1000) for number in range(50)])
    with pytest.raises(ArchiveDamaged, match="not the log that was archived as broker-b"):
        run(store, target)


def test_scope_of_an_archive_can_not_be_changed(written_store: Path, tmp_path: Path) -> None:
    run(written_store, tmp_path / "archive", topics=("flights",))
    with pytest.raises(OptionError, match="topics"):
        run(written_store, tmp_path / "archive")


def test_continuous_archiving_runs_until_stopped(written_store: Path, tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    trio.run(partial(write_store, store, 200))
    stop = threading.Event()
    passes = 0

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal passes
            passes += 1
            assert timeout is not None
            assert 0 < timeout <= 30  # from the beginning of a pass
            if passes == 1:
                trio.run(partial(write_store, store, 150, seed=8))
            else:
                self.set()
            return self.is_set()

    stop = Clock()
    result = archive(SPARK, options_of(store, target, every_s=30), stop=stop)
    assert passes == 2
    assert [row["physicalOffset"] for row in visible(target)] == queued_offsets(store)
    assert result.rows == len(queued_offsets(store))


def test_log_replaced_while_archiving_is_detected(tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    trio.run(partial(write_store, store, 100))

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            shutil.rmtree(store)
            trio.run(partial(write_store, store, 200, seed=9))
            return False

    with pytest.raises(ArchiveDamaged, match="not the log"):
        archive(SPARK, options_of(store, target, every_s=30), stop=Clock())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_file_bytes": 0}, "target_file_bytes"),
        ({"compression_level": 99}, "compression_level"),
        ({"every_s": 0.0}, "every_s"),
        ({"compact_files_min": -1}, "compact_files_min"),
        ({"compact_files_min": 1}, "compact_files_min"),
        ({"extra_columns": ("colour",)}, "extra_columns"),
        ({"archive": "s3://bucket/x"}, "archive"),
    ],
)
def test_wrong_options_are_named(written_store: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    given = {"archive": str(tmp_path / "archive")} | changes
    with pytest.raises(OptionError, match=words):
        archive(SPARK, ArchiveOptions(path=str(written_store), **given))
    assert not (tmp_path / "archive").exists()


def test_a_path_that_is_no_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreadable, match="nowhere"):
        run(tmp_path / "nowhere", tmp_path / "archive")


def test_a_target_that_can_not_be_written_is_named(written_store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFailed, match="file"):
        run(written_store, tmp_path / "file" / "archive")


def test_reading_a_directory_without_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no archive"):
        archive_states(tmp_path)


def test_damaged_manifest_is_refused(written_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    run(written_store, target, topics=("flights",), range_bytes=32 << 10, compact_files_min=0)
    commits = sorted(target.glob("_halog/*/commits/*"))
    assert len(commits) > 1
    content = commits[0].read_bytes()
    commits[0].unlink()
    with pytest.raises(ArchiveDamaged, match="commit 1 of broker-b is missing"):
        run(written_store, target, topics=("flights",))
    commits[0].write_bytes(content[:-20])
    with pytest.raises(ArchiveDamaged, match="can't be read"):
        run(written_store, target, topics=("flights",))


def test_properties_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    store = tmp_path / "broker-c"
    strings = [b"a\x01\xff\xfe\x02", "a\x01\ufffd\x02".encode(), b"TAGS\x01x\x02"]

    async def write() -> None:
        async with open_message_store(store_options(store)) as opened:
            for string in strings:
                results = await opened.log.put([Message(topic="t", queue_id=0, body=b"x", properties=string)])
                assert {each.status for each in results} == {PutStatus.PUT_OK}
            await dispatched(opened)

    trio.run(write)
    run(store, tmp_path / "archive")
    rows = visible(tmp_path / "archive")
    assert [row["propertiesRaw"] for row in rows] == [strings[0], None, None]
    assert [rebuilt(row) for row in rows] == [raw for _, raw in raw_records(store)]


def test_partition_names_are_escaped_as_hive_does() -> None:
    assert escape_path_name("%RETRY%group") == "%25RETRY%25group"
    assert escape_path_name("a=b/c:d") == "a%3Db%2Fc%3Ad"
    for topic in ("%RETRY%group", "a=b/c", "задержки", "100%", "x_y-z|1"):
        assert unescape_path_name(escape_path_name(topic)) == topic


def test_an_archive_path_is_local() -> None:
    assert archive_path("file:///a/b") == archive_path("/a/b") == Path("/a/b")
    with pytest.raises(OptionError):
        archive_path("hdfs://a/b")


def file_of(begin: int, size: int, topic: str = "t") -> ArchivedFile:
    return ArchivedFile(f"{topic}-{begin}", "", topic, date(2026, 1, 1), 1, size, begin, begin + 1, ())


def test_merges_join_neighbours_and_leave_large_files_alone() -> None:
    def merged(sizes: list[int], files_min: int = 2) -> list[list[int]]:
        files = [file_of(begin, size) for begin, size in enumerate(sizes)]
        runs = plan_merges(reversed(files), target_file_bytes=100, files_min=files_min)
        return [[file.physical_begin for file in run] for run in runs]

    assert merged([10, 10, 10]) == [[0, 1, 2]]
    assert merged([10, 10, 10], files_min=4) == []
    assert merged([10, 90, 10]) == []  # never across a large one
    assert merged([40, 1, 1]) == [[1, 2]]  # 40 is not rewritten for 2
    assert merged([40, 40, 40, 40]) == [[0, 1, 2]]  # cut where full
    assert merged([]) == []
    two = [file_of(0, 10, "a"), file_of(1, 10, "b")]
    assert plan_merges(two, target_file_bytes=100, files_min=2) == []


def test_a_topic_that_was_created_again_shows_in_the_manifest() -> None:
    """RocketMQ begins at queue offset 0 again. Merges keep the files of both topics apart, as gaps might hide it."""

    def of_queue(begin: int, first: int, last: int, **changes: Any) -> ArchivedFile:
        spans = (QueueSpan(0, first, last, last - first + 1),)
        return msgspec.structs.replace(file_of(begin, 10), **{"queues": spans, "physical_end": begin + 10, **changes})

    def created_again(*files: ArchivedFile, erased: Sequence[Erasure] = ()) -> set[tuple[str, int]]:
        state = State(broker_name="b", files={str(at): file for at, file in enumerate(files)}, erased=list(erased))
        assert state.created_again({"other"}) == set()
        return state.created_again()

    files = [of_queue(0, 0, 4), of_queue(10, 5, 9), of_queue(20, 3, 6), of_queue(30, 12, 15)]
    runs = plan_merges(files, target_file_bytes=1000, files_min=2)
    assert [[file.physical_begin for file in run] for run in runs] == [[0, 10], [20, 30]]
    assert created_again(*files) == created_again(files[0], files[2]) == {("t", 0)}
    assert created_again(files[0], files[1], files[3]) == set()
    # A clock that was set back at midnight: the files of two days overlap in the log.
    assert created_again(of_queue(0, 0, 9), of_queue(5, 4, 6, date=date(2026, 1, 2))) == set()
    assert created_again(files[0], of_queue(10, 9, 9, queues=(QueueSpan(0, 5, 9, 6),))) == {("t", 0)}
    gone = Erasure(rows=5, topics={"t": 10}, spans={"t": (QueueSpan(0, 0, 4, 5),)})
    assert created_again(files[1], erased=[gone]) == set()
    assert created_again(files[2], erased=[gone]) == {("t", 0)}


def test_many_small_commits_are_rewritten_few_times() -> None:
    files: list[ArchivedFile] = []
    rewritten = 0
    for begin in range(1000):
        files.append(file_of(begin, 10))
        for run in plan_merges(files, target_file_bytes=10_000, files_min=4):
            total = sum(file.bytes for file in run)
            rewritten += total
            files = [file for file in files if file not in run] + [file_of(run[0].physical_begin, total)]
    assert sum(file.bytes for file in files) == 10_000
    assert rewritten <= 10_000 * 7
    assert len(files) < 30


def test_schema_of_files_does_not_depend_on_rows(written_store: Path, tmp_path: Path) -> None:
    run(written_store, tmp_path / "archive")
    schemas = {str(pq.read_schema(path)) for path in tmp_path.glob("archive/topic=*/*/*")}
    assert len(schemas) == 1
    assert pa.schema(pq.read_schema(next(tmp_path.glob("archive/topic=*/*/*")))).field("body").type == pa.binary()
    with LogReader(written_store) as reader:
        assert reader.end_offset() == Manifest(tmp_path / "archive", "broker-b").state().covered_end
