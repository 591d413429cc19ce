"""Locates findings: the file and the bytes in it."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from pathlib import Path

import msgspec

from ha.arrow import LogReader
from ha.audit.findings import Finding
from ha.cli.log.checksums import segment_size
from ha.protocol.store_files import ENTRY_SIZE, segment_name, segment_start

QUEUE_KINDS = frozenset({"entry_missing", "entry_wrong", "entry_extra"})
_SPANS = frozenset({"unreadable", "checksum", "tail"})
_SIZE_BYTES = 4


class Place(msgspec.Struct, frozen=True):
    """Bytes [begin, end) of `file`, a path below the store directory.

    If no file holds them, `file` is "", and begin and end are positions in the whole log or queue.
    """

    file: str
    begin: int
    end: int


class Places:
    """Locates the findings in one store."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._root = reader.path

    def of(self, finding: Finding) -> Place:
        """Returns the place of `finding`: that of the queue entry it is about, or else that of its bytes in the log."""
        if finding.kind in QUEUE_KINDS and finding.queue_offset >= 0:
            return self._entry(finding.topic, finding.queue_id, finding.queue_offset)
        if finding.kind in ("missing_file", "overlap"):
            return self._behind_segment(finding)
        is_span = finding.kind in _SPANS
        length = finding.length if is_span else self._record_size(finding.physical_offset)
        return self.of_log(finding.physical_offset, length)

    def of_log(self, physical_offset: int, length: int) -> Place:
        """Returns the place of bytes of the log, cut at the end of the file that holds the first of them."""
        segments = self._reader.segments()
        at = bisect_right([segment.start for segment in segments], physical_offset) - 1
        if at < 0 or physical_offset >= segments[at].end:
            return Place("", physical_offset, physical_offset + length)
        segment = segments[at]
        begin = physical_offset - segment.start
        file = segment.path.relative_to(self._root)
        return Place(str(file), begin, min(begin + max(length, 1), segment.size))

    def _behind_segment(self, finding: Finding) -> Place:
        """Returns the place of surplus or missing bytes at the end of a segment file, or that of a missing file."""
        segments = self._reader.segments()
        at = bisect_left([segment.start for segment in segments], finding.physical_offset) - 1
        if finding.kind == "missing_file" and (at < 0 or segments[at].size == segment_size(self._reader)):
            return Place(f"commitlog/{segment_name(finding.physical_offset)}", 0, finding.length)
        before = segments[at]
        begin = finding.physical_offset - before.start
        return Place(str(before.path.relative_to(self._root)), begin, begin + finding.length)

    def _record_size(self, physical_offset: int) -> int:
        """Returns the size in the record's own size field, at least 4."""
        raw = b"".join(bytes(view) for view in self._reader.bytes_at(physical_offset, physical_offset + _SIZE_BYTES))
        size = int.from_bytes(raw, "big", signed=True) if len(raw) == _SIZE_BYTES else 0
        return max(size, _SIZE_BYTES)

    def _entry(self, topic: str, queue_id: int, queue_offset: int) -> Place:
        folder = Path("consumequeue", topic, str(queue_id))
        position = queue_offset * ENTRY_SIZE
        try:
            names = os.listdir(self._root / folder)
        except OSError:
            names = []
        starts = sorted(start for name in names if (start := segment_start(name)) is not None and start <= position)
        if not starts:
            return Place("", position, position + ENTRY_SIZE)
        begin = position - starts[-1]
        return Place(str(folder / segment_name(starts[-1])), begin, begin + ENTRY_SIZE)
