"""Opens the files of the commitlog at start, and truncates the commitlog.

Files that are too short are completed with zeros, and missing files are created with zeros. The zeros are damage, which
recovery lists. Content is not checked here: only names, sizes and the checksum files.
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
_ZERO_FILLED_COUNT_MAX = 16
"""Maximum number of missing segments that are filled with zeros. If more are missing, files were probably moved, and
the store does not open."""
_LOGGED_BYTES_MAX = 8 << 20
"""Maximum number of bytes that are read from the removed part of a segment, to log how many of them were data."""
_WHOLE_SUFFIX = ".whole"
"""Suffix of an incomplete copy that is to replace a file that is too short."""


class ZeroFilled(msgspec.Struct, frozen=True):
    """A range [`begin`, `end`) of physical offsets that was filled with zeros, because a file was too short or
    missing."""

    begin: int
    end: int
    reason: str
    was_missing: bool = False
    """Whether the file did not exist. A crash never leaves a missing file before others"""


def load_segments(
    disk: Disk, directory: Path, segment_size: int, checksums: Checksums, known_begin: int, known_end: int
) -> tuple[list[Segment], list[ZeroFilled]]:
    """Opens the files of the commitlog. Completes, with zeros, files that are too short, and creates files that are
    missing: between others, from `known_begin` on, or before `known_end`. Returns the segments and the ranges that were
    filled; two empty lists if there is no file. Blocking. Raises OSError.

    `known_begin`: retention has deleted nothing from this physical offset on; if it is -1 (unknown), the log begins
    with its first file. `known_end`: the log was flushed at least up to this physical offset. An empty last file, which
    a crash of RocketMQ can leave, is removed, unless `known_end` shows that it wasn't empty.

    Raises CorruptLog, before anything is completed, if a file's name is not a multiple of `segment_size`, if a file is
    larger than that, or if more than _ZERO_FILLED_COUNT_MAX files are missing. Also raises it if a file is smaller and
    nothing proves `segment_size`, neither another file of that size nor a sound checksum file of the smaller one.
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
    _check_sizes(directory, sizes, segment_size, checksums)
    stop = max(max(sizes) + 1, known_end)
    first = min(known_begin, *sizes) if known_begin >= 0 and known_begin % segment_size == 0 else min(sizes)
    expected = range(first, stop, segment_size)
    missing = [start for start in expected if start not in sizes]
    if len(missing) > _ZERO_FILLED_COUNT_MAX:
        path = directory / segment_name(missing[0])
        hint = "put them back; if the first ones were deleted on purpose, delete the file checkpoint"
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
            file = _completed(disk, path, size, segment_size)
            zero_filled.append(ZeroFilled(start + size, start + segment_size, f"the file ended after {size} bytes"))
        segments.append(Segment(start, segment_size, file))
    for each in zero_filled:
        logger.error("commitlog.segment_zero_filled begin=%d end=%d reason=%r", each.begin, each.end, each.reason)
    return segments, zero_filled


def _check_sizes(directory: Path, sizes: dict[int, int], segment_size: int, checksums: Checksums) -> None:
    for start, size in sizes.items():
        path = directory / segment_name(start)
        if start % segment_size:
            raise CorruptLog(path, 0, f"its name is not a multiple of mappedFileSizeCommitLog {segment_size}")
        is_ours = segment_size in sizes.values() or checksums.is_of(start)
        if size > segment_size or (size < segment_size and not is_ours):
            raise CorruptLog(path, size, f"the file has {size} bytes, mappedFileSizeCommitLog is {segment_size}")


def truncate_segments(disk: Disk, segments: list[Segment], end: int, reason: str) -> int:
    """Truncates contiguous segments at `end`: removes those after it from the list and the disk, and overwrites the
    rest of the last remaining one with zeros, synced. Returns the number of bytes that were overwritten, without
    trailing zeros; at most _LOGGED_BYTES_MAX. Blocking. Raises OSError.

    Deletes the last file first: a crash in between must not leave a gap. The first segment stays, all zeros, if it
    begins at `end`.
    """
    cut_bytes = 0
    while segments and (segments[-1].start > end or (segments[-1].start == end and len(segments) > 1)):
        _log_removed(segments[-1], 0, reason)
        disk.unlink(segments[-1].file.path)
        segments.pop()
    if segments and segments[-1].end > end:
        segment = segments[-1]
        position = end - segment.start
        cut_bytes = _log_removed(segment, position, reason)
        segment.file.zero(position, segment.size - position)
        segment.file.sync()
    return cut_bytes


def truncate_files(disk: Disk, directory: Path, end: int) -> None:
    """Truncates the files of a log like `truncate_segments`. Their sizes are not checked: recovery does that later."""
    segments = []
    for start in segment_starts(disk.list_dir(directory)):
        path = directory / segment_name(start)
        segments.append(Segment(start, disk.size(path), disk.open(path)))
    truncate_segments(disk, segments, end, "truncation interrupted by a crash")


def _log_removed(segment: Segment, position: int, reason: str) -> int:
    raw = segment.file.pread(min(_LOGGED_BYTES_MAX, segment.size - position), position)
    used = len(raw.rstrip(b"\x00"))
    if used:
        logger.warning(
            "commitlog.truncated file=%s at=%d bytes=%d reason=%r", segment.file.path, position, used, reason
        )
    return used


def _completed(disk: Disk, path: Path, size: int, segment_size: int) -> File:
    """Replaces a file of `size` bytes by a copy that is completed with zeros to `segment_size` bytes, all of them
    allocated on the disk. Returns the new file, open. Raises OSError."""
    old = disk.open(path)
    fresh_path = path.with_name(path.name + _WHOLE_SUFFIX)
    fresh = disk.create(fresh_path, segment_size, allocate=True)
    for at in range(0, size, _COPY_BYTES):
        fresh.pwrite(old.pread(min(_COPY_BYTES, size - at), at), at)
    fresh.sync()
    disk.rename(fresh_path, path)
    return disk.open(path)
