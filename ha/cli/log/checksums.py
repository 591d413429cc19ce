"""Checks the blocks of a log against halog's checksum files (ha/protocol/checksum_file.py).

A record's own CRC covers only its body; checksum files cover every flushed byte. RocketMQ's stores have none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from ha.arrow import LogReader
from ha.arrow.segments import Segment
from ha.audit.walk import RawLog
from ha.protocol.checksum_file import GROUP_ENTRIES, GROUP_SIZE, ChecksumHead, unpack_group, unpack_head
from ha.protocol.store_files import segment_start

FOLDER = "checksums"


class BadBlock(NamedTuple):
    """Physical offsets [begin, end) of a block whose bytes have changed since they were written."""

    begin: int
    end: int


def bad_blocks(reader: LogReader, begin: int, end: int) -> Iterator[BadBlock]:
    """Yields the blocks that begin in [begin, end) (physical offsets) and do not match their checksum.

    Blocks without a checksum, or with an unusable one, are skipped.
    """
    for segment in reader.segments():
        if segment.start < end and segment.end > begin:
            yield from _bad_blocks_of(reader, segment, begin, end)


def _bad_blocks_of(reader: LogReader, segment: Segment, begin: int, end: int) -> Iterator[BadBlock]:
    head, raw = _read(reader.path / FOLDER / segment.path.name)
    if head is None or (head.segment_start, head.segment_size) != (segment.start, segment.size):
        return  # the checksum file is damaged, or belongs to another log
    first = max(0, -(-(begin - segment.start) // head.block_size))
    stop = min(head.block_count, -(-(end - segment.start) // head.block_size))
    for number in range(first, stop):
        known = _entry(head, raw, number)
        if known is None or not known[1]:
            continue
        at = segment.start + number * head.block_size
        crc = length = 0
        for view in reader.bytes_at(at, at + known[1]):
            crc = crc32(view, crc)
            length += len(view)
        if length == known[1] and crc != known[0]:  # no bytes: the segment was deleted
            yield BadBlock(at, at + known[1])


class LostBytes(NamedTuple):
    """Physical offsets [begin, end) of flushed bytes that a segment file, missing or too short, lacks."""

    begin: int
    end: int


def lost_end(reader: LogReader) -> Iterator[LostBytes]:
    """Yields the flushed bytes that the last segment and later ones lack."""
    begin = max((segment.start for segment in reader.segments()), default=0)
    oldest = RawLog(reader.path).min_offset
    if oldest < sys.maxsize:
        begin = max(begin, oldest)  # retention has deleted older segments meanwhile
    for path in _files(reader):
        start = segment_start(path.name)
        if start is None or start < begin:
            continue
        head, raw = _read(path)
        if head is None or head.segment_start != start:
            continue
        lengths = ((number, _entry(head, raw, number)) for number in range(head.block_count - 1, -1, -1))
        covered = next((number * head.block_size + known[1] for number, known in lengths if known and known[1]), 0)
        try:
            size = (reader.path / "commitlog" / path.name).stat().st_size
        except OSError:
            size = 0
        if size < covered:
            yield LostBytes(start + size, start + covered)


def segment_size(reader: LogReader) -> int:
    """Returns the size of a complete segment in bytes, as the segments and the checksum files show it."""
    heads = (_read(path, GROUP_SIZE)[0] for path in _files(reader))
    sizes = [head.segment_size for head in heads if head is not None]
    return max([*sizes, *(segment.size for segment in reader.segments())], default=0)


def _files(reader: LogReader) -> list[Path]:
    return sorted((reader.path / FOLDER).glob("*"))


def _read(path: Path, size: int = -1) -> tuple[ChecksumHead | None, bytes]:
    """Returns the head and the first `size` bytes of a checksum file; -1 for all of them.

    There is no head if the file can't be read or is damaged.
    """
    try:
        with path.open("rb") as opened:
            raw = opened.read(size)
    except OSError:
        return None, b""
    return unpack_head(raw), raw


def _entry(head: ChecksumHead, raw: bytes, number: int) -> tuple[int, int] | None:
    """Returns CRC and length of a block (length 0: it has no checksum); None if its group is damaged."""
    group, at = divmod(number, GROUP_ENTRIES)
    position = GROUP_SIZE * (1 + group)
    entries = unpack_group(group, raw[position : position + GROUP_SIZE])
    return None if entries is None else (entries[0][at], entries[1][at])


def has_checksums(path: Path) -> bool:
    """Returns whether the store at `path` has checksum files."""
    return (path / FOLDER).is_dir()
