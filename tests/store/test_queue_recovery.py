"""What a start does with consume queues that lack files, entries or their end."""

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ha.errors import CorruptLog, DiskFailed
from ha.protocol.store_files import BLANK_SIZE, ENTRY
from ha.store.consume_queue import ConsumeQueue, QueueEntry
from ha.store.files import OsDisk
from ha.store.message_store import open_message_store
from ha.store.open_files import OpenFiles
from ha.store.queue_ends import QUEUE_ENDS_FILE
from ha.store.store_recovery import FLUSHED_FIRST
from tests.store.bad_sectors import bad_sectors
from tests.store.damaged_stores import made, segment
from tests.store.disks import MemoryDisk, MemoryFile, Worker
from tests.store.stores import (
    ROOT,
    WallClock,
    all_bytes,
    check_derived,
    dispatched,
    message,
    open_small,
    small_options,
)

QUEUE = ROOT / "consumequeue" / "T" / "0"


async def test_a_queue_is_truncated_although_the_disk_can_not_read_old_entries(tmp_path: Path) -> None:
    """A start that had to remove entries of lost records failed, and so did all later ones."""
    async with open_small(OsDisk(), root=tmp_path) as store:
        results = await store.log.put([message(number) for number in range(100)])
        await dispatched(store)
        [queue] = store.queues
        with bad_sectors() as bad:
            for start in range(0, 64, 8):
                bad.add(tmp_path / "consumequeue/T/0" / f"{start * 20:020d}", 0)
            assert queue.truncate(results[90].physical_offset) == 10
            assert bad.failed_count > 0
        assert queue.max_offset == 90
        assert queue.read(89, 1)[0].physical_offset == results[89].physical_offset


async def test_a_queue_keeps_its_start_while_the_disk_can_not_read_the_entries_there(tmp_path: Path) -> None:
    """Retention ended the node, and so did each later start."""
    async with open_small(OsDisk(), root=tmp_path) as store:
        results = await store.log.put([message(number) for number in range(100)])
        await dispatched(store)
        [queue] = store.queues
        begin = results[20].physical_offset
        with bad_sectors() as bad:
            bad.add(tmp_path / "consumequeue/T/0" / f"{16 * 20:020d}", 0)
            assert store.queues.correct_min(begin) == 0
            assert (bad.failed_count, queue.min_offset) == (1, 0)
            assert queue.read(24, 1)
        assert store.queues.correct_min(begin) == 2
        assert queue.min_offset == 20


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("folder", ["consumequeue", "index"])
async def test_missing_queues_or_index_are_rebuilt(folder: str, is_clean: bool) -> None:
    disk, _ = await made(is_clean=is_clean)
    before = {path: bytes(i.content) for path, i in disk.inodes.items() if folder in path.parts}
    for path in before:
        del disk.inodes[path]
    async with open_small(disk) as store:
        await check_derived(store)
    after = {path: bytes(i.content) for path, i in disk.inodes.items() if folder in path.parts}
    assert sorted(after.values()) == sorted(before.values())


async def test_a_queue_with_a_missing_file_is_rebuilt() -> None:
    disk, _ = await made(60)
    del disk.inodes[ROOT / "consumequeue" / "T" / "0" / f"{160:020d}"]
    async with open_small(disk) as store:
        await check_derived(store)


def zero_the_end(disk: MemoryDisk) -> None:
    content = disk.inodes[QUEUE / f"{8 * 20:020d}"].content
    content[2 * 20 :] = bytes(6 * 20)


def lose_the_last_file(disk: MemoryDisk) -> None:
    del disk.inodes[QUEUE / f"{8 * 20:020d}"]


def lose_the_queue(disk: MemoryDisk) -> None:
    for path in [path for path in disk.inodes if path.parent == QUEUE]:
        del disk.inodes[path]


def point_behind_the_log(disk: MemoryDisk) -> None:
    disk.inodes[QUEUE / f"{8 * 20:020d}"].content[2 * 20] ^= 0x10


@pytest.mark.parametrize("harm", [zero_the_end, lose_the_last_file, lose_the_queue, point_behind_the_log])
@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_queue_that_lost_its_end_while_the_node_was_down_gets_it_back(
    harm: Callable[[MemoryDisk], None], is_clean: bool
) -> None:
    """The queue itself looks as if it ended there. Its next offsets would be used twice."""
    disk, clock = MemoryDisk(), WallClock()
    async with open_small(disk, clock) as store:
        for number in range(30):
            clock.now_ms += 5000
            await store.log.put([message(number, size=400, queue_id=number % 2 if number < 22 else 1)])
        await check_derived(store)
    if not is_clean:
        disk.write_bytes(ROOT / "abort", b"")
    harm(disk)
    async with open_small(disk, clock) as store:
        await check_derived(store)
        [result] = await store.log.put([message(99)])
        assert result.queue_offset == 11
        await check_derived(store)


@pytest.mark.parametrize("change", ["file size", "no files", "no last file"])
@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_queue_whose_messages_are_deleted_keeps_its_end_when_its_files_are_rebuilt(
    change: str, is_clean: bool, autojump_clock: MockClock
) -> None:
    """Consumers have committed its end, and would miss messages with earlier queue offsets."""
    disk, clock = MemoryDisk(), WallClock()
    disk.now_ms = clock.now_ms
    old = ROOT / "consumequeue" / "Old" / "0"
    async with open_small(disk, clock, flush_mode="SYNC_FLUSH") as store:
        await store.log.put([message(number, topic="Old") for number in range(20)])
        await store.flusher.flush()
        await dispatched(store)
        early = disk.inodes[old / f"{8 * 20:020d}"]
        await store.log.put([message(number, size=1000) for number in range(40)])
        await store.flusher.flush()
        await dispatched(store)
        clock.now_ms += 1000 * 3_600_000
        while await store.retention.clean(at_any_hour=True):
            pass
    assert disk.list_dir(old) == [f"{16 * 20:020d}"]
    if not is_clean:
        disk.write_bytes(ROOT / "abort", FLUSHED_FIRST)
    if change != "file size":
        del disk.inodes[old / f"{16 * 20:020d}"]
    if change == "no last file":
        disk.inodes[old / f"{8 * 20:020d}"] = early
    for number in range(20, 23):
        async with open_small(disk, clock, queue_entry_count=16 if change == "file size" else 8) as store:
            [result] = await store.log.put([message(1, topic="Old")])
            assert result.queue_offset == number
            await dispatched(store)
            queue = store.queues.get("Old", 0)
            assert queue is not None
            assert (queue.min_offset, queue.max_offset) == (20, number + 1)


async def test_the_end_of_a_queue_whose_records_a_crash_lost_is_not_restored_later() -> None:
    """A slave gets these records again from its master, with the same queue offsets."""
    disk, clock = MemoryDisk(), WallClock()
    async with open_small(disk, clock) as store:
        await store.log.put([message(number) for number in range(20)])
        await dispatched(store)
        end = store.log.max_offset.value
    ends = disk.read_bytes(ROOT / QUEUE_ENDS_FILE)
    disk.inodes.clear()
    async with open_small(disk, clock) as store:
        await store.log.put([message(number) for number in range(18)])
        await dispatched(store)
    disk.write_bytes(ROOT / QUEUE_ENDS_FILE, ends)
    disk.write_bytes(ROOT / "abort", b"")
    for _ in range(2):
        async with open_small(disk, clock, is_slave=True) as store:
            assert store.log.max_offset.value < end
            await dispatched(store)
            assert store.queues.next_queue_offset("T", 0) == 18


async def stopped_store() -> tuple[MemoryDisk, WallClock, list[QueueEntry]]:
    """A store with 70 messages in one queue, and the entries of these."""
    disk, clock = MemoryDisk(), WallClock()
    async with open_small(disk, clock) as store:
        for number in range(70):
            clock.now_ms += 5000
            await store.log.put([message(number, size=400)])
        await check_derived(store)
        [queue] = store.queues
        return disk, clock, queue.read(0, 70)


@pytest.mark.parametrize("first", range(26, 38))
async def test_zeros_amid_a_queue_leave_its_end_in_place_after_a_crash(first: int) -> None:
    """The search for the entries that are written again ended at the zeros, and what follows them was removed."""
    disk, clock, entries = await stopped_store()
    disk.write_bytes(ROOT / "abort", b"")
    for position in range(first, first + 3):
        content = disk.inodes[QUEUE / f"{position // 8 * 8 * 20:020d}"].content
        content[position % 8 * 20 : position % 8 * 20 + 20] = bytes(20)
    async with open_small(disk, clock) as store:
        await dispatched(store)
        [queue] = store.queues
        assert (queue.min_offset, queue.max_offset) == (0, 70)
        assert queue.read(0, first) + queue.read(first + 3, 70) == entries[:first] + entries[first + 3 :]


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("position", [*range(30, 41), 68, 69])
async def test_a_damaged_size_in_an_entry_hides_no_record(position: int, is_clean: bool) -> None:
    """If it was the last entry that stayed, the records behind it were taken for ones that have an entry."""
    disk, clock, _ = await stopped_store()
    if not is_clean:
        disk.write_bytes(ROOT / "abort", b"")
    disk.inodes[QUEUE / f"{position // 8 * 8 * 20:020d}"].content[position % 8 * 20 + 8] ^= 1
    async with open_small(disk, clock, recovery_scan_bytes=20_000) as store:
        [result] = await store.log.put([message(70)])
        assert result.queue_offset == 70
        await dispatched(store)
        [queue] = store.queues
        assert queue.max_offset == 71
        await store.scrub.wait_round()
        await check_derived(store)


async def test_unreadable_queue_ends_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    disk, _ = await made()
    content = disk.inodes[ROOT / QUEUE_ENDS_FILE].content
    content[-3] ^= 1
    async with open_small(disk) as store:
        await check_derived(store)
    assert "queue.ends_damaged" in caplog.text


async def test_a_queue_that_ends_later_than_recorded_is_kept() -> None:
    """RocketMQ used the store meanwhile."""
    disk, _ = await made()
    early = bytes(disk.inodes[ROOT / QUEUE_ENDS_FILE].content)
    async with open_small(disk) as store:
        await store.log.put([message(number) for number in range(30, 40)])
    disk.write_bytes(ROOT / QUEUE_ENDS_FILE, early)
    async with open_small(disk) as store:
        assert store.queues.rebuild_from is None
        await check_derived(store)


QUEUE_ID_END, QUEUE_OFFSET_END = 15, 27
"""Position of the last byte of a field in a record"""


async def flipped(number: int, field_end: int, bit: int) -> tuple[MemoryDisk, list[tuple[int, int]]]:
    """A store of a process that was killed, with a flipped bit in the head of a record that has no checksum."""
    disk, places = await made(is_clean=False)
    path, position = segment(disk, places[number][0])
    disk.inodes[path].content[position + field_end - bit // 8] ^= 1 << bit % 8
    return disk, places


@pytest.mark.parametrize("number", [0, 6, 28])
@pytest.mark.parametrize("bit", [10, 40, 57])
async def test_a_flipped_queue_offset_does_not_move_its_queue(number: int, bit: int) -> None:
    """The queue began at the wrong offset, and the records with lower ones, before and after it, were not in it."""
    disk, places = await flipped(number, QUEUE_OFFSET_END, bit)
    for _ in range(2):
        async with open_small(disk) as store:
            await dispatched(store)
            queue = store.queues.get("T", 0)
            assert queue is not None
            assert queue.min_offset <= 1  # RocketMQ, too, lets it begin behind blank entries
            assert queue.max_offset == 15
            found = [each.physical_offset for each in queue.read(queue.min_offset, 15) if each.size != BLANK_SIZE]
            assert found == [place for place, _ in places[::2] if place != places[number][0]]
    async with open_small(disk) as store:
        [result] = await store.log.put([message(99)])
        assert result.queue_offset == 15


@pytest.mark.parametrize("kill_count", [1, 2])
async def test_a_flipped_queue_id_does_not_free_a_queue_offset(kill_count: int) -> None:
    """The next message got the offset of one that had been acknowledged, and that consumers may have seen."""
    disk, places = await flipped(28, QUEUE_ID_END, 2)
    for number in range(kill_count):
        if number:
            disk.write_bytes(ROOT / "abort", b"")
        async with open_small(disk) as store:
            await dispatched(store)
            queue = store.queues.get("T", 0)
            assert queue is not None
            assert (queue.min_offset, queue.max_offset) == (0, 15)
    async with open_small(disk) as store:
        [result] = await store.log.put([message(99)])
        assert result.queue_offset == 15
        await dispatched(store)
        queue = store.queues.get("T", 0)
        assert queue is not None
        found = [each.physical_offset for each in queue.read(0, 16) if each.size != BLANK_SIZE]
        assert found == [place for place, _ in places[:28:2]] + [result.physical_offset]


async def test_the_scrub_restores_the_entries_that_a_slightly_wrong_queue_offset_displaced() -> None:
    disk, places = await flipped(6, QUEUE_OFFSET_END, 2)
    async with open_small(disk) as store:
        await dispatched(store)
        await store.scrub.wait_round()
        queue = store.queues.get("T", 0)
        assert queue is not None
        found = [each.physical_offset for each in queue.read(0, 15) if each.size != BLANK_SIZE]
        assert found == [place for place, _ in places[::2] if place != places[6][0]]


async def test_files_among_the_queues_are_ignored(tmp_path: Path) -> None:
    async with open_message_store(small_options(root=tmp_path)) as store:
        await store.log.put([message(1)])
        await dispatched(store)
    for name in (".DS_Store", "T/README"):
        (tmp_path / "consumequeue" / name).write_bytes(b"x")
    async with open_message_store(small_options(root=tmp_path)) as store:
        queue = store.queues.get("T", 0)
        assert queue is not None
        assert queue.max_offset == 1


async def test_a_start_that_is_killed_while_it_dispatches_what_a_clean_stop_left_loses_nothing(
    autojump_clock: MockClock,
) -> None:
    """A slave on a full disk may stop before all is dispatched. Then only some queues had the records."""
    async with open_small() as master:
        await master.log.put([message(number, size=60, queue_id=number % 2) for number in range(8)])
        raw = await all_bytes(master)
    stopped = MemoryDisk()
    async with open_small(stopped, is_slave=True, index_enabled=False) as slave:
        stopped.refuse = lambda operation, path: errno.ENOSPC if "consumequeue" in path.parts else None
        await slave.log.append_raw(0, raw)
        await trio.sleep(1)
    stopped.refuse = lambda operation, path: None
    assert not stopped.exists(ROOT / "abort")
    for die_at in range(100):
        disk = stopped.kill()
        disk.die_at = die_at
        with suppress(DiskFailed):
            async with open_small(disk, is_slave=True, index_enabled=False):
                break
        disk = disk.kill()
        async with open_small(disk, is_slave=True, index_enabled=False) as slave:
            await check_derived(slave)
    assert die_at > 5


async def test_a_start_that_is_killed_while_it_deletes_a_damaged_queue_hides_no_messages() -> None:
    """The files left were taken for a queue that begins later."""
    stopped, _ = await made(60)
    del stopped.inodes[QUEUE / f"{2 * 160:020d}"]
    for die_at in range(10):
        disk = stopped.kill()
        disk.die_at = die_at
        with suppress(DiskFailed):
            async with open_small(disk):
                pass
        async with open_small(disk.kill()) as store:
            await check_derived(store)


async def test_the_entry_after_a_gap_shows_that_a_clean_log_has_lost_its_end() -> None:
    """The blank entries in the gap hid it: the start removed the record, and others got its offsets."""
    disk = MemoryDisk()
    async with open_small(disk) as store:
        first = (await store.log.put([message(0)]))[0]
        await dispatched(store)
        store.log.set_next_queue_offsets({("T", 0): 4})
        second = (await store.log.put([message(1)]))[0]
        await dispatched(store)
        queue = store.queues.get("T", 0)
        assert queue is not None
        assert [entry.size for entry in queue.read(0, 5)] == [first.size, *3 * [BLANK_SIZE], second.size]
        assert queue.first_record_from(first.physical_offset + 1) == second.physical_offset
    for path in [path for path in disk.inodes if path.parent.name == "checksums"]:
        del disk.inodes[path]
    del disk.inodes[ROOT / "checkpoint"]
    content = disk.inodes[ROOT / "commitlog" / f"{0:020d}"].content
    content[second.physical_offset :] = bytes(len(content) - second.physical_offset)
    with pytest.raises(CorruptLog, match="a consume queue has the record"):
        async with open_small(disk):
            pass


def test_searches_for_records_pass_a_gap_with_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, the blank entries of a gap of a whole file took 300,000 reads."""
    disk = MemoryDisk()
    queue = ConsumeQueue(disk, OpenFiles(disk), QUEUE, "T", 0, 1000)
    queue.append(700, [ENTRY.pack(4096, 100, 0)])
    queue.append(1600, [ENTRY.pack(8192, 100, 0)])
    reads: list[int] = []
    pread = MemoryFile.pread

    def note(self: MemoryFile, size: int, position: int) -> bytes:
        reads.append(size)
        return pread(self, size, position)

    monkeypatch.setattr(MemoryFile, "pread", note)
    assert queue.first_record_from(4097) == 8192
    assert queue.last_record_before(8192) == 4096
    assert len(reads) < 50
    assert queue.first_record_from(8193) is None
    assert queue.last_record_before(4096) == -1


@pytest.mark.parametrize("operation", ["create", "pwrite", "sync", "rename"])
async def test_a_queue_file_that_is_too_short_stays_until_its_successor_is_complete(
    operation: str, autojump_clock: MockClock
) -> None:
    """It was deleted first: the next append found no file, and ended the node."""
    disk = MemoryDisk()
    async with open_small(disk, scrub_bytes_per_s=0) as store:
        await store.log.put([message(number) for number in range(12)])
        await dispatched(store)
        del disk.inodes[QUEUE / f"{8 * 20:020d}"].content[2 * 20 :]
        disk.refuse = lambda refused, path: errno.EMFILE if refused == operation and path.parent == QUEUE else None
        await store.scrub.round()
        assert disk.size(QUEUE / f"{8 * 20:020d}") == 2 * 20
        disk.refuse = lambda refused, path: None
        await store.scrub.round()
        await store.log.put([message(12)])
        await check_derived(store)
    names = [f"{start * 20:020d}" for start in (0, 8)]
    assert disk.list_dir(QUEUE) == names
    disk.write_bytes(QUEUE / f"{names[1]}.whole", b"")  # as a crash leaves it
    async with open_small(disk):
        assert disk.list_dir(QUEUE) == names


async def test_a_worker_completes_a_queue_file_that_dispatch_does_not_write_to(autojump_clock: MockClock) -> None:
    disk = MemoryDisk()
    worker = Worker()
    completed: list[tuple[str, bool]] = []

    def note(operation: str, path: Path) -> None:
        if operation == "rename" and QUEUE in path.parents:
            completed.append((path.name, worker.is_working))

    options = small_options(scrub_bytes_per_s=0)
    async with open_message_store(options, disk=disk, run_blocking=worker.run, wall_clock_ms=WallClock()) as store:
        await store.log.put([message(number) for number in range(20)])
        await dispatched(store)
        disk.refuse = note
        names = [f"{start * 20:020d}" for start in (0, 8, 16)]
        for name in names:
            del disk.inodes[QUEUE / name].content[2 * 20 :]
        await store.scrub.round()
        assert [(name.removesuffix(".whole"), worked) for name, worked in completed] == [
            (names[0], True),
            (names[1], True),
            (names[2], False),
        ]
        await check_derived(store)
