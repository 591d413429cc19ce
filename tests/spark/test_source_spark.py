"""The source through Spark itself: what only the real planner, workers and Arrow transfer can show. Few jobs."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import ha.spark
from ha.arrow.schema import COLUMNS
from ha.spark.source.batch_reader import HalogReader
from ha.spark.source.options import parse_options
from ha.spark.source.schema import spark_schema
from tests.spark.stores import make_store, message
from tests.unpacking import unpack_store


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "broker-a"
    messages = [message(n, topic="delays" if n % 5 == 0 else "flights") for n in range(3000)]
    return make_store(path, messages, segment_size=128 << 10)


def load(spark: SparkSession, path: Path, **given: Any) -> DataFrame:
    return spark.read.format("halog").options(**given).load(str(path))


@pytest.mark.spark_versions
@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_spark_shows_the_rows_that_the_tasks_gave(version: str, spark: SparkSession, tmp_path: Path) -> None:
    """Every column of a real broker's store passes through Spark unchanged. (test_source_local compares the tasks' rows
    with the manifest.) Nothing was registered: pyspark_halog is found."""
    path = unpack_store(version, tmp_path / "broker-a")
    reader = HalogReader(parse_options({"path": str(path)}, "batch"), spark_schema(COLUMNS))
    given: list[dict[str, Any]] = []
    for task in reader.partitions():
        for batch in reader.read(task):
            given += batch.to_pylist()
    shown = load(spark, path, columns="*").orderBy("physicalOffset").toArrow().to_pylist()
    assert len(shown) > 40
    assert shown == given


def test_a_schema_chooses_the_columns_and_counts_cheaply(spark: SparkSession, flights: Path) -> None:
    few = spark.read.format("halog").schema("queueid int, body binary").load(str(flights))
    assert few.columns == ["queueid", "body"]
    rows = few.where("queueid = 1").collect()
    assert sorted(int(row["body"]) for row in rows) == list(range(1, 3000, 4))
    assert spark.read.format("halog").schema("queueId int").load(str(flights)).count() == 3000
    assert load(spark, flights, topic="delays", columns="queueId").count() == 600


def test_source_is_usable_as_a_sql_table(spark: SparkSession, flights: Path) -> None:
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW log USING halog OPTIONS (path '{flights}', topic 'delays')")
    [row] = spark.sql("SELECT count(*) AS n, count(DISTINCT uniqKey) AS keys, max(keys[0]) AS k FROM log").collect()
    assert (row.n, row.keys, row.k) == (600, 600, "k995")
    spark.catalog.dropTempView("log")


def test_each_topic_has_a_view(spark: SparkSession, flights: Path) -> None:
    assert ha.spark.catalog_views(spark, str(flights), columns="topic,queueId") == ["delays", "flights"]
    assert spark.sql("SELECT count(*) FROM `flights`").first() == (2400,)
    assert spark.table("delays").columns == ["topic", "queueId"]
    assert ha.spark.catalog_views(spark, str(flights)) == ["delays", "flights"], "again, with other options"
    assert "body" in spark.table("delays").columns
    for view in ("delays", "flights"):
        spark.catalog.dropTempView(view)


@pytest.mark.spark_versions
def test_permanent_tables_are_refused_or_get_their_options_in_the_query(spark: SparkSession, flights: Path) -> None:
    with pytest.raises(PySparkException, match=r"CREATE TABLE: Spark does not pass .* CREATE TEMPORARY VIEW name"):
        spark.sql(f"CREATE TABLE refused USING halog OPTIONS (path '{flights}', topic 'delays')")
    spark.sql("CREATE TABLE halog_log (topic STRING, queueId INT) USING halog")
    try:
        with pytest.raises(PySparkException, match=r"path: there is no option at all; .* CREATE TEMPORARY VIEW name"):
            spark.table("halog_log").count()
        assert spark.sql(f"SELECT count(*) FROM halog_log WITH (path = '{flights}')").first() == (3000,)
    finally:
        spark.sql("DROP TABLE halog_log")


@pytest.mark.spark_versions
def test_filters_pushed_and_not_give_the_same_rows(
    spark: SparkSession, pushdown_spark: SparkSession, flights: Path
) -> None:
    middle = load(spark, flights, columns="storeTimestamp,physicalOffset").where("physicalOffset > 200000").first()
    assert middle is not None
    conditions = [
        "topic = 'delays' AND tags IN ('tag1', 'tag2') AND queueOffset BETWEEN 20 AND 120 AND queueId <> 3",
        f"storeTimestamp >= timestamp_micros({int(middle.storeTimestamp.timestamp() * 1e6)}) AND queueId IN (1, 2)",
        f"physicalOffset < {middle.physicalOffset} AND keys[1] = 'n3'",
        "uniqKey = 'U00000123' OR topic = 'none'",
    ]
    columns = "topic,queueId,queueOffset,physicalOffset,tags,keys,uniqKey,storeTimestamp"
    plain = load(spark, flights, columns=columns)
    pushed = load(pushdown_spark, flights, columns=columns)
    counts = []
    for condition in conditions:
        wanted = plain.where(condition).select("topic", "queueId", "queueOffset")
        found = pushed.where(condition).select("topic", "queueId", "queueOffset")
        rows = sorted(map(tuple, wanted.collect()))
        assert sorted(map(tuple, found.collect())) == rows, condition
        counts.append(len(rows))
    assert all(0 < count < 3000 for count in counts), counts
    plan = pushed.where(conditions[0])._jdf.queryExecution().executedPlan().toString()
    assert "tag1" not in plan, plan  # Spark left it to the source
    assert "tag1" in plain.where(conditions[0])._jdf.queryExecution().executedPlan().toString()


@pytest.mark.spark_versions
@pytest.mark.parametrize(
    ("given", "schema", "message"),
    [
        ({"topics": "flights"}, None, "OptionError: topics: no option for reading has this name"),
        (
            {"path": "/nowhere"},
            None,
            "StoreUnreadable: /nowhere can't be read as a store: the directory does not exist",
        ),
        ({"topic": "fligths"}, None, "OptionError: subscribe: topic 'fligths' has no queue in the log"),
        ({}, "body string", "OptionError: schema: column body is binary, not string"),
    ],
    ids=["option", "path", "topic", "schema"],
)
def test_errors_name_the_option(
    spark: SparkSession, flights: Path, given: dict[str, str], schema: str | None, message: str
) -> None:
    reader = spark.read.format("halog").options(**{"path": str(flights), **given})
    with pytest.raises(PySparkException) as caught:
        (reader if schema is None else reader.schema(schema)).load().count()
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)
