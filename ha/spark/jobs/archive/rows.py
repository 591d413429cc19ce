"""Reads rows of archived Parquet files on an executor, in the form that LogReader returns. Uses no Spark job.

A merge may replace files between planning and reading. A part of an archive is therefore given by physical offsets of
one topic and day. The files with these records are looked up in the manifest when the part is read, and again if one of
them is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ha.arrow.plain import plain_body
from ha.arrow.properties import PropertyTable
from ha.arrow.read_options import ReadOptions
from ha.arrow.schema import COLUMNS
from ha.errors import ArchiveDamaged, CorruptLog, OptionError
from ha.protocol.codes import SysFlag
from ha.spark.jobs.archive.files import RAW_PROPERTIES, reading, row_batches
from ha.spark.jobs.archive.manifest import ArchivedFile, Manifest
from ha.spark.jobs.archive.read import steady_state

_GIVEN = ("topic", "brokerName")
"""Columns that are the same in all rows of a topic of a broker"""


class FileRange(msgspec.Struct, frozen=True):
    """Rows of one topic and day at physical offsets [begin, end), limited to the queue offsets in `offsets`."""

    archive: str
    broker_name: str
    """Name of the broker in the archive"""
    shown_broker: str
    """Name of the broker in the returned rows"""
    topic: str
    date: date | None
    begin: int
    end: int
    offsets: dict[int, tuple[int, int]]
    """queue id -> queue offsets [begin, end)"""

    @classmethod
    def of(
        cls, archive: Path, broker_name: str, shown_broker: str, file: ArchivedFile, offsets: dict[int, tuple[int, int]]
    ) -> FileRange:
        """Returns the range of the rows of `file` that have queue offsets in `offsets`."""
        begin, end = file.physical_begin, file.physical_end
        return cls(str(archive), broker_name, shown_broker, file.topic or "", file.date, begin, end, offsets)


def read_files(part: FileRange, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Yields the rows of `part` with `options.columns`, in physical order. `options.where` is not applied.

    Raises OptionError for a column that the archive lacks, or if decompression requires a package that is not
    installed; ArchiveDamaged for a missing or damaged file; CorruptLog for a damaged record with `on_damage="fail"`.
    Also raises the errors of `steady_state`.
    """
    manifest = Manifest(Path(part.archive), part.broker_name)
    at = part.begin
    missing = -1
    while at < part.end:
        state = steady_state(manifest)
        for file in _files_of(state.files, part, at):
            try:
                with reading(manifest.archive, file.path):
                    parquet = pq.ParquetFile(manifest.archive / file.path)
            except FileNotFoundError:
                if state.sequence == missing:
                    raise ArchiveDamaged(manifest.archive, f"{file.path} is missing") from None
                missing = state.sequence  # a merge may have replaced it
                break
            with reading(manifest.archive, file.path), parquet:
                yield from _read_file(parquet, part, at, options)
            at = file.physical_end
        else:
            return


def _files_of(files: Mapping[str, ArchivedFile], part: FileRange, at: int) -> list[ArchivedFile]:
    found = [
        file
        for file in files.values()
        if file.topic == part.topic
        and file.date == part.date
        and file.physical_end > at
        and file.physical_begin < part.end
    ]
    return sorted(found, key=lambda file: file.physical_begin)


def _read_file(parquet: pq.ParquetFile, part: FileRange, at: int, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    needed = _needed(parquet, options)
    low = min(begin for begin, _ in part.offsets.values())
    high = max(end for _, end in part.offsets.values())
    bounds = {"physicalOffset": (at, part.end), "queueOffset": (low, high)}
    groups = [number for number in range(parquet.num_row_groups) if _overlaps(parquet, number, bounds)]
    for batch in row_batches(parquet, groups, needed):
        chosen = batch.filter(pa.array(_chosen(batch, part, at)))
        if options.on_damage != "report":
            damaged = chosen.filter(pc.invert(chosen["crcOk"]))
            if damaged.num_rows and options.on_damage == "fail":
                place = damaged["physicalOffset"][0].as_py()
                raise CorruptLog(Path(part.archive), place, f"the archived record of {part.topic} is damaged")
            chosen = chosen.filter(chosen["crcOk"])
        if chosen.num_rows:
            yield from _slices(_shaped(chosen, part, options), options.batch_rows)


def _needed(parquet: pq.ParquetFile, options: ReadOptions) -> list[str]:
    there = parquet.schema_arrow.names
    needed = {"queueId", "queueOffset", "physicalOffset", "crcOk"}
    for name in options.columns:
        if name == "properties":
            needed |= {"propertiesString", RAW_PROPERTIES}
        elif name == "body":
            needed |= {"body", "sysFlag"}
        elif name not in _GIVEN:
            if name not in there:
                known = [column for column in COLUMNS if column in (*there, *_GIVEN, "properties")]
                raise OptionError("columns", f"the archive has no column {name}", ", ".join(known))
            needed.add(name)
    return [name for name in there if name in needed]


def _overlaps(parquet: pq.ParquetFile, number: int, bounds: Mapping[str, tuple[int, int]]) -> bool:
    group = parquet.metadata.row_group(number)
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema in bounds and column.is_stats_set and column.statistics.has_min_max:
            begin, end = bounds[column.path_in_schema]
            if column.statistics.max < begin or column.statistics.min >= end:
                return False
    return True


def _chosen(batch: pa.RecordBatch, part: FileRange, at: int) -> npt.NDArray[np.bool_]:
    """Returns which rows are in the part, from physical offset `at` on. A damaged record without a queue offset is in
    no part."""
    places = batch["physicalOffset"].to_numpy(zero_copy_only=False)
    queue_ids = pc.fill_null(batch["queueId"], -1).to_numpy(zero_copy_only=False)
    offsets = pc.fill_null(batch["queueOffset"], -1).to_numpy(zero_copy_only=False)
    chosen = np.zeros(batch.num_rows, np.bool_)
    for queue_id, (begin, end) in part.offsets.items():
        chosen |= (queue_ids == queue_id) & (offsets >= begin) & (offsets < end)
    chosen &= (places >= at) & (places < part.end)
    return chosen


def _shaped(batch: pa.RecordBatch, part: FileRange, options: ReadOptions) -> pa.RecordBatch:
    arrays = []
    for name in options.columns:
        if name == "topic":
            array = pa.repeat(pa.scalar(part.topic), batch.num_rows)
        elif name == "brokerName":
            array = pa.repeat(pa.scalar(part.shown_broker), batch.num_rows)
        elif name == "properties":
            array = _properties(batch)
        elif name == "body" and options.decompress:
            array = _plain_bodies(batch, options.message_size_max)
        else:
            array = batch[name]
        arrays.append(array.cast(COLUMNS[name]))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(name, COLUMNS[name]) for name in options.columns]))


def _properties(batch: pa.RecordBatch) -> pa.Array:
    strings = pc.coalesce(batch[RAW_PROPERTIES], batch["propertiesString"].cast(pa.binary()))
    maps = PropertyTable(pc.fill_null(strings, b""), has_maps=True).maps()
    rows = pc.if_else(strings.is_valid(), pa.array(range(len(strings)), pa.int64()), None)
    return maps.take(rows)


def _plain_bodies(batch: pa.RecordBatch, size_max: int) -> pa.Array:
    """Returns the bodies, decompressed; null for one that can't be decompressed to at most `size_max` bytes. Raises
    OptionError if a required package is not installed."""
    flags = pc.fill_null(batch["sysFlag"], 0).to_numpy(zero_copy_only=False)
    compressed = np.flatnonzero(flags & SysFlag.COMPRESSED)
    if not len(compressed):
        return batch["body"]
    bodies = batch["body"].to_pylist()
    for row in compressed.tolist():
        bodies[row] = plain_body(bodies[row], int(flags[row]), size_max)
    return pa.array(bodies, pa.binary())


def _slices(batch: pa.RecordBatch, rows_max: int) -> Iterator[pa.RecordBatch]:
    for first in range(0, batch.num_rows, rows_max):
        yield batch.slice(first, rows_max)
