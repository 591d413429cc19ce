"""Stores that RocketMQ brokers wrote, read as Arrow: each record and column as the manifest and the plain codec say."""

import base64
from pathlib import Path
from typing import Any

import pytest

from ha.arrow import COLUMNS, LogReader, ReadOptions, RowFilter, arrow_schema, read_arrow
from tests.arrow.oracle import plain_rows, rows_of
from tests.protocol.golden import STORES, manifest
from tests.unpacking import unpack_store

ALL = ReadOptions(columns=tuple(COLUMNS))


@pytest.fixture(params=STORES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The store, and what was found in it when it was made."""
    version: str = request.param
    return unpack_store(version, tmp_path / "broker-a"), manifest(version)


def test_queued_messages_equal_the_reference_decoder(golden: tuple[Path, dict[str, Any]]) -> None:
    store, manifest = golden
    with LogReader(store) as reader:
        for topic, queue_id in reader.queues():
            begin, end = reader.queue_range(topic, queue_id)
            entries = [e for e in manifest["consumequeue"] if e[:2] == [topic, queue_id]]
            assert (begin, end) == (0, len(entries))
            found = rows_of(reader.read_queue(topic, queue_id, begin, end, ALL))
            assert found == plain_rows(store, [e[3] for e in entries], "broker-a")


def test_rows_equal_those_of_a_java_consumer(golden: tuple[Path, dict[str, Any]]) -> None:
    store, manifest = golden
    columns = ["queueId", "queueOffset", "physicalOffset", "tags", "keys", "properties", "body", "uniqKey", "flag"]
    found = rows_of(read_arrow(store, topic=manifest["topic"], columns=columns))
    expected = {(m["queueId"], m["queueOffset"]): m for m in manifest["stored"]}
    assert {(m["queueId"], m["queueOffset"]) for m in found} == set(expected)
    for message in found:
        theirs = expected[message["queueId"], message["queueOffset"]]
        assert message["body"] == base64.b64decode(theirs["body_base64"])
        assert message["physicalOffset"] == theirs["commitLogOffset"]
        assert message["tags"] == theirs["tags"]
        assert message["keys"] == (theirs["keys"].split(" ") if theirs["keys"] else None)
        assert message["uniqKey"] == theirs["msgId"]
        assert message["flag"] == theirs["flag"]
        # The client adds the queue's bounds at that moment.
        stored = {k: v for k, v in theirs["properties"].items() if k not in ("MIN_OFFSET", "MAX_OFFSET")}
        assert message["properties"] == stored


def test_walk_finds_queued_and_unqueued_records(golden: tuple[Path, dict[str, Any]]) -> None:
    store, manifest = golden
    offsets = [r["offset"] for r in manifest["commitlog"] if r["kind"] == "message"]
    with LogReader(store) as reader:
        end = reader.segments()[-1].end
        assert [int(o) for part in reader.walk(0, end) for o in part] == offsets
        assert rows_of(reader.walk_range(0, end, ALL)) == plain_rows(store, offsets, "broker-a")


def test_whole_log_in_physical_order_has_every_queued_record(golden: tuple[Path, dict[str, Any]]) -> None:
    store, manifest = golden
    queued = sorted({e[3] for e in manifest["consumequeue"]})
    assert rows_of(read_arrow(store, columns=COLUMNS)) == plain_rows(store, queued, "broker-a")


def test_adjacent_ranges_return_every_row_once(golden: tuple[Path, dict[str, Any]]) -> None:
    store, _ = golden
    options = ReadOptions(columns=("physicalOffset", "body"))
    with LogReader(store) as reader:
        end = reader.end_offset()
        whole = rows_of(reader.read_range(0, end, options))
        for each in (997, 4096, 100_000):
            parts = [rows_of(reader.read_range(low, high, options)) for low, high in reader.split(0, end, each)]
            assert [line for part in parts for line in part] == whole
            walks = [
                int(o) for low, high in reader.split(0, end, each) for part in reader.walk(low, high) for o in part
            ]
            assert walks == [int(o) for part in reader.walk(0, end) for o in part]


def test_single_columns_equal_those_of_a_full_read(golden: tuple[Path, dict[str, Any]]) -> None:
    store, _ = golden
    whole = rows_of(read_arrow(store, columns=COLUMNS))
    for name in COLUMNS:
        table = read_arrow(store, columns=[name])
        assert table.schema == arrow_schema([name])
        assert rows_of(table) == [{name: line[name]} for line in whole]


def test_small_batches_hold_the_same_rows(golden: tuple[Path, dict[str, Any]]) -> None:
    store, _ = golden
    whole = rows_of(read_arrow(store, columns=COLUMNS))
    for options in (ReadOptions(batch_rows=1), ReadOptions(batch_rows=7), ReadOptions(batch_bytes=600)):
        batches = list(read_arrow(store, columns=COLUMNS, options=options))
        assert rows_of(batches) == whole
        assert max(len(batch) for batch in batches) <= options.batch_rows


@pytest.mark.parametrize(
    "where",
    [
        RowFilter(tags=frozenset({"TagA"})),
        RowFilter(tags=frozenset({"TagA", "warm", "none such"})),
        RowFilter(keys=frozenset({"k0b", "k3a"})),
        RowFilter(queue_ids=frozenset({0, 3})),
        RowFilter(topics=frozenset({"GoldenTopic"})),
        RowFilter(queue_offset_begin=2, queue_offset_end=5),
        RowFilter(physical_begin=300, physical_end=9_000),
        RowFilter(tags=frozenset({"TagA"}), queue_ids=frozenset({0}), queue_offset_begin=1),
        RowFilter(topics=frozenset({"none such"})),
    ],
)
def test_filters_keep_matching_rows(golden: tuple[Path, dict[str, Any]], where: RowFilter) -> None:
    store, _ = golden

    def passes(line: dict[str, Any]) -> bool:
        return (
            (where.tags is None or line["tags"] in where.tags)
            and (where.keys is None or line["uniqKey"] in where.keys or bool(where.keys & set(line["keys"] or ())))
            and (where.topics is None or line["topic"] in where.topics)
            and (where.queue_ids is None or line["queueId"] in where.queue_ids)
            and (where.queue_offset_begin or 0) <= line["queueOffset"] < (where.queue_offset_end or 1 << 60)
            and (where.physical_begin or 0) <= line["physicalOffset"] < (where.physical_end or 1 << 60)
        )

    expected = [line for line in rows_of(read_arrow(store, columns=COLUMNS)) if passes(line)]
    assert rows_of(read_arrow(store, columns=COLUMNS, where=where)) == expected
    with LogReader(store, broker_name="broker-a") as reader:
        walked = rows_of(reader.walk_range(0, reader.end_offset(), ReadOptions(columns=tuple(COLUMNS), where=where)))
        queued = {line["physicalOffset"] for line in expected}
        assert [line for line in walked if line["physicalOffset"] in queued] == expected
        assert all(passes(line) for line in walked)


def test_times_are_found(golden: tuple[Path, dict[str, Any]]) -> None:
    store, manifest = golden
    by_offset = {r["offset"]: r for r in manifest["commitlog"]}
    with LogReader(store) as reader:
        times = {r["storeTimestamp"] for r in by_offset.values() if r["kind"] == "message"}
        for t in sorted(times | {0, min(times) - 1, max(times) + 1}):
            later = [e[3] for e in manifest["consumequeue"] if by_offset[e[3]]["storeTimestamp"] >= t]
            assert reader.physical_offset_for_time(t) == min(later, default=reader.end_offset())
            for topic, queue_id in reader.queues():
                queue = [e for e in manifest["consumequeue"] if e[:2] == [topic, queue_id]]
                expected = [e[2] for e in queue if by_offset[e[3]]["storeTimestamp"] >= t]
                assert reader.offset_for_time(topic, queue_id, t) == min(expected, default=None)


def test_a_time_filter_is_exact(golden: tuple[Path, dict[str, Any]]) -> None:
    store, manifest = golden
    times = sorted({r["storeTimestamp"] for r in manifest["commitlog"] if r["kind"] == "message"})
    begin, end = times[len(times) // 4], times[3 * len(times) // 4]
    expected = [
        r["offset"] for r in manifest["commitlog"] if r["kind"] == "message" and begin <= r["storeTimestamp"] < end
    ]
    queued = {e[3] for e in manifest["consumequeue"]}
    where = RowFilter(store_begin_ms=begin, store_end_ms=end)
    found = rows_of(read_arrow(store, columns=["physicalOffset"], where=where))
    assert [line["physicalOffset"] for line in found] == [offset for offset in expected if offset in queued]
