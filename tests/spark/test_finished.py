"""Killed jobs resume: finished ranges are not read again, and the result is the same.

To show that, the finished segments are overwritten between the attempts, and their modification times reset, so that a
job that read them again would find zeros.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ha.audit.range import CopyPlace, RangeTask
from ha.spark.jobs.audit.archive import ArchivePlace, ArchiveTask
from ha.spark.jobs.audit.job import AuditOptions, _Keys, audit_with
from ha.spark.jobs.finished import FinishedTasks, finished_tasks, state_folder, task_key
from ha.spark.jobs.stats.job import StatsOptions, _keys, stats_with
from tests.spark.inline import inline_runner
from tests.spark.stores import make_store, message

ROOT = Path(__file__).parents[2]
SEGMENT = 1 << 16
SEGMENTS = 40
KILL_AT = 20
"""Segments: two waves of 16 tasks are stored by then."""
KEPT_BY_TWO_CORES = 32
KEPT = 16
"""Where an inline job is stopped: behind two waves of 8."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 40 small segments."""
    messages = [message(number, body=b"%08d" % number * 512) for number in range(SEGMENTS * 15)]
    store = make_store(tmp_path_factory.mktemp("built") / "broker-s", messages, segment_size=SEGMENT)
    assert len(list((store / "commitlog").iterdir())) >= SEGMENTS
    return store


@pytest.fixture
def stores(built: Path, tmp_path: Path) -> list[Path]:
    """Two copies of it."""
    return [Path(shutil.copytree(built, tmp_path / name)) for name in ("one", "two")]


def attempt(job: str, stores: Sequence[Path], folder: Path, kill_at: int | None) -> dict[str, Any] | None:
    """Runs `job` in a separate process; None if it was killed after `kill_at` bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.finished_job", job, str(folder), str(kill_at or -1), *map(str, stores)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if kill_at is not None:
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_one_go(job: str, stores: Sequence[Path]) -> dict[str, Any]:
    """The result of `job` without Spark and without a stop."""
    if job == "audit":
        options = AuditOptions(paths=tuple(map(str, stores)), range_bytes=SEGMENT)
        found: msgspec.Struct = audit_with(inline_runner(), options)
    else:
        found = stats_with(inline_runner(), StatsOptions(path=str(stores[0]), range_bytes=SEGMENT))
    as_json: dict[str, Any] = json.loads(msgspec.json.encode(found))
    return as_json


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("duration_s", "started_ms", "notes")}


def overwrite(store: Path, count: int) -> None:
    """Overwrites the first `count` segments with zeros without changing their times."""
    for file in sorted((store / "commitlog").iterdir())[:count]:
        before = file.stat()
        with file.open("r+b") as opened:
            opened.write(bytes(before.st_size))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.spark
@pytest.mark.parametrize("job", [pytest.param("stats", marks=pytest.mark.long), "audit"])
def test_killed_job_resumes_without_rereading(job: str, stores: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "unfinished"
    whole = in_one_go(job, stores)
    attempt(job, stores, folder, KILL_AT * SEGMENT)
    [kept] = folder.glob("*.sqlite")
    for store in stores:
        overwrite(store, KEPT_BY_TWO_CORES)
    resumed = attempt(job, stores, folder, None)
    assert resumed is not None
    assert without_times(resumed) == without_times(whole)
    assert not kept.exists()
    if job == "audit":
        assert whole["notes"] == []
        assert resumed["notes"][0].startswith(f"{KEPT_BY_TWO_CORES} ranges were read by an earlier, unfinished attempt")
    # A successful run deletes its stored results: the next one reads everything, and sees the zeros.
    again = attempt(job, stores, folder, None)
    assert again is not None
    assert without_times(again) != without_times(whole)


class StoppedError(Exception):
    """Stands for a stop."""


def stopping_at(done_bytes: int) -> Any:
    def progress(stage: str, done: int, total: int) -> None:
        if done >= done_bytes:
            raise StoppedError

    return progress


def stats_of(store: Path, folder: Path, stop_at: int = 1 << 60) -> tuple[dict[str, Any], int]:
    """The result, and the number of ranges taken from the previous attempt."""
    options = StatsOptions(path=str(store), range_bytes=SEGMENT, unfinished=str(folder))
    with finished_tasks("stats", options, options.unfinished) as finished:
        result = stats_with(finished.runner(inline_runner(), _keys(str(store))), options, stopping_at(stop_at))
        assert bool(finished.note()) == bool(finished.taken_count)
    return without_times(msgspec.to_builtins(result, str_keys=True)), finished.taken_count


def test_changed_ranges_are_read_again(stores: list[Path], tmp_path: Path) -> None:
    store, folder = stores[0], tmp_path / "unfinished"
    with pytest.raises(StoppedError):
        stats_of(store, folder, KEPT * SEGMENT)
    third = sorted((store / "commitlog").iterdir())[2]
    os.utime(third)
    result, taken = stats_of(store, folder)
    assert taken == KEPT - 1
    assert result == stats_of(store, tmp_path / "other")[0]


def test_ranges_are_read_again_after_reindex_replaced_the_queues(stores: list[Path], tmp_path: Path) -> None:
    store, folder = stores[0], tmp_path / "unfinished"
    queues = store / "consumequeue"
    shutil.move(queues, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", queues)
    shutil.rmtree(queues / "flights" / "1")
    place = CopyPlace("one", str(store), "b", 0, SEGMENT)
    task = RangeTask(0, SEGMENT, (place,), (0,), 3, "audit")
    before = _Keys()(task)
    with pytest.raises(StoppedError):
        stats_of(store, folder, KEPT * SEGMENT)
    queues.rename(tmp_path / "before-reindex")
    shutil.move(tmp_path / "whole", queues)
    result, taken = stats_of(store, folder)
    assert taken == 0
    assert result == stats_of(store, tmp_path / "other")[0]
    assert _Keys()(task) != before


def test_job_resumes_on_log_that_grew_and_lost_segments(stores: list[Path], tmp_path: Path) -> None:
    store, folder = stores[0], tmp_path / "unfinished"
    with pytest.raises(StoppedError):
        stats_of(store, folder, KEPT * SEGMENT)
    make_store(store, [message(number) for number in range(900)], segment_size=SEGMENT)
    first = sorted((store / "commitlog").iterdir())[0]
    first.unlink()
    result, taken = stats_of(store, folder)
    assert taken == KEPT - 1
    assert result == stats_of(store, tmp_path / "other")[0]


def test_another_log_at_same_path_shares_no_results(built: Path, stores: list[Path], tmp_path: Path) -> None:
    store, folder = stores[0], tmp_path / "unfinished"
    with pytest.raises(StoppedError):
        stats_of(store, folder, KEPT * SEGMENT)
    shutil.rmtree(store)
    make_store(store, [message(number, body=b"%08d" % number * 512) for number in range(SEGMENTS * 15)], SEGMENT)
    result, taken = stats_of(store, folder)
    assert taken == 0
    assert result == stats_of(store, tmp_path / "other")[0]


def test_damaged_result_file_and_missing_folder_only_lose_results(
    stores: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, folder = stores[0], tmp_path / "unfinished"
    with pytest.raises(StoppedError):
        stats_of(store, folder, KEPT * SEGMENT)
    [file] = folder.iterdir()
    file.write_bytes(b"no database " * 1000)
    expected = stats_of(store, tmp_path / "other")
    assert stats_of(store, folder) == expected
    assert "job.results_not_stored" in caplog.text
    (tmp_path / "a-file").touch()
    assert stats_of(store, tmp_path / "a-file" / "folder") == expected


@pytest.mark.parametrize("change", ["result = x'00'", "result = zeroblob(9)", "result = 'x'", "at_ms = 1 << 62"])
def test_damaged_results_are_made_again(change: str, stores: list[Path], tmp_path: Path) -> None:
    store, folder = stores[0], tmp_path / "unfinished"
    with pytest.raises(StoppedError):
        stats_of(store, folder, KEPT * SEGMENT)
    [file] = folder.iterdir()
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(f"UPDATE finished SET {change}")
    result, taken = stats_of(store, folder)
    assert taken == (KEPT if "at_ms" in change else 0)
    assert result == stats_of(store, tmp_path / "other")[0]


def test_findings_of_a_stopped_audit_are_kept_with_it(stores: list[Path], tmp_path: Path) -> None:
    log = sorted((stores[1] / "commitlog").iterdir())[3]
    raw = bytearray(log.read_bytes())
    raw[1000] ^= 1
    log.write_bytes(raw)
    options = AuditOptions(paths=tuple(map(str, stores)), range_bytes=SEGMENT // 2)
    whole = audit_with(inline_runner(), options)
    assert whole.damage_count
    finished = FinishedTasks(tmp_path / "kept.sqlite")

    def key_of(task: Any) -> bytes:
        return task_key("t", task.begin, task.end, task.starts)

    with pytest.raises(StoppedError):
        audit_with(finished.runner(inline_runner(), key_of), options, stopping_at(KEPT * SEGMENT // 2))
    finished.close()
    again = FinishedTasks(tmp_path / "kept.sqlite")
    resumed = audit_with(again.runner(inline_runner(), key_of), options)
    assert again.taken_count >= KEPT
    assert without_times(msgspec.structs.asdict(resumed)) == without_times(msgspec.structs.asdict(whole))


def test_the_key_of_an_archived_range_depends_on_all_of_the_archive_but_its_ends(built: Path) -> None:
    archive = ArchivePlace(str(built), "b", 0, SEGMENT, (), None, frozenset(), skips_damaged=False)
    place = CopyPlace("store", str(built), "b", 0, SEGMENT)
    others: dict[str, Any] = {
        "path": "/other",
        "broker_name": "other",
        "files": (("config", "t", 0, 9),),
        "topics": frozenset({"t"}),
        "left_out": frozenset({"u", "t"}),
        "skips_damaged": True,
        "erased_topics": (("t", 5),),
        "erased": (5,),
    }
    assert {*others, "begin", "end"} == set(ArchivePlace.__struct_fields__)

    def key(**changes: Any) -> bytes | None:
        return _Keys()(ArchiveTask(0, SEGMENT, 0, place, msgspec.structs.replace(archive, **changes), examples_max=3))

    assert key() == key(begin=100, end=2 * SEGMENT)
    assert len({key(), *(key(**{name: value}) for name, value in others.items())}) == len(others) + 1
    assert key(left_out=frozenset({"t", "u"})) == key(left_out=frozenset({"u", "t"}))


def test_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "halog" / "jobs"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local" / "state" / "halog" / "jobs"
