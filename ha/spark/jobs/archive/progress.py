"""Reports how far an archive is behind its log: in a log line after commits, and as metrics in Prometheus' text
format."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from ha.arrow import LogReader, ReadOptions
from ha.spark.jobs.archive.options import ArchiveResult
from ha.spark.metrics import quoted, replace_metrics

logger = logging.getLogger("ha.spark")

_LOOK_BYTES = 1 << 20
"""Maximum number of log bytes that are read to find the oldest message that is not archived"""


class ArchiveLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far an archive is behind its log at one time. Sizes in bytes of the log."""

    bytes: int
    """Bytes of the log that are not archived yet"""
    seconds: float
    """Age in seconds of the oldest message that is not archived; 0 if none in the first _LOOK_BYTES after the archive's
    end has a known time"""
    headroom_bytes: int
    """Bytes of the log that are archived and not deleted yet: what retention can delete before it reaches messages that
    are not archived"""


def measure_archive_lag(reader: LogReader, covered_end: int, now_ms: int) -> ArchiveLag:
    """Returns the lag of an archive that ends at physical offset `covered_end`, behind the log as `reader` has it."""
    end = reader.queued_end()
    options = ReadOptions(columns=("storeTimestamp",), batch_rows=1, fail_on_data_loss=False)
    seconds = 0.0
    begin = max(covered_end, reader.min_offset)
    if begin < end:
        # A read by queue would wait for records that are not queued yet.
        for batch in reader.walk_range(begin, min(end, begin + _LOOK_BYTES), options):
            stored = batch["storeTimestamp"].cast("int64")[0].as_py() if batch.num_rows else None
            if stored is not None:
                seconds = max(0.0, now_ms / 1000 - stored / 1_000_000)
                break
    return ArchiveLag(
        bytes=max(0, end - covered_end),
        seconds=seconds,
        headroom_bytes=max(0, min(covered_end, end) - reader.min_offset),
    )


class LagReports:
    """Reports, during one run of an archive job, how far the archive is behind the log: in log lines and in
    `metrics_file`."""

    def __init__(self, metrics_file: str | None) -> None:
        self._metrics_file = None if metrics_file is None else Path(metrics_file)
        self._commits = 0

    def report(self, reader: LogReader, covered_end: int, result: ArchiveResult) -> None:
        """Refreshes `reader`, logs a line if there were commits since the last report, and rewrites the metrics file.

        Does nothing if there were no commits and there is no metrics file. If that can't be written, logs a warning.
        """
        has_committed = result.commits > self._commits
        if not has_committed and self._metrics_file is None:
            return
        self._commits = result.commits
        reader.refresh()
        now_ms = time.time_ns() // 1_000_000
        lag = measure_archive_lag(reader, covered_end, now_ms)
        if has_committed:
            logger.info(
                "archive.committed broker=%r commits=%d rows=%d covered_end=%d lag_bytes=%d lag_s=%.1f "
                "headroom_bytes=%d",
                result.broker_name,
                result.commits,
                result.rows,
                covered_end,
                lag.bytes,
                lag.seconds,
                lag.headroom_bytes,
            )
        if self._metrics_file is not None:
            replace_metrics(self._metrics_file, prometheus_text(lag, result, now_ms))


_METRICS = (
    ("halog_archive_lag_bytes", "gauge", "Bytes of the log that are not archived yet."),
    ("halog_archive_lag_seconds", "gauge", "Age of the oldest message that is not archived yet."),
    ("halog_archive_headroom_bytes", "gauge", "Archived bytes that are still in the log."),
    ("halog_archive_rows_total", "counter", "Messages archived by this process."),
    ("halog_archive_commits_total", "counter", "Commits of this process."),
    ("halog_archive_measured_timestamp_seconds", "gauge", "When these figures were measured."),
)


def prometheus_text(lag: ArchiveLag, result: ArchiveResult, now_ms: int) -> str:
    """Returns the metrics in Prometheus' text format."""
    broker = quoted(result.broker_name)
    values = (lag.bytes, lag.seconds, lag.headroom_bytes, result.rows, result.commits, now_ms / 1000)
    lines = []
    for (name, kind, help_text), value in zip(_METRICS, values, strict=True):
        lines += [
            f"# HELP {name} {help_text}",
            f"# TYPE {name} {kind}",
            f'{name}{{broker="{broker}"}} {value}',
        ]
    return "\n".join(lines) + "\n"
