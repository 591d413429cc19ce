"""What a process does once it serves."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from ha import process
from ha.config import Config


class Made:
    """Something that a start makes."""


async def test_garbage_collection_does_not_look_at_what_the_start_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Made] = []

    @asynccontextmanager
    async def serve(config: msgspec.Struct) -> AsyncIterator[str]:
        made.append(Made())
        assert any(each is made[0] for each in gc.get_objects())
        yield "READY"

    monkeypatch.setattr(process, "_end_after", lambda timeout_s: None)
    monkeypatch.setattr("ha.process.signal.signal", lambda number, handler: None)
    stop = process._StopSignals()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.Entry("ha.test", Config, serve)._serve, Config(), stop)
            await trio.testing.wait_all_tasks_blocked()
            assert not any(each is made[0] for each in gc.get_objects())
            stop.first.set()
    finally:
        gc.unfreeze()
