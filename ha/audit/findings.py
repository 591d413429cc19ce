"""What an audit can find, counted without bound and shown up to a bound.

A finding names a copy (a store or the archive) and a physical offset in it. `counts` and `cells` are complete whatever
their size; of each kind and copy at most `examples_max` findings are kept in full.
"""

from __future__ import annotations

import msgspec

DAMAGE = {
    "unreadable": "bytes that are no record",
    "misplaced": "a record that says it stands at another physical offset",
    "crc": "a body that does not have the CRC stored with it",
    "missing": "a record that another copy has here and this one has not",
    "extra": "a record that the first copy, intact at this place, has not",
    "different": "a record that is not what the other copy has here",
    "duplicate": "a queue offset (in an archive: a physical offset) that an earlier record has too",
    "out_of_order": "a record whose queue offset does not follow those before it",
    "hole": "queue offsets that no record has",
    "entry_missing": "a record for which its consume queue has no entry",
    "entry_wrong": "a consume-queue entry that does not say what the record at its place says",
    "entry_extra": "a consume-queue entry that points at no record of its queue",
}
"""Kinds that make an audit unclean."""
NOTICES = {
    "padding": "bytes behind the last record of a segment that differ; they mean nothing, yet replicas copy them",
    "topic_without_queues": "records of a topic that has no consume queue at all: the topic was deleted",
    "time_backwards": "a record stored before its predecessor by its own store timestamp: a clock was set back",
}
"""Kinds that are told and change no exit code."""
KINDS = {**DAMAGE, **NOTICES}

HOUR_MS = 3_600_000
NO_HOUR = -1
"""The hour of what has no readable store timestamp."""
CELLS_MAX = 100_000
OTHER_TOPICS = "(other topics)"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing found. Offsets are −1 where they are not known; `hour` counts hours since 1970 (UTC)."""

    kind: str
    copy: str
    physical_offset: int = -1
    length: int = 0
    """Bytes for "unreadable", queue offsets for "hole", else 0."""
    topic: str = ""
    queue_id: int = -1
    queue_offset: int = -1
    hour: int = NO_HOUR
    detail: str = ""


class Findings(msgspec.Struct):
    """Counts by (kind, copy) and by (topic, hour, kind), and some findings of each (kind, copy) in full."""

    examples_max: int
    counts: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)
    cells: dict[tuple[str, int, str], int] = msgspec.field(default_factory=dict)
    examples: dict[tuple[str, str], list[Finding]] = msgspec.field(default_factory=dict)

    def add(self, finding: Finding, count: int = 1) -> None:
        """Counts `finding` `count` times and keeps it while there is room."""
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

    def total(self, kind: str) -> int:
        """How often `kind` was found, over all copies."""
        return sum(count for (found, _), count in self.counts.items() if found == kind)

    @property
    def damage_count(self) -> int:
        """How many findings make the audit unclean."""
        return sum(count for (kind, _), count in self.counts.items() if kind in DAMAGE)
