"""New index entries, in memory until a worker writes them: found, written once, never lost."""

import errno
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from ha.errors import DiskFailed
from ha.protocol.record_digest import KEY
from ha.protocol.store_files import INDEX_ENTRY, INDEX_ENTRY_SIZE, index_entry_position, index_file_size
from ha.store import key_index
from ha.store.index_file import IndexFile
from ha.store.key_index import KeyIndex
from tests.store.disks import MemoryDisk
from tests.store.stores import ROOT, check_derived, dispatched, message, open_small

Entry = tuple[int, int, int, int]
SLOTS, ENTRIES = 5, 40
NO_LIMIT = 1 << 30


def put(file: IndexFile, begin: int, end: int) -> None:
    """Returns one key of each record from number `begin` to `end`, 100 bytes long and a second apart."""
    keys = b"".join(KEY.pack(number * 7, number * 100, 1000 * number) for number in range(begin, end))
    assert file.put(keys, NO_LIMIT) == end - begin


def chained(count: int) -> list[Entry]:
    """Returns the entries of records 1 to `count`, chained according to the specification."""
    newest: dict[int, int] = {}
    entries = []
    for number in range(1, count + 1):
        key_hash = number * 7
        entries.append((key_hash, number * 100, number - 1, newest.get(key_hash % SLOTS, 0)))
        newest[key_hash % SLOTS] = number
    return entries


def on_disk(file: IndexFile, count: int) -> list[Entry]:
    raw = file.file.pread(count * INDEX_ENTRY_SIZE, index_entry_position(SLOTS, 1))
    return list(INDEX_ENTRY.iter_unpack(raw))


def new_file() -> IndexFile:
    path = Path("/index/20231114221320000")
    file = IndexFile(MemoryDisk().create(path, index_file_size(SLOTS, ENTRIES), allocate=False), SLOTS, ENTRIES)
    file.load_slots()
    return file


@pytest.mark.parametrize("written", [0, 1, 12, 30])
def test_entries_are_read_before_and_after_they_are_written(written: int) -> None:
    file = new_file()
    put(file, 1, written + 1)
    file.write(file.take_unwritten())
    put(file, written + 1, 31)
    assert on_disk(file, 30)[written:] == [(0, 0, 0, 0)] * (30 - written)
    expected = chained(30)
    assert file.entries(1, 30) == expected
    for begin in range(1, 31):
        for count in (1, 2, 17, 50):
            assert file.entries(begin, count) == expected[begin - 1 : begin - 1 + count]
    for number in range(1, 31):
        assert file.find(number * 7, 64, 0, 1 << 50) == [number * 100]
    assert file.trouble(file.next_entry, file.slots) == ""
    file.write(file.take_unwritten())
    assert on_disk(file, 30) == file.entries(1, 30) == expected
    assert file.trouble(file.next_entry, file.slots) == ""


@pytest.mark.parametrize("written", [2, 12, 20, 30])
@pytest.mark.parametrize("kept", [1, 11, 12, 13, 29])
def test_truncation_keeps_earlier_entries_in_file_and_memory(written: int, kept: int) -> None:
    file = new_file()
    put(file, 1, written + 1)
    file.write(file.take_unwritten())
    put(file, written + 1, 31)
    file.truncate(kept + 1, kept * 1000)
    assert file.entries(1, 30) == chained(kept)
    put(file, kept + 1, 26 if kept < 26 else 31)
    count = file.next_entry - 1
    assert file.entries(1, 40) == chained(count)
    file.write(file.take_unwritten())
    assert on_disk(file, count) == chained(count)
    assert file.trouble(file.next_entry, file.slots) == ""


def index_steps(disk: MemoryDisk) -> list[tuple[str, str]]:
    """Operations on index files, whose names are the only ones of 17 digits."""
    return [step for step in disk.steps if len(step[1]) == 17]


async def test_dispatch_leaves_the_index_file_alone(autojump_clock: object) -> None:
    disk = MemoryDisk()
    async with open_small(disk, derived_flush_interval_s=1.0, index_entry_count=4000) as store:
        await store.log.put([message(0)])
        await dispatched(store)
        del disk.steps[:]
        await store.log.put([message(number) for number in range(1, 30)])
        await dispatched(store)
        await check_derived(store)
        assert index_steps(disk) == []
        await trio.sleep(2.5)
        await check_derived(store)
        assert "sync" in [operation for operation, _ in index_steps(disk)]


async def test_put_writes_excess_entries_unless_a_worker_saves(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "_NEW_BYTES_MAX", 10 * INDEX_ENTRY_SIZE)
    monkeypatch.setattr(key_index, "_NEW_BYTES_MAX_SAVING", 20 * INDEX_ENTRY_SIZE)
    disk = MemoryDisk()
    async with open_small(disk, derived_flush_interval_s=1e6, index_entry_count=4000) as store:
        assert store.index is not None

        async def writes(begin: int, end: int) -> list[int]:
            """Messages, of three keys each, at which the index file is written."""
            found = []
            for number in range(begin, end):
                del disk.steps[:]
                await store.log.put([message(number)])
                await check_derived(store)
                found += [number] * len(index_steps(disk))
            return found

        await writes(0, 1)  # the file's header
        assert await writes(1, 10) == [4, 8]
        taken = store.index.take_unwritten()
        store.index.write(taken)
        assert await writes(10, 19) == [17]
        store.index.give_back(taken)
        assert await writes(19, 25) == [21]


async def test_put_of_excess_entries_notices_a_full_disk(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "_NEW_BYTES_MAX", 10 * INDEX_ENTRY_SIZE)
    disk = MemoryDisk()

    def refuse(operation: str, path: Path) -> int | None:
        return errno.ENOSPC if operation == "pwrite" and path.parent == ROOT / "index" else None

    async with open_small(disk, derived_flush_interval_s=1.0, index_entry_count=4000) as store:
        await store.log.put([message(0)])
        await dispatched(store)
        disk.refuse = refuse
        await store.log.put([message(number) for number in range(1, 4)])
        await dispatched(store)
        await store.log.put([message(number) for number in range(4, 8)])
        await trio.sleep(2.5)
        assert store.dispatcher.paused_reason.startswith("disk full")
        disk.refuse = lambda operation, path: None
        await dispatched(store)
        await check_derived(store)
    disk.locked.clear()
    async with open_small(disk, index_entry_count=4000) as store:
        await check_derived(store)


@pytest.mark.parametrize("taken_bytes", [1, INDEX_ENTRY_SIZE, 150])
def test_partly_written_entries_are_written_again(taken_bytes: int) -> None:
    disk = MemoryDisk()
    path = Path("/index/20231114221320000")
    file = IndexFile(disk.create(path, index_file_size(SLOTS, ENTRIES), allocate=False), SLOTS, ENTRIES)
    file.load_slots()
    put(file, 1, 11)
    disk.taken_bytes = taken_bytes
    disk.refuse = lambda operation, path: errno.ENOSPC if operation == "pwrite" else None
    taken = file.take_unwritten()
    with pytest.raises(OSError, match="ENOSPC") as refused:
        file.write(taken)
    file.give_back(taken)
    raw = file.file.pread(200, index_entry_position(SLOTS, 1))
    assert len(raw.rstrip(b"\0")) <= taken_bytes
    put(file, 11, 21)  # while the error is kept, as by a thread that has not delivered it yet
    disk.refuse = lambda operation, path: None
    file.write(file.take_unwritten())
    assert on_disk(file, 20) == chained(20)
    assert refused.value.errno == errno.ENOSPC


async def test_a_file_that_a_full_disk_left_without_header_is_used_later(autojump_clock: object) -> None:
    """Each attempt made another one. The next start deleted them, with all index files that had followed."""
    disk = MemoryDisk()

    def refuse(operation: str, path: Path) -> int | None:
        return errno.ENOSPC if operation == "pwrite" and path.parent == ROOT / "index" else None

    async with open_small(disk) as store:
        await store.log.put([message(number) for number in range(13)])  # 39 keys: the first file is full
        await dispatched(store)
        await trio.sleep(15)
        disk.refuse = refuse
        await store.log.put([message(13)])
        await trio.sleep(5)
        assert store.dispatcher.paused_reason.startswith("disk full")
        disk.refuse = lambda operation, path: None
        await check_derived(store)
        assert len(disk.list_dir(ROOT / "index")) == 2
    async with open_small(disk) as store:
        assert disk.list_dir(ROOT / "index") == [file.path.name for file in store.index.files]  # type: ignore[union-attr]
        await check_derived(store)


def test_a_query_of_a_file_whose_slots_are_dropped_meanwhile_reads_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker drops the slots of a full file when it is written."""
    file = new_file()
    put(file, 1, 31)
    file.write(file.take_unwritten())
    tables = iter([file.slots])
    monkeypatch.setattr(IndexFile, "slots", property(lambda self: next(tables, None)), raising=False)
    assert [file.find(70, 64, 0, 1 << 50), file.find(70, 64, 0, 1 << 50)] == [[1000], [1000]]


async def test_keys_that_wait_for_a_worker_survive_a_truncation_behind_their_records(autojump_clock: object) -> None:
    """As while the disk is too full for them."""
    async with open_small(derived_flush_interval_s=1e6) as store:
        assert store.index is not None
        await store.log.put([message(number) for number in range(3)])
        await dispatched(store)
        taken = store.index.take_unwritten()
        await store.log.put([message(number) for number in range(3, 6)])
        [cut] = await store.log.put([message(6)])
        await dispatched(store)
        store.index.give_back(taken)
        assert store.index.has_pending
        await store.truncate(cut.physical_offset)
        await check_derived(store)


@pytest.mark.parametrize("is_rebuilt", [False, True])
async def test_keys_are_found_after_a_kill_in_the_middle_of_deleting_index_files(is_rebuilt: bool) -> None:
    """By a start that finds one damaged, or by a rebuild. The files left had gaps."""
    stopped = MemoryDisk()
    async with open_small(stopped) as store:
        await store.log.put([message(number) for number in range(60)])
        await dispatched(store)
    names = stopped.list_dir(ROOT / "index")
    assert len(names) == 5
    for deleted_count in range(1, 5):
        disk = stopped.kill()
        if not is_rebuilt:
            disk.inodes[ROOT / "index" / names[1]].content.pop()
        await killed_after(disk, deleted_count)
        async with open_small(disk.kill()) as store:
            await check_derived(store)


async def killed_after(disk: MemoryDisk, deleted_count: int) -> None:
    """Starts the store and rebuilds its index; the process is killed after it has deleted some index files."""
    left = iter(range(deleted_count))

    def refuse(operation: str, path: Path) -> None:
        if operation == "unlink" and path.parent == ROOT / "index" and next(left, None) is None:
            disk.die_at = 0
            raise OSError(errno.EIO, "killed")

    disk.refuse = refuse
    with suppress(DiskFailed):
        async with open_small(disk) as store:
            with suppress(OSError):
                await store.scrub._rebuild_index()


def test_a_file_that_the_index_begins_to_use_is_not_dropped() -> None:
    """As by dispatch, after a truncation, while a rebuild of the index adds the file."""
    index = KeyIndex(
        MemoryDisk(),
        Path("/index"),
        slot_count=SLOTS,
        entry_count=ENTRIES,
        index_tags=False,
        wall_clock_ms=lambda: 1_700_000_000_000,
    )
    index.make_spare()
    spare = index._spare
    assert spare is not None
    worker = threading.Thread(target=index.drop_spare)
    write_header = spare.write_header

    def write_while_it_is_dropped() -> None:
        worker.start()
        worker.join(0.2)
        write_header()

    spare.write_header = write_while_it_is_dropped  # type: ignore[method-assign]
    index.put(KEY.pack(1, 100, 1000), 100, 100)
    worker.join()
    assert index.files == [spare]
    assert index._disk.exists(spare.path)
