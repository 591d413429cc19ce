"""Spark integration: the data source `halog` for batch and streaming queries, its sink, and the jobs of `ha spark`.

Public names are imported on first access, so that `read_arrow` works without PySpark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ha.arrow import read_arrow
    from ha.spark.data_source import HalogDataSource
    from ha.spark.restarts import with_restarts
    from ha.spark.source.listener import LagListener, LagReport, QueueLag
    from ha.spark.topic_table import topic
    from ha.spark.views import catalog_views

__all__ = [
    "HalogDataSource",
    "LagListener",
    "LagReport",
    "QueueLag",
    "catalog_views",
    "read_arrow",
    "topic",
    "with_restarts",
]

_HOMES = {
    "HalogDataSource": "ha.spark.data_source",
    "LagListener": "ha.spark.source.listener",
    "LagReport": "ha.spark.source.listener",
    "QueueLag": "ha.spark.source.listener",
    "catalog_views": "ha.spark.views",
    "read_arrow": "ha.arrow",
    "topic": "ha.spark.topic_table",
    "with_restarts": "ha.spark.restarts",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
