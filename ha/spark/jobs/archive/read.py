"""Reads an archive as a table: the files in its manifests, with the right types.

If the archive's format is parquet, `spark.read.parquet(archive)` works as well, with two differences: Spark guesses the
type of a partition column (topics that all look like numbers become numbers), and a reader may see a commit that is
being applied (see `manifest.py`). With the formats delta and iceberg, it also reads files that a merge or an erasure
has replaced, so it returns some rows twice, and erased rows.
"""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from ha.errors import ArchiveConflict, ArchiveDamaged, OptionError
from ha.spark.jobs.archive.files import EXTRA_COLUMNS, REQUIRED_COLUMNS, archive_schema
from ha.spark.jobs.archive.manifest import Manifest, State, brokers

_APPLY_WAIT_S = 10.0
_LOOK_AGAIN_S = 0.05
PARTITION_FIELDS = (pa.field("topic", pa.string()), pa.field("date", pa.date32()))


def archive_states(archive: Path) -> list[State]:
    """Returns the last state of each broker's archive in which all files are in place, as `steady_state` does.

    Raises OptionError if there is no archive, or one of an unsupported version; ArchiveDamaged; ArchiveConflict if a
    merge or erasure in progress does not end within _APPLY_WAIT_S.
    """
    names = brokers(archive)
    if not names:
        raise OptionError("archive", f"{archive} holds no archive", "a directory that `archive` has written")
    return [steady_state(Manifest(archive, name)) for name in names]


def archive_schema_of(states: list[State]) -> pa.Schema:
    """Returns the columns of the table: topic, date, and those of all brokers' files."""
    scopes = [state.scope for state in states if state.scope is not None]
    schemas = [archive_schema(scope.columns, scope.body_columns) for scope in scopes]
    return pa.unify_schemas(
        [pa.schema(PARTITION_FIELDS), *(schemas or [archive_schema((*REQUIRED_COLUMNS, *EXTRA_COLUMNS))])]
    )


def read_archive(spark: SparkSession, archive: Path) -> DataFrame:
    """Returns the rows of the archive at `archive`, of all brokers. Errors as in `archive_states`."""
    return read_states(spark, archive, archive_states(archive))


def read_states(spark: SparkSession, archive: Path, states: list[State]) -> DataFrame:
    """Returns the rows of the files in `states`, the states of brokers in the archive at `archive`."""
    schema: StructType = from_arrow_schema(archive_schema_of(states))
    files = [str(archive / path) for state in states for path in state.files]
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).option("basePath", str(archive)).parquet(*files)


def steady_state(manifest: Manifest) -> State:
    """Returns the last state whose files are all in place, after waiting for a merge or erasure in progress.

    If its process was killed, the merge or erasure is finished here. Errors as in `archive_states`.
    """
    give_up = time.monotonic() + _APPLY_WAIT_S
    while True:
        commit = manifest.unapplied()
        if commit is None or not commit.removed:
            # A commit in progress only adds files, which are not in the returned state yet.
            return manifest.state(applied_only=True)
        try:
            with manifest.locked():
                return manifest.recover()
        except ArchiveConflict:
            if time.monotonic() > give_up:
                raise
        except OSError as error:
            reason = f"a merge was interrupted, and finishing it failed: {error}; run archive again"
            raise ArchiveDamaged(manifest.archive, reason) from None
        time.sleep(_LOOK_AGAIN_S)
