"""Archives the log as Parquet, Delta or Iceberg, each record once, and reads such archives."""

from ha.spark.jobs.archive.job import archive
from ha.spark.jobs.archive.options import ArchiveOptions, ArchiveResult, archive_path
from ha.spark.jobs.archive.read import archive_states, read_archive

__all__ = ["ArchiveOptions", "ArchiveResult", "archive", "archive_path", "archive_states", "read_archive"]
