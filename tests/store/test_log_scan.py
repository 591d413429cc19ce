"""Scans behind the end of a log whose last segment is reserved and mostly unwritten."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_record
from ha.protocol.store_files import Checkpoint
from ha.store.files import File, OsFile
from ha.store.log_scan import LogScan
from ha.store.mapped_file import Segment
from ha.store.message_store import open_message_store
from ha.store.options import StoreOptions
from ha.store.recovery import LogRecovery
from ha.store.rewrite import write_again
from ha.store.segment_files import ZeroFilled
from tests.store.disks import run_inline
from tests.store.stores import dispatched, message, open_small, small_options

MIB = 1 << 20
SIZE = 256 * MIB
READ_AHEAD = 128 << 10


class ReservedFile:
    """Like ext4 after posix_fallocate: reserved space is no data until it is read; then its
    pages are in the cache, with some more that the kernel read ahead, and count as data."""

    path = Path("00000000000000000000")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.data_end = -(-len(content) // 4096) * 4096
        self.read_bytes = 0

    def pread(self, size: int, position: int) -> bytes:
        end = min(position + size, SIZE)
        self.read_bytes += end - position
        self.data_end = max(self.data_end, min(end + READ_AHEAD, SIZE))
        return self.content[position:end].ljust(end - position, b"\0")

    def pwrite(self, content: bytes, position: int) -> None:
        self.content = self.content[:position] + content + self.content[position + len(content) :]

    def _evict(self, position: int, size: int) -> None:
        if position + size == SIZE:
            self.data_end = max(-(-position // 4096) * 4096, -(-len(self.content) // 4096) * 4096)

    def next_range(self, position: int) -> tuple[int, int] | None:
        return (position, self.data_end) if position < self.data_end else None


class ShortFile(ReservedFile):
    """A file that another program has truncated after its content. Fails a scan that never ends."""

    def pread(self, size: int, position: int) -> bytes:
        self.read_bytes += 1
        assert self.read_bytes < 1000
        return self.content[position : position + size]

    def sync(self) -> None:
        pass


def record(physical_offset: int, queue_offset: int) -> bytes:
    return encode_record(
        Message("T", 0, bytes(1000)),
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        store_timestamp_ms=1_700_000_000_000 + queue_offset,
        store_host=bytes(8),
    )


def log_of(count: int, gap: int = 0) -> tuple[bytes, int]:
    """Makes `count` records, and one more behind a gap of zeros, if any; returns the end of the first ones."""
    log = b""
    for number in range(count):
        log += record(len(log), number)
    end = len(log)
    if gap:
        log += bytes(gap)
        log += record(len(log), count)
    return log, end


def look_behind(content: bytes, end: int) -> tuple[int | None, int]:
    """Returns the position of the next good record, and how much was read to find it."""
    file: File = ReservedFile(content)  # type: ignore[assignment]
    scan = LogScan([Segment(0, SIZE, file)], StoreOptions(root=Path("/store"), segment_size=SIZE), is_clean=True)
    found = scan.next_good_record(end, 1_700_000_000_000)
    return None if found is None else found.physical_offset, file.read_bytes  # type: ignore[attr-defined]


def test_reserved_space_is_not_read() -> None:
    content, end = log_of(50)
    found, read_bytes = look_behind(content, end)
    assert found is None
    assert read_bytes < MIB


def test_a_record_behind_a_gap_is_found() -> None:
    content, end = log_of(50, gap=100_000)
    found, _ = look_behind(content, end)
    assert found == end + 100_000


def test_reserved_space_is_not_zeroed() -> None:
    content, end = log_of(50)
    file = ReservedFile(content + b"a torn record")
    OsFile.zero(file, end, SIZE - end)  # type: ignore[arg-type]
    assert file.content[:end] == content
    assert not any(file.content[end:])
    assert file.read_bytes < MIB


def test_repeated_starts_do_not_read_more() -> None:
    content, end = log_of(50)
    file = ReservedFile(content)
    read_bytes = []
    for _ in range(5):
        before = file.read_bytes
        file.pread(MIB, end)  # as the search for the log's end does
        OsFile.zero(file, end, SIZE - end)  # type: ignore[arg-type]
        read_bytes.append(file.read_bytes - before)
    assert len(set(read_bytes)) == 1


async def test_a_scan_ends_where_the_file_ends() -> None:
    content, end = log_of(50)
    file: File = ShortFile(content)  # type: ignore[assignment]
    scan = LogScan([Segment(0, SIZE, file)], StoreOptions(root=Path("/store"), segment_size=SIZE), is_clean=True)
    found = await scan.find_end(0, run_inline)
    assert (found.position, found.reason) == (end, "the file ends here")


async def test_the_zero_filled_part_of_a_file_that_another_program_truncates_is_listed() -> None:
    content, end = log_of(50)
    file: File = ShortFile(content)  # type: ignore[assignment]
    async with open_small(segment_size=SIZE) as store:
        recovery = LogRecovery(
            store._parts,
            [Segment(0, SIZE, file)],
            [ZeroFilled(end, SIZE, "the file was too short")],
            Checkpoint(0, 0, 0),
            is_clean=True,
            are_queues_whole=True,
            queues_prove=False,
            known_end=0,
        )
        recovery.list_found(SIZE, [])
        [damage] = store.damage.open
        assert (damage.begin, damage.end) == (end, SIZE)


def test_bytes_that_the_file_has_lost_are_not_written_again() -> None:
    content, end = log_of(50)
    file: File = ShortFile(content)  # type: ignore[assignment]
    write_again([Segment(0, SIZE, file)], 0, end + 1)
    assert file.content == content  # type: ignore[attr-defined]


def large_options(root: Path, message_size_max: int, **changes: Any) -> StoreOptions:
    return small_options(root=root, segment_size=64 * MIB, message_size_max=message_size_max, **changes)


def large_message(size: int) -> Message:
    return Message("T", 0, b"x" * size, b"")


@pytest.mark.parametrize("is_slave", [False, True], ids=["master", "slave"])
@pytest.mark.parametrize("following", [0, 3])
async def test_records_above_the_present_maximum_are_sound(tmp_path: Path, is_slave: bool, following: int) -> None:
    """A store was damaged, or could not be opened, once maxMessageSize was lowered."""
    async with open_message_store(large_options(tmp_path, 16 * MIB)) as store:
        for each in (message(1), large_message(10 * MIB), *map(message, range(following))):
            await store.log.put([each])
        await dispatched(store)
        end = store.log.max_offset.value
    async with open_message_store(large_options(tmp_path, 4 * MIB, is_slave=is_slave)) as store:
        assert store.log.max_offset.value == end
        assert not store.damage.open


@pytest.mark.parametrize("message_size_max", [4 * MIB, 16 * MIB])
async def test_killed_master_keeps_records_above_the_present_maximum(tmp_path: Path, message_size_max: int) -> None:
    killed = tmp_path / "killed"
    async with open_message_store(large_options(tmp_path / "s", 16 * MIB)) as store:
        await store.log.put([message(1)])
        await store.flusher.flush()
        await store.checkpointer.save(with_derived=True)
        for _ in range(3):
            await store.log.put([large_message(9 * MIB)])
        await dispatched(store)
        end = store.log.max_offset.value
        shutil.copytree(tmp_path / "s", killed)
    async with open_message_store(large_options(killed, message_size_max)) as store:
        assert store.log.max_offset.value == end


async def test_reads_of_records_above_the_present_maximum(tmp_path: Path) -> None:
    """Of a store without checksums, such as RocketMQ's: damage was found, healed, and found again."""
    options = large_options(tmp_path, 16 * MIB, recovery_scan_bytes=5000)
    async with open_message_store(options) as store:
        await store.log.put([message(1)])
        [large] = await store.log.put([large_message(10 * MIB)])
        for number in range(100):
            await store.log.put([message(number, size=900)])
        await dispatched(store)
    shutil.rmtree(tmp_path / "checksums")
    async with open_message_store(large_options(tmp_path, 4 * MIB, recovery_scan_bytes=5000)) as store:
        assert await store.log.read(large.physical_offset, 1000)
