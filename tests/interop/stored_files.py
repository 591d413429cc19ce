"""Reads store folders by their layout alone, without halog's own code, so that a mistake there cannot hide.

Commitlog record (IPv4 hosts, big-endian): int32 size | int32 magic | int32 body crc | int32 queue id | int32 flag |
int64 queue offset | int64 physical offset | int32 system flag | int64 born | 8 B born host | int64 stored |
8 B store host | int32 reconsumed | int64 prepared | int32 + body | int8 + topic | int16 + properties.
Segments are files of equal size, named by their first offset; a filler (int32 rest | magic) ends each but the last.
"""

import mmap
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

_MAGIC_V1, _FILLER = -626843481, -875286124
_HEAD = struct.Struct(">iiiiiqq")
_FIXED_SIZE = 84
_ENTRY = struct.Struct(">qiq")
_INDEX_HEADER = struct.Struct(">qqqqii")
_INDEX_ENTRY_SIZE = 20


class Stored(NamedTuple):
    """One record of a commitlog. `sequence` is the number that InteropClient begins its bodies with."""

    physical_offset: int
    size: int
    queue_id: int
    queue_offset: int
    body_size: int
    body_crc: int
    sequence: int | None
    topic: str
    properties: dict[str, str]


class LogRange(NamedTuple):
    """Where a commitlog begins, and the end of its last whole record or filler."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def segments(commitlog: Path) -> list[Path]:
    return sorted(path for path in commitlog.iterdir() if path.name.isdigit()) if commitlog.exists() else []


class LogCursor:
    """Follows a commitlog that a broker is writing, without reading anything twice."""

    def __init__(self, commitlog: Path) -> None:
        self._commitlog = commitlog
        self._start: int | None = None
        self._end = 0

    def advance(self) -> LogRange:
        """Returns the current extent; (0, 0) without segments. Counts only complete records with a matching CRC."""
        for path in segments(self._commitlog):
            first = int(path.name)
            if self._start is None:
                self._start = self._end = first
            if first <= self._end < first + path.stat().st_size:
                for position, size, _ in _walk(path, self._end - first):
                    self._end = first + position + size
        return LogRange(self._start or 0, self._end)


def log_range(commitlog: Path) -> LogRange:
    return LogCursor(commitlog).advance()


def records(commitlog: Path) -> Iterator[Stored]:
    """Yields every record in order. Checks that each contains its own physical offset."""
    for path in segments(commitlog):
        for position, size, record in _walk(path):
            if record is None:
                continue
            _, _, crc, queue_id, _, queue_offset, physical_offset = _HEAD.unpack_from(record)
            assert physical_offset == int(path.name) + position
            body_size = int.from_bytes(record[_FIXED_SIZE : _FIXED_SIZE + 4])
            at = _FIXED_SIZE + 4 + body_size
            start = bytes(record[_FIXED_SIZE + 4 : min(_FIXED_SIZE + 14, at)])
            sequence = int(start) if start.isdigit() and len(start) == 10 else None
            topic = bytes(record[at + 1 : at + 1 + record[at]]).decode()
            properties = bytes(record[at + 1 + record[at] + 2 : size]).decode()
            pairs = dict(piece.split("\x01", 1) for piece in properties.split("\x02") if "\x01" in piece)
            yield Stored(physical_offset, size, queue_id, queue_offset, body_size, crc, sequence, topic, pairs)


def _walk(path: Path, position: int = 0) -> Iterator[tuple[int, int, memoryview | None]]:
    """Yields (position, size, bytes) of each complete valid record of one file, and (position, rest, None) for its
    filler."""
    file_size = path.stat().st_size
    if not file_size:
        return
    with (
        path.open("rb") as file,
        closing(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) as mapped,
        memoryview(mapped) as view,
    ):
        while position + 8 <= file_size:
            size, magic = struct.unpack_from(">ii", view, position)
            if magic == _FILLER:
                yield position, file_size - position, None
                return
            if magic != _MAGIC_V1 or size < _FIXED_SIZE or position + size > file_size:
                return
            with view[position : position + size] as record:
                following = position + size
                if not _is_whole(record, is_last=not any(view[following : following + 8])):
                    return
                yield position, size, record
            position += size


def _is_whole(record: memoryview, *, is_last: bool) -> bool:
    """The body's CRC is right, and the parts after it fill the record; in the last one, they are all there.

    A slave may still be waiting for their end. Where a kill tore it, a real master that starts again takes the record
    for whole, as no CRC covers properties, and goes on behind it.
    """
    body_size = int.from_bytes(record[_FIXED_SIZE : _FIXED_SIZE + 4])
    at = _FIXED_SIZE + 4 + body_size
    if at + 3 > len(record):
        return False
    with record[_FIXED_SIZE + 4 : at] as body:
        if zlib.crc32(body) & 0x7FFFFFFF != int.from_bytes(record[8:12]):
            return False
    at += 1 + record[at]
    properties_size = int.from_bytes(record[at : at + 2])
    is_unfinished = is_last and properties_size > 0 and record[-1] == 0
    return at + 2 + properties_size == len(record) and not is_unfinished


def compare_commitlogs(one: Path, other: Path) -> LogRange:
    """Assert that two commitlogs have the same bytes wherever both have any; that range.

    The range ends where the shorter one's last whole record does. Segments must have the same names and sizes.
    """
    ranges = log_range(one), log_range(other)
    common = LogRange(max(found.start for found in ranges), min(found.end for found in ranges))
    for path in segments(one):
        first = int(path.name)
        if first + path.stat().st_size <= common.start or first >= common.end:
            continue
        twin = other / path.name
        assert twin.exists(), f"{other} has no {path.name}; ranges {ranges}"
        assert twin.stat().st_size == path.stat().st_size
        size = min(common.end - first, path.stat().st_size)
        for position in range(0, size, 1 << 20):
            length = min(1 << 20, size - position)
            left, right = _read(path, position, length), _read(twin, position, length)
            if left != right:
                wrong = next(i for i in range(length) if left[i] != right[i])
                raise AssertionError(
                    f"{one} and {other} differ from offset {first + position + wrong} on: "
                    f"{left[wrong : wrong + 32].hex()} / {right[wrong : wrong + 32].hex()}; ranges {ranges}"
                )
    return common


def bytes_at(commitlog: Path, offset: int, length: int = 4096) -> bytes:
    """What stands at a physical offset, up to its segment's end: for who wonders why no record does."""
    path = next(path for path in segments(commitlog) if int(path.name) <= offset < int(path.name) + path.stat().st_size)
    return _read(path, offset - int(path.name), length)


def _read(path: Path, position: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(position)
        return file.read(length)


def queue_entries(store: Path) -> dict[tuple[str, int], list[tuple[int, int, int]]]:
    """(physical offset, size, tags code) of every consume-queue entry a store holds, by topic and queue id."""
    found: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for folder in sorted((store / "consumequeue").glob("*/*")):
        entries = found.setdefault((folder.parent.name, int(folder.name)), [])
        for path in sorted(folder.iterdir()):
            raw = path.read_bytes()
            entries += [entry for entry in _ENTRY.iter_unpack(raw[: len(raw) // 20 * 20]) if entry[1] > 0]
    return {key: entries for key, entries in found.items() if entries}


class IndexFile(NamedTuple):
    """One index file without its name, which is a local time. Slots and used entries are raw bytes."""

    begin_timestamp_ms: int
    end_timestamp_ms: int
    begin_physical_offset: int
    end_physical_offset: int
    used_slot_count: int
    entry_count: int
    slots: bytes
    entries: bytes


def index_files(store: Path, slot_count: int) -> list[IndexFile]:
    """A store's index files in order; files in which nothing is indexed yet are left out."""
    files = []
    for path in sorted((store / "index").iterdir()) if (store / "index").exists() else []:
        raw = path.read_bytes()
        begin_ms, end_ms, begin_offset, end_offset, used_slot_count, entry_count = _INDEX_HEADER.unpack_from(raw)
        entries_at = _INDEX_HEADER.size + 4 * slot_count
        slots = raw[_INDEX_HEADER.size : entries_at]
        # Entry 0 is never used; the header's count is that of the next one.
        entries = raw[entries_at + _INDEX_ENTRY_SIZE : entries_at + _INDEX_ENTRY_SIZE * entry_count]
        if entries:
            files.append(
                IndexFile(begin_ms, end_ms, begin_offset, end_offset, used_slot_count, entry_count, slots, entries)
            )
    return files


class RecordHead(NamedTuple):
    """What an acknowledgement can be checked against."""

    sequence: int
    queue_id: int
    queue_offset: int
    body_size: int
    body_crc: int


def heads_at(commitlog: Path, physical_offsets: Iterable[int]) -> Iterator[RecordHead]:
    """The heads of the records at these offsets, in this order; the body's CRC is checked against its bytes."""
    with ExitStack() as stack:
        maps: dict[int, mmap.mmap] = {}
        for path in segments(commitlog):
            file = stack.enter_context(path.open("rb"))
            maps[int(path.name)] = stack.enter_context(closing(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
        first = min(maps)
        segment_size = len(maps[first])
        for physical_offset in physical_offsets:
            start = physical_offset - (physical_offset - first) % segment_size
            mapped, at = maps[start], physical_offset - start
            _, magic, crc, queue_id, _, queue_offset, own_offset = _HEAD.unpack_from(mapped, at)
            assert (magic, own_offset) == (_MAGIC_V1, physical_offset)
            body_at = at + _FIXED_SIZE + 4
            body_size = int.from_bytes(mapped[body_at - 4 : body_at])
            body = mapped[body_at : body_at + body_size]
            assert zlib.crc32(body) & 0x7FFFFFFF == crc
            yield RecordHead(int(body[:10]), queue_id, queue_offset, body_size, crc)
