"""Rebuilt queues and indexes equal, byte for byte, what real brokers and halog's own store built from the same log."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from pyspark.sql import SparkSession

from ha.arrow import LogReader
from ha.errors import CorruptLog, OptionError, StoreLocked, StoreUnreadable
from ha.protocol.bodies import TopicConfigTable
from ha.protocol.codes import PutStatus, SysFlag
from ha.protocol.java_json import dumps
from ha.protocol.record import Message, decode_record
from ha.protocol.record_encoding import encode_record
from ha.protocol.store_files import ENTRY_FILL, IndexHeader
from ha.spark.jobs import Progress, no_progress
from ha.spark.jobs.reindex import job as reindex_job
from ha.spark.jobs.reindex import scan as reindex_scan
from ha.spark.jobs.reindex.index import build_index_file
from ha.spark.jobs.reindex.job import ReindexOptions, ReindexResult, build_files, reindex
from ha.store.message_store import open_message_store
from tests.arrow.stores import STORE_HOST, StoreWriter
from tests.spark.derived_stores import run_inline, store_options, write_store
from tests.spark.stores import message
from tests.store.stores import dispatched
from tests.unpacking import unpack_store

SMALL: dict[str, Any] = {"index_slot_count": 500, "index_entry_count": 400}


def build(options: ReindexOptions) -> ReindexResult:
    return build_files(run_inline, 2, options, no_progress)


def assert_same_files(built: Path, expected: Path) -> None:
    """Queues under the same names; index files in the same order, under names that ascend."""
    for folder in ("consumequeue",):
        names = {path.relative_to(built) for path in (built / folder).rglob("*") if path.is_file()}
        assert names == {path.relative_to(expected) for path in (expected / folder).rglob("*") if path.is_file()}
        for name in sorted(names):
            assert (built / name).read_bytes() == (expected / name).read_bytes(), name
    ours, theirs = sorted((built / "index").iterdir()), sorted((expected / "index").iterdir())
    assert len(ours) == len(theirs)
    for our_file, their_file in zip(ours, theirs, strict=True):
        assert our_file.read_bytes() == their_file.read_bytes(), (our_file, their_file)
        assert len(our_file.name) == 17


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 messages in some 25 segments, 60 queue files, 30 index files."""
    root = tmp_path_factory.mktemp("varied") / "store"
    trio.run(write_store, root, 4000)
    return root


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
@pytest.mark.parametrize("has_derived", [True, False], ids=["sizes-of-the-files", "commitlog-alone"])
def test_files_equal_those_of_a_real_broker(tmp_path: Path, version: str, has_derived: bool) -> None:
    original = unpack_store(version, tmp_path / "original")
    store = tmp_path / "store"
    if has_derived:
        store = original
    else:
        shutil.copytree(original / "commitlog", store / "commitlog")
    result = build(
        ReindexOptions(
            path=store,
            target=tmp_path / "built",
            queue_file_entries=None if has_derived else 10,
            index_slot_count=1000,
            index_entry_count=4000,
            index_tags=version == "5.5.0",
            range_bytes=1,
        )
    )
    assert result.range_count == 2
    assert_same_files(tmp_path / "built", original)


@pytest.mark.parametrize("range_bytes", [1, 200_000, 1 << 30], ids=["a-segment", "some", "one-range"])
def test_files_equal_those_of_the_store(tmp_path: Path, varied: Path, range_bytes: int) -> None:
    result = build(ReindexOptions(path=varied, target=tmp_path / "built", range_bytes=range_bytes, **SMALL))
    assert_same_files(tmp_path / "built", varied)
    assert result.index_file_count == len(list((varied / "index").iterdir())) > 10
    assert result.end_reason == ""
    assert (result.not_dense_count, result.unusable_count) == (0, 0)


def test_reindex_on_spark(tmp_path: Path, varied: Path, spark: SparkSession) -> None:
    seen: list[tuple[str, int, int]] = []
    options = ReindexOptions(path=varied, target=tmp_path / "built", range_bytes=200_000, **SMALL)
    reindex(spark, options, lambda *progress: seen.append(progress))
    assert_same_files(tmp_path / "built", varied)
    assert not (tmp_path / "built" / ".reindex").exists()
    for stage in ("log", "queues", "index"):
        shown = [(done, total) for name, done, total in seen if name == stage]
        assert shown == sorted(shown)
        assert shown[0][0] == 0
        assert shown[-1][0] == shown[-1][1] > 0


def test_a_damaged_record_is_named_by_the_job(tmp_path: Path, varied: Path, spark: SparkSession) -> None:
    store = tmp_path / "store"
    shutil.copytree(varied / "commitlog", store / "commitlog")
    third = sorted((store / "commitlog").iterdir())[2]
    raw = bytearray(third.read_bytes())
    raw[4] ^= 1
    third.write_bytes(raw)
    with pytest.raises(CorruptLog) as caught:
        reindex(spark, ReindexOptions(path=store, target=tmp_path / "built", range_bytes=1 << 30))
    assert (caught.value.file, caught.value.position) == (third, 0)


async def test_queues_start_with_blank_entries_after_retention(tmp_path: Path, varied: Path) -> None:
    """Queues then begin in the middle of a file; halog's store, given the same files, is the oracle."""
    store = tmp_path / "store"
    shutil.copytree(varied / "commitlog", store / "commitlog")
    for path in sorted((store / "commitlog").iterdir())[:9]:
        path.unlink()
    build(ReindexOptions(path=store, target=tmp_path / "built", queue_file_entries=100, **SMALL))
    async with open_message_store(store_options(store)):
        pass
    assert_same_files(tmp_path / "built", store)
    files = [path for path in (store / "consumequeue").rglob("0*") if path.is_file()]
    assert any(path.read_bytes().startswith(ENTRY_FILL) for path in files)


@pytest.mark.parametrize("range_bytes", [100_000, 1 << 30])
async def test_messages_of_deleted_topics_stay_deleted(tmp_path: Path, range_bytes: int) -> None:
    """A topic that was deleted and used again, and one that was only deleted; the store itself is the oracle."""
    options = await write_store(tmp_path / "store", 1500)
    async with open_message_store(options) as store:
        deleted = {"flights": store.log.max_offset.value, "delays": store.log.max_offset.value}
        await store.clear_topics(deleted)
        messages = [Message("flights", number % 2, b"new") for number in range(20)]
        assert {result.status for result in await store.log.put(messages)} == {PutStatus.PUT_OK}
        await dispatched(store)
    (options.root / "config").mkdir(exist_ok=True)
    (options.root / "config" / "topics.json").write_bytes(dumps(TopicConfigTable(deleted_topics=deleted)))
    given = ReindexOptions(path=options.root, target=tmp_path / "built", range_bytes=range_bytes, **SMALL)
    result = build(given)
    assert_same_files(tmp_path / "built", options.root)
    with LogReader(options.root) as reader:
        queues = [queue for queue in reader.queues() if not queue.topic.startswith("SCHEDULE")]
        left = sum(end - begin for begin, end in (reader.queue_range(*queue) for queue in reader.queues()))
        assert {reader.queue_range(*queue).begin for queue in queues if queue.topic == "delays"} != {0}
    assert result.entry_count == left
    assert result.deleted_count > 500


def test_deleted_messages_stay_out_of_queues_after_kill(tmp_path: Path, varied: Path) -> None:
    """The second attempt created a queue's first file again, and lost all entries of the queue."""
    store = tmp_path / "store"
    shutil.copytree(varied / "commitlog", store / "commitlog")
    segments = sorted((store / "commitlog").iterdir())
    for path in segments[:9]:
        path.unlink()  # so that queues begin within a file
    deleted = {"flights": int(segments[-1].name), "delays": int(segments[-6].name)}
    (store / "config").mkdir()
    (store / "config" / "topics.json").write_bytes(dumps(TopicConfigTable(deleted_topics=deleted)))
    whole, again = tmp_path / "whole", tmp_path / "again"
    options = ReindexOptions(path=store, target=whole, queue_file_entries=40, range_bytes=200_000, **SMALL)
    expected = build(options)

    class Killed(Exception):  # noqa: N818
        pass

    def run_until_index(function: Any, items: Any, progress: Any) -> list[Any]:
        if function.func is build_index_file:
            raise Killed
        return run_inline(function, items, progress)

    options = msgspec.structs.replace(options, target=again)
    with pytest.raises(Killed):
        build_files(run_until_index, 2, options, no_progress)
    result = build(options)
    assert_same_files(again, whole)
    assert (result.entry_count, result.deleted_count) == (expected.entry_count, expected.deleted_count)
    first_files = [min((again / "consumequeue" / topic / "0").iterdir()) for topic in deleted]
    assert all(path.read_bytes().startswith(ENTRY_FILL) for path in first_files)


async def test_queues_with_gaps_and_repetitions_are_built_in_order(tmp_path: Path) -> None:
    """A log whose queue offsets were edited: the oracle is what halog's dispatch makes of it."""
    options = await write_store(tmp_path / "written", 1500, seed=3)
    store = tmp_path / "store"
    shutil.copytree(options.root / "commitlog", store / "commitlog")
    edited = _edit_queue_offsets(store / "commitlog", random.Random(5))
    result = build(
        ReindexOptions(path=store, target=tmp_path / "built", queue_file_entries=100, range_bytes=200_000, **SMALL)
    )
    async with open_message_store(store_options(store)) as opened:
        await dispatched(opened)
        skipped = opened.statistics().dispatch_skipped_count
    assert_same_files(tmp_path / "built", store)
    assert edited > 20
    assert result.not_dense_count > 5
    assert result.dropped_count == skipped > 5


def _edit_queue_offsets(commitlog: Path, random_: random.Random) -> int:
    """Move the queue offsets of some records and of all behind them in the queue's file, back or ahead."""
    edited = 0
    for path in sorted(commitlog.iterdir()):
        raw = bytearray(path.read_bytes())
        at = 0
        while raw[at + 4 : at + 7] == b"\xda\xa3\x20":
            if random_.random() < 0.05:
                queue_offset = int.from_bytes(raw[at + 20 : at + 28], "big")
                moved = max(queue_offset + random_.choice([-3, -1, 1, 5, 40, 350]), 0)
                raw[at + 20 : at + 28] = moved.to_bytes(8, "big")
                edited += 1
            at += int.from_bytes(raw[at : at + 4], "big")
        path.write_bytes(raw)
    return edited


def test_a_torn_tail_is_the_end(tmp_path: Path, varied: Path) -> None:
    """As recovery has it: the log ends at the first record of the last segment whose body's CRC is wrong."""
    store = tmp_path / "store"
    shutil.copytree(varied / "commitlog", store / "commitlog")
    whole = build(ReindexOptions(path=varied, target=tmp_path / "whole", **SMALL))
    last = max(path for path in (store / "commitlog").iterdir() if any(path.read_bytes()))
    raw = bytearray(last.read_bytes())
    positions = [0]
    while size := int.from_bytes(raw[positions[-1] : positions[-1] + 4], "big"):
        positions.append(positions[-1] + size)
    torn = next(at for at in positions[4:] if len(decode_record(raw, at).body) > 2)
    record = decode_record(raw, torn)
    body_at = raw.index(record.body, torn)
    raw[body_at : body_at + 2] = bytes(byte ^ 0xFF for byte in record.body[:2])
    last.write_bytes(raw)
    (store / "abort").touch()
    options = ReindexOptions(path=store, target=tmp_path / "built", queue_file_entries=100, **SMALL)
    with pytest.raises(OptionError, match="abort"):
        build(options)
    result = build(msgspec.structs.replace(options, force=True))
    assert result.end_offset == int(last.name) + torn < whole.end_offset
    assert "CRC" in result.end_reason
    assert result.record_count < whole.record_count


def test_a_record_written_for_another_place_is_the_end(tmp_path: Path) -> None:
    """Leftovers of an earlier log are whole records, but say another physical offset."""
    writer = StoreWriter(tmp_path / "store")
    for number in range(3):
        writer.put(message(number))
    whole = encode_record(
        message(3), queue_offset=3, physical_offset=7, store_timestamp_ms=1_700_000_000_000, store_host=STORE_HOST
    )
    writer.write_log(writer.offset, whole)
    result = build(ReindexOptions(path=writer.root, target=tmp_path / "built"))
    assert (result.record_count, result.end_offset) == (3, writer.offset)
    assert "names physical offset 7" in result.end_reason


def test_batches_in_one_record_are_refused(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "store")
    writer.put(message(0))
    inner = Message("batches", 0, b"x", b"INNER_NUM\x013\x02", sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP)
    at = writer.put(inner, is_queued=False)
    with pytest.raises(StoreUnreadable, match=f"physical offset {at} is for a batch consume queue"):
        build(ReindexOptions(path=writer.root, target=tmp_path / "built"))


def test_reindex_resumes_after_kill(tmp_path: Path, varied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills after a number of tasks, in any stage: finished ranges are not read again, and the result is the same."""
    read: list[int] = []
    left = 0

    class SeenWalk(reindex_scan.RangeWalk):
        def __init__(self, task: reindex_scan.ScanTask, log_range: reindex_scan.LogRange) -> None:
            read.append(log_range.number)
            super().__init__(task, log_range)

    class Killed(Exception):  # noqa: N818
        pass

    def run(function: Any, items: Any, progress: Any) -> list[Any]:
        nonlocal left
        made = []
        for item in items:
            left -= 1
            if left < 0:
                raise Killed
            made.append(function(item))
        return made

    monkeypatch.setattr(reindex_scan, "RangeWalk", SeenWalk)
    options = ReindexOptions(path=varied, target=tmp_path / "built", range_bytes=200_000, **SMALL)
    for lives in range(1, 100, 4):
        left = lives
        try:
            result = build_files(run, 2, options, no_progress)
            break
        except Killed:
            with pytest.raises(OptionError, match="other options"):
                build(msgspec.structs.replace(options, index_tags=False))
    assert lives > 9
    assert_same_files(tmp_path / "built", varied)
    assert sorted(read) == list(range(result.range_count))


def test_ranges_of_an_earlier_boot_are_read_again(
    tmp_path: Path, varied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss may keep a range's summary but not its entries, which are synced at the end."""

    class PowerLost(Exception):  # noqa: N818
        pass

    def run_once(function: Any, items: Any, progress: Any) -> list[Any]:
        function(items[0])
        raise PowerLost

    options = ReindexOptions(path=varied, target=tmp_path / "built", range_bytes=200_000, **SMALL)
    with pytest.raises(PowerLost):
        build_files(run_once, 2, options, no_progress)
    for path in (tmp_path / "built" / "consumequeue").rglob("0*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setattr(reindex_scan, "boot_id", lambda: "the next one")
    build_files(run_inline, 2, options, no_progress)
    assert_same_files(tmp_path / "built", varied)


def test_in_place_keeps_the_old_files(tmp_path: Path, varied: Path, spark: SparkSession) -> None:
    store = tmp_path / "store"
    shutil.copytree(varied, store)
    wrong = next(path for path in (store / "consumequeue").rglob("0*") if path.is_file())
    wrong.write_bytes(b"\xff" * wrong.stat().st_size)
    options = ReindexOptions(path=store, in_place=True, **SMALL)
    result = reindex(spark, options)
    assert_same_files(store, varied)
    assert (store / "before-reindex" / wrong.relative_to(store)).read_bytes()[:1] == b"\xff"
    assert result.set_aside == str(store / "before-reindex")
    assert {path.name for path in store.iterdir()} == {path.name for path in varied.iterdir()} | {"before-reindex"}
    with pytest.raises(OptionError, match="before-reindex"):
        reindex(spark, options)


@pytest.mark.parametrize("name", ["plan", "built"])
def test_reindex_resumes_after_a_kill_while_it_writes_its_state(
    tmp_path: Path, varied: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Killed(Exception):  # noqa: N818
        pass

    def build_inline(spark: object, options: ReindexOptions, progress: Progress) -> ReindexResult:
        return build_files(run_inline, 2, options, progress)

    opened = Path.open

    def open_until(path: Path, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        file = opened(path, mode, *arguments, **more)
        if mode == "wb" and path.name.startswith(name):
            file.close()
            raise Killed
        return file

    store = tmp_path / "store"
    shutil.copytree(varied, store)
    monkeypatch.setattr(reindex_job, "_build_with", build_inline)
    options = ReindexOptions(path=store, in_place=True, **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_until)
        with pytest.raises(Killed):
            reindex(None, options)  # type: ignore[arg-type]
    reindex(None, options)  # type: ignore[arg-type]
    assert_same_files(store, varied)


def test_interrupted_swap_is_finished(tmp_path: Path, varied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill at any rename of the swap: the next call rebuilds nothing and ends with both folders in place."""

    def build_inline(spark: object, options: ReindexOptions, progress: Progress) -> ReindexResult:
        return build_files(run_inline, 2, options, progress)

    class Killed(Exception):  # noqa: N818
        pass

    rename = Path.rename
    left = 0

    def rename_until(path: Path, target: Path) -> Path:
        nonlocal left
        if path.name in ("consumequeue", "index"):
            left -= 1
            if left < 0:
                raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_until)
    for lives in range(4):
        store = tmp_path / f"store-{lives}"
        shutil.copytree(varied, store)
        monkeypatch.setattr(reindex_job, "_build_with", build_inline)
        options = ReindexOptions(path=store, in_place=True, **SMALL)
        left = lives
        with pytest.raises(Killed):
            reindex(None, options)  # type: ignore[arg-type]
        monkeypatch.undo()
        result = reindex(None, options)  # type: ignore[arg-type]
        monkeypatch.setattr(Path, "rename", rename_until)
        assert result.target == str(store)
        assert_same_files(store, varied)
        assert_same_files(store / "before-reindex", varied)
        assert not (store / "reindexed").exists()


async def test_a_store_in_use_is_left_alone(tmp_path: Path) -> None:
    options = await write_store(tmp_path / "store", 50)
    wanted = ReindexOptions(path=options.root, target=tmp_path / "built", **SMALL)
    async with open_message_store(options):
        with pytest.raises(StoreLocked):
            build(wanted)
        with pytest.raises(StoreLocked):
            reindex(None, ReindexOptions(path=options.root, in_place=True, force=True, **SMALL))  # type: ignore[arg-type]
        build(msgspec.structs.replace(wanted, force=True))
    assert_same_files(tmp_path / "built", options.root)


def test_impossible_rebuilds_are_refused(tmp_path: Path, varied: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (OptionError, "target: none", {}),
        (OptionError, "not empty", {"target": full}),
        (StoreUnreadable, "no directory commitlog", {"target": tmp_path / "new", "path": tmp_path}),
        (OptionError, "queue_file_entries: 7", {"target": tmp_path / "new", "queue_file_entries": 7}),
        (OptionError, "they make files of", {"target": tmp_path / "new", "index_slot_count": 501}),
        (OptionError, "range_bytes: 0", {"target": tmp_path / "new", "range_bytes": 0}),
    ]
    for error, match, changes in cases:
        with pytest.raises(error, match=match):
            build(ReindexOptions(**{"path": varied, **SMALL, **changes}))
    assert not (tmp_path / "new").exists()
    assert [path.name for path in full.iterdir()] == ["mine"]


def test_index_names_sort_before_the_brokers_own(tmp_path: Path, varied: Path) -> None:
    build(ReindexOptions(path=varied, target=tmp_path / "built", **SMALL))
    files = sorted((tmp_path / "built" / "index").iterdir())
    begins = [IndexHeader.unpack(path.read_bytes()).begin_timestamp_ms for path in files]
    assert begins == sorted(begins)
    # 1 700 000 000 s, when the test's clock begins, is 2023-11-14 22:13:20 in Greenwich.
    assert files[0].name.startswith("20231114101")


def test_without_an_index_none_is_made(tmp_path: Path, varied: Path) -> None:
    result = build(ReindexOptions(path=varied, target=tmp_path / "built", index_enabled=False))
    assert (result.key_count, result.index_file_count) == (0, 0)
    assert [path.name for path in (tmp_path / "built").iterdir()] == ["consumequeue"]


def test_an_empty_log_gives_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    result = build(ReindexOptions(path=tmp_path / "store", target=tmp_path / "built"))
    assert (result.record_count, result.end_offset) == (0, 0)
    assert not any(path.is_file() for path in (tmp_path / "built").rglob("*"))
