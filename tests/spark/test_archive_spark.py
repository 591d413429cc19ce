"""Archives written and read by Spark: Parquet, Delta, and back into a broker."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DateType, StringType

from ha.errors import OptionError
from ha.spark.jobs.archive import ArchiveOptions, archive, delta
from ha.spark.jobs.archive.delta import delta_session
from ha.spark.jobs.archive.manifest import Manifest
from ha.spark.jobs.archive.read import read_archive
from ha.spark.jobs.restore import RestoreOptions, restore
from tests.arrow.oracle import plain_rows
from tests.spark.clusters import running_broker
from tests.spark.derived_stores import write_store
from tests.spark.stores import KilledError, make_store, message
from tests.spark.test_archive import queued_offsets, raw_body, raw_records, rebuilt
from tests.spark.test_restore import origins, stored

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("archive-spark") / "broker-b"
    trio.run(partial(write_store, root, 400))
    return root


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_broker(tmp_path_factory.mktemp("restore-spark")) as address:
        yield address


def options_of(store: Path, target: Path, **changes: Any) -> ArchiveOptions:
    given: dict[str, Any] = {"path": str(store), "archive": str(target), "range_bytes": 40 << 10}
    return ArchiveOptions(**given | changes)


def places(rows: DataFrame) -> list[tuple[int, str, bytes]]:
    found = rows.select("physicalOffset", "topic", "body").collect()
    return sorted((row[0], row[1], bytes(row[2])) for row in found)


def expected_places(store: Path) -> list[tuple[int, str, bytes]]:
    rows = plain_rows(store, queued_offsets(store), "b")
    records = zip(rows, raw_records(store), strict=True)
    return [(row["physicalOffset"], row["topic"], raw_body(raw)) for row, (_, raw) in records]


def test_parquet_by_executors_is_what_spark_reads(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    stages = []
    result = archive(spark, options_of(store, target), lambda stage, done, total: stages.append((stage, done, total)))
    assert result.rows == len(queued_offsets(store))
    assert stages[-1][0] == "compact"
    ends = [(done, total) for stage, done, total in stages if stage == "archive"]
    assert ends[-1][0] == ends[-1][1] == result.covered_end
    # An orphan of a killed run.
    manifest = Manifest(target, "broker-b")
    (manifest.folder / "staging" / manifest.stage(9) / "x.parquet").write_bytes(b"half a file")
    assert places(spark.read.parquet(str(target))) == expected_places(store)
    table = read_archive(spark, target)
    assert places(table) == expected_places(store)
    assert isinstance(table.schema["topic"].dataType, StringType)
    assert isinstance(table.schema["date"].dataType, DateType)
    assert table.where(F.col("date") != F.to_date("storeTimestamp")).count() == 0
    rows = [row.asDict(recursive=True) for row in table.where("topic = 'задержки'").orderBy("physicalOffset").collect()]
    raw = dict(raw_records(store))
    for row in rows:
        row["body"] = bytes(row["body"])
        for name in ("bornTimestamp", "storeTimestamp"):
            row[name] = row[name].replace(tzinfo=row[name].tzinfo or UTC)
        assert rebuilt(row) == raw[row["physicalOffset"]]
    assert rows


def test_numeric_topics_stay_text_and_rows_without_time_have_no_date(spark: SparkSession, tmp_path: Path) -> None:
    topics = ["007", "007", "%RETRY%7"]
    numbers = make_store(tmp_path / "broker-n", [message(n, topic=topic) for n, topic in enumerate(topics)])
    (_, _), (damaged, _), _ = raw_records(numbers)
    [segment] = (numbers / "commitlog").iterdir()
    content = bytearray(segment.read_bytes())
    content[damaged + 4] ^= 0xFF  # of the magic number
    segment.write_bytes(content)
    result = archive(spark, options_of(numbers, tmp_path / "archive"))
    assert result.damaged == 1
    table = read_archive(spark, tmp_path / "archive")
    rows = table.orderBy("physicalOffset").select("topic", F.col("date").isNull(), "crcOk").collect()
    assert [tuple(row) for row in rows] == [("007", False, True), ("007", True, False), ("%RETRY%7", False, True)]


def test_a_delta_table_has_every_record_once_through_kills(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    skip_without_delta(spark)
    target = tmp_path / "archive"
    settings = {"format": "delta", "topics": ("flights", "delays"), "compact_files_min": 2}
    expected = [place for place in expected_places(store) if place[1] in ("flights", "delays")]
    for fatal, rows in (("link commit", 0), ("mark applied", 0), ("follow", None), ("link commit", None)):

        def kill(step: str, fatal: str = fatal) -> None:
            if step == fatal:
                raise KilledError

        with pytest.raises(KilledError):
            archive(spark, options_of(store, target, **settings), failpoint=kill)
        held = places(delta_rows(spark, target)) if (target / "_delta_log").exists() else []
        assert held == expected[: len(held)]
        assert rows is None or len(held) == rows
    # Killed after its first commit was complete.
    assert held
    result = archive(spark, options_of(store, target, **settings))
    assert places(delta_rows(spark, target)) == places(read_archive(spark, target)) == expected
    assert result.covered_end == result.log_end
    assert result.merged_files
    late = delta_rows(spark, target).where(f"topic = 'flights' AND physicalOffset > {expected[-10][0]}")
    assert places(late) == [place for place in expected[-9:] if place[1] == "flights"]
    # A stream over the table has each row once, as a merge is no change of its data.
    out = tmp_path / "out"
    stream = delta_session(spark).readStream.format("delta").option("startingVersion", "0").load(str(target))
    writer = stream.writeStream.format("parquet").option("checkpointLocation", f"{out}-c").trigger(availableNow=True)
    assert writer.start(str(out)).awaitTermination(300)
    assert places(spark.read.parquet(str(out))) == expected
    again = archive(spark, options_of(store, target, **settings))
    assert (again.rows, again.commits) == (0, 0)
    counted = restore(spark, RestoreOptions(archive=str(target), topic="delays", dry_run=True))
    assert counted.rows == sum(place[1] == "delays" for place in expected)


def test_missing_delta_is_an_error(
    spark: SparkSession, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_DELTA_TABLE", "io.delta.tables.NoSuchTable")
    with pytest.raises(OptionError, match="no Delta Lake"):
        archive(spark, options_of(store, tmp_path / "archive", format="delta"))
    assert not list(tmp_path.glob("archive/topic=*"))


@pytest.mark.processes
def test_an_archive_is_restored_into_a_topic(spark: SparkSession, servers: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "broker-s", [message(number) for number in range(1000)])
    archive(spark, options_of(store, tmp_path / "archive"))
    options = RestoreOptions(
        archive=f"file:{tmp_path / 'archive'}",
        topic="flights",
        target="back",
        servers=servers,
        state=str(tmp_path / "state.json"),
        queues=(0, 1, 3),
        tags=("tag0", "tag1"),
        begin_ms=0,
    )
    expected = [n for n in range(1000) if n % 4 != 2 and n % 3 != 2]
    counted = restore(spark, RestoreOptions(**as_dict(options) | {"dry_run": True, "state": None}))
    result = restore(spark, options)
    assert (counted.rows, result.sent, result.exit_code) == (len(expected), len(expected), 0)
    found = stored(servers, "back")
    for queue in (0, 1, 3):
        mine = [n for n in expected if n % 4 == queue]
        assert origins(found[queue]) == [f"flights/broker-s/{queue}/{n // 4}" for n in mine]
        assert [each.body for each in found[queue]] == [b"%08d" % n for n in mine]
    again = restore(spark, RestoreOptions(**as_dict(options) | {"archive": str(tmp_path / "archive")}))
    assert (again.sent, again.already) == (0, len(expected))
    assert Counter(queue.target.queue_id for queue in again.queues if queue.target) == {0: 1, 1: 1, 3: 1}


def as_dict(options: RestoreOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__struct_fields__}


def delta_rows(spark: SparkSession, target: Path) -> DataFrame:
    """What Delta itself reads."""
    return delta_session(spark).read.format("delta").load(str(target))


def skip_without_delta(spark: SparkSession) -> None:
    if "Delta" not in str(spark.sparkContext.getConf().get("spark.sql.extensions", "")):
        pytest.skip("Delta's jars could not be had")
