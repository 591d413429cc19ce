"""Reading an archive as a table: what its manifests name, with the right types.

`spark.read.parquet(archive)` works too, with two differences: Spark guesses the type of a partition column (topics
that all look like numbers become numbers), and a reader may meet a commit half way (see archive_manifest).
"""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ha.errors import ArchiveConflict, ArchiveDamaged, OptionError
from ha.spark.jobs.archive_files import archive_schema
from ha.spark.jobs.archive_manifest import ArchivedFile, Manifest, State, brokers

_APPLY_WAIT_S = 10.0
_LOOK_AGAIN_S = 0.05
PARTITION_FIELDS = (pa.field("topic", pa.string()), pa.field("date", pa.date32()))


def archive_states(archive: Path) -> list[State]:
    """What each broker's manifest says, at one moment each. What a killed archiver left half done is finished.

    Raises OptionError if there is no archive, ArchiveDamaged, and ArchiveConflict if a merge does not end.
    """
    names = brokers(archive)
    if not names:
        raise OptionError("archive", f"{archive} holds no archive", "a directory that `archive` has written")
    return [_steady_state(Manifest(archive, name)) for name in names]


def archive_schema_of(states: list[State]) -> pa.Schema:
    """The columns of the table: topic, date, and those of all brokers' files."""
    schemas = [pa.schema(PARTITION_FIELDS)]
    schemas.extend(archive_schema(state.scope.columns) for state in states if state.scope is not None)
    return pa.unify_schemas(schemas)


def read_archive(spark: SparkSession, archive: Path) -> DataFrame:
    """The rows of the Parquet or Delta archive at `archive`, of all brokers. Errors as of `archive_states`."""
    states = archive_states(archive)
    if any(state.scope is not None and state.scope.format == "delta" for state in states):
        return spark.read.format("delta").load(str(archive))
    schema: StructType = from_arrow_schema(archive_schema_of(states))
    files = [str(archive / path) for state in states for path in state.files]
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).option("basePath", str(archive)).parquet(*files)


def archived_files(archive: Path) -> list[ArchivedFile]:
    """All files of the Parquet archive at `archive`, in physical order per broker."""
    return [
        file
        for state in archive_states(archive)
        for file in sorted(state.files.values(), key=lambda each: each.physical_begin)
    ]


def _steady_state(manifest: Manifest) -> State:
    """The last state all of whose files are in place."""
    give_up = time.monotonic() + _APPLY_WAIT_S
    while True:
        commit = manifest.unapplied()
        if commit is None or not commit.removed:
            # New files of a commit under way are just not seen yet.
            return manifest.state(applied_only=True)
        try:
            with manifest.locked():
                return manifest.recover()
        except ArchiveConflict:
            if time.monotonic() > give_up:
                raise
        except OSError as error:
            reason = f"a merge was left half done, and finishing it failed: {error}; run archive once more"
            raise ArchiveDamaged(manifest.archive, reason) from None
        time.sleep(_LOOK_AGAIN_S)
