"""Combines the facts of ranges in the order of the log: runs the checks that span ranges, and totals each copy."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from ha.arrow import LogReader
from ha.arrow.places import LIGHT_QUEUE_PREFIX
from ha.audit.findings import CELLS_MAX, DAMAGE, NO_HOUR, OTHER_TOPICS, Finding, Findings
from ha.audit.queues import QueueFold
from ha.audit.range import CopyFacts, CopyPlace, has_plain_entries
from ha.audit.walk import Damaged, damage_at
from ha.protocol.store_files import BLANK_SIZE

_ENTRIES_AT_ONCE = 1 << 16
_ENTRIES_LOOKED_AT_MAX = 1 << 24
"""Maximum number of entries of one queue that are read although no record has their queue offsets: 320 MiB of files.
Further ones count as holes.
"""
SPANS_KEPT_MAX = 100_000
"""Maximum number of damaged spans kept to explain queue entries that point into them."""


class CopyFold:
    """The state of one copy: call `add` in the order of the log, then `finish` with a reader of the copy."""

    def __init__(self, place: CopyPlace, findings: Findings) -> None:
        self.place = place
        self.record_count = 0
        self.byte_count = 0
        self.cells: dict[tuple[str, int], tuple[int, int]] = {}
        self.begin = place.begin
        """Physical offset from which queues are checked: the copy's start, or the end of the last range that retention
        deleted during the audit."""
        self.last_end: int | None = place.begin
        """Physical offset of the end of the last record, at first the copy's start; None inside damaged bytes, and
        after a range that retention deleted."""
        self._is_behind_gap = False
        self._findings = findings
        self._queues: dict[tuple[str, int], QueueFold] = {}
        self._damaged: list[Damaged] = []
        self._digest = hashlib.sha256()
        self._last_store_ms = 0

    @property
    def digest(self) -> str:
        """SHA-256 over the SHA-256 of each range, in hex: comparable between audits with the same ranges."""
        return self._digest.hexdigest()

    def add(self, begin: int, end: int, facts: CopyFacts) -> None:
        """Folds the facts of the physical range [begin, end)."""
        if facts.is_gone:
            # Retention deletes the oldest files: queues now begin after this range.
            self.begin, self.last_end, self._is_behind_gap = end, None, True
            self._queues.clear()
            return
        self._digest.update(facts.digest)
        self.record_count += facts.record_count
        self.byte_count += facts.byte_count
        if self.last_end is None and not self._is_behind_gap:
            self._add_damage(Damaged(begin, end if facts.first_start is None else facts.first_start, ""))
        for damaged in facts.damaged:
            self._add_damage(damaged)
        self._is_behind_gap = False
        if self.last_end is None or self.last_end < end:
            self.last_end = facts.next_start
        if facts.record_count:
            back_ms = self._last_store_ms - facts.first_store_ms
            if back_ms > 0:
                detail = f"stored {back_ms} ms before the preceding record"
                self._add("time_backwards", facts.first_position, detail=detail)
            self._last_store_ms = facts.last_store_ms
        for cell, (count, size) in facts.cells.items():
            if cell not in self.cells and len(self.cells) >= CELLS_MAX:
                cell = (OTHER_TOPICS, NO_HOUR)
            known = self.cells.get(cell, (0, 0))
            self.cells[cell] = (known[0] + count, known[1] + size)
        for (topic, queue_id), queue_facts in facts.queues.items():
            queue = self._queues.setdefault((topic, queue_id), QueueFold())
            queue.add(queue_facts)
            for kind, spans in (("duplicate", queue.repeated), ("out_of_order", queue.displaced)):
                for span in spans:
                    count = span.end - span.begin
                    self._add(
                        kind,
                        span.physical_offset,
                        count,
                        topic=topic,
                        queue_id=queue_id,
                        queue_offset=span.begin,
                        hour=span.hour,
                        detail=f"and the {count - 1} that follow it in its queue" if count > 1 else "",
                    )

    def _add_damage(self, span: Damaged) -> None:
        last = self._damaged[-1] if self._damaged else None
        if last is not None and last.end >= span.begin:
            self._damaged[-1] = Damaged(last.begin, max(last.end, span.end), last.reason)
        elif span.begin < span.end:
            if len(self._damaged) == SPANS_KEPT_MAX:
                self._report_damage(self._damaged.pop(0), None)
            self._damaged.append(span)

    def _add(self, kind: str, physical_offset: int, count: int = 1, **more: object) -> None:
        fields = {"kind": kind, "copy": self.place.name, "physical_offset": physical_offset, **more}
        self._findings.add(msgspec.convert(fields, Finding), count)

    def _report_damage(self, span: Damaged, lost: tuple[str, int, int] | None) -> None:
        topic, queue_id, queue_offset = lost or ("", -1, -1)
        self._add(
            "unreadable",
            span.begin,
            length=span.end - span.begin,
            topic=topic,
            queue_id=queue_id,
            queue_offset=queue_offset,
            detail=span.reason,
        )

    def finish(self, reader: LogReader) -> None:
        """Checks the queue entries that belong to no record, and adds findings for them, for damage and for holes."""
        lost = self._check_entries_without_records(reader)
        for span in self._damaged:
            self._report_damage(span, lost.get(span.begin))
        self._damaged = []

    def _check_entries_without_records(self, reader: LogReader) -> dict[int, tuple[str, int, int]]:
        """Checks entries without a record, and reports holes.

        Returns, by the start of each damaged span, the (topic, queue id, queue offset) of an entry that points into it.
        """
        named = {
            finding.physical_offset
            for (kind, copy), found in self._findings.examples.items()
            if copy == self.place.name and kind in DAMAGE
            for finding in found
        }
        lost: dict[int, tuple[str, int, int]] = {}
        known = {(queue.topic, queue.queue_id) for queue in reader.queues()}
        for topic, queue_id in sorted(known | set(self._queues)):
            if topic.startswith(LIGHT_QUEUE_PREFIX):
                continue
            fold = self._queues.get((topic, queue_id))
            if not has_plain_entries(reader, topic, queue_id):
                for begin, end, place in fold.holes() if fold is not None else ():
                    self._report_hole(topic, queue_id, begin, end, place, end - begin)
                continue
            bounds = reader.queue_range(topic, queue_id)
            if fold is None:
                gaps = [(bounds.begin, bounds.end, -1)]
            else:
                gaps = [(bounds.begin, fold.begin, -1), *fold.holes(), (fold.end, bounds.end, -1)]
            budget = _ENTRIES_LOOKED_AT_MAX
            for begin, end, place in gaps:
                if begin >= end:
                    continue
                accounted = 0
                for low in range(max(begin, bounds.begin), min(end, bounds.end), _ENTRIES_AT_ONCE):
                    if budget <= 0:
                        break
                    high = min(low + _ENTRIES_AT_ONCE, end, bounds.end)
                    budget -= high - low
                    accounted += self._explain_entries(reader, topic, queue_id, low, high, named, lost)
                # A record already reported for its wrong queue offset does not also leave a hole before it.
                if place >= 0 and place not in named and accounted < end - begin:
                    self._report_hole(topic, queue_id, begin, end, place, end - begin - accounted)
        return lost

    def _explain_entries(
        self,
        reader: LogReader,
        topic: str,
        queue_id: int,
        begin: int,
        end: int,
        named: set[int],
        lost: dict[int, tuple[str, int, int]],
    ) -> int:
        """Examines the entries [begin, end) of a queue, whose queue offsets no record has; returns how many point into
        the audited part of the log.

        An entry that points into damage is added to `lost`. Any other becomes a finding, unless there is one already at
        its physical offset (`named`).
        """
        entries = reader.entries(topic, queue_id, begin, end)
        physical = entries["physical_offset"].astype(np.int64)
        size = entries["size"].astype(np.int64)
        within = (size != BLANK_SIZE) & (size != 0) & (physical >= self.begin) & (physical < self.place.end)
        rows = np.flatnonzero(within)
        for index, span in zip(rows.tolist(), damage_at(self._damaged, physical[rows]).tolist(), strict=True):
            position = int(physical[index])
            if span >= 0:
                lost.setdefault(self._damaged[span].begin, (topic, queue_id, begin + index))
            elif position not in named:
                detail = f"entry of {size[index]} bytes; no record of this queue and queue offset is there"
                self._add(
                    "entry_extra",
                    position,
                    topic=topic,
                    queue_id=queue_id,
                    queue_offset=begin + index,
                    detail=detail,
                )
        return len(rows)

    def _report_hole(self, topic: str, queue_id: int, begin: int, end: int, place: int, count: int) -> None:
        detail = f"{count} of queue offsets [{begin}, {end}); the physical offset is that of the record after them"
        where = {"topic": topic, "queue_id": queue_id, "queue_offset": begin}
        self._add("hole", place, count, length=count, detail=detail, **where)
