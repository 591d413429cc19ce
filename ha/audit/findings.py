"""Defines the kinds of findings, and a collection of findings of bounded size.

A finding names a copy (a store or the archive) and a physical offset in it. All findings are counted; at most
`examples_max` of each kind and copy are kept in full.
"""

from __future__ import annotations

import msgspec

DAMAGE = {
    "unreadable": "bytes that are not a valid record",
    "misplaced": "a record whose own physical offset field names another offset",
    "crc": "a body that does not match the CRC stored with it",
    "missing": "a record that another copy has at this offset and this copy lacks",
    "extra": "a record that the first copy, undamaged at this offset, lacks",
    "different": "a record that differs from the other copy's record at this offset",
    "duplicate": "a queue offset (in an archive: a physical offset) that an earlier record already has",
    "out_of_order": "a record whose queue offset does not follow those before it",
    "hole": "queue offsets that no record has",
    "entry_missing": "a record without an entry in its consume queue",
    "entry_wrong": "a consume-queue entry that disagrees with its record",
    "entry_extra": "a consume-queue entry that points to no record of its queue",
}
"""Kinds that count as damage."""
NOTICES = {
    "erased": "a record that the archive lacks because it was erased there",
    "padding": "unused bytes after the last record of a segment that differ, although replicas copy them",
    "topic_deleted": "records of a topic that was deleted since",
    "time_backwards": "a record with an earlier store timestamp than its predecessor: a clock was set back",
}
"""Kinds that are reported and do not change the exit code."""
KINDS = {**DAMAGE, **NOTICES}

HOUR_MS = 3_600_000
NO_HOUR = -1
"""The hour of a finding without a readable store timestamp."""
CELLS_MAX = 100_000
"""Maximum number of (topic, hour, kind) counters; further findings are counted under OTHER_TOPICS and NO_HOUR."""
OTHER_TOPICS = "(other topics)"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. Unknown offsets and queue ids are -1. `hour` counts hours since 1970 (UTC)."""

    kind: str
    copy: str
    physical_offset: int = -1
    length: int = 0
    """Number of bytes for "unreadable" and the kinds that only `ha log verify` reports (checksum, overlap,
    missing_file, tail); number of queue offsets for "hole"; else 0."""
    topic: str = ""
    queue_id: int = -1
    queue_offset: int = -1
    hour: int = NO_HOUR
    detail: str = ""


class Findings(msgspec.Struct):
    """Counts by (kind, copy) and by (topic, hour, kind), and the first findings of each (kind, copy) in full."""

    examples_max: int
    counts: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    cells: dict[tuple[str, int, str], int] = msgspec.field(default_factory=dict)
    examples: dict[tuple[str, str], list[Finding]] = msgspec.field(default_factory=dict)

    def add(self, finding: Finding, count: int = 1) -> None:
        """Counts `finding` `count` times, and keeps it unless `examples_max` of its kind and copy are kept already."""
        key = (finding.kind, finding.copy)
        self.counts[key] = self.counts.get(key, 0) + count
        self._add_cell((finding.topic, finding.hour, finding.kind), count)
        kept = self.examples.setdefault(key, [])
        if len(kept) < self.examples_max:
            kept.append(finding)

    def merge(self, later: Findings) -> None:
        """Adds the findings of a later range."""
        for key, count in later.counts.items():
            self.counts[key] = self.counts.get(key, 0) + count
        for cell, count in later.cells.items():
            self._add_cell(cell, count)
        for key, examples in later.examples.items():
            kept = self.examples.setdefault(key, [])
            kept.extend(examples[: self.examples_max - len(kept)])

    def _add_cell(self, cell: tuple[str, int, str], count: int) -> None:
        if cell not in self.cells and len(self.cells) >= CELLS_MAX:
            cell = (OTHER_TOPICS, NO_HOUR, cell[2])
        self.cells[cell] = self.cells.get(cell, 0) + count

    def by_kind(self) -> dict[str, int]:
        """Returns the count of each kind over all copies, sorted by kind."""
        counts: dict[str, int] = {}
        for (kind, _), count in sorted(self.counts.items()):
            counts[kind] = counts.get(kind, 0) + count
        return counts

    @property
    def damage_count(self) -> int:
        """Number of findings that count as damage."""
        return sum(count for (kind, _), count in self.counts.items() if kind in DAMAGE)
