"""Retention: what is deleted and when, and what prevents it."""

import errno
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ha.errors import DiskFull, HalogError
from ha.store.files import OsDisk, OsFile
from ha.store.log_reset import waiting_segment
from ha.store.mapped_file import run_in_thread
from ha.store.message_store import MessageStore, open_message_store
from tests.store.disks import MemoryDisk, run_inline
from tests.store.stores import (
    ROOT,
    SEGMENT,
    WallClock,
    all_bytes,
    check_derived,
    dispatched,
    message,
    open_small,
    small_options,
)

HOUR_MS = 3_600_000


async def fill(store: MessageStore, count: int = 120) -> None:
    for number in range(count):
        await store.log.put([message(number, size=1000, queue_id=number % 2)])
    await dispatched(store)


def at_hour(hour: int) -> WallClock:
    """A wall clock at a local hour of some day."""
    day = time.mktime((2026, 6, 10, hour, 30, 0, 0, 0, -1))
    return WallClock(int(day) * 1000)


async def test_at_the_hour_expired_segments_are_deleted_oldest_first_up_to_the_limit() -> None:
    clock = at_hour(3)
    disk = MemoryDisk()
    disk.now_ms = clock.now_ms
    async with open_small(disk, clock, delete_files_max=4, reserved_h=72.0, index_entry_count=20) as store:
        await fill(store)
        count = len(store.log.segments)
        assert count > 8
        clock.now_ms += 74 * HOUR_MS  # it is half past five
        assert await store.retention.clean() == 0
        clock.now_ms -= HOUR_MS
        assert await store.retention.clean() == 4
        assert store.log.min_offset == 4 * SEGMENT
        assert disk.list_dir(ROOT / "commitlog")[0] == f"{4 * SEGMENT:020d}"
        queue = store.queues.get("T", 0)
        assert queue is not None
        assert queue.min_offset > 0
        assert queue.read(queue.min_offset, 1)[0].physical_offset >= store.log.min_offset
        assert store.index is not None
        assert store.index.files[0].end_physical_offset >= store.log.min_offset
        await check_derived(store)
        while await store.retention.clean():
            pass
        assert len(store.log.segments) == 1
        await check_derived(store)
    async with open_small(disk, clock) as store:
        await check_derived(store)
        [result] = await store.log.put([message(1)])
        assert result.queue_offset == 60


async def test_young_segments_stay_and_the_first_young_one_ends_the_round() -> None:
    clock = at_hour(4)
    disk = MemoryDisk()
    disk.now_ms = clock.now_ms
    async with open_small(disk, clock) as store:
        await fill(store, 40)
        disk.inodes[ROOT / "commitlog" / f"{0:020d}"].modified_ms = 0
        disk.inodes[ROOT / "commitlog" / f"{2 * SEGMENT:020d}"].modified_ms = 0
        assert await store.retention.clean() == 1
        assert store.log.min_offset == SEGMENT


@pytest.mark.parametrize(
    ("used", "is_expired", "forcibly", "deletes", "writable"),
    [
        (0.74, True, True, False, True),
        (0.76, True, True, True, True),
        (0.76, False, True, False, True),
        (0.86, False, True, True, True),
        (0.86, False, False, False, True),
        (0.91, False, True, True, False),
    ],
)
async def test_a_filling_disk_deletes_at_any_hour_then_at_any_age_then_refuses_puts(
    used: float, is_expired: bool, forcibly: bool, deletes: bool, writable: bool
) -> None:
    clock = at_hour(12)
    disk = MemoryDisk()
    disk.now_ms = 0 if is_expired else clock.now_ms
    async with open_small(disk, clock, clean_forcibly=forcibly) as store:
        await fill(store, 40)
        disk.total_bytes, disk.free_bytes = 1000, round(1000 * (1 - used))
        await store.retention.check_disk()
        assert bool(await store.retention.clean()) is deletes
        is_writable, reason = store.is_writable
        assert is_writable is writable
        assert ("91.0% full" in reason) is not writable
        disk.free_bytes = 900
        await store.retention.check_disk()
        assert store.is_writable == (True, "")


async def test_segments_that_a_slave_needs_are_kept_up_to_the_limit() -> None:
    clock = at_hour(4)
    async with open_small(clock=clock, retain_bytes_max=10 * SEGMENT) as store:
        await fill(store)
        total = len(store.log.segments)
        needed = [(total - 8) * SEGMENT + 5]
        store.set_retain_from(lambda: needed[0])
        await store.retention.clean()
        while await store.retention.clean():
            pass
        assert store.log.min_offset == needed[0] - 5
        needed[0] = 0  # a slave that asks for more than there is pins no more than the bound
        await fill(store)
        while await store.retention.clean():
            pass
        assert 9 * SEGMENT <= store.log.max_offset.value - store.log.min_offset <= 11 * SEGMENT


async def test_a_disconnected_slave_does_not_stop_producers_when_the_disk_fills(autojump_clock: MockClock) -> None:
    clock = at_hour(12)
    disk = MemoryDisk()
    disk.now_ms = clock.now_ms
    async with open_small(disk, clock) as store:
        await fill(store, 40)
        store.set_retain_from(lambda: 0)
        disk.total_bytes, disk.free_bytes = 1000, 200
        await store.retention.check_disk()
        assert await store.retention.clean() == 0
        disk.free_bytes = 140
        await store.retention.check_disk()
        assert await store.retention.clean() > 0


async def test_rounds_begin_after_a_minute_and_run_every_ten_seconds(autojump_clock: MockClock) -> None:
    clock = at_hour(4)
    async with open_small(clock=clock, clean_first_s=60.0, delete_files_max=1) as store:
        await fill(store)
        await trio.sleep(59)
        assert store.log.min_offset == 0
        await trio.sleep(2)
        assert store.log.min_offset == SEGMENT
        await trio.sleep(10)
        assert store.log.min_offset == 2 * SEGMENT


async def test_a_worker_frees_the_space_of_a_deleted_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last close of a deleted file frees its blocks, which takes tens of ms for a segment of 1 GiB."""
    closed_by: dict[str, threading.Thread] = {}
    close = OsFile.__del__

    def note_and_close(file: OsFile) -> None:
        closed_by[file.path.name] = threading.current_thread()
        close(file)

    options = small_options(root=tmp_path, hot_window_bytes=SEGMENT)
    async with open_message_store(options, disk=OsDisk(), run_blocking=run_in_thread) as store:
        await fill(store)
        with trio.fail_after(20):
            # Releasing pages and syncing reference the segment.
            while min(store.log._released_to, store.log.flushed_offset.value) < store.log.segments[0].end:  # noqa: ASYNC110
                await trio.sleep(0.001)
        oldest = store.log.segments[0].file.path.name
        with monkeypatch.context() as patch:
            patch.setattr(OsFile, "__del__", note_and_close)
            await store.log.delete_first()
            with trio.fail_after(20):
                while oldest not in closed_by:  # noqa: ASYNC110 (a worker lets go of its last job after it is answered)
                    await trio.sleep(0.001)
            assert closed_by[oldest] is not threading.main_thread()


async def dying(disk: MemoryDisk, store: MessageStore, step: int | None) -> int:
    """Waits until the checkpoint has the first offset of the flushed log; returns the number of disk steps.

    With a `step` the disk fails after that many more.
    """
    await trio.sleep(30)
    if step is not None:
        disk.die_at = len(disk.steps) + step
    return len(disk.steps)


def run_virtually(life: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
    return trio.run(life, *arguments, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("is_power_loss", [True, False])
def test_after_a_crash_during_a_deletion_no_segment_counts_as_missing(is_power_loss: bool) -> None:
    clock = at_hour(4)

    async def life(disk: MemoryDisk, step: int | None) -> int:
        async with open_small(disk, clock, delete_files_max=3, reserved_h=0.0, clean_interval_s=1e6) as store:
            await fill(store, 20)
            before = await dying(disk, store, step)
            assert await store.retention.clean() == 3
            return len(disk.steps) - before

    async def check(disk: MemoryDisk) -> int:
        names = disk.list_dir(ROOT / "commitlog")
        async with open_small(disk, clock) as store:
            assert store.log.min_offset == int(names[0])
            assert not store.damage.open
            await check_derived(store)
            return store.log.min_offset // SEGMENT

    begins = set()
    for step in range(run_virtually(life, MemoryDisk(), None) + 1):
        disk = MemoryDisk()
        with suppress(HalogError, OSError, ExceptionGroup):
            run_virtually(life, disk, step)
        begins.add(run_virtually(check, disk.power_loss(Random(step)) if is_power_loss else disk.kill()))
    assert begins == {0, 1, 2, 3}


@pytest.mark.parametrize("is_power_loss", [False, True])
def test_after_a_crash_during_a_reset_the_log_is_the_old_one_or_begins_at_the_new_offset(is_power_loss: bool) -> None:
    """It does not begin elsewhere, and no segment counts as missing."""
    clock = at_hour(4)

    async def made() -> bytes:
        async with open_small() as master:
            await fill(master, 20)
            return await all_bytes(master)

    async def life(disk: MemoryDisk, step: int | None) -> int:
        async with open_small(disk, clock, is_slave=True, clean_interval_s=1e6) as store:
            for start in (0, SEGMENT):
                await store.log.append_raw(start, log[start : start + SEGMENT])
            before = await dying(disk, store, step)
            await store.log.reset(5 * SEGMENT)
            await trio.sleep(30)
            return len(disk.steps) - before

    async def check(disk: MemoryDisk) -> int:
        async with open_small(disk, clock, is_slave=True) as store:
            assert not store.damage.open
            assert waiting_segment(disk, store.options) is None
            begin = store.log.min_offset
            assert store.log.max_offset.value > SEGMENT
            await check_derived(store)
            if begin:
                assert store.log.max_offset.value == begin
                assert not list(store.queues)
                await store.log.append_raw(begin, log[:SEGMENT])
        async with open_small(disk, clock, is_slave=True) as store:
            assert store.log.min_offset == begin
            return begin // SEGMENT

    log = run_virtually(made)
    begins = set()
    for step in range(run_virtually(life, MemoryDisk(), None) + 1):
        disk = MemoryDisk()
        with suppress(HalogError, OSError, ExceptionGroup):
            run_virtually(life, disk, step)
        begins.add(run_virtually(check, disk.power_loss(Random(step)) if is_power_loss else disk.kill()))
    assert begins == {0, 5}


def names_in_log(disk: MemoryDisk) -> list[int]:
    return [int(name) for name in disk.list_dir(ROOT / "commitlog")]


async def fill_and_expire(store: MessageStore, clock: WallClock) -> None:
    for number in range(60):
        await store.log.put([message(number, size=1000)])
    await dispatched(store)
    clock.now_ms += 1000 * 3_600_000


@pytest.mark.parametrize("fails", ["cancelled", "EMFILE"])
async def test_deletion_that_is_interrupted_leaves_no_gap(autojump_clock: MockClock, fails: str) -> None:
    """The file stayed, later ones were deleted, and the next start found the files in between missing."""
    clock, disk = WallClock(), MemoryDisk()
    disk.now_ms = clock.now_ms
    scope = trio.CancelScope()

    async def run_blocking(call: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if "_unlink" in getattr(call, "__name__", "") and not interrupted:
            interrupted.append(True)
            if fails == "EMFILE":
                raise OSError(errno.EMFILE, "Too many open files")
            scope.cancel()
            await trio.lowlevel.checkpoint()
        return call(*arguments)

    interrupted: list[bool] = []
    options = small_options(delete_files_max=1, delete_when_hours=frozenset())
    async with open_message_store(options, disk=disk, run_blocking=run_blocking, wall_clock_ms=clock) as store:
        await fill_and_expire(store, clock)
        with scope, suppress(DiskFull):
            await store.retention.clean(at_any_hour=True)
        assert interrupted
        for _ in range(3):
            await store.retention.clean(at_any_hour=True)
        names = names_in_log(disk)
        assert names[0] == store.log.min_offset > 0
        assert names == list(range(names[0], names[-1] + 1, SEGMENT))
        assert all(queue.min_offset > 0 for queue in store.queues)
    async with open_small(disk, clock) as store:
        assert not store.damage.open


async def test_full_disk_postpones_what_follows_a_deletion(autojump_clock: MockClock) -> None:
    """The terms' file could not be written, and a member ended exactly when space became free."""
    clock, disk = WallClock(), MemoryDisk()
    disk.now_ms = clock.now_ms
    async with open_small(disk, clock, delete_when_hours=frozenset(range(24))) as store:
        await store.epochs.append(1, 0)
        await store.log.put([message(0, size=1000)])
        await store.epochs.append(2, store.log.max_offset.value)
        await fill_and_expire(store, clock)
        disk.refuse = lambda operation, path: errno.ENOSPC if "epochFile" in str(path) else None
        await trio.sleep(100)
        assert store.log.min_offset > 0
        assert len(store.epochs.entries) == 2
        disk.refuse = lambda operation, path: None
        await trio.sleep(20)
        assert len(store.epochs.entries) == 1


@pytest.mark.parametrize("folder", ["consumequeue", "index"])
async def test_files_that_a_full_disk_does_not_delete_are_deleted_later(folder: str, autojump_clock: MockClock) -> None:
    """As a file system that copies on write: they stayed until the next start."""
    disk, clock = MemoryDisk(), at_hour(12)
    disk.now_ms = clock.now_ms
    async with open_small(disk, clock, delete_files_max=1000) as store:
        await fill_and_expire(store, clock)
        disk.refuse = lambda operation, path: errno.ENOSPC if operation == "unlink" and folder in path.parts else None
        with pytest.raises(DiskFull):
            await store.retention.clean(at_any_hour=True)
        disk.refuse = lambda operation, path: None
        await store.retention.clean(at_any_hour=True)
        [queue] = store.queues
        assert queue.files.starts[0] > 0
        names = [f"{start * 20:020d}" for start in queue.files.starts]
        assert disk.list_dir(ROOT / "consumequeue" / "T" / "0") == names
        assert store.index is not None
        assert disk.list_dir(ROOT / "index") == [file.path.name for file in store.index.files]
        await check_derived(store)


async def test_a_checkpoint_that_was_written_in_part_is_written_again(autojump_clock: MockClock) -> None:
    """Although its content is again that of the last complete write."""
    disk, clock = MemoryDisk(), at_hour(12)
    disk.now_ms = clock.now_ms
    path = ROOT / "checkpoint"
    async with open_small(disk, clock) as store:
        await fill_and_expire(store, clock)
        await store.checkpointer.save(with_derived=False)
        whole = disk.read_bytes(path)
        disk.taken_bytes = 84  # the offset at which the log begins, without its CRC
        disk.refuse = lambda operation, path: errno.ENOSPC if path.name == "checkpoint" else None
        with pytest.raises(DiskFull):
            await store.retention.clean(at_any_hour=True)
        assert disk.read_bytes(path) != whole
        disk.refuse = lambda operation, path: None
        await store.checkpointer.save(with_derived=False)
        assert disk.read_bytes(path) == whole


async def test_files_that_were_deleted_by_hand_do_not_end_the_store(tmp_path: Path) -> None:
    """As operators of RocketMQ do it on a full disk, whose broker goes on, too."""
    async with open_message_store(small_options(root=tmp_path), run_blocking=run_inline) as store:
        await store.log.put([message(number, size=400) for number in range(40)])
        await dispatched(store)
        assert store.index is not None
        store.index.files[0].path.unlink()
        for segment in store.log.segments[:3]:
            segment.file.path.unlink()
        del segment
        assert await store.retention.clean(at_any_hour=True) == 3
        assert store.log.min_offset == 3 * SEGMENT
        assert store.index.files[0].end_physical_offset >= store.log.min_offset
    async with open_message_store(small_options(root=tmp_path), run_blocking=run_inline) as store:
        assert (store.log.min_offset, store.damage.open) == (3 * SEGMENT, [])
