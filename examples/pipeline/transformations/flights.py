"""The topic `flights` as tables: bronze as stored, silver decoded, gold aggregated.

Long delays are sent to the topic `late-flights`.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import avg, col, count, from_json, struct, to_json

spark = SparkSession.active()
SERVERS = spark.conf.get("halog.servers") or ""
FLIGHT = "carrier STRING, hour INT, dep_delay DOUBLE"
LATE = "dep_delay > 60"


@dp.table
def flights_bronze() -> DataFrame:
    """Every message, with its place in the log."""
    return (
        spark.readStream.format("halog")
        .options(servers=SERVERS, topic="flights", startingOffsets="earliest")
        .load()
    )


@dp.table
def flights_silver() -> DataFrame:
    """Every flight; bodies that are not JSON stay in bronze."""
    flight = from_json(col("body").cast("string"), FLIGHT).alias("flight")
    rows = spark.readStream.table("flights_bronze")
    return rows.select("keys", "storeTimestamp", flight).select(
        "keys", "storeTimestamp", "flight.*"
    )


@dp.materialized_view
def delays_gold() -> DataFrame:
    """Flights and mean delay by carrier."""
    return (
        spark.read.table("flights_silver")
        .where("carrier IS NOT NULL")
        .groupBy("carrier")
        .agg(count("*").alias("flights"), avg("dep_delay").alias("delay"))
    )


dp.create_sink(
    "late_flights",
    format="halog",
    options={"servers": SERVERS, "topic": "late-flights"},
)


@dp.append_flow(target="late_flights")
def late() -> DataFrame:
    """Sends each long delay exactly once, like every stream into a topic."""
    rows = spark.readStream.table("flights_silver").where(LATE)
    body = to_json(struct("carrier", "hour", "dep_delay")).cast("binary")
    return rows.select(body.alias("body"), "keys")
