"""Writes the Delta table of an archive. Requires Delta Lake in Spark (jars, extension), which writes the table's log.

A commit of the table is a transaction of Delta with `txn.appId` = `halog/<broker>` and `txn.version` = the number of
the broker's commit. A merge of files has `dataChange` = false, so streams over the table skip it. Files that only
earlier versions of the table use remain until the user runs VACUUM.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow.parquet as pq
from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from ha.errors import ArchiveConflict, OptionError
from ha.spark.jobs.archive.files import readable_statistics
from ha.spark.jobs.archive.manifest import ArchivedFile, State
from ha.spark.jobs.archive.read import archive_schema_of

_DELTA_TABLE = "io.delta.tables.DeltaTable"


class DeltaTable:
    """The Delta table of an archive: implements `ArchiveTable`."""

    def __init__(self, spark: SparkSession, archive: Path) -> None:
        self._archive = archive
        self._session = delta_session(spark)
        self._sql: Any = self._session._jvm.org.apache.spark.sql  # type: ignore[union-attr]
        with self._active():
            self._log = self._sql.delta.DeltaLog.forTable(self._session._jsparkSession, str(archive))
        self._seen = -1
        self._rows: dict[str, int] = {}
        self._columns: list[str] = []

    def files(self) -> dict[str, int]:
        """Returns the row counts of the table's files; see ArchiveTable."""
        with self._active():
            snapshot = self._log.startTransaction().snapshot()
            if snapshot.version() != self._seen:
                found = DataFrame(snapshot.allFiles().toDF(), self._session).select("path", "stats").collect()
                self._rows = {unquote(row.path): json.loads(row.stats or "{}").get("numRecords", 0) for row in found}
                self._columns = list(snapshot.schema().fieldNames())
                self._seen = snapshot.version()
        return self._rows

    def sequence(self, broker_name: str) -> int:
        """Returns the number of the broker's last commit to the table; see ArchiveTable."""
        found = self._log.unsafeVolatileSnapshot().transactions().get(f"halog/{broker_name}")
        return int(found.get()) if found.isDefined() else 0

    def commit(self, state: State, added: Sequence[ArchivedFile], removed: Sequence[str], *, is_merge: bool) -> None:
        """Commits a change of files to the table; see ArchiveTable."""
        try:
            self._commit(state, added, removed, is_merge=is_merge)
        except Py4JJavaError as error:
            # Delta's conflict errors (io.delta.exceptions.DeltaConcurrentModificationException) extend this class.
            conflict = "java.util.ConcurrentModificationException"
            if not is_instance_of(self._session.sparkContext._gateway, error.java_exception, conflict):
                raise
            reason = f"another writer changed its Delta table: {error.java_exception.toString()}"
            raise ArchiveConflict(self._archive, reason) from None

    def _commit(self, state: State, added: Sequence[ArchivedFile], removed: Sequence[str], *, is_merge: bool) -> None:
        self._add_columns(state)
        app = f"halog/{state.broker_name}"
        covered = f"{app} physical offsets [{state.covered_begin}, {state.covered_end})"
        self._session.conf.set("spark.databricks.delta.commitInfo.userMetadata", covered)
        now_ms = time.time_ns() // 1_000_000
        actions: list[dict[str, Any]] = [
            {"txn": {"appId": app, "version": state.sequence, "lastUpdated": now_ms}},
            *({"add": _add(self._archive, file) | {"dataChange": not is_merge}} for file in added),
            *(
                {"remove": {"path": quote(path), "deletionTimestamp": now_ms, "dataChange": not is_merge}}
                for path in removed
            ),
        ]
        jvm: Any = self._session._jvm
        made = jvm.java.util.ArrayList()
        for action in actions:
            made.add(self._sql.delta.actions.Action.fromJson(json.dumps(action)))
        seq = jvm.scala.jdk.javaapi.CollectionConverters.asScala(made).toSeq()
        operation = getattr(getattr(self._sql.delta, "DeltaOperations$ManualUpdate$"), "MODULE$")
        with self._active():
            version = self._log.startTransaction().commit(seq, operation)
        if version == self._seen + 1:
            self._rows = {path: rows for path, rows in self._rows.items() if path not in removed}
            self._rows |= {file.path: file.rows for file in added}
            self._seen = version

    def expire(self) -> None:
        """Does nothing: the user runs VACUUM."""

    @contextmanager
    def _active(self) -> Iterator[None]:
        """Makes `_session` Spark's active session in the block, because Delta uses the active session's settings."""
        sessions = self._sql.classic.SparkSession
        before = sessions.getActiveSession()
        sessions.setActiveSession(self._session._jsparkSession)
        try:
            yield
        finally:
            if before.isDefined():
                sessions.setActiveSession(before.get())
            else:
                sessions.clearActiveSession()

    def _add_columns(self, state: State) -> None:
        """Creates the table, or adds the columns of `state` that it does not have."""
        schema = archive_schema_of([state])
        if set(schema.names) - set(self._columns):
            rows = self._session.createDataFrame([], from_arrow_schema(schema))
            writer = rows.write.format("delta").mode("append").partitionBy("topic", "date")
            writer.option("mergeSchema", "true").save(str(self._archive))
            self.files()


def _add(archive: Path, file: ArchivedFile) -> dict[str, Any]:
    return {
        "path": quote(file.path),
        "partitionValues": {"topic": file.topic, "date": None if file.date is None else file.date.isoformat()},
        "size": file.bytes,
        "modificationTime": (archive / file.path).stat().st_mtime_ns // 1_000_000,
        "stats": json.dumps({"numRecords": file.rows, **_bounds(pq.read_metadata(archive / file.path))}),
    }


def _bounds(footer: pq.FileMetaData) -> dict[str, dict[str, Any]]:
    """Returns the minimum and maximum of each column of integers or times, by which Delta decides which files to skip.

    Columns whose statistics are missing or can't be read in a row group are not included.
    """
    found: dict[str, tuple[Any, Any]] = {}
    unknown: set[str] = set()
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            statistics = readable_statistics(column)
            if statistics is None:
                unknown.add(column.path_in_schema)
            elif statistics.has_min_max:
                low, high = statistics.min, statistics.max
                if isinstance(low, int | datetime) and not isinstance(low, bool):
                    known = found.get(column.path_in_schema, (low, high))
                    found[column.path_in_schema] = min(low, known[0]), max(high, known[1])
    for name in unknown & found.keys():
        del found[name]
    return {
        "minValues": {name: _shown(low) for name, (low, _) in found.items()},
        "maxValues": {name: _shown(high) for name, (_, high) in found.items()},
    }


def _shown(value: Any) -> Any:
    """Returns `value` in the form of Delta's statistics: a time becomes text in UTC, rounded down to milliseconds."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value


def delta_session(spark: SparkSession) -> SparkSession:
    """Returns a new session that can use Delta tables by their paths. Raises OptionError if this Spark has no Delta
    Lake."""
    delta_table = attrgetter(_DELTA_TABLE)(spark._jvm)
    extensions = str(spark.sparkContext.getConf().get("spark.sql.extensions", ""))
    # py4j returns a package object for a class that does not exist.
    if type(delta_table).__name__ == "JavaPackage" or "DeltaSparkSessionExtension" not in extensions:
        raise OptionError(
            "format",
            "this Spark has no Delta Lake",
            "delta with --conf spark.jars.packages=io.delta:delta-spark_4.2_2.13:4.4.0 --conf "
            "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension, or iceberg, or parquet",
        )
    session = spark.newSession()
    session.conf.set("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    session.conf.set("spark.sql.session.timeZone", "UTC")
    # Delta's default of 50 partitions is meant for much larger tables.
    session.conf.set("spark.databricks.delta.snapshotPartitions", str(2 * spark.sparkContext.defaultParallelism))
    return session
