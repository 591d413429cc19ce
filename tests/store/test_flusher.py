"""Group commit and interval flushing, at exact virtual times, and failed syncs."""

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ha.errors import DiskFailed
from ha.protocol.codes import PutStatus
from ha.store.message_store import open_message_store
from tests.store.disks import MemoryDisk
from tests.store.stores import ROOT, message, open_small, small_options


class SlowSync:
    """A blocking runner on virtual time: a sync takes `sync_s`, everything else nothing."""

    def __init__(self, sync_s: float) -> None:
        self.sync_s = sync_s
        self.sync_count = 0

    async def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(call, "__name__", "") == "sync":
            self.sync_count += 1
            await trio.sleep(self.sync_s)
        else:
            await trio.lowlevel.checkpoint()
        return call(*arguments)


async def test_one_sync_serves_all_earlier_requests(autojump_clock: MockClock) -> None:
    runner = SlowSync(0.010)
    answers: list[tuple[float, int, PutStatus]] = []
    options = small_options(flush_mode="SYNC_FLUSH", segment_size=1 << 16, derived_flush_interval_s=1e6)
    async with open_message_store(options, disk=MemoryDisk(), run_blocking=runner) as store:
        began = trio.current_time()

        async def put(number: int) -> None:
            [result] = await store.log.put([message(number)])
            store.flusher.request(
                result.next_offset,
                trio.current_time() + 5,
                lambda status: answers.append((round(trio.current_time() - began, 6), number, status)),
            )

        await put(0)
        await trio.sleep(0.004)
        for number in range(1, 50):
            await put(number)
        await trio.sleep(1)
        # The first sync covers what was there when it began; the next one everything that came meanwhile.
        assert answers[0] == (0.010, 0, PutStatus.PUT_OK)
        assert [(when, status) for when, _, status in answers[1:]] == [(0.020, PutStatus.PUT_OK)] * 49
        assert [number for _, number, _ in answers] == list(range(50))
        assert runner.sync_count == store.flusher.sync_count == 2


async def test_a_request_is_answered_at_its_deadline_and_not_again(autojump_clock: MockClock) -> None:
    runner = SlowSync(7)
    answers: list[tuple[float, PutStatus]] = []
    options = small_options(flush_mode="SYNC_FLUSH", stop_timeout_s=100.0, derived_flush_interval_s=1e6)
    async with open_message_store(options, disk=MemoryDisk(), run_blocking=runner) as store:
        began = trio.current_time()

        def note(status: PutStatus) -> None:
            answers.append((trio.current_time() - began, status))

        [result] = await store.log.put([message(0)])
        store.flusher.request(result.next_offset, began + 5, note)
        store.flusher.request(result.next_offset, began + 3, note)
        store.flusher.request(result.next_offset, began + 100, note)
        await trio.sleep(20)
        assert answers == [
            (3, PutStatus.FLUSH_DISK_TIMEOUT),
            (5, PutStatus.FLUSH_DISK_TIMEOUT),
            (7, PutStatus.PUT_OK),
        ]
        store.flusher.request(result.next_offset, began, note)
        assert answers[3:] == [(20, PutStatus.PUT_OK)]


async def test_nothing_past_the_flushed_offset_is_dispatched_in_sync_flush(autojump_clock: MockClock) -> None:
    options = small_options(flush_mode="SYNC_FLUSH", derived_flush_interval_s=1e6)
    async with open_message_store(options, disk=MemoryDisk(), run_blocking=SlowSync(1)) as store:
        await store.log.put([message(0)])
        await trio.sleep(0.5)
        assert store.log.flushed_offset.value == store.log.dispatched_offset.value == 0
        await trio.sleep(1)
        assert store.log.dispatched_offset.value == store.log.flushed_offset.value == store.log.max_offset.value > 0


async def test_async_flush_by_pages_and_thoroughly(autojump_clock: MockClock) -> None:
    async with open_small(segment_size=1 << 20, flush_interval_s=0.5, flush_least_pages=4) as store:
        began = trio.current_time()
        await store.log.put([message(0)])
        await trio.sleep(9.9)
        assert store.log.flushed_offset.value == 0  # less than 4 pages
        await trio.sleep(0.2)
        assert store.log.flushed_offset.value == store.log.max_offset.value  # but never later than 10 s
        assert trio.current_time() - began < 10.2
        await store.log.put([message(n, size=1500) for n in range(30)])
        await trio.sleep(0.6)
        assert store.log.flushed_offset.value == store.log.max_offset.value


async def test_the_tail_of_a_large_range_is_synced_last(autojump_clock: MockClock) -> None:
    """A write waits for the pages of a sync that its own page is among (page lock, Linux)."""
    disk = MemoryDisk()
    kib = 1 << 10
    async with open_small(disk, flush_mode="SYNC_FLUSH", segment_size=3000 * kib) as store:

        def syncs() -> list[tuple[str, str]]:
            return [step for step in disk.steps if step[0].startswith(("write back", "sync")) and step[1].isdigit()]

        async def append(size: int) -> list[tuple[str, str]]:
            done = len(syncs())
            end = store.log.max_offset.value
            await store.log.append_raw(end, memoryview(bytes(size)))
            await store.log.flushed_offset.wait_beyond(end + size - 1)
            return syncs()[done:]

        first, second = f"{0:020}", f"{3000 * kib:020}"
        assert await append(10 * kib) == [("sync", first)]
        assert await append(1000 * kib) == [("sync", first)]  # less than 1 MiB before the tail: one wait, not two
        assert await append(1200 * kib) == [(f"write back {1010 * kib} to {2176 * kib}", first), ("sync", first)]
        assert await append(790 * kib) == [("sync", first)]
        assert await append(1200 * kib) == [(f"write back 0 to {1152 * kib}", second), ("sync", second)]


async def test_a_failed_write_back_fails_the_sync(autojump_clock: MockClock) -> None:
    """The kernel has reported the failure by then: the sync would report success."""
    disk = MemoryDisk()
    disk.refuse = lambda operation, path: errno.EIO if operation.startswith("write back") else None
    with pytest.RaisesGroup(DiskFailed, flatten_subgroups=True):
        async with open_small(disk, flush_mode="SYNC_FLUSH", segment_size=4 << 20) as store:
            await store.log.append_raw(0, memoryview(bytes(2 << 20)))
            await trio.sleep(60)
    assert store.log.flushed_offset.value == 0
    assert ("sync", f"{0:020}") not in disk.steps
    assert disk.exists(ROOT / "abort")


@pytest.mark.parametrize("flush_mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_a_failed_sync_ends_the_store_and_is_never_retried(autojump_clock: MockClock, flush_mode: str) -> None:
    disk = MemoryDisk()
    answers: list[PutStatus] = []
    failures = [0]

    def refuse(operation: str, path: Path) -> int | None:
        if operation == "sync" and path.parent.name == "commitlog":
            failures[0] += 1
            return errno.EIO if failures[0] == 1 else None  # a second sync would report success, as Linux does
        return None

    with pytest.RaisesGroup(DiskFailed, flatten_subgroups=True):
        async with open_small(disk, flush_mode=flush_mode, flush_least_pages=0) as store:
            disk.refuse = refuse
            [result] = await store.log.put([message(0)])
            store.flusher.request(result.next_offset, trio.current_time() + 1000, answers.append)
            await trio.sleep_forever()
    assert answers == [PutStatus.FLUSH_DISK_TIMEOUT]
    assert failures == [1]
    assert store.log.flushed_offset.value == 0
    assert store.is_writable[0] is False
    assert "fdatasync" in store.is_writable[1]
    assert disk.exists(ROOT / "abort")


async def test_a_failed_sync_that_its_caller_ignores_is_raised_when_the_store_closes() -> None:
    disk = MemoryDisk()

    async def close_after_a_failure() -> None:
        async with open_small(disk) as store:
            await store.log.put([message(0)])
            disk.refuse = lambda operation, path: errno.EIO if operation == "sync" else None
            with suppress(DiskFailed):
                await store.flusher.flush()

    with pytest.raises(DiskFailed, match="fdatasync"):
        await close_after_a_failure()
    assert disk.exists(ROOT / "abort")
