"""`archive`: writes the log as Parquet files by topic and day, each record once. With the formats delta and iceberg, a
table lists these files.

The driver plans ranges of the commitlog from the end of the archive to the confirmed end of the log; executors read
them with `ha.arrow` and write the files themselves; the driver commits. Committed ranges are never read again, and
ranges that were not committed are read again as a whole. So if the job is killed at any moment and run again, the
archive has every record once (see `manifest.py`).

Store and archive must be at the same paths on the driver and on every executor: on one machine, or on a shared file
system that supports flock, link and rename. Several brokers can be archived into one directory, at the same time.

Bodies are kept as stored; sysFlag shows which ones are compressed. By default, damaged records become rows with
crcOk=false and the fields that could be read; those without topic or time are in the partition
`__HIVE_DEFAULT_PARTITION__` (null).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from ha.arrow import LogReader
from ha.arrow.replicas import stored_broker_name
from ha.errors import DiskFailed
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.archive.manifest import Manifest, brokers, no_failure
from ha.spark.jobs.archive.options import ArchiveOptions, ArchiveResult, archive_path, check
from ha.spark.jobs.archive.passes import ArchiveJob


def archive(
    spark: SparkSession,
    options: ArchiveOptions,
    progress: Progress = no_progress,
    *,
    stop: threading.Event | None = None,
    failpoint: Callable[[str], None] = no_failure,
) -> ArchiveResult:
    """Brings the archive up to the log's end, once or every `options.every_s` seconds until `stop` is set.

    Setting `stop` also ends a pass early, after the commit in progress. Progress is in bytes of the log ("archive") and
    in merges ("compact"). Commits are logged, with the lag.

    Raises OptionError; StoreUnreadable; CorruptLog; ArchiveConflict if another archiver or an erasure of this broker is
    running, or if another program changes the table; ArchiveDamaged, also if this is not the log that was archived
    before; RecordsGone; DiskFailed. After an error or a kill, run it again: it continues after the last commit.
    """
    target = archive_path(options.archive)
    check(options)
    stop = stop or threading.Event()
    started = time.monotonic()
    try:
        with LogReader(options.path, broker_name=options.broker_name or _earlier_name(options, target)) as reader:
            manifest = Manifest(target, reader.broker_name, failpoint=failpoint)
            with manifest.locked():
                job = ArchiveJob(spark, options, manifest, reader, progress)
                job.recover()
                while True:
                    began_s = time.monotonic()
                    job.run_pass(stop)
                    if options.every_s is None or stop.wait(max(0, began_s + options.every_s - time.monotonic())):
                        break
    except OSError as error:
        raise DiskFailed(Path(error.filename or target), "archiving", error.strerror or str(error)) from None
    job.result.seconds = time.monotonic() - started
    return job.result


def _earlier_name(options: ArchiveOptions, target: Path) -> str | None:
    """Returns the name of the store's directory, which earlier versions used as the broker's name, if the archive has a
    broker of that name and none of the name that the store states; else None."""
    name, known = Path(options.path).resolve().name, brokers(target)
    return name if name in known and stored_broker_name(Path(options.path)) not in known else None
