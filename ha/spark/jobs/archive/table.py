"""Keeps the Delta or Iceberg table of an archive up to date: a second list of the archive's files, for other tools.

halog itself reads only the manifest. After each commit of the manifest, `follow` compares the broker's files in the
manifest with those in the table, and commits the differences to the table, with the covered offsets. Because it
compares both lists, the next run repairs the table after a kill between the two commits, a lost catalog or a deleted
table.

Files that a commit removes stay in place until no version of the table has them: until its old snapshots expire
(Iceberg), or until the user runs VACUUM (Delta).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pyspark.sql import SparkSession

from ha.errors import ArchiveConflict, ArchiveDamaged
from ha.spark.jobs.archive.manifest import ArchivedFile, Scope, State, escape_path_name

_COMMITS_MAX = 4
"""Number of attempts to commit to a table that others, such as archivers of other brokers, change at the same time"""
_FILE = re.compile(r"topic=[^/]+/date=[^/]+/part-(.+)-\d{20}-\d+-\d+-\d+\.zstd\.parquet")
"""Matches the path of a file that `archive` wrote; group 1 is the escaped name of its broker."""


class ArchiveTable(Protocol):
    """A table in the folder of an archive, which several brokers may share."""

    def files(self) -> dict[str, int]:
        """Returns path -> row count of all its files. Paths are relative to the archive; files elsewhere have a URI."""

    def sequence(self, broker_name: str) -> int:
        """Returns the number of the broker's last commit that the table has; 0 if it has none."""

    def commit(self, state: State, added: Sequence[ArchivedFile], removed: Sequence[str], *, is_merge: bool) -> None:
        """Adds and removes files of the broker of `state`, and records the offsets that its archive covers, atomically.

        `is_merge`: the added files have the rows of the removed ones. Raises ArchiveConflict if concurrent commits of
        other writers prevent this one.
        """

    def expire(self) -> None:
        """Deletes versions of the table that are too old, with the files that only they use. Does nothing for Delta."""


def open_table(spark: SparkSession, archive: Path, scope: Scope) -> ArchiveTable | None:
    """Returns the table of an archive, and creates it if necessary (Delta: the first commit does); None for Parquet.
    Raises OptionError if a required library or the catalog is missing, or if the table is not at the archive's path."""
    if scope.format == "delta":
        from ha.spark.jobs.archive.delta import DeltaTable

        return DeltaTable(spark, archive)
    if scope.format == "iceberg":
        from ha.spark.jobs.archive.iceberg import open_iceberg_table

        return open_iceberg_table(archive, scope.table)
    return None


def follow(table: ArchiveTable, archive: Path, state: State) -> None:
    """Makes the broker's files in `table` those of `state`, in one commit if anything differs. After a conflict with
    another writer, compares them again. Raises ArchiveDamaged if another program added a file to the table;
    ArchiveConflict if _COMMITS_MAX commits have failed as in `ArchiveTable.commit`."""
    for left in reversed(range(_COMMITS_MAX)):
        try:
            _follow(table, archive, state)
        except ArchiveConflict:
            if not left:
                raise
        else:
            return


def _follow(table: ArchiveTable, archive: Path, state: State) -> None:
    held: dict[str, int] = {}
    for path, rows in table.files().items():
        name = _FILE.fullmatch(path)
        if name is None:
            raise ArchiveDamaged(archive, f"its table has {path}, which another program wrote; only halog may")
        if name[1] == escape_path_name(state.broker_name):
            held[path] = rows
    added = [file for path, file in state.files.items() if path not in held]
    removed = sorted(held.keys() - state.files.keys())
    if added or removed or table.sequence(state.broker_name) != state.sequence:
        is_merge = bool(removed) and sum(file.rows for file in added) == sum(held[path] for path in removed)
        table.commit(state, added, removed, is_merge=is_merge)
