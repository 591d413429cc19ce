"""The figures of a log: exact ones against a real broker's manifest, and against messages made for the purpose."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from ha.errors import OptionError, StoreUnreadable
from ha.protocol.record import Message
from ha.protocol.store_files import segment_name
from ha.spark.jobs.restore import RestoreOptions, restore
from ha.spark.jobs.stats.job import StatsOptions, StatsResult, stats, stats_with
from ha.spark.jobs.stats.report import stats_html, stats_plots
from tests.arrow.stores import StoreWriter
from tests.protocol.golden import STORES, manifest
from tests.spark.inline import inline_runner, inline_spark
from tests.spark.stores import ODD_TIMES_MS, make_store, message, named, set_store_time
from tests.unpacking import unpack_store

HOUR_MS = 3_600_000


def count(path: Path, **more: Any) -> StatsResult:
    return stats_with(inline_runner(), StatsOptions(path=str(path), **more))


@pytest.mark.parametrize("version", STORES)
@pytest.mark.parametrize("range_bytes", [1000, 1 << 20])
def test_a_real_brokers_log_is_counted_like_its_manifest(version: str, range_bytes: int, tmp_path: Path) -> None:
    golden = manifest(version)
    records = [entry for entry in golden["commitlog"] if entry["kind"] == "message"]
    result = count(unpack_store(version, tmp_path / "store"), range_bytes=range_bytes, top=1000)
    assert (result.total.messages, result.damaged, result.exit_code) == (len(records), 0, 0)
    assert result.total.record_bytes == sum(record["size"] for record in records)
    assert result.total.body_bytes == sum(record["bodyLength"] for record in records)
    cells: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for record in records:
        hour_ms = record["storeTimestamp"] // HOUR_MS * HOUR_MS
        cells.setdefault((record["topic"], record["queueId"], hour_ms), []).append(record)
    rows = {(row.topic, row.queue_id, row.hour_ms): row.figures for row in result.rows}
    assert rows.keys() == cells.keys()
    for key, held in cells.items():
        found = rows[key]
        assert found.messages == len(held)
        assert found.record_bytes == sum(record["size"] for record in held)
        assert (found.first_ms, found.last_ms) == (held[0]["storeTimestamp"], held[-1]["storeTimestamp"])
        sizes = sorted(record["bodyLength"] for record in held)
        latencies = sorted(record["storeTimestamp"] - record["bornTimestamp"] for record in held)
        assert found.size_max == sizes[-1]
        assert found.latency_ms_max == latencies[-1]
        for q, size, latency in (
            (0.5, found.size_p50, found.latency_ms_p50),
            (0.9, found.size_p90, found.latency_ms_p90),
            (0.99, found.size_p99, found.latency_ms_p99),
        ):
            assert size == pytest.approx(sizes[int(q * (len(sizes) - 1))], rel=0.01)
            assert latency == pytest.approx(latencies[int(q * (len(latencies) - 1))], rel=0.01)
    tags = Counter((r["topic"], r["properties"]["TAGS"]) for r in records if "TAGS" in r["properties"])
    assert {(tag.topic, tag.value): tag.count for tag in result.tags} == tags
    keys = Counter((r["topic"], word) for r in records for word in r["properties"].get("KEYS", "").split(" ") if word)
    assert {(key.topic, key.value): key.count for key in result.keys} == keys
    assert {(tag.error) for tag in result.tags + result.keys} == {0}


def test_topics_hours_retries_and_dead_letters(tmp_path: Path) -> None:
    messages = [message(number) for number in range(300)]
    messages += [message(number, topic="%RETRY%shop", queue_id=0) for number in range(7)]
    messages += [message(number, topic="%DLQ%shop", queue_id=0) for number in range(2)]
    for again in messages[300:307]:
        again.reconsume_times = 3
    store = make_store(tmp_path / "store", messages)
    result = count(store)
    assert {topic.topic: (topic.figures.messages, topic.queues) for topic in result.topics} == {
        "flights": (300, 4),
        "%RETRY%shop": (7, 1),
        "%DLQ%shop": (2, 1),
    }
    ((group),) = result.groups
    assert (group.group, group.retry_messages, group.dead_letters) == ("shop", 7, 2)
    assert (result.total.retried, result.total.reconsume_times_max) == (7, 3)
    assert sum(hour.figures.messages for hour in result.hours) == 309
    total = result.total
    assert total.messages_per_s == pytest.approx(309 / max(1.0, (total.last_ms - total.first_ms) / 1000))
    assert count(store, topics=("%DLQ%shop",)).total.messages == 2
    assert count(store, end_ms=total.first_ms).total.messages == 0
    assert count(store, begin_ms=total.first_ms, end_ms=total.last_ms + 1).total.messages == 309


def test_messages_are_chosen_by_times_that_step_back(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "s")
    for number in range(40):
        store.put(message(number), store_ms=9000 if number in (3, 8, 20, 31) else 1000 + number)
    assert count(store.root, begin_ms=9000).total.messages == 4
    assert count(store.root, end_ms=9000).total.messages == 36
    chosen = RestoreOptions(path=str(store.root), topic="flights", begin_ms=9000, dry_run=True)
    assert restore(inline_spark(), chosen).rows == 4


@pytest.mark.parametrize(("minutes", "length", "unit"), [(35, 1, "minute"), (179, 1, "minute"), (300, 60, "hour")])
def test_plots_of_a_short_log_are_by_minute(tmp_path: Path, minutes: int, length: int, unit: str) -> None:
    begin_ms = 472_223 * HOUR_MS
    store = StoreWriter(tmp_path / "s", segment_size=1 << 20)
    for minute in range(minutes + 1):
        store.put(Message("t" if minute % 5 else "u", minute % 2, b"x"), store_ms=begin_ms + minute * 60_000)
    result = count(store.root)
    assert [each.begin_ms for each in result.intervals] == list(
        range(begin_ms, begin_ms + minutes * 60_000 + 1, length * 60_000)
    )
    assert sum(each.figures.messages for each in result.intervals) == minutes + 1
    second = result.intervals[1]
    assert second.messages == ({"t": 1} if length == 1 else {"t": 48, "u": 12})
    assert [hour.hour_ms for hour in result.hours] == list(range(begin_ms, begin_ms + minutes * 60_000 + 1, HOUR_MS)), (
        "the table is by the hour in any case"
    )
    assert sum(row.figures.messages for row in result.rows) == minutes + 1
    titles = {plot.name: plot.title for plot in stats_plots(result)}
    assert titles["messages"] == f"Messages by {unit} and topic"
    assert titles["written"] == f"Log written by {unit}"


def test_a_broker_has_the_name_that_its_store_states(tmp_path: Path) -> None:
    store = make_store(tmp_path / "slave", [message(0)])
    assert count(store).broker_name == "slave"
    assert count(named(store, "broker-a")).broker_name == "broker-a"


def test_messages_of_a_clock_ahead_are_counted(tmp_path: Path) -> None:
    early = message(0)
    early.born_timestamp_ms = 4_000_000_000_000
    result = count(make_store(tmp_path / "store", [early, message(1)]))
    assert result.total.born_after_store == 1
    assert result.total.latency_ms_max > 0


def test_a_born_time_that_is_not_in_ms_is_counted(tmp_path: Path) -> None:
    """A client decides on it; in nanoseconds it is out of range for the column."""
    nanoseconds = message(0)
    nanoseconds.born_timestamp_ms = 1_700_000_000_000_000_000
    assert count(make_store(tmp_path / "store", [nanoseconds, message(1)])).total.messages == 2


def test_damaged_records_are_left_out_and_counted(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [message(number) for number in range(20)])
    log = store / "commitlog" / f"{0:020d}"
    raw = bytearray(log.read_bytes())
    raw[4] ^= 0xFF
    log.write_bytes(raw)
    result = count(store)
    assert (result.total.messages, result.damaged, result.exit_code) == (19, 1, 3)


def test_records_deleted_while_the_job_runs_are_reported(tmp_path: Path) -> None:
    store = StoreWriter(tmp_path / "s", segment_size=4096)
    for number in range(100):
        store.put(message(number), store_ms=1000 + number)

    def run(function: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterator[list[Any]]:
        (store.root / "commitlog" / segment_name(0)).unlink()
        yield from inline_runner()(function, tasks)

    result = stats_with(run, StatsOptions(path=str(store.root), range_bytes=2048))
    assert result.total.messages == sum(offset >= 4096 for offset in store.offsets)
    assert (result.gone_end, result.damaged, result.exit_code) == (4096, 0, 3)
    assert "were deleted while the job ran" in stats_html(result)
    later = count(store.root, range_bytes=2048)
    assert (later.total, later.gone_end, later.exit_code) == (result.total, None, 0)


@pytest.mark.parametrize("store_ms", ODD_TIMES_MS)
@pytest.mark.parametrize("number", [0, 5, 9])
def test_damaged_store_times(tmp_path: Path, store_ms: int, number: int) -> None:
    store = make_store(tmp_path / "store", [message(number) for number in range(10)])
    set_store_time(store, number, store_ms)
    result = count(store)
    assert (result.total.messages, result.damaged) == ((10, 0) if store_ms == ODD_TIMES_MS[0] else (9, 1))


def test_an_empty_log_has_figures_too(tmp_path: Path) -> None:
    result = count(make_store(tmp_path / "store", []))
    assert (result.total.messages, result.total.size_p50, result.rows) == (0, None, ())


def test_bad_input_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreadable, match="nowhere"):
        count(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="tracked"):
        count(tmp_path, tracked=0)


@pytest.mark.spark_versions
def test_executors_count_what_the_driver_would(tmp_path: Path, spark: SparkSession) -> None:
    options = StatsOptions(path=str(unpack_store("5.5.0", tmp_path / "store")), range_bytes=4096)
    there, here = stats(spark, options), stats_with(inline_runner(), options)
    assert (there.total, there.rows, there.tags, there.keys) == (here.total, here.rows, here.tags, here.keys)
