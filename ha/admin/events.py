"""Keeps the last log lines for /status, and counts lines by level."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ha.text_log import escape

EVENT_COUNT_MAX = 50
TEXT_LENGTH_MAX = 500


class Event(msgspec.Struct, frozen=True):
    """One log record. `time_s`: wall clock, in seconds since 1970."""

    time_s: float
    level: str
    logger: str
    text: str


class RecentEvents(logging.Handler):
    """Keeps the last records at INFO and above, during a `kept` block."""

    def __init__(self, count_max: int = EVENT_COUNT_MAX) -> None:
        super().__init__(logging.INFO)
        self._events: deque[Event] = deque(maxlen=count_max)
        self.counts: Counter[str] = Counter()
        """Number of records by level, without DEBUG"""

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps and counts a record; called by logging."""
        try:
            text = escape(record.getMessage())
        except (TypeError, ValueError):
            self.handleError(record)
            return
        self.counts[record.levelname] += 1
        self._events.append(Event(record.created, record.levelname, record.name, text[:TEXT_LENGTH_MAX]))

    def newest_first(self) -> list[Event]:
        """Returns the events, newest first."""
        return list(reversed(self._events))

    @contextmanager
    def kept(self, logger_name: str = "ha") -> Iterator[RecentEvents]:
        """Collects the records of a logger and its descendants during the block."""
        logger = logging.getLogger(logger_name)
        logger.addHandler(self)
        try:
            yield self
        finally:
            logger.removeHandler(self)
