"""The files of the commitlog as a start finds them: opened, and made whole with zeros where they are too short or gone;
and what is done to them where the log is cut.

What was put there is damage, which recovery lists. Nothing is judged by its content here: only names, sizes and what
the checksums say of them.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from ha.errors import CorruptLog
from ha.protocol.store_files import segment_name
from ha.store.checksums import Checksums
from ha.store.files import Disk, File
from ha.store.mapped_file import Segment, segment_starts

logger = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20
_REMADE_COUNT_MAX = 16
"""More segments missing than this is no damage of a disk: somebody moved files."""
_NOTED_BYTES_MAX = 8 << 20
"""So much of what is cut is looked at, to say how many bytes it was"""
_WHOLE_SUFFIX = ".whole"
"""Of the copy that replaces a file that is too short, until it is complete"""


class ZeroFilled(msgspec.Struct, frozen=True):
    """Bytes [`begin`, `end`) of the log are zeros, put where a file was too short or missing."""

    begin: int
    end: int
    reason: str
    was_missing: bool = False
    """There was no file at all, which no crash leaves before others."""


def load_segments(
    disk: Disk, directory: Path, segment_size: int, checksums: Checksums, known_begin: int, known_end: int
) -> tuple[list[Segment], list[ZeroFilled]]:
    """Open the files of the commitlog; those too short, or missing before others or before `known_end`, are remade.

    `known_begin`: retention deleted nothing from there on; -1 if that is unknown, and the first file then is the first
    that there was. `known_end`: the log was flushed up to there, at least. CorruptLog if the files are of another size
    altogether, or too many are missing. An empty last file, which a crash of RocketMQ can leave, is removed, unless it
    is known that it wasn't empty. Without any file there is nothing: the log was deleted.
    """
    names = disk.list_dir(directory)
    for name in names:
        if name.endswith(_WHOLE_SUFFIX):
            disk.unlink(directory / name)
    sizes = {start: disk.size(directory / segment_name(start)) for start in segment_starts(names)}
    if sizes and sizes[max(sizes)] == 0 and known_end <= max(sizes):
        disk.unlink(directory / segment_name(max(sizes)))
        del sizes[max(sizes)]
    if not sizes:
        return [], []
    for start, size in sizes.items():
        path = directory / segment_name(start)
        if start % segment_size:
            raise CorruptLog(path, 0, f"its name is no multiple of mappedFileSizeCommitLog {segment_size}")
        is_ours = segment_size in sizes.values() or checksums.is_of(start)
        if size > segment_size or (size < segment_size and not is_ours):
            raise CorruptLog(path, size, f"the file has {size} bytes, mappedFileSizeCommitLog is {segment_size}")
    stop = max(max(sizes) + 1, known_end)
    first = min(known_begin, *sizes) if known_begin >= 0 and known_begin % segment_size == 0 else min(sizes)
    expected = range(first, stop, segment_size)
    missing = [start for start in expected if start not in sizes]
    if len(missing) > _REMADE_COUNT_MAX:
        path = directory / segment_name(missing[0])
        hint = "put them back; where the first ones are meant to be gone, delete the file checkpoint"
        raise CorruptLog(path, 0, f"{len(missing)} segments are missing, from {path.name} on: {hint}")
    segments: list[Segment] = []
    zero_filled: list[ZeroFilled] = []
    for start in expected:
        path = directory / segment_name(start)
        size = sizes.get(start, -1)
        if size == segment_size:
            file = disk.open(path)
        elif size < 0:
            file = disk.create(path, segment_size, allocate=True)
            zero_filled.append(ZeroFilled(start, start + segment_size, "the file was missing", was_missing=True))
        else:
            file = _made_whole(disk, path, size, segment_size)
            zero_filled.append(ZeroFilled(start + size, start + segment_size, f"the file ended after {size} bytes"))
        segments.append(Segment(start, segment_size, file))
    for each in zero_filled:
        logger.error("commitlog.segment_zero_filled begin=%d end=%d reason=%r", each.begin, each.end, each.reason)
    return segments, zero_filled


def truncate_segments(disk: Disk, segments: list[Segment], end: int, reason: str) -> int:
    """Zero what lies behind `end` in the last of some neighbouring segments, synced, and delete those behind it, which
    leave the list; return how many bytes were not zero.

    The last one first: a crash in between must not leave a gap between segments. The first one stays, all zeros, if
    `end` is where it begins.
    """
    cut_bytes = 0
    while segments and (segments[-1].start > end or (segments[-1].start == end and len(segments) > 1)):
        _note(segments[-1], 0, reason)
        disk.unlink(segments[-1].file.path)
        segments.pop()
    if segments and segments[-1].end > end:
        segment = segments[-1]
        position = end - segment.start
        cut_bytes = _note(segment, position, reason)
        segment.file.zero(position, segment.size - position)
        segment.file.sync()
    return cut_bytes


def truncate_files(disk: Disk, directory: Path, end: int) -> None:
    """Do to the files of a log what `truncate_segments` does, whatever their sizes are; a start checks those later."""
    segments = []
    for start in segment_starts(disk.list_dir(directory)):
        path = directory / segment_name(start)
        segments.append(Segment(start, disk.size(path), disk.open(path)))
    truncate_segments(disk, segments, end, "truncation interrupted by a crash")


def _note(segment: Segment, position: int, reason: str) -> int:
    raw = segment.file.pread(min(_NOTED_BYTES_MAX, segment.size - position), position)
    used = len(raw.rstrip(b"\x00"))
    if used:
        logger.warning(
            "commitlog.truncated file=%s at=%d bytes=%d reason=%r", segment.file.path, position, used, reason
        )
    return used


def _made_whole(disk: Disk, path: Path, size: int, segment_size: int) -> File:
    """Replace a file that is too short by one with zeros at its end, its space reserved."""
    old = disk.open(path)
    fresh_path = path.with_name(path.name + _WHOLE_SUFFIX)
    fresh = disk.create(fresh_path, segment_size, allocate=True)
    for at in range(0, size, _COPY_BYTES):
        fresh.pwrite(old.pread(min(_COPY_BYTES, size - at), at), at)
    fresh.sync()
    disk.rename(fresh_path, path)
    return disk.open(path)
