"""`ha spark erase`: exactly the named messages disappear from an archive, and the audit tells them from lost ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

import ha.spark
from ha.cli import run
from ha.errors import ArchiveConflict, ArchiveDamaged, OptionError
from ha.protocol.record import Message
from ha.spark.jobs.archive import ArchiveOptions, archive, archive_states
from ha.spark.jobs.archive.erase import EraseOptions, EraseResult, erase
from ha.spark.jobs.archive.manifest import Commit, Manifest, Scope, State
from ha.spark.jobs.audit.job import AuditOptions, AuditResult, audit_with
from tests.spark.inline import inline_runner, inline_spark
from tests.spark.sessions import use_session
from tests.spark.stores import KilledError, live_store, make_store, message, records_of
from tests.spark.test_archive import visible
from tests.spark.test_archive_spark import delta_rows, skip_without_delta
from tests.spark.test_archived_source import Reader, View, numbers

SPARK = inline_spark()
RETRY, DELAYED = "%RETRY%g", "SCHEDULE_TOPIC_XXXX"


def messages(begin: int, end: int) -> list[Message]:
    """Messages of two topics with the same keys, and copies of some of the first topic's."""
    found = []
    for n in range(begin, end):
        found += [message(n), message(n, topic="other")]
        if n % 5 == 0:
            found += [
                message(n, topic=RETRY, queue_id=0, RETRY_TOPIC="flights"),
                message(n, topic=RETRY, queue_id=0, RETRY_TOPIC="other"),
                message(n, topic=DELAYED, queue_id=0, REAL_TOPIC="flights"),
            ]
    return found


class Archived:
    """A store and its archive."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "broker-b"
        self.target = folder / "archive"

    def run_archive(self, **changes: Any) -> int:
        options = {"range_bytes": 16 << 10, "compact_files_min": 0, **changes}
        return archive(SPARK, ArchiveOptions(path=str(self.store), archive=str(self.target), **options)).rows

    def erase(self, *keys: str, topic: str = "flights", dry_run: bool = False, **more: Any) -> EraseResult:
        options = EraseOptions(archive=str(self.target), topic=topic, keys=keys, dry_run=dry_run)
        return erase(SPARK, options, **more)

    def audit(self) -> AuditResult:
        options = AuditOptions(paths=(str(self.store),), archive=str(self.target), range_bytes=8 << 10)
        return audit_with(inline_runner(), options)

    def rows(self) -> Counter[tuple[str, str, str]]:
        """Topic, unique key and real topic of each row."""
        found: Counter[tuple[str, str, str]] = Counter()
        for row in visible(self.target):
            pairs = dict(p.split("\x01") for p in row["propertiesString"].split("\x02") if p)
            real_topic = pairs.get("RETRY_TOPIC") or pairs.get("REAL_TOPIC") or ""
            found[row["topic"], row["uniqKey"], real_topic] += 1
        return found

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.target.rglob("*") if path.is_file()}


@pytest.fixture
def archived(tmp_path: Path) -> Archived:
    found = Archived(tmp_path)
    make_store(found.store, messages(0, 140), segment_size=32 << 10)
    found.run_archive()
    return found


def test_messages_with_a_key_and_their_copies_disappear(archived: Archived) -> None:
    before, files = archived.rows(), archived.files()
    dry = archived.erase("k35", "U00000040", dry_run=True)
    assert (archived.rows(), archived.files()) == (before, files)
    done = archived.erase("k35", "U00000040")
    gone = Counter(
        (topic, unique, real)
        for unique in ("U00000035", "U00000040")
        for topic, real in (("flights", ""), (RETRY, "flights"), (DELAYED, "flights"))
    )
    assert archived.rows() == before - gone
    assert (dry.rows, done.rows, done.exit_code) == (6, 6, 0)
    assert dry.topics == done.topics
    assert {each.topic: each.rows for each in done.topics} == {"flights": 2, RETRY: 2, DELAYED: 2}
    after = archived.files()
    rewritten = [path for path in files if path.endswith(".parquet") and path not in after]
    assert len(rewritten) == sum(each.rewritten_files + each.deleted_files for each in done.topics)
    assert all(files[path] == after[path] for path in files if path.endswith(".parquet") and path in after)
    assert not any(b"k35" in content for path, content in after.items() if "_halog" in path)
    # A word of many messages.
    shared = archived.erase("n3")
    expected = sum(n % 7 == 3 for n in range(140)) + 2 * sum(n % 7 == 3 for n in range(0, 140, 5))
    assert shared.rows == expected
    assert archived.erase("n3").rows == 0


def test_the_audit_shows_what_was_erased_and_finds_what_is_lost(archived: Archived) -> None:
    assert archived.audit().found == {}
    archived.erase("n3")
    count = sum(1 for _ in archived.audit().findings)
    erased = archived.erase("n4").rows
    result = archived.audit()
    assert result.found == {"erased": {"archive": count + erased}}
    assert (result.exit_code, result.damage_count) == (0, 0)
    archived.erase(topic="flights")
    result = archived.audit()
    assert result.found["erased"]["archive"] == 140 + 2 * 28
    erased_places = {record.physical_offset for record in records_of(archived.store) if record.topic != "other"}
    assert {finding.physical_offset for finding in result.findings} < erased_places
    [state] = archive_states(archived.target)
    lost = next(path for path, file in state.files.items() if file.topic == "other")
    Manifest(archived.target, "broker-b").commit(
        Commit(
            sequence=state.sequence + 1,
            kind="compact",
            time_ms=0,
            scope=state.scope or Scope("parquet"),
            covered_begin=0,
            covered_end=state.covered_end or 0,
            removed=(lost,),
        )
    )
    result = archived.audit()
    assert set(result.found) == {"erased", "missing"}
    assert result.exit_code == 1


def test_a_whole_topic_disappears_and_its_new_messages_are_archived(tmp_path: Path) -> None:
    archived = Archived(tmp_path)
    with live_store(archived.store, 32 << 10) as live:
        live.put(messages(0, 100))
        archived.run_archive()
        assert archived.erase(dry_run=True).rows == 100 + 2 * 20
        done = archived.erase()
        assert done.rows == 140
        [flights] = [each for each in done.topics if each.topic == "flights"]
        assert (flights.rewritten_files, flights.rows) == (0, 100)
        assert flights.deleted_files > 1
        assert {topic for topic, _, _ in archived.rows()} == {"other", RETRY}
        live.put(messages(100, 110))
        assert archived.run_archive(compact_files_min=2) == 26
        assert sum(count for (topic, _, _), count in archived.rows().items() if topic == "flights") == 10
        assert archived.audit().found == {"erased": {"archive": 140}}


def test_streams_go_on_behind_erased_messages(tmp_path: Path) -> None:
    view, archived = View(tmp_path), Archived(tmp_path)
    with live_store(archived.store, 32 << 10) as live:
        live.put(messages(0, 100))
        archived.run_archive()
        late, slow = Reader(view, maxOffsetsPerTrigger="30"), Reader(view, maxOffsetsPerTrigger="30")
        late.run(1)
        slow.run(1)
        seen = set(late.seen)
        archived.erase("n3")
        archived.erase("k99")
        live.put(messages(100, 140))
        archived.run_archive()
        live.put([message(n, topic="else", body=bytes(500)) for n in range(150)])
        live.clean()
        left = [n for n in range(140) if n % 7 != 3 or n >= 100]
        left.remove(99)
        assert numbers(view.all_rows()) == left
        late.run(1000)
        assert sorted(late.seen) == sorted(seen | set(left))
        archived.erase()
        assert numbers(view.all_rows()) == []
        fresh = Reader(view)
        fresh.run(1000)
        late.run(1000)
        live.put(messages(140, 150))
        for reader in (fresh, late, slow):
            before = set(reader.seen)
            reader.run(1000)
            assert set(reader.seen) - before == set(range(140, 150))


def test_a_kill_leaves_all_rows_or_none(tmp_path: Path) -> None:
    steps: list[str] = []
    number = 0
    while number == 0 or number < len(steps):
        archived = Archived(tmp_path / str(number))
        make_store(archived.store, messages(0, 30))
        archived.run_archive(topics=("flights",))
        if not number:
            before = archived.rows()
            archived.erase("n3", "k1", failpoint=steps.append)
            after = archived.rows()
            assert {step.split()[0] for step in steps} == {"clear", "link", "remove", "rename", "mark"}
            number = 1
            continue
        left = number

        def kill(step: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KilledError(step)

        with pytest.raises(KilledError):
            archived.erase("n3", "k1", failpoint=kill)
        archive_states(archived.target)
        assert archived.rows() in (before, after), f"after a kill at {steps[number - 1]}"
        archived.erase("n3", "k1")
        assert archived.rows() == after
        assert archived.audit().found == {"erased": {"archive": sum((before - after).values())}}
        number += 1


def damage_record(store: Path, text: bytes) -> None:
    """Makes the first record with `text` in its properties unreadable: its magic code."""
    [file] = (store / "commitlog").iterdir()
    raw = bytearray(file.read_bytes())
    at = raw.rindex(b"\xda\xa3\x20\xa7", 0, raw.index(text))
    raw[at : at + 4] = bytes(4)
    file.write_bytes(raw)


def test_rows_that_cannot_be_searched_are_counted(tmp_path: Path) -> None:
    archived = Archived(tmp_path)
    make_store(archived.store, messages(0, 20))
    damage_record(archived.store, b"U00000007")
    archived.run_archive()
    result = archived.erase("k3")
    assert result.rows == 1
    assert (result.not_searched, result.exit_code) == (1, 3)


@pytest.mark.parametrize("keys", [(), ("k3",)])
def test_copies_that_cannot_be_searched_are_counted(tmp_path: Path, keys: tuple[str, ...]) -> None:
    archived = Archived(tmp_path)
    retries = [message(number, topic="%RETRY%g", queue_id=0, RETRY_TOPIC="flights") for number in (3, 4)]
    others = [message(5, topic="other")]
    make_store(archived.store, [message(3), *retries, *others])
    damage_record(archived.store, b"U00000004")
    archived.run_archive()
    result = archived.erase(*keys)
    assert result.rows == 2
    assert (result.not_searched, result.exit_code) == (1, 3)


@pytest.mark.parametrize("damage", ["no footer", "changed page", "truncated"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str, dry_run: bool) -> None:
    archived = Archived(tmp_path)
    make_store(archived.store, messages(0, 40))
    archived.run_archive()
    path = sorted(archived.target.glob("topic=flights/*/*.parquet"))[0]
    raw = bytearray(path.read_bytes())
    if damage == "changed page":
        raw[4 : len(raw) // 2] = bytes(len(raw) // 2 - 4)
    else:
        raw = raw[:100] if damage == "truncated" else raw[:-8] + bytes(8)
    path.write_bytes(raw)
    before = archived.files()
    with pytest.raises(ArchiveDamaged, match=rf"topic=flights/.*{path.name}: "):
        archived.erase("k1", dry_run=dry_run)
    assert archived.files().keys() == before.keys()


def test_a_damaged_file_is_not_merged(tmp_path: Path) -> None:
    archived = Archived(tmp_path)
    for begin in (0, 20):
        make_store(archived.store, messages(begin, begin + 20))
        archived.run_archive()
    for path in archived.target.glob("topic=*/*/*.parquet"):
        path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    make_store(archived.store, messages(40, 60))
    with pytest.raises(ArchiveDamaged, match=r"topic=.*\.parquet: "):
        archived.run_archive(compact_files_min=2)


def test_an_archiver_must_be_stopped_first(archived: Archived) -> None:
    with Manifest(archived.target, "broker-b").locked():
        assert archived.erase("k1", dry_run=True).rows == 1
        with pytest.raises(ArchiveConflict, match="another archiver or erasure is running; stop it first"):
            archived.erase("k1")
    assert archived.erase("k1").rows == 1


@pytest.mark.parametrize("kind", ["append", "void"])
def test_a_delta_archive_without_files_in_its_manifest_is_refused(
    tmp_path: Path, kind: Literal["append", "void"]
) -> None:
    """As halog 0.1 wrote it. Nothing of it is changed."""
    store, manifest = make_store(tmp_path / "broker-b", messages(0, 1)), Manifest(tmp_path / "archive", "broker-b")
    with manifest.locked():
        commit = Commit(sequence=1, kind=kind, time_ms=0, scope=Scope("delta"), covered_begin=0, covered_end=9)
        manifest.commit(commit)
    for refused in (
        lambda: archive_states(manifest.archive),
        lambda: archive(SPARK, ArchiveOptions(path=str(store), archive=str(manifest.archive), format="delta")),
        lambda: erase(SPARK, EraseOptions(archive=str(manifest.archive), topic="flights", dry_run=False)),
    ):
        with pytest.raises(OptionError, match=r"is a Delta archive of halog 0\.1"):
            refused()
    assert manifest.applied() == 0


def test_so_is_one_whose_last_commit_is_in_a_state_file(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "archive", "broker-b")
    with manifest.locked():
        state = State(broker_name="broker-b", sequence=64, scope=Scope("delta"), covered_begin=0, covered_end=9)
        (manifest.folder / "commits" / f"{64:020d}.state.json").write_bytes(msgspec.json.encode(state))
        manifest.mark_applied(64 + 1)
    with pytest.raises(OptionError, match=r"is a Delta archive of halog 0\.1"):
        archive_states(manifest.archive)


def test_options_are_checked(archived: Archived, tmp_path: Path) -> None:
    for options, said in (
        (EraseOptions(archive=str(tmp_path / "no"), topic="flights"), "holds no archive"),
        (EraseOptions(archive=str(archived.target), topic="flights", broker_name="x"), "no broker 'x'"),
        (EraseOptions(archive=str(archived.target), topic="flights", keys=("a b",)), "has a space"),
        (EraseOptions(archive=str(archived.target), topic="flights", keys=("",)), "empty"),
    ):
        with pytest.raises(OptionError, match=said):
            erase(SPARK, options)


@pytest.mark.parametrize("keys", [("k35", "U00000040"), ()])
def test_messages_disappear_from_a_delta_table(spark: SparkSession, tmp_path: Path, keys: tuple[str, ...]) -> None:
    skip_without_delta(spark)
    store, target = tmp_path / "broker-b", tmp_path / "archive"

    def run_archive() -> int:
        options = ArchiveOptions(path=str(store), archive=str(target), format="delta")
        return archive(spark, options).rows

    def erase_now(*, dry_run: bool) -> EraseResult:
        return erase(spark, EraseOptions(archive=str(target), topic="flights", keys=keys, dry_run=dry_run))

    def rows() -> Counter[tuple[str, str, bool]]:
        of_flights = F.col("propertiesString").contains("_TOPIC\x01flights")
        found = delta_rows(spark, target).select("topic", "uniqKey", of_flights.alias("copy")).collect()
        return Counter((row.topic, row.uniqKey, row["copy"]) for row in found)

    make_store(store, messages(0, 60))
    run_archive()
    before = rows()
    dry = erase_now(dry_run=True)
    assert rows() == before
    done = erase_now(dry_run=False)
    gone = Counter({each: count for each, count in before.items() if each[0] == "flights" or each[2]})
    if keys:
        gone = Counter({each: count for each, count in gone.items() if each[1] in ("U00000035", "U00000040")})
    assert before - rows() == gone
    assert dry.topics == done.topics
    assert done.rows == sum(gone.values())
    assert erase_now(dry_run=False).rows == 0
    make_store(store, messages(60, 65))
    assert run_archive() == 5 + 5 + 3
    table = ha.spark.topic(spark, "flights", archive=str(target), path=str(store))
    expected = set(range(65)) - ({35, 40} if keys else set(range(60)))
    assert {int(bytes(row.body)) for row in table.collect()} == expected


def test_the_command_shows_first_and_erases_with_yes(
    archived: Archived, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_session(monkeypatch, SPARK)
    command = ["spark", "erase", str(archived.target), "--topic", "flights", "--key", "k35"]
    before = archived.rows()
    assert run(command) == 0
    shown = capsys.readouterr()
    assert "Would be erased: 3 rows" in shown.out
    assert "dry run, nothing was changed" in shown.err
    assert "until retention deletes" in shown.err
    assert archived.rows() == before
    assert run([*command, "--yes", "--json"]) == 0
    shown = capsys.readouterr()
    assert '"dry_run": false' in shown.out
    assert "dry run" not in shown.err
    assert sum((before - archived.rows()).values()) == 3
