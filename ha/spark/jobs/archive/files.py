"""Writes archive files on an executor: from one range of the log, or from files to be merged. Uses no Spark.

Rows are split by topic and day (UTC, of storeTimestamp) and written in physical order, so each file holds each of its
queues in order. The process that reads the log writes the files with pyarrow, so bodies never pass through the JVM. A
file is closed at the target size; its row groups are about `row_group_bytes` of Arrow memory. All unfinished files
together buffer at most `buffer_bytes`, plus one batch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ha.arrow import COLUMNS, LogReader, ReadOptions, RowFilter
from ha.errors import ArchiveDamaged
from ha.protocol.compression import BODY_SIZE_MAX
from ha.protocol.record import decode_record
from ha.spark.jobs.archive.body_columns import BodyDecoder, body_fields
from ha.spark.jobs.archive.manifest import (
    FOLDER,
    ArchivedFile,
    BodyColumns,
    LastRecord,
    QueueSpan,
    escape_path_name,
    partition_path,
)

REQUIRED_COLUMNS = (
    "brokerName",
    "queueId",
    "queueOffset",
    "physicalOffset",
    "storeSize",
    "body",
    "bodyCRC",
    "propertiesString",
    "bornTimestamp",
    "storeTimestamp",
    "bornHost",
    "storeHost",
    "sysFlag",
    "flag",
    "reconsumeTimes",
    "preparedTransactionOffset",
    "crcOk",
)
"""Columns that are needed to restore a record, in addition to the topic, which is in the path."""
EXTRA_COLUMNS = ("tags", "keys", "uniqKey")
"""Columns derived from the others, for queries."""
RAW_PROPERTIES = "propertiesRaw"
"""Binary column with the property string if it is not UTF-8 (`propertiesString` then contains U+FFFD), else null."""

_NO_STATISTICS = ("body", "propertiesString", RAW_PROPERTIES, "uniqKey")
_DICTIONARY = ("brokerName", "queueId", "storeHost", "bornHost", "sysFlag", "flag", "reconsumeTimes", "tags", "crcOk")
_OPEN_FILES_MAX = 64
_Partition: TypeAlias = tuple[str | None, date | None]
"""Topic and day (UTC) of rows; None if unknown because their record is damaged"""
_BATCH_BYTES = 16 << 20
_EPOCH = date(1970, 1, 1)
_US_PER_DAY = 86_400_000_000
_DAY_MIN, _DAY_MAX = (date.min - _EPOCH).days, (date.max - _EPOCH).days
_NO_DAY = np.iinfo(np.int64).min
_REPLACEMENT = "\ufffd"


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for writing files. Sizes in bytes; `target_file_bytes` is compressed, the other two are in memory."""

    target_file_bytes: int = 256 << 20
    row_group_bytes: int = 64 << 20
    buffer_bytes: int = 192 << 20
    compression_level: int = 3


class RangeTask(msgspec.Struct, frozen=True, kw_only=True):
    """Archive the records of the log at `path` whose first byte is in physical offsets [begin, end)."""

    archive: str
    path: str
    broker_name: str
    begin: int
    end: int
    run: str
    """Name of this attempt's folder in staging"""
    sequence: int
    """Number of the commit that will add the files to the archive"""
    number: int
    """Number of this task within the commit, from 0"""
    topics: tuple[str, ...] | None
    left_out: tuple[str, ...]
    columns: tuple[str, ...]
    body_columns: BodyColumns | None
    on_damage: str
    files: FileOptions


class MergeTask(msgspec.Struct, frozen=True, kw_only=True):
    """Write the rows of `sources`, all of one partition and in physical order, into as few files as possible."""

    archive: str
    broker_name: str
    run: str
    sequence: int
    number: int
    sources: tuple[ArchivedFile, ...]
    files: FileOptions


class Written(msgspec.Struct, frozen=True):
    """The files that a task wrote, and its row counts."""

    files: tuple[ArchivedFile, ...]
    rows: int
    damaged: int
    last: LastRecord | None = None
    undecoded: dict[str, int] = {}
    """Topic -> number of bodies whose columns could not be decoded"""


def archive_schema(columns: Iterable[str], body_columns: BodyColumns | None = None) -> pa.Schema:
    """Returns the schema of a file: `columns` in this order, RAW_PROPERTIES, and the decoded columns of all topics."""
    fields = [pa.field(name, COLUMNS[name]) for name in columns]
    decoded = [] if body_columns is None else body_fields([body_columns])
    return pa.schema([*fields, pa.field(RAW_PROPERTIES, pa.binary()), *decoded])


def read_task(task: RangeTask) -> Iterator[pa.RecordBatch]:
    """Yields the rows of `task` with the topic, the columns in `task.columns`, and RAW_PROPERTIES.

    Raises RecordsGone if retention has deleted a part of the range; CorruptLog for a damaged record with `on_damage`
    "fail"; StoreUnreadable.
    """
    options = ReadOptions(
        columns=("topic", *task.columns),
        decompress=False,
        on_damage=task.on_damage,  # type: ignore[arg-type]
        fail_on_data_loss=True,
        where=RowFilter(topics=None if task.topics is None else frozenset(task.topics)),
    )
    with LogReader(task.path, broker_name=task.broker_name) as reader:
        for batch in reader.read_range(task.begin, task.end, options):
            if task.left_out:
                batch = batch.filter(pc.invert(pc.is_in(batch["topic"], pa.array(task.left_out))))
            yield batch.append_column(RAW_PROPERTIES, _raw_properties(batch, reader))


def write_range(task: RangeTask, attempt: int = 0) -> Written:
    """Writes the rows of `task` into staging. Errors as in `read_task`, and OSError; OptionError if a package that
    bodies require is not installed.

    `attempt` is part of the files' names, so that two attempts at the same task write different files.
    """
    folder = Path(task.archive, FOLDER, escape_path_name(task.broker_name), "staging", task.run)
    rows = damaged = 0
    last: LastRecord | None = None
    decoder = BodyDecoder(task.body_columns)
    undecoded: Counter[str] = Counter()
    with _Files(task, folder, archive_schema(task.columns, task.body_columns), attempt) as files:
        for batch in read_task(task):
            rows += batch.num_rows
            damaged += pc.sum(pc.invert(batch["crcOk"])).as_py() or 0
            last = _last_record(batch) or last
            for topic, day, part in split_batch(batch):
                part, failed = decoder.append_columns(topic, part.drop_columns(["topic"]), BODY_SIZE_MAX)
                undecoded[topic or ""] += failed
                files.write(topic, day, part)
        return Written(files.close(), rows, damaged, last, dict(+undecoded))


def merge_files(task: MergeTask, attempt: int = 0) -> Written:
    """Writes the rows of the task's files into staging, in the same order. Errors as in `write_files` and
    `file_batches`."""
    rows = (batch for source in task.sources for batch in file_batches(Path(task.archive), source.path))
    written = write_files(task, rows, attempt)
    expected = sum(source.rows for source in task.sources)
    assert written.rows == expected, f"merged {written.rows} rows of {expected}"
    return written


def write_files(task: MergeTask, rows: Iterable[pa.RecordBatch], attempt: int = 0) -> Written:
    """Writes `rows`, which come from the task's files, into staging. Raises ArchiveDamaged if the first file is
    damaged; OSError."""
    folder = Path(task.archive, FOLDER, escape_path_name(task.broker_name), "staging", task.run)
    first = task.sources[0]
    with reading(Path(task.archive), first.path):
        schema = pq.read_schema(Path(task.archive, first.path))
    with _Files(task, folder, schema, attempt) as files:
        for batch in rows:
            files.write(first.topic, first.date, batch)
        written = files.close()
    return Written(written, sum(file.rows for file in written), 0)


def file_batches(archive: Path, path: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yields the rows of the file at `path` in `archive`. Raises ArchiveDamaged if the file is damaged, and OSError if
    it is missing or the disk fails."""
    with reading(archive, path), pq.ParquetFile(archive / path) as parquet:
        yield from row_batches(parquet, range(parquet.num_row_groups), columns)


@contextmanager
def reading(archive: Path, path: str) -> Iterator[None]:
    """Raises ArchiveDamaged for errors in the contents of a file, which PyArrow raises as ArrowException or as OSError
    without an errno."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ArchiveDamaged(archive, f"{path}: {error}") from None


def row_batches(
    parquet: pq.ParquetFile, row_groups: Iterable[int], columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of some row groups in their order, about 16 MiB at a time."""
    for number in row_groups:
        group = parquet.metadata.row_group(number)
        rows_at_once = max(1, _BATCH_BYTES * group.num_rows // max(1, group.total_byte_size))
        yield from parquet.iter_batches(batch_size=rows_at_once, row_groups=[number], columns=columns)


def readable_statistics(column: pq.ColumnChunkMetaData) -> pq.Statistics | None:
    """Returns the statistics of a column in one row group; None if it has none, or has times outside Python's range."""
    if column.is_stats_set:
        with suppress(OverflowError):
            _ = column.statistics.min, column.statistics.max
            return column.statistics
    return None


def split_batch(batch: pa.RecordBatch) -> Iterator[tuple[str | None, date | None, pa.RecordBatch]]:
    """Yields (topic, day, rows) for each topic and day of `batch`, with the rows in their order.

    The topic is None if it is null. The day is None if the time is null or outside the years 1 to 9999. Both happen
    with damaged records.
    """
    if not batch.num_rows:
        return
    topics = batch["topic"].dictionary_encode()
    codes = pc.fill_null(topics.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    times = pc.fill_null(batch["storeTimestamp"].cast(pa.int64()), _NO_DAY).to_numpy(zero_copy_only=False)
    days = times // _US_PER_DAY
    days[(days < _DAY_MIN) | (days > _DAY_MAX)] = _NO_DAY
    groups, members = np.unique(np.stack([codes, days]), axis=1, return_inverse=True)
    order = np.argsort(members.reshape(-1), kind="stable")
    sizes = np.bincount(members.reshape(-1))
    start = 0
    for code, day, size in zip(*groups.tolist(), sizes.tolist(), strict=True):
        topic = topics.dictionary[code].as_py() if code >= 0 else None
        # A part is copied: a slice would keep the whole batch in memory for a rare topic.
        rows = batch if len(sizes) == 1 else batch.take(pa.array(order[start : start + size]))
        yield topic, None if day == _NO_DAY else _EPOCH + timedelta(day), rows
        start += size


def _raw_properties(batch: pa.RecordBatch, reader: LogReader) -> pa.Array:
    """Returns the property strings that are not UTF-8, as bytes; null for all other rows.

    These strings are rare, so they are read from the log again.
    """
    suspects = pc.match_substring(batch["propertiesString"], _REPLACEMENT)
    if not pc.any(suspects).as_py():
        return pa.nulls(batch.num_rows, pa.binary())
    raw: list[bytes | None] = [None] * batch.num_rows
    for row in np.flatnonzero(pc.fill_null(suspects, False).to_numpy(zero_copy_only=False)).tolist():
        at = batch["physicalOffset"][row].as_py()
        stored = b"".join(reader.bytes_at(at, at + batch["storeSize"][row].as_py()))
        properties = decode_record(stored, verify_crc=False).properties
        if properties.decode("utf-8", "replace").encode() != properties:
            raw[row] = properties
    return pa.array(raw, pa.binary())


def last_record(path: Path, begin: int, end: int) -> LastRecord | None:
    """Returns the last undamaged record of an archived file in physical offsets [begin, end); None if there is none.
    Raises OSError or ArrowException if the file can't be read."""
    within = (pc.field("physicalOffset") >= begin) & (pc.field("physicalOffset") < end)
    columns = ["physicalOffset", "storeSize", "bodyCRC", "storeTimestamp", "crcOk"]
    return _last_record(pq.read_table(path, columns=columns, filters=within, partitioning=None))


def _last_record(rows: pa.RecordBatch | pa.Table) -> LastRecord | None:
    """Returns the last undamaged record of `rows`, or None if there is none."""
    sound = np.flatnonzero(pc.fill_null(rows["crcOk"], False).to_numpy(zero_copy_only=False))
    if not len(sound):
        return None
    row = int(sound[-1])
    return LastRecord(
        rows["physicalOffset"][row].as_py(),
        rows["storeSize"][row].as_py(),
        rows["bodyCRC"][row].as_py(),
        rows["storeTimestamp"].cast(pa.int64())[row].as_py(),
    )


class _Files:
    """Writes the files of one task, with one unfinished file at a time for each topic and day."""

    def __init__(self, task: RangeTask | MergeTask, folder: Path, schema: pa.Schema, attempt: int) -> None:
        self._task = task
        self._folder = folder
        self._schema = schema
        self._attempt = attempt
        self._unfinished: dict[_Partition, _File] = {}
        self._open: dict[_Partition, None] = {}
        """The unfinished files of which a part is on disk, the least recently flushed first"""
        self._buffered_bytes = 0
        self._done: list[ArchivedFile] = []
        self._count = 0

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            for file in self._unfinished.values():
                stack.callback(file.abandon)

    def write(self, topic: str | None, day: date | None, rows: pa.RecordBatch) -> None:
        options = self._task.files
        partition = topic, day
        file = self._unfinished.get(partition)
        if file is None:
            file = self._unfinished[partition] = self._new()
        self._buffered_bytes += file.add(rows)
        if file.buffered_bytes >= options.row_group_bytes:
            self._flush(partition)
        while self._buffered_bytes > options.buffer_bytes:
            self._flush(max(self._unfinished, key=lambda each: self._unfinished[each].buffered_bytes))

    def close(self) -> tuple[ArchivedFile, ...]:
        """Finishes and syncs all files, and returns them."""
        for partition in list(self._unfinished):
            self._finish(partition)
        return tuple(self._done)

    def _new(self) -> _File:
        name = f"{self._task.number:05d}-{self._count:05d}-{self._attempt}.parquet"
        self._count += 1
        return _File(self._folder / name, self._schema, self._task.files.compression_level)

    def _flush(self, partition: _Partition) -> None:
        """Writes the buffered rows of a file, and finishes the file if it has the target size. If the file is not on
        disk yet, but _OPEN_FILES_MAX others are, the least recently flushed of these is finished first.

        The file of a topic with few rows is only a buffer until it is finished. So each topic gets one file, however
        many topics there are.
        """
        if partition not in self._open and len(self._open) >= _OPEN_FILES_MAX:
            self._finish(next(iter(self._open)))
        self._open.pop(partition, None)
        self._open[partition] = None
        file = self._unfinished[partition]
        self._buffered_bytes -= file.flush()
        if file.written_bytes >= self._task.files.target_file_bytes:
            self._finish(partition)

    def _finish(self, partition: _Partition) -> None:
        topic, day = partition
        task = self._task
        file = self._unfinished.pop(partition)
        self._open.pop(partition, None)
        self._buffered_bytes -= file.buffered_bytes
        size = file.finish()
        begin, end = file.physical_begin, file.physical_end
        ordinal = f"{task.sequence:08d}-{task.number:05d}-{len(self._done):05d}"
        name = f"part-{escape_path_name(task.broker_name)}-{begin:020d}-{ordinal}.zstd.parquet"
        staged = file.path.relative_to(task.archive).as_posix()
        path = f"{partition_path(topic, day)}/{name}"
        self._done.append(ArchivedFile(path, staged, topic, day, file.rows, size, begin, end, file.spans()))


class _File:
    """One Parquet file. It is created by the first flush."""

    def __init__(self, path: Path, schema: pa.Schema, compression_level: int) -> None:
        self.path = path
        self._schema = schema
        self._compression_level = compression_level
        self._sink: Any = None
        self._writer: Any = None
        self._batches: list[pa.RecordBatch] = []
        self._spans: dict[int, tuple[int, int, int]] = {}
        self.buffered_bytes = 0
        self.rows = 0
        self.physical_begin = 0
        self.physical_end = 0

    @property
    def written_bytes(self) -> int:
        """Size of the file without buffered rows. The file must be open."""
        return int(self._sink.tell())

    def add(self, rows: pa.RecordBatch) -> int:
        """Buffers `rows`, and returns their size in memory, in bytes."""
        begins = rows["physicalOffset"]
        ends = pc.add(begins, pc.fill_null(rows["storeSize"], 0).cast(pa.int64()))
        if not self.rows:
            self.physical_begin = pc.min(begins).as_py() or 0
        self.physical_end = max(self.physical_end, pc.max(ends).as_py() or 0)
        self._count_queues(rows)
        self.rows += rows.num_rows
        self._batches.append(rows)
        self.buffered_bytes += rows.nbytes
        return int(rows.nbytes)

    def flush(self) -> int:
        """Writes the buffered rows, and returns their size in memory, in bytes."""
        if self._writer is None:
            self._open()
        if self._batches:
            table = pa.Table.from_batches(self._batches, self._schema)
            self._writer.write_table(table, row_group_size=table.num_rows)
            self._batches = []
        flushed, self.buffered_bytes = self.buffered_bytes, 0
        return flushed

    def finish(self) -> int:
        """Writes the buffered rows, syncs and closes the file, and returns its size in bytes."""
        self.flush()
        self._writer.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        return self.path.stat().st_size

    def abandon(self) -> None:
        """Closes and deletes the file, if it was created."""
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self.path.unlink(missing_ok=True)

    def _open(self) -> None:
        names = self._schema.names
        self._sink = self.path.open("xb")
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression="zstd",
            compression_level=self._compression_level,
            use_dictionary=[name for name in names if name in _DICTIONARY],
            write_statistics=[name for name in names if name not in _NO_STATISTICS],
            store_schema=False,
        )

    def spans(self) -> tuple[QueueSpan, ...]:
        return tuple(QueueSpan(queue, *span) for queue, span in sorted(self._spans.items()))

    def _count_queues(self, rows: pa.RecordBatch) -> None:
        known = pa.table({"queue": rows["queueId"], "offset": rows["queueOffset"]}).drop_null()
        counted = known.group_by("queue").aggregate([("offset", "min"), ("offset", "max"), ("offset", "count")])
        for row in counted.to_pylist():
            queue = row["queue"]
            low, high, count = self._spans.get(queue, (row["offset_min"], row["offset_max"], 0))
            self._spans[queue] = (
                min(low, row["offset_min"]),
                max(high, row["offset_max"]),
                count + row["offset_count"],
            )
