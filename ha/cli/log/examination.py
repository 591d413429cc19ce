"""One store, or two beside one another, examined range by range, from front to back, until the end or a Ctrl-C.

The checks are those of `ha spark audit` (ha/audit), run here one after the other and without Spark. As the
ranges come in order, each begins with the record where the one before it ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from ha.arrow import LogReader
from ha.audit.findings import Findings
from ha.audit.fold import CopyFold
from ha.audit.range import CopyFacts, CopyPlace, RangeFacts, RangeTask, examine_range
from ha.cli.exits import UsageError

RANGE_BYTES = 16 << 20
"""Examined at once: what a Ctrl-C waits for, about a tenth of a second."""
Watch = Callable[[RangeFacts], None]


class Span(msgspec.Struct, frozen=True):
    """Physical offsets [begin, end)."""

    begin: int
    end: int


class Examination:
    """What is found in `span` of stores that were opened for it. Ends are as of that moment."""

    def __init__(self, readers: Sequence[LogReader], names: Sequence[str], span: Span, examples_max: int) -> None:
        self.readers = readers
        self.span = span
        self.reached = span.begin
        """Everything before it, from the span's begin on, was examined."""
        self.findings = Findings(examples_max)
        self.places = [
            CopyPlace(name, str(reader.path.absolute()), reader.broker_name, span.begin, reader.end_offset())
            for name, reader in zip(names, readers, strict=True)
        ]
        self.folds = [CopyFold(place, self.findings) for place in self.places]
        self._begins_between = all(reader.min_offset != span.begin for reader in readers)

    @property
    def is_complete(self) -> bool:
        """Whether all of the span was examined."""
        return self.reached >= self.span.end

    def run(self, stop: threading.Event, progress: Callable[[int, int], None], watch: Watch | None = None) -> None:
        """Examine until the end, or until `stop` is set: then what was examined so far counts, as if it were all."""
        begin, end = self.span.begin, self.span.end
        is_sought = self._begins_between
        while self.reached < end and not stop.is_set():
            low = self.reached
            high = min(end, low - low % RANGE_BYTES + RANGE_BYTES)
            if is_sought:
                # The record that reaches into the span began before it: its end is no damage.
                for fold in self.folds:
                    fold.add(low, low, _nothing(fold.place.name))
            starts = tuple(fold.last_end for fold in self.folds)
            audit_id = f"{os.getpid()} {id(self)}"
            facts = examine_range(
                RangeTask(low, high, tuple(self.places), starts, self.findings.examples_max, audit_id)
            )
            self.findings.merge(facts.findings)
            for fold, copy_facts in zip(self.folds, facts.copies, strict=True):
                fold.add(low, high, copy_facts)
            is_sought = is_sought and all(copy_facts.first_start is None for copy_facts in facts.copies)
            self.reached = high
            if watch is not None:
                watch(facts)
            progress(high - begin, end - begin)
        for fold, reader in zip(self.folds, self.readers, strict=True):
            fold.place = msgspec.structs.replace(fold.place, end=self.reached)
            fold.finish(reader)


def _nothing(copy: str) -> CopyFacts:
    return CopyFacts(copy, b"", None, None, 0, 0, [], {}, {}, 0, -1, 0, is_gone=True)


@contextmanager
def opened(*paths: Path) -> Iterator[list[LogReader]]:
    """Readers of these stores. StoreUnreadable."""
    with ExitStack() as stack:
        yield [stack.enter_context(LogReader(path, broker_name="")) for path in paths]


def span_of(begin: int, end: int, from_: int | None, to: int | None) -> Span:
    """What of [begin, end) is asked for. UsageError if that is nothing though the log holds something."""
    low = begin if from_ is None else max(begin, from_)
    high = end if to is None else min(end, to)
    if low >= high and begin < end:
        raise UsageError(f"nothing lies between --from and --to: the log holds physical offsets {begin} to {end}")
    return Span(low, max(low, high))
