"""`ha spark archive --every`: lag, metrics, and what many commits leave behind. Without Spark: tasks run inline."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ha.arrow import LogReader
from ha.cli import run
from ha.cli.spark.archives import _interval_s
from ha.errors import RecordsGone
from ha.spark.jobs.archive import ArchiveOptions, archive, archive_states
from ha.spark.jobs.archive.manifest import Manifest
from ha.spark.jobs.archive.progress import ArchiveLag, measure_archive_lag
from tests.spark.inline import inline_spark
from tests.spark.sessions import use_session
from tests.spark.stores import KilledError, live_store, make_store, message

STORED_MS = 1_700_000_000_000


def metrics(file: Path) -> dict[str, float]:
    found = dict(re.findall(r'(?m)^halog_archive_(\w+)\{broker="broker-b"\} (\S+)$', file.read_text()))
    assert len(found) == 6
    return {name: float(value) for name, value in found.items()}


class Passes(threading.Event):
    """A stop event: `between` is called instead of each wait, and stops after `count` of them."""

    def __init__(self, count: int, between: Any) -> None:
        super().__init__()
        self.left = count
        self.between = between

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        self.between()
        if self.left == 0:
            self.set()
        return self.is_set()


def test_lag_is_what_the_archive_does_not_have_yet(tmp_path: Path) -> None:
    times = iter([STORED_MS] * 4 + [STORED_MS + 7000] * 1000)
    store = make_store(tmp_path / "s", [message(n) for n in range(2)], clock_ms=lambda: next(times))
    with LogReader(store) as reader:
        end = reader.queued_end()
        assert measure_archive_lag(reader, end, STORED_MS + 60_000) == ArchiveLag(
            bytes=0, seconds=0.0, headroom_bytes=end
        )
        all_of_it = measure_archive_lag(reader, 0, STORED_MS + 60_000)
        assert (all_of_it.bytes, all_of_it.headroom_bytes) == (end, 0)
        assert 53 <= all_of_it.seconds <= 60


def test_a_service_reports_its_lag_after_each_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, target, file = tmp_path / "broker-b", tmp_path / "archive", tmp_path / "archive.prom"
    seen: list[dict[str, float]] = []
    with live_store(store, 64 << 10) as live, caplog.at_level(logging.INFO, "ha.spark"):

        def between() -> None:
            seen.append(metrics(file))
            if len(seen) == 1:
                live.put([message(n, body=bytes(500)) for n in range(100, 300)])
            if len(seen) == 2:
                assert live.clean()

        def late(step: str) -> None:
            if step == "link commit" and len(seen) == 1:
                live.put([message(300)])

        live.put([message(n) for n in range(100)])
        options = ArchiveOptions(
            path=str(store), archive=str(target), every_s=5, metrics_file=str(file), compact_files_min=0
        )
        result = archive(inline_spark(), options, stop=Passes(4, between), failpoint=late)
    assert [each["rows_total"] for each in seen] == [100, 300, 301, 301]
    assert [each["commits_total"] for each in seen] == [1, 2, 3, 3]
    assert [each["lag_bytes"] > 0 for each in seen] == [False, True, False, False]
    assert seen[2]["headroom_bytes"] < seen[1]["headroom_bytes"]
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("archive.committed")]
    assert len(lines) == result.commits == 3
    assert "broker='broker-b' commits=1 rows=100 " in lines[0]
    assert re.search(r"commits=2 rows=300 .*lag_bytes=[1-9]\d* lag_s=\d+\.\d ", lines[1])
    assert "lag_bytes=0 lag_s=0.0" in lines[2]


def queue_files(store: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (store / "consumequeue" / "flights").glob("*/*")}


def test_queues_that_are_rebuilt_do_not_make_it_another_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a crash of the broker, which begins between the reader's look at the queues and at the last record."""
    store, target = make_store(tmp_path / "broker-b", [message(n) for n in range(100)]), tmp_path / "archive"
    options = ArchiveOptions(path=str(store), archive=str(target))
    archive(inline_spark(), options)
    files, refresh = queue_files(store), LogReader.refresh

    def refresh_then_crash(reader: LogReader) -> bool:
        has_changed = refresh(reader)
        reader.end_offset()
        for path, raw in files.items():
            path.write_bytes(bytes(len(raw)))
        return has_changed

    (store / "abort").touch()
    monkeypatch.setattr(LogReader, "refresh", refresh_then_crash)
    assert archive(inline_spark(), options).rows == 0


def test_a_service_waits_while_the_broker_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ha.arrow.log_reader._REWRITE_TIMEOUT_S", 0)
    store, target = make_store(tmp_path / "broker-b", [message(n) for n in range(100)]), tmp_path / "archive"
    files = queue_files(store)

    def crash() -> None:
        for path, raw in files.items():
            path.write_bytes(raw[: 10 * 20] + bytes(len(raw) - 10 * 20))

    def recover() -> None:
        for path, raw in files.items():
            path.write_bytes(raw)

    options = ArchiveOptions(path=str(store), archive=str(target), every_s=5)
    (store / "abort").touch()
    with pytest.raises(RecordsGone, match="the queues end before them"):
        archive(inline_spark(crash), ArchiveOptions(path=str(store), archive=str(target)))
    recover()
    crashes = iter([crash])
    result = archive(inline_spark(lambda: [each() for each in crashes]), options, stop=Passes(2, recover))
    assert (result.rows, result.commits) == (100, 1)
    assert "archive.log_moved_back broker='broker-b'" in caplog.text


def test_metrics_that_cannot_be_written_do_not_stop_the_archive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path / "broker-b", [message(0)])
    options = ArchiveOptions(path=str(store), archive=str(tmp_path / "a"), metrics_file=str(tmp_path / "no" / "f"))
    assert archive(inline_spark(), options).rows == 1
    assert "metrics.not_written" in caplog.text


def test_old_commits_are_deleted_and_the_state_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ha.spark.jobs.archive.manifest._STATE_EVERY", 4)
    monkeypatch.setattr("ha.spark.jobs.archive.manifest._COMMITS_KEPT", 8)
    store, target = tmp_path / "broker-b", tmp_path / "archive"
    manifest = Manifest(target, "broker-b")
    count = kills = 0
    with live_store(store) as live:

        def put() -> None:
            nonlocal count
            live.put([message(count)])
            count += 1

        def kill(step: str) -> None:
            nonlocal kills
            if step in ("write state", "delete commits"):
                kills += 1
                raise KilledError

        put()
        while count < 30:
            options = ArchiveOptions(path=str(store), archive=str(target), every_s=5, compact_files_min=0)
            try:
                archive(inline_spark(), options, stop=Passes(3, put), failpoint=kill if count % 3 else lambda _: None)
            except KilledError:
                assert manifest.state(applied_only=True).rows == manifest.state().rows
        archive(inline_spark(), ArchiveOptions(path=str(store), archive=str(target)))
    assert kills > 2
    state = manifest.state()
    assert (state.rows, len(archive_states(target)[0].files)) == (count, len(state.files))
    names = sorted(path.name for path in (manifest.folder / "commits").iterdir())
    numbers = [int(name.split(".")[0]) for name in names if ".state." not in name]
    states = [int(name.split(".")[0]) for name in names if ".state." in name]
    assert state.sequence > 30
    assert numbers == list(range(numbers[0], state.sequence + 1))
    assert 8 <= len(numbers) < 20
    assert states[0] == numbers[0] - 1, "the state before the oldest commit"


@pytest.mark.parametrize(("text", "seconds"), [("5s", 5), ("5", 5), ("0.5", 0.5), ("250ms", 0.25), ("2m", 120)])
def test_interval(text: str, seconds: float) -> None:
    assert _interval_s(text) == seconds


def test_the_command_runs_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path / "broker-b", [message(n) for n in range(10)])

    @contextmanager
    def stoppable() -> Iterator[threading.Event]:
        yield Passes(2, lambda: None)

    use_session(monkeypatch, inline_spark())
    monkeypatch.setattr("ha.cli.spark.archives.stoppable", stoppable)
    command = ["spark", "archive", "--path", str(store), "--to", str(tmp_path / "a")]
    assert run([*command, "--every", "5s", "--metrics-file", str(tmp_path / "f"), "--json"]) == 0
    shown = capsys.readouterr()
    assert '"rows": 10' in shown.out
    assert re.search(r"INFO ha.spark archive.committed broker='broker-b' commits=1 rows=10 ", shown.err)
    assert metrics(tmp_path / "f")["lag_bytes"] == 0
    for text in ("soon", "0s", "-5"):
        assert run([*command, f"--every={text}"]) == 2
        assert "5s" in capsys.readouterr().err
