"""Columns that an archive decodes from JSON bodies, without Spark but for the view."""

from __future__ import annotations

import json
import zlib
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

import ha.spark
from ha.errors import OptionError
from ha.protocol.codes import SysFlag
from ha.protocol.record import Message
from ha.spark.jobs.archive import ArchiveOptions, ArchiveResult, archive
from ha.spark.jobs.archive.body_columns import BodyDecoder
from ha.spark.jobs.archive.erase import EraseOptions, erase
from ha.spark.jobs.archive.manifest import BodyColumns
from ha.spark.jobs.archive.read import archive_schema_of, archive_states
from ha.spark.jobs.audit.job import AuditOptions, audit_with
from tests.spark.inline import inline_runner, inline_spark
from tests.spark.stores import live_store, make_store, message
from tests.spark.test_archive_spark import delta_rows, skip_without_delta

SPARK = inline_spark()


def schema(**types: Any) -> str:
    """A schema as Spark writes it in JSON."""
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in types.items()]
    return json.dumps({"type": "struct", "fields": fields})


def decoded(bodies: list[bytes | None], **types: Any) -> list[Any]:
    decoder = BodyDecoder(BodyColumns("json", {"t": types}))
    found = decoder.decode("t", pa.array(bodies, pa.binary()), pa.array([0] * len(bodies)), 1 << 20)
    return list(found.to_pylist())


LONGS = {"type": "array", "elementType": "long", "containsNull": True}
NAMES = {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True}
ITEM = json.loads(schema(sku="string", count="integer"))
ITEMS = {"type": "array", "elementType": ITEM, "containsNull": True}
ALL_TYPES: dict[str, Any] = {
    "paid": "boolean",
    "count": "integer",
    "order_id": "long",
    "share": "float",
    "price": "double",
    "customer": "string",
    "amount": "decimal(20,4)",
    "day": "date",
    "at": "timestamp",
    "codes": LONGS,
    "notes": NAMES,
    "items": ITEMS,
    "first": ITEM,
}
ALL_VALUES: dict[str, Any] = {
    "paid": True,
    "count": 3,
    "order_id": 1 << 40,
    "share": 0.5,
    "price": 0.1,
    "customer": "é",
    "amount": Decimal("1.2500"),
    "day": date(2026, 2, 28),
    "at": datetime(2026, 2, 28, 1, 2, 3, 4, UTC),
    "codes": [1, None],
    "notes": {"a": "b", "c": None},
    "items": [{"sku": "x", "count": 1}, None, {"sku": None, "count": None}],
    "first": {"sku": "y", "count": None},
}
"""Of a body that is the JSON of these values"""
ORDERS = schema(order_id="long", amount="decimal(10,2)")
PAYMENTS = schema(order_id="long", method="string")


@pytest.fixture(scope="module")
def one_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("orders") / "broker-a", [order(1)])


def order(number: int, topic: str = "orders", body: bytes | None = None) -> Message:
    """An order, every fifth one compressed; every seventh one is no JSON."""
    text = json.dumps({"order_id": number, "amount": f"{number}.50", "note": "n"}).encode()
    if body is None:
        body = text if number % 7 else b"no json"
    made = message(number, topic=topic, body=body if number % 5 else zlib.compress(body))
    made.sys_flag = 0 if number % 5 else SysFlag.COMPRESSED
    return made


def payment(number: int) -> Message:
    return message(number, topic="payments", body=json.dumps({"order_id": number, "method": "cash"}).encode())


def expected_orders(begin: int, end: int) -> list[tuple[int | None, Decimal | None]]:
    """Of `order`, by number; null where it is no JSON."""
    return [(n, Decimal(n) + Decimal("0.50")) if n % 7 else (None, None) for n in range(begin, end)]


def run(store: Path, target: Path, **changes: Any) -> ArchiveResult:
    given: dict[str, Any] = {
        "columns_from": "json",
        "schemas": {"orders": ORDERS, "payments": PAYMENTS},
        "compact_files_min": 0,
        **changes,
    }
    return archive(SPARK, ArchiveOptions(path=str(store), archive=str(target), **given))


def rows(target: Path, topic: str) -> list[dict[str, Any]]:
    """The rows of a topic in its files, in physical order."""
    found = [
        row for path in target.glob(f"topic={topic}/*/*.parquet") for row in pq.ParquetFile(path).read().to_pylist()
    ]
    return sorted(found, key=lambda row: row["physicalOffset"])


def values(target: Path) -> list[tuple[Any, Any]]:
    return [(row["order_id"], row["amount"]) for row in rows(target, "orders")]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("long", "-9223372036854775808", -(1 << 63)),
        ("integer", "2147483647", (1 << 31) - 1),
        ("double", "3", 3.0),
        ("float", "0.5", 0.5),
        ("boolean", "true", True),
        ("string", '"é\\n"', "é\n"),
        ("date", '"2026-02-28"', date(2026, 2, 28)),
        ("timestamp", '"2026-01-01T02:00:00.000001+02:00"', datetime(2026, 1, 1, 0, 0, 0, 1, UTC)),
        ("timestamp", '"2026-01-01T00:00:00"', datetime(2026, 1, 1, tzinfo=UTC)),
        ("decimal(10,2)", "12.5", Decimal("12.50")),
        ("decimal(10,2)", '"12.50"', Decimal("12.50")),
        (LONGS, "[1, null]", [1, None]),
        (ITEM, '{"sku": "x", "c": 2}', {"sku": "x", "count": None}),
        (NAMES, '{"x": "1", "y": null}', [("x", "1"), ("y", None)]),
        ("long", "null", None),
    ],
)
def test_values_have_the_types_of_the_schema(kind: Any, text: str, value: Any) -> None:
    body = f'{{"other": [1], "a": {text}}}'.encode()
    assert decoded([body, None, b"{}"], a=kind) == [{"a": value}, None, {"a": None}]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("long", '"12"'),
        ("long", "9223372036854775808"),
        ("integer", "2147483648"),
        ("long", "1.5"),
        ("long", "true"),
        ("string", "1"),
        ("boolean", "0"),
        ("timestamp", "1700000000"),
        ("date", '"yesterday"'),
        ("decimal(10,2)", "1.255"),
        ("decimal(10,2)", "123456789.00"),
        ("decimal(10,2)", '"NaN"'),
        ("decimal(10,2)", "1e999999999"),
        ("string", '"\\ud800"'),
        ("long", "[" * 100_000),
        (LONGS, '["x"]'),
    ],
)
def test_a_body_with_a_value_that_does_not_fit_leaves_only_its_own_row_null(kind: Any, text: str) -> None:
    sound = b'{"b": 1}'
    found = decoded([sound, f'{{"b": 2, "a": {text}}}'.encode(), sound], a=kind, b="long")
    assert found == [{"a": None, "b": 1}, None, {"a": None, "b": 1}]


@given(st.lists(st.one_of(st.binary(), st.from_regex(rb'\{"a":.{0,9}\}'))))
def test_any_bytes_are_a_row(bodies: list[bytes]) -> None:
    found = decoded([*bodies, b'{"a": 1}'], a="long", b="decimal(5,1)")
    assert len(found) == len(bodies) + 1
    assert found[-1] == {"a": 1, "b": None}


def test_columns_are_decoded_and_failures_counted(tmp_path: Path) -> None:
    store, target = tmp_path / "broker-a", tmp_path / "archive"
    other = [message(n, topic="other", body=b'{"order_id": 9}') for n in range(3)]
    sent = [made for n in range(40) for made in (order(n), payment(n))]
    make_store(store, sent + other)
    result = run(store, target)
    assert (result.rows, result.undecoded, result.exit_code) == (83, {"orders": 6}, 0)
    assert values(target) == expected_orders(0, 40)
    assert [row["body"] for row in rows(target, "orders")] == [order(n).body for n in range(40)]
    assert [row["method"] for row in rows(target, "orders")] == [None] * 40
    paid = [(row["order_id"], row["method"], row["amount"]) for row in rows(target, "payments")]
    assert paid == [(n, "cash", None) for n in range(40)]
    assert [row["order_id"] for row in rows(target, "other")] == [None] * 3
    again = run(store, target)
    assert (again.rows, again.undecoded) == (0, {})
    options = AuditOptions(paths=(str(store),), archive=str(target))
    assert audit_with(inline_runner(), options).exit_code == 0


@pytest.mark.parametrize("form", ["parquet", "iceberg"])
def test_columns_stay_through_merges_and_erasure(tmp_path: Path, form: str) -> None:
    store, target = tmp_path / "broker-a", tmp_path / "archive"
    for begin in range(0, 40, 10):
        make_store(store, [made for n in range(begin, begin + 10) for made in (order(n), payment(n))])
        run(store, target, format=form)
    assert run(store, target, format=form, compact_files_min=2).merged_files == 8
    if form == "parquet":
        assert values(target) == expected_orders(0, 40)
    erased = erase(SPARK, EraseOptions(archive=str(target), topic="orders", keys=("k8",), dry_run=False))
    assert erased.rows == 1
    expected = [pair for n, pair in enumerate(expected_orders(0, 40)) if n != 8]
    if form == "parquet":
        assert values(target) == expected
        return
    table = StaticTable.from_metadata(str(target))
    found = table.scan(row_filter="topic = 'orders'").to_arrow().sort_by("physicalOffset")
    assert list(zip(found["order_id"].to_pylist(), found["amount"].to_pylist(), strict=True)) == expected
    late = table.scan(row_filter="topic = 'orders' and order_id >= 30").to_arrow()
    assert sorted(late["order_id"].to_pylist()) == [n for n in range(30, 40) if n % 7]
    assert pc.sum(table.scan(row_filter="method = 'cash'").to_arrow()["order_id"]).as_py() == sum(range(40))


def full_messages(count: int) -> list[Message]:
    """Of the topic "full", with ALL_VALUES, and null in every third."""
    bodies = [msgspec.json.encode(ALL_VALUES) if n % 3 else b"{}" for n in range(count)]
    return [message(n, topic="full", body=body) for n, body in enumerate(bodies)]


@pytest.mark.parametrize("form", ["parquet", "iceberg"])
def test_columns_of_all_types_are_in_files_and_tables(tmp_path: Path, form: str) -> None:
    store, target = make_store(tmp_path / "broker-a", full_messages(30)), tmp_path / "archive"
    assert not run(store, target, format=form, schemas={"full": schema(**ALL_TYPES)}).undecoded
    if form == "parquet":
        found = rows(target, "full")
    else:
        found = StaticTable.from_metadata(str(target)).scan().to_arrow().sort_by("physicalOffset").to_pylist()
        for row in found:
            row["items"] = row["items"] or None  # PyIceberg 0.12 reads a null list of structs as an empty one
    expected = ALL_VALUES | {"notes": list(ALL_VALUES["notes"].items())}
    nothing = dict.fromkeys(ALL_VALUES)
    shown = [{name: row[name] for name in ALL_VALUES} for row in found]
    assert shown == [expected if n % 3 else nothing for n in range(30)]


def test_the_schemas_of_an_archive_stay_the_same(tmp_path: Path) -> None:
    store, target = make_store(tmp_path / "broker-a", [order(n) for n in range(10)]), tmp_path / "archive"
    run(store, target)
    changed: list[dict[str, Any]] = [{"schemas": {"orders": ORDERS}}, {"schemas": {}, "columns_from": None}]
    for changes in changed:
        with pytest.raises(OptionError, match="the archive was created with"):
            run(store, target, **changes)


def test_brokers_of_an_archive_agree_on_types(tmp_path: Path) -> None:
    target = tmp_path / "archive"
    first, second = (make_store(tmp_path / name, [order(n) for n in range(10)]) for name in ("a", "b"))
    run(first, target)
    with pytest.raises(OptionError, match=r"order_id of topic orders is string; there is order_id, int64"):
        run(second, target, schemas={"orders": schema(order_id="string")})
    run(second, target, schemas={"orders": schema(order_id="long", note="string")})
    names = archive_schema_of(archive_states(target)).names
    assert names[-4:] == ["order_id", "amount", "method", "note"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"columns_from": None}, "only one of them"),
        ({"schemas": {}}, "only one of them"),
        ({"topics": ("payments",)}, "topic orders is not archived"),
        ({"schemas": {"orders": "{"}}, "schema of orders can't be used"),
        ({"schemas": {"orders": schema()}}, "has no fields"),
        ({"schemas": {"orders": schema(Topic="string")}}, "Topic of topic orders would clash with the column topic"),
        ({"schemas": {"orders": schema(date="date")}}, "would clash with the column date"),
        ({"schemas": {"orders": schema(properties="string")}}, "would clash with the column properties"),
        ({"schemas": {"orders": schema(propertiesRaw="string")}}, "would clash with the column propertiesRaw"),
        ({"schemas": {"orders": schema(a="long", A="long")}}, "a name is there twice"),
        ({"schemas": {"orders": schema(**{"a.b": "long"})}}, "can't have the name 'a.b'"),
        ({"schemas": {"orders": schema(a=json.loads(schema(**{"b c": "long"})))}}, "can't have the name 'b c'"),
        ({"schemas": {"orders": schema(a="binary")}}, "BINARY can't be decoded from JSON"),
        ({"schemas": {"a": schema(x="long"), "b": schema(x="double")}}, "x of topic b is double"),
        ({"schemas": {"a": schema(x="long"), "b": schema(X="long")}}, "X of topic b is int64; there is x"),
    ],
)
def test_schemas_that_give_no_table_are_refused(
    one_order: Path, tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(OptionError, match=error):
        run(one_order, tmp_path / "archive", **changes)
    assert not list(tmp_path.glob("archive/topic=*"))


@pytest.mark.parametrize("form", ["parquet", "delta", "iceberg"])
def test_archived_and_later_messages_have_the_same_columns(spark: SparkSession, tmp_path: Path, form: str) -> None:
    if form == "delta":
        skip_without_delta(spark)
    store, target = tmp_path / "broker-a", tmp_path / "archive"
    ddl = "order_id BIGINT, amount DECIMAL(10, 2)"
    given: dict[str, Any] = {"path": str(store), "archive": str(target), "format": form}
    schemas = {"orders": ddl, "full": schema(**ALL_TYPES | {"amount": "decimal(10,2)"})}
    options = ArchiveOptions(**given, columns_from="json", schemas=schemas)
    with live_store(store) as live:
        live.put([*(order(n) for n in range(40)), *full_messages(30)])
        assert archive(spark, options).undecoded == {"orders": 6}
        live.put([*(order(n) for n in range(40, 60)), *full_messages(30)])
        for decompress in ("true", "false"):
            table = ha.spark.topic(spark, "orders", archive=str(target), path=str(store), decompress=decompress)
            assert table.columns[-2:] == ["order_id", "amount"]
            found = table.orderBy("physicalOffset").select("order_id", "amount").collect()
            assert [tuple(row) for row in found] == expected_orders(0, 60)
        table = ha.spark.topic(spark, "full", archive=str(target), path=str(store)).orderBy("physicalOffset")
        full = [row.asDict(recursive=True) for row in table.select(*ALL_VALUES).collect()]
        for row in full:
            row["at"] = row["at"] and row["at"].replace(tzinfo=UTC)
        assert full == [ALL_VALUES if n % 3 else dict.fromkeys(ALL_VALUES) for n in (*range(30), *range(30))]
    if form == "delta":
        late = delta_rows(spark, target).where("topic = 'orders' AND order_id >= 30").select("order_id").collect()
        assert sorted(row.order_id for row in late) == [n for n in range(30, 40) if n % 7]
