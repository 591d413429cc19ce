"""Writes the Iceberg table of an archive with PyIceberg, which requires neither Spark nor a server.

The default catalog is the archive's folder itself, in the layout of Iceberg's Hadoop tables:

    archive/
      metadata/v7.metadata.json     a version of the table's metadata, numbered from 1, never changed. A writer that
                                    finds its number taken reads that version and tries again
      metadata/version-hint.text    7: the number from which readers look for the last version
      metadata/*.avro               Iceberg's lists of the files under topic=…/date=…

Table properties `halog.commit.<broker>` and `halog.covered-end.<broker>` state the last commit of each broker and the
physical offset up to which its log is archived. Properties of a snapshot are `halog.broker`, `halog.commit`,
`halog.covered-begin` and `halog.covered-end`.

The files have neither the columns topic and date, which are their partition, nor field ids, which the table's name
mapping replaces.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ha.errors import ArchiveConflict, OptionError
from ha.spark.jobs.archive.files import readable_statistics
from ha.spark.jobs.archive.manifest import TABLE_IN_FOLDER, ArchivedFile, State
from ha.spark.jobs.archive.read import archive_schema_of
from ha.spark.jobs.synced import create_file, replace_file, sync_folder, sync_path

try:
    from pyiceberg.catalog import Catalog, load_catalog
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, ValidationException
    from pyiceberg.io.pyarrow import (
        MetricModeTypes,
        MetricsMode,
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestFile
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import CommitTableResponse, StaticTable, Table, TableProperties
    from pyiceberg.table.metadata import TableMetadata, new_table_metadata
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortOrder
    from pyiceberg.table.update import AddSnapshotUpdate, TableRequirement, TableUpdate, update_table_metadata
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.typedef import EMPTY_DICT, Identifier, Properties, Record
    from pyiceberg.types import DateType, NestedField, StringType
except ModuleNotFoundError as error:
    raise OptionError("format", f"PyIceberg is missing ({error})", "pip install 'halog[iceberg]'") from None

_SNAPSHOT_AGE_MS = 3_600_000
"""Maximum age of snapshots of a new table, in ms. Each commit writes a list of all snapshots, about 0.7 kB each."""
_EPOCH = date(1970, 1, 1)
_SCHEMA = Schema(NestedField(1, "topic", StringType()), NestedField(2, "date", DateType()))
"""Schema of a new table; the first commit adds the columns of the files, and later commits add new columns."""
_PARTITIONS = PartitionSpec(
    PartitionField(source_id=1, field_id=1000, transform=IdentityTransform(), name="topic"),
    PartitionField(source_id=2, field_id=1001, transform=IdentityTransform(), name="date"),
)


def open_iceberg_table(archive: Path, name: str) -> IcebergTable:
    """Opens the table `name`, which is TABLE_IN_FOLDER or `catalog.namespace.table`, or creates it.

    Raises OptionError if the name has another form, if there is no such catalog, or if the table is not at the
    archive's path.
    """
    if name == TABLE_IN_FOLDER:
        catalog: Catalog = FolderCatalog(archive)
        identifier: Identifier = ("archive",)
    else:
        catalog_name, *rest = name.split(".")
        if len(rest) < 2:
            raise OptionError("iceberg_table", f"{name!r} has no namespace or no catalog", "catalog.namespace.table")
        try:
            catalog = load_catalog(catalog_name)
        except ValueError as error:
            accepted = "a catalog in .pyiceberg.yaml or PYICEBERG_CATALOG__…"
            raise OptionError("iceberg_table", f"{catalog_name}: {error}", accepted) from None
        identifier = tuple(rest)
        catalog.create_namespace_if_not_exists(identifier[:-1])
    # The path is not percent-encoded as in a URI, because readers do not decode it.
    location = f"file://{archive}"
    try:
        table = catalog.load_table(identifier)
    except NoSuchTableError:
        table = catalog.create_table(identifier, _SCHEMA, location, _PARTITIONS, properties=_properties())
    if table.location() != location:
        raise OptionError("iceberg_table", f"{name} is a table at {table.location()}", f"one at {location}")
    return IcebergTable(archive, table)


def _properties() -> dict[str, str]:
    return {
        TableProperties.DEFAULT_NAME_MAPPING: _SCHEMA.name_mapping.model_dump_json(),
        TableProperties.MAX_SNAPSHOT_AGE_MS: str(_SNAPSHOT_AGE_MS),
        TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
    }


class IcebergTable:
    """The Iceberg table of an archive: implements `ArchiveTable`."""

    def __init__(self, archive: Path, table: Table) -> None:
        self._archive = archive
        self._table = table
        self._seen: int | None = None
        self._files: dict[str, DataFile] = {}

    def files(self) -> dict[str, int]:
        """Returns the row counts of the table's files; see ArchiveTable."""
        self._table.refresh()
        snapshot = self._table.current_snapshot()
        if snapshot is None:
            self._seen, self._files = None, {}
        elif snapshot.snapshot_id != self._seen:
            prefix = f"{self._table.location()}/"
            files = self._data_files(snapshot.manifests(self._table.io))
            self._files = {file.file_path.removeprefix(prefix): file for file in files}
            self._seen = snapshot.snapshot_id
        return {path: file.record_count for path, file in self._files.items()}

    def sequence(self, broker_name: str) -> int:
        """Returns the number of the broker's last commit to the table; see ArchiveTable."""
        return int(self._table.properties.get(f"halog.commit.{broker_name}", 0))

    def commit(self, state: State, added: Sequence[ArchivedFile], removed: Sequence[str], *, is_merge: bool) -> None:
        """Commits a change of files to the table; see ArchiveTable.

        A merge is an overwrite snapshot, because PyIceberg can't write snapshots with the operation "replace". After a
        commit of another writer, PyIceberg repeats an append, but not an overwrite (ValidationException).
        """
        try:
            self._commit(state, added, removed)
        except (CommitFailedException, ValidationException) as error:
            raise ArchiveConflict(self._archive, f"another writer changed its Iceberg table: {error}") from None

    def _commit(self, state: State, added: Sequence[ArchivedFile], removed: Sequence[str]) -> None:
        offsets = {"commit": state.sequence, "covered-end": state.covered_end or 0}
        properties = {f"halog.{name}.{state.broker_name}": str(value) for name, value in offsets.items()}
        of_snapshot = {"broker": state.broker_name, "covered-begin": state.covered_begin or 0, **offsets}
        with self._table.transaction() as transaction:
            with transaction.update_schema() as schema:
                schema.union_by_name(archive_schema_of([state]))
            transaction.set_properties(properties)
            snapshot = transaction.update_snapshot({f"halog.{name}": str(value) for name, value in of_snapshot.items()})
            files = self._new_files(added, transaction.table_metadata)
            with snapshot.overwrite() if removed else snapshot.merge_append() as update:
                for path in removed:
                    update.delete_data_file(self._files[path])
                for file in files.values():
                    update.append_data_file(file)
        made = self._table.current_snapshot()
        if made is not None and made.parent_snapshot_id == self._seen:
            self._files = {path: file for path, file in self._files.items() if path not in removed} | files
            self._seen = made.snapshot_id

    def _new_files(self, added: Sequence[ArchivedFile], metadata: TableMetadata) -> dict[str, DataFile]:
        schema = metadata.schema()
        plan, ids = compute_statistics_plan(schema, metadata.properties), parquet_path_to_id_mapping(schema)
        found = {}
        for file in added:
            footer = pq.read_metadata(self._archive / file.path)
            counted = plan | {
                ids[path]: replace(plan[ids[path]], mode=MetricsMode(MetricModeTypes.NONE))
                for path in _without_statistics(footer)
            }
            made = DataFile.from_args(
                content=DataFileContent.DATA,
                file_path=f"{metadata.location}/{file.path}",
                file_format=FileFormat.PARQUET,
                partition=Record(file.topic, None if file.date is None else (file.date - _EPOCH).days),
                file_size_in_bytes=file.bytes,
                sort_order_id=None,
                equality_ids=None,
                key_metadata=None,
                **data_file_statistics_from_parquet_metadata(footer, counted, ids).to_serialized_dict(),
            )
            made.spec_id = metadata.default_spec_id
            found[file.path] = made
        return found

    def expire(self) -> None:
        """Deletes snapshots older than the table's `history.expire.max-snapshot-age-ms` that no branch or tag names.

        Files are deleted before the snapshots that list them, so after a kill in between, or if another writer commits
        at the same moment, the next call deletes the rest.
        """
        table = self._table.refresh()
        age_ms = int(table.properties.get(TableProperties.MAX_SNAPSHOT_AGE_MS, _SNAPSHOT_AGE_MS))
        end_ms = time.time_ns() // 1_000_000 - age_ms
        named = {ref.snapshot_id for ref in table.refs().values()}
        kept: list[Snapshot] = []
        gone: list[Snapshot] = []
        for snapshot in table.snapshots():
            is_old = snapshot.timestamp_ms < end_ms and snapshot.snapshot_id not in named
            (gone if is_old else kept).append(snapshot)
        if not gone:
            return
        kept_manifests = {each.manifest_path: each for snapshot in kept for each in snapshot.manifests(table.io)}
        manifests = {}
        for snapshot in gone:
            with suppress(FileNotFoundError):
                manifests.update({each.manifest_path: each for each in snapshot.manifests(table.io)})
        unused = [each for path, each in manifests.items() if path not in kept_manifests]
        live = {file.file_path for file in self._data_files(kept_manifests.values())}
        files = {file.file_path for file in self._data_files(unused)} - live
        for path in (*files, *(each.manifest_path for each in unused), *(each.manifest_list for each in gone)):
            with suppress(FileNotFoundError):
                table.io.delete(path)
        # ValueError: another archiver has deleted one of the snapshots.
        with suppress(CommitFailedException, ValueError):
            table.maintenance.expire_snapshots().by_ids([each.snapshot_id for each in gone]).commit()

    def _data_files(self, manifests: Iterable[ManifestFile]) -> Iterator[DataFile]:
        for manifest in manifests:
            with suppress(FileNotFoundError):  # a killed `expire` has deleted it; the table does not need it
                for entry in manifest.fetch_manifest_entry(self._table.io):
                    yield entry.data_file


def _without_statistics(footer: pq.FileMetaData) -> set[str]:
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return {column.path_in_schema for column in columns if readable_statistics(column) is None}


class FolderCatalog(NoopCatalog):
    """A catalog that holds one table, whose metadata files are in the table's own folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__("halog")
        self._metadata = folder / "metadata"
        self._last: Table | None = None

    def create_table(
        self,
        identifier: str | Identifier,
        schema: Schema | pa.Schema,
        location: str | None = None,
        partition_spec: PartitionSpec = _PARTITIONS,
        sort_order: SortOrder = UNSORTED_SORT_ORDER,
        properties: Properties = EMPTY_DICT,
    ) -> Table:
        """Creates the table, and returns it; if another archiver has created it first, returns that one."""
        assert isinstance(schema, Schema)
        assert location is not None
        self._metadata.mkdir(parents=True, exist_ok=True)
        with suppress(CommitFailedException):  # another archiver created it
            self._write(1, new_table_metadata(schema, partition_spec, sort_order, location, properties))
        return self.load_table(identifier)

    def load_table(self, identifier: str | Identifier) -> Table:
        """Returns the last version of the table. Raises NoSuchTableError if there is none."""
        version = self._version()
        if not version:
            raise NoSuchTableError(f"{self._metadata} has no metadata")
        location = str(self._metadata / f"v{version}.metadata.json")
        if self._last is None or self._last.metadata_location != location:
            static = StaticTable.from_metadata(location)
            self._last = Table(self.identifier_to_tuple(identifier), static.metadata, location, static.io, self)
        return copy(self._last)

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Writes the next version. Raises CommitFailedException if another writer has changed the table."""
        version = self._version()
        current = self.load_table(table.name())
        for requirement in requirements:
            requirement.validate(current.metadata)
        metadata = update_table_metadata(current.metadata, updates, metadata_location=current.metadata_location)
        for update in updates:
            if isinstance(update, AddSnapshotUpdate):
                self._sync(update.snapshot, table)
        self._write(version + 1, metadata)
        location = str(self._metadata / f"v{version + 1}.metadata.json")
        self._last = Table(table.name(), metadata, location, table.io, self)
        return CommitTableResponse.model_validate({"metadata": metadata, "metadata-location": location})

    def _version(self) -> int:
        """Returns the number of the last version; 0 if there is none."""
        hint = self._metadata / "version-hint.text"
        version = int(hint.read_text()) if hint.exists() else 0
        while (self._metadata / f"v{version + 1}.metadata.json").exists():
            version += 1
        return version

    def _write(self, version: int, metadata: TableMetadata) -> None:
        try:
            create_file(self._metadata / f"v{version}.metadata.json", metadata.model_dump_json().encode())
        except FileExistsError:
            raise CommitFailedException(f"another writer wrote version {version} first") from None
        replace_file(self._metadata / "version-hint.text", b"%d" % version)

    def _sync(self, snapshot: Snapshot, table: Table) -> None:
        """Syncs the files of a new snapshot, which PyIceberg writes without syncing them."""
        manifests = snapshot.manifests(table.io)
        new = [each.manifest_path for each in manifests if each.added_snapshot_id == snapshot.snapshot_id]
        for path in (snapshot.manifest_list, *new):
            sync_path(Path(path.removeprefix("file://")))
        sync_folder(self._metadata)
