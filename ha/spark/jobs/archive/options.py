"""Defines and checks the options of `archive`, and defines its result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from ha.arrow import COLUMNS
from ha.errors import OptionError
from ha.spark.jobs.archive.body_columns import body_fields
from ha.spark.jobs.archive.body_formats import BodyFormat, body_format
from ha.spark.jobs.archive.files import EXTRA_COLUMNS, RAW_PROPERTIES, REQUIRED_COLUMNS
from ha.spark.jobs.archive.manifest import TABLE_IN_FOLDER, BodyColumns, Hole

EXIT_INCOMPLETE = 3
_OWN_NAMES = {name.lower(): name for name in (*COLUMNS, RAW_PROPERTIES, "date")}
_COLUMN_NAME = re.compile(r"[^\s,;{}()=.`\"]+")
"""Matches names that Parquet, Delta and Iceberg all accept"""


class ArchiveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an archive. Sizes in bytes."""

    path: str
    """The store directory"""
    archive: str
    """The archive: a local path or file://"""
    broker_name: str | None = None
    """Name of the broker in the archive; default: the name that the store states, else the directory's. An archive that
    already has the log under the directory's name keeps that name"""
    format: Literal["parquet", "delta", "iceberg"] = "parquet"
    iceberg_table: str | None = None
    """`catalog.namespace.table` of PyIceberg's configuration; None: the archive's folder is the table"""
    topics: tuple[str, ...] | None = None
    """Topics to archive; None: all, including the broker's own (RMQ_SYS_…, SCHEDULE_TOPIC_XXXX), but not the commits of
    Spark's sinks (halog-sink-commits)"""
    extra_columns: tuple[str, ...] = EXTRA_COLUMNS
    """Columns in addition to those needed to restore a message"""
    columns_from: Literal["json", "avro", "protobuf"] | None = None
    """Format of bodies from which columns are decoded; avro requires the extra halog[avro]"""
    schemas: Mapping[str, str | tuple[bytes, str]] = {}
    """With columns_from: topic -> schema of its bodies, whose fields become columns. json: Spark's DDL or JSON; avro:
    the JSON of a record; protobuf: (descriptor set, full name of the message)"""
    target_file_bytes: int = 256 << 20
    """Compressed size at which a file is closed"""
    range_bytes: int = 1 << 30
    """Maximum bytes of log per task"""
    row_group_bytes: int = 64 << 20
    """Size of a row group in memory"""
    buffer_bytes: int = 192 << 20
    """Maximum size of the rows that a task holds before it writes them"""
    compression_level: int = 3
    """Level of zstd, -7 to 22"""
    compact_files_min: int = 4
    """Minimum number of neighbouring small files to merge, 2 or more; 0: never merge"""
    on_damage: Literal["report", "skip", "fail"] = "report"
    """report: a row with crcOk=false and null for unreadable fields; skip: no row; fail: CorruptLog"""
    fail_on_data_loss: bool = True
    """Raise RecordsGone for records deleted before they were archived, instead of recording a hole in the manifest"""
    every_s: float | None = None
    """Interval in seconds at which new records are archived until the job is stopped; None: run once"""
    metrics_file: str | None = None
    """File of metrics for the textfile collector of Prometheus' node exporter, rewritten after each commit and each
    check for new records"""


class ArchiveResult(msgspec.Struct, kw_only=True):
    """The result of one run. The broker's archive covers physical offsets [covered_begin, covered_end) of the log,
    which ended at `log_end` when the last pass began (all in bytes)."""

    archive: str
    broker_name: str
    rows: int = 0
    """Number of rows archived by this run"""
    log_bytes: int = 0
    """Number of log bytes read by this run"""
    files: int = 0
    file_bytes: int = 0
    commits: int = 0
    damaged: int = 0
    holes: list[Hole] = []
    merged_files: int = 0
    """Number of small files replaced by larger ones"""
    undecoded: dict[str, int] = {}
    """Topic -> number of bodies archived by this run that could not be decoded, so that their columns are null"""
    covered_begin: int = 0
    covered_end: int = 0
    log_end: int = 0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0, or 3 if this run found damaged records or holes."""
        return EXIT_INCOMPLETE if self.damaged or self.holes else 0


def table_name(options: ArchiveOptions) -> str:
    """Returns the value of `Scope.table`: the name of the Delta or Iceberg table, or "" with Parquet."""
    return "" if options.format == "parquet" else options.iceberg_table or TABLE_IN_FOLDER


def body_columns(options: ArchiveOptions) -> BodyColumns | None:
    """Returns the columns that are decoded from bodies; None if `options` has no schemas.

    Raises OptionError for an invalid schema or column name, for a topic that is not archived, if the topics' columns
    don't fit into one table, if a required package is not installed, and if only one of `columns_from` and `schemas` is
    given.
    """
    if options.columns_from is None and not options.schemas:
        return None
    if options.columns_from is None or not options.schemas:
        raise OptionError("columns_from, schemas", "there is only one of them", "both, or none")
    for topic in options.schemas:
        if options.topics is not None and topic not in options.topics:
            raise OptionError("schemas", f"the topic {topic} is not archived", ", ".join(options.topics))
    form = body_format(options.columns_from)
    schemas = {topic: _body_schema(form, topic, given) for topic, given in sorted(options.schemas.items())}
    found = BodyColumns(options.columns_from, schemas)
    body_fields([found])  # checks them together
    return found


def _body_schema(form: BodyFormat, topic: str, given: str | tuple[bytes, str]) -> dict[str, Any]:
    try:
        stored = form.stored_schema(given)
        schema = from_arrow_schema(pa.schema(list(form.columns(stored))))
    except ValueError as error:
        raise OptionError("schemas", f"the schema of {topic} can't be used: {error}", form.ACCEPTED) from None
    _check_names(topic, schema)
    for name in schema.names:
        if name.lower() in _OWN_NAMES:
            own = _OWN_NAMES[name.lower()]
            raise OptionError("schemas", f"{name} of topic {topic} would clash with the column {own}", "other names")
    return stored


def _check_names(topic: str, kind: DataType) -> None:
    """Raises OptionError if a struct within `kind` has a field name that a table can't have, or has a name twice,
    regardless of case."""
    if isinstance(kind, ArrayType):
        _check_names(topic, kind.elementType)
    if isinstance(kind, MapType):
        _check_names(topic, kind.valueType)
    if isinstance(kind, StructType):
        if len({name.lower() for name in kind.names}) < len(kind.names):
            raise OptionError("schemas", f"a name is there twice in {topic}: {', '.join(kind.names)}", "each name once")
        for field in kind.fields:
            if not _COLUMN_NAME.fullmatch(field.name):
                raise OptionError("schemas", f"a column can't have the name {field.name!r}", "a name without , ;{}()=.")
            _check_names(topic, field.dataType)


def archive_path(archive: str) -> Path:
    """Returns the directory that the option `archive` names. Raises OptionError if it is "" or a URI of another scheme
    than file."""
    if archive.startswith("file:"):
        archive = archive.removeprefix("file:")
        archive = "/" + archive.lstrip("/")
    if "://" in archive or not archive:
        raise OptionError("archive", f"{archive!r} is not on a file system that archive can write", "a path, file://…")
    return Path(archive).absolute()


def check(options: ArchiveOptions) -> None:
    """Raises OptionError for the first invalid value. `body_columns` checks `columns_from` and `schemas`."""
    for name in ("target_file_bytes", "range_bytes", "row_group_bytes", "buffer_bytes"):
        if getattr(options, name) < 1:
            raise OptionError(name, f"{getattr(options, name)} bytes", "1 or more")
    if not -7 <= options.compression_level <= 22:
        raise OptionError("compression_level", f"zstd has no level {options.compression_level}", "-7 … 22")
    if options.every_s is not None and options.every_s <= 0:
        raise OptionError("every_s", f"{options.every_s} s", "more than 0, or None for once")
    if options.iceberg_table is not None and options.format != "iceberg":
        raise OptionError("iceberg_table", f"the format is {options.format}", "iceberg_table with format iceberg")
    if options.compact_files_min < 0 or options.compact_files_min == 1:
        raise OptionError("compact_files_min", f"{options.compact_files_min} files", "0 (never merge), or 2 or more")
    for column in options.extra_columns:
        if column not in COLUMNS or column == "topic" or column in REQUIRED_COLUMNS:
            others = [name for name in COLUMNS if name != "topic" and name not in REQUIRED_COLUMNS]
            raise OptionError("extra_columns", f"{column!r} is unknown or always included", ", ".join(others))
