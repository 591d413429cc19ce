"""`archive` into a Delta table: the same rows, with Delta's own transactions. Requires Delta in Spark (jars,
extension).

A commit is first written to the manifest as an intent and then to Delta as the transaction (txnAppId `halog/<broker>`,
txnVersion = its number). Delta ignores a transaction whose number it has already seen, so the next run on the archive
writes the last intent again, for exactly the same range, and marks it applied. If the range is no longer in the log by
then, Delta has not seen it (otherwise it would not have asked for the rows), and the intent is voided.

Bodies pass through the JVM. Files are merged with Delta's OPTIMIZE; deleting old ones with VACUUM is up to the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from ha.errors import RecordsGone
from ha.spark.jobs.archive.base import ArchiveJob
from ha.spark.jobs.archive.files import RangeTask, archive_schema, read_task
from ha.spark.jobs.archive.manifest import Commit, Hole
from ha.spark.jobs.archive.read import PARTITION_FIELDS, delta_session, is_delta

_OPEN_WRITERS = "16"
_COMMITS_PER_OPTIMIZE = 64
"""While it runs continuously: OPTIMIZE looks at the whole table, which would take longer than a commit."""


class DeltaJob(ArchiveJob):
    """Intents in the manifest, transactions in Delta."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._session = delta_session(self.spark)
        self._compacted_commits = 0
        self._session.conf.set("spark.sql.parquet.compression.codec", "zstd")
        self._session.conf.set("spark.sql.maxConcurrentOutputFileWriters", _OPEN_WRITERS)
        optimize = "spark.databricks.delta.optimize"
        self._session.conf.set(f"{optimize}.maxFileSize", str(self.options.target_file_bytes))
        self._session.conf.set(f"{optimize}.minFileSize", str(max(1, self.options.target_file_bytes // 2)))

    def recover(self) -> None:
        """See ArchiveJob."""
        super().recover()
        commit = self.manifest.unapplied()
        if commit is None:
            return
        before = self.manifest.state(applied_only=True)
        begin = commit.covered_begin if before.covered_end is None else before.covered_end
        begin = max([begin, *(hole.end for hole in commit.holes)])
        try:
            self._write(commit, self.reader.split(begin, commit.covered_end, self.options.range_bytes), begin)
        except RecordsGone:
            pass  # voided; the next plan begins at the same offset, and finds the hole

    def append(self, ranges: list[tuple[int, int]], begin: int, end: int, holes: tuple[Hole, ...]) -> None:
        """See ArchiveJob."""
        commit = self.commit_of("append", end, holes=holes, last=self.state.last)
        self.manifest.commit(commit)
        self.state.fold(commit)
        self._write(commit, ranges, begin)

    def compact(self) -> None:
        """See ArchiveJob."""
        is_due = self.result.commits - self._compacted_commits >= _COMMITS_PER_OPTIMIZE
        if not self.result.commits or (self.options.every_s is not None and not is_due):
            return
        self._compacted_commits = self.result.commits
        table = self._session._jvm.io.delta.tables.DeltaTable  # type: ignore[union-attr]
        table.forPath(self._session._jsparkSession, str(self.manifest.archive)).optimize().executeCompaction()

    def _write(self, commit: Commit, ranges: list[tuple[int, int]], begin: int) -> None:
        tasks = self.tasks(ranges, "", commit.sequence)
        app = f"halog/{self.reader.broker_name}"
        self.manifest.failpoint("write delta")
        try:
            (
                _rows(self._session, tasks, self.scope.columns)
                .write.format("delta")
                .mode("append")
                .partitionBy("topic", "date")
                .option("txnAppId", app)
                .option("txnVersion", commit.sequence)
                .option("userMetadata", f"{app} physical offsets [{begin}, {commit.covered_end})")
                .save(str(self.manifest.archive))
            )
        except Exception as error:
            # An executor's failure arrives as text. All that matters here is whether the range still exists.
            self.reader.refresh()
            if self.reader.min_offset <= begin or self._count(begin, commit.covered_end):
                raise
            # Before the intent is marked as applied: after a kill in between it must be written again.
            void = self.commit_of("void", begin)
            self.manifest.commit(void)
            self.manifest.mark_applied(void.sequence)
            self.state.fold(void)
            what = f"the log of {self.reader.broker_name}"
            raise RecordsGone(what, begin, self.reader.min_offset, "deleted while it was archived") from error
        self.manifest.mark_applied(commit.sequence)
        self.result.commits += 1
        self.result.rows += self._count(begin, commit.covered_end)

    def _count(self, begin: int, end: int) -> int:
        """Count the table's rows of [begin, end), the damaged ones among them, and find the last one."""
        place = F.col("physicalOffset")
        if not is_delta(self.manifest.archive):
            return 0
        rows = self._session.read.format("delta").load(str(self.manifest.archive))
        found = rows.where((F.col("brokerName") == self.reader.broker_name) & (place >= begin) & (place < end))
        counts = found.agg(F.count("*"), F.count_if(~F.col("crcOk")), F.max(F.when(F.col("crcOk"), place))).first()
        assert counts is not None
        self.result.damaged += counts[1]
        if counts[2] is not None:
            self.state.last = self._record_at(counts[2]) or self.state.last
        return int(counts[0])


def _rows(session: SparkSession, tasks: list[RangeTask], columns: tuple[str, ...]) -> DataFrame:
    """Return a DataFrame of all tasks' rows, which executors read when Spark requests them."""
    schema = pa.schema([*PARTITION_FIELDS, *archive_schema(columns)])

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in numbers:
            for index in number.column(0).to_pylist():
                for batch in read_task(tasks[index]):
                    day = batch["storeTimestamp"].cast(pa.date32())
                    arrays = [batch["topic"], day, *(batch[name] for name in schema.names[2:])]
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return session.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(read, from_arrow_schema(schema))
