"""SQL tables and views of a log: temporary views by topic, and why a permanent table can't be read.

Spark stores the options of a CREATE TABLE, but passes none of them to a Python data source that reads or writes the
table (4.2 and 4.3), only those of WITH (…) in the query itself. A CREATE TABLE without columns asks the data source for
its schema; its options are recognized by Spark's own `provider`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from ha.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_INTERNAL = ("%", "SCHEDULE_TOPIC", "RMQ_SYS_", "rmq_sys_", "halog-sink-commits")
"""Prefixes of topics that applications don't read"""

_INSTEAD = (
    "CREATE TEMPORARY VIEW name USING halog OPTIONS (path '…', topic '…'), ha.spark.catalog_views(spark, path), or the "
    "options in each statement: FROM name WITH (path = '…')"
)


def refuse_table(options: Mapping[str, str]) -> None:
    """Raises OptionError for the options of a permanent table, and if there are none, as when such a table is used."""
    reason = "Spark does not pass a permanent table's options to a Python data source"
    if not options:
        raise OptionError("path", f"there is no option at all; {reason}", _INSTEAD)
    if any(name.lower() == "provider" for name in options):
        raise OptionError("CREATE TABLE", reason, _INSTEAD)


def catalog_views(spark: SparkSession, path: str, **options: str) -> list[str]:
    """Creates, or replaces, a temporary view for each topic of a log; returns their names, sorted.

    `path` and `options` are those of the data source. A view is named after its topic (`` `my-topic` `` in SQL) and
    reads the log as it is when it is queried. RocketMQ's own topics, retry topics and the sink's commits are left out;
    a topic that appears later has no view until the next call.
    """
    from ha.spark.data_source import HalogDataSource
    from ha.spark.source.opening import open_source
    from ha.spark.source.options import parse_options

    with closing(open_source(parse_options({"path": path, **options}, "batch"))) as source:
        topics = [topic for topic in source.topics() if not topic.startswith(_INTERNAL)]
    spark.dataSource.register(HalogDataSource)
    for topic in topics:
        reader = spark.read.format("halog").options(path=path, topic=topic, **options)
        reader.load().createOrReplaceTempView(f"`{topic}`")
    return topics
