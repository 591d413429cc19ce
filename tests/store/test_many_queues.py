"""A start costs little for each queue: files of queues are nearly empty, and stay so."""

from __future__ import annotations

from pathlib import Path

import pytest

from ha.store.files import OsDisk, OsFile
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions
from tests.store.disks import run_inline
from tests.store.stores import WallClock, dispatched, message

QUEUE_COUNT = 20


async def test_a_start_reads_and_writes_no_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = StoreOptions(root=tmp_path, segment_size=1 << 20, index_enabled=False, queue_entry_count=300_000)
    read_bytes: list[int] = []
    synced: list[Path] = []
    pread, sync = OsFile.pread, OsFile.sync

    def noting_pread(self: OsFile, size: int, position: int) -> bytes:
        raw = pread(self, size, position)
        if "consumequeue" in self.path.parts:
            read_bytes.append(len(raw))
        return raw

    def noting_sync(self: OsFile) -> None:
        if "consumequeue" in self.path.parts:
            synced.append(self.path)
        sync(self)

    def held_bytes() -> int:
        return sum(path.stat().st_blocks * 512 for path in tmp_path.glob("consumequeue/*/*/*"))

    async with open_message_store(options, disk=OsDisk(), run_blocking=run_inline, wall_clock_ms=WallClock()) as store:
        await store.log.put([message(number, queue_id=number % QUEUE_COUNT) for number in range(100)])
        await dispatched(store)
    held = held_bytes()
    assert held <= QUEUE_COUNT * 8192
    monkeypatch.setattr(OsFile, "pread", noting_pread)
    monkeypatch.setattr(OsFile, "sync", noting_sync)
    async with open_message_store(options, disk=OsDisk(), run_blocking=run_inline, wall_clock_ms=WallClock()) as store:
        assert sum(queue.max_offset for queue in store.queues) == 100
        assert synced == []
        assert 0 < sum(read_bytes) <= QUEUE_COUNT * 16384
    (tmp_path / "abort").touch()  # as after a kill: what is behind the entries is made sure of
    async with open_message_store(options, disk=OsDisk(), run_blocking=run_inline, wall_clock_ms=WallClock()) as store:
        assert sum(queue.max_offset for queue in store.queues) == 100
        assert len(set(synced)) == QUEUE_COUNT
    assert held_bytes() == held
