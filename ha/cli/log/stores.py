"""Opens store directories, and determines the part of a log that --from and --to select."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from ha.arrow import LogReader
from ha.cli.exits import UsageError
from ha.errors import StoreUnreadable


class Span(msgspec.Struct, frozen=True):
    """Physical offsets [begin, end)."""

    begin: int
    end: int


@contextmanager
def opened(*paths: Path) -> Iterator[list[LogReader]]:
    """Opens readers of these stores. Raises StoreUnreadable if a file of them can't be read, also during the block."""
    with ExitStack() as stack:
        try:
            yield [stack.enter_context(LogReader(path, broker_name="")) for path in paths]
        except OSError as error:
            if error.filename is None:  # an error of writing the output
                raise
            raise StoreUnreadable(Path(error.filename), error.strerror or str(error)) from None


def span_of(begin: int, end: int, from_: int | None, to: int | None) -> Span:
    """Returns the part of [begin, end) within --from and --to. Raises UsageError if it is empty and the log is not."""
    low = begin if from_ is None else max(begin, from_)
    high = end if to is None else min(end, to)
    if low >= high and begin < end:
        raise UsageError(f"the log has no bytes between --from and --to: it holds physical offsets {begin} to {end}")
    return Span(low, max(low, high))
