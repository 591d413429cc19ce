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


def test_a_view_reads_the_log_as_it_was_at_its_first_query(spark: SparkSession, tmp_path: Path) -> None:
    path = make_store(tmp_path / "broker-a", [message(n, topic="grows") for n in range(20)])
    ha.spark.catalog_views(spark, str(path))
    loaded = load(spark, path, topic="grows")
    assert (spark.table("grows").count(), loaded.count()) == (20, 20)
    make_store(path, [message(n, topic="grows") for n in range(20, 30)])
    assert (spark.table("grows").count(), spark.table("grows").where("queueId >= 0").count()) == (20, 20)
    assert (loaded.count(), load(spark, path, topic="grows").count()) == (20, 30)
    ha.spark.catalog_views(spark, str(path))
    assert spark.table("grows").count() == 30
    spark.catalog.dropTempView("grows")


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
@pytest.mark.parametrize("session", ["spark", "pushdown_spark"])
def test_a_dataframe_has_all_its_rows_in_every_query(
    session: str, request: pytest.FixtureRequest, flights: Path
) -> None:
    """Spark keeps one plan for each DataFrame that is loaded, which all queries of it share."""
    spark: SparkSession = request.getfixturevalue(session)
    columns = "topic,queueId,queueOffset,physicalOffset,tags,storeTimestamp"

    def counts(*conditions: str) -> list[int]:
        table = load(spark, flights, columns=columns)
        return [table.where(condition).count() for condition in conditions]

    delays, others, all_rows = "topic = 'delays'", "topic = 'flights'", "true"
    assert counts(delays, all_rows, others) == [600, 3000, 2400]
    assert counts(all_rows, delays, all_rows) == [3000, 600, 3000]
    assert counts("queueId = 1 AND queueOffset < 50", "physicalOffset >= 0", "tags IS NOT NULL")[1:] == [3000, 3000]

    table = load(spark, flights, columns=columns)
    assert table.where(delays).union(table.where(others)).count() == 3000
    one, two = (table.where(f"{others} AND queueId = {queue}").select("queueOffset") for queue in (0, 1))
    assert one.join(two, "queueOffset").count() == 600

    table = load(spark, flights, columns=columns)
    planned = table.select("topic")
    planned._jdf.queryExecution().executedPlan()
    cached = table.where(delays).cache()
    assert (cached.count(), table.count(), cached.count(), len(planned.collect())) == (600, 3000, 600, 3000)
    cached.unpersist()

    load(spark, flights, columns=columns).createOrReplaceTempView("log_of_flights")
    found = [
        spark.sql(f"SELECT * FROM log_of_flights WHERE {condition}").count() for condition in (delays, others, all_rows)
    ]
    assert found == [600, 2400, 3000]
    spark.catalog.dropTempView("log_of_flights")


@pytest.mark.spark_versions
@pytest.mark.parametrize("session", ["spark", "pushdown_spark"])
def test_options_select_messages_by_tag_and_key(session: str, request: pytest.FixtureRequest, flights: Path) -> None:
    spark: SparkSession = request.getfixturevalue(session)
    table = load(spark, flights, topic="flights", tags="tag1||tag2", columns="topic,tags,keys")
    assert table.where("tags = 'tag1'").count() == 800
    assert table.count() == 1600, "the plan that both queries share has the rows of both tags"
    assert [row.tags for row in table.select("tags").distinct().orderBy("tags").collect()] == ["tag1", "tag2"]
    found = load(spark, flights, keys="k7 U00000010", columns="body").collect()
    assert sorted(int(row.body) for row in found) == [7, 10]


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
        ({"tags": "||"}, None, "OptionError: tags: '||' names no tag"),
    ],
    ids=["option", "path", "topic", "schema", "tags"],
)
def test_errors_name_the_option(
    spark: SparkSession, flights: Path, given: dict[str, str], schema: str | None, message: str
) -> None:
    reader = spark.read.format("halog").options(**{"path": str(flights), **given})
    with pytest.raises(PySparkException) as caught:
        (reader if schema is None else reader.schema(schema)).load().count()
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)
