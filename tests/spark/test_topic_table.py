"""A topic as one table, from an archive and the log: each message once, while both change."""

import zlib
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import ha.spark
from ha.errors import OptionError
from ha.protocol.codes import SysFlag
from ha.protocol.record import Message
from ha.spark.jobs.archive import ArchiveOptions, archive
from tests.spark.stores import LiveStore, live_store, message
from tests.spark.test_archive_spark import KilledError, skip_without_delta

pytestmark = pytest.mark.spark

SEGMENT = 64 << 10


def messages(begin: int, end: int) -> list[Message]:
    """Messages with their number in the body, every fifth one compressed, and as many of another topic."""
    found = []
    for number in range(begin, end):
        text = b"%08d" % number + bytes(500)
        made = message(number, body=text if number % 5 else zlib.compress(text))
        made.sys_flag = 0 if number % 5 else SysFlag.COMPRESSED
        found += [made, message(number, topic="other", body=bytes(100))]
    return found


def run_archive(spark: SparkSession, store: Path, target: Path, **changes: Any) -> None:
    options: dict[str, Any] = {"range_bytes": 40 << 10, **changes}
    given = {name: options.pop(name) for name in ("failpoint",) if name in options}
    archive(spark, ArchiveOptions(path=str(store), archive=str(target), **options), **given)


def numbers(table: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body[:8])) for row in table.select("body").collect())


@pytest.mark.parametrize("form", ["parquet", "delta"])
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
        # What the earlier state of the archive lacks is gone from the log.
        with pytest.raises(PySparkException, match="retention deleted them"):
            numbers(early)


def delete_archived(live: LiveStore) -> None:
    """Deletes all segments but the last."""
    assert live.clean() > 2


def test_a_topic_that_is_gone_from_the_log_is_read_from_the_archive(spark: SparkSession, tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    with live_store(store) as live:
        live.put(messages(0, 50))
        run_archive(spark, store, target, topics=("flights",))
        with pytest.raises(OptionError, match="does not contain the topic other"):
            ha.spark.topic(spark, "other", archive=str(target), path=str(store))
    other = tmp_path / "broker-b2"
    with live_store(other) as live:
        live.put([message(1, topic="else")])
        table = ha.spark.topic(spark, "flights", archive=str(target), path=str(other))
        assert numbers(table) == list(range(50))
