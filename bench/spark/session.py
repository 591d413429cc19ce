"""The Spark application in which both sides run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]


@contextmanager
def spark_application(
    folder: Path, *, cores: int, memory: str, jars: list[Path], settings: Mapping[str, str]
) -> Iterator[SparkSession]:
    """`local[cores]` on loopback with all temporary files below `folder`; `settings` override the defaults."""
    # Workers import the functions of this package; they are started with the JVM's environment.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update(
        SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_HOSTNAME="localhost", PYTHONPATH=path, PYSPARK_PYTHON=sys.executable
    )
    builder = SparkSession.Builder().master(f"local[{cores}]").appName("halog bench")
    chosen = {
        "spark.driver.memory": memory,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(cores),
        # By default, Kafka's consumers keep their fetched data for 5 minutes after their query, which fills the heap of
        # an application that runs many queries.
        "spark.kafka.consumer.cache.timeout": "5s",
        "spark.kafka.consumer.cache.evictorThreadRunInterval": "2s",
        "spark.kafka.consumer.fetchedData.cache.timeout": "5s",
        "spark.kafka.consumer.fetchedData.cache.evictorThreadRunInterval": "2s",
        "spark.jars": ",".join(map(str, jars)),
        "spark.log.level": "FATAL",
        **settings,
    }
    for name, value in chosen.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def jvm_pid(spark: SparkSession) -> int:
    """Returns the pid of the driver's JVM, which is also the executor in local mode; Python workers are its
    descendants.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    return int(jvm.java.lang.ProcessHandle.current().pid())
