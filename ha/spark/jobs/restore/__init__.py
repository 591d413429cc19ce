"""Sends messages of an archive or a store into a topic, each once and in order."""

from ha.spark.jobs.restore.job import RestoreOptions, RestoreResult, restore

__all__ = ["RestoreOptions", "RestoreResult", "restore"]
