"""`ha spark stats`: computes statistics of a log."""

from ha.spark.jobs.stats.job import StatsOptions, StatsResult, stats
from ha.spark.jobs.stats.report import write_stats

__all__ = ["StatsOptions", "StatsResult", "stats", "write_stats"]
