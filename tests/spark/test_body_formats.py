"""Columns that an archive decodes from Avro and Protobuf bodies. Java's Avro and protoc wrote the bodies."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.table import StaticTable
from pyspark.sql import SparkSession

import ha.spark
from ha.errors import OptionError
from ha.protocol.record import Message
from ha.spark.jobs.archive import ArchiveOptions, ArchiveResult, archive
from ha.spark.jobs.archive.body_columns import BodyDecoder
from ha.spark.jobs.archive.body_formats import body_format
from ha.spark.jobs.archive.manifest import BodyColumns
from ha.spark.jobs.archive.read import archive_schema_of, archive_states
from tests.spark.inline import inline_spark
from tests.spark.stores import live_store, make_store, message
from tests.spark.test_archive_spark import skip_without_delta

SPARK = inline_spark()
Format = Literal["avro", "protobuf"]
Given = str | tuple[bytes, str]


def record(*fields: tuple[str, Any], name: str = "test") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": field, "type": kind} for field, kind in fields]}


def logical(kind: str, name: str, /, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


AMOUNT = logical("bytes", "decimal", precision=20, scale=4)
MILLIS = logical("long", "timestamp-millis")
AVRO_ORDER = {
    "namespace": "shop",
    **record(
        ("paid", "boolean"),
        ("count", "int"),
        ("order_id", "long"),
        ("share", "float"),
        ("price", "double"),
        ("photo", "bytes"),
        ("customer", ["null", "string"]),
        ("note", ["string", "null"]),
        ("amount", AMOUNT),
        ("tax", logical("fixed", "decimal", name="Tax", size=4, precision=9, scale=2)),
        ("day", logical("int", "date")),
        ("at", logical("long", "timestamp-micros")),
        ("sent_at", ["null", MILLIS]),
        ("local", logical("long", "local-timestamp-millis")),
        ("clock", logical("int", "time-millis")),
        ("uid", logical("string", "uuid")),
        ("uid_bytes", logical("fixed", "uuid", name="Uid", size=16)),
        ("state", {"type": "enum", "name": "State", "symbols": ["NEW", "DONE"]}),
        ("last_state", ["null", "State"]),
        ("hash", {"type": "fixed", "name": "Hash", "size": 2}),
        ("codes", {"type": "array", "items": ["null", "long"]}),
        ("fees", {"type": "map", "values": AMOUNT}),
        ("items", {"type": "array", "items": record(("sku", "string"), ("at", MILLIS), name="Item")}),
        ("first", ["null", "shop.Item"]),
        name="Order",
    ),
}
AVRO_JSON: dict[str, Any] = {
    "paid": True,
    "count": -3,
    "order_id": 1 << 40,
    "share": 0.5,
    "price": 0.1,
    "photo": "\u0000\u00ff",
    "customer": {"string": "é"},
    "note": None,
    "amount": "\u0030\u00d4",
    "tax": "\u00ff\u00ff\u00ff\u006a",
    "day": 20512,
    "at": 1772240523000004,
    "sent_at": {"long": 1772240523005},
    "local": 1772240523005,
    "clock": 3723005,
    "uid": "f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
    "uid_bytes": "".join(map(chr, bytes.fromhex("f81d4fae7dec11d0a76500a0c91e6bf6"))),
    "state": "DONE",
    "last_state": {"shop.State": "NEW"},
    "hash": "\u0001\u0002",
    "codes": [{"long": 1}, None],
    "fees": {"post": "\u00ff"},
    "items": [{"sku": "x", "at": 1}],
    "first": {"shop.Item": {"sku": "y", "at": -1}},
}
"""In Avro's JSON encoding"""
AVRO_VALUES: dict[str, Any] = {
    "paid": True,
    "count": -3,
    "order_id": 1 << 40,
    "share": 0.5,
    "price": 0.1,
    "photo": b"\x00\xff",
    "customer": "é",
    "note": None,
    "amount": Decimal("1.2500"),
    "tax": Decimal("-1.50"),
    "day": date(2026, 2, 28),
    "at": datetime(2026, 2, 28, 1, 2, 3, 4, UTC),
    "sent_at": datetime(2026, 2, 28, 1, 2, 3, 5000, UTC),
    "local": 1772240523005,
    "clock": 3723005,
    "uid": "f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
    "uid_bytes": "f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
    "state": "DONE",
    "last_state": "NEW",
    "hash": b"\x01\x02",
    "codes": [1, None],
    "fees": {"post": Decimal("-0.0001")},
    "items": [{"sku": "x", "at": datetime(1970, 1, 1, 0, 0, 0, 1000, UTC)}],
    "first": {"sku": "y", "at": datetime(1969, 12, 31, 23, 59, 59, 999000, UTC)},
}
AVRO_BODY = bytes.fromhex(
    "01058080808080400000003f9a9999999999b93f0400ff0204c3a9020430d4ffffff6ac0c00288e3a3edfcf5a50602fabba29c9467fabba2"
    "9c9467fabbc6034866383164346661652d376465632d313164302d613736352d303061306339316536626636f81d4fae7dec11d0a76500a0"
    "c91e6bf6020200010204020200000208706f737402ff00020278020002027901"
)
"""Of AVRO_JSON, by Avro 1.12.1 for Java: see test_java_writes_this_body"""

PROTO = """
syntax = "proto3";
package shop;
import "google/protobuf/duration.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";

message Item { string sku = 1; optional int32 count = 2; }
enum State { NEW = 0; DONE = 1; }
message Order {
  bool paid = 1;
  int32 count = 2;
  sint64 order_id = 3;
  float share = 4;
  double price = 5;
  bytes photo = 6;
  string customer = 7;
  optional string note = 8;
  uint32 small = 9;
  fixed64 large = 10;
  google.protobuf.Timestamp at = 11;
  google.protobuf.Duration took = 12;
  google.protobuf.Int64Value limit = 13;
  State state = 14;
  repeated State states = 15;
  repeated int64 codes = 16;
  map<int32, string> names = 17;
  map<string, Item> by_sku = 18;
  repeated Item items = 19;
  Item first = 20;
  oneof method { string card = 21; int64 cash = 22; }
  message Place { string city = 1; }
  Place place = 23;
}
message Node { string name = 1; repeated Node children = 2; }
message Empty {}
message Test { int32 a = 1; string b = 2; Inner c = 3; string d = 4; repeated int32 e = 5; repeated int32 f = 6; }
message Inner { int32 a = 1; }
message Newer { bool paid = 1; string added = 99; }
service Shop { rpc Send(Order) returns (Item); }
"""
PROTO_TEXT = """
paid: true  count: -3  order_id: -1099511627776  share: 0.5  price: 0.1  photo: "\\000\\377"  customer: "é"
small: 4294967295  large: 18446744073709551615
at { seconds: 1772240523 nanos: 4999 }  took { seconds: -1 nanos: -500000000 }  limit { value: 7 }
state: DONE  states: [NEW, 5]  codes: [1, 300]  names { key: 1 value: "a" }
by_sku { key: "x" value { sku: "x" count: 0 } }  items { sku: "y" }  first { }  cash: 0
"""
PROTO_VALUES: dict[str, Any] = {
    "paid": True,
    "count": -3,
    "order_id": -(1 << 40),
    "share": 0.5,
    "price": 0.1,
    "photo": b"\x00\xff",
    "customer": "é",
    "note": None,
    "small": 4294967295,
    "large": Decimal(18446744073709551615),
    "at": datetime(2026, 2, 28, 1, 2, 3, 4, UTC),
    "took": -1_500_000,
    "limit": 7,
    "state": "DONE",
    "states": ["NEW", "5"],
    "codes": [1, 300],
    "names": {1: "a"},
    "by_sku": {"x": {"sku": "x", "count": 0}},
    "items": [{"sku": "y", "count": None}],
    "first": {"sku": "", "count": None},
    "card": None,
    "cash": 0,
    "place": None,
}
MAPS = ("fees", "names", "by_sku")


def protoc(folder: Path, *arguments: str, given: str = "") -> bytes:
    """Run protoc on shop.proto."""
    (folder / "shop.proto").write_text(PROTO)
    words = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", *arguments, "shop.proto"]
    return subprocess.run(words, input=given.encode(), capture_output=True, check=True, timeout=60, cwd=folder).stdout


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The descriptor set, as a user makes it."""
    folder = tmp_path_factory.mktemp("proto")
    protoc(folder, "--include_imports", "--descriptor_set_out=shop.desc")
    return (folder / "shop.desc").read_bytes()


@pytest.fixture(scope="module")
def proto_body(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return protoc(tmp_path_factory.mktemp("proto"), "--encode=shop.Order", given=PROTO_TEXT)


def decoded(form: Format, schema: Given, bodies: list[bytes | None]) -> list[Any]:
    decoder = BodyDecoder(BodyColumns(form, {"t": body_format(form).stored_schema(schema)}))
    found = decoder.decode("t", pa.array(bodies, pa.binary()), pa.array([0] * len(bodies), pa.int32()), 1 << 20)
    return list(found.to_pylist(maps_as_pydicts="strict"))


def decoded_avro(schema: dict[str, Any], *bodies: bytes) -> list[Any]:
    return decoded("avro", json.dumps(schema), list(bodies))


@pytest.mark.parametrize(
    ("kind", "body", "value"),
    [
        ("long", "00", 0),
        ("long", "01", -1),
        ("long", "02", 1),
        ("long", "03", -2),
        ("long", "7f", -64),
        ("long", "8001", 64),
        ("string", "06666f6f", "foo"),
        ({"type": "array", "items": "long"}, "04063600", [3, 27]),
        ({"type": "array", "items": "long"}, "0304063600", [3, 27]),
        (["null", "string"], "00", None),
        (["null", "string"], "020261", "a"),
        ({"type": "enum", "name": "Foo", "symbols": ["A", "B", "C", "D"]}, "06", "D"),
        (record(("a", "long"), ("b", "string")), "3606666f6f", {"a": 27, "b": "foo"}),
    ],
)
def test_examples_of_the_avro_specification(kind: Any, body: str, value: Any) -> None:
    assert decoded_avro(record(("f", kind), name="outer"), bytes.fromhex(body)) == [{"f": value}]


def test_an_avro_enum_may_be_used_again_by_its_name() -> None:
    state = {"type": "enum", "name": "State", "symbols": ["NEW", "DONE"], "default": "NEW"}
    schema = record(("first", state), ("all", {"type": "array", "items": ["null", "State"]}), name="outer")
    bodies = bytes.fromhex("02 06 0202 00 0200 00"), bytes.fromhex("02 02 0201 00")
    assert decoded_avro(schema, *bodies) == [{"first": "DONE", "all": ["DONE", None, "NEW"]}, None]


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("089601", {"a": 150}),
        ("120774657374696e67", {"b": "testing"}),
        ("1a03089601", {"c": {"a": 150}}),
        ("220568656c6c6f280128022803", {"d": "hello", "e": [1, 2, 3]}),
        ("3206038e029ea705", {"f": [3, 270, 86942]}),
        ("", {}),
    ],
)
def test_examples_of_the_protobuf_encoding_guide(shop: bytes, body: str, values: dict[str, Any]) -> None:
    unset = {"a": 0, "b": "", "c": None, "d": "", "e": [], "f": []}
    assert decoded("protobuf", (shop, "shop.Test"), [bytes.fromhex(body), None]) == [unset | values, None]


def test_values_have_the_types_of_an_avro_schema() -> None:
    assert decoded_avro(AVRO_ORDER, AVRO_BODY) == [AVRO_VALUES]


def test_values_have_the_types_of_a_message(shop: bytes, proto_body: bytes) -> None:
    assert decoded("protobuf", (shop, "shop.Order"), [proto_body]) == [PROTO_VALUES]


def test_a_field_that_the_descriptor_lacks_is_skipped(shop: bytes, tmp_path: Path) -> None:
    body = protoc(tmp_path, "--encode=shop.Newer", given='paid: true added: "x"')
    [found] = decoded("protobuf", (shop, "shop.Order"), [body])
    assert (found["paid"], found["count"], found["cash"]) == (True, 0, None)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("long", ""),
        ("long", "80"),
        ("long", "0000"),
        ("int", "8080808010"),
        ("string", "0866"),
        ("string", "01"),
        ("string", "02ff"),
        ("double", "000000"),
        (["null", "long"], "04"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "02"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "01"),
        (["null", {"type": "enum", "name": "E", "symbols": ["A", "B"]}], "0203"),
        ({"type": "array", "items": "long"}, "feffffffffffffffff01"),
        (logical("bytes", "decimal", precision=2, scale=1), "0264"),
        (logical("long", "timestamp-millis"), "feffffffffffffffff01"),
        ("long", "c3018f5c393f1ad57572020000"),
    ],
)
def test_an_avro_body_that_does_not_fit_leaves_only_its_own_row_null(kind: Any, body: str) -> None:
    sound = b"\x02" * 2 if kind == "long" else None
    schema = record(("f", kind), name="outer")
    bodies = [bytes.fromhex(body)] if sound is None else [sound[:1], bytes.fromhex(body), sound[:1]]
    assert decoded_avro(schema, *bodies) == [None] if sound is None else [{"f": 1}, None, {"f": 1}]


@pytest.mark.parametrize("header", ["0000000001", "000000002a", "0000000000000007"], ids=["Confluent", "42", "8 bytes"])
def test_an_avro_body_with_the_header_of_a_registry_does_not_fit_but_by_chance(header: str) -> None:
    """docs/spark.md: the id looks like the first field."""
    assert decoded_avro(AVRO_ORDER, bytes.fromhex(header) + AVRO_BODY) == [None]
    schema = record(*((name, "long") for name in "abcd"), ("e", "bytes"))
    body = bytes.fromhex("0000000006" + "020406")  # id 6, and a record of three bytes
    assert decoded_avro(schema, body) == [{"a": 0, "b": 0, "c": 0, "d": 0, "e": b"\x02\x04\x06"}]


def test_each_part_of_an_avro_body_is_needed() -> None:
    bodies = [AVRO_BODY[:size] for size in range(len(AVRO_BODY))]
    assert decoded_avro(AVRO_ORDER, *bodies, AVRO_BODY) == [None] * len(bodies) + [AVRO_VALUES]


@pytest.mark.parametrize(
    "body",
    [
        "08",
        "0a",
        "3a02ffff",
        "6e6f206a736f6e",
        "5a0a08ffffffffffffffff7f",
        "5a06108094ebdc03",
        "620d080110ffffffffffffffffff01",
    ],
)
def test_a_protobuf_body_that_does_not_fit_leaves_only_its_own_row_null(shop: bytes, body: str) -> None:
    found = decoded("protobuf", (shop, "shop.Order"), [b"\x08\x01", bytes.fromhex(body), b"\x08\x01"])
    assert [row and row["paid"] for row in found] == [True, None, True]


@given(st.lists(st.binary()))
def test_any_bytes_are_a_row(shop: bytes, bodies: list[bytes]) -> None:
    assert len(decoded("protobuf", (shop, "shop.Order"), [*bodies])) == len(bodies)
    found = decoded_avro(AVRO_ORDER, *bodies, *(AVRO_BODY[:40] + body for body in bodies), AVRO_BODY)
    assert len(found) == 2 * len(bodies) + 1
    assert found[-1] == AVRO_VALUES


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ("{", "schema of t can't be used"),
        ('"long"', "it is not of a record"),
        ('{"type": "record", "name": "a", "fields": [{"name": "b", "type": "x"}]}', "UnknownType: x"),
        ('{"type": "record", "name": "a"}', "schema of t can't be used"),
        (record(("a", ["int", "string"])), "the type of the union"),
        (record(("a", "null")), "the type null"),
        (record(("a", ["null", "test"])), "test contains itself"),
        (record(("a", record(name="none"))), "none has no fields"),
        (record(("a", {"type": "fixed", "name": "b", "size": 0})), "b has no bytes"),
        (record(("a", logical("bytes", "decimal", precision=39))), "39 digits; a column has 38 at most"),
        (record(("a", "int"), ("A", "int")), "a name is there twice"),
        (record(("Topic", "int")), "would clash with the column topic"),
        ((b"", "m"), "it is no text"),
    ],
)
def test_avro_schemas_that_give_no_columns_are_refused(schema: Any, error: str, tmp_path: Path) -> None:
    text = json.dumps(schema) if isinstance(schema, dict) else schema
    refused("avro", text, error, tmp_path)


def refused(form: Format, schema: Given, error: str, folder: Path) -> None:
    store = make_store(folder / "broker-a", [message(0, topic="t", body=b"")])
    with pytest.raises(OptionError, match=error):
        run(store, folder / "archive", form, {"t": schema})
    assert not list(folder.glob("archive/topic=*"))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("shop.Node", "shop.Node contains itself"),
        ("shop.Empty", "shop.Empty has no fields"),
        ("shop.None", "no message shop.None"),
        ("", "no message"),
    ],
)
def test_messages_that_give_no_columns_are_refused(shop: bytes, name: str, error: str, tmp_path: Path) -> None:
    refused("protobuf", (shop, name), error, tmp_path)


def test_files_that_are_no_complete_descriptor_set_are_refused(tmp_path: Path) -> None:
    protoc(tmp_path, "--descriptor_set_out=shop.desc")
    refused("protobuf", ((tmp_path / "shop.desc").read_bytes(), "shop.Order"), "not complete", tmp_path)
    refused("protobuf", (PROTO.encode(), "shop.Order"), "no descriptor set", tmp_path)
    refused("protobuf", PROTO, "names no message", tmp_path)


def run(store: Path, target: Path, form: Format, schemas: dict[str, Given], **changes: Any) -> ArchiveResult:
    options = ArchiveOptions(path=str(store), archive=str(target), columns_from=form, schemas=schemas, **changes)
    return archive(SPARK, options)


def orders(body: bytes, count: int = 8) -> list[Message]:
    """Every fourth body is cut."""
    return [message(n, topic="orders", body=body if n % 4 else body[:-1]) for n in range(count)]


@pytest.fixture(params=["avro", "protobuf"])
def case(request: pytest.FixtureRequest, shop: bytes, proto_body: bytes) -> tuple[Format, Given, bytes, dict[str, Any]]:
    """A format, a schema, a body, and its values."""
    if request.param == "avro":
        return "avro", json.dumps(AVRO_ORDER), AVRO_BODY, AVRO_VALUES
    return "protobuf", (shop, "shop.Order"), proto_body, PROTO_VALUES


@pytest.mark.parametrize("table", ["parquet", "iceberg"])
def test_columns_are_in_files_and_tables(
    tmp_path: Path, table: Literal["parquet", "iceberg"], case: tuple[Format, Given, bytes, dict[str, Any]]
) -> None:
    form, schema, body, expected = case
    store, target = make_store(tmp_path / "broker-a", orders(body)), tmp_path / "archive"
    assert run(store, target, form, {"orders": schema}, format=table).undecoded == {"orders": 2}
    if table == "parquet":
        [file] = target.glob("topic=orders/*/*.parquet")
        found = pq.ParquetFile(file).read()
    else:
        found = StaticTable.from_metadata(str(target)).scan().to_arrow().sort_by("physicalOffset")
    shown = [row for row in found.select(list(expected)).to_pylist(maps_as_pydicts="strict") if row["paid"]]
    assert shown == [expected] * 6
    assert found["paid"].null_count == 2
    assert found["body"].to_pylist() == [each.body for each in orders(body)]


def test_archived_and_later_messages_have_the_same_columns(
    spark: SparkSession, tmp_path: Path, case: tuple[Format, Given, bytes, dict[str, Any]]
) -> None:
    skip_without_delta(spark)
    form, schema, body, expected = case
    store, target = tmp_path / "broker-a", tmp_path / "archive"
    given: dict[str, Any] = {"path": str(store), "archive": str(target), "format": "delta"}
    options = ArchiveOptions(**given, columns_from=form, schemas={"orders": schema})
    with live_store(store) as live:
        live.put(orders(body))
        assert archive(spark, options).undecoded == {"orders": 2}
        live.put(orders(body))
        table = ha.spark.topic(spark, "orders", archive=str(target), path=str(store)).orderBy("physicalOffset")
        found = [row.asDict(recursive=True) for row in table.select(*expected).collect()]
    for row in found:
        for name, value in row.items():
            row[name] = in_utc(value)
    assert found == [expected if n % 4 else dict.fromkeys(expected) for n in (*range(8), *range(8))]


def in_utc(value: Any) -> Any:
    """A value of Spark with time zones, and bytes instead of bytearrays."""
    if isinstance(value, dict):
        return {key: in_utc(each) for key, each in value.items()}
    if isinstance(value, list):
        return [in_utc(each) for each in value]
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC)
    return bytes(value) if isinstance(value, bytearray) else value


def test_java_writes_this_body(spark: SparkSession) -> None:
    java: Any = spark._jvm
    avro = java.org.apache.avro
    schema = avro.Schema.Parser().parse(json.dumps(AVRO_ORDER))
    text = avro.io.DecoderFactory.get().jsonDecoder(schema, json.dumps(AVRO_JSON))
    datum = avro.generic.GenericDatumReader(schema).read(None, text)
    written = java.java.io.ByteArrayOutputStream()
    encoder = avro.io.EncoderFactory.get().directBinaryEncoder(written, None)
    avro.generic.GenericDatumWriter(schema).write(datum, encoder)
    assert bytes(written.toByteArray()) == AVRO_BODY
    single = avro.message.BinaryMessageEncoder(avro.generic.GenericData.get(), schema).encode(datum)
    body = bytes(single.array())
    assert body[10:] == AVRO_BODY
    other = body[:9] + bytes([body[9] ^ 1]) + body[10:]
    assert decoded_avro(AVRO_ORDER, body, other) == [AVRO_VALUES, None]


def test_a_changed_schema_is_refused_and_changed_documentation_is_not(tmp_path: Path) -> None:
    schema = record(("a", "long"))
    store, target = make_store(tmp_path / "broker-a", orders(b"\x02\x02")), tmp_path / "archive"
    run(store, target, "avro", {"orders": json.dumps(schema)})
    run(store, target, "avro", {"orders": json.dumps(schema | {"doc": "An order."})})
    with pytest.raises(OptionError, match="other schemas of orders; "):
        run(store, target, "avro", {"orders": json.dumps(record(("a", "long"), ("b", "long")))})


def test_brokers_of_an_archive_have_the_same_avro_schema(tmp_path: Path) -> None:
    target = tmp_path / "archive"
    first, second = (make_store(tmp_path / name, orders(b"\x02\x02")) for name in ("a", "b"))
    run(first, target, "avro", {"orders": json.dumps(record(("a", "long")))})
    with pytest.raises(OptionError, match="brokers of the archive have different schemas of orders"):
        run(second, target, "avro", {"orders": json.dumps(record(("a", "long"), ("b", "long")))})
    run(second, target, "avro", {"orders": json.dumps(record(("a", "long")))})


def test_without_fastavro_the_extra_is_named_and_archives_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, target = make_store(tmp_path / "broker-a", orders(b"\x02\x02")), tmp_path / "archive"
    schemas: dict[str, Given] = {"orders": json.dumps(record(("a", "long")))}
    run(store, target, "avro", schemas)
    for name in ("fastavro", "fastavro.schema"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match=r"fastavro is missing.*pip install 'halog\[avro\]'"):
        run(store, target, "avro", schemas)
    assert archive_schema_of(archive_states(target)).field("a").type == pa.int64()
