"""A streaming query into a topic, for the sink's tests; as a program, with its own Spark, to be killed.

python -m tests.spark.sink_query SERVERS TOPIC INPUT CHECKPOINT
"""

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery


def start(
    spark: SparkSession, source: str, servers: str, topic: str, directory: str, checkpoint: str
) -> StreamingQuery:
    """Sends the lines of the files in `directory`, one file per batch, in two partitions, until all are sent."""
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(directory)
    return (
        lines.selectExpr("value AS body", "substring(value, 1, 6) AS keys")
        .repartition(2)
        .writeStream.format(source)
        .option("servers", servers)
        .option("topic", topic)
        .option("batchSize", 20)
        .option("inFlight", 2)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )


def main(servers: str, topic: str, directory: str, checkpoint: str) -> None:
    """Runs the query until it ends."""
    from ha.spark import HalogDataSource

    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_HOSTNAME="localhost", PYSPARK_PYTHON=sys.executable)
    spark = (
        SparkSession.Builder()
        .master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "512m")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.dataSource.register(HalogDataSource)
    start(spark, "halog", servers, topic, directory, checkpoint).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
