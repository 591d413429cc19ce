"""A client of Spark Connect, which starts its server: reads a store as a table and as a stream, and writes to a topic.

`python -m tests.spark.connect_query STORE SERVERS CHECKPOINT` prints the counts as JSON.
"""

import json
import sys

from pyspark.sql import SparkSession


def main(store: str, servers: str, checkpoint: str) -> None:
    builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.memory", "512m").getOrCreate()
    assert "connect" in type(spark).__module__
    rows = spark.read.format("halog").options(path=store, topic="flights").load()
    found = {"batch": rows.count(), "filtered": rows.where("queueId = 1 AND tags = 'tag1'").count()}
    stream = spark.readStream.format("halog").options(path=store, topic="flights", startingOffsets="earliest").load()
    writer = stream.writeStream.format("memory").queryName("seen").option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination(120)
    found["stream"] = spark.table("seen").count()
    rows.select("body").write.format("halog").options(servers=servers, topic="copied").mode("append").save()
    written = spark.read.format("halog").options(servers=servers, topic="copied", isolation="read_committed").load()
    found["sink"] = written.count()
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
