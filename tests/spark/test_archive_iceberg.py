"""Iceberg archives, without Spark: what PyIceberg and DuckDB read, through kills, merges, expiry and other writers."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import StaticTable, Table

from ha.errors import ArchiveConflict, ArchiveDamaged, OptionError
from ha.spark.jobs.archive import ArchiveOptions, ArchiveResult, archive
from ha.spark.jobs.archive.erase import EraseOptions, erase
from ha.spark.jobs.archive.iceberg import FolderCatalog, IcebergTable, open_iceberg_table
from ha.spark.jobs.archive.manifest import TABLE_IN_FOLDER
from ha.spark.jobs.audit.job import AuditOptions, audit_with
from tests.spark.inline import inline_runner, inline_spark
from tests.spark.stores import KilledError, make_store, message
from tests.spark.test_archive import raw_body, raw_records

SPARK = inline_spark()
HOUR_NS = 3_600_000_000_000
TOPICS = ("flights", "%RETRY%g", "задержки")


def put(store: Path, begin: int, end: int) -> None:
    """Adds messages of three topics in turn."""
    make_store(store, [message(number, topic=TOPICS[number % 3]) for number in range(begin, end)])


def run(
    store: Path, target: Path, failpoint: Callable[[str], None] = lambda step: None, **changes: Any
) -> ArchiveResult:
    given: dict[str, Any] = {"format": "iceberg", "compact_files_min": 0, **changes}
    return archive(SPARK, ArchiveOptions(path=str(store), archive=str(target), **given), failpoint=failpoint)


def opened(target: Path) -> Table:
    """The table as others open it, by its directory."""
    return StaticTable.from_metadata(str(target))


def rows(table: Table, **scan: Any) -> list[tuple[int, bytes]]:
    """The physical offsets and bodies that PyIceberg reads."""
    if table.current_snapshot() is None:
        return []
    found = table.scan(**scan).to_arrow()
    return sorted(zip(found["physicalOffset"].to_pylist(), found["body"].to_pylist(), strict=True))


def expected_rows(store: Path) -> list[tuple[int, bytes]]:
    return [(place, raw_body(raw)) for place, raw in raw_records(store)]


def files_on_disk(target: Path) -> set[str]:
    return {f"file://{path}" for path in target.glob("topic=*/*/*.parquet")}


def listed_files(table: Table) -> set[str]:
    return {task.file.file_path for task in table.scan().plan_files()}


@contextmanager
def duck() -> Iterator[Any]:
    """DuckDB with its extension for Iceberg, without a network."""
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        for name in ("avro", "iceberg"):
            [folder] = pytest.importorskip(f"duckdb_extension_{name}").__path__
            [file] = Path(folder).glob("extensions/*/*.duckdb_extension")
            connection.execute(f"LOAD '{file}'")
        yield connection


def test_pyiceberg_and_duckdb_read_each_record_once(tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "with space" / "архив"
    for begin in range(0, 90, 30):
        put(store, begin, begin + 30)
        run(store, target, compact_files_min=2)
    expected = expected_rows(store)
    table = opened(target)
    assert rows(table) == expected
    found = table.scan().to_arrow()
    assert Counter(found["topic"].to_pylist()) == dict.fromkeys(TOPICS, 30)
    assert found["date"].to_pylist() == [each.date() for each in found["storeTimestamp"].to_pylist()]
    for number, topic in enumerate(TOPICS):
        assert rows(table, row_filter=f"topic = '{topic}'") == expected[number::3]
    assert rows(table, row_filter=f"physicalOffset < {expected[5][0]}") == expected[:5]
    # The statistics of the files exclude all but the first.
    assert len(list(table.scan(row_filter=f"physicalOffset < {expected[1][0]}").plan_files())) == 1
    with duck() as connection:
        source = f"FROM iceberg_scan('{target}')"
        assert sorted(connection.sql(f"SELECT physicalOffset, body {source}").fetchall()) == expected
        counts = connection.sql(f"SELECT topic, count(DISTINCT keys[1]) {source} GROUP BY topic").fetchall()
        assert dict(counts) == dict.fromkeys(TOPICS, 30)


def test_a_time_that_python_can_not_represent_has_no_bounds(tmp_path: Path) -> None:
    """A client may send any time of birth."""
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    sent = [message(0), msgspec.structs.replace(message(1), born_timestamp_ms=253_402_300_800_000), message(2)]
    make_store(store, sent)
    run(store, target)
    table = opened(target)
    assert table.scan(selected_fields=("physicalOffset",)).count() == 3
    found = table.scan(selected_fields=("body",)).to_arrow()["body"].to_pylist()
    assert sorted(found) == sorted(bytes(each.body) for each in sent)
    [task] = table.scan(row_filter="bornTimestamp < '2026-01-01T00:00:00+00:00'").plan_files()  # not excluded
    assert task.file.record_count == 3


def assert_offsets_are_of_the_rows(target: Path, store: Path) -> int:
    """Returns the number of rows: those of the log up to the offset that the table states."""
    if not (target / "metadata" / "version-hint.text").exists():
        return 0
    table = opened(target)
    covered_end = int(table.properties.get("halog.covered-end.broker-b", 0))
    held = rows(table)
    assert held == [row for row in expected_rows(store) if row[0] < covered_end]
    snapshot = table.current_snapshot()
    if snapshot is not None and snapshot.summary is not None:
        assert snapshot.summary["halog.broker"] == "broker-b"
        assert snapshot.summary["halog.covered-end"] == str(covered_end)
    return len(held)


def test_rows_and_offsets_change_together_through_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    commit = FolderCatalog.commit_table
    fatal, skipped = "", 0
    count = held = 0

    def kill(step: str) -> None:
        nonlocal skipped
        if fatal and step.startswith(fatal):
            skipped -= 1
            if skipped < 0:
                raise KilledError(step)

    def commit_table(self: FolderCatalog, *given: Any) -> Any:
        kill("before the table's commit")
        result = commit(self, *given)
        kill("after the table's commit")
        return result

    monkeypatch.setattr(FolderCatalog, "commit_table", commit_table)
    for skip in (0, 2):
        for fatal in ("link commit", "rename", "mark applied", "follow", "before", "after"):
            put(store, count, count + 6)
            count += 6
            skipped = skip
            try:
                run(store, target, kill, compact_files_min=skip)
            except KilledError:
                pass
            before, held = held, assert_offsets_are_of_the_rows(target, store)
            assert skip or (held > before) == (fatal == "after"), f"after a kill at {fatal}"
    fatal = ""
    run(store, target, compact_files_min=2)
    # Without new messages, too, a run completes what an earlier one has committed.
    fatal, skipped = "follow", 1
    put(store, count, count + 6)
    count += 6
    with pytest.raises(KilledError):
        run(store, target, kill)
    assert assert_offsets_are_of_the_rows(target, store) == count - 6
    fatal = ""
    assert run(store, target).rows == 0
    assert assert_offsets_are_of_the_rows(target, store) == count
    run(store, target, compact_files_min=2)
    snapshots = opened(target).snapshots()
    assert {str(each.summary.operation.value) for each in snapshots if each.summary} == {"append", "overwrite"}
    assert run(store, target, compact_files_min=2).rows == 0
    assert opened(target).snapshots() == snapshots
    assert assert_offsets_are_of_the_rows(target, store) == count


def test_old_snapshots_and_their_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    # Its file is never merged, but the lists that name it are written again.
    make_store(store, [message(1000, topic="rare")])
    for begin in range(0, 40, 10):
        put(store, begin, begin + 10)
        run(store, target, compact_files_min=2)
    table = opened(target)
    first = table.snapshots()[0].snapshot_id
    assert rows(table, snapshot_id=first) == expected_rows(store)[:11]
    assert files_on_disk(target) > listed_files(table)
    run(store, target)
    assert len(opened(target).snapshots()) == len(table.snapshots())
    now = time.time_ns
    monkeypatch.setattr("ha.spark.jobs.archive.iceberg.time.time_ns", lambda: now() + 7 * HOUR_NS)
    left, delete = 0, PyArrowFileIO.delete

    def delete_some(self: PyArrowFileIO, path: Any) -> None:
        nonlocal left
        if left == 0:
            raise KilledError
        left -= 1
        delete(self, path)

    monkeypatch.setattr(PyArrowFileIO, "delete", delete_some)
    kills = 0
    while len(opened(target).snapshots()) > 1:
        left = kills
        try:
            run(store, target)
        except KilledError:
            kills += 1
        assert rows(opened(target)) == expected_rows(store)
    assert kills > 5
    table = opened(target)
    assert files_on_disk(target) == listed_files(table)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    lists = {snapshot.manifest_list, *(each.manifest_path for each in snapshot.manifests(table.io))}
    assert {f"file://{path}" for path in target.glob("metadata/*.avro")} == lists


def test_a_table_in_a_catalog_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    store, target, database = tmp_path / "broker-b", tmp_path / "archive", tmp_path / "catalog.db"
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{database}")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", import_module("pyiceberg.utils.config").Config())
    put(store, 0, 20)

    def in_catalog() -> list[tuple[int, bytes]]:
        catalog = load_catalog("lake")
        found = rows(catalog.load_table("logs.broker"))
        catalog.close()
        return found

    run(store, target, iceberg_table="lake.logs.broker")
    assert in_catalog() == expected_rows(store)
    with pytest.raises(OptionError, match="the archive was created with"):
        run(store, target)
    with pytest.raises(OptionError, match="is a table at file:"):
        run(store, tmp_path / "other", iceberg_table="lake.logs.broker")
    for name, said in (("lake", "no namespace"), ("nowhere.a.b", "nowhere: ")):
        with pytest.raises(OptionError, match=said):
            run(store, tmp_path / "third", iceberg_table=name)
    # A lost catalog is filled from the archive.
    database.unlink()
    put(store, 20, 30)
    assert run(store, target, iceberg_table="lake.logs.broker").rows == 10
    assert in_catalog() == expected_rows(store)


def test_brokers_share_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, target = tmp_path / "a", tmp_path / "a-1", tmp_path / "archive"
    write = FolderCatalog._write
    waiting = ["other"]

    def write_second(self: FolderCatalog, *given: Any) -> None:
        if waiting and given[0] > 2:
            waiting.clear()
            run(other, target, extra_columns=("msgId", "tags"))
        write(self, *given)

    put(one, 0, 30)
    put(other, 30, 60)
    run(one, target)
    put(one, 60, 70)
    monkeypatch.setattr(FolderCatalog, "_write", write_second)
    assert run(one, target).rows == 10
    assert not waiting
    found = opened(target).scan().to_arrow()
    assert Counter(found["brokerName"].to_pylist()) == {"a": 40, "a-1": 30}
    assert sum(each is not None for each in found["msgId"].to_pylist()) == 30
    assert sum(each is not None for each in found["uniqKey"].to_pylist()) == 40
    assert sorted(found["body"].to_pylist()) == [b"%08d" % number for number in range(70)]
    properties = opened(target).properties
    assert {name for name in properties if name.startswith("halog.commit")} == {"halog.commit.a", "halog.commit.a-1"}


def test_a_merge_while_another_broker_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, target = tmp_path / "a", tmp_path / "a-1", tmp_path / "archive"
    overwrite = IcebergTable._commit
    waiting = ["other"]

    def commit_second(self: IcebergTable, state: Any, added: Any, removed: Any) -> None:
        if waiting and removed:
            waiting.clear()
            run(other, target)
        overwrite(self, state, added, removed)

    monkeypatch.setattr("pyiceberg.table.time.sleep", lambda s: None)
    put(other, 30, 60)
    for begin in range(0, 30, 10):
        put(one, begin, begin + 10)
        if begin < 20:
            run(one, target)
    monkeypatch.setattr(IcebergTable, "_commit", commit_second)
    assert run(one, target, compact_files_min=2).merged_files > 0
    assert not waiting
    found = opened(target).scan().to_arrow()
    assert sorted(found["body"].to_pylist()) == [b"%08d" % number for number in range(60)]
    assert files_on_disk(target) >= listed_files(opened(target))


def with_old_snapshots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Returns a store and its archive, with three snapshots that the next run expires."""
    store, target = folder / "broker-b", folder / "archive"
    for begin in range(0, 30, 10):
        put(store, begin, begin + 10)
        run(store, target)
    now = time.time_ns
    monkeypatch.setattr("ha.spark.jobs.archive.iceberg.time.time_ns", lambda: now() + 7 * HOUR_NS)
    return store, target


def test_snapshots_stay_if_another_writer_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = with_old_snapshots(tmp_path, monkeypatch)
    write = FolderCatalog._write

    def write_second(self: FolderCatalog, version: int, metadata: Any) -> None:
        taken = target / f"metadata/v{version}.metadata.json"
        taken.touch()
        try:
            write(self, version, metadata)
        finally:
            taken.unlink()

    monkeypatch.setattr(FolderCatalog, "_write", write_second)
    run(store, target)
    assert len(opened(target).snapshots()) == 3
    monkeypatch.setattr(FolderCatalog, "_write", write)
    run(store, target)
    assert len(opened(target).snapshots()) == 1
    assert rows(opened(target)) == expected_rows(store)


def test_snapshots_that_another_writer_has_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = with_old_snapshots(tmp_path, monkeypatch)
    commit_table = FolderCatalog.commit_table

    def commit_second(self: FolderCatalog, *given: Any) -> Any:
        monkeypatch.setattr(FolderCatalog, "commit_table", commit_table)
        open_iceberg_table(target, TABLE_IN_FOLDER).expire()
        return commit_table(self, *given)

    monkeypatch.setattr(FolderCatalog, "commit_table", commit_second)
    run(store, target)
    assert len(opened(target).snapshots()) == 1
    assert rows(opened(target)) == expected_rows(store)


def test_other_programs_must_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    put(store, 0, 10)
    run(store, target)
    put(store, 10, 20)

    def always_second(self: FolderCatalog, version: int, metadata: Any) -> None:
        raise import_module("pyiceberg.exceptions").CommitFailedException("second")

    with monkeypatch.context() as patch:
        patch.setattr(FolderCatalog, "_write", always_second)
        patch.setattr("pyiceberg.table.time.sleep", lambda s: None)
        with pytest.raises(ArchiveConflict, match="another writer changed its Iceberg table: second"):
            run(store, target)
    assert len(rows(opened(target))) == 10
    assert run(store, target).rows == 0, "the archive had the rows, and only the table was behind"
    assert rows(opened(target)) == expected_rows(store)
    FolderCatalog(target).load_table("archive").append(pa.table({"topic": ["theirs"], "date": [date(2026, 11, 27)]}))
    with pytest.raises(ArchiveDamaged, match="another program wrote"):
        run(store, target)


def test_erased_messages_are_in_no_later_snapshot(tmp_path: Path) -> None:
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    put(store, 0, 30)
    run(store, target)
    expected = expected_rows(store)
    options = EraseOptions(archive=str(target), topic="flights", keys=("k3", "U00000006"), dry_run=False)

    def kill(step: str) -> None:
        if step == "follow":
            raise KilledError

    with pytest.raises(KilledError):
        erase(SPARK, options, failpoint=kill)
    assert rows(opened(target)) == expected
    assert erase(SPARK, options).rows == 0
    table = opened(target)
    assert rows(table) == [row for row in expected if row[1] not in (b"00000003", b"00000006")]
    assert rows(table, snapshot_id=table.snapshots()[0].snapshot_id) == expected
    audited = audit_with(inline_runner(), AuditOptions(paths=(str(store),), archive=str(target)))
    assert (audited.exit_code, audited.found) == (0, {"erased": {"archive": 2}})
    assert erase(SPARK, EraseOptions(archive=str(target), topic="flights", dry_run=False)).rows == 8
    assert rows(opened(target)) == [row for number, row in enumerate(expected) if number % 3]


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "broker-b", 0, 1)
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    monkeypatch.delitem(sys.modules, "ha.spark.jobs.archive.iceberg")
    with pytest.raises(OptionError, match=r"PyIceberg is missing.*halog\[iceberg\]"):
        run(tmp_path / "broker-b", tmp_path / "archive")
