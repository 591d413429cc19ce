"""Examines one store, or compares two, range by range in the order of the log, until the end or a Ctrl-C.

The checks are those of `ha spark audit` (ha/audit), without Spark. As the ranges are examined in order, each starts at
the record where the one before it ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from ha.arrow import LogReader
from ha.audit.findings import Findings
from ha.audit.fold import CopyFold
from ha.audit.range import CopyPlace, RangeFacts, RangeTask, examine_range, gone_facts
from ha.cli.log.stores import Span

RANGE_BYTES = 16 << 20
"""Number of bytes examined at a time; Ctrl-C takes effect after the current range, which takes about 0.1 s."""
Watch = Callable[[RangeFacts], None]
_numbers = count()


class Examination:
    """Examines a span of stores, up to the ends that the stores had when `readers` were opened."""

    def __init__(self, readers: Sequence[LogReader], names: Sequence[str], span: Span, examples_max: int) -> None:
        self.readers = readers
        self.span = span
        self.reached = span.begin
        """Physical offset at which the examined part of the span ends."""
        self.findings = Findings(examples_max)
        self.places = [
            CopyPlace(name, str(reader.path.absolute()), reader.broker_name, span.begin, reader.end_offset())
            for name, reader in zip(names, readers, strict=True)
        ]
        self.folds = [CopyFold(place, self.findings) for place in self.places]
        self._audit_id = f"examination {next(_numbers)}"
        self._starts_inside = all(reader.min_offset != span.begin for reader in readers)

    @property
    def begin(self) -> int:
        """Physical offset at which the examined part starts: the start of the span, or the end of the bytes that
        retention deleted meanwhile."""
        return max(fold.begin for fold in self.folds)

    @property
    def is_complete(self) -> bool:
        """Whether the whole span was examined."""
        return self.reached >= self.span.end

    def resume_options(self, to: int | None) -> str:
        """Returns the options that examine the rest; "" if there is none."""
        return "" if self.is_complete else f"--from {self.reached}" + ("" if to is None else f" --to {to}")

    def run(self, stop: threading.Event, progress: Callable[[int, int], None], watch: Watch | None = None) -> None:
        """Examines the span. If `stop` is set meanwhile, ends after the current range; queue entries that point beyond
        `reached` are then not checked.

        After each range, calls `watch` with the range's facts, and `progress` with the number of bytes examined and the
        total. Raises StoreUnreadable if a store can't be read.
        """
        begin, end = self.span.begin, self.span.end
        start_is_unknown = self._starts_inside
        while self.reached < end and not stop.is_set():
            low = self.reached
            high = min(end, low - low % RANGE_BYTES + RANGE_BYTES)
            if start_is_unknown:
                # The end of a record that began before the span is not damage.
                for fold in self.folds:
                    fold.add(low, low, gone_facts(fold.place.name))
            starts = tuple(fold.last_end for fold in self.folds)
            facts = examine_range(
                RangeTask(low, high, tuple(self.places), starts, self.findings.examples_max, self._audit_id)
            )
            self.findings.merge(facts.findings)
            for fold, copy_facts in zip(self.folds, facts.copies, strict=True):
                fold.add(low, high, copy_facts)
            start_is_unknown = start_is_unknown and all(each.first_start is None for each in facts.copies)
            self.reached = high
            if watch is not None:
                watch(facts)
            progress(high - begin, end - begin)
        for fold, reader in zip(self.folds, self.readers, strict=True):
            fold.place = msgspec.structs.replace(fold.place, end=self.reached)
            fold.finish(reader)
