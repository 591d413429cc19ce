"""The benchmarks measure what they say: the same messages on both sides, the right rows, processor time of every child.

Kafka itself is left out here: a broker's start costs more than all of this.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from pyspark.sql import SparkSession

import ha.spark
from bench.spark import __main__ as bench
from bench.spark import planning
from bench.spark.broker import broker_over
from bench.spark.cases import THROUGH_BROKER, Sources, all_cases, make_archives
from bench.spark.filling import fill_store, is_filled, kafka_batches
from bench.spark.messages import CARRIERS, QUEUE_COUNT, TOPIC, WANTED_CARRIER
from bench.spark.processes import ProcessTree
from ha.arrow import LogReader, ReadOptions
from ha.spark import HalogDataSource

ROWS = 1600
RUN = {"case": "columns", "side": "halog", "unit": "s", "seconds": 1.0, "cpu_s": 2.5, "log_bytes": 500_000_000} | {
    "broker_cpu_s": 0.0,
    "foreign_cores": 0.0,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "store"
    fill_store(folder, ROWS)
    return folder


def test_both_sides_hold_the_same_messages(store: Path) -> None:
    options = ReadOptions(columns=("keys", "body", "properties"))
    with LogReader(store) as reader:
        for queue_id in range(QUEUE_COUNT):
            begin, end = reader.queue_range(TOPIC, queue_id)
            ours = [
                row for batch in reader.read_queue(TOPIC, queue_id, begin, end, options) for row in batch.to_pylist()
            ]
            theirs = [row for batch in kafka_batches(queue_id, ROWS) for row in batch.to_pylist()]
            assert len(ours) == len(theirs) == ROWS // QUEUE_COUNT
            for mine, other in zip(ours, theirs, strict=True):
                assert mine["body"] == other["value"]
                assert len(mine["body"]) == 1024
                assert [word.encode() for word in mine["keys"]] == [other["key"]]
                headers = {header["key"]: header["value"].decode() for header in other["headers"]}
                assert dict(mine["properties"]) == {"KEYS": other["key"].decode(), **headers}
                assert other["partition"] == queue_id
                assert f"F{json.loads(mine['body'])['n']}" == mine["keys"][0]


def test_existing_complete_store_is_reused(store: Path) -> None:
    assert is_filled(store, ROWS)
    assert not is_filled(store, ROWS + 1)
    assert not is_filled(store / "commitlog", ROWS)


@pytest.mark.processes
def test_each_case_reads_what_it_should(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    spark.dataSource.register(HalogDataSource)
    with broker_over(store, tmp_path / "broker") as broker:
        check_cases(spark, store, tmp_path, broker.name_server)


def check_cases(spark: SparkSession, store: Path, tmp_path: Path, servers: str) -> None:
    sources = Sources(
        store=store,
        bootstrap=None,
        output=tmp_path,
        cores=2,
        archives=tmp_path / "archives",
        servers=servers,
        stream_rows=320,
        stream_batches=2,
        stream_batches_skipped=1,
    )
    make_archives(spark, sources)
    archived = spark.read.parquet(str(sources.partial_archive)).count()
    assert 0.8 * ROWS < archived < ROWS
    assert ha.spark.topic(spark, TOPIC, archive=str(sources.partial_archive), path=str(store)).count() == ROWS
    cases = all_cases(sources)
    found = {(case.name, case.side): case.run(spark) for case in cases}
    assert {name for name, _ in found} == set(bench.QUESTIONS)
    assert {side for _, side in found} == {side for side in bench.SIDES if not side.startswith("Kafka")}
    log_bytes = found["audit", "halog"]["compared_bytes"]
    assert log_bytes > ROWS * 1024
    assert {case.log_bytes for case in cases} == {0, log_bytes}
    assert {case.log_bytes for case in cases if case.side == THROUGH_BROKER} == {log_bytes}
    assert found["count", "halog"]["rows"] == ROWS
    assert found["parquet", "halog"]["rows"] == ROWS
    assert found["parquet", "halog archive"]["rows"] == ROWS
    assert found["micro-batch", "halog"]["batches"] >= 3
    assert sources.halog(spark, ("queueId",), tags=WANTED_CARRIER).count() == ROWS // len(CARRIERS)


def test_planning_is_measured_for_the_queues_that_a_query_reads(tmp_path: Path) -> None:
    trio.run(planning.fill, tmp_path, 150, 300)
    whole = planning.measured(tmp_path, planning.Point(150), 2)
    topic = planning.measured(tmp_path, planning.Point(150, 1), 2)
    assert (whole["queues_read"], topic["queues_read"]) == (150, 100)
    for run in (whole, topic):
        assert min(run["batch_s"], run["start_s"], run["look_s"]) > 0
        assert 20 < run["offset_bytes"] < run["uneven_offset_bytes"]
    assert whole["uneven_offset_bytes"] > topic["uneven_offset_bytes"]


def test_time_of_a_child_that_ended_is_kept() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint('burnt', flush=True)\ninput()"
    shell = f'"{sys.executable}" -c "{burn}"; read wait'
    with subprocess.Popen(["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        with ProcessTree([parent.pid]) as tree:
            assert parent.stdout.readline() == "burnt\n"
            with_child = tree.cpu_s()
            assert with_child >= 0.15
            parent.stdin.write("\n")
            parent.stdin.flush()
            parent.stdin.close()
            parent.wait()
            assert tree.cpu_s() >= with_child


def test_the_table_compares_with_both_kafka_sides(tmp_path: Path) -> None:
    lines = [
        {"round": number, "case": "count", "side": side, "unit": "s", "seconds": seconds, "cpu_s": 1.0}
        | {"broker_cpu_s": 0.5, "foreign_cores": 0.0}
        for side, all_seconds in (
            ("halog", (1.0, 2.0, 3.0)),
            ("Kafka", (9.0, 8.0, 30.0)),
            ("Kafka, tuned", (6.0, 6.0, 6.0)),
        )
        for number, seconds in enumerate(all_seconds)
    ]
    file = tmp_path / "runs.jsonl"
    text = [json.dumps(line) for line in [{**lines[0], "round": -1, "seconds": 99.0}, *lines, {"kafka": "4"}]]
    file.write_text("\n".join(text) + "\n")
    rows = bench.table(bench.runs_of(file))
    assert [row[1] for row in rows] == ["Kafka", "Kafka, tuned", "halog"]
    assert rows[2][2:5] == ["2.00 (1.00-3.00)", "4.5", "3.0"]
    assert rows[0][3:5] == ["", ""]
    assert rows[2][-3:] == ["", "", ""]


def test_the_table_has_medians_per_gb_of_log() -> None:
    runs = [RUN | {"seconds": seconds} for seconds in (1.0, 6.0, 4.0)]
    files, broker = bench.table([*runs, RUN | {"side": THROUGH_BROKER, "broker_cpu_s": 1.5}])
    assert bench.HEAD[-3:] == ["s/GB of log", "application CPU s/GB", "broker CPU s/GB"]
    assert files[-3:] == ["8.00", "5.00", ""]
    assert broker[-3:] == ["2.00", "5.00", "3.00"]


def test_two_versions_are_compared_where_both_were_measured() -> None:
    old = [RUN | {"seconds": seconds} for seconds in (3.0, 6.0, 4.0)]
    new = [RUN | {"seconds": 2.0, "cpu_s": 5.0}, RUN | {"case": "view"}]
    [row] = bench.compared(old, new)
    assert row[1:] == ["halog", "4.00 (3.00-6.00)", "2.00", "2.00", "2.50 (2.50-2.50)", "5.00", "0.50"]


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "store" / "commitlog"
    mine.mkdir(parents=True)
    with pytest.raises(SystemExit, match="holds something else"), bench.data_folder(tmp_path, keep=False):
        raise AssertionError("not reached")
    assert mine.is_dir()


def test_its_own_folder_is_kept_or_removed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for keep in (True, False):
        with bench.data_folder(folder, keep=keep):
            (folder / "store").mkdir(exist_ok=True)
            (folder / "output").mkdir()
        assert (folder / "store").exists() == keep
        assert not (folder / "output").exists()
    assert not folder.exists()


def test_a_wrong_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.arguments(["--only", "columns,colums"])
    assert "--only: unknown colums" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.arguments(["--sides", "halog,kafka"])
    assert "--sides: unknown kafka" in capsys.readouterr().err
