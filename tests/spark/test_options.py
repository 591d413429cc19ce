"""The source's options: their meaning, and which are refused and why. Starts no Spark."""

import pickle
import subprocess
import sys
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from ha.arrow.read_options import DEFAULT_COLUMNS
from ha.arrow.schema import COLUMNS, arrow_schema
from ha.errors import OptionError
from ha.spark.source.options import Kind, SourceOptions, parse_any, parse_options
from ha.spark.source.positions import EARLIEST, LATEST, AtEdge, AtOffsets, AtTime, AtTimes
from ha.spark.source.schema import batch_schema, columns_of, spark_schema


def parse(kind: Kind = "batch", /, **given: Any) -> SourceOptions:
    given = {"path": "data/slave", **{name.replace("__", "."): value for name, value in given.items()}}
    return parse_options(CaseInsensitiveDict({k: v for k, v in given.items() if v is not None}), kind)


def test_names_are_case_insensitive_as_spark_hands_them_over() -> None:
    assert parse(MAXRecordsPerPARTITION="7").max_records_per_partition == 7
    assert parse("stream", maxoffsetspertrigger="7").max_offsets_per_trigger == 7


def test_the_defaults() -> None:
    batch, stream = parse(), parse("stream")
    assert (batch.starting, batch.ending) == (AtEdge(EARLIEST), AtEdge(LATEST))
    assert stream.starting == AtEdge(LATEST)
    assert batch.fail_on_data_loss
    assert stream.fail_on_data_loss
    assert stream.max_trigger_delay_ms == 15 * 60 * 1000
    assert (stream.offset_retries, stream.offset_retry_interval_ms) == (3, 1000)
    assert batch.columns == DEFAULT_COLUMNS
    assert batch.reads_everything
    assert batch.paths == ("data/slave",)
    assert not parse(topic="flights").reads_everything
    assert not parse(startingTimestamp="5").reads_everything
    assert pickle.loads(pickle.dumps(batch)) == batch


def test_starting_timestamp_beats_offsets_by_timestamp_beats_offsets() -> None:
    by_time = '{"flights":{"0":5}}'
    every = {"startingTimestamp": "9", "startingOffsetsByTimestamp": by_time, "startingOffsets": '{"flights":{"0":1}}'}
    assert parse(**every).starting == AtTime(9)
    assert parse(**every).starting_option == "startingTimestamp"
    del every["startingTimestamp"]
    assert parse(**every).starting == AtTimes({"flights": {"0": 5}})
    del every["startingOffsetsByTimestamp"]
    assert parse(**every).starting == AtOffsets({"flights": {"0": 1}})
    assert parse("stream", startingOffsets="EARLIEST").starting == AtEdge(EARLIEST)
    every = {"endingTimestamp": "9", "endingOffsetsByTimestamp": by_time, "endingOffsets": "latest"}
    assert parse(**every).ending == AtTime(9)
    del every["endingTimestamp"]
    assert parse(**every).ending == AtTimes({"flights": {"0": 5}})


def test_offsets_may_be_edges_and_may_name_brokers() -> None:
    starting = parse("stream", startingOffsets='{"flights":{"broker-a:0":23,"1":-1,"2":-2}}').starting
    assert starting == AtOffsets({"flights": {"broker-a:0": 23, "1": LATEST, "2": EARLIEST}})


def test_offsets_copied_from_a_checkpoint_are_understood() -> None:
    copied = '{"flights":{"0":23},"$start":{"flights":{"0":20}},"$initial":"latest"}'
    assert parse("stream", startingOffsets=copied).starting == AtOffsets({"flights": {"0": 23}})


def test_topics() -> None:
    assert parse(subscribe=" a, b ,a,").subscribe == ("a", "b")
    assert parse(topic="a").subscribe == ("a",)
    assert parse(subscribePattern="fl.*").subscribe_pattern == "fl.*"
    assert parse(assign='{"a":[0,"1","broker-a:2","b:c:3"]}').assign == {"a": ("0", "1", "broker-a:2", "b:c:3")}


@pytest.mark.parametrize(
    ("option", "text", "changed"),
    [
        ("brokerName", "m, m", {"broker_names": ("m", "m")}),
        ("tags", "UA || D,L||UA", {"tags": frozenset({"UA", "D,L"})}),
        ("tags", "*", {}),
        ("keys", "k1  k,2", {"keys": frozenset({"k1", "k,2"})}),
        ("startingOffsetsByTimestampStrategy", "Latest", {"no_match": "latest"}),
        ("minPartitions", "3", {"min_partitions": 3}),
        ("maxRecordsPerPartition", "1", {"max_records_per_partition": 1}),
        ("maxBytesPerPartition", "1k", {"max_bytes_per_partition": 1024}),
        ("maxOffsetsPerTrigger", "5", {"max_offsets_per_trigger": 5}),
        ("minOffsetsPerTrigger", "5", {"min_offsets_per_trigger": 5}),
        ("maxBytesPerTrigger", "1k", {"max_bytes_per_trigger": 1024}),
        ("failOnDataLoss", "FALSE", {"fail_on_data_loss": False}),
        ("isolation", "read_committed", {"isolation": "read_committed"}),
        ("fetchOffset.numRetries", "0", {"offset_retries": 0}),
        ("fetchOffset.retryIntervalMs", "0", {"offset_retry_interval_ms": 0}),
        ("damagedRecords", "skip", {"damaged_records": "skip"}),
        ("verifyCrc", "true", {"verify_crc": True}),
        ("decompress", "false", {"decompress": False}),
        ("maxMessageSize", "1", {"message_size_max": 1}),
        ("maxRecordsPerBatch", "7", {"batch_rows": 7}),
        ("startingTimestamp", "0", {"starting": AtTime(0), "starting_option": "startingTimestamp"}),
    ],
)
def test_an_option_changes_its_field_alone(option: str, text: str, changed: dict[str, Any]) -> None:
    before, after = msgspec.structs.asdict(parse("stream")), msgspec.structs.asdict(parse("stream", **{option: text}))
    assert {field: value for field, value in after.items() if value != before[field]} == changed


def test_the_smallest_batch_may_be_the_largest() -> None:
    assert parse("stream", minOffsetsPerTrigger="9", maxOffsetsPerTrigger="9").min_offsets_per_trigger == 9


def test_paths() -> None:
    assert parse(path="a, b/*").paths == ("a", "b/*")
    assert parse(path=None, paths='["a","b,c"]').paths == ("a", "b,c")
    assert parse(path="file:///x/y").paths == ("/x/y",)
    assert parse(path="file:/x/y").paths == ("/x/y",)
    assert parse(path=None, servers="h:9876,i:9876").servers == ("h:9876", "i:9876")
    assert parse(path="a,b", brokerName="m,m").broker_names == ("m", "m")


def test_columns() -> None:
    assert parse(columns="queueId, BODY").columns == ("queueId", "body")
    assert parse(columns="*").columns == tuple(COLUMNS)
    assert parse(includeProperties="true").columns == (*DEFAULT_COLUMNS, "properties")
    assert parse(includeHeaders="TRUE", columns="body").columns == ("body", "properties")
    assert parse(includeHeaders="true", columns="properties,body").columns == ("properties", "body")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 500),
        ("30s", 30_000),
        ("15m", 900_000),
        ("2min", 120_000),
        ("1h", 3_600_000),
        ("1d", 86_400_000),
        ("7", 7),
    ],
)
def test_times(text: str, expected: int) -> None:
    assert parse("stream", minOffsetsPerTrigger="1", maxTriggerDelay=text).max_trigger_delay_ms == expected


@pytest.mark.parametrize(("text", "expected"), [("1024", 1024), ("64k", 65536), ("2M", 2 << 20), ("1gb", 1 << 30)])
def test_sizes(text: str, expected: int) -> None:
    assert parse("stream", maxBytesPerTrigger=text).max_bytes_per_trigger == expected


REFUSED: list[tuple[Kind, dict[str, Any], str, str]] = [
    ("batch", {"path": None}, "path", "missing"),
    ("batch", {"path": " "}, "path", "empty"),
    ("batch", {"path": ","}, "path", "names nothing"),
    ("batch", {"path": "hdfs://x/y"}, "path", "hdfs"),
    ("batch", {"paths": "x"}, "paths", "no list"),
    ("batch", {"paths": "[x"}, "paths", "no list"),
    ("batch", {"servers": "h:1"}, "servers", "path is given too"),
    ("batch", {"path": None, "servers": "h"}, "servers", "is not host:port"),
    ("batch", {"path": None, "servers": "h:1", "maxBytesPerPartition": "1m"}, "maxBytesPerPartition", "not known"),
    ("stream", {"path": None, "servers": "h:1", "maxBytesPerTrigger": "1m"}, "maxBytesPerTrigger", "not known"),
    (
        "stream",
        {"path": None, "servers": "h:1", "archive": "a", "maxBytesPerTrigger": "1m"},
        "maxBytesPerTrigger",
        "not known",
    ),
    ("batch", {"pullTimeout": "1s"}, "pullTimeout", "network"),
    ("batch", {"subscribed": "a"}, "subscribed", "did you mean subscribe?"),
    ("batch", {"kafka.bootstrap.servers": "h:1"}, "kafka.bootstrap.servers", "servers"),
    ("batch", {"groupIdPrefix": "x"}, "groupidprefix", "joins no consumer group"),
    ("batch", {"subscribe": "a", "topic": "b"}, "topic", "subscribe is given too"),
    ("batch", {"subscribe": "a", "assign": '{"a":[0]}'}, "assign", "only one|is given too"),
    ("batch", {"subscribe": " , "}, "subscribe", "names nothing"),
    ("batch", {"subscribePattern": "a("}, "subscribePattern", "regular expression"),
    ("batch", {"assign": "a"}, "assign", "no JSON"),
    ("batch", {"assign": "{}"}, "assign", "names no queue"),
    ("batch", {"assign": '{"a":[]}'}, "assign", "no list of queues"),
    ("batch", {"assign": '{"a":[-1]}'}, "assign", "no list of queues"),
    ("batch", {"assign": '{"a":[true]}'}, "assign", "no list of queues"),
    ("batch", {"startingOffsets": "latest"}, "startingOffsets", "reads nothing"),
    ("batch", {"startingOffsets": '{"a":{"0":-1}}'}, "startingOffsets", "a queue 0 can't be latest"),
    ("batch", {"endingOffsets": "earliest"}, "endingOffsets", "reads nothing"),
    ("batch", {"endingOffsets": '{"a":{"0":-2}}'}, "endingOffsets", "a queue 0 can't be earliest"),
    ("batch", {"startingOffsets": "sometime"}, "startingOffsets", "no JSON"),
    ("batch", {"startingOffsets": "[]"}, "startingOffsets", "no object"),
    ("batch", {"startingOffsets": '{"a":3}'}, "startingOffsets", "does not map"),
    ("batch", {"startingOffsets": '{"a":{"x":3}}'}, "startingOffsets", "a: 'x' is no queue"),
    ("batch", {"startingOffsets": '{"a":{"0-4":[3,1]}}'}, "startingOffsets", "'0-4' is 5 queues, but has 2 numbers"),
    ("batch", {"startingOffsets": '{"a":{"4-0":3}}'}, "startingOffsets", "'4-0' is not 1 to 65536 queues"),
    ("batch", {"startingOffsets": '{"a":{"0-99999":3}}'}, "startingOffsets", "is not 1 to 65536 queues"),
    ("batch", {"startingOffsets": '{"a":{"0-1":[1,-9]}}'}, "startingOffsets", "-8 of queue 1 is out of range"),
    ("batch", {"startingOffsets": '{"a":{"0-1":[1,true]}}'}, "startingOffsets", "of queue 0-1 is out of range"),
    ("batch", {"startingOffsets": '{"a":{"0":-3}}'}, "startingOffsets", "out of range"),
    ("batch", {"startingOffsets": '{"a":{"0":true}}'}, "startingOffsets", "out of range"),
    ("batch", {"startingOffsetsByTimestamp": '{"a":{"0":-1}}'}, "startingOffsetsByTimestamp", "out of range"),
    ("batch", {"startingTimestamp": "yesterday"}, "startingTimestamp", "no"),
    ("batch", {"startingTimestamp": "9", "endingTimestamp": "8"}, "startingTimestamp", "later than endingTimestamp"),
    (
        "batch",
        {"startingOffsets": '{"a":{"0":5}}', "endingOffsets": '{"a":{"0":4}}'},
        "startingOffsets",
        "a queue 0 would start at 5, after its end",
    ),
    (
        "batch",
        {"startingOffsets": '{"a":{"0":5}}', "endingOffsets": '{"a":{"1":6}}'},
        "endingOffsets",
        "not in both",
    ),
    ("batch", {"startingOffsetsByTimestampStrategy": "x"}, "startingOffsetsByTimestampStrategy", "none of its values"),
    ("batch", {"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger", "no triggers in a batch"),
    ("batch", {"maxTriggerDelay": "5s"}, "maxTriggerDelay", "no triggers in a batch"),
    ("stream", {"endingOffsets": "latest"}, "endingOffsets", "no end"),
    ("stream", {"endingTimestamp": "5"}, "endingTimestamp", "no end"),
    ("stream", {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "minOffsetsPerTrigger", "above"),
    ("stream", {"maxTriggerDelay": "5s"}, "maxTriggerDelay", "nothing is delayed"),
    ("stream", {"minOffsetsPerTrigger": "1", "maxTriggerDelay": "soon"}, "maxTriggerDelay", "can't be read"),
    ("stream", {"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger", "no"),
    ("stream", {"maxOffsetsPerTrigger": "1e3"}, "maxOffsetsPerTrigger", "no"),
    ("stream", {"maxBytesPerTrigger": "0"}, "maxBytesPerTrigger", "can't be read"),
    ("batch", {"minPartitions": "0"}, "minPartitions", "no"),
    ("batch", {"failOnDataLoss": "yes"}, "failOnDataLoss", "none of its values"),
    ("batch", {"damagedRecords": "ignore"}, "damagedRecords", "none of its values"),
    ("batch", {"tags": " || "}, "tags", "names no tag"),
    ("batch", {"commitTopic": "c"}, "commitTopic", "commits are not read"),
    ("stream", {"commitTopic": "a b", "isolation": "read_committed"}, "commitTopic", "can't be one"),
    ("stream", {"tags": " "}, "tags", "it is empty"),
    ("batch", {"keys": " "}, "keys", "it is empty"),
    ("batch", {"columns": "body,value"}, "columns", "'value'"),
    ("batch", {"columns": "body,body"}, "columns", "twice"),
    ("batch", {"includeHeaders": "true", "includeProperties": "true"}, "includeHeaders", "another name"),
]


@pytest.mark.parametrize(("kind", "given", "option", "reason"), REFUSED, ids=[str(case[1]) for case in REFUSED])
def test_unsupported_options_are_refused_with_a_reason(
    kind: Kind, given: dict[str, Any], option: str, reason: str
) -> None:
    with pytest.raises(OptionError, match=reason.replace("?", r"\?").replace("(", r"\(")) as caught:
        parse(kind, **given)
    assert caught.value.option.lower() == option.lower()
    assert caught.value.accepted
    assert option.lower() in str(caught.value).lower()


def test_an_archive_s_tasks_have_a_maximum_size_with_servers_too() -> None:
    given = parse("stream", path=None, servers="h:1", archive="archive", maxBytesPerPartition="1m")
    assert given.max_bytes_per_partition == 1 << 20


def test_parse_any_refuses_only_options_invalid_for_both_kinds() -> None:
    parse_any({"path": "a", "startingOffsets": "latest"})
    parse_any({"path": "a", "endingoffsets": "latest"})
    parse_any({"path": "a", "maxoffsetspertrigger": "5"})
    with pytest.raises(OptionError, match="endingOffsets"):
        parse_any({"path": "a", "endingoffsets": "latest", "maxoffsetspertrigger": "5"})


def test_spark_s_arrow_schema_is_the_core_s_and_says_what_holds_no_nulls() -> None:
    found = batch_schema(spark_schema(COLUMNS))
    inner = {
        "keys": pa.list_(pa.field("element", pa.string(), nullable=False)),
        "properties": pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False)),
    }
    assert found.names == list(COLUMNS)
    for field, core in zip(found, arrow_schema(COLUMNS), strict=True):
        assert field.nullable
        assert field.equals(core if field.name not in inner else core.with_type(inner[field.name]))


def test_a_schema_given_by_the_user() -> None:
    from pyspark.sql.types import IntegerType, LongType, MapType, StringType, StructType

    assert columns_of(StructType().add("QUEUEID", IntegerType()).add("body", "binary")) == ("queueId", "body")
    assert columns_of(StructType().add("properties", MapType(StringType(), StringType()))) == ("properties",)
    with pytest.raises(OptionError, match="no column 'value'"):
        columns_of(StructType().add("value", "binary"))
    with pytest.raises(OptionError, match="queueId is int, not bigint"):
        columns_of(StructType().add("queueId", LongType()))
    with pytest.raises(OptionError, match="twice"):
        columns_of(StructType().add("body", "binary").add("BODY", "binary"))
    with pytest.raises(OptionError, match="no column"):
        columns_of(StructType())


def test_the_module_that_spark_finds_never_fails_to_import() -> None:
    """Spark imports every pyspark_… there is, and gives up on all of them if one fails."""
    code = "import sys; sys.modules['pyarrow'] = None; import pyspark_halog as m; print(hasattr(m, 'DefaultSource'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert "install halog[spark]" in done.stderr
    import pyspark_halog

    assert pyspark_halog.DefaultSource.name() == "halog"


def test_the_longest_body_reaches_the_reader() -> None:
    assert parse_options({"path": "/s"}, "batch").read_options(("body",)).message_size_max == 4 << 20
    given = parse_options({"path": "/s", "maxMessageSize": "16m"}, "batch")
    assert given.read_options(("body",)).message_size_max == 16 << 20
    with pytest.raises(OptionError, match="maxMessageSize"):
        parse_options({"path": "/s", "maxMessageSize": "0"}, "batch")


def test_name_servers_are_separated_by_commas_or_semicolons() -> None:
    assert parse(path=None, servers="a:1, b:2;[::1]:3").servers == ("a:1", "b:2", "[::1]:3")
    for wrong in ("a:1;b", "a:1,b:x", "a:1 b:2;:3", "a:1,b:70000"):
        with pytest.raises(OptionError, match="is not host:port"):
            parse(path=None, servers=wrong)
