"""Creates temporary views of a log's topics, for SQL."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ha.errors import OptionError
from ha.protocol.topic_names import is_system_topic
from ha.spark.data_source import HalogDataSource
from ha.spark.sink.options import COMMIT_TOPIC
from ha.spark.source.opening import open_source
from ha.spark.source.options import parse_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def catalog_views(spark: SparkSession, path: str, **options: str) -> list[str]:
    """Creates or replaces a temporary view for each topic of a log, and returns the names of the topics, sorted.

    `path` and `options` are those of the data source. A view is named after its topic (`` `my-topic` `` in SQL).
    RocketMQ's own topics, retry topics and the sink's commits have no view.

    A view reads the log as it is at its first query: Spark keeps this plan for later queries, also while the log grows,
    and they fail with RecordsGone when retention has deleted the planned messages. Call this function again to include
    later messages and topics.

    Raises OptionError for an invalid option, or if names of topics differ only in case and Spark ignores case;
    StoreUnreadable or OSError if the log can't be read. Then no view is created.
    """
    with closing(open_source(parse_options({"path": path, **options}, "batch"))) as source:
        topics = [topic for topic in source.topics() if not is_system_topic(topic) and topic != COMMIT_TOPIC]
    if spark.conf.get("spark.sql.caseSensitive") != "true":
        _check_case(topics)
    spark.dataSource.register(HalogDataSource)
    for topic in topics:
        reader = spark.read.format("halog").options(path=path, topic=topic, **options)
        reader.load().createOrReplaceTempView(f"`{topic}`")
    return topics


def _check_case(topics: list[str]) -> None:
    by_view: dict[str, list[str]] = {}
    for topic in topics:
        by_view.setdefault(topic.lower(), []).append(topic)
    for names in by_view.values():
        if len(names) > 1:
            reason = f"the topics {', '.join(names)} would have one view, as Spark ignores case"
            raise OptionError("spark.sql.caseSensitive", reason, "true, or a view of your own for each of them")
