"""Lets PySpark find the data source by itself: it looks for top-level modules `pyspark_…` with a `DefaultSource`."""

from ha.spark.data_source import HalogDataSource as DefaultSource

__all__ = ["DefaultSource"]
