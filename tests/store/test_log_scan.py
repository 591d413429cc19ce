"""Scans behind the end of a log whose last segment is reserved and mostly unwritten."""

from pathlib import Path

from ha.protocol.record import Message
from ha.protocol.record_encoding import encode_record
from ha.store.files import File, OsFile
from ha.store.log_scan import LogScan
from ha.store.mapped_file import Segment
from ha.store.options import StoreOptions

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
