"""Rebuilds consume queues and the key index from the commitlog alone."""

from ha.spark.jobs.reindex.job import ReindexResult, reindex
from ha.spark.jobs.reindex.plan import ReindexOptions

__all__ = ["ReindexOptions", "ReindexResult", "reindex"]
