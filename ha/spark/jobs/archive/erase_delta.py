"""`erase` of a Delta table: one transaction of Delta for the rows with a key and for copies, one for a whole topic.

After a kill in between, run it again. Earlier versions of the table have the rows until VACUUM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from ha.spark.jobs.archive.manifest import ArchivedFile, QueueSpan
from ha.spark.jobs.archive.match import SEARCHED, Finds, Found, Match
from ha.spark.jobs.archive.read import delta_session

_VIEW = "halog_erased"


class DeltaPart:
    """The rows of one broker in the table at `archive`."""

    def __init__(self, spark: SparkSession, archive: Path, broker_name: str, match: Match) -> None:
        self._session = delta_session(spark)
        self._archive = archive
        self._broker_name = broker_name
        self._match = match

    def _rows(self) -> DataFrame:
        rows = self._session.read.format("delta").load(str(self._archive))
        return rows.where(F.col("brokerName") == self._broker_name).withColumn("file", F.col("_metadata.file_path"))

    def search(self) -> list[tuple[ArchivedFile, Found]]:
        """Return the files that have matching rows, or rows that can't be searched."""
        rows = self._rows()
        topics = [row.topic for row in rows.select("topic").distinct().collect()]
        found = self._whole_files(rows) if not self._match.keys else {}
        searched = [each for each in topics if self._match.may_be_in(each)]
        if not self._match.keys:
            searched = [each for each in searched if each != self._match.topic]
        if searched:
            candidates = rows.where(_is_one_of(searched)).select("topic", "file", *SEARCHED)
            for row in candidates.mapInArrow(_search(self._match), "topic string, file string, found binary").collect():
                part = msgspec.msgpack.decode(row.found, type=Found)
                key = row.topic, row.file
                found[key] = part if key not in found else _added(found[key], part)
        counts = {row["file"]: row["count"] for row in rows.groupBy("file").count().collect()}
        return [(_file(file, topic, counts[file]), each) for (topic, file), each in found.items()]

    def _whole_files(self, rows: DataFrame) -> dict[tuple[str | None, str], Found]:
        offset = F.col("queueOffset")
        spans = F.min(offset).alias("first"), F.max(offset).alias("last"), F.count("*").alias("count")
        found: dict[tuple[str | None, str], Found] = {}
        of_topic = rows.where(F.col("topic") == self._match.topic)
        for row in of_topic.groupBy("file", "queueId").agg(*spans).collect():
            is_known = row["queueId"] is not None and row["first"] is not None
            queues = (QueueSpan(row["queueId"], row["first"], row["last"], row["count"]),) if is_known else ()
            key = self._match.topic, row["file"]
            found[key] = _added(found.get(key, Found(0, 0, (), ())), Found(row["count"], 0, (), queues))
        return found

    def delete(self, changed: list[tuple[ArchivedFile, Found]]) -> tuple[tuple[ArchivedFile, ...], tuple[str, ...]]:
        """Delete the rows; the manifest of a Delta table names no files."""
        places = {(file.topic, place) for file, found in changed for place in found.physical_offsets}
        if places:
            self._delete_matching(sorted(places, key=str), "a.physicalOffset = e.physicalOffset")
        if not self._match.keys:
            self._delete_matching([(self._match.topic, None)], "true")
        return (), ()

    def _delete_matching(self, places: Sequence[tuple[str | None, int | None]], condition: str) -> None:
        rows = [(self._broker_name, topic, place) for topic, place in places]
        erased = self._session.createDataFrame(rows, "broker string, topic string, physicalOffset long")
        erased.createOrReplaceTempView(_VIEW)
        table = str(self._archive).replace("`", "``")
        # Not DELETE: like MERGE, it takes no parameters, and names can hold anything.
        self._session.sql(
            f"MERGE INTO delta.`{table}` AS a USING {_VIEW} AS e "
            f"ON a.brokerName = e.broker AND a.topic <=> e.topic AND {condition} WHEN MATCHED THEN DELETE"
        )
        self._session.catalog.dropTempView(_VIEW)


def _is_one_of(topics: list[str | None]) -> Column:
    named = F.col("topic").isin([topic for topic in topics if topic is not None])
    return named | F.col("topic").isNull() if None in topics else named


def _search(match: Match) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function of a task: what matches in its rows, for each topic and file."""

    def search(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found: dict[tuple[str | None, str], Finds] = {}
        for batch in batches:
            for key in {*zip(batch["topic"].to_pylist(), batch["file"].to_pylist(), strict=True)}:
                topic, file = key
                of_topic = batch["topic"].is_null() if topic is None else pc.equal(batch["topic"], topic)
                rows = batch.filter(pc.and_(pc.fill_null(of_topic, False), pc.equal(batch["file"], file)))
                found.setdefault(key, Finds()).add(match, topic, rows)
        parts = [(topic, file, each.found()) for (topic, file), each in found.items()]
        parts = [part for part in parts if part[2].rows or part[2].not_searched]
        yield pa.RecordBatch.from_pydict(
            {
                "topic": pa.array([topic for topic, _, _ in parts], pa.string()),
                "file": pa.array([file for _, file, _ in parts], pa.string()),
                "found": pa.array([msgspec.msgpack.encode(each) for _, _, each in parts], pa.binary()),
            }
        )

    return search


def _added(one: Found, other: Found) -> Found:
    return Found(
        one.rows + other.rows,
        one.not_searched + other.not_searched,
        one.physical_offsets + other.physical_offsets,
        one.spans + other.spans,
    )


def _file(path: str, topic: str | None, rows: int) -> ArchivedFile:
    return ArchivedFile(path, "", topic, None, rows, 0, 0, 0, ())
