"""What a process does when it begins to serve."""

import gc
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from ha import process
from ha.config import Config
from ha.log_lines import LogLines


class Made:
    """Something that a start makes."""


async def test_garbage_collection_does_not_look_at_what_the_start_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Made] = []

    @asynccontextmanager
    async def serve(config: msgspec.Struct) -> AsyncIterator[str]:
        made.append(Made())
        assert any(each is made[0] for each in gc.get_objects())
        yield "READY"

    monkeypatch.setattr(process, "_end_after", lambda timeout_s, lines: None)
    monkeypatch.setattr("ha.process.signal.signal", lambda number, handler: None)
    stop = process._StopSignals()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.Entry("ha.test", Config, serve)._serve, Config(), stop, LogLines(2))
            await trio.testing.wait_all_tasks_blocked()
            assert not any(each is made[0] for each in gc.get_objects())
            stop.first.set()
    finally:
        gc.unfreeze()


async def test_what_is_needed_later_is_imported_by_a_worker_when_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "needed_later.py").write_text(
        "import threading\nprint('imported', threading.current_thread() is threading.main_thread())"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "_end_after", lambda timeout_s, lines: None)
    monkeypatch.setattr("ha.process.signal.signal", lambda number, handler: None)

    @asynccontextmanager
    async def serve(config: msgspec.Struct) -> AsyncIterator[str]:
        yield "READY"

    stop = process._StopSignals()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                process.Entry("ha.test", Config, serve, later="needed_later")._serve, Config(), stop, LogLines(2)
            )
            await trio.testing.wait_all_tasks_blocked()
            stop.first.set()
        assert "needed_later" in sys.modules
    finally:
        gc.unfreeze()
    assert threading.current_thread() is threading.main_thread()
    assert capsys.readouterr().out == "READY\nimported False\n"
    assert gc.isenabled()
