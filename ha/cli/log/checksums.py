"""Checks the blocks of a log against halog's checksum files (ha/protocol/checksum_file.py).

A record's own CRC covers only its body; checksum files cover every flushed byte. RocketMQ's stores have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from ha.arrow import LogReader
from ha.arrow.segments import Segment
from ha.protocol.checksum_file import GROUP_ENTRIES, GROUP_SIZE, ChecksumHead, unpack_group, unpack_head

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
    try:
        raw = (reader.path / FOLDER / segment.path.name).read_bytes()
    except OSError:
        return
    head = unpack_head(raw)
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


def _entry(head: ChecksumHead, raw: bytes, number: int) -> tuple[int, int] | None:
    """Returns CRC and length of a block (length 0: it has no checksum); None if its group is damaged."""
    group, at = divmod(number, GROUP_ENTRIES)
    position = GROUP_SIZE * (1 + group)
    entries = unpack_group(group, raw[position : position + GROUP_SIZE])
    return None if entries is None else (entries[0][at], entries[1][at])


def has_checksums(path: Path) -> bool:
    """Returns whether the store at `path` has checksum files."""
    return (path / FOLDER).is_dir()
