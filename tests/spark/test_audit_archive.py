"""An archive compared with its store: changes of either are found at their physical offset, and nothing else is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from ha.arrow import LogReader
from ha.audit.findings import HOUR_MS, NO_HOUR
from ha.errors import ArchiveDamaged, OptionError
from ha.protocol.bodies import TopicConfigTable
from ha.protocol.java_json import dumps
from ha.spark.jobs.archive import ArchiveOptions, archive
from ha.spark.jobs.archive.erase import EraseOptions, erase
from ha.spark.jobs.audit.archive import compare_archive
from ha.spark.jobs.audit.job import AuditOptions, AuditResult, audit_with
from tests.spark.inline import inline_runner, inline_spark
from tests.spark.stores import ODD_TIMES_MS, make_store, message, records_of, set_store_time
from tests.spark.test_audit import Golden, found


class Archived(Golden):
    """The master's log and its archive, made without Spark."""

    def __init__(self, version: str, folder: Path) -> None:
        super().__init__(version, folder)
        self.archive = folder / "parquet"
        options = ArchiveOptions(path=str(self.master), archive=str(self.archive), broker_name="b")
        archive(inline_spark(), options)

    def look(self, **more: Any) -> AuditResult:
        given: dict[str, Any] = {"paths": (str(self.master),), "archive": str(self.archive), "range_bytes": 4096}
        return audit_with(inline_runner(), AuditOptions(**given | more))

    def rewrite(self, topic: str, change: Callable[[pa.Table], pa.Table]) -> None:
        """Replaces the archive's file of `topic` by what `change` makes of it."""
        (path,) = self.archive.glob(f"topic={topic}/date=*/*.parquet")
        pq.write_table(change(pq.read_table(path, partitioning=None)), path)


@pytest.fixture(params=["4.9.7", "5.5.0"])
def archived(request: pytest.FixtureRequest, tmp_path: Path) -> Archived:
    return Archived(request.param, tmp_path)


@pytest.fixture
def one(tmp_path: Path) -> Archived:
    return Archived("5.5.0", tmp_path)


def at(table: pa.Table, record: dict[str, Any]) -> int:
    return int(pc.index(table.column("physicalOffset"), record["offset"]).as_py())


def replaced(table: pa.Table, row: int, column: str, value: Any) -> pa.Table:
    index = table.column_names.index(column)
    values = table.column(column).to_pylist()
    values[row] = value
    return table.set_column(index, table.field(index), pa.array(values, table.field(index).type))


@pytest.mark.parametrize("range_bytes", [1500, 1 << 20])
def test_a_sound_archive_is_clean(archived: Archived, range_bytes: int) -> None:
    result = archived.look(range_bytes=range_bytes)
    assert result.findings == ()
    assert result.exit_code == 0
    assert result.compared_bytes == archived.end
    copy = result.copies[-1]
    assert (copy.name, copy.record_count) == ("archive", len(archived.records))
    assert copy.byte_count == sum(record["size"] for record in archived.records)
    both = archived.look(paths=(str(archived.master), str(archived.slave)))
    assert (both.exit_code, len(both.copies)) == (0, 3)


def test_rows_changed_lost_invented_and_repeated(one: Archived) -> None:
    changed, lost, twice, body = one.pick(2), one.pick(3), one.pick(4), one.pick(5)

    def change(table: pa.Table) -> pa.Table:
        table = replaced(table, at(table, changed), "reconsumeTimes", 9)
        table = replaced(table, at(table, body), "body", b"another body")
        row = at(table, twice)
        invented = replaced(table.slice(row, 1), 0, "physicalOffset", twice["offset"] + 1)
        table = pa.concat_tables([table, table.slice(row, 1), invented])
        return table.filter(pc.not_equal(table.column("physicalOffset"), lost["offset"]))

    one.rewrite("GoldenTopic", change)
    result = one.look()
    assert found(result) == {
        ("different", "archive", changed["offset"]),
        ("missing", "archive", lost["offset"]),
        ("duplicate", "archive", twice["offset"]),
        ("extra", "archive", twice["offset"] + 1),
        ("crc", "archive", body["offset"]),
        ("different", "archive", body["offset"]),
    }
    assert result.exit_code == 1
    (detail,) = (f.detail for f in result.findings if f.physical_offset == changed["offset"])
    assert "reconsumeTimes" in detail


def test_a_record_that_the_store_has_lost_is_in_the_archive(one: Archived) -> None:
    record = one.pick()
    one.flip(one.master, record["offset"] + 4)
    assert found(one.look()) == {("unreadable", "master", record["offset"]), ("missing", "master", record["offset"])}


@pytest.mark.parametrize("store_ms", ODD_TIMES_MS)
def test_rows_with_damaged_store_times_are_compared(tmp_path: Path, store_ms: int) -> None:
    store = make_store(tmp_path / "store", [message(number) for number in range(3)])
    set_store_time(store, 1, store_ms)
    archive(inline_spark(), ArchiveOptions(path=str(store), archive=str(tmp_path / "archive")))
    log = store / "commitlog" / f"{0:020d}"
    raw = bytearray(log.read_bytes())
    raw[records_of(store)[1].physical_offset + 4] ^= 0xFF
    log.write_bytes(raw)
    result = audit_with(inline_runner(), AuditOptions(paths=(str(store),), archive=str(tmp_path / "archive")))
    [missing] = (finding for finding in result.findings if finding.kind == "missing")
    assert missing.hour == (store_ms // HOUR_MS if store_ms == ODD_TIMES_MS[0] else NO_HOUR)


def test_damaged_body_in_store_is_reported_for_the_store(one: Archived) -> None:
    record = one.pick()
    one.flip(one.master, record["offset"] + 90)
    assert found(one.look()) == {("crc", "master", record["offset"]), ("different", "master", record["offset"])}


def test_rows_only_in_the_archive_are_not_damage(one: Archived) -> None:
    (one.master / "commitlog" / f"{0:020d}").unlink()
    result = one.look()
    assert (result.findings, result.exit_code) == ((), 0)
    assert [(c.begin, c.end, c.copies) for c in result.only_in] == [(0, 16_384, ("archive",))]


def test_one_of_several_brokers_has_to_be_named(one: Archived) -> None:
    archive(inline_spark(), ArchiveOptions(path=str(one.slave), archive=str(one.archive), broker_name="c"))
    with pytest.raises(OptionError, match=r"^broker_name: the archive has several brokers; accepted: one of: b, c$"):
        one.look()
    assert one.look(broker_name="b").exit_code == 0


def test_bad_archives_are_refused_by_name(one: Archived, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nowhere"):
        one.look(archive=str(tmp_path / "nowhere"))
    with pytest.raises(OptionError, match="broker_name"):
        one.look(broker_name="other")
    with pytest.raises(OptionError, match="names"):
        one.look(names=("archive",))
    (path,) = one.archive.glob("topic=GoldenTopic/date=*/*.parquet")
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(ArchiveDamaged, match="GoldenTopic"):
        one.look()
    path.unlink()
    with pytest.raises(ArchiveDamaged, match="GoldenTopic"):
        one.look()


def test_a_topic_that_halog_deleted_is_no_damage(tmp_path: Path) -> None:
    """Its queues keep their ends, and its records stay in the log until retention; the store says where they end."""
    store = make_store(tmp_path / "store", [message(0), message(1, topic="other"), message(2)], clear="other")
    with LogReader(store) as reader:
        table = TopicConfigTable(deleted_topics={"other": reader.end_offset()})
    (store / "config").mkdir(exist_ok=True)
    (store / "config" / "topics.json").write_bytes(dumps(table))
    make_store(store, [message(3, topic="other")])
    archive(inline_spark(), ArchiveOptions(path=str(store), archive=str(tmp_path / "archive")))
    for directory in (None, str(tmp_path / "archive")):
        result = audit_with(inline_runner(), AuditOptions(paths=(str(store),), archive=directory))
        deleted = {"store": 1, "archive": 1} if directory else {"store": 1}
        assert (result.exit_code, result.found) == (0, {"topic_deleted": deleted})
    (store / "config" / "topics.json").unlink()
    assert audit_with(inline_runner(), AuditOptions(paths=(str(store),))).found == {"entry_missing": {"store": 1}}


def test_archive_that_is_merged_or_erased_from_during_the_audit_is_clean(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", str(tmp_path / "archive")
    for number in range(4):
        make_store(store, [message(number)])
        archive(inline_spark(), ArchiveOptions(path=str(store), archive=folder, compact_files_min=0))

    def run(function: Callable[[Any], Any], tasks: Any, /) -> Any:
        if function is compare_archive:
            merged = archive(inline_spark(), ArchiveOptions(path=str(store), archive=folder, compact_files_min=2))
            assert merged.merged_files == 4
            erased = erase(inline_spark(), EraseOptions(archive=folder, topic=message(0).topic, dry_run=False))
            assert erased.rows == 4
        return inline_runner()(function, tasks)

    result = audit_with(run, AuditOptions(paths=(str(store),), archive=folder))
    assert (result.exit_code, result.found) == (0, {"erased": {"archive": 4}})
